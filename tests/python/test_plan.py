"""Plans of real models at their true size, against sums of our own from the GGUF header and the rules of tensor parallelism."""
import json
import math
import re

import pytest
from conftest import DEEPSEEK, FIXTURES, GLM, ok, refused
from gguf_files import read_header

PLANS = FIXTURES / "container" / "plan"
COUNTS = json.loads((PLANS / "plan.json").read_text())

# By the GGUF's names. Everything else is held whole by every rank.
VOCAB = re.compile(r"^(token_embd|output)\.weight$|\.nextn\.(embed_tokens|shared_head_head)\.weight$")
CUT = re.compile(r"^blk\.\d+\.(attn_q|attn_q_b|attn_k_b|attn_v_b|attn_kv_b|attn_output|ffn_(gate|up|down)(_exps|_shexp)?)\.weight$")
F32 = re.compile(r"\.exp_probs_b\.bias$")
EXPERTS = re.compile(r"_exps\.weight$")


def own_sum(infos, tp, size=2):
    """(bytes per rank, number of HF weights) of a DeepSeek or GLM-5 model."""
    total = weights = 0
    for info in infos:
        elements = math.prod(info.shape)
        if VOCAB.search(info.name):
            rows, width = info.shape
            elements = rows * width if tp == 1 else -(-rows // 64) * 64 // tp * width
        elif CUT.search(info.name):
            assert elements % tp == 0
            elements //= tp
        total += elements * (4 if F32.search(info.name) else size)
        # Keys and values are one weight; every expert is one of its own.
        weights += 0 if info.name.endswith("attn_k_b.weight") else info.shape[0] if EXPERTS.search(info.name) else 1
    return total, weights


@pytest.mark.parametrize("tp", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_bytes_per_rank(name, tp):
    metadata, infos = read_header(PLANS / name)
    assert len(infos) == COUNTS[name]["tensors"]
    plan = json.loads(ok("plan", PLANS / name, "--tp", tp, "--header-only", "--json"))
    assert plan["source_tensors"] == plan["used_tensors"] == COUNTS[name]["tensors"]
    assert plan["ignored"] == []
    # The data's size counts the padding between tensors, which nobody has to read.
    assert 0 <= COUNTS[name]["data_bytes"] - plan["source_bytes"] < 32 * len(infos)
    total, weights = own_sum(infos, tp)
    assert [rank["bytes"] for rank in plan["ranks"]] == [total] * tp
    assert plan["output_bytes"] == total * tp
    assert plan["parameters"] == len(plan["tensors"]) == weights
    assert total > 10**9


@pytest.mark.parametrize("name", [n for n in sorted(COUNTS) if n.startswith("glm-5")])
def test_every_tensor_of_glm_5_is_used(name):
    assert "1809 of 1809 tensors used, 0 ignored by rule" in ok("plan", PLANS / name, "--tp", 8, "--header-only")


@pytest.mark.parametrize("dtype, size", [("bf16", 2), ("f16", 2), ("f32", 4)])
@pytest.mark.parametrize("source", [GLM, DEEPSEEK], ids=["glm_moe_dsa", "deepseek_v3"])
def test_bytes_per_rank_of_the_toy_models(source, dtype, size):
    infos = [i for p in (sorted(source.glob("*.gguf")) if source.is_dir() else [source]) for i in read_header(p)[1]]
    for tp in (1, 2, 4, 8):
        plan = json.loads(ok("plan", source, "--tp", tp, "--json", "--dtype", dtype))
        total, weights = own_sum(infos, tp, size)
        assert [rank["bytes"] for rank in plan["ranks"]] == [total] * tp
        assert plan["parameters"] == weights


def test_a_header_without_data_is_no_model(tmp_path):
    for name in COUNTS:
        assert name in refused("plan", PLANS / name, "--tp", 8)
        assert name in refused("convert", PLANS / name, tmp_path / "out", "--tp", 8)
    assert not (tmp_path / "out").exists()
