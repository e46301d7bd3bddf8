"""A real vLLM on the CPU takes converted folders: the original checkpoint's tokens, and the original checkpoint's parameters.

Needs vLLM (`make test-vllm`) and, for tokens, GGSHARD_CORPUS: serving/deepseek_v3 is a BF16 GGUF and its original checkpoint.
Engines run one after the other, each in a process group of its own. Tokens are only compared at the same tensor-parallel size:
another size sums in another order.
"""
import json
import struct
import sys

import pytest

from engines import FAMILIES, MODEL, PROFILE, PROMPTS, ROOT, convert, engine, generate, ggshard, needs_corpus, python


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("serving")


@needs_corpus
@pytest.mark.parametrize("config", ["derived", "given"])
@pytest.mark.parametrize("tp", [1, 2])
def test_rank_files_give_the_tokens_of_the_original(work, original, tp, config):
    given = ["--config", MODEL / "hf"] if config == "given" else []
    folder = convert(MODEL / "deepseek_v3-BF16.gguf", work / f"{config}-tp{tp}", "--tp", tp, "--profile", PROFILE, *given)
    if given:
        copied = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
        assert [f for f in copied if (folder / f).read_bytes() != (MODEL / "hf" / f).read_bytes()] == []
        configs = [json.loads((f / "config.json").read_text()) for f in (folder, MODEL / "hf")]
        assert configs[0] == configs[1]
    else:
        assert not (folder / "tokenizer.json").exists()
    [found] = generate(work / f"{folder.name}.json", tp, [engine(folder, "sharded_state")])
    assert found["tokens"] == original(tp)["tokens"]
    if given:
        assert found["texts"] == original(tp)["texts"] and any(found["texts"])


@needs_corpus
def test_a_checkpoint_in_original_names_gives_the_tokens_of_the_original(work, original):
    folder = convert(MODEL / "deepseek_v3-BF16.gguf", work / "hf-tp1", "--tp", 1)
    [found] = generate(work / "hf-tp1.json", 1, [engine(folder, "auto")])
    assert found["tokens"] == original(1)["tokens"]


@needs_corpus
def test_one_changed_byte_shows(work, original):
    """The comparison can fail: the sign of one of 256 values in the last norm is turned, which vLLM itself cannot notice."""
    folder = convert(MODEL / "deepseek_v3-BF16.gguf", work / "changed-tp1", "--tp", 1, "--profile", PROFILE)
    assert ggshard("verify", folder).returncode == 0
    path = folder / "model-rank-0-part-0.safetensors"
    with open(path, "r+b") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        begin, end = json.loads(f.read(length))["model.norm.weight"]["data_offsets"]
        high = 8 + length + (begin + end) // 4 * 2 + 1  # high byte of the middle value, little-endian bf16
        f.seek(high)
        byte = f.read(1)[0]
        f.seek(high)
        f.write(bytes([byte ^ 0x80]))
    done = ggshard("verify", folder)
    assert done.returncode == 1 and path.name in done.stdout + done.stderr
    [found] = generate(work / "changed-tp1.json", 1, [engine(folder, "sharded_state")])
    found, wanted = found["tokens"], original(1)["tokens"]
    print(f"{sum(a != b for a, b in zip(found, wanted))} of {len(PROMPTS)} prompts get other tokens")
    assert found != wanted


def written_config(name, path):
    """The config.json of a fixture's checkpoint, as transformers writes it."""
    import transformers
    sys.path.insert(0, str(FAMILIES))
    from make_fixtures import FAMILIES as known, SIZES
    kind, changes, by_hand, _, _ = known[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes}, architectures=[f"{kind}ForCausalLM"], dtype="bfloat16")
    path.write_text(json.dumps(config.to_dict() | by_hand))
    return path


@pytest.mark.parametrize("name, draft", [("qwen3_moe", False), ("glm4_moe_lite", False), ("glm4_moe_lite", True)])
def test_vllm_holds_the_parameters_of_the_original(tmp_path, name, draft):
    """vLLM's own modules on two processes load the rank files and hold, bit for bit, what they held after the checkpoint."""
    oracle = json.loads((ROOT / "fixtures" / "oracle" / f"{name}.json").read_text())["vllm-0.32"]  # on CPU these are the same
    given = ["--config", written_config(name, tmp_path / "config.json")] if name == "qwen3_moe" else []  # no config is derived for it
    folder = convert(ROOT / "fixtures" / "families" / f"{name}.gguf", tmp_path / "out", "--tp", 2, "--profile", PROFILE, *given)
    if draft:
        folder /= "mtp"
    text, seconds = python(tmp_path / "log", FAMILIES / "vllm_state.py", folder, "--tp", 2, "--format", "sharded_state",
                           "--json", tmp_path / "state.json", *["--draft"] * draft)
    assert "left untouched by the load: none" in text
    state, wanted = json.loads((tmp_path / "state.json").read_text()), oracle["tp2-mtp" if draft else "tp2"]
    assert len(state) == 2 and len(state[0]) > 10
    assert state == wanted
    print(f"\n{name}{' (draft)' * draft}: {[len(rank) for rank in state]} parameters on the ranks, {seconds:.0f} s")
