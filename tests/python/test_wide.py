"""Low-bit output of a model whose matrices are as wide as real ones: GGSHARD_WIDE names its GGUF.

Any DeepSeek or GLM file will do whose cuts at tp 8 fall between blocks of 128 and 256, as those of the published models do. Disk is
needed for its weights at one byte each, twice; memory for one parameter. Without the variable the same rules are checked on small
models, by test_low_bits.py.
"""
import json
import os
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import BIN, ok, refused, run
from low_bits import NUMPY, check_rank, check_vllm_rank, header, same, tensors

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
    # Rank by rank, so that one is on the disk at a time; sealed, so that it can be verified.
    compared = 0
    for rank in range(tp):
        folder = convert(tmp_path / "out", "--tp", tp, "--dtype", "fp8", "--profile", profile, "--ranks", rank, "--seal")
        held = tensors(folder, rank)
        compared += sum(array.size for array in held.values())
        if profile == "hf":
            check_rank(held, whole, rank, tp)
        else:
            check_vllm_rank(folder, whole, rank, tp)
        if rank == tp - 1:
            verified(folder)
        shutil.rmtree(folder)
    print(f"\n{profile}, fp8, tp {tp}: {compared} elements")


def verified(folder):
    """By its own digests, and made again from the source."""
    for against in ((), ("--source", WIDE)):
        report = json.loads(ok("verify", folder, *against, "--json", timeout=HOUR))
        assert report["ok"] and report["tensors"] > 40
