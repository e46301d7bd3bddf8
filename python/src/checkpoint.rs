//! One rank of a converted folder, as a mapping from names to tensors.

use std::path::PathBuf;
use std::sync::Arc;

use ggshard::runtime::{OpenOptions, RankCheckpoint, Set, SharedTensor, Verify};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::raise;
use crate::tensor::Tensor;

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

    /// The names in the plan's order.
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.names())
    }
}
