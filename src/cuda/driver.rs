//! The driver's functions, found by name in its library. One of the five files of this folder with `unsafe`.
//!
//! The bindings of cudarc give the names of the library and the types of handles. The functions are looked up here, for
//! two reasons: one that a driver lacks is a reason that can be told and no panic, and a result code that a newer driver
//! adds is a number and not a value that no enum has.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::absence::Absence;

pub(super) use sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};

/// The driver's result codes that mean something here.
const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;

/// The oldest driver that knows the format of the kernels: CUDA 12.0.
const OLDEST: Version = Version { major: 12, minor: 0 };

macro_rules! functions {
    ($($name:ident($($argument:ident: $ty:ty),*);)*) => {
        /// Every function of the driver that is called, by its exported name.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($ty),*) -> c_int,)*
        }

        impl Functions {
            /// Finds every function, or names the first that the library lacks.
            fn find() -> Result<Self, Absence> {
                // SAFETY: loading runs the library's initialisers, which is what a program that uses the driver wants.
                // That the library is there was asked first; without it, this panics.
                let library = unsafe { sys::culib() };
                Ok(Functions {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the signature is the one that the driver's documentation gives for this name.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> c_int>(name) };
                        *found.map_err(|_| Absence::NoFunction(stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxSetCurrent(context: CUcontext);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(pointer: CUdeviceptr);
    cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(pointer: *mut c_void);
    cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

/// A version of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 12 of 12.8.
    pub major: u32,
    /// 8 of 12.8.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver, initialised.
pub(super) struct Driver {
    pub functions: Functions,
    /// The newest version of CUDA that it knows.
    pub version: Version,
    /// Number of devices, at least one.
    pub devices: u32,
}

/// The driver of this machine, or why there is none. Found once.
pub(super) fn driver() -> Result<&'static Driver, Absence> {
    static DRIVER: OnceLock<Result<Driver, Absence>> = OnceLock::new();
    DRIVER.get_or_init(Driver::find).as_ref().map_err(Clone::clone)
}

impl Driver {
    fn find() -> Result<Self, Absence> {
        // SAFETY: loading runs the library's initialisers, as above.
        if !unsafe { sys::is_culib_present() } {
            return Err(Absence::NoLibrary);
        }
        let functions = Functions::find()?;
        let mut version = 0;
        // SAFETY: `version` is written to; this function needs no initialisation.
        functions.check("cuDriverGetVersion", unsafe { (functions.cuDriverGetVersion)(&mut version) })?;
        let number = u32::try_from(version).unwrap_or(0);
        let version = Version { major: number / 1000, minor: number % 1000 / 10 };
        if version < OLDEST {
            return Err(Absence::OldDriver { found: version, oldest: OLDEST });
        }
        // SAFETY: 0 is the only value that is defined.
        let begun = unsafe { (functions.cuInit)(0) };
        if begun == NO_DEVICE {
            return Err(Absence::NoDevice);
        }
        functions.check("cuInit", begun)?;
        let mut devices = 0;
        // SAFETY: `devices` is written to, after `cuInit`.
        functions.check("cuDeviceGetCount", unsafe { (functions.cuDeviceGetCount)(&mut devices) })?;
        match u32::try_from(devices) {
            Ok(devices) if devices > 0 => Ok(Driver { functions, version, devices }),
            Ok(_) | Err(_) => Err(Absence::NoDevice),
        }
    }
}

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct DriverError {
    /// The function of the driver.
    pub call: &'static str,
    /// What it gave.
    pub code: i32,
    /// The driver's name for that.
    pub name: String,
}

impl DriverError {
    /// Whether memory, of a device or pinned, was not to be had.
    pub fn out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }
}

impl Functions {
    /// An error, unless the function of that name gave success.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` is set to a string that lives as long as the library, or to null for codes that have none.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == SUCCESS && !name.is_null();
        let name = if known {
            // SAFETY: not null, so the string that the driver gave.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "a code without a name".to_owned()
        };
        Err(DriverError { call, code, name })
    }
}

/// Calls a function of the driver by its name; an error carries the name. To be used inside `unsafe`.
macro_rules! call {
    ($functions:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let functions = $functions;
        functions.check(stringify!($name), (functions.$name)($($argument),*))
    }};
}
pub(super) use call;
