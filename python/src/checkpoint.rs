//! One rank of a converted folder, as a mapping from names to tensors.

use std::path::PathBuf;
use std::sync::Arc;

use ggshard::runtime::{Blocks, DecodeOptions, OpenOptions, RankCheckpoint, Set, SharedTensor, Verify};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::errors::raise;
use crate::jobs::float_type;
use crate::tensor::Tensor;
use crate::weights::{Stream, WeightIterator};

/// The set of that name.
pub fn set(name: &str) -> PyResult<Set> {
    match name {
        "main" => Ok(Set::Main),
        "draft" => Ok(Set::Draft),
        _ => Err(PyValueError::new_err(format!("set is '{name}'; expected 'main' or 'draft'"))),
    }
}

/// A mapped file, as the bytes of a tensor in it.
struct Mapped(SharedTensor);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// An open rank. What every mapping has beside these methods is added in `ggshard/checkpoint.py`.
#[pyclass(frozen, subclass, module = "ggshard._ggshard")]
pub struct Rank(RankCheckpoint);

/// What blocks are, for Python.
type Described<'py> = (String, &'static str, Bound<'py, PyTuple>);

impl Rank {
    fn known(&self, name: &str) -> PyResult<()> {
        self.0.get(name).map(drop).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }
}

#[pymethods]
impl Rank {
    #[new]
    #[pyo3(signature = (dir, rank, verify, set_name, stage, threads))]
    fn open(
        py: Python<'_>,
        dir: PathBuf,
        rank: u32,
        verify: bool,
        set_name: &str,
        stage: Option<u32>,
        threads: usize,
    ) -> PyResult<Self> {
        let verify = if verify { Verify::Full } else { Verify::No };
        let options = OpenOptions { verify, set: set(set_name)?, stage, threads };
        py.detach(|| RankCheckpoint::open(&dir, rank, options)).map(Rank).map_err(raise)
    }

    #[getter]
    fn dir(&self) -> PathBuf {
        self.0.dir().to_path_buf()
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    #[getter]
    fn stage(&self) -> Option<u32> {
        self.0.stage()
    }

    #[getter]
    fn tp(&self) -> u32 {
        self.0.tp()
    }

    #[getter]
    fn pp(&self) -> u32 {
        self.0.pp()
    }

    #[getter]
    fn expert_parallel(&self) -> bool {
        self.0.expert_parallel()
    }

    #[getter]
    fn profile(&self) -> &str {
        self.0.profile()
    }

    #[getter]
    fn launch(&self) -> Vec<String> {
        self.0.launch().to_vec()
    }

    #[getter]
    fn model_class(&self) -> Option<&str> {
        self.0.class()
    }

    #[getter]
    fn dtype(&self) -> &str {
        self.0.dtype()
    }

    #[getter]
    fn plan_digest(&self) -> String {
        self.0.plan_digest().to_string()
    }

    #[getter]
    fn files(&self) -> Vec<PathBuf> {
        self.0.files().to_vec()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.total_bytes()
    }

    /// Refuses a folder that was made for other numbers of ranks and stages or another profile.
    fn expect(&self, tp: u32, pp: u32, profile: &str) -> PyResult<()> {
        self.0.expect(tp, pp, profile).map_err(raise)
    }

    /// Reads every byte of this rank's files into memory, in parallel.
    fn prefetch(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.prefetch())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.0.get(name).is_some()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Tensor> {
        let tensor = self.0.shared(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        Ok(Tensor::new(Arc::new(Mapped(tensor)), dtype, shape))
    }

    /// Of kept blocks, the weight's name, the ggml type and the weight's shape; `None` of other tensors.
    fn blocks<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Described<'py>>> {
        self.known(name)?;
        let described = |blocks: Blocks<'_>| Ok((blocks.weight, blocks.ty.name(), PyTuple::new(py, &blocks.shape)?));
        self.0.blocks(name).map(described).transpose()
    }

    /// Kept blocks decoded to ``"bf16"``, ``"f16"`` or ``"f32"``: the bytes that a conversion to that type writes.
    ///
    /// In parallel on the CPU, into memory of their own; other Python threads run meanwhile.
    ///
    /// :param allow_nonfinite: let NaN, infinite and overflowing values through
    #[pyo3(signature = (name, dtype = "bf16", *, allow_nonfinite = false))]
    fn decode(&self, py: Python<'_>, name: &str, dtype: &str, allow_nonfinite: bool) -> PyResult<Tensor> {
        self.known(name)?;
        let dtype = float_type(dtype)?;
        let options = DecodeOptions { dtype, allow_nonfinite };
        let bytes = py.detach(|| self.0.decode(name, options)).map_err(raise)?;
        let shape = self.0.blocks(name).map(|blocks| blocks.shape).unwrap_or_default();
        Ok(Tensor::new(Arc::new(bytes), dtype.into(), shape))
    }

    /// Every tensor, kept blocks decoded, in host memory or on a device.
    #[pyo3(signature = (dtype, allow_nonfinite, device))]
    fn iter_decoded(
        &self,
        py: Python<'_>,
        dtype: &str,
        allow_nonfinite: bool,
        device: Option<u32>,
    ) -> PyResult<WeightIterator> {
        let options = DecodeOptions { dtype: float_type(dtype)?, allow_nonfinite };
        WeightIterator::new(py, || match device {
            Some(device) => self.0.decoded_on(options, device).map(Stream::RankOnDevice),
            None => Ok(Stream::Rank(self.0.decoded(options))),
        })
    }

    /// The names in the plan's order.
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.names())
    }
}
