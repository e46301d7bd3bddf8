//! config.json: what a mapping derives from a GGUF against what the original checkpoint's says, and what is made of a
//! config.json that the user gives.
//!
//! The expected values are typed from the configs of `families/make_fixtures.py` and of the models behind
//! `fixtures/models`, not computed. With `GGSHARD_CORPUS` set, every model's derived config is compared with its
//! original field by field.

#[allow(dead_code, reason = "shared with tests/variants.rs")]
#[path = "variants/array.rs"]
mod array;
#[allow(dead_code, reason = "shared with tests/variants.rs")]
#[path = "variants/check.rs"]
mod check;
#[allow(dead_code, reason = "shared with tests/variants.rs")]
#[path = "variants/file.rs"]
mod file;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[allow(dead_code, reason = "shared with tests/variants.rs")]
#[path = "variants/toy.rs"]
mod toy;

#[path = "config/corpus.rs"]
mod corpus;
#[path = "config/derived.rs"]
mod derived;
#[path = "config/given.rs"]
mod given;
#[path = "config/language.rs"]
mod language;

use std::path::{Path, PathBuf};

use ggshard::convert::{self, Extras, Planned, Request};
use ggshard::dequant::FloatType;
use ggshard::error::Error;
use serde_json::{Map, Value, json};

type Fields = Map<String, Value>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn family(name: &str) -> PathBuf {
    fixture(&format!("families/{name}.gguf"))
}

/// BF16, as the checkpoints are.
fn bf16() -> Request {
    Request { dtype: FloatType::BF16, ..Request::default() }
}

fn planned(source: &Path, request: &Request) -> Planned {
    convert::plan(source, request, false).unwrap_or_else(|e| panic!("{}: {e}", source.display()))
}

fn file<'a>(extras: &'a Extras, name: &str) -> &'a [u8] {
    let found = extras.files.iter().find(|(n, _)| n == name);
    &found.unwrap_or_else(|| panic!("no {name} among {:?}", extras.files.len())).1
}

fn fields(extras: &Extras) -> Fields {
    serde_json::from_slice(file(extras, "config.json")).unwrap()
}

/// The derived config.json and the notes about it.
fn derive(source: &Path, request: &Request) -> (Fields, Vec<String>) {
    let extras = convert::extras(&planned(source, request), None).unwrap();
    (fields(&extras), extras.notes)
}

/// What is made of a config.json with this text, and where it was.
fn give(source: &Path, request: &Request, text: &[u8]) -> (Result<Extras, Error>, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("given.json");
    std::fs::write(&path, text).unwrap();
    (convert::extras(&planned(source, request), Some(&path)), path)
}

fn give_fields(source: &Path, request: &Request, fields: &Fields) -> (Result<Extras, Error>, PathBuf) {
    give(source, request, &serde_json::to_vec(fields).unwrap())
}

/// Numbers as numbers, whether whole or not; within f32.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64().unwrap() as f32 == b.as_f64().unwrap() as f32,
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(k, v)| b.get(k).is_some_and(|w| same(v, w)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(v, w)| same(v, w)),
        (a, b) => a == b,
    }
}

fn object(value: Value) -> Fields {
    match value {
        Value::Object(fields) => fields,
        other => panic!("{other}"),
    }
}

/// Asserts that each of these fields is there with this value.
#[track_caller]
fn holds(label: &str, fields: &Fields, expected: Value) {
    for (name, value) in object(expected) {
        let found = fields.get(&name).unwrap_or(&Value::Null);
        assert!(same(found, &value) && fields.contains_key(&name), "{label}: {name} is {found}, not {value}");
    }
}

/// What all toy families share: `SIZES` of make_fixtures.py.
fn sizes() -> Fields {
    object(json!({
        "dtype": "bfloat16", "vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "num_attention_heads": 4, "tie_word_embeddings": false,
    }))
}

/// For each toy family what its original config.json says (`FAMILIES` of make_fixtures.py).
fn families() -> Vec<(&'static str, Value)> {
    let moe = json!({
        "moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    });
    let mla = json!({
        "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_head_dim": 28, "num_key_value_heads": 4, "moe_layer_freq": 1,
    });
    let join =
        |parts: &[&Value]| -> Value { parts.iter().flat_map(|p| object((*p).clone())).collect::<Fields>().into() };
    let plain_rope = json!({ "rope_theta": 10000.0, "rope_type": "default" });
    vec![
        (
            "llama",
            json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 32,
                "attention_bias": true, "mlp_bias": true, "rope_parameters": plain_rope, "hidden_act": "silu",
            }),
        ),
        (
            "mixtral",
            json!({
                "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2, "head_dim": 32,
                "num_local_experts": 4, "num_experts_per_tok": 2,
            }),
        ),
        (
            "qwen2",
            json!({
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, "head_dim": 8,
                "use_sliding_window": false, "rope_parameters": plain_rope,
            }),
        ),
        (
            "qwen2_moe",
            json!({
                "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_key_value_heads": 2,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": false,
                "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": true,
            }),
        ),
        (
            "qwen3",
            json!({
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32,
                "attention_bias": false, "use_sliding_window": false, "rope_parameters": plain_rope,
            }),
        ),
        (
            "qwen3_moe",
            json!({
                "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 2,
                "head_dim": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
                "attention_bias": false,
            }),
        ),
        (
            "gemma3",
            json!({
                "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 2,
                "head_dim": 32, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": false,
                "rope_parameters": {
                    "full_attention": { "rope_theta": 1000000.0, "rope_type": "default" },
                    "sliding_attention": { "rope_theta": 10000.0, "rope_type": "default" },
                },
            }),
        ),
        (
            "glm4_moe",
            join(&[
                &moe,
                &json!({
                    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_key_value_heads": 2,
                    "head_dim": 32, "attention_bias": true, "use_qk_norm": true, "norm_topk_prob": true,
                    "partial_rotary_factor": 0.5,
                    "rope_parameters": { "rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5 },
                }),
            ]),
        ),
        (
            "glm4_moe_lite",
            join(&[
                &moe,
                &mla,
                &json!({
                    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "norm_topk_prob": true,
                }),
            ]),
        ),
        (
            "deepseek_v32",
            join(&[
                &moe,
                &mla,
                &json!({
                    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 16,
                    "index_n_heads": 2, "index_head_dim": 128, "index_topk": 16, "indexer_rope_interleave": false,
                }),
            ]),
        ),
    ]
}
