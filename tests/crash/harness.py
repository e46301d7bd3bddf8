#!/usr/bin/env python3
"""What a crash, a full disk, a lost permission or a source that changes leaves behind, at every point of a conversion.

    harness.py --bin target/release/ggshard [--every N] [--only FAULT,…]

Two conversions: of a model of many weights to bf16, and of one of few to nvfp4, with a file for each tensor, so that a weight,
the scales of its blocks and that of the weight itself are finished, or not, one by one.

A library that is loaded into the program (fault.c) kills, stops or fails it at the N-th call that changes a file system.
A first run without a fault lists those calls; then one run for each of them (or every N-th) dies there. After each run:

* the source has the bytes that it had;
* nothing in the folder passes for a checkpoint that is not one, by the names that loaders look for;
* convert --resume (or seal) finishes it, and the folder is byte for byte that of an undisturbed run.

Prints a table: conversion, phase and fault → runs, resumed, identical. Ends with status 1 if any run is not.
"""
import argparse
import collections
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent.parent / "fixtures" / "models" / "glm_moe_dsa-UD-IQ2_XXS.gguf"
NOBODY = 65534


class Conversion(NamedTuple):
    """What is converted, and how. The source is made by a function that gets its path; `alone` says that every tensor gets a
    file of its own."""

    source: Callable
    options: list
    alone: bool


def few_weights(path):
    """A GGUF of three tensors of f32, for the mapping nvfp4.toml."""
    text = lambda t: struct.pack("<Q", len(t)) + t.encode()
    tensors = {"gate": (512, 64), "down": (256, 128), "norm": (64,)}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    header += text("general.architecture") + struct.pack("<I", 8) + text("crash")
    numbers, data = random.Random(1), b""
    for name, shape in tensors.items():
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, len(data))
        values = [numbers.gauss(0, 0.02) for _ in range(math.prod(shape))]
        data += struct.pack(f"<{len(values)}f", *values)
    path.write_bytes(header + bytes(-len(header) % 32) + data)


# Small parts, so that there are several; one thread, so that calls come in the same order each time.
CONVERSIONS = {
    "bf16": Conversion(lambda path: shutil.copy(FIXTURE, path),
                       ["--tp", "2", "--profile", "vllm-0.32", "--part-size", "4M", "--threads", "1", "--tile-size", "128K"],
                       alone=False),
    "nvfp4": Conversion(few_weights,
                        ["--tp", "2", "--mapping", str(HERE / "nvfp4.toml"), "--dtype", "nvfp4", "--part-size", "32",
                         "--threads", "1", "--tile-size", "4K"],
                        alone=True),
}


def build(folder):
    """The library for LD_PRELOAD."""
    library = Path(folder) / "fault.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "fault.c", "-ldl"], check=True)
    return library


def phase_of(call, path, out):
    """The phase of a conversion that a call belongs to."""
    name = os.path.relpath(path, out)
    if path == str(out) or name.startswith(".."):
        return "begin" if call != "fsync" else "commit"
    if name.startswith("ggshard.work"):
        base = os.path.basename(name)
        if call in ("unlink", "rmdir"):
            return "clean up"
        return "finish a part" if base.startswith(("receipt", "source")) else "begin"
    if ".safetensors" in name and not name.endswith(".json"):
        if call == "rename":
            return "finish a part" if name.endswith(".done") else "commit"
        return "write parts" if call in ("open", "pwrite", "mkdir") else "finish a part"
    if name.startswith("ggshard.json"):
        return "manifest"
    if name in ("mtp",):
        return "write parts" if call == "mkdir" else "commit"
    return "config and sums"


class Unavailable(Exception):
    """A fault that this machine does not allow to be made."""


class Harness:
    def __init__(self, program, work, conversion, every=1):
        self.options = conversion.options
        self.program, self.work, self.every = str(Path(program).resolve()), Path(work), every
        self.library = build(work)
        self.source = self.work / "source.gguf"
        conversion.source(self.source)
        self.source_digest = digest(self.source)
        self.baseline = self.work / "undisturbed"
        self.convert_ok(self.baseline)
        self.expected = files_of(self.baseline)
        files = json.loads((self.baseline / "ggshard.json").read_text())["files"]
        assert all(len(file["tensors"]) == 1 for file in files) == conversion.alone
        self.rows = collections.OrderedDict()
        self.failures = []
        self.count = 0

    # Runs.

    def command(self, out, *more):
        return [self.program, "convert", str(self.source), str(out), *self.options, *more]

    def run(self, command, stop=None, user=None, **fault):
        """Runs a command under a fault. `stop` is called when it has stopped itself. Gives status and stderr."""
        env = {**os.environ, "LD_PRELOAD": str(self.library)}
        names = {"fault": "FAULT", "at": "FAULT_AT", "log": "FAULT_LOG", "short": "FAULT_SHORT"}
        env.update({names[key]: str(value) for key, value in fault.items()})
        child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, user=user,
                                 extra_groups=[] if user else None, group=user)
        if stop:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                try:
                    stop()
                finally:
                    os.kill(child.pid, signal.SIGCONT)
            else:
                child.returncode = os.waitstatus_to_exitcode(status)
        errors = child.stderr.read()
        child.stderr.close()
        child.wait()
        return child.returncode, errors

    def convert_ok(self, out, *more):
        done = subprocess.run(self.command(out, *more), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def calls(self, command, out):
        """The calls of a command that change a file system: (number, phase)."""
        log = self.work / "calls"
        log.unlink(missing_ok=True)
        status, errors = self.run(command, log=log)
        assert status == 0, errors
        calls = [line.split(" ", 2) for line in log.read_text().splitlines()]
        return [(int(n), phase_of(call, path, out)) for n, call, path in calls]

    def points(self, calls):
        """Every N-th call of each phase, and its first and last."""
        by_phase = collections.OrderedDict()
        for n, phase in calls:
            by_phase.setdefault(phase, []).append(n)
        for phase, numbers in by_phase.items():
            wanted = set(numbers[:: self.every]) | {numbers[0], numbers[-1]}
            yield from ((phase, n) for n in sorted(wanted))

    # Checks.

    def note(self, phase, fault, problem=None, resumed=True):
        row = self.rows.setdefault((phase, fault), [0, 0, 0])
        row[0] += 1
        row[1] += bool(resumed and not problem)
        row[2] += not problem
        if problem:
            self.failures.append(f"{phase}, {fault}: {problem}")
            print(self.failures[-1], file=sys.stderr)

    def check_left(self, out):
        """What is wrong with what is left, or None."""
        if digest(self.source) != self.source_digest:
            return "the source was changed"
        return passes_wrongly(out, self.expected, self.program)

    def finish(self, phase, fault, out, *commands):
        """Runs the commands that finish the work, compares, and notes the outcome."""
        problem = self.check_left(out)
        for command in commands:
            if problem:
                break
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                problem = f"{' '.join(command[1:3])} … does not finish it: {done.stderr.strip()}"
        problem = problem or differs(out, self.expected)
        self.note(phase, fault, problem)
        shutil.rmtree(out, ignore_errors=True)

    def out(self):
        self.count += 1
        return self.work / f"out-{self.count}"

    def resume(self, out):
        return self.command(out, "--resume")

    # Faults.

    def kill_convert(self):
        out = self.out()
        calls = self.calls(self.command(out), out)
        shutil.rmtree(out)
        for phase, n in self.points(calls):
            out = self.out()
            status, errors = self.run(self.command(out), at=n, fault="kill")
            if status != -signal.SIGKILL:
                self.note(phase, "kill", f"call {n}: status {status}, {errors}")
                continue
            self.finish(phase, "kill", out, self.resume(out))

    def kill_resume(self):
        """Two crashes: the second one while it resumes."""
        first = self.out()
        calls = self.calls(self.command(first), first)
        middle = [n for n, phase in calls if phase == "finish a part"][-4]
        late = [n for n, phase in calls if phase == "config and sums"][4]
        for crash in (middle, late):
            begun = self.out()
            self.run(self.command(begun), at=crash, fault="kill")
            copy = self.out()
            shutil.copytree(begun, copy)
            again = self.calls(self.resume(copy), copy)
            for phase, n in self.points(again):
                out = self.out()
                shutil.copytree(begun, out)
                status, errors = self.run(self.resume(out), at=n, fault="kill")
                if status != -signal.SIGKILL:
                    self.note(f"resume: {phase}", "kill", f"call {n}: status {status}, {errors}")
                    continue
                self.finish(f"resume: {phase}", "kill", out, self.resume(out))

    def kill_seal(self):
        ranks = self.out()
        for rank in ("0", "1"):
            self.convert_ok(ranks, "--ranks", rank)
        copy = self.out()
        shutil.copytree(ranks, copy)
        seal = lambda out: [self.program, "seal", str(out)]
        for i, (phase, n) in enumerate(self.points(self.calls(seal(copy), copy))):
            out = self.out()
            shutil.copytree(ranks, out)
            status, errors = self.run(seal(out), at=n, fault="kill")
            if status != -signal.SIGKILL:
                self.note(f"seal: {phase}", "kill", f"call {n}: status {status}, {errors}")
                continue
            # Either command finishes it.
            self.finish(f"seal: {phase}", "kill", out, seal(out) if i % 2 else self.resume(out))

    def kill_verify(self):
        out = self.out()
        shutil.copytree(self.baseline, out)
        for i in range(20):
            child = subprocess.Popen([self.program, "verify", str(out), "--source", str(self.source)],
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                child.wait(0.002 * i)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            problem = self.check_left(out) or differs(out, self.expected)
            self.note("verify", "kill", problem)
        shutil.rmtree(out)

    def fail(self, name, error, kind="from"):
        """From one call on everything fails, or one call fails; then the cause is gone and the work is resumed."""
        out = self.out()
        calls = self.calls(self.command(out), out)
        shutil.rmtree(out)
        for phase, n in self.points(calls):
            out = self.out()
            status, errors = self.run(self.command(out), at=n, fault=f"{kind}:{error}")
            problem = None
            # Once the manifest is there, only synchronizing it may fail, and the removal of what is not needed any more.
            if status < 0 or (status == 0 and not (out / "ggshard.json").exists()):
                problem = f"call {n}: status {status}, {errors}"
            elif status > 0 and os.strerror(error) not in errors:
                problem = f"call {n}: the reason is not told: {errors}"
            if problem:
                self.note(phase, name, problem)
                shutil.rmtree(out, ignore_errors=True)
                continue
            self.finish(phase, name, out, self.resume(out))

    def stopped(self, name, points, action, undo, user=None, prepare=None, out_of=None, status_of=lambda s: s > 0, text=""):
        """The program stops at a call, something real happens to the file system, and it goes on."""
        for phase, n in points:
            out = (out_of or self.out)()
            if prepare:
                prepare(out)
            status, errors = self.run(self.command(out), at=n, fault="stop", user=user, stop=lambda: action(out))
            problem = None if status_of(status) and text in errors else f"call {n}: status {status}, {errors}"
            if not problem:
                problem = passes_wrongly(out, self.expected, self.program)
            undo(out)
            if problem:
                self.note(phase, name, problem)
                shutil.rmtree(out, ignore_errors=True)
                continue
            self.finish(phase, name, out, self.resume(out))

    def sample(self, count):
        """A few points of each phase before the manifest is there."""
        out = self.out()
        calls = self.calls(self.command(out), out)
        shutil.rmtree(out)
        by_phase = collections.OrderedDict()
        for n, phase in calls[1:]:
            by_phase.setdefault(phase, []).append(n)
        by_phase.pop("clean up")
        for phase, numbers in by_phase.items():
            for i in range(min(count, len(numbers) - 1)):
                yield phase, numbers[(len(numbers) - 1) * i // count]

    def full_disk(self):
        """A real tmpfs that something else fills while the program is stopped."""
        mount = self.work / "tmpfs"
        mount.mkdir()
        mounted("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mount)
        filler = mount / "filler"

        def fill(_):
            file = os.open(filler, os.O_WRONLY | os.O_CREAT)
            try:
                while True:
                    os.write(file, bytes(1 << 16))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            finally:
                os.close(file)

        def out_of():
            self.count += 1
            return mount / f"out-{self.count}"

        try:
            points = [(phase, n) for phase, n in self.sample(4) if phase != "commit"]
            # What only renames and synchronizes needs no space: it may finish.
            self.stopped("full disk (tmpfs)", points, fill, lambda _: filler.unlink(), out_of=out_of,
                         status_of=lambda status: status >= 0)
        finally:
            subprocess.run(["umount", mount], check=True)

    def permissions(self):
        """An unprivileged user whose folder loses its write permission, and gets it back."""
        self.work.chmod(0o755)
        readable = [self.work, *self.work.parents]
        if os.geteuid() == 0 and not all(path.stat().st_mode & 1 for path in readable):
            raise Unavailable(f"an unprivileged user cannot reach {self.work}")

        def prepare(out):
            out.mkdir()
            if os.geteuid() == 0:
                os.chown(out, NOBODY, NOBODY)

        def mode(bits):
            def change(out):
                for folder in [out, *(path for path in out.rglob("*") if path.is_dir())]:
                    folder.chmod(bits)
            return change

        user = NOBODY if os.geteuid() == 0 else None
        self.stopped("no permission", self.sample(4), mode(0o555), mode(0o755), user=user, prepare=prepare,
                     status_of=lambda status: status >= 0)

    def read_only(self):
        """An output on a mount that is read-only: nothing happens, and nothing is needed afterwards."""
        there, mount = self.work / "writable", self.work / "read-only"
        there.mkdir()
        mount.mkdir()
        mounted("mount", "--bind", there, mount)
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", mount], check=True)
            done = subprocess.run(self.command(mount / "out"), capture_output=True, text=True)
            problem = None if done.returncode == 1 and "Read-only" in done.stderr else f"{done.returncode} {done.stderr}"
            self.note("begin", "read-only mount", problem or (any(there.iterdir()) and "something was written") or None)
        finally:
            subprocess.run(["umount", mount], check=True)

    def source_shrinks(self):
        """The source becomes shorter while it is read, and then is as it was."""
        whole = self.source.read_bytes()

        def shrink(_):
            os.truncate(self.source, 4096)

        def restore(_):
            with self.source.open("r+b") as file:
                file.write(whole)

        points = [(phase, n) for phase, n in self.sample(8) if phase in ("write parts", "finish a part")]
        for io in ("mmap", "pread"):
            for phase, n in points:
                out = self.out()
                command = self.command(out, "--io", io)
                status, errors = self.run(command, at=n, fault="stop", stop=lambda: shrink(out))
                # The last bytes may have been read before.
                told = status == 1 and "source.gguf" in errors
                problem = None if told or (status == 0 and not differs(out, self.expected)) else f"call {n}: {status} {errors}"
                problem = problem or passes_wrongly(out, self.expected, self.program)
                restore(out)
                fault = f"source shrinks ({io})"
                if problem:
                    self.note(phase, fault, problem)
                    continue
                if (out / "ggshard.work" / "record.json").exists():
                    # It has another time now, so it must be said that it is the same.
                    done = subprocess.run(self.resume(out), capture_output=True, text=True)
                    if done.returncode != 1 or "--same-source" not in done.stderr:
                        self.note(phase, fault, f"call {n}: a changed source was taken: {done.stderr}")
                        continue
                self.finish(phase, fault, out, [*self.resume(out), "--same-source"])

    def source_vanishes(self):
        """The source's name goes while it is read: what was opened is read to the end."""
        elsewhere = self.work / "elsewhere.gguf"
        points = [(phase, n) for phase, n in self.sample(4) if phase in ("write parts", "finish a part")]
        self.stopped("source vanishes", points, lambda _: self.source.rename(elsewhere),
                     lambda _: elsewhere.rename(self.source), status_of=lambda status: status == 0)

    def short_transfers(self):
        """Reads and writes that do a part of what they were asked for, or end with EINTR."""
        for io in ("mmap", "pread"):
            out = self.out()
            status, errors = self.run(self.command(out, "--io", io), short=1)
            problem = differs(out, self.expected) if status == 0 else errors
            self.note("whole run", f"short reads and writes ({io})", problem)
            shutil.rmtree(out, ignore_errors=True)


def table(harnesses):
    """What came out, of all conversions."""
    rows = [(name, phase, fault, *row) for name, harness in harnesses.items() for (phase, fault), row in harness.rows.items()]
    lines = ["| conversion | phase | fault | runs | resumed | identical |", "|---|---|---|--:|--:|--:|"]
    lines += ["| {} | {} | {} | {} | {} | {} |".format(*row) for row in rows]
    total = [sum(row[3 + i] for row in rows) for i in range(3)]
    return "\n".join([*lines, "| all | | | {} | {} | {} |".format(*total)])


def mounted(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"no file system can be mounted here: {done.stderr.strip()}")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_of(folder):
    return {str(p.relative_to(folder)): digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def differs(out, expected):
    found = files_of(out) if out.exists() else {}
    if found == expected:
        return None
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"not the folder of an undisturbed run: {names}"


def passes_wrongly(out, expected, program):
    """Whether something passes for a checkpoint that is none. Loaders look for config.json or an index, then take every
    file of a pattern; we look for the manifest."""
    if not out.exists():
        return None
    found = files_of(out)
    loadable = {name for name in found if name.endswith((".safetensors", ".bin", ".pt"))}
    if any(found[name] != expected.get(name) for name in loadable):
        return "weights under a final name are not those of an undisturbed run"
    weights = {name for name in expected if name.endswith(".safetensors")}
    entrances = [name for name in found if name.endswith(("config.json", ".index.json", "B3SUMS"))
                 and not name.startswith("ggshard.work")]
    if entrances and not weights <= loadable:
        return f"{entrances} beside incomplete weights"
    if "ggshard.json" in found:
        checked = subprocess.run([program, "verify", str(out)], capture_output=True, text=True)
        if checked.returncode != 0 or any(found.get(name) != expected[name] for name in expected):
            return f"a manifest beside other files than it should be: {checked.stdout}"
    return None


FAULTS = {
    "kill": Harness.kill_convert,
    "kill-resume": Harness.kill_resume,
    "kill-seal": Harness.kill_seal,
    "kill-verify": Harness.kill_verify,
    "enospc": lambda harness: harness.fail("ENOSPC", errno.ENOSPC),
    "enospc-once": lambda harness: harness.fail("ENOSPC, once", errno.ENOSPC, "once"),
    "eio": lambda harness: harness.fail("EIO, once", errno.EIO, "once"),
    "erofs": lambda harness: harness.fail("EROFS", errno.EROFS),
    "full-disk": Harness.full_disk,
    "permissions": Harness.permissions,
    "read-only": Harness.read_only,
    "source-shrinks": Harness.source_shrinks,
    "source-vanishes": Harness.source_vanishes,
    "short": Harness.short_transfers,
}
# These mount file systems.
PRIVILEGED = {"full-disk", "read-only"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", required=True)
    parser.add_argument("--every", type=int, default=1, help="take every N-th point of each phase")
    parser.add_argument("--only", help="faults, separated by commas: " + ", ".join(FAULTS))
    a = parser.parse_args()
    harnesses = {}
    for conversion, what in CONVERSIONS.items():
        with tempfile.TemporaryDirectory() as work:
            harnesses[conversion] = harness = Harness(a.bin, work, what, a.every)
            for name in a.only.split(",") if a.only else FAULTS:
                if name in PRIVILEGED and os.geteuid() != 0:
                    print(f"{conversion}, {name}: not run, only root mounts file systems", file=sys.stderr)
                    continue
                try:
                    FAULTS[name](harness)
                except Unavailable as reason:
                    print(f"{conversion}, {name}: not run, {reason}", file=sys.stderr)
                    continue
                print(f"{conversion}, {name}: {len(harness.failures)} failures so far", file=sys.stderr)
    print(table(harnesses))
    return 1 if any(harness.failures for harness in harnesses.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
