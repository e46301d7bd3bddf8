"""`--load-format ggshard` in a real vLLM on the CPU: the original checkpoint's tokens from rank folders and from GGUFs, and refusals.

DeepSeek-V3 is the model with latent attention: its GGUF holds attn_k_b and attn_v_b, which vLLM's kv_b_proj is made of. Llama is
the other kind, with permuted q and k and biases. Both are in GGSHARD_CORPUS.
"""
import json
import shutil

import pytest
from blake3 import blake3

from engines import MODEL, PROFILE, PROMPTS, convert, engine, generate, needs_corpus, run

LLAMA_PROMPTS = [[token % 512 for token in prompt] for prompt in PROMPTS]
DEEPSEEK = MODEL / "deepseek_v3-BF16.gguf" if MODEL else None
PAGE = 4096  # the data of a rank file begins at a multiple of it
pytestmark = needs_corpus


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("plugin")


def folder_and_gguf(folder, gguf, hf, tp, prompts):
    """What engines answer from a rank folder, and after it from the GGUF."""
    convert(gguf, folder, "--tp", tp, "--profile", PROFILE, "--config", hf)
    return generate(folder.with_suffix(".json"), tp, [engine(folder, "ggshard"), engine(hf, "ggshard", gguf=str(gguf))], prompts)


@pytest.mark.parametrize("tp", [1, 2])
def test_deepseek_from_a_folder_and_from_a_gguf_gives_the_tokens_of_the_original(work, original, tp):
    for found in folder_and_gguf(work / f"deepseek-tp{tp}", DEEPSEEK, MODEL / "hf", tp, PROMPTS):
        assert found["tokens"] == original(tp)["tokens"] and found["texts"] == original(tp)["texts"]


@pytest.mark.parametrize("tp", [1, 2])
def test_llama_from_a_folder_and_from_a_gguf_gives_the_tokens_of_the_original(work, llama, tp):
    [wanted] = generate(work / f"original-tp{tp}.json", tp, [engine(llama / "hf", "auto")], LLAMA_PROMPTS)
    assert len({token for answer in wanted["tokens"] for token in answer}) > 10
    for found in folder_and_gguf(work / f"llama-tp{tp}", llama / "llama-BF16.gguf", llama / "hf", tp, LLAMA_PROMPTS):
        assert found["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("tp", [1, 2])
def test_kept_blocks_give_the_tokens_of_a_folder_in_bf16(work, llama, tp):
    rules = work / "vllm-0.32-keep.toml"
    rules.write_text(KEEP)
    options = ["--tp", tp, "--config", llama / "hf"]
    plain = convert(llama / "llama-Q4_K_M.gguf", work / f"plain-tp{tp}", *options, "--profile", PROFILE)
    kept = work / f"keep-tp{tp}"
    convert(llama / "llama-Q4_K_M.gguf", kept, *options, "--profile", rules, "--dtype", "keep", "--keep-or", "bf16")
    assert sum("blocks" in parameter for parameter in json.loads((kept / "ggshard.json").read_text())["parameters"]) > 5
    engines = [engine(plain, "ggshard"), engine(kept, "ggshard", overrides={"quantization_config": None})]
    wanted, found = generate(work / f"keep-tp{tp}.json", tp, engines, LLAMA_PROMPTS)
    assert found["tokens"] == wanted["tokens"] and len({token for answer in wanted["tokens"] for token in answer}) > 5


# Refusals. Each is raised in an engine, and its message names what differs.


def forge(source, folder, name, axis=None, sealed=True):
    """A copy of a folder of one file without a tensor; or, with `axis`, with one row less of it.

    Sealed means that the manifest was made to agree, digests and all, so that only a comparison with the model can find it.
    """
    shutil.copytree(source, folder)
    text = (folder / "ggshard.json").read_text()
    manifest = json.loads(text)
    [file] = manifest["files"]
    raw = (folder / file["name"]).read_bytes()
    data, header, tensors = b"", {}, []
    for tensor in file["tensors"]:
        begin, end = (file["header_bytes"] + offset for offset in tensor["offsets"])
        part = raw[begin:end]
        if tensor["name"] == name:
            if axis is None:
                continue
            assert axis == 0
            part = part[: len(part) // tensor["shape"][0] * (tensor["shape"][0] - 1)]
            tensor["shape"][0] -= 1
        tensor["offsets"] = [len(data), len(data) + len(part)]
        tensor["blake3"] = blake3(part).hexdigest()
        data += part
        header[tensor["name"]] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": tensor["offsets"]}
        tensors.append(tensor)
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % PAGE)
    new = len(head).to_bytes(8, "little") + head + data
    (folder / file["name"]).write_bytes(new)
    if sealed:
        file.update(tensors=tensors, bytes=len(new), header_bytes=8 + len(head), blake3=blake3(new).hexdigest())
        [parameter] = (p for p in manifest["parameters"] if p["name"] == name)
        if axis is None:
            manifest["parameters"].remove(parameter)
        else:
            parameter["shape"][0] -= 1
        del manifest["digest"]
        text = json.dumps(manifest)[:-1] + ',\n"digest":"' + "0" * 64 + '"\n}\n'
        digest = blake3(text.encode()).hexdigest()
        (folder / "ggshard.json").write_text(text.replace("0" * 64, digest))
    return folder


KEEP = 'name = "vllm-0.32-keep"\nversion = 1\nextends = "vllm-0.32-cpu"\nabout = "Blocks."\nchecked = "nothing"\nformats = ["keep"]\n'
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.experts.gate.weight"
OLD = 'name = "vllm-0.31"\nversion = 1\nextends = "vllm-0.32-cpu"\nabout = "Of another version."\nchecked = "nothing"\n'


@pytest.fixture(scope="module")
def refused(work, llama):
    """What engines at tp 1 said of folders and GGUFs that do not fit."""

    def folder(name, *args):
        return convert(DEEPSEEK, work / name, "--config", MODEL / "hf", *args)

    good = folder("good", "--tp", 1, "--profile", PROFILE)
    (work / "vllm-0.31.toml").write_text(OLD)
    old = folder("old", "--tp", 1, "--profile", work / "vllm-0.31.toml")
    engines = {
        "tp": engine(folder("tp", "--tp", 2, "--profile", PROFILE), "ggshard"),
        "removed": engine(forge(good, work / "removed", GATE), "ggshard"),
        "shorter": engine(forge(good, work / "shorter", NORM, axis=0), "ggshard"),
        "unsealed": engine(forge(good, work / "unsealed", NORM, sealed=False), "ggshard"),
        "hf": engine(folder("hf", "--tp", 1), "ggshard"),
        "sglang": engine(folder("sglang", "--tp", 1, "--profile", "sglang-0.5"), "ggshard"),
        "old": engine(old, "ggshard"),
        "f32": engine(folder("f32", "--tp", 1, "--profile", PROFILE, "--dtype", "f32"), "ggshard"),
        "original": engine(MODEL / "hf", "ggshard"),
        "llama": engine(MODEL / "hf", "ggshard", gguf=str(llama / "llama-BF16.gguf")),
        "accepted": engine(old, "ggshard", any_version=True),
    }
    found, _ = run(work / "refusals.json", 1, list(engines.values()))
    return dict(zip(engines, found, strict=True))


@pytest.mark.parametrize(
    "case, words",
    [
        ("tp", ["CheckpointError", "it was made for tp 2, and vLLM runs with --tensor-parallel-size 1", "--tp 1"]),
        ("removed", ["CheckpointError", f"'{GATE}': not in the folder", "Convert again"]),
        ("shorter", ["CheckpointError", f"'{NORM}': shape [255], the model's is [256]", "Convert again"]),
        ("unsealed", ["CheckpointError", "model-rank-0-part-0.safetensors"]),
        ("hf", ["CheckpointError", "its profile 'hf' is not vLLM's layout", "--profile"]),
        ("sglang", ["CheckpointError", "its profile 'sglang-0.5' is not vLLM's layout", "--profile"]),
        ("old", ["CheckpointError", "its profile 'vllm-0.31' was checked with another version than this vLLM, 0.32.0", "any_version"]),
        ("f32", ["CheckpointError", f"'{NORM}': torch.float32, the model's is torch.bfloat16"]),
        ("original", ["CheckpointError", "it has no ggshard.json", '{"gguf": "model.gguf"}']),
        ("llama", ["CheckpointError", "llama-BF16.gguf: vLLM did not take the weight 'model.", "not of the same model"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(refused, case, words):
    message = refused[case].get("refused", "it started")
    assert [word for word in words if word not in message] == [], message


def test_another_version_is_accepted_on_demand(refused, original):
    assert refused["accepted"]["tokens"] == original(1)["tokens"]


def test_a_refusal_in_a_worker_is_in_the_log(work):
    folder = convert(DEEPSEEK, work / "one-rank", "--tp", 1, "--profile", PROFILE, "--config", MODEL / "hf")
    [found], log = run(work / "two-ranks.json", 2, [engine(folder, "ggshard")])
    assert "refused" in found
    assert "it was made for tp 1, and vLLM runs with --tensor-parallel-size 2" in log
