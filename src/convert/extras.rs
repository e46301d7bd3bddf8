//! Files that go beside the weights.

use std::io::Read;
use std::path::Path;

use super::{Planned, quantization};
use crate::error::{Error, Fault, Result};
use crate::mapping::{Set, config};
use crate::plan::{DRAFT_FOLDER, Plan};
use crate::regular;

/// Files that go beside the weights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    /// Names and bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// What is not certain about them, for the user and the manifest.
    pub notes: Vec<String>,
}

/// Files of a model folder that a serving stack wants beside the weights.
const TOKENIZER_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];
/// Longest file that is put beside the weights.
const LONGEST_EXTRA: u64 = 1 << 28;
/// Longest config.json, of which every value is kept in memory.
const LONGEST_CONFIG: u64 = 1 << 24;

/// The files that go beside the weights: config.json, given (a file, or a folder from which tokenizer files are taken as
/// well) and checked against the source, or derived from the source. A draft model gets the same config.json.
pub fn extras(planned: &Planned, given: Option<&Path>) -> Result<Extras> {
    let Planned { set, mapping, plan } = planned;
    let dtype = plan.policy.dtype;
    let mut extras = Extras::default();
    let config = match given {
        None => config::derive(mapping, set, &plan.model, dtype)?,
        Some(path) => {
            let folder = path.is_dir();
            let file = if folder { path.join("config.json") } else { path.to_path_buf() };
            let (bytes, fields) = read_config(&file)?;
            if folder {
                for name in TOKENIZER_FILES.iter().filter(|name| path.join(name).is_file()) {
                    extras.files.push(((*name).to_owned(), read_small(&path.join(name), LONGEST_EXTRA)?));
                }
            }
            let given = config::Given { path: &file, bytes, fields };
            Some(config::check(mapping, set, &plan.model, dtype, given)?)
        }
    };
    if let Some(config) = config {
        extras.notes = config.notes;
        let bytes = quantization::stated(plan, config.bytes, &mut extras.notes)?;
        extras.add(plan, "config.json", bytes);
    }
    if let Some(bytes) = quantization::file(plan)? {
        extras.add(plan, quantization::FILE, bytes);
    }
    Ok(extras)
}

impl Extras {
    /// Adds a file, beside the weights of a draft model as well.
    fn add(&mut self, plan: &Plan, name: &str, bytes: Vec<u8>) {
        if plan.files.iter().any(|file| file.set == Set::Draft) {
            self.files.push((format!("{DRAFT_FOLDER}/{name}"), bytes.clone()));
        }
        self.files.push((name.to_owned(), bytes));
    }
}

fn read_small(path: &Path, longest: u64) -> Result<Vec<u8>> {
    let (file, length) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
    if length > longest {
        let fault = Fault::new(format!("{length} bytes")).file(path);
        return Err(fault.expected(format!("a file of at most {longest} bytes")).output());
    }
    let mut bytes = Vec::new();
    file.take(longest).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(bytes)
}

/// A config.json's text, and what it says.
fn read_config(path: &Path) -> Result<(Vec<u8>, serde_json::Map<String, serde_json::Value>)> {
    let wrong = |found: String| Fault::new(found).file(path).expected("a config.json").output();
    let bytes = read_small(path, LONGEST_CONFIG)?;
    match serde_json::from_slice(&bytes) {
        Ok(serde_json::Value::Object(fields)) => Ok((bytes, fields)),
        Ok(_) => Err(wrong("it is JSON, but no object".into())),
        Err(e) => Err(wrong(format!("not JSON: {e}"))),
    }
}
