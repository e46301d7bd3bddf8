//! What a conversion into one folder is: the same for every process that takes part in it, today or after a crash.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::Counts;
use crate::error::{Fault, Result};
use crate::gguf::Mark;
use crate::output::digest::Digest;
use crate::output::filename;
use crate::output::manifest::{
    self, Ignored, Manifest, Mapping, OtherFile, Parameter, Policy, Profile, Source, Topology,
};

/// The value of the `format` field.
const FORMAT: &str = "ggshard work";
/// The version of the format. Another version's work is not continued.
const FORMAT_VERSION: u32 = 1;
/// Most ranks, as of a plan.
const MOST_RANKS: u32 = 1024;

/// Everything about a manifest that is known before the first byte is written, and what identifies the source further.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    format: String,
    format_version: u32,
    /// As in the manifest.
    pub tool: String,
    /// As in the manifest.
    pub plan: Digest,
    /// As in the manifest, without digests of whole parts.
    pub source: Source,
    /// What the parts were like when the conversion began. Not in the manifest: it would differ from copy to copy.
    pub marks: Vec<Mark>,
    /// As in the manifest.
    pub mapping: Mapping,
    /// As in the manifest.
    pub profile: Profile,
    /// As in the manifest, with all ranks.
    pub topology: Topology,
    /// As in the manifest.
    pub policy: Policy,
    /// As in the manifest.
    pub warnings: Vec<String>,
    /// As in the manifest.
    pub ignored: Vec<Ignored>,
    /// As in the manifest, before any value was counted.
    pub parameters: Vec<Parameter>,
    /// Files beside the weights, without the index.
    pub others: Vec<OtherFile>,
    /// The safetensors files, in the manifest's order.
    pub files: Vec<Expected>,
    /// Name of the index, where the profile has one.
    pub index: Option<String>,
}

/// A safetensors file that is to be made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    /// Its name.
    pub name: String,
    /// The tensor-parallel rank whose conversion makes it.
    pub rank: u32,
}

/// How many values of one tensor of a file are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counted {
    /// The tensor, as an index of the file's tensors.
    pub tensor: usize,
    /// The first of the ranks that hold the very same slice, so that they are counted once.
    pub first_rank: u32,
    /// Values that are NaN.
    pub nan: u64,
    /// Values that are infinite in the source.
    pub inf: u64,
    /// Values that became infinite.
    pub overflow: u64,
}

impl Record {
    /// The record of a conversion whose manifest will be `manifest` but for its files, counts and digests.
    pub fn new(manifest: Manifest, marks: Vec<Mark>, files: Vec<Expected>, index: Option<String>) -> Self {
        let Manifest {
            format: _,
            format_version: _,
            tool,
            plan,
            source,
            mapping,
            profile,
            topology,
            policy,
            warnings,
            ignored,
            parameters,
            files: _,
            others,
            digest: _,
        } = manifest;
        Record {
            format: FORMAT.into(),
            format_version: FORMAT_VERSION,
            tool,
            plan,
            source,
            marks,
            mapping,
            profile,
            topology,
            policy,
            warnings,
            ignored,
            parameters,
            others,
            files,
            index,
        }
    }

    /// The record of a conversion that gave `manifest`, for comparison with `like`: what the manifest does not hold is
    /// taken from there.
    pub fn of_sealed(manifest: &Manifest, like: &Record) -> Self {
        let mut manifest = manifest.clone();
        manifest.source.parts.iter_mut().for_each(|part| part.blake3 = None);
        manifest.topology.ranks = (0..manifest.topology.tp).collect();
        for parameter in &mut manifest.parameters {
            (parameter.nan, parameter.inf, parameter.overflow) = (0, 0, 0);
        }
        manifest.others.retain(|other| like.index.as_ref() != Some(&other.name));
        Record::new(manifest, like.marks.clone(), like.files.clone(), like.index.clone())
    }

    /// The manifest of the files of `ranks`, without those. `others` are all files beside the weights, `parts` digests of
    /// the source's parts where they were asked for.
    pub fn manifest(
        &self,
        ranks: Vec<u32>,
        counts: &Counts,
        others: Vec<OtherFile>,
        parts: Option<Vec<Digest>>,
    ) -> Manifest {
        let Record { tool, plan, source, mapping, profile, topology, policy, warnings, ignored, .. } = self.clone();
        let (mut source, mut parameters) = (source, self.parameters.clone());
        counts.fill(&mut parameters);
        for (part, digest) in source.parts.iter_mut().zip(parts.into_iter().flatten()) {
            part.blake3 = Some(digest);
        }
        Manifest {
            format: manifest::FORMAT.into(),
            format_version: manifest::FORMAT_VERSION,
            tool,
            plan,
            source,
            mapping,
            profile,
            topology: Topology { ranks, ..topology },
            policy,
            warnings,
            ignored,
            parameters,
            files: Vec::new(),
            others,
            digest: Digest::default(),
        }
    }

    /// The bytes that are kept in the work folder.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self);
        let mut bytes = json.map_err(|e| Fault::new(format!("the record cannot be written: {e}")).audit())?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads what [`Record::to_bytes`] wrote; the error says what is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let record: Record = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if record.format != FORMAT || record.format_version != FORMAT_VERSION {
            return Err(format!("'{}' of version {}", record.format, record.format_version));
        }
        record.check()?;
        Ok(record)
    }

    /// A folder is sealed by its record alone, so nothing that it names may lie elsewhere, and nothing be counted for ever.
    fn check(&self) -> Result<(), String> {
        let ranks = self.topology.tp;
        if !(1..=MOST_RANKS).contains(&ranks) {
            return Err(format!("{ranks} ranks"));
        }
        let files = self.files.iter().map(|file| &file.name).chain(self.others.iter().map(|file| &file.name));
        let mut seen = HashSet::from([filename::MANIFEST, filename::SUMS]);
        for name in files.chain(&self.index) {
            if let Some(objection) = filename::objection(name) {
                return Err(format!("{objection}: '{name}'"));
            }
            if !seen.insert(name) || filename::folder(name) == filename::WORK {
                return Err(format!("the file '{name}' twice, or under a name that is taken"));
            }
        }
        match self.files.iter().find(|file| file.rank >= ranks) {
            Some(file) => Err(format!("'{}' for rank {} of {ranks}", file.name, file.rank)),
            None => Ok(()),
        }
    }

    /// The first difference that forbids to mix files of two conversions: what differs, in this one, in the other one.
    pub fn difference(&self, other: &Record) -> Option<(&'static str, String, String)> {
        let short = |plan: &Digest| plan.to_string();
        let source = |s: &Source| {
            let part = |p: &manifest::SourcePart| format!("{} ({} bytes, header {})", p.name, p.bytes, p.header_blake3);
            s.parts.iter().map(part).collect::<Vec<_>>().join(", ")
        };
        let rules = |name: &str, version: &str, digest: &Digest| format!("{name} (version {version}, {digest})");
        let others = |record: &Record| {
            let file = |o: &OtherFile| format!("{} ({} bytes, {})", o.name, o.bytes, o.blake3);
            record.others.iter().map(file).collect::<Vec<_>>().join(", ")
        };
        let topology = |t: &Topology| {
            let experts = if t.expert_parallel { ", whole experts" } else { "" };
            format!("tp {}, pp {} {:?}{experts}", t.tp, t.pp, t.stage_layers)
        };
        let policy = |p: &Policy| {
            let Policy { dtype, rules: given, keep_or, nvfp4_search, input_scales, .. } = p;
            let Policy { mtp, part_size, moe_pad, allow_nonfinite, .. } = p;
            let given = given.as_ref().map(|given| rules(&given.name, &given.version, &given.digest));
            let given = given.map_or(String::new(), |given| format!(", policy {given}"));
            let or = keep_or.as_ref().map_or(String::new(), |or| format!(", keep-or {or}"));
            let search = if *nvfp4_search { ", nvfp4-search" } else { "" };
            let inputs = match input_scales.len() {
                0 => String::new(),
                count => {
                    let mut hasher = blake3::Hasher::new();
                    input_scales.iter().for_each(|(name, value)| {
                        hasher.update(name.as_bytes()).update(&value.to_le_bytes());
                    });
                    format!(", {count} input scales ({})", Digest::from(hasher.finalize()))
                }
            };
            let pad = moe_pad.map_or(String::new(), |pad| format!(", moe-pad {pad}"));
            let allow = if *allow_nonfinite { ", allow-nonfinite" } else { "" };
            format!("dtype {dtype}{given}{or}{search}{inputs}, mtp {mtp}, part-size {part_size}{pad}{allow}")
        };
        let differences = [
            ("tool", self.tool.clone(), other.tool.clone()),
            ("source", source(&self.source), source(&other.source)),
            (
                "mapping",
                rules(&self.mapping.name, &self.mapping.version, &self.mapping.digest),
                rules(&other.mapping.name, &other.mapping.version, &other.mapping.digest),
            ),
            (
                "profile",
                rules(&self.profile.name, &self.profile.version, &self.profile.digest),
                rules(&other.profile.name, &other.profile.version, &other.profile.digest),
            ),
            ("topology", topology(&self.topology), topology(&other.topology)),
            ("policy", policy(&self.policy), policy(&other.policy)),
            ("plan", short(&self.plan), short(&other.plan)),
            ("files beside the weights", others(self), others(other)),
        ];
        if let Some(difference) = differences.into_iter().find(|(_, this, other)| this != other) {
            return Some(difference);
        }
        // Everything else follows from these; if it does not, one of the records is damaged.
        let alike = Record { marks: self.marks.clone(), ..other.clone() } == *self;
        (!alike).then(|| ("record", "this conversion's".into(), "another, though its parts are equal".into()))
    }

    /// The first part of the source that does not look as it did: its place, now (this record), then (the other).
    pub fn changed_part<'a>(&'a self, other: &'a Record) -> Option<(usize, &'a Mark, &'a Mark)> {
        let pairs = self.marks.iter().zip(&other.marks).enumerate();
        pairs.map(|(i, (now, then))| (i, now, then)).find(|(_, now, then)| now != then)
    }

    /// The files that the conversion of `rank` makes, as indices of [`Record::files`].
    pub fn files_of(&self, ranks: &[u32]) -> impl Iterator<Item = usize> {
        self.files.iter().enumerate().filter(|(_, file)| ranks.contains(&file.rank)).map(|(i, _)| i)
    }
}
