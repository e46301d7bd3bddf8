//! The work folder: what makes an unfinished conversion go on, after a crash or in several processes at once.
//!
//! ```text
//! OUT/ggshard.work/
//!   lock                 held for a moment by whoever joins or leaves
//!   rank-3.lock          held by the process that makes rank 3
//!   record.json          what is converted into what: equal for every process that takes part
//!   other-0              a file beside the weights, until the folder is sealed
//!   receipt-12.json      file 12 is finished: its digests. Written before the file is called finished
//!   source.json          digests of the source's parts, if they were asked for
//! ```
//!
//! Every file in it is written under another name and renamed. No process writes what another one writes: receipts belong
//! to the rank's holder, and record and other files are the same whoever writes them. The folder goes when the manifest
//! is there.

mod count;
mod receipt;
mod record;

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

pub use count::Counts;
pub use receipt::Receipt;
pub use record::{Counted, Expected, Record};

use crate::error::{Error, Fault, Result};
use crate::output::digest::Digest;
use crate::output::filename::WORK;
use crate::output::lock::Lock;
use crate::output::manifest::{FileEntry, OtherFile};
use crate::regular::{self, remove};
use crate::threads::lock;

/// The largest file that is read here, in bytes.
const READ_LIMIT: u64 = 1 << 30;
const RECORD: &str = "record.json";
const SOURCE: &str = "source.json";
const LOCK: &str = "lock";

/// The work folder of an output folder, with the locks of some ranks.
#[derive(Debug)]
pub struct Work {
    path: PathBuf,
    locks: Vec<Lock>,
    /// Makes names of temporary files: the first of the ranks whose locks are held.
    owner: u32,
    /// BLAKE3 of the record.
    record: Digest,
    /// Whether this process created the folder.
    created: bool,
    /// Files whose receipts this process wrote.
    receipts: Mutex<Vec<usize>>,
}

impl Work {
    /// Where the work folder of `output` is.
    pub fn path_in(output: &Path) -> PathBuf {
        output.join(WORK)
    }

    /// The record in the work folder of `output`; `None` if no conversion has begun there.
    pub fn record_in(output: &Path) -> Result<Option<Record>> {
        let path = Self::path_in(output).join(RECORD);
        let Some(bytes) = read(&path)? else { return Ok(None) };
        let record = Record::parse(&bytes);
        record.map(Some).map_err(|found| {
            Fault::new(format!("not the record of a conversion: {found}"))
                .file(path)
                .remedy("Remove the output folder and convert again, or continue with the version that began")
                .output()
        })
    }

    /// Takes the locks of `ranks` and makes `record` the folder's, or finds that it is. `others` are the bytes of the
    /// record's files beside the weights. With `same_source`, parts that are copies of those that the conversion began
    /// with will do.
    pub fn join(
        output: &Path,
        ranks: &[u32],
        record: &Record,
        others: &[(String, Vec<u8>)],
        same_source: bool,
    ) -> Result<Self> {
        let path = Self::path_in(output);
        let created = match fs::create_dir(&path) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            Err(e) => return Err(Error::io("create", &path, e)),
        };
        refuse_link(&path)?;
        let mut work = Work { created, ..Self::new(output, ranks, Digest::default()) };
        let joined = work.enter(output, ranks, record, others, same_source);
        match joined {
            Ok(()) => Ok(work),
            Err(error) => {
                if work.created {
                    work.leave(false);
                }
                Err(error)
            }
        }
    }

    fn enter(
        &mut self,
        output: &Path,
        ranks: &[u32],
        record: &Record,
        others: &[(String, Vec<u8>)],
        same_source: bool,
    ) -> Result<()> {
        let _door = Lock::wait(&self.path.join(LOCK))?;
        self.lock_ranks(output, ranks)?;
        let bytes = record.to_bytes()?;
        match Self::record_in(output)? {
            None => {
                self.write(RECORD, &bytes)?;
                self.record = Digest::of(&bytes);
            }
            Some(begun) => {
                refuse_mixture(output, record, &begun, same_source)?;
                self.record = Digest::of(&begun.to_bytes()?);
            }
        }
        for (i, (_, bytes)) in others.iter().enumerate() {
            if read(&self.other(i))?.as_deref() != Some(bytes.as_slice()) {
                self.write(&other_name(i), bytes)?;
            }
        }
        self.sync()
    }

    /// Takes the locks of `ranks` of a conversion that has begun.
    pub fn enter_begun(output: &Path, ranks: &[u32], record: &Record) -> Result<Self> {
        let mut work = Self::new(output, ranks, Digest::of(&record.to_bytes()?));
        refuse_link(&work.path)?;
        let _door = Lock::wait(&work.path.join(LOCK))?;
        work.lock_ranks(output, ranks)?;
        Ok(work)
    }

    fn new(output: &Path, ranks: &[u32], record: Digest) -> Self {
        let owner = ranks.first().copied().unwrap_or(0);
        let receipts = Mutex::default();
        Work { path: Self::path_in(output), locks: Vec::new(), owner, record, created: false, receipts }
    }

    fn lock_ranks(&mut self, output: &Path, ranks: &[u32]) -> Result<()> {
        for rank in ranks {
            let lock = Lock::take(&self.path.join(format!("rank-{rank}.lock")))?.ok_or_else(|| {
                Fault::new(format!("another process is converting rank {rank} into this folder"))
                    .file(output)
                    .remedy("Wait until it is done, choose other --ranks, or stop it")
                    .output()
            })?;
            self.locks.push(lock);
        }
        Ok(())
    }

    /// The receipt of a file that this conversion has finished. A damaged one, or one of another conversion, is none.
    pub fn receipt(&self, record: &Record, file: usize) -> Result<Option<Receipt>> {
        let receipt = read(&self.path.join(receipt_name(file)))?.and_then(|bytes| Receipt::parse(&bytes));
        Ok(receipt.filter(|r| r.record == self.record && r.file.name == record.files[file].name))
    }

    /// Writes the receipt of a file.
    pub fn write_receipt(&self, file: usize, entry: FileEntry, counted: Vec<Counted>) -> Result<()> {
        let receipt = Receipt { record: self.record, file: entry, counted };
        lock(&self.receipts).push(file);
        self.write(&receipt_name(file), &receipt.to_bytes()?)
    }

    /// Removes the receipt of a file, if there is one.
    pub fn remove_receipt(&self, file: usize) -> Result<()> {
        remove(&self.path.join(receipt_name(file)))
    }

    /// The bytes of the files beside the weights.
    pub fn others(&self, record: &Record) -> Result<Vec<(String, Vec<u8>)>> {
        let other = |(i, file): (usize, &OtherFile)| {
            let path = self.other(i);
            let bytes = read(&path)?.filter(|bytes| Digest::of(bytes) == file.blake3);
            let damaged = || {
                let fault = Fault::new(format!("the copy of '{}' is missing or damaged", file.name)).file(&path);
                fault.remedy("Run convert with --resume, which writes it again").output()
            };
            Ok((file.name.clone(), bytes.ok_or_else(damaged)?))
        };
        record.others.iter().enumerate().map(other).collect()
    }

    /// The digests of the source's parts, if some process has computed them.
    pub fn source_digests(&self, record: &Record) -> Result<Option<Vec<Digest>>> {
        let path = self.path.join(SOURCE);
        let Some(bytes) = read(&path)? else { return Ok(None) };
        let digests =
            serde_json::from_slice(&bytes).ok().filter(|d: &Vec<Digest>| d.len() == record.source.parts.len());
        let damaged = || Fault::new("no list of one digest per source part").file(&path);
        digests.map(Some).ok_or_else(|| damaged().remedy("Run convert with --resume --hash-source again").output())
    }

    /// Keeps the digests of the source's parts. Another process may have found them before, but no others.
    pub fn write_source_digests(&self, record: &Record, digests: &[Digest]) -> Result<()> {
        match self.source_digests(record)? {
            Some(found) if found == digests => Ok(()),
            Some(_) => Err(Fault::new("another process read other bytes from the source")
                .file(self.path.join(SOURCE))
                .remedy("The processes do not have the same source; remove the output folder and convert again")
                .contradiction()),
            None => {
                let json = serde_json::to_vec(digests);
                let json = json.map_err(|e| Fault::new(format!("digests cannot be written: {e}")).audit())?;
                self.write(SOURCE, &json)
            }
        }
    }

    fn other(&self, index: usize) -> PathBuf {
        self.path.join(other_name(index))
    }

    /// Writes a file that is complete and on the disk when it has its name.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temporary = self.path.join(format!("{name}.{}.tmp", self.owner));
        // Never through a link that somebody left under that name, nor into another process's file.
        remove(&temporary)?;
        let written = File::create_new(&temporary).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        });
        written.map_err(|e| Error::io("write", &temporary, e))?;
        fs::rename(&temporary, self.path.join(name)).map_err(|e| Error::io("rename", &temporary, e))
    }

    fn sync(&self) -> Result<()> {
        let folder = File::open(&self.path).map_err(|e| Error::io("open", &self.path, e))?;
        folder.sync_all().map_err(|e| Error::io("write to disk", &self.path, e))
    }

    /// Gives the locks back, and nothing more.
    #[cfg(test)]
    pub(in crate::output) fn release(&mut self) {
        self.locks.clear();
    }

    /// Gives the locks back, and without `keep` takes this process's receipts away. If nobody has finished a file, and
    /// nobody else is at work, the folder goes too.
    pub fn leave(&mut self, keep: bool) {
        let receipts = std::mem::take(self.receipts.get_mut().unwrap_or_else(PoisonError::into_inner));
        for file in receipts.into_iter().filter(|_| !keep) {
            if let Err(error) = self.remove_receipt(file) {
                tracing::warn!(%error, "the receipt of a file that is gone stays");
            }
        }
        if let Err(error) = self.try_leave() {
            tracing::debug!(%error, "the work folder stays");
        }
        self.locks.clear();
    }

    fn try_leave(&mut self) -> Result<()> {
        let door = Lock::wait(&self.path.join(LOCK))?;
        let held: Vec<&Path> = self.locks.iter().map(Lock::path).collect();
        let names = self.names()?;
        if names.iter().any(|name| name.starts_with("receipt-") && !name.ends_with(".tmp")) {
            return Ok(());
        }
        for name in names.iter().filter(|name| name.ends_with(".lock")) {
            let path = self.path.join(name);
            if !held.contains(&path.as_path()) && Lock::take(&path)?.is_none() {
                return Ok(());
            }
        }
        self.clear(&names, door)
    }

    /// Removes the folder: the manifest is there.
    pub fn remove(&mut self) -> Result<()> {
        let door = Lock::wait(&self.path.join(LOCK))?;
        self.clear(&self.names()?, door)
    }

    /// Removes the work folder of a sealed folder, where a crash has left it.
    pub fn remove_remains(output: &Path) -> Result<()> {
        if !Self::path_in(output).is_dir() {
            return Ok(());
        }
        refuse_link(&Self::path_in(output))?;
        match Self::new(output, &[], Digest::default()).remove() {
            // Another process is just removing it, or has come and will see that there is nothing to do.
            Err(Error::Io { source, .. })
                if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) =>
            {
                Ok(())
            }
            result => result,
        }
    }

    /// Removes the files and the folder, the record first: without it nothing else counts.
    fn clear(&mut self, names: &[String], door: Option<Lock>) -> Result<()> {
        remove(&self.path.join(RECORD))?;
        for name in names {
            remove(&self.path.join(name))?;
        }
        // NFS and FUSE keep a file that is removed while it is open, under another name in the same folder, until it is
        // closed. Whoever joins after that has files in the folder, and it stays.
        self.locks.clear();
        drop(door);
        fs::remove_dir(&self.path).map_err(|e| Error::io("remove", &self.path, e))
    }

    fn names(&self) -> Result<Vec<String>> {
        let io = |e| Error::io("list", &self.path, e);
        let entries = fs::read_dir(&self.path).map_err(io)?;
        entries.map(|entry| Ok(entry.map_err(io)?.file_name().to_string_lossy().into_owned())).collect()
    }
}

/// Refuses to put files of two conversions into one folder.
fn refuse_mixture(output: &Path, record: &Record, begun: &Record, same_source: bool) -> Result<()> {
    if let Some((what, this, other)) = record.difference(begun) {
        return Err(Fault::new(format!("this conversion's {what} is {this}"))
            .file(output)
            .key(what)
            .expected(format!("that of the conversion which began here, {other}"))
            .remedy("Continue with what it began with, or choose another folder")
            .output());
    }
    let Some((part, now, then)) = record.changed_part(begun) else { return Ok(()) };
    let name = record.source.parts.get(part).map_or("", |part| part.name.as_str());
    let fault =
        Fault::new(format!("the source part '{name}' is not the file that the conversion began with")).file(output);
    if now.samples != then.samples {
        return Err(fault
            .expected("the same bytes at 64 sampled places")
            .remedy(
                "Another model, or the same quantized again: choose another folder, or give the source it began with",
            )
            .output());
    }
    if same_source {
        return Ok(());
    }
    let text =
        |mark: &crate::gguf::Mark| format!("modified {}.{:09}, inode {}", mark.modified.0, mark.modified.1, mark.inode);
    Err(fault
        .expected(format!("{}, not {}", text(then), text(now)))
        .remedy("If it is a copy of that file, or the file was touched or moved, say --same-source")
        .output())
}

fn receipt_name(file: usize) -> String {
    format!("receipt-{file}.json")
}

fn other_name(index: usize) -> String {
    format!("other-{index}")
}

/// The bytes of a file, `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let (file, _) = match regular::open(path) {
        Ok(opened) => opened,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("open", path, e)),
    };
    let mut bytes = Vec::new();
    file.take(READ_LIMIT).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(Some(bytes))
}

/// Refuses a link in the place of the work folder, whose files are removed in the end.
fn refuse_link(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(status) if status.is_symlink() => {
            let fault = Fault::new("a link in the place of the work folder").file(path);
            Err(fault.remedy("It is not from a conversion: remove the link, or choose another folder").output())
        }
        Ok(_) | Err(_) => Ok(()),
    }
}
