"""Low-bit output of a model whose matrices are as wide as real ones: GGSHARD_WIDE names its GGUF.

Any GLM-5 or DeepSeek-V3 will do, also one of a few blocks and experts. Its weights need disk at one byte each, twice, and memory for one
parameter. Without the variable the same rules are checked on small models only, by test_low_bits.py.
"""
import json
import os
import re
import shutil
from pathlib import Path

import gguf
import pytest
from conftest import ok, refused, run
from gguf_files import readers
from low_bits import NUMPY, check_kept_rank, check_rank, check_vllm_rank, cut, header, same, tensors, types

WIDE = Path(os.environ["GGSHARD_WIDE"]).resolve() if os.environ.get("GGSHARD_WIDE") else None
HOUR = 3600

pytestmark = pytest.mark.skipif(WIDE is None, reason="GGSHARD_WIDE names no GGUF")


def convert(folder, *flags):
    ok("convert", WIDE, folder, *flags, timeout=HOUR)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The fp8 checkpoint of `--tp 1`, as DeepSeek publishes it."""
    folder = convert(tmp_path_factory.mktemp("whole") / "out", "--tp", 1, "--dtype", "fp8")
    yield tensors(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("profile", ["hf", "vllm-0.32"])
def test_ranks_of_fp8_hold_the_cut_of_the_whole(profile, tp, whole, tmp_path):
    folder = convert(tmp_path / "out", "--tp", tp, "--dtype", "fp8", "--profile", profile)
    compared = 0
    for rank in range(tp):
        held = tensors(folder, rank)
        compared += sum(array.size for array in held.values())
        if profile == "hf":
            check_rank(held, whole, rank, tp)
        else:
            check_vllm_rank(folder, whole, rank, tp)
    if (profile, tp) == ("vllm-0.32", 8):
        verified(folder)
    shutil.rmtree(folder)
    print(f"\n{profile}, fp8, tp {tp}: {compared} elements in {len(held)} tensors per rank")


def verified(folder):
    """By its own digests, and made again from the source."""
    for against in ((), ("--source", WIDE)):
        report = json.loads(ok("verify", folder, *against, "--json", timeout=HOUR))
        assert report["ok"] and report["tensors"] > 40


# Kept blocks.

# Where a GGUF has what is kept, by the end of the name in the checkpoint.
STORED = {
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "o_proj": "attn_output",
    "wq_b": "indexer.attn_q_b", "wk": "indexer.attn_k", "weights_proj": "indexer.proj", "eh_proj": "nextn.eh_proj",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "lm_head": "output"}
# What each rank holds as a whole.
REPLICATED = re.compile(r"attn_q_a|attn_kv_a|norm|indexer|ffn_gate_inp|exp_probs_b|nextn\.(eh_proj|[eh]norm|shared_head_norm)")


@pytest.fixture(scope="module")
def source():
    """{name: tensor} by gguf-py, mapped."""
    return {tensor.name: tensor for reader in readers(WIDE) for tensor in reader.tensors}


def stored(name, source):
    """The bytes of the rows of a weight in the source, and their type."""
    module = name.removesuffix(".qweight")
    if module in WHOLE:
        tensor = source[f"{WHOLE[module]}.weight"]
        return tensor.data, tensor.tensor_type.name
    layer, leaf = re.fullmatch(r"model\.layers\.(\d+)\.(?:.*\.)?(\w+)", module).groups()
    expert = re.search(r"\.experts\.(\d+)\.", module)
    kind = "_exps" if expert else "_shexp" if ".shared_experts." in module else ""
    tensor = source[f"blk.{layer}.{STORED[leaf]}{kind}.weight"]
    return tensor.data[int(expert[1])] if expert else tensor.data, tensor.tensor_type.name


def check_cut(held, blocks, source, rank, tp):
    """Kept blocks are those of the source, in place. Gives their number of bytes."""
    for name in blocks:
        rows, kind = stored(name, source)
        assert blocks[name] == kind, name
        assert same(held[name], cut(name, rows, rank, tp)), (name, rank)
    return sum(held[name].nbytes for name in blocks)


def written(folder):
    """Bytes of tensors on the disk."""
    return sum(len(header(path)[1]) for path in folder.glob("*.safetensors"))


def size(tensor, tp):
    """Bytes of all ranks together for a tensor of the source: its blocks, or its numbers as bf16."""
    elements = int(tensor.n_elements)
    kept = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] > 1 and not re.search(r"attn_[kv]_b\.", tensor.name)
    bytes_ = int(tensor.n_bytes) if kept else elements * (4 if "exp_probs_b" in tensor.name else 2)
    return bytes_ * (tp if REPLICATED.search(tensor.name) else 1)


def test_kept_blocks_at_tp_8_are_the_cut_of_the_source_and_decode_to_what_is_decoded_directly(source, tmp_path):
    folder = convert(tmp_path / "keep", "--tp", 8, "--dtype", "keep")
    blocks = types(folder)
    assert len(blocks) > 40 and len(set(blocks.values())) > 2
    assert written(folder) == sum(size(tensor, 8) for tensor in source.values())
    compared = 0
    for rank in range(8):
        held = tensors(folder, rank)
        compared += check_cut(held, blocks, source, rank, 8)
        direct, plain = (
            convert(tmp_path / dtype, "--tp", 8, "--dtype", dtype, "--ranks", rank, "--seal") for dtype in ("f32", "bf16")
        )
        check_kept_rank(held, blocks, tensors(direct, rank), tensors(plain, rank))
        for made in (direct, plain):
            shutil.rmtree(made)
    verified(folder)
    shutil.rmtree(folder)
    print(f"\nkeep, tp 8: {compared} bytes of {len(blocks)} tensors per rank, {sorted(set(blocks.values()))}")


def test_where_a_cut_goes_through_kept_blocks_other_values_work_or_they_are_decoded(source, tmp_path):
    line = refused("plan", WIDE, "--tp", 16, "--dtype", "keep")
    assert "within blocks of 256" in line and "--keep-or bf16" in line
    working = [int(tp) for tp in re.search(r"work for this model with this policy: ([\d, ]+);", line)[1].split(", ")]
    assert len(working) > 1 and 16 not in working
    for tp in working:
        folder = convert(tmp_path / str(tp), "--tp", tp, "--dtype", "keep", "--ranks", tp - 1, "--seal")
        assert check_cut(tensors(folder, None if tp == 1 else tp - 1), types(folder), source, tp - 1, tp)
        shutil.rmtree(folder)
    for tp in set(range(1, max(working))) - set(working):
        assert run("plan", WIDE, "--tp", tp, "--dtype", "keep").returncode == 1, tp

    folder = convert(tmp_path / "or", "--tp", 16, "--dtype", "keep", "--keep-or", "bf16", "--ranks", 15, "--seal")
    manifest = json.loads((folder / "ggshard.json").read_text())
    decoded = {p["name"] for p in manifest["parameters"] if "tp 16 cuts through" in p.get("decoded", "")}
    # Of the columns that a rank holds, these alone are no multiple of 256.
    experts = {name for name in decoded if ".experts." in name or ".shared_experts." in name}
    assert decoded and decoded == experts and all(name.endswith("down_proj.weight") for name in decoded)
    assert any(f"{len(decoded)} parameters are decoded to bf16" in warning for warning in manifest["warnings"])
    plain = tensors(convert(tmp_path / "bf16", "--tp", 16, "--ranks", 15, "--seal"), 15)
    held = tensors(folder, 15)
    check_cut(held, types(folder), source, 15, 16)
    for name in decoded:
        assert held[name].dtype == NUMPY["BF16"] and same(held[name], plain[name]), name
    print(f"\nkeep, tp 16 refused; working: {working}; with --keep-or bf16 {len(decoded)} decoded, {len(types(folder))} kept")
