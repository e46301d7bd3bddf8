//! What a conversion consists of, each part alone: decoding, hashing and writing of the same bytes.
//!
//! ```sh
//! cargo bench --bench parts -- model.gguf --write /dev/shm [--output BYTES] [--files 8] [--threads 1,2] [--rounds 5] [--json]
//! ```
//!
//! `decode` decodes every weight of the model to bf16, from the page cache, in tiles of 512 KiB like the engine's. `hash` is
//! BLAKE3 of the output's bytes, once, over such a tile in the cache. `write` writes the output's bytes from such a tile to
//! new files in the folder, as many to each, without fsync, and removes them. `both` decodes each tile and hashes it twice,
//! as a conversion does, for a tensor's and a file's digest. What a conversion must cost is decode + 2 hash + write.
//!
//! `--output` is for conversions whose output is not two bytes per weight: weights that every rank holds, say.
//!
//! Wall and CPU time per part and number of threads, in turns; medians, least and most.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ggshard::dequant::{Dequantizer, FloatType, Simd};
use ggshard::gguf::{GgufSet, Io, OpenOptions};

const TILE: usize = 512 << 10;

fn main() {
    let (mut model, mut folder, mut output, mut files) = (None, None, None, 1);
    let (mut threads, mut rounds, mut json) = (vec![1, 2], 5, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} takes a value"));
        match arg.as_str() {
            "--bench" => {} // from cargo
            "--json" => json = true,
            "--write" => folder = Some(PathBuf::from(value())),
            "--output" => output = Some(value().parse().expect("a number of bytes")),
            "--files" => files = value().parse().expect("a number of files"),
            "--rounds" => rounds = value().parse().expect("a number of rounds"),
            "--threads" => threads = value().split(',').map(|n| n.parse().expect("a number of threads")).collect(),
            _ => model = Some(PathBuf::from(arg)),
        }
    }
    let Some(model) = model else {
        eprintln!("no model is named; nothing is measured");
        return;
    };
    let options = OpenOptions { io: Io::Mmap, ..OpenOptions::default() };
    let set = GgufSet::open_with(&model, options).unwrap_or_else(|error| panic!("{error}"));
    let work = Work::new(&set);

    let mut parts: Vec<Part> = Vec::new();
    for name in ["write", "decode", "hash", "both"] {
        for &threads in &threads {
            if name != "write" || folder.is_some() {
                parts.push(Part { name, threads, times: Vec::new() });
            }
        }
    }
    let bytes = output.unwrap_or(work.weights as u64 * 2);
    let length = |tile: u64| (bytes - tile * TILE as u64).min(TILE as u64) as usize;
    work.run(1, |tile, scratch, buffer| work.decode(tile, scratch, buffer)); // into the page cache
    for _ in 0..rounds {
        for part in &mut parts {
            let time = match part.name {
                "decode" => {
                    timed(|| work.run(part.threads, |tile, scratch, buffer| work.decode(tile, scratch, buffer)))
                }
                "hash" => timed(|| {
                    on_tiles(bytes.div_ceil(TILE as u64), part.threads, |tile, _, buffer| hash(&buffer[..length(tile)]))
                }),
                "both" => timed(|| {
                    work.run(part.threads, |tile, scratch, buffer| {
                        work.decode(tile, scratch, buffer);
                        hash(&buffer[..tile.weights * 2]);
                        hash(&buffer[..tile.weights * 2]);
                    })
                }),
                _ => {
                    let folder = folder.as_ref().expect("asked for above");
                    let paths: Vec<_> =
                        (0..files).map(|i| folder.join(format!("parts.{}.{i}", std::process::id()))).collect();
                    let open = |path| File::create_new(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
                    let all: Vec<File> = paths.iter().map(open).collect();
                    let time = timed(|| {
                        on_tiles(bytes.div_ceil(TILE as u64), part.threads, |tile, _, buffer| {
                            let (file, at) = (tile % files, tile / files * TILE as u64);
                            all[file as usize].write_all_at(&buffer[..length(tile)], at).expect("room for the output");
                        })
                    });
                    paths.iter().for_each(|path| std::fs::remove_file(path).expect("it was made here"));
                    time
                }
            };
            part.times.push(time);
        }
    }
    if json {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| serde_json::json!({"part": part.name, "threads": part.threads, "wall_and_cpu": part.times}))
            .collect();
        println!("{}", serde_json::json!({"bytes": bytes, "rounds": rounds, "parts": parts}));
        return;
    }
    println!("{} weights, {bytes} bytes of output, {rounds} rounds: seconds (least–most)\n", work.weights);
    println!("| part | threads | wall | CPU | GB/s per CPU second |\n|---|---:|---:|---:|---:|");
    for part in &parts {
        let (wall, cpu) = (spread(part, |time| time.0), spread(part, |time| time.1));
        let speed = bytes as f64 / cpu[0] / 1e9;
        println!(
            "| {} | {} | {:.3} ({:.3}–{:.3}) | {:.3} ({:.3}–{:.3}) | {speed:.1} |",
            part.name, part.threads, wall[0], wall[1], wall[2], cpu[0], cpu[1], cpu[2]
        );
    }
}

/// One way to spend time, and its wall and CPU seconds, round by round.
struct Part {
    name: &'static str,
    threads: usize,
    times: Vec<(f64, f64)>,
}

/// Some weights of one tensor.
struct Tile {
    tensor: usize,
    /// Bytes from the start of the tensor's data.
    start: u64,
    bytes: u64,
    weights: usize,
}

struct Work<'a> {
    set: &'a GgufSet,
    tiles: Vec<Tile>,
    weights: usize,
}

impl<'a> Work<'a> {
    fn new(set: &'a GgufSet) -> Self {
        let mut tiles = Vec::new();
        let mut total = 0;
        for (tensor, source) in set.tensors().iter().enumerate() {
            if Dequantizer::new(source.ty, Simd::detect()).is_none() {
                continue;
            }
            let block = source.ty.block() as usize;
            let most = TILE / 2 / block * block;
            let all = source.elements() as usize;
            for first in (0..all).step_by(most) {
                let weights = most.min(all - first);
                let bytes = |weights: usize| (weights / block) as u64 * source.ty.block_bytes();
                tiles.push(Tile { tensor, start: bytes(first), bytes: bytes(weights), weights });
                total += weights;
            }
        }
        Work { set, tiles, weights: total }
    }

    fn decode(&self, tile: &Tile, scratch: &mut Vec<u8>, buffer: &mut [u8]) {
        let decoder =
            Dequantizer::new(self.set.tensors()[tile.tensor].ty, Simd::detect()).expect("tiles have decoders");
        let blocks = self.set.read(tile.tensor, tile.start..tile.start + tile.bytes, scratch);
        let blocks = blocks.unwrap_or_else(|error| panic!("{error}"));
        decoder.decode(black_box(blocks), FloatType::BF16, black_box(&mut buffer[..tile.weights * 2]));
    }

    /// Does something with every tile.
    fn run(&self, threads: usize, work: impl Fn(&Tile, &mut Vec<u8>, &mut [u8]) + Sync) {
        on_tiles(self.tiles.len() as u64, threads, |tile, scratch, buffer| {
            work(&self.tiles[tile as usize], scratch, buffer);
        });
    }
}

/// Does something so many times, each thread with buffers of its own that it has touched before.
fn on_tiles(count: u64, threads: usize, work: impl Fn(u64, &mut Vec<u8>, &mut [u8]) + Sync) {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let (mut scratch, mut buffer) = (Vec::new(), vec![1; TILE]);
                loop {
                    let tile = next.fetch_add(1, Ordering::Relaxed);
                    if tile >= count {
                        break;
                    }
                    work(tile, &mut scratch, &mut buffer);
                }
            });
        }
    });
}

fn hash(bytes: &[u8]) {
    black_box(blake3::hash(black_box(bytes)));
}

/// Wall and CPU seconds of this process.
fn timed(work: impl FnOnce()) -> (f64, f64) {
    let (began, before) = (Instant::now(), cpu_time());
    work();
    (began.elapsed().as_secs_f64(), cpu_time() - before)
}

fn cpu_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is ours.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Median, least and most.
fn spread(part: &Part, which: impl Fn(&(f64, f64)) -> f64) -> [f64; 3] {
    let mut times: Vec<f64> = part.times.iter().map(which).collect();
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[0], times[times.len() - 1]]
}
