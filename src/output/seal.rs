//! Sealing: from finished files, whoever made them, to a checkpoint.

use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::deviation::Worst;
use super::filename;
use super::folder::OutputFolder;
use super::index::Index;
use super::manifest::{Check, Manifest, OtherFile, Text};
use super::work::{Counts, Receipt, Record};
use super::{Digest, Sums};
use crate::error::{Error, Fault, Result};

/// What finished files hold, without their tensors, of which there may be half a million.
#[derive(Debug, Default)]
pub struct Finished {
    /// Number of files.
    pub files: usize,
    /// Number of tensors in them.
    pub tensors: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Values that are not finite.
    pub counts: Counts,
    /// Encoded tensors that are furthest from the source.
    pub worst: Worst,
    /// Names and digests of the files.
    sums: Vec<(String, Digest)>,
    /// In which file each tensor is, if an index is to be written.
    index: Option<Index>,
}

impl Finished {
    /// Looks through the receipts of the files of `ranks`, which must all be finished.
    ///
    /// # Errors
    ///
    /// [`Error::Output`] that says which are not.
    pub fn of(folder: &OutputFolder, record: &Record, ranks: &[u32]) -> Result<Self> {
        let index = record.index.is_some().then(Index::default);
        let mut finished = Finished { index, ..Finished::default() };
        let mut missing = Vec::new();
        for index in record.files_of(ranks) {
            match receipt(folder, record, index)? {
                Some(receipt) => finished.add(&receipt),
                None => missing.push(&record.files[index]),
            }
        }
        let Some(first) = missing.first() else { return Ok(finished) };
        let mut of: Vec<String> = missing.iter().map(|file| file.rank.to_string()).collect();
        of.dedup();
        let all = missing.len() + finished.files;
        Err(Fault::new(format!("{} of {all} files are not finished, the first is '{}'", missing.len(), first.name))
            .file(folder.path())
            .expected("all files of all ranks")
            .remedy(format!("Run convert with --ranks {} --resume, then seal", of.join(",")))
            .output())
    }

    fn add(&mut self, Receipt { file, counted, .. }: &Receipt) {
        self.files += 1;
        self.tensors += file.tensors.len();
        self.bytes += file.bytes;
        self.counts.add(file, counted);
        self.worst.add(file);
        self.sums.push((file.name.clone(), file.blake3));
        self.index.iter_mut().for_each(|index| index.add(file));
    }
}

/// The receipt of a file that is finished and as long as it says.
fn receipt(folder: &OutputFolder, record: &Record, index: usize) -> Result<Option<Receipt>> {
    let receipt = folder.work().receipt(record, index)?;
    Ok(receipt.filter(|receipt| folder.finished_bytes(&receipt.file.name) == Some(receipt.file.bytes)))
}

/// Makes `folder` a checkpoint of `ranks`, whose files must all be finished. Their lengths are compared with what was
/// written; their bytes are those that a process of this conversion has hashed and synced. `accept` sees
/// what is in them first, and may refuse it. Gives that, and the BLAKE3 of the manifest.
///
/// # Errors
///
/// [`Error::Output`] that says which files are missing, and when files of other ranks are there, which nobody would
/// vouch for.
pub fn seal(
    folder: OutputFolder,
    record: &Record,
    ranks: &[u32],
    accept: impl FnOnce(&Finished) -> Result<()>,
) -> Result<(Finished, Digest)> {
    refuse_others(&folder, record, ranks)?;
    let mut finished = Finished::of(&folder, record, ranks)?;
    accept(&finished)?;
    let mut others = folder.work().others(record)?;
    if let Some((name, index)) = record.index.clone().zip(finished.index.take()) {
        others.push((name, index.into_bytes()?));
    }
    let entry = |(name, bytes): &(String, Vec<u8>)| OtherFile {
        name: name.clone(),
        bytes: bytes.len() as u64,
        blake3: Digest::of(bytes),
    };
    let listed = others.iter().map(entry).collect();
    let manifest = record.manifest(ranks.to_vec(), &finished.counts, listed, folder.work().source_digests(record)?);
    let digest = write_manifest(&folder, record, ranks, &manifest)?;
    let files = finished.sums.iter().cloned();
    let small = manifest.others.iter().map(|file| (file.name.clone(), file.blake3));
    let sums = Sums::new(files.chain(small), digest).to_text();
    let names: Vec<&str> = finished.sums.iter().map(|(name, _)| name.as_str()).collect();
    folder.commit(&names, &others, sums.as_bytes())?;
    Ok((finished, digest))
}

/// Writes the manifest under its partial name, receipt by receipt. Gives the digest of the file.
fn write_manifest(folder: &OutputFolder, record: &Record, ranks: &[u32], manifest: &Manifest) -> Result<Digest> {
    let file = folder.begin_manifest()?;
    let path = folder.path().join(filename::MANIFEST);
    let refused = |fault: Box<Fault>| fault.file(Path::new(filename::MANIFEST)).audit();
    let mut check = Check::begin(manifest).map_err(refused)?;
    let mut text = Text::begin(BufWriter::with_capacity(1 << 20, &file), &path, manifest)?;
    for index in record.files_of(ranks) {
        let gone = || Fault::new("a file was changed while the folder was sealed").file(&record.files[index].name);
        let receipt = receipt(folder, record, index)?.ok_or_else(|| gone().output())?;
        check.file(&receipt.file).map_err(refused)?;
        text.file(&receipt.file)?;
    }
    check.end().map_err(refused)?;
    let (mut written, digest, place) = text.end(&manifest.others)?;
    let io = |e| Error::io("write", &path, e);
    written.flush().map_err(io)?;
    file.write_all_at(digest.to_string().as_bytes(), place.start).map_err(io)?;
    file.sync_all().map_err(|e| Error::io("write to disk", &path, e))?;
    let bytes = file.metadata().map_err(io)?.len();
    Digest::of_file(&file, &path, bytes, 1, &|_| Ok(()))
}

/// The manifest of some ranks does not list the files of others: they may not lie in its folder.
fn refuse_others(folder: &OutputFolder, record: &Record, ranks: &[u32]) -> Result<()> {
    let other =
        record.files.iter().find(|file| !ranks.contains(&file.rank) && folder.finished_bytes(&file.name).is_some());
    let Some(other) = other else { return Ok(()) };
    Err(Fault::new(format!("the folder also holds '{}', of rank {}", other.name, other.rank))
        .file(folder.path())
        .expected(format!("files of ranks {ranks:?} only"))
        .remedy("Seal all ranks together, or make these in a folder of their own")
        .output())
}
