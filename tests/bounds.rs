//! Inputs made to cost much: a typed error, or a plan, in bounded time and memory. Each test is named after what it
//! prevents.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ggshard::dequant::FloatType;
use ggshard::gguf::{GgmlType, GgufSet};
use ggshard::mapping::{Mapping, Model, MtpPolicy, Profile, choose, config, resolve};
use ggshard::plan::{Plan, PlanRequest, Policy};
use ggshard::{Error, Result};

#[path = "common/allocations.rs"]
mod allocations;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;
#[path = "common/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

use gguf_writer::GgufBuilder;

#[path = "bounds/headers.rs"]
mod headers;
#[path = "bounds/profiles.rs"]
mod profiles;
#[path = "bounds/rules.rs"]
mod rules;

/// One at a time, so that memory is the test's own.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs what must end soon and stay small, in this unoptimised build.
#[track_caller]
fn bounded<T>(megabytes: usize, work: impl FnOnce() -> T) -> T {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = allocations::HELD.load(Ordering::Relaxed);
    allocations::PEAK.store(before, Ordering::Relaxed);
    let start = Instant::now();
    let result = work();
    let (took, peak) = (start.elapsed(), allocations::PEAK.load(Ordering::Relaxed) - before);
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(peak < megabytes << 20, "{} MiB", peak >> 20);
    result
}

/// The message of an error of the kind that `is` accepts.
#[track_caller]
fn refused<T>(result: Result<T>, is: fn(&Error) -> bool, with: &str) -> String {
    let Err(error) = result else { panic!("accepted; expected '{with}'") };
    let text = error.to_string();
    assert!(is(&error) && text.contains(with) && text.len() < 20_000, "{error:?}");
    text
}

fn rules(error: &Error) -> bool {
    matches!(error, Error::Rules(_))
}

fn contradiction(error: &Error) -> bool {
    matches!(error, Error::Contradiction(_))
}

fn layout(error: &Error) -> bool {
    matches!(error, Error::Layout(_))
}

/// A mapping that begins like any other.
fn mapping(rest: &str) -> Result<Mapping> {
    Mapping::from_texts(&[format!("name = 'x'\nclass = 'C'\n{rest}")])
}

/// One weight, and what is said of it.
fn weight(name: &str, shape: &str, more: &str) -> String {
    format!("[[weight]]\nname = '{name}'\nshape = {shape}\ncut = 'replicated'\n{more}\n")
}

/// What a mapping makes of a file, planned for `tp` ranks.
fn planned(set: &GgufSet, mapping: &Mapping, tp: u32) -> Result<Plan> {
    plan_model(set, resolve(mapping, set, MtpPolicy::Keep)?, tp, plans::policy())
}

fn plan_model(set: &GgufSet, model: Model, tp: u32, policy: Policy) -> Result<Plan> {
    Plan::audited(set, model, PlanRequest::new(Profile::load("hf")?, tp, policy))
}

/// A file whose data are not there, written to disk since only a path can be opened without its data.
fn header_only(file: GgufBuilder) -> GgufSet {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("header.gguf");
    std::fs::write(&path, file.build()).unwrap();
    GgufSet::open_header_only(&path).unwrap()
}
