"""GGUF models as pre-sharded, per-rank tensor-parallel safetensors.

Importing this imports neither NumPy nor PyTorch: they are imported by what needs them.
"""
from .errors import (
    AuditError,
    CheckpointError,
    ContainerError,
    ContradictionError,
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
from ._ggshard import Tensor, __version__
from .jobs import convert, inspect, plan, verify

__all__ = [
    "AuditError",
    "CheckpointError",
    "ContainerError",
    "ContradictionError",
    "GgshardError",
    "IoError",
    "LayoutError",
    "MissingTensorError",
    "NoMappingError",
    "NonfiniteError",
    "OutputError",
    "RulesError",
    "SplitError",
    "Tensor",
    "TruncatedError",
    "UnknownTensorError",
    "UnsupportedError",
    "__version__",
    "convert",
    "inspect",
    "plan",
    "verify",
]
