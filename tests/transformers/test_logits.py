"""transformers computes the same logits, bit for bit, from our folder as from the checkpoint the GGUF was made of.

Needs torch and transformers (`make test-transformers`) and, for BF16 models with their original checkpoints, GGSHARD_CORPUS.
"""
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("GGSHARD_BIN", ROOT / "target" / "release" / "ggshard")).resolve()
CORPUS = Path(os.environ["GGSHARD_CORPUS"]).resolve() if os.environ.get("GGSHARD_CORPUS") else None
MODELS = ["serving/deepseek_v3", "models/deepseek_v3", "models/deepseek_v2", "models/deepseek_v2_lite", "models/glm_moe_dsa"]

logging.set_verbosity_error()
pytestmark = pytest.mark.skipif(CORPUS is None, reason="GGSHARD_CORPUS names no corpus")


def load(folder):
    """The model, and the weights that the files lack or have too many of."""
    torch.manual_seed(0)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    return model.eval(), info


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """sources(name): the BF16 GGUF and the folder of the original checkpoint."""
    base = tmp_path_factory.mktemp("corpus")

    def find(name):
        folder = CORPUS / name
        model = folder.name
        if not (folder / "hf").is_dir():
            archive = folder / f"{model}.tar.zst"
            zstd = subprocess.Popen(["zstd", "-q", "-d", "--long=27", "-c", archive], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", base], stdin=zstd.stdout, check=True)
            assert zstd.wait() == 0
            folder = base / model
        return folder / f"{model}-BF16.gguf", folder / "hf"

    return find


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal(sources, tmp_path, name):
    gguf, original = sources(name)
    ours = tmp_path / "ours"
    subprocess.run([BIN, "convert", gguf, ours, "--tp", "1", "--config", original / "config.json"], check=True)
    (want, want_info), (got, got_info) = load(original), load(ours)
    assert set(got_info["missing_keys"]) == set(want_info["missing_keys"]) == set()
    # The block after the last is the MTP block, which transformers does not load.
    layers = json.loads((original / "config.json").read_text())["num_hidden_layers"]
    for info in (got_info, want_info):
        assert [k for k in info["unexpected_keys"] if not re.match(rf"model\.layers\.{layers}\.", k)] == []

    weights = dict(want.named_parameters()) | dict(want.named_buffers())
    mine = dict(got.named_parameters()) | dict(got.named_buffers())
    assert weights.keys() == mine.keys() and weights
    different = [k for k, v in weights.items() if v.dtype != mine[k].dtype or not torch.equal(v, mine[k])]
    assert different == []

    ids = torch.randint(0, want.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(7))
    a, b = logits(want, ids), logits(got, ids)
    assert a.shape == (2, 48, want.config.vocab_size) and torch.isfinite(a).all() and a.std() > 0
    largest = (a.float() - b.float()).abs().max().item()
    print(f"\n{name}: {a.numel()} logits, std {a.float().std():.4f}, {(a != b).sum().item()} differ, at most by {largest}")
    assert torch.equal(a, b)
    # One changed weight shows, so the comparison can fail.
    with torch.no_grad():
        got.get_input_embeddings().weight[ids[0, 0]] += 1
    assert not torch.equal(a, logits(got, ids))
