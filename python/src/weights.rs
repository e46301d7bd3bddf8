//! Weights decoded while they are consumed: from a GGUF, or from the blocks that a rank's files keep.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ggshard::gguf::OpenOptions;
use ggshard::runtime::{
    DecodedTensor, DecodedTensors, DeviceDecoded, DeviceLoaded, DeviceWeights, Loaded, RankOptions, Source,
    WeightOptions, Weights,
};
use pyo3::prelude::*;

use crate::checkpoint::set;
use crate::device::DeviceTensor;
use crate::errors::raise;
use crate::jobs::{float_type, input_scales, mtp_policy, opening, output_type};
use crate::tensor::Tensor;

/// Which weights, by keyword.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct WeightChoices {
    mapping: Option<String>,
    dtype: String,
    policy: Option<String>,
    keep_or: Option<String>,
    nvfp4_search: bool,
    input_scales: Option<String>,
    mtp: String,
    names: Option<Vec<String>>,
    threads: usize,
    memory: u64,
    allow_nonfinite: bool,
    io: String,
}

impl WeightChoices {
    fn options(self) -> PyResult<(WeightOptions, OpenOptions)> {
        let (dtype, opening) = (output_type(&self.dtype)?, opening(&self.io)?);
        let options = WeightOptions {
            mapping: self.mapping,
            keep_or: self.keep_or.as_deref().map(float_type).transpose()?,
            nvfp4_search: self.nvfp4_search,
            input_scales: input_scales(self.input_scales.as_deref())?,
            mtp: mtp_policy(&self.mtp)?,
            names: self.names,
            threads: self.threads,
            memory: self.memory,
            allow_nonfinite: self.allow_nonfinite,
            ..WeightOptions::default()
        };
        Ok((options.typed(&dtype, self.policy).map_err(raise)?, opening))
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

/// What is decoded, and where it comes to be.
pub enum Stream {
    /// A GGUF, in memory of the host.
    Host(Weights),
    /// A GGUF, in memory of a device.
    Device(DeviceWeights),
    /// A rank's files, in memory of the host.
    Rank(DecodedTensors),
    /// A rank's files, in memory of a device.
    RankOnDevice(DeviceDecoded),
}

impl Stream {
    fn remaining(&self) -> usize {
        match self {
            Stream::Host(weights) => weights.remaining(),
            Stream::Device(weights) => weights.weights().remaining(),
            Stream::Rank(tensors) => tensors.remaining(),
            Stream::RankOnDevice(tensors) => tensors.remaining(),
        }
    }

    /// What the user should know. A folder's warnings are in its manifest.
    fn warnings(&self) -> &[String] {
        match self {
            Stream::Host(weights) => weights.warnings(),
            Stream::Device(weights) => weights.weights().warnings(),
            Stream::Rank(_) | Stream::RankOnDevice(_) => &[],
        }
    }

    fn next(&mut self) -> Option<ggshard::Result<Item>> {
        match self {
            Stream::Host(weights) => weights.next().map(|next| next.map(Item::from)),
            Stream::Device(weights) => weights.next().map(|next| next.map(Item::Device)),
            Stream::Rank(tensors) => tensors.next().map(|next| next.map(Item::from)),
            Stream::RankOnDevice(tensors) => tensors.next().map(|next| next.map(Item::Device)),
        }
    }
}

/// A parameter.
enum Item {
    Host(String, Tensor),
    Device(DeviceLoaded),
}

impl From<Loaded> for Item {
    fn from(Loaded { name, bytes, dtype, shape, .. }: Loaded) -> Self {
        Item::Host(name, Tensor::new(Arc::new(bytes), dtype, shape))
    }
}

impl From<DecodedTensor> for Item {
    fn from(DecodedTensor { name, bytes, dtype, shape }: DecodedTensor) -> Self {
        Item::Host(name, Tensor::new(Arc::new(bytes), dtype, shape))
    }
}

impl WeightIterator {
    /// An iterator over what `start` begins.
    pub fn new(py: Python<'_>, start: impl FnOnce() -> ggshard::Result<Stream> + Send) -> PyResult<Self> {
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
            Some(Item::Host(name, tensor)) => Some((name, Py::new(py, tensor)?.into_any())),
            Some(Item::Device(DeviceLoaded { name, memory, dtype, shape, .. })) => {
                Some((name, Py::new(py, DeviceTensor::new(memory, dtype, shape))?.into_any()))
            }
        })
    }

    /// How many are yet to come.
    fn __length_hint__(&self, py: Python<'_>) -> usize {
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Stream::remaining))
    }

    /// What the user should know, in sentences.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> Vec<String> {
        let of = |stream: &Stream| stream.warnings().to_vec();
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
