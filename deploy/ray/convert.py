#!/usr/bin/env python3
"""Converts a GGUF on a Ray cluster: groups of ranks are tasks on whichever nodes, in one shared folder; then it is sealed
and verified.

    python deploy/ray/convert.py /models/glm5.gguf /models/glm5-tp8 --tp 8 --address auto
    python deploy/ray/convert.py SRC OUT --tp 8 --profile vllm-0.32 -- --config /models/glm5-hf --io pread

What follows `--` goes to `ggshard convert` as it is. SRC and OUT must have the same paths on all nodes, and so must the
program. To resume, whatever has ended it: the same command line again. Exit status 0: the folder is a checkpoint, and every
byte of it was verified.
"""
import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time

import ray
from ray.exceptions import RayError

WRONG_COMMAND_LINE = 2
# Seconds before the first repetition; doubled before each further one.
PAUSE = 5.0


class Failed(Exception):
    """ggshard has said why on the task's stderr; here is what it said last."""


def arguments():
    parser = argparse.ArgumentParser(
        description="Convert a GGUF on a Ray cluster, seal the folder and verify it.",
        epilog="What follows -- goes to `ggshard convert` as it is.",
    )
    parser.add_argument("src", help="a GGUF file, any part of a split set, or a folder that holds one set")
    parser.add_argument("out", help="the folder to write to, on a file system that all nodes share")
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--profile", default="hf", help="the layout (default: hf)")
    parser.add_argument("--ranks-per-task", type=int, default=1, metavar="N", help="ranks that one task makes (default: 1)")
    parser.add_argument("--address", help="the cluster, as in auto or HOST:6379 (default: a Ray of its own on this machine)")
    parser.add_argument("--ggshard", default="ggshard", metavar="PATH", help="the program, on every node")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="CPUs of a task, and its threads (default: 4)")
    parser.add_argument("--retries", type=int, default=5, metavar="N", help="repetitions of a task that failed (default: 5)")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:cut])
    args.options = given[cut + 1 :]
    if args.tp < 1 or args.ranks_per_task < 1 or args.cpus < 1 or args.retries < 0:
        parser.error("--tp, --ranks-per-task and --cpus must be at least 1, --retries at least 0")
    # Tasks have working folders of their own.
    args.src, args.out = os.path.abspath(args.src), os.path.abspath(args.out)
    return args


def die_with_parent():
    """A worker that is killed must not leave its ggshard behind, which would hold the lock of its ranks."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(command, retries):
    """Runs a command until it succeeds. Gives the last line of its output."""
    for attempt in range(retries + 1):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=die_with_parent)
        if done.returncode == 0:
            return done.stdout.strip().rpartition("\n")[2]
        if done.returncode < 0:
            why = f"killed by {signal.Signals(-done.returncode).name}"
        else:
            why = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        print(f"{' '.join(command)}: {why}", file=sys.stderr, flush=True)
        if done.returncode == WRONG_COMMAND_LINE:
            break
        if attempt < retries:
            time.sleep(PAUSE * 2**attempt)
    raise Failed(why)


def main():
    args = arguments()
    ray.init(address=args.address, log_to_driver=True)

    # `max_retries` is for workers and nodes that die, `run` repeats what fails. Either way the same command line resumes.
    # SPREAD: one node's disk and network are what a conversion waits for.
    task = ray.remote(num_cpus=args.cpus, max_retries=args.retries, scheduling_strategy="SPREAD")(run)
    waiting = {}
    for first in range(0, args.tp, args.ranks_per_task):
        ranks = ",".join(map(str, range(first, min(first + args.ranks_per_task, args.tp))))
        command = [args.ggshard, "convert", args.src, args.out, "--tp", str(args.tp), "--profile", args.profile]
        command += ["--ranks", ranks, "--resume", "--threads", str(args.cpus), *args.options]
        waiting[task.options(name=f"ranks {ranks}").remote(command, args.retries)] = ranks

    failed = []
    while waiting:
        [ready], _ = ray.wait(list(waiting), num_returns=1)
        ranks = waiting.pop(ready)
        try:
            ray.get(ready)
            print(f"ranks {ranks} are made", flush=True)
        except (Failed, RayError) as error:
            failed.append(ranks)
            print(f"ranks {ranks} failed: {cause(error)}", file=sys.stderr, flush=True)
    if failed:
        print(f"not sealed, {args.out} lacks ranks {', '.join(failed)}: run the same again to resume", file=sys.stderr)
        return 1

    # On a node, since the folder may not be mounted here. What verify finds, it would find again.
    seal = [args.ggshard, "seal", args.out]
    verify = [args.ggshard, "verify", args.out, "--threads", str(args.cpus)]
    for command, retries in ((seal, args.retries), (verify, 0)):
        try:
            print(ray.get(task.options(name=command[1]).remote(command, retries)), flush=True)
        except (Failed, RayError) as error:
            print(f"{command[1]} failed: {cause(error)}", file=sys.stderr)
            return 1
    return 0


def cause(error):
    """Why a task failed, without the traceback that Ray adds."""
    return getattr(error, "cause", None) or error


if __name__ == "__main__":
    sys.exit(main())
