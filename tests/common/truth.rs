//! What a conversion must give, computed the plain way: whole weights as f32, cut by index arithmetic of its own.
//!
//! Shares nothing with mapping, plan or engine. Sources are decoded by the library's decoders, which other tests hold
//! against ggml.
#![allow(dead_code, reason = "each test binary uses some of it")]

use ggshard::dequant::{Dequantizer, Simd};
use ggshard::gguf::GgufSet;
use half::{bf16, f16};

/// How ranks share a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shared {
    Replicated,
    /// Rows of axis 0, evenly.
    Column,
    /// Rows of axis 0 in this many heads; with fewer heads than ranks, neighbours hold the same head.
    Heads(usize),
    /// Columns, evenly.
    Row,
    /// Rows of axis 0, padded with zeros to a multiple of 64.
    Vocab,
}

/// A weight of the original checkpoint.
#[derive(Debug, Clone)]
pub struct Truth {
    pub name: String,
    pub shape: Vec<usize>,
    pub shared: Shared,
    /// Stays F32 whatever the output policy.
    pub f32: bool,
    /// Row-major.
    pub values: Vec<f32>,
}

/// The values of a source tensor.
pub fn decode(set: &GgufSet, name: &str) -> Vec<f32> {
    let index = set.find(name).unwrap_or_else(|| panic!("the file has no '{name}'"));
    let tensor = &set.tensors()[index];
    let mut out = vec![0.0; tensor.elements() as usize];
    Dequantizer::new(tensor.ty, Simd::Baseline).unwrap().to_f32(&set.data(index).unwrap(), &mut out);
    out
}

impl Truth {
    pub fn new(name: impl Into<String>, shape: &[usize], shared: Shared, values: Vec<f32>) -> Self {
        let name = name.into();
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
        Truth { name, shape: shape.to_vec(), shared, f32: false, values }
    }

    pub fn pinned(self) -> Self {
        Truth { f32: true, ..self }
    }

    /// What a rank holds: shape and values.
    pub fn slice(&self, tp: usize, rank: usize) -> (Vec<usize>, Vec<f32>) {
        let mut shape = self.shape.clone();
        if tp == 1 || self.shared == Shared::Replicated {
            return (shape, self.values.clone());
        }
        let inner: usize = shape[1..].iter().product();
        // The first row of axis 0 and the number of rows that a rank holds.
        let (first, count) = match self.shared {
            Shared::Replicated => unreachable!(),
            Shared::Row if shape.len() > 1 => {
                let width = shape[shape.len() - 1];
                let held = width / tp;
                *shape.last_mut().unwrap() = held;
                let rows = self.values.chunks(width);
                return (shape, rows.flat_map(|row| row[rank * held..(rank + 1) * held].to_vec()).collect());
            }
            Shared::Column | Shared::Row => (rank * shape[0] / tp, shape[0] / tp),
            Shared::Heads(heads) if heads < tp => (rank / (tp / heads) * (shape[0] / heads), shape[0] / heads),
            Shared::Heads(_) => (rank * shape[0] / tp, shape[0] / tp),
            Shared::Vocab => {
                let padded = shape[0].div_ceil(64) * 64;
                (rank * padded / tp, padded / tp)
            }
        };
        shape[0] = count;
        let wanted = first * inner..(first + count) * inner;
        (shape, wanted.map(|i| self.values.get(i).copied().unwrap_or(0.0)).collect())
    }
}

/// Values as little-endian bytes of `"f32"`, `"bf16"` or `"f16"`, rounded to nearest even.
pub fn bytes(values: &[f32], dtype: &str) -> Vec<u8> {
    match dtype {
        "f32" => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "bf16" => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        "f16" => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("{other}"),
    }
}

/// The weights of the fixture models with latent attention and experts, rule by rule.
pub fn mla_moe(set: &GgufSet) -> Vec<Truth> {
    use Shared::*;
    let number = |key: &str| {
        let full = format!("{}.{key}", set.architecture().unwrap());
        set.metadata().u64(&full).unwrap().map(|n| n as usize)
    };
    let shape = |name: &str| -> Vec<usize> {
        let tensor = &set.tensors()[set.find(name).unwrap()];
        tensor.shape().iter().map(|n| *n as usize).collect()
    };
    let heads = number("attention.head_count").unwrap();
    let mut out = Vec::new();
    let mut take = |name: String, source: &str, shared: Shared| {
        if set.find(source).is_some() {
            out.push(Truth::new(name, &shape(source), shared, decode(set, source)));
        }
    };
    take("model.embed_tokens.weight".into(), "token_embd.weight", Vocab);
    take("lm_head.weight".into(), "output.weight", Vocab);
    take("model.norm.weight".into(), "output_norm.weight", Replicated);
    let plain = [
        ("input_layernorm.weight", "attn_norm.weight", Replicated),
        ("self_attn.q_a_proj.weight", "attn_q_a.weight", Replicated),
        ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", Replicated),
        ("self_attn.q_b_proj.weight", "attn_q_b.weight", Heads(heads)),
        ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", Replicated),
        ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", Replicated),
        ("self_attn.o_proj.weight", "attn_output.weight", Row),
        ("self_attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", Replicated),
        ("self_attn.indexer.wk.weight", "indexer.attn_k.weight", Replicated),
        ("self_attn.indexer.k_norm.weight", "indexer.k_norm.weight", Replicated),
        ("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias", Replicated),
        ("self_attn.indexer.weights_proj.weight", "indexer.proj.weight", Replicated),
        ("post_attention_layernorm.weight", "ffn_norm.weight", Replicated),
        ("mlp.gate_proj.weight", "ffn_gate.weight", Column),
        ("mlp.up_proj.weight", "ffn_up.weight", Column),
        ("mlp.down_proj.weight", "ffn_down.weight", Row),
        ("mlp.gate.weight", "ffn_gate_inp.weight", Replicated),
        ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", Column),
        ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", Column),
        ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", Row),
        ("enorm.weight", "nextn.enorm.weight", Replicated),
        ("hnorm.weight", "nextn.hnorm.weight", Replicated),
        ("eh_proj.weight", "nextn.eh_proj.weight", Replicated),
        ("embed_tokens.weight", "nextn.embed_tokens.weight", Vocab),
        ("shared_head.norm.weight", "nextn.shared_head_norm.weight", Replicated),
        ("shared_head.head.weight", "nextn.shared_head_head.weight", Vocab),
    ];
    let blocks = number("block_count").unwrap();
    for layer in 0..blocks {
        for (name, source, shared) in plain {
            take(format!("model.layers.{layer}.{name}"), &format!("blk.{layer}.{source}"), shared);
        }
    }
    for layer in 0..blocks {
        let (source, target) = (|s: &str| format!("blk.{layer}.{s}"), |t: &str| format!("model.layers.{layer}.{t}"));
        // Per head: the rows of k, which are stored transposed, then those of v.
        let (k_shape, v_shape) = (shape(&source("attn_k_b.weight")), shape(&source("attn_v_b.weight")));
        let (rank, nope, v_head) = (k_shape[1], k_shape[2], v_shape[1]);
        let (k, v) = (decode(set, &source("attn_k_b.weight")), decode(set, &source("attn_v_b.weight")));
        let mut kv = Vec::new();
        for head in 0..heads {
            for row in 0..nope {
                kv.extend((0..rank).map(|col| k[(head * rank + col) * nope + row]));
            }
            kv.extend(&v[head * v_head * rank..(head + 1) * v_head * rank]);
        }
        let kv_shape = [heads * (nope + v_head), rank];
        out.push(Truth::new(target("self_attn.kv_b_proj.weight"), &kv_shape, Heads(heads), kv));
        let bias = source("exp_probs_b.bias");
        if set.find(&bias).is_some() {
            let values = decode(set, &bias);
            let name = target("mlp.gate.e_score_correction_bias");
            out.push(Truth::new(name, &[values.len()], Replicated, values).pinned());
        }
        for (part, shared) in [("gate", Column), ("up", Column), ("down", Row)] {
            let stacked = source(&format!("ffn_{part}_exps.weight"));
            if set.find(&stacked).is_none() {
                continue;
            }
            let axes = shape(&stacked);
            for (expert, values) in decode(set, &stacked).chunks(axes[1] * axes[2]).enumerate() {
                let name = target(&format!("mlp.experts.{expert}.{part}_proj.weight"));
                out.push(Truth::new(name, &axes[1..], shared, values.to_vec()));
            }
        }
    }
    out
}
