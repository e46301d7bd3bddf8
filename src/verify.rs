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

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Fault, Result};
use crate::output::filename;
use crate::output::manifest::Manifest;
use crate::output::sums::Sums;

mod contents;
mod index;
mod report;

pub use report::{Finding, Report, What};

/// What to check, and with how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Check only the files that this rank loads; those of other ranks may be absent.
    pub rank: Option<u32>,
    /// Number of threads that read and hash; 0 for one per CPU.
    pub threads: usize,
}

/// Checks the checkpoint in `dir` against its manifest.
///
/// # Errors
///
/// Those of [`Manifest::read`], [`Error::Checkpoint`](crate::Error::Checkpoint) for a rank that is not in the folder,
/// and [`Error::Io`](crate::Error::Io) when the folder cannot be listed. Differences are findings of the report, not
/// errors.
pub fn verify(dir: &Path, options: Options) -> Result<Report> {
    let (bytes, path) = Manifest::read_bytes(dir)?;
    let manifest = Manifest::parse(&bytes, &path)?;
    if let Some(rank) = options.rank
        && manifest.topology.ranks.binary_search(&rank).is_err()
    {
        return Err(Fault::new(format!("rank {rank} is not in this folder"))
            .file(path)
            .expected(format!("one of {:?}, of {} ranks", manifest.topology.ranks, manifest.topology.tp))
            .checkpoint());
    }
    let mut report = Report::new(options.rank);
    report.checks.push("folder".into());
    check_folder(dir, &manifest, &mut report)?;
    contents::check(dir, &manifest, options, &mut report)?;
    check_sums(dir, &Sums::of(&manifest, &bytes), &mut report);
    index::check(dir, &manifest, &mut report);
    if report.tensors == 0 {
        report.push(Finding::new(filename::MANIFEST, What::NothingChecked));
    }
    Ok(report)
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
