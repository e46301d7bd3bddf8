"""GGUF models as pre-sharded, per-rank tensor-parallel safetensors.

Importing this imports neither NumPy nor PyTorch: they are imported by what needs them.
"""
from .errors import (
    AuditError,
    CheckpointError,
    ContainerError,
    ContradictionError,
    DeviceError,
    GgshardError,
    IoError,
    LayoutError,
    MissingTensorError,
    NoMappingError,
    NonfiniteError,
    OutputError,
    RulesError,
    SplitError,
    TruncatedError,
    UnknownTensorError,
    UnsupportedError,
)
from ._ggshard import DeviceTensor, Tensor, WeightIterator, __version__
from .checkpoint import Blocks, RankCheckpoint, open_rank
from .jobs import convert, inspect, plan, seal, verify
from .weights import iter_rank, iter_weights

__all__ = [
    "AuditError",
    "Blocks",
    "CheckpointError",
    "ContainerError",
    "ContradictionError",
    "DeviceError",
    "DeviceTensor",
    "GgshardError",
    "IoError",
    "LayoutError",
    "MissingTensorError",
    "NoMappingError",
    "NonfiniteError",
    "OutputError",
    "RankCheckpoint",
    "RulesError",
    "SplitError",
    "Tensor",
    "TruncatedError",
    "UnknownTensorError",
    "UnsupportedError",
    "WeightIterator",
    "__version__",
    "convert",
    "inspect",
    "iter_rank",
    "iter_weights",
    "open_rank",
    "plan",
    "seal",
    "verify",
]
