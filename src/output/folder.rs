//! The output folder: from nothing to a checkpoint, in steps that no loader mistakes for one.
//!
//! ```text
//! X.safetensors.partial ─► .done (after fsync) ─► all there: X.safetensors ─► others (config, index) ─► B3SUMS ─► manifest
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::file::OutputFile;
use super::manifest::{FileEntry, Manifest};
use super::work::{Counted, Receipt, Record, Work};
use super::{Digest, filename};
use crate::error::{Error, Fault, Result};
use crate::regular::{self, remove};
use crate::threads::lock;

mod look;

use look::{Found, look, occupied, unfinished};

/// Appended to a safetensors file's name while it is written.
pub const PARTIAL: &str = ".partial";
/// Appended to a safetensors file's name when it is complete and on disk, but others are not.
pub const DONE: &str = ".done";

/// A step from complete files to a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step<'a> {
    /// What was done so far is on disk.
    Sync,
    /// A complete file gets its final name.
    Finish(&'a str),
    /// A small file is written.
    Write(&'a str, &'a [u8]),
    /// The manifest, which is written already, gets its name.
    Manifest,
}

/// The steps in order. After none but the last is the folder a checkpoint, to us or to a stack that looks for config.json.
fn steps<'a>(files: &[&'a str], others: &'a [(String, Vec<u8>)], sums: &'a [u8]) -> Vec<Step<'a>> {
    let mut steps = vec![Step::Sync];
    steps.extend(files.iter().map(|name| Step::Finish(name)));
    steps.push(Step::Sync);
    steps.extend(others.iter().map(|(name, bytes)| Step::Write(name, bytes)));
    steps.push(Step::Write(filename::SUMS, sums));
    steps.push(Step::Sync);
    steps.push(Step::Manifest);
    steps.push(Step::Sync);
    steps
}

/// How a conversion wants to use a folder.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The tensor-parallel ranks that it makes.
    pub ranks: &'a [u32],
    /// What is converted into what.
    pub record: &'a Record,
    /// The bytes of the files beside the weights.
    pub others: &'a [(String, Vec<u8>)],
    /// The parts of the source, none of which may lie in the folder.
    pub sources: &'a [&'a Path],
    /// Whether it goes on where an earlier run ended.
    pub resume: bool,
    /// Whether finished files stay if it fails, to be resumed.
    pub keep: bool,
    /// Whether the source may be a copy of the one that the conversion began with.
    pub same_source: bool,
}

/// A folder that was claimed.
#[derive(Debug)]
pub enum Claimed {
    /// There is work to do.
    Open(Box<OutputFolder>),
    /// An earlier run had finished, but for nothing that a user would notice.
    Sealed(Box<Manifest>, Digest),
}

/// A folder that a conversion writes to. Unless it is [committed](OutputFolder::commit), what this process put into it is
/// removed again when this is dropped: everything, or everything but finished files.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    work: Work,
    created: Vec<PathBuf>,
    /// Sub-folders that files of the conversion lie in.
    folders: BTreeSet<String>,
    /// Those of them that this process created.
    below: Mutex<Vec<PathBuf>>,
    written: Mutex<Vec<PathBuf>>,
    /// Whether finished files stay if it is dropped before its commit.
    keep: AtomicBool,
    committed: bool,
}

impl OutputFolder {
    /// Takes the folder at `path` for some ranks. It is created, or must be empty, or hold work that may be continued.
    pub fn claim(path: &Path, claim: &Claim<'_>) -> Result<Claimed> {
        let Claim { ranks, record, sources, resume, .. } = *claim;
        let every_rank = ranks.len() == record.topology.tp as usize;
        match look(path, sources)? {
            Found::Nothing => {}
            Found::Unfinished if resume || !every_rank => {}
            Found::Unfinished => return Err(unfinished(path, "an unfinished conversion")),
            Found::Sealed => return Self::sealed(path, claim),
        }
        Self::enter(path, claim)
    }

    /// Takes the ranks of a folder that was not sealed when it was looked at.
    fn enter(path: &Path, claim: &Claim<'_>) -> Result<Claimed> {
        let Claim { ranks, record, others, resume, keep, same_source, .. } = *claim;
        let mut created: Vec<PathBuf> = Vec::new();
        let mut at = Some(path);
        while let Some(folder) = at.filter(|f| !f.as_os_str().is_empty() && !f.exists()) {
            created.push(folder.to_path_buf());
            at = folder.parent();
        }
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        let mut work = match Work::join(path, ranks, record, others, same_source) {
            Ok(work) => work,
            Err(error) => {
                created.iter().for_each(|folder| _ = fs::remove_dir(folder));
                return Err(error);
            }
        };
        // Who seals takes these locks too. So if there is a manifest, it came since the look and before the locks, and
        // this work folder is a new one: to go on would make the ranks again, and take them from a checkpoint.
        if path.join(filename::MANIFEST).is_file() {
            work.leave(false);
            return Self::sealed(path, claim);
        }
        let folder = Self::new(path, work, record, created, keep);
        if !resume {
            folder.refuse_remains(record, ranks)?;
        }
        Ok(Claimed::Open(Box::new(folder)))
    }

    /// Takes the folder at `path`, where a conversion has begun, to seal it.
    pub fn claim_begun(path: &Path, ranks: &[u32], record: &Record) -> Result<Self> {
        Ok(Self::new(path, Work::enter_begun(path, ranks, record)?, record, Vec::new(), true))
    }

    fn new(path: &Path, work: Work, record: &Record, created: Vec<PathBuf>, keep: bool) -> Self {
        let names = record.files.iter().map(|file| &file.name).chain(record.others.iter().map(|file| &file.name));
        let folders = names.map(|name| filename::folder(name).to_owned()).filter(|folder| !folder.is_empty()).collect();
        let (below, written) = (Mutex::default(), Mutex::default());
        let (path, keep) = (path.to_path_buf(), AtomicBool::new(keep));
        OutputFolder { path, work, created, folders, below, written, keep, committed: false }
    }

    /// Whether finished files stay when this is dropped.
    pub fn set_keep(&self, keep: bool) {
        self.keep.store(keep, Ordering::Relaxed);
    }

    /// The manifest of a folder that is sealed already, if it is this conversion's and may go on.
    fn sealed(path: &Path, claim: &Claim<'_>) -> Result<Claimed> {
        if !claim.resume {
            return Err(occupied(path, format!("a checkpoint, '{}'", filename::MANIFEST)));
        }
        let (mut manifest, digest) = Manifest::read_with_digest(path)?;
        // Most of it, and no part of a record.
        let files = std::mem::take(&mut manifest.files);
        if let Some((what, this, other)) = claim.record.difference(&Record::of_sealed(&manifest, claim.record)) {
            return Err(Fault::new(format!("this conversion's {what} is {this}"))
                .file(path)
                .key(what)
                .expected(format!("that of the finished conversion in this folder, {other}"))
                .remedy("Choose another folder, or remove what is in it")
                .output());
        }
        let absent = claim.ranks.iter().find(|rank| manifest.topology.ranks.binary_search(rank).is_err());
        if let Some(rank) = absent {
            return Err(Fault::new(format!("the folder was sealed without rank {rank}"))
                .file(path)
                .expected(format!("ranks {:?}", manifest.topology.ranks))
                .remedy("Make this rank in another folder")
                .output());
        }
        Work::remove_remains(path)?;
        manifest.files = files;
        Ok(Claimed::Sealed(Box::new(manifest), digest))
    }

    /// A conversion that does not resume may join others, but its own ranks must be untouched.
    fn refuse_remains(&self, record: &Record, ranks: &[u32]) -> Result<()> {
        for index in record.files_of(ranks) {
            let name = &record.files[index].name;
            let there = [PARTIAL, DONE, ""].iter().any(|ending| self.path.join(format!("{name}{ending}")).exists());
            if there || self.work.receipt(record, index)?.is_some() {
                return Err(unfinished(&self.path, &format!("an unfinished conversion of '{name}'")));
            }
        }
        Ok(())
    }

    /// The work folder.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// The receipts of the files of `ranks` that are finished and whose bytes are still those that were written; what is
    /// left of the others is removed. `each` is told of bytes read, and may end it with an error.
    pub fn finished(
        &self,
        record: &Record,
        ranks: &[u32],
        threads: usize,
        each: &(dyn Fn(u64) -> Result<()> + Sync),
    ) -> Result<Vec<(usize, Receipt)>> {
        let mut finished = Vec::new();
        let mut to_do = Vec::new();
        for index in record.files_of(ranks) {
            let name = &record.files[index].name;
            let receipt = self.work.receipt(record, index)?;
            match receipt.zip(self.finished_path(name)) {
                Some((receipt, path)) if holds(&path, &receipt, threads, each)? => finished.push((index, receipt)),
                Some(_) | None => to_do.push(index),
            }
        }
        if !to_do.is_empty() {
            // A stack must not find config.json beside weights that are about to go.
            self.withdraw(record)?;
        }
        for index in to_do {
            let name = &record.files[index].name;
            for ending in [PARTIAL, DONE, ""] {
                remove(&self.path.join(format!("{name}{ending}")))?;
            }
            self.work.remove_receipt(index)?;
        }
        Ok(finished)
    }

    /// Where a finished file is: under its final name, or still under the one before.
    fn finished_path(&self, name: &str) -> Option<PathBuf> {
        [format!("{name}{DONE}"), name.to_owned()].iter().map(|name| self.path.join(name)).find(|path| path.is_file())
    }

    /// The length of a finished file, or of what is there in its place.
    pub fn finished_bytes(&self, name: &str) -> Option<u64> {
        Some(fs::metadata(self.finished_path(name)?).ok()?.len())
    }

    /// Removes what makes a folder look complete, if a commit was cut short.
    fn withdraw(&self, record: &Record) -> Result<()> {
        let others = record.others.iter().map(|file| file.name.as_str());
        for name in others.chain(record.index.as_deref()).chain([filename::SUMS]) {
            for ending in ["", PARTIAL] {
                remove(&self.path.join(format!("{name}{ending}")))?;
            }
        }
        remove(&self.path.join(format!("{}{PARTIAL}", filename::MANIFEST)))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a new file of so many bytes under its partial name, to be written by way of the page cache or past it.
    pub(super) fn open_partial(&self, name: &str, bytes: u64, direct: bool) -> Result<OutputFile> {
        let path = self.path.join(format!("{name}{PARTIAL}"));
        self.create_above(&path)?;
        let file = OutputFile::create(&path, bytes, direct).map_err(|e| Error::io("create", &path, e))?;
        self.note(path);
        Ok(file)
    }

    /// Creates the folder of a file, below the output folder.
    fn create_above(&self, path: &Path) -> Result<()> {
        let Some(folder) = path.parent().filter(|f| *f != self.path) else { return Ok(()) };
        match fs::symlink_metadata(folder) {
            Ok(status) if status.is_symlink() => {
                let fault = Fault::new("a link in the place of a sub-folder").file(folder);
                return Err(fault.remedy("Remove it, or choose another folder").output());
            }
            Ok(_) => return Ok(()),
            Err(_) => {}
        }
        match fs::create_dir(folder) {
            Ok(()) => lock(&self.below).push(folder.to_path_buf()),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io("create", folder, e)),
        }
        Ok(())
    }

    /// Marks a file as finished: its bytes and its receipt are on disk before it has the name.
    pub(super) fn complete(&self, index: usize, entry: FileEntry, counted: Vec<Counted>, file: &File) -> Result<()> {
        let name = entry.name.clone();
        let partial = self.path.join(format!("{name}{PARTIAL}"));
        let done = self.path.join(format!("{name}{DONE}"));
        file.sync_all().map_err(|e| Error::io("write to disk", &partial, e))?;
        self.work.write_receipt(index, entry, counted)?;
        self.rename(&partial, &done)
    }

    /// Creates the manifest under its partial name.
    pub(super) fn begin_manifest(&self) -> Result<File> {
        self.create(&self.path.join(format!("{}{PARTIAL}", filename::MANIFEST)))
    }

    /// Creates a file, in the place of what a run before has left.
    fn create(&self, path: &Path) -> Result<File> {
        // Never through a link that somebody left under that name.
        remove(path)?;
        let file = File::create_new(path).map_err(|e| Error::io("create", path, e))?;
        self.note(path.to_path_buf());
        Ok(file)
    }

    /// Gives all files their final names, then writes the small files and `B3SUMS`. Last, the manifest that was begun and
    /// is complete gets its name.
    pub fn commit(mut self, files: &[&str], others: &[(String, Vec<u8>)], sums: &[u8]) -> Result<()> {
        for step in steps(files, others, sums) {
            self.take(step)?;
        }
        self.committed = true;
        if let Err(error) = self.work.remove() {
            tracing::warn!(%error, "the checkpoint is complete, but its work folder stays");
        }
        Ok(())
    }

    fn take(&self, step: Step<'_>) -> Result<()> {
        match step {
            Step::Sync => self.sync(),
            Step::Finish(name) => {
                let done = self.path.join(format!("{name}{DONE}"));
                // A commit that was cut short has renamed some.
                if done.exists() || !self.path.join(name).is_file() {
                    self.rename(&done, &self.path.join(name))
                } else {
                    Ok(())
                }
            }
            Step::Write(name, bytes) => self.write(name, bytes),
            Step::Manifest => {
                let path = self.path.join(filename::MANIFEST);
                self.rename(&self.path.join(format!("{}{PARTIAL}", filename::MANIFEST)), &path)
            }
        }
    }

    fn note(&self, path: PathBuf) {
        lock(&self.written).push(path);
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.note(to.to_path_buf());
        fs::rename(from, to).map_err(|e| Error::io("rename", from, e))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let partial = self.path.join(format!("{name}{PARTIAL}"));
        self.create_above(&partial)?;
        let mut file = self.create(&partial)?;
        file.write_all(bytes).map_err(|e| Error::io("write", &partial, e))?;
        file.sync_all().map_err(|e| Error::io("write to disk", &partial, e))?;
        self.rename(&partial, &self.path.join(name))
    }

    /// Brings the names in the folder and in its sub-folders to the disk.
    fn sync(&self) -> Result<()> {
        let below = self.folders.iter().map(|name| self.path.join(name)).filter(|path| path.is_dir());
        for path in below.chain([self.path.clone()]) {
            let folder = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
            folder.sync_all().map_err(|e| Error::io("write to disk", &path, e))?;
        }
        Ok(())
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        // The latest names first: a manifest must go before the files it vouches for.
        let written = std::mem::take(&mut *lock(&self.written));
        let keep = self.keep.load(Ordering::Relaxed);
        for path in written.iter().rev().filter(|path| !keep || !is_finished_weights(path)) {
            // Most have been renamed. On a file system that fails, asking is all that can be done about those.
            if path.exists()
                && let Err(error) = remove(path)
            {
                tracing::warn!(%error, "an unfinished file stays");
            }
        }
        self.work.leave(keep);
        for folder in lock(&self.below).iter().chain(&self.created) {
            // Only what this conversion created, and only if nobody else put anything into it.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Whether a path is that of weights that are finished, under either name.
fn is_finished_weights(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.strip_suffix(DONE).unwrap_or(&name).ends_with(".safetensors")
}

/// Whether a finished file's bytes are those that its receipt names.
fn holds(path: &Path, receipt: &Receipt, threads: usize, each: &(dyn Fn(u64) -> Result<()> + Sync)) -> Result<bool> {
    let (file, bytes) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
    if bytes != receipt.file.bytes {
        return Ok(false);
    }
    Ok(Digest::of_file(&file, path, bytes, threads, each)? == receipt.file.blake3)
}

#[cfg(test)]
mod tests;
