//! Faults that other tools had, one test for each, named after its row in `docs/known-faults.md`. Each works on a toy that
//! would bring the fault out, and fails if what protects from it is taken away.

#[allow(dead_code)]
#[path = "variants/array.rs"]
mod array;
#[allow(dead_code)]
#[path = "container/build.rs"]
mod build;
#[allow(dead_code)]
#[path = "variants/check.rs"]
mod check;
#[allow(dead_code)]
#[path = "variants/file.rs"]
mod file;
#[allow(dead_code)]
#[path = "common/folders.rs"]
mod folders;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/toy.rs"]
mod small;
#[allow(dead_code)]
#[path = "variants/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

#[path = "regression/dequant.rs"]
mod dequant;
#[path = "regression/names.rs"]
mod names;
#[path = "regression/output.rs"]
mod output;
#[path = "regression/parse.rs"]
mod parse;
#[path = "regression/ranks.rs"]
mod ranks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ggshard::Result;
use ggshard::convert::{self, Extras, Planned, Report, Request};
use ggshard::dequant::FloatType;
use ggshard::engine::Options;
use ggshard::gguf::GgufSet;
use ggshard::mapping::{Mapping, Profile};
use safetensors::SafeTensors;

/// A tensor as a file holds it: shape and bytes.
type Stored = (Vec<usize>, Vec<u8>);

fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families").join(name)
}

/// A request for exact values.
fn exact(profile: &str, tp: u32) -> Request {
    Request { profile: profile.into(), tp, dtype: FloatType::F32, ..Request::default() }
}

/// A plan of a file in memory by a mapping of its own.
fn planned(bytes: Vec<u8>, mapping: Mapping, request: &Request) -> Result<Planned> {
    let set = GgufSet::from_bytes("toy.gguf", bytes)?;
    convert::plan_with(set, mapping, Profile::load(&request.profile)?, request)
}

/// What a plan writes, rank by rank.
fn written(planned: &Planned) -> Result<(Vec<BTreeMap<String, Stored>>, Report)> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let options = Options { threads: 2, track_reads: true, ..Options::default() };
    let report = convert::convert(planned, &out, options, &Extras::default(), &|_| {})?;
    let ranks = (0..planned.plan.tp).map(|rank| held(&out, rank, planned.plan.tp)).collect();
    Ok((ranks, report))
}

/// The tensors of one rank's files in a folder.
fn held(folder: &Path, rank: u32, tp: u32) -> BTreeMap<String, Stored> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let own = name.starts_with(&format!("model-rank-{rank}-")) || (tp == 1 && name.starts_with("model-0"));
        if !own || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            assert!(all.insert(name, (tensor.shape().to_vec(), tensor.data().to_vec())).is_none());
        }
    }
    assert!(!all.is_empty());
    all
}

/// A family's fixture, converted exactly.
fn family_written(name: &str, profile: &str, tp: u32) -> Vec<BTreeMap<String, Stored>> {
    let planned = convert::plan(&family(name), &exact(profile, tp), false).unwrap();
    written(&planned).unwrap().0
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Rows of a matrix.
fn rows(stored: &Stored, range: std::ops::Range<usize>) -> &[u8] {
    let width = stored.1.len() / stored.0[0];
    &stored.1[range.start * width..range.end * width]
}

/// The functions of a test file.
fn functions(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")?.split(['(', '<']).next());
    names.map(str::to_owned).collect()
}

#[test]
fn every_row_of_the_document_has_its_test_and_every_test_its_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(root.join("docs/known-faults.md")).unwrap();
    let rows: Vec<(&str, &str)> = document
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| row"))
        .map(|line| (line[2..].split(' ').next().unwrap(), line.rsplit(" | ").next().unwrap()))
        .collect();
    assert_eq!(rows.len(), 59);
    let mut named = Vec::new();
    for (row, shown) in rows {
        let tests: Vec<&str> = shown.split('`').filter(|text| text.starts_with("tests/")).collect();
        for test in &tests {
            let (file, function) = test.split_once("::").unwrap_or((test, ""));
            let there = functions(&root.join(file));
            assert!(function.is_empty() || there.iter().any(|f| f == function), "{row}: {test} does not exist");
        }
        let (_, own) = tests[0].split_once("::").unwrap();
        assert!(own.starts_with(&format!("{}_", row.to_lowercase())), "{row}: {own}");
        named.push(own.to_owned());
    }
    let is_test = |name: &String| name.split_once('_').is_some_and(|(id, _)| id[1..].parse::<u32>().is_ok());
    let files = std::fs::read_dir(root.join("tests/regression")).unwrap().map(|entry| entry.unwrap().path());
    let mut tests: Vec<String> = files.flat_map(|file| functions(&file)).filter(is_test).collect();
    tests.sort();
    named.sort();
    assert_eq!(tests, named);
}
