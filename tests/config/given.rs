//! Configs that the user gives.

use std::fs;

use ggshard::convert::{self, Request};
use ggshard::mapping::MtpPolicy;
use serde_json::{Value, json};

use super::check::says;
use super::*;

/// Fields that a file does not decide: a given config may say what it likes.
const FREE: &[&str] = &[
    "attention_dropout",
    "decoder_sparse_step",
    "dtype",
    "hidden_act",
    "hidden_activation",
    "indexer_rope_interleave",
    "initializer_range",
    "max_position_embeddings",
    "model_type",
    "moe_layer_freq",
    "output_router_logits",
    "partial_rotary_factor",
    "pretraining_tp",
    "query_pre_attn_scalar",
    "rope_interleave",
    "topk_method",
    "use_cache",
    "use_sliding_window",
];
/// Free in files that lack the metadata, as the toy families do: the mapping's own value is no evidence.
const DEFAULTED: &[&str] = &[
    "n_group",
    "norm_topk_prob",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_theta",
    "routed_scaling_factor",
    "topk_group",
];
/// Free per family: a literal of the class, a guess, or evidence for one answer only.
const FREE_HERE: &[(&str, &[&str])] = &[
    ("gemma3", &["layer_types"]),
    ("glm4_moe", &["num_nextn_predict_layers", "scoring_func", "tie_word_embeddings"]),
    (
        "glm4_moe_lite",
        &["attention_bias", "head_dim", "num_nextn_predict_layers", "scoring_func", "tie_word_embeddings"],
    ),
    ("deepseek_v32", &["attention_bias", "head_dim", "num_nextn_predict_layers", "tie_word_embeddings"]),
    ("llama", &["tie_word_embeddings"]),
    ("mixtral", &["tie_word_embeddings"]),
    ("qwen2", &["tie_word_embeddings"]),
    ("qwen2_moe", &["tie_word_embeddings"]),
    ("qwen3", &["tie_word_embeddings"]),
    ("qwen3_moe", &["tie_word_embeddings"]),
];

/// Another value of the same kind.
fn another(value: &Value) -> Value {
    match value {
        Value::Null => json!(1),
        Value::Bool(b) => json!(!b),
        Value::Number(n) if n.is_f64() => json!(n.as_f64().unwrap() * 1.001 + 0.001),
        Value::Number(n) => json!(n.as_i64().unwrap() + 1),
        Value::String(text) => json!(format!("{text}x")),
        Value::Array(list) => list.iter().cloned().chain([json!("x")]).collect(),
        Value::Object(fields) => fields.iter().map(|(k, v)| (k.clone(), another(v))).collect::<Fields>().into(),
    }
}

#[test]
fn a_contradiction_in_any_field_that_the_file_decides_is_refused() {
    for (name, _) in families() {
        let source = family(name);
        let (derived, _) = derive(&source, &bf16());
        // What is derived agrees with itself.
        give_fields(&source, &bf16(), &derived).0.unwrap_or_else(|e| panic!("{name}: {e}"));
        let here = FREE_HERE.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, list)| list);
        let mut decided = 0;
        for (field, value) in &derived {
            let changed = Fields::from_iter([(field.clone(), another(value))]);
            let (outcome, path) = give_fields(&source, &bf16(), &changed);
            let free = [FREE, DEFAULTED, here].iter().any(|list| list.contains(&field.as_str()));
            match outcome {
                Ok(_) => assert!(free, "{name}: {field} = {} was accepted", changed[field]),
                Err(error) => {
                    assert!(!free, "{name}: {error}");
                    let (own, theirs) = (value.to_string(), changed[field].to_string());
                    let parts = [field, &own, &theirs, path.to_str().unwrap(), source.to_str().unwrap(), "--mapping"];
                    says(&error, "Contradiction", &parts);
                    decided += 1;
                }
            }
        }
        assert!(decided >= 8, "{name}: only {decided} fields are checked");
    }
}

#[test]
fn metadata_that_are_there_are_checked() {
    let deepseek = fixture("models/deepseek_v3-split");
    for field in [
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "rope_theta",
        "routed_scaling_factor",
        "rms_norm_eps",
        "scoring_func",
    ] {
        let (derived, _) = derive(&deepseek, &bf16());
        let changed = Fields::from_iter([(field.to_owned(), another(&derived[field]))]);
        let (outcome, _) = give_fields(&deepseek, &bf16(), &changed);
        says(
            &outcome.unwrap_err(),
            "Contradiction",
            &[field, &derived[field].to_string(), &changed[field].to_string()],
        );
    }
    // Within an object, and there by its full name; what may be chosen for a longer context is not checked.
    let rope =
        |theta: f64, factor: f64| object(json!({ "rope_parameters": { "rope_theta": theta, "factor": factor } }));
    let (outcome, _) = give_fields(&deepseek, &bf16(), &rope(20000.0, 40.0));
    says(&outcome.unwrap_err(), "Contradiction", &["rope_parameters.rope_theta", "20000", "10000"]);
    give_fields(&deepseek, &bf16(), &rope(10000.0, 80.0)).0.unwrap();
}

#[test]
fn numbers_agree_within_f32_but_whole_ones_exactly() {
    let glm = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    for (text, accepted) in [
        (r#"{"rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 2.5}"#, true),
        (r#"{"rms_norm_eps": 9.999999747378752e-06}"#, true),
        (r#"{"rms_norm_eps": 1.00001e-05}"#, false),
        (r#"{"vocab_size": 512.0}"#, true),
        (r#"{"vocab_size": 513}"#, false),
        (r#"{"vocab_size": "512"}"#, false),
    ] {
        assert_eq!(give(&glm, &bf16(), text.as_bytes()).0.is_ok(), accepted, "{text}");
    }
}

#[test]
fn null_says_nothing_except_where_it_is_a_value() {
    let llama = family("llama");
    give(&llama, &bf16(), br#"{"head_dim": null, "num_key_value_heads": null}"#).0.unwrap();
    let lite = family("glm4_moe_lite");
    let error = give(&lite, &bf16(), br#"{"q_lora_rank": null}"#).0.unwrap_err();
    says(&error, "Contradiction", &["q_lora_rank", "null", "24"]);
}

#[test]
fn embeddings_said_to_be_untied_need_an_output_weight() {
    let error = give(&family("gemma3"), &bf16(), br#"{"tie_word_embeddings": false}"#).0.unwrap_err();
    says(&error, "Contradiction", &["tie_word_embeddings", "false", "true"]);
    // Tied ones may have one all the same.
    give(&family("llama"), &bf16(), br#"{"tie_word_embeddings": true}"#).0.unwrap();
}

#[test]
fn another_class_is_refused_unless_its_weights_are_the_same() {
    let error = give(&family("llama"), &bf16(), br#"{"architectures": ["Qwen2ForCausalLM"]}"#).0.unwrap_err();
    says(&error, "Contradiction", &["architectures", "Qwen2ForCausalLM", "LlamaForCausalLM"]);
    let text = br#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}"#;
    let extras = give(&family("llama"), &bf16(), text).0.unwrap();
    assert_eq!(file(&extras, "config.json"), text);
    assert!(extras.notes.iter().any(|n| n.contains("MistralForCausalLM")), "{:?}", extras.notes);
    assert!(give(&family("mixtral"), &bf16(), text).0.is_err());
}

#[test]
fn a_config_that_agrees_is_copied_byte_for_byte() {
    for text in [
        "{\n\t \"strange\":  [1.50, \"ä\", 1e-05],\r\n \"num_nextn_predict_layers\": 1 }",
        r#"{"architectures": ["Glm4MoeForCausalLM"], "z": 1, "a": 100000000000000000000000001, "num_nextn_predict_layers": 1}"#,
        "{}",
    ] {
        let extras = give(&family("glm4_moe"), &bf16(), text.as_bytes()).0.unwrap();
        assert_eq!(file(&extras, "config.json"), text.as_bytes());
        let silent = text == "{}";
        assert_eq!(
            extras.notes.iter().any(|n| n.contains("has no num_nextn_predict_layers")),
            silent,
            "{:?}",
            extras.notes
        );
    }
    // A mapping that knows nothing about configs takes anything.
    let request = Request { mapping: Some("raw".into()), ..bf16() };
    let extras = give(&family("llama"), &request, b"{ \"hidden_size\":1}").0.unwrap();
    assert_eq!(file(&extras, "config.json"), b"{ \"hidden_size\":1}");
}

#[test]
fn mtp_blocks_are_made_to_agree_and_nothing_else_changes() {
    let request = |mtp| Request { mtp, ..bf16() };
    for (given, mtp, expected) in [
        (json!(1), MtpPolicy::Drop, json!(0)),
        (json!(3), MtpPolicy::Keep, json!(1)),
        (json!(null), MtpPolicy::Keep, json!(1)),
        (json!("1"), MtpPolicy::Keep, json!(1)),
    ] {
        let text = json!({ "num_nextn_predict_layers": given, "hidden_size": 32, "own": [1, 2] });
        let extras = give_fields(&family("glm4_moe"), &request(mtp), &object(text.clone())).0.unwrap();
        let mut wanted = object(text);
        wanted.insert("num_nextn_predict_layers".into(), expected.clone());
        assert_eq!(fields(&extras), wanted);
        let note = format!("num_nextn_predict_layers of the given config.json was {given} and is now {expected}");
        assert!(extras.notes.iter().any(|n| n.contains(&note)), "{:?}", extras.notes);
    }
    let text = b"{\"num_nextn_predict_layers\":  null}";
    let extras = give(&family("glm4_moe"), &request(MtpPolicy::Drop), text).0.unwrap();
    assert_eq!(file(&extras, "config.json"), text);
}

#[test]
fn a_draft_gets_the_given_config_too() {
    let request = Request { profile: "vllm-0.32".into(), tp: 2, ..bf16() };
    let text = b"{ \"num_nextn_predict_layers\": 1 }";
    let extras = give(&family("glm4_moe"), &request, text).0.unwrap();
    assert_eq!(file(&extras, "mtp/config.json"), text);
}

#[test]
fn a_folder_gives_its_tokenizer_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let files =
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
    for name in files {
        fs::write(dir.path().join(name), format!("{{\"{name}\": 1}}")).unwrap();
    }
    for name in ["model.safetensors", "README.md", "tokenizer.json.bak"] {
        fs::write(dir.path().join(name), "not to be copied").unwrap();
    }
    let extras = convert::extras(&planned(&family("llama"), &bf16()), Some(dir.path())).unwrap();
    let mut names: Vec<&str> = extras.files.iter().map(|(n, _)| n.as_str()).collect();
    names.sort_unstable();
    let mut expected = files;
    expected.sort_unstable();
    assert_eq!(names, expected);
    for name in files {
        assert_eq!(file(&extras, name), format!("{{\"{name}\": 1}}").as_bytes());
    }
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let error = convert::extras(&planned(&family("llama"), &bf16()), Some(dir.path())).unwrap_err();
    says(&error, "Io", &["config.json"]);
}

#[test]
fn what_is_no_config_is_refused_with_its_name() {
    let llama = family("llama");
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    let texts: [&[u8]; 8] = [b"", b"{bad", b"[]", b"7", b"null", b"{\"a\": 1} x", b"\xff\xfe{}", &deep];
    for text in texts {
        let (outcome, path) = give(&llama, &bf16(), text);
        says(&outcome.unwrap_err(), "Output", &[path.to_str().unwrap(), "a config.json"]);
    }
    let dir = tempfile::tempdir().unwrap();
    let huge = dir.path().join("huge.json");
    fs::File::create(&huge).unwrap().set_len(300 << 20).unwrap();
    let error = convert::extras(&planned(&llama, &bf16()), Some(&huge)).unwrap_err();
    says(&error, "Output", &["huge.json", "314572800", "16777216"]);
    let error = convert::extras(&planned(&llama, &bf16()), Some(Path::new("/dev/zero"))).unwrap_err();
    says(&error, "Io", &["/dev/zero", "not a regular file"]);
    let error = convert::extras(&planned(&llama, &bf16()), Some(&dir.path().join("absent.json"))).unwrap_err();
    says(&error, "Io", &["absent.json"]);
}
