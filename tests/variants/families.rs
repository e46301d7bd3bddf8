//! The language carries the families to come (MAPPING, section 5): each has a small mapping here, written as an author
//! would, and a toy that went through the converter's arithmetic.

use super::array::Array;
use super::check::{Made, Truth, converts_by, refused, says, usual_slice, with_mapping};
use super::file::{File, Kv};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 6;
const HIDDEN: usize = 20;
const INTER: usize = 16;
const VOCAB: usize = 64;

/// Weights, the file that holds them, and the rules that lead from one to the other.
struct Family {
    truth: Truth,
    file: File,
    toml: String,
    next: usize,
}

impl Family {
    fn new(arch: &'static str) -> Self {
        let mut file = File::default();
        file.set("general.architecture", Kv::Str(arch));
        let mut set = |key: &str, n: usize| {
            file.set(&format!("{arch}.{key}"), Kv::U32(n as u32));
        };
        set("block_count", 2);
        set("embedding_length", HIDDEN);
        set("feed_forward_length", INTER);
        set("attention.head_count", HEADS);
        set("attention.head_count_kv", KV_HEADS);
        set("attention.key_length", HEAD);
        set("vocab_size", VOCAB);
        let toml = r#"
name = "toy"
extends = "common"
class = "ToyForCausalLM"
[dims]
blocks   = { key = "block_count" }
hidden   = { key = "embedding_length" }
vocab    = { key = "vocab_size" }
inter    = { key = "feed_forward_length" }
heads    = { key = "attention.head_count" }
kv_heads = { key = "attention.head_count_kv" }
head     = { key = "attention.key_length" }
experts  = [{ key = "expert_count" }, 0]
[loops]
layer = "blocks"
expert = "experts"
[blocks]
count = "blocks"
trunk = "blocks"
"#;
        Family { truth: Truth::new(), file, toml: toml.to_owned(), next: 1 }
    }

    /// A new weight of the checkpoint.
    fn weight(&mut self, name: &str, shape: &[usize]) -> Array {
        let array = Array::numbered(shape, &mut self.next);
        self.truth.insert(name.to_owned(), array.clone());
        array
    }

    /// A weight that the file holds as it is, with its rule.
    fn plain(&mut self, name: &str, gguf: &str, shape: &[usize]) {
        let array = self.weight(name, shape);
        self.file.add(gguf, &array);
    }

    fn rule(&mut self, name: &str, shape: &str, cut: &str, from: &str) {
        self.toml += &format!("[[weight]]\nname = \"{name}\"\nshape = {shape}\ncut = {cut}\nfrom = {from}\n");
    }

    #[track_caller]
    fn converts(&self) -> Made {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("toy.toml");
        std::fs::write(&path, &self.toml).unwrap();
        converts_by(&self.file, &with_mapping(path.to_str().unwrap()), &self.truth, slice)
    }
}

/// As usual, but ranks beyond the key and value heads share them.
fn slice(name: &str, whole: &Array, tp: usize, rank: usize) -> Array {
    if name.contains("k_proj") || name.contains("v_proj") {
        let held = KV_HEADS.div_ceil(tp);
        let first = rank * KV_HEADS / tp;
        return whole.rows(first * HEAD..(first + held) * HEAD);
    }
    if name.contains("q_proj") {
        let held = HEADS / tp * HEAD;
        return whole.rows(rank * held..(rank + 1) * held);
    }
    usual_slice(name, whole, tp, rank)
}

/// llama.cpp's permutation: row (head, t, i) of the checkpoint is stored as row (head, i, t).
fn permute(array: &Array, heads: usize) -> Array {
    let half = array.shape[0] / heads / 2;
    let rows = (0..heads).flat_map(|h| (0..half).flat_map(move |i| (0..2).map(move |t| (h * 2 + t) * half + i)));
    Array::join(&rows.map(|r| array.rows(r..r + 1)).collect::<Vec<_>>())
}

const Q: &str = r#"{ column = "heads" }"#;
const KV: &str = r#"{ column = "kv_heads", repeat = true }"#;

#[test]
fn llama_rows_are_unpermuted_per_head_and_kv_heads_repeated() {
    let mut f = Family::new("llama");
    f.plain("model.embed_tokens.weight", "token_embd.weight", &[VOCAB, HIDDEN]);
    f.rule("model.embed_tokens.weight", r#"["vocab", "hidden"]"#, "\"vocab\"", r#"{ gguf = "token_embd.weight" }"#);
    for layer in 0..2 {
        for (part, heads) in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)] {
            for (kind, shape) in [("weight", vec![heads * HEAD, HIDDEN]), ("bias", vec![heads * HEAD])] {
                let w = f.weight(&format!("model.layers.{layer}.self_attn.{part}_proj.{kind}"), &shape);
                let stored = if part == "v" { w } else { permute(&w, heads) };
                f.file.add(&format!("blk.{layer}.attn_{part}.{kind}"), &stored);
            }
        }
        let o_proj = format!("model.layers.{layer}.self_attn.o_proj.weight");
        f.plain(&o_proj, &format!("blk.{layer}.attn_output.weight"), &[HIDDEN, HEADS * HEAD]);
    }
    for (part, heads, cut, unpermute) in [
        ("q", "heads", Q, r#", unpermute = "heads""#),
        ("k", "kv_heads", KV, r#", unpermute = "kv_heads""#),
        ("v", "kv_heads", KV, ""),
    ] {
        for (kind, shape) in
            [("weight", format!(r#"["{heads} * head", "hidden"]"#)), ("bias", format!(r#"["{heads} * head"]"#))]
        {
            let name = format!("model.layers.{{layer}}.self_attn.{part}_proj.{kind}");
            let from = format!("{{ gguf = \"blk.{{layer}}.attn_{part}.{kind}\"{unpermute} }}");
            f.rule(&name, &shape, cut, &from);
        }
    }
    let o_proj = r#"{ gguf = "blk.{layer}.attn_output.weight" }"#;
    f.rule(
        "model.layers.{layer}.self_attn.o_proj.weight",
        r#"["hidden", "heads * head"]"#,
        r#"{ row = "heads" }"#,
        o_proj,
    );
    f.file.add("rope_freqs.weight", &Array::new(&[3], vec![1.0, 2.0, 3.0]));
    let made = f.converts();
    assert!(made.ignored()["rope_freqs.weight"].contains("RoPE"));
}

#[test]
fn a_fused_qkv_is_three_row_ranges() {
    let mut f = Family::new("glm4moe");
    let ranges = [("q", HEADS, "0"), ("k", KV_HEADS, "heads * head"), ("v", KV_HEADS, "(heads + kv_heads) * head")];
    for layer in 0..2 {
        for (kind, width) in [("weight", vec![HIDDEN]), ("bias", vec![])] {
            let parts: Vec<Array> = ranges
                .iter()
                .map(|(part, heads, _)| {
                    let shape: Vec<usize> = std::iter::once(heads * HEAD).chain(width.iter().copied()).collect();
                    f.weight(&format!("model.layers.{layer}.self_attn.{part}_proj.{kind}"), &shape)
                })
                .collect();
            // The first block is fused, the second as usual.
            if layer == 0 {
                f.file.add(&format!("blk.{layer}.attn_qkv.{kind}"), &Array::join(&parts));
            } else {
                ranges.iter().zip(&parts).for_each(|((part, ..), array)| {
                    f.file.add(&format!("blk.{layer}.attn_{part}.{kind}"), array);
                });
            }
        }
    }
    for (part, heads, first) in ranges {
        let (heads, cut) = if heads == HEADS { ("heads", Q) } else { ("kv_heads", KV) };
        for (kind, width) in [("weight", ", \"hidden\""), ("bias", "")] {
            let from = format!(
                "[{{ gguf = \"blk.{{layer}}.attn_{part}.{kind}\" }}, {{ gguf = \"blk.{{layer}}.attn_qkv.{kind}\", \
                 shape = [\"(heads + 2 * kv_heads) * head\"{width}], rows = [\"{first}\", \"{heads} * head\"] }}]"
            );
            let name = format!("model.layers.{{layer}}.self_attn.{part}_proj.{kind}");
            f.rule(&name, &format!("[\"{heads} * head\"{width}]"), cut, &from);
        }
    }
    f.converts();
}

#[test]
fn a_fused_qkv_may_be_permuted_as_well() {
    let mut f = Family::new("llama");
    let name = |layer: usize, part: &str| format!("model.layers.{layer}.self_attn.{part}_proj.weight");
    for layer in 0..2 {
        let q = f.weight(&name(layer, "q"), &[HEADS * HEAD, HIDDEN]);
        let k = f.weight(&name(layer, "k"), &[KV_HEADS * HEAD, HIDDEN]);
        let v = f.weight(&name(layer, "v"), &[KV_HEADS * HEAD, HIDDEN]);
        let fused = Array::join(&[permute(&q, HEADS), permute(&k, KV_HEADS), v]);
        f.file.add(&format!("blk.{layer}.attn_qkv.weight"), &fused);
    }
    for (part, heads, cut, first, unpermute) in [
        ("q", "heads", Q, "0", ", unpermute = \"heads\""),
        ("k", "kv_heads", KV, "heads * head", ", unpermute = \"kv_heads\""),
        ("v", "kv_heads", KV, "(heads + kv_heads) * head", ""),
    ] {
        let from = format!(
            "{{ gguf = \"blk.{{layer}}.attn_qkv.weight\", shape = [\"(heads + 2 * kv_heads) * head\", \"hidden\"], \
             rows = [\"{first}\", \"{heads} * head\"]{unpermute} }}"
        );
        let weight = format!("model.layers.{{layer}}.self_attn.{part}_proj.weight");
        f.rule(&weight, &format!("[\"{heads} * head\", \"hidden\"]"), cut, &from);
    }
    f.converts();
}

#[test]
fn qwen2moe_shared_expert_gate_gets_its_axis_of_one_back() {
    for stored in [vec![1, HIDDEN], vec![HIDDEN]] {
        let mut f = Family::new("qwen2moe");
        for layer in 0..2 {
            let gate = f.weight(&format!("model.layers.{layer}.mlp.shared_expert_gate.weight"), &[1, HIDDEN]);
            f.file.add(&format!("blk.{layer}.ffn_gate_inp_shexp.weight"), &gate.reshape(&stored));
        }
        let from = r#"{ gguf = "blk.{layer}.ffn_gate_inp_shexp.weight" }"#;
        f.rule("model.layers.{layer}.mlp.shared_expert_gate.weight", r#"[1, "hidden"]"#, "\"replicated\"", from);
        f.converts();
    }
}

/// Mixtral's w1 = gate, w3 = up, w2 = down, from a file per expert or from stacks.
fn mixtral(stacked: [bool; 2]) -> Family {
    let mut f = Family::new("llama");
    f.file.set("llama.expert_count", Kv::U32(3));
    let parts = [("w1", "gate", [INTER, HIDDEN]), ("w2", "down", [HIDDEN, INTER]), ("w3", "up", [INTER, HIDDEN])];
    for (layer, stacked) in stacked.into_iter().enumerate() {
        for (hf, gguf, shape) in parts {
            let experts: Vec<Array> = (0..3)
                .map(|e| f.weight(&format!("model.layers.{layer}.block_sparse_moe.experts.{e}.{hf}.weight"), &shape))
                .collect();
            if stacked {
                f.file.add(&format!("blk.{layer}.ffn_{gguf}_exps.weight"), &Array::stack(&experts));
            } else {
                experts.iter().enumerate().for_each(|(e, array)| {
                    f.file.add(&format!("blk.{layer}.ffn_{gguf}.{e}.weight"), array);
                });
            }
        }
    }
    for (hf, gguf, shape) in parts {
        let (shape, cut) = if shape[0] == INTER {
            (r#"["inter", "hidden"]"#, "\"column\"")
        } else {
            (r#"["hidden", "inter"]"#, "\"row\"")
        };
        let from = format!(
            "[{{ gguf = \"blk.{{layer}}.ffn_{gguf}_exps.weight\", unstack = \"expert\" }}, \
             {{ gguf = \"blk.{{layer}}.ffn_{gguf}.{{expert}}.weight\" }}]"
        );
        f.rule(&format!("model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{hf}.weight"), shape, cut, &from);
    }
    f
}

#[test]
fn mixtral_experts_stacked_and_one_by_one() {
    for stacked in [[true, true], [false, false], [true, false]] {
        mixtral(stacked).converts();
    }
}

#[test]
fn a_missing_expert_of_many_is_named() {
    let mut f = mixtral([true, false]);
    f.file.remove("blk.1.ffn_up.2.weight");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("toy.toml");
    std::fs::write(&path, &f.toml).unwrap();
    let error = refused(&f.file, &with_mapping(path.to_str().unwrap()));
    says(&error, "MissingTensor", &["blk.1.ffn_up.2.weight", "experts.2.w3"]);
}

#[test]
fn gemma_norms_lose_the_one_that_the_converter_added() {
    let mut f = Family::new("gemma");
    for layer in 0..2 {
        let norm = f.weight(&format!("model.layers.{layer}.input_layernorm.weight"), &[HIDDEN]);
        f.file.add(&format!("blk.{layer}.attn_norm.weight"), &norm.map(|x| x + 1.0));
    }
    let from = r#"{ gguf = "blk.{layer}.attn_norm.weight", add = -1.0 }"#;
    f.rule("model.layers.{layer}.input_layernorm.weight", r#"["hidden"]"#, "\"replicated\"", from);
    f.converts();
}

#[test]
fn a_scale_comes_before_an_added_constant() {
    let mut f = Family::new("gemma");
    for layer in 0..2 {
        let norm = f.weight(&format!("model.layers.{layer}.input_layernorm.weight"), &[HIDDEN]);
        f.file.add(&format!("blk.{layer}.attn_norm.weight"), &norm.map(|x| (x + 1.0) / 2.0));
        f.file.add(&format!("blk.{layer}.attn_norm.scale"), &Array::new(&[1], vec![2.0]));
    }
    let from = r#"{ gguf = "blk.{layer}.attn_norm.weight", add = -1.0 }"#;
    f.rule("model.layers.{layer}.input_layernorm.weight", r#"["hidden"]"#, "\"replicated\"", from);
    f.converts();
}

#[test]
fn head_counts_that_differ_from_block_to_block() {
    let mut f = Family::new("openelm");
    f.file.set("openelm.attention.head_count", Kv::U32s(vec![4, 8]));
    for (layer, heads) in [(0, 4), (1, 8)] {
        let o_proj = format!("model.layers.{layer}.self_attn.o_proj.weight");
        f.plain(&o_proj, &format!("blk.{layer}.attn_output.weight"), &[HIDDEN, heads * HEAD]);
    }
    f.toml = f.toml.replace(r#""attention.head_count" }"#, r#""attention.head_count", per_block = true }"#);
    let from = r#"{ gguf = "blk.{layer}.attn_output.weight" }"#;
    f.rule(
        "model.layers.{layer}.self_attn.o_proj.weight",
        r#"["hidden", "heads * head"]"#,
        r#"{ row = "heads" }"#,
        from,
    );
    f.converts();
}
