"""What reading costs: which bytes are fetched from the disk, and how much memory is taken. Measured by the system, from outside."""
import ctypes
import mmap
import os
import struct
import subprocess
import sys

import ggshard
import pytest
from conftest import DEEPSEEK

TP, RANK = 8, 3
OPENED = f"""
import ggshard, sys
def fetched():
    with open("/proc/self/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("read_bytes:"))
before = fetched()
checkpoint = ggshard.open_rank(sys.argv[1], {RANK}, verify=sys.argv[2] == "verify")
if sys.argv[2] == "prefetch":
    checkpoint.prefetch()
print(fetched() - before)
"""


def evict(path):
    """Takes a file out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def cached(path):
    """How many bytes of a file are in the page cache, in whole pages."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as map:
        start = ctypes.c_char.from_buffer(map)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("way", ["open", "prefetch", "verify"])
def test_a_rank_is_read_without_the_files_of_another(tmp_path, way):
    out = tmp_path / "out"
    ggshard.convert(DEEPSEEK, out, tp=TP, profile="vllm-0.32-cpu")
    files = {path: f"rank-{RANK}-" in path.name for path in sorted(out.rglob("*.safetensors"))}
    assert len(files) >= TP and 0 < sum(files.values()) < len(files)
    everything = [path for path in out.rglob("*") if path.is_file()]
    for path in everything:
        evict(path)
    if any(cached(path) for path in everything):
        pytest.skip("this file system does not let go of its pages")
    done = subprocess.run([sys.executable, "-c", OPENED, out, way], check=True, capture_output=True, text=True)
    mine = sum(path.stat().st_size for path, own in files.items() if own)
    assert [path.name for path, own in files.items() if not own and cached(path)] == []
    manifest = (out / "ggshard.json").stat().st_size
    others = [p.name for p in everything if p.suffix != ".safetensors" and p.name != "ggshard.json" and cached(p)]
    assert others == [], "the manifest is all that is read beside the rank's files"
    if way != "open":
        assert mine <= int(done.stdout) <= mine + manifest + len(files) * mmap.PAGESIZE


# Memory.

MIB = 1 << 20
WEIGHTS = """
import ggshard, sys, threading
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
before, peak, over = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.001):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
for _ in ggshard.iter_weights(sys.argv[1], mapping="raw", memory=int(sys.argv[2]), threads=2):
    pass
over.set()
watcher.join()
print(peak - before)
"""


def peak(path, tensors, memory):
    """The most memory that iterating over so many weights of 8 MiB took beyond what the interpreter had."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    rows, columns = 2048, 2048  # 16 MiB as F32, 8 as BF16
    header = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1) + text("general.architecture") + struct.pack("<I", 8) + text("large")
    for i in range(tensors):
        header += text(f"{i}.weight") + struct.pack("<IQQIQ", 2, columns, rows, 0, i * rows * columns * 4)
    header += bytes(-len(header) % 32)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + tensors * rows * columns * 4)
    done = subprocess.run([sys.executable, "-c", WEIGHTS, path, str(memory)], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_memory_does_not_grow_with_the_model(tmp_path):
    few, many = (peak(tmp_path / f"{n}.gguf", n, 16 * MIB) for n in (32, 128))
    # What is ahead, the tensor in the consumer's hands and the next; and what the C library keeps of freed blocks, in each thread.
    allowed = 16 * MIB + 2 * 8 * MIB + 64 * MIB
    assert few <= allowed and many <= allowed, (few / MIB, many / MIB)
    assert many - few < 32 * MIB, "four times as much was decoded"
