//! Metadata that contradicts the tensors: every dimension is checked against a shape, and no value, however large or
//! oddly typed, costs more than an error.

use std::time::{Duration, Instant};

use super::check::exact;
use super::check::{refused, says};
use super::file::Kv;
use super::toy::{Dims, Toy};

/// Every dimension key of the MLA families, and whether the file can do without it.
const KEYS: &[(&str, bool)] = &[
    ("block_count", true),
    ("embedding_length", true),
    ("feed_forward_length", true),
    ("attention.head_count", true),
    ("attention.key_length_mla", false),
    ("attention.value_length_mla", false),
    ("attention.kv_lora_rank", true),
    ("attention.q_lora_rank", false),
    ("rope.dimension_count", true),
    ("vocab_size", false),
    ("leading_dense_block_count", false),
    ("expert_count", false),
    ("expert_shared_count", false),
    ("expert_feed_forward_length", false),
    ("attention.indexer.head_count", true),
    ("attention.indexer.key_length", true),
    ("nextn_predict_layers", false),
];

fn toy() -> Toy {
    Toy::new(Dims { dense: 2, ..Dims::glm_dsa(&[true; 5], 1) })
}

fn value_of(toy: &Toy, key: &str) -> u32 {
    let key = toy.key(key);
    match toy.file.kv.iter().find(|(k, _)| *k == key) {
        Some((_, Kv::U32(n))) => *n,
        other => panic!("{key}: {other:?}"),
    }
}

#[test]
fn a_dimension_that_the_tensors_do_not_have_is_refused() {
    for (key, _) in KEYS {
        let right = value_of(&toy(), key);
        for wrong in [right + 1, right - 1, right * 2] {
            let mut toy = toy();
            toy.set(key, Kv::U32(wrong));
            let error = refused(&toy.file, &exact());
            let text = error.to_string();
            assert!(!text.contains("defect"), "{key} = {wrong}: {text}");
            assert!(text.contains(&toy.key(key)) && text.contains(&wrong.to_string()), "{key} = {wrong}: {text}");
            // A shape, or the tensor or block that the value calls for or leaves over.
            assert!(error.fault().tensor.is_some() || text.contains("block"), "{key} = {wrong}: {text}");
            println!("{key} = {wrong} for {right}: {text}\n");
        }
    }
}

#[test]
fn shapes_are_shown_beside_the_values() {
    for (key, tensor, shape) in [
        ("embedding_length", "token_embd.weight", "[100, 40]"),
        ("attention.head_count", "attn_q_b.weight", "[32, 10]"),
        ("attention.key_length_mla", "attn_q_b.weight", "[32, 10]"),
        ("attention.value_length_mla", "attn_v_b.weight", "[4, 5, 12]"),
        ("attention.kv_lora_rank", "attn_kv_a_mqa.weight", "[14, 40]"),
        ("attention.q_lora_rank", "attn_q_b.weight", "[28, 10]"),
        ("rope.dimension_count", "attn_kv_a_mqa.weight", "[14, 40]"),
        ("feed_forward_length", "ffn_gate.weight", "[36, 40]"),
        ("expert_count", "ffn_gate_inp.weight", "[3, 40]"),
        ("expert_feed_forward_length", "ffn_gate_exps.weight", "[3, 12, 40]"),
        ("expert_shared_count", "ffn_gate_shexp.weight", "[24, 40]"),
        ("vocab_size", "token_embd.weight", "[100, 40]"),
        ("attention.indexer.head_count", "indexer.attn_q_b.weight", "[28, 10]"),
        ("attention.indexer.key_length", "indexer.attn_q_b.weight", "[28, 10]"),
    ] {
        let mut toy = toy();
        let wrong = value_of(&toy, key) * 2;
        toy.set(key, Kv::U32(wrong));
        let error = refused(&toy.file, &exact());
        says(&error, "Contradiction", &[tensor, shape, &toy.key(key), &wrong.to_string()]);
    }
}

#[test]
fn a_value_of_another_type_is_an_error_that_names_the_key() {
    for (key, _) in KEYS {
        let wrong = [
            Kv::Str("4"),
            Kv::F32(4.0),
            Kv::Bool(true),
            Kv::I32(-1),
            Kv::F32s(vec![4.0; 5]),
            Kv::Strs(vec!["4"; 5]),
            Kv::Bools(vec![true; 5]),
        ];
        for value in wrong {
            let mut toy = toy();
            toy.set(key, value.clone());
            let error = refused(&toy.file, &exact());
            says(&error, "Contradiction", &[&toy.key(key)]);
        }
    }
}

#[test]
fn an_array_where_one_value_is_meant_is_refused() {
    for key in ["block_count", "embedding_length", "vocab_size", "nextn_predict_layers", "leading_dense_block_count"] {
        let mut toy = toy();
        let n = value_of(&toy, key);
        toy.set(key, Kv::U32s(vec![n; 5]));
        says(&refused(&toy.file, &exact()), "Contradiction", &[&toy.key(key), "array"]);
    }
}

#[test]
fn an_absent_key_is_named() {
    for (key, required) in KEYS {
        if !required {
            continue;
        }
        let mut toy = toy();
        toy.unset(key);
        says(&refused(&toy.file, &exact()), "Contradiction", &[&toy.key(key), "lacks"]);
    }
    // Without any length of a head nothing can be checked.
    let mut toy = toy();
    toy.unset("attention.key_length_mla").unset("attention.key_length");
    let both = ["glm-dsa.attention.key_length_mla", "glm-dsa.attention.key_length'"];
    says(&refused(&toy.file, &exact()), "Contradiction", &both);
}

#[test]
fn huge_values_cost_no_time_and_no_memory() {
    let huge = [
        Kv::U32(1 << 31),
        Kv::U32(u32::MAX),
        Kv::U64(1 << 40),
        Kv::U64(1 << 62),
        Kv::U64(i64::MAX as u64),
        Kv::U64(1 << 63),
        Kv::U64(u64::MAX),
    ];
    for (key, _) in KEYS {
        for value in &huge {
            let mut toy = toy();
            toy.set(key, value.clone());
            let start = Instant::now();
            let error = refused(&toy.file, &exact());
            assert!(start.elapsed() < Duration::from_secs(5), "{key} {value:?}: {:?}", start.elapsed());
            let text = error.to_string();
            assert!(text.contains(&toy.key(key)), "{key} {value:?}: {text}");
            assert!(text.len() < 3000, "{text}");
        }
    }
}

#[test]
fn zeros_are_values_like_any_other() {
    for (key, _) in KEYS {
        let mut toy = toy();
        toy.set(key, Kv::U32(0));
        let error = refused(&toy.file, &exact());
        let text = error.to_string();
        assert!(text.contains(&toy.key(key)), "{key} = 0: {text}");
    }
}

#[test]
fn two_huge_values_that_cancel_are_refused() {
    // block_count and nextn_predict_layers agree on the trunk; the rest of the count is beyond any model.
    let mut toy = toy();
    toy.set("block_count", Kv::U32(u32::MAX)).set("nextn_predict_layers", Kv::U32(u32::MAX - 4));
    says(&refused(&toy.file, &exact()), "Contradiction", &["block_count", "nextn_predict_layers"]);
    // No experts' tensors, but a count of them.
    let mut toy = Toy::new(Dims { experts: 0, shared: 0, ..Dims::v2() });
    toy.set("expert_count", Kv::U64(1 << 40));
    says(&refused(&toy.file, &exact()), "MissingTensor", &["ffn_gate_inp", "expert_count"]);
}
