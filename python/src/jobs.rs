//! The program's commands as functions.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use ggshard::convert::{self as conversion, InputScalesFrom, Request};
use ggshard::dequant::FloatType;
use ggshard::engine;
use ggshard::gguf::{Description, GgufSet, Io, OpenOptions};
use ggshard::mapping::MtpPolicy;
use ggshard::verify::{self as verification, Against, Reference, Step};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::raise;
use crate::json::to_dict;
use crate::watch;

/// Output types of files that are no float types; there is an output policy behind each.
const POLICIES: [&str; 3] = ["fp8", "nvfp4", "keep"];

/// The float type of that name.
pub fn float_type(name: &str) -> PyResult<FloatType> {
    match name.to_ascii_lowercase().as_str() {
        "bf16" => Ok(FloatType::BF16),
        "f16" => Ok(FloatType::F16),
        "f32" => Ok(FloatType::F32),
        _ => Err(PyValueError::new_err(format!("dtype is '{name}'; expected 'bf16', 'f16' or 'f32'"))),
    }
}

/// The output type of that name: a float type, or a name that stands for a policy.
pub fn output_type(name: &str) -> PyResult<String> {
    let name = name.to_ascii_lowercase();
    if !POLICIES.contains(&name.as_str()) {
        float_type(&name)?;
    }
    Ok(name)
}

/// Scales of activations from the place of that name.
pub fn input_scales(place: Option<&str>) -> PyResult<Option<InputScalesFrom>> {
    place.map(InputScalesFrom::load).transpose().map_err(raise)
}

/// The policy of that name.
pub fn mtp_policy(name: &str) -> PyResult<MtpPolicy> {
    let all = [MtpPolicy::Keep, MtpPolicy::Drop, MtpPolicy::Only];
    let found = all.into_iter().find(|policy| policy.name() == name);
    found.ok_or_else(|| PyValueError::new_err(format!("mtp is '{name}'; expected 'keep', 'drop' or 'only'")))
}

/// How a source is opened whose bytes are fetched in the way of that name.
pub fn opening(io: &str) -> PyResult<OpenOptions> {
    let io = match io {
        // Never mapped unasked: what happens to a mapped file can end the whole process.
        "auto" | "pread" => Io::Pread,
        "mmap" => Io::Mmap,
        _ => return Err(PyValueError::new_err(format!("io is '{io}'; expected 'auto', 'pread' or 'mmap'"))),
    };
    Ok(OpenOptions { io, ..OpenOptions::default() })
}

/// What every planning function is asked for, by keyword.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Choices {
    tp: u32,
    profile: String,
    mapping: Option<String>,
    dtype: String,
    policy: Option<String>,
    keep_or: Option<String>,
    nvfp4_search: bool,
    input_scales: Option<String>,
    mtp: String,
    ep: bool,
    pp: u32,
    pp_layers: Option<Vec<u64>>,
    moe_pad: Option<u64>,
    part_size: Option<u64>,
}

impl Choices {
    /// The request of the library.
    pub fn request(self) -> PyResult<Request> {
        if self.tp == 0 || self.pp == 0 {
            return Err(PyValueError::new_err("tp and pp are at least 1"));
        }
        let stage_layers = self.pp_layers.unwrap_or_default();
        let dtype = output_type(&self.dtype)?;
        let request = Request {
            mapping: self.mapping,
            profile: self.profile,
            tp: self.tp,
            keep_or: self.keep_or.as_deref().map(float_type).transpose()?,
            nvfp4_search: self.nvfp4_search,
            input_scales: input_scales(self.input_scales.as_deref())?,
            mtp: mtp_policy(&self.mtp)?,
            part_size: self.part_size.unwrap_or(conversion::PART_SIZE),
            pp: if stage_layers.is_empty() { self.pp } else { stage_layers.len() as u32 },
            stage_layers,
            expert_parallel: self.ep,
            moe_pad: self.moe_pad,
            ..Request::default()
        };
        request.typed(&dtype, self.policy).map_err(raise)
    }
}

/// What a GGUF holds.
#[pyfunction]
pub fn inspect(py: Python<'_>, src: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let set = py.detach(|| GgufSet::open(&src)).map_err(raise)?;
    to_dict(py, &Description::from_set(&set))
}

/// What a conversion would write.
#[pyfunction]
pub fn plan(py: Python<'_>, src: PathBuf, choices: Choices, header_only: bool) -> PyResult<Bound<'_, PyAny>> {
    let request = choices.request()?;
    let planned = py.detach(|| conversion::plan(&src, &request, header_only)).map_err(raise)?;
    to_dict(py, &planned.plan.summary(&planned.mapping.chosen, true))
}

/// Writes a checkpoint.
#[pyfunction]
#[pyo3(signature = (src, out, choices, ranks, threads, device, config, allow_nonfinite, io, ending, progress))]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of the Python function")]
pub fn convert(
    py: Python<'_>,
    src: PathBuf,
    out: PathBuf,
    choices: Choices,
    ranks: Option<Vec<u32>>,
    threads: usize,
    device: String,
    config: Option<PathBuf>,
    allow_nonfinite: bool,
    io: String,
    ending: Ending,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'_, PyAny>> {
    let request = choices.request()?;
    let opening = opening(&io)?;
    let device: engine::Device = device.parse().map_err(PyValueError::new_err)?;
    if ranks.as_ref().is_some_and(Vec::is_empty) {
        return Err(PyValueError::new_err("ranks is empty; expected the ranks to write, or None for all"));
    }
    let ranks = ranks.unwrap_or_default();
    let report = watch::run(py, progress, move |meter| {
        let planned = conversion::plan_set(GgufSet::open_with(&src, opening)?, &request)?;
        let extras = conversion::extras(&planned, config.as_deref())?;
        let wanted = planned.plan.files.iter().filter(|f| ranks.is_empty() || ranks.contains(&f.rank));
        meter.total.store(wanted.map(|f| f.data_bytes).sum(), Ordering::Relaxed);
        let cancel = Some(meter.cancel.clone());
        let Ending { resume, same_source, seal, hash_source, direct } = ending;
        let direct = match direct {
            None => conversion::Direct::Auto,
            Some(true) => conversion::Direct::On,
            Some(false) => conversion::Direct::Off,
        };
        let options = engine::Options { ranks, threads, device, allow_nonfinite, cancel, ..Default::default() };
        // Who resumes wants to resume again.
        let keep = resume;
        let from = conversion::Output::from(&out);
        let output = conversion::Output { resume, keep, same_source, seal, direct, hash_source, ..from };
        let progress = |bytes| {
            meter.done.fetch_add(bytes, Ordering::Relaxed);
        };
        conversion::convert(&planned, output, options, &extras, &progress)
    })?;
    to_dict(py, &report)
}

/// How a conversion begins and ends.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Ending {
    resume: bool,
    same_source: bool,
    seal: Option<bool>,
    hash_source: bool,
    direct: Option<bool>,
}

/// Makes a folder of converted ranks a checkpoint.
#[pyfunction]
#[pyo3(signature = (dir, ranks))]
pub fn seal(py: Python<'_>, dir: PathBuf, ranks: Vec<u32>) -> PyResult<Bound<'_, PyAny>> {
    let sealed = py.detach(|| conversion::seal(&dir, &ranks)).map_err(raise)?;
    to_dict(py, &sealed)
}

/// Checks a checkpoint.
#[pyfunction]
#[pyo3(signature = (dir, source, reference, rank, max_rms, threads, progress))]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of the Python function")]
pub fn verify(
    py: Python<'_>,
    dir: PathBuf,
    source: Option<PathBuf>,
    reference: Option<PathBuf>,
    rank: Option<u32>,
    max_rms: f64,
    threads: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'_, PyAny>> {
    if !(max_rms.is_finite() && max_rms >= 0.0) {
        return Err(PyValueError::new_err(format!("max_rms is {max_rms}; expected a number from 0 up")));
    }
    let report = watch::run(py, progress, move |meter| {
        let reference = reference.as_deref().map(|folder| Reference { folder, max_rms });
        let against = Against { source: source.as_deref(), reference, ..Against::default() };
        let options = verification::Options { rank, threads, cancel: Some(meter.cancel.clone()) };
        verification::verify_against(&dir, options, against, &|step| match step {
            Step::Begin { bytes, .. } => {
                meter.total.fetch_add(bytes, Ordering::Relaxed);
            }
            Step::Bytes(bytes) => {
                meter.done.fetch_add(bytes, Ordering::Relaxed);
            }
        })
    })?;
    let verdict = to_dict(py, &report)?;
    verdict.set_item("ok", report.ok())?;
    Ok(verdict)
}
