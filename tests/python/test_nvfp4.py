"""Weights in nvfp4: every code and every scale against an encoder in numpy and ml_dtypes, which knows nothing of ours; cuts of them;
and what goes beside them so that stacks know."""
import json
import re
import struct

import low_bits
import ml_dtypes
import numpy as np
import pytest
from conftest import DEEPSEEK, FIXTURES, GLM, MODELS, ok, refused, run
from low_bits import NUMPY, cut, header, held_bytes, joined, same, tensors
from make_encode_fixtures import nvfp4 as encode

E2M1 = ml_dtypes.float4_e2m1fn
LLAMA = FIXTURES / "families" / "llama.gguf"

# What NVIDIA's checkpoints of DeepSeek and GLM hold in four bits. MTP blocks stay as they are.
MLP = re.compile(r"\.mlp\.(shared_experts\.|experts\.\d+\.)?(gate|up|down)_proj\.weight$")
TRUNK = {DEEPSEEK: 3, GLM: 2}


def is_mlp(name, source):
    return MLP.search(name) is not None and int(name.split(".")[2]) < TRUNK.get(source, 99)


def is_projection(name):
    return re.search(r"\.(q|k|v|o|gate|up|down)_proj\.weight$", name) is not None


def partners(name):
    """The weights that a stack joins with this one."""
    for parts in (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")):
        for part in parts:
            if name.endswith(f".{part}.weight"):
                return [name.replace(f".{part}.", f".{other}.") for other in parts]
    return [name]


def suffixes(encoded, inputs=False):
    return {f"{stem}.{what}" for stem in (name.removesuffix(".weight") for name in encoded) for what in ("weight_scale", "weight_scale_2") + (("input_scale",) if inputs else ())}


def check_encoding(truth, plain, found, is_encoded, search=False):
    """Every tensor of an nvfp4 folder, by the f32 and the bf16 folder of the same model."""
    encoded = [name for name in truth if is_encoded(name)]
    assert len(encoded) > 5
    assert set(found) == set(truth) | suffixes(encoded)
    for name in truth:
        if name not in encoded:
            assert same(found[name], plain[name]), name
            continue
        largest = max(np.abs(truth[partner]).max() for partner in partners(name))
        scale_2 = np.float32(largest) / np.float32(2688) if largest > 0 else np.float32(1)
        expected = encode(truth[name], scale_2, search)
        assert found[f"{name}_scale_2"].shape == () and found[f"{name}_scale_2"] == scale_2, name
        assert found[f"{name}_scale"].dtype == NUMPY["F8_E4M3"] and found[name].dtype == np.uint8
        if search:
            check_search(truth[name], found, name, expected)
            continue
        np.testing.assert_array_equal(found[f"{name}_scale"].view(np.uint8), expected["scales"], name)
        np.testing.assert_array_equal(found[name], expected["codes"], name)


def check_search(truth, found, name, expected):
    """Codes are those of the scales, and scales those of the oracle, but where two leave the same error up to the rounding of
    the f32 products that both decode to: one and a half times a scale with codes two thirds as large gives the same numbers."""
    scales = found[f"{name}_scale"].view(np.uint8)
    other = scales != expected["scales"]
    assert other.mean() < 2e-3, name
    same_scales = ~np.repeat(other, 8, 1)
    np.testing.assert_array_equal(found[name][same_scales], expected["codes"][same_scales], name)
    theirs = {name: expected["codes"], f"{name}_scale": expected["scales"].view(NUMPY["F8_E4M3"]), f"{name}_scale_2": expected["scale_2"][0]}
    blocks = truth.astype(np.float64).reshape(len(truth), -1, 16)
    ours, oracles = (((decode(those, name).reshape(blocks.shape) - blocks) ** 2).sum(2) for those in (found, theirs))
    energy = (blocks**2).sum(2)
    rounding = 2**-22 * np.sqrt(oracles * energy) + 2**-15 * oracles
    assert (np.abs(ours - oracles) <= rounding)[other].all(), name


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_code_and_scale_is_that_of_an_independent_encoder(model, search, converted):
    source = MODELS[model]
    truth, plain = (tensors(converted(source, "--tp", 1, "--dtype", dtype)) for dtype in ("f32", "bf16"))
    found = tensors(converted(source, "--tp", 1, "--dtype", "nvfp4", *(["--nvfp4-search"] if search else [])))
    check_encoding(truth, plain, found, lambda name: is_mlp(name, source), search)


def test_attention_is_encoded_where_it_is_not_latent(converted):
    """llama.cpp stores q and k in another order of rows."""
    truth, plain, found = (tensors(converted(LLAMA, "--tp", 1, "--dtype", dtype)) for dtype in ("f32", "bf16", "nvfp4"))
    check_encoding(truth, plain, found, is_projection)


def test_every_code_and_scale_of_the_corpus(corpus_source, tmp_path):
    def made(dtype):
        ok("convert", corpus_source, tmp_path / dtype, "--tp", 1, "--dtype", dtype)
        return tensors(tmp_path / dtype)

    truth, plain, found = map(made, ("f32", "bf16", "nvfp4"))
    latent = any("kv_a_proj_with_mqa" in name for name in truth)
    # A block for multi-token prediction has parameters that no other has.
    mtp = {name.split(".")[2] for name in truth if name.endswith(".eh_proj.weight")}
    is_encoded = MLP.search if latent else is_projection
    check_encoding(truth, plain, found, lambda name: is_encoded(name) and name.split(".")[2] not in mtp)


def held(name, array, rank, tp):
    """A rank's part of a tensor: codes and scales of blocks are cut alike, the scale of the weight is everywhere."""
    if name.endswith("_scale_2") or name.endswith("input_scale"):
        return array
    return cut(name.removesuffix("_scale"), array, rank, tp)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_the_cut_of_the_whole(model, tp, converted):
    whole = tensors(converted(MODELS[model], "--tp", 1, "--dtype", "nvfp4"))
    folder = converted(MODELS[model], "--tp", tp, "--dtype", "nvfp4")
    for rank in range(tp):
        found = tensors(folder, rank)
        assert set(found) == set(whole)
        for name, array in found.items():
            assert same(array, held(name, whole[name], rank, tp)), (name, rank)


@pytest.mark.parametrize("tp,more", [(1, ()), (2, ()), (4, ()), (2, ("--ep",))])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_parameters_join_codes_and_scales_alike(model, tp, more, converted):
    whole = tensors(converted(MODELS[model], "--tp", 1, "--dtype", "nvfp4"))
    folder = converted(MODELS[model], "--tp", tp, "--dtype", "nvfp4", "--profile", "vllm-0.32", *more)
    seen = 0
    for rank in range(tp):
        found = tensors(folder, rank)
        for name in [name for name in found if f"{name}_scale_2" in found]:
            array = found[name]
            stacked = array.ndim == 3
            experts = next(len(found[n]) for n in found if n.endswith("w13_weight")) if stacked else 0
            ways, at = (1, 0) if more and stacked else (tp, rank)
            parts = joined(name, experts * (tp if more else 1))
            if more and stacked:
                parts = parts[rank * experts:(rank + 1) * experts]
            elements = parts if stacked else [parts]
            for suffix in ("", "_scale"):
                joins = [np.concatenate([held(f"{part}{suffix}", whole[f"{part}{suffix}"], at, ways) for part in element]) for element in elements]
                assert same(found[name + suffix], np.stack(joins) if stacked else joins[0]), (name, suffix, rank)
            shared = np.array([[whole[f"{part}_scale_2"] for part in element] for element in elements], np.float32)
            shape = shared.shape if stacked and shared.shape[1] > 1 else shared.size
            assert same(found[f"{name}_scale_2"], shared.reshape(shape)), (name, rank)
            # vLLM would take the largest of several.
            assert all(len(set(element)) == 1 for element in shared)
            inputs = found[re.sub("weight$", "input_scale", name)]
            assert inputs.shape == found[f"{name}_scale_2"].shape and (inputs.astype("f4") == 1).all()
            assert inputs.dtype == (np.float32 if stacked else NUMPY["BF16"])
            seen += 1
    assert seen >= 5 * tp


def test_decoded_it_is_as_far_from_the_source_as_the_manifest_says(converted):
    for search in ((), ("--nvfp4-search",)):
        folder = converted(DEEPSEEK, "--tp", 1, "--dtype", "nvfp4", *search)
        truth, found = tensors(converted(DEEPSEEK, "--tp", 1, "--dtype", "f32")), tensors(folder)
        manifest = json.loads((folder / "ggshard.json").read_text())
        said = {t["name"]: t["deviation"] for file in manifest["files"] for t in file["tensors"] if "deviation" in t}
        assert set(said) == {name for name in truth if is_mlp(name, DEEPSEEK)}
        for name, deviation in said.items():
            assert 0.01 < deviation["relative_rms"] < 0.2
            error = truth[name].astype(np.float64) - decode(found, name)
            rms = np.sqrt((error**2).sum() / (truth[name].astype(np.float64) ** 2).sum())
            np.testing.assert_allclose(deviation["relative_rms"], rms, rtol=1e-3)
            np.testing.assert_allclose(deviation["largest_error"], np.abs(error).max(), rtol=1e-3)


def decode(found, name):
    """By ml_dtypes' E2M1 and E4M3."""
    nibbles = np.stack([found[name] & 15, found[name] >> 4], -1).reshape(len(found[name]), -1)
    scales = found[f"{name}_scale"].astype(np.float32) * found[f"{name}_scale_2"]
    return nibbles.view(E2M1).astype(np.float32) * np.repeat(scales, 16, 1)


def test_a_search_leaves_less_error(converted):
    truth = tensors(converted(GLM, "--tp", 1, "--dtype", "f32"))
    taken, searched = (tensors(converted(GLM, "--tp", 1, "--dtype", "nvfp4", *more)) for more in ((), ("--nvfp4-search",)))

    def error(found, name):
        return ((truth[name].astype(np.float64) - decode(found, name)) ** 2).sum()

    encoded = [name for name in truth if is_mlp(name, GLM)]
    assert all(error(searched, name) <= error(taken, name) for name in encoded)
    assert sum(error(searched, name) for name in encoded) < 0.95 * sum(error(taken, name) for name in encoded)


def test_stacks_are_told(converted):
    for source, profile in [(GLM, "hf"), (DEEPSEEK, "vllm-0.32")]:
        folder = converted(source, "--tp", 1, "--dtype", "nvfp4", "--profile", profile)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "modelopt" and config["quant_algo"] == "W4A16_NVFP4" and config["group_size"] == 16
        assert config["config_groups"]["group_0"]["input_activations"] is None
        beside = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        assert beside == {"quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": config["ignore"]}
        left = config["ignore"]
        assert {"lm_head", "model.layers.0.self_attn*", "model.layers.1.mlp.gate"} <= set(left)
        # The whole block for multi-token prediction, but not block 10 with block 1.
        assert ("model.layers.2.*" in left) == (source == GLM)
        assert not any(pattern in ("model.layers.1*", "model.layers.1.mlp*") for pattern in left)


MIXED = """
name = "mixed"
about = "MLPs in nvfp4, attention in fp8."
[[rule]]
dtype = "nvfp4"
weights = [
  "model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight", "model.layers.{layer}.mlp.down_proj.weight",
  "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
  "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
]
[[rule]]
dtype = "fp8"
weights = [
  "model.layers.{layer}.self_attn.q_a_proj.weight", "model.layers.{layer}.self_attn.q_b_proj.weight",
  "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", "model.layers.{layer}.self_attn.kv_b_proj.weight",
  "model.layers.{layer}.self_attn.o_proj.weight",
]
"""


def test_beside_nvfp4_fp8_is_as_modelopt_has_it(converted, tmp_path):
    policy = tmp_path / "mixed.toml"
    policy.write_text(MIXED)
    for profile, tp in [("hf", 1), ("hf", 2), ("vllm-0.32", 2)]:
        folder = tmp_path / f"{profile}-{tp}"
        ok("convert", DEEPSEEK, folder, "--tp", tp, "--policy", policy, "--profile", profile)
        ok("verify", folder, "--source", DEEPSEEK)
        fp8 = tensors(converted(DEEPSEEK, "--tp", tp, "--dtype", "fp8", "--profile", profile), None if tp == 1 else 1)
        nvfp4 = tensors(converted(DEEPSEEK, "--tp", tp, "--dtype", "nvfp4", "--profile", profile), None if tp == 1 else 1)
        mixed = tensors(folder, None if tp == 1 else 1)
        seen = 0
        for name, array in mixed.items():
            if f"{name}_scale_2" in mixed:
                assert all(same(mixed[name + s], nvfp4[name + s]) for s in ("", "_scale", "_scale_2")), name
            elif array.dtype == NUMPY["F8_E4M3"] and f"{name}_scale" in mixed:
                assert same(array, fp8[name]), name
                rows, cols = fp8[f"{name}_scale_inv"].shape
                assert same(mixed[f"{name}_scale"], fp8[f"{name}_scale_inv"].reshape(rows, 1, cols, 1)), name
                seen += 1
        assert seen > 5
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    layers = config["quantized_layers"]
    assert layers["model.layers.1.mlp.experts"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers["model.layers.1.self_attn.q_b_proj"] == {"quant_algo": "FP8_PB_WO", "group_size": 128}
    assert "model.layers.1.mlp.gate" not in layers
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"] == layers


def test_fp8_that_stacks_do_not_load_beside_nvfp4_is_refused(tmp_path):
    policy = tmp_path / "p.toml"
    experts = ", ".join(f'"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight"' for part in ("gate", "up", "down"))
    policy.write_text(f'name = "p"\nabout = "x"\n[[rule]]\ndtype = "fp8"\nweights = [{experts}]\n[[rule]]\ndtype = "nvfp4"\nweights = ["model.layers.{{layer}}.self_attn.o_proj.weight"]\n')
    for profile in ("hf", "vllm-0.32"):
        line = refused("plan", DEEPSEEK, "--tp", 1, "--policy", policy, "--profile", profile)
        assert "experts in fp8, and nvfp4 elsewhere" in line, line


def test_cuts_through_a_block_are_refused_with_the_values_that_work():
    # 64 columns of an expert's down_proj among 8 ranks are 8.
    line = refused("plan", LLAMA, "--tp", 8, "--dtype", "nvfp4")
    assert "tp" in line
    done = run("plan", DEEPSEEK, "--tp", 32, "--dtype", "nvfp4")
    assert done.returncode == 1


def test_what_has_no_effect_or_no_reason_is_refused(tmp_path):
    assert "--nvfp4-search has no effect" in refused("plan", GLM, "--tp", 1, "--dtype", "fp8", "--nvfp4-search")
    for profile in ("sglang-0.5", "vllm-0.32-cpu"):
        assert "not known to load nvfp4" in refused("plan", GLM, "--tp", 1, "--dtype", "nvfp4", "--profile", profile)
    line = refused("plan", GLM, "--tp", 1, "--dtype", "nvfp4", "--input-scales", "source")
    assert "no scales of activations" in line and "no statistics of activations" in line
    scales = tmp_path / "scales.safetensors"
    save(scales, {"model.layers.0.mlp.up_proj.input_scale": 0.5})
    line = refused("plan", GLM, "--tp", 1, "--dtype", "nvfp4", "--input-scales", scales)
    assert "no scale of the activations of" in line, line
    assert "--input-scales has no effect" in refused("plan", GLM, "--tp", 1, "--input-scales", scales)
    save(scales, {"something.else": 0.5})
    assert "ends with '.input_scale'" in refused("plan", GLM, "--tp", 1, "--dtype", "nvfp4", "--input-scales", scales)


def save(path, scales):
    entries = {name: {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(scales)}
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + np.array(list(scales.values()), "<f4").tobytes())


@pytest.mark.parametrize("place", ["file", "folder"])
def test_with_scales_of_activations_both_are_in_four_bits(place, converted, tmp_path):
    names = [name for name in tensors(converted(DEEPSEEK, "--tp", 1, "--dtype", "nvfp4")) if name.endswith("weight_scale_2")]
    rng = np.random.default_rng(2)
    given = {name.replace("weight_scale_2", "input_scale"): np.float32(rng.uniform(1e-4, 1e-2)) for name in names}
    (tmp_path / "given").mkdir()
    half = len(given) // 2
    save(tmp_path / "given" / "a.safetensors", dict(list(given.items())[:half]))
    save(tmp_path / "given" / "b.safetensors", dict(list(given.items())[half:]))
    save(tmp_path / "all.safetensors", given)
    flags = ("--dtype", "nvfp4", "--input-scales", tmp_path / ("given" if place == "folder" else "all.safetensors"))
    ok("convert", DEEPSEEK, tmp_path / "hf", "--tp", 2, *flags)
    for rank in range(2):
        found = tensors(tmp_path / "hf", rank)
        assert {name: found[name] for name in given} == given and all(found[name].dtype == np.float32 for name in given)
    ok("convert", DEEPSEEK, tmp_path / "vllm", "--tp", 2, *flags, "--profile", "vllm-0.32")
    found = tensors(tmp_path / "vllm", 1)
    inputs = found["model.layers.1.mlp.experts.routed_experts.w13_input_scale"]
    expected = [[given[f"model.layers.1.mlp.experts.{e}.{part}_proj.input_scale"] for part in ("gate", "up")] for e in range(len(inputs))]
    assert same(inputs, np.array(expected, np.float32))
    for folder in ("hf", "vllm"):
        config = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert config["quant_algo"] == "NVFP4" and config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
        # What was given is in the manifest.
        ok("verify", tmp_path / folder, "--source", DEEPSEEK)
    line = refused("plan", DEEPSEEK, "--tp", 2, *flags, "--profile", "vllm-0.32", "--ep")
    assert "want those of all experts" in line, line


def test_bytes_depend_on_no_choice_of_how(converted, tmp_path):
    flags = ("--tp", 2, "--dtype", "nvfp4", "--profile", "vllm-0.32")
    expected = {p.name: p.read_bytes() for p in converted(GLM, *flags).glob("*.safetensors")}
    for i, more in enumerate([("--threads", 1), ("--threads", 7, "--mem-limit", "1M"), ("--tile-size", "512"), ("--io", "pread")]):
        out = tmp_path / str(i)
        ok("convert", GLM, out, *flags, *more)
        assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} == expected, more


def test_ranks_and_parts_one_by_one_give_the_same(converted, tmp_path):
    """Weights, scales and shared scales are in different files, of which some are finished when a conversion goes on."""
    flags = ("--tp", 2, "--dtype", "nvfp4", "--part-size", "100k")
    whole = converted(GLM, *flags)
    names = sorted(p.name for p in whole.glob("*.safetensors"))
    out = tmp_path / "out"
    ok("convert", GLM, out, *flags, "--ranks", 1)
    for path in sorted(out.glob("*.done"))[::2]:
        path.unlink()
    ok("convert", GLM, out, *flags, "--ranks", 1, "--resume")
    ok("convert", GLM, out, *flags, "--ranks", 0, "--resume")
    ok("seal", out)
    assert [(out / name).read_bytes() for name in names] == [(whole / name).read_bytes() for name in names]
    # Another choice is another conversion.
    ok("convert", GLM, tmp_path / "two", *flags, "--ranks", 0)
    assert "policy" in refused("convert", GLM, tmp_path / "two", *flags, "--ranks", 1, "--nvfp4-search", "--resume")


@pytest.mark.parametrize("profile,tp", [("hf", 1), ("hf", 4), ("vllm-0.32", 2)])
@pytest.mark.parametrize("model", MODELS)
def test_folders_verify_alone_and_against_the_source(model, profile, tp, converted):
    folder = converted(MODELS[model], "--tp", tp, "--dtype", "nvfp4", "--profile", profile)
    report = json.loads(ok("verify", folder, "--source", MODELS[model], "--json"))
    assert report["ok"] and report["tensors"] > 40


def test_every_source_byte_of_a_weight_in_nvfp4_is_fetched_twice(tmp_path):
    """Once for the scale that all its blocks share, once to encode them."""
    report = json.loads(ok("convert", DEEPSEEK, tmp_path / "out", "--tp", 2, "--dtype", "nvfp4", "--track-reads", "--json"))
    plan = json.loads(ok("plan", DEEPSEEK, "--tp", 2, "--dtype", "nvfp4", "--json"))
    assert 0 < report["repeated_bytes"] < plan["source_bytes"]
    encoded = {source for tensor in plan["tensors"] if is_mlp(tensor["name"], DEEPSEEK) for source, _ in tensor["sources"]}
    import gguf

    sizes = {t.name: int(t.n_bytes) for path in DEEPSEEK.glob("*.gguf") for t in gguf.GGUFReader(path).tensors}
    assert report["repeated_bytes"] == sum(sizes[name] for name in encoded)


GLM_5 = FIXTURES / "container" / "plan" / "glm-5-744b-q4_k_m.header.gguf"
MTP_BLOCK = 78


@pytest.mark.parametrize("form", ["nvfp4", "mixed"])
def test_the_full_scale_plan_adds_up(form):
    flags = ("plan", GLM_5, "--header-only", "--tp", 8, "--json")
    weights = json.loads(ok(*flags))["tensors"]
    plan = json.loads(ok(*flags, *(("--dtype", "nvfp4") if form == "nvfp4" else ("--policy", "nvfp4-fp8"))))

    def of(tensor):
        name = tensor["name"]
        if MLP.search(name) and (form == "mixed" or int(name.split(".")[2]) < MTP_BLOCK):
            return held_bytes(tensor, "nvfp4", 8)
        if form == "mixed" and low_bits.is_projection(name):
            return held_bytes(tensor, "fp8", 8)
        return held_bytes(tensor, "bf16", 8)

    assert [rank["bytes"] for rank in plan["ranks"]] == [sum(map(of, weights))] * 8
