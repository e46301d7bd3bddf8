//! A made-up model that uses every word of the mapping language, with a mapping of its own and its truth.
#![allow(dead_code, reason = "each test binary uses some of it")]

use ggshard::gguf::{GgmlType, GgufSet};
use ggshard::mapping::Mapping;

use super::gguf_writer::GgufBuilder;
use super::truth::{Shared, Truth, decode};

pub const LAYERS: usize = 2;
pub const HIDDEN: usize = 32;
pub const HEADS: usize = 4;
pub const KV: usize = 2;
pub const HEAD: usize = 8;
pub const RANK: usize = 32;
pub const MOE: usize = 16;
pub const EXPERTS: usize = 3;
pub const VOCAB: usize = 100;

/// Heads whose rows llama.cpp stores pairwise, fewer key and value heads than ranks, fused projections taken apart by
/// rows, interleaved parts of which one is transposed, scales per expert, norms with a constant added, a vocabulary
/// that needs padding, cut biases, a stacked tensor of three axes.
pub const MAPPING: &str = r#"
name = "toy"
extends = "common"
class = "ToyForCausalLM"

[dims]
hidden  = { key = "embedding_length" }
layers  = { key = "block_count" }
heads   = { key = "attention.head_count" }
kv      = { key = "attention.head_count_kv" }
head    = { key = "attention.key_length" }
rank    = { axis = -1, of = "blk.*.attn_v_b.weight" }
moe     = { key = "expert_feed_forward_length" }
experts = { key = "expert_count" }
vocab   = { axis = 0, of = "token_embd.weight" }

[loops]
layer  = "layers"
expert = "experts"

[[weight]]
name  = "embed.weight"
shape = ["vocab", "hidden"]
cut   = "vocab"
from  = { gguf = "token_embd.weight" }

[[weight]]
name  = "layers.{layer}.norm.weight"
shape = ["hidden"]
cut   = "replicated"
from  = { gguf = "blk.{layer}.attn_norm.weight", add = -1.0 }

[[weight]]
name  = "layers.{layer}.q.weight"
shape = ["heads * head", "hidden"]
cut   = { column = "heads" }
from  = { gguf = "blk.{layer}.attn_q.weight", unpermute = "heads" }

[[weight]]
name  = "layers.{layer}.q.bias"
shape = ["heads * head"]
cut   = { column = "heads" }
from  = { gguf = "blk.{layer}.attn_q.bias", unpermute = "heads" }

[[weight]]
name  = "layers.{layer}.k.weight"
shape = ["kv * head", "hidden"]
cut   = { column = "kv", repeat = true }
from  = { gguf = "blk.{layer}.attn_k.weight", unpermute = "kv" }

[[weight]]
name  = "layers.{layer}.v.weight"
shape = ["kv * head", "hidden"]
cut   = { column = "kv", repeat = true }
from  = { gguf = "blk.{layer}.attn_v.weight" }

[[weight]]
name  = "layers.{layer}.v.bias"
shape = ["kv * head"]
cut   = { column = "kv", repeat = true }
from  = { gguf = "blk.{layer}.attn_v.bias" }

[[weight]]
name  = "layers.{layer}.o.weight"
shape = ["hidden", "heads * head"]
cut   = { row = "heads" }
from  = { gguf = "blk.{layer}.attn_output.weight" }

[[weight]]
name  = "layers.{layer}.x.q.weight"
shape = ["heads * head", "hidden"]
cut   = { column = "heads" }
from  = { gguf = "blk.{layer}.attn_qkv.weight", shape = ["(heads + 2 * kv) * head", "hidden"], rows = [0, "heads * head"] }

[[weight]]
name  = "layers.{layer}.x.k.weight"
shape = ["kv * head", "hidden"]
cut   = { column = "kv", repeat = true }
from  = { gguf = "blk.{layer}.attn_qkv.weight", shape = ["(heads + 2 * kv) * head", "hidden"], rows = ["heads * head", "kv * head"] }

[[weight]]
name  = "layers.{layer}.x.v.weight"
shape = ["kv * head", "hidden"]
cut   = { column = "kv", repeat = true }
from  = { gguf = "blk.{layer}.attn_qkv.weight", shape = ["(heads + 2 * kv) * head", "hidden"], rows = ["(heads + kv) * head", "kv * head"] }

[[weight]]
name  = "layers.{layer}.kv_b.weight"
shape = ["heads * 2 * head", "rank"]
cut   = { column = "heads" }
from  = { per = "heads", parts = [
  { gguf = "blk.{layer}.attn_k_b.weight", shape = ["heads", "rank", "head"], transpose = true },
  { gguf = "blk.{layer}.attn_v_b.weight", shape = ["heads", "head", "rank"] },
] }

[[weight]]
name  = "layers.{layer}.router.weight"
shape = ["experts", "hidden"]
cut   = "replicated"
dtype = "f32"
from  = { gguf = "blk.{layer}.ffn_gate_inp.weight" }

[[weight]]
name  = "layers.{layer}.experts.{expert}.gate.weight"
shape = ["moe", "hidden"]
cut   = "column"
from  = { gguf = "blk.{layer}.ffn_gate_up_exps.weight", unstack = "expert", shape = ["2 * moe", "hidden"], rows = [0, "moe"] }

[[weight]]
name  = "layers.{layer}.experts.{expert}.up.weight"
shape = ["moe", "hidden"]
cut   = "column"
from  = { gguf = "blk.{layer}.ffn_gate_up_exps.weight", unstack = "expert", shape = ["2 * moe", "hidden"], rows = ["moe", "moe"] }

[[weight]]
name  = "layers.{layer}.experts.{expert}.down.weight"
shape = ["hidden", "moe"]
cut   = "row"
from  = { gguf = "blk.{layer}.ffn_down_exps.weight", unstack = "expert" }

[[weight]]
name  = "layers.{layer}.conv.weight"
shape = ["heads", 3, "head"]
cut   = "column"
from  = { gguf = "blk.{layer}.conv.weight" }

[[weight]]
name  = "head.weight"
shape = ["vocab", "hidden"]
cut   = "vocab"
from  = { gguf = "output.weight" }
"#;

pub fn mapping() -> Mapping {
    Mapping::from_texts(&[MAPPING.to_owned()]).unwrap()
}

/// The file. Its order of tensors is not that of the rules.
pub fn builder() -> GgufBuilder {
    use GgmlType::*;
    let n = |list: &[usize]| -> Vec<u64> { list.iter().map(|n| *n as u64).collect() };
    let mut seed = 0;
    let mut file = GgufBuilder::architecture("toy")
        .kv_u32("toy.embedding_length", HIDDEN as u32)
        .kv_u32("toy.block_count", LAYERS as u32)
        .kv_u32("toy.attention.head_count", HEADS as u32)
        .kv_u32("toy.attention.head_count_kv", KV as u32)
        .kv_u32("toy.attention.key_length", HEAD as u32)
        .kv_u32("toy.expert_feed_forward_length", MOE as u32)
        .kv_u32("toy.expert_count", EXPERTS as u32)
        .random("output.weight", F16, &n(&[HIDDEN, VOCAB]), 1000)
        .random("rope_freqs.weight", F32, &n(&[HEAD / 2]), 1001)
        .random("token_embd.weight", Q8_0, &n(&[HIDDEN, VOCAB]), 1002);
    for layer in 0..LAYERS {
        let tensors: [(&str, GgmlType, Vec<u64>); 17] = [
            ("ffn_down_exps.weight", F16, n(&[MOE, HIDDEN, EXPERTS])),
            ("ffn_down_exps.scale", F32, n(&[1])),
            ("attn_v_b.weight", Q4_0, n(&[RANK, HEAD, HEADS])),
            ("attn_k_b.weight", F32, n(&[HEAD, RANK, HEADS])),
            ("attn_v.bias", F32, n(&[KV * HEAD])),
            ("attn_v.weight", Q8_0, n(&[HIDDEN, KV * HEAD])),
            ("attn_k.weight", Q8_0, n(&[HIDDEN, KV * HEAD])),
            ("attn_q.weight", Q8_0, n(&[HIDDEN, HEADS * HEAD])),
            ("attn_q.bias", F32, n(&[HEADS * HEAD])),
            ("attn_norm.weight", F32, n(&[HIDDEN])),
            ("attn_output.weight", Q8_0, n(&[HEADS * HEAD, HIDDEN])),
            ("attn_output.input_scale", F32, n(&[1])),
            ("attn_qkv.weight", BF16, n(&[HIDDEN, (HEADS + 2 * KV) * HEAD])),
            ("ffn_gate_inp.weight", F32, n(&[HIDDEN, EXPERTS])),
            ("ffn_gate_up_exps.weight", Q8_0, n(&[HIDDEN, 2 * MOE, EXPERTS])),
            ("ffn_gate_up_exps.scale", F32, n(&[EXPERTS])),
            ("conv.weight", F16, n(&[HEAD, 3, HEADS])),
        ];
        for (name, ty, ne) in tensors {
            seed += 1;
            file = file.random(&format!("blk.{layer}.{name}"), ty, &ne, seed);
        }
    }
    file
}

pub fn set() -> GgufSet {
    GgufSet::from_bytes("toy.gguf", builder().build()).unwrap()
}

/// What the mapping must make of the file.
pub fn truth(set: &GgufSet) -> Vec<Truth> {
    use Shared::*;
    let mut out = vec![
        Truth::new("embed.weight", &[VOCAB, HIDDEN], Vocab, decode(set, "token_embd.weight")),
        Truth::new("head.weight", &[VOCAB, HIDDEN], Vocab, decode(set, "output.weight")),
    ];
    // Row t·half + i of a head is stored as row 2·i + t.
    let unpermuted = |stored: Vec<f32>, width: usize| -> Vec<f32> {
        let row = |r: usize| {
            let (head, t, i) = (r / HEAD, r % HEAD / (HEAD / 2), r % (HEAD / 2));
            head * HEAD + 2 * i + t
        };
        (0..stored.len()).map(|at| stored[row(at / width) * width + at % width]).collect()
    };
    for layer in 0..LAYERS {
        let source = |name: &str| decode(set, &format!("blk.{layer}.{name}"));
        let mut put = |name: &str, shape: &[usize], shared: Shared, values: Vec<f32>| {
            let truth = Truth::new(format!("layers.{layer}.{name}"), shape, shared, values);
            out.push(if name == "router.weight" { truth.pinned() } else { truth });
        };
        put("norm.weight", &[HIDDEN], Replicated, source("attn_norm.weight").iter().map(|v| v + -1.0).collect());
        let (q, kv) = (HEADS * HEAD, KV * HEAD);
        put("q.weight", &[q, HIDDEN], Heads(HEADS), unpermuted(source("attn_q.weight"), HIDDEN));
        put("q.bias", &[q], Heads(HEADS), unpermuted(source("attn_q.bias"), 1));
        put("k.weight", &[kv, HIDDEN], Heads(KV), unpermuted(source("attn_k.weight"), HIDDEN));
        put("v.weight", &[kv, HIDDEN], Heads(KV), source("attn_v.weight"));
        put("v.bias", &[kv], Heads(KV), source("attn_v.bias"));
        put("o.weight", &[HIDDEN, q], Row, source("attn_output.weight"));
        let fused = source("attn_qkv.weight");
        put("x.q.weight", &[q, HIDDEN], Heads(HEADS), fused[..q * HIDDEN].to_vec());
        put("x.k.weight", &[kv, HIDDEN], Heads(KV), fused[q * HIDDEN..(q + kv) * HIDDEN].to_vec());
        put("x.v.weight", &[kv, HIDDEN], Heads(KV), fused[(q + kv) * HIDDEN..].to_vec());
        let (k_b, v_b) = (source("attn_k_b.weight"), source("attn_v_b.weight"));
        let element = |row: usize, col: usize| {
            let (head, inside) = (row / (2 * HEAD), row % (2 * HEAD));
            if inside < HEAD {
                k_b[head * RANK * HEAD + col * HEAD + inside]
            } else {
                v_b[(head * HEAD + inside - HEAD) * RANK + col]
            }
        };
        let kv_b = (0..2 * q * RANK).map(|at| element(at / RANK, at % RANK)).collect();
        put("kv_b.weight", &[2 * q, RANK], Heads(HEADS), kv_b);
        put("router.weight", &[EXPERTS, HIDDEN], Replicated, source("ffn_gate_inp.weight"));
        let (gate_up, scales) = (source("ffn_gate_up_exps.weight"), source("ffn_gate_up_exps.scale"));
        let (down, scale) = (source("ffn_down_exps.weight"), source("ffn_down_exps.scale")[0]);
        for expert in 0..EXPERTS {
            let half = MOE * HIDDEN;
            let of = |part: usize| -> Vec<f32> {
                gate_up[(2 * expert + part) * half..][..half].iter().map(|v| v * scales[expert]).collect()
            };
            put(&format!("experts.{expert}.gate.weight"), &[MOE, HIDDEN], Column, of(0));
            put(&format!("experts.{expert}.up.weight"), &[MOE, HIDDEN], Column, of(1));
            let down = down[expert * half..][..half].iter().map(|v| v * scale).collect();
            put(&format!("experts.{expert}.down.weight"), &[HIDDEN, MOE], Row, down);
        }
        put("conv.weight", &[HEADS, 3, HEAD], Column, source("conv.weight"));
    }
    out
}
