#!/usr/bin/env python3
"""ggshard next to what the machine can do: every table but those of peers and decoders.

    evidence.py MODEL.gguf --ggshard PROGRAM [--parts PROGRAM] [--rounds 5] [--tmpfs DIR] [--disk DIR] [--only cost,cold,...] [--json]

`make bench-evidence` runs it. --parts is the program of benches/parts.rs; by default cargo builds it. Needs nothing but
Python, and b3sum for one table. What is compared takes turns, and ratios are taken within a round; turns.py says what is
done about virtual machines (--warm) and about other programs. Tables:

    cost     CPU seconds of a conversion to --tmpfs, and of its parts alone, for the same bytes
    cold     wall seconds of a conversion from a cold source to --disk, also with --direct, of reading the source cold, and of writing as many bytes,
             synced, by way of the page cache and past it (O_DIRECT)
    verify   ggshard verify and b3sum over the same files in --tmpfs
    memory   the most anonymous memory of a conversion
    plan     planning GLM-5 at full size from its header
"""
import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import turns
from turns import run, run_watched, spread, turn

ROOT = Path(__file__).resolve().parents[1]
PIECE = 512 << 10
HEADER = ROOT / "fixtures/container/plan/glm-5-744b-q4_k_m.header.gguf"


def built(bench):
    """The program of a benchmark, built by cargo."""
    command = ["cargo", "bench", "--locked", "--no-run", "--quiet", "--bench", bench, "--message-format", "json"]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [message["executable"] for message in map(json.loads, said.splitlines()) if message.get("executable")]
    return Path(found[-1])


def convert(a, tp, folder, prepare=lambda: None, direct="off"):
    """Wall and CPU seconds, and the bytes and the number of files that were written."""

    def clear():
        shutil.rmtree(folder, ignore_errors=True)
        prepare()

    command = [a.ggshard, "convert", a.model, folder, "--tp", tp, f"--direct={direct}", "--json"]
    wall, cpu, _ = turn(lambda: run(command), clear, a.warm)
    sizes = [path.stat().st_size for path in folder.rglob("*.safetensors")]
    return wall, cpu, sum(sizes), len(sizes)


def evict(path):
    """Takes a file out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def cost(a):
    """Parts are measured with one thread, so that no part pays for waiting on another thread."""
    rows = []
    once = None
    for tp in a.tp:
        folder = a.tmpfs / f"evidence-{os.getpid()}"
        measured = []
        for _ in range(a.rounds):
            wall, used, output, files = convert(a, tp, folder)
            shutil.rmtree(folder)
            once = once or output  # a tensor's digest is made once for all ranks that hold the same
            command = [a.parts, a.model, "--write", a.tmpfs, "--output", output, "--files", files, "--rounds", 1, "--json"]
            said = turn(lambda: run(command), memory=a.warm)[2]
            parts = {(part["part"], part["threads"]): part["wall_and_cpu"][0] for part in json.loads(said)["parts"]}
            hashes = (once + output) / output
            row = {"wall": wall, "cpu": used, "output": output}
            for threads in 1, 2:
                row[f"decode {threads}"] = parts["decode", threads][1]
                row[f"hash {threads}"] = parts["hash", threads][1] * hashes
                row[f"write {threads}"] = parts["write", threads][1]
            row["scaling"] = parts["both", 1][0] / parts["both", 2][0]
            measured.append(row)
        rows.append((tp, measured))
    text = ["| tp | output GB | convert: wall s | convert: CPU s | decode | hash | write | of the sum, 1 thread | of the sum, 2 threads | decode and hash, 1 → 2 threads |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for tp, measured in rows:
        def all_of(key):
            return [row[key] for row in measured]

        def shares(threads):
            return [sum(row[f"{part} {threads}"] for part in ("decode", "hash", "write")) / row["cpu"] for row in measured]

        cells = [tp, f"{measured[0]['output'] / 1e9:.2f}", spread(all_of("wall")), spread(all_of("cpu"))]
        cells += [f"{spread(all_of(f'{part} 1'))}; {statistics.median(all_of(f'{part} 2')):.2f}" for part in ("decode", "hash", "write")]
        cells += [spread(shares(1)), spread(shares(2)), spread(all_of("scaling"))]
        text.append(line(cells))
    return rows, text


def cold(a):
    """Times of the slower of reading and writing, per round."""
    rows = []
    folder = a.disk / f"evidence-{os.getpid()}"
    for tp in a.tp:
        measured = []
        for _ in range(a.rounds):
            wall, used, output, files = convert(a, tp, folder, lambda: evict(a.model))
            row = {"wall": wall, "cpu": used, "output": output}
            row["wall direct"], row["cpu direct"], *_ = convert(a, tp, folder, lambda: evict(a.model), "on")
            shutil.rmtree(folder)
            row["read"] = turn(lambda: run(["cat", a.model], discard=True), lambda: evict(a.model))[0]
            for way, flags in ("write", 0), ("direct", os.O_DIRECT):

                def clear():
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()

                row[way] = turn(lambda: write(folder, output, files, flags), clear, a.warm)
                shutil.rmtree(folder)
            measured.append(row)
        rows.append((tp, measured))
    text = ["| tp | output GB | convert: wall s | convert: CPU s | --direct: wall s | --direct: CPU s | cat source s | write, fsync s | O_DIRECT, fsync s | slower of cat and write / convert | slower of cat and O_DIRECT / --direct |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for tp, measured in rows:
        cells = [spread([row[key] for row in measured]) for key in ("wall", "cpu", "wall direct", "cpu direct", "read", "write", "direct")]
        for way, ours in ("write", "wall"), ("direct", "wall direct"):
            cells.append(spread([max(row["read"], row[way]) / row[ours] for row in measured]))
        text.append(line([tp, f"{measured[0]['output'] / 1e9:.2f}", *cells]))
    return rows, text


def write(folder, size, files, flags=0):
    """Seconds of a plain sequential write of so many bytes, file after file, synced."""
    piece = mmap.mmap(-1, PIECE)  # of random bytes, and aligned, as O_DIRECT wants it
    piece.write(os.urandom(PIECE))
    view = memoryview(piece)
    began = time.perf_counter()
    for i in range(files):
        left = size // files + (i < size % files)
        file = os.open(folder / str(i), os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
        while left > 0:
            left -= os.write(file, view[:-(-min(left, PIECE) // 4096) * 4096])  # whole pages, as O_DIRECT wants them
        os.fsync(file)
        os.close(file)
    return time.perf_counter() - began


def verify(a):
    folder = a.tmpfs / f"evidence-{os.getpid()}"
    _, _, output, _ = convert(a, max(a.tp), folder)
    paths = sorted(folder.rglob("*.safetensors"))
    ways = {"ggshard verify": [a.ggshard, "verify", folder]}
    if "--tensors" in subprocess.run([a.ggshard, "verify", "--help"], capture_output=True, text=True).stdout:
        ways["ggshard verify --tensors"] = [a.ggshard, "verify", folder, "--tensors"]
    if shutil.which("b3sum"):
        ways[f"b3sum --num-threads {os.cpu_count()}"] = ["b3sum", "--num-threads", os.cpu_count(), *paths]
    measured = {name: [] for name in ways}
    for number in range(a.rounds + 1):
        for name in list(ways)[number % len(ways):] + list(ways)[:number % len(ways)]:
            took = turn(lambda: run(ways[name]))
            if number:  # the first one touches what is touched for the first time
                measured[name].append(took[:2])
    shutil.rmtree(folder)
    text = [f"{output / 1e9:.2f} GB in {len(paths)} files, in the page cache:", "", "| | wall s | CPU s | GB/s of wall | b3sum / this |", "|---|---:|---:|---:|---:|"]
    reference = list(measured.values())[-1]
    for name, times in measured.items():
        wall = [took[0] for took in times]
        ratio = [theirs[0] / ours for theirs, ours in zip(reference, wall)]
        text.append(line([name, spread(wall), spread([took[1] for took in times]), f"{output / statistics.median(wall) / 1e9:.1f}", spread(ratio)]))
    return measured, text


def memory(a):
    rows = []
    folder = a.tmpfs / f"evidence-{os.getpid()}"
    for tp in a.tp:
        for more in [], ["--mem-limit", "64M"], ["--io", "pread"]:
            shutil.rmtree(folder, ignore_errors=True)
            most = run_watched([a.ggshard, "convert", a.model, folder, "--tp", tp, *more], 0.002)[2]
            shutil.rmtree(folder)
            rows.append((tp, " ".join(more) or "default", most))
    text = ["| tp | options | most anonymous memory, MiB |", "|---:|---|---:|"]
    text += [line([tp, limit, f"{most:.1f}"]) for tp, limit, most in rows]
    return rows, text


def plan(a):
    command = [a.ggshard, "plan", HEADER, "--header-only", "--tp", 8]
    times = [turn(lambda: run(command))[:2] for _ in range(a.rounds)]
    text = ["| plan of GLM-5, 1,809 tensors, tp 8 | s |", "|---|---:|", line(["wall", spread([took[0] for took in times])]), line(["CPU", spread([took[1] for took in times])])]
    return times, text


TABLES = {"cost": cost, "cold": cold, "verify": verify, "memory": memory, "plan": plan}


def line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ggshard", type=Path, required=True)
    parser.add_argument("--parts", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=lambda text: int(float(text) * 1e9), default=6 * 10**9, metavar="GB", help="memory that is touched before each turn")
    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=ROOT / "target")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(TABLES))
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.parts is None and "cost" in a.only:
        a.parts = built("parts")
    result = {}
    for name in a.only:
        load = os.getloadavg()[0]
        raw, text = TABLES[name](a)
        result[name] = {"load": [load, os.getloadavg()[0]], "measured": raw}
        if not a.json:
            print(f"## {name}: {a.model.name}, {a.rounds} rounds, load {load:.1f} before, {os.getloadavg()[0]:.1f} after, {turns.repeated} turns repeated\n")
            print("\n".join(text), end="\n\n", flush=True)
    if a.json:
        json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
