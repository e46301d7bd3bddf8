//! Multi-token-prediction blocks: there, stripped, alone, or not what the metadata says (MAPPING, section 6).

use ggshard::mapping::MtpPolicy;

use super::check::{Truth, convert, convert_split, converts, exact, refused, says, with_mtp};
use super::file::Kv;
use super::toy::{Dims, Toy};

fn glm() -> Toy {
    Toy::new(Dims::glm_dsa(&[true; 4], 1))
}

fn without(truth: &Truth, gone: impl Fn(&str) -> bool) -> Truth {
    truth.iter().filter(|(name, _)| !gone(name)).map(|(n, a)| (n.clone(), a.clone())).collect()
}

fn trunk(name: &str) -> bool {
    (0..3).any(|n| name.starts_with(&format!("blk.{n}.")) || name.starts_with(&format!("model.layers.{n}.")))
}

fn mtp(name: &str) -> bool {
    name.starts_with("blk.3.") || name.starts_with("model.layers.3.")
}

#[test]
fn stripped_mtp_tensors_are_a_warning() {
    let mut toy = glm();
    toy.file.remove_where(mtp);
    let made = converts(&toy.file, &exact(), &without(&toy.truth, mtp));
    assert!(made.warnings().contains("MTP block 3"), "{}", made.warnings());
    assert!(made.warnings().contains("nextn_predict_layers"), "{}", made.warnings());
}

#[test]
fn a_file_made_without_mtp_has_no_key_and_no_warning() {
    let toy = Toy::new(Dims::glm_dsa(&[true; 3], 0));
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert_eq!(made.warnings(), "[]");
}

#[test]
fn the_mtp_head_alone_is_converted() {
    let mut toy = glm();
    toy.file.remove_where(trunk);
    for policy in [MtpPolicy::Keep, MtpPolicy::Only] {
        let made = converts(&toy.file, &with_mtp(policy), &without(&toy.truth, trunk));
        assert!(made.warnings().contains("MTP blocks alone"), "{}", made.warnings());
    }
}

#[test]
fn dropped_blocks_are_listed_with_the_reason() {
    let toy = glm();
    let made = converts(&toy.file, &with_mtp(MtpPolicy::Drop), &without(&toy.truth, mtp));
    let expected: Vec<&String> = toy.file.tensors.iter().map(|t| &t.name).filter(|n| mtp(n)).collect();
    assert_eq!(made.ignored().len(), expected.len());
    for name in expected {
        assert!(made.ignored()[name].contains("--mtp drop"), "{name}");
    }
    let made = converts(&toy.file, &with_mtp(MtpPolicy::Only), &without(&toy.truth, trunk));
    assert!(made.ignored().iter().all(|(name, reason)| trunk(name) && reason.contains("--mtp only")));
    assert_eq!(made.ignored().len(), toy.file.tensors.iter().filter(|t| trunk(&t.name)).count());
    let made = converts(&toy.file, &with_mtp(MtpPolicy::Keep), &toy.truth);
    assert!(made.ignored().is_empty());
}

#[test]
fn mtp_only_without_an_mtp_block_is_an_error() {
    let toy = Toy::new(Dims::v3());
    says(&refused(&toy.file, &with_mtp(MtpPolicy::Only)), "MissingTensor", &["--mtp only"]);
    let mut toy = glm();
    toy.file.remove_where(mtp);
    let error = refused(&toy.file, &with_mtp(MtpPolicy::Only));
    says(&error, "MissingTensor", &["--mtp only", "nextn_predict_layers"]);
}

#[test]
fn mtp_tensors_without_the_key_are_a_contradiction() {
    let mut toy = glm();
    toy.unset("nextn_predict_layers");
    toy.set("attention.indexer.types", Kv::Bools(vec![true; 4]));
    let error = refused(&toy.file, &exact());
    says(&error, "Contradiction", &["block 3", "nextn.", "glm-dsa.nextn_predict_layers", "glm-dsa.block_count"]);
}

#[test]
fn an_mtp_block_without_mtp_tensors_is_a_contradiction() {
    let mut toy = Toy::new(Dims::glm_dsa(&[true; 4], 0));
    toy.set("nextn_predict_layers", Kv::U32(1));
    let error = refused(&toy.file, &exact());
    says(&error, "Contradiction", &["block 3", "nextn.", "glm-dsa.nextn_predict_layers"]);
    // Two declared, one there: block 2 of the trunk would be an MTP block.
    let mut toy = glm();
    toy.set("nextn_predict_layers", Kv::U32(2));
    says(&refused(&toy.file, &exact()), "Contradiction", &["block 2", "glm-dsa.nextn_predict_layers"]);
}

#[test]
fn two_mtp_blocks() {
    let toy = Toy::new(Dims::glm_dsa(&[true; 5], 2));
    converts(&toy.file, &exact(), &toy.truth);
    let mut toy = toy;
    toy.set("nextn_predict_layers", Kv::U32(6));
    says(&refused(&toy.file, &exact()), "Contradiction", &["nextn_predict_layers", "6"]);
}

#[test]
fn many_absent_mtp_blocks_are_one_warning() {
    let mut toy = Toy::new(Dims::glm_dsa(&[true; 3], 0));
    toy.set("block_count", Kv::U32(60003)).set("nextn_predict_layers", Kv::U32(60000));
    let made = convert(&toy.file, &exact()).unwrap();
    assert!(made.warnings().len() < 1000, "{}", made.warnings().len());
    assert!(made.warnings().contains("60000"));
}

#[test]
fn a_missing_trunk_block_is_an_error_that_names_it() {
    for gone in 0..3 {
        let mut toy = glm();
        toy.file.remove_where(|name| name.starts_with(&format!("blk.{gone}.")));
        let error = refused(&toy.file, &exact());
        says(&error, "MissingTensor", &[&format!("block {gone}"), &format!("blk.{gone}."), "block_count"]);
    }
}

#[test]
fn a_block_beyond_the_count_is_unknown() {
    let mut toy = glm();
    let extra = toy.file.tensor("blk.2.attn_norm.weight").data.clone();
    toy.file.add_raw("blk.4.attn_norm.weight", &[40], 0, extra);
    let error = refused(&toy.file, &exact());
    says(&error, "UnknownTensor", &["1 of", "blk.4.attn_norm.weight", "block_count", "4"]);
    for policy in [MtpPolicy::Drop, MtpPolicy::Only] {
        says(&refused(&toy.file, &with_mtp(policy)), "UnknownTensor", &["blk.4.attn_norm.weight"]);
    }
}

#[test]
fn every_single_tensor_is_missed_by_name() {
    let toy = Toy::new(Dims { mtp_tables: true, ..Dims::glm_dsa(&[true; 4], 1) });
    let optional = [
        "output.weight",
        "nextn.embed_tokens.weight",
        "nextn.shared_head_head.weight",
        "nextn.shared_head_norm.weight",
    ];
    for index in 0..toy.file.tensors.len() {
        let mut file = toy.file.clone();
        let gone = file.tensors.remove(index).name;
        if optional.iter().any(|o| gone == *o || gone.ends_with(&format!(".{o}"))) {
            assert!(convert_plan(&file), "{gone}");
            continue;
        }
        let error = refused(&file, &exact());
        says(&error, "MissingTensor", &[&gone]);
        assert_eq!(error.fault().tensor.as_deref(), Some(gone.as_str()), "{error}");
    }
}

fn convert_plan(file: &super::file::File) -> bool {
    let dir = tempfile::tempdir().unwrap();
    ggshard::convert::plan(&file.write(dir.path(), 1), &exact(), false).is_ok()
}

#[test]
fn a_block_number_with_a_leading_zero_is_no_block() {
    for policy in [MtpPolicy::Keep, MtpPolicy::Drop, MtpPolicy::Only] {
        let mut toy = glm();
        toy.file.add_raw("blk.03.attn_norm.weight", &[1], 0, vec![0; 4]);
        says(&refused(&toy.file, &with_mtp(policy)), "UnknownTensor", &["blk.03.attn_norm.weight"]);
    }
}

#[test]
fn every_single_extra_tensor_is_named() {
    let toy = glm();
    let names =
        ["blk.0.attn_q.weight", "blk.1.attn_q_norm.weight", "v.blk.0.x.weight", "weight", "blk.0.ffn_gate_exps.weight"];
    for name in names {
        let mut file = toy.file.clone();
        file.add_raw(name, &[1], 0, vec![0; 4]);
        let error = refused(&file, &exact());
        says(&error, "UnknownTensor", &["1 of", name, "glm_moe_dsa"]);
    }
    let mut file = toy.file.clone();
    for n in 0..27 {
        file.add_raw(&format!("extra.{n}.weight"), &[1], 0, vec![0; 4]);
    }
    let total = format!("27 of {} tensors", file.tensors.len());
    says(&refused(&file, &exact()), "UnknownTensor", &[&total, "extra.0.weight", "more"]);
}

#[test]
fn tied_embeddings_leave_no_head_and_a_warning() {
    for dims in [Dims::v2(), Dims::glm_dsa(&[true; 4], 1)] {
        let toy = Toy::new(Dims { tied: true, ..dims });
        let made = converts(&toy.file, &exact(), &toy.truth);
        assert!(!made.ranks[0].contains_key("lm_head.weight"));
        assert!(made.warnings().contains("tie_word_embeddings"), "{}", made.warnings());
    }
}

#[test]
fn a_head_in_the_last_part_of_a_set_counts() {
    let mut toy = Toy::new(Dims::v3());
    let head = toy.file.remove("output.weight");
    toy.file.tensors.push(head);
    // Halves of one weight in different parts, too.
    toy.file
        .tensors
        .sort_by_key(|t| (t.name == "output.weight", t.name.contains("attn_v_b"), t.name.contains("_exps")));
    for parts in [2, 5] {
        let made = convert_split(&toy.file, parts, &exact()).unwrap();
        assert_eq!(made.warnings(), "[]");
        let head = &made.ranks[0]["lm_head.weight"].2;
        let kv_b = &made.ranks[0]["model.layers.1.self_attn.kv_b_proj.weight"].2;
        let bytes = |name: &str| toy.truth[name].data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(head, &bytes("lm_head.weight"));
        assert_eq!(kv_b, &bytes("model.layers.1.self_attn.kv_b_proj.weight"));
        assert_eq!(made.ranks[0].len(), toy.truth.len());
    }
}
