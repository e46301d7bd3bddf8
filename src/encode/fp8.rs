//! FP8 in blocks, as DeepSeek publishes it: E4M3 codes, and an `f32` `weight_scale_inv` per block of 128 x 128.
//!
//! A block's scale is its largest magnitude over 448, and the code of a value is `value / scale`, rounded to E4M3; both
//! divisions round to `f32`. That is DeepSeek's quantizer (`s = amax / 448; y = x / s`) in torch's arithmetic. Others
//! multiply by a reciprocal, which rounds once more. Decoded, a weight is `code * scale`.

use super::deviation::{Deviation, LANES as COMPARED, Measure};
use super::kernels;
use super::minifloat::E4M3;
use crate::dequant::Simd;

/// Rows and columns of a block. The last ones of a weight may be shorter.
pub const BLOCK: usize = 128;

/// The largest magnitude of a code.
pub const LARGEST: f32 = 448.0;

/// Encodes a band: one row of blocks, at most 128 rows of `values`, row-major.
///
/// `out` gets a code per value, row-major; `scales` a scale per 128 columns, from the left.
///
/// - The scale of a block is never subnormal, which devices flush to zero: where `amax / 448` is, it is 2^-126.
/// - A block of zeros has the scale 1. Zeros keep their sign.
/// - Values that are not finite are for the caller to refuse. Here a NaN becomes a NaN, and the rest of its block is worth
///   nothing.
///
/// # Panics
///
/// If there are more than 128 rows, or a slice has not the length that `rows` and `cols` demand; these are programming
/// errors.
pub fn band(values: &[f32], rows: usize, cols: usize, out: &mut [u8], scales: &mut [f32]) {
    band_on(Simd::detect(), values, rows, cols, out, scales);
}

/// As [`band`], on an instruction set, or the best that this CPU has where it lacks that. The bits are the same.
///
/// # Panics
///
/// As [`band`].
pub fn band_on(simd: Simd, values: &[f32], rows: usize, cols: usize, out: &mut [u8], scales: &mut [f32]) {
    check(values, rows, cols, out, scales);
    kernels::fp8_band(simd, values, cols, out, scales);
}

/// How far an encoded band is from `values`. Arguments are as for [`band`].
///
/// # Panics
///
/// As [`band`].
pub fn deviation(values: &[f32], rows: usize, cols: usize, codes: &[u8], scales: &[f32]) -> Deviation {
    deviation_on(Simd::detect(), values, rows, cols, codes, scales)
}

/// As [`deviation`], on an instruction set, or the best that this CPU has where it lacks that. The bits are the same.
///
/// # Panics
///
/// As [`band`].
pub fn deviation_on(simd: Simd, values: &[f32], rows: usize, cols: usize, codes: &[u8], scales: &[f32]) -> Deviation {
    check(values, rows, cols, codes, scales);
    kernels::fp8_deviation(simd, values, cols, codes, scales)
}

/// The value of a code, without its scale.
pub fn value(code: u8) -> f32 {
    E4M3.value(code)
}

fn check(values: &[f32], rows: usize, cols: usize, codes: &[u8], scales: &[f32]) {
    assert!(rows <= BLOCK, "{rows} rows are more than a band of {BLOCK}");
    assert_eq!(values.len(), rows * cols, "values of {rows} x {cols}");
    assert_eq!(codes.len(), rows * cols, "codes of {rows} x {cols}");
    assert_eq!(scales.len(), cols.div_ceil(BLOCK), "scales of {cols} columns");
}

/// One band, block after block, so that the second look at a block finds it in a cache.
#[inline(always)]
pub(super) fn encode(values: &[f32], cols: usize, out: &mut [u8], scales: &mut [f32]) {
    for (block, scale) in scales.iter_mut().enumerate() {
        let columns = block * BLOCK..cols.min((block + 1) * BLOCK);
        let mut largest = [0; LANES];
        for row in values.chunks_exact(cols) {
            scan(&row[columns.clone()], &mut largest);
        }
        *scale = scale_of(largest);
        for (row, out) in values.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            divide(&row[columns.clone()], *scale, &mut out[columns.clone()]);
        }
    }
}

/// Maxima that are kept side by side, so that loops over them vectorise.
const LANES: usize = 32;

/// Raises `largest` to the magnitudes of a block's row. As integers, bits of magnitudes are in the order of the values.
#[inline(always)]
fn scan(row: &[f32], largest: &mut [u32; LANES]) {
    let (groups, rest) = row.as_chunks::<LANES>();
    for group in groups {
        for (largest, value) in largest.iter_mut().zip(group) {
            *largest = (*largest).max(value.to_bits() & 0x7FFF_FFFF);
        }
    }
    for (largest, value) in largest.iter_mut().zip(rest) {
        *largest = (*largest).max(value.to_bits() & 0x7FFF_FFFF);
    }
}

#[inline(always)]
fn scale_of(largest: [u32; LANES]) -> f32 {
    let amax = f32::from_bits(largest.into_iter().fold(0, u32::max));
    if amax == 0.0 { 1.0 } else { (amax / LARGEST).max(f32::MIN_POSITIVE) }
}

/// The codes of a block's row.
#[inline(always)]
fn divide(row: &[f32], scale: f32, out: &mut [u8]) {
    let (groups, rest) = row.as_chunks::<BLOCK>();
    let (group_outs, rest_out) = out.as_chunks_mut::<BLOCK>();
    for (group, out) in groups.iter().zip(group_outs) {
        for (value, out) in group.iter().zip(out) {
            *out = E4M3.code(*value / scale);
        }
    }
    for (value, out) in rest.iter().zip(rest_out) {
        *out = E4M3.code(*value / scale);
    }
}

/// [`deviation`], to be compiled for an instruction set.
#[inline(always)]
pub(super) fn measure(values: &[f32], cols: usize, codes: &[u8], scales: &[f32]) -> Deviation {
    let mut measure = Measure::default();
    for (block, scale) in scales.iter().enumerate() {
        let columns = block * BLOCK..cols.min((block + 1) * BLOCK);
        for (row, codes) in values.chunks_exact(cols).zip(codes.chunks_exact(cols)) {
            let (groups, rest) = row[columns.clone()].as_chunks::<COMPARED>();
            let (group_codes, rest_codes) = codes[columns.clone()].as_chunks::<COMPARED>();
            for (group, codes) in groups.iter().zip(group_codes) {
                measure.take(group, &decode(codes, *scale));
            }
            if rest.is_empty() {
                continue;
            }
            // Lanes past the end compare a zero with a zero.
            let (mut group, mut codes) = ([0.0; COMPARED], [0; COMPARED]);
            group[..rest.len()].copy_from_slice(rest);
            codes[..rest.len()].copy_from_slice(rest_codes);
            measure.take(&group, &decode(&codes, *scale));
        }
        measure.end_block();
    }
    measure.end()
}

#[inline(always)]
fn decode(codes: &[u8; COMPARED], scale: f32) -> [f32; COMPARED] {
    let mut decoded = [0.0; COMPARED];
    for (decoded, code) in decoded.iter_mut().zip(codes) {
        *decoded = E4M3.value(*code) * scale;
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every level gives these codes and scales.
    fn encoded(values: &[f32], rows: usize, cols: usize) -> (Vec<u8>, Vec<f32>) {
        let mut all = Simd::available().into_iter().map(|simd| {
            let (mut out, mut scales) = (vec![0xAA; rows * cols], vec![9.0; cols.div_ceil(BLOCK)]);
            band_on(simd, values, rows, cols, &mut out, &mut scales);
            (out, scales)
        });
        let first = all.next().unwrap();
        all.for_each(|other| assert_eq!(other, first));
        first
    }

    /// Values of many sizes, both signs.
    fn sample(count: usize) -> Vec<f32> {
        let mut state = 1u32;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let size = 2f32.powi((state >> 8) as i32 % 30 - 20);
            (state as i32) as f32 / 2f32.powi(31) * size
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn blocks_have_their_own_scales_also_where_they_are_ragged() {
        let (rows, cols) = (3, 300);
        let values = sample(rows * cols);
        let (out, scales) = encoded(&values, rows, cols);
        for (block, scale) in scales.iter().enumerate() {
            let columns = 128 * block..cols.min(128 * (block + 1));
            let cells: Vec<usize> =
                (0..rows).flat_map(|row| columns.clone().map(move |col| row * cols + col)).collect();
            let amax = cells.iter().fold(0f32, |amax, &cell| amax.max(values[cell].abs()));
            assert_eq!(*scale, amax / 448.0);
            for cell in cells {
                assert_eq!(out[cell], E4M3.code(values[cell] / scale), "{cell}");
            }
        }
    }

    #[test]
    fn the_largest_value_of_a_block_has_the_largest_code() {
        for amax in [1.0, 0.1, 3e38, 1e-30, f32::MAX, 448.0 * f32::MIN_POSITIVE] {
            assert_eq!(encoded(&[amax, -amax], 1, 2).0, [0x7E, 0xFE], "{amax:e}");
        }
    }

    #[test]
    fn zeros_have_the_scale_one_and_keep_their_sign() {
        assert_eq!(encoded(&[0.0, -0.0], 1, 2), (vec![0, 0x80], vec![1.0]));
    }

    #[test]
    fn scales_are_never_subnormal() {
        let tiny = f32::MIN_POSITIVE;
        assert_eq!(encoded(&[tiny, -tiny * 1.5, f32::from_bits(1)], 1, 3), (vec![0x38, 0xBC, 0], vec![tiny]));
        assert_eq!(encoded(&[f32::from_bits(1)], 1, 1), (vec![0], vec![tiny]));
    }

    #[test]
    fn what_is_not_finite_does_no_more_than_spoil_its_block() {
        let mut values = sample(2 * 256);
        values[0] = f32::NAN;
        values[300] = f32::INFINITY;
        values[128] = 1.0;
        let (out, scales) = encoded(&values, 2, 256);
        assert_eq!(out[0], 0x7F);
        values[0] = 0.0;
        values[300] = 0.0;
        let clean = encoded(&values, 2, 256);
        assert_eq!((scales[1], out[128]), (clean.1[1], clean.0[128]));
    }

    #[test]
    fn an_empty_band_is_no_work() {
        assert_eq!(encoded(&[], 0, 200), (vec![], vec![1.0, 1.0]));
        assert_eq!(encoded(&[], 5, 0), (vec![], vec![]));
    }
}
