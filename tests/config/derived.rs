//! Derived configs.

use ggshard::convert::{self, Request};
use ggshard::dequant::FloatType;
use ggshard::engine::Options;
use ggshard::mapping::MtpPolicy;
use serde_json::{Value, json};

use super::file::{File, Kv};
use super::toy::{Dims, Toy};
use super::*;

#[test]
fn every_family_has_the_fields_that_decide() {
    for (name, expected) in families() {
        let (fields, notes) = derive(&family(name), &bf16());
        holds(name, &fields, sizes_unless(&expected).into());
        holds(name, &fields, expected);
        assert!(notes.iter().all(|n| n.starts_with("config.json is derived from the GGUF; ")), "{name}: {notes:?}");
        assert!(notes.iter().any(|n| n.contains("compare them with the original")), "{name}: {notes:?}");
    }
}

/// The shared sizes, without those that the family states otherwise.
fn sizes_unless(expected: &Value) -> Fields {
    sizes().into_iter().filter(|(name, _)| expected.get(name).is_none()).collect()
}

#[test]
fn every_built_in_mapping_of_a_class_derives_a_config() {
    for mapping in ggshard::mapping::builtin_mappings().unwrap().iter().filter(|m| !m.rules.class.is_empty()) {
        assert!(mapping.rules.config.0.contains_key("model_type"), "{}", mapping.rules.name);
        assert!(!mapping.rules.config_unknown.is_empty(), "{}", mapping.rules.name);
    }
}

#[test]
fn models_of_real_structure() {
    let (fields, _) = derive(&fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf"), &bf16());
    let expected = json!({
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1, "vocab_size": 512, "hidden_size": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 64, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64, "indexer_rope_interleave": true,
        "indexer_types": ["full", "full"], "mlp_layer_types": ["dense", "sparse"], "index_topk_pattern": "FF",
        "routed_scaling_factor": 2.5, "norm_topk_prob": true, "rms_norm_eps": 1e-5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "rope_interleave": true, "rope_parameters": { "rope_theta": 1000000, "rope_type": "default" },
    });
    holds("glm", &fields, expected);
    let (fields, _) = derive(&fixture("models/deepseek_v3-split"), &bf16());
    let expected = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_type": "yarn",
        },
    });
    holds("deepseek", &fields, expected);
}

#[test]
fn numbers_that_were_f32_are_written_in_their_shortest_form() {
    let mut toy = Toy::new(Dims::v2());
    toy.set("attention.layer_norm_rms_epsilon", Kv::F32(1e-5)).set("expert_weights_scale", Kv::F32(2.827));
    toy.set("rope.scaling.type", Kv::Str("yarn")).set("rope.scaling.yarn_log_multiplier", Kv::F32(0.0707));
    let (text, _) = of(&toy.file, &bf16());
    // Exactly the number that was meant, not the f32 next to it.
    assert_eq!(text["rms_norm_eps"].as_f64(), Some(1e-5));
    assert_eq!(text["routed_scaling_factor"].as_f64(), Some(2.827));
    assert_eq!(text["rope_parameters"]["mscale_all_dim"].as_f64(), Some(0.707));
    let text = Value::from(text).to_string();
    assert!(!text.contains("9999") && !text.contains("0000000"), "{text}");
}

/// The config derived from a file in the making.
fn of(file: &File, request: &Request) -> (Fields, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    derive(&file.write(dir.path(), 1), request)
}

#[test]
fn glm_5_2_says_which_blocks_share_their_indexer() {
    let mut toy = Toy::new(Dims { layers: 4, ..Dims::glm_dsa(&[true, true, false, false, true], 1) });
    for declared in [true, false] {
        if !declared {
            toy.unset("attention.indexer.types");
        }
        let (fields, _) = of(&toy.file, &bf16());
        let expected = json!({
            "indexer_types": ["full", "full", "shared", "shared"], "index_topk_pattern": "FFSS",
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
        });
        holds("glm 5.2", &fields, expected);
    }
}

#[test]
fn the_number_of_mtp_blocks_is_that_of_the_written_ones() {
    for (mtp, expected) in [(MtpPolicy::Keep, 1), (MtpPolicy::Drop, 0), (MtpPolicy::Only, 1)] {
        for name in ["glm4_moe", "glm4_moe_lite", "deepseek_v32"] {
            let (fields, _) = derive(&family(name), &Request { mtp, ..bf16() });
            holds(name, &fields, json!({ "num_nextn_predict_layers": expected, "num_hidden_layers": 2 }));
        }
    }
}

#[test]
fn dtype_follows_the_output() {
    for (dtype, name) in [(FloatType::BF16, "bfloat16"), (FloatType::F16, "float16"), (FloatType::F32, "float32")] {
        let (fields, _) = derive(&family("qwen3"), &Request { dtype, ..Request::default() });
        holds(name, &fields, json!({ "dtype": name }));
    }
}

#[test]
fn the_manifest_has_the_config_with_its_digest_and_a_draft_has_its_own() {
    for (name, profile, draft) in [("glm4_moe", "vllm-0.32", true), ("llama", "hf", false)] {
        let planned = planned(&family(name), &Request { profile: profile.into(), tp: 2, ..bf16() });
        let extras = convert::extras(&planned, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        convert::convert(&planned, &out, Options::default(), &extras, &|_| {}).unwrap();
        let manifest: Value = serde_json::from_slice(&std::fs::read(out.join("ggshard.json")).unwrap()).unwrap();
        let mut files = vec!["config.json"];
        files.extend(draft.then_some("mtp/config.json"));
        for file in files {
            let written = std::fs::read(out.join(file)).unwrap();
            let others = manifest["others"].as_array().unwrap();
            let other = others.iter().find(|o| o["name"] == file).unwrap_or_else(|| panic!("{name}: no {file}"));
            let digest = other["blake3"].as_str().unwrap();
            assert!(digest.ends_with(&blake3::hash(&written).to_hex().to_string()), "{name}: {digest}");
            assert_eq!(other["bytes"], written.len(), "{name}");
            assert_eq!(written, super::file(&extras, "config.json"), "{name}");
        }
        assert_eq!(out.join("mtp/config.json").exists(), draft, "{name}");
        assert!(manifest["warnings"].to_string().contains("derived from the GGUF"), "{name}");
    }
}

/// A Llama of one block, of 4 heads of 8.
fn small(arch: &'static str) -> File {
    let mut file = File::default();
    file.set("general.architecture", Kv::Str(arch));
    for (key, n) in [
        ("block_count", 1),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("context_length", 4096),
    ] {
        file.set(&format!("{arch}.{key}"), Kv::U32(n));
    }
    let mut next = 1;
    let mut add = |name: &str, shape: &[usize]| {
        file.add(name, &super::array::Array::numbered(shape, &mut next));
    };
    add("token_embd.weight", &[20, 32]);
    add("output_norm.weight", &[32]);
    add("blk.0.attn_norm.weight", &[32]);
    add("blk.0.attn_q.weight", &[32, 32]);
    add("blk.0.attn_k.weight", &[16, 32]);
    add("blk.0.attn_v.weight", &[16, 32]);
    add("blk.0.attn_output.weight", &[32, 32]);
    add("blk.0.ffn_norm.weight", &[32]);
    add("blk.0.ffn_gate.weight", &[48, 32]);
    add("blk.0.ffn_up.weight", &[48, 32]);
    add("blk.0.ffn_down.weight", &[32, 48]);
    file
}

#[test]
fn presence_of_tensors_decides_biases_and_tied_embeddings() {
    let (fields, _) = of(&small("llama"), &bf16());
    let expected = json!({
        "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true, "vocab_size": 20, "head_dim": 8,
        "num_key_value_heads": 2,
    });
    holds("no biases", &fields, expected);
    holds("biases", &derive(&family("llama"), &bf16()).0, json!({ "attention_bias": true, "mlp_bias": true }));
}

#[test]
fn rope_parameters_of_llama_3_are_not_in_a_gguf_and_the_note_says_so() {
    let mut file = small("llama");
    file.set("llama.rope.freq_base", Kv::F32(500000.0));
    let loud = |notes: &[String]| notes.iter().any(|n| n.contains("THE ROPE PARAMETERS ARE INCOMPLETE"));
    assert!(!loud(&of(&file, &bf16()).1));
    file.add("rope_freqs.weight", &super::array::Array::new(&[4], vec![1.0, 1.0, 4.0, 8.0]));
    let (fields, notes) = of(&file, &bf16());
    assert!(loud(&notes), "{notes:?}");
    let note = notes.iter().find(|n| n.contains("INCOMPLETE")).unwrap();
    for part in ["rope_freqs.weight", "llama3", "low_freq_factor", "--config"] {
        assert!(note.contains(part), "{note}");
    }
    holds("base", &fields, json!({ "rope_theta": 500000.0 }));
    // A given config is taken as it is, and nothing is noted.
    let dir = tempfile::tempdir().unwrap();
    let source = file.write(dir.path(), 1);
    let given = json!({
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": { "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 },
    });
    let extras = give_fields(&source, &bf16(), &object(given.clone())).0.unwrap();
    assert_eq!(Value::from(super::fields(&extras)), given);
    assert!(extras.notes.is_empty(), "{:?}", extras.notes);
}

#[test]
fn scaled_rope() {
    let mut file = small("llama");
    file.set("llama.rope.freq_base", Kv::F32(1e6)).set("llama.rope.scaling.factor", Kv::F32(4.0));
    file.set("llama.rope.scaling.original_context_length", Kv::U32(32768));
    for (kind, expected) in [
        ("linear", json!({ "rope_type": "linear", "rope_theta": 1e6, "factor": 4.0 })),
        ("none", json!({ "rope_type": "default", "rope_theta": 1e6 })),
        (
            "yarn",
            json!({ "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 32768 }),
        ),
    ] {
        file.set("llama.rope.scaling.type", Kv::Str(kind));
        let (fields, notes) = of(&file, &bf16());
        holds(kind, &fields, json!({ "rope_parameters": expected }));
        assert!(!notes.iter().any(|n| n.contains("INCOMPLETE")), "{kind}: {notes:?}");
    }
    file.set("llama.rope.scaling.type", Kv::Str("longrope"));
    assert!(of(&file, &bf16()).1.iter().any(|n| n.contains("INCOMPLETE")));
}

#[test]
fn gemma_has_two_bases_and_a_pattern() {
    let norm = |file: &mut File, name: &str, n: usize| {
        file.add(name, &super::array::Array::new(&[n], vec![1.5; n]));
    };
    let mut file = small("gemma3");
    for block in 1..8 {
        let copies: Vec<_> = file.tensors.iter().filter(|t| t.name.starts_with("blk.0.")).cloned().collect();
        for copy in copies {
            file.add_raw(&copy.name.replace("blk.0.", &format!("blk.{block}.")), &copy.shape, copy.ty, copy.data);
        }
    }
    for block in 0..8 {
        for (name, n) in [("attn_q_norm", 8), ("attn_k_norm", 8), ("post_attention_norm", 32), ("post_ffw_norm", 32)] {
            norm(&mut file, &format!("blk.{block}.{name}.weight"), n);
        }
    }
    file.set("gemma3.block_count", Kv::U32(8)).set("gemma3.rope.freq_base", Kv::F32(2e6));
    file.set("gemma3.rope.freq_base_swa", Kv::F32(3e4)).set("gemma3.attention.sliding_window", Kv::U32(512));
    file.set("gemma3.rope.scaling.type", Kv::Str("linear")).set("gemma3.rope.scaling.factor", Kv::F32(8.0));
    let (s, f) = ("sliding_attention", "full_attention");
    let (fields, _) = of(&file, &bf16());
    let expected = json!({
        "layer_types": [s, s, s, s, s, f, s, s], "sliding_window": 512, "query_pre_attn_scalar": 8, "rope_theta": 2e6,
        "rope_local_base_freq": 3e4, "tie_word_embeddings": true,
        "rope_parameters": {
            f: { "rope_type": "linear", "rope_theta": 2e6, "factor": 8.0 }, s: { "rope_type": "default", "rope_theta": 3e4 },
        },
    });
    holds("gemma3", &fields, expected);
    file.set("gemma3.attention.sliding_window_pattern", Kv::U32(2));
    holds("period", &of(&file, &bf16()).0, json!({ "layer_types": [s, f, s, f, s, f, s, f] }));
    file.unset("gemma3.attention.sliding_window");
    let (fields, _) = of(&file, &bf16());
    holds("no window", &fields, json!({ "layer_types": [f, f, f, f, f, f, f, f] }));
    assert!(!fields.contains_key("sliding_window"));
}

#[test]
fn a_file_that_contradicts_itself_says_to_give_a_config() {
    let mut file = small("llama");
    file.set("llama.rope.freq_base", Kv::F32s(vec![1.0, 2.0]));
    let dir = tempfile::tempdir().unwrap();
    let source = file.write(dir.path(), 1);
    let error = convert::extras(&planned(&source, &bf16()), None).unwrap_err();
    super::check::says(&error, "Contradiction", &["config.rope_", "llama.rope.freq_base", "model.gguf", "--config"]);
    // Then what the user gives is taken; the rest is checked.
    let given = json!({ "architectures": ["LlamaForCausalLM"], "rope_theta": 77.0, "hidden_size": 32 });
    assert!(give_fields(&source, &bf16(), &object(given)).0.is_ok());
    let given = json!({ "architectures": ["LlamaForCausalLM"], "rope_theta": 77.0, "hidden_size": 33 });
    assert!(give_fields(&source, &bf16(), &object(given)).0.is_err());
}
