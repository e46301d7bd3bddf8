//! One rank of a converted folder: its files, checked against the manifest and mapped.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::tensor::{SharedTensor, Tensor};
use crate::dtype::Dtype;
use crate::error::{Fault, Result};
use crate::gguf::{Advice, GgmlType, Map};
use crate::mapping::Set;
use crate::output::Digest;
use crate::output::filename;
use crate::output::manifest::{self, FileEntry, Manifest};
use crate::plan::DRAFT_FOLDER;
use crate::verify::{Depth, Finding, check_files};

/// How far a checkpoint is checked when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// The manifest, the length and header of every file, and the set of tensors. Reads no tensor data.
    #[default]
    No,
    /// Also every byte of this rank's files, by the BLAKE3 of each file and tensor.
    Full,
}

/// What is to be opened, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// How far it is checked.
    pub verify: Verify,
    /// The model itself, or the draft model in `mtp/`.
    pub set: Set,
    /// The pipeline stage; `None` for all of them. The draft model is not divided.
    pub stage: Option<u32>,
    /// Number of threads that check, prefetch, copy and decode; 0 for one per CPU.
    pub threads: usize,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { verify: Verify::No, set: Set::Main, stage: None, threads: 0 }
    }
}

/// One rank of a converted folder, open for reading. A clone shares the files.
///
/// The files stay mapped for as long as the checkpoint, a clone, or a [`SharedTensor`] of it lives. They must not be
/// changed or truncated meanwhile: the bytes would change with them, and a truncated file ends the process (SIGBUS).
#[derive(Clone)]
pub struct RankCheckpoint(Arc<Inner>);

struct Inner {
    dir: PathBuf,
    rank: u32,
    set: Set,
    stage: Option<u32>,
    threads: usize,
    topology: manifest::Topology,
    policy: manifest::Policy,
    profile: String,
    launch: Vec<String>,
    class: Option<String>,
    plan: Digest,
    files: Vec<PathBuf>,
    maps: Vec<Arc<Map>>,
    /// In the plan's order.
    tensors: Vec<Held>,
    by_name: HashMap<Arc<str>, u32>,
}

struct Held {
    name: Arc<str>,
    dtype: Dtype,
    /// The type of its blocks, where they are kept.
    blocks: Option<GgmlType>,
    shape: Arc<[u64]>,
    /// Index of its file.
    file: u32,
    /// Its bytes in the file.
    range: Range<usize>,
}

impl RankCheckpoint {
    /// Opens the files of `rank` in the folder `dir`, and no others. Those of other ranks may be absent.
    ///
    /// # Errors
    ///
    /// Those of [`Manifest::read`]; [`Error::Checkpoint`](crate::Error::Checkpoint) when the rank, stage or set is not
    /// in the folder, or when a file is not what the manifest says: every difference is named in
    /// the [`Fault`], of which the message shows the beginning;
    /// [`Error::Io`](crate::Error::Io) when a file cannot be mapped.
    pub fn open(dir: impl AsRef<Path>, rank: u32, options: OpenOptions) -> Result<Self> {
        let dir = dir.as_ref();
        let manifest = Manifest::read(dir)?;
        let files =
            choose(&manifest, rank, options).map_err(|fault| fault.file(dir.join(filename::MANIFEST)).checkpoint())?;
        let depth = match options.verify {
            Verify::No => Depth::Headers,
            Verify::Full => Depth::Contents,
        };
        refuse(dir, &check_files(dir, &manifest, &files, depth, options.threads)?)?;
        let mut maps = Vec::with_capacity(files.len());
        let mut places = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            let path = dir.join(&file.name);
            let map = Map::open(&path)?;
            if map.len() as u64 != file.bytes {
                let fault = Fault::new(format!("{} bytes", map.len())).file(path);
                return Err(fault.expected(format!("{} bytes, as a moment ago", file.bytes)).checkpoint());
            }
            // Advice only: it changes nothing but speed.
            if let Err(error) = map.advise(0..map.len(), Advice::LargePages) {
                tracing::debug!(%error, "no large pages");
            }
            maps.push(Arc::new(map));
            for tensor in &file.tensors {
                let at = |offset: u64| (file.header_bytes + offset) as usize;
                let range = at(tensor.offsets.0)..at(tensor.offsets.1);
                places.insert(tensor.name.as_str(), (index as u32, tensor, range));
            }
        }
        let folder = folder_of(options.set);
        let mut tensors = Vec::with_capacity(places.len());
        for parameter in manifest.parameters.iter().filter(|p| p.set == folder) {
            if let Some((file, tensor, range)) = places.remove(parameter.name.as_str()) {
                let (name, shape) = (Arc::from(tensor.name.as_str()), Arc::from(tensor.shape.as_slice()));
                let blocks = parameter.blocks.as_deref().and_then(GgmlType::from_name);
                tensors.push(Held { name, dtype: tensor.dtype, blocks, shape, file, range });
            }
        }
        let by_name = tensors.iter().enumerate().map(|(i, t)| (Arc::clone(&t.name), i as u32)).collect();
        let files = files.iter().map(|file| dir.join(&file.name)).collect();
        let Manifest { topology, policy, profile, mapping, plan, .. } = manifest;
        Ok(RankCheckpoint(Arc::new(Inner {
            dir: dir.to_path_buf(),
            rank,
            set: options.set,
            stage: options.stage,
            threads: options.threads,
            topology,
            policy,
            profile: profile.name,
            launch: profile.launch,
            class: mapping.class,
            plan,
            files,
            maps,
            tensors,
            by_name,
        })))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// The rank.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// The model itself, or the draft model.
    pub fn set(&self) -> Set {
        self.0.set
    }

    /// The pipeline stage that was asked for; `None` for all of them.
    pub fn stage(&self) -> Option<u32> {
        self.0.stage
    }

    /// Number of tensor-parallel ranks.
    pub fn tp(&self) -> u32 {
        self.0.topology.tp
    }

    /// Number of pipeline stages.
    pub fn pp(&self) -> u32 {
        self.0.topology.pp
    }

    /// Whether ranks hold whole experts instead of a slice of every expert.
    pub fn expert_parallel(&self) -> bool {
        self.0.topology.expert_parallel
    }

    /// Name of the profile, such as `vllm-0.32`.
    pub fn profile(&self) -> &str {
        &self.0.profile
    }

    /// The arguments with which the profile's stack is to be started.
    pub fn launch(&self) -> &[String] {
        &self.0.launch
    }

    /// The model class as the serving stack calls it, where the mapping knows one.
    pub fn class(&self) -> Option<&str> {
        self.0.class.as_deref()
    }

    /// Element type of weights that no rule pins: `bf16`, `f16`, `f32`.
    pub fn dtype(&self) -> &str {
        &self.0.policy.dtype
    }

    /// Identity of the plan that was executed: equal for all ranks of one conversion, and for no other.
    pub fn plan_digest(&self) -> Digest {
        self.0.plan
    }

    /// The files that are open.
    pub fn files(&self) -> &[PathBuf] {
        &self.0.files
    }

    /// Checks that the folder was made for these numbers of ranks and stages and for this profile.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) that says what differs and how to convert anew.
    pub fn expect(&self, tp: u32, pp: u32, profile: &str) -> Result<()> {
        let text = |tp: u32, pp: u32, profile: &str| format!("tp {tp}, pp {pp}, profile '{profile}'");
        let mut differs = Vec::new();
        if self.tp() != tp {
            differs.push("the number of ranks");
        }
        if self.pp() != pp {
            differs.push("the number of pipeline stages");
        }
        if self.profile() != profile {
            differs.push("the profile");
        }
        if differs.is_empty() {
            return Ok(());
        }
        let made = text(self.tp(), self.pp(), self.profile());
        Err(Fault::new(format!("made for {made}: {} differs", differs.join(" and ")))
            .file(&self.0.dir)
            .expected(text(tp, pp, profile))
            .remedy(format!(
                "Convert the source again with --profile {profile} --tp {tp}{}, or start the stack as the folder was made",
                if pp > 1 || self.pp() > 1 { format!(" --pp {pp}") } else { String::new() }
            ))
            .checkpoint())
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.0.tensors.len()
    }

    /// Whether there are no tensors; no checkpoint that opens is empty.
    pub fn is_empty(&self) -> bool {
        self.0.tensors.is_empty()
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.0.tensors.iter().map(|t| t.range.len() as u64).sum()
    }

    /// The tensors' names, in the plan's order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.tensors.iter().map(|t| &*t.name)
    }

    /// The tensors, in the plan's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.0.tensors.iter().map(|held| self.view(held))
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let index = self.0.by_name.get(name)?;
        Some(self.view(&self.0.tensors[*index as usize]))
    }

    /// The tensor of that name, which keeps its file mapped by itself.
    pub fn shared(&self, name: &str) -> Option<SharedTensor> {
        let held = &self.0.tensors[*self.0.by_name.get(name)? as usize];
        Some(SharedTensor {
            name: Arc::clone(&held.name),
            dtype: held.dtype,
            shape: Arc::clone(&held.shape),
            map: Arc::clone(&self.0.maps[held.file as usize]),
            range: held.range.clone(),
        })
    }

    /// The tensor at a place of the plan's order.
    pub(super) fn at(&self, index: usize) -> Option<Tensor<'_>> {
        Some(self.view(self.0.tensors.get(index)?))
    }

    pub(super) fn block_type(&self, name: &str) -> Option<GgmlType> {
        let index = self.0.by_name.get(name)?;
        self.0.tensors[*index as usize].blocks
    }

    fn view<'a>(&'a self, held: &'a Held) -> Tensor<'a> {
        let bytes = &self.0.maps[held.file as usize][held.range.clone()];
        Tensor { name: &held.name, dtype: held.dtype, shape: &held.shape, bytes }
    }

    pub(super) fn maps(&self) -> &[Arc<Map>] {
        &self.0.maps
    }

    pub(super) fn threads(&self) -> usize {
        self.0.threads
    }
}

impl fmt::Debug for RankCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { dir, rank, set, stage, profile, tensors, .. } = &*self.0;
        f.debug_struct("RankCheckpoint")
            .field("dir", dir)
            .field("rank", rank)
            .field("set", set)
            .field("stage", stage)
            .field("profile", profile)
            .field("tensors", &tensors.len())
            .finish_non_exhaustive()
    }
}

fn folder_of(set: Set) -> &'static str {
    match set {
        Set::Main => "",
        Set::Draft => DRAFT_FOLDER,
    }
}

/// The files of a rank, set and stage, if the manifest gives them every parameter that they must hold, once.
fn choose(manifest: &Manifest, rank: u32, options: OpenOptions) -> Result<Vec<&FileEntry>, Box<Fault>> {
    let topology = &manifest.topology;
    if topology.ranks.binary_search(&rank).is_err() {
        let fault = Fault::new(format!("rank {rank} is not in this folder"))
            .expected(format!("one of {:?}, of {} ranks", topology.ranks, topology.tp))
            .remedy("Convert this rank as well, or open the folder that holds it");
        return Err(fault.into());
    }
    if let Some(stage) = options.stage.filter(|stage| *stage >= topology.pp) {
        let fault = Fault::new(format!("pipeline stage {stage} is not in this folder"))
            .expected(format!("a stage below {}", topology.pp))
            .remedy("Convert with as many stages as the stack has, by --pp");
        return Err(fault.into());
    }
    let folder = folder_of(options.set);
    let held: Vec<&FileEntry> = manifest.files_of(rank).filter(|f| filename::folder(&f.name) == folder).collect();
    if held.is_empty() {
        let fault = match options.set {
            Set::Main => Fault::new(format!("no file of the model itself for rank {rank}"))
                .remedy("The folder may hold nothing but a draft model: open that set"),
            Set::Draft => Fault::new(format!("no draft model ('{DRAFT_FOLDER}/') for rank {rank}"))
                .remedy("Choose a source with MTP blocks and a profile that makes a draft model of them"),
        };
        return Err(fault.into());
    }
    // Every stage counts here: what another stage holds is not missing, and what two hold is one too many.
    let mut seen = HashSet::new();
    for file in &held {
        if let Some(twice) = file.tensors.iter().find(|t| !seen.insert(t.name.as_str())) {
            let found = format!("'{}' holds this tensor once more for rank {rank}", file.name);
            return Err(Fault::new(found).tensor(&twice.name).key("files").into());
        }
    }
    let missing = |p: &&manifest::Parameter| p.set == folder && !seen.contains(p.name.as_str());
    let missing: Vec<&str> = manifest.parameters.iter().filter(missing).map(|p| p.name.as_str()).collect();
    if let [first, others @ ..] = missing.as_slice() {
        let fault = Fault::new(match others {
            [] => format!("no file of rank {rank} holds this parameter"),
            others => format!("no file of rank {rank} holds this parameter, nor {}", others.join(", ")),
        });
        return Err(fault.tensor(*first).key("parameters").remedy("Convert again").into());
    }
    let wanted = |file: &&FileEntry| match (options.stage, file.stage) {
        (Some(wanted), Some(stage)) => wanted == stage,
        (None, _) | (_, None) => true,
    };
    let files: Vec<&FileEntry> = held.into_iter().filter(wanted).collect();
    if files.iter().all(|file| file.tensors.is_empty()) {
        let found = match options.stage {
            Some(stage) => format!("no tensors for rank {rank} in pipeline stage {stage}"),
            None => format!("no tensors for rank {rank}"),
        };
        return Err(Fault::new(found).key("files").into());
    }
    Ok(files)
}

/// An error that names every difference.
fn refuse(dir: &Path, findings: &[Finding]) -> Result<()> {
    let Some(first) = findings.first() else { return Ok(()) };
    let fault = match findings {
        [only] => {
            let mut fault = Fault::new(match &only.found {
                Some(found) => format!("{}: found {found}", only.what.text()),
                None => only.what.text().to_owned(),
            });
            fault.tensor.clone_from(&only.tensor);
            fault.expected.clone_from(&only.expected);
            fault.file(dir.join(&only.file))
        }
        several => {
            let lines: Vec<String> = several.iter().map(|finding| format!("\n  {finding}")).collect();
            Fault::new(format!("{} differences from the manifest:{}\n", several.len(), lines.concat())).file(dir)
        }
    };
    Err(fault.remedy(first.what.remedy()).checkpoint())
}
