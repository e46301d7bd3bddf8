//! The kernels as a library for the host: built by the C++ compiler, loaded with `dlopen`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ggshard::cuda::{Encode, Encoder, Grid, Launch};

/// `kernels/` of the repository.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Compiles `host.cpp` of a folder. The caller judges the compiler's output.
pub fn compile(folder: &Path, library: &Path) -> Output {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"])
        .args(["-shared", "-fPIC", "-o"])
        .arg(library)
        .arg(folder.join("host.cpp"))
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; these tests need a C++ compiler", compiler.display()))
}

type Dq8 = unsafe extern "C" fn(*const c_char, *const u8, u32, *mut f32) -> c_int;
type Block = unsafe extern "C" fn(*const c_char, *mut u32, *mut u32) -> c_int;
type Run = unsafe extern "C" fn(*const c_char, *const u32, *const u32, *const Launch) -> c_int;
type Accesses = unsafe extern "C" fn(u32) -> u32;
type Layout = unsafe extern "C" fn(*mut u32);
type Shape = unsafe extern "C" fn(*mut u32, *mut u32);
type RunEncoder = unsafe extern "C" fn(*const c_char, *const u32, *const u32, *const Encode, c_int) -> c_int;
type Shapes = unsafe extern "C" fn(*mut u32, *mut u32, *mut u32);
type Divide = unsafe extern "C" fn(*const f32, *const f32, u64, *mut f32);

/// The loaded library. Never unloaded.
pub struct Library {
    dq8: Dq8,
    block: Block,
    run: Run,
    accesses: Accesses,
    layout: Layout,
    shape: Shape,
    run_encoder: RunEncoder,
    encode_layout: Layout,
    encode_shape: Shapes,
    divide: Divide,
}

impl Library {
    /// Builds the repository's kernels and loads them.
    pub fn build() -> Library {
        // Test binaries may run at once: each has a file of its own.
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}.so", std::process::id()));
        let output = compile(&sources(), &path);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let library = Library::load(&path);
        std::fs::remove_file(&path).unwrap();
        library
    }

    /// Loads a library that [`compile`] made.
    pub fn load(path: &Path) -> Library {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library has no constructors of its own; the name ends with a zero byte.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{} cannot be loaded", path.display());
        let find = |name: &CStr| -> *mut c_void {
            // SAFETY: the handle is that of a loaded library; the name ends with a zero byte.
            let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!symbol.is_null(), "{name:?} is missing");
            symbol
        };
        // SAFETY: these are the signatures that host.cpp defines.
        unsafe {
            Library {
                dq8: std::mem::transmute::<*mut c_void, Dq8>(find(c"host_dq8")),
                block: std::mem::transmute::<*mut c_void, Block>(find(c"host_block")),
                run: std::mem::transmute::<*mut c_void, Run>(find(c"host_launch")),
                accesses: std::mem::transmute::<*mut c_void, Accesses>(find(c"host_accesses")),
                layout: std::mem::transmute::<*mut c_void, Layout>(find(c"host_layout")),
                shape: std::mem::transmute::<*mut c_void, Shape>(find(c"host_shape")),
                run_encoder: std::mem::transmute::<*mut c_void, RunEncoder>(find(c"host_encode")),
                encode_layout: std::mem::transmute::<*mut c_void, Layout>(find(c"host_encode_layout")),
                encode_shape: std::mem::transmute::<*mut c_void, Shapes>(find(c"host_encode_shape")),
                divide: std::mem::transmute::<*mut c_void, Divide>(find(c"host_divide")),
            }
        }
    }

    /// Eight weights of a type: `block` must hold the group's whole block, or for float types the group's weights.
    pub fn dq8(&self, ty: &str, block: &[u8], group: u32) -> [f32; 8] {
        let (name, mut out) = (CString::new(ty).unwrap(), [0.0; 8]);
        // SAFETY: the caller's block is as long as said, and eight values are written.
        let misaligned = unsafe { (self.dq8)(name.as_ptr(), block.as_ptr(), group, out.as_mut_ptr()) };
        assert_eq!(misaligned, 0, "{ty}: misaligned loads");
        out
    }

    /// Weights and bytes of a type's block.
    pub fn block(&self, ty: &str) -> Option<(u32, u32)> {
        let (name, mut weights, mut bytes) = (CString::new(ty).unwrap(), 0, 0);
        // SAFETY: two integers are written.
        let found = unsafe { (self.block)(name.as_ptr(), &mut weights, &mut bytes) };
        (found == 0).then_some((weights, bytes))
    }

    /// Runs a kernel. Where a launch reads and writes is the caller's responsibility: tests put memory that cannot be touched
    /// around it.
    pub fn launch(&self, kernel: &str, grid: Grid, launch: &Launch) {
        let name = CString::new(kernel).unwrap();
        // SAFETY: the launch describes memory of the caller; what lies outside ends the process.
        let misaligned = unsafe { (self.run)(name.as_ptr(), grid.blocks.as_ptr(), grid.threads.as_ptr(), launch) };
        assert_eq!(misaligned, 0, "{kernel}: misaligned accesses, or no such kernel");
    }

    /// How often the last launch of this thread accessed so many bytes at once.
    pub fn accesses(&self, bytes: u32) -> u32 {
        assert!(bytes <= 16);
        // SAFETY: a counter is read, which there is for up to 16 bytes.
        unsafe { (self.accesses)(bytes) }
    }

    /// Offsets of the fields of `Launch`, and its size.
    pub fn layout(&self) -> [u32; 16] {
        let mut at = [0; 16];
        // SAFETY: 16 integers are written.
        unsafe { (self.layout)(at.as_mut_ptr()) };
        at
    }

    /// Threads of a block, and rounds of a thread.
    pub fn shape(&self) -> (u32, u32) {
        let (mut threads, mut rounds) = (0, 0);
        // SAFETY: two integers are written.
        unsafe { (self.shape)(&mut threads, &mut rounds) };
        (threads, rounds)
    }

    /// Runs an encoding kernel, threads from the first or from the last on. Memory is as for [`Library::launch`].
    pub fn encode(&self, encoder: Encoder, encode: &Encode, backwards: bool) {
        let name = CString::new(encoder.kernel()).unwrap();
        let grid = encoder.grid(encode.rows, encode.cols).unwrap();
        let (blocks, threads) = (grid.blocks.as_ptr(), grid.threads.as_ptr());
        // SAFETY: as for `launch`.
        let misaligned = unsafe { (self.run_encoder)(name.as_ptr(), blocks, threads, encode, backwards as c_int) };
        assert_eq!(misaligned, 0, "{encoder:?}: misaligned accesses, or no such kernel");
    }

    /// Offsets of the fields of `Encode`, and its size; then those of `Found`.
    pub fn encode_layout(&self) -> [u32; 19] {
        let mut at = [0; 19];
        // SAFETY: 19 integers are written.
        unsafe { (self.encode_layout)(at.as_mut_ptr()) };
        at
    }

    /// Threads of a block of an encoding kernel, rows of a strip, and how many of `Found` there are.
    pub fn encode_shape(&self) -> [u32; 3] {
        let [mut threads, mut strip, mut slots] = [0; 3];
        // SAFETY: three integers are written.
        unsafe { (self.encode_shape)(&mut threads, &mut strip, &mut slots) };
        [threads, strip, slots]
    }

    /// Quotients of values and divisors.
    pub fn divide(&self, values: &[f32], divisors: &[f32]) -> Vec<f32> {
        assert_eq!(values.len(), divisors.len());
        let mut quotients = vec![0.0; values.len()];
        let count = values.len() as u64;
        // SAFETY: all three have this length.
        unsafe { (self.divide)(values.as_ptr(), divisors.as_ptr(), count, quotients.as_mut_ptr()) };
        quotients
    }
}
