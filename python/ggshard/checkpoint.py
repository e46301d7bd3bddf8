"""One rank of a folder that ggshard wrote."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from ._ggshard import Rank, Tensor, WeightIterator
from .jobs import Path
from .weights import ordinal

if TYPE_CHECKING:
    import numpy as _numpy


class Blocks(NamedTuple):
    """What kept blocks decode to."""

    weight: str
    """The name of the weight."""
    type: str
    """The ggml type of all blocks: ``"Q4_K"``, …"""
    shape: tuple[int, ...]
    """The weight's shape on this rank in elements, the slowest axis first."""


class RankCheckpoint(Rank):
    """The tensors of one rank by name, in the plan's order: a :class:`collections.abc.Mapping`.

    Opening it reads the manifest and this rank's headers, checks them against each other, and maps this rank's files;
    tensors are views of the mapped files. A file stays mapped for as long as the checkpoint, a tensor or any array over
    it lives. Files must not be changed or truncated meanwhile.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def blocks(self, name: str) -> Optional[Blocks]:
        """What the kept blocks of that name are (their name ends with ``qweight``); ``None`` of any other tensor."""
        blocks = super().blocks(name)
        return None if blocks is None else Blocks(*blocks)

    def decoded(self, dtype: str = "bf16", *, device: str = "cpu", allow_nonfinite: bool = False) -> WeightIterator:
        """Pairs of name and tensor in the plan's order: every tensor of the rank, kept blocks decoded.

        Each is decoded when it is asked for, and is under the weight's name. What is not kept as blocks is as it is in the files.

        :param dtype: the type of decoded weights: ``"bf16"``, ``"f16"`` or ``"f32"``
        :param device: ``"cuda"`` or ``"cuda:1"``: every tensor comes to be in the memory of that device, as
            :class:`DeviceTensor`; blocks are sent there and decoded where they stay
        :param allow_nonfinite: let NaN, infinite and overflowing values through
        """
        return self.iter_decoded(dtype, allow_nonfinite, ordinal(device))

    def numpy(self, name: str) -> "_numpy.ndarray[Any, Any]":
        """The tensor as a read-only NumPy array, without a copy. See :meth:`Tensor.numpy`."""
        return self[name].numpy()

    # A Mapping: these are its methods, in their own words.
    keys = Mapping.keys
    items = Mapping.items
    values = Mapping.values
    get = Mapping.get

    def __repr__(self) -> str:
        return f"RankCheckpoint({str(self.dir)!r}, rank {self.rank} of {self.tp}, profile {self.profile!r}, {len(self)} tensors)"


Mapping.register(RankCheckpoint)


def open_rank(
    dir: Path,
    rank: int,
    *,
    verify: bool = False,
    set: str = "main",
    stage: Optional[int] = None,
    threads: int = 0,
) -> RankCheckpoint:
    """Opens one rank of a folder that ggshard wrote. Reads no file of another rank.

    :param verify: also check every byte of this rank's files against the manifest
    :param set: ``"main"``, or ``"draft"`` for the draft model in ``mtp/``
    :param stage: the pipeline stage; by default all of them
    :param threads: number of threads that check, prefetch and decode; 0 for one per CPU
    """
    return RankCheckpoint(dir, rank, verify, set, stage, threads)


__all__ = ["Blocks", "RankCheckpoint", "Tensor", "open_rank"]
