//! A conversion beside the sum of its parts.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use super::{Options, Rate, cpu_time, machine, median};
use crate::convert::{Extras, Planned, convert};
use crate::engine::{self, Device};
use crate::error::{Error, Result};
use crate::gguf::GgmlType;
use crate::plan::Plan;

/// A conversion, measured.
#[derive(Debug, Clone, Serialize)]
pub struct Conversion {
    /// Number of ranks.
    pub tp: u32,
    /// Number of threads; 0 for one per CPU.
    pub threads: usize,
    /// Bytes of the source.
    pub source_bytes: u64,
    /// Bytes of the safetensors files.
    pub output_bytes: u64,
    /// Seconds from beginning to end, the median of several runs.
    pub seconds: f64,
    /// CPU seconds of all threads.
    pub cpu_seconds: f64,
    /// CPU seconds that decoding, hashing and writing the same bytes take alone.
    pub ceiling_cpu_seconds: Parts,
    /// The sum of those, divided by the CPU seconds: 1 is a conversion that does nothing else.
    pub fraction_of_ceiling: f64,
}

/// CPU seconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Parts {
    /// Decoding every weight once.
    pub decode: f64,
    /// Hashing every tensor, those that ranks share once, and every file.
    pub hash: f64,
    /// Writing every file into the page cache.
    pub write: f64,
}

/// Several conversions of one plan.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Number of ranks.
    pub tp: u32,
    /// What decoded.
    pub device: String,
    /// Bytes of the safetensors files.
    pub output_bytes: u64,
    /// Seconds from beginning to end, the median.
    pub seconds: f64,
    /// CPU seconds of all threads, the median.
    pub cpu_seconds: f64,
}

/// Converts into `options.folder` several times with a device.
pub fn convert_with(planned: &Planned, threads: usize, device: &Device, options: &Options<'_>) -> Result<Run> {
    const RUNS: usize = 3;
    let output = options.folder.join(format!("ggshard-bench-{}.out", std::process::id()));
    let (mut walls, mut cpus, mut output_bytes) = (Vec::new(), Vec::new(), 0);
    for _ in 0..RUNS {
        let (cpu, wall) = (cpu_time(), Instant::now());
        let engine = engine::Options {
            threads,
            simd: options.simd,
            device: device.clone(),
            allow_nonfinite: true,
            ..Default::default()
        };
        let converted = convert(planned, &output, engine, &Extras::default(), &|_| {});
        walls.push(wall.elapsed());
        cpus.push(cpu_time() - cpu);
        // A failed one leaves nothing.
        output_bytes = converted?.output_bytes;
        std::fs::remove_dir_all(&output).map_err(|e| Error::io("remove", &output, e))?;
        options.check_cancel()?;
    }
    Ok(Run {
        tp: planned.plan.tp,
        device: device.to_string(),
        output_bytes,
        seconds: median(walls).as_secs_f64(),
        cpu_seconds: median(cpus).as_secs_f64(),
    })
}

/// Converts into `options.folder` several times, and compares with `rates`, as [`super::machine`] gave them.
pub fn conversion(planned: &Planned, threads: usize, rates: &[Rate], options: &Options<'_>) -> Result<Conversion> {
    let Run { output_bytes, seconds, cpu_seconds, .. } = convert_with(planned, threads, &Device::Cpu, options)?;
    let plan = &planned.plan;
    let parts = parts(plan, output_bytes, rates, options);
    Ok(Conversion {
        tp: plan.tp,
        threads,
        source_bytes: plan.sources.iter().map(|source| source.bytes).sum(),
        output_bytes,
        seconds,
        cpu_seconds,
        ceiling_cpu_seconds: parts,
        fraction_of_ceiling: (parts.decode + parts.hash + parts.write) / cpu_seconds.max(1e-9),
    })
}

fn parts(plan: &Plan, output_bytes: u64, rates: &[Rate], options: &Options<'_>) -> Parts {
    let rate = |what: &str, detail: &str| {
        let found = rates.iter().find(|rate| rate.what == what && rate.detail.contains(detail));
        found.map_or(f64::INFINITY, |rate| rate.bytes_per_cpu_second)
    };
    let mut elements: BTreeMap<&str, (u64, GgmlType)> = BTreeMap::new();
    for source in &plan.sources {
        elements.entry(source.ty.name()).or_insert((0, source.ty)).0 += source.elements;
    }
    let decode = elements.iter().map(|(name, (count, ty))| {
        let known = rates.iter().find(|rate| rate.what == "decode" && rate.detail == *name).cloned();
        let rate = known.or_else(|| machine::decode(*ty, options.simd));
        rate.map_or(0.0, |rate| (*count * 2) as f64 / rate.bytes_per_cpu_second)
    });
    let distinct: u64 = plan
        .params
        .iter()
        .flat_map(|param| {
            let own = |(rank, _): &(usize, _)| param.first_holder(*rank as u32) == *rank as u32;
            param.slices.iter().enumerate().filter(own).map(|(_, slice)| plan.slice_bytes(param, slice))
        })
        .sum();
    Parts {
        decode: decode.sum(),
        hash: (distinct + output_bytes) as f64 / rate("hash", "BLAKE3"),
        write: output_bytes as f64 / rate("write", "page cache"),
    }
}
