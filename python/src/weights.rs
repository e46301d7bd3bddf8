//! Weights decoded from a GGUF while they are consumed.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ggshard::gguf::OpenOptions;
use ggshard::runtime::{DeviceLoaded, DeviceWeights, Loaded, RankOptions, Source, WeightOptions, Weights};
use pyo3::prelude::*;

use crate::checkpoint::set;
use crate::device::DeviceTensor;
use crate::errors::raise;
use crate::jobs::{float_type, mtp_policy, opening};
use crate::tensor::Tensor;

/// Which weights, by keyword.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct WeightChoices {
    mapping: Option<String>,
    dtype: String,
    mtp: String,
    names: Option<Vec<String>>,
    threads: usize,
    memory: u64,
    allow_nonfinite: bool,
    io: String,
}

impl WeightChoices {
    fn options(self) -> PyResult<(WeightOptions, OpenOptions)> {
        let WeightChoices { mapping, dtype, mtp, names, threads, memory, allow_nonfinite, io } = self;
        let (dtype, mtp) = (float_type(&dtype)?, mtp_policy(&mtp)?);
        Ok((WeightOptions { mapping, dtype, mtp, names, threads, memory, allow_nonfinite }, opening(&io)?))
    }
}

/// Which rank of which layout, by keyword.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct RankChoices {
    profile: String,
    tp: u32,
    rank: u32,
    ep: bool,
    pp: u32,
    pp_layers: Option<Vec<u64>>,
    stage: Option<u32>,
    moe_pad: Option<u64>,
    set: Option<String>,
}

impl RankChoices {
    fn options(self, weights: WeightOptions) -> PyResult<RankOptions> {
        let stage_layers = self.pp_layers.unwrap_or_default();
        Ok(RankOptions {
            profile: self.profile,
            tp: self.tp,
            rank: self.rank,
            pp: if stage_layers.is_empty() { self.pp } else { stage_layers.len() as u32 },
            stage_layers,
            stage: self.stage,
            expert_parallel: self.ep,
            moe_pad: self.moe_pad,
            set: self.set.as_deref().map(set).transpose()?,
            weights,
        })
    }
}

/// An iterator over names and tensors. Any thread may take the next; each is given once.
#[pyclass(frozen, module = "ggshard._ggshard")]
pub struct WeightIterator(Mutex<Option<Stream>>);

/// Where the parameters come to be.
enum Stream {
    Host(Weights),
    Device(DeviceWeights),
}

impl Stream {
    fn weights(&self) -> &Weights {
        match self {
            Stream::Host(weights) => weights,
            Stream::Device(weights) => weights.weights(),
        }
    }

    fn next(&mut self) -> Option<ggshard::Result<Item>> {
        match self {
            Stream::Host(weights) => weights.next().map(|next| next.map(Item::Host)),
            Stream::Device(weights) => weights.next().map(|next| next.map(Item::Device)),
        }
    }
}

/// A parameter.
enum Item {
    Host(Loaded),
    Device(DeviceLoaded),
}

impl WeightIterator {
    fn new(py: Python<'_>, start: impl FnOnce() -> ggshard::Result<Stream> + Send) -> PyResult<Self> {
        py.detach(start).map(|stream| WeightIterator(Mutex::new(Some(stream)))).map_err(raise)
    }
}

#[pymethods]
impl WeightIterator {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(String, Py<PyAny>)>> {
        let next = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(Stream::next));
        Ok(match next.transpose().map_err(raise)? {
            None => None,
            Some(Item::Host(Loaded { name, bytes, dtype, shape, .. })) => {
                Some((name, Py::new(py, Tensor::new(Arc::new(bytes), dtype, shape))?.into_any()))
            }
            Some(Item::Device(DeviceLoaded { name, memory, dtype, shape, .. })) => {
                Some((name, Py::new(py, DeviceTensor::new(memory, dtype, shape))?.into_any()))
            }
        })
    }

    /// How many are yet to come.
    fn __length_hint__(&self, py: Python<'_>) -> usize {
        py.detach(|| {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, |s| s.weights().remaining())
        })
    }

    /// What the user should know, in sentences.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> Vec<String> {
        let of = |stream: &Stream| stream.weights().warnings().to_vec();
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or_else(Vec::new, of))
    }

    /// Ends the decoding; there are no more items.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

impl Drop for WeightIterator {
    fn drop(&mut self) {
        // The workers are waited for, and need no interpreter; whoever holds it must not stand still for them.
        let weights = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        Python::attach(|py| py.detach(|| drop(weights)));
    }
}

/// Weights by their names in the original checkpoint.
#[pyfunction]
pub fn iter_weights(py: Python<'_>, src: PathBuf, choices: WeightChoices) -> PyResult<WeightIterator> {
    let (options, opening) = choices.options()?;
    WeightIterator::new(py, || Source::open_with(&src, opening)?.weights(options).map(Stream::Host))
}

/// One rank's parameters of a layout, in host memory or on a device.
#[pyfunction]
#[pyo3(signature = (src, layout, choices, device))]
pub fn iter_rank(
    py: Python<'_>,
    src: PathBuf,
    layout: RankChoices,
    choices: WeightChoices,
    device: Option<u32>,
) -> PyResult<WeightIterator> {
    let (weights, opening) = choices.options()?;
    let options = layout.options(weights)?;
    WeightIterator::new(py, || {
        let source = Source::open_with(&src, opening)?;
        match device {
            Some(device) => source.rank_on(options, device).map(Stream::Device),
            None => source.rank(options).map(Stream::Host),
        }
    })
}
