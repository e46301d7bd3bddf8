//! One and two bits with one `f16` scale.
//!
//! ```text
//! Q1_0  d f16 | bits 16 B     128 weights: x[i] = bit i is set ? d : -d
//! Q2_0  d f16 | qs 16 B       64 weights: x[i] = d * (q - 1), two bits each, four to a byte from the lowest up
//! ```

use super::super::isa::Isa;
use super::signs::{SIGNS, to_bytes};
use super::{field, map, scale};

/// Q1_0.
#[inline(always)]
pub(in crate::dequant) fn q1_0<I: Isa>(isa: I, block: &[u8; 18], out: &mut [f32; 128]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let mut words = [0u64; 16];
    for (word, byte) in words.iter_mut().zip(field::<2, 16, _>(block)) {
        // 0xFF becomes 1 and 0 becomes -1.
        *word = !SIGNS[*byte as usize] | 0x0101_0101_0101_0101;
    }
    scale(out, d, &to_bytes(words));
}

/// Q2_0.
#[inline(always)]
pub(in crate::dequant) fn q2_0<I: Isa>(isa: I, block: &[u8; 18], out: &mut [f32; 64]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let mut codes = [0i8; 64];
    for (codes, byte) in codes.as_chunks_mut::<4>().0.iter_mut().zip(field::<2, 16, _>(block)) {
        // A byte's four codes to one byte each: copies of the byte, each moved so that its code is lowest.
        let byte = *byte as u32;
        let spread = (byte | byte << 6 | byte << 12 | byte << 18) & 0x0303_0303;
        *codes = map(&spread.to_le_bytes(), |q| q as i8 - 1);
    }
    scale(out, d, &codes);
}
