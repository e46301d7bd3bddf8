//! Bounded memory: what a conversion allocates does not grow with the model or with a tensor.
//!
//! Alone in its binary, because it counts every allocation of the process. Of a mapped source nothing counts, of one that is
//! read the buffers do, and so does whatever the conversion keeps.

#[path = "common/allocations.rs"]
mod allocations;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;

use std::path::Path;
use std::sync::atomic::Ordering;

use allocations::{HELD, PEAK};
use ggshard::convert::{Extras, Request, convert, plan_set};
use ggshard::engine::Options;
use ggshard::gguf::{GgmlType, GgufSet, Io, OpenOptions};
use gguf_writer::GgufBuilder;

const MIB: usize = 1 << 20;

/// Writes a file of tensors of so many MiB of BF16 each.
fn write(path: &Path, tensors: usize, mib: usize) {
    let mut file = GgufBuilder::architecture("large");
    for i in 0..tensors {
        let bytes = [0x12u8, 0x3F, i as u8, 0x40].repeat(mib * MIB / 4);
        file = file.tensor(&format!("{i}.weight"), GgmlType::BF16, &[1024, (mib * MIB / 2048) as u64], bytes);
    }
    std::fs::write(path, file.build()).unwrap();
}

/// The most that a conversion held at once, beyond what was held before.
fn peak(io: Io, tensors: usize, mib: usize, tp: u32) -> usize {
    peak_with(io, tensors, mib, tp, Options { threads: 2, ..Options::default() })
}

fn peak_with(io: Io, tensors: usize, mib: usize, tp: u32, options: Options) -> usize {
    let temp = tempfile::tempdir().unwrap();
    let source = temp.path().join("large.gguf");
    write(&source, tensors, mib);
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let request = Request { mapping: Some("raw".into()), tp, ..Request::default() };
    let opening = OpenOptions { io, ..OpenOptions::default() };
    let planned = plan_set(GgufSet::open_with(&source, opening).unwrap(), &request).unwrap();
    convert(&planned, &temp.path().join("out"), options, &Extras::default(), &|_| {}).unwrap();
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn peak_memory_does_not_grow_with_model_or_tensor() {
    for io in [Io::Mmap, Io::Pread] {
        let small = peak(io, 2, 8, 1);
        let many = peak(io, 24, 8, 1);
        let large = peak(io, 1, 192, 1);
        let ranks = peak(io, 2, 24, 4);
        eprintln!(
            "{io:?}: 16 MiB: {small} bytes; 24 tensors of 8 MiB: {many}; one of 192 MiB: {large}; four ranks: {ranks}"
        );
        for (what, bytes) in [("24 tensors", many), ("one large tensor", large), ("four ranks", ranks)] {
            assert!(bytes < 8 * MIB, "{io:?}, {what}: {bytes} bytes");
            assert!(bytes < small + MIB, "{io:?}, {what}: {bytes} bytes, a small file takes {small}");
        }
    }
    // Many workers, each with buffers of its own, within what they may take together.
    for (threads, buffers) in [(64, 16 * MIB), (64, 4 * MIB), (3, MIB)] {
        let options = Options { threads, buffer_bytes: buffers as u64, ..Options::default() };
        let bytes = peak_with(Io::Pread, 24, 8, 4, options);
        eprintln!("{threads} workers, buffers of {buffers} bytes: {bytes} bytes");
        assert!(bytes < buffers + 2 * MIB, "{threads} workers, buffers of {buffers} bytes: {bytes} bytes");
    }
}
