//! The kernels as a library for the host: built by the C++ compiler, loaded with `dlopen`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ggshard::cuda::{Grid, Launch};

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
type Fp8 = unsafe extern "C" fn(*const f32, u64, u64, *mut u8, *mut f32);
type Nvfp4 = unsafe extern "C" fn(*const f32, u64, f32, c_int, *mut u8, *mut u8);
type Scale2 = unsafe extern "C" fn(*const f32, u64) -> f32;

/// The loaded library. Never unloaded.
pub struct Library {
    dq8: Dq8,
    block: Block,
    run: Run,
    accesses: Accesses,
    layout: Layout,
    shape: Shape,
    fp8: Fp8,
    nvfp4: Nvfp4,
    scale_2: Scale2,
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
                fp8: std::mem::transmute::<*mut c_void, Fp8>(find(c"host_fp8")),
                nvfp4: std::mem::transmute::<*mut c_void, Nvfp4>(find(c"host_nvfp4")),
                scale_2: std::mem::transmute::<*mut c_void, Scale2>(find(c"host_nvfp4_scale_2")),
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

    /// A band in fp8: codes, and scales.
    pub fn fp8(&self, values: &[f32], rows: usize, cols: usize) -> (Vec<u8>, Vec<f32>) {
        assert_eq!(values.len(), rows * cols);
        let (mut codes, mut scales) = (vec![0; rows * cols], vec![0.0; cols.div_ceil(128)]);
        // SAFETY: all have the lengths that rows and columns demand.
        unsafe { (self.fp8)(values.as_ptr(), rows as u64, cols as u64, codes.as_mut_ptr(), scales.as_mut_ptr()) };
        (codes, scales)
    }

    /// Blocks of 16 in nvfp4: packed codes, and scales.
    pub fn nvfp4(&self, values: &[f32], scale_2: f32, searched: bool) -> (Vec<u8>, Vec<u8>) {
        let blocks = values.len() / 16;
        let (mut packed, mut scales) = (vec![0; 8 * blocks], vec![0; blocks]);
        let (codes, scale) = (packed.as_mut_ptr(), scales.as_mut_ptr());
        // SAFETY: there are 16 values, 8 bytes and one scale per block.
        unsafe { (self.nvfp4)(values.as_ptr(), blocks as u64, scale_2, searched as c_int, codes, scale) };
        (packed, scales)
    }

    /// The `weight_scale_2` of nvfp4.
    pub fn scale_2(&self, values: &[f32]) -> f32 {
        // SAFETY: so many values are read.
        unsafe { (self.scale_2)(values.as_ptr(), values.len() as u64) }
    }
}
