//! `ggshard bench`

use std::process::ExitCode;

use anyhow::Result;
use ggshard::bench::{self, Conversion, DeviceRate, DeviceRates, Options, Rate, Run};
use ggshard::convert::{self, Request};
use ggshard::dequant::Simd;
use ggshard::engine::Device;
use serde::Serialize;

use super::args::Bench;
use super::print::{print, print_json};
use super::signals::Signals;

#[derive(Serialize)]
struct Report {
    simd: String,
    cpus: usize,
    rates: Vec<Rate>,
    conversions: Vec<Conversion>,
}

/// Measures, and prints each result as it comes.
pub fn bench(args: &Bench) -> Result<ExitCode> {
    let signals = Signals::heed()?;
    match &args.device {
        Some(device) => end(args, &signals, measure_device(args, device, &signals)),
        None => end(args, &signals, measure(args, &signals)),
    }
}

fn end(args: &Bench, signals: &Signals, result: ggshard::Result<impl Serialize>) -> Result<ExitCode> {
    if let Some(status) = signals.end(&result, "Nothing of it stays.") {
        return Ok(status);
    }
    let report = result?;
    if args.json {
        print_json(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints unless JSON is wanted.
fn show(args: &Bench, text: &str) {
    if !args.json {
        // Nobody reads on where this fails; the end of the run says so.
        let _ = print(text);
    }
}

#[derive(Serialize)]
struct DeviceReport {
    devices: Vec<DeviceRates>,
    conversions: Vec<Run>,
}

/// Measures devices, as rows of a Markdown table.
fn measure_device(args: &Bench, device: &Device, signals: &Signals) -> ggshard::Result<DeviceReport> {
    let cancel = signals.cancel();
    let options = Options { folder: &args.dir, file_bytes: args.size, simd: Simd::detect(), cancel: Some(&cancel) };
    let ordinals = match device {
        Device::Cpu | Device::Auto => &[][..],
        Device::Cuda(ordinals) => ordinals,
    };
    let mut devices = Vec::new();
    show(args, "| device | what | GB/s | of a copy on the device |\n|---|---|---:|---:|\n");
    for ordinal in ordinals {
        devices.push(bench::device(*ordinal, &options, &mut |rate| {
            let DeviceRate { what, detail, bytes_per_second, of_copy } = rate;
            let of_copy = of_copy.map(|part| format!("{:.0} %", part * 100.0)).unwrap_or_default();
            show(args, &format!("| cuda:{ordinal} | {what} {detail} | {:.1} | {of_copy} |\n", bytes_per_second / 1e9));
        })?);
    }
    let mut conversions = Vec::new();
    for (source, tp) in args.source.iter().flat_map(|source| args.tp.iter().map(move |tp| (source, *tp))) {
        let planned = convert::plan(source, &Request { tp, ..Request::default() }, false)?;
        for device in [&Device::Cpu, device] {
            let run = bench::convert_with(&planned, args.threads, device, &options)?;
            let rate = run.output_bytes as f64 / run.seconds.max(1e-9) / 1e9;
            let cpu = run.cpu_seconds;
            show(args, &format!("| {device} | convert, tp {tp}, {cpu:.2} CPU s | {rate:.2} | |\n"));
            conversions.push(run);
        }
    }
    Ok(DeviceReport { devices, conversions })
}

fn measure(args: &Bench, signals: &Signals) -> ggshard::Result<Report> {
    let cancel = signals.cancel();
    let options = Options { folder: &args.dir, file_bytes: args.size, simd: Simd::detect(), cancel: Some(&cancel) };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    show(args, &format!("{:?}, {cpus} CPUs. One core, GB/s: of wall time, of CPU time\n", options.simd));
    let rates = bench::machine(&options, &mut |rate| {
        let Rate { what, detail, bytes_per_second, bytes_per_cpu_second } = rate;
        show(
            args,
            &format!("{what:8} {detail:24} {:7.2} {:7.2}\n", bytes_per_second / 1e9, bytes_per_cpu_second / 1e9),
        );
    })?;
    let mut conversions = Vec::new();
    for tp in args.source.iter().flat_map(|_| &args.tp) {
        let Some(source) = &args.source else { break };
        let request = Request { tp: *tp, ..Request::default() };
        let planned = convert::plan(source, &request, false)?;
        let done = bench::conversion(&planned, args.threads, &rates, &options)?;
        let parts = done.ceiling_cpu_seconds;
        show(
            args,
            &format!(
                "convert  tp {tp}: {} bytes in {:.2} s, {:.2} CPU s; alone decode {:.2}, hash {:.2}, write {:.2}: {:.0} % of the ceiling\n",
                done.output_bytes,
                done.seconds,
                done.cpu_seconds,
                parts.decode,
                parts.hash,
                parts.write,
                done.fraction_of_ceiling * 100.0
            ),
        );
        conversions.push(done);
    }
    Ok(Report { simd: format!("{:?}", options.simd), cpus, rates, conversions })
}
