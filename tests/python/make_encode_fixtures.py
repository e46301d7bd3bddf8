#!/usr/bin/env python3
"""Makes fixtures/encode/: values, and what the encoders must make of them. Run by test_encode.py, which compares.

    make_encode_fixtures.py FOLDER

Nothing here uses ggshard. Rounding to E4M3 and E2M1 is that of ml_dtypes, everything else that of numpy; weights of a
real file are decoded by gguf-py. Each case has tensors `CASE.WHAT`. A case without values is named by a weight of MODEL, and
has the upper left of it.
"""
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "models" / "glm_moe_dsa-UD-IQ2_XXS.gguf"
F32 = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
TINY = np.finfo(F32).tiny


def model(name, rows, cols):
    """The upper left of a weight of the model."""
    tensor = next(tensor for tensor in gguf.GGUFReader(MODEL).tensors if tensor.name == name)
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(F32)
    return np.ascontiguousarray(values.reshape(-1, values.shape[-1])[:rows, :cols])


def to_e4m3(values):
    return np.clip(values, -448, 448).astype(E4M3)


def to_e2m1(values):
    return np.clip(values, -6, 6).astype(E2M1)


def around(points):
    """The points, the middles between them, and the f32 beside each; both signs."""
    points = np.asarray(points, F32)
    middles = (points[1:] + points[:-1]) / F32(2)
    both = np.concatenate([points, middles])
    near = np.concatenate([both, np.nextafter(both, F32(np.inf)), np.nextafter(both, F32(-np.inf))])
    near = near[(near >= 0) & (near <= points[-1])]
    return np.concatenate([near, -near])


def shaped(values, cols, first):
    """Rows of one block that begin with `first`, so that blocks have a known scale; then the values, then zeros."""
    rows = -(-len(values) // (cols - 1))
    padded = np.zeros(rows * (cols - 1), F32)
    padded[: len(values)] = values
    return np.hstack([np.full((rows, 1), first, F32), padded.reshape(rows, cols - 1)])


def figures(values, decoded):
    """What Deviation says: relative root mean square, largest error."""
    errors = values.astype(np.float64) - decoded.astype(np.float64)
    size = np.sqrt((values.astype(np.float64) ** 2).sum())
    rms = np.sqrt((errors**2).sum()) / size if size else 0.0
    return np.array([rms, np.abs(errors).max()], np.float64)


# ---- fp8: a band of up to 128 rows, blocks of 128 columns.


def fp8(values):
    rows, cols = values.shape
    codes, scales, decoded = np.zeros((rows, cols), np.uint8), [], np.zeros((rows, cols), F32)
    for start in range(0, cols, 128):
        block = values[:, start : start + 128]
        amax = np.abs(block).max()
        scale = F32(1) if amax == 0 else max(amax / F32(448), TINY)
        assert scale.dtype == F32
        code = to_e4m3(block / scale)
        codes[:, start : start + 128] = code.view(np.uint8)
        decoded[:, start : start + 128] = code.astype(F32) * scale
        scales.append(scale)
    return {"codes": codes, "scales": np.array(scales, F32), "figures": figures(values, decoded)}


def fp8_cases():
    rng = np.random.default_rng(8)
    every = np.arange(127, dtype=np.uint8).view(E4M3).astype(F32)
    yield "ties", shaped(around(every), 128, 448)
    # Scales that are no powers of two: their codes are rounded from quotients that are.
    yield "ragged", (rng.standard_normal((5, 300)) * rng.choice([1e-3, 0.1, 30], (5, 300))).astype(F32)
    yield "one column", rng.standard_normal((3, 129)).astype(F32)
    sizes = np.exp2(rng.integers(-126, 127, (2, 8))).astype(F32)
    yield "sizes", np.repeat(sizes, 128, 1)[:, : 7 * 128 + 3] * rng.standard_normal((2, 7 * 128 + 3)).astype(F32)
    zeros = np.zeros((2, 256), F32)
    zeros[1, ::2] = -0.0
    zeros[0, 200] = 1
    yield "zeros", zeros
    tiny = np.array([[1, -1, 3, 2**20, 2**22, -(2**22), 2**23 - 1, 0]])
    sign = np.where(tiny < 0, 0x80000000, 0).astype(np.uint32)
    yield "subnormal", (np.abs(tiny).astype(np.uint32) | sign).view(F32)
    yield "subnormal scale", np.array([[TINY * 300, -TINY * 1.5, TINY * 447.9, TINY / 8]], F32)
    yield "largest", np.array([[np.finfo(F32).max, -np.finfo(F32).max, 1e38, 1]], F32)


# ---- nvfp4: blocks of 16 along rows.


def nvfp4_steps(scales, scale_2):
    """Decoded scales, a column per block."""
    return (scales.astype(F32) * F32(scale_2)).reshape(-1, 1)


def nvfp4_codes(blocks, scales, scale_2):
    steps = nvfp4_steps(scales, scale_2)
    codes = to_e2m1(blocks / steps)
    return codes, codes.astype(F32) * steps


def nvfp4(values, scale_2=None, search=False):
    scale_2 = F32(scale_2 or max(np.abs(values).max() / F32(2688), TINY * F32(512)) or 1)
    if not values.any():
        scale_2 = F32(1)
    blocks = values.reshape(-1, 16)
    ratios = np.abs(blocks).max(1) / (F32(6) * scale_2)
    scales = to_e4m3(np.where(ratios == 0, F32(1), np.maximum(ratios, F32(2**-9))))
    codes, decoded = nvfp4_codes(blocks, scales, scale_2)
    if search:
        first = scales.view(np.uint8).astype(int)
        least = ((blocks.astype(np.float64) - decoded) ** 2).sum(1)
        for nudge in range(-2, 7):
            other = np.clip(first + nudge, 1, 0x7E).astype(np.uint8).view(E4M3)
            other_codes, other_decoded = nvfp4_codes(blocks, other, scale_2)
            error = ((blocks.astype(np.float64) - other_decoded) ** 2).sum(1)
            better = error < least * (1 - 2**-16)
            scales, least = np.where(better, other, scales), np.where(better, error, least)
            codes = np.where(better[:, None], other_codes, codes)
            decoded = np.where(better[:, None], other_decoded, decoded)
    nibbles = codes.view(np.uint8).reshape(values.shape) & 15
    return {
        "codes": nibbles[:, 0::2] | nibbles[:, 1::2] << 4,
        "scales": scales.view(np.uint8).reshape(len(values), -1),
        "scale_2": np.array([scale_2], F32),
        "figures": figures(values, decoded.reshape(values.shape)),
    }


def nvfp4_cases():
    rng = np.random.default_rng(4)
    every = np.arange(8, dtype=np.uint8).view(E2M1).astype(F32)
    # Block scale and weight_scale_2 are 1.
    yield "ties", shaped(around(every), 16, 6), 1
    # Block scales, the middles between them, and what lies beside.
    points = np.concatenate([around(np.arange(low, low + 4, dtype=np.uint8).view(E4M3).astype(F32)) for low in (1, 6, 56, 123)])
    ties = np.zeros((len(points), 16), F32)
    ties[:, 5] = points * F32(6)
    yield "scale ties", ties, 1
    yield "gauss", (rng.standard_normal((4, 256)) * 0.02).astype(F32), None
    # The scale of a larger weight, so that block scales are small, and of a smaller one, so that values are cut off.
    yield "shared", (rng.standard_normal((2, 64)) * np.exp2(rng.integers(-14, 1, (2, 1)))).astype(F32), 1 / 8
    yield "cut off", (rng.standard_normal((1, 64)) * 1000).astype(F32), 2**-5
    zeros = np.zeros((2, 32), F32)
    zeros[1, ::3] = -0.0
    yield "zeros", zeros, None
    zeros = zeros.copy()
    zeros[0, 20] = 1e-30
    yield "nearly zeros", zeros, None
    yield "tiny", (np.arange(32, dtype=np.uint32) * 1000 + 1).view(F32).reshape(1, 32), None
    yield "largest", np.array([[np.finfo(F32).max, -1e38] + [0.0] * 13 + [1]], F32), None


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"all codes": np.arange(256, dtype=np.uint8).view(E4M3).astype(F32)}
    for name, values in fp8_cases():
        tensors |= {f"{name}.values": values} | {f"{name}.{what}": value for what, value in fp8(values).items()}
    for name, rows, cols in [("blk.0.attn_output.weight", 128, 160), ("output.weight", 16, 256)]:
        tensors |= {f"{name}.{what}": value for what, value in fp8(model(name, rows, cols)).items()}
    save_file(tensors, folder / "fp8.safetensors")

    tensors = {"all codes": np.arange(16, dtype=np.uint8).view(E2M1).astype(F32)}
    cases = list(nvfp4_cases())
    tensors |= {f"{name}.values": values for name, values, _ in cases}
    cases += [(name, model(name, 24, 256), None) for name in ("blk.0.attn_output.weight", "output.weight")]
    for name, values, scale_2 in cases:
        tensors |= {f"{name}.{what}": value for what, value in nvfp4(values, scale_2).items()}
        tensors |= {f"{name}.searched.{what}": value for what, value in nvfp4(values, scale_2, search=True).items()}
    save_file(tensors, folder / "nvfp4.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
