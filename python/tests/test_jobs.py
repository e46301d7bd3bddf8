"""inspect, plan, convert and verify: what they give, what they refuse, and how they are stopped."""
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import blake3
import ggshard
import pytest
from conftest import DEEPSEEK, FIXTURES, GLM


def test_inspect_describes_the_file():
    description = ggshard.inspect(GLM)
    assert description["architecture"] == "glm-dsa"
    assert len(description["tensors"]) == sum(part["tensors"] for part in description["parts"])
    assert ggshard.inspect(str(GLM)) == description


def test_plan_says_what_convert_writes(tmp_path):
    plan = ggshard.plan(DEEPSEEK, tp=4, profile="vllm-0.32-cpu", dtype="f16")
    report = ggshard.convert(DEEPSEEK, tmp_path / "out", tp=4, profile="vllm-0.32-cpu", dtype="f16")
    assert plan["tp"] == 4 and plan["dtype"] == "f16" and plan["profile"]["name"] == "vllm-0.32-cpu"
    planned = {name for rank in plan["ranks"] for name, _ in rank["files"]}
    assert report["files"] == len(planned) and all((tmp_path / "out" / name).is_file() for name in planned)
    assert report["tensors"] == 4 * len(plan["tensors"])


def test_choices_reach_the_plan():
    assert ggshard.plan(GLM, tp=1, mtp="drop")["parameters"] < ggshard.plan(GLM, tp=1)["parameters"]
    assert ggshard.plan(GLM, tp=2, profile="vllm-0.32-cpu", ep=True)["expert_parallel"]
    assert ggshard.plan(GLM, tp=1, profile="vllm-0.32-cpu", pp=2)["pp"] == 2
    assert ggshard.plan(GLM, tp=1, mapping="raw")["mapping"]["name"] == "raw"
    assert ggshard.plan(GLM, tp=1, dtype="fp8")["policy"]["name"] == "deepseek-fp8"
    kept = ggshard.plan(DEEPSEEK, tp=2, policy="keep", keep_or="f16")
    assert {"U8", "F16"} < set(kept["ranks"][0]["by_dtype"])
    with pytest.raises(ggshard.GgshardError, match="keep-or"):
        ggshard.plan(DEEPSEEK, tp=2, dtype="keep")


def test_the_same_bytes_whatever_the_threads_and_ranks_one_by_one(tmp_path):
    def files(folder):
        return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}

    ggshard.convert(GLM, tmp_path / "all", tp=2, threads=3)
    for rank in range(2):
        ggshard.convert(GLM, tmp_path / str(rank), tp=2, ranks=[rank], threads=1, seal=True)
    assert files(tmp_path / "all") == files(tmp_path / "0") | files(tmp_path / "1")


def test_ranks_in_one_folder_are_sealed_and_work_goes_on(tmp_path):
    def files(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    ggshard.convert(GLM, tmp_path / "all", tp=2)
    shared = tmp_path / "shared"
    assert not ggshard.convert(GLM, shared, tp=2, ranks=[1])["sealed"]
    with pytest.raises(ggshard.OutputError, match="model-rank-0") as error:
        ggshard.seal(shared)
    assert "--ranks 0" in error.value.remedy
    # Another layout does not mix, and what there is stays.
    with pytest.raises(ggshard.OutputError, match="dtype f32"):
        ggshard.convert(GLM, shared, tp=2, ranks=[0], dtype="f32")
    report = ggshard.convert(GLM, shared, tp=2, resume=True)
    assert (report["files"], report["kept_files"], report["sealed"]) == (2, 1, True)
    assert files(shared) == files(tmp_path / "all")
    assert ggshard.seal(shared)["already"]


def test_digests_of_the_source_are_in_the_manifest(tmp_path):
    ggshard.convert(GLM, tmp_path / "out", tp=2, hash_source=True)
    manifest = json.loads((tmp_path / "out" / "ggshard.json").read_text())
    assert [part["blake3"] for part in manifest["source"]["parts"]] == [blake3.blake3(GLM.read_bytes()).hexdigest()]


@pytest.mark.parametrize("direct", [True, False])
def test_files_written_past_the_page_cache_or_not_are_the_same(tmp_path, direct):
    def files(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    ggshard.convert(GLM, tmp_path / "default", tp=2)
    ggshard.convert(GLM, tmp_path / "chosen", tp=2, direct=direct)
    assert files(tmp_path / "chosen") == files(tmp_path / "default")


def test_verify_finds_nothing_then_a_flipped_byte(tmp_path):
    out = tmp_path / "out"
    ggshard.convert(GLM, out, tp=2, profile="vllm-0.32-cpu")
    report = ggshard.verify(out, source=GLM)
    assert report["ok"] and report["findings"] == [] and report["checks"] == ["folder", "source"]
    damaged = out / "model-rank-1-part-0.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    report = ggshard.verify(out)
    assert not report["ok"] and {f["file"] for f in report["findings"]} == {damaged.name}
    assert ggshard.verify(out, rank=0)["ok"] and not ggshard.verify(out, rank=1)["ok"]


def test_arguments_that_make_no_sense_are_value_errors(tmp_path):
    for wrong in ({"dtype": "bf17"}, {"mtp": "maybe"}, {"tp": 0}, {"pp": 0}, {"ranks": []}):
        with pytest.raises(ValueError, match="expected|at least"):
            ggshard.convert(GLM, tmp_path / "out", **{"tp": 1, **wrong})
    with pytest.raises(ValueError, match="max_rms"):
        ggshard.verify(tmp_path, max_rms=float("nan"))
    with pytest.raises(TypeError):
        ggshard.convert(GLM, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Errors.


def test_errors_say_where_what_and_what_to_do(tmp_path):
    with pytest.raises(ggshard.LayoutError) as caught:
        ggshard.plan(DEEPSEEK, tp=7)
    error = caught.value
    assert error.file == str(DEEPSEEK) and error.tensor == "model.embed_tokens.weight"
    assert "7 ranks" in error.found and error.remedy.endswith("1, 2, 4, 8")
    assert error.key is None and error.offset is None
    assert error.found in str(error) and error.remedy in str(error)


def test_a_missing_file_is_an_os_error_as_well():
    with pytest.raises(OSError) as caught:
        ggshard.inspect("/nowhere.gguf")
    assert type(caught.value) is ggshard.IoError and isinstance(caught.value, ggshard.GgshardError)
    assert caught.value.errno == errno.ENOENT and caught.value.file == "/nowhere.gguf"


@pytest.mark.parametrize(
    "kind, act",
    [
        (ggshard.ContainerError, lambda tmp: ggshard.inspect(FIXTURES / "attacks" / "git-lfs-pointer.gguf")),
        (ggshard.RulesError, lambda tmp: ggshard.plan(GLM, tp=1, profile="no-such-profile")),
        (ggshard.NoMappingError, lambda tmp: ggshard.plan(FIXTURES / "blocks" / "Q4_K.gguf", tp=1)),
        (ggshard.OutputError, lambda tmp: (tmp / "x").touch() or ggshard.convert(GLM, tmp, tp=1)),
        (ggshard.CheckpointError, lambda tmp: ggshard.verify(tmp)),
    ],
)
def test_each_kind_has_its_class(kind, act, tmp_path):
    with pytest.raises(ggshard.GgshardError) as caught:
        act(tmp_path)
    assert type(caught.value) is kind, caught.value


def test_a_truncated_file_and_an_incomplete_set(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(GLM.read_bytes()[:-1])
    with pytest.raises(ggshard.TruncatedError) as caught:
        ggshard.inspect(tmp_path / "cut.gguf")
    assert caught.value.file == str(tmp_path / "cut.gguf") and caught.value.tensor
    part = sorted(DEEPSEEK.iterdir())[0]
    (tmp_path / part.name).write_bytes(part.read_bytes())
    with pytest.raises(ggshard.SplitError):
        ggshard.inspect(tmp_path / part.name)


def test_errors_can_be_pickled():
    for act in (lambda: ggshard.plan(DEEPSEEK, tp=7), lambda: ggshard.inspect("/nowhere.gguf")):
        with pytest.raises(ggshard.GgshardError) as caught:
            act()
        error = caught.value
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
        assert getattr(copy, "errno", None) == getattr(error, "errno", None)


# Progress and interruption.


def test_progress_grows_to_the_whole_on_the_calling_thread(large, tmp_path):
    told = []
    began = time.monotonic()
    ggshard.convert(large, tmp_path / "out", tp=1, mapping="raw", progress=lambda *n: told.append((n, threading.get_ident())))
    lasted = time.monotonic() - began
    numbers, threads = zip(*told)
    assert set(threads) == {threading.get_ident()}
    assert [done for done, _ in numbers] == sorted(done for done, _ in numbers)
    assert len({total for _, total in numbers}) == 1 and numbers[-1][0] == numbers[-1][1]
    assert len(told) <= lasted * 10 + 2


def test_what_progress_raises_ends_the_conversion_and_leaves_nothing(large, tmp_path):
    def stop(done, total):
        assert (tmp_path / "a").exists() and done < total
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        ggshard.convert(large, tmp_path / "a" / "out", tp=1, mapping="raw", threads=1, progress=stop)
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import ggshard, sys
print("ready", flush=True)
try:
    ggshard.convert(sys.argv[1], sys.argv[2], tp=1, mapping="raw", threads=1, progress=lambda *_: print("working", flush=True))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_the_conversion_and_leaves_nothing(large, tmp_path):
    out = tmp_path / "a" / "out"
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, large, out], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n" and process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and rest.endswith("interrupted\n"), rest
    assert list(tmp_path.iterdir()) == []


CHECKED = """
import ggshard, sys
begun = False
def tell(*_):
    global begun
    if not begun:
        print("working", flush=True)
    begun = True
try:
    ggshard.verify(sys.argv[1], source=sys.argv[2], threads=1, progress=tell)
except KeyboardInterrupt:
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("Threads:")))
"""


def test_ctrl_c_ends_a_check_and_its_threads(large, tmp_path):
    ggshard.convert(large, tmp_path / "out", tp=1, mapping="raw")
    process = subprocess.Popen([sys.executable, "-c", CHECKED, tmp_path / "out", large], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and rest == "1\n", rest


def test_what_progress_raises_ends_a_check(large, tmp_path):
    ggshard.convert(large, tmp_path / "out", tp=1, mapping="raw")

    def stop(done, total):
        assert done < total
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        ggshard.verify(tmp_path / "out", source=large, threads=1, progress=stop)


def test_the_interpreter_is_free_meanwhile(large, tmp_path):
    counted = 0
    done = threading.Event()

    def work():
        ggshard.convert(large, tmp_path / "out", tp=1, mapping="raw", threads=1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        counted += 1
        time.sleep(0.001)
    thread.join()
    assert counted > 10


def test_conversions_in_several_threads_do_not_disturb_each_other(tmp_path):
    reports = {}

    def work(i):
        reports[i] = ggshard.convert(GLM, tmp_path / str(i), tp=2)["manifest_blake3"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4 and len(set(reports.values())) == 1


def test_importing_it_imports_nothing_heavy():
    code = f"import sys, ggshard; ggshard.plan({str(GLM)!r}, tp=1); print(*sorted({{'torch', 'numpy', 'ml_dtypes', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == ""
