//! IQ3 types: an index picks four magnitudes from a grid; a pattern gives the signs of eight.
//!
//! ```text
//! IQ3_XXS  d f16 | indices 64 B | 8 x u32 (four 7-bit signs, 4-bit scale on top)          x = d * (0.5 + sc) / 2 * code
//! IQ3_S    d f16 | indices 64 B | qh 8 B | signs 32 B | scales 4 B (nibbles, low first)   x = d * (1 + 2*sc) * code
//! ```
//!
//! Both have one scale per 32 weights.

use super::super::isa::Isa;
use super::grids::{IQ3S, IQ3XXS};
use super::signs::{EVEN_SIGNS, SIGNS, negate, to_bytes};
use super::{field, scale_groups};

/// IQ3_XXS.
#[inline(always)]
pub(in crate::dequant) fn iq3_xxs<I: Isa>(isa: I, block: &[u8; 98], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let qs = field::<2, 64, _>(block);
    let mut words = [0; 32];
    let mut scales = [0.0; 8];
    for (i, signs) in field::<66, 32, _>(block).as_chunks::<4>().0.iter().enumerate() {
        let signs = u32::from_le_bytes(*signs);
        scales[i] = d * (0.5 + (signs >> 28) as f32) * 0.5;
        for l in 4 * i..4 * i + 4 {
            let codes = IQ3XXS[qs[2 * l] as usize] as u64 | (IQ3XXS[qs[2 * l + 1] as usize] as u64) << 32;
            words[l] = negate(codes, EVEN_SIGNS[(signs >> (7 * (l % 4)) & 127) as usize]);
        }
    }
    scale_groups::<32>(out, &scales, &to_bytes(words));
}

/// IQ3_S. Bit `l` of `qh[i]` is the ninth bit of index `l` of group `i`, eight indices to a group.
#[inline(always)]
pub(in crate::dequant) fn iq3_s<I: Isa>(isa: I, block: &[u8; 110], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let qs = field::<2, 64, _>(block);
    let qh = field::<66, 8, _>(block);
    let signs = field::<74, 32, _>(block);
    let packed = u32::from_le_bytes(*field::<106, 4, _>(block));
    let mut words = [0; 32];
    let mut scales = [0.0; 8];
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale = d * (1 + 2 * (packed >> (4 * i) & 15)) as f32;
    }
    for (l, word) in words.iter_mut().enumerate() {
        let high = (qh[l / 4] >> (2 * (l % 4))) as usize;
        let first = IQ3S[qs[2 * l] as usize | (high & 1) << 8] as u64;
        let second = IQ3S[qs[2 * l + 1] as usize | (high >> 1 & 1) << 8] as u64;
        *word = negate(first | second << 32, SIGNS[signs[l] as usize]);
    }
    scale_groups::<32>(out, &scales, &to_bytes(words));
}
