//! E4M3 in blocks of 128 × 128 with one f32 scale each, as DeepSeek publishes its checkpoints.
//!
//! ```text
//! scale = max |v| / 448        byte = E4M3(v / scale), to nearest even, at most ±448
//! value = byte * scale
//! ```
//!
//! A block of zeros has scale 1. The maximum is over finite values; a NaN becomes E4M3's NaN, an infinity ±448.

/// Rows and columns of a block.
pub const BLOCK: usize = 128;
/// The largest number of E4M3.
const LARGEST: f32 = 448.0;
/// The byte of every NaN: which sign one has depends on the processor.
const NAN: u8 = 0x7F;

/// Encodes a band of at most 128 rows: `values` are `rows` × `cols`, row-major, `out` as many bytes. `scales` gets one for
/// each 128 columns; the last block may be narrower.
///
/// # Panics
///
/// If a length is not what `rows` and `cols` demand, which is a programming error.
pub fn band(values: &[f32], rows: usize, cols: usize, out: &mut [u8], scales: &mut [f32]) {
    assert!(rows <= BLOCK && values.len() == rows * cols && out.len() == values.len(), "{rows} rows of {cols}");
    assert_eq!(scales.len(), cols.div_ceil(BLOCK), "a scale for each block of {cols} columns");
    let mut largest = vec![0u32; scales.len()];
    for row in values.chunks_exact(cols.max(1)) {
        for (block, largest) in row.chunks(BLOCK).zip(&mut largest) {
            *largest = block.iter().fold(*largest, |m, v| m.max(finite_magnitude(*v)));
        }
    }
    for (scale, largest) in scales.iter_mut().zip(&largest) {
        let quotient = f32::from_bits(*largest) / LARGEST;
        *scale = if quotient > 0.0 { quotient } else { 1.0 };
    }
    for (row, out) in values.chunks_exact(cols.max(1)).zip(out.chunks_exact_mut(cols.max(1))) {
        for ((block, out), scale) in row.chunks(BLOCK).zip(out.chunks_mut(BLOCK)).zip(scales.iter()) {
            for (value, out) in block.iter().zip(out) {
                *out = e4m3(value / scale);
            }
        }
    }
}

/// The bits of a value's magnitude, 0 if it is not finite. Magnitudes compare as their bits do.
#[inline(always)]
fn finite_magnitude(value: f32) -> u32 {
    let bits = value.to_bits() & 0x7FFF_FFFF;
    if bits < 0x7F80_0000 { bits } else { 0 }
}

/// The nearest number of E4M3, of two equally near ones the even, and ±448 for all that is larger.
#[inline(always)]
fn e4m3(value: f32) -> u8 {
    /// A float of this size has steps of 2^-9, those of E4M3's subnormal numbers.
    const STEPS: f32 = 16_384.0;
    /// The smallest normal number, 2^-6.
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs().min(LARGEST);
    let bits = magnitude.to_bits();
    let subnormal = (magnitude + STEPS).to_bits() - STEPS.to_bits();
    let rounded = (bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub((127 - 7) << 3);
    let number = if bits < SMALLEST_NORMAL { subnormal } else { normal } as u8;
    if value.is_nan() { NAN } else { sign | number }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a byte stands for, by the definition of the format.
    fn value(byte: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            e => (1.0 + mantissa / 8.0) * 2f32.powi(e - 7),
        };
        if byte & 0x80 != 0 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_number_encodes_to_itself_and_every_midpoint_to_the_even_neighbour() {
        for byte in 0..NAN {
            assert_eq!((e4m3(value(byte)), e4m3(-value(byte))), (byte, byte | 0x80));
            if byte < NAN - 1 {
                let middle = (value(byte) + value(byte + 1)) / 2.0;
                let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
                assert_eq!((e4m3(below), e4m3(middle), e4m3(above)), (byte, byte + byte % 2, byte + 1));
            }
        }
        assert_eq!((e4m3(1e9), e4m3(f32::NEG_INFINITY), e4m3(-f32::NAN)), (0x7E, 0xFE, NAN));
    }

    #[test]
    fn a_block_reaches_the_largest_number_and_a_ragged_one_has_its_own_scale() {
        let (rows, cols) = (3, 130);
        let mut values = vec![0.0f32; rows * cols];
        (values[5], values[cols + 7], values[2 * cols + 129]) = (-896.0, 2.0, 0.5);
        let (mut out, mut scales) = (vec![9; rows * cols], vec![0.0; 2]);
        band(&values, rows, cols, &mut out, &mut scales);
        assert_eq!(scales, [2.0, 0.5 / 448.0]);
        assert_eq!((out[5], value(out[cols + 7]), value(out[2 * cols + 129])), (0xFE, 1.0, 448.0));
        assert!(out.iter().filter(|b| **b != 0).count() == 3);
        band(&[0.0; 4], 2, 2, &mut out[..4], &mut scales[..1]);
        assert_eq!((&out[..4], scales[0]), (&[0; 4][..], 1.0));
    }
}
