//! Which class a `deepseek2` file is (MAPPING, section 1), and what the choice changes.

use ggshard::convert::{self, Request};
use ggshard::dequant::FloatType;

use super::array::Array;
use super::check::{convert, converts, exact, refused, says, with_mapping};
use super::file::{File, Kv};
use super::toy::{Dims, Toy};

/// The class that a file is taken for.
#[track_caller]
fn class(file: &File) -> String {
    let dir = tempfile::tempdir().unwrap();
    let planned = convert::plan(&file.write(dir.path(), 1), &exact(), false).unwrap_or_else(|e| panic!("{e}"));
    planned.plan.model.class.clone()
}

#[test]
fn kimi_and_other_v3_models_are_the_same_class() {
    for pre in ["kimi-k2", "deepseek-v3", "deepseek-r1-qwen", "deepseek-llm"] {
        let mut toy = Toy::new(Dims::v3());
        toy.file.set("tokenizer.ggml.pre", Kv::Str(pre));
        let made = converts(&toy.file, &exact(), &toy.truth);
        assert_eq!(made.class(), "DeepseekV3ForCausalLM");
    }
}

#[test]
fn every_kind_of_evidence_for_v3_counts() {
    // The router bias alone, with a gating function that the file misstates.
    let mut toy = Toy::new(Dims::v3());
    toy.set("expert_gating_func", Kv::U32(1));
    assert_eq!(class(&toy.file), "DeepseekV3ForCausalLM");
    // The gating function alone: then the bias is required, not guessed away.
    let mut toy = Toy::new(Dims::v3());
    toy.file.remove_where(|name| name.ends_with("exp_probs_b.bias"));
    says(&refused(&toy.file, &exact()), "MissingTensor", &["blk.1.exp_probs_b.bias"]);
    // One block's bias alone: the others are missing.
    let mut toy = Toy::new(Dims::v3());
    toy.file.remove("blk.1.exp_probs_b.bias");
    says(&refused(&toy.file, &exact()), "MissingTensor", &["blk.1.exp_probs_b.bias"]);
}

#[test]
fn v2_is_not_mistaken() {
    for gating in [None, Some(1)] {
        let mut toy = Toy::new(Dims::v2());
        toy.file.set("tokenizer.ggml.pre", Kv::Str("deepseek-llm"));
        match gating {
            None => toy.unset("expert_gating_func"),
            Some(n) => toy.set("expert_gating_func", Kv::U32(n)),
        };
        assert_eq!(class(&toy.file), "DeepseekV2ForCausalLM");
    }
}

#[test]
fn glm_lite_is_known_by_its_tokenizer() {
    let mut toy = Toy::new(Dims::v3());
    toy.file.set("tokenizer.ggml.pre", Kv::Str("glm4"));
    assert_eq!(class(&toy.file), "Glm4MoeLiteForCausalLM");
}

#[test]
fn glm_lite_is_known_by_its_mtp_block() {
    let mut toy = Toy::new(Dims::glm_lite());
    toy.set("expert_gating_func", Kv::U32(2));
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert_eq!(made.class(), "Glm4MoeLiteForCausalLM");
    // The key alone, when the tensors were stripped.
    toy.file.remove_where(|name| name.starts_with("blk.3."));
    assert_eq!(class(&toy.file), "Glm4MoeLiteForCausalLM");
}

#[test]
fn glm_lite_is_known_by_its_vocabulary() {
    let dims = Dims { vocab: 154880, hidden: 4, dense: 0, layers: 1, experts: 1, tied: true, ..Dims::v3() };
    let mut toy = Toy::new(dims);
    assert_eq!(class(&toy.file), "Glm4MoeLiteForCausalLM");
    // GLM files may lack the key; the embedding says the same.
    toy.unset("vocab_size");
    assert_eq!(class(&toy.file), "Glm4MoeLiteForCausalLM");
}

#[test]
fn a_router_bias_without_a_gating_function_is_glm_lite() {
    let mut toy = Toy::new(Dims::v3());
    toy.unset("expert_gating_func");
    assert_eq!(class(&toy.file), "Glm4MoeLiteForCausalLM");
}

#[test]
fn a_named_mapping_overrides_the_evidence() {
    let toy = Toy::new(Dims::v3());
    let made = convert(&toy.file, &with_mapping("glm4_moe_lite")).unwrap();
    assert_eq!(made.class(), "Glm4MoeLiteForCausalLM");
    // As V2 the router bias has no rule: named, never dropped.
    let error = refused(&toy.file, &with_mapping("deepseek_v2"));
    says(&error, "UnknownTensor", &["2 of", "blk.1.exp_probs_b.bias", "blk.2.exp_probs_b.bias", "deepseek_v2"]);
    let made = convert(&toy.file, &with_mapping("raw")).unwrap();
    assert!(made.ranks[0].contains_key("blk.0.attn_k_b.weight"));
    says(&refused(&toy.file, &with_mapping("deepseek_v9")), "Rules", &["deepseek_v9", "deepseek_v3", "raw"]);
}

#[test]
fn the_router_bias_stays_f32_whatever_is_asked_for() {
    let mut toy = Toy::new(Dims::v3());
    // 1 + 2^-20 has no bf16 or f16; 1e5 no f16.
    let values = Array::new(&[3], vec![1.0 + f32::powi(2.0, -20), -1e5, 3.0e-39]);
    for layer in [1, 2] {
        toy.file.remove(&format!("blk.{layer}.exp_probs_b.bias"));
        toy.file.add(&format!("blk.{layer}.exp_probs_b.bias"), &values);
    }
    // Numbers above 65504 overflow f16 and are refused; keep the others small.
    for tensor in toy.file.tensors.iter_mut().filter(|t| !t.name.ends_with(".bias")) {
        tensor.data.chunks_mut(4).for_each(|b| b.copy_from_slice(&0.5f32.to_le_bytes()));
    }
    let bytes: Vec<u8> = values.data.iter().flat_map(|x| x.to_le_bytes()).collect();
    for (dtype, name) in [(FloatType::F32, "F32"), (FloatType::BF16, "BF16"), (FloatType::F16, "F16")] {
        for tp in [1, 2] {
            let made = convert(&toy.file, &Request { dtype, tp, ..Request::default() }).unwrap();
            for rank in &made.ranks {
                let bias = &rank["model.layers.1.mlp.gate.e_score_correction_bias"];
                assert_eq!(*bias, ("F32".to_owned(), vec![3], bytes.clone()));
                assert_eq!(rank["model.layers.1.mlp.gate.weight"].0, name);
            }
        }
    }
}
