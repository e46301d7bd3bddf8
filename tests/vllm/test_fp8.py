"""Weights in fp8 as torch sees them: its own `float8_e4m3fn` gives our bytes, and what it decodes is what the format means."""
import pytest
import torch
from engines import ROOT, convert
from safetensors.torch import load_file

BLOCK = 128
FIXTURES = ROOT / "fixtures" / "models"
MODELS = {"glm_moe_dsa": FIXTURES / "glm_moe_dsa-UD-IQ2_XXS.gguf", "deepseek_v3": FIXTURES / "deepseek_v3-split"}
# Every number of E4M3 that is not negative, by its code: 4 bits of exponent, 3 of mantissa; 127 is NaN.
NUMBERS = torch.tensor([(m / 8 * 2**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def blocks(matrix):
    """[.., R, C] as [.., blocks, rows, blocks, columns], filled up with zeros at the end."""
    rows, cols = matrix.shape[-2:]
    filled = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return filled.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def scales_of(matrix):
    largest = blocks(matrix).abs().amax((-3, -1))
    return torch.where(largest == 0, torch.ones(()), (largest / torch.tensor(448.0)).clamp(min=torch.finfo(torch.float32).tiny))


def expanded(scales, shape):
    """A scale per element."""
    return scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., : shape[-2], : shape[-1]]


def nearest(scaled):
    """Codes of the nearest numbers of E4M3, of two equally near ones the even code, found in the table of all numbers."""
    magnitudes = scaled.abs()
    between = (NUMBERS[:-1] + NUMBERS[1:]) / 2  # exact in f32
    below, above = (torch.bucketize(magnitudes, between, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above)
    return torch.where(torch.signbit(scaled), codes + 128, codes)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def tensors(folder):
    """[{name: tensor}], a rank's each; those of a draft model are ranks of their own."""
    ranks = {}
    for path in sorted(folder.rglob("*.safetensors")):
        ranks.setdefault(str(path).split("-part-")[0], {}).update(load_file(path))
    return list(ranks.values())


@pytest.mark.parametrize("profile, tp", [("hf", 1), ("hf", 2), ("vllm-0.32", 1), ("vllm-0.32", 2)])
@pytest.mark.parametrize("model", MODELS)
def test_every_byte_and_value_is_that_of_torch(model, profile, tp, tmp_path):
    flags = ("--profile", profile, "--tp", tp)
    truth, found = (tensors(convert(MODELS[model], tmp_path / dtype, "--dtype", dtype, *flags)) for dtype in ("f32", "fp8"))
    assert len(truth) == len(found) >= tp
    compared = 0
    for direct, held in zip(truth, found, strict=True):
        encoded = [name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn]
        assert encoded and set(held) == set(direct) | {f"{name}_scale_inv" for name in encoded}
        for name in encoded:
            values, codes, scales = direct[name], held[name], held[f"{name}_scale_inv"]
            assert values.dtype == scales.dtype == torch.float32 and codes.shape == values.shape
            assert torch.equal(bits(scales), bits(scales_of(values))), name
            scale = expanded(scales_of(values), values.shape)
            # One division in f32. Torch makes NaN of what is beyond 464, and nothing is.
            scaled = (values / scale).clamp(-448, 448)
            assert torch.equal(bits(codes), bits(scaled.to(torch.float8_e4m3fn))), name
            # Decoded as whoever loads it does, against the numbers of the table.
            meant = NUMBERS[nearest(scaled) % 128].copysign(scaled) * scale
            assert torch.equal(bits(codes.to(torch.float32) * expanded(scales, values.shape)), bits(meant)), name
            compared += values.numel()
    print(f"\n{model}, {profile}, tp {tp}: {compared} weights")
    assert compared > 1_000_000


def test_the_table_is_that_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(bits(decoded[:127]), bits(NUMBERS)) and torch.equal(bits(decoded[128:255]), bits(-NUMBERS))
    assert decoded[[127, 255]].isnan().all()
    # Ties, and everything that a division by the scale can give.
    ties = torch.cat([NUMBERS, (NUMBERS[:-1] + NUMBERS[1:]) / 2])
    around = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(448.0))])
    around = torch.cat([around, -around])
    assert torch.equal(nearest(around).to(torch.uint8), bits(around.to(torch.float8_e4m3fn)))
