//! The description that `ggshard inspect` prints.

use ggshard::gguf::{Description, GgufSet};

use crate::build::*;
use crate::fixtures;

#[test]
fn a_description_serialises_and_renders() {
    let long = "x".repeat(5000);
    let file = Gguf::model()
        .text("general.description", &long)
        .text("general.url", "a\u{1b}[2Jb\u{202e}c")
        .entry("general.file_type", U32, &15u32.to_le_bytes())
        .entry("nan", F32, &f32::NAN.to_le_bytes());
    let set = GgufSet::from_bytes("toy.gguf", file.bytes()).unwrap();
    let description = Description::from_set(&set);
    let json = serde_json::to_value(&description).unwrap();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["file_type"]["name"], "Q4_K_M");
    assert_eq!(json["parameters"], 12 + 96 + 4);
    assert_eq!(json["tensor_bytes"], 48 + 102 + 16);
    assert_eq!(json["types"][0]["ty"], "Q8_0");
    assert_eq!(json["tensors"][1]["shape"], serde_json::json!([3, 32]));
    let value = |key: &str| {
        let keys = json["metadata"].as_array().unwrap();
        keys.iter().find(|k| k["key"] == key).unwrap()["value"].clone()
    };
    assert_eq!(value("llama.rope.freq_base"), 1e-5, "the number that was written, not its f64 expansion");
    assert_eq!(value("nan"), "NaN");
    assert_eq!(value("llama.block_count"), 2);
    assert_eq!(value("tokenizer.ggml.tokens"), serde_json::json!(["a", "\u{fffd}"]));
    assert!(value("general.description").as_str().unwrap().len() < 200);

    let text = description.render(true);
    assert!(text.contains("blk.0.attn_q.weight  Q8_0  [3, 32]"), "{text}");
    assert!(text.contains("str[2]") && text.contains("15 (Q4_K_M)"), "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "text from the file cannot drive a terminal");
    assert!(text.lines().all(|line| line.chars().count() < 300 && line == line.trim_end()));
    assert!(!description.render(false).contains("attn_q"));
}

#[test]
fn sums_of_headers_without_data_do_not_overflow() {
    let huge = |i: u64| Tensor {
        name: format!("t{i}").into_bytes(),
        ne: vec![1 << 60],
        ty: 24,
        data: vec![],
        offset: Some(i << 60),
    };
    let mut file = Gguf::empty();
    file.tensors = (0..15).map(huge).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.gguf");
    std::fs::write(&path, file.header()).unwrap();
    let set = GgufSet::open_header_only(&path).unwrap();
    assert_eq!(Description::from_set(&set).parameters, 15 << 60);
    assert!(GgufSet::open(&path).is_err());
}

#[test]
fn the_header_of_a_744b_model_describes_quickly() {
    let path = fixtures().join("container/plan/glm-5-744b-q4_k_m.header.gguf");
    let start = std::time::Instant::now();
    let set = GgufSet::open_header_only(&path).unwrap();
    let description = Description::from_set(&set);
    let text = description.render(true);
    // Generous, for slow builders: it takes a few milliseconds.
    assert!(start.elapsed().as_secs_f64() < 2.0);
    assert_eq!(description.tensors.len(), 1809);
    assert!(text.lines().count() > 1809 && text.contains("glm-dsa"));
}
