#!/usr/bin/env python3
"""How fast one rank's files come into a process: ggshard, safetensors and plain reads, side by side.

    loading.py FOLDER [--rank 0] [--runs 9] [--threads 0] [--fresh] [--json]

FOLDER is what `ggshard convert` wrote. Needs ggshard, numpy, ml_dtypes and safetensors 0.8 (PyTorch is used if it is there). The
files are read once before, so that all of it measures memory and not a disk. In each run every way has its turn, in an order that
changes; the table has medians, and how many times as long as the fastest way each took.

It matters who brought the files into the page cache, since Linux keeps them in pages of the size that they were asked for in.
Without --fresh they are as they were found: after a conversion in small pages, as it wrote them. With it they are taken out of
the page cache, and ggshard reads them in, in pages of 2 MiB where the file system has them.

Ways, each in a process of its own, which is forked for the turn: whatever a way maps or allocates is touched for the first
time, as in a server that starts. A page that is touched for the first time costs more than its bytes do: "read, reused" is
the one way that avoids it, and it leaves nothing but the last few bytes in memory.

    open_rank        ggshard.open_rank, then one byte of every page of every tensor
      prefetch       the same after RankCheckpoint.prefetch(), which maps the pages in parallel
      verify         the same with verify=True: every byte is hashed as well
      to NumPy       the same as prefetch, then every tensor copied into memory of its own
    safe_open        safetensors.safe_open, every tensor as a NumPy array (a copy); bf16 by ml_dtypes
      PyTorch        the same as PyTorch tensors (views of the mapped file), and one byte of every page
    read, reused     read() into one buffer of 1 MiB, again and again
    read, fresh      read() into one new buffer per file, which holds all of it
"""
import argparse
import importlib.util
import json
import os
import statistics
import time
from pathlib import Path

import ggshard
import ml_dtypes  # noqa: F401  (safetensors finds bf16 in it)
import numpy
from safetensors import safe_open

PAGE = 4096
PIECE = 1 << 20


def touch(array):
    """One byte of every page. Returns their sum, so that nothing can be left out."""
    return int(numpy.asarray(array).reshape(-1).view(numpy.uint8)[::PAGE].sum(dtype=numpy.uint64))


def touch_rank(rank):
    return sum(touch(tensor.numpy()) for tensor in rank.values())


def open_rank(a, files):
    return touch_rank(ggshard.open_rank(a.folder, a.rank, threads=a.threads))


def prefetch(a, files):
    rank = ggshard.open_rank(a.folder, a.rank, threads=a.threads)
    rank.prefetch()
    return touch_rank(rank)


def verify(a, files):
    return touch_rank(ggshard.open_rank(a.folder, a.rank, verify=True, threads=a.threads))


def to_numpy(a, files):
    rank = ggshard.open_rank(a.folder, a.rank, threads=a.threads)
    rank.prefetch()
    return len([tensor.numpy().copy() for tensor in rank.values()])


def safetensors_numpy(a, files):
    kept = []
    for path in files:
        with safe_open(path, framework="numpy") as file:
            kept += [file.get_tensor(name) for name in file.keys()]
    return sum(map(touch, kept))


def safetensors_torch(a, files):
    import torch

    kept = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            kept += [file.get_tensor(name) for name in file.keys()]
    return sum(touch(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in kept)


def read_reused(a, files):
    buffer = bytearray(PIECE)
    done = 0
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while read := file.readinto(buffer):
                done += read
    return done


def read_fresh(a, files):
    kept = []
    for path in files:
        buffer = numpy.empty(path.stat().st_size, numpy.uint8)
        with open(path, "rb", buffering=0) as file:
            view, done = memoryview(buffer), 0
            while read := file.readinto(view[done:]):
                done += read
        kept.append(buffer)
    return sum(map(touch, kept))


WAYS = {
    "open_rank": open_rank,
    "  prefetch": prefetch,
    "  verify": verify,
    "  to NumPy": to_numpy,
    "safe_open": safetensors_numpy,
    "  PyTorch": safetensors_torch,
    "read, reused": read_reused,
    "read, fresh": read_fresh,
}


def evict(path):
    """Takes a file out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def timed(way, a, files):
    """Seconds that a way takes in a fork of this process, from its first to its last step."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            if way is safetensors_torch:
                import torch  # noqa: F401  (an import, which is not measured)
            began = time.perf_counter()
            way(a, files)
            os.write(theirs, repr(time.perf_counter() - began).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with open(ours) as said:
        text = said.read()
    if os.waitpid(child, 0)[1] or not text:
        raise SystemExit(f"{way.__name__} failed")
    return float(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="of ggshard; 0 for one per CPU")
    parser.add_argument("--fresh", action="store_true", help="let ggshard bring the files into the page cache first")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    files = ggshard.open_rank(a.folder, a.rank).files
    size = sum(path.stat().st_size for path in files)
    ways = {name: way for name, way in WAYS.items() if way is not safetensors_torch or importlib.util.find_spec("torch")}
    if a.fresh:
        for path in files:
            evict(path)
        prefetch(a, files)
    read_reused(a, files)
    seconds = {name: [] for name in ways}
    for run in range(a.runs):
        order = list(ways)
        for name in order[run % len(order):] + order[:run % len(order)]:
            seconds[name].append(timed(ways[name], a, files))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min(medians.values())
    if a.json:
        print(json.dumps({"bytes": size, "files": len(files), "runs": a.runs, "seconds": seconds}))
        return
    print(f"{size} bytes in {len(files)} files, {a.runs} runs, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print(f"{'':14}{'seconds':>9}{'GB/s':>8}{'times':>8}{'least':>9}{'most':>9}")
    for name, median in medians.items():
        least, most = min(seconds[name]), max(seconds[name])
        print(f"{name:14}{median:9.4f}{size / median / 1e9:8.1f}{median / fastest:8.2f}{least:9.4f}{most:9.4f}")


if __name__ == "__main__":
    main()
