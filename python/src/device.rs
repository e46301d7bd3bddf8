//! One tensor in the memory of a CUDA device.

use std::sync::Arc;

use ggshard::cuda::Memory;
use ggshard::dtype::Dtype;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::dlpack::{self, Owner, Wanted};

/// A tensor in the memory of a CUDA device, which lives as long as any array over it does.
#[pyclass(frozen, module = "ggshard")]
pub struct DeviceTensor {
    memory: Arc<Memory>,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl DeviceTensor {
    /// A tensor over `memory`, row-major.
    pub fn new(memory: Memory, dtype: Dtype, shape: Vec<u64>) -> Self {
        DeviceTensor { memory: Arc::new(memory), dtype, shape }
    }
}

#[pymethods]
impl DeviceTensor {
    /// The element type, by its safetensors name: `BF16`, `F32`, ….
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// The shape, the slowest axis first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Bytes of the elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.len()
    }

    /// The device, as PyTorch names it: `cuda:0`.
    #[getter]
    fn device(&self) -> String {
        format!("cuda:{}", self.memory.device())
    }

    /// The address on the device.
    #[getter]
    fn data_ptr(&self) -> u64 {
        self.memory.address()
    }

    /// A copy of the bytes in host memory, little-endian and row-major.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.memory.read()).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// For `from_dlpack` of PyTorch, JAX, CuPy and others. Every byte is there, so any stream may read it.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream;
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err("the tensor is on a CUDA device, and is not moved by itself"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the tensor is not copied by itself: clone what is made of it"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let owner = Owner::Device(Arc::clone(&self.memory));
        dlpack::capsule(py, owner, self.dtype, &self.shape, Wanted { versioned, copied: false })
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CUDA, self.memory.device() as i32)
    }

    fn __repr__(&self) -> String {
        format!("DeviceTensor(dtype={}, shape={:?}, device='{}')", self.dtype, self.shape, self.device())
    }
}
