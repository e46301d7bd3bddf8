//! Reading GGUF and safetensors files.

use ggshard::Error;
use ggshard::gguf::GgufSet;
use ggshard::output::SafetensorsHeader;

use super::array::Array;
use super::build::*;
use super::check::{convert, exact, refused, says};
use super::file::Kv;
use super::toy::{Dims, Toy};

fn open(file: &Gguf) -> Result<GgufSet, Error> {
    GgufSet::from_bytes("toy.gguf", file.bytes())
}

fn error(file: &Gguf) -> Error {
    open(file).expect_err("it must be refused")
}

#[test]
fn p2_an_alignment_of_a_gibibyte() {
    let aligned = |ty, value: &[u8]| Gguf::model().entry("general.alignment", ty, value);
    for value in [1u32 << 30, 1 << 21, 0, 3, 48] {
        says(&error(&aligned(U32, &value.to_le_bytes())), "Container", &["general.alignment", "power of two"]);
    }
    says(&error(&aligned(I32, &32i32.to_le_bytes())), "Container", &["expected u32"]);
    for value in [1u32, 32, 64] {
        let file = Gguf { alignment: value as usize, ..aligned(U32, &value.to_le_bytes()) };
        assert_eq!(open(&file).unwrap().parts()[0].alignment(), u64::from(value));
    }
}

#[test]
fn p3_dimensions_whose_product_wraps() {
    let shaped = |ty, ne: &[u64]| error(&Gguf::model().raw_tensor("w", ty, ne, &[0; 64]));
    says(&shaped(0, &[u64::MAX, 2, 1, 1]), "Container", &["'w'", "dimension of -1"]);
    says(&shaped(0, &[1 << 32, 1 << 32]), "Container", &["'w'", "overflows"]);
    says(&shaped(0, &[1, 1, 1, 1, 1]), "Container", &["'w'", "5 dimensions"]);
    says(&shaped(8, &[33, 1]), "Container", &["'w'", "block of 32"]);
    says(&shaped(0, &[1 << 20]), "Truncated", &["'w'", "file of at least"]);
}

#[test]
fn p4_arrays_of_another_element_type_than_expected() {
    let file = Gguf::model().entry("tokenizer.ggml.scores", ARRAY, &array(U8, 4, &[1, 2, 3, 4]));
    let set = open(&file).unwrap();
    let error = set.metadata().f32_array("tokenizer.ggml.scores").unwrap_err();
    says(&error, "Contradiction", &["tokenizer.ggml.scores", "array of 4 u8", "array of f32"]);
    assert!(set.metadata().string_array("tokenizer.ggml.scores").is_err());
    assert_eq!(set.metadata().u64_array("tokenizer.ggml.scores").unwrap(), Some(vec![1, 2, 3, 4]));
}

#[test]
fn p5_counts_types_and_lengths_that_are_not_validated() {
    let long = (1u64 << 40).to_le_bytes();
    says(&error(&Gguf::empty().entry("k", STR, &long)), "Container", &["'k'", "bytes long"]);
    says(&error(&Gguf::empty().entry("k", 13, &[0; 8])), "Container", &["value type 13"]);
    says(&error(&Gguf::model().raw_tensor("w", 0, &[1; 9], &[0; 4])), "Container", &["9 dimensions"]);
    says(&error(&Gguf::model().raw_tensor("w", 77, &[4], &[0; 16])), "Unsupported", &["'w'", "type id 77"]);
    says(&error(&Gguf { tensor_count: Some(1 << 50), ..Gguf::model() }), "Truncated", &["1125899906842624 tensors"]);
    says(&error(&Gguf { entry_count: Some(1 << 50), ..Gguf::model() }), "Truncated", &["metadata entries"]);
}

#[test]
fn p6_one_name_for_two_tensors_in_a_file_or_across_parts() {
    says(&error(&Gguf::model().tensor("w", 0, &[4]).tensor("w", 0, &[4])), "Container", &["'w'", "a second time"]);
    let folder = tempfile::tempdir().unwrap();
    let parts = [Gguf::model().split(0, 2, 4), Gguf::empty().split(1, 2, 4).tensor("token_embd.weight", 0, &[4, 3])];
    for (i, part) in parts.iter().enumerate() {
        std::fs::write(folder.path().join(format!("m-{:05}-of-00002.gguf", i + 1)), part.bytes()).unwrap();
    }
    let error = GgufSet::open(folder.path()).unwrap_err();
    says(&error, "Split", &["'token_embd.weight'", "also in"]);
}

#[test]
fn p7_a_file_that_is_cut_short() {
    let bytes = Gguf::model().tensor("last", 0, &[8]).bytes();
    for cut in [1, 17, 32] {
        let error = GgufSet::from_bytes("cut.gguf", bytes[..bytes.len() - cut].to_vec()).unwrap_err();
        says(&error, "Truncated", &["cut.gguf", "'last'", "incomplete"]);
    }
    // Nothing is written, rather than zeros in the place of what is missing.
    let folder = tempfile::tempdir().unwrap();
    let source = Toy::new(Dims::v2()).file.write(folder.path(), 1);
    let bytes = std::fs::read(&source).unwrap();
    std::fs::write(&source, &bytes[..bytes.len() - 64]).unwrap();
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_ggshard"));
    let run = program.arg("convert").arg(&source).arg(folder.path().join("out")).args(["--tp", "1"]).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&run.stderr).contains("ends before the tensor's data"));
    assert!(!folder.path().join("out").exists());
}

#[test]
fn p8_missing_unknown_and_cut_are_three_errors() {
    let mut toy = Toy::new(Dims::v2());
    let kept = toy.file.remove("blk.1.ffn_gate_inp.weight");
    says(&refused(&toy.file, &exact()), "MissingTensor", &["blk.1.ffn_gate_inp.weight"]);
    toy.file.tensors.push(kept);
    toy.file.add("blk.1.surprise.weight", &Array::new(&[2], vec![0.0; 2]));
    says(&refused(&toy.file, &exact()), "UnknownTensor", &["blk.1.surprise.weight"]);
    toy.file.remove("blk.1.surprise.weight");
    // A block without a dense projection is a block of experts, and complete.
    assert!(toy.file.tensors.iter().all(|t| t.name != "blk.1.ffn_gate.weight"));
    convert(&toy.file, &exact()).unwrap();
    let bytes = toy.file.to_bytes();
    let error = GgufSet::from_bytes("cut.gguf", bytes[..bytes.len() - 100].to_vec()).unwrap_err();
    says(&error, "Truncated", &["ends before"]);
}

#[test]
fn p10_a_second_modality_in_the_file() {
    let mut toy = Toy::new(Dims::v2());
    for name in ["v.blk.0.attn_q.weight", "v.patch_embd.weight", "mm.0.weight"] {
        toy.file.add(name, &Array::new(&[2, 2], vec![1.0; 4]));
    }
    let error = refused(&toy.file, &exact());
    says(
        &error,
        "UnknownTensor",
        &["3 of", "v.blk.0.attn_q.weight", "v.patch_embd.weight", "mm.0.weight", "ignored by a rule"],
    );
}

#[test]
fn p11_byte_order_is_told_by_the_version_and_not_guessed() {
    for version in [2, 3] {
        assert_eq!(open(&Gguf { version, ..Gguf::model() }).unwrap().parts()[0].version(), version);
        let swapped = Gguf { version: version.swap_bytes(), ..Gguf::model() };
        says(&error(&swapped), "Unsupported", &["big-endian", &format!("version {version}")]);
    }
}

#[test]
fn p12_names_longer_than_ggml_keeps() {
    let named = |n: usize| Gguf::model().tensor("n".repeat(n), 0, &[4]);
    let set = open(&named(63)).unwrap();
    assert_eq!(set.tensors()[set.find(&"n".repeat(63)).unwrap()].bytes, 16);
    says(&error(&named(64)), "Container", &["64 bytes long", "at most 63"]);
}

#[test]
fn r9_a_header_larger_than_readers_take() {
    use ggshard::dtype::Dtype;
    use ggshard::output::safetensors::{READ_LIMIT, WRITE_LIMIT};
    const { assert!(WRITE_LIMIT < READ_LIMIT) };
    let names = (0..46_000).map(|i| (format!("{i:02000}"), Dtype::U8, vec![1]));
    says(&SafetensorsHeader::layout(names, Default::default()).unwrap_err(), "Layout", &["--part-size"]);
    // A planner counts the header of each part as it fills it.
    let each = ggshard::output::safetensors::entry_bytes("model.layers.0.x", Dtype::BF16, &[1 << 40, 1 << 20]);
    assert!(each > 60, "{each}");
}

#[test]
fn r10_a_file_that_is_not_safetensors_at_all() {
    for bytes in [Gguf::model().bytes(), b"<!DOCTYPE html><html>".to_vec(), vec![0xff; 100]] {
        let error =
            SafetensorsHeader::read_from(&mut &bytes[..], bytes.len() as u64, std::path::Path::new("x.safetensors"));
        says(&error.unwrap_err(), "Checkpoint", &["x.safetensors", "not a safetensors file"]);
    }
}

#[test]
fn x2_the_count_of_blocks_includes_the_draft_block() {
    let toy = Toy::new(Dims::glm_lite());
    let made = convert(&toy.file, &exact()).unwrap();
    // Three trunk blocks, 0 to 2; the draft block is number 3 and has attention like any other.
    assert!(made.ranks[0].contains_key("model.layers.3.eh_proj.weight"));
    assert!(made.ranks[0].contains_key("model.layers.3.self_attn.kv_b_proj.weight"));
    assert!(!made.ranks[0].keys().any(|name| name.starts_with("model.layers.4.")));
    let mut short = Toy::new(Dims::glm_lite());
    short.set("block_count", Kv::U32(3));
    // One block fewer makes block 2 the draft block, which it is not.
    let error = refused(&short.file, &exact());
    says(&error, "Contradiction", &["block 2", "nextn_predict_layers"]);
}
