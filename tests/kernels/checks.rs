//! What the kernels must do, each against the Rust decoders. A check panics at the first difference.

use ggshard::cuda::{Grid, Launch, launch};
use ggshard::dequant::{Dequantizer, FloatType, Nonfinite, Simd, convert};
use ggshard::gguf::GgmlType;

use crate::gguf_writer::Random;
use crate::library::Library;
use crate::memory::{Guarded, Touching};
use crate::samples::{Sample, decodable, tame};

pub const DTYPES: [FloatType; 3] = [FloatType::BF16, FloatType::F16, FloatType::F32];

/// The pattern of output bytes that nobody wrote.
const UNTOUCHED: u8 = 0xA5;

pub fn dequantizer(ty: GgmlType) -> Dequantizer {
    Dequantizer::new(ty, Simd::detect()).unwrap()
}

/// Whether decoding is arithmetic, whose NaN have no payload of their own.
fn computes(ty: GgmlType) -> bool {
    !matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
}

fn decoded(ty: GgmlType, blocks: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; blocks.len() / ty.block_bytes() as usize * ty.block() as usize];
    dequantizer(ty).to_f32(blocks, &mut values);
    values
}

/// Bits, those of all NaN being one where they come from arithmetic.
fn class(ty: GgmlType, value: f32) -> u32 {
    if value.is_nan() && computes(ty) { 0x7FC0_0000 } else { value.to_bits() }
}

/// `dq8` of every group of every block.
pub fn weights(library: &Library, sample: &Sample) {
    let ty = sample.ty;
    let want = decoded(ty, &sample.blocks);
    // Eight weights of a float type are a group of an endless block.
    let (bytes, groups) = if ty.block() == 1 {
        (8 * ty.block_bytes() as usize, 1)
    } else {
        (ty.block_bytes() as usize, ty.block() as u32 / 8)
    };
    for (i, (block, want)) in sample.blocks.chunks_exact(bytes).zip(want.chunks(8 * groups as usize)).enumerate() {
        // The first blocks alone, so that nothing but the block is read.
        let alone = (i < 3).then(|| [Touching::Start, Touching::End].map(|at| Guarded::copy(block, at)));
        let places = match &alone {
            Some(alone) => vec![alone[0].bytes(), alone[1].bytes()],
            None => vec![block],
        };
        for block in places {
            for (group, want) in (0..groups).zip(want.as_chunks::<8>().0) {
                let got = library.dq8(ty.name(), block, group);
                for lane in 0..8 {
                    let (got, want) = (class(ty, got[lane]), class(ty, want[lane]));
                    assert_eq!(got, want, "{}, block {i}, group {group}, weight {lane}", sample.name);
                }
            }
        }
    }
}

/// A launch over all blocks as one row, to every output type.
pub fn outputs(library: &Library, sample: &Sample) {
    let ty = sample.ty;
    let source = Guarded::copy(&sample.blocks, Touching::End);
    let elements = sample.blocks.len() / ty.block_bytes() as usize * ty.block() as usize;
    for dtype in DTYPES {
        let mut want = vec![0; elements * dtype.bytes()];
        let found = dequantizer(ty).decode(&sample.blocks, dtype, &mut want);
        let mut out = Guarded::new(want.len(), Touching::Start);
        let mut counts = [0u64; 3];
        let launch = Launch {
            source: source.bytes().as_ptr() as u64,
            out: out.bytes_mut().as_mut_ptr() as u64,
            row_bytes: sample.blocks.len() as u64,
            skip: 0,
            rows: 1,
            cols: elements as u64,
            out_start: 0,
            out_stride: elements as u64,
            dtype: launch::dtype(dtype),
            transpose: 0,
            has_scale: 0,
            has_add: 0,
            scale: f32::NAN,
            add: f32::NAN,
            counts: counts.as_mut_ptr() as u64,
        };
        library.launch(launch::kernel(ty).unwrap(), launch.grid().unwrap(), &launch);
        assert_eq!(nonfinite(counts), found, "{}, {dtype}", sample.name);
        assert_same(out.bytes(), &want, dtype, &format!("{}, {dtype}", sample.name));
    }
}

fn nonfinite([nan, inf, overflow]: [u64; 3]) -> Nonfinite {
    Nonfinite { nan, inf, overflow }
}

#[track_caller]
fn assert_same(got: &[u8], want: &[u8], dtype: FloatType, what: &str) {
    if let Some(at) = (0..got.len()).find(|at| got[*at] != want[*at]) {
        let element = at / dtype.bytes();
        let range = element * dtype.bytes()..(element + 1) * dtype.bytes();
        panic!("{what}, element {element}: {:02x?} is not {:02x?}", &got[range.clone()], &want[range]);
    }
}

/// Where nothing is in the way, a group is stored by accesses of 16 bytes, and a float type is not loaded in small pieces.
pub fn widths(library: &Library) {
    let mut random = Random(11);
    for ty in decodable() {
        let count = 8192 / ty.block();
        let source = Guarded::copy(&tame(ty, count, &mut random), Touching::Start);
        for dtype in DTYPES {
            let mut out = Guarded::new(8192 * dtype.bytes(), Touching::Start);
            let launch = Launch {
                source: source.bytes().as_ptr() as u64,
                out: out.bytes_mut().as_mut_ptr() as u64,
                row_bytes: count * ty.block_bytes(),
                cols: 8192,
                rows: 1,
                dtype: launch::dtype(dtype),
                ..Launch::default()
            };
            library.launch(launch::kernel(ty).unwrap(), launch.grid().unwrap(), &launch);
            assert_eq!(library.accesses(16) as usize, 8192 * dtype.bytes() / 16, "{ty}, {dtype}");
            if ty.block() == 1 {
                let small: u32 = [1, 2, 4].iter().map(|bytes| library.accesses(*bytes)).sum();
                assert_eq!(small, 0, "{ty}, {dtype}");
            }
        }
    }
}

/// A rectangle of some blocks, and where it goes.
#[derive(Debug)]
struct Case {
    ty: GgmlType,
    dtype: FloatType,
    rows: u64,
    row_blocks: u64,
    /// First wanted column, and how many.
    first: u64,
    cols: u64,
    turned: bool,
    out_start: u64,
    out_stride: u64,
    scale: Option<f32>,
    add: Option<f32>,
    wild: bool,
    touching: Touching,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let types = decodable();
        let ty = types[random.below(types.len() as u64) as usize];
        let turned = random.below(3) == 0;
        let row_blocks = 1 + random.below(if ty.block() == 1 { 700 } else { (2048 / ty.block()).min(40) });
        let width = row_blocks * ty.block();
        // Whole rows, pieces at multiples of eight, and anything.
        let step = [width, 8, 1][random.below(3) as usize].min(width);
        let first = random.below(width.div_ceil(step)) * step;
        let cols = ((1 + random.below((width - first).div_ceil(step))) * step).min(width - first);
        let most_rows = [1, 5, 70][random.below(3) as usize];
        let rows = 1 + random.below(most_rows);
        let inner = if turned { rows } else { cols };
        let multiple = [1, 8][random.below(2) as usize];
        let mut factor = || match random.below(12) {
            0..=7 => None,
            8 => Some([0.0, -0.0, f32::INFINITY, f32::NAN, 1e38, 1e-40][random.below(6) as usize]),
            _ => Some((random.next() as i32 as f32) / 1e9),
        };
        let (scale, add) = (factor(), factor());
        Case {
            ty,
            dtype: DTYPES[random.below(3) as usize],
            rows,
            row_blocks,
            first,
            cols,
            turned,
            out_start: random.below(9) * multiple,
            out_stride: inner.next_multiple_of(multiple) + random.below(3) * multiple,
            scale,
            add,
            wild: random.below(4) == 0,
            touching: if random.below(2) == 0 { Touching::Start } else { Touching::End },
        }
    }

    /// The output as it must be, written element by element, and what is counted.
    fn expected(&self, blocks: &[u8], len: usize) -> (Vec<u8>, Nonfinite) {
        let (mut out, mut found) = (vec![UNTOUCHED; len], Nonfinite::default());
        let row_bytes = (self.row_blocks * self.ty.block_bytes()) as usize;
        for (r, row) in blocks.chunks(row_bytes).enumerate() {
            let values = decoded(self.ty, row);
            for c in 0..self.cols {
                let mut value = values[(self.first + c) as usize];
                value = self.scale.map_or(value, |scale| value * scale);
                value = self.add.map_or(value, |add| value + add);
                if value.is_nan() && (computes(self.ty) || self.scale.is_some() || self.add.is_some()) {
                    value = f32::from_bits(0x7FC0_0000);
                }
                let r = r as u64;
                let at = self.out_start + if self.turned { c * self.out_stride + r } else { r * self.out_stride + c };
                let at = at as usize * self.dtype.bytes();
                found += convert(&[value], self.dtype, Simd::Baseline, &mut out[at..at + self.dtype.bytes()]);
            }
        }
        (out, found)
    }

    fn check(&self, library: &Library, random: &mut Random) {
        let count = self.rows * self.row_blocks;
        let blocks = if self.wild {
            (0..count * self.ty.block_bytes()).map(|_| random.next() as u8).collect()
        } else {
            tame(self.ty, count, random)
        };
        // Of the last row no block after the wanted columns is there, of the first none before.
        let (block, bytes) = (self.ty.block(), self.ty.block_bytes());
        let before = (self.first / block * bytes) as usize;
        let after = ((self.row_blocks - (self.first + self.cols).div_ceil(block)) * bytes) as usize;
        let source = Guarded::copy(&blocks[before..blocks.len() - after], self.touching);
        let (outer, inner) = if self.turned { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let elements = self.out_start + (outer - 1) * self.out_stride + inner;
        // A few bytes more, which nobody may write.
        let len = (elements as usize * self.dtype.bytes() + 16).next_multiple_of(16);
        let mut out = Guarded::new(len, self.touching);
        out.bytes_mut().fill(UNTOUCHED);
        let mut counts = [0u64; 3];
        let launch = Launch {
            source: source.bytes().as_ptr() as u64,
            out: out.bytes_mut().as_mut_ptr() as u64,
            row_bytes: self.row_blocks * bytes,
            skip: self.first % block,
            rows: self.rows,
            cols: self.cols,
            out_start: self.out_start,
            out_stride: self.out_stride,
            dtype: launch::dtype(self.dtype),
            transpose: self.turned as u32,
            has_scale: self.scale.is_some() as u32,
            has_add: self.add.is_some() as u32,
            scale: self.scale.unwrap_or(f32::NAN),
            add: self.add.unwrap_or(f32::NAN),
            counts: counts.as_mut_ptr() as u64,
        };
        let mut grid = launch.grid().unwrap();
        if random.below(3) == 0 {
            // As where a grid cannot be high enough.
            grid = Grid { blocks: [grid.blocks[0], grid.blocks[1].min(2), 1], ..grid };
        }
        library.launch(launch::kernel(self.ty).unwrap(), grid, &launch);
        let (want, found) = self.expected(&blocks, len);
        assert_eq!(nonfinite(counts), found, "{self:?}");
        assert_same(out.bytes(), &want, self.dtype, &format!("{self:?}"));
    }
}

/// Launches over random rectangles.
pub fn rectangles(library: &Library, seed: u64, cases: usize) {
    let mut random = Random(seed);
    for _ in 0..cases {
        Case::random(&mut random).check(library, &mut random);
    }
}
