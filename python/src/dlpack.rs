//! DLPack: tensors handed to other libraries without a copy. The structures are those of `dlpack.h` 1.0.
//!
//! A capsule owns a [`Managed`]: the header that consumers read, and the share of the bytes that keeps them alive. Whoever
//! consumes the capsule renames it and calls the header's deleter in the end; a capsule that nobody consumed does so itself.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use ggshard::cuda::Memory;
use ggshard::dtype::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::tensor::Bytes;

/// `kDLCPU` and the only device of that kind.
pub const DEVICE: (i32, i32) = (1, 0);
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`.
const IS_COPIED: u64 = 2;
const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct Element {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    dims: i32,
    element: Element,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// A header with everything that it points into.
#[repr(C)]
struct Managed<H> {
    header: H,
    /// The shape, then the strides.
    _extents: Box<[i64]>,
    _owner: Owner,
}

/// What holds the elements, and keeps them there.
pub enum Owner {
    /// Memory of the host, which nobody may write to.
    Host(Bytes),
    /// Memory of a CUDA device, which is the consumer's to write to.
    Device(Arc<Memory>),
}

impl Owner {
    fn data(&self) -> *mut c_void {
        match self {
            Owner::Host(bytes) => (**bytes).as_ref().as_ptr().cast_mut().cast(),
            // An address of the device, which is no pointer here.
            Owner::Device(memory) => ptr::without_provenance_mut(memory.address() as usize),
        }
    }

    fn device(&self) -> Device {
        match self {
            Owner::Host(_) => Device { kind: DEVICE.0, id: DEVICE.1 },
            Owner::Device(memory) => Device { kind: CUDA, id: memory.device() as i32 },
        }
    }

    fn flags(&self, wanted: Wanted) -> u64 {
        match self {
            Owner::Host(_) if wanted.copied => IS_COPIED,
            Owner::Host(_) => READ_ONLY,
            Owner::Device(_) => 0,
        }
    }
}

/// What a consumer asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The header with a version and flags.
    pub versioned: bool,
    /// The bytes are a copy that belongs to the consumer alone.
    pub copied: bool,
}

/// The code of an element type in DLPack.
fn element(dtype: Dtype) -> Element {
    let code = match dtype {
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => 0,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => 1,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => 2,
        Dtype::BF16 => 4,
        Dtype::C64 => 5,
        Dtype::Bool => 6,
        Dtype::F8E4M3 => 10,
        Dtype::F8E4M3Fnuz => 11,
        Dtype::F8E5M2 => 12,
        Dtype::F8E5M2Fnuz => 13,
        Dtype::F8E8M0 => 14,
    };
    Element { code, bits: dtype.bytes() as u8 * 8, lanes: 1 }
}

/// A capsule over what `owner` holds: a tensor of `dtype` and `shape`, row-major.
pub fn capsule<'py>(
    py: Python<'py>,
    owner: Owner,
    dtype: Dtype,
    shape: &[u64],
    wanted: Wanted,
) -> PyResult<Bound<'py, PyAny>> {
    let mut extents: Vec<i64> = Vec::with_capacity(2 * shape.len());
    for extent in shape {
        extents.push(i64::try_from(*extent).map_err(|e| PyBufferError::new_err(e.to_string()))?);
    }
    let mut stride = 1i64;
    let mut strides: Vec<i64> = Vec::with_capacity(shape.len());
    for extent in extents.iter().rev() {
        strides.push(stride);
        stride *= extent.max(&1);
    }
    strides.reverse();
    extents.extend(strides);
    let mut extents = extents.into_boxed_slice();
    let tensor = DlTensor {
        data: owner.data(),
        device: owner.device(),
        dims: shape.len() as i32,
        element: element(dtype),
        shape: extents.as_mut_ptr(),
        // A box without elements has a dangling pointer that nobody reads.
        strides: extents.as_mut_ptr().wrapping_add(shape.len()),
        byte_offset: 0,
    };
    let context = ptr::null_mut();
    let (header, name): (*mut c_void, &CStr) = if wanted.versioned {
        let flags = owner.flags(wanted);
        let header = Versioned { major: 1, minor: 0, context, deleter: Some(delete::<Versioned>), flags, tensor };
        (Box::into_raw(Box::new(Managed { header, _extents: extents, _owner: owner })).cast(), VERSIONED)
    } else {
        let header = Plain { tensor, context, deleter: Some(delete::<Plain>) };
        (Box::into_raw(Box::new(Managed { header, _extents: extents, _owner: owner })).cast(), PLAIN)
    };
    let destructor = if wanted.versioned { destroy_versioned } else { destroy_plain };
    // SAFETY: the interpreter is attached, the pointer is not null and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(header, name.as_ptr(), Some(destructor)) };
    // SAFETY: PyCapsule_New gives a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// The deleter that consumers call, from any thread, attached or not.
///
/// # Safety
///
/// `header` is the header of a `Managed<H>` that `capsule` made, and is not used afterwards.
unsafe extern "C" fn delete<H>(header: *mut H) {
    // SAFETY: the header is the first field of a boxed Managed<H> in C layout, so both have one address.
    drop(unsafe { Box::from_raw(header.cast::<Managed<H>>()) });
}

unsafe extern "C" fn destroy_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with a capsule of `capsule()`.
    unsafe { destroy::<Plain>(capsule, PLAIN.as_ptr()) }
}

unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with a capsule of `capsule()`.
    unsafe { destroy::<Versioned>(capsule, VERSIONED.as_ptr()) }
}

/// Frees what a capsule that nobody consumed owns; a consumed one was renamed.
///
/// # Safety
///
/// `capsule` is a capsule over a `Managed<H>`, whose name before consumption is `name`.
unsafe fn destroy<H>(capsule: *mut ffi::PyObject, name: *const c_char) {
    // SAFETY: the capsule is valid, and its pointer is taken by the name that it has.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, name).cast::<H>());
        }
    }
}
