//! A conversion, from a plan to finished files, and sealing them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Extras, Planned, metadata, record};
use crate::engine::{self, Engine, Observer, Outcome};
use crate::error::{Error, Fault, Result};
use crate::output::file::direct_is_fast;
use crate::output::folder::{Claim, Claimed};
use crate::output::manifest::{Manifest, Topology};
use crate::output::seal::Finished;
use crate::output::work::{Counts, Record, Work};
use crate::output::{Digest, OutputFolder, SourceHasher, Worst, Writer, space};
use crate::plan::{Plan, PlannedFile};
use crate::threads;

/// Room that is left for the small files when free space is checked.
const SPARE_BYTES: u64 = 16 << 20;
/// Room that is left for what receipts and the manifest say of a tensor.
const SPARE_BYTES_PER_TENSOR: u64 = 512;

/// Where a conversion goes, and what becomes of it there.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// The folder. It is created, or must be empty, unless work in it goes on.
    pub folder: &'a Path,
    /// Go on with what an earlier run began in the folder, if one did: files that are finished, and whose bytes are still
    /// those that were written, are not made again.
    pub resume: bool,
    /// If it ends early, keep the files that are finished. Otherwise nothing remains.
    pub keep: bool,
    /// The source may be a copy of the one that the conversion began with.
    pub same_source: bool,
    /// Whether the folder becomes a checkpoint at the end; if not, [`seal`] makes it one when other processes have made
    /// the other ranks. By default, if all ranks are made here.
    pub seal: Option<bool>,
    /// Whether files are written past the page cache.
    pub direct: Direct,
    /// Whether the BLAKE3 of every part of the source is recorded, for which all of it is read.
    pub hash_source: bool,
    /// The largest relative RMS error of an encoded tensor with which the conversion ends well.
    pub max_error: Option<f64>,
}

/// Whether files are written past the page cache (`O_DIRECT`).
///
/// Workers wait for the disk then. So there are four per CPU, up to 32, unless their number was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// From 1 GiB of output on, on file systems where it was measured to be at least as fast (ext4), unless a number of
    /// threads was chosen.
    #[default]
    Auto,
    /// Wherever the file system knows how.
    On,
    /// Never.
    Off,
}

impl Direct {
    /// Output from which on it may be worth it.
    const SMALLEST: u64 = 1 << 30;
    const WORKERS_PER_CPU: usize = 4;
    const MOST_WORKERS: usize = 32;

    /// Whether it is done for `bytes` of output in a folder, by so many threads (0 if that was not chosen); and the number
    /// of workers.
    fn decide(self, folder: &Path, bytes: u64, threads: usize) -> (bool, usize) {
        let direct = match self {
            Direct::Auto => threads == 0 && bytes >= Self::SMALLEST && direct_is_fast(folder),
            Direct::On => true,
            Direct::Off => false,
        };
        let cpus = threads::count(0);
        match threads {
            0 if direct => (direct, cpus.max((cpus * Self::WORKERS_PER_CPU).min(Self::MOST_WORKERS))),
            chosen => (direct, chosen),
        }
    }
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for Output<'a> {
    fn from(folder: &'a P) -> Self {
        Output {
            folder: folder.as_ref(),
            resume: false,
            keep: false,
            same_source: false,
            seal: None,
            direct: Direct::Auto,
            hash_source: false,
            max_error: None,
        }
    }
}

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The output folder as given.
    pub output: PathBuf,
    /// Safetensors files of the ranks that were asked for.
    pub files: usize,
    /// How many of them an earlier run had finished.
    pub kept_files: usize,
    /// Tensors in the files, over all ranks.
    pub tensors: usize,
    /// Bytes of the files.
    pub output_bytes: u64,
    /// Source bytes that were fetched.
    pub source_bytes: u64,
    /// Of them, fetched more than once; only if it was tracked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeated_bytes: Option<u64>,
    /// Values that are not finite, by parameter: NaN, infinite, overflowed.
    pub nonfinite: BTreeMap<String, (u64, u64, u64)>,
    /// The encoded tensors that are furthest from the decoded source.
    pub worst: Worst,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// Whether the folder is a checkpoint now. If not, other ranks or the sealing are yet to come.
    pub sealed: bool,
    /// BLAKE3 of the manifest, if it is there.
    pub manifest_blake3: Option<String>,
}

/// Executes a plan into a folder. `extras` go beside the weights. `progress` is told of tensor bytes done.
///
/// # Errors
///
/// Those of the source and the plan; [`Error::Output`] when the folder cannot be used: not empty, another conversion's,
/// in use by another process, too little space; [`Error::Io`]. After any of them the folder is no checkpoint.
pub fn convert<'o>(
    planned: &Planned,
    output: impl Into<Output<'o>>,
    options: engine::Options,
    extras: &Extras,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Report> {
    let output = output.into();
    let Output { folder: path, resume, keep, same_source, seal, max_error, .. } = output;
    let Planned { set, plan, .. } = planned;
    let ranks = ranks(plan, &options)?;
    let record = record::record(planned, extras, options.allow_nonfinite)?;
    let sources: Vec<&Path> = set.parts().iter().map(|p| p.path()).collect();
    let claim =
        Claim { ranks: &ranks, record: &record, others: &extras.files, sources: &sources, resume, keep, same_source };
    let folder = match OutputFolder::claim(path, &claim)? {
        Claimed::Open(folder) => folder,
        Claimed::Sealed(manifest, digest) => return Ok(Report::of_sealed(path, &ranks, &manifest, digest)),
    };
    let job = Job { planned, folder: &folder, record: &record, ranks: &ranks, output, options: &options, progress };
    let (outcome, kept_files) = job.run().inspect_err(|error| {
        if !can_be_resumed(error) {
            folder.set_keep(false);
        }
    })?;
    let (source_bytes, repeated_bytes) = (outcome.reads.bytes(), outcome.reads.repeated());
    let report = |finished: Finished, manifest: Option<Digest>| Report {
        output: path.to_path_buf(),
        files: finished.files,
        kept_files,
        tensors: finished.tensors,
        output_bytes: finished.bytes,
        source_bytes,
        repeated_bytes,
        nonfinite: finished.counts.by_name(),
        worst: finished.worst,
        warnings: record.warnings.clone(),
        sealed: manifest.is_some(),
        manifest_blake3: manifest.map(|digest| digest.to_string()),
    };
    let accept = |finished: &Finished| match max_error {
        Some(most) => check_error(path, &finished.worst, most),
        None => Ok(()),
    };
    if seal.unwrap_or(ranks.len() == plan.tp as usize) {
        let (finished, digest) = crate::output::seal::seal(*folder, &record, &ranks, accept)?;
        return Ok(report(finished, Some(digest)));
    }
    let finished = Finished::of(&folder, &record, &ranks)?;
    accept(&finished)?;
    folder.set_keep(true);
    Ok(report(finished, None))
}

/// Refuses a conversion of which some tensor is further from the source than `most`. Its files stay, where they would.
fn check_error(path: &Path, worst: &Worst, most: f64) -> Result<()> {
    match worst.tensors().first().filter(|first| first.deviation.relative_rms > most) {
        None => Ok(()),
        Some(first) => Err(Fault::new(format!("a relative RMS error of {}", first.deviation.relative_rms))
            .file(path.join(&first.file))
            .tensor(&first.tensor)
            .expected(format!("at most {most}"))
            .remedy("Allow more with --max-error, or give the weight another form by a policy")
            .output()),
    }
}

/// Whether it makes sense to go on where this error ended a conversion. After the others, the same would happen again.
fn can_be_resumed(error: &Error) -> bool {
    match error {
        Error::Io { .. } | Error::Truncated(_) | Error::Output(_) | Error::Device(_) | Error::Cancelled(_) => true,
        Error::Container(_)
        | Error::Unsupported(_)
        | Error::Split(_)
        | Error::Rules(_)
        | Error::NoMapping(_)
        | Error::MissingTensor(_)
        | Error::UnknownTensor(_)
        | Error::Contradiction(_)
        | Error::Layout(_)
        | Error::Audit(_)
        | Error::Nonfinite(_)
        | Error::Checkpoint(_) => false,
    }
}

/// The making of files.
struct Job<'a> {
    planned: &'a Planned,
    folder: &'a OutputFolder,
    record: &'a Record,
    ranks: &'a [u32],
    output: Output<'a>,
    options: &'a engine::Options,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl Job<'_> {
    /// Makes the files that are not finished. Gives what the engine saw, and how many files were.
    fn run(&self) -> Result<(Outcome, usize)> {
        let Job { planned: Planned { set, plan, .. }, folder, record, ranks, output, options, progress } = *self;
        let each = |_| options.check_cancel();
        let finished = if output.resume { folder.finished(record, ranks, options.threads, &each)? } else { Vec::new() };
        let finished: BTreeSet<usize> = finished.into_iter().map(|(index, _)| index).collect();
        let wanted: BTreeSet<usize> = record.files_of(ranks).filter(|index| !finished.contains(index)).collect();
        progress(finished.iter().map(|index| plan.files[*index].data_bytes).sum());
        check_space(folder.path(), plan, &wanted)?;
        let bytes = wanted.iter().map(|index| plan.files[*index].data_bytes).sum();
        let (direct, threads) = output.direct.decide(folder.path(), bytes, options.threads);
        let writer = Writer::new(plan, folder, &wanted, metadata(env!("CARGO_PKG_VERSION")), direct)?;
        let skip = finished.iter().map(|index| *index as u32).collect();
        let hasher = output.hash_source.then(|| SourceHasher::new(set));
        let observer = hasher.as_ref().map(|hasher| hasher as &dyn Observer);
        let engine = Engine::new(plan, set, engine::Options { skip, threads, ..options.clone() }).observed(observer);
        let outcome = engine.run(&writer, progress)?;
        writer.finish()?;
        if let Some(hasher) = hasher {
            let digests = hasher.finish(options.threads, options.cancel.as_deref())?;
            folder.work().write_source_digests(record, &digests)?;
        }
        self.check_source()?;
        options.check_cancel()?;
        Ok((outcome, finished.len()))
    }

    /// The source's files are those that they were when the conversion began.
    fn check_source(&self) -> Result<()> {
        for (part, then) in self.planned.set.parts().iter().zip(&self.record.marks) {
            if part.mark()? != *then {
                return Err(Fault::new("the file was changed or replaced while it was read")
                    .file(part.path())
                    .remedy("Convert again when nobody writes to it")
                    .contradiction());
            }
        }
        Ok(())
    }
}

impl Report {
    /// The report of a conversion that an earlier run had finished.
    fn of_sealed(path: &Path, ranks: &[u32], manifest: &Manifest, digest: Digest) -> Report {
        let of_ranks = || manifest.files.iter().filter(|file| file.rank.is_none_or(|rank| ranks.contains(&rank)));
        Report {
            output: path.to_path_buf(),
            files: of_ranks().count(),
            kept_files: of_ranks().count(),
            tensors: of_ranks().map(|file| file.tensors.len()).sum(),
            output_bytes: of_ranks().map(|file| file.bytes).sum(),
            source_bytes: 0,
            repeated_bytes: None,
            nonfinite: Counts::of(&manifest.parameters).by_name(),
            worst: of_ranks().fold(Worst::default(), |mut worst, file| {
                worst.add(file);
                worst
            }),
            warnings: manifest.warnings.clone(),
            sealed: true,
            manifest_blake3: Some(digest.to_string()),
        }
    }
}

/// What sealing a folder gave.
#[derive(Debug, Clone, Serialize)]
pub struct Sealed {
    /// The folder as given.
    pub output: PathBuf,
    /// The ranks in it.
    pub ranks: Vec<u32>,
    /// Number of tensor-parallel ranks of the model.
    pub tp: u32,
    /// Safetensors files.
    pub files: usize,
    /// Bytes of them.
    pub output_bytes: u64,
    /// Whether the folder was sealed before.
    pub already: bool,
    /// BLAKE3 of the manifest.
    pub manifest_blake3: String,
}

/// Makes a folder into which processes have converted ranks a checkpoint: checks that every file of `ranks` (all of the
/// model, if empty) is finished, and writes the small files and the manifest. A folder that is sealed stays as it is.
///
/// # Errors
///
/// [`Error::Output`] when files are missing (it says which), a process is still at work, or nothing was converted here.
pub fn seal(path: &Path, ranks: &[u32]) -> Result<Sealed> {
    if path.join(super::MANIFEST).is_file() {
        let (manifest, digest) = Manifest::read_with_digest(path)?;
        let Topology { tp, ranks: sealed, .. } = manifest.topology;
        if !ranks.is_empty() && ranks != sealed {
            return Err(Fault::new(format!("the folder is sealed with ranks {sealed:?}"))
                .file(path)
                .expected(format!("ranks {ranks:?}"))
                .output());
        }
        Work::remove_remains(path)?;
        return Ok(Sealed {
            output: path.to_path_buf(),
            ranks: sealed,
            tp,
            files: manifest.files.len(),
            output_bytes: manifest.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add),
            already: true,
            manifest_blake3: digest.to_string(),
        });
    }
    let record = Work::record_in(path)?.ok_or_else(|| {
        let fault = Fault::new("no conversion has begun in this folder").file(path);
        fault.remedy("Name the folder that convert was given").output()
    })?;
    let tp = record.topology.tp;
    let ranks: Vec<u32> = if ranks.is_empty() { (0..tp).collect() } else { ranks.to_vec() };
    check_ranks(&ranks, tp)?;
    let folder = OutputFolder::claim_begun(path, &ranks, &record)?;
    let (finished, digest) = crate::output::seal::seal(folder, &record, &ranks, |_| Ok(()))?;
    Ok(Sealed {
        output: path.to_path_buf(),
        ranks,
        tp,
        files: finished.files,
        output_bytes: finished.bytes,
        already: false,
        manifest_blake3: digest.to_string(),
    })
}

fn ranks(plan: &Plan, options: &engine::Options) -> Result<Vec<u32>> {
    let mut ranks: Vec<u32> = if options.ranks.is_empty() { (0..plan.tp).collect() } else { options.ranks.clone() };
    ranks.sort_unstable();
    ranks.dedup();
    check_ranks(&ranks, plan.tp)?;
    Ok(ranks)
}

fn check_ranks(ranks: &[u32], tp: u32) -> Result<()> {
    if let Some(beyond) = ranks.iter().find(|rank| **rank >= tp) {
        let fault = Fault::new(format!("--ranks names rank {beyond} of {tp}"));
        return Err(fault.expected(format!("ranks 0 to {}", tp - 1)).layout());
    }
    Ok(())
}

fn check_space(output: &Path, plan: &Plan, wanted: &BTreeSet<usize>) -> Result<()> {
    let room = |file: &PlannedFile| file.data_bytes + SPARE_BYTES_PER_TENSOR * file.params.len() as u64;
    let needed = wanted.iter().map(|index| room(&plan.files[*index])).sum::<u64>() + SPARE_BYTES;
    let free = space::free_bytes(output)?;
    if free < needed {
        return Err(Fault::new(format!("{free} bytes are free"))
            .file(output)
            .expected(format!("{needed} bytes for {} files", wanted.len()))
            .remedy("Free some space, choose another disk, or convert some ranks at a time with --ranks")
            .output());
    }
    Ok(())
}
