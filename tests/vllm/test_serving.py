"""A real vLLM on the CPU takes converted folders: the original checkpoint's tokens, and the original checkpoint's parameters.

Needs vLLM (`make test-vllm`) and, for tokens, GGSHARD_CORPUS: serving/deepseek_v3 is a BF16 GGUF and its original checkpoint.
Engines run one after the other, each in a process group of its own. Tokens are only compared at the same tensor-parallel size:
another size sums in another order.
"""
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAMILIES = ROOT / "tests" / "families"
BIN = Path(os.environ.get("GGSHARD_BIN", ROOT / "target" / "release" / "ggshard")).resolve()
CORPUS = Path(os.environ["GGSHARD_CORPUS"]).resolve() if os.environ.get("GGSHARD_CORPUS") else None
MODEL = CORPUS / "serving" / "deepseek_v3" if CORPUS else None
PROFILE = "vllm-0.32-cpu"
TOKENS = 16
PROMPTS = [
    [5, 6, 7, 8, 9],
    [100, 200, 300, 400, 500, 600],
    [1, 1023, 2, 1022],
    [42, 17, 900, 3, 3, 3, 77, 512, 640],
    [(7 * i + 11) % 1024 for i in range(40)],
    [350],
]
LONGEST = 300  # seconds that an engine may take

needs_corpus = pytest.mark.skipif(
    CORPUS is None, reason="GGSHARD_CORPUS names no corpus; tokens are compared with its serving/deepseek_v3 (BF16 GGUF and hf/)"
)


def ggshard(*args):
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def convert(source, folder, *args):
    done = ggshard("convert", source, folder, *args)
    assert done.returncode == 0, done.stderr
    return folder


def python(log, *args):
    """Runs a script of ours that starts processes of its own; what it says goes into a file."""
    begin = time.monotonic()
    with open(log, "w") as said:
        child = subprocess.Popen([sys.executable, *map(str, args)], stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                                 start_new_session=True)
        try:
            child.wait(LONGEST)
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # whatever is left of the group
            except ProcessLookupError:
                pass
            child.wait()
    text = log.read_text()
    assert child.returncode == 0, f"{args}: exit {child.returncode}\n{text[-6000:]}"
    return text, time.monotonic() - begin


def generate(folder, out, tp, load_format):
    """Tokens of an engine over a folder. The same question has to get the same answer, or nothing could be compared."""
    tokenizer = ["--tokenizer"] if (folder / "tokenizer.json").exists() else []
    text, seconds = python(out.with_suffix(".log"), HERE / "generate.py", folder, out, "--tp", tp, "--format", load_format,
                           "--tokens", TOKENS, "--prompts", json.dumps(PROMPTS), *tokenizer)
    found = json.loads(out.read_text())
    assert found["again"] == found["tokens"]
    assert [len(t) for t in found["tokens"]] == [TOKENS] * len(PROMPTS)
    for complaint in ("loading tensor of shape", "Attempted to load weight"):  # what sharded_state says of another shape or dtype
        assert complaint not in text
    print(f"\n{folder.name} at tp {tp}, {load_format}: {found['versions']}, {seconds:.0f} s {found['seconds']}")
    for tokens in found["tokens"]:
        print("  ", *tokens)
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def original(work):
    """original(tp): what the original checkpoint answers. Asked once per size."""
    answers = {}

    def ask(tp):
        if tp not in answers:
            answers[tp] = generate(MODEL / "hf", work / f"original-tp{tp}.json", tp, "auto")
            tokens = answers[tp]["tokens"]
            assert len({tuple(t) for t in tokens}) == len(PROMPTS) and len({t for answer in tokens for t in answer}) > 3 * TOKENS
        return answers[tp]

    return ask


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
    found = generate(folder, work / f"{folder.name}.json", tp, "sharded_state")
    assert found["tokens"] == original(tp)["tokens"]
    if given:
        assert found["texts"] == original(tp)["texts"] and any(found["texts"])


@needs_corpus
def test_a_checkpoint_in_original_names_gives_the_tokens_of_the_original(work, original):
    folder = convert(MODEL / "deepseek_v3-BF16.gguf", work / "hf-tp1", "--tp", 1)
    assert generate(folder, work / "hf-tp1.json", 1, "auto")["tokens"] == original(1)["tokens"]


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
    found, wanted = generate(folder, work / "changed-tp1.json", 1, "sharded_state")["tokens"], original(1)["tokens"]
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
