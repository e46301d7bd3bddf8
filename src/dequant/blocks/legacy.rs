//! The first generation: 32 weights, one `f16` scale, perhaps a minimum.
//!
//! ```text
//! Q4_0  d f16 | qs 16 B                       x = d * (q - 8)
//! Q4_1  d f16 | m f16 | qs 16 B               x = d * q + m
//! Q5_0  d f16 | qh 4 B | qs 16 B              x = d * (q - 16)
//! Q5_1  d f16 | m f16 | qh 4 B | qs 16 B      x = d * q + m
//! Q8_0  d f16 | qs 32 x i8                    x = d * q
//! ```
//!
//! Nibbles are not interleaved: the low nibble of `qs[i]` is weight `i`, the high nibble weight `i + 16`. Bit `i` of `qh`
//! is the fifth bit of weight `i`.

use super::super::isa::Isa;
use super::{affine, field, map, scale};

/// The 4-bit codes of 16 bytes, in order of weights.
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [u8; 32] {
    let mut codes = [0; 32];
    for (i, byte) in qs.iter().enumerate() {
        codes[i] = byte & 15;
        codes[i + 16] = byte >> 4;
    }
    codes
}

/// The 5-bit codes, in order of weights.
#[inline(always)]
fn five_bits(qh: &[u8; 4], qs: &[u8; 16]) -> [u8; 32] {
    let mut codes = nibbles(qs);
    for (i, code) in codes.iter_mut().enumerate() {
        let fifth = qh[i / 8] & (1 << (i % 8)) != 0;
        *code |= if fifth { 16 } else { 0 };
    }
    codes
}

/// Q4_0.
#[inline(always)]
pub(in crate::dequant) fn q4_0<I: Isa>(isa: I, block: &[u8; 18], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let codes = map(&nibbles(field::<2, 16, _>(block)), |q| q as i8 - 8);
    scale(out, d, &codes);
}

/// Q4_1.
#[inline(always)]
pub(in crate::dequant) fn q4_1<I: Isa>(isa: I, block: &[u8; 20], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let m = isa.f16(*field::<2, 2, _>(block));
    affine(out, d, &nibbles(field::<4, 16, _>(block)), m);
}

/// Q5_0.
#[inline(always)]
pub(in crate::dequant) fn q5_0<I: Isa>(isa: I, block: &[u8; 22], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let codes = map(&five_bits(field::<2, 4, _>(block), field::<6, 16, _>(block)), |q| q as i8 - 16);
    scale(out, d, &codes);
}

/// Q5_1.
#[inline(always)]
pub(in crate::dequant) fn q5_1<I: Isa>(isa: I, block: &[u8; 24], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let m = isa.f16(*field::<2, 2, _>(block));
    let codes = five_bits(field::<4, 4, _>(block), field::<8, 16, _>(block));
    affine(out, d, &codes, m);
}

/// Q8_0.
#[inline(always)]
pub(in crate::dequant) fn q8_0<I: Isa>(isa: I, block: &[u8; 34], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let codes = map(field::<2, 32, _>(block), |q| q as i8);
    scale(out, d, &codes);
}
