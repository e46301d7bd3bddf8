//! The engine's sink when a checkpoint is compared with its source: what would be written is read instead.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::{Finding, Report, What};
use crate::encode;
use crate::engine::Sink;
use crate::error::{Fault, Result};
use crate::gguf::read_up_to;
use crate::output::manifest::{FileEntry, Manifest};
use crate::output::{Deviation, filename};
use crate::plan::Plan;
use crate::regular;
use crate::threads::{into_inner, lock};

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

thread_local! {
    /// What a worker reads into.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Compares what the engine makes with the bytes at the same place of the written files.
pub(super) struct Comparer<'a> {
    plan: &'a Plan,
    dir: &'a Path,
    /// By index of [`Plan::files`]; none for ranks that are not compared.
    files: Vec<Option<Written<'a>>>,
    /// How far encoded tensors are from the source, by parameter and rank: of files that are not compared to the end, and
    /// of all others.
    deviating: Mutex<BTreeMap<(u32, u32), encode::Deviation>>,
    deviations: Mutex<BTreeMap<(u32, u32), Deviation>>,
    /// By (file, parameter).
    differences: Mutex<BTreeMap<(u32, u32), Difference>>,
}

/// A file that was written.
struct Written<'a> {
    name: &'a str,
    /// Where its data begins, by the plan.
    data_start: u64,
    /// Bytes of its data that have yet to come.
    missing: AtomicU64,
    handle: RwLock<Handle>,
    /// Why it cannot be read.
    failure: OnceLock<String>,
}

enum Handle {
    Unopened,
    Open(Arc<File>),
    /// Every byte was compared, or the file cannot be opened.
    Closed,
}

/// How one tensor differs in one file.
struct Difference {
    /// The first byte of the tensor that differs.
    first: u64,
    /// What the source gives there.
    expected: u8,
    /// What the file has there; `None` where it has ended.
    found: Option<u8>,
    /// How many bytes differ.
    bytes: u64,
}

impl<'a> Comparer<'a> {
    /// Compares the planned files of `ranks`, whose headers have the given lengths (by index of [`Plan::files`]).
    pub fn new(plan: &'a Plan, dir: &'a Path, ranks: &[u32], header_bytes: &[u64]) -> Self {
        let written = |(file, header): (&'a crate::plan::PlannedFile, &u64)| {
            ranks.contains(&file.rank).then(|| Written {
                name: &file.name,
                data_start: *header,
                missing: AtomicU64::new(file.data_bytes),
                handle: RwLock::new(Handle::Unopened),
                failure: OnceLock::new(),
            })
        };
        let files = plan.files.iter().zip(header_bytes).map(written).collect();
        let (deviating, deviations) = (Mutex::default(), Mutex::default());
        Comparer { plan, dir, files, deviating, deviations, differences: Mutex::default() }
    }

    /// Recorded deviations that are not those that the source gives.
    pub fn deviations(&self, manifest: &Manifest) -> Vec<Finding> {
        let entries: HashMap<&str, &FileEntry> = manifest.files.iter().map(|file| (file.name.as_str(), file)).collect();
        let deviations = lock(&self.deviations);
        let mut findings = Vec::new();
        let files = self.plan.files.iter().zip(&self.files).filter(|(_, written)| written.is_some());
        for (file, entry) in files.filter_map(|(file, _)| Some((file, *entries.get(file.name.as_str())?))) {
            for (param, tensor) in file.params.iter().zip(&entry.tensors) {
                let found = deviations.get(&(*param, file.rank)).copied();
                if tensor.deviation != found {
                    let text = |d: Option<Deviation>| {
                        d.map_or("none".to_owned(), |d| format!("{} and at most {}", d.relative_rms, d.largest_error))
                    };
                    let finding = Finding::new(filename::MANIFEST, What::Record).tensor(&tensor.name);
                    findings.push(
                        finding.expected(format!("a deviation of {}", text(found))).found(text(tensor.deviation)),
                    );
                }
            }
        }
        findings
    }

    /// Adds what was found to the report, file after file in the plan's order. Every byte must have come.
    pub fn finish(self, report: &mut Report) -> Result<()> {
        let absent = super::absent(report);
        for file in self.files.iter().flatten() {
            let missing = file.missing.load(Ordering::Acquire);
            if missing != 0 {
                return Err(Fault::new(format!("{missing} bytes were never compared"))
                    .file(self.dir.join(file.name))
                    .audit());
            }
            if let Some(failure) = file.failure.get()
                && !absent.contains(file.name)
            {
                report.push(Finding::new(file.name, What::Unreadable).found(failure));
            }
        }
        let differences = into_inner(self.differences);
        for ((file, param), difference) in differences {
            let (planned, param) = (&self.plan.files[file as usize], &self.plan.params[param as usize]);
            let Some(written) = &self.files[file as usize] else { continue };
            let Difference { first, expected, found, bytes } = difference;
            let in_file = written.data_start + param.slices[planned.rank as usize].offset + first;
            let found = found.map_or("the end of the file".to_owned(), |byte| format!("{byte:#04x}"));
            let mut finding = Finding::new(written.name, What::SourceBytes)
                .tensor(&param.name)
                .expected(format!("{expected:#04x} there"))
                .found(format!(
                    "{found} at byte {first} (byte {in_file} of the file), the first of {bytes} that differ"
                ));
            finding.offset = Some(first);
            finding.differing = Some(bytes);
            report.push(finding);
        }
        Ok(())
    }

    fn compare(&self, file: u32, param: u32, at: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(written) = &self.files[file as usize] else {
            let fault = Fault::new("a rank that is not compared").tensor(&self.plan.params[param as usize].name);
            return Err(fault.audit());
        };
        if let Some(handle) = written.open(self.dir) {
            BUFFER.with_borrow_mut(|buffer| {
                buffer.resize(CHUNK, 0);
                for (i, want) in bytes.chunks(CHUNK).enumerate() {
                    let skipped = (i * CHUNK) as u64;
                    match read_up_to(&handle, &mut buffer[..want.len()], at + skipped) {
                        Ok(read) if buffer[..read] == *want => {}
                        Ok(read) => self.differ(file, param, offset + skipped, want, &buffer[..read]),
                        Err(error) => {
                            let _ = written.failure.set(error.to_string());
                            break;
                        }
                    }
                }
            });
        }
        if written.done(bytes.len() as u64) {
            let planned = &self.plan.files[file as usize];
            let (mut deviating, mut deviations) = (lock(&self.deviating), lock(&self.deviations));
            for key in planned.params.iter().map(|param| (*param, planned.rank)) {
                deviations.extend(deviating.remove(&key).map(|found| (key, found.into())));
            }
        }
        Ok(())
    }

    /// Notes bytes of a tensor that differ; `got` is shorter than `want` where the file ends.
    fn differ(&self, file: u32, param: u32, offset: u64, want: &[u8], got: &[u8]) {
        let unequal = |i: &usize| got.get(*i) != Some(&want[*i]);
        let Some(first) = (0..want.len()).find(unequal) else { return };
        let bytes = (first..want.len()).filter(unequal).count() as u64;
        let new =
            Difference { first: offset + first as u64, expected: want[first], found: got.get(first).copied(), bytes };
        let mut differences = lock(&self.differences);
        match differences.get_mut(&(file, param)) {
            None => {
                differences.insert((file, param), new);
            }
            Some(known) => {
                let bytes = known.bytes + new.bytes;
                if new.first < known.first {
                    *known = new;
                }
                known.bytes = bytes;
            }
        }
    }
}

impl Sink for Comparer<'_> {
    fn deviate(&self, param: u32, ranks: &[u32], found: &encode::Deviation) {
        let mut deviating = lock(&self.deviating);
        ranks.iter().for_each(|rank| *deviating.entry((param, *rank)).or_default() += *found);
    }

    fn put(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        for rank in ranks {
            let slice = &self.plan.params[param as usize].slices[*rank as usize];
            let data_start = self.files[slice.file as usize].as_ref().map_or(0, |written| written.data_start);
            self.compare(slice.file, param, data_start + slice.offset + offset, offset, bytes)?;
        }
        Ok(())
    }
}

impl Written<'_> {
    /// The open file; `None` when it cannot be opened.
    fn open(&self, dir: &Path) -> Option<Arc<File>> {
        if let Handle::Open(file) = &*self.handle.read().unwrap_or_else(PoisonError::into_inner) {
            return Some(file.clone());
        }
        let mut handle = self.handle.write().unwrap_or_else(PoisonError::into_inner);
        match &*handle {
            Handle::Open(file) => return Some(file.clone()),
            Handle::Closed => return None,
            Handle::Unopened => {}
        }
        let path = dir.join(self.name);
        match regular::open(&path) {
            Ok((file, _)) => {
                let file = Arc::new(file);
                *handle = Handle::Open(file.clone());
                Some(file)
            }
            Err(error) => {
                *handle = Handle::Closed;
                let _ = self.failure.set(error.to_string());
                None
            }
        }
    }

    /// Counts compared bytes, and closes the file after the last: a model has more files than a process may open. Gives whether
    /// this was the last.
    fn done(&self, bytes: u64) -> bool {
        let last = self.missing.fetch_sub(bytes, Ordering::AcqRel) == bytes;
        if last {
            *self.handle.write().unwrap_or_else(PoisonError::into_inner) = Handle::Closed;
        }
        last
    }
}
