//! `ggshard bench`

use std::process::ExitCode;

use anyhow::Result;
use ggshard::bench::{self, Conversion, Options, Rate};
use ggshard::convert::{self, Request};
use ggshard::dequant::Simd;
use serde::Serialize;

use super::args::Bench;
use super::run::{print, print_json};
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
    let result = measure(args, &signals);
    if let Some(status) = signals.end(&result, "Nothing of it stays.") {
        return Ok(status);
    }
    let report = result?;
    if args.json {
        print_json(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Bench, signals: &Signals) -> ggshard::Result<Report> {
    let show = |text: String| {
        if !args.json {
            // Nobody reads on where this fails; the end of the run says so.
            let _ = print(&text);
        }
    };
    let cancel = signals.cancel();
    let options = Options { folder: &args.dir, file_bytes: args.size, simd: Simd::detect(), cancel: Some(&cancel) };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    show(format!("{:?}, {cpus} CPUs. One core, GB/s: of wall time, of CPU time\n", options.simd));
    let rates = bench::machine(&options, &mut |rate| {
        let Rate { what, detail, bytes_per_second, bytes_per_cpu_second } = rate;
        show(format!("{what:8} {detail:24} {:7.2} {:7.2}\n", bytes_per_second / 1e9, bytes_per_cpu_second / 1e9));
    })?;
    let mut conversions = Vec::new();
    for tp in args.source.iter().flat_map(|_| &args.tp) {
        let Some(source) = &args.source else { break };
        let request = Request { tp: *tp, ..Request::default() };
        let planned = convert::plan(source, &request, false)?;
        let done = bench::conversion(&planned, args.threads, &rates, &options)?;
        let parts = done.ceiling_cpu_seconds;
        show(format!(
            "convert  tp {tp}: {} bytes in {:.2} s, {:.2} CPU s; alone decode {:.2}, hash {:.2}, write {:.2}: {:.0} % of the ceiling\n",
            done.output_bytes,
            done.seconds,
            done.cpu_seconds,
            parts.decode,
            parts.hash,
            parts.write,
            done.fraction_of_ceiling * 100.0
        ));
        conversions.push(done);
    }
    Ok(Report { simd: format!("{:?}", options.simd), cpus, rates, conversions })
}
