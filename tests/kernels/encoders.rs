//! What the encoding kernels must do, against the encoders of Rust. A check panics at the first difference.

use std::path::Path;

use ggshard::cuda::{Encode, Encoder, Found};
use ggshard::dequant::{Nonfinite, Simd};
use ggshard::encode::nvfp4::BlockScale;
use ggshard::encode::{Deviation, fp8, nvfp4};
use safetensors::SafeTensors;

use crate::gguf_writer::Random;
use crate::library::Library;
use crate::memory::{Guarded, Touching};
use crate::samples::hard_values;

/// Values of much the same size, values of any size, those at which a rounding can go wrong, and those of the golden cases;
/// all finite.
fn samples() -> Vec<Vec<f32>> {
    let mut random = Random(9);
    let mut uniform = move || random.next() as i32 as f32 / 2f32.powi(31);
    let plain = (0..20_000).map(|_| uniform()).collect();
    let sizes = (0..20_000).map(|i| uniform() * 2f32.powi(i / 160 - 62)).collect();
    let spread = (0..20_000).map(|i| uniform() * 2f32.powi(i % 24 - 20)).collect();
    let hard: Vec<f32> = hard_values().into_iter().filter(|value| value.is_finite()).collect();
    // Values of a size together, so that their block's scale does not make zeros of most.
    let mut sorted = hard.clone();
    sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    // Quotients with a scale of 1: what lies between codes, and beside that.
    let codes = (0..0x7E).map(|code| [fp8::value(code), fp8::value(code + 1)]);
    let middles = codes.flat_map(|[low, high]| [low, (low + high) / 2.0]);
    let mut ties: Vec<f32> = middles.flat_map(|x| [x, -x, x.next_up(), x.next_down()]).collect();
    ties.extend([448.0, -448.0]);
    let mut all =
        vec![plain, sizes, spread, hard, sorted, ties, [0.0, -0.0, 0.0, 0.0].repeat(16), vec![f32::from_bits(1); 32]];
    for file in ["fp8.safetensors", "nvfp4.safetensors"] {
        let file = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/encode").join(file)).unwrap();
        let golden = SafeTensors::deserialize(&file).unwrap();
        let values = golden.iter().filter(|(name, _)| name.ends_with(".values"));
        let floats = values.map(|(_, tensor)| tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
        all.extend(floats.map(|floats| floats.filter(|value| value.is_finite()).collect()));
    }
    all
}

/// Memory for a kernel, between pages that nobody may touch. Its end is filled up to 16 bytes with what must stay.
struct Room(Guarded, usize);

const FILL: u8 = 0xFF;

impl Room {
    fn new(len: usize, fill: u8) -> Room {
        let mut memory = Guarded::new(len.next_multiple_of(16), Touching::End);
        memory.bytes_mut()[..len].fill(fill);
        memory.bytes_mut()[len..].fill(FILL);
        Room(memory, len)
    }

    fn address(&mut self) -> u64 {
        self.0.bytes_mut().as_mut_ptr() as u64
    }

    fn bytes(&self) -> &[u8] {
        let (bytes, rest) = self.0.bytes().split_at(self.1);
        assert!(rest.iter().all(|byte| *byte == FILL), "written beyond the end");
        bytes
    }

    fn words(&self) -> Vec<u32> {
        self.bytes().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Fp8,
    Nvfp4(f32, BlockScale),
}

#[derive(Debug, PartialEq)]
struct Encoded {
    codes: Vec<u8>,
    /// The bits of `f32`, or codes.
    scales: Vec<u32>,
    deviation: Deviation,
    found: Nonfinite,
}

/// Rows at some distance, between which lies what nobody may read.
fn spread(values: &[f32], cols: usize, stride: usize) -> Room {
    let rows = values.len() / cols;
    let mut room = Room::new(4 * ((rows - 1) * stride + cols), FILL);
    for (row, values) in values.chunks_exact(cols).enumerate() {
        for (col, value) in values.iter().enumerate() {
            room.0.bytes_mut()[4 * (row * stride + col)..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }
    room
}

/// Runs the kernels of a form in their order.
fn kernels(library: &Library, form: Form, values: &[f32], cols: usize, stride: usize, backwards: bool) -> Encoded {
    let (rows, blocks) = (values.len() / cols, (values.len() / cols).div_ceil(128) * cols.div_ceil(128));
    let (codes, scales) = match form {
        Form::Fp8 => (values.len(), 4 * blocks),
        Form::Nvfp4(..) => (values.len() / 2, values.len() / 16),
    };
    let mut from = spread(values, cols, stride);
    let [mut codes, mut scales] = [codes, scales].map(|len| Room::new(len, 0xA5));
    let mut largest = Room::new(4 * blocks, 0);
    let mut sums = Room::new(blocks * Encode::SUMS as usize * 8, 0xA5);
    let mut slots = vec![Found::default(); Encode::SLOTS];
    let mut encode = Encode {
        values: from.address(),
        stride: stride as u64,
        rows: rows as u64,
        cols: cols as u64,
        codes: codes.address(),
        scales: scales.address(),
        largest: largest.address(),
        sums: sums.address(),
        found: slots.as_mut_ptr() as u64,
        whole: 0,
        scale_2: 0.0,
    };
    let order = match form {
        Form::Fp8 => &[Encoder::Amax, Encoder::Fp8, Encoder::Fp8Measure, Encoder::Fp8Sum][..],
        Form::Nvfp4(_, BlockScale::Amax) => &[Encoder::Nvfp4],
        Form::Nvfp4(_, BlockScale::Searched) => &[Encoder::Nvfp4Searched],
    };
    if let Form::Nvfp4(scale_2, _) = form {
        encode.scale_2 = scale_2;
    }
    for encoder in order {
        library.encode(*encoder, &encode, backwards);
    }
    let scales = match form {
        Form::Fp8 => scales.words(),
        Form::Nvfp4(..) => scales.bytes().iter().map(|scale| *scale as u32).collect(),
    };
    // Nothing was written behind these either.
    let _ = (sums.bytes(), largest.bytes());
    let mut found = Found::default();
    slots.into_iter().for_each(|slot| found += slot);
    let (deviation, found) = found.end();
    Encoded { codes: codes.bytes().to_vec(), scales, deviation, found }
}

/// What Rust makes of it.
fn rust(form: Form, values: &[f32], cols: usize) -> Encoded {
    let simd = Simd::detect();
    let (mut codes, mut all, mut deviation) = (Vec::new(), Vec::new(), Deviation::default());
    match form {
        Form::Fp8 => {
            for band in values.chunks(128 * cols) {
                let (rows, from) = (band.len() / cols, codes.len());
                codes.resize(from + band.len(), 0);
                let mut scales = vec![0.0; cols.div_ceil(fp8::BLOCK)];
                fp8::band_on(simd, band, rows, cols, &mut codes[from..], &mut scales);
                deviation += fp8::deviation_on(simd, band, rows, cols, &codes[from..], &scales);
                all.extend(scales.iter().map(|scale| scale.to_bits()));
            }
        }
        Form::Nvfp4(scale_2, how) => {
            let mut scales = vec![0; values.len() / 16];
            codes.resize(values.len() / 2, 0);
            nvfp4::rows_on(simd, values, cols, scale_2, how, &mut codes, &mut scales);
            deviation = nvfp4::deviation_on(simd, values, cols, scale_2, &codes, &scales);
            all.extend(scales.iter().map(|scale| *scale as u32));
        }
    }
    let count = |test: fn(f32) -> bool| values.iter().filter(|value| test(**value)).count() as u64;
    let found = Nonfinite { nan: count(f32::is_nan), inf: count(f32::is_infinite), overflow: 0 };
    Encoded { codes, scales: all, deviation, found }
}

/// Whatever the order of the threads, and however far rows are apart.
#[track_caller]
fn same(library: &Library, form: Form, values: &[f32], cols: usize) {
    let want = rust(form, values, cols);
    for (more, backwards) in [(0, false), (8, true)] {
        let got = kernels(library, form, values, cols, cols.next_multiple_of(4) + more, backwards);
        let rows = values.len() / cols;
        assert_eq!(got.scales, want.scales, "{form:?}, {rows} x {cols}: scales");
        let wrong = (0..want.codes.len()).find(|at| got.codes[*at] != want.codes[*at]);
        assert_eq!(wrong, None, "{form:?}, {rows} x {cols}: codes differ here");
        assert_eq!(got, want, "{form:?}, {rows} x {cols}");
    }
}

/// The kernel for the largest magnitude, with one result.
fn amax(library: &Library, values: &[f32], cols: usize) -> f32 {
    let (stride, mut largest) = (cols.next_multiple_of(4), Room::new(4, 0));
    let mut from = spread(values, cols, stride);
    let encode = Encode {
        values: from.address(),
        stride: stride as u64,
        rows: (values.len() / cols) as u64,
        cols: cols as u64,
        largest: largest.address(),
        whole: 1,
        ..Encode::default()
    };
    library.encode(Encoder::Amax, &encode, false);
    f32::from_bits(largest.words()[0])
}

/// Blocks, whole and ragged, of every sample.
pub fn fp8_blocks(library: &Library) {
    for values in samples() {
        for (rows, cols) in [(128, 156), (1, 1100), (3, 129), (1, 16), (130, 260), (17, 8), (2050, 9)] {
            values.chunks_exact(rows * cols).for_each(|values| same(library, Form::Fp8, values, cols));
        }
    }
}

/// Blocks, with the scale of their weight and with others.
pub fn nvfp4_blocks(library: &Library) {
    for values in samples() {
        let values = &values[..values.len() / 16 * 16];
        let own = nvfp4::weight_scale_2(nvfp4::amax(values));
        for part in values.chunks(528) {
            let scale = nvfp4::weight_scale_2(nvfp4::amax(part));
            for scale_2 in [scale, own, 1.0, scale / 16.0] {
                if scale_2 < f32::MIN_POSITIVE * 512.0 {
                    continue;
                }
                for how in [BlockScale::Amax, BlockScale::Searched] {
                    same(library, Form::Nvfp4(scale_2, how), part, if part.len() % 33 == 0 { 176 } else { part.len() });
                }
            }
        }
        for cols in [1, 7, 300].into_iter().filter(|cols| *cols <= values.len()) {
            let values = &values[..values.len() / cols * cols];
            assert_eq!(amax(library, values, cols).to_bits(), nvfp4::amax(values).to_bits());
        }
    }
}

/// Whole groups are loaded and stored as wide as they can be.
pub fn widths(library: &Library) {
    let (values, whole) = ([1.5; 32 * 256], 32 * 256);
    let accesses = || [16, 8, 4, 2].map(|bytes| library.accesses(bytes));
    kernels(library, Form::Nvfp4(1.0, BlockScale::Amax), &values, 256, 256, false);
    assert_eq!(accesses(), [whole / 4, whole / 16, 0, 0]);
    assert_eq!(amax(library, &values, 256), 1.5);
    assert_eq!(accesses(), [whole / 4, 0, 0, 0]);
    // Every thread loads its largest magnitude, and one of each block stores the scale.
    let (mut from, mut codes) = (spread(&values, 256, 256), Room::new(values.len(), 0));
    let (mut largest, mut scales, mut slots) =
        (Room::new(8, 0), Room::new(8, 0), vec![Found::default(); Encode::SLOTS]);
    let encode = Encode {
        values: from.address(),
        stride: 256,
        rows: 32,
        cols: 256,
        codes: codes.address(),
        scales: scales.address(),
        largest: largest.address(),
        found: slots.as_mut_ptr() as u64,
        ..Encode::default()
    };
    library.encode(Encoder::Fp8, &encode, false);
    assert_eq!(accesses(), [whole / 4, whole / 8, 2 * 32 + 2, 0]);
}

/// Random shapes, with values of any size, and with some that are not finite: those are counted, and spoil their block only.
pub fn shapes(library: &Library, seed: u64, count: usize) {
    let mut random = Random(seed);
    for case in 0..count {
        let (rows, cols) = (1 + random.below(400) as usize, 16 * (1 + random.below(40) as usize));
        let ragged = if case % 2 == 0 { cols } else { cols - random.below(16) as usize };
        let wild = case % 3 == 0;
        let mut value = |_| {
            let any = f32::from_bits(random.next() as u32 & 0xBFFF_FFFF);
            if wild { any } else { (random.next() as i32 as f32) * 2f32.powi(-31) }
        };
        let mut values: Vec<f32> = (0..rows * ragged).map(&mut value).collect();
        same(library, Form::Fp8, &values, ragged);
        if ragged == cols {
            let scale_2 = nvfp4::weight_scale_2(nvfp4::amax(&values));
            same(library, Form::Nvfp4(scale_2, BlockScale::Amax), &values, cols);
            same(library, Form::Nvfp4(scale_2, BlockScale::Searched), &values[..16 * (values.len() / 16).min(64)], 16);
        }
        // In the first block, sometimes alone in what a thread takes.
        let clean = rust(Form::Fp8, &values, ragged);
        values[0] = f32::from_bits(if case % 3 == 0 { 0x7F80_0001 } else { 0xFFC0_0000 });
        values[(ragged.min(40) - 1) * (case % 4 / 2)] = -f32::INFINITY;
        let spoilt = kernels(library, Form::Fp8, &values, ragged, ragged.next_multiple_of(4), false);
        let counted = rust(Form::Fp8, &values, ragged).found;
        assert_eq!(spoilt.found, counted, "{rows} x {ragged}");
        assert_eq!(spoilt.scales[1..], clean.scales[1..]);
        for at in (0..values.len()).filter(|at| at / ragged >= 128 || at % ragged >= 128) {
            assert_eq!(spoilt.codes[at], clean.codes[at], "{rows} x {ragged}, {at}");
        }
        if ragged == cols {
            let spoilt = kernels(library, Form::Nvfp4(1.0, BlockScale::Amax), &values, cols, cols, false);
            assert_eq!(spoilt.found, counted);
            values[..cols.min(48)].fill(0.0);
            let clean = rust(Form::Nvfp4(1.0, BlockScale::Amax), &values, cols);
            let rest = cols.min(48) / 16;
            assert_eq!(
                (&spoilt.codes[8 * rest..], &spoilt.scales[rest..]),
                (&clean.codes[8 * rest..], &clean.scales[rest..])
            );
        }
    }
}

/// Pairs whose quotients must be those of IEEE division; divisors are normal.
fn pairs(random: &mut Random, count: usize) -> Vec<(f32, f32)> {
    let mut pairs = Vec::with_capacity(count);
    let float = |mantissa: u64, exponent: u64| f32::from_bits((exponent << 23) as u32 | mantissa as u32 & 0x007F_FFFF);
    while pairs.len() < count {
        let (a, b) = (random.next(), random.next());
        let exponents = (1 + (a >> 40) % 254, 1 + (b >> 40) % 254);
        let divisor = float(b, exponents.1);
        match pairs.len() % 4 {
            // Any bits.
            0 => pairs.push((f32::from_bits(a as u32 & 0xBFFF_FFFF), divisor)),
            // Quotients of about 1.
            1 => pairs.push((float(a, 127), float(b, 127))),
            // As near to the middle of two numbers as a quotient can be: V * 2^k is M * S + 1 or - 1, M in the middle.
            2 => {
                let (s, k) = (b & 0x007F_FFFF | 0x0080_0001, 24 + (a & 1));
                let inverse = (0..5).fold(1u64, |i, _| i.wrapping_mul(2u64.wrapping_sub(i.wrapping_mul(s))));
                for above in [true, false] {
                    let m = if above { inverse.wrapping_neg() } else { inverse } & ((1 << k) - 1) | 1 << 24;
                    let product = if above { m.wrapping_mul(s) + 1 } else { m.wrapping_mul(s) - 1 };
                    let v = product >> k;
                    if product.trailing_zeros() as u64 >= k && v >> 24 == 0 && v >> 23 == 1 {
                        pairs.push((float(v, exponents.0), float(s, exponents.1)));
                    }
                }
                pairs.push((float(a, exponents.0), divisor));
            }
            // Quotients that have few bits: small numbers, and halves between subnormal ones.
            _ => {
                let divisor = float(b & 0x007F_FF80, 155 + (b >> 40) % 100);
                let quotient = (1 + (a >> 8) % 127) as f64 * 2f64.powi([-150, -149, -151, 0][(a & 3) as usize]);
                let value = divisor as f64 * quotient;
                if value == (value as f32) as f64 {
                    pairs.push((value as f32, divisor));
                }
            }
        }
    }
    pairs
}

/// So many quotients. Every kind of them must have been there.
pub fn quotients(library: &Library, seed: u64, count: usize) {
    let mut random = Random(seed);
    let (mut subnormal, mut zero, mut infinite, mut near) = (0, 0, 0, 0);
    let mut done = 0;
    while done < count {
        let pairs = pairs(&mut random, 1 << 16);
        let (values, divisors): (Vec<f32>, Vec<f32>) = pairs.iter().copied().unzip();
        for ((value, divisor), got) in pairs.iter().zip(library.divide(&values, &divisors)) {
            let want = value / divisor;
            assert_eq!(got.to_bits(), want.to_bits(), "{value:e} / {divisor:e} is {want:e} and not {got:e}");
            subnormal += want.is_subnormal() as usize;
            zero += (want == 0.0 && *value != 0.0) as usize;
            infinite += want.is_infinite() as usize;
            // In units of the last bit, how far the quotient is from the middle of two numbers.
            let (exact, unit) = (*value as f64 / *divisor as f64, (want.next_up() - want) as f64);
            near += (((exact - want as f64) / unit).abs() > 0.499_999_9) as usize;
        }
        done += pairs.len();
    }
    assert!(subnormal.min(zero).min(infinite).min(near) > done / 100, "{subnormal} {zero} {infinite} {near} of {done}");
    // Every mantissa of a divisor: a reciprocal that is too far from the true one gives no 1.
    for start in (0..1u32 << 23).step_by(1 << 16) {
        let divisors: Vec<f32> = (start..start + (1 << 16)).map(|m| f32::from_bits(m | 127 << 23)).collect();
        let wrong = divisors.iter().zip(library.divide(&divisors, &divisors)).find(|(_, quotient)| *quotient != 1.0);
        assert_eq!(wrong, None, "a divisor by itself");
    }
}
