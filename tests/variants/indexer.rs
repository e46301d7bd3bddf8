//! Sparse attention: indexers in every block, in some, in none, and metadata that says otherwise (MAPPING, sections 3
//! and 4).

use super::array::Array;
use super::check::{convert, converts, exact, refused, says};
use super::file::Kv;
use super::toy::{Dims, Toy};

const FIVE: [&str; 5] = ["attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight"];

#[test]
fn glm_5_with_an_indexer_in_every_block() {
    let mut toy = Toy::new(Dims::glm_dsa(&[true; 4], 1));
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert_eq!(made.class(), "GlmMoeDsaForCausalLM");
    toy.unset("attention.indexer.types");
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn glm_5_2_with_shared_blocks_goes_by_the_tensors() {
    let full = [true, true, false, false, true, false, true];
    let mut toy = Toy::new(Dims::glm_dsa(&full, 1));
    converts(&toy.file, &exact(), &toy.truth);
    toy.unset("attention.indexer.types");
    converts(&toy.file, &exact(), &toy.truth);
    // A long context makes llama.cpp assume the released pattern; tensors still decide.
    toy.set("context_length", Kv::U32(1 << 20));
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn types_that_contradict_the_tensors_are_refused_both_ways() {
    let mut toy = Toy::new(Dims::glm_dsa(&[true, true, false], 0));
    toy.set("attention.indexer.types", Kv::Bools(vec![true, true, true]));
    let parts = ["block 2", "true", "glm-dsa.attention.indexer.types", "blk.2.indexer.attn_q_b.weight", "lacks"];
    says(&refused(&toy.file, &exact()), "Contradiction", &parts);
    toy.set("attention.indexer.types", Kv::Bools(vec![true, false, false]));
    let parts = ["block 1", "false", "glm-dsa.attention.indexer.types", "blk.1.indexer.attn_q_b.weight"];
    says(&refused(&toy.file, &exact()), "Contradiction", &parts);
}

#[test]
fn types_of_another_length_or_kind_are_refused() {
    let mut toy = Toy::new(Dims::glm_dsa(&[true, true, false, true], 1));
    toy.set("attention.indexer.types", Kv::Bools(vec![true, true, false, true]));
    converts(&toy.file, &exact(), &toy.truth);
    for list in [vec![true, true], vec![true; 5], vec![]] {
        toy.set("attention.indexer.types", Kv::Bools(list));
        let error = refused(&toy.file, &exact());
        says(&error, "Contradiction", &["glm-dsa.attention.indexer.types", "3", "values"]);
    }
    for wrong in [Kv::Str("full"), Kv::F32s(vec![1.0; 3]), Kv::U32s(vec![1, 1, 0])] {
        toy.set("attention.indexer.types", wrong);
        let error = refused(&toy.file, &exact());
        says(&error, "Contradiction", &["glm-dsa.attention.indexer.types"]);
    }
}

#[test]
fn four_of_five_indexer_tensors_are_an_error_that_names_the_fifth() {
    for gone in FIVE {
        for types in [true, false] {
            let mut toy = Toy::new(Dims::glm_dsa(&[true; 4], 1));
            if !types {
                toy.unset("attention.indexer.types");
            }
            let gone = format!("blk.2.indexer.{gone}");
            toy.file.remove(&gone);
            let error = refused(&toy.file, &exact());
            says(&error, "MissingTensor", &[&gone, "indexer"]);
            assert_eq!(error.fault().tensor.as_deref(), Some(gone.as_str()));
        }
    }
}

#[test]
fn glm_without_any_indexer_is_converted_with_a_warning() {
    let mut toy = Toy::new(Dims::glm_dsa(&[false; 3], 0));
    toy.unset("attention.indexer.types");
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert!(made.warnings().contains("indexer"), "{}", made.warnings());
}

#[test]
fn the_mtp_block_of_glm_has_its_own_indexer_and_tables() {
    for (mtp_tables, indexer) in [(false, true), (true, true), (true, false)] {
        let dims = Dims { mtp_tables, ..Dims::glm_dsa(&[true, false, true, indexer], 1) };
        let toy = Toy::new(dims);
        let made = converts(&toy.file, &exact(), &toy.truth);
        let has = |name: &str| made.ranks[0].contains_key(&format!("model.layers.3.{name}"));
        assert_eq!(has("embed_tokens.weight") && has("shared_head.head.weight"), mtp_tables);
        assert_eq!(has("self_attn.indexer.wk.weight"), indexer);
    }
}

#[test]
fn a_quantized_indexer_projection_is_a_weight_like_any_other() {
    // Q8_0: one f16 scale of 0.5 (0x3800), then 32 signed bytes.
    let dims = Dims { hidden: 32, ..Dims::glm_dsa(&[true; 3], 0) };
    let mut toy = Toy::new(dims);
    let name = "blk.1.indexer.proj.weight";
    toy.file.remove(name);
    let codes: Vec<i8> = (0..64).map(|i| i - 30).collect();
    let blocks: Vec<u8> =
        codes.chunks(32).flat_map(|c| [0x00, 0x38].into_iter().chain(c.iter().map(|q| *q as u8))).collect();
    toy.file.add_raw(name, &[2, 32], 8, blocks);
    let values = codes.iter().map(|q| f32::from(*q) * 0.5).collect();
    toy.truth.insert("model.layers.1.self_attn.indexer.weights_proj.weight".into(), Array::new(&[2, 32], values));
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn v3_2_requires_an_indexer_in_every_block() {
    for mtp in [0, 1] {
        let toy = Toy::new(Dims::v32(mtp));
        let made = converts(&toy.file, &exact(), &toy.truth);
        assert_eq!(made.class(), "DeepseekV32ForCausalLM");
        let last = 2 + mtp;
        for gone in FIVE {
            let mut file = toy.file.clone();
            let gone = format!("blk.{last}.indexer.{gone}");
            file.remove(&gone);
            says(&refused(&file, &exact()), "MissingTensor", &[&gone, &format!("block {last}")]);
        }
        let mut file = toy.file.clone();
        file.remove_where(|name| name.starts_with("blk.1.indexer."));
        says(&refused(&file, &exact()), "MissingTensor", &["blk.1.indexer.attn_q_b.weight"]);
    }
}

#[test]
fn v3_2_stored_as_deepseek2_is_v3() {
    let toy = Toy::new(Dims::v3());
    assert_eq!(convert(&toy.file, &exact()).unwrap().class(), "DeepseekV3ForCausalLM");
}
