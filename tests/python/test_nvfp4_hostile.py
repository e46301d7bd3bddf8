"""What nobody vouches for, where nvfp4 reads it: scales of activations, weights of strange values, profiles and policies. A typed
error in words or the right bytes, and always an end."""
import json
import os
import signal
import struct
import subprocess
import time

import gguf
import numpy as np
import pytest
from blake3 import blake3
from conftest import BIN, FIXTURES, GLM, ok, refused
from gguf_files import readers, tiny
from low_bits import same, tensors
from make_encode_fixtures import nvfp4 as encode
from test_hostile import within

LLAMA = FIXTURES / "families" / "llama.gguf"
MOE = FIXTURES / "families" / "mixtral.gguf"


# Scales of activations from a checkpoint.


def entry(begin, end, dtype="F32", shape=()):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def safetensors(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def scales(values):
    return safetensors({name: entry(4 * i, 4 * i + 4) for i, name in enumerate(values)}, np.array(list(values.values()), "<f4").tobytes())


MAPPING = """
name = "one"
extends = "common"
class = "OneForCausalLM"
[[weight]]
name = "a.weight"
shape = [{rows}, {cols}]
cut = "column"
from = {{ gguf = "a.weight" }}
"""
ONE_RULE = 'name = "x"\nabout = "x"\n[[rule]]\ndtype = "nvfp4"\n'
LAYERS, EXPERTS = 2, 4
NAMES = [f"model.layers.{layer}.self_attn.{part}_proj.input_scale" for layer in range(LAYERS) for part in "qkvo"]
NAMES += [
    f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.input_scale"
    for layer in range(LAYERS) for expert in range(EXPERTS) for part in ("w1", "w2", "w3")
]
GOOD = {name: 0.5 + i / 64 for i, name in enumerate(NAMES)}
ONE = NAMES[0]
BROKEN = {
    "nothing": b"",
    "cut-in-the-header": scales(GOOD)[:100],
    "cut-in-the-data": scales(GOOD)[:-2],
    "more-than-the-tensors": scales(GOOD) + b"\0",
    "a-header-of-2-to-the-63": safetensors({}, length=1 << 63),
    "a-header-of-gigabytes": safetensors({}, length=3 << 30),
    "no-json": safetensors(b"{'x'}"),
    "arrays-in-arrays": safetensors(b'{"x.input_scale":' + b"[" * 100_000),
    "a-gguf": MOE.read_bytes()[:4096],
    "zeros": bytes(4096),
    "no-scales": scales({"lm_head.weight": 1.0}),
    "bf16": safetensors({ONE: entry(0, 2, "BF16")}, bytes(2)),
    "two-values": safetensors({ONE: entry(0, 8, shape=[2])}, bytes(8)),
    "no-values": safetensors({ONE: entry(0, 0, shape=[0])}),
    "no-values-of-a-shape-that-overflows": safetensors({ONE: entry(0, 0, shape=[1 << 40, 1 << 40, 0])}),
    "twice-in-a-file": safetensors(f'{{"{ONE}":{json.dumps(entry(0, 4))},"{ONE}":{json.dumps(entry(4, 8))}}}'.encode(), bytes(8)),
    "nan": scales(GOOD | {ONE: np.nan}),
    "infinite": scales(GOOD | {ONE: np.inf}),
    "zero": scales(GOOD | {ONE: 0.0}),
    "negative": scales(GOOD | {ONE: -1.0}),
    "one-is-lacking": scales({name: value for name, value in GOOD.items() if name != ONE}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_scales_of_activations_are_refused(case, tmp_path):
    path = tmp_path / "given.safetensors"
    path.write_bytes(BROKEN[case])
    said = within("plan", MOE, "--tp", 1, "--dtype", "nvfp4", "--input-scales", path, status=(1,)).stderr
    assert str(path) in said, said
    if len(BROKEN[case]) > 4 and ONE.encode() in BROKEN[case] and not case.startswith(("cut", "more")):
        assert ONE in said, said


def test_places_that_hold_no_scales(tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "with-a-pipe").mkdir()
    os.mkfifo(tmp_path / "with-a-pipe" / "a.safetensors")
    (tmp_path / "with-a-folder" / "a.safetensors").mkdir(parents=True)
    (tmp_path / "with-a-loop").mkdir()
    (tmp_path / "with-a-loop" / "a.safetensors").symlink_to("a.safetensors")
    (tmp_path / "twice").mkdir()
    for name in "ab":
        (tmp_path / "twice" / f"{name}.safetensors").write_bytes(scales(GOOD))
    for place in ("empty", "pipe", "with-a-pipe", "with-a-folder", "with-a-loop", "twice", "absent"):
        said = within("plan", MOE, "--tp", 1, "--dtype", "nvfp4", "--input-scales", tmp_path / place, status=(1,)).stderr
        assert str(tmp_path / place) in said, said
    within("plan", MOE, "--tp", 1, "--dtype", "nvfp4", "--input-scales", "/dev/zero", status=(1,))


def test_a_folder_of_thousands_of_tensors(tmp_path):
    """Of which most are not looked at, and those that no weight needs may be anything: they are not in the manifest either."""
    given = tmp_path / "given"
    given.mkdir()
    for i in range(8):
        others = {f"other.{i}.{j}.input_scale": [np.nan, np.inf, 0, -1, 1][j % 5] for j in range(2000)}
        (given / f"{i}.safetensors").write_bytes(scales(others))
    (given / "x.safetensors").write_bytes(scales(GOOD))
    within("convert", MOE, tmp_path / "out", "--tp", 1, "--dtype", "nvfp4", "--input-scales", given, status=(0,))
    within("verify", tmp_path / "out", "--source", MOE, status=(0,))
    manifest = json.loads((tmp_path / "out" / "ggshard.json").read_text())
    assert manifest["policy"]["input_scales"] == GOOD
    found = tensors(tmp_path / "out")
    assert {name: float(found[name]) for name in NAMES} == GOOD


# Scales of activations from the source.


def stem(name):
    return name.removesuffix(".weight")


def is_encoded(tensor):
    return any(part in tensor for part in ("attn_q.", "attn_k.", "attn_v.", "attn_output.", "ffn_gate", "ffn_up", "ffn_down")) and "inp" not in tensor


def with_inputs(target, change=lambda name, values: values, source=MOE):
    """The model with a scale beside every weight that is encoded, one for each expert of stacks."""
    added = {}
    for reader in readers(source):
        for tensor in reader.tensors:
            if tensor.name.endswith(".weight") and is_encoded(tensor.name):
                count = int(tensor.shape[2]) if len(tensor.shape) == 3 else 1
                values = change(tensor.name, np.arange(1, count + 1, dtype=np.float32) / 8 + len(added))
                if values is not None:
                    added[f"{stem(tensor.name)}.input_scale"] = values
    return append(source, target, added), added


def append(source, target, added, gone=()):
    """A model with further tensors, or others in the place of those of the same name."""
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for key, field in fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.name not in added and tensor.name not in gone:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)
    for name, array in added.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def in_a_model(name, added):
    """The scale that the source has for the weight whose scale has this name."""
    parts = name.split(".")
    block = f"blk.{parts[2]}"
    if "experts" in name:
        file = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}[parts[6]]
        values = added[f"{block}.{file}.input_scale"]
        return values[int(parts[5]) if len(values) > 1 else 0]
    file = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}[parts[4]]
    return added[f"{block}.{file}.input_scale"][0]


@pytest.mark.parametrize("experts", ["each", "all"])
def test_scales_of_activations_from_the_source(experts, tmp_path):
    """Of stacks one for each expert, or one for all."""
    source, added = with_inputs(tmp_path / "x.gguf", lambda _, values: values if experts == "each" else values[:1])
    flags = ("--dtype", "nvfp4", "--input-scales", "source")
    for profile in ("hf", "vllm-0.32"):
        within("convert", source, tmp_path / profile, "--tp", 1, *flags, "--profile", profile, status=(0,))
        within("verify", tmp_path / profile, "--source", source, status=(0,))
    found = tensors(tmp_path / "hf")
    assert {name: found[name] for name in NAMES} == {name: in_a_model(name, added) for name in NAMES}
    joined = next(array for name, array in tensors(tmp_path / "vllm-0.32").items() if ".1." in name and name.endswith("w13_input_scale"))
    expected = [[in_a_model(f"model.layers.1.block_sparse_moe.experts.{e}.{part}.input_scale", added) for part in ("w1", "w3")] for e in range(EXPERTS)]
    assert same(joined, np.array(expected, np.float32))
    # The weights are those of a conversion without scales of activations.
    ok("convert", MOE, tmp_path / "plain", "--tp", 1, "--dtype", "nvfp4")
    plain, found = tensors(tmp_path / "plain"), tensors(tmp_path / "hf")
    assert set(found) == set(plain) | set(NAMES) and all(same(found[name], plain[name]) for name in plain)


WRONG_BESIDE = {
    "another-type": (lambda name, values: values.astype(np.float16), "F16"),
    "whole-numbers": (lambda name, values: values.astype(np.int32), "I32"),
    "too-few": (lambda name, values: values[:-1] if len(values) > 1 else values, "1 or 4 F32"),
    "half-as-many": (lambda name, values: values[::2], "1 or 4 F32"),
    "too-many": (lambda name, values: np.repeat(values, 2), "1 F32"),
    "one-for-each-row": (lambda name, values: np.ones(64, np.float32) if "attn_k" in name else values, "1 F32"),
    "nan": (lambda name, values: values * np.float32(np.nan), "NaN"),
    "negative": (lambda name, values: -values, "is -"),
    "zero": (lambda name, values: values * 0, "is 0"),
    "one-is-lacking": (lambda name, values: None if name == "blk.1.ffn_up_exps.weight" else values, "no scale of the activations of 'model.layers.1."),
}


@pytest.mark.parametrize("case", WRONG_BESIDE)
def test_wrong_scales_in_the_source_are_refused(case, tmp_path):
    change, expected = WRONG_BESIDE[case]
    source, _ = with_inputs(tmp_path / "x.gguf", change)
    said = within("plan", source, "--tp", 1, "--dtype", "nvfp4", "--input-scales", "source", status=(1,)).stderr
    assert str(source) in said and expected in said and "input_scale" in said, said
    # Where they are not asked for, they are nobody's business.
    within("plan", source, "--tp", 1, "--dtype", "nvfp4", status=(0,))


def test_a_header_alone_has_no_scales(tmp_path):
    source, _ = with_inputs(tmp_path / "x.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[:4000])
    for source in (cut, source):
        done = within("plan", source, "--header-only", "--tp", 1, "--dtype", "nvfp4", "--input-scales", "source")
        assert done.returncode == 0 or str(source) in done.stderr


def test_fused_experts_have_the_scale_of_their_expert(tmp_path):
    """gate and up in one tensor: those of expert 1 are its third and fourth parts, but their scale is the second."""
    stacks = {t.name: t for t in gguf.GGUFReader(GLM).tensors if "_exps.weight" in t.name}
    fused = {}
    for block in {name.split(".")[1] for name in stacks}:
        pair = [stacks[f"blk.{block}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        values = [gguf.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape))) for t in pair]
        fused[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(values, 1).astype(np.float32)
        fused[f"blk.{block}.ffn_gate_up_exps.input_scale"] = np.arange(1, len(values[0]) + 1, dtype=np.float32) + 100 * int(block)
    source = append(GLM, tmp_path / "x.gguf", fused, [name for name in stacks if "down" not in name])
    names = [f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")]
    (tmp_path / "p.toml").write_text(f"{ONE_RULE}weights = {json.dumps(names)}")
    within("convert", source, tmp_path / "out", "--tp", 2, "--policy", tmp_path / "p.toml", "--input-scales", "source", status=(0,))
    found = {name: value for name, value in tensors(tmp_path / "out", 1).items() if name.endswith("input_scale")}
    assert len(found) == 2 * sum(len(values) for name, values in fused.items() if name.endswith("input_scale"))
    assert all(value == int(name.split(".")[5]) + 1 + 100 * int(name.split(".")[2]) for name, value in found.items())


# Weights of strange values.

def values_of(kind, shape, rng):
    normal = rng.standard_normal(shape).astype(np.float32)
    return {
        "zeros": np.zeros(shape, np.float32),
        "negative-zeros": np.full(shape, -0.0, np.float32),
        "one-value": np.where(np.arange(np.prod(shape)).reshape(shape) == 17, np.float32(1e-3), np.float32(0)),
        "subnormal": rng.integers(1, 1 << 22, shape).astype(np.uint32).view(np.float32),
        "the-smallest": np.full(shape, np.uint32(1).view(np.float32)),
        "the-largest": np.where(normal > 0, np.finfo(np.float32).max, -np.finfo(np.float32).max).astype(np.float32),
        "all-sizes": (normal * np.exp2(rng.integers(-140, 120, shape))).astype(np.float32),
        "2-to-the-100": normal * np.float32(2**100),
        "normal": normal,
    }[kind]


KINDS = ("zeros", "negative-zeros", "one-value", "subnormal", "the-smallest", "the-largest", "all-sizes", "2-to-the-100", "normal")


def strange(target, gate, up, down):
    rng = np.random.default_rng(3)
    added = {f"blk.0.ffn_{part}.weight": values_of(kind, (32, 48) if part == "down" else (48, 32), rng) for part, kind in (("gate", gate), ("up", up), ("down", down))}
    append(LLAMA, target, added)
    return {f"model.layers.0.mlp.{part}_proj.weight": added[f"blk.0.ffn_{part}.weight"] for part in ("gate", "up", "down")}


def check(found, truth, search):
    gate, up, down = truth
    for name in truth:
        largest = max(np.abs(truth[other]).max() for other in ((gate, up) if name != down else (down,)))
        scale_2 = np.float32(1) if largest == 0 else max(largest / np.float32(2688), np.float32(2**-117))
        assert found[f"{name}_scale_2"] == scale_2, name
        expected = encode_shared(truth[name], scale_2, search)
        np.testing.assert_array_equal(found[f"{name}_scale"].view(np.uint8), expected["scales"], name)
        np.testing.assert_array_equal(found[name], expected["codes"], name)


def encode_shared(values, scale_2, search=False):
    """The oracle takes weights of zeros to be alone."""
    if values.any():
        return encode(values, scale_2, search)
    zeros = encode(values)
    signs = np.signbit(values).astype(np.uint8) * 8
    assert (zeros["codes"] == (signs[:, 0::2] | signs[:, 1::2] << 4)).all()
    return zeros


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("up", KINDS)
def test_strange_values_are_encoded_as_the_oracle_does(up, search, tmp_path):
    truth = strange(tmp_path / "x.gguf", "normal", up, up)
    within("convert", tmp_path / "x.gguf", tmp_path / "out", "--tp", 1, "--dtype", "nvfp4", *(["--nvfp4-search"] if search else []), status=(0,))
    check(tensors(tmp_path / "out"), truth, search)
    within("verify", tmp_path / "out", "--source", tmp_path / "x.gguf", status=(0,))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_or_spoils_its_block_alone(value, tmp_path):
    source = tmp_path / "x.gguf"
    truth = strange(source, "normal", "normal", "normal")
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {f"blk.0.ffn_{part}.weight": truth[f"model.layers.0.mlp.{part}_proj.weight"].copy() for part in ("gate", "up", "down")}
    weights["blk.0.ffn_up.weight"][5, 20] = value
    append(LLAMA, source, weights)
    (tmp_path / "p.toml").write_text(ONE_RULE + 'weights = ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]')
    flags = ("--tp", 2, "--policy", tmp_path / "p.toml")
    line = refused("convert", source, tmp_path / "no", *flags)
    assert "blk.0.ffn_up.weight" in line and "--allow-nonfinite" in line and not (tmp_path / "no" / "ggshard.json").exists(), line
    done = within("convert", source, tmp_path / "out", *flags, "--allow-nonfinite", status=(0,))
    assert name in done.stderr, done.stderr
    largest = np.abs(np.where(np.isfinite(weights["blk.0.ffn_up.weight"]), weights["blk.0.ffn_up.weight"], 0)).max()
    scale_2 = max(largest, np.abs(truth["model.layers.0.mlp.gate_proj.weight"]).max()) / np.float32(2688)
    expected = encode(truth[name], scale_2)
    for rank in range(2):
        found = tensors(tmp_path / "out", rank)
        assert found[f"{name}_scale_2"] == scale_2
        for what, held in (("codes", found[name]), ("scales", found[f"{name}_scale"].view(np.uint8))):
            wanted = expected[what][rank * 24:(rank + 1) * 24]
            spoilt = np.zeros_like(wanted, bool)
            if rank == 0:
                spoilt[5, wanted.shape[1] // 2:] = True
            np.testing.assert_array_equal(held[~spoilt], wanted[~spoilt])
    within("verify", tmp_path / "out", "--source", source, status=(0,))


@pytest.mark.parametrize("rows,cols", [(1, 16), (3, 16), (1, 48), (0, 16)])
def test_weights_of_a_block_or_few(rows, cols, tmp_path):
    values = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)
    source = tiny(tmp_path / "x.gguf", "one", {"a.weight": values})
    (tmp_path / "m.toml").write_text(MAPPING.format(rows=rows, cols=cols))
    (tmp_path / "p.toml").write_text(ONE_RULE)
    flags = ("--mapping", tmp_path / "m.toml", "--policy", tmp_path / "p.toml")
    done = within("convert", source, tmp_path / "out", "--tp", 1, *flags)
    if rows == 0:
        assert done.returncode == 1 or tensors(tmp_path / "out")["a.weight"].shape == (0, cols // 2)
        return
    assert done.returncode == 0, done.stderr
    found, expected = tensors(tmp_path / "out"), encode(values)
    assert found["a.weight_scale_2"] == expected["scale_2"][0]
    np.testing.assert_array_equal(found["a.weight"], expected["codes"])
    np.testing.assert_array_equal(found["a.weight_scale"].view(np.uint8), expected["scales"])


# Profiles, policies, manifests.

PROFILE = 'name = "mine"\nversion = 1\nextends = "vllm-0.32"\nabout = "x"\nchecked = "x"\n'
ALL_GATES = '"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"'
PROFILES = {
    "together-with-nothing": "[[together]]\nweights = []",
    "together-with-one": f"[[together]]\nweights = [{ALL_GATES}]",
    "together-twice": f"[[together]]\nweights = [{ALL_GATES}, {ALL_GATES}]\n" * 2,
    "together-by-any-numbers": '[[together]]\nweights = ["model.layers.*.mlp.experts.*.gate_proj.weight"]',
    "together-in-a-chain": '[[together]]\nweights = ["model.layers.{layer}.mlp.experts.*.gate_proj.weight"]\n[[together]]\nweights = ["model.layers.*.mlp.experts.{expert}.down_proj.weight", "model.layers.*.mlp.experts.{expert}.up_proj.weight"]',
    "together-without-a-pattern": '[[together]]\nweights = ["{", "}{", "{layer"]',
    "together-with-a-variable-twice": '[[together]]\nweights = ["model.layers.{a}.mlp.experts.{a}.gate_proj.weight"]',
    "together-by-a-thousand-rules": f"[[together]]\nweights = [{ALL_GATES}]\n" * 1024,
    "together-by-too-many": f"[[together]]\nweights = [{ALL_GATES}]\n" * 1025,
    "together-and-more": '[[together]]\nweights = ["a"]\nmore = 1',
    "scales-of-another-word": '[nvfp4]\ntensor_scales = "vector"',
    "scales-of-a-number": "[nvfp4]\ntensor_scales = 4",
    "a-word-that-nvfp4-has-not": "[nvfp4]\nblock = 32",
    "scalars-without-inputs": '[nvfp4]\ntensor_scales = "scalar"\ninput_scales = false',
    "formats-that-do-not-exist": 'formats = ["nvfp4", "fp4"]',
    "formats-again-and-again": 'formats = ["nvfp4"' + ', "nvfp4"' * 10_000 + "]",
    "no-formats": "formats = []",
}


@pytest.mark.parametrize("case", PROFILES)
def test_absurd_profiles(case, tmp_path):
    (tmp_path / "mine.toml").write_text(PROFILE + PROFILES[case])
    done = within("convert", GLM, tmp_path / "out", "--tp", 2, "--dtype", "nvfp4", "--profile", tmp_path / "mine.toml")
    if done.returncode == 0:
        within("verify", tmp_path / "out", "--source", GLM, status=(0,))


CONDITION = """
[[layout]]
name = "mine"
classes = ["*"]
verbatim = {verbatim}
[[layout.constant]]
names = ["{{block}}extra_scale"]
after = "model.layers.{{layer}}.input_layernorm.weight"
value = {value}
when = {when}
"""
CONDITIONS = ("'nvfp4'", "'nvfp4 and nvfp4'", "'fp8 * 9'", "'nvfp4 / fp8'", "'not'", "'nvfp5'", "''", "'" + "(" * 5000 + "'", "'has(nvfp4)'", "1", "true", "['nvfp4']", "'" + "nvfp4 + " * 20_000 + "1'")


@pytest.mark.parametrize("when", CONDITIONS, ids=range(len(CONDITIONS)))
def test_absurd_conditions_of_constants(when, tmp_path):
    for verbatim, value in (("true", "1"), ("false", "nan"), ("false", "1e400")):
        (tmp_path / "mine.toml").write_text(PROFILE + CONDITION.format(verbatim=verbatim, value=value, when=when))
        within("plan", GLM, "--tp", 2, "--dtype", "nvfp4", "--profile", tmp_path / "mine.toml")


def rules(*rules):
    return 'name = "x"\nabout = "x"\n' + "".join(f"[[rule]]\n{rule}\n" for rule in rules)


EXPERTS_OF = 'weights = ["model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"]'
POLICIES = {
    "another-class-alone": (1, rules('dtype = "nvfp4"\nclasses = ["NoSuchForCausalLM", ""]')),
    "the-class-and-its-experts": (0, rules(f'dtype = "nvfp4"\nclasses = ["X", "GlmMoeDsaForCausalLM"]\n{EXPERTS_OF}')),
    "the-block-for-multi-token-prediction": (0, rules(f'dtype = "nvfp4"\nmtp = true\n{EXPERTS_OF}')),
    "the-others": (0, rules(f'dtype = "nvfp4"\nmtp = false\n{EXPERTS_OF}')),
    "mtp-by-another-word": (1, rules('dtype = "nvfp4"\nmtp = "true"')),
    "classes-that-are-no-list": (1, rules('dtype = "nvfp4"\nclasses = "GlmMoeDsaForCausalLM"')),
    "half-of-a-pair": (0, rules('dtype = "nvfp4"\nweights = ["model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]')),
    "every-matrix": (0, rules('dtype = "nvfp4"')),
    "every-weight": (1, rules('dtype = "nvfp4"\nweights = ["model.layers.*.input_layernorm.weight"]')),
    "both-for-one": (0, rules(f'dtype = "fp8"\nlayers = "0"\n{EXPERTS_OF}', f'dtype = "nvfp4"\n{EXPERTS_OF}')),
    "fp8-experts-beside": (1, rules(f'dtype = "fp8"\nlayers = "1"\n{EXPERTS_OF}', f'dtype = "nvfp4"\nlayers = "2"\n{EXPERTS_OF}')),
    "kept-beside": (0, rules('dtype = "keep"\nweights = ["model.layers.*.mlp.experts.*.down_proj.weight"]', f'dtype = "nvfp4"\n{EXPERTS_OF}')),
}


@pytest.mark.parametrize("case", POLICIES)
def test_policies_of_classes_and_blocks(case, tmp_path):
    status, text = POLICIES[case]
    (tmp_path / "p.toml").write_text(text)
    within("convert", GLM, tmp_path / "out", "--tp", 1, "--policy", tmp_path / "p.toml", status=(status,))
    if status == 0:
        within("verify", tmp_path / "out", "--source", GLM, status=(0,))
    # One parameter has one form.
    if case == "half-of-a-pair":
        said = within("plan", GLM, "--tp", 1, "--policy", tmp_path / "p.toml", "--profile", "vllm-0.32", status=(1,)).stderr
        assert "which are one parameter" in said


def forged(folder, change):
    """The manifest of a folder, changed and sealed again as whoever forges one would."""
    path = folder / "ggshard.json"
    manifest = json.loads(path.read_text())
    manifest.pop("digest")
    change(manifest)
    body = json.dumps(manifest)[:-1] + ',\n"digest":"'
    digest = blake3((body + "0" * 64 + '"\n}\n').encode()).hexdigest()
    path.unlink()
    path.write_text(body + digest + '"\n}\n')


def put(**more):
    return lambda manifest: manifest["policy"].update(more)


FORGED = {
    "none": put(input_scales={}),
    "one-less": lambda manifest: manifest["policy"]["input_scales"].pop(ONE),
    "another-value": lambda manifest: manifest["policy"]["input_scales"].update({ONE: 3.0}),
    "one-beyond-f32": lambda manifest: manifest["policy"]["input_scales"].update({ONE: 1e300}),
    "one-that-is-tiny": lambda manifest: manifest["policy"]["input_scales"].update({ONE: 1e-300}),
    "one-that-is-negative": lambda manifest: manifest["policy"]["input_scales"].update({ONE: -1.0}),
    "one-that-is-no-number": lambda manifest: manifest["policy"]["input_scales"].update({ONE: None}),
    "a-list": put(input_scales=[1.0]),
    "many-more": lambda manifest: manifest["policy"]["input_scales"].update({f"x.{i}.input_scale": 1.0 for i in range(50_000)}),
    "a-search-that-was-none": put(nvfp4_search=True),
    "without-a-policy": lambda manifest: manifest["policy"].pop("rules"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_scales_of_activations(case, tmp_path):
    (tmp_path / "given.safetensors").write_bytes(scales(GOOD))
    ok("convert", MOE, tmp_path / "out", "--tp", 1, "--dtype", "nvfp4", "--input-scales", tmp_path / "given.safetensors")
    forged(tmp_path / "out", FORGED[case])
    said = within("verify", tmp_path / "out", "--source", MOE, status=(0, 1) if case == "many-more" else (1,))
    assert said.stdout or said.stderr


# Ends: one worker may wait for a scale that another finds.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model whose gate and up take a while to measure."""
    path = tmp_path_factory.mktemp("large") / "x.gguf"
    rows, cols = 8192, 8192
    values = np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32)
    return tiny(path, "one", {"a.weight": values}), rows, cols


def rule_files(folder, rows, cols):
    (folder / "m.toml").write_text(MAPPING.format(rows=rows, cols=cols))
    (folder / "p.toml").write_text(ONE_RULE)
    return ("--mapping", folder / "m.toml", "--policy", folder / "p.toml")


@pytest.mark.parametrize("after", [0.02, 0.1, 0.3])
def test_a_signal_while_a_scale_is_sought_ends_it(after, large, tmp_path):
    source, rows, cols = large
    command = [BIN, "convert", source, tmp_path / "out", "--tp", 1, *rule_files(tmp_path, rows, cols), "--threads", 8, "--tile-size", 4096, "--resume"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    out, said = process.communicate(timeout=20)
    assert time.monotonic() - start < 10 and process.returncode in (0, 130, -signal.SIGINT) and "panicked" not in said, said


def test_a_source_that_ends_early_ends_it(large, tmp_path):
    source, rows, cols = large
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes())
    flags = ("--tp", 1, *rule_files(tmp_path, rows, cols), "--threads", 8, "--tile-size", 4096, "--io", "pread")
    process = subprocess.Popen([BIN, "convert", cut, tmp_path / "out", *map(str, flags)], stderr=subprocess.PIPE, text=True)
    time.sleep(0.15)
    os.truncate(cut, 100_000_000)
    _, said = process.communicate(timeout=30)
    assert process.returncode in (0, 1) and "panicked" not in said, said
    assert process.returncode == 0 or str(cut) in said, said
