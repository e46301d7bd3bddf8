//! Decoding to f32, next to ggml's own C functions: the same blocks, one process, one core, in turns.
//!
//! ```sh
//! GGML_LIBRARY=/path/to/libggml-base.so cargo bench --bench ggml -- [TYPE...] [--rounds 31] [--json]
//! ```
//!
//! `make bench-peers` compiles such a library from a package of PyPI. Without the variable nothing is done.
//!
//! Blocks are random but valid: each byte is taken from the same place of a random golden block, so that scales have the
//! sizes of real ones and nothing repeats that a branch predictor could learn. 64 Ki weights are decoded at a time, to
//! 256 KiB, so that input and output stay in a second-level cache. What is measured is the thread's CPU time, in batches of
//! about a millisecond; the thread stays on one CPU. In each round every function has its turn, and ratios are taken within
//! the round: what disturbs the machine disturbs both. The results are compared before anything is measured.

#[path = "../tests/common/golden.rs"]
mod golden;

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::hint::black_box;

use ggshard::dequant::{Dequantizer, FloatType, Simd};
use ggshard::gguf::GgmlType;

const WEIGHTS: usize = 64 << 10;
const BATCH: f64 = 1e-3;

/// `void dequantize_row_*(const void * blocks, float * out, int64_t weights)`
type RowFn = unsafe extern "C" fn(*const c_void, *mut f32, i64);

fn main() {
    let mut rounds = 31;
    let mut json = false;
    let mut only = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {} // from cargo
            "--json" => json = true,
            "--rounds" => rounds = args.next().and_then(|n| n.parse().ok()).expect("--rounds takes a number"),
            name => only.push(name.to_uppercase()),
        }
    }
    let Some(path) = std::env::var_os("GGML_LIBRARY") else {
        eprintln!("GGML_LIBRARY names no library of ggml's row functions; nothing is measured");
        return;
    };
    let library = Library::open(path.to_str().expect("a path in UTF-8"));
    stay_on_one_cpu();

    let levels = Simd::available();
    let mut all = Vec::new();
    for golden in golden::read_folder(&golden::fixtures()) {
        let wanted = golden.name.ends_with("gguf: quantized")
            && (only.is_empty() || only.iter().any(|name| *name == golden.ty.name().to_uppercase()));
        let Some(theirs) = library.row_function(golden.ty).filter(|_| wanted) else { continue };
        all.push(Subject { ty: golden.ty, theirs, blocks: mixed(&golden), times: BTreeMap::new() });
    }

    let mut out = vec![0f32; WEIGHTS];
    let mut expected = vec![0f32; WEIGHTS];
    for subject in &all {
        subject.theirs(&mut expected);
        for &level in &levels {
            subject.ours(level, &mut out);
            let wrong =
                out.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
            assert_eq!(wrong, None, "{} at {level:?} differs from ggml at this weight", subject.ty);
        }
    }

    let mut copies = Vec::new();
    let source = vec![1u8; WEIGHTS * 4];
    for _ in 0..rounds {
        let target: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        copies.push(per_call(|| black_box(&mut *target).copy_from_slice(black_box(&source))));
        for subject in &mut all {
            let time = per_call(|| subject.theirs(black_box(&mut out)));
            subject.times.entry("ggml".to_owned()).or_default().push(time);
            for &level in &levels {
                let time = per_call(|| subject.ours(level, black_box(&mut out)));
                subject.times.entry(format!("{level:?}")).or_default().push(time);
            }
            for &level in &levels {
                let bf16: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut out)[..WEIGHTS * 2];
                let decoder = Dequantizer::new(subject.ty, level).expect("checked above");
                let time = per_call(|| {
                    decoder.decode(black_box(&subject.blocks), FloatType::BF16, black_box(&mut *bf16));
                });
                subject.times.entry(format!("{level:?} BF16")).or_default().push(time);
            }
        }
    }
    if json { print_json(&all, &copies, rounds) } else { print_table(&all, &copies, &levels, rounds) }
}

/// One type: who decodes what, and seconds per call of each way, round by round.
struct Subject {
    ty: GgmlType,
    theirs: RowFn,
    blocks: Vec<u8>,
    times: BTreeMap<String, Vec<f64>>,
}

impl Subject {
    fn theirs(&self, out: &mut [f32]) {
        assert_eq!(out.len() / self.ty.block() as usize * self.ty.block_bytes() as usize, self.blocks.len());
        // SAFETY: the function reads the blocks of this many weights and writes as many; both lengths were just checked.
        unsafe { (self.theirs)(self.blocks.as_ptr().cast(), out.as_mut_ptr(), out.len() as i64) }
    }

    fn ours(&self, level: Simd, out: &mut [f32]) {
        Dequantizer::new(self.ty, level)
            .expect("ggml decodes no type that we do not")
            .to_f32(black_box(&self.blocks), out);
    }

    fn median(&self, way: &str) -> f64 {
        median(&self.times[way])
    }

    /// Times as fast as ggml: median, least and most of the rounds' ratios.
    fn ratio(&self, way: &str) -> [f64; 3] {
        let mut all: Vec<f64> =
            self.times["ggml"].iter().zip(&self.times[way]).map(|(theirs, ours)| theirs / ours).collect();
        all.sort_by(f64::total_cmp);
        [all[all.len() / 2], all[0], all[all.len() - 1]]
    }
}

fn print_table(all: &[Subject], copies: &[f64], levels: &[Simd], rounds: usize) {
    println!(
        "GB/s of output on one core, medians of {rounds} rounds; in brackets the ratio to ggml, and its least and most.\n"
    );
    print!("| type | ggml f32 |");
    levels.iter().for_each(|level| print!(" {level:?} f32 |"));
    levels.iter().for_each(|level| print!(" {level:?} bf16 |"));
    println!("\n|---|{}", "---:|".repeat(2 * levels.len() + 1));
    for subject in all {
        let speed = |way: &str, bytes: usize| (WEIGHTS * bytes) as f64 / subject.median(way) / 1e9;
        print!("| {} | {:.2} |", subject.ty, speed("ggml", 4));
        for level in levels {
            let way = format!("{level:?}");
            let [middle, least, most] = subject.ratio(&way);
            print!(" {:.2} ({middle:.2}; {least:.2}–{most:.2}) |", speed(&way, 4));
        }
        for level in levels {
            print!(" {:.2} |", speed(&format!("{level:?} BF16"), 2));
        }
        println!();
    }
    println!("\ncopying the same 256 KiB in the cache: {:.1} GB/s", (WEIGHTS * 4) as f64 / median(copies) / 1e9);
}

fn print_json(all: &[Subject], copies: &[f64], rounds: usize) {
    let types: serde_json::Map<String, serde_json::Value> =
        all.iter().map(|subject| (subject.ty.name().to_owned(), serde_json::json!(subject.times))).collect();
    let what = "seconds of CPU per call, round by round";
    println!(
        "{}",
        serde_json::json!({"what": what, "weights": WEIGHTS, "rounds": rounds, "copy": copies, "types": types})
    );
}

/// Valid blocks without a pattern: every byte is that of a random golden block at the same place.
fn mixed(golden: &golden::Golden) -> Vec<u8> {
    let size = golden.ty.block_bytes() as usize;
    let count = golden.blocks.len() / size;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let bytes = WEIGHTS / golden.ty.block() as usize * size;
    (0..bytes)
        .map(|at| {
            state ^= state << 13; // xorshift64
            state ^= state >> 7;
            state ^= state << 17;
            golden.blocks[(state >> 33) as usize % count * size + at % size]
        })
        .collect()
}

/// Seconds of CPU that a call takes, over as many calls as take about a millisecond.
fn per_call(mut call: impl FnMut()) -> f64 {
    let before = cpu_time();
    call();
    let calls = (BATCH / (cpu_time() - before).max(1e-7)).clamp(1.0, 10_000.0) as u32;
    let before = cpu_time();
    (0..calls).for_each(|_| call());
    (cpu_time() - before) / f64::from(calls)
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn cpu_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is ours.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Where the system allows it: a thread that moves finds cold caches.
fn stay_on_one_cpu() {
    #[cfg(target_os = "linux")]
    // SAFETY: a zeroed set is an empty one; the calls read and write it within its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// A library that stays open.
struct Library(*mut c_void);

impl Library {
    fn open(path: &str) -> Library {
        let name = CString::new(path).expect("a path without NUL");
        // SAFETY: the name ends with NUL; whoever names the library vouches for what its initialisers do.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path}: not a library that can be loaded");
        Library(handle)
    }

    /// ggml's function for a type, or nothing for the types that it has none for (F32, F16, BF16, integers).
    fn row_function(&self, ty: GgmlType) -> Option<RowFn> {
        let lower = ty.name().to_lowercase();
        let name = lower.strip_suffix("_k").map_or(lower.clone(), |family| format!("{family}_K"));
        let name = CString::new(format!("dequantize_row_{name}")).expect("no NUL");
        // SAFETY: the handle is open, the name ends with NUL.
        let function = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        // SAFETY: all functions of these names have this signature in every version of ggml.
        (!function.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, RowFn>(function) })
    }
}
