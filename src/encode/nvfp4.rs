//! NVFP4, as ModelOpt publishes it: two E2M1 codes in a byte, the first in the low bits; an E4M3 `weight_scale` per 16
//! values along a row; an `f32` `weight_scale_2` per weight. Decoded, a weight is `code * (weight_scale * weight_scale_2)`.
//!
//! The arithmetic is that of ModelOpt's quantizer, every step rounded to `f32`:
//!
//! ```text
//! weight_scale_2 = amax of the weight / 2688                     2688 = 6 * 448, the largest code and block scale
//! weight_scale   = E4M3(amax of the block / (6 * weight_scale_2))
//! code           = E2M1(value / (weight_scale * weight_scale_2))
//! ```
//!
//! Both conversions round to nearest even; what a block scale that was rounded down makes larger than 6 becomes 6. A block
//! scale is at least 2^-9, the smallest, and 1 for a block of zeros. ModelOpt gives -0 the code of 0; here it keeps its sign.

use super::deviation::{Blocks, Deviation, LANES, fold};
use super::kernels;
use super::minifloat::{E2M1, E4M3};
use crate::dequant::Simd;

/// Values that share a block scale.
pub const BLOCK: usize = 16;

/// The block scale that a search may take instead: codes from the one that [`BlockScale::Amax`] gives.
///
/// One or two smaller cut off the largest value; three to six larger give it the code 4 instead of 6, where codes are closer.
/// Of random values, scales further off are never the best.
const SEARCHED: std::ops::RangeInclusive<i32> = -2..=6;

/// How much smaller the error with another scale must be: more than the arithmetic can be wrong.
const BETTER: f32 = 1.0 - 1.0 / 65536.0;

/// How block scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockScale {
    /// From the largest magnitude of the block, as ModelOpt does.
    Amax,
    /// Among that scale and its neighbours, the one with the smallest squared error; the former where none is better.
    Searched,
}

/// The largest magnitude, for [`weight_scale_2`]. It is not finite if a value is not.
///
/// That of a weight is the largest of those of its parts.
pub fn amax(values: &[f32]) -> f32 {
    amax_on(Simd::detect(), values)
}

/// As [`amax`], on an instruction set, or the best that this CPU has where it lacks that.
pub fn amax_on(simd: Simd, values: &[f32]) -> f32 {
    kernels::nvfp4_amax(simd, values)
}

/// The `weight_scale_2` of a weight, or of weights that share one, from the largest magnitude.
///
/// It is 1 for zeros. It is at least 2^-117, so that no product with a block scale is subnormal.
pub fn weight_scale_2(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / 2688.0).max(f32::MIN_POSITIVE * 512.0) }
}

/// Encodes whole rows of `values`, row-major: a byte per two values into `packed`, a block scale per 16 into `scales`.
///
/// `weight_scale_2` is what the function of that name gives, for this weight or for a larger one. With a smaller one, large
/// values are cut off. Values that are not finite are for the caller to refuse; here they spoil their block.
///
/// # Panics
///
/// If `cols` is not a multiple of 16, or a slice has not the length that the values demand; these are programming errors.
pub fn rows(values: &[f32], cols: usize, weight_scale_2: f32, how: BlockScale, packed: &mut [u8], scales: &mut [u8]) {
    rows_on(Simd::detect(), values, cols, weight_scale_2, how, packed, scales);
}

/// As [`rows`], on an instruction set, or the best that this CPU has where it lacks that. The bits are the same.
///
/// # Panics
///
/// As [`rows`].
pub fn rows_on(
    simd: Simd,
    values: &[f32],
    cols: usize,
    weight_scale_2: f32,
    how: BlockScale,
    packed: &mut [u8],
    scales: &mut [u8],
) {
    check(values, cols, packed, scales);
    match how {
        BlockScale::Amax => kernels::nvfp4_rows(simd, values, weight_scale_2, packed, scales),
        BlockScale::Searched => kernels::nvfp4_searched(simd, values, weight_scale_2, packed, scales),
    }
}

/// How far encoded rows are from `values`. Arguments are as for [`rows`].
///
/// # Panics
///
/// As [`rows`].
pub fn deviation(values: &[f32], cols: usize, weight_scale_2: f32, packed: &[u8], scales: &[u8]) -> Deviation {
    deviation_on(Simd::detect(), values, cols, weight_scale_2, packed, scales)
}

/// As [`deviation`], on an instruction set, or the best that this CPU has where it lacks that. The bits are the same.
///
/// # Panics
///
/// As [`rows`].
pub fn deviation_on(
    simd: Simd,
    values: &[f32],
    cols: usize,
    weight_scale_2: f32,
    packed: &[u8],
    scales: &[u8],
) -> Deviation {
    check(values, cols, packed, scales);
    kernels::nvfp4_deviation(simd, values, weight_scale_2, packed, scales)
}

/// The value of the low four bits of a byte, without its scales.
pub fn value(code: u8) -> f32 {
    E2M1.value(code & 15)
}

/// The value of a block scale, without `weight_scale_2`.
pub fn scale_value(code: u8) -> f32 {
    E4M3.value(code)
}

fn check(values: &[f32], cols: usize, packed: &[u8], scales: &[u8]) {
    assert!(cols.is_multiple_of(BLOCK), "{cols} columns are not whole blocks of {BLOCK}");
    let whole = if cols == 0 { values.is_empty() } else { values.len().is_multiple_of(cols) };
    assert!(whole, "{} values are not whole rows of {cols}", values.len());
    assert_eq!(packed.len(), values.len() / 2, "codes of {} values", values.len());
    assert_eq!(scales.len(), values.len() / BLOCK, "scales of {} values", values.len());
}

/// [`amax`], to be compiled for an instruction set.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    let mut largest = [0; 4 * BLOCK];
    let (groups, rest) = values.as_chunks::<{ 4 * BLOCK }>();
    for group in groups {
        for (largest, value) in largest.iter_mut().zip(group) {
            *largest = (*largest).max(magnitude(*value));
        }
    }
    let largest = largest.into_iter().fold(0, u32::max);
    f32::from_bits(rest.iter().fold(largest, |largest, value| largest.max(magnitude(*value))))
}

/// As bits, which as integers have the order of the magnitudes.
#[inline(always)]
fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7FFF_FFFF
}

/// Blocks that are encoded together, so that their scales are computed side by side.
const GROUP: usize = 16;

/// Rows with [`BlockScale::Amax`]. Rows are whole blocks, so that their length does not matter.
#[inline(always)]
pub(super) fn encode(values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
    let groups = values.chunks(GROUP * BLOCK).zip(packed.chunks_mut(GROUP * BLOCK / 2)).zip(scales.chunks_mut(GROUP));
    for ((values, packed), scales) in groups {
        let blocks = values.as_chunks::<BLOCK>().0;
        let first = scales_of(blocks, weight_scale_2);
        scales.copy_from_slice(&first[..scales.len()]);
        let steps = steps(&first, weight_scale_2);
        for ((block, packed), step) in blocks.iter().zip(packed.as_chunks_mut::<8>().0).zip(&steps) {
            pack(&codes(block, *step), packed);
        }
    }
}

/// Rows with [`BlockScale::Searched`].
#[inline(always)]
pub(super) fn search(values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
    let groups = values.chunks(GROUP * BLOCK).zip(packed.chunks_mut(GROUP * BLOCK / 2)).zip(scales.chunks_mut(GROUP));
    for ((values, packed), scales) in groups {
        let blocks = values.as_chunks::<BLOCK>().0;
        let first = scales_of(blocks, weight_scale_2);
        for ((block, packed), (scale, first)) in
            blocks.iter().zip(packed.as_chunks_mut::<8>().0).zip(scales.iter_mut().zip(&first))
        {
            *scale = best(block, weight_scale_2, *first);
            pack(&codes(block, E4M3.value(*scale) * weight_scale_2), packed);
        }
    }
}

/// The scale with the smallest squared error, among `first` and its neighbours.
#[inline(always)]
fn best(block: &[f32; BLOCK], weight_scale_2: f32, first: u8) -> u8 {
    let mut ratios = [0.0; BLOCK];
    for (ratio, value) in ratios.iter_mut().zip(block) {
        *ratio = value / weight_scale_2;
    }
    let mut best = first;
    let mut least = squared_error(block, &ratios, weight_scale_2, first);
    for nudge in SEARCHED {
        let other = (first as i32 + nudge).clamp(1, 0x7E) as u8;
        let error = squared_error(block, &ratios, weight_scale_2, other);
        if error < least * BETTER {
            (best, least) = (other, error);
        }
    }
    best
}

/// The scales of at most [`GROUP`] blocks; past the last one they mean nothing.
#[inline(always)]
fn scales_of(blocks: &[[f32; BLOCK]], weight_scale_2: f32) -> [u8; GROUP] {
    let mut largest = [0; GROUP];
    for (largest, block) in largest.iter_mut().zip(blocks) {
        for value in block {
            *largest = magnitude(*value).max(*largest);
        }
    }
    let mut scales = [0; GROUP];
    for (scale, largest) in scales.iter_mut().zip(largest) {
        let ratio = f32::from_bits(largest) / (6.0 * weight_scale_2);
        *scale = E4M3.code(if ratio == 0.0 { 1.0 } else { ratio.max(E4M3.value(1)) });
    }
    scales
}

/// What the codes of blocks count.
#[inline(always)]
fn steps(scales: &[u8; GROUP], weight_scale_2: f32) -> [f32; GROUP] {
    let mut steps = [0.0; GROUP];
    for (step, scale) in steps.iter_mut().zip(scales) {
        *step = E4M3.value(*scale) * weight_scale_2;
    }
    steps
}

#[inline(always)]
fn codes(block: &[f32; BLOCK], step: f32) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    for (code, value) in codes.iter_mut().zip(block) {
        *code = E2M1.code(value / step);
    }
    codes
}

#[inline(always)]
fn pack(codes: &[u8; BLOCK], packed: &mut [u8; BLOCK / 2]) {
    for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// The sum of a block's squared errors with a scale, in units of `weight_scale_2`, of which `ratios` are the values. No value
/// of a weight has more than 2688 of them: a square neither overflows nor loses its last bits. `code * scale` is exact.
#[inline(always)]
fn squared_error(block: &[f32; BLOCK], ratios: &[f32; BLOCK], weight_scale_2: f32, scale: u8) -> f32 {
    let scale = E4M3.value(scale);
    let step = scale * weight_scale_2;
    let mut squares = [0.0; BLOCK];
    for lane in 0..BLOCK {
        let error = ratios[lane] - E2M1.value(E2M1.code(block[lane] / step)) * scale;
        squares[lane] = error * error;
    }
    fold(squares)
}

/// [`deviation`], to be compiled for an instruction set.
#[inline(always)]
pub(super) fn measure(values: &[f32], weight_scale_2: f32, packed: &[u8], scales: &[u8]) -> Deviation {
    let mut measure = Blocks::default();
    let groups = values.chunks(GROUP * BLOCK).zip(packed.chunks(GROUP * BLOCK / 2)).zip(scales.chunks(GROUP));
    for ((values, packed), scales) in groups {
        let (blocks, packed) = (values.as_chunks::<BLOCK>().0, packed.as_chunks::<8>().0);
        let mut all = [0; GROUP];
        all[..scales.len()].copy_from_slice(scales);
        let steps = steps(&all, weight_scale_2);
        measure.take(blocks, |block| {
            let packed = u64::from_le_bytes(packed[block]);
            let mut decoded = [0.0; LANES];
            for (lane, decoded) in decoded.iter_mut().enumerate() {
                *decoded = E2M1.value((packed >> (4 * lane)) as u8 & 15) * steps[block];
            }
            decoded
        });
    }
    measure.end()
}
