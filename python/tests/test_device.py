"""CUDA devices, by a test double of the driver's library; what it is, tests/cuda/driver.cpp says."""
import os
import subprocess
import sys
from pathlib import Path

import ggshard
import pytest
from conftest import GLM

DOUBLE = Path(__file__).resolve().parents[2] / "tests" / "cuda" / "driver.cpp"


@pytest.fixture(scope="session")
def double(tmp_path_factory):
    """A folder with a library of the driver's name."""
    folder = tmp_path_factory.mktemp("double")
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run([os.environ.get("CXX", "c++"), *options, "-o", folder / "libcuda.so", DOUBLE], check=True)
    return folder


def run(script, library, settings="devices=2", *arguments):
    """Runs a script in a process that finds ``library``; gives what it printed."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "GGSHARD_DOUBLE": settings}
    command = [sys.executable, "-B", "-c", script, str(GLM), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_on_a_device_has_the_bytes_of_the_host(double):
    script = """
import gc, sys, ggshard
layout = dict(tp=2, rank=1, profile="vllm-0.32")
host = list(ggshard.iter_rank(sys.argv[1], **layout))
there = ggshard.iter_rank(sys.argv[1], **layout, device="cuda:1")
assert there.__length_hint__() == len(host) > 10
for (name, want), (other, got) in zip(host, there, strict=True):
    assert isinstance(got, ggshard.DeviceTensor) and got.device == "cuda:1" and got.data_ptr
    assert (name, want.dtype, want.shape, want.nbytes) == (other, got.dtype, got.shape, got.nbytes)
    assert got.tobytes() == want.tobytes(), name
    assert got.__dlpack_device__() == (2, 1)
    for capsule in got.__dlpack__(stream=2), got.__dlpack__(max_version=(1, 0)):
        assert "dltensor" in repr(capsule)
    for wrong in dict(copy=True), dict(dl_device=(1, 0)):
        try:
            got.__dlpack__(**wrong)
        except BufferError:
            continue
        raise AssertionError(wrong)
del got, capsule, there
gc.collect()
print("done")
"""
    assert run(script, double) == "done\n"


def test_a_conversion_on_a_device_has_the_bytes_of_the_host(double, tmp_path):
    script = """
import sys, ggshard
from pathlib import Path
for device in "cpu", "cuda:0,1":
    ggshard.convert(sys.argv[1], Path(sys.argv[2], device), tp=2, device=device)
"""
    run(script, double, f"devices=2,report={tmp_path / 'report'}", tmp_path)
    assert "launch" in (tmp_path / "report").read_text()
    files = {path.name: path.read_bytes() for path in (tmp_path / "cpu").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "cuda:0,1").iterdir()}


def test_a_device_that_fails_or_is_absent_is_a_device_error(double, tmp_path):
    script = """
import sys, ggshard
try:
    for _ in ggshard.iter_rank(sys.argv[1], tp=1, rank=0, device="cuda"): pass
except ggshard.DeviceError as error:
    print(error)
"""
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in run(script, double, "launch=5")
    assert "finds no device" in run(script, double, "devices=0")
    (tmp_path / "libcuda.so").write_text("no library")
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert "is not installed" in run(script, tmp_path)


def test_devices_that_there_are_not_are_value_errors(tmp_path):
    for device in "gpu", "cuda:", "cuda:x", "cuda:-1", "auto", "":
        with pytest.raises(ValueError, match="device"):
            ggshard.iter_rank(GLM, tp=1, rank=0, device=device)
    with pytest.raises(ValueError, match="no device"):
        ggshard.convert(GLM, tmp_path / "out", tp=1, device="gpu")
