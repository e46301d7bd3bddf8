"""What people write: a Llama GGUF to bf16 safetensors, one file per rank, with packages of PyPI alone.

    script.py MODEL.gguf FOLDER --tp N [--by gguf|libgguf] [--fsync]

One process and one thread (NumPy has none for element-wise work), tensor by tensor: read by `gguf`, decoded to f32 by
`gguf` or `libgguf`, rounded to bf16 by `ml_dtypes`, un-permuted (llama.cpp stores rows of q and k in pairs) and cut; every
tensor is decoded once, whatever tp is. A rank's tensors are collected in memory and written by `safetensors`, which does
not copy them. That is the whole model in memory, as usual.

The values and names are those of `ggshard convert MODEL FOLDER --tp N`; compare.py checks it.
"""
import argparse
import os
import re
from pathlib import Path

import ml_dtypes
import numpy
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"output_norm", "attn_norm", "ffn_norm"}
BY_COLUMNS = {"attn_output", "ffn_down"}


def decode(by, tensor):
    if by == "gguf" or tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return dequantize(tensor.data, tensor.tensor_type)
    import libgguf

    return libgguf.dequantize_rows(tensor.data, tensor.tensor_type)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--by", choices=["gguf", "libgguf"], default="gguf")
    parser.add_argument("--fsync", action="store_true")
    a = parser.parse_args()

    reader = GGUFReader(a.model)
    heads = {
        "attn_q": reader.get_field("llama.attention.head_count").contents(),
        "attn_k": reader.get_field("llama.attention.head_count_kv").contents(),
    }
    if heads["attn_k"] % a.tp:
        raise SystemExit(f"{heads['attn_k']} KV heads are not divided among {a.tp} ranks here")
    ranks = [{} for _ in range(a.tp)]
    for tensor in reader.tensors:
        block, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        name = (f"model.layers.{block}." if block else "") + NAMES[kind] + ".weight"
        values = decode(a.by, tensor).astype(ml_dtypes.bfloat16)
        if kind in heads:
            rows, columns = values.shape
            values = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        for rank, its in enumerate(ranks):
            if kind in WHOLE:
                its[name] = values
            elif kind in BY_COLUMNS:
                width = values.shape[1] // a.tp
                its[name] = numpy.ascontiguousarray(values[:, rank * width:(rank + 1) * width])
            else:
                height = values.shape[0] // a.tp
                its[name] = values[rank * height:(rank + 1) * height]
    a.folder.mkdir(parents=True, exist_ok=True)
    for rank, its in enumerate(ranks):
        path = a.folder / f"model-rank-{rank}.safetensors"
        save_file(its, path)
        if a.fsync:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


if __name__ == "__main__":
    main()
