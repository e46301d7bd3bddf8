//! Converts a file with the library and compares what came out with what should have.

use std::collections::BTreeMap;

use ggshard::convert::{self, Request};
use ggshard::dequant::FloatType;
use ggshard::engine::Options;
use ggshard::error::Error;
use ggshard::mapping::MtpPolicy;
use safetensors::SafeTensors;

use super::array::Array;
use super::file::File;

/// The weights of a checkpoint.
pub type Truth = BTreeMap<String, Array>;

/// A tensor of the output: dtype, shape, bytes.
pub type Stored = (String, Vec<usize>, Vec<u8>);

/// What a conversion wrote.
pub struct Made {
    /// For each rank its tensors.
    pub ranks: Vec<BTreeMap<String, Stored>>,
    pub manifest: serde_json::Value,
}

impl Made {
    pub fn warnings(&self) -> String {
        self.manifest["warnings"].to_string()
    }

    /// The ignored tensors with the reasons for it.
    pub fn ignored(&self) -> BTreeMap<String, String> {
        let text = |v: &serde_json::Value| v.as_str().unwrap().to_owned();
        let ignored = self.manifest["ignored"].as_array().cloned().unwrap_or_default();
        ignored.iter().map(|i| (text(&i["tensor"]), text(&i["reason"]))).collect()
    }

    pub fn class(&self) -> &str {
        self.manifest["mapping"]["class"].as_str().unwrap()
    }
}

/// F32, so that every element can be told.
pub fn exact() -> Request {
    Request { dtype: FloatType::F32, ..Request::default() }
}

pub fn with_mtp(mtp: MtpPolicy) -> Request {
    Request { mtp, ..exact() }
}

pub fn with_mapping(mapping: impl Into<String>) -> Request {
    Request { mapping: Some(mapping.into()), ..exact() }
}

pub fn convert(file: &File, request: &Request) -> Result<Made, Error> {
    convert_split(file, 1, request)
}

pub fn convert_split(file: &File, parts: usize, request: &Request) -> Result<Made, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = file.write(dir.path(), parts);
    let planned = convert::plan(&path, request, false)?;
    let out = dir.path().join("out");
    let options = Options { threads: 1, track_reads: true, ..Options::default() };
    let report = convert::convert(&planned, &out, options, &convert::Extras::default(), &|_| ())?;
    assert_eq!(report.repeated_bytes, Some(0), "some bytes were read twice");
    let mut ranks = vec![BTreeMap::new(); request.tp as usize];
    for entry in std::fs::read_dir(&out).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.ends_with(".safetensors") {
            continue;
        }
        let rank = name.strip_prefix("model-rank-").map_or(0, |n| n.split('-').next().unwrap().parse().unwrap());
        let bytes = std::fs::read(&path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let entry = (format!("{:?}", tensor.dtype()), tensor.shape().to_vec(), tensor.data().to_vec());
            assert!(ranks[rank].insert(name, entry).is_none());
        }
    }
    let manifest = serde_json::from_slice(&std::fs::read(out.join("ggshard.json")).unwrap()).unwrap();
    Ok(Made { ranks, manifest })
}

/// Plans only, with the header alone: what a refusal costs.
pub fn refused(file: &File, request: &Request) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let path = file.write(dir.path(), 1);
    match convert::plan(&path, request, false) {
        Ok(planned) => panic!("accepted, with warnings {:?}", planned.plan.model.warnings),
        Err(error) => error,
    }
}

/// Asserts the variant of an error and that its message has all of `parts`.
#[track_caller]
pub fn says(error: &Error, variant: &str, parts: &[&str]) {
    let debug = format!("{error:?}");
    let kind = debug.split(['(', ' ', '{']).next().unwrap();
    assert_eq!(kind, variant, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

/// How a weight of the MLA families is shared, by MAPPING and the usual tensor parallelism.
pub fn usual_slice(name: &str, whole: &Array, tp: usize, rank: usize) -> Array {
    let ends = |list: &[&str]| list.iter().any(|suffix| name.ends_with(suffix));
    let share = |n: usize| rank * (n / tp)..(rank + 1) * (n / tp);
    if tp == 1 {
        whole.clone()
    } else if ends(&["embed_tokens.weight", "lm_head.weight", "shared_head.head.weight"]) {
        let rows = whole.shape[0];
        let range = share(rows.next_multiple_of(64));
        let mut slice = whole.rows(range.start.min(rows)..range.end.min(rows));
        slice.shape[0] = range.len();
        slice.data.resize(slice.shape.iter().product(), 0.0);
        slice
    } else if ends(&[
        "q_proj.weight",
        "q_b_proj.weight",
        "kv_b_proj.weight",
        "gate_proj.weight",
        "up_proj.weight",
        "q_proj.bias",
        "w1.weight",
        "w3.weight",
    ]) {
        whole.rows(share(whole.shape[0]))
    } else if ends(&["o_proj.weight", "down_proj.weight", "w2.weight"]) {
        whole.cols(share(*whole.shape.last().unwrap()))
    } else {
        whole.clone()
    }
}

/// Compares F32 output with the truth, position by position, at tp 1, 2 and 4.
#[track_caller]
pub fn converts(file: &File, request: &Request, truth: &Truth) -> Made {
    converts_by(file, request, truth, usual_slice)
}

#[track_caller]
pub fn converts_by(
    file: &File,
    request: &Request,
    truth: &Truth,
    slice: impl Fn(&str, &Array, usize, usize) -> Array,
) -> Made {
    let mut last = None;
    for tp in [4, 2, 1] {
        let made = convert(file, &Request { tp: tp as u32, ..request.clone() }).unwrap_or_else(|e| panic!("{e}"));
        for rank in 0..tp {
            same(&made.ranks[rank], truth, &format!("tp {tp} rank {rank}"), |name, whole| slice(name, whole, tp, rank));
        }
        last = Some(made);
    }
    last.unwrap()
}

#[track_caller]
fn same(made: &BTreeMap<String, Stored>, truth: &Truth, place: &str, slice: impl Fn(&str, &Array) -> Array) {
    let names = |list: Vec<&String>| list.into_iter().cloned().collect::<Vec<_>>();
    assert_eq!(names(made.keys().collect()), names(truth.keys().collect()), "{place}: names");
    for (name, whole) in truth {
        let expected = slice(name, whole);
        let (dtype, shape, bytes) = &made[name];
        assert_eq!(dtype, "F32", "{place}: {name}");
        assert_eq!(shape, &expected.shape, "{place}: {name}");
        let found: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let differ = |i: &usize| found[*i].to_bits() != expected.data[*i].to_bits();
        if let Some(at) = (0..found.len()).find(differ) {
            panic!("{place}: {name} {shape:?} element {at}: {} instead of {}", found[at], expected.data[at]);
        }
    }
}
