//! Looking at every value of a source: what a corrupt download shows before an hour of conversion.
//!
//! Needs no mapping and no known architecture. Threads take runs of blocks from one queue, part after part in the order
//! of the file, so a disk sees one sequential pass; each run is decoded into the thread's own buffer and counted there.

use std::fmt::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::Serialize;

use crate::dequant::{Dequantizer, FloatType, Simd};
use crate::engine::{Observer, check_cancel};
use crate::error::{Error, Fault, Result};
use crate::gguf::{Advice, GgufSet, SourceTensor};
use crate::output::{Digest, SourceHasher};
use crate::threads::{into_inner, lock, on_threads};

/// Values that a thread decodes at a time: 1 MiB of `f32`.
const RUN: u64 = 256 << 10;
/// How many bytes of a part are requested ahead of the threads.
const AHEAD: u64 = 64 << 20;

/// What to look at, and with how many threads.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Also give the BLAKE3 of every part, in the same pass.
    pub hash: bool,
    /// Number of threads; 0 for one per CPU.
    pub threads: usize,
    /// Set by whoever wants the check to stop: it ends with [`Error::Cancelled`] soon after.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The files, in order.
    pub parts: Vec<PartReport>,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<TensorReport>,
}

/// One file.
#[derive(Debug, Clone, Serialize)]
pub struct PartReport {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Its BLAKE3, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Digest>,
}

/// One tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Its ggml type.
    pub ty: &'static str,
    /// Number of values.
    pub elements: u64,
    /// Whether its values were looked at: whether its type has a decoder.
    pub checked: bool,
    /// Values that are NaN.
    pub nan: u64,
    /// Values that are infinite.
    pub inf: u64,
    /// Whether there are values, and all are zero, of either sign.
    pub zero: bool,
}

impl Report {
    /// Whether every value that could be looked at is finite. A tensor of zeros is suspicious, but some models have one.
    pub fn ok(&self) -> bool {
        self.tensors.iter().all(|t| t.nan == 0 && t.inf == 0)
    }

    /// What was found as text, ending in a newline: a summary, every tensor with a finding, and digests in the form of
    /// `b3sum`. Control characters from the file are escaped.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let checked = || self.tensors.iter().filter(|t| t.checked);
        let sum = |of: fn(&TensorReport) -> u64| checked().map(of).sum::<u64>();
        let (values, nan, inf) = (sum(|t| t.elements), sum(|t| t.nan), sum(|t| t.inf));
        let zero = checked().filter(|t| t.zero).count();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "checked    {} of {} tensors, {values} values: {nan} NaN, {inf} infinite; {zero} tensors all zero",
            checked().count(),
            self.tensors.len()
        );
        for tensor in &self.tensors {
            let TensorReport { name, ty, elements, checked, nan, inf, zero } = tensor;
            let name = name.escape_debug();
            let _ = match (checked, nan + inf, zero) {
                (false, _, _) => writeln!(out, "unchecked  {name} ({ty}): the type has no decoder"),
                (true, 1.., _) => {
                    writeln!(out, "not finite {name} ({ty}): {nan} NaN, {inf} infinite of {elements} values")
                }
                (true, 0, true) => writeln!(out, "all zero   {name} ({ty}): {elements} values"),
                (true, 0, false) => Ok(()),
            };
        }
        for part in &self.parts {
            if let Some(digest) = part.blake3 {
                let name = part.path.file_name().unwrap_or(part.path.as_os_str()).to_string_lossy();
                let _ = writeln!(out, "{digest}  {}", name.escape_debug());
            }
        }
        out
    }
}

/// How many bytes [`check`] tells its progress of.
pub fn bytes(set: &GgufSet) -> u64 {
    set.tensors().iter().filter(|t| Dequantizer::new(t.ty, Simd::Baseline).is_some()).map(|t| t.bytes).sum()
}

/// Looks at every value of every tensor. `progress` is told of bytes of tensors done.
///
/// # Errors
///
/// Those of reading the source, and [`Error::Cancelled`]. What is wrong with values is in the report.
pub fn check(set: &GgufSet, options: &Options, progress: &(dyn Fn(u64) + Sync)) -> Result<Report> {
    if set.header_only() {
        let fault = Fault::new("the set was opened for its headers only").file(set.path());
        return Err(fault.expected("files with their data").unsupported());
    }
    let hasher = options.hash.then(|| SourceHasher::new(set));
    let counts = set.tensors().iter().map(|_| Counts::default()).collect();
    let checker = Checker {
        set,
        options,
        progress,
        hasher: hasher.as_ref(),
        state: Mutex::new(State { tensor: 0, run: 0, part: 0, requested: 0, counts, failure: None }),
    };
    on_threads(options.threads, || checker.work());
    let State { counts, failure, .. } = into_inner(checker.state);
    if let Some(error) = failure {
        return Err(error);
    }
    let digests = match &hasher {
        Some(hasher) => hasher.finish(options.threads, options.cancel.as_deref())?.into_iter().map(Some).collect(),
        None => vec![None; set.parts().len()],
    };
    let part = |(part, blake3): (&crate::gguf::Part, _)| PartReport {
        path: part.path().to_path_buf(),
        bytes: part.bytes(),
        blake3,
    };
    let tensor = |(tensor, counts): (&SourceTensor, Counts)| TensorReport {
        name: tensor.name.clone(),
        ty: tensor.ty.name(),
        elements: tensor.elements(),
        checked: Dequantizer::new(tensor.ty, Simd::Baseline).is_some(),
        nan: counts.nan,
        inf: counts.inf,
        zero: counts.zeros > 0 && counts.zeros == tensor.elements(),
    };
    Ok(Report {
        parts: set.parts().iter().zip(digests).map(part).collect(),
        tensors: set.tensors().iter().zip(counts).map(tensor).collect(),
    })
}

/// What was counted of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    nan: u64,
    inf: u64,
    zeros: u64,
}

struct Checker<'a> {
    set: &'a GgufSet,
    options: &'a Options,
    progress: &'a (dyn Fn(u64) + Sync),
    hasher: Option<&'a SourceHasher<'a>>,
    state: Mutex<State>,
}

struct State {
    /// The tensor that the next run is of, and the run's number in it.
    tensor: usize,
    run: u64,
    /// The part that was last read, and up to where it was requested.
    part: usize,
    requested: u64,
    counts: Vec<Counts>,
    failure: Option<Error>,
}

/// Elements of one tensor.
struct Run<'a> {
    index: usize,
    tensor: &'a SourceTensor,
    decoder: Dequantizer,
    elements: u64,
    /// Bytes of the tensor.
    bytes: Range<u64>,
}

impl<'a> Checker<'a> {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two writes to the state.
        lock(&self.state)
    }

    fn work(&self) {
        let (mut buffer, mut values) = (Vec::new(), Vec::new());
        while let Some(run) = self.next() {
            let counted =
                check_cancel(self.options.cancel.as_deref()).and_then(|()| self.count(&run, &mut buffer, &mut values));
            let mut state = self.state();
            match counted {
                Ok(found) => {
                    let counts = &mut state.counts[run.index];
                    counts.nan += found.nan;
                    counts.inf += found.inf;
                    counts.zeros += found.zeros;
                }
                Err(error) => {
                    state.failure.get_or_insert(error);
                    return;
                }
            }
            drop(state);
            (self.progress)(run.bytes.end - run.bytes.start);
        }
    }

    /// The next run of blocks, in the order of the files. None after a failure.
    fn next(&self) -> Option<Run<'a>> {
        let mut state = self.state();
        loop {
            let tensor = self.set.tensors().get(state.tensor).filter(|_| state.failure.is_none())?;
            let (block, block_bytes) = (tensor.ty.block(), tensor.ty.block_bytes());
            let blocks = tensor.bytes / block_bytes;
            let in_run = (RUN / block).max(1);
            let first = state.run * in_run;
            let decoder = Dequantizer::new(tensor.ty, Simd::detect()).filter(|_| first < blocks);
            let Some(decoder) = decoder else {
                (state.tensor, state.run) = (state.tensor + 1, 0);
                continue;
            };
            let count = in_run.min(blocks - first);
            let (index, elements) = (state.tensor, count * block);
            let bytes = first * block_bytes..(first + count) * block_bytes;
            state.run += 1;
            self.request(&mut state, tensor, tensor.offset + bytes.end);
            return Some(Run { index, tensor, decoder, elements, bytes });
        }
    }

    /// Requests what follows byte `end` of a tensor's part, in steps of half of what may be ahead.
    fn request(&self, state: &mut State, tensor: &SourceTensor, end: u64) {
        if state.part != tensor.part {
            (state.part, state.requested) = (tensor.part, 0);
        }
        if state.requested < end + AHEAD / 2 {
            let ahead = state.requested.max(end)..end + AHEAD;
            state.requested = ahead.end;
            // Advice only: what the system makes of it changes nothing but speed.
            if let Err(error) = self.set.advise(tensor.part, ahead, Advice::WillNeed) {
                tracing::debug!(%error, "no readahead");
            }
        }
    }

    fn count(&self, run: &Run<'_>, buffer: &mut Vec<u8>, values: &mut Vec<f32>) -> Result<Counts> {
        let Run { index, tensor, ref bytes, .. } = *run;
        if let Some(hasher) = self.hasher {
            hasher.before(tensor.part, tensor.offset + bytes.start..tensor.offset + bytes.end, buffer)?;
        }
        values.resize(run.elements as usize, 0.0);
        let blocks = self.set.read(index, bytes.clone(), buffer)?;
        let found = run.decoder.decode(blocks, FloatType::F32, bytemuck::cast_slice_mut(values));
        let zeros = values.iter().filter(|value| **value == 0.0).count() as u64;
        Ok(Counts { nan: found.nan, inf: found.inf, zeros })
    }
}
