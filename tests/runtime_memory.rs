//! Bounded memory: what is decoded ahead of a consumer never exceeds the budget by more than one parameter.
//!
//! Alone in its binary, because it counts every allocation of the process.

#[path = "common/allocations.rs"]
mod allocations;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use allocations::{HELD, PEAK};
use ggshard::gguf::GgmlType;
use ggshard::runtime::{Source, WeightOptions};
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

/// The most that was held at once, beyond what was held before, by a consumer that keeps nothing.
fn peak(source: &Source, memory: usize, slow: bool) -> usize {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let mapping = Some("raw".into());
    let options = WeightOptions { mapping, threads: 4, memory: memory as u64, ..WeightOptions::default() };
    for item in source.weights(options).unwrap() {
        item.unwrap();
        if slow {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn what_is_in_memory_stays_within_the_budget_and_one_parameter() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("large.gguf");
    write(&path, 24, 8);
    let source = Source::open(&path).unwrap();
    for slow in [false, true] {
        for budget in [0, 20, 64] {
            // Beside the budget: the parameter that the consumer has, the next one, and buffers of four workers.
            let bytes = peak(&source, budget * MIB, slow);
            assert!(bytes <= (budget + 8 + 8 + 8) * MIB, "budget {budget} MiB: {bytes} bytes");
        }
        assert!(peak(&source, 64 * MIB, true) > 48 * MIB, "nothing is decoded ahead");
    }
}
