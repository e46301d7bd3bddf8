"""Measuring programs by turns, on a machine that may be a virtual one and may not be ours alone.

Two things ruin such measurements more than any other, and both are taken care of here:

- **Memory that the host has taken back.** In many virtual machines free pages go back to the host within seconds, and a page
  that has to be fetched again costs several times as much as one that has not. `warm` touches memory before each turn.
- **Other programs.** A turn begins when they rest, and is repeated if one of them used the CPUs meanwhile: more than
  `DISTURBED` of a CPU in user mode, beyond what the measured program used.
"""
import mmap
import os
import re
import statistics
import subprocess
import threading
import time
from pathlib import Path

POPULATE_WRITE = 23  # of Linux 5.14, which Python has no name for
DISTURBED = 0.1
TRIES = 8
PATIENCE = 300  # seconds that a turn waits for other programs to rest

repeated = 0  # turns that were disturbed, and taken again


def spread(values):
    """Median, least and most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def warm(size):
    """Has the host give this machine memory, which is free again at the end."""
    if size:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(POPULATE_WRITE)


def user_seconds():
    """CPU seconds in user mode of all programs since the start of the machine."""
    user, nice = Path("/proc/stat").read_text().split()[1:3]
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    """The same of this program and all children that have ended."""
    return sum(os.times()[i] for i in (0, 2))


def rest():
    """Waits until other programs rest."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        before = user_seconds()
        time.sleep(0.5)
        if user_seconds() - before <= 0.5 * DISTURBED:
            return
        time.sleep(1)


def turn(work, prepare=lambda: None, memory=0):
    """What `work` returns, of a turn that nothing disturbed, or of the last one. `prepare` comes before each."""
    global repeated
    for _ in range(TRIES):
        prepare()
        rest()
        warm(memory)
        before, began = user_seconds() - own_seconds(), time.monotonic()
        result = work()
        others = user_seconds() - own_seconds() - before
        if others <= DISTURBED * (time.monotonic() - began) + 0.02:
            break
        repeated += 1
    return result


def run(command, watch=None, discard=False):
    """Wall and CPU seconds of a program, and what it printed. `watch` is called with its process id, on another thread."""
    began = time.perf_counter()
    out = subprocess.DEVNULL if discard else subprocess.PIPE
    child = subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.PIPE)
    errors = []
    threads = [threading.Thread(target=lambda: errors.append(child.stderr.read()))]
    if watch:
        threads.append(threading.Thread(target=watch, args=(child.pid,)))
    for thread in threads:
        thread.start()
    said = b"" if discard else child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    for thread in threads:
        thread.join()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"failed with {child.returncode}: {' '.join(map(str, command))}\n{errors[0].decode()}")
    return wall, usage.ru_utime + usage.ru_stime, said.decode()


def run_watched(command, every):
    """Wall and CPU seconds, and the most anonymous memory in MiB of all looks. Mapped files are the page cache's, and do not count."""
    most = [0]

    def watch(process):
        while held := anonymous(process):
            most[0] = max(most[0], held)
            time.sleep(every)

    wall, cpu, _ = run(command, watch)
    return wall, cpu, most[0] / 1024


def anonymous(process):
    """KiB of anonymous memory, or 0 for a process that is gone."""
    try:
        held = re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.M)
    except OSError:
        return 0
    return int(held[1]) if held else 0
