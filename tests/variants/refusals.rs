//! What cannot be converted, and what the message says to do.

use ggshard::convert::Request;

use super::check::{convert, exact, refused, says};
use super::file::{File, Kv};
use super::toy::{Dims, Toy};

fn tp(tp: u32) -> Request {
    Request { tp, ..exact() }
}

#[test]
fn a_tp_that_does_not_divide_lists_those_that_do() {
    let toy = Toy::new(Dims::v3());
    // 4 heads.
    let error = refused(&toy.file, &tp(3));
    says(&error, "Layout", &["3 ranks", "--tp values that work for this model: 1, 2, 4"]);
    let error = refused(&toy.file, &tp(8));
    says(&error, "Layout", &["4 heads cannot be divided among 8 ranks", "1, 2, 4"]);
    // 12 heads, but experts of 10 rows.
    let toy = Toy::new(Dims { heads: 12, moe_inter: 10, ..Dims::v3() });
    says(&refused(&toy.file, &tp(4)), "Layout", &["an axis of 10", "experts.0.gate_proj", "work for this model: 1, 2"]);
    // 6 heads and even experts: at tp 3 the padded vocabulary of 128 rows is in the way.
    let toy = Toy::new(Dims { heads: 6, ..Dims::v3() });
    says(&refused(&toy.file, &tp(3)), "Layout", &["100 vocabulary rows", "128", "model.embed_tokens.weight", "1, 2"]);
    for n in [0, 1025] {
        says(&refused(&toy.file, &tp(n)), "Layout", &[&format!("tp {n}"), "1024"]);
    }
}

#[test]
fn files_of_other_kinds_are_refused_by_name() {
    for kind in ["adapter", "mmproj", "imatrix", "vocab"] {
        let mut toy = Toy::new(Dims::v3());
        toy.file.set("general.type", Kv::Str(kind));
        says(&refused(&toy.file, &exact()), "Unsupported", &[kind, "general.type"]);
    }
    let mut toy = Toy::new(Dims::v3());
    toy.file.set("general.type", Kv::Str("model"));
    assert!(convert(&toy.file, &exact()).is_ok());
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let mut toy = Toy::new(Dims::v3());
    toy.file.set("general.architecture", Kv::Str("deepseek9"));
    let known = ["deepseek9", "deepseek_v3", "deepseek2", "glm-dsa", "deepseek32", "--mapping"];
    says(&refused(&toy.file, &exact()), "NoMapping", &known);
    toy.file.unset("general.architecture");
    says(&refused(&toy.file, &exact()), "Contradiction", &["general.architecture"]);
    toy.file.set("general.architecture", Kv::U32(2));
    says(&refused(&toy.file, &exact()), "Contradiction", &["general.architecture"]);
}

#[test]
fn a_mapping_for_another_architecture_fails_on_its_keys() {
    let toy = Toy::new(Dims::glm_dsa(&[true; 3], 0));
    let error = refused(&toy.file, &Request { mapping: Some("deepseek_v3".into()), ..exact() });
    says(&error, "UnknownTensor", &["blk.0.indexer.attn_q_b.weight", "deepseek_v3"]);
}

#[test]
fn types_that_are_no_weights_are_refused_by_tensor() {
    let bytes = |ty: u32| match ty {
        9 => 40 * 36 / 32 * 32,
        24 => 40 * 32,
        25 => 40 * 32 * 2,
        26 => 40 * 32 * 4,
        _ => 40 * 32 * 8,
    };
    for (ty, name) in [(9, "Q8_1"), (24, "I8"), (25, "I16"), (26, "I32"), (27, "I64")] {
        let mut toy = Toy::new(Dims { heads: 4, v_head: 8, ..Dims::v3() });
        let tensor = toy.file.tensor("blk.1.attn_output.weight");
        assert_eq!(tensor.shape, [40, 32]);
        tensor.ty = ty;
        tensor.data = vec![0; bytes(ty)];
        says(&refused(&toy.file, &exact()), "Unsupported", &["blk.1.attn_output.weight", name]);
    }
}

#[test]
fn an_empty_file_is_no_model() {
    let mut file = File::default();
    file.set("general.architecture", Kv::Str("deepseek2"));
    says(&refused(&file, &exact()), "Unsupported", &["without tensors"]);
    // A model that is nothing but its embedding.
    let mut toy = Toy::new(Dims::v3());
    toy.file.remove_where(|name| name.starts_with("blk."));
    says(&refused(&toy.file, &exact()), "MissingTensor", &["none of the 3 trunk blocks", "block_count"]);
}
