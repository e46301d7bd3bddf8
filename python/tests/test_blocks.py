"""Low-bit output in memory: kept blocks decoded, against gguf-py's decoders, and output policies in streams of a GGUF."""
import gc
import json
import subprocess
import sys

import ggshard
import gguf
import ml_dtypes
import numpy as np
import pytest
from conftest import DEEPSEEK, GLM, TP
from test_device import double, run  # noqa: F401
from test_tensors import files_of

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


@pytest.fixture(scope="module", params=[GLM, DEEPSEEK], ids=["glm", "deepseek"])
def kept(request, tmp_path_factory):
    """A model on two ranks with its blocks kept where they can be, and the same in bf16."""
    folder = tmp_path_factory.mktemp("kept")
    ggshard.convert(request.param, folder / "keep", tp=TP, dtype="keep", keep_or="bf16")
    ggshard.convert(request.param, folder / "bf16", tp=TP)
    return folder


def opened(folder, rank=0, **options):
    return ggshard.open_rank(folder / "keep", rank, **options)


@pytest.mark.parametrize("rank", range(TP))
def test_blocks_decode_to_what_gguf_py_makes_of_them(kept, rank):
    checkpoint, plain = opened(kept, rank), files_of(kept / "bf16", rank)
    stored = files_of(kept / "keep", rank)
    manifest = json.loads((kept / "keep" / "ggshard.json").read_text())
    types = {p["name"]: p["blocks"] for p in manifest["parameters"] if "blocks" in p}
    assert len(types) > 20
    for name in checkpoint:
        blocks = checkpoint.blocks(name)
        if blocks is None:
            assert name not in types
            continue
        assert isinstance(blocks, ggshard.Blocks) and blocks.type == types[name]
        dtype, shape, data = plain[blocks.weight]
        assert blocks.shape == shape and dtype == ml_dtypes.bfloat16
        rows = np.frombuffer(stored[name][2], np.uint8).reshape(-1, stored[name][1][-1])
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[blocks.type]).reshape(shape)
        for wanted, element in TYPES.items():
            tensor = checkpoint.decode(name, wanted)
            array = tensor.numpy()
            assert (array.dtype, array.shape, tensor.dtype) == (element, shape, wanted.upper())
            assert array.tobytes() == values.astype(element).tobytes(), (name, wanted)
        assert checkpoint.decode(name).tobytes() == data, "bf16, as a conversion writes it"


@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_rank_decoded_is_the_rank_of_a_conversion(kept, rank, threads):
    checkpoint, plain = opened(kept, rank, threads=threads), files_of(kept / "bf16", rank)
    decoded = checkpoint.decoded()
    assert decoded.__length_hint__() == len(checkpoint) == len(plain) and decoded.warnings == []
    found, order = {}, []
    for name, tensor in decoded:
        array = tensor.numpy()
        found[name] = (array.dtype, array.shape, array.tobytes())
        order.append(name)
    assert found == plain and order == list(ggshard.open_rank(kept / "bf16", rank))
    assert decoded.__length_hint__() == 0 and next(decoded, None) is None


def test_what_is_decoded_outlives_its_checkpoint_and_the_rest_is_not_copied(kept):
    checkpoint = opened(kept)
    addresses = {name: tensor.numpy().ctypes.data for name, tensor in checkpoint.items()}
    tensors = dict(checkpoint.decoded("f32"))
    names = {checkpoint.blocks(name).weight if checkpoint.blocks(name) else name: name for name in checkpoint}
    for name, tensor in tensors.items():
        copied = tensor.numpy().ctypes.data != addresses[names[name]]
        assert copied == (name != names[name]), name
    expected = tensors[next(iter(tensors))].tobytes()
    array = tensors[next(iter(tensors))].numpy()
    del checkpoint, tensors, tensor
    gc.collect()
    assert array.tobytes() == expected


def test_what_cannot_be_decoded_is_an_error_of_its_kind(kept):
    checkpoint = opened(kept)
    name = next(name for name in checkpoint if checkpoint.blocks(name))
    for call in (checkpoint.blocks, checkpoint.decode):
        with pytest.raises(KeyError, match="no.such"):
            call("no.such")
    with pytest.raises(ggshard.CheckpointError, match="no such blocks") as caught:
        checkpoint.decode("model.norm.weight")
    assert caught.value.tensor == "model.norm.weight" and checkpoint.blocks("model.norm.weight") is None
    for wrong in (lambda: checkpoint.decode(name, "fp8"), lambda: checkpoint.decoded("keep")):
        with pytest.raises(ValueError, match="dtype"):
            wrong()
    for device in ("gpu", "auto"):
        with pytest.raises(ValueError, match="device"):
            checkpoint.decoded(device=device)
    decoded = checkpoint.decoded()
    next(decoded)
    decoded.close()
    assert next(decoded, None) is None


def test_values_that_are_not_finite_are_refused_unless_allowed(tmp_path):
    ggshard.convert(DEEPSEEK, tmp_path / "out", tp=1, dtype="keep")
    checkpoint = ggshard.open_rank(tmp_path / "out", 0)
    name = next(name for name in checkpoint if (checkpoint.blocks(name) or (0, 0))[1] == "Q4_K")
    weight = checkpoint.blocks(name).weight
    (path,) = (path for path in checkpoint.files)
    data = bytearray(path.read_bytes())
    at = data.index(checkpoint[name].tobytes())
    data[at : at + 2] = np.float16(np.nan).tobytes()
    del checkpoint
    path.write_bytes(data)
    checkpoint = ggshard.open_rank(tmp_path / "out", 0)
    for call in (lambda: checkpoint.decode(name), lambda: dict(checkpoint.decoded())):
        with pytest.raises(ggshard.NonfiniteError, match="256 NaN") as caught:
            call()
        assert caught.value.tensor == weight and "allow_nonfinite" in caught.value.remedy
    assert np.isnan(checkpoint.decode(name, "f32", allow_nonfinite=True).numpy()).sum() == 256
    assert len(dict(checkpoint.decoded(allow_nonfinite=True))) == len(checkpoint)


def test_a_rank_is_decoded_in_the_memory_of_a_device(kept, double):  # noqa: F811
    script = """
import gc, sys, ggshard
for rank in 0, 1:
    kept = ggshard.open_rank(sys.argv[2] + "/keep", rank, threads=2)
    plain = ggshard.open_rank(sys.argv[2] + "/bf16", rank)
    decoded = kept.decoded(device="cuda:1")
    assert decoded.__length_hint__() == len(plain) > 20
    for (name, want), (other, got) in zip(plain.items(), decoded, strict=True):
        assert isinstance(got, ggshard.DeviceTensor) and got.device == "cuda:1"
        assert (name, want.dtype, want.shape) == (other, got.dtype, got.shape)
        assert got.tobytes() == want.tobytes(), name
try:
    kept.decoded(device="cuda:7")
except ggshard.DeviceError as error:
    print(error)
del got, decoded, kept
gc.collect()
"""
    assert "7" in run(script, double, "devices=2", kept)


MEMORY = """
import ggshard, sys
def most():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
checkpoint, peak = ggshard.open_rank(sys.argv[1], 0, threads=2), 0
before = most()
for name, tensor in checkpoint.decoded():
    peak = max(peak, most() - before)
print(peak)
"""


def test_no_more_than_a_tensor_at_a_time_is_in_memory(tmp_path):
    path, columns, rows, count = tmp_path / "large.gguf", 4096, 2048, 12
    writer = gguf.GGUFWriter(path, "large")
    data = np.zeros((rows, columns // 32 * 34), np.uint8)
    for i in range(count):
        writer.add_tensor(f"{i}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ggshard.convert(path, tmp_path / "out", tp=1, mapping="raw", dtype="keep")
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "out"], check=True, capture_output=True, text=True)
    each = columns * rows * 2
    # The one in the consumer's hands and the next, of twelve; and what the C library keeps.
    assert int(done.stdout) < 3 * each + (16 << 20), f"{int(done.stdout)} bytes, each of {each}"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "choice, profile", [(form, profile) for form in ("fp8", "nvfp4", "policy") for profile in ("hf", "vllm-0.32")] + [("keep", "hf")]
)
def test_streams_with_a_policy_are_what_convert_writes(tmp_path, choice, tp, profile):
    rules = tmp_path / "some.toml"
    named = 'weights = ["model.layers.{layer}.self_attn.o_proj.weight"]'
    rules.write_text(f'name = "some"\nversion = 1\nabout = "Few."\n[[rule]]\ndtype = "fp8"\nlayers = "0-1"\n{named}\n')
    options = {
        "fp8": {"dtype": "fp8"},
        "nvfp4": {"dtype": "nvfp4", "nvfp4_search": True},
        "policy": {"dtype": "f16", "policy": rules},
        "keep": {"dtype": "keep", "keep_or": "bf16"},
    }[choice]
    ggshard.convert(GLM, tmp_path / "out", tp=tp, profile=profile, **options)
    for rank in range(tp):
        converted = ggshard.open_rank(tmp_path / "out", rank)
        expected = {name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in converted.items()}
        for threads, memory in [(1, 0), (4, 1 << 30), (4, 0)]:
            layout = dict(tp=tp, rank=rank, profile=profile, set="main", threads=threads, memory=memory)
            weights = ggshard.iter_rank(GLM, **layout, **options)
            found = {name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in weights}
            assert found == expected and list(found) == list(converted)
        if (tp, profile) == (1, "hf"):
            weights = ggshard.iter_weights(GLM, **options)
            assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in weights} == expected
    kinds = {dtype for dtype, _, _ in expected.values()}
    wanted = {"fp8": {"F8_E4M3"}, "nvfp4": {"U8", "F8_E4M3"}, "policy": {"F8_E4M3", "F16"}, "keep": {"U8"}}
    assert wanted[choice] | {"F32"} == kinds - {"BF16"}


def test_policies_that_cannot_be_are_refused():
    layout = dict(tp=1, rank=0)
    for error, part, options in [
        (ggshard.RulesError, "deepseek-fp8", {"dtype": "fp8", "policy": "keep"}),
        (ggshard.RulesError, "no-such", {"policy": "no-such"}),
        (ggshard.LayoutError, "keep", {"dtype": "keep", "profile": "vllm-0.32"}),
        (ggshard.LayoutError, "no effect", {"keep_or": "bf16"}),
        (ValueError, "int4", {"dtype": "int4"}),
        (ValueError, "dtype", {"dtype": "keep", "keep_or": "fp8"}),
    ]:
        with pytest.raises(error, match=part):
            ggshard.iter_rank(GLM, **layout, **options)
