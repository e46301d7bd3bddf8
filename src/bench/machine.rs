//! The parts of a conversion, each alone on one core.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Options, Rate, cpu_time, median};
use crate::dequant::{Dequantizer, FloatType, Simd};
use crate::error::{Error, Result};
use crate::gguf::GgmlType;
use crate::gguf::types::TYPES;
use crate::output::Digest;

/// A tile, as conversions have them: it stays in the second-level cache.
const TILE: usize = 512 << 10;
/// What does not fit into any cache.
const LARGE: usize = 256 << 20;
/// Runs of which the median counts, and how long each is at least.
const RUNS: usize = 5;
const RUN: Duration = Duration::from_millis(40);

/// Measures every part, and tells `each` of it. Some 15 seconds, more on a slow disk.
pub fn machine(options: &Options<'_>, each: &mut dyn FnMut(&Rate)) -> Result<Vec<Rate>> {
    let mut rates = Vec::new();
    let mut add = |rate: Rate| {
        each(&rate);
        rates.push(rate);
        options.check_cancel()
    };
    for (detail, bytes) in [("in L2", TILE / 2), ("in memory", LARGE)] {
        let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        add(timed("memcpy", detail, bytes, || black_box(&mut to).copy_from_slice(black_box(&from))))?;
    }
    let tile = noise(TILE);
    add(timed("hash", "BLAKE3 in L2", TILE, || _ = black_box(Digest::of(black_box(&tile)))))?;
    for info in TYPES {
        if let Some(rate) = decode(info.ty, options.simd) {
            add(rate)?;
        }
    }
    files(options, &mut add)?;
    Ok(rates)
}

/// The rate at which a type is decoded to bf16; none for types without a decoder.
pub(super) fn decode(ty: GgmlType, simd: Simd) -> Option<Rate> {
    let decoder = Dequantizer::new(ty, simd)?;
    let elements = (TILE / 2) as u64 / ty.block() * ty.block();
    // Whatever a type takes for a scale or a value is finite so, as in sound files: counting what is not costs time.
    let mut blocks = noise((elements / ty.block() * ty.block_bytes()) as usize);
    blocks.iter_mut().for_each(|byte| *byte &= 0x3F);
    let mut out = vec![0; elements as usize * 2];
    Some(timed("decode", ty.name(), out.len(), || {
        black_box(decoder.decode(black_box(&blocks), FloatType::BF16, black_box(&mut out)));
    }))
}

/// Runs `work`, which does `bytes` bytes, often enough.
fn timed(what: &'static str, detail: &str, bytes: usize, mut work: impl FnMut()) -> Rate {
    work();
    let runs = (0..RUNS).map(|_| {
        let (mut times, cpu, wall) = (0_u32, cpu_time(), Instant::now());
        while wall.elapsed() < RUN {
            work();
            times += 1;
        }
        (wall.elapsed() / times, (cpu_time() - cpu) / times)
    });
    rate(what, detail, bytes as u64, runs.collect())
}

fn rate(what: &'static str, detail: &str, bytes: u64, runs: Vec<(Duration, Duration)>) -> Rate {
    let per_second = |times: Vec<Duration>| bytes as f64 / median(times).as_secs_f64().max(1e-9);
    let (wall, cpu) = runs.into_iter().unzip();
    Rate { what, detail: detail.to_owned(), bytes_per_second: per_second(wall), bytes_per_cpu_second: per_second(cpu) }
}

/// Bytes without a pattern, always the same.
pub(super) fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// A file that is removed when this is dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes a file and reads it back, as conversions do.
fn files(options: &Options<'_>, add: &mut dyn FnMut(Rate) -> Result<()>) -> Result<()> {
    let scratch = Scratch(options.folder.join(format!("ggshard-bench-{}", std::process::id())));
    let (path, tiles) = (&scratch.0, options.file_bytes / TILE as u64);
    // O_DIRECT wants memory that begins at a page.
    let memory = noise(TILE + PAGE);
    let start = memory.as_ptr().align_offset(PAGE).min(PAGE);
    let tile = &memory[start..start + TILE];
    let bytes = tiles * TILE as u64;
    for (detail, direct, sync) in [
        ("into the page cache", false, false),
        ("to the disk (fsync)", false, true),
        ("to the disk, O_DIRECT", true, true),
    ] {
        let mut runs = Vec::new();
        for _ in 0..RUNS.min(3) {
            let _ = std::fs::remove_file(path);
            let Some(file) = create(path, direct)? else { break };
            let (cpu, wall) = (cpu_time(), Instant::now());
            for i in 0..tiles {
                file.write_all_at(tile, i * TILE as u64).map_err(|e| Error::io("write", path, e))?;
                options.check_cancel()?;
            }
            if sync {
                file.sync_all().map_err(|e| Error::io("write to disk", path, e))?;
            }
            runs.push((wall.elapsed(), cpu_time() - cpu));
        }
        if !runs.is_empty() {
            add(rate("write", detail, bytes, runs))?;
        }
    }
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut buffer = vec![0; TILE];
    let mut runs = Vec::new();
    for run in 0..=RUNS {
        let (cpu, wall) = (cpu_time(), Instant::now());
        for i in 0..tiles {
            file.read_exact_at(&mut buffer, i * TILE as u64).map_err(|e| Error::io("read", path, e))?;
        }
        // The first run brings it into the page cache.
        if run > 0 {
            runs.push((wall.elapsed(), cpu_time() - cpu));
        }
    }
    add(rate("read", "from the page cache", bytes, runs))
}

/// A page, and the alignment that O_DIRECT wants at most.
const PAGE: usize = 4096;

/// Creates a file; none where the file system has no O_DIRECT.
fn create(path: &Path, direct: bool) -> Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    if direct {
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    }
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if direct && e.kind() == ErrorKind::InvalidInput => Ok(None),
        Err(e) => Err(Error::io("create", path, e)),
    }
}
