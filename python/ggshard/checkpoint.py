"""One rank of a folder that ggshard wrote."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Optional

from ._ggshard import Rank, Tensor
from .jobs import Path

if TYPE_CHECKING:
    import numpy as _numpy


class RankCheckpoint(Rank):
    """The tensors of one rank by name, in the plan's order: a :class:`collections.abc.Mapping`.

    Opening it reads the manifest and this rank's headers, checks them against each other, and maps this rank's files;
    tensors are views of the mapped files. A file stays mapped for as long as the checkpoint, a tensor or any array over
    it lives. Files must not be changed or truncated meanwhile.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

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
    :param threads: number of threads that check and prefetch; 0 for one per CPU
    """
    return RankCheckpoint(dir, rank, verify, set, stage, threads)


__all__ = ["RankCheckpoint", "Tensor", "open_rank"]
