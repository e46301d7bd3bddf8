//! The commands.

use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;
use ggshard::check;
use ggshard::convert::{self, InputScalesFrom, Planned, Request};
use ggshard::engine;
use ggshard::gguf::{Description, GgufSet, OpenOptions};
use ggshard::output::{Deviating, Deviation};
use ggshard::plan::Picture;
use ggshard::verify;
use serde::Serialize;

use super::args::{Args, Command, Convert, Inspect, PlanArgs, PlanChoices, ReadChoices, Seal, Verify};
use super::print::{print, print_json};
use super::signals::Signals;
use super::{bench, devices, library, page, progress, sigbus, signals};

/// Runs a command.
pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Inspect(args) => inspect(&args),
        Command::Plan(args) => plan(&args),
        Command::Convert(args) => convert(&args),
        Command::Seal(args) => seal(&args),
        Command::Verify(args) => verify(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Devices(args) => devices::devices(&args),
        Command::Mappings(args) => library::mappings(&args),
        Command::Profiles(args) => library::profiles(&args),
        Command::Policies(args) => library::policies(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "ggshard", &mut script);
            std::io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// What `inspect --json` prints.
#[derive(Serialize)]
struct Inspected {
    #[serde(flatten)]
    description: Description,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<check::Report>,
}

fn inspect(args: &Inspect) -> Result<ExitCode> {
    let set = GgufSet::open_with(&args.source, opening(&args.read, sigbus::reading))?;
    let description = Description::from_set(&set);
    let mut report = None;
    if args.check {
        let signals = Signals::heed()?;
        let options = check::Options { hash: args.hash, threads: args.threads, cancel: Some(signals.cancel()) };
        let bar = progress::bytes(check::bytes(&set), "checking");
        let result = check::check(&set, &options, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        if let Some(status) = signals.end(&result, "There is no verdict.") {
            return Ok(status);
        }
        report = Some(result?);
    }
    let ok = report.as_ref().is_none_or(check::Report::ok);
    if args.json {
        print_json(&Inspected { description, check: report })?;
    } else {
        let found = report.map(|report| format!("\n{}", report.render())).unwrap_or_default();
        print(&format!("{}{found}", description.render(args.tensors)))?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn opening(choices: &ReadChoices, on_map: fn(&Path, Range<usize>)) -> OpenOptions {
    OpenOptions { io: choices.io.into(), on_map: Some(on_map), ..OpenOptions::default() }
}

fn request(choices: &PlanChoices) -> Result<Request> {
    let request = Request {
        mapping: choices.mapping.clone(),
        profile: choices.profile.clone(),
        tp: choices.tp,
        keep_or: choices.keep_or.map(Into::into),
        nvfp4_search: choices.nvfp4_search,
        input_scales: choices.input_scales.as_deref().map(InputScalesFrom::load).transpose()?,
        mtp: choices.mtp.into(),
        part_size: choices.part_size,
        pp: choices.pp.unwrap_or(choices.pp_layers.len().max(1) as u32),
        stage_layers: choices.pp_layers.clone(),
        expert_parallel: choices.ep,
        moe_pad: choices.moe_pad,
        ..Request::default()
    };
    Ok(request.typed(choices.dtype.name(), choices.policy.clone())?)
}

fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let opening = OpenOptions { header_only: args.header_only, ..opening(&args.choices.read, sigbus::reading) };
    let planned = convert::plan_set(GgufSet::open_with(&args.choices.source, opening)?, &request(&args.choices)?)?;
    // Whatever `convert` would refuse about the config, it refuses here.
    convert::extras(&planned, None)?;
    if let Some(path) = &args.html {
        page::write(path, picture(&planned).to_html().as_bytes())?;
    }
    let mut summary = planned.plan.summary(&planned.mapping.chosen, args.json);
    summary.gpu_memory = args.gpu_memory.map(|bytes| summary.fit(bytes));
    if args.json {
        print_json(&summary)?;
    } else {
        print(&summary.render())?;
        if let Some(path) = &args.html {
            print(&format!("picture    {}\n", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The picture of a plan, named as the model names itself, or else after its file.
fn picture(planned: &Planned) -> Picture {
    let named = planned.set.metadata().str("general.name").ok().flatten();
    let file = planned.set.path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    planned.plan.picture(named.unwrap_or(&file), &planned.mapping.chosen)
}

fn convert(args: &Convert) -> Result<ExitCode> {
    let signals = Signals::heed()?;
    let set = GgufSet::open_with(&args.choices.source, opening(&args.choices.read, sigbus::converting))?;
    let planned = convert::plan_set(set, &request(&args.choices)?)?;
    let Planned { plan, mapping, .. } = &planned;
    tracing::info!(mapping = plan.model.mapping.name, "{}", mapping.chosen);
    let extras = convert::extras(&planned, args.config.as_deref())?;
    for warning in &plan.model.warnings {
        tracing::warn!("{warning}");
    }
    let ranks = args.ranks.as_ref().map(|r| r.0.clone()).unwrap_or_default();
    let total: u64 =
        plan.files.iter().filter(|f| ranks.is_empty() || ranks.contains(&f.rank)).map(|f| f.data_bytes).sum();
    let mut options = engine::Options {
        ranks,
        threads: args.threads,
        buffer_bytes: args.mem_limit,
        allow_nonfinite: args.allow_nonfinite,
        track_reads: args.track_reads,
        device: args.device.clone(),
        cancel: Some(signals.cancel()),
        ..engine::Options::default()
    };
    options.tile_bytes = args.tile_size.unwrap_or(options.tile_bytes);
    let bar = progress::bytes(total, "converting");
    let output = convert::Output {
        folder: &args.output,
        resume: args.resume,
        keep: true,
        same_source: args.same_source,
        seal: args.seal.then_some(true),
        direct: args.direct.into(),
        hash_source: args.hash_source,
        max_error: args.max_error,
    };
    let result = convert::convert(&planned, output, options, &extras, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    if let Some(status) = signals.end(&result, signals::how_to_resume()) {
        return Ok(status);
    }
    let report = result?;
    for (name, (nan, inf, overflow)) in &report.nonfinite {
        tracing::warn!("tensor '{name}': {nan} NaN, {inf} infinite, {overflow} overflowed values were let through");
    }
    if args.json {
        print_json(&report)?;
    } else {
        let summary = plan.summary(&mapping.chosen, false);
        let notes: String = extras.notes.iter().map(|note| format!("note       {note}\n")).collect();
        let worst: String = report.worst.tensors().iter().map(deviation).collect();
        let kept = match report.kept_files {
            0 => String::new(),
            n => format!(" ({n} of them finished before)"),
        };
        let manifest = args.output.join(convert::MANIFEST);
        let end = match report.sealed {
            true => format!("manifest   {}\n", manifest.display()),
            false => format!("unsealed   when all ranks are made: ggshard seal {}\n", args.output.display()),
        };
        print(&format!(
            "{}{notes}{worst}written    {} tensors in {} files{kept}, {} bytes, from {} bytes of source\n{end}",
            summary.render(),
            report.tensors,
            report.files,
            report.output_bytes,
            report.source_bytes,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A line about an encoded tensor.
fn deviation(found: &Deviating) -> String {
    let Deviating { tensor, file, deviation: Deviation { relative_rms, largest_error } } = found;
    format!("error      {relative_rms} relative RMS, at most {largest_error}: {tensor} ({file})\n")
}

fn seal(args: &Seal) -> Result<ExitCode> {
    let ranks = args.ranks.as_ref().map(|r| r.0.clone()).unwrap_or_default();
    let sealed = convert::seal(&args.folder, &ranks)?;
    if args.json {
        print_json(&sealed)?;
    } else {
        print(&format!(
            "{} {} files, {} bytes, ranks {:?} of {}\nmanifest   {}\n",
            if sealed.already { "sealed before:" } else { "sealed    " },
            sealed.files,
            sealed.output_bytes,
            sealed.ranks,
            sealed.tp,
            args.folder.join(convert::MANIFEST).display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(args: &Verify) -> Result<ExitCode> {
    let signals = Signals::heed()?;
    let options = verify::Options { rank: args.rank, threads: args.threads, cancel: Some(signals.cancel()) };
    let reference = args.reference.as_deref().map(|folder| verify::Reference { folder, max_rms: args.max_rms });
    let against =
        verify::Against { source: args.source.as_deref(), open: opening(&args.read, sigbus::reading), reference };
    let bar = progress::bytes(0, "verifying");
    let result = verify::verify_against(&args.folder, options, against, &|step| match step {
        verify::Step::Begin { check, bytes } => {
            bar.reset();
            bar.set_length(bytes);
            bar.set_message(format!("verifying {check}"));
        }
        verify::Step::Bytes(bytes) => bar.inc(bytes),
    });
    bar.finish_and_clear();
    if let Some(status) = signals.end(&result, "There is no verdict.") {
        return Ok(status);
    }
    let report = result?;
    let text = if args.json { report.to_json()? } else { report.to_string() };
    print(&format!("{text}\n"))?;
    Ok(if report.ok() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
