//! `model.safetensors.index.json`: every tensor must be in the file that the index names.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::{Finding, Report, What};
use crate::output::filename;
use crate::output::manifest::{Manifest, READ_LIMIT};
use crate::regular;

/// Checks each index that the manifest lists, against the files of its own folder.
pub(super) fn check(dir: &Path, manifest: &Manifest, report: &mut Report) {
    for other in manifest.others.iter().filter(|other| filename::base(&other.name) == filename::INDEX) {
        match read(&dir.join(&other.name), other.bytes) {
            // Absent, unreadable or of another length: a finding already.
            None => {}
            Some(Err(error)) => report.push(Finding::new(&other.name, What::Index).found(error)),
            Some(Ok(index)) => compare(&other.name, index, manifest, report),
        }
    }
}

fn read(path: &Path, bytes: u64) -> Option<serde_json::Result<Index>> {
    let (file, length) = regular::open(path).ok()?;
    if length != bytes || bytes > READ_LIMIT {
        return None;
    }
    let mut text = Vec::new();
    file.take(bytes).read_to_end(&mut text).ok()?;
    Some(serde_json::from_slice(&text))
}

/// Tensor and file of every entry of an index, in its order.
pub(super) fn entries(text: &[u8]) -> serde_json::Result<Vec<(String, String)>> {
    serde_json::from_slice(text).map(|index: Index| index.weight_map.0)
}

fn compare(name: &str, index: Index, manifest: &Manifest, report: &mut Report) {
    let mut holders: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let folder = filename::folder(name);
    for file in manifest.files.iter().filter(|file| filename::folder(&file.name) == folder) {
        for tensor in &file.tensors {
            holders.entry(&tensor.name).or_default().insert(filename::base(&file.name));
        }
    }
    let mut seen = BTreeSet::new();
    let finding = |tensor: &str| Finding::new(name, What::Index).tensor(tensor);
    let one_of = |files: &BTreeSet<&str>| files.iter().copied().collect::<Vec<_>>().join(" or ");
    for (tensor, file) in &index.weight_map.0 {
        if !seen.insert(tensor.as_str()) {
            report.push(finding(tensor).found("the tensor twice"));
        }
        match holders.get(tensor.as_str()) {
            None => report.push(finding(tensor).found("a tensor that is in no file")),
            Some(files) if !files.contains(file.as_str()) => {
                report.push(finding(tensor).expected(one_of(files)).found(file));
            }
            Some(_) => {}
        }
    }
    for (tensor, files) in &holders {
        if !seen.contains(tensor) {
            report.push(finding(tensor).expected(one_of(files)).found("no entry"));
        }
    }
}

#[derive(Deserialize)]
struct Index {
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    weight_map: Pairs,
}

/// A map of strings as a list, so that a key given twice is seen.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor to file")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Map)
    }
}
