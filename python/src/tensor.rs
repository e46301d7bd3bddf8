//! One tensor, and the ways in which Python libraries take it without a copy.

use std::sync::Arc;

use ggshard::dtype::Dtype;
use pyo3::exceptions::{PyBufferError, PyModuleNotFoundError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{self, Owner, Wanted};

/// The bytes of a tensor and whatever keeps them alive: a mapped file or a buffer.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A tensor in memory, which lives as long as any array over it does.
#[pyclass(frozen, module = "ggshard")]
pub struct Tensor {
    bytes: Bytes,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl Tensor {
    /// A tensor over `bytes`, row-major.
    pub fn new(bytes: Bytes, dtype: Dtype, shape: Vec<u64>) -> Self {
        Tensor { bytes, dtype, shape }
    }

    /// What NumPy calls the bytes, and what `ml_dtypes` calls the elements where NumPy has no such type.
    fn numpy_types(&self) -> (&'static str, Option<&'static str>) {
        match self.dtype {
            Dtype::Bool => ("|b1", None),
            Dtype::U8 => ("|u1", None),
            Dtype::I8 => ("|i1", None),
            Dtype::F8E5M2 => ("|u1", Some("float8_e5m2")),
            Dtype::F8E4M3 => ("|u1", Some("float8_e4m3fn")),
            Dtype::F8E8M0 => ("|u1", Some("float8_e8m0fnu")),
            Dtype::F8E4M3Fnuz => ("|u1", Some("float8_e4m3fnuz")),
            Dtype::F8E5M2Fnuz => ("|u1", Some("float8_e5m2fnuz")),
            Dtype::I16 => ("<i2", None),
            Dtype::U16 => ("<u2", None),
            Dtype::F16 => ("<f2", None),
            Dtype::BF16 => ("<u2", Some("bfloat16")),
            Dtype::I32 => ("<i4", None),
            Dtype::U32 => ("<u4", None),
            Dtype::F32 => ("<f4", None),
            Dtype::C64 => ("<c8", None),
            Dtype::F64 => ("<f8", None),
            Dtype::I64 => ("<i8", None),
            Dtype::U64 => ("<u8", None),
        }
    }

    /// The attribute of `torch` for the elements.
    fn torch_type(&self) -> &'static str {
        match self.dtype {
            Dtype::Bool => "bool",
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::F8E5M2 => "float8_e5m2",
            Dtype::F8E4M3 => "float8_e4m3fn",
            Dtype::F8E8M0 => "float8_e8m0fnu",
            Dtype::F8E4M3Fnuz => "float8_e4m3fnuz",
            Dtype::F8E5M2Fnuz => "float8_e5m2fnuz",
            Dtype::I16 => "int16",
            Dtype::U16 => "uint16",
            Dtype::F16 => "float16",
            Dtype::BF16 => "bfloat16",
            Dtype::I32 => "int32",
            Dtype::U32 => "uint32",
            Dtype::F32 => "float32",
            Dtype::C64 => "complex64",
            Dtype::F64 => "float64",
            Dtype::I64 => "int64",
            Dtype::U64 => "uint64",
        }
    }
}

#[pymethods]
impl Tensor {
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
        (*self.bytes).as_ref().len()
    }

    /// A copy of the bytes, little-endian and row-major.
    fn tobytes(&self) -> std::borrow::Cow<'_, [u8]> {
        (*self.bytes).as_ref().into()
    }

    /// A read-only NumPy array over the bytes.
    ///
    /// Types that NumPy lacks are those of `ml_dtypes`; without that package they come as unsigned integers of their
    /// size, and `dtype` says what they are.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let array = py.import("numpy")?.call_method1("asarray", (Interface(slf.clone().unbind()),))?;
        let Some(name) = slf.get().numpy_types().1 else { return Ok(array) };
        match py.import("ml_dtypes") {
            Ok(types) => array.call_method1("view", (types.getattr(name)?,)),
            Err(error) if error.is_instance_of::<PyModuleNotFoundError>(py) => Ok(array),
            Err(error) => Err(error),
        }
    }

    /// For `numpy.asarray` and its like.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = Tensor::numpy(slf)?;
        let array = match dtype {
            Some(dtype) => {
                let keywords = PyDict::new(slf.py());
                keywords.set_item("copy", false)?;
                array.call_method("astype", (dtype,), Some(&keywords))?
            }
            None => array,
        };
        if copy == Some(true) { array.call_method0("copy") } else { Ok(array) }
    }

    /// A PyTorch tensor over the bytes. PyTorch knows no read-only tensors: writing to it is not allowed, so `clone()` it
    /// first.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let torch = py.import("torch")?;
        // As bytes, which every version of PyTorch takes; newer element types are not in every version's DLPack.
        let length = self.nbytes() as u64;
        let wanted = Wanted { versioned: false, copied: false };
        let capsule = dlpack::capsule(py, Owner::Host(self.bytes.clone()), Dtype::U8, &[length], wanted)?;
        let flat = torch.getattr("utils")?.getattr("dlpack")?.call_method1("from_dlpack", (capsule,))?;
        let typed = flat.call_method1("view", (torch.getattr(self.torch_type())?,))?;
        typed.call_method1("reshape", (PyTuple::new(py, &self.shape)?,))
    }

    /// For `from_dlpack` of NumPy, PyTorch, JAX and others.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("a tensor in host memory has no stream"));
        }
        if dl_device.is_some_and(|device| device != dlpack::DEVICE) {
            return Err(PyBufferError::new_err("the tensor is in host memory, and is not moved by itself"));
        }
        let copied = copy == Some(true);
        let bytes: Bytes = if copied { Arc::new((*self.bytes).as_ref().to_vec()) } else { self.bytes.clone() };
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, Owner::Host(bytes), self.dtype, &self.shape, Wanted { versioned, copied })
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::DEVICE
    }

    fn __repr__(&self) -> String {
        format!("Tensor(dtype={}, shape={:?})", self.dtype, self.shape)
    }
}

/// NumPy's array interface over a tensor's bytes. Apart from [`Tensor`], whose elements it does not describe where NumPy
/// lacks their type.
#[pyclass(frozen, module = "ggshard._ggshard")]
struct Interface(Py<Tensor>);

#[pymethods]
impl Interface {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tensor = self.0.get();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &tensor.shape)?)?;
        interface.set_item("typestr", tensor.numpy_types().0)?;
        let read_only = true;
        interface.set_item("data", ((*tensor.bytes).as_ref().as_ptr() as usize, read_only))?;
        Ok(interface)
    }
}
