"""deploy/ray/convert.py on a real Ray: what comes out is what one process makes, whatever dies on the way.

Run by `make test-ray`. Each test has a Ray cluster of its own on this machine, of two nodes with two CPUs each.
"""
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

# Before ray is imported: nothing is sent, and nothing is written to the home folder.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "ray" / "convert.py"
MODEL = ROOT / "fixtures" / "models" / "glm_moe_dsa-UD-IQ2_XXS.gguf"
BIN = Path(os.environ.get("GGSHARD_BIN", ROOT / "target" / "release" / "ggshard")).resolve()
TP = 4
LONGEST = 300

# Stands before the program. The first time that rank 2 is made, it is slowed down, and in the middle of its file somebody is
# killed: the Ray worker that started it, or the program itself. A stopped program cannot finish before the shot.
ASSASSIN = """\
#!{python}
import os, signal, sys, time
program, log, out, victim = {program!r}, {log!r}, {out!r}, {victim!r}
command = sys.argv[1:]
if "2" in command and not os.path.exists(log):
    command += ["--tile-size", "64"]
    target, worker = os.getpid(), os.getppid()
    if os.fork() == 0:
        partial = os.path.join(out, "model-rank-2-part-0.safetensors.partial")
        while not os.path.exists(partial):
            time.sleep(0.0005)
        os.kill(target, signal.SIGSTOP)
        with open(log, "w") as file:
            file.write("in the middle" if os.path.exists(partial) else "too late")
        os.kill({{"worker": worker, "ggshard": target}}[victim], signal.SIGKILL)
        os.kill(target, signal.SIGCONT)
        os._exit(0)
os.execv(program, [program, *command])
"""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one process makes of the model."""
    out = tmp_path_factory.mktemp("single") / "out"
    subprocess.run([BIN, "convert", MODEL, out, "--tp", str(TP)], check=True, capture_output=True)
    yield files_of(out)
    shutil.rmtree(out)


@pytest.fixture
def cluster(tmp_path_factory):
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def files_of(folder):
    """{name: bytes} of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def convert(cluster, out, *more, program=BIN, tp=TP):
    command = [sys.executable, SCRIPT, MODEL, out, "--tp", str(tp), "--cpus", "1", "--ggshard", program]
    command += ["--address", cluster.address, *more]
    return subprocess.run([str(arg) for arg in command], capture_output=True, text=True, timeout=LONGEST)


def test_a_group_of_ranks_per_task_gives_what_one_process_gives(cluster, single, tmp_path):
    out = tmp_path / "out"
    done = convert(cluster, out, "--ranks-per-task", "3")
    assert done.returncode == 0, done.stderr
    assert "ranks 0,1,2 are made" in done.stdout and "ranks 3 are made" in done.stdout and "ok: " in done.stdout
    assert files_of(out) == single
    # The same again finds it done.
    assert convert(cluster, out, "--ranks-per-task", "3").returncode == 0
    assert files_of(out) == single


@pytest.mark.parametrize("victim", ["worker", "ggshard"])
def test_whoever_is_killed_in_the_middle_is_replaced(cluster, single, tmp_path, victim):
    out, log, program = tmp_path / "out", tmp_path / "log", tmp_path / "assassin"
    text = ASSASSIN.format(python=sys.executable, program=str(BIN), log=str(log), out=str(out), victim=victim)
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = convert(cluster, out, program=program)
    print(done.stdout, done.stderr)
    assert log.read_text() == "in the middle"
    assert done.returncode == 0, done.stderr
    noticed = {"worker": "the task will be retried", "ggshard": "killed by SIGKILL"}[victim]
    assert noticed in done.stdout + done.stderr
    assert files_of(out) == single


def test_what_cannot_be_made_is_named_and_nothing_is_sealed(cluster, single, tmp_path):
    """A wrong command line is not repeated; ranks that are done stay, and another run goes on with them."""
    out, program = tmp_path / "out", tmp_path / "broken"
    program.write_text(f'#!/bin/sh\ncase "$*" in *"--ranks 1 "*) echo "no rank 1 today" >&2; exit 2;; esac\nexec {BIN} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = convert(cluster, out, program=program)
    assert done.returncode == 1
    assert "ranks 1 failed: no rank 1 today" in done.stderr and "lacks ranks 1: run the same again" in done.stderr
    assert not (out / "ggshard.json").exists() and not (out / "config.json").exists()
    assert len(list(out.glob("*.done"))) == 3
    assert convert(cluster, out).returncode == 0
    assert files_of(out) == single
