from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Callable, Optional, Union, final

import numpy as _numpy
import torch as _torch

_Path = Union[str, PathLike[str]]
_Progress = Callable[[int, int], object]

__version__: str

def inspect(src: _Path) -> dict[str, Any]: ...
def plan(src: _Path, choices: Mapping[str, Any], header_only: bool) -> dict[str, Any]: ...
def convert(
    src: _Path,
    out: _Path,
    choices: Mapping[str, Any],
    ranks: Optional[Sequence[int]],
    threads: int,
    device: str,
    config: Optional[_Path],
    allow_nonfinite: bool,
    io: str,
    ending: Mapping[str, Any],
    progress: Optional[_Progress],
) -> dict[str, Any]: ...
def seal(dir: _Path, ranks: Sequence[int]) -> dict[str, Any]: ...
def verify(
    dir: _Path,
    source: Optional[_Path],
    reference: Optional[_Path],
    rank: Optional[int],
    max_rms: float,
    threads: int,
    progress: Optional[_Progress],
) -> dict[str, Any]: ...
def iter_weights(src: _Path, choices: Mapping[str, Any]) -> WeightIterator: ...
def iter_rank(
    src: _Path, layout: Mapping[str, Any], choices: Mapping[str, Any], device: Optional[int]
) -> WeightIterator: ...

@final
class Tensor:
    """A tensor in memory, which lives as long as any array over it does."""

    @property
    def dtype(self) -> str:
        """The element type, by its safetensors name: ``"BF16"``, ``"F32"``, …"""
    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, the slowest axis first."""
    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
    def tobytes(self) -> bytes:
        """A copy of the bytes, little-endian and row-major."""
    def numpy(self) -> _numpy.ndarray[Any, Any]:
        """A read-only NumPy array over the bytes.

        Types that NumPy lacks are those of ``ml_dtypes``; without that package they come as unsigned integers of their
        size, and ``dtype`` says what they are.
        """
    def torch(self) -> _torch.Tensor:
        """A PyTorch tensor over the bytes. PyTorch knows no read-only tensors: writing to it is not allowed."""
    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> _numpy.ndarray[Any, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class DeviceTensor:
    """A tensor in the memory of a CUDA device, which lives as long as any array over it does."""

    @property
    def dtype(self) -> str:
        """The element type, by its safetensors name: ``"BF16"``, ``"F32"``, …"""
    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, the slowest axis first."""
    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
    @property
    def device(self) -> str:
        """The device, as PyTorch names it: ``"cuda:0"``."""
    @property
    def data_ptr(self) -> int:
        """The address on the device."""
    def tobytes(self) -> bytes:
        """A copy of the bytes in host memory, little-endian and row-major."""
    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Rank:
    """An open rank, as the compiled half knows it; see ``ggshard.RankCheckpoint``."""

    def __new__(
        cls, dir: _Path, rank: int, verify: bool, set_name: str, stage: Optional[int], threads: int
    ) -> Rank: ...
    @property
    def dir(self) -> Path:
        """The folder."""
    @property
    def rank(self) -> int:
        """The tensor-parallel rank."""
    @property
    def stage(self) -> Optional[int]:
        """The pipeline stage that was asked for; ``None`` for all of them."""
    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
    @property
    def expert_parallel(self) -> bool:
        """Whether ranks hold whole experts instead of a slice of every expert."""
    @property
    def profile(self) -> str:
        """Name of the profile."""
    @property
    def launch(self) -> list[str]:
        """The arguments with which the profile's stack is to be started."""
    @property
    def model_class(self) -> Optional[str]:
        """The model class as the serving stack calls it, where the mapping knows one."""
    @property
    def dtype(self) -> str:
        """Element type of weights that no rule pins: ``"bf16"``, ``"f16"``, ``"f32"``."""
    @property
    def plan_digest(self) -> str:
        """Identity of the plan: equal for all ranks of one conversion, and for no other."""
    @property
    def files(self) -> list[Path]:
        """The files that are open."""
    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
    def expect(self, tp: int, pp: int, profile: str) -> None:
        """Raises ``CheckpointError`` unless the folder was made for these numbers of ranks and stages and this profile."""
    def prefetch(self) -> int:
        """Reads every byte of this rank's files into memory, in parallel, and gives their number."""
    def blocks(self, name: str) -> Optional[tuple[str, str, tuple[int, ...]]]: ...
    def decode(self, name: str, dtype: str = "bf16", *, allow_nonfinite: bool = False) -> Tensor:
        """Kept blocks decoded to ``"bf16"``, ``"f16"`` or ``"f32"``: the bytes that a conversion to that type writes.

        In parallel on the CPU, into memory of their own; other Python threads run meanwhile.

        :param allow_nonfinite: let NaN, infinite and overflowing values through
        """
    def iter_decoded(self, dtype: str, allow_nonfinite: bool, device: Optional[int]) -> WeightIterator: ...
    def names(self) -> list[str]:
        """The tensors' names in the plan's order."""
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...

@final
class WeightIterator(Iterator[tuple[str, Tensor]]):
    """Names and tensors, decoded as they are asked for, or ahead. Any thread may take the next; each is given once."""

    @property
    def warnings(self) -> list[str]:
        """What the user should know, in sentences."""
    def __iter__(self) -> WeightIterator: ...
    def __next__(self) -> tuple[str, Tensor]: ...
    def __length_hint__(self) -> int:
        """How many are yet to come."""
    def close(self) -> None:
        """Ends the decoding; there are no more items."""
