//! The engine's sink: tiles are hashed while they are in cache and written to their place in a rank's file.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::folder::OutputFolder;
use super::manifest::{FileEntry, TensorEntry};
use super::{Digest, SafetensorsHeader, TreeHash};
use crate::engine::Sink;
use crate::error::{Error, Fault, Result};
use crate::mapping::Set;
use crate::plan::{Plan, PlannedFile};

/// Writes the files of the wanted ranks.
pub struct Writer<'a> {
    plan: &'a Plan,
    folder: &'a OutputFolder,
    /// By index of [`Plan::files`]; none for ranks that are not wanted.
    files: Vec<Option<RankFile>>,
    /// Tensors that have begun to arrive, by (parameter, first of the ranks that hold it).
    tensors: Mutex<HashMap<(u32, u32), Arc<TensorHash>>>,
    /// Digests of complete slices, `tp` for each parameter.
    digests: Vec<OnceLock<Digest>>,
}

struct RankFile {
    name: String,
    header: Vec<u8>,
    bytes: u64,
    hash: TreeHash,
    digest: OnceLock<Digest>,
    /// Bytes that have yet to be written.
    missing: AtomicU64,
    handle: RwLock<Handle>,
}

enum Handle {
    Unopened,
    Open(Arc<File>),
    Complete,
}

struct TensorHash {
    hash: TreeHash,
    missing: AtomicU64,
}

impl<'a> Writer<'a> {
    /// Lays out the headers of the wanted ranks' files. Opens nothing yet.
    pub fn new(
        plan: &'a Plan,
        folder: &'a OutputFolder,
        ranks: &[u32],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let files = plan.files.iter().map(|file| -> Result<Option<RankFile>> {
            if !ranks.contains(&file.rank) {
                return Ok(None);
            }
            let layout = header_of(plan, file, metadata)?;
            let bytes = layout.file_bytes();
            Ok(Some(RankFile {
                name: file.name.clone(),
                header: layout.to_bytes()?,
                bytes,
                hash: TreeHash::new(bytes),
                digest: OnceLock::new(),
                missing: AtomicU64::new(bytes),
                handle: RwLock::new(Handle::Unopened),
            }))
        });
        let files = files.collect::<Result<Vec<_>>>()?;
        let mut digests = Vec::new();
        digests.resize_with(plan.params.len() * plan.tp as usize, OnceLock::new);
        Ok(Writer { plan, folder, files, tensors: Mutex::default(), digests })
    }

    /// Bytes of all files that will be written.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().flatten().map(|f| f.bytes).sum()
    }

    /// Completes files without tensor data and gives the manifest's entries. Every byte must have come.
    pub fn finish(&self) -> Result<Vec<FileEntry>> {
        let mut entries = Vec::new();
        for (planned, file) in self.plan.files.iter().zip(&self.files) {
            let Some(file) = file else { continue };
            if matches!(*read(&file.handle), Handle::Unopened) {
                file.open(self.folder)?;
            }
            let incomplete = || {
                Fault::new(format!("{} bytes were never made", file.missing.load(Ordering::Relaxed)))
                    .file(self.folder.path().join(&file.name))
                    .audit()
            };
            let blake3 = *file.digest.get().ok_or_else(incomplete)?;
            let tensors = planned.params.iter().map(|p| self.tensor_entry(*p, planned.rank));
            entries.push(FileEntry {
                name: file.name.clone(),
                rank: self.plan.rank_of(planned),
                stage: Some(planned.stage).filter(|_| self.plan.stages.count() > 1 && planned.set == Set::Main),
                bytes: file.bytes,
                header_bytes: file.header.len() as u64,
                blake3,
                tensors: tensors.collect::<Result<_>>()?,
            });
        }
        Ok(entries)
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
            let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
            let begun = || Arc::new(TensorHash { hash: TreeHash::new(total), missing: AtomicU64::new(total) });
            tensors.entry(key).or_insert_with(begun).clone()
        };
        tensor.hash.add(offset, bytes)?;
        let left = tensor.missing.fetch_sub(bytes.len() as u64, Ordering::AcqRel) - bytes.len() as u64;
        if left == 0 {
            self.tensors.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
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
    let tensors = file.params.iter().map(|p| {
        let param = &plan.params[*p as usize];
        (param.name.as_str(), param.dtype, param.slices[file.rank as usize].shape.axes().to_vec())
    });
    SafetensorsHeader::layout(tensors, metadata.clone())
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
            file.write(self.folder, file.header.len() as u64 + slice.offset + offset, bytes)?;
        }
        Ok(())
    }
}

impl RankFile {
    fn write(&self, folder: &OutputFolder, at: u64, bytes: &[u8]) -> Result<()> {
        let open = match &*read(&self.handle) {
            Handle::Open(file) => Some(file.clone()),
            Handle::Unopened | Handle::Complete => None,
        };
        let handle = match open {
            Some(handle) => handle,
            None => self.open(folder)?,
        };
        self.hash.add(at, bytes)?;
        self.write_at(folder, &handle, at, bytes)
    }

    fn write_at(&self, folder: &OutputFolder, handle: &File, at: u64, bytes: &[u8]) -> Result<()> {
        let written = handle.write_all_at(bytes, at);
        written.map_err(|e| Error::io("write", &folder.path().join(&self.name), e))?;
        let left = self.missing.fetch_sub(bytes.len() as u64, Ordering::AcqRel) - bytes.len() as u64;
        if left == 0 {
            // The last byte is in: nobody else will touch this file.
            folder.complete(&self.name, handle)?;
            let _ = self.digest.set(self.hash.finish()?.into());
            *self.handle.write().unwrap_or_else(PoisonError::into_inner) = Handle::Complete;
        }
        Ok(())
    }

    /// Opens the file and writes its header, once.
    fn open(&self, folder: &OutputFolder) -> Result<Arc<File>> {
        let mut state = self.handle.write().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            Handle::Open(file) => return Ok(file.clone()),
            Handle::Complete => {
                return Err(Fault::new("bytes came after the last").file(folder.path().join(&self.name)).audit());
            }
            Handle::Unopened => {}
        }
        let file = Arc::new(folder.open_partial(&self.name)?);
        *state = Handle::Open(file.clone());
        drop(state);
        self.hash.add(0, &self.header)?;
        self.write_at(folder, &file, 0, &self.header)?;
        Ok(file)
    }
}

fn read(handle: &RwLock<Handle>) -> std::sync::RwLockReadGuard<'_, Handle> {
    handle.read().unwrap_or_else(PoisonError::into_inner)
}
