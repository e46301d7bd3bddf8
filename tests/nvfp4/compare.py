#!/usr/bin/env python3
"""nvfp4 next to a public quantizer: MLX's, on the same values, with the same weight_scale_2.

Ours is the independent encoder of tests/python/make_encode_fixtures.py, whose bytes tests/encode.rs has the program give.
Both results are decoded by the same formula. Values, rather than codes, are compared with each other: MLX has no negative
zero, which is one in thirty of ours. Fails if a search is worse than the public quantizer, or no search by more than
a hundredth of the squared error.
"""
import sys
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from make_encode_fixtures import model, nvfp4  # noqa: E402


def decoded(codes, scales, scale_2):
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return values * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, -1) * float(scale_2)


def relative_rms(values, found):
    return np.sqrt(((values - found) ** 2).sum() / (values.astype(np.float64) ** 2).sum())


def theirs(values):
    """Packed codes and block scales. What they call the global scale is the largest magnitude."""
    amax = mx.array(np.abs(values).max())
    words, scales = mx.quantize(mx.array(values), mode="nvfp4", global_scale=amax)
    return np.array(words).view(np.uint8).reshape(len(values), -1), np.array(scales)


def main():
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(1)
    samples = {
        "Gaussian, 256 x 1024": (rng.standard_normal((256, 1024)) * 0.02).astype(np.float32),
        "Student t, 5 degrees, 256 x 1024": (rng.standard_t(5, (256, 1024)) * 0.02).astype(np.float32),
    }
    for name in ("blk.0.attn_output.weight", "output.weight", "token_embd.weight"):
        samples[f"{name} of the toy model"] = model(name, None, None)
    print("| values | MLX | ours | ours, searched | same scales | same values |\n|---|---|---|---|---|---|")
    faults = []
    for name, values in samples.items():
        ours, searched = nvfp4(values), nvfp4(values, search=True)
        scale_2 = ours["scale_2"][0]
        codes, scales = theirs(values)
        results = [decoded(codes, scales, scale_2)]
        results += [decoded(found["codes"], found["scales"], scale_2) for found in (ours, searched)]
        errors = [relative_rms(values, result) for result in results]
        same_scales, same_values = (scales == ours["scales"]).mean(), (results[0] == results[1]).mean()
        figures = " | ".join(f"{error:.5f}" for error in errors)
        print(f"| {name} | {figures} | {same_scales:.4%} | {same_values:.4%} |")
        if errors[2] > errors[0] or errors[1] ** 2 > 1.01 * errors[0] ** 2:
            faults.append(name)
    if faults:
        sys.exit("worse than MLX: " + ", ".join(faults))


if __name__ == "__main__":
    main()
