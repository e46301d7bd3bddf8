//! The output folder: from nothing to a checkpoint, in steps that no loader mistakes for one.
//!
//! ```text
//! X.safetensors.partial ─► .done (after fsync) ─► all there: X.safetensors ─► others (config, index) ─► B3SUMS ─► manifest
//! ```

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::filename;
use crate::error::{Error, Fault, Result};

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
}

/// The steps in order. After none but the last is the folder a checkpoint, to us or to a stack that looks for config.json.
fn steps<'a>(files: &[&'a str], others: &'a [(String, Vec<u8>)], sums: &'a [u8], manifest: &'a [u8]) -> Vec<Step<'a>> {
    let mut steps = vec![Step::Sync];
    steps.extend(files.iter().map(|name| Step::Finish(name)));
    steps.push(Step::Sync);
    steps.extend(others.iter().map(|(name, bytes)| Step::Write(name, bytes)));
    steps.push(Step::Write(filename::SUMS, sums));
    steps.push(Step::Sync);
    steps.push(Step::Write(filename::MANIFEST, manifest));
    steps.push(Step::Sync);
    steps
}

/// A folder that a conversion writes to. Unless it is [committed](OutputFolder::commit), everything that was put into
/// it is removed again when this is dropped.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    created: Vec<PathBuf>,
    /// Folders created below the output folder.
    below: Mutex<Vec<PathBuf>>,
    written: Mutex<Vec<PathBuf>>,
    committed: bool,
}

impl OutputFolder {
    /// Checks that `path` can take a conversion: it does not exist yet, or is an empty folder. Creates nothing.
    pub fn check(path: &Path, sources: &[&Path]) -> Result<()> {
        let status = match fs::metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Error::io("look at", path, e)),
            Ok(status) => status,
        };
        if !status.is_dir() {
            let fault = Fault::new("the output is a file").file(path).expected("a folder, or nothing yet");
            return Err(fault.output());
        }
        let entries = fs::read_dir(path).map_err(|e| Error::io("list", path, e))?;
        let mut names: Vec<String> = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("list", path, e))?;
            if let Some(source) = sources.iter().find(|s| same_file(s, &entry.path())) {
                return Err(Fault::new(format!("the output folder holds the source part '{}'", source.display()))
                    .file(path)
                    .expected("an empty folder away from the source")
                    .output());
            }
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        let Some(first) = names.first() else { return Ok(()) };
        let interrupted = names.iter().any(|n| n.ends_with(PARTIAL) || n.ends_with(DONE));
        let remedy = if interrupted {
            "It holds an unfinished conversion; remove the folder, or choose another"
        } else {
            "Choose another folder, or remove what is in it"
        };
        Err(Fault::new(format!("the output folder holds {} entries, the first is '{first}'", names.len()))
            .file(path)
            .expected("an empty folder, or none")
            .remedy(remedy)
            .output())
    }

    /// Creates the folder, and the folders above it, where they do not exist.
    pub fn create(path: &Path) -> Result<Self> {
        let mut missing: Vec<PathBuf> = Vec::new();
        let mut at = Some(path);
        while let Some(folder) = at.filter(|f| !f.as_os_str().is_empty() && !f.exists()) {
            missing.push(folder.to_path_buf());
            at = folder.parent();
        }
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        Ok(OutputFolder {
            path: path.to_path_buf(),
            created: missing,
            below: Mutex::default(),
            written: Mutex::default(),
            committed: false,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a new file under its partial name.
    pub(super) fn open_partial(&self, name: &str) -> Result<File> {
        let path = self.path.join(format!("{name}{PARTIAL}"));
        self.create_above(&path)?;
        let file = File::create_new(&path).map_err(|e| Error::io("create", &path, e))?;
        self.note(path);
        Ok(file)
    }

    /// Creates the folder of a file, below the output folder.
    fn create_above(&self, path: &Path) -> Result<()> {
        let Some(folder) = path.parent().filter(|f| *f != self.path && !f.exists()) else { return Ok(()) };
        match fs::create_dir(folder) {
            Ok(()) => lock(&self.below).push(folder.to_path_buf()),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io("create", folder, e)),
        }
        Ok(())
    }

    /// Marks a file as complete: its bytes are on disk before it has the name.
    pub(super) fn complete(&self, name: &str, file: &File) -> Result<()> {
        let partial = self.path.join(format!("{name}{PARTIAL}"));
        let done = self.path.join(format!("{name}{DONE}"));
        file.sync_all().map_err(|e| Error::io("write to disk", &partial, e))?;
        self.rename(&partial, &done)
    }

    /// Gives all files their final names, then writes the small files, `B3SUMS` and, last, the manifest.
    pub fn commit(mut self, files: &[&str], others: &[(String, Vec<u8>)], sums: &[u8], manifest: &[u8]) -> Result<()> {
        for step in steps(files, others, sums, manifest) {
            self.take(step)?;
        }
        self.committed = true;
        Ok(())
    }

    fn take(&self, step: Step<'_>) -> Result<()> {
        match step {
            Step::Sync => self.sync(),
            Step::Finish(name) => self.rename(&self.path.join(format!("{name}{DONE}")), &self.path.join(name)),
            Step::Write(name, bytes) => self.write(name, bytes),
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
        let mut file = self.open_partial(name)?;
        let partial = self.path.join(format!("{name}{PARTIAL}"));
        file.write_all(bytes).map_err(|e| Error::io("write", &partial, e))?;
        file.sync_all().map_err(|e| Error::io("write to disk", &partial, e))?;
        self.rename(&partial, &self.path.join(name))
    }

    fn sync(&self) -> Result<()> {
        for path in lock(&self.below).iter().chain([&self.path]) {
            let folder = File::open(path).map_err(|e| Error::io("open", path, e))?;
            folder.sync_all().map_err(|e| Error::io("write to disk", path, e))?;
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
        for path in written.iter().rev() {
            if let Err(error) = fs::remove_file(path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot remove an unfinished file");
            }
        }
        for folder in lock(&self.below).iter().chain(&self.created) {
            // Only what this conversion created, and only if nobody else put anything into it.
            let _ = fs::remove_dir(folder);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether two paths lead to one file, through links as well.
fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
        (Err(_), _) | (_, Err(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 3] =
        ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "mtp/a.safetensors"];

    /// A process that dies between any two steps leaves nothing that passes for a checkpoint: no manifest, and nothing
    /// that a stack reads first (config.json, an index) unless every weight is in place under its name.
    #[test]
    fn a_death_after_any_step_leaves_no_checkpoint() {
        let others = [("config.json".to_owned(), b"{}".to_vec()), ("mtp/config.json".to_owned(), b"{}".to_vec())];
        let all = steps(&FILES, &others, b"sums", b"manifest");
        let last = all.iter().rposition(|s| matches!(s, Step::Write(..))).unwrap();
        for dies_after in 0..=all.len() {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("out");
            let folder = OutputFolder::create(&path).unwrap();
            for name in FILES {
                let file = folder.open_partial(name).unwrap();
                folder.complete(name, &file).unwrap();
            }
            for step in &all[..dies_after] {
                folder.take(*step).unwrap();
            }
            // No destructor runs in a process that is killed.
            std::mem::forget(folder);
            let is = |name: &str| path.join(name).exists();
            assert_eq!(is(filename::MANIFEST), dies_after > last, "after {dies_after} steps");
            if is("config.json") || is("mtp/config.json") || is(filename::SUMS) {
                assert!(FILES.iter().all(|name| is(name)), "after {dies_after} steps");
            }
            if dies_after > last {
                assert!(
                    FILES.iter().all(|name| is(name))
                        && is("config.json")
                        && is("mtp/config.json")
                        && is(filename::SUMS)
                );
            }
        }
    }
}
