//! The engine's sink: tiles are hashed while they are in cache and written to their place in a rank's file.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::file::OutputFile;
use super::folder::OutputFolder;
use super::manifest::{FileEntry, TensorEntry};
use super::work::Counted;
use super::{Digest, SafetensorsHeader, TreeHash};
use crate::dequant::Nonfinite;
use crate::encode;
use crate::engine::Sink;
use crate::error::{Error, Fault, Result};
use crate::mapping::Set;
use crate::plan::{Plan, PlannedFile};
use crate::threads::lock;

/// The key of a header's metadata under which the types of kept blocks are, as a JSON object by tensor.
const BLOCKS_KEY: &str = "ggshard.blocks";

/// Writes files of a plan.
pub struct Writer<'a> {
    plan: &'a Plan,
    folder: &'a OutputFolder,
    /// By index of [`Plan::files`]; none for those that are not wanted.
    files: Vec<Option<RankFile>>,
    /// Whether files are written past the page cache.
    direct: bool,
    /// The strings in each header.
    metadata: BTreeMap<String, String>,
    /// Values that are not finite, by parameter and rank.
    nonfinite: Mutex<BTreeMap<(u32, u32), Nonfinite>>,
    /// How far encoded tensors of unfinished files are from the source, by parameter and rank.
    deviations: Mutex<BTreeMap<(u32, u32), encode::Deviation>>,
    /// Tensors that have begun to arrive, by (parameter, first of the ranks that hold it).
    tensors: Mutex<HashMap<(u32, u32), Arc<TensorHash>>>,
    /// Digests of complete slices, `tp` for each parameter.
    digests: Vec<OnceLock<Digest>>,
}

struct RankFile {
    /// Its index in [`Plan::files`].
    index: usize,
    name: String,
    /// Length of the header, which is made when the file is opened: headers of all files would be most of the memory.
    header_bytes: u64,
    bytes: u64,
    hash: TreeHash,
    /// Bytes that have yet to be written.
    missing: AtomicU64,
    handle: RwLock<Handle>,
}

enum Handle {
    Unopened,
    Open(Arc<OutputFile>),
    Complete,
}

struct TensorHash {
    hash: TreeHash,
    missing: AtomicU64,
}

impl<'a> Writer<'a> {
    /// Lays out the headers of the files with these indices. Opens nothing yet. With `direct`, files are written past the
    /// page cache where that is possible.
    pub fn new(
        plan: &'a Plan,
        folder: &'a OutputFolder,
        wanted: &BTreeSet<usize>,
        metadata: BTreeMap<String, String>,
        direct: bool,
    ) -> Result<Self> {
        let files = plan.files.iter().enumerate().map(|(index, file)| -> Result<Option<RankFile>> {
            if !wanted.contains(&index) {
                return Ok(None);
            }
            let layout = header_of(plan, file, &metadata)?;
            let bytes = layout.file_bytes();
            Ok(Some(RankFile {
                index,
                name: file.name.clone(),
                header_bytes: layout.header_bytes,
                bytes,
                hash: TreeHash::new(bytes),
                missing: AtomicU64::new(bytes),
                handle: RwLock::new(Handle::Unopened),
            }))
        });
        let files = files.collect::<Result<Vec<_>>>()?;
        let mut digests = Vec::new();
        digests.resize_with(plan.params.len() * plan.tp as usize, OnceLock::new);
        Ok(Writer {
            plan,
            folder,
            files,
            direct,
            metadata,
            nonfinite: Mutex::default(),
            deviations: Mutex::default(),
            tensors: Mutex::default(),
            digests,
        })
    }

    /// Bytes of all files that will be written.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().flatten().map(|f| f.bytes).sum()
    }

    /// Completes files without tensor data. Every byte of the others must have come.
    pub fn finish(&self) -> Result<()> {
        for file in self.files.iter().flatten() {
            if matches!(*read(&file.handle), Handle::Unopened) {
                self.open(file)?;
            }
            if !matches!(*read(&file.handle), Handle::Complete) {
                let missing = file.missing.load(Ordering::Relaxed);
                let fault = Fault::new(format!("{missing} bytes were never made"));
                return Err(fault.file(self.folder.path().join(&file.name)).audit());
            }
        }
        Ok(())
    }

    /// The manifest's entry of a file whose bytes are all there, and what was counted in it.
    fn entry(&self, file: &RankFile) -> Result<(FileEntry, Vec<Counted>)> {
        let planned = &self.plan.files[file.index];
        let tensors = planned.params.iter().map(|p| self.tensor_entry(*p, planned.rank));
        let entry = FileEntry {
            name: file.name.clone(),
            rank: self.plan.rank_of(planned),
            stage: Some(planned.stage).filter(|_| self.plan.stages.count() > 1 && planned.set == Set::Main),
            bytes: file.bytes,
            header_bytes: file.header_bytes,
            blake3: file.hash.finish()?.into(),
            tensors: tensors.collect::<Result<_>>()?,
        };
        let nonfinite = lock(&self.nonfinite);
        let counted = planned.params.iter().enumerate().filter_map(|(tensor, param)| {
            let Nonfinite { nan, inf, overflow } = *nonfinite.get(&(*param, planned.rank))?;
            let first_rank = self.plan.params[*param as usize].first_holder(planned.rank);
            Some(Counted { tensor, first_rank, nan, inf, overflow })
        });
        Ok((entry, counted.collect()))
    }

    fn tensor_entry(&self, index: u32, rank: u32) -> Result<TensorEntry> {
        let param = &self.plan.params[index as usize];
        let slice = &param.slices[rank as usize];
        let bytes = self.plan.slice_bytes(param, slice);
        let digest = self.digests[self.slot(index, rank)].get().copied();
        let blake3 = digest
            .or((bytes == 0).then(|| Digest::of(&[])))
            .ok_or_else(|| Fault::new(format!("rank {rank}'s slice was not completed")).tensor(&param.name).audit())?;
        Ok(TensorEntry {
            name: param.name.clone(),
            dtype: param.dtype,
            shape: slice.shape.axes().to_vec(),
            offsets: (slice.offset, slice.offset + bytes),
            blake3,
            deviation: lock(&self.deviations).remove(&(index, rank)).map(Into::into),
        })
    }

    fn slot(&self, param: u32, rank: u32) -> usize {
        param as usize * self.plan.tp as usize + rank as usize
    }

    /// Hashes bytes of a slice that `ranks` hold alike.
    fn hash_tensor(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        let planned = &self.plan.params[param as usize];
        let total = self.plan.slice_bytes(planned, &planned.slices[ranks[0] as usize]);
        let settle = |digest: Digest| {
            for rank in ranks {
                if self.digests[self.slot(param, *rank)].set(digest).is_err() {
                    return Err(Fault::new("the slice came twice").tensor(&planned.name).audit());
                }
            }
            Ok(())
        };
        if bytes.len() as u64 == total {
            return settle(Digest::of(bytes));
        }
        let key = (param, ranks[0]);
        let tensor = {
            let mut tensors = lock(&self.tensors);
            let begun = || Arc::new(TensorHash { hash: TreeHash::new(total), missing: AtomicU64::new(total) });
            tensors.entry(key).or_insert_with(begun).clone()
        };
        tensor.hash.add(offset, bytes)?;
        let left = tensor.missing.fetch_sub(bytes.len() as u64, Ordering::AcqRel) - bytes.len() as u64;
        if left == 0 {
            lock(&self.tensors).remove(&key);
            settle(tensor.hash.finish()?.into())?;
        }
        Ok(())
    }
}

/// The header of a planned file.
pub(crate) fn header_of(
    plan: &Plan,
    file: &PlannedFile,
    metadata: &BTreeMap<String, String>,
) -> Result<SafetensorsHeader> {
    let mut metadata = metadata.clone();
    let params = file.params.iter().map(|p| &plan.params[*p as usize]);
    let blocks: BTreeMap<&str, &str> =
        params.filter_map(|p| Some((p.name.as_str(), p.form.blocks()?.name()))).collect();
    if !blocks.is_empty() {
        // A map of texts: nothing that JSON cannot say.
        metadata.insert(BLOCKS_KEY.into(), serde_json::to_string(&blocks).unwrap_or_default());
    }
    let tensors = file.params.iter().map(|p| {
        let param = &plan.params[*p as usize];
        (param.name.as_str(), param.dtype, param.slices[file.rank as usize].shape.axes().to_vec())
    });
    SafetensorsHeader::layout(tensors, metadata)
}

impl Sink for Writer<'_> {
    fn put(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.hash_tensor(param, ranks, offset, bytes)?;
        for rank in ranks {
            let slice = &self.plan.params[param as usize].slices[*rank as usize];
            let file = self.files[slice.file as usize].as_ref().ok_or_else(|| {
                Fault::new(format!("rank {rank} is not written")).tensor(&self.plan.params[param as usize].name).audit()
            })?;
            self.write(file, file.header_bytes + slice.offset + offset, bytes)?;
        }
        Ok(())
    }

    fn deviate(&self, param: u32, ranks: &[u32], found: &encode::Deviation) {
        let mut deviations = lock(&self.deviations);
        ranks.iter().for_each(|rank| *deviations.entry((param, *rank)).or_default() += *found);
    }

    fn note(&self, param: u32, ranks: &[u32], found: Nonfinite) {
        let mut nonfinite = lock(&self.nonfinite);
        ranks.iter().for_each(|rank| *nonfinite.entry((param, *rank)).or_default() += found);
    }
}

impl Writer<'_> {
    fn write(&self, file: &RankFile, at: u64, bytes: &[u8]) -> Result<()> {
        let open = match &*read(&file.handle) {
            Handle::Open(handle) => Some(handle.clone()),
            Handle::Unopened | Handle::Complete => None,
        };
        let handle = match open {
            Some(handle) => handle,
            None => self.open(file)?,
        };
        file.hash.add(at, bytes)?;
        self.write_at(file, &handle, at, bytes)
    }

    fn write_at(&self, file: &RankFile, handle: &OutputFile, at: u64, bytes: &[u8]) -> Result<()> {
        let written = handle.write_all_at(bytes, at);
        written.map_err(|e| Error::io("write", &self.folder.path().join(&file.name), e))?;
        let left = file.missing.fetch_sub(bytes.len() as u64, Ordering::AcqRel) - bytes.len() as u64;
        if left == 0 {
            // The last byte is in: nobody else will touch this file.
            let (entry, counted) = self.entry(file)?;
            self.folder.complete(file.index, entry, counted, handle.file())?;
            *file.handle.write().unwrap_or_else(PoisonError::into_inner) = Handle::Complete;
        }
        Ok(())
    }

    /// Opens a file and writes its header, once.
    fn open(&self, file: &RankFile) -> Result<Arc<OutputFile>> {
        let mut state = file.handle.write().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            Handle::Open(handle) => return Ok(handle.clone()),
            Handle::Complete => {
                let fault = Fault::new("bytes came after the last").file(self.folder.path().join(&file.name));
                return Err(fault.audit());
            }
            Handle::Unopened => {}
        }
        let handle = Arc::new(self.folder.open_partial(&file.name, file.bytes, self.direct)?);
        *state = Handle::Open(handle.clone());
        drop(state);
        let header = header_of(self.plan, &self.plan.files[file.index], &self.metadata)?.to_bytes()?;
        file.hash.add(0, &header)?;
        self.write_at(file, &handle, 0, &header)?;
        Ok(handle)
    }
}

fn read(handle: &RwLock<Handle>) -> std::sync::RwLockReadGuard<'_, Handle> {
    handle.read().unwrap_or_else(PoisonError::into_inner)
}
