//! A device with the kernels loaded, its streams and its memory. One of the five files of this folder with `unsafe`.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use super::absence::{Absence, Capability};
use super::artifact::{Artifact, choose};
use super::driver::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream, Driver, DriverError, Functions, Version,
    call, driver,
};
use super::encode::{Encode, Encoder};
use super::launch::{Grid, Launch, kernel};
use crate::gguf::GgmlType;
use crate::gguf::types::TYPES;

/// Attributes of devices, by the driver's numbers.
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
/// A stream that does not wait for the default one.
const NON_BLOCKING: u32 = 1;
/// An event whose waiters sleep, and which keeps no time.
const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// What the driver tells of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct About {
    pub name: String,
    pub capability: Capability,
    pub memory: u64,
}

/// Asks the driver about a device.
pub(super) fn about(driver: &Driver, ordinal: u32) -> Result<About, DriverError> {
    let functions = &driver.functions;
    let device = handle(functions, ordinal)?;
    let mut name = [0_u8; 256];
    // SAFETY: `name` has the length that is given.
    unsafe { call!(functions, cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device)) }?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: `value` is written to.
        unsafe { call!(functions, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let capability = Capability { major: attribute(CAPABILITY_MAJOR)?, minor: attribute(CAPABILITY_MINOR)? };
    let mut memory = 0;
    // SAFETY: `memory` is written to.
    unsafe { call!(functions, cuDeviceTotalMem_v2(&mut memory, device)) }?;
    Ok(About { name: String::from_utf8_lossy(&name[..end]).into_owned(), capability, memory: memory as u64 })
}

fn handle(functions: &Functions, ordinal: u32) -> Result<CUdevice, DriverError> {
    let mut device = 0;
    // SAFETY: `device` is written to; a number that no device has is an error.
    unsafe { call!(functions, cuDeviceGet(&mut device, ordinal as c_int)) }?;
    Ok(device)
}

/// A device with the kernels loaded.
pub(crate) struct Device {
    functions: &'static Functions,
    ordinal: u32,
    about: About,
    version: Version,
    context: Context,
    module: CUmodule,
    artifact: Artifact,
    kernels: BTreeMap<GgmlType, CUfunction>,
    encoders: BTreeMap<Encoder, CUfunction>,
}

// SAFETY: the driver's handles may be used by any thread, several at a time; every call here sets the context first.
unsafe impl Send for Device {}
// SAFETY: as above; nothing in a `Device` changes after it is made.
unsafe impl Sync for Device {}

/// The device's primary context, which other libraries in the process share.
struct Context {
    functions: &'static Functions,
    device: CUdevice,
    context: CUcontext,
}

impl Context {
    fn retain(functions: &'static Functions, device: CUdevice) -> Result<Self, DriverError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is written to; it is released once, when this is dropped.
        unsafe { call!(functions, cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        Ok(Context { functions, device, context })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and nothing of it is used afterwards.
        freed(unsafe { call!(self.functions, cuDevicePrimaryCtxRelease_v2(self.device)) });
    }
}

/// A launch that is not even tried.
pub(super) fn refused(name: String) -> DriverError {
    DriverError { call: "cuLaunchKernel", code: -1, name }
}

/// What is freed after a device has failed gives that failure again. There is nothing to be done about it.
fn freed(result: Result<(), DriverError>) {
    if let Err(error) = result {
        tracing::debug!(%error, "not freed");
    }
}

impl Device {
    /// Opens a device and loads the kernels for it.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, Absence> {
        let driver = driver()?;
        if ordinal >= driver.devices {
            return Err(Absence::NoSuchDevice { ordinal, devices: driver.devices });
        }
        let functions = &driver.functions;
        let about = about(driver, ordinal)?;
        let artifact = choose(about.capability, driver.version)?;
        let context = Context::retain(functions, handle(functions, ordinal)?)?;
        let (module, kernels, encoders) = (std::ptr::null_mut(), BTreeMap::new(), BTreeMap::new());
        let version = driver.version;
        let mut device = Device { functions, ordinal, about, version, context, module, artifact, kernels, encoders };
        device.enter()?;
        device.load().map_err(|error| Absence::Refused { artifact: artifact.name, error })?;
        Ok(Arc::new(device))
    }

    fn load(&mut self) -> Result<(), DriverError> {
        let functions = self.functions;
        let image = self.artifact.image();
        let image = image.map_err(|name| DriverError { call: "unpacking the kernels", code: -1, name })?;
        // SAFETY: an image that is part of the program: ELF, or text, with a zero byte at its end. The driver copies it.
        unsafe { call!(functions, cuModuleLoadData(&mut self.module, image.as_ptr().cast())) }?;
        for info in TYPES {
            if let Some(name) = kernel(info.ty) {
                self.kernels.insert(info.ty, self.function(name)?);
            }
        }
        for encoder in Encoder::ALL {
            self.encoders.insert(encoder, self.function(encoder.kernel())?);
        }
        Ok(())
    }

    /// A kernel of the module.
    fn function(&self, name: &'static str) -> Result<CUfunction, DriverError> {
        let name = CString::new(name).map_err(|_| refused(format!("no kernel has the name {name}")))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends with a zero byte.
        unsafe { call!(self.functions, cuModuleGetFunction(&mut function, self.module, name.as_ptr())) }?;
        Ok(function)
    }

    /// Makes the device's context that of this thread.
    pub fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained for as long as this lives.
        unsafe { call!(self.functions, cuCtxSetCurrent(self.context.context)) }
    }

    /// The file of the kernels that were loaded.
    pub fn kernels(&self) -> &'static str {
        self.artifact.name
    }

    /// As messages name it.
    pub fn title(&self) -> String {
        format!("CUDA device {} ({})", self.ordinal, self.about.name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.about.name
    }

    /// Its architecture.
    pub fn capability(&self) -> Capability {
        self.about.capability
    }

    /// The newest version of CUDA that the driver knows.
    pub fn driver(&self) -> Version {
        self.version
    }

    /// Whether there is a kernel for a type.
    pub fn decodes(&self, ty: GgmlType) -> bool {
        self.kernels.contains_key(&ty)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.module.is_null() && self.enter().is_ok() {
            // SAFETY: the module was loaded once; streams, which launch its kernels, keep the device alive.
            freed(unsafe { call!(self.functions, cuModuleUnload(self.module)) });
        }
    }
}

/// Memory of a device. Freed when it is dropped.
pub struct Memory {
    device: Arc<Device>,
    pointer: CUdeviceptr,
    len: usize,
}

impl Memory {
    /// Allocates at least one byte.
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Self, DriverError> {
        device.enter()?;
        let mut pointer = 0;
        // SAFETY: `pointer` is written to; it is freed once, when this is dropped.
        unsafe { call!(device.functions, cuMemAlloc_v2(&mut pointer, len.max(1))) }?;
        Ok(Memory { device: Arc::clone(device), pointer, len })
    }

    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.pointer
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.device.ordinal
    }

    /// Copies its bytes to the host.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn read(&self) -> Result<Vec<u8>, DriverError> {
        let mut bytes = vec![0; self.len];
        self.device.enter()?;
        if !bytes.is_empty() {
            let to = bytes.as_mut_ptr().cast();
            // SAFETY: both have this length, and the call returns when the copy is complete.
            unsafe { call!(self.device.functions, cuMemcpyDtoH_v2(to, self.pointer, self.len)) }?;
        }
        Ok(bytes)
    }

    /// Copies bytes of the host to a range that nobody else writes to. A range that is not in it is a defect.
    pub(crate) fn write(&self, start: usize, bytes: &[u8]) -> Result<(), DriverError> {
        self.device.enter()?;
        if bytes.is_empty() {
            return Ok(());
        }
        let to = self.at(start, bytes.len());
        // SAFETY: the range is in the allocation, and the call returns when the bytes were read.
        unsafe { call!(self.device.functions, cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len())) }
    }

    /// The address of a byte range. A range that is not in it is a defect of the caller.
    pub(crate) fn at(&self, start: usize, len: usize) -> CUdeviceptr {
        assert!(start <= self.len && len <= self.len - start, "{len} bytes at {start} of {}", self.len);
        self.pointer + start as u64
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("device", &self.device.ordinal).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        freed(self.device.enter());
        // SAFETY: allocated once; whoever had streams use it has waited for them.
        freed(unsafe { call!(self.device.functions, cuMemFree_v2(self.pointer)) });
    }
}

/// Memory of the host that devices reach by themselves. Cached as any other: write-combined memory would be slow to read.
pub(crate) struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the allocation is this value's alone.
unsafe impl Send for Pinned {}
// SAFETY: through `&Pinned` bytes are only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeros.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self, DriverError> {
        device.enter()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: `pointer` is written to; it is freed once, when this is dropped.
        unsafe { call!(device.functions, cuMemHostAlloc(&mut pointer, len.max(1), 0)) }?;
        let start = NonNull::new(pointer.cast::<u8>()).unwrap_or(NonNull::dangling());
        // SAFETY: the driver gave so many bytes, or none were asked for.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Ok(Pinned { device: Arc::clone(device), start, len })
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that nobody writes to: streams that do are waited for (see `Stream`).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Its bytes, to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        freed(self.device.enter());
        // SAFETY: allocated once; whoever had streams use it has waited for them.
        freed(unsafe { call!(self.device.functions, cuMemFreeHost(self.start.as_ptr().cast())) });
    }
}

/// An order of work on a device.
///
/// What is enqueued uses memory until the stream, or an event recorded behind it, was waited for. The methods that
/// enqueue are `unsafe` for that reason alone.
pub(crate) struct Stream {
    device: Arc<Device>,
    stream: CUstream,
}

// SAFETY: as for `Device`.
unsafe impl Send for Stream {}
// SAFETY: as for `Device`.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other.
    pub fn new(device: &Arc<Device>) -> Result<Self, DriverError> {
        device.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is written to; it is destroyed once, when this is dropped.
        unsafe { call!(device.functions, cuStreamCreate(&mut stream, NON_BLOCKING)) }?;
        Ok(Stream { device: Arc::clone(device), stream })
    }

    /// The device that it works on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Copies the first `len` bytes to the device, `at` bytes into its memory.
    ///
    /// # Safety
    ///
    /// `from` is not written to or freed, and `to` not used otherwise, before the copy is waited for.
    pub unsafe fn copy_in(&self, from: &Pinned, len: usize, to: &Memory, at: usize) -> Result<(), DriverError> {
        let source = from.bytes()[..len].as_ptr().cast();
        // SAFETY: both ranges are in their allocations; the caller keeps them.
        unsafe { call!(self.device.functions, cuMemcpyHtoDAsync_v2(to.at(at, len), source, len, self.stream)) }
    }

    /// Copies the first `len` bytes of the device's memory.
    ///
    /// # Safety
    ///
    /// `to` is not used or freed, and `from` not written to or freed, before the copy is waited for.
    pub unsafe fn copy_out(&self, from: &Memory, len: usize, to: &mut Pinned) -> Result<(), DriverError> {
        let target = to.bytes_mut()[..len].as_mut_ptr().cast();
        // SAFETY: both ranges are in their allocations; the caller keeps them.
        unsafe { call!(self.device.functions, cuMemcpyDtoHAsync_v2(target, from.at(0, len), len, self.stream)) }
    }

    /// Copies `len` bytes from one memory of the device to another.
    ///
    /// # Safety
    ///
    /// Neither is used otherwise or freed before the copy is waited for.
    pub unsafe fn copy(&self, from: &Memory, to: &Memory, len: usize) -> Result<(), DriverError> {
        // SAFETY: both ranges are in their allocations; the caller keeps them.
        unsafe { call!(self.device.functions, cuMemcpyDtoDAsync_v2(to.at(0, len), from.at(0, len), len, self.stream)) }
    }

    /// Sets `len` bytes from `at` on to zero.
    ///
    /// # Safety
    ///
    /// The memory is not used otherwise or freed before this is waited for.
    pub unsafe fn zero(&self, memory: &Memory, at: usize, len: usize) -> Result<(), DriverError> {
        // SAFETY: the range is in the allocation; the caller keeps it.
        unsafe { call!(self.device.functions, cuMemsetD8Async(memory.at(at, len), 0, len, self.stream)) }
    }

    /// Launches the kernel of a type.
    ///
    /// # Safety
    ///
    /// What `launch` reads and writes is memory of this device, and is not used otherwise or freed before the kernel is
    /// waited for.
    pub unsafe fn launch(&self, ty: GgmlType, launch: Launch) -> Result<(), DriverError> {
        let kernel = self.device.kernels.get(&ty).ok_or_else(|| refused(format!("no kernel for {ty}")))?;
        // SAFETY: this kernel takes one `Launch`; the caller answers for what it points to.
        unsafe { self.start(*kernel, launch.grid(), launch) }
    }

    /// Launches an encoding kernel.
    ///
    /// # Safety
    ///
    /// As for [`Stream::launch`].
    pub unsafe fn encode(&self, encoder: Encoder, encode: Encode) -> Result<(), DriverError> {
        let kernel = self.device.encoders.get(&encoder);
        let kernel = kernel.ok_or_else(|| refused(format!("no kernel {}", encoder.kernel())))?;
        // SAFETY: this kernel takes one `Encode`; the caller answers for what it points to.
        unsafe { self.start(*kernel, encoder.grid(encode.rows, encode.cols), encode) }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    ///
    /// The kernel takes one `T`, and what that points to is as for [`Stream::launch`].
    unsafe fn start<T: Copy>(
        &self,
        kernel: CUfunction,
        grid: Option<Grid>,
        mut argument: T,
    ) -> Result<(), DriverError> {
        let Grid { blocks, threads } = grid.ok_or_else(|| refused("no grid for the rectangle".to_owned()))?;
        let mut parameters = [(&raw mut argument).cast::<c_void>()];
        // SAFETY: the driver copies the argument before this returns; the caller answers for its type.
        unsafe {
            call!(
                self.device.functions,
                cuLaunchKernel(
                    kernel,
                    blocks[0],
                    blocks[1],
                    blocks[2],
                    threads[0],
                    threads[1],
                    threads[2],
                    0,
                    self.stream,
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }

    /// Has everything that is enqueued from now on wait for an event.
    pub fn wait_for(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: both live; the driver keeps what it needs of the event.
        unsafe { call!(self.device.functions, cuStreamWaitEvent(self.stream, event.event, 0)) }
    }

    /// Waits until everything that was enqueued is done.
    pub fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives.
        unsafe { call!(self.device.functions, cuStreamSynchronize(self.stream)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        freed(self.device.enter());
        // SAFETY: created once; what was enqueued was waited for.
        freed(unsafe { call!(self.device.functions, cuStreamDestroy_v2(self.stream)) });
    }
}

/// A place in a stream that can be waited for.
pub(crate) struct Event {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}

impl Event {
    /// An event that was not recorded.
    pub fn new(device: &Arc<Device>) -> Result<Self, DriverError> {
        device.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is written to; it is destroyed once, when this is dropped.
        unsafe { call!(device.functions, cuEventCreate(&mut event, BLOCKING_SYNC | DISABLE_TIMING)) }?;
        Ok(Event { device: Arc::clone(device), event })
    }

    /// Records what the stream has been given so far.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both live and are of one device.
        unsafe { call!(self.device.functions, cuEventRecord(self.event, stream.stream)) }
    }

    /// Sleeps until everything that was recorded is done.
    pub fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event lives.
        unsafe { call!(self.device.functions, cuEventSynchronize(self.event)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        freed(self.device.enter());
        // SAFETY: created once; nothing waits for it any more.
        freed(unsafe { call!(self.device.functions, cuEventDestroy_v2(self.event)) });
    }
}
