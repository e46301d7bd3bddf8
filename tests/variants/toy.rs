//! Toy checkpoints of the MLA families, and what llama.cpp's converter makes of them (MAPPING, sections 2 to 6).

use super::array::Array;
use super::check::Truth;
use super::file::{File, Kv};

/// Sizes of a toy; all differ, so that no mix-up of two can pass.
#[derive(Clone, Debug)]
pub struct Dims {
    pub arch: &'static str,
    pub hidden: usize,
    pub heads: usize,
    pub nope: usize,
    pub rope: usize,
    pub v_head: usize,
    pub kv_rank: usize,
    pub q_rank: Option<usize>,
    pub vocab: usize,
    pub inter: usize,
    pub moe_inter: usize,
    pub experts: usize,
    pub shared: usize,
    pub dense: usize,
    /// Trunk layers.
    pub layers: usize,
    /// Multi-token-prediction layers after them.
    pub mtp: usize,
    /// Whether MTP layers have their own embeddings and head.
    pub mtp_tables: bool,
    pub router_bias: bool,
    /// Heads and head size of the indexer, and which blocks have one.
    pub index: Option<(usize, usize, Vec<bool>)>,
    pub tied: bool,
}

impl Dims {
    pub fn v2() -> Self {
        Dims {
            arch: "deepseek2",
            hidden: 40,
            heads: 4,
            nope: 6,
            rope: 2,
            v_head: 5,
            kv_rank: 12,
            q_rank: Some(10),
            vocab: 100,
            inter: 36,
            moe_inter: 12,
            experts: 3,
            shared: 2,
            dense: 1,
            layers: 3,
            mtp: 0,
            mtp_tables: false,
            router_bias: false,
            index: None,
            tied: false,
        }
    }

    pub fn v3() -> Self {
        Dims { router_bias: true, ..Dims::v2() }
    }

    pub fn glm_lite() -> Self {
        Dims { mtp: 1, ..Dims::v3() }
    }

    /// `full` says which blocks, MTP included, have an indexer.
    pub fn glm_dsa(full: &[bool], mtp: usize) -> Self {
        let layers = full.len() - mtp;
        Dims { arch: "glm-dsa", layers, mtp, index: Some((2, 14, full.to_vec())), ..Dims::v3() }
    }

    pub fn v32(mtp: usize) -> Self {
        Dims { arch: "deepseek32", ..Dims::glm_dsa(&vec![true; 3 + mtp], mtp) }
    }
}

/// A checkpoint and its GGUF.
#[derive(Clone)]
pub struct Toy {
    pub dims: Dims,
    pub truth: Truth,
    pub file: File,
}

impl Toy {
    pub fn new(dims: Dims) -> Self {
        let truth = checkpoint(&dims);
        let mut file = metadata(&dims);
        for (name, array) in tensors(&dims, &truth) {
            file.add(&name, &array);
        }
        Toy { dims, truth, file }
    }

    /// The whole name of a key of the architecture.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.dims.arch)
    }

    pub fn set(&mut self, key: &str, value: Kv) -> &mut Self {
        let key = self.key(key);
        self.file.set(&key, value);
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        let key = self.key(key);
        self.file.unset(&key);
        self
    }
}

fn checkpoint(d: &Dims) -> Truth {
    let mut truth = Truth::new();
    let mut next = 1;
    let mut add = |name: String, shape: &[usize]| {
        truth.insert(name, Array::numbered(shape, &mut next));
    };
    let qk = d.nope + d.rope;
    add("model.embed_tokens.weight".into(), &[d.vocab, d.hidden]);
    for layer in 0..d.layers + d.mtp {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        add(at("input_layernorm.weight"), &[d.hidden]);
        match d.q_rank {
            None => add(at("self_attn.q_proj.weight"), &[d.heads * qk, d.hidden]),
            Some(rank) => {
                add(at("self_attn.q_a_proj.weight"), &[rank, d.hidden]);
                add(at("self_attn.q_a_layernorm.weight"), &[rank]);
                add(at("self_attn.q_b_proj.weight"), &[d.heads * qk, rank]);
            }
        }
        add(at("self_attn.kv_a_proj_with_mqa.weight"), &[d.kv_rank + d.rope, d.hidden]);
        add(at("self_attn.kv_a_layernorm.weight"), &[d.kv_rank]);
        add(at("self_attn.kv_b_proj.weight"), &[d.heads * (d.nope + d.v_head), d.kv_rank]);
        add(at("self_attn.o_proj.weight"), &[d.hidden, d.heads * d.v_head]);
        add(at("post_attention_layernorm.weight"), &[d.hidden]);
        if let Some((heads, dim, full)) = &d.index
            && full[layer]
        {
            add(at("self_attn.indexer.wq_b.weight"), &[heads * dim, d.q_rank.unwrap()]);
            add(at("self_attn.indexer.wk.weight"), &[*dim, d.hidden]);
            add(at("self_attn.indexer.k_norm.weight"), &[*dim]);
            add(at("self_attn.indexer.k_norm.bias"), &[*dim]);
            add(at("self_attn.indexer.weights_proj.weight"), &[*heads, d.hidden]);
        }
        let mut mlp = |name: &str, inter: usize| {
            add(at(&format!("mlp.{name}gate_proj.weight")), &[inter, d.hidden]);
            add(at(&format!("mlp.{name}up_proj.weight")), &[inter, d.hidden]);
            add(at(&format!("mlp.{name}down_proj.weight")), &[d.hidden, inter]);
        };
        if layer < d.dense || d.experts == 0 {
            mlp("", d.inter);
        } else {
            (0..d.experts).for_each(|e| mlp(&format!("experts.{e}."), d.moe_inter));
            if d.shared > 0 {
                mlp("shared_experts.", d.shared * d.moe_inter);
            }
            add(at("mlp.gate.weight"), &[d.experts, d.hidden]);
            if d.router_bias {
                add(at("mlp.gate.e_score_correction_bias"), &[d.experts]);
            }
        }
        if layer >= d.layers {
            add(at("eh_proj.weight"), &[d.hidden, 2 * d.hidden]);
            add(at("enorm.weight"), &[d.hidden]);
            add(at("hnorm.weight"), &[d.hidden]);
            add(at("shared_head.norm.weight"), &[d.hidden]);
            if d.mtp_tables {
                add(at("embed_tokens.weight"), &[d.vocab, d.hidden]);
                add(at("shared_head.head.weight"), &[d.vocab, d.hidden]);
            }
        }
    }
    add("model.norm.weight".into(), &[d.hidden]);
    if !d.tied {
        add("lm_head.weight".into(), &[d.vocab, d.hidden]);
    }
    truth
}

fn metadata(d: &Dims) -> File {
    let mut file = File::default();
    file.set("general.architecture", Kv::Str(d.arch));
    let mut set = |key: &str, value: Kv| {
        file.set(&format!("{}.{key}", d.arch), value);
    };
    let n = |n: usize| Kv::U32(n as u32);
    set("block_count", n(d.layers + d.mtp));
    set("context_length", n(4096));
    set("embedding_length", n(d.hidden));
    set("feed_forward_length", n(d.inter));
    set("attention.head_count", n(d.heads));
    set("attention.head_count_kv", n(1));
    set("attention.key_length", n(d.kv_rank + d.rope));
    set("attention.value_length", n(d.kv_rank));
    set("attention.key_length_mla", n(d.nope + d.rope));
    set("attention.value_length_mla", n(d.v_head));
    set("attention.kv_lora_rank", n(d.kv_rank));
    set("rope.dimension_count", n(d.rope));
    set("rope.freq_base", Kv::F32(1e4));
    set("vocab_size", n(d.vocab));
    if let Some(rank) = d.q_rank {
        set("attention.q_lora_rank", n(rank));
    }
    if d.experts > 0 {
        set("expert_count", n(d.experts));
        set("expert_used_count", n(1));
        set("expert_shared_count", n(d.shared));
        set("expert_feed_forward_length", n(d.moe_inter));
        set("leading_dense_block_count", n(d.dense));
        if d.mtp == 0 || d.arch != "deepseek2" {
            set("expert_gating_func", n(if d.router_bias { 2 } else { 1 }));
        }
    }
    if d.mtp > 0 {
        set("nextn_predict_layers", n(d.mtp));
    }
    if let Some((heads, dim, full)) = &d.index {
        set("attention.indexer.head_count", n(*heads));
        set("attention.indexer.key_length", n(*dim));
        set("attention.indexer.top_k", n(8));
        if d.arch == "glm-dsa" {
            set("attention.indexer.types", Kv::Bools(full[..d.layers].to_vec()));
        }
    }
    file
}

/// The converter: weights to GGUF tensors.
fn tensors(d: &Dims, truth: &Truth) -> Vec<(String, Array)> {
    let mut out: Vec<(String, Array)> = Vec::new();
    let mut plain = |gguf: String, hf: String| {
        if let Some(array) = truth.get(&hf) {
            out.push((gguf, array.clone()));
        }
    };
    plain("token_embd.weight".into(), "model.embed_tokens.weight".into());
    plain("output_norm.weight".into(), "model.norm.weight".into());
    plain("output.weight".into(), "lm_head.weight".into());
    for layer in 0..d.layers + d.mtp {
        for (gguf, hf) in PLAIN {
            plain(format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{hf}"));
        }
    }
    for layer in 0..d.layers + d.mtp {
        let (k, v) = split_kv_b(d, &truth[&format!("model.layers.{layer}.self_attn.kv_b_proj.weight")]);
        out.push((format!("blk.{layer}.attn_k_b.weight"), k));
        out.push((format!("blk.{layer}.attn_v_b.weight"), v));
        if layer < d.dense || d.experts == 0 {
            continue;
        }
        for part in ["gate", "up", "down"] {
            let stacked = Array::stack(&experts(d, truth, layer, part));
            out.push((format!("blk.{layer}.ffn_{part}_exps.weight"), stacked));
        }
    }
    out
}

/// One projection of every expert of a layer.
pub fn experts(d: &Dims, truth: &Truth, layer: usize, part: &str) -> Vec<Array> {
    (0..d.experts).map(|e| truth[&format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight")].clone()).collect()
}

/// `kv_b_proj` [H·(n+v), kl] to `attn_k_b` [H, kl, n] and `attn_v_b` [H, v, kl].
pub fn split_kv_b(d: &Dims, kv_b: &Array) -> (Array, Array) {
    let each = d.nope + d.v_head;
    let head = |h: usize, rows: std::ops::Range<usize>| kv_b.rows(h * each + rows.start..h * each + rows.end);
    let k: Vec<Array> = (0..d.heads).map(|h| head(h, 0..d.nope)).collect();
    let v: Vec<Array> = (0..d.heads).map(|h| head(h, d.nope..each)).collect();
    (Array::stack(&k).swap(), Array::stack(&v))
}

const PLAIN: &[(&str, &str)] = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    ("indexer.attn_k.weight", "self_attn.indexer.wk.weight"),
    ("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    ("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
    ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    ("nextn.eh_proj.weight", "eh_proj.weight"),
    ("nextn.enorm.weight", "enorm.weight"),
    ("nextn.hnorm.weight", "hnorm.weight"),
    ("nextn.embed_tokens.weight", "embed_tokens.weight"),
    ("nextn.shared_head_head.weight", "shared_head.head.weight"),
    ("nextn.shared_head_norm.weight", "shared_head.norm.weight"),
];
