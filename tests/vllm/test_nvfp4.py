"""Weights in nvfp4 as torch sees them, decoded by compressed-tensors and by vLLM; and tokens of a vLLM that computes with them."""
import json
import struct

import pytest
import torch
from engines import PROMPTS, ROOT, convert, engine, generate, needs_corpus
from safetensors.torch import load_file

MODELS = {"glm_moe_dsa": "models/glm_moe_dsa-UD-IQ2_XXS.gguf", "deepseek_v3": "models/deepseek_v3-split", "llama": "families/llama.gguf"}
# Of activations in a model of random weights, about.
INPUT_SCALE = 0.002
# Numbers of E2M1 that are not negative: 2 bits of exponent, 1 of mantissa.
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def tensors(folder):
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        found.update(load_file(path))
    return found


def nearest(scaled):
    """The nearest numbers of E2M1, of two equally near ones the one with an even code."""
    between = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    below, above = (torch.bucketize(scaled.abs(), between, right=right) for right in (False, True))
    return torch.copysign(NUMBERS[torch.where(below % 2 == 0, below, above)], scaled)


@pytest.mark.parametrize("model", MODELS)
def test_others_decode_what_was_meant(model, tmp_path):
    """Intended is the nearest number of E2M1 times the scales, by torch from `--dtype f32`; every element, bit for bit."""
    from compressed_tensors.compressors import unpack_fp4_from_uint8
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    source = ROOT / "fixtures" / MODELS[model]
    truth, held = (tensors(convert(source, tmp_path / dtype, "--tp", 1, "--dtype", dtype)) for dtype in ("f32", "nvfp4"))
    compared = 0
    for name in [name for name in truth if f"{name}_scale_2" in held]:
        codes, blocks, scale_2 = held[name], held[f"{name}_scale"], held[f"{name}_scale_2"]
        assert codes.dtype == torch.uint8 and blocks.dtype == torch.float8_e4m3fn and scale_2.dtype == torch.float32
        scales = (blocks.to(torch.float32) * scale_2).repeat_interleave(16, -1)
        intended = nearest(truth[name] / scales)
        assert intended.abs().max() == 6, name
        unpacked = unpack_fp4_from_uint8(codes, *truth[name].shape, dtype=torch.float32)
        assert torch.equal(unpacked, intended) and torch.equal(torch.signbit(unpacked), torch.signbit(intended)), name
        by_vllm = dequantize_to_dtype(codes, blocks, scale_2, torch.float32, 16, swizzle=False)
        assert torch.equal(by_vllm, intended * scales), name
        compared += codes.numel() * 2
    print(f"\n{model}: {compared} weights")
    assert compared > 10_000


@needs_corpus
@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_generates_the_same_from_rank_files_as_from_the_checkpoint(tp, llama, tmp_path):
    """With activations in four bits as well, for which vLLM has arithmetic that runs on a CPU."""
    source = llama / "llama-BF16.gguf"
    plain = tensors(convert(source, tmp_path / "plain", "--tp", 1, "--dtype", "nvfp4"))
    names = [name.replace("weight_scale_2", "input_scale") for name in plain if name.endswith("weight_scale_2")]
    entries = {name: {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(entries).encode()
    scales = tmp_path / "scales.safetensors"
    scales.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<f", INPUT_SCALE) * len(names))
    flags = ("--dtype", "nvfp4", "--input-scales", scales, "--config", llama / "hf" / "config.json")
    whole = convert(source, tmp_path / "hf", "--tp", 1, *flags)
    ranks = convert(source, tmp_path / "ranks", "--tp", tp, "--profile", "vllm-0.32", *flags)
    vocab = json.loads((whole / "config.json").read_text())["vocab_size"]
    prompts = [[token % vocab for token in prompt] for prompt in PROMPTS]
    checkpoint, sharded = generate(tmp_path / "tokens.json", tp, [engine(whole, "auto"), engine(ranks, "sharded_state")], prompts, nvfp4=True)
    assert sharded["tokens"] == checkpoint["tokens"]
    assert len({tuple(tokens) for tokens in checkpoint["tokens"]}) > 2
