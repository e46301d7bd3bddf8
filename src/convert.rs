//! The main job: a GGUF becomes per-rank safetensors and a manifest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::dequant::{FloatType, Nonfinite};
use crate::engine::{self, Engine, Observer};
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgufSet, OpenOptions};
use crate::mapping::{self, Mapping, MtpPolicy, Profile, RulesId, Set, config};
use crate::output::filename;
use crate::output::manifest::{self, FileEntry, Manifest, OtherFile};
use crate::output::{Digest, OutputFolder, SourceHasher, Sums, Writer, space};
use crate::plan::{DRAFT_FOLDER, Plan, PlanRequest, Policy};

/// Part size unless another is asked for: 5 GiB, as published checkpoints have it.
pub const PART_SIZE: u64 = 5 << 30;
/// What the manifest's `tool` begins with; the version follows.
pub(crate) const TOOL: &str = "ggshard ";
/// Room that is left for the manifest and the small files when free space is checked.
const SPARE_BYTES: u64 = 16 << 20;

/// What is to be converted, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// A mapping by name or path; by default the one whose `[match]` fits.
    pub mapping: Option<String>,
    /// A profile by name or path.
    pub profile: String,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Output dtype of weights that are not pinned.
    pub dtype: FloatType,
    /// What becomes of MTP blocks.
    pub mtp: MtpPolicy,
    /// Size in bytes at which a part is closed.
    pub part_size: u64,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Blocks per pipeline stage; empty to divide them evenly.
    pub stage_layers: Vec<u64>,
    /// Ranks hold whole experts instead of a slice of every expert.
    pub expert_parallel: bool,
    /// Each rank's rows of an expert's projections are padded with zeros to a multiple of this.
    pub moe_pad: Option<u64>,
}

impl Default for Request {
    fn default() -> Self {
        Request {
            mapping: None,
            profile: "hf".into(),
            tp: 1,
            dtype: FloatType::BF16,
            mtp: MtpPolicy::Keep,
            part_size: PART_SIZE,
            pp: 1,
            stage_layers: Vec::new(),
            expert_parallel: false,
            moe_pad: None,
        }
    }
}

/// A source with its audited plan.
pub struct Planned {
    /// The source.
    pub set: GgufSet,
    /// The mapping, which says why it was chosen.
    pub mapping: Mapping,
    /// The plan.
    pub plan: Plan,
}

/// Files that go beside the weights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    /// Names and bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// What is not certain about them, for the user and the manifest.
    pub notes: Vec<String>,
}

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The output folder as given.
    pub output: PathBuf,
    /// Safetensors files written.
    pub files: usize,
    /// Tensors written, over all ranks.
    pub tensors: usize,
    /// Bytes of safetensors files.
    pub output_bytes: u64,
    /// Source bytes that were fetched.
    pub source_bytes: u64,
    /// Of them, fetched more than once; only if it was tracked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeated_bytes: Option<u64>,
    /// Values that are not finite, by parameter: NaN, infinite, overflowed.
    pub nonfinite: BTreeMap<String, (u64, u64, u64)>,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// BLAKE3 of the manifest.
    pub manifest_blake3: String,
}

/// Opens a source and plans its conversion. With `header_only` the source's data need not be there.
pub fn plan(source: &Path, request: &Request, header_only: bool) -> Result<Planned> {
    plan_set(GgufSet::open_with(source, OpenOptions { header_only, ..OpenOptions::default() })?, request)
}

/// Plans the conversion of an open source.
pub fn plan_set(set: GgufSet, request: &Request) -> Result<Planned> {
    set.refuse_nonmodel()?;
    let mapping = match &request.mapping {
        Some(name) => Mapping::load(name)?,
        None => mapping::choose(&set)?,
    };
    plan_with(set, mapping, Profile::load(&request.profile)?, request)
}

/// Plans the conversion of an open source by rules that are at hand.
pub fn plan_with(set: GgufSet, mapping: Mapping, profile: Profile, request: &Request) -> Result<Planned> {
    let plan = audited(&set, &mapping, profile, request)?;
    Ok(Planned { set, mapping, plan })
}

/// The audited plan of a conversion.
pub(crate) fn audited(set: &GgufSet, mapping: &Mapping, profile: Profile, request: &Request) -> Result<Plan> {
    let model = mapping::resolve(mapping, set, request.mtp)?;
    let Request { dtype, mtp, part_size, moe_pad, .. } = *request;
    let plan_request = PlanRequest {
        profile,
        tp: request.tp,
        pp: request.pp,
        stage_layers: request.stage_layers.clone(),
        expert_parallel: request.expert_parallel,
        policy: Policy { dtype, mtp, part_size, moe_pad },
    };
    Plan::audited(set, model, plan_request)
}

/// Executes a plan into `output`, which is created or must be empty. `extras` go beside the weights. `progress` is told of tensor bytes done.
pub fn convert(
    planned: &Planned,
    output: &Path,
    options: engine::Options,
    extras: &Extras,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Report> {
    let Planned { set, plan, .. } = planned;
    let ranks = ranks(plan, &options)?;
    let sources: Vec<&Path> = set.parts().iter().map(|p| p.path()).collect();
    OutputFolder::check(output, &sources)?;
    check_space(output, plan, &ranks)?;
    let folder = OutputFolder::create(output)?;
    let writer = Writer::new(plan, &folder, &ranks, &metadata(env!("CARGO_PKG_VERSION")))?;
    let output_bytes = writer.total_bytes();
    let hasher = options.hash_source.then(|| SourceHasher::new(set));
    let observer = hasher.as_ref().map(|hasher| hasher as &dyn Observer);
    let outcome = Engine::new(plan, set, options.clone()).observed(observer).run(&writer, progress)?;
    let files = writer.finish()?;
    options.check_cancel()?;
    let mut source = source_of(set)?;
    if let Some(hasher) = hasher {
        let digests = hasher.finish(options.threads, options.cancel.as_deref())?;
        source.parts.iter_mut().zip(digests).for_each(|(part, digest)| part.blake3 = Some(digest));
    }
    let mut others = extras.files.clone();
    others.extend(index(plan, &files)?);
    let warnings: Vec<String> = plan.model.warnings.iter().chain(&extras.notes).cloned().collect();
    let manifest = Manifest {
        format: manifest::FORMAT.into(),
        format_version: manifest::FORMAT_VERSION,
        tool: format!("{TOOL}{}", env!("CARGO_PKG_VERSION")),
        plan: plan.identity().into(),
        source,
        mapping: mapping_of(plan)?,
        profile: profile_of(plan)?,
        topology: manifest::Topology {
            tp: plan.tp,
            pp: plan.stages.count(),
            stage_layers: if plan.stages.count() > 1 { plan.stages.counts().to_vec() } else { Vec::new() },
            expert_parallel: plan.expert_parallel,
            ranks,
        },
        policy: manifest::Policy {
            dtype: plan.policy.dtype.name().to_lowercase(),
            mtp: plan.policy.mtp.name().into(),
            part_size: plan.policy.part_size,
            moe_pad: plan.policy.moe_pad,
            allow_nonfinite: options.allow_nonfinite,
        },
        warnings: warnings.clone(),
        ignored: ignored(plan),
        parameters: parameters(plan, &outcome.nonfinite),
        others: others
            .iter()
            .map(|(name, bytes)| OtherFile { name: name.clone(), bytes: bytes.len() as u64, blake3: Digest::of(bytes) })
            .collect(),
        files,
        digest: Digest::default(),
    };
    let bytes = manifest.to_bytes()?;
    let sums = Sums::of(&manifest, &bytes).to_text();
    let names: Vec<&str> = manifest.files.iter().map(|f| f.name.as_str()).collect();
    drop(writer);
    folder.commit(&names, &others, sums.as_bytes(), &bytes)?;
    Ok(Report {
        output: output.to_path_buf(),
        files: names.len(),
        tensors: manifest.files.iter().map(|f| f.tensors.len()).sum(),
        output_bytes,
        source_bytes: outcome.reads.bytes(),
        repeated_bytes: outcome.reads.repeated(),
        nonfinite: outcome
            .nonfinite
            .iter()
            .map(|(p, n)| (plan.params[*p as usize].name.clone(), (n.nan, n.inf, n.overflow)))
            .collect(),
        warnings,
        manifest_blake3: Digest::of(&bytes).to_string(),
    })
}

fn ranks(plan: &Plan, options: &engine::Options) -> Result<Vec<u32>> {
    let mut ranks: Vec<u32> = if options.ranks.is_empty() { (0..plan.tp).collect() } else { options.ranks.clone() };
    ranks.sort_unstable();
    ranks.dedup();
    if let Some(beyond) = ranks.iter().find(|r| **r >= plan.tp) {
        let fault = Fault::new(format!("--ranks names rank {beyond} of {}", plan.tp))
            .expected(format!("ranks 0 to {}", plan.tp - 1));
        return Err(fault.layout());
    }
    Ok(ranks)
}

fn check_space(output: &Path, plan: &Plan, ranks: &[u32]) -> Result<()> {
    let needed: u64 =
        plan.files.iter().filter(|f| ranks.contains(&f.rank)).map(|f| f.data_bytes).sum::<u64>() + SPARE_BYTES;
    let free = space::free_bytes(output)?;
    if free < needed {
        return Err(Fault::new(format!("{free} bytes are free"))
            .file(output)
            .expected(format!("{needed} bytes for the files of {} ranks", ranks.len()))
            .remedy("Free some space, choose another disk, or convert some ranks at a time with --ranks")
            .output());
    }
    Ok(())
}

/// The index that transformers looks for beside the parts of a whole checkpoint.
pub(crate) fn index(plan: &Plan, files: &[FileEntry]) -> Result<Option<(String, Vec<u8>)>> {
    let whole = plan.profile.whole_at(plan.tp, plan.stages.count());
    let Some(name) = plan.profile.rules.files.index.as_ref().filter(|_| whole) else { return Ok(None) };
    let mut weight_map = serde_json::Map::new();
    let mut total = 0;
    for file in files {
        for tensor in &file.tensors {
            weight_map.insert(tensor.name.clone(), file.name.clone().into());
            total += tensor.offsets.1 - tensor.offsets.0;
        }
    }
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let mut bytes = serde_json::to_vec_pretty(&index)
        .map_err(|e| Fault::new(format!("the index cannot be written: {e}")).audit())?;
    bytes.push(b'\n');
    Ok(Some((name.clone(), bytes)))
}

/// The strings in the header of each safetensors file that this version wrote.
pub(crate) fn metadata(version: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("ggshard".to_owned(), version.to_owned())])
}

pub(crate) fn ignored(plan: &Plan) -> Vec<manifest::Ignored> {
    plan.unused_sources().map(|(tensor, reason)| manifest::Ignored { tensor, reason }).collect()
}

pub(crate) fn source_of(set: &GgufSet) -> Result<manifest::Source> {
    let parts = set.parts().iter().map(|part| {
        let name = part.path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(manifest::SourcePart {
            name,
            bytes: part.bytes(),
            header_bytes: part.header_bytes(),
            header_blake3: digest(&part.header_blake3()?)?,
            blake3: None,
        })
    });
    Ok(manifest::Source {
        architecture: set.architecture().unwrap_or_default().to_owned(),
        parts: parts.collect::<Result<_>>()?,
    })
}

fn digest(hex: &str) -> Result<Digest> {
    Digest::parse(hex).ok_or_else(|| Fault::new(format!("'{hex}' is no digest")).audit())
}

fn mapping_of(plan: &Plan) -> Result<manifest::Mapping> {
    let RulesId { name, version, digest: hex, texts } = plan.model.mapping.clone();
    let class = Some(plan.model.class.clone()).filter(|c| !c.is_empty());
    Ok(manifest::Mapping { name, version: version.to_string(), class, digest: digest(&hex)?, texts })
}

fn profile_of(plan: &Plan) -> Result<manifest::Profile> {
    let RulesId { name, version, digest: hex, texts } = plan.profile.id();
    Ok(manifest::Profile {
        name,
        version: version.to_string(),
        digest: digest(&hex)?,
        texts,
        launch: plan.profile.rules.launch.clone(),
    })
}

pub(crate) fn parameters(plan: &Plan, nonfinite: &BTreeMap<u32, Nonfinite>) -> Vec<manifest::Parameter> {
    let parameter = |index: usize| {
        let param = &plan.params[index];
        let found = nonfinite.get(&(index as u32)).copied().unwrap_or_default();
        manifest::Parameter {
            name: param.name.clone(),
            set: match param.set {
                Set::Main => String::new(),
                Set::Draft => DRAFT_FOLDER.into(),
            },
            shape: param.shape.clone(),
            dtype: param.dtype,
            cut: param.cut.name().into(),
            sources: plan.sources_of(index).into_iter().map(|(n, t)| (n, t.to_owned())).collect(),
            nan: found.nan,
            inf: found.inf,
            overflow: found.overflow,
        }
    };
    (0..plan.params.len()).map(parameter).collect()
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
                    extras.files.push(((*name).to_owned(), read_small(&path.join(name))?));
                }
            }
            let given = config::Given { path: &file, bytes, fields };
            Some(config::check(mapping, set, &plan.model, dtype, given)?)
        }
    };
    if let Some(config) = config {
        let bytes = config.bytes;
        if plan.files.iter().any(|f| f.set == Set::Draft) {
            extras.files.push((format!("{DRAFT_FOLDER}/config.json"), bytes.clone()));
        }
        extras.files.push(("config.json".into(), bytes));
        extras.notes = config.notes;
    }
    Ok(extras)
}

fn read_small(path: &Path) -> Result<Vec<u8>> {
    let found = std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    let wrong = |what: String| Fault::new(what).file(path).expected(format!("a file of at most {LONGEST_EXTRA} bytes"));
    if !found.is_file() {
        return Err(wrong("it is no regular file".into()).output());
    }
    if found.len() > LONGEST_EXTRA {
        return Err(wrong(format!("{} bytes", found.len())).output());
    }
    std::fs::read(path).map_err(|e| Error::io("read", path, e))
}

/// A config.json's text, and what it says.
fn read_config(path: &Path) -> Result<(Vec<u8>, serde_json::Map<String, serde_json::Value>)> {
    let wrong = |found: String| Fault::new(found).file(path).expected("a config.json").output();
    let bytes = read_small(path)?;
    match serde_json::from_slice(&bytes) {
        Ok(serde_json::Value::Object(fields)) => Ok((bytes, fields)),
        Ok(_) => Err(wrong("it is JSON, but no object".into())),
        Err(e) => Err(wrong(format!("not JSON: {e}"))),
    }
}

/// The name of the manifest in an output folder.
pub const MANIFEST: &str = filename::MANIFEST;
