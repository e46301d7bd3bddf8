//! The original checkpoint: which of its files holds which tensor, where.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::super::{Reference, index};
use super::{is_absent, vocab_pad};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::output::filename;
use crate::output::manifest::{Manifest, READ_LIMIT};
use crate::output::{SafetensorsHeader, TensorInfo};
use crate::regular;

/// The tensors of an original checkpoint. Only headers have been read.
pub(in crate::verify) struct Original {
    pub(super) files: Vec<PathBuf>,
    pub(super) tensors: BTreeMap<String, Stored>,
    pub(super) max_rms: f64,
    pub(super) vocab_pad: u64,
}

/// A tensor of the original checkpoint.
pub(super) struct Stored {
    /// Index of its file.
    pub file: usize,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Its first byte in the file.
    pub at: u64,
}

impl Original {
    /// Opens the folder: the files that its index names, or every `*.safetensors`. `path` is the manifest's, for messages.
    pub fn open(reference: Reference<'_>, manifest: &Manifest, path: &Path) -> Result<Self> {
        let Reference { folder, max_rms } = reference;
        if max_rms.is_nan() || max_rms < 0.0 {
            return Err(Fault::new(format!("a largest relative RMS of {max_rms}")).expected("0 or more").checkpoint());
        }
        let vocab_pad = vocab_pad(manifest, path)?;
        let index = read_index(folder)?;
        let names = match &index {
            Some(index) => {
                let mut names: Vec<&String> = index.values().collect();
                names.sort();
                names.dedup();
                names.into_iter().map(|name| folder.join(name)).collect()
            }
            None => list(folder)?,
        };
        let mut original = Original { files: names, tensors: BTreeMap::new(), max_rms, vocab_pad };
        for number in 0..original.files.len() {
            let path = original.files[number].clone();
            let header = SafetensorsHeader::read(&path)?;
            for TensorInfo { name, dtype, shape, offsets } in header.tensors {
                // Where the index says that a tensor is in another file, this copy is not the one that is loaded.
                let elsewhere = |file: &String| folder.join(file) != path;
                if index.as_ref().and_then(|index| index.get(&name)).is_some_and(elsewhere) {
                    continue;
                }
                let at = header.header_bytes + offsets.0;
                let stored = Stored { file: number, dtype, shape, at };
                if let Some(twice) = original.tensors.insert(name.clone(), stored) {
                    return Err(Fault::new(format!("also in {}", original.files[twice.file].display()))
                        .file(path)
                        .tensor(name)
                        .expected("every tensor of the reference in one file")
                        .remedy(format!("Leave one copy of the weights in the folder, or add {}", filename::INDEX))
                        .checkpoint());
                }
            }
        }
        let missing = |(tensor, _): &(&String, &String)| !original.tensors.contains_key(*tensor);
        if let Some((tensor, file)) = index.iter().flatten().find(missing) {
            let fault = Fault::new("it is not in the file that the index names").file(folder.join(file)).tensor(tensor);
            return Err(fault.remedy("The reference is incomplete: download it again").checkpoint());
        }
        Ok(original)
    }
}

/// Tensor → file, as the index says; `None` where there is no index.
fn read_index(folder: &Path) -> Result<Option<BTreeMap<String, String>>> {
    let path = folder.join(filename::INDEX);
    let (file, length) = match regular::open(&path) {
        Ok(opened) => opened,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(Error::io("open", &path, error)),
    };
    let fault = |found: String| Fault::new(found).file(&path).checkpoint();
    if length > READ_LIMIT {
        return Err(fault(format!("not an index: {length} bytes")));
    }
    let mut text = Vec::new();
    file.take(READ_LIMIT).read_to_end(&mut text).map_err(|e| Error::io("read", &path, e))?;
    let mut tensors = BTreeMap::new();
    for (tensor, file) in index::entries(&text).map_err(|e| fault(format!("not an index: {e}")))? {
        if let Some(objection) = filename::objection(&file) {
            return Err(fault(format!("{objection}: '{file}'")));
        }
        if tensors.insert(tensor.clone(), file).is_some() {
            return Err(fault(format!("two entries for '{tensor}'")));
        }
    }
    Ok(Some(tensors))
}

/// Every `*.safetensors` of the folder, sorted.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |e| Error::io("list", folder, e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    if files.is_empty() {
        let fault = Fault::new("no safetensors file").file(folder);
        return Err(fault.expected("the folder of an original checkpoint").checkpoint());
    }
    files.sort();
    Ok(files)
}
