//! Comparing a checkpoint with the original one of the same model, value by value.
//!
//! Nothing is joined: the cut of a parameter says which rectangle of the whole tensor a rank holds, so each rank's tensor is
//! streamed beside the rectangle of the reference, chunk by chunk.
//!
//! ```text
//!   column: rows of axis 0       row: columns of the last axis      vocab: rows, then rows of zeros
//!   ┌─────────┐                  ┌────┬────┐                        ┌─────────┐
//!   │ rank 0  │                  │ 0  │ 1  │                        │ rank 0  │
//!   ├─────────┤                  │    │    │                        ├─────────┤
//!   │ rank 1  │                  │    │    │                        │ rank 1  │
//!   └─────────┘                  └────┴────┘                        └ 0 0 0 0 ┘
//! ```
//!
//! Threads take whole parameters, so sums are added in one order and the result does not depend on their number.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::report::REFERENCE;
use super::{Distance, Finding, Options, Report, Step, Summary, What};
use crate::engine::check_cancel;
use crate::error::{Error, Fault, Result};
use crate::output::manifest::{FileEntry, Manifest, Parameter, TensorEntry};
use crate::regular;
use crate::threads::{into_inner, lock, on_threads};

mod original;
mod place;
mod values;

pub(super) use original::Original;
use original::Stored;
use place::{Place, place};
use values::{Comparison, Tally};

/// Elements that are compared at a time.
const CHUNK: u64 = 128 << 10;
/// How many of the largest differences the summary names.
const WORST: usize = 10;

/// A parameter that both sides hold in comparable types, and every different share of it.
struct Task<'a> {
    parameter: &'a Parameter,
    stored: &'a Stored,
    comparison: Comparison,
    shares: Vec<Share<'a>>,
    /// Some rank's share has no place in the whole.
    unplaced: bool,
}

/// What one file holds of a parameter.
struct Share<'a> {
    file: &'a FileEntry,
    tensor: &'a TensorEntry,
    place: Place,
}

/// What became of a task.
#[derive(Default)]
struct Compared {
    tally: Tally,
    /// Not every share could be read.
    partial: bool,
    findings: Vec<Finding>,
}

impl Original {
    /// Compares every value of the ranks that `options` asks for and adds to `report`.
    pub fn check(
        &self,
        dir: &Path,
        manifest: &Manifest,
        options: &Options,
        progress: &(dyn Fn(Step) + Sync),
        report: &mut Report,
    ) -> Result<()> {
        let (tasks, findings) = self.tasks(manifest, options);
        report.findings.extend(findings);
        let extra = self.extra(manifest);
        let shares = tasks.iter().flat_map(|task| &task.shares);
        let bytes = shares.map(|share| share.tensor.offsets.1 - share.tensor.offsets.0).fold(0, u64::saturating_add);
        progress(Step::Begin { check: REFERENCE, bytes });
        let absent = super::absent(report);
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let done: Mutex<Vec<(usize, Result<Compared>)>> = Mutex::default();
        on_threads(options.threads, || {
            let mut worker =
                Worker { dir, original: self, absent: &absent, progress, ours: Vec::new(), theirs: Vec::new() };
            while !failed.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(task) = tasks.get(index) else { return };
                let result = check_cancel(options.cancel.as_deref()).and_then(|()| worker.compare(task));
                if result.is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
                lock(&done).push((index, result));
            }
        });
        let mut done = into_inner(done);
        done.sort_by_key(|(index, _)| *index);
        let mut summary = Summary { max_rms: self.max_rms, ..Summary::default() };
        let mut distances: Vec<(f64, &str)> = Vec::new();
        for (index, result) in done {
            let (Compared { tally, partial, findings }, task) = (result?, &tasks[index]);
            let rms = tally.relative_rms();
            if !partial {
                summary.tensors += 1;
                summary.exact += u64::from(tally.unequal == 0);
            }
            summary.values += tally.values;
            summary.unequal += tally.unequal;
            if tally.unequal > 0 {
                distances.push((rms, &task.parameter.name));
            }
            report.findings.extend(findings);
            // Not `rms > max_rms`: what is no number does not pass.
            let passes = tally.unequal == 0 || rms <= self.max_rms;
            if !passes {
                report.push(self.too_far(task, &tally, rms));
            }
        }
        // Last, since there may be many: a block that the GGUF does not hold is a hundred tensors.
        report.findings.extend(extra);
        distances.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
        summary.worst = distances
            .iter()
            .take(WORST)
            .map(|(rms, name)| Distance { tensor: (*name).to_owned(), relative_rms: rms.is_finite().then_some(*rms) })
            .collect();
        report.reference = Some(summary);
        report.checks.push(REFERENCE.into());
        Ok(())
    }

    fn too_far(&self, task: &Task<'_>, tally: &Tally, rms: f64) -> Finding {
        // The file that holds the first value that differs.
        let holder = tally.first.as_ref().map_or(0, |first| first.share);
        let file = task.shares.get(holder).map_or("", |share| share.file.name.as_str());
        let mut finding = Finding::new(file, What::ReferenceValues).tensor(&task.parameter.name);
        finding = finding.expected(match self.max_rms {
            0.0 => "equal values".to_owned(),
            max => format!("a relative RMS difference of at most {max}"),
        });
        let size = if rms.is_finite() { format!("{rms:.6e}") } else { "not finite".to_owned() };
        let mut found = format!("{size}, {} of {} values differ", tally.unequal, tally.values);
        if let Some(first) = &tally.first {
            let place = index_of(first.element, &task.parameter.shape);
            found.push_str(&format!(", the first is {} instead of {} at {place:?}", first.ours, first.theirs));
        }
        finding.found(found)
    }

    /// What can be compared, and what cannot.
    fn tasks<'a>(&'a self, manifest: &'a Manifest, options: &Options) -> (Vec<Task<'a>>, Vec<Finding>) {
        let mut holders: HashMap<&str, Vec<(&FileEntry, &TensorEntry)>> = HashMap::new();
        let wanted = |file: &&FileEntry| options.rank.is_none() || file.rank.is_none() || file.rank == options.rank;
        for file in manifest.files.iter().filter(wanted) {
            for tensor in &file.tensors {
                holders.entry(&tensor.name).or_default().push((file, tensor));
            }
        }
        let (mut tasks, mut findings) = (Vec::new(), Vec::new());
        for parameter in &manifest.parameters {
            let stored = self.tensors.get(&parameter.name);
            let Some(holders) = holders.get(parameter.name.as_str()) else { continue };
            let finding = |file: &FileEntry, what| Finding::new(&file.name, what).tensor(&parameter.name);
            let first = holders[0].0;
            let Some(stored) = stored else {
                findings.push(finding(first, What::ReferenceLacks));
                continue;
            };
            if stored.shape != parameter.shape {
                let text = |shape: &[u64]| format!("{shape:?}");
                let finding = finding(first, What::ReferenceShape).expected(text(&stored.shape));
                findings.push(finding.found(text(&parameter.shape)));
                continue;
            }
            let Some(comparison) = Comparison::between(parameter.dtype, stored.dtype) else {
                let finding = finding(first, What::NotComparable).expected(stored.dtype);
                findings.push(finding.found(parameter.dtype));
                continue;
            };
            let (mut shares, mut places): (Vec<Share<'_>>, HashMap<Place, usize>) = Default::default();
            let mut unplaced = false;
            for (file, tensor) in holders {
                let rank = file.rank.map(u64::from).filter(|_| manifest.topology.tp > 1);
                let tp = u64::from(manifest.topology.tp);
                match place(&parameter.cut, &parameter.shape, &tensor.shape, tp, rank, self.vocab_pad) {
                    Err(why) => {
                        unplaced = true;
                        findings.push(finding(file, What::ReferenceShape).found(why));
                    }
                    // Equal shares are compared once. That their bytes are those of the digest, the folder's check says.
                    Ok(place) => match places.get(&place).map(|at: &usize| &shares[*at]) {
                        Some(same) if same.tensor.blake3 != tensor.blake3 => {
                            let expected = format!("{}, as in '{}'", same.tensor.blake3, same.file.name);
                            findings.push(finding(file, What::Replica).expected(expected).found(tensor.blake3));
                        }
                        Some(_) => {}
                        None => {
                            places.insert(place.clone(), shares.len());
                            shares.push(Share { file, tensor, place });
                        }
                    },
                }
            }
            tasks.push(Task { parameter, stored, comparison, shares, unplaced });
        }
        (tasks, findings)
    }

    /// Tensors of the reference that are no parameter of the checkpoint.
    fn extra(&self, manifest: &Manifest) -> Vec<Finding> {
        let parameters: HashSet<&str> = manifest.parameters.iter().map(|p| p.name.as_str()).collect();
        let extra = self.tensors.iter().filter(|(name, _)| !parameters.contains(name.as_str()));
        let finding = |(name, stored): (&String, &Stored)| {
            let file = self.files[stored.file].file_name().unwrap_or_default().to_string_lossy().into_owned();
            Finding::new(file, What::ReferenceExtra)
                .tensor(name)
                .expected(format!("{} {:?}", stored.dtype, stored.shape))
        };
        extra.map(finding).collect()
    }
}

/// One thread, with the buffers that it keeps.
struct Worker<'a> {
    dir: &'a Path,
    original: &'a Original,
    absent: &'a BTreeSet<String>,
    progress: &'a (dyn Fn(Step) + Sync),
    ours: Vec<u8>,
    theirs: Vec<u8>,
}

impl Worker<'_> {
    fn compare(&mut self, task: &Task<'_>) -> Result<Compared> {
        // A share without a place is a finding already.
        let mut result = Compared { partial: task.unplaced, ..Compared::default() };
        let path = &self.original.files[task.stored.file];
        let (theirs, _) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
        for (number, share) in task.shares.iter().enumerate() {
            // Reported already: its bytes are not there.
            if self.absent.contains(&share.file.name) {
                result.partial = true;
                continue;
            }
            if let Err(failure) = self.compare_share(task, number, share, &theirs, &mut result) {
                match failure {
                    Failure::Ours(error) => {
                        result.partial = true;
                        let finding = Finding::new(&share.file.name, What::Unreadable).tensor(&share.tensor.name);
                        result.findings.push(finding.found(error));
                    }
                    Failure::Theirs(error) => return Err(Error::io("read", path, error)),
                }
            }
        }
        Ok(result)
    }

    fn compare_share(
        &mut self,
        task: &Task<'_>,
        number: usize,
        share: &Share<'_>,
        theirs: &File,
        result: &mut Compared,
    ) -> std::result::Result<(), Failure> {
        let (ours, _) = regular::open(&self.dir.join(&share.file.name)).map_err(Failure::Ours)?;
        let (width, their_width) = (task.parameter.dtype.bytes(), task.stored.dtype.bytes());
        let mut at = share.file.header_bytes + share.tensor.offsets.0;
        let mut runs = share.place.runs();
        let mut run = 0..0;
        loop {
            // As many runs of the reference as make a chunk, beside one run of ours.
            self.theirs.clear();
            let mut chunk: Vec<(u64, u64)> = Vec::new();
            let mut elements = 0;
            while elements < CHUNK {
                if run.is_empty() {
                    match runs.next() {
                        Some(next) => run = next,
                        None => break,
                    }
                    continue;
                }
                let taken = (run.end - run.start).min(CHUNK - elements);
                let filled = self.theirs.len();
                self.theirs.resize(filled + (taken * their_width) as usize, 0);
                let from = task.stored.at + run.start * their_width;
                theirs.read_exact_at(&mut self.theirs[filled..], from).map_err(Failure::Theirs)?;
                chunk.push((elements, run.start));
                run.start += taken;
                elements += taken;
            }
            if elements == 0 {
                break;
            }
            self.ours.resize((elements * width) as usize, 0);
            ours.read_exact_at(&mut self.ours, at).map_err(Failure::Ours)?;
            at += elements * width;
            let element = |i: u64| {
                let run = chunk.partition_point(|(first, _)| *first <= i) - 1;
                chunk[run].1 + (i - chunk[run].0)
            };
            result.tally.add(task.comparison, &self.ours, &self.theirs, number, &element);
            (self.progress)(Step::Bytes(elements * width));
        }
        let end = share.file.header_bytes + share.tensor.offsets.1;
        let padding = at;
        while at < end {
            let read = (end - at).min(CHUNK);
            self.ours.resize(read as usize, 0);
            ours.read_exact_at(&mut self.ours, at).map_err(Failure::Ours)?;
            if let Some(i) = self.ours.iter().position(|byte| *byte != 0) {
                let row = (at + i as u64 - padding) / (width * share.place.width.max(1));
                let finding = Finding::new(&share.file.name, What::Padding).tensor(&share.tensor.name);
                let place = share.place.rows.end - share.place.rows.start + row;
                result.findings.push(finding.found(format!("{:#04x} in row {place} of this file", self.ours[i])));
                (self.progress)(Step::Bytes(end - at));
                break;
            }
            at += read;
            (self.progress)(Step::Bytes(read));
        }
        Ok(())
    }
}

enum Failure {
    Ours(std::io::Error),
    Theirs(std::io::Error),
}

/// The indices of an element of a row-major tensor.
fn index_of(mut element: u64, shape: &[u64]) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for (i, dim) in shape.iter().enumerate().rev() {
        index[i] = element % (*dim).max(1);
        element /= (*dim).max(1);
    }
    index
}

/// Checks that `manifest` has the tensors of an original checkpoint, and gives its padding of the vocabulary.
fn vocab_pad(manifest: &Manifest, path: &Path) -> Result<u64> {
    if manifest.profile.name != "hf" {
        return Err(Fault::new(format!("a folder of profile '{}'", manifest.profile.name))
            .file(path)
            .key("profile")
            .expected("profile 'hf': only its tensors have the names and shapes of an original checkpoint")
            .remedy("Convert with --profile hf to compare with --reference; --source works for every profile")
            .checkpoint());
    }
    super::source::recorded_profile(manifest).map(|profile| profile.rules.vocab.multiple)
}

/// Whether an error says that there is no such file.
fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}
