//! What a manifest must not contradict in itself.

use std::collections::{HashMap, HashSet};

use super::{FORMAT, FORMAT_VERSION, FileEntry, Manifest, Parameter};
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::gguf::GgmlType;
use crate::output::filename;
use crate::output::safetensors::DATA_ALIGNMENT;

type Checked<T = ()> = Result<T, Box<Fault>>;

impl Manifest {
    /// Checks everything that can be checked without the other files.
    pub(super) fn check(&self) -> Checked {
        let mut check = Check::begin(self)?;
        for file in &self.files {
            check.file(file)?;
        }
        check.end()
    }

    fn check_topology(&self) -> Checked {
        let topology = &self.topology;
        if topology.tp == 0 {
            return fault("topology.tp", "no rank at all");
        }
        if topology.ranks.is_empty() {
            return fault("topology.ranks", "no rank in this folder");
        }
        if !topology.ranks.is_sorted_by(|a, b| a < b) {
            return fault("topology.ranks", "ranks that are not ascending, or one twice");
        }
        let stages = topology.stage_layers.len();
        if topology.pp == 0 || (stages > 0 && stages != topology.pp as usize) {
            return fault("topology.pp", format!("{} stages, blocks for {stages}", topology.pp));
        }
        if let Some(rank) = topology.ranks.iter().find(|&&rank| rank >= topology.tp) {
            return fault("topology.ranks", format!("rank {rank} of {}", topology.tp));
        }
        Ok(())
    }
}

/// The check of a manifest whose files come one at a time: all of them together may be large.
pub(crate) struct Check<'a> {
    manifest: &'a Manifest,
    /// Index and parameter, by set (sub-folder) and name. A set may repeat another's names: the draft model in `mtp/` has
    /// an embedding of its own.
    parameters: HashMap<(&'a str, &'a str), (u32, &'a Parameter)>,
    /// Names of files so far.
    names: HashSet<String>,
    /// By parameter, whether a file that every rank loads holds it.
    shared: Vec<bool>,
    /// By parameter, whether a file of one rank does.
    ranked: Vec<bool>,
    /// Parameter, rank and stage of what files of one rank hold.
    placed: HashSet<(u32, u32, Option<u32>)>,
}

impl<'a> Check<'a> {
    /// Checks all of `manifest` but its files.
    pub fn begin(manifest: &'a Manifest) -> Checked<Self> {
        if manifest.format != FORMAT {
            return refuse(Fault::new(format!("the format '{}'", manifest.format)).key("format"));
        }
        if manifest.format_version != FORMAT_VERSION {
            return refuse(Fault::new(format!("version {}", manifest.format_version)).key("format_version"));
        }
        manifest.check_topology()?;
        for part in &manifest.source.parts {
            if part.name.contains('/') || filename::objection(&part.name).is_some() {
                return refuse(Fault::new(format!("'{}' is not a plain file name", part.name)).key("source.parts"));
            }
        }
        let mut parameters = HashMap::with_capacity(manifest.parameters.len());
        for (index, parameter) in manifest.parameters.iter().enumerate() {
            let key = (parameter.set.as_str(), parameter.name.as_str());
            if parameter.blocks.as_deref().is_some_and(|ty| !holds_blocks(parameter.dtype, &parameter.shape, ty)) {
                let found = format!("blocks of '{}'", parameter.blocks.as_deref().unwrap_or_default());
                let fault = Fault::new(found).tensor(&parameter.name).key("parameters");
                return refuse(fault.expected(format!("a ggml type of {} {:?}", parameter.dtype, parameter.shape)));
            }
            if parameters.insert(key, (index as u32, parameter)).is_some() {
                return refuse(Fault::new("this parameter is listed twice").tensor(&parameter.name).key("parameters"));
            }
        }
        let none = vec![false; parameters.len()];
        let names = HashSet::from([filename::MANIFEST.to_owned(), filename::SUMS.to_owned()]);
        let mut check =
            Check { manifest, parameters, names, shared: none.clone(), ranked: none, placed: HashSet::new() };
        manifest.others.iter().try_for_each(|other| check.name(&other.name))?;
        Ok(check)
    }

    /// Names of files: plain, relative, none twice.
    fn name(&mut self, name: &str) -> Checked {
        if let Some(objection) = filename::objection(name) {
            return refuse(Fault::new(format!("{objection}: '{name}'")).key("files"));
        }
        if !self.names.insert(name.to_owned()) {
            return fault("files", format!("the file '{name}' is listed twice, or its name is reserved"));
        }
        Ok(())
    }

    /// Checks the next file.
    pub fn file(&mut self, file: &FileEntry) -> Checked {
        self.name(&file.name)?;
        let topology = &self.manifest.topology;
        if file.stage.is_some_and(|stage| stage >= topology.pp) {
            return fault("files", format!("'{}' is for a stage beyond the last", file.name));
        }
        if let Some(rank) = file.rank.filter(|rank| topology.ranks.binary_search(rank).is_err()) {
            return fault("files", format!("'{}' is for rank {rank}, which is not in this folder", file.name));
        }
        let params = self.tensors(file)?;
        for (param, tensor) in params.into_iter().zip(&file.tensors) {
            let slot = param as usize;
            let once = match file.rank {
                None => !std::mem::replace(&mut self.shared[slot], true) && !self.ranked[slot],
                Some(rank) => {
                    self.ranked[slot] = true;
                    self.placed.insert((param, rank, file.stage)) && !self.shared[slot]
                }
            };
            if !once {
                let found = format!("'{}' holds this tensor once more for the same rank", file.name);
                return refuse(Fault::new(found).tensor(&tensor.name).key("files"));
            }
        }
        Ok(())
    }

    /// One file's tensors: known, of the parameter's type, of the size of their shape, one after the other to the end.
    /// Gives the index of each one's parameter.
    fn tensors(&self, file: &FileEntry) -> Checked<Vec<u32>> {
        if file.header_bytes < DATA_ALIGNMENT || !file.header_bytes.is_multiple_of(DATA_ALIGNMENT) {
            let found = format!("'{}' has a header of {} bytes", file.name, file.header_bytes);
            return refuse(Fault::new(found).key("header_bytes").expected(format!("a multiple of {DATA_ALIGNMENT}")));
        }
        let mut reached = 0;
        let mut params = Vec::with_capacity(file.tensors.len());
        for tensor in &file.tensors {
            let fault = |found: String| Fault::new(found).tensor(&tensor.name).key(&file.name);
            let key = (filename::folder(&file.name), tensor.name.as_str());
            let Some((index, parameter)) = self.parameters.get(&key) else {
                return refuse(fault("a tensor that is not among the parameters".into()));
            };
            if parameter.dtype != tensor.dtype {
                return refuse(fault(format!("dtype {}", tensor.dtype)).expected(format!("{}", parameter.dtype)));
            }
            let holds = |ty: &str| holds_blocks(tensor.dtype, &tensor.shape, ty);
            let in_blocks = parameter.blocks.as_deref().is_none_or(holds);
            if parameter.shape.len() != tensor.shape.len() || !in_blocks {
                let found = format!("shape {:?}", tensor.shape);
                return refuse(fault(found).expected(format!("a part of {:?}", parameter.shape)));
            }
            let size = tensor.dtype.tensor_bytes(&tensor.shape).and_then(|size| size.checked_add(reached));
            let Some(end) = size else {
                return refuse(fault(format!("the size of {:?} overflows", tensor.shape)));
            };
            if tensor.offsets != (reached, end) {
                let (b, e) = tensor.offsets;
                return refuse(fault(format!("offsets [{b},{e}]")).expected(format!("[{reached},{end}]")));
            }
            reached = end;
            params.push(*index);
        }
        if file.header_bytes.checked_add(reached) != Some(file.bytes) {
            let found = format!("'{}' has {} bytes", file.name, file.bytes);
            let expected = format!("a header of {} bytes and {reached} bytes of data", file.header_bytes);
            return refuse(Fault::new(found).key("bytes").expected(expected));
        }
        Ok(params)
    }

    /// Checks what only all files together show: that every parameter is somewhere, and no file another's folder.
    pub fn end(self) -> Checked {
        if let Some(name) = self.names.iter().filter(|name| self.names.contains(filename::folder(name))).min() {
            return fault("files", format!("'{name}' lies in a folder that is itself listed as a file"));
        }
        let topology = &self.manifest.topology;
        let every_rank = topology.ranks.len() == topology.tp as usize;
        let held = self.shared.iter().zip(&self.ranked).map(|(shared, ranked)| *shared || *ranked);
        match self.manifest.parameters.iter().zip(held).find(|(_, held)| !held) {
            Some((missing, _)) if every_rank => {
                refuse(Fault::new("no file holds this parameter").tensor(&missing.name).key("parameters"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Whether a tensor's rows are whole blocks of the type of that name.
fn holds_blocks(dtype: Dtype, shape: &[u64], ty: &str) -> bool {
    let block = GgmlType::from_name(ty).map(GgmlType::block_bytes);
    let row = shape.last().filter(|_| shape.len() > 1 && dtype == Dtype::U8);
    block.zip(row).is_some_and(|(bytes, row)| row.is_multiple_of(bytes))
}

fn refuse<T>(fault: Fault) -> Checked<T> {
    Err(Box::new(fault))
}

fn fault(key: &str, found: impl Into<String>) -> Checked {
    refuse(Fault::new(found).key(key))
}
