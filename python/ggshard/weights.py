"""Weights decoded from a GGUF on the fly, without a folder in between."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Optional

from . import _ggshard
from ._ggshard import WeightIterator
from .jobs import Path

MEMORY = 1 << 30
"""Bytes that are decoded ahead of the consumer, unless another number is asked for."""


def iter_weights(
    src: Path,
    *,
    dtype: str = "bf16",
    policy: Optional[Path] = None,
    keep_or: Optional[str] = None,
    nvfp4_search: bool = False,
    input_scales: Optional[Path] = None,
    mapping: Optional[str] = None,
    mtp: str = "keep",
    names: Optional[Sequence[str]] = None,
    threads: int = 0,
    memory: int = MEMORY,
    allow_nonfinite: bool = False,
    io: str = "auto",
) -> WeightIterator:
    """Pairs of name and :class:`Tensor`: the weights of the original (Hugging Face) checkpoint, in a fixed order.

    They are decoded by other threads, ahead of the consumer by at most ``memory`` bytes (and one tensor). Whoever stops
    half-way drops the iterator or calls its ``close()``.

    ``dtype``, ``policy`` and what goes with them are those of :func:`convert`: an encoded weight is followed by its scales, and a kept
    one comes as U8 under the name ``….qweight``.

    :param names: only these weights; an encoded weight and its scales come together, whichever is named
    :param io: ``"pread"`` or ``"mmap"``: how the source's bytes are fetched; ``"auto"`` is ``"pread"``, since a mapped file
        that becomes shorter ends the process
    """
    return _ggshard.iter_weights(src, _choices(dtype, policy, keep_or, nvfp4_search, input_scales, mapping, mtp, names, threads, memory, allow_nonfinite, io))


def iter_rank(
    src: Path,
    *,
    tp: int,
    rank: int,
    profile: str = "hf",
    ep: bool = False,
    pp: int = 1,
    pp_layers: Optional[Sequence[int]] = None,
    stage: Optional[int] = None,
    moe_pad: Optional[int] = None,
    set: Optional[str] = None,
    dtype: str = "bf16",
    policy: Optional[Path] = None,
    keep_or: Optional[str] = None,
    nvfp4_search: bool = False,
    input_scales: Optional[Path] = None,
    mapping: Optional[str] = None,
    mtp: str = "keep",
    names: Optional[Sequence[str]] = None,
    threads: int = 0,
    memory: int = MEMORY,
    allow_nonfinite: bool = False,
    io: str = "auto",
    device: str = "cpu",
) -> WeightIterator:
    """As :func:`iter_weights`, for the parameters that one rank holds under a profile: what ``convert`` would write.

    :param set: ``"main"`` or ``"draft"``; by default both
    :param stage: the pipeline stage; by default all of them
    :param device: ``"cuda"`` or ``"cuda:1"``: the parameters come to be in the memory of that device, as
        :class:`DeviceTensor`. Quantized bytes are sent there and decoded where they stay; ``memory`` bounds memory of the device
    """
    layout = {
        "profile": profile,
        "tp": tp,
        "rank": rank,
        "ep": ep,
        "pp": pp,
        "pp_layers": pp_layers,
        "stage": stage,
        "moe_pad": moe_pad,
        "set": set,
    }
    choices = _choices(dtype, policy, keep_or, nvfp4_search, input_scales, mapping, mtp, names, threads, memory, allow_nonfinite, io)
    return _ggshard.iter_rank(src, layout, choices, ordinal(device))


def ordinal(device: str) -> Optional[int]:
    """The number of a CUDA device; ``None`` for the CPU."""
    kind, _, number = device.partition(":")
    if device == "cpu":
        return None
    if kind == "cuda" and (number.isascii() and number.isdigit() or device == "cuda"):
        return int(number or 0)
    raise ValueError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:0'")


def _choices(
    dtype: str,
    policy: Optional[Path],
    keep_or: Optional[str],
    nvfp4_search: bool,
    input_scales: Optional[Path],
    mapping: Optional[str],
    mtp: str,
    names: Optional[Sequence[str]],
    threads: int,
    memory: int,
    allow_nonfinite: bool,
    io: str,
) -> dict[str, Any]:
    return {
        "mapping": mapping,
        "dtype": dtype,
        "policy": None if policy is None else os.fspath(policy),
        "keep_or": keep_or,
        "nvfp4_search": nvfp4_search,
        "input_scales": None if input_scales is None else os.fspath(input_scales),
        "mtp": mtp,
        "names": names,
        "threads": threads,
        "memory": memory,
        "allow_nonfinite": allow_nonfinite,
        "io": io,
    }
