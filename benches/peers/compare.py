#!/usr/bin/env python3
"""ggshard next to what people use today: the same GGUF to the same bf16 values, in turns, on this machine.

    compare.py [MODEL.gguf] --ggshard PROGRAM [--rounds 5] [--tp 1,8] [--tmpfs DIR] [--disk DIR] [--with-transformers] [--json]

`make bench-peers` sets up what it needs and runs it. Without MODEL (a dense model of architecture llama, F32, F16 or
quantized), one of 1.2 GB is made first (model.py) and kept in --cache. Ways:

    ggshard       ggshard convert MODEL FOLDER --tp N
    gguf-py       script.py: gguf, ml_dtypes and safetensors
    libgguf       the same with the decoders of libgguf, in C++
    transformers  from_pretrained(gguf_file=...), then save_pretrained: tp 1 only, with --with-transformers

Each way is a process of its own, from start to end, with the source in the page cache. To --tmpfs, nobody waits for a disk. To
--disk, everybody's files are synced before the clock stops: ggshard does it always, the others when asked to. In each round
every way has its turn, in an order that changes; turns.py says what is done about virtual machines (--warm) and about other
programs. Times are of the clock and of all CPUs (getrusage of the child). Before
anything is measured, all tensors of the first two ways and of libgguf are compared by digest, tensor by tensor.
"""
import argparse
import hashlib
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import turns  # noqa: E402  (beside the folder of this file)


def ways(a, tp, synced):
    """Name to command; each writes to the folder that is appended."""
    script = [sys.executable, "-B", HERE / "script.py", a.model, "--tp", str(tp)] + ["--fsync"] * synced
    made = {
        "ggshard": [a.ggshard, "convert", a.model, "--tp", str(tp)],
        "gguf-py": script + ["--by", "gguf"],
        "libgguf": script + ["--by", "libgguf"],
    }
    if a.with_transformers and tp == 1:
        made["transformers"] = [sys.executable, "-B", HERE / "by_transformers.py", a.model] + ["--fsync"] * synced
    return {name: command for name, command in made.items() if name in a.ways}


def digests(folder):
    """(file's rank, tensor) to dtype, shape and SHA-256 of its bytes, for all safetensors of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        rank = path.stem.split("rank-")[-1].split("-")[0] if "rank-" in path.stem else "0"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            end = 8 + int.from_bytes(view[:8], "little")
            for name, entry in json.loads(bytes(view[8:end])).items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    with view[end + first:end + last] as part:
                        digest = hashlib.sha256(part).hexdigest()
                    found[rank, name] = (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def check(a, tp):
    """All ways give the same tensors, as the first one does."""
    folder = a.tmpfs / f"ggshard-peers-{os.getpid()}"
    expected = None
    for name, command in ways(a, tp, False).items():
        turns.run([*command, folder])
        found = digests(folder)
        shutil.rmtree(folder)
        if expected is None:
            expected = found
        elif name != "transformers" and found != expected:
            wrong = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
            raise SystemExit(f"{name}, tp {tp}: {len(wrong)} of {len(expected)} tensors differ, the first is {wrong[0]}")
    return len(expected)


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def version(command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()[:1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="default: one that is made here")
    parser.add_argument("--ggshard", type=Path, required=True, help="the program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, help="default: the folder of --cache. An empty string: not to a disk")
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / "target/peers", help="where the model is made and kept")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["ggshard", "gguf-py", "libgguf", "transformers"])
    parser.add_argument("--warm", type=lambda text: int(float(text) * 1e9), default=10 * 10**9, metavar="GB", help="0: none")
    parser.add_argument("--with-transformers", action="store_true", help="needs torch and transformers: several GB")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.model is None:
        a.model = a.cache / "llama-q4_k_m.gguf"
        if not a.model.exists():
            subprocess.run([sys.executable, "-B", HERE / "model.py", a.model], check=True)
    to = {"tmpfs": a.tmpfs}
    if a.disk is None:
        a.cache.mkdir(parents=True, exist_ok=True)
        to["disk, fsync"] = a.cache
    elif str(a.disk) != ".":
        to["disk, fsync"] = a.disk
    with open(a.model, "rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass

    compared = {tp: check(a, tp) for tp in a.tp}
    load = [os.getloadavg()[0]]
    results = {}
    for turn in range(a.rounds):
        for where, base in to.items():
            for tp in a.tp:
                folder = base / f"ggshard-peers-{os.getpid()}"
                all_ways = list(ways(a, tp, where != "tmpfs").items())
                for name, command in all_ways[turn % len(all_ways):] + all_ways[:turn % len(all_ways)]:
                    try:
                        took = turns.turn(
                            lambda: turns.run_watched([*command, folder], 0.02),
                            lambda: shutil.rmtree(folder, ignore_errors=True),
                            a.warm,
                        )
                    finally:
                        shutil.rmtree(folder, ignore_errors=True)
                    results.setdefault((where, tp), {}).setdefault(name, []).append(took)
                    if sys.stderr.isatty() or not a.json:
                        print(f"round {turn + 1}: {where}, tp {tp}, {name}: {took[0]:.2f} s", file=sys.stderr)
        load.append(os.getloadavg()[0])

    if a.json:
        rows = [
            {"to": where, "tp": tp, "way": name, "wall_cpu_anonymous_mib": took}
            for (where, tp), by in results.items() for name, took in by.items()
        ]
        print(json.dumps({"cpu": cpu(), "cpus": os.cpu_count(), "load": load, "repeated": turns.repeated, "model": str(a.model),
                          "model_bytes": a.model.stat().st_size, "compared": compared, "rounds": a.rounds, "results": rows}))
        return
    print(f"{a.model.name}, {a.model.stat().st_size / 1e9:.2f} GB, to bf16; {cpu()}, {os.cpu_count()} CPUs; {a.rounds} rounds;")
    print(f"load at the start and after each round {', '.join(f'{one:.1f}' for one in load)}, {turns.repeated} turns repeated; " + ", ".join(version([a.ggshard, "--version"])))
    print("; ".join(f"tp {tp}: {count} tensors compared, all equal" for tp, count in compared.items()) + "\n")
    print("| to | tp | way | wall s | CPU s | anonymous MiB, most | wall, times ggshard's | CPU, times ggshard's |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for (where, tp), by in results.items():
        for name, took in by.items():
            wall, used, most = zip(*took)
            row = [where, str(tp), name, turns.spread(wall), turns.spread(used), f"{max(most):.0f}"]
            for i in range(2):  # round by round, so that what disturbed a round disturbs both
                ratios = [theirs[i] / ours[i] for theirs, ours in zip(took, by.get("ggshard", took))]
                row.append("1" if name == "ggshard" else turns.spread(ratios))
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
