"""A model to measure with: the shapes of Llama 3 8B with fewer blocks, in the types of a Q4_K_M file, with random weights.

    model.py FILE [--blocks 8]

Eight blocks are 2.0 billion weights, 1.2 GB as a GGUF and 4.0 GB as bf16. Values do not matter for speed, as long as they
are finite; packed bytes are random, scales are of the size of real ones. The same arguments give the same bytes.
"""
import argparse
from pathlib import Path

import numpy
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, LlamaFileType

HIDDEN, INTER, HEADS, KV_HEADS, HEAD, VOCAB = 4096, 14336, 32, 8, 128, 32000


def tensors(blocks):
    """Name, rows, columns and type, in the order of a file that llama.cpp writes; norms have no rows."""
    yield "token_embd.weight", VOCAB, HIDDEN, Type.Q4_K
    for i in range(blocks):
        # llama.cpp gives the first and last eighth of the blocks, and every third between, more bits for two matrices.
        more = Type.Q6_K if i < blocks // 8 or i >= 7 * blocks // 8 or (i - blocks // 8) % 3 == 2 else Type.Q4_K
        yield f"blk.{i}.attn_norm.weight", None, HIDDEN, Type.F32
        yield f"blk.{i}.ffn_down.weight", HIDDEN, INTER, more
        yield f"blk.{i}.ffn_gate.weight", INTER, HIDDEN, Type.Q4_K
        yield f"blk.{i}.ffn_up.weight", INTER, HIDDEN, Type.Q4_K
        yield f"blk.{i}.ffn_norm.weight", None, HIDDEN, Type.F32
        yield f"blk.{i}.attn_k.weight", KV_HEADS * HEAD, HIDDEN, Type.Q4_K
        yield f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD, Type.Q4_K
        yield f"blk.{i}.attn_q.weight", HEADS * HEAD, HIDDEN, Type.Q4_K
        yield f"blk.{i}.attn_v.weight", KV_HEADS * HEAD, HIDDEN, more
    yield "output_norm.weight", None, HIDDEN, Type.F32
    yield "output.weight", VOCAB, HIDDEN, Type.Q6_K


def shape(rows, columns, kind):
    """Shape of a tensor's bytes, rows first."""
    if kind == Type.F32:
        return (columns * 4,)
    return rows, columns // 256 * {Type.Q4_K: 144, Type.Q6_K: 210}[kind]


def content(random, rows, columns, kind):
    """Random blocks: f16 scales are drawn, everything else may be any byte."""
    if kind == Type.F32:
        return random.uniform(0.5, 1.5, columns).astype(numpy.float32)
    size = shape(rows, columns, kind)
    data = numpy.frombuffer(random.bytes(size[0] * size[1]), numpy.uint8).copy().reshape(size)
    scale = random.uniform(0.5e-4, 2e-4, (rows * columns // 256, 2)).astype("<f2").view(numpy.uint8)
    if kind == Type.Q4_K:  # d and dmin, then packed 6-bit scales, then quants
        data.reshape(-1, 144)[:, :4] = scale
    else:  # quants and 8-bit scales, then d
        data.reshape(-1, 210)[:, 208:] = scale[:, :2]
    return data


def write(path, blocks):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    writer = GGUFWriter(unfinished, "llama")
    writer.add_name("Random weights in the shapes of Llama 3")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_block_count(blocks)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    for name, rows, columns, kind in tensors(blocks):
        size = shape(rows, columns, kind)
        if kind == Type.F32:
            writer.add_tensor_info(name, (columns,), numpy.dtype(numpy.float32), columns * 4)
        else:
            writer.add_tensor_info(name, size, numpy.dtype(numpy.uint8), size[0] * size[1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = numpy.random.default_rng(6)
    for _, rows, columns, kind in tensors(blocks):
        writer.write_tensor_data(content(random, rows, columns, kind))
    writer.close()
    unfinished.rename(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--blocks", type=int, default=8)
    a = parser.parse_args()
    write(a.file, a.blocks)
