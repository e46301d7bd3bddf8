"""Opening a rank, iterating over weights, and handing tensors to other libraries without a copy."""
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Mapping

import ggshard
import ml_dtypes
import numpy as np
import pytest
from conftest import DEEPSEEK, GLM, TP
from safetensors import safe_open

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def files_of(folder, rank):
    """{name: (dtype, shape, bytes)} of a rank, read by the official library."""
    found = {}
    for path in sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():
                array = file.get_tensor(name)
                found[name] = (array.dtype, array.shape, array.tobytes())
    return found


@pytest.mark.parametrize("rank", range(TP))
def test_a_rank_holds_what_its_files_hold(folder, rank):
    checkpoint = ggshard.open_rank(folder, rank, verify=True)
    expected = files_of(folder, rank)
    assert set(checkpoint) == set(expected) and len(checkpoint) == len(expected)
    for name, tensor in checkpoint.items():
        dtype, shape, data = expected[name]
        array = tensor.numpy()
        assert (array.dtype, array.shape, array.tobytes()) == (dtype, shape, data), name
        assert array.dtype == NUMPY[tensor.dtype] and tensor.shape == shape
        assert tensor.nbytes == len(data) and tensor.tobytes() == data
    assert checkpoint.nbytes == sum(len(data) for _, _, data in expected.values())


def test_a_rank_is_a_mapping_and_says_what_it_is(folder):
    checkpoint = ggshard.open_rank(folder, 1)
    assert isinstance(checkpoint, Mapping)
    assert list(checkpoint.keys()) == list(checkpoint) == checkpoint.names()
    assert len(list(checkpoint.values())) == len(checkpoint)
    assert "nothing" not in checkpoint and checkpoint.get("nothing") is None
    with pytest.raises(KeyError, match="nothing"):
        checkpoint["nothing"]
    assert (checkpoint.rank, checkpoint.tp, checkpoint.pp, checkpoint.stage) == (1, TP, 1, None)
    assert checkpoint.profile == "vllm-0.32-cpu" and not checkpoint.expert_parallel and checkpoint.dtype == "bf16"
    assert checkpoint.model_class == "GlmMoeDsaForCausalLM" and checkpoint.dir == folder
    assert any("sharded_state" in line for line in checkpoint.launch)
    assert [path.name for path in checkpoint.files] == ["model-rank-1-part-0.safetensors"]
    assert checkpoint.plan_digest == ggshard.open_rank(folder, 0).plan_digest
    assert "rank 1 of 2" in repr(checkpoint)
    assert checkpoint.prefetch() > checkpoint.nbytes


def test_the_wrong_launch_is_refused(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    checkpoint.expect(TP, 1, "vllm-0.32-cpu")
    with pytest.raises(ggshard.CheckpointError, match="number of ranks") as caught:
        checkpoint.expect(4, 1, "vllm-0.32-cpu")
    assert "--tp 4" in caught.value.remedy
    with pytest.raises(ggshard.CheckpointError, match="rank 2"):
        ggshard.open_rank(folder, 2)
    with pytest.raises(ValueError, match="main"):
        ggshard.open_rank(folder, 0, set="other")


def test_the_draft_model_is_opened_by_name(folder):
    draft, main = ggshard.open_rank(folder, 0, set="draft"), ggshard.open_rank(folder, 0)
    assert any(".mtp_block." in name for name in draft) and not any(".mtp_block." in name for name in main)


def test_damage_is_found_when_asked_for(tmp_path):
    ggshard.convert(GLM, tmp_path / "out", tp=1, profile="vllm-0.32-cpu")
    path = tmp_path / "out" / "model-rank-0-part-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ggshard.open_rank(tmp_path / "out", 0)
    with pytest.raises(ggshard.CheckpointError, match="BLAKE3"):
        ggshard.open_rank(tmp_path / "out", 0, verify=True)
    path.write_bytes(data[:-1])
    with pytest.raises(ggshard.CheckpointError):
        ggshard.open_rank(tmp_path / "out", 0)


# Without a copy.


def mapped(path):
    """The address ranges at which this process has a file mapped."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[-1] == str(path)]


def test_arrays_are_read_only_views_of_the_mapped_file_and_outlive_everything_else(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    (path,) = (p.resolve() for p in checkpoint.files)
    name = next(iter(checkpoint))
    expected = checkpoint[name].tobytes()
    array = checkpoint.numpy(name)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    del checkpoint
    gc.collect()
    assert any(start <= array.ctypes.data < end for start, end in mapped(path))
    assert array.tobytes() == expected
    del array
    gc.collect()
    assert mapped(path) == []


def test_dlpack_without_a_copy_and_read_only(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    name = next(n for n in checkpoint if checkpoint[n].dtype == "F32" and checkpoint[n].shape)
    tensor = checkpoint[name]
    array = np.from_dlpack(tensor)
    assert array.ctypes.data == tensor.numpy().ctypes.data and not array.flags.writeable
    assert np.array_equal(array, tensor.numpy()) and tensor.__dlpack_device__() == (1, 0)
    copy = np.from_dlpack(tensor, copy=True)
    assert copy.ctypes.data != array.ctypes.data and np.array_equal(copy, array)
    del tensor, checkpoint
    gc.collect()
    assert array.sum() == copy.sum()


def test_capsules_are_freed_when_nobody_takes_them(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    (path,) = (p.resolve() for p in checkpoint.files)
    tensor = checkpoint[next(iter(checkpoint))]
    capsules = [tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0)), tensor.__dlpack__(copy=True)]
    assert "dltensor" in repr(capsules[0]) and "dltensor_versioned" in repr(capsules[1])
    del checkpoint, tensor, capsules
    gc.collect()
    assert mapped(path) == []


def test_dlpack_refuses_what_it_cannot_do(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    tensor = checkpoint[next(iter(checkpoint))]
    for keywords in ({"dl_device": (2, 0)}, {"stream": 1}):
        with pytest.raises(BufferError):
            tensor.__dlpack__(**keywords)


def test_asarray_gives_the_elements(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    name = next(n for n in checkpoint if checkpoint[n].dtype == "BF16")
    assert np.asarray(checkpoint[name]).dtype == ml_dtypes.bfloat16
    assert np.asarray(checkpoint[name], dtype=np.float32).dtype == np.float32


def test_without_ml_dtypes_bf16_comes_as_its_bits(folder):
    code = f"""
import sys
sys.modules["ml_dtypes"] = None
import ggshard
checkpoint = ggshard.open_rank({str(folder)!r}, 0)
tensor = next(t for t in checkpoint.values() if t.dtype == "BF16")
array = tensor.numpy()
assert array.dtype == "uint16" and array.shape == tensor.shape and array.tobytes() == tensor.tobytes()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Weights on the fly.


def test_a_rank_on_the_fly_is_what_convert_writes(folder):
    for rank in range(TP):
        found = {}
        for name, tensor in ggshard.iter_rank(GLM, tp=TP, rank=rank, profile="vllm-0.32-cpu", set="main"):
            array = tensor.numpy()
            found[name] = (array.dtype, array.shape, array.tobytes())
        assert found == files_of(folder, rank)
        assert list(found) == list(ggshard.open_rank(folder, rank))


def test_weights_have_their_original_names():
    planned = ggshard.plan(DEEPSEEK, tp=1)["tensors"]
    weights = ggshard.iter_weights(DEEPSEEK)
    assert len(list(itertools.islice(weights, 1))) == 1
    rest = list(weights)
    assert [name for name, _ in rest] == [t["name"] for t in planned][1:]
    assert [(t.dtype, list(t.shape)) for _, t in rest] == [(t["dtype"], t["shape"]) for t in planned][1:]


def test_options_of_weights():
    name = "model.norm.weight"
    [(found, tensor)] = ggshard.iter_weights(DEEPSEEK, names=[name], dtype="f32")
    assert found == name and tensor.dtype == "F32"
    with pytest.raises(ggshard.LayoutError, match="nonsense"):
        ggshard.iter_weights(DEEPSEEK, names=["nonsense"])
    with pytest.raises(ValueError, match="dtype"):
        ggshard.iter_weights(DEEPSEEK, dtype="int4")
    with pytest.raises(ggshard.LayoutError, match="rank"):
        ggshard.iter_rank(DEEPSEEK, tp=2, rank=2)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_consumer_may_stop_half_way(memory):
    before = threads()
    for end in ("drop", "close"):
        weights = ggshard.iter_weights(GLM, memory=memory, threads=3)
        name, tensor = next(weights)
        if end == "close":
            weights.close()
            assert next(weights, None) is None
        del weights
        gc.collect()
        assert threads() == before
        assert tensor.numpy().shape == tensor.shape, "what was delivered stays"


def threads():
    """Threads of this process, as the system counts them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_several_threads_share_one_iterator_and_one_rank(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    weights = ggshard.iter_rank(GLM, tp=TP, rank=0, profile="vllm-0.32-cpu", set="main", memory=1 << 20)
    seen, wrong = [], []

    def work():
        for name, tensor in weights:
            seen.append(name)
            if tensor.numpy().tobytes() != checkpoint.numpy(name).tobytes():
                wrong.append(name)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(seen) == sorted(checkpoint) and wrong == []


def test_an_error_half_way_comes_once(tmp_path):
    damaged = bytearray(GLM.read_bytes())
    norm = next(t for t in ggshard.inspect(GLM)["tensors"] if t["name"] == "output_norm.weight")
    damaged[norm["offset"] : norm["offset"] + 4] = np.float32(np.nan).tobytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    weights = ggshard.iter_weights(path)
    with pytest.raises(ggshard.NonfiniteError) as caught:
        for _ in weights:
            pass
    assert caught.value.tensor == "model.norm.weight" and "output_norm.weight" in caught.value.found
    assert next(weights, None) is None
    assert len(list(ggshard.iter_weights(path, allow_nonfinite=True))) == ggshard.plan(path, tp=1)["parameters"]
