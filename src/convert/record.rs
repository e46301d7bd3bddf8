//! What a conversion says about itself: in the manifest, and in the record of unfinished work.

use std::collections::BTreeMap;

use super::{Extras, Planned, TOOL};
use crate::dequant::Nonfinite;
use crate::error::{Fault, Result};
use crate::gguf::{GgufSet, Part};
use crate::mapping::{RulesId, Set};
use crate::output::manifest::{self, FileEntry, Manifest, OtherFile};
use crate::output::work::{Expected, Record};
use crate::output::{Digest, Index};
use crate::plan::{DRAFT_FOLDER, Plan};

/// The record of a conversion, of all its ranks.
pub(super) fn record(planned: &Planned, extras: &Extras, allow_nonfinite: bool) -> Result<Record> {
    let Planned { set, plan, .. } = planned;
    let policy = &plan.policy;
    let several = plan.stages.count() > 1;
    let manifest = Manifest {
        format: manifest::FORMAT.into(),
        format_version: manifest::FORMAT_VERSION,
        tool: format!("{TOOL}{}", env!("CARGO_PKG_VERSION")),
        plan: plan.identity().into(),
        source: source_of(set)?,
        mapping: mapping_of(plan)?,
        profile: profile_of(plan)?,
        topology: manifest::Topology {
            tp: plan.tp,
            pp: plan.stages.count(),
            stage_layers: if several { plan.stages.counts().to_vec() } else { Vec::new() },
            expert_parallel: plan.expert_parallel,
            ranks: (0..plan.tp).collect(),
        },
        policy: manifest::Policy {
            dtype: policy.dtype.name().to_lowercase(),
            keep_or: plan.keep_or.map(|float| float.name().to_lowercase()),
            nvfp4_search: plan.nvfp4.search,
            input_scales: plan.nvfp4.input_scales.as_ref().map(|scales| scales.by_name.clone()).unwrap_or_default(),
            rules: plan.forms.as_ref().map(|forms| rules_of(forms.id())).transpose()?,
            mtp: policy.mtp.name().into(),
            part_size: policy.part_size,
            moe_pad: policy.moe_pad,
            allow_nonfinite,
        },
        warnings: plan.model.warnings.iter().chain(&extras.notes).cloned().collect(),
        ignored: ignored(plan),
        parameters: parameters(plan, &BTreeMap::new()),
        files: Vec::new(),
        others: extras
            .files
            .iter()
            .map(|(name, bytes)| OtherFile { name: name.clone(), bytes: bytes.len() as u64, blake3: Digest::of(bytes) })
            .collect(),
        digest: Digest::default(),
    };
    let marks = set.parts().iter().map(Part::mark).collect::<Result<_>>()?;
    let files = plan.files.iter().map(|file| Expected { name: file.name.clone(), rank: file.rank }).collect();
    Ok(Record::new(manifest, marks, files, index_name(plan).cloned()))
}

/// The name of the index beside the parts of a whole checkpoint, if the profile has one.
fn index_name(plan: &Plan) -> Option<&String> {
    let whole = plan.profile.whole_at(plan.tp, plan.stages.count());
    plan.profile.rules.files.index.as_ref().filter(|_| whole)
}

/// The index that transformers looks for beside the parts of a whole checkpoint.
pub(crate) fn index(plan: &Plan, files: &[FileEntry]) -> Result<Option<(String, Vec<u8>)>> {
    let Some(name) = index_name(plan) else { return Ok(None) };
    let mut index = Index::default();
    files.iter().for_each(|file| index.add(file));
    Ok(Some((name.clone(), index.into_bytes()?)))
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

fn rules_of(id: RulesId) -> Result<manifest::PolicyRules> {
    let RulesId { name, version, digest: hex, texts } = id;
    Ok(manifest::PolicyRules { name, version: version.to_string(), digest: digest(&hex)?, texts })
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
            blocks: param.form.blocks().map(|ty| ty.name().to_owned()),
            decoded: param.decoded.clone(),
            nan: found.nan,
            inf: found.inf,
            overflow: found.overflow,
        }
    };
    (0..plan.params.len()).map(parameter).collect()
}
