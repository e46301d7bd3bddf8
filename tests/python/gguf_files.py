"""GGUF files: a header reader of our own, and files written by the `gguf` package, which shares no code with ggshard."""
import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Info(NamedTuple):
    """One entry of a GGUF's table of tensors; `shape` is row-major, slowest axis first."""

    name: str
    shape: tuple
    type: int
    offset: int


def read_header(path):
    """Metadata and table of tensors of a GGUF whose data may be absent."""
    raw = Path(path).read_bytes()
    at = 0

    def take(code):
        nonlocal at
        (value,) = struct.unpack_from("<" + code, raw, at)
        at += struct.calcsize("<" + code)
        return value

    def text():
        nonlocal at
        length = take("Q")
        at += length
        return raw[at - length : at].decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            item = take("I")
            return [value(item) for _ in range(take("Q"))]
        return take(SCALARS[kind])

    assert take("4s") == b"GGUF" and take("I") in (2, 3)
    tensors, pairs = take("Q"), take("Q")
    metadata = {}
    for _ in range(pairs):
        key = text()
        metadata[key] = value(take("I"))
    infos = []
    for _ in range(tensors):
        name = text()
        shape = tuple(reversed([take("Q") for _ in range(take("I"))]))
        infos.append(Info(name, shape, take("I"), take("Q")))
    return metadata, infos


def readers(source):
    """A reader of the `gguf` package for a file, or for each part of a folder's split set."""
    source = Path(source)
    return [gguf.GGUFReader(p) for p in (sorted(source.glob("*.gguf")) if source.is_dir() else [source])]


def rewrite(source, target, vocab=None, rename=None, leave_out=(), **split):
    """Writes a model again with the `gguf` package: fewer vocabulary rows, other names, or as a split set (`split_max_tensors`).

    Gives the path of the (first) file.
    """
    parts = readers(source)
    fields = parts[0].fields
    arch = fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch, **split)
    for key, field in fields.items():
        if key.startswith(("GGUF.", "split.")) or key == "general.architecture":
            continue
        value = field.contents()
        if vocab and key == f"{arch}.vocab_size":
            value = vocab
        if vocab and key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            value = value[:vocab]
        kind = field.types[0]
        writer.add_key_value(key, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in leave_out:
                continue
            data = tensor.data
            if vocab and tensor.name in ("token_embd.weight", "output.weight"):
                data = data[:vocab]
            name = (rename or {}).get(tensor.name, tensor.name)
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = Path(target)
    if split:
        return next(iter(sorted(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))))
    return target


def tiny(target, arch, tensors):
    """Writes a small GGUF of an architecture of that name with F32 arrays."""
    writer = gguf.GGUFWriter(target, arch)
    writer.add_block_count(1)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(target)
