//! Sealing: from finished files, whoever made them, to a checkpoint.

use super::folder::OutputFolder;
use super::manifest::{Manifest, OtherFile};
use super::work::{Receipt, Record};
use super::{Digest, Sums, index};
use crate::error::{Fault, Result};

/// A sealed folder.
#[derive(Debug)]
pub struct Sealed {
    /// The manifest.
    pub manifest: Manifest,
    /// BLAKE3 of its bytes.
    pub digest: Digest,
}

/// Makes `folder` a checkpoint of `ranks`, whose files must all be finished. Their lengths are compared with what was
/// written; their bytes are those that a process of this conversion has hashed and synced.
///
/// # Errors
///
/// [`Error::Output`](crate::Error::Output) that says which files are missing, and when files of other ranks are there,
/// which nobody would vouch for.
pub fn seal(folder: OutputFolder, record: &Record, ranks: &[u32]) -> Result<Sealed> {
    refuse_others(&folder, record, ranks)?;
    let mut files = Vec::new();
    let mut missing = Vec::new();
    for index in record.files_of(ranks) {
        let expected = &record.files[index];
        let receipt = folder.work().receipt(record, index)?;
        match receipt.filter(|receipt| folder.finished_bytes(&expected.name) == Some(receipt.file.bytes)) {
            Some(Receipt { file, counted, .. }) => files.push((file, counted)),
            None => missing.push(expected),
        }
    }
    if let Some(first) = missing.first() {
        let mut of: Vec<String> = missing.iter().map(|file| file.rank.to_string()).collect();
        of.dedup();
        let all = missing.len() + files.len();
        return Err(Fault::new(format!(
            "{} of {all} files are not finished, the first is '{}'",
            missing.len(),
            first.name
        ))
        .file(folder.path())
        .expected("all files of all ranks")
        .remedy(format!("Run convert with --ranks {} --resume, then seal", of.join(",")))
        .output());
    }
    let mut others = folder.work().others(record)?;
    if let Some(name) = &record.index {
        others.push((name.clone(), index(files.iter().map(|(file, _)| file))?));
    }
    let entry = |(name, bytes): &(String, Vec<u8>)| OtherFile {
        name: name.clone(),
        bytes: bytes.len() as u64,
        blake3: Digest::of(bytes),
    };
    let listed = others.iter().map(entry).collect();
    let manifest = record.manifest(ranks.to_vec(), files, listed, folder.work().source_digests(record)?);
    let bytes = manifest.to_bytes()?;
    let sums = Sums::of(&manifest, &bytes).to_text();
    let names: Vec<&str> = manifest.files.iter().map(|f| f.name.as_str()).collect();
    folder.commit(&names, &others, sums.as_bytes(), &bytes)?;
    Ok(Sealed { digest: Digest::of(&bytes), manifest })
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
