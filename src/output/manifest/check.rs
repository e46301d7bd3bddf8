//! What a manifest must not contradict in itself.

use std::collections::{HashMap, HashSet};

use super::{FORMAT, FORMAT_VERSION, FileEntry, Manifest, Parameter};
use crate::error::Fault;
use crate::output::filename;
use crate::output::safetensors::DATA_ALIGNMENT;

type Checked<T = ()> = Result<T, Box<Fault>>;
/// Parameters by set and name.
type Parameters<'a> = HashMap<(&'a str, &'a str), &'a Parameter>;

impl Manifest {
    /// Checks everything that can be checked without the other files.
    pub(super) fn check(&self) -> Checked {
        if self.format != FORMAT {
            return fault("format", format!("the format '{}'", self.format));
        }
        if self.format_version != FORMAT_VERSION {
            return fault("format_version", format!("version {}", self.format_version));
        }
        self.check_topology()?;
        self.check_names()?;
        let parameters = self.check_parameters()?;
        for file in &self.files {
            check_file(file, &parameters)?;
        }
        self.check_placement(&parameters)
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
        if let Some(file) = self.files.iter().find(|file| file.stage.is_some_and(|stage| stage >= topology.pp)) {
            return fault("files", format!("'{}' is for a stage beyond the last", file.name));
        }
        if let Some(rank) = topology.ranks.iter().find(|&&rank| rank >= topology.tp) {
            return fault("topology.ranks", format!("rank {rank} of {}", topology.tp));
        }
        Ok(())
    }

    /// Names of files: plain, relative, none twice, none that is another's folder.
    fn check_names(&self) -> Checked {
        for part in &self.source.parts {
            if part.name.contains('/') || filename::objection(&part.name).is_some() {
                return fault("source.parts", format!("'{}' is not a plain file name", part.name));
            }
        }
        let names = || self.files.iter().map(|file| &file.name).chain(self.others.iter().map(|file| &file.name));
        let mut seen = HashSet::from([filename::MANIFEST, filename::SUMS]);
        for name in names() {
            if let Some(objection) = filename::objection(name) {
                return refuse(Fault::new(format!("{objection}: '{name}'")).key("files"));
            }
            if !seen.insert(name) {
                return fault("files", format!("the file '{name}' is listed twice, or its name is reserved"));
            }
        }
        if let Some(name) = names().find(|name| seen.contains(filename::folder(name))) {
            return fault("files", format!("'{name}' lies in a folder that is itself listed as a file"));
        }
        Ok(())
    }

    /// The parameters by set (sub-folder) and name.
    fn check_parameters(&self) -> Checked<Parameters<'_>> {
        let mut parameters = HashMap::with_capacity(self.parameters.len());
        for parameter in &self.parameters {
            if parameters.insert((parameter.set.as_str(), parameter.name.as_str()), parameter).is_some() {
                return refuse(Fault::new("this parameter is listed twice").tensor(&parameter.name).key("parameters"));
            }
        }
        Ok(parameters)
    }

    /// Which rank holds what: no tensor twice for one rank and set, and every parameter somewhere.
    ///
    /// A sub-folder is a set of its own (the draft model in `mtp/` repeats the embedding).
    fn check_placement(&self, parameters: &Parameters<'_>) -> Checked {
        let mut shared = HashSet::new();
        let mut placed = HashSet::new();
        let mut anywhere = HashSet::with_capacity(parameters.len());
        let twice = |file: &FileEntry, name: &str| {
            refuse(
                Fault::new(format!("'{}' holds this tensor once more for the same rank", file.name))
                    .tensor(name)
                    .key("files"),
            )
        };
        for file in &self.files {
            let folder = filename::folder(&file.name);
            match file.rank {
                None => {
                    for tensor in &file.tensors {
                        if !shared.insert((folder, tensor.name.as_str())) {
                            return twice(file, &tensor.name);
                        }
                    }
                }
                Some(rank) if self.topology.ranks.binary_search(&rank).is_err() => {
                    return fault("files", format!("'{}' is for rank {rank}, which is not in this folder", file.name));
                }
                Some(rank) => {
                    for tensor in &file.tensors {
                        if !placed.insert((folder, rank, file.stage, tensor.name.as_str())) {
                            return twice(file, &tensor.name);
                        }
                    }
                }
            }
            anywhere.extend(file.tensors.iter().map(|tensor| (folder, tensor.name.as_str())));
        }
        for file in self.files.iter().filter(|file| file.rank.is_some()) {
            let folder = filename::folder(&file.name);
            if let Some(tensor) = file.tensors.iter().find(|t| shared.contains(&(folder, t.name.as_str()))) {
                return twice(file, &tensor.name);
            }
        }
        let every_rank = self.topology.ranks.len() == self.topology.tp as usize;
        match self
            .parameters
            .iter()
            .find(|parameter| !anywhere.contains(&(parameter.set.as_str(), parameter.name.as_str())))
        {
            Some(missing) if every_rank => {
                refuse(Fault::new("no file holds this parameter").tensor(&missing.name).key("parameters"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// One file's tensors: known, of the parameter's type, of the size of their shape, one after the other to the end.
fn check_file(file: &FileEntry, parameters: &Parameters<'_>) -> Checked {
    if file.header_bytes < DATA_ALIGNMENT || !file.header_bytes.is_multiple_of(DATA_ALIGNMENT) {
        let found = format!("'{}' has a header of {} bytes", file.name, file.header_bytes);
        return refuse(Fault::new(found).key("header_bytes").expected(format!("a multiple of {DATA_ALIGNMENT}")));
    }
    let mut reached = 0;
    for tensor in &file.tensors {
        let fault = |found: String| Fault::new(found).tensor(&tensor.name).key(&file.name);
        let Some(parameter) = parameters.get(&(filename::folder(&file.name), tensor.name.as_str())) else {
            return refuse(fault("a tensor that is not among the parameters".into()));
        };
        if parameter.dtype != tensor.dtype {
            return refuse(fault(format!("dtype {}", tensor.dtype)).expected(format!("{}", parameter.dtype)));
        }
        if parameter.shape.len() != tensor.shape.len() {
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
    }
    if file.header_bytes.checked_add(reached) != Some(file.bytes) {
        let found = format!("'{}' has {} bytes", file.name, file.bytes);
        let expected = format!("a header of {} bytes and {reached} bytes of data", file.header_bytes);
        return refuse(Fault::new(found).key("bytes").expected(expected));
    }
    Ok(())
}

fn refuse<T>(fault: Fault) -> Checked<T> {
    Err(Box::new(fault))
}

fn fault(key: &str, found: impl Into<String>) -> Checked {
    refuse(Fault::new(found).key(key))
}
