//! `ggshard.json`: what was written, from what, by which rules, and the digest of every file and tensor.
//!
//! The field-by-field description is in `docs/format.md`. The manifest is written last; a folder without one is not a
//! checkpoint.

use std::collections::BTreeMap;
use std::io::{Cursor, ErrorKind, Read, Seek};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};

use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::output::deviation::Deviation;
use crate::output::digest::Digest;
use crate::output::filename;
use crate::regular;

mod check;
mod text;

pub(crate) use check::Check;
pub(crate) use text::Text;

/// The value of the `format` field.
pub const FORMAT: &str = "ggshard";
/// The version of the format that this library writes and reads.
pub const FORMAT_VERSION: u32 = 1;
/// The largest manifest that is read, in bytes. A model of a million tensors needs about 250 MB.
pub const READ_LIMIT: u64 = 1 << 30;

/// The manifest of one checkpoint folder.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Name and version of the program that wrote the folder.
    pub tool: String,
    /// Identity of the plan that was executed.
    pub plan: Digest,
    /// The GGUF set that was converted.
    pub source: Source,
    /// The rules from GGUF names to weights.
    pub mapping: Mapping,
    /// The rules from weights to one serving stack's parameters.
    pub profile: Profile,
    /// Into how many ranks the model is cut, and which of them lie in this folder.
    pub topology: Topology,
    /// What the user chose.
    pub policy: Policy,
    /// What the user should know, in sentences.
    pub warnings: Vec<String>,
    /// Source tensors that a rule leaves out.
    pub ignored: Vec<Ignored>,
    /// The whole, uncut parameters, in the plan's order.
    pub parameters: Vec<Parameter>,
    /// The safetensors files.
    pub files: Vec<FileEntry>,
    /// Every other file of the folder, except the manifest itself and `B3SUMS`.
    pub others: Vec<OtherFile>,
    /// BLAKE3 of the manifest's own bytes with these 64 digits replaced by zeros. Filled in by [`Manifest::read`] and
    /// [`Manifest::parse`]; [`Manifest::to_bytes`] computes it and does not look at this value.
    pub digest: Digest,
}

/// The GGUF set that was converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// `general.architecture`.
    pub architecture: String,
    /// The files of the set, in their order.
    pub parts: Vec<SourcePart>,
}

/// One file of the GGUF set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourcePart {
    /// File name without its folder.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// Length of everything before the tensor data.
    pub header_bytes: u64,
    /// BLAKE3 of those bytes.
    pub header_blake3: Digest,
    /// BLAKE3 of the whole file, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Digest>,
}

/// The mapping that was used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapping {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The model class it describes, as a serving stack calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// BLAKE3 over its text and those of the mappings that it extends.
    pub digest: Digest,
    /// Those of the texts that are not built in, the mapping's own first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<String>,
}

/// The profile that was used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// BLAKE3 over its text and those of the profiles that it extends.
    pub digest: Digest,
    /// Those of the texts that are not built in, the profile's own first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<String>,
    /// The arguments with which the stack is to be started.
    pub launch: Vec<String>,
}

/// How the model is spread over ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Number of pipeline stages.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pp: u32,
    /// Blocks of each stage, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage_layers: Vec<u64>,
    /// Whether ranks hold whole experts instead of a slice of every expert.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub expert_parallel: bool,
    /// The ranks in this folder, ascending.
    pub ranks: Vec<u32>,
}

/// What the user chose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Output type of weights that no rule pins and no rule of the output policy is for: `bf16`, `f16`, `f32`.
    pub dtype: String,
    /// The output policy, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<PolicyRules>,
    /// Output type of weights whose blocks are kept, but cut through: `bf16`, `f16`, `f32`, if that was allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_or: Option<String>,
    /// Whether nvfp4's scales of blocks were searched by their error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvfp4_search: bool,
    /// The scales of activations that were given, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub input_scales: BTreeMap<String, f32>,
    /// What happens to the MTP block: `keep`, `drop`, `only`.
    pub mtp: String,
    /// The size, in bytes, at which a new part is begun.
    pub part_size: u64,
    /// The multiple to which each rank's rows of an expert's projections are padded with zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_pad: Option<u64>,
    /// Whether NaN and infinite values were let through.
    pub allow_nonfinite: bool,
}

/// The output policy that was used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyRules {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// BLAKE3 over its text.
    pub digest: Digest,
    /// The text, if it is not built in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<String>,
}

/// A source tensor that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ignored {
    /// Its name in the GGUF.
    pub tensor: String,
    /// The rule's reason.
    pub reason: String,
}

/// A parameter as a whole, before it is cut into ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Its name in the serving stack, the name of its tensor in every rank.
    pub name: String,
    /// The sub-folder of the set that it belongs to; empty for the model itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub set: String,
    /// Shape of the whole, row-major, slowest axis first.
    #[serde(deserialize_with = "bounded_shape")]
    pub shape: Vec<u64>,
    /// Element type in the files.
    pub dtype: Dtype,
    /// How it is cut: `column`, `row`, `vocab`, `replicated`, ….
    pub cut: String,
    /// The source tensors it is made of and their ggml types.
    pub sources: Vec<(String, String)>,
    /// The ggml type of its blocks, where they are kept: the last axis of its shapes counts their bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<String>,
    /// Why its blocks, which were to be kept, are decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoded: Option<String>,
    /// Values that are NaN, over the whole parameter.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nan: u64,
    /// Values that are infinite in the source.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub inf: u64,
    /// Finite values that became infinite in the output type.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overflow: u64,
}

/// One safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name relative to the checkpoint's folder, with at most one sub-folder.
    pub name: String,
    /// The rank that loads it; `None` (`null`) when every rank does.
    #[serde(deserialize_with = "given")]
    pub rank: Option<u32>,
    /// The pipeline stage, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// Length of the file.
    pub bytes: u64,
    /// Length of its header; tensor data starts here.
    pub header_bytes: u64,
    /// BLAKE3 of the whole file.
    pub blake3: Digest,
    /// Its tensors, in the order of their data.
    pub tensors: Vec<TensorEntry>,
}

/// One tensor in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name, that of an entry in [`Manifest::parameters`].
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on this rank, row-major, slowest axis first.
    #[serde(deserialize_with = "bounded_shape")]
    pub shape: Vec<u64>,
    /// First byte and the byte after the last, relative to the data section.
    pub offsets: (u64, u64),
    /// BLAKE3 of the tensor's bytes.
    pub blake3: Digest,
    /// How far it is from the decoded source, if it is encoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deviation: Option<Deviation>,
}

/// A file beside the weights: `config.json`, the index, the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherFile {
    /// Name relative to the checkpoint's folder, with at most one sub-folder.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// BLAKE3 of the whole file.
    pub blake3: Digest,
}

impl Manifest {
    /// Reads and checks the manifest of the checkpoint in `dir`.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] when there is none, when its bytes are not those that were written, or when it contradicts
    /// itself; [`Error::Unsupported`] for another version of the format.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::read_with_digest(dir).map(|(manifest, _)| manifest)
    }

    /// As [`Manifest::read`], with the BLAKE3 of the whole file.
    pub(crate) fn read_with_digest(dir: &Path) -> Result<(Self, Digest)> {
        let path = dir.join(filename::MANIFEST);
        let (mut file, length) = match regular::open(&path) {
            Ok(opened) => opened,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(Fault::new(format!("no {}, so this is not a checkpoint", filename::MANIFEST))
                    .file(dir)
                    .remedy("The manifest is written last: if it is missing, the conversion did not finish")
                    .checkpoint());
            }
            Err(e) => return Err(Error::io("open", &path, e)),
        };
        if length > READ_LIMIT {
            return Err(Fault::new(format!("a manifest of {length} bytes"))
                .file(path)
                .expected(format!("at most {READ_LIMIT} bytes"))
                .checkpoint());
        }
        Self::read_from(&mut file, length, &path)
    }

    /// Parses and checks the bytes of a manifest; `path` is for messages only.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        Self::read_from(&mut Cursor::new(bytes), bytes.len() as u64, path).map(|(manifest, _)| manifest)
    }

    fn read_from<R: Read + Seek>(from: &mut R, length: u64, path: &Path) -> Result<(Self, Digest)> {
        let read = text::read(from, length, path).and_then(|(manifest, digest)| {
            manifest.check().map_err(|fault| fault.file(path).checkpoint())?;
            Ok((manifest, digest))
        });
        read.map_err(|error| text::other_version(from, path).unwrap_or(error))
    }

    /// The manifest's bytes, its digest included: the same manifest gives the same bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Audit`] when [`Manifest::read`] would refuse the result.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check().map_err(|fault| fault.file(filename::MANIFEST).audit())?;
        text::render(self)
    }

    /// The files that `rank` loads: its own and the shared ones, in the manifest's order.
    pub fn files_of(&self, rank: u32) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().filter(move |file| file.rank.is_none_or(|r| r == rank))
    }
}

fn one() -> u32 {
    1
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A field that may be `null` but not absent.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Option::deserialize(deserializer)
}

/// Dimensions, with a bound on their number.
fn bounded_shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    crate::output::safetensors::Shape::deserialize(deserializer).map(|shape| shape.0)
}
