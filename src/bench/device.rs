//! What a CUDA device can do: copies, and decoding and encoding next to them.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::machine::noise;
use super::{Options, median};
use crate::cuda::{Absence, Device, DriverError, Format, Trial};
use crate::encode::nvfp4::BlockScale;
use crate::error::{Fault, Result};
use crate::gguf::GgmlType;
use crate::gguf::types::TYPES;

/// Pinned bytes that are copied at a time: a tile.
const PINNED: usize = 32 << 20;
/// The most bytes of bf16 that a kernel makes at a time; more than any cache holds.
const MOST: u64 = 256 << 20;
/// Columns of values that are encoded.
const COLS: u64 = 1024;
/// Runs of which the median counts, and how long each is at least.
const RUNS: usize = 5;
const RUN: Duration = Duration::from_millis(20);

/// A device, measured.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceRates {
    /// Its number.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its architecture, such as 9.0.
    pub capability: String,
    /// The newest version of CUDA that the driver knows.
    pub driver: String,
    /// The kernels that it took.
    pub kernels: &'static str,
    /// What was measured.
    pub rates: Vec<DeviceRate>,
}

/// A rate of a device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceRate {
    /// `copy in`, `copy out`, `copy` (on the device), `decode` or `encode`.
    pub what: &'static str,
    /// The type that is decoded, or the form; empty otherwise.
    pub detail: &'static str,
    /// Bytes per second, the median of several runs. On the device, of all bytes that are taken or made.
    pub bytes_per_second: f64,
    /// Of decoding and encoding, the rate divided by that of copying on the device.
    pub of_copy: Option<f64>,
}

/// Measures a device, and tells `each` of every rate. `options.file_bytes` bounds what kernels decode at a time.
pub fn device(ordinal: u32, options: &Options<'_>, each: &mut dyn FnMut(&DeviceRate)) -> Result<DeviceRates> {
    let absent = |absence: Absence| Fault::new(absence.to_string()).remedy("See `ggshard devices`").device();
    let device = Device::open(ordinal).map_err(absent)?;
    let failed = |error: DriverError| Fault::new(format!("{}: {error}", device.title())).device();
    let mut rates: Vec<DeviceRate> = Vec::new();
    let mut add = |rate: DeviceRate| {
        each(&rate);
        rates.push(rate);
        options.check_cancel()
    };
    let weights = options.file_bytes.clamp(1 << 16, MOST) / 2 / 256 * 256;
    let out = weights as usize * 2;
    let pinned = PINNED.min(out);
    let plain =
        |what, bytes: u64, time| DeviceRate { what, detail: "", bytes_per_second: rate(bytes, time), of_copy: None };

    let mut trial = Trial::new(&device, pinned, out, out).map_err(failed)?;
    let time = runs(|times| trial.copy_in(times)).map_err(failed)?;
    add(plain("copy in", pinned as u64, time))?;
    let time = runs(|times| trial.copy_out(times)).map_err(failed)?;
    add(plain("copy out", pinned as u64, time))?;
    let time = runs(|times| trial.copy(out, times)).map_err(failed)?;
    let copy = plain("copy", 2 * out as u64, time);
    let copied = copy.bytes_per_second;
    add(copy)?;
    drop(trial);

    for info in TYPES.iter().filter(|info| device.decodes(info.ty)) {
        let source = weights / info.ty.block() * info.ty.block_bytes();
        let time = decode(&device, info.ty, weights, source as usize, pinned).map_err(failed)?;
        let bytes_per_second = rate(source + out as u64, time);
        let of_copy = Some(bytes_per_second / copied);
        add(DeviceRate { what: "decode", detail: info.name, bytes_per_second, of_copy })?;
    }
    let nvfp4 = |how| Format::Nvfp4 { scale_2: 1.0 / 2688.0, how };
    for (detail, format) in [
        ("fp8", Format::Fp8 { measured: true }),
        ("nvfp4", nvfp4(BlockScale::Amax)),
        ("nvfp4, searched", nvfp4(BlockScale::Searched)),
    ] {
        // As many bytes of values as of weights in bf16.
        let (rows, cols) = (weights / 2 / COLS, COLS);
        let made = Trial::encoded(format, rows, cols).unwrap_or(usize::MAX);
        let time = encode(&device, format, rows, cols, made).map_err(failed)?;
        let bytes_per_second = rate(rows * cols * 4 + made as u64, time);
        let of_copy = Some(bytes_per_second / copied);
        add(DeviceRate { what: "encode", detail, bytes_per_second, of_copy })?;
    }
    Ok(DeviceRates {
        ordinal,
        name: device.name().to_owned(),
        capability: device.capability().to_string(),
        driver: device.driver().to_string(),
        kernels: device.kernels(),
        rates,
    })
}

fn decode(
    device: &Arc<Device>,
    ty: GgmlType,
    weights: u64,
    source: usize,
    pinned: usize,
) -> Result<Duration, DriverError> {
    let mut trial = Trial::new(device, pinned, source, weights as usize * 2)?;
    // Whatever a type takes for a scale or a value is finite so, as in sound files.
    let mut blocks = noise(64 * ty.block_bytes() as usize);
    blocks.iter_mut().for_each(|byte| *byte &= 0x3F);
    trial.fill(&blocks)?;
    runs(|times| trial.decode(ty, weights, times))
}

fn encode(device: &Arc<Device>, format: Format, rows: u64, cols: u64, made: usize) -> Result<Duration, DriverError> {
    let source = (rows * cols * 4) as usize;
    let mut trial = Trial::new(device, PINNED.min(source), source, made)?;
    // Numbers below 1, of any size.
    let mut values = noise(1 << 12);
    values.iter_mut().for_each(|byte| *byte &= 0x3F);
    trial.fill(&values)?;
    runs(|times| trial.encode(format, rows, cols, times))
}

/// The median time of doing something once, having done it often enough.
fn runs(mut work: impl FnMut(u32) -> Result<Duration, DriverError>) -> Result<Duration, DriverError> {
    work(1)?;
    let once = work(1)?.max(Duration::from_micros(1));
    let times = u32::try_from(RUN.as_micros() / once.as_micros()).unwrap_or(u32::MAX).max(1);
    let each: Vec<Duration> = (0..RUNS).map(|_| Ok(work(times)? / times)).collect::<Result<_, DriverError>>()?;
    Ok(median(each))
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9)
}
