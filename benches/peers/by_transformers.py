"""A GGUF through transformers: from_pretrained(gguf_file=...) as bf16, then save_pretrained. One file, no tensor parallelism.

    by_transformers.py MODEL.gguf FOLDER [--fsync]
"""
import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", type=Path)
parser.add_argument("folder", type=Path)
parser.add_argument("--fsync", action="store_true")
a = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(a.model.parent, gguf_file=a.model.name, dtype=torch.bfloat16)
# The weights are decoded, but transformers 5 takes the model for a quantized one that it cannot save.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(a.folder)
if a.fsync:
    for path in a.folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
