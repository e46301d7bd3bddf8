"""Folders of low-bit output, and the rules by which the checkpoint of `--tp 1` becomes what a rank holds."""
import json
import re

import gguf
import ml_dtypes
import numpy as np

BLOCK = 128

# What the published FP8 checkpoints hold as E4M3, by the end of the name.
PROJECTIONS = (
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "gate_proj", "up_proj", "down_proj",
    "q_proj", "k_proj", "v_proj",
)

NUMPY = {"U8": np.dtype("u1"), "F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}

# What vLLM holds as F32, and the checkpoint as bf16.
VLLM_F32 = ("indexer.k_norm.weight", "indexer.k_norm.bias")


def header(path):
    """The header of a safetensors file, and its data, which is mapped."""
    raw = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    return json.loads(raw[8 : 8 + length].tobytes()), raw[8 + length :]


def tensors(folder, rank=None):
    """{name: array} of the safetensors files of a folder, or of one rank's. Nothing is read before it is looked at."""
    found = {}
    for path in sorted(folder.glob("*.safetensors" if rank is None else f"model-rank-{rank}-part-*.safetensors")):
        entries, data = header(path)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            assert name not in found, name
            found[name] = data[begin:end].view(NUMPY[entry["dtype"]]).reshape(entry["shape"])
    return found


def grid(n):
    return -(-n // BLOCK)


def is_projection(name):
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in PROJECTIONS


def same(found, expected):
    """Dtype, shape and every bit."""
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def cut(name, array, rank, tp):
    """What a rank of the hf profile holds of a tensor at tp 1: the same rule for codes, scales and rows of kept blocks."""
    leaf = name.removesuffix("_scale_inv").removesuffix(".weight").removesuffix(".qweight").rsplit(".", 1)[-1]
    if leaf in ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "head"):
        n, rest = divmod(array.shape[0], tp)
        assert rest == 0, (name, tp)
        return array[rank * n:(rank + 1) * n]
    if leaf in ("o_proj", "down_proj"):
        n, rest = divmod(array.shape[1], tp)
        assert rest == 0, (name, tp)
        return array[:, rank * n:(rank + 1) * n]
    return array


def joined(name, experts):
    """The weights whose rows a parameter of profile vllm-0.32 joins: a list, or one for each of the stacked experts.

    Of scales: the weights that they belong to. None for what no weight is in: the scalars of attention.
    """
    name = name.removesuffix("_scale_inv")
    if re.search(r"\._(q|k|v|prob)_scale$", name):
        return None
    for only_vllm, ours in [(".mla_attn", ""), (".mtp_block", ""), ("experts._shared_experts._layer", "shared_experts"), (".experts.gate.", ".gate.")]:
        name = name.replace(only_vllm, ours)
    block, _, leaf = name.removesuffix(".weight").rpartition(".")
    stacked = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
    if leaf in stacked:
        block = block.removesuffix(".routed_experts")
        return [[f"{block}.{expert}.{part}.weight" for part in stacked[leaf]] for expert in range(experts)]
    fused = {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "wk_weights_proj": ("wk", "weights_proj"),
    }
    return [f"{block}.{part}.weight" for part in fused[leaf]] if leaf in fused else [name]


def check_rank(held, whole, rank, tp):
    """Every tensor of a rank of profile hf, by the fp8 checkpoint of `--tp 1`."""
    assert set(held) == set(whole)
    for name, array in held.items():
        assert same(array, cut(name, whole[name], rank, tp)), (name, rank)


def check_vllm_rank(folder, whole, rank, tp):
    """Every tensor of a rank of profile vllm-0.32, the draft model's too, by the fp8 checkpoint of `--tp 1`."""
    used = check_joined(tensors(folder, rank), whole, rank, tp)
    if (folder / "mtp").exists():
        used |= check_joined(tensors(folder / "mtp", rank), whole, rank, tp)
    assert used == set(whole)


def check_joined(held, whole, rank, tp):
    """The tensors of one set; gives the names that they hold of the whole."""
    used = set()
    for name, array in held.items():
        suffix = "_scale_inv" if name.endswith("_scale_inv") else ""
        parts = joined(name, array.shape[0] if array.ndim == 3 else 0)
        if parts is None:
            assert array.dtype == np.float32 and array.shape == () and array == 1, name
            continue

        def expected(weights):
            weights = [f"{weight}{suffix}" for weight in weights]
            if weights[0].endswith("shared_head.head.weight") and weights[0] not in whole:
                weights = ["lm_head.weight"]  # The draft model has none of its own.
            used.update(weights)
            return np.concatenate([cut(weight, whole[weight], rank, tp) for weight in weights])

        if array.ndim == 3:
            assert all(same(found, expected(weights)) for found, weights in zip(array, parts, strict=True)), (name, rank)
        else:
            rounded = array.astype(NUMPY["BF16"]) if name.endswith(VLLM_F32) else array
            assert rounded is array or array.dtype == np.float32
            assert same(rounded, expected(parts)), (name, rank)
    return used


def types(folder):
    """{name: ggml type} of kept blocks, by the manifest."""
    manifest = json.loads((folder / "ggshard.json").read_text())
    return {p["name"]: p["blocks"] for p in manifest["parameters"] if "blocks" in p}


def check_kept_rank(held, blocks, direct, plain):
    """Every tensor of a rank of kept blocks, by the types of these, and what `--dtype f32` and another one make of the same model."""
    assert {name.replace("qweight", "weight") for name in held} == set(direct)
    for name, array in held.items():
        if name not in blocks:
            assert same(array, plain[name]), name
            continue
        decoded = gguf.quants.dequantize(array, gguf.GGMLQuantizationType[blocks[name]]).astype("<f4", copy=False)
        assert same(decoded, direct[name.replace("qweight", "weight")]), name


def held_bytes(tensor, form, tp):
    """Bytes of rank 0 of a weight of profile hf, by its whole shape and cut in the bf16 plan."""
    shape, types = list(tensor["shape"]), {kind for _, kind in tensor["sources"]}
    if tensor["cut"] in ("column", "vocab"):
        shape[0] //= tp
    elif tensor["cut"] == "row":
        shape[-1] //= tp
    elements = int(np.prod(shape))
    if form == "fp8" and is_projection(tensor["name"]):
        return elements + 4 * grid(shape[0]) * grid(shape[1])
    if form == "nvfp4":
        return elements // 2 + elements // 16 + 4
    block, bytes_ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[min(types)]]
    if form == "keep" and block > 1 and not tensor["name"].endswith("kv_b_proj.weight"):
        return elements // block * bytes_
    return elements * {"BF16": 2, "F32": 4}[tensor["dtype"]]
