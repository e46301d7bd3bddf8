//! Checking a written checkpoint against its manifest.
//!
//! ```text
//! ggshard.json ─► self-check ─┬─► folder: is every listed file there, and no other that a loader would pick up?
//!                             ├─► contents: size, header, BLAKE3 of the file and of each tensor, in one pass
//!                             ├─► B3SUMS: says the same
//!                             └─► model.safetensors.index.json: every tensor is in the file it names
//! ```
//!
//! A damaged manifest is an error, because nothing can be checked against it; every other difference is a [`Finding`],
//! and all of them are found in one run. Whoever can rewrite the manifest, `B3SUMS` and the files together can forge a
//! checkpoint that passes: against that, compare with the source or keep the manifest's digest elsewhere.
//!
//! [`verify_against`] goes further, after those checks:
//!
//! ```text
//! source GGUF ─► the same plan? ─► engine ─► every byte, and the header of every file
//! original checkpoint ─────────────────────► every value of every rank, at the place that the cut gives it
//! ```

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::{Fault, Result};
use crate::gguf::OpenOptions;
use crate::output::filename;
use crate::output::manifest::Manifest;
use crate::output::sums::Sums;

mod bytes;
mod contents;
mod index;
mod reference;
mod report;
mod source;

pub(crate) use contents::{Depth, check_files};
pub use report::{Distance, Finding, Report, Summary, What};

/// What to check, and with how many threads.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Check only the files that this rank loads; those of other ranks may be absent.
    pub rank: Option<u32>,
    /// Number of threads that read and hash; 0 for one per CPU.
    pub threads: usize,
    /// Set by whoever wants the check to stop: it ends with [`Error::Cancelled`](crate::Error::Cancelled) soon after.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// What a checkpoint is compared with, beside its own manifest.
#[derive(Debug, Clone, Copy, Default)]
pub struct Against<'a> {
    /// The GGUF that it was made from: every byte is made again and compared.
    pub source: Option<&'a Path>,
    /// How the source is opened.
    pub open: OpenOptions,
    /// The original checkpoint of the same model.
    pub reference: Option<Reference<'a>>,
}

/// An original checkpoint (Hugging Face safetensors) to compare values with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reference<'a> {
    /// Its folder.
    pub folder: &'a Path,
    /// The largest rms(checkpoint − reference) / rms(reference) of a tensor that passes; 0 asks for equal values.
    pub max_rms: f64,
}

/// How far a check has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A check begins that will read this many bytes of the checkpoint.
    Begin {
        /// Its name, as in [`Report::checks`].
        check: &'static str,
        /// Bytes that it will read.
        bytes: u64,
    },
    /// So many more bytes are done.
    Bytes(u64),
}

/// Checks the checkpoint in `dir` against its manifest.
///
/// # Errors
///
/// Those of [`Manifest::read`], [`Error::Checkpoint`](crate::Error::Checkpoint) for a rank that is not in the folder,
/// and [`Error::Io`](crate::Error::Io) when the folder cannot be listed. Differences are findings of the report, not
/// errors.
pub fn verify(dir: &Path, options: Options) -> Result<Report> {
    verify_against(dir, options, Against::default(), &|_| {})
}

/// Checks the checkpoint in `dir` against its manifest, then against a source, then against a reference, and tells
/// `progress` how far it is.
///
/// # Errors
///
/// Those of [`verify`]. A source or reference that cannot be read, a source that is not the one of the manifest, rules
/// that this version does not have, and a profile whose tensors are not those of an original checkpoint are errors too,
/// before anything is hashed.
pub fn verify_against(
    dir: &Path,
    options: Options,
    against: Against<'_>,
    progress: &(dyn Fn(Step) + Sync),
) -> Result<Report> {
    let (manifest, digest) = Manifest::read_with_digest(dir)?;
    let path = dir.join(filename::MANIFEST);
    if let Some(rank) = options.rank
        && manifest.topology.ranks.binary_search(&rank).is_err()
    {
        return Err(Fault::new(format!("rank {rank} is not in this folder"))
            .file(path)
            .expected(format!("one of {:?}, of {} ranks", manifest.topology.ranks, manifest.topology.tp))
            .checkpoint());
    }
    let source =
        against.source.map(|source| source::Source::open(source, against.open, &manifest, &path)).transpose()?;
    let reference = against.reference.map(|r| reference::Original::open(r, &manifest, &path)).transpose()?;
    let mut report = Report::new(options.rank);
    report.checks.push("folder".into());
    check_folder(dir, &manifest, &mut report)?;
    contents::check(dir, &manifest, &options, progress, &mut report)?;
    check_sums(dir, &Sums::of(&manifest, digest), &mut report);
    index::check(dir, &manifest, &mut report);
    if report.tensors == 0 {
        report.push(Finding::new(filename::MANIFEST, What::NothingChecked));
    }
    if let Some(source) = source {
        source.check(dir, &manifest, &options, progress, &mut report)?;
    }
    if let Some(reference) = reference {
        reference.check(dir, &manifest, &options, progress, &mut report)?;
    }
    Ok(report)
}

/// The files of which an earlier check has found that their bytes are not there.
fn absent(report: &Report) -> BTreeSet<String> {
    let gone = |what: What| matches!(what, What::Missing | What::Unreadable | What::Size);
    report.findings.iter().filter(|f| gone(f.what)).map(|f| f.file.clone()).collect()
}

/// Endings of files that a loader picks up by pattern, or that an unfinished conversion leaves behind.
const SUSPECT: [&str; 7] = [".safetensors", ".partial", ".done", ".safetensors.index.json", ".bin", ".pt", ".pth"];

/// Finds files that the manifest does not list. That listed ones are there is seen when they are opened.
fn check_folder(dir: &Path, manifest: &Manifest, report: &mut Report) -> Result<()> {
    let files = manifest.files.iter().map(|file| file.name.as_str());
    let listed: BTreeSet<&str> = files.chain(manifest.others.iter().map(|file| file.name.as_str())).collect();
    for name in list(dir)? {
        if !listed.contains(name.as_str()) && SUSPECT.iter().any(|ending| name.ends_with(ending)) {
            report.push(Finding::new(name, What::Extra));
        }
    }
    Ok(())
}

/// The files of `dir` and of its sub-folders, one level deep, sorted.
fn list(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let path = dir.join(&folder);
        let io = |e| crate::Error::io("list", &path, e);
        for entry in std::fs::read_dir(&path).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = std::fs::metadata(entry.path()).is_ok_and(|status| status.is_dir());
            if !is_folder {
                names.insert(if folder.is_empty() { name } else { format!("{folder}/{name}") });
            } else if folder.is_empty() {
                folders.push(name);
            }
        }
    }
    Ok(names)
}

fn check_sums(dir: &Path, expected: &Sums, report: &mut Report) {
    let found = match Sums::read(dir) {
        Ok(sums) => sums,
        Err(crate::Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return report.push(Finding::new(filename::SUMS, What::Missing));
        }
        Err(e) => return report.push(Finding::new(filename::SUMS, What::Sums).found(e.fault().to_string())),
    };
    let line = |sums: &Sums, name: &str| {
        let at = sums.entries().binary_search_by(|(listed, _)| listed.as_str().cmp(name));
        at.ok().map(|at| format!("{}  {name}", sums.entries()[at].1))
    };
    let names: BTreeSet<&str> =
        expected.entries().iter().chain(found.entries()).map(|(name, _)| name.as_str()).collect();
    for name in names {
        let (expected, found) = (line(expected, name), line(&found, name));
        if expected != found {
            let nothing = || format!("no line for '{name}'");
            report.push(
                Finding::new(filename::SUMS, What::Sums)
                    .expected(expected.unwrap_or_else(nothing))
                    .found(found.unwrap_or_else(nothing)),
            );
        }
    }
}
