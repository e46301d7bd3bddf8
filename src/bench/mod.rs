//! What this machine can do, and how near a conversion comes to it.
//!
//! A conversion decodes, hashes twice (the tensor and the file) and writes. Each of these alone, on one core, gives a
//! ceiling; a conversion's CPU time is compared with the sum of its parts.

mod conversion;
mod device;
mod machine;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

pub use conversion::{Conversion, Run, conversion, convert_with};
pub use device::{DeviceRate, DeviceRates, device};
pub use machine::machine;

use crate::dequant::Simd;
use crate::engine::check_cancel;
use crate::error::Result;

/// A rate on one core.
#[derive(Debug, Clone, Serialize)]
pub struct Rate {
    /// What was done: `memcpy`, `hash`, `decode`, …
    pub what: &'static str,
    /// With what: a place, a type.
    pub detail: String,
    /// Bytes per second of wall time, the median of several runs. Of decoding, bytes of bf16 that come out.
    pub bytes_per_second: f64,
    /// Bytes per second of CPU time.
    pub bytes_per_cpu_second: f64,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Where files are written and read; removed afterwards.
    pub folder: &'a Path,
    /// Bytes of those files.
    pub file_bytes: u64,
    /// The instruction set for decoding.
    pub simd: Simd,
    /// Set by whoever wants it to end.
    pub cancel: Option<&'a AtomicBool>,
}

impl Options<'_> {
    fn check_cancel(&self) -> Result<()> {
        check_cancel(self.cancel)
    }
}

/// The CPU time of this process so far, all threads together.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The median of some durations.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
