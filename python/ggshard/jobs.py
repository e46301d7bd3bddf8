"""The program's commands as functions. Each gives the dictionary that the command prints with ``--json``."""
from __future__ import annotations

import os
from typing import Any, Callable, Optional, Sequence, Union

from . import _ggshard

Path = Union[str, "os.PathLike[str]"]
Progress = Callable[[int, int], object]
"""Called with the bytes done and the bytes to do, at most about ten times a second, by the thread that called. What it
raises ends the work; the last call, with two equal numbers, comes when everything is done."""


def inspect(src: Path) -> dict[str, Any]:
    """What a GGUF (a file, any part of a split set, or a folder with one set) holds."""
    return _ggshard.inspect(src)


def plan(
    src: Path,
    *,
    tp: int,
    profile: str = "hf",
    mapping: Optional[str] = None,
    dtype: str = "bf16",
    policy: Optional[Path] = None,
    keep_or: Optional[str] = None,
    nvfp4_search: bool = False,
    input_scales: Optional[Path] = None,
    mtp: str = "keep",
    ep: bool = False,
    pp: int = 1,
    pp_layers: Optional[Sequence[int]] = None,
    moe_pad: Optional[int] = None,
    part_size: Optional[int] = None,
    header_only: bool = False,
) -> dict[str, Any]:
    """What :func:`convert` would write: bytes per rank, types, replication, every parameter. Reads no tensor data.

    With ``header_only`` the source is a header whose tensor data is not there.
    """
    nvfp4 = {"nvfp4_search": nvfp4_search, "input_scales": None if input_scales is None else os.fspath(input_scales)}
    choices = _choices(tp, profile, mapping, dtype, policy, keep_or, mtp, ep, pp, pp_layers, moe_pad, part_size, nvfp4)
    return _ggshard.plan(src, choices, header_only)


def convert(
    src: Path,
    out: Path,
    *,
    tp: int,
    profile: str = "hf",
    mapping: Optional[str] = None,
    dtype: str = "bf16",
    policy: Optional[Path] = None,
    keep_or: Optional[str] = None,
    nvfp4_search: bool = False,
    input_scales: Optional[Path] = None,
    mtp: str = "keep",
    ep: bool = False,
    pp: int = 1,
    pp_layers: Optional[Sequence[int]] = None,
    moe_pad: Optional[int] = None,
    part_size: Optional[int] = None,
    ranks: Optional[Sequence[int]] = None,
    threads: int = 0,
    device: str = "cpu",
    config: Optional[Path] = None,
    allow_nonfinite: bool = False,
    io: str = "auto",
    resume: bool = False,
    same_source: bool = False,
    hash_source: bool = False,
    direct: Optional[bool] = None,
    seal: Optional[bool] = None,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Writes the files of all ranks, or of ``ranks``, into the folder ``out``, which is created or must be empty.

    :param tp: number of tensor-parallel ranks
    :param profile: the layout: a built-in profile or a TOML file
    :param mapping: the names: a built-in mapping or a TOML file; by default the one that fits the file
    :param dtype: ``"bf16"``, ``"f16"`` or ``"f32"``: output type of weights that are not pinned to another; ``"fp8"`` is
        ``policy="deepseek-fp8"``, ``"nvfp4"`` is ``policy="modelopt-nvfp4"`` and ``"keep"`` is ``policy="keep"``, each with bf16
        for the other weights
    :param policy: which weights are written in which form: a built-in output policy or a TOML file
    :param keep_or: a float type for weights whose blocks are to be kept, but are cut through; by default that is refused
    :param nvfp4_search: choose the scale of each block of nvfp4 by the error that it leaves; slower
    :param input_scales: scales of activations for nvfp4 in weights and activations: a checkpoint that ModelOpt calibrated, or
        ``"source"`` for a GGUF that has them; by default weights alone are in nvfp4
    :param mtp: ``"keep"``, ``"drop"`` or ``"only"``: what becomes of multi-token-prediction blocks
    :param ep: ranks hold whole experts instead of a slice of every expert
    :param pp: number of pipeline stages; ``pp_layers`` gives the blocks of each instead
    :param moe_pad: pad each rank's rows of an expert to a multiple of this
    :param part_size: begin a new file at this many bytes
    :param threads: number of threads; 0 for one per CPU
    :param device: what decodes: ``"cpu"``, ``"cuda"``, ``"cuda:0,1"``, or ``"auto"``, as the program's ``--device``. No driver
        is loaded unasked, since processes that are forked from one that has it cannot use it
    :param config: the model's ``config.json``, or a folder that holds it and tokenizer files
    :param allow_nonfinite: let NaN, infinite and overflowing values through; they are counted
    :param io: ``"pread"`` or ``"mmap"``: how the source's bytes are fetched; ``"auto"`` is ``"pread"``, since a mapped file
        that becomes shorter ends the process
    :param resume: go on with what an earlier call began in ``out``, if one did, and keep finished files if this one ends
        early
    :param same_source: the source may be a copy of the one that the earlier call had
    :param hash_source: put the BLAKE3 of the source's files into the manifest
    :param direct: write past the page cache; by default where it is worth it, as the program's ``--direct=auto``
    :param seal: whether ``out`` is a checkpoint at the end; by default, if all ranks are made. Otherwise :func:`seal` makes
        it one when other processes have made the other ranks
    :param progress: told how far it is

    All or nothing: on any error, on Ctrl-C, and when ``progress`` raises before everything is done, nothing remains in
    ``out``; with ``resume``, files that are finished remain, in a folder that no stack takes for a checkpoint.
    """
    nvfp4 = {"nvfp4_search": nvfp4_search, "input_scales": None if input_scales is None else os.fspath(input_scales)}
    choices = _choices(tp, profile, mapping, dtype, policy, keep_or, mtp, ep, pp, pp_layers, moe_pad, part_size, nvfp4)
    ending = {"resume": resume, "same_source": same_source, "seal": seal, "hash_source": hash_source, "direct": direct}
    return _ggshard.convert(src, out, choices, ranks, threads, device, config, allow_nonfinite, io, ending, progress)


def seal(dir: Path, *, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Makes a folder into which several calls of :func:`convert` have put ranks a checkpoint.

    :param ranks: the ranks that must be there, and no others; by default all of the model
    """
    return _ggshard.seal(dir, list(ranks))


def verify(
    dir: Path,
    *,
    source: Optional[Path] = None,
    reference: Optional[Path] = None,
    rank: Optional[int] = None,
    max_rms: float = 0.0,
    threads: int = 0,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Checks a folder that ggshard wrote. Differences are in ``["findings"]``, the verdict in ``["ok"]``.

    :param source: recompute every tensor from this GGUF and compare every byte
    :param reference: an original Hugging Face checkpoint of the same model to compare values with
    :param rank: check only what this rank loads
    :param max_rms: the largest relative RMS difference from the reference that passes

    Ctrl-C and whatever ``progress`` raises end it, and its threads, within a tile or a tensor of each.
    """
    return _ggshard.verify(dir, source, reference, rank, max_rms, threads, progress)


def _choices(
    tp: int,
    profile: str,
    mapping: Optional[str],
    dtype: str,
    policy: Optional[Path],
    keep_or: Optional[str],
    mtp: str,
    ep: bool,
    pp: int,
    pp_layers: Optional[Sequence[int]],
    moe_pad: Optional[int],
    part_size: Optional[int],
    nvfp4: dict[str, Any],
) -> dict[str, Any]:
    return {
        **nvfp4,
        "tp": tp,
        "profile": profile,
        "mapping": mapping,
        "dtype": dtype,
        "policy": None if policy is None else os.fspath(policy),
        "keep_or": keep_or,
        "mtp": mtp,
        "ep": ep,
        "pp": pp,
        "pp_layers": pp_layers,
        "moe_pad": moe_pad,
        "part_size": part_size,
    }
