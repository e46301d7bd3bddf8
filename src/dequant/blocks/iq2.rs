//! IQ2 types: an index picks eight magnitudes from a grid, a pattern gives their signs.
//!
//! ```text
//! IQ2_XXS  d f16 | 8 x (indices 4 B | u32: four 7-bit signs, 4-bit scale on top)
//! IQ2_XS   d f16 | qs 32 x u16 (9-bit index, 7-bit signs) | scales 8 B
//! IQ2_S    d f16 | indices 32 B | signs 32 B | qh 8 B | scales 8 B
//! ```
//!
//! `x = d * (0.5 + sc) / 4 * code`; IQ2_XXS has one scale per 32 weights, the others one per 16 (nibbles, low first).

use super::super::isa::Isa;
use super::grids::{IQ2S, IQ2XS, IQ2XXS};
use super::signs::{EVEN_SIGNS, SIGNS, negate, to_bytes};
use super::{field, scale_groups};

/// IQ2_XXS.
#[inline(always)]
pub(in crate::dequant) fn iq2_xxs<I: Isa>(isa: I, block: &[u8; 66], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let mut words = [0; 32];
    let mut scales = [0.0; 8];
    for (i, group) in field::<2, 64, _>(block).as_chunks::<8>().0.iter().enumerate() {
        let signs = u32::from_le_bytes(*field::<4, 4, _>(group));
        scales[i] = d * (0.5 + (signs >> 28) as f32) * 0.25;
        for l in 0..4 {
            let mask = EVEN_SIGNS[(signs >> (7 * l) & 127) as usize];
            words[4 * i + l] = negate(IQ2XXS[group[l] as usize], mask);
        }
    }
    scale_groups::<32>(out, &scales, &to_bytes(words));
}

/// The 16 scales of IQ2_XS and IQ2_S.
#[inline(always)]
fn scales_of_16(d: f32, packed: &[u8; 8]) -> [f32; 16] {
    let mut scales = [0.0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale = d * (0.5 + (packed[i / 2] >> (4 * (i % 2)) & 15) as f32) * 0.25;
    }
    scales
}

/// IQ2_XS.
#[inline(always)]
pub(in crate::dequant) fn iq2_xs<I: Isa>(isa: I, block: &[u8; 74], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let qs = field::<2, 64, _>(block).as_chunks::<2>().0;
    let scales = scales_of_16(d, field::<66, 8, _>(block));
    let mut words = [0; 32];
    for (word, q) in words.iter_mut().zip(qs) {
        let q = u16::from_le_bytes(*q) as usize;
        *word = negate(IQ2XS[q & 511], EVEN_SIGNS[q >> 9]);
    }
    scale_groups::<16>(out, &scales, &to_bytes(words));
}

/// IQ2_S. Two more bits for each index come from `qh`: index `l` of group `i` takes bits `2 * l` and `2 * l + 1` of `qh[i]`.
#[inline(always)]
pub(in crate::dequant) fn iq2_s<I: Isa>(isa: I, block: &[u8; 82], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let qs = field::<2, 32, _>(block);
    let signs = field::<34, 32, _>(block);
    let qh = field::<66, 8, _>(block);
    let scales = scales_of_16(d, field::<74, 8, _>(block));
    let mut words = [0; 32];
    for (l, word) in words.iter_mut().enumerate() {
        let high = (qh[l / 4] >> (2 * (l % 4)) & 3) as usize;
        *word = negate(IQ2S[qs[l] as usize | high << 8], SIGNS[signs[l] as usize]);
    }
    scale_groups::<16>(out, &scales, &to_bytes(words));
}
