"""Several processes convert ranks into one folder, as on several machines: nothing is lost, nothing is mixed, nobody is let in
twice, and what comes out is what one process makes.

A conversion of tiny tiles on one thread takes about half a second here: long enough to be stopped in the middle of a file.
"""
import os
import shutil
import signal
import subprocess
import time

import gguf
import pytest
from conftest import BIN, GLM, ROOT, files_of, ok, refused, run

TP = 4
SLOW = ("--tile-size", "64", "--threads", "1")
NAMESPACES = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])


def make(out, ranks, *more, source=GLM):
    """The arguments with which every process, on whichever machine, makes its ranks."""
    return ["convert", source, out, "--tp", TP, "--ranks", ranks, "--resume", *more]


def start(*args, before=()):
    command = [*before, BIN, *args]
    return subprocess.Popen([str(arg) for arg in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def file_of(out, rank, ending):
    return out / f"model-rank-{rank}-part-0.safetensors{ending}"


def stop(process, out, rank):
    """Stops a process while it writes the file of a rank."""
    while not file_of(out, rank, ".partial").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.0005)
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and file_of(out, rank, ".partial").exists(), "it was done before it could be stopped"


@pytest.fixture
def working(tmp_path):
    """working(out, ranks): a process that is stopped in the middle of its first rank's file."""
    started = []

    def begin(out, ranks, *more):
        process = start(*make(out, ranks, *SLOW, *more))
        started.append(process)
        stop(process, out, ranks[0])
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def go_on(process):
    process.send_signal(signal.SIGCONT)
    return done(process)


def network_namespace():
    """What starts a program in a network namespace of its own; nothing where that is not permitted."""
    for command in NAMESPACES:
        if shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return None


@pytest.mark.parametrize("where", ["processes", "network namespaces"])
def test_three_at_once_and_one_is_killed(converted, tmp_path, where):
    before = network_namespace() if where == "network namespaces" else []
    if before is None:
        pytest.skip("no network namespace can be made here")
    out = tmp_path / "out"
    first, victim, third = (start(*make(out, ranks, *SLOW), before=before) for ranks in ("0", "1-2", "3"))
    stop(victim, out, 1)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    done(first)
    done(third)

    # What is there is no checkpoint, for us or for a stack that looks for these names.
    assert "no ggshard.json" in refused("verify", out)
    assert not list(out.glob("*.json")) and not list(out.glob("*.safetensors"))
    message = refused("seal", out)
    assert "2 of 4 files are not finished" in message and "--ranks 1,2 --resume" in message

    done(start(*make(out, "1-2"), before=before))
    ok("seal", out)
    ok("verify", out)
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_a_rank_has_one_process(converted, tmp_path, working):
    out = tmp_path / "out"
    holder = working(out, "1")
    before = files_of(out)
    for ranks in ("1", "0-2", "1-3"):
        assert "another process is converting rank 1 into this folder" in refused(*make(out, ranks))
    # Also without --resume, and for all ranks.
    assert "converting rank 1" in refused("convert", GLM, out, "--tp", TP, "--ranks", "1")
    assert "--resume" in refused("convert", GLM, out, "--tp", TP)
    after = files_of(out)
    assert {name: after[name] for name in before} == before
    # The ranks that were refused along with rank 1 are free.
    ok(*make(out, "0"))
    ok(*make(out, "2-3"))
    go_on(holder)
    ok("seal", out)
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_two_that_begin_the_same_rank_at_once(converted, tmp_path):
    """One is refused, or comes when the other is done and finds its work; never both write."""
    for attempt in range(5):
        out = tmp_path / str(attempt)
        processes = [start(*make(out, "0-3", "--tile-size", "4K", "--threads", "1")) for _ in range(2)]
        ended = [(process.communicate(timeout=300)[1], process.returncode) for process in processes]
        assert 0 in [status for _, status in ended], ended
        for message, status in ended:
            assert status == 0 or status == 1 and "another process is converting rank 0 into this folder" in message, message
        assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_a_folder_is_not_sealed_while_one_works(converted, tmp_path, working):
    out = tmp_path / "out"
    ok(*make(out, "0-1"))
    ok(*make(out, "3"))
    holder = working(out, "2")
    message = refused("seal", out)
    assert "another process is converting rank 2 into this folder" in message
    assert not (out / "ggshard.json").exists() and not (out / "config.json").exists()
    go_on(holder)
    ok("seal", out)
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))
    # Once more changes nothing, nor does a process that comes too late.
    assert "sealed before" in ok("seal", out)
    ok(*make(out, "2"))
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_other_choices_are_refused_and_nothing_is_lost(converted, tmp_path, working):
    out, other, rules = tmp_path / "out", tmp_path / "other.gguf", tmp_path / "rules.toml"
    ok(*make(out, "0"))
    holder = working(out, "1")
    before = files_of(out)
    rules.write_text((ROOT / "mappings" / "models" / "glm_moe_dsa.toml").read_text() + "\n# Changed.\n")
    other.write_bytes(GLM.read_bytes())
    for arguments, what in [
        (["convert", GLM, out, "--tp", 8, "--ranks", 2, "--resume"], "topology is tp 8"),
        (make(out, 2, "--dtype", "f32"), "policy is dtype f32"),
        (make(out, 2, "--mtp", "drop"), "policy is dtype bf16, mtp drop"),
        (make(out, 2, "--part-size", "1M"), "part-size 1048576"),
        (make(out, 2, "--profile", "vllm-0.32"), "profile is vllm-0.32"),
        (make(out, 2, "--mapping", "raw"), "mapping is raw"),
        (make(out, 2, "--mapping", rules), "mapping is glm_moe_dsa"),
        (make(out, 2, source=other), "source is other.gguf"),
    ]:
        message = refused(*arguments)
        assert what in message and "the conversion which began here" in message
    # Each of them took rank 2's lock for a moment; locks stay.
    after = {name: data for name, data in files_of(out).items() if not name.endswith("rank-2.lock")}
    assert after == before
    go_on(holder)
    ok(*make(out, "2-3"))
    ok("seal", out)
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_the_source_must_stay_the_same(converted, tmp_path):
    """A touched file and a copy are taken for the source on request; the same model quantized anew never is."""
    out, source = tmp_path / "out", tmp_path / GLM.name
    shutil.copy(GLM, source)
    ok(*make(out, "0", source=source))
    before = files_of(out)

    os.utime(source, ns=(0, source.stat().st_mtime_ns + 10**9))
    message = refused(*make(out, "1", source=source))
    assert f"'{GLM.name}' is not the file that the conversion began with" in message and "say --same-source" in message
    ok(*make(out, "1", "--same-source", source=source))

    copy = tmp_path / "copy" / GLM.name
    copy.parent.mkdir()
    shutil.copy2(source, copy)
    assert "say --same-source" in refused(*make(out, "2", source=copy))
    ok(*make(out, "2", "--same-source", source=copy))

    # Same header, same size, other values: the lowest bit of every byte of data.
    again = tmp_path / "again" / GLM.name
    again.parent.mkdir()
    data = GLM.read_bytes()
    begin = gguf.GGUFReader(GLM).data_offset
    again.write_bytes(data[:begin] + bytes(byte ^ 1 for byte in data[begin:]))
    for more in ([], ["--same-source"]):
        message = refused(*make(out, "3", *more, source=again))
        assert "the same bytes at 64 sampled places" in message and "the same quantized again" in message

    assert {name: data for name, data in files_of(out).items() if name in before} == before
    ok(*make(out, "3", "--same-source", source=copy))
    ok("seal", out)
    assert files_of(out) == files_of(converted(GLM, "--tp", TP))


def test_some_ranks_alone(converted, tmp_path):
    """--seal and `seal --ranks` make a checkpoint of some ranks, if no others are in the folder."""
    alone, sealed = tmp_path / "alone", tmp_path / "sealed"
    ok(*make(alone, "1-2", "--seal"))
    ok(*make(sealed, "1"))
    ok(*make(sealed, "2"))
    ok("seal", sealed, "--ranks", "1-2")
    assert files_of(alone) == files_of(sealed)
    ok("verify", alone)
    whole = files_of(converted(GLM, "--tp", TP))
    for name, data in files_of(alone).items():
        assert name in ("ggshard.json", "B3SUMS") or data == whole[name]

    out = tmp_path / "out"
    ok(*make(out, "0-1"))
    message = refused("seal", out, "--ranks", "1")
    assert "also holds 'model-rank-0-part-0.safetensors', of rank 0" in message
    assert "--ranks names rank 4 of 4" in refused("seal", out, "--ranks", "4")
    assert run("convert", GLM, tmp_path / "none", "--tp", TP, "--seal").returncode == 2
    assert "no conversion has begun" in refused("seal", tmp_path)
