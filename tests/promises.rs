//! The promises that no other test file keeps: complete, placed by rule, exact or reported, all or nothing,
//! deterministic, and unharmed by hostile rules.
//!
//! One read and values: `engine.rs`. Bounded memory: `memory.rs`. Bits of every type: `dequant.rs`.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;
#[path = "common/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

#[path = "promises/all_or_nothing.rs"]
mod all_or_nothing;
#[path = "promises/hostile_rules.rs"]
mod hostile_rules;

use std::collections::BTreeMap;
use std::path::Path;

use ggshard::convert::{Extras, Planned, Request, convert, plan_with};
use ggshard::dequant::{FloatType, Simd};
use ggshard::engine::Options;
use ggshard::error::{Error, Result};
use ggshard::gguf::{GgmlType, GgufSet};
use ggshard::mapping::{Profile, choose};
use gguf_writer::{GgufBuilder, Random};

fn planned(builder: &GgufBuilder, tp: u32, dtype: FloatType) -> Result<Planned> {
    let set = GgufSet::from_bytes("toy.gguf", builder.build()).unwrap();
    plan_with(set, toy::mapping(), Profile::load("hf").unwrap(), &Request { tp, dtype, ..Request::default() })
}

fn read(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// The safetensors files of a conversion.
fn weights(planned: &Planned, options: Options) -> BTreeMap<String, Vec<u8>> {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("out");
    convert(planned, &output, options, &Extras::default(), &|_| {}).unwrap();
    read(&output).into_iter().filter(|(name, _)| name.ends_with(".safetensors")).collect()
}

// Complete.

#[test]
fn a_file_that_lacks_any_needed_tensor_is_refused_by_its_name() {
    let whole = toy::builder();
    for index in 0..whole.tensors.len() {
        let mut file = whole.clone();
        let gone = file.tensors.remove(index).name;
        let optional = gone.ends_with("scale") || gone == "rope_freqs.weight";
        match planned(&file, 2, FloatType::BF16) {
            Ok(_) => assert!(optional, "'{gone}' was not missed"),
            Err(error) => {
                assert!(!optional, "{error}");
                assert!(error.to_string().contains(&gone), "'{gone}' is not named: {error}");
            }
        }
    }
}

#[test]
fn a_tensor_without_a_rule_is_refused_by_its_name() {
    for name in ["blk.0.attn_q_norm.weight", "blk.2.attn_q.weight", "token_embd.bias", "blk.0.attn_q.scale2", "x"] {
        let file = toy::builder().random(name, GgmlType::F32, &[8], 1);
        match planned(&file, 1, FloatType::BF16).map(|p| p.plan.params.len()) {
            Err(error) => assert!(error.to_string().contains(name), "{error}"),
            Ok(_) => panic!("'{name}' was dropped"),
        }
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused_by_its_name() {
    let whole = toy::builder();
    for index in 0..whole.tensors.len() {
        let name = &whole.tensors[index].name;
        // The axis that the mapping asks a tensor for cannot be wrong; an ignored tensor may have any shape.
        if ["token_embd.weight", "rope_freqs.weight"].contains(&name.as_str()) || name.ends_with("input_scale") {
            continue;
        }
        let mut file = whole.clone();
        let tensor = &mut file.tensors[index];
        let row = tensor.bytes.len() / tensor.ne[1..].iter().product::<u64>().max(1) as usize;
        *tensor.ne.last_mut().unwrap() += 1;
        let more = if tensor.ne.len() == 1 {
            4
        } else {
            row * tensor.ne[1..tensor.ne.len() - 1].iter().product::<u64>() as usize
        };
        let longer = tensor.bytes.len() + more;
        tensor.bytes.resize(longer, 0);
        match planned(&file, 1, FloatType::BF16).map(|p| p.plan.params.len()) {
            Err(error) => assert!(error.to_string().contains(name.as_str()), "'{name}' is not named: {error}"),
            Ok(_) => panic!("the shape of '{name}' was not looked at"),
        }
    }
}

// Placed by rule.

#[test]
fn the_order_of_tensors_and_keys_changes_nothing() {
    let whole = toy::builder();
    for tp in [1, 4] {
        let reference = weights(&planned(&whole, tp, FloatType::BF16).unwrap(), Options::default());
        for seed in 0..4 {
            let mut file = whole.clone();
            let mut random = Random(seed);
            for i in (1..file.tensors.len()).rev() {
                file.tensors.swap(i, random.below(i as u64 + 1) as usize);
            }
            file.entries.reverse();
            let again = weights(&planned(&file, tp, FloatType::BF16).unwrap(), Options::default());
            assert!(again == reference, "tp {tp}, order {seed}");
        }
    }
}

// Exact, or reported by tensor.

#[test]
fn nan_infinity_and_overflow_are_reported_by_tensor_and_nothing_is_written() {
    for (value, dtype, count) in [
        (f32::NAN, FloatType::BF16, (1, 0, 0)),
        (f32::INFINITY, FloatType::F32, (0, 1, 0)),
        (-70_000.0, FloatType::F16, (0, 0, 1)),
        (3.4e38, FloatType::BF16, (0, 0, 0)),
        (f32::MAX, FloatType::BF16, (0, 0, 1)),
    ] {
        let mut file = toy::builder();
        let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.1.attn_q.bias").unwrap();
        // Small values, so that nothing else overflows.
        tensor.bytes = [1.0f32; 32].iter().flat_map(|v| v.to_le_bytes()).collect();
        tensor.bytes[20..24].copy_from_slice(&value.to_le_bytes());
        // Scales of one: random ones take experts past what F16 holds.
        for tensor in file.tensors.iter_mut().filter(|t| t.name.ends_with(".scale")) {
            tensor.bytes = 1.0f32.to_le_bytes().repeat(tensor.bytes.len() / 4);
        }
        let planned = planned(&file, 2, dtype).unwrap();
        let temp = tempfile::tempdir().unwrap();
        let output = temp.path().join("new/out");
        let refused = convert(&planned, &output, Options::default(), &Extras::default(), &|_| {});
        match refused {
            Ok(_) => assert_eq!(count, (0, 0, 0)),
            Err(Error::Nonfinite(fault)) => {
                assert_eq!(fault.tensor.as_deref(), Some("layers.1.q.bias"));
                assert!(!temp.path().join("new").exists());
            }
            Err(error) => panic!("{error}"),
        }
        if count == (0, 0, 0) {
            continue;
        }
        let options = Options { allow_nonfinite: true, ..Options::default() };
        let report = convert(&planned, &output, options, &Extras::default(), &|_| {}).unwrap();
        assert_eq!(report.nonfinite, BTreeMap::from([("layers.1.q.bias".to_owned(), count)]));
    }
}

// Deterministic.

#[test]
fn every_instruction_set_gives_the_same_bytes() {
    let toy = planned(&toy::builder(), 4, FloatType::BF16).unwrap();
    let set = plans::open(plans::GLM);
    let mapping = choose(&set).unwrap();
    let glm = plan_with(set, mapping, Profile::load("hf").unwrap(), &Request { tp: 2, ..Request::default() }).unwrap();
    for planned in [toy, glm] {
        let options = |simd| Options { simd, allow_nonfinite: true, ..Options::default() };
        let reference = weights(&planned, options(Simd::Baseline));
        assert!(weights(&planned, options(Simd::detect())) == reference);
    }
}
