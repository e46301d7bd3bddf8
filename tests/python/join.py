#!/usr/bin/env python3
"""Joins the ranks of a tensor-parallel checkpoint and compares them with the whole one, byte for byte.

    join.py WHOLE_FOLDER RANKED_FOLDER

Written against the rules of tensor parallelism alone. It reads safetensors files, parses their headers itself and knows
nothing of ggshard: no manifest, no index, no mapping. What to do with a weight follows from its name, as serving stacks do it.
"""
import json
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB_PAD = 64

# Rules by the parameter's name, without its module path. HF weights are [out, in].
VOCAB = re.compile(r"(^|\.)(embed_tokens|lm_head|shared_head\.head)\.weight$")
COLUMN = re.compile(r"\.(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj)\.(weight|bias)$")
KEY_VALUE = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
ROW = re.compile(r"\.(o_proj|down_proj)\.weight$")
REPLICATED = re.compile(
    r"(norm\.(weight|bias)|\.(enorm|hnorm)\.weight|\.q_a_proj\.weight|\.kv_a_proj_with_mqa\.weight|\.eh_proj\.weight"
    r"|\.indexer\.[a-z_]+\.(weight|bias)|\.mlp\.gate\.(weight|e_score_correction_bias)|\.(o_proj|down_proj)\.bias)$"
)


class Tensor(NamedTuple):
    """A tensor as a safetensors file holds it."""

    dtype: str
    shape: tuple
    data: bytes

    def rows(self):
        """The bytes as [rows, bytes per row]."""
        rows = self.shape[0] if self.shape else 1
        return np.frombuffer(self.data, np.uint8).reshape(rows, -1)


def read_file(path):
    """All tensors of one safetensors file."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return tensors


def read_whole(folder):
    """All tensors of a folder that is not cut into ranks."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise ValueError(f"{path}: {name} is in two files")
            tensors[name] = tensor
    return tensors


def read_ranks(folder):
    """The tensors of each rank, in the order of the ranks."""
    ranks = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        match = re.fullmatch(r"model-rank-(\d+)-part-\d+\.safetensors", path.name)
        if not match:
            raise ValueError(f"{path}: not a rank's file")
        of_rank = ranks.setdefault(int(match[1]), {})
        for name, tensor in read_file(path).items():
            if name in of_rank:
                raise ValueError(f"{path}: {name} is in two files of the rank")
            of_rank[name] = tensor
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"{folder}: ranks {sorted(ranks)}")
    return [ranks[r] for r in range(len(ranks))]


def join(name, parts, whole_shape):
    """One weight from its slices; `whole_shape` says only how often key and value heads are repeated and where padding begins."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise ValueError(f"rank {rank} has {part.dtype} {part.shape}, rank 0 {first.dtype} {first.shape}")
    if VOCAB.search(name):
        rows = np.concatenate([p.rows() for p in parts])
        vocab = whole_shape[0]
        padded = -(-vocab // VOCAB_PAD) * VOCAB_PAD
        if len(rows) != padded:
            raise ValueError(f"{len(rows)} vocabulary rows instead of {padded}")
        if rows[vocab:].any():
            raise ValueError(f"rows from {vocab} on are not zero")
        joined, shape = rows[:vocab], (vocab, *first.shape[1:])
    elif COLUMN.search(name) or KEY_VALUE.search(name):
        repeats = 1
        if KEY_VALUE.search(name):
            total = first.shape[0] * len(parts)
            if total % whole_shape[0]:
                raise ValueError(f"{total} rows over all ranks are no multiple of {whole_shape[0]}")
            repeats = total // whole_shape[0]
        for begin in range(0, len(parts), repeats):
            for rank in range(begin + 1, begin + repeats):
                if parts[rank].data != parts[begin].data:
                    raise ValueError(f"ranks {begin} and {rank} share a key/value head and differ")
        parts = parts[::repeats]
        joined, shape = np.concatenate([p.rows() for p in parts]), (first.shape[0] * len(parts), *first.shape[1:])
    elif ROW.search(name):
        joined = np.concatenate([p.rows() for p in parts], axis=1)
        shape = (first.shape[0], first.shape[1] * len(parts))
    elif REPLICATED.search(name):
        for rank, part in enumerate(parts):
            if part.data != first.data:
                raise ValueError(f"rank {rank} differs from rank 0, but the weight is replicated")
        joined, shape = first.rows(), first.shape
    else:
        raise ValueError("no rule for this name")
    return Tensor(first.dtype, shape, joined.tobytes())


def compare(whole, ranks):
    """Joins every weight. Gives the number of weights that were compared and a sentence per difference."""
    problems = []
    compared = 0
    for rank, tensors in enumerate(ranks):
        for name in sorted(whole.keys() - tensors.keys()):
            problems.append(f"rank {rank}: {name} is missing")
        for name in sorted(tensors.keys() - whole.keys()):
            problems.append(f"rank {rank}: {name} is not in the whole checkpoint")
    for name, want in whole.items():
        if any(name not in tensors for tensors in ranks):
            continue
        try:
            got = join(name, [tensors[name] for tensors in ranks], want.shape)
        except ValueError as problem:
            problems.append(f"{name}: {problem}")
            continue
        compared += 1
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            problems.append(f"{name}: {got.dtype} {got.shape} instead of {want.dtype} {want.shape}")
        elif got.data != want.data:
            byte = next(i for i, (a, b) in enumerate(zip(got.data, want.data)) if a != b)
            problems.append(f"{name}: differs from byte {byte} on")
    return compared, problems


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ranks = read_ranks(sys.argv[2])
    compared, problems = compare(read_whole(sys.argv[1]), ranks)
    for problem in problems:
        print(problem)
    print(f"{compared} weights of {len(ranks)} ranks joined, {len(problems)} problems")
    sys.exit(1 if problems or not compared else 0)


if __name__ == "__main__":
    main()
