//! Converted folders, and how to forge one: whoever edits a file and makes every digest anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use ggshard::convert::{self, Request};
use ggshard::dtype::Dtype;
use ggshard::engine;
use ggshard::output::manifest::{FileEntry, TensorEntry};
use ggshard::output::{Digest, Manifest, SafetensorsHeader, Sums};

/// A source in `fixtures/models`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
}

/// A toy GLM-5 in one file.
pub fn glm() -> PathBuf {
    fixture("glm_moe_dsa-UD-IQ2_XXS.gguf")
}

/// A toy DeepSeek-V3 in four parts.
pub fn deepseek() -> PathBuf {
    fixture("deepseek_v3-split")
}

/// Converts ranks (none: all) of a source into `folder`.
pub fn convert_ranks(source: &Path, folder: &Path, request: &Request, ranks: &[u32]) {
    let planned = convert::plan(source, request, false).unwrap();
    let options = engine::Options { ranks: ranks.to_vec(), threads: 2, ..engine::Options::default() };
    // A checkpoint of these ranks alone.
    let output = convert::Output { seal: Some(true), ..convert::Output::from(folder) };
    convert::convert(&planned, output, options, &convert::Extras::default(), &|_| {}).unwrap();
}

/// Converts a source for `tp` ranks, otherwise by default.
pub fn converted(source: &Path, tp: u32) -> tempfile::TempDir {
    converted_by(source, &Request { tp, ..Request::default() })
}

/// Converts a source.
pub fn converted_by(source: &Path, request: &Request) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    convert_ranks(source, folder.path(), request, &[]);
    folder
}

/// Makes the digests of every file and tensor anew, then manifest and `B3SUMS`.
pub fn reseal(folder: &Path) {
    let mut manifest = Manifest::read(folder).unwrap();
    for file in &mut manifest.files {
        let bytes = fs::read(folder.join(&file.name)).unwrap();
        file.blake3 = Digest::of(&bytes);
        let data = &bytes[file.header_bytes as usize..];
        for tensor in &mut file.tensors {
            tensor.blake3 = Digest::of(&data[tensor.offsets.0 as usize..tensor.offsets.1 as usize]);
        }
    }
    write(folder, &manifest);
}

/// Writes a manifest and the `B3SUMS` that go with it.
pub fn write(folder: &Path, manifest: &Manifest) {
    let bytes = manifest.to_bytes().unwrap();
    fs::write(folder.join("B3SUMS"), Sums::of(manifest, Digest::of(&bytes)).to_text()).unwrap();
    fs::write(folder.join("ggshard.json"), bytes).unwrap();
}

/// Changes the manifest and everything that depends on it.
pub fn edit_manifest(folder: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = Manifest::read(folder).unwrap();
    change(&mut manifest);
    write(folder, &manifest);
}

/// Where a rank holds a tensor.
pub fn find(folder: &Path, tensor: &str, rank: u32) -> (FileEntry, TensorEntry) {
    let manifest = Manifest::read(folder).unwrap();
    let found = manifest.files_of(rank).find_map(|f| f.tensors.iter().find(|t| t.name == tensor).map(|t| (f, t)));
    let (file, tensor) = found.unwrap_or_else(|| panic!("no tensor {tensor} for rank {rank}"));
    (file.clone(), tensor.clone())
}

/// Changes the bytes of one rank's tensor and nothing else. Gives the name of its file.
pub fn edit_tensor(folder: &Path, tensor: &str, rank: u32, change: impl FnOnce(&mut [u8])) -> String {
    let (file, tensor) = find(folder, tensor, rank);
    edit(&folder.join(&file.name), |bytes| {
        let at = |offset: u64| (file.header_bytes + offset) as usize;
        change(&mut bytes[at(tensor.offsets.0)..at(tensor.offsets.1)]);
    });
    file.name
}

/// Changes a file.
pub fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// A tensor as a whole.
#[derive(Clone)]
pub struct Whole {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// Every tensor of a folder of one rank.
pub fn tensors(folder: &Path) -> Vec<Whole> {
    let manifest = Manifest::read(folder).unwrap();
    let mut all = Vec::new();
    for file in &manifest.files {
        let bytes = fs::read(folder.join(&file.name)).unwrap();
        let data = &bytes[file.header_bytes as usize..];
        all.extend(file.tensors.iter().map(|t| Whole {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            bytes: data[t.offsets.0 as usize..t.offsets.1 as usize].to_vec(),
        }));
    }
    all
}

/// Writes tensors as one safetensors file.
pub fn write_tensors(path: &Path, tensors: &[Whole]) {
    let mut sorted: Vec<&Whole> = tensors.iter().collect();
    sorted.sort_by_key(|t| std::cmp::Reverse(t.dtype.bytes()));
    let laid_out = sorted.iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone()));
    let mut bytes = SafetensorsHeader::layout(laid_out, BTreeMap::new()).unwrap().to_bytes().unwrap();
    sorted.iter().for_each(|t| bytes.extend_from_slice(&t.bytes));
    fs::write(path, bytes).unwrap();
}
