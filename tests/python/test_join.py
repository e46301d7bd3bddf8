"""Ranks joined by an independent script are the whole checkpoint, and the script notices when they are not."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS, ok, run
from gguf_files import rewrite
from join import Tensor, compare, read_ranks, read_whole

WEIGHTS = {"glm_moe_dsa": 110, "deepseek_v3": 91}


@pytest.mark.parametrize("part_size", ["5G", "1M", "100k", "1"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_join_to_the_whole_checkpoint(converted, model, tp, part_size):
    whole = read_whole(converted(MODELS[model], "--tp", 1))
    folder = converted(MODELS[model], "--tp", tp, "--part-size", part_size)
    ranks = read_ranks(folder)
    assert len(ranks) == tp
    compared, problems = compare(whole, ranks)
    assert problems == []
    assert compared == len(whole) == WEIGHTS[model]
    parts = len(list(folder.glob("model-rank-0-part-*.safetensors")))
    assert (parts == 1) == (part_size == "5G")
    if part_size == "1":
        assert parts == len(ranks[0])


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_join_in_every_type(converted, model, dtype):
    whole = read_whole(converted(MODELS[model], "--tp", 1, "--dtype", dtype))
    compared, problems = compare(whole, read_ranks(converted(MODELS[model], "--tp", 4, "--dtype", dtype)))
    assert (compared, problems) == (WEIGHTS[model], [])


@pytest.mark.parametrize("mtp", ["drop", "only"])
def test_ranks_join_whatever_becomes_of_mtp_blocks(converted, mtp):
    whole = read_whole(converted(MODELS["glm_moe_dsa"], "--tp", 1, "--mtp", mtp))
    every = read_whole(converted(MODELS["glm_moe_dsa"], "--tp", 1))
    assert 0 < len(whole) < len(every)
    assert all(every[name] == tensor for name, tensor in whole.items())
    compared, problems = compare(whole, read_ranks(converted(MODELS["glm_moe_dsa"], "--tp", 8, "--mtp", mtp)))
    assert (compared, problems) == (len(whole), [])


@pytest.mark.parametrize("vocab", [511, 449, 448, 65])
@pytest.mark.parametrize("model", MODELS)
def test_vocabulary_is_padded_with_zeros_to_64_rows(tmp_path, model, vocab):
    source = rewrite(MODELS[model], tmp_path / "cut.gguf", vocab=vocab)
    ok("convert", source, tmp_path / "whole", "--tp", 1)
    whole = read_whole(tmp_path / "whole")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert whole[name].shape == (vocab, 256)
    for tp in (2, 4, 8):
        ok("convert", source, tmp_path / f"tp{tp}", "--tp", tp)
        ranks = read_ranks(tmp_path / f"tp{tp}")
        compared, problems = compare(whole, ranks)
        assert (compared, problems) == (WEIGHTS[model], [])
        assert ranks[0]["lm_head.weight"].shape == (-(-vocab // 64) * 64 // tp, 256)


def test_corpus_ranks_join(corpus_source, tmp_path):
    ok("convert", corpus_source, tmp_path / "whole", "--tp", 1)
    whole = read_whole(tmp_path / "whole")
    joined = 0
    for tp in (2, 4, 8):
        done = run("convert", corpus_source, tmp_path / f"tp{tp}", "--tp", tp, "--part-size", "300k")
        if done.returncode == 1 and "cannot be divided" in done.stderr:
            print(done.stderr.strip())
            continue
        assert done.returncode == 0, done.stderr
        compared, problems = compare(whole, read_ranks(tmp_path / f"tp{tp}"))
        assert (compared, problems) == (len(whole), [])
        joined += 1
    assert joined, "no --tp value worked"


def test_as_a_command(converted):
    script = Path(__file__).with_name("join.py")
    whole, ranks = converted(MODELS["glm_moe_dsa"], "--tp", 1), converted(MODELS["glm_moe_dsa"], "--tp", 2)
    done = subprocess.run([sys.executable, script, whole, ranks], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "110 weights of 2 ranks joined, 0 problems\n")
    other = converted(MODELS["deepseek_v3"], "--tp", 2)
    done = subprocess.run([sys.executable, script, whole, other], capture_output=True, text=True)
    assert done.returncode == 1


# The script itself: each kind of mistake is noticed.


@pytest.fixture
def pair(converted):
    whole = read_whole(converted(MODELS["glm_moe_dsa"], "--tp", 1))
    ranks = read_ranks(converted(MODELS["glm_moe_dsa"], "--tp", 4))
    assert compare(whole, ranks)[1] == []
    return whole, [dict(rank) for rank in ranks]


def changed(tensor, rows):
    return Tensor(tensor.dtype, tensor.shape, np.ascontiguousarray(rows).tobytes())


CUT = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.self_attn.q_b_proj.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.experts.3.up_proj.weight",
    "model.layers.1.mlp.experts.3.down_proj.weight",
    "model.layers.1.mlp.shared_experts.down_proj.weight",
]


@pytest.mark.parametrize("name", CUT)
def test_swapped_ranks_are_noticed(pair, name):
    whole, ranks = pair
    ranks[1][name], ranks[2][name] = ranks[2][name], ranks[1][name]
    assert [p.split(":")[0] for p in compare(whole, ranks)[1]] == [name]


@pytest.mark.parametrize("name", CUT)
def test_rows_shifted_by_one_are_noticed(pair, name):
    whole, ranks = pair
    ranks[3][name] = changed(ranks[3][name], np.roll(ranks[3][name].rows(), 1, axis=0))
    assert [p.split(":")[0] for p in compare(whole, ranks)[1]] == [name]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.indexer.wk.weight", "model.layers.2.eh_proj.weight"])
def test_one_changed_bit_of_a_replicated_weight_is_noticed(pair, name):
    whole, ranks = pair
    rows = ranks[2][name].rows().copy()
    rows[-1, -1] ^= 1
    ranks[2][name] = changed(ranks[2][name], rows)
    assert compare(whole, ranks)[1] == [f"{name}: rank 2 differs from rank 0, but the weight is replicated"]


def test_missing_and_surplus_weights_are_noticed(pair):
    whole, ranks = pair
    del ranks[1]["model.norm.weight"]
    ranks[0]["model.extra.weight"] = whole["model.norm.weight"]
    whole["model.layers.0.odd.weight"] = whole["model.norm.weight"]
    for rank in ranks:
        rank["model.layers.0.odd.weight"] = whole["model.norm.weight"]
    assert compare(whole, ranks)[1] == [
        "rank 0: model.extra.weight is not in the whole checkpoint",
        "rank 1: model.norm.weight is missing",
        "model.layers.0.odd.weight: no rule for this name",
    ]


def weights(name, array):
    return {name: Tensor("U8", array.shape, array.tobytes())}


def test_padding_must_be_zero_and_complete():
    rows = np.arange(1, 101, dtype=np.uint8).reshape(100, 1)
    padded = np.concatenate([rows, np.zeros((28, 1), np.uint8)])
    whole = weights("lm_head.weight", rows)
    ranks = [weights("lm_head.weight", half) for half in np.split(padded, 2)]
    assert compare(whole, ranks) == (1, [])
    padded[-1] = 1
    assert compare(whole, [weights("lm_head.weight", half) for half in np.split(padded, 2)])[1] == ["lm_head.weight: rows from 100 on are not zero"]
    assert compare(whole, [weights("lm_head.weight", half) for half in np.split(rows, 2)])[1] == ["lm_head.weight: 100 vocabulary rows instead of 128"]


def test_key_value_heads_are_repeated_when_there_are_fewer_than_ranks():
    name = "model.layers.0.self_attn.k_proj.weight"
    heads = np.arange(8, dtype=np.uint8).reshape(2, 4)
    ranks = [weights(name, heads[[head]]) for head in (0, 0, 1, 1)]
    whole = weights(name, heads)
    assert compare(whole, ranks) == (1, [])
    assert compare(whole, [ranks[0], ranks[2], ranks[1], ranks[3]])[1] != []
    assert compare(whole, [ranks[i] for i in (0, 0, 0, 0)])[1] != []
    # Only key and value heads may be repeated.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert compare(weights(name, heads), [weights(name, heads[[head]]) for head in (0, 0, 1, 1)])[1] != []
