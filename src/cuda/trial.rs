//! Work for a device that is timed. One of the five files of this folder with `unsafe`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::area::{Format, Places, enqueue_format};
use super::device::{Device, Memory, Pinned, Stream, refused};
use super::driver::DriverError;
use super::encode::Encode;
use super::lane::{Piece, Values, reading};
use super::launch::Launch;
use crate::dequant::FloatType;
use crate::gguf::GgmlType;

/// Bytes that three counts take.
const COUNTS: usize = 24;

/// Memory on both sides, and a stream.
pub(crate) struct Trial {
    stream: Stream,
    pinned: Pinned,
    source: Memory,
    out: Memory,
    counts: Memory,
}

impl Trial {
    /// Allocates so many bytes of pinned memory, of a source and of output.
    pub fn new(device: &Arc<Device>, pinned: usize, source: usize, out: usize) -> Result<Self, DriverError> {
        Ok(Trial {
            stream: Stream::new(device)?,
            pinned: Pinned::new(device, pinned)?,
            source: Memory::new(device, source)?,
            out: Memory::new(device, out)?,
            counts: Memory::new(device, COUNTS)?,
        })
    }

    /// Fills the source with `pattern`, again and again.
    pub fn fill(&mut self, pattern: &[u8]) -> Result<(), DriverError> {
        let pinned = self.pinned.bytes_mut();
        let step = pinned.len() / pattern.len() * pattern.len();
        pinned[..step].chunks_exact_mut(pattern.len()).for_each(|chunk| chunk.copy_from_slice(pattern));
        for at in (0..self.source.len()).step_by(step) {
            let len = step.min(self.source.len() - at);
            // SAFETY: waited for below, before anything else happens to either.
            unsafe { self.stream.copy_in(&self.pinned, len, &self.source, at) }?;
        }
        self.stream.wait()
    }

    /// How long it takes to copy all pinned bytes to the device so many times.
    pub fn copy_in(&mut self, times: u32) -> Result<Duration, DriverError> {
        let len = self.pinned.bytes().len();
        // SAFETY: `timed` waits, before anything else happens to either.
        timed(&self.stream, times, || unsafe { self.stream.copy_in(&self.pinned, len, &self.source, 0) })
    }

    /// How long it takes to copy as many bytes back.
    pub fn copy_out(&mut self, times: u32) -> Result<Duration, DriverError> {
        let len = self.pinned.bytes().len();
        // SAFETY: as above.
        timed(&self.stream, times, || unsafe { self.stream.copy_out(&self.out, len, &mut self.pinned) })
    }

    /// How long it takes to copy so many bytes from the source to the output, on the device.
    pub fn copy(&mut self, len: usize, times: u32) -> Result<Duration, DriverError> {
        // SAFETY: as above.
        timed(&self.stream, times, || unsafe { self.stream.copy(&self.source, &self.out, len) })
    }

    /// How long it takes to decode so many weights of the source.
    pub fn decode(&mut self, ty: GgmlType, weights: u64, times: u32) -> Result<Duration, DriverError> {
        let values = Values { ty, scale: None, add: None, dtype: FloatType::BF16 };
        let piece = Piece { source: 0, row_bytes: 0, skip: 0, rows: 1, cols: weights, transpose: false };
        let launch = Launch {
            out: self.out.at(0, weights as usize * values.dtype.bytes()),
            out_stride: weights,
            counts: self.counts.at(0, COUNTS),
            ..reading(&self.source, values, &piece)
        };
        // SAFETY: the source and the output are large enough, which `reading` and `at` check; waited for as above.
        timed(&self.stream, times, || unsafe { self.stream.launch(ty, launch) })
    }

    /// Bytes of output that encoding takes.
    pub fn encoded(format: Format, rows: u64, cols: u64) -> Option<usize> {
        let all = 0..cols;
        Places::new(rows, cols, std::slice::from_ref(&all), Some(format)).map(|places| places.values)
    }

    /// How long it takes to encode so many rows and columns of values, with which the source is filled, and to measure what
    /// became of them.
    pub fn encode(&mut self, format: Format, rows: u64, cols: u64, times: u32) -> Result<Duration, DriverError> {
        let all = 0..cols;
        let places = Places::new(rows, cols, std::slice::from_ref(&all), Some(format));
        let places = places.ok_or_else(|| refused("values that are too many".to_owned()))?;
        let bytes = rows.saturating_mul(cols).saturating_mul(4);
        let values = self.source.at(0, usize::try_from(bytes).unwrap_or(usize::MAX));
        let encode = Encode { values, stride: cols, rows, cols, ..places.encode(&self.out, 0) };
        self.stream.device().enter()?;
        // SAFETY: waited for before anything else happens to the memory.
        unsafe { self.stream.zero(&self.out, 0, places.zeroed) }.and(self.stream.wait())?;
        // SAFETY: the source and the output are large enough, which `at` checks; waited for as above.
        timed(&self.stream, times, || unsafe { enqueue_format(&self.stream, encode, Some(format)) })
    }
}

/// Enqueues work so many times and waits for all of it.
fn timed(
    stream: &Stream,
    times: u32,
    mut enqueue: impl FnMut() -> Result<(), DriverError>,
) -> Result<Duration, DriverError> {
    stream.device().enter()?;
    let began = Instant::now();
    let enqueued = (0..times).try_for_each(|_| enqueue());
    // Whatever was enqueued before a failure still uses the memory.
    stream.wait().and(enqueued)?;
    Ok(began.elapsed())
}
