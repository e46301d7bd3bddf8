//! What a plan amounts to: bytes per rank, types, replication. For people and for scripts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;

use serde::Serialize;

use super::{DRAFT_FOLDER, Param, ParamCut, Plan};
use crate::gguf::GgmlType;
use crate::mapping::{CutKind, OutputPolicy, RulesId, Set};

/// The summary of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// `general.architecture` of the source.
    pub architecture: String,
    /// The HF class.
    pub class: String,
    /// The mapping.
    pub mapping: RulesId,
    /// Why this mapping.
    pub mapping_chosen: String,
    /// The profile.
    pub profile: RulesId,
    /// The launch that the profile assumes.
    pub launch: Vec<String>,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Ranks hold whole experts.
    pub expert_parallel: bool,
    /// Output dtype of weights that are not pinned and to which the output policy gives no form of its own.
    pub dtype: String,
    /// The output policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<RulesId>,
    /// Source tensors in the file.
    pub source_tensors: usize,
    /// Of them, used by a weight (scales included).
    pub used_tensors: usize,
    /// Of them, ignored by a rule: name and reason.
    pub ignored: Vec<(String, String)>,
    /// Bytes of source data that are read.
    pub source_bytes: u64,
    /// Weights of the model, and so parameters of each rank.
    pub parameters: usize,
    /// Elements of the model, each weight counted once.
    pub elements: u64,
    /// Source types.
    pub types: Vec<TypeSummary>,
    /// Ranks.
    pub ranks: Vec<RankSummary>,
    /// Bytes of tensor data of all ranks together.
    pub output_bytes: u64,
    /// Of them, bytes of weights that every rank holds whole, counted on all ranks but one: the cost of replication.
    pub replicated_bytes: u64,
    /// Whether the weights fit the memory of GPUs that was asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory: Option<Fit>,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// Every parameter, in the global order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<ParameterSummary>,
}

/// Whether each GPU holds the weights of its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Memory of a GPU, in bytes.
    pub bytes: u64,
    /// The most that one GPU holds: a rank of a stage, with the draft model where there is one.
    pub largest: u64,
    /// Whether that is no more.
    pub fits: bool,
}

/// Source tensors of one type.
#[derive(Debug, Clone, Serialize)]
pub struct TypeSummary {
    /// The type.
    pub name: &'static str,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes.
    pub bytes: u64,
}

/// One rank of one pipeline stage of one set of files.
#[derive(Debug, Clone, Serialize)]
pub struct RankSummary {
    /// The set: `main`, or `mtp` for the draft model.
    pub set: &'static str,
    /// The pipeline stage.
    pub stage: u32,
    /// The tensor-parallel rank.
    pub rank: u32,
    /// Bytes of tensor data.
    pub bytes: u64,
    /// Bytes by dtype.
    pub by_dtype: BTreeMap<&'static str, u64>,
    /// Its files and the bytes of their data sections.
    pub files: Vec<(String, u64)>,
}

/// One parameter.
#[derive(Debug, Clone, Serialize)]
pub struct ParameterSummary {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: &'static str,
    /// Its whole shape.
    pub shape: Vec<u64>,
    /// Its cut.
    pub cut: &'static str,
    /// The source tensors it is made of, with their types.
    pub sources: Vec<(String, &'static str)>,
    /// The type of its blocks, which are kept; the shape's last axis counts bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<&'static str>,
    /// Why its blocks, which were to be kept, are decoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoded: Option<String>,
}

impl Plan {
    /// The names and types of the sources of a parameter, each once.
    pub fn sources_of(&self, param: usize) -> Vec<(String, &'static str)> {
        let weights = self.params[param].content.weights();
        let (mut seen, mut order) = (HashSet::new(), Vec::new());
        for part in weights.iter().flat_map(|w| &self.model.weights[*w as usize].recipe.parts) {
            for source in std::iter::once(part.source).chain(part.op.scale.map(|(s, _)| s)) {
                if seen.insert(source) {
                    order.push(source);
                }
            }
        }
        order.iter().map(|s| &self.sources[*s as usize]).map(|s| (s.name.clone(), s.ty.name())).collect()
    }

    /// Sources that only weights use which the layout leaves out.
    fn left_out_sources(&self) -> Vec<u32> {
        let parts = |w: &u32| self.model.weights[*w as usize].recipe.parts.iter().map(|p| p.source);
        let used: HashSet<u32> = self.params.iter().flat_map(|p| p.content.weights()).flat_map(parts).collect();
        let mut seen = HashSet::new();
        let left_out = self.left_out.iter().flat_map(|(w, _)| parts(w));
        left_out.filter(|s| !used.contains(s) && seen.insert(*s)).collect()
    }

    /// The sources that no parameter uses, and why: ignored by the mapping, or left out by the layout.
    pub fn unused_sources(&self) -> impl Iterator<Item = (String, String)> {
        let name = |source: u32| self.sources[source as usize].name.clone();
        // Of several weights that use a source, the first gives the reason.
        let mut reasons: HashMap<u32, &str> = HashMap::new();
        for (weight, reason) in &self.left_out {
            for part in &self.model.weights[*weight as usize].recipe.parts {
                reasons.entry(part.source).or_insert(reason);
            }
        }
        let reason = move |source: u32| reasons.get(&source).copied().unwrap_or_default().to_owned();
        let ignored = self.model.ignored.iter().map(move |i| (name(i.source), i.reason.clone()));
        let left_out = self.left_out_sources();
        ignored.chain(left_out.into_iter().map(move |s| (name(s), reason(s))))
    }

    /// Sums the plan up. `tensors` adds every parameter.
    pub fn summary(&self, chosen: &str, tensors: bool) -> Summary {
        let mut ignored = vec![false; self.sources.len()];
        self.model
            .ignored
            .iter()
            .map(|i| i.source)
            .chain(self.left_out_sources())
            .for_each(|i| ignored[i as usize] = true);
        let mut types: BTreeMap<&'static str, TypeSummary> = BTreeMap::new();
        for source in &self.sources {
            let name = source.ty.name();
            let row = types.entry(name).or_insert(TypeSummary { name, tensors: 0, bytes: 0 });
            row.tensors += 1;
            row.bytes += source.bytes;
        }
        let mut ranks: BTreeMap<(Set, u32, u32), RankSummary> = BTreeMap::new();
        let mut replicated_bytes = 0;
        for file in &self.files {
            let set = match file.set {
                Set::Main => "main",
                Set::Draft => DRAFT_FOLDER,
            };
            let (stage, rank) = (file.stage, file.rank);
            let row = ranks.entry((file.set, stage, rank)).or_insert_with(|| RankSummary {
                set,
                stage,
                rank,
                bytes: 0,
                by_dtype: BTreeMap::new(),
                files: Vec::new(),
            });
            row.bytes += file.data_bytes;
            row.files.push((file.name.clone(), file.data_bytes));
            for param in file.params.iter().map(|p| &self.params[*p as usize]) {
                let bytes = self.slice_bytes(param, &param.slices[rank as usize]);
                *row.by_dtype.entry(param.dtype.name()).or_default() += bytes;
                if rank > 0 && param.cut == ParamCut::Weights(CutKind::Replicated) {
                    replicated_bytes += bytes;
                }
            }
        }
        let ranks: Vec<RankSummary> = ranks.into_values().collect();
        let mut types: Vec<TypeSummary> = types.into_values().collect();
        types.sort_by_key(|t| std::cmp::Reverse(t.bytes));
        let used = |i: &usize| !ignored[*i];
        Summary {
            architecture: self.model.architecture.clone(),
            class: self.model.class.clone(),
            mapping: self.model.mapping.clone(),
            mapping_chosen: chosen.to_owned(),
            profile: self.profile.id(),
            launch: self.profile.rules.launch.clone(),
            tp: self.tp,
            pp: self.stages.count(),
            expert_parallel: self.expert_parallel,
            dtype: self.policy.dtype.name().to_lowercase(),
            policy: self.forms.as_ref().map(OutputPolicy::id),
            source_tensors: self.sources.len(),
            used_tensors: (0..self.sources.len()).filter(used).count(),
            ignored: self.unused_sources().collect(),
            source_bytes: (0..self.sources.len()).filter(used).map(|i| self.sources[i].bytes).sum(),
            parameters: self.params.len(),
            elements: self.params.iter().filter(|p| !p.form.is_scales()).map(Param::elements).sum(),
            types,
            output_bytes: ranks.iter().map(|r| r.bytes).sum(),
            ranks,
            replicated_bytes,
            gpu_memory: None,
            warnings: self.model.warnings.clone(),
            tensors: if tensors {
                (0..self.params.len()).map(|p| self.parameter_summary(p)).collect()
            } else {
                Vec::new()
            },
        }
    }

    fn parameter_summary(&self, index: usize) -> ParameterSummary {
        let param = &self.params[index];
        ParameterSummary {
            name: param.name.clone(),
            dtype: param.dtype.name(),
            shape: param.shape.clone(),
            cut: param.cut.name(),
            sources: self.sources_of(index),
            blocks: param.form.blocks().map(GgmlType::name),
            decoded: param.decoded.clone(),
        }
    }
}

impl Summary {
    /// Whether GPUs of so many bytes each hold the weights. Caches and activations come on top.
    pub fn fit(&self, bytes: u64) -> Fit {
        let draft = |rank: u32| self.ranks.iter().filter(move |r| r.set != "main" && r.rank == rank).map(|r| r.bytes);
        let main = self.ranks.iter().filter(|r| r.set == "main");
        // The draft model runs where the last stage is.
        let held = main.map(|r| r.bytes + if r.stage + 1 == self.pp { draft(r.rank).sum() } else { 0 });
        let largest = held.chain(draft(0)).max().unwrap_or(0);
        Fit { bytes, largest, fits: largest <= bytes }
    }

    /// The summary in words and tables.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let class = if self.class.is_empty() { String::new() } else { format!(" ({})", self.class) };
        let _ = writeln!(out, "mapping    {}{class}: {}", self.mapping.name, self.mapping_chosen);
        let pp = if self.pp > 1 { format!(", pp {}", self.pp) } else { String::new() };
        let ep = if self.expert_parallel { ", whole experts per rank" } else { "" };
        let policy = self.policy.as_ref().map_or(String::new(), |policy| format!(", policy {}", policy.name));
        let _ = writeln!(out, "profile    {}, tp {}{pp}{ep}, {}{policy}", self.profile.name, self.tp, self.dtype);
        for line in &self.launch {
            let _ = writeln!(out, "launch     {line}");
        }
        let _ = writeln!(
            out,
            "source     {} of {} tensors used, {} ignored by rule; {} to read",
            self.used_tensors,
            self.source_tensors,
            self.ignored.len(),
            size(self.source_bytes)
        );
        let _ = writeln!(out, "parameters {} with {} elements", self.parameters, count(self.elements));
        for row in &self.types {
            let _ = writeln!(out, "           {:8} {:6} tensors {:>14} bytes", row.name, row.tensors, row.bytes);
        }
        let _ = writeln!(
            out,
            "output     {} bytes ({}) for all ranks, of them {} for weights that every rank holds whole",
            self.output_bytes,
            size(self.output_bytes),
            size(self.replicated_bytes)
        );
        for rank in &self.ranks {
            let dtypes: Vec<String> = rank.by_dtype.iter().map(|(d, b)| format!("{d} {b}")).collect();
            let stage = if self.pp > 1 { format!("stage {} ", rank.stage) } else { String::new() };
            let set = if rank.set == "main" { String::new() } else { format!("{}/ ", rank.set) };
            let label = format!("{set}{stage}rank {}", rank.rank);
            let _ =
                writeln!(out, "{label:10} {} bytes in {} files ({})", rank.bytes, rank.files.len(), dtypes.join(", "));
        }
        if let Some(Fit { bytes, largest, fits }) = self.gpu_memory {
            let verdict =
                if fits { format!("fits, {} are left", size(bytes - largest)) } else { "DOES NOT FIT".into() };
            let _ = writeln!(
                out,
                "memory     {largest} bytes ({}) of weights on a GPU of {}: {verdict}",
                size(largest),
                size(bytes)
            );
        }
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, reason) in &self.ignored {
            reasons.entry(reason).or_default().push(name);
        }
        for (reason, names) in reasons {
            let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
            let _ = writeln!(out, "ignored    {}{more}: {reason}", names[0]);
        }
        for warning in &self.warnings {
            let _ = writeln!(out, "warning    {warning}");
        }
        out
    }
}

/// Elements for people: `753.9 billion`.
fn count(elements: u64) -> String {
    match elements {
        0..1_000_000 => elements.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} million", elements as f64 / 1e6),
        1_000_000_000.. => format!("{:.1} billion", elements as f64 / 1e9),
    }
}

/// Bytes for people: `402.1 GB` (powers of ten, as disks are sold).
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        1_000_000_000..1_000_000_000_000 => format!("{:.1} GB", bytes as f64 / 1e9),
        1_000_000_000_000.. => format!("{:.2} TB", bytes as f64 / 1e12),
    }
}
