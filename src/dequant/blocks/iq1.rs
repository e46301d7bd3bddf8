//! IQ1 types: an 11-bit index picks eight codes of -1, 0 or 1, which a shift of an eighth moves off zero.
//!
//! ```text
//! IQ1_S  d f16 | indices 32 B | qh 8 x u16
//! IQ1_M  indices 32 B | qh 16 B | scales 4 x u16
//! ```
//!
//! `x = d * (2*sc + 1) * (code + shift)`, shift being 1/8 or, where its bit is set, -1/8. All of it is exact, so codes are
//! kept in eighths (see the grid) and the scale is divided by eight.

use super::super::isa::Isa;
use super::grids::IQ1S;
use super::signs::to_bytes;
use super::{field, scale_groups};

/// Eight codes of the grid in eighths, shifted up by one or down by one.
#[inline(always)]
fn shifted(index: usize, down: bool) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // Bytes are 0x78, 0x80 or 0x88 before and never wrap; the XOR takes the offset of 0x80 away.
    IQ1S[index & 2047].wrapping_add(if down { ONES.wrapping_neg() } else { ONES }) ^ (0x80 * ONES)
}

/// IQ1_S. `qh[i]` of 32 weights: bits 0..12 the upper three bits of four indices, bits 12..15 the scale, bit 15 the shift.
#[inline(always)]
pub(in crate::dequant) fn iq1_s<I: Isa>(isa: I, block: &[u8; 50], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let qs = field::<2, 32, _>(block);
    let mut words = [0; 32];
    let mut scales = [0.0; 8];
    for (i, qh) in field::<34, 16, _>(block).as_chunks::<2>().0.iter().enumerate() {
        let qh = u16::from_le_bytes(*qh);
        scales[i] = d * (2 * (qh >> 12 & 7) + 1) as f32 * 0.125;
        for l in 0..4 {
            let high = (qh >> (3 * l) & 7) as usize;
            words[4 * i + l] = shifted(qs[4 * i + l] as usize | high << 8, qh & 0x8000 != 0);
        }
    }
    scale_groups::<32>(out, &scales, &to_bytes(words));
}

/// IQ1_M. A nibble of `qh` for each index: three upper bits, and the shift on top. `scales`: in each `u16` four 3-bit scales
/// of 16 weights each, from the lowest bits up; the four top nibbles are the four nibbles of `d`, lowest first.
#[inline(always)]
pub(in crate::dequant) fn iq1_m<I: Isa>(isa: I, block: &[u8; 56], out: &mut [f32; 256]) {
    let qs = field::<0, 32, _>(block);
    let qh = field::<32, 16, _>(block);
    let packed = u64::from_le_bytes(*field::<48, 8, _>(block));
    let d = (packed >> 12 & 0x000F) | (packed >> 24 & 0x00F0) | (packed >> 36 & 0x0F00) | (packed >> 48 & 0xF000);
    let d = isa.f16((d as u16).to_le_bytes());
    let mut words = [0; 32];
    let mut scales = [0.0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale = d * (2 * (packed >> (16 * (i / 4) + 3 * (i % 4)) & 7) + 1) as f32 * 0.125;
    }
    for (l, word) in words.iter_mut().enumerate() {
        let nibble = (qh[l / 2] >> (4 * (l % 2)) & 15) as usize;
        *word = shifted(qs[l] as usize | (nibble & 7) << 8, nibble & 8 != 0);
    }
    scale_groups::<16>(out, &scales, &to_bytes(words));
}
