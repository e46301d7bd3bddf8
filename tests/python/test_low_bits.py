"""Weights in fp8: every byte and every scale against an encoder in numpy, which knows nothing of ours, and cuts of them."""
import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from conftest import DEEPSEEK, FIXTURES, GLM, MODELS, ok, refused, run
from low_bits import BLOCK, NUMPY, check_kept_rank, check_rank, check_vllm_rank, grid, header, held_bytes, is_projection, tensors, types
from safetensors import safe_open


def encode(values):
    """(bytes, scales) of a matrix of f32, block by block."""
    rows, cols = values.shape
    bytes_, scales = np.zeros((rows, cols), np.uint8), np.zeros((grid(rows), grid(cols)), np.float32)
    for i in range(grid(rows)):
        for j in range(grid(cols)):
            at = np.s_[i * BLOCK:(i + 1) * BLOCK, j * BLOCK:(j + 1) * BLOCK]
            largest = np.abs(values[at]).max()
            scale = np.float32(largest) / np.float32(448) if largest > 0 else np.float32(1)
            scaled = np.clip((values[at] / scale).astype(np.float32), -448, 448)
            bytes_[at], scales[i, j] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale
    return bytes_, scales


def check_encoding(truth, plain, found):
    """Every tensor of an fp8 folder, by its name, the f32 and the bf16 folder of the same model."""
    encoded = [name for name in truth if is_projection(name)]
    assert len(encoded) > 10
    assert set(found) == set(truth) | {f"{name}_scale_inv" for name in encoded}
    for name in truth:
        if name not in encoded:
            assert found[name].dtype == plain[name].dtype and found[name].tobytes() == plain[name].tobytes(), name
            continue
        bytes_, scales = encode(truth[name])
        assert found[name].dtype == NUMPY["F8_E4M3"] and found[f"{name}_scale_inv"].dtype == np.float32
        np.testing.assert_array_equal(found[f"{name}_scale_inv"], scales, name)
        np.testing.assert_array_equal(found[name].view(np.uint8), bytes_, name)


@pytest.mark.parametrize("model", MODELS)
def test_every_byte_and_scale_is_that_of_an_independent_encoder(model, converted):
    source = MODELS[model]
    check_encoding(*(tensors(converted(source, "--tp", 1, "--dtype", dtype)) for dtype in ("f32", "bf16", "fp8")))


def test_every_byte_and_scale_of_the_corpus(corpus_source, tmp_path):
    def made(dtype):
        ok("convert", corpus_source, tmp_path / dtype, "--tp", 1, "--dtype", dtype)
        return tensors(tmp_path / dtype)

    check_encoding(*map(made, ("f32", "bf16", "fp8")))


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_the_cut_of_the_whole(model, converted):
    whole = tensors(converted(MODELS[model], "--tp", 1, "--dtype", "fp8"))
    folder = converted(MODELS[model], "--tp", 2, "--dtype", "fp8")
    for rank in range(2):
        check_rank(tensors(folder, rank), whole, rank, 2)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_parameters_join_bytes_and_scales_alike(model, tp, converted):
    whole = tensors(converted(MODELS[model], "--tp", 1, "--dtype", "fp8"))
    folder = converted(MODELS[model], "--tp", tp, "--dtype", "fp8", "--profile", "vllm-0.32")
    for rank in range(tp):
        check_vllm_rank(folder, whole, rank, tp)


def test_torch_and_safetensors_read_the_types(converted):
    folder = converted(DEEPSEEK, "--tp", 1, "--dtype", "fp8")
    [path] = folder.glob("*.safetensors")
    with safe_open(path, "numpy") as file:
        slice_ = file.get_slice("model.layers.0.self_attn.o_proj.weight")
        assert slice_.get_dtype() == "F8_E4M3" and slice_.get_shape() == [256, 512]


def test_the_config_says_what_is_quantized(converted, tmp_path):
    config = json.loads((converted(DEEPSEEK, "--tp", 1, "--dtype", "fp8") / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }
    assert config["dtype"] == "bfloat16"
    policy = tmp_path / "experts.toml"
    policy.write_text("""
name = "experts"
about = "Experts of two layers."
[[rule]]
dtype = "fp8"
layers = "1-2"
weights = [
  "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
  "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
  "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
]
""")
    ok("convert", DEEPSEEK, tmp_path / "out", "--tp", 2, "--policy", policy, "--profile", "vllm-0.32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    plain = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.self_attn.o_proj" in plain and "model.layers.1.mlp.shared_experts.up_proj" in plain
    assert not any(".mlp.experts" in name for name in plain if name.startswith(("model.layers.1.", "model.layers.2.")))
    # The policy's own text is in the manifest, so verifying needs no file.
    policy.unlink()
    ok("verify", tmp_path / "out", "--source", DEEPSEEK)


def test_what_a_given_config_says_of_other_weights_is_replaced(converted, tmp_path):
    given = json.loads((converted(DEEPSEEK, "--tp", 1) / "config.json").read_text())
    given["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(given))
    for dtype, method in [("bf16", None), ("fp8", "fp8")]:
        out = ok("convert", DEEPSEEK, tmp_path / dtype, "--tp", 1, "--dtype", dtype, "--config", tmp_path / "config.json")
        assert "quantization_config" in out
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config.get("quantization_config", {}).get("quant_method") == method


def test_cuts_through_a_block_are_refused_with_the_values_that_work():
    for model in MODELS.values():
        for profile in ("hf", "vllm-0.32"):
            line = refused("plan", model, "--tp", 4, "--dtype", "fp8", "--profile", profile)
            assert "block" in line and line.endswith("with this policy: 1, 2"), line


def test_what_the_stack_cannot_load_is_refused(tmp_path):
    for profile in ("sglang-0.5", "vllm-0.32-cpu"):
        line = refused("plan", GLM, "--tp", 1, "--dtype", "fp8", "--profile", profile)
        assert f"'{profile}'" in line and "fp8" in line and "bf16, f16, f32" in line, line
    policy = tmp_path / "p.toml"
    for rule, why in [
        ('dtype = "fp8"\nweights = ["model.norm.weight"]', "two axes"),
        ('dtype = "fp8"\nweights = ["model.layers.{layer}.mlp.gate_proj.weight"]', "one parameter"),
        ('dtype = "int3"', "p.toml: TOML parse error at line 4"),
    ]:
        policy.write_text(f'name = "p"\nabout = "x"\n[[rule]]\n{rule}\n')
        assert why in refused("plan", GLM, "--tp", 1, "--policy", policy, "--profile", "vllm-0.32")
    assert "no rule for any weight" in refused("plan", GLM, "--tp", 1, "--mapping", "raw", "--dtype", "fp8")
    assert "no effect" in refused("plan", GLM, "--tp", 1, "--keep-or", "bf16")
    assert "--policy" in refused("plan", GLM, "--tp", 1, "--dtype", "fp8", "--policy", "deepseek-fp8")


def test_pinned_dtypes_win(tmp_path):
    policy = tmp_path / "p.toml"
    policy.write_text('name = "p"\nabout = "x"\n[[rule]]\ndtype = "f16"\nweights = ["model.layers.{layer}.mlp.gate.e_score_correction_bias"]\n')
    plan = json.loads(ok("plan", GLM, "--tp", 1, "--policy", policy, "--json"))
    dtypes = {t["dtype"] for t in plan["tensors"] if t["name"].endswith("e_score_correction_bias")}
    assert dtypes == {"F32"} and plan["policy"]["name"] == "p"


def test_the_plan_counts_bytes_and_says_whether_they_fit():
    plan = json.loads(ok("plan", DEEPSEEK, "--tp", 2, "--dtype", "fp8", "--profile", "vllm-0.32", "--gpu-memory", "96G", "--json"))
    main = [rank for rank in plan["ranks"] if rank["set"] == "main"]
    assert all(rank["by_dtype"]["F8_E4M3"] > 0 and sum(rank["by_dtype"].values()) == rank["bytes"] for rank in main)
    assert plan["gpu_memory"] == {"bytes": 96 << 30, "largest": plan["gpu_memory"]["largest"], "fits": True}
    assert plan["gpu_memory"]["largest"] >= max(rank["bytes"] for rank in main)
    # 128 rows of gate and up per rank need no padding; one row of their scales is no reason to ask for it.
    assert not any("multiple of 128" in warning for warning in plan["warnings"])
    assert "DOES NOT FIT" in ok("plan", DEEPSEEK, "--tp", 2, "--dtype", "fp8", "--gpu-memory", "1M")


@pytest.mark.parametrize("profile", ["hf", "vllm-0.32"])
@pytest.mark.parametrize("model", MODELS)
def test_folders_verify_alone_and_against_the_source(model, profile, converted):
    folder = converted(MODELS[model], "--tp", 2, "--dtype", "fp8", "--profile", profile)
    report = json.loads(ok("verify", folder, "--source", MODELS[model], "--json"))
    assert report["ok"] and report["tensors"] > 40


def test_bytes_depend_on_no_choice_of_how(converted, tmp_path):
    expected = {p.name: p.read_bytes() for p in converted(GLM, "--tp", 2, "--dtype", "fp8", "--profile", "vllm-0.32").glob("*.safetensors")}
    for i, flags in enumerate([("--threads", 1), ("--threads", 3, "--mem-limit", "1M"), ("--tile-size", "512"), ("--io", "pread")]):
        out = tmp_path / str(i)
        ok("convert", GLM, out, "--tp", 2, "--dtype", "fp8", "--profile", "vllm-0.32", *flags)
        assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} == expected, flags


@pytest.mark.parametrize("choices", [("--ep",), ("--pp", 2), ("--mtp", "drop"), ("--ep", "--tp", 4)])
def test_other_choices_go_together_with_fp8(choices, tmp_path):
    tp = () if "--tp" in choices else ("--tp", 2)
    done = run("convert", GLM, tmp_path / "out", *tp, "--dtype", "fp8", "--profile", "vllm-0.32", *choices)
    # Whole experts need no cut, but attention and dense blocks do.
    assert done.returncode == (1 if "--tp" in choices else 0), done.stderr
    if not done.returncode:
        ok("verify", tmp_path / "out", "--source", GLM)


def test_each_source_byte_is_fetched_once(tmp_path):
    report = json.loads(ok("convert", DEEPSEEK, tmp_path / "out", "--tp", 2, "--dtype", "fp8", "--track-reads", "--json"))
    assert report["repeated_bytes"] == 0


def test_small_parts_and_ranks_one_by_one_give_the_same(converted, tmp_path):
    """A weight and its scales are in different files, of which one may be finished when a conversion goes on."""
    flags = ("--tp", 2, "--dtype", "fp8", "--part-size", "200k")
    whole = converted(GLM, *flags)
    names = sorted(p.name for p in whole.glob("*.safetensors"))
    assert len(names) > 8
    out = tmp_path / "out"
    ok("convert", GLM, out, *flags, "--ranks", 0)
    # What a kill would leave: some files done, with their receipts, others not begun.
    done = sorted(out.glob("*.done"))
    for path in done[::2]:
        path.unlink()
    ok("convert", GLM, out, *flags, "--ranks", 0, "--resume")
    ok("convert", GLM, out, *flags, "--ranks", 1, "--resume")
    ok("seal", out)
    assert [(out / name).read_bytes() for name in names] == [(whole / name).read_bytes() for name in names]
    assert (out / "ggshard.json").read_bytes() == (whole / "ggshard.json").read_bytes()
    other = run("convert", GLM, tmp_path / "two", *flags, "--ranks", 0)
    assert other.returncode == 0
    line = refused("convert", GLM, tmp_path / "two", "--tp", 2, "--part-size", "200k", "--ranks", 1, "--resume")
    assert "policy" in line, line


def deviations(folder):
    """{(file, tensor): deviation} by the manifest."""
    manifest = json.loads((folder / "ggshard.json").read_text())
    listed = [(file["name"], tensor) for file in manifest["files"] for tensor in file["tensors"]]
    return {(file, tensor["name"]): tensor.get("deviation") for file, tensor in listed}


def test_the_manifest_says_how_far_each_tensor_is_from_the_source(converted):
    folder = converted(DEEPSEEK, "--tp", 2, "--dtype", "fp8")
    direct = converted(DEEPSEEK, "--tp", 2, "--dtype", "f32")
    found = deviations(folder)
    for rank in range(2):
        held, truth = tensors(folder, rank), tensors(direct, rank)
        for name, array in held.items():
            deviation = found[f"model-rank-{rank}-part-0.safetensors", name]
            if array.dtype != NUMPY["F8_E4M3"]:
                assert deviation is None
                continue
            scales = np.repeat(np.repeat(held[f"{name}_scale_inv"], BLOCK, 0), BLOCK, 1)[:array.shape[0], :array.shape[1]]
            error = truth[name].astype(np.float64) - (array.astype(np.float32) * scales)
            rms = np.sqrt((error**2).sum() / (truth[name].astype(np.float64) ** 2).sum())
            np.testing.assert_allclose(deviation["relative_rms"], rms, rtol=1e-3)
            np.testing.assert_allclose(deviation["largest_error"], np.abs(error).max(), rtol=1e-3)


def test_the_worst_are_reported_and_a_limit_fails(converted, tmp_path):
    report = json.loads(ok("convert", GLM, tmp_path / "out", "--tp", 1, "--dtype", "fp8", "--json"))
    worst = [found["relative_rms"] for found in report["worst"]]
    assert len(worst) == 10 and worst == sorted(worst, reverse=True) and 0.01 < worst[0] < 0.05
    assert worst[0] == max(d["relative_rms"] for d in deviations(tmp_path / "out").values() if d)
    shown = ok("convert", GLM, tmp_path / "again", "--tp", 1, "--dtype", "fp8", "--max-error", worst[0])
    assert f"error      {worst[0]} relative RMS" in shown
    line = refused("convert", GLM, tmp_path / "limit", "--tp", 1, "--dtype", "fp8", "--max-error", worst[-1])
    assert f"at most {worst[-1]}" in line and report["worst"][0]["tensor"] in line
    # No checkpoint, but what was made need not be made again.
    assert not (tmp_path / "limit" / "ggshard.json").exists()
    again = json.loads(ok("convert", GLM, tmp_path / "limit", "--tp", 1, "--dtype", "fp8", "--resume", "--json"))
    assert again["kept_files"] == again["files"] and again["worst"] == report["worst"]


# GLM-5 as it is: 744 billion weights, of which a header is all that is needed.
GLM_5 = FIXTURES / "container" / "plan" / "glm-5-744b-q4_k_m.header.gguf"


@pytest.mark.parametrize("form", ["bf16", "fp8", "keep"])
def test_the_full_scale_plan_adds_up(form):
    flags = ("plan", GLM_5, "--header-only", "--tp", 8, "--json")
    weights = json.loads(ok(*flags))["tensors"]
    plan = json.loads(ok(*flags, "--dtype", form))
    assert [rank["bytes"] for rank in plan["ranks"]] == [sum(held_bytes(t, form, 8) for t in weights)] * 8


# Kept blocks.


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_kept_blocks_decode_to_what_is_decoded_directly(model, tp, converted):
    """By gguf-py's decoders, every element, bit for bit."""
    kept = converted(MODELS[model], "--tp", tp, "--dtype", "keep", "--keep-or", "bf16")
    assert len(set(types(kept).values())) > 1
    check_kept(kept, converted(MODELS[model], "--tp", tp, "--dtype", "f32"), converted(MODELS[model], "--tp", tp), tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_kept_blocks_of_the_corpus_decode_to_what_is_decoded_directly(tp, corpus_source, tmp_path):
    if run("plan", corpus_source, "--tp", tp).returncode:
        pytest.skip("no such tp for this model")
    folders = {"keep": ("--keep-or", "bf16"), "f32": (), "bf16": ()}
    for dtype, flags in folders.items():
        ok("convert", corpus_source, tmp_path / dtype, "--tp", tp, "--dtype", dtype, *flags)
    check_kept(*(tmp_path / dtype for dtype in folders), tp)


def check_kept(kept, direct, plain, tp):
    """Every tensor of a folder of kept blocks, by the f32 and the bf16 folder of the same model."""
    for rank in [None] if tp == 1 else range(tp):
        check_kept_rank(tensors(kept, rank), types(kept), tensors(direct, rank), tensors(plain, rank))


def test_kept_blocks_are_as_large_as_in_the_source_and_every_file_names_their_types(converted):
    folder = converted(DEEPSEEK, "--tp", 1, "--dtype", "keep")
    blocks, manifest = types(folder), json.loads((folder / "ggshard.json").read_text())
    assert {p["decoded"] for p in manifest["parameters"] if "decoded" in p}
    named, of_blocks = {}, 0
    for path in folder.glob("*.safetensors"):
        entries, _ = header(path)
        here = json.loads(entries["__metadata__"]["ggshard.blocks"])
        assert set(here) == {name for name in entries if name in blocks}
        named |= here
        of_blocks += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items() if name in here)
    assert named == blocks
    kept = {name for p in manifest["parameters"] if "blocks" in p for name, _ in p["sources"]}
    sizes = {}
    for path in DEEPSEEK.glob("*.gguf"):
        for tensor in gguf.GGUFReader(path).tensors:
            sizes[tensor.name] = int(tensor.n_bytes)
    assert of_blocks == sum(sizes[name] for name in kept)
    # No stack takes the folder for a checkpoint whose weights are missing.
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == {"quant_method": "ggml_blocks"}


def test_cuts_through_kept_blocks_are_refused_or_decoded(tmp_path):
    line = refused("plan", DEEPSEEK, "--tp", 2, "--dtype", "keep")
    assert "within blocks of 256" in line and "with this policy: 1;" in line and "--keep-or bf16" in line, line
    plan = json.loads(ok("plan", DEEPSEEK, "--tp", 2, "--dtype", "keep", "--keep-or", "f16", "--json"))
    cut = [t for t in plan["tensors"] if "cuts through" in t.get("decoded", "")]
    assert cut and all(t["dtype"] == "F16" and t["cut"] == "row" for t in cut)
    assert any("instead of kept, because tp 2 cuts through" in warning for warning in plan["warnings"])
    assert all(t["blocks"] for t in plan["tensors"] if t["name"].endswith("qweight"))


def test_vllm_takes_no_kept_blocks():
    assert "not known to load keep" in refused("plan", GLM, "--tp", 1, "--dtype", "keep", "--profile", "vllm-0.32")


def test_folders_of_kept_blocks_verify(converted):
    folder = converted(GLM, "--tp", 2, "--dtype", "keep", "--keep-or", "bf16")
    assert json.loads(ok("verify", folder, "--source", GLM, "--json"))["ok"]


def test_one_policy_mixes_forms(tmp_path):
    policy = tmp_path / "mixed.toml"
    policy.write_text("""
name = "mixed"
about = "Attention in fp8, experts kept."
[[rule]]
dtype = "fp8"
weights = ["model.layers.{layer}.self_attn.o_proj.weight"]
[[rule]]
dtype = "keep"
min_elements = 1000
""")
    ok("convert", GLM, tmp_path / "out", "--tp", 1, "--policy", policy)
    found = tensors(tmp_path / "out")
    assert found["model.layers.1.self_attn.o_proj.weight"].dtype == NUMPY["F8_E4M3"]
    assert found["model.layers.1.mlp.experts.0.up_proj.qweight"].dtype == np.uint8
    ok("verify", tmp_path / "out", "--source", GLM)
