//! Sizes, headers and digests, in one pass over each file's bytes.
//!
//! Threads take tiles from one queue, file after file in order, so a disk sees sequential reads and many small files
//! keep all threads as busy as one large one. Each tile is read into the thread's own buffer (a plain read, which a file
//! that shrinks meanwhile cannot turn into a fault) and hashed for the file and for the tensors in it while it is in
//! cache.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{Finding, Options, Report, Step, What};
use crate::engine::check_cancel;
use crate::error::{Error, Result};
use crate::output::digest::Digest;
use crate::output::manifest::{FileEntry, Manifest, TensorEntry};
use crate::output::safetensors::SafetensorsHeader;
use crate::output::treehash::TreeHash;
use crate::regular;
use crate::threads::{into_inner, lock, on_threads};

/// Bytes that are read at a time.
const TILE: u64 = 1 << 20;

/// One file to be read, as the manifest describes it.
struct Target<'m> {
    name: &'m str,
    bytes: u64,
    blake3: Digest,
    /// `None` for a file that is not safetensors.
    weights: Option<Weights<'m>>,
}

impl<'m> Target<'m> {
    fn of(file: &'m FileEntry) -> Self {
        let weights = Weights { header_bytes: file.header_bytes, tensors: &file.tensors };
        Target { name: &file.name, bytes: file.bytes, blake3: file.blake3, weights: Some(weights) }
    }
}

#[derive(Clone, Copy)]
struct Weights<'m> {
    header_bytes: u64,
    tensors: &'m [TensorEntry],
}

/// A file that is being read.
struct Reading<'m> {
    /// Its place in the order of the report.
    number: usize,
    target: &'m Target<'m>,
    file: File,
    whole: TreeHash,
    tensors: Vec<TreeHash>,
    /// Bytes not yet hashed.
    left: AtomicU64,
    unreadable: AtomicBool,
}

struct Queue<'m> {
    targets: std::iter::Enumerate<std::slice::Iter<'m, Target<'m>>>,
    current: Option<(Arc<Reading<'m>>, u64)>,
}

struct Checker<'m> {
    dir: &'m Path,
    queue: Mutex<Queue<'m>>,
    results: Mutex<Results>,
    progress: &'m (dyn Fn(Step) + Sync),
    cancel: Option<&'m AtomicBool>,
    /// Which file has a digest, to recognise files that were swapped.
    owners: HashMap<Digest, &'m str>,
}

#[derive(Default)]
struct Results {
    findings: Vec<(usize, Finding)>,
    files: u64,
    tensors: u64,
    bytes: u64,
    error: Option<Error>,
}

/// Checks every file that `options.rank` needs and adds to `report`.
pub(super) fn check(
    dir: &Path,
    manifest: &Manifest,
    options: &Options,
    progress: &(dyn Fn(Step) + Sync),
    report: &mut Report,
) -> Result<()> {
    let wanted = |rank: Option<u32>| options.rank.is_none() || rank.is_none() || rank == options.rank;
    let weights = manifest.files.iter().filter(|file| wanted(file.rank)).map(Target::of);
    let others = manifest.others.iter().map(|file| Target {
        name: &file.name,
        bytes: file.bytes,
        blake3: file.blake3,
        weights: None,
    });
    let targets: Vec<Target<'_>> = weights.chain(others).collect();
    progress(Step::Begin {
        check: "folder",
        bytes: targets.iter().map(|target| target.bytes).fold(0, u64::saturating_add),
    });
    let results = check_targets(dir, manifest, &targets, Depth::Contents, options, progress)?;
    report.findings.extend(results.findings.into_iter().map(|(_, finding)| finding));
    report.files += results.files;
    report.tensors += results.tensors;
    report.bytes += results.bytes;
    Ok(())
}

/// How much of a file is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Its length, and its header against the manifest.
    Headers,
    /// Also every byte, by the digests of the file and of its tensors.
    Contents,
}

/// Checks some of the manifest's safetensors files and gives every difference, in their order.
pub(crate) fn check_files(
    dir: &Path,
    manifest: &Manifest,
    files: &[&FileEntry],
    depth: Depth,
    threads: usize,
) -> Result<Vec<Finding>> {
    let targets: Vec<Target<'_>> = files.iter().map(|file| Target::of(file)).collect();
    let options = Options { threads, ..Options::default() };
    let results = check_targets(dir, manifest, &targets, depth, &options, &|_| {})?;
    Ok(results.findings.into_iter().map(|(_, finding)| finding).collect())
}

fn check_targets<'m>(
    dir: &'m Path,
    manifest: &'m Manifest,
    targets: &'m [Target<'m>],
    depth: Depth,
    options: &'m Options,
    progress: &'m (dyn Fn(Step) + Sync),
) -> Result<Results> {
    let checker = Checker {
        dir,
        queue: Mutex::new(Queue { targets: targets.iter().enumerate(), current: None }),
        results: Mutex::default(),
        progress,
        cancel: options.cancel.as_deref(),
        owners: manifest.files.iter().map(|file| (file.blake3, file.name.as_str())).collect(),
    };
    on_threads(options.threads, || match depth {
        Depth::Headers => checker.look(),
        Depth::Contents => checker.work(),
    });
    let mut results = into_inner(checker.results);
    if let Some(error) = results.error {
        return Err(error);
    }
    results.findings.sort_by_key(|(number, _)| *number);
    Ok(results)
}

impl<'m> Checker<'m> {
    /// Takes tiles until none are left.
    fn work(&self) {
        let mut buffer = vec![0; TILE as usize];
        while let Some((reading, offset)) = self.next_tile() {
            let len = TILE.min(reading.target.bytes - offset);
            let tile = &mut buffer[..len as usize];
            let hashed = match reading.file.read_exact_at(tile, offset) {
                Ok(()) => check_cancel(self.cancel).and_then(|()| reading.hash(offset, tile)),
                Err(e) => {
                    if !reading.unreadable.swap(true, Ordering::Relaxed) {
                        self.find(reading.number, unreadable(reading.target, &e));
                    }
                    Ok(())
                }
            };
            (self.progress)(Step::Bytes(len));
            if let Err(error) = hashed {
                lock(&self.results).error.get_or_insert(error);
                return;
            }
            if reading.left.fetch_sub(len, Ordering::AcqRel) == len {
                self.finish(&reading);
            }
        }
    }

    /// Opens files, which compares length and header, until none are left.
    fn look(&self) {
        loop {
            let next = lock(&self.queue).targets.next();
            let Some((number, target)) = next else { return };
            self.open(number, target);
        }
    }

    /// The next tile of the file being read, or the first one of the next file that has any.
    fn next_tile(&self) -> Option<(Arc<Reading<'m>>, u64)> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((reading, next)) = &mut queue.current {
                let offset = *next;
                if offset < reading.target.bytes {
                    *next += TILE.min(reading.target.bytes - offset);
                    return Some((Arc::clone(reading), offset));
                }
                queue.current = None;
            }
            let (number, target) = queue.targets.next()?;
            if let Some(reading) = self.open(number, target) {
                if target.bytes == 0 {
                    self.finish(&reading);
                } else {
                    queue.current = Some((Arc::new(reading), 0));
                }
            }
        }
    }

    /// Opens a file and compares length and header. `None` when its bytes cannot be those promised.
    fn open(&self, number: usize, target: &'m Target<'m>) -> Option<Reading<'m>> {
        let path = self.dir.join(target.name);
        let file = match regular::open(&path) {
            Ok((file, bytes)) => {
                if let Some(weights) = target.weights {
                    self.check_header(number, target.name, weights, &file, bytes);
                }
                if bytes != target.bytes {
                    let finding = Finding::new(target.name, What::Size);
                    let text = |n: u64| format!("{n} bytes");
                    self.find(number, finding.expected(text(target.bytes)).found(text(bytes)));
                    return None;
                }
                file
            }
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                self.find(number, Finding::new(target.name, What::Missing));
                return None;
            }
            Err(e) => {
                self.find(number, unreadable(target, &e));
                return None;
            }
        };
        let tensors = target.weights.map_or(&[][..], |weights| weights.tensors);
        Some(Reading {
            number,
            target,
            file,
            whole: TreeHash::new(target.bytes),
            tensors: tensors.iter().map(|tensor| TreeHash::new(tensor.offsets.1 - tensor.offsets.0)).collect(),
            left: AtomicU64::new(target.bytes),
            unreadable: AtomicBool::new(false),
        })
    }

    /// Compares a file's own header with the manifest: the same tensors with the same dtype, shape and place.
    fn check_header(&self, number: usize, name: &str, weights: Weights<'_>, mut file: &File, bytes: u64) {
        let header = match SafetensorsHeader::read_from(&mut file, bytes, Path::new(name)) {
            Ok(header) => header,
            Err(e) => {
                let mut fault = e.fault().clone();
                fault.file = None;
                let tensor = fault.tensor.take();
                let mut finding = Finding::new(name, What::Header).found(fault);
                finding.tensor = tensor;
                return self.find(number, finding);
            }
        };
        if header.header_bytes != weights.header_bytes {
            let text = |n: u64| format!("a header of {n} bytes");
            let finding = Finding::new(name, What::Header);
            self.find(number, finding.expected(text(weights.header_bytes)).found(text(header.header_bytes)));
        }
        let mut found: HashMap<&str, _> =
            header.tensors.iter().map(|t| (t.name.as_str(), (t.dtype, t.shape.as_slice(), t.offsets))).collect();
        for tensor in weights.tensors {
            let expected = (tensor.dtype, tensor.shape.as_slice(), tensor.offsets);
            let found = found.remove(tensor.name.as_str());
            if found != Some(expected) {
                let text = |(dtype, shape, (b, e)): (_, &[u64], _)| format!("{dtype} {shape:?} at [{b},{e}]");
                let found = found.map_or("no such tensor".to_string(), text);
                let finding = Finding::new(name, What::Header).tensor(&tensor.name);
                self.find(number, finding.expected(text(expected)).found(found));
            }
        }
        for tensor in header.tensors.iter().filter(|tensor| found.contains_key(tensor.name.as_str())) {
            let finding = Finding::new(name, What::Header).tensor(&tensor.name);
            self.find(number, finding.found("a tensor that the manifest does not list"));
        }
    }

    /// Compares the digests of a file whose every byte was hashed.
    fn finish(&self, reading: &Reading<'m>) {
        if reading.unreadable.load(Ordering::Relaxed) {
            return;
        }
        let target = reading.target;
        let tensors = target.weights.map_or(&[][..], |weights| weights.tensors);
        let mut findings = Vec::new();
        let compared = reading.whole.finish().and_then(|hash| {
            let found = Digest::from(hash);
            if found != target.blake3 {
                let finding = Finding::new(target.name, What::FileDigest).expected(target.blake3);
                findings.push(match self.owners.get(&found) {
                    Some(owner) => finding.found(format!("{found}, which is '{owner}'")),
                    None => finding.found(found),
                });
            }
            for (tensor, hash) in tensors.iter().zip(&reading.tensors) {
                let found = Digest::from(hash.finish()?);
                if found != tensor.blake3 {
                    let finding = Finding::new(target.name, What::TensorDigest).tensor(&tensor.name);
                    findings.push(finding.expected(tensor.blake3).found(found));
                }
            }
            Ok(())
        });
        let mut results = lock(&self.results);
        results.findings.extend(findings.into_iter().map(|finding| (reading.number, finding)));
        match compared {
            Ok(()) => {
                results.files += 1;
                results.tensors += tensors.len() as u64;
                results.bytes += target.bytes;
            }
            Err(error) => {
                results.error.get_or_insert(error);
            }
        }
    }

    fn find(&self, number: usize, finding: Finding) {
        lock(&self.results).findings.push((number, finding));
    }
}

impl Reading<'_> {
    /// Hashes a tile of the file for the file and for each tensor in it.
    fn hash(&self, offset: u64, tile: &[u8]) -> Result<()> {
        self.whole.add(offset, tile)?;
        let Some(weights) = self.target.weights else { return Ok(()) };
        // The tile's place relative to the data section; what lies before it is header.
        let end = (offset + tile.len() as u64).saturating_sub(weights.header_bytes);
        let skipped = weights.header_bytes.saturating_sub(offset);
        let start = (offset + skipped) - weights.header_bytes;
        let first = weights.tensors.partition_point(|tensor| tensor.offsets.1 <= start);
        for (tensor, hash) in weights.tensors[first..].iter().zip(&self.tensors[first..]) {
            let (begin, stop) = (tensor.offsets.0.max(start), tensor.offsets.1.min(end));
            if tensor.offsets.0 >= end {
                break;
            }
            if begin < stop {
                let at = (skipped + begin - start) as usize;
                hash.add(begin - tensor.offsets.0, &tile[at..at + (stop - begin) as usize])?;
            }
        }
        Ok(())
    }
}

fn unreadable(target: &Target<'_>, error: &std::io::Error) -> Finding {
    Finding::new(target.name, What::Unreadable).found(error)
}
