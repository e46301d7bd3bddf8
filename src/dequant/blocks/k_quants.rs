//! K-quants: super-blocks of 256 weights whose sub-blocks have small integer scales of their own.
//!
//! ```text
//! Q2_K  scales 16 B | qs 64 B | d f16 | dmin f16                   x = d*sc * q - dmin*m       16 x 16 weights
//! Q3_K  hmask 32 B | qs 64 B | scales 12 B | d f16                 x = d*(sc - 32) * (q - 4)   16 x 16
//! Q4_K  d f16 | dmin f16 | scales 12 B | qs 128 B                  x = d*sc * q - dmin*m       8 x 32
//! Q5_K  d f16 | dmin f16 | scales 12 B | qh 32 B | qs 128 B        x = d*sc * q - dmin*m       8 x 32
//! Q6_K  ql 128 B | qh 64 B | scales 16 x i8 | d f16                x = d*sc * (q - 32)         16 x 16
//! Q8_K  d f32 | qs 256 x i8 | bsums 16 x i16 (unused here)         x = d * q                   1 x 256
//! ```
//!
//! `d*sc` and `dmin*m` are exact, and so is the product with `q`; only the subtraction rounds.

use super::super::isa::Isa;
use super::{field, map, one_at_a_time, scale, scale_groups};

/// Q2_K. `scales[i]`: low nibble `sc`, high nibble `m` of sub-block `i`. Codes of two bits: byte `l` of 32 bytes holds
/// weights `l`, `l + 32`, `l + 64`, `l + 96` of its half of the block, from the lowest bits up.
#[inline(always)]
pub(in crate::dequant) fn q2_k<I: Isa>(isa: I, block: &[u8; 84], out: &mut [f32; 256]) {
    let scales = field::<0, 16, _>(block);
    let d = isa.f16(*field::<80, 2, _>(block));
    let dmin = isa.f16(*field::<82, 2, _>(block));
    let qs = field::<16, 64, _>(block).as_chunks::<16>().0;
    for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let factor = d * (scales[i] & 15) as f32;
        let minimum = dmin * (scales[i] >> 4) as f32;
        for (out, byte) in out.iter_mut().zip(&qs[i / 8 * 2 + i % 2]) {
            *out = factor * (byte >> (i % 8 / 2 * 2) & 3) as f32 - minimum;
        }
        one_at_a_time();
    }
}

/// The codes of Q2_K, and the lower two bits of Q3_K's, in order of weights.
#[inline(always)]
fn two_bits(qs: &[u8; 64]) -> [u8; 256] {
    let mut codes = [0; 256];
    for (codes, qs) in codes.as_chunks_mut::<128>().0.iter_mut().zip(qs.as_chunks::<32>().0) {
        for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(qs) {
                *code = byte >> (2 * i) & 3;
            }
        }
    }
    codes
}

/// Q3_K. `qs` as in Q2_K; bit `i` of `hmask[l]` is the third bit of weight `l + 32 * i`. Scales have 6 bits: `scales[i]`
/// and `scales[i + 8]`'s low nibbles are the low and high nibbles of byte `i` (0..8); their upper two bits are in bytes
/// 8..12, of scale `i` in byte `8 + i % 4` at bit `2 * (i / 4)`.
#[inline(always)]
pub(in crate::dequant) fn q3_k<I: Isa>(isa: I, block: &[u8; 110], out: &mut [f32; 256]) {
    let hmask = field::<0, 32, _>(block);
    let packed = field::<96, 12, _>(block);
    let d = isa.f16(*field::<108, 2, _>(block));

    let mut codes = two_bits(field::<32, 64, _>(block));
    for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, mask) in codes.iter_mut().zip(hmask) {
            *code = (*code | (mask >> i & 1) << 2).wrapping_sub(4);
        }
    }
    let mut scales = [0f32; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = packed[i % 8] >> (4 * (i / 8)) & 15;
        let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        *scale = d * ((low | high << 4) as i8 - 32) as f32;
    }
    scale_groups::<16>(out, &scales, &map(&codes, |code| code as i8));
}

/// The 6-bit scales and minimums of Q4_K and Q5_K, eight each.
///
/// ```text
/// byte   0..4              4..8              8..12
/// bits   hhssssss          hhmmmmmm          mmmmssss
///        sc[0..4], and     m[0..4], and      low nibbles: sc[4..8], high: m[4..8]
///        hh of sc[4..8]    hh of m[4..8]
/// ```
#[inline(always)]
fn scales_and_minimums(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    const SIX: u32 = 0x3F3F_3F3F;
    const FOUR: u32 = 0x0F0F_0F0F;
    let [a, b, c] = map(&bytemuck::cast::<_, [[u8; 4]; 3]>(*packed), u32::from_le_bytes);
    let scales = [a & SIX, c & FOUR | a >> 2 & SIX & !FOUR];
    let minimums = [b & SIX, c >> 4 & FOUR | b >> 2 & SIX & !FOUR];
    (bytemuck::cast(map(&scales, u32::to_le_bytes)), bytemuck::cast(map(&minimums, u32::to_le_bytes)))
}

/// Q4_K. Each 32 bytes of `qs` hold two sub-blocks: low nibbles the first, high nibbles the second.
#[inline(always)]
pub(in crate::dequant) fn q4_k<I: Isa>(isa: I, block: &[u8; 144], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let dmin = isa.f16(*field::<2, 2, _>(block));
    let (scales, minimums) = scales_and_minimums(field::<4, 12, _>(block));
    let scales = map(&scales, |scale| d * scale as f32);
    let minimums = map(&minimums, |minimum| dmin * minimum as f32);
    let qs = field::<16, 128, _>(block).as_chunks::<32>().0;
    for (i, (out, qs)) in out.as_chunks_mut::<64>().0.iter_mut().zip(qs).enumerate() {
        for (l, byte) in qs.iter().enumerate() {
            out[l] = scales[2 * i] * (byte & 15) as f32 - minimums[2 * i];
            out[l + 32] = scales[2 * i + 1] * (byte >> 4) as f32 - minimums[2 * i + 1];
        }
    }
}

/// Q5_K. As Q4_K; bit `i` of `qh[l]` is the fifth bit of weight `l` of sub-block `i`.
#[inline(always)]
pub(in crate::dequant) fn q5_k<I: Isa>(isa: I, block: &[u8; 176], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let dmin = isa.f16(*field::<2, 2, _>(block));
    let (scales, minimums) = scales_and_minimums(field::<4, 12, _>(block));
    let qh = field::<16, 32, _>(block);
    let qs = field::<48, 128, _>(block).as_chunks::<32>().0;
    let scales = map(&scales, |scale| d * scale as f32);
    let minimums = map(&minimums, |minimum| dmin * minimum as f32);
    for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for ((out, byte), high) in out.iter_mut().zip(&qs[i / 2]).zip(qh) {
            let q = byte >> (4 * (i % 2)) & 15 | (high >> i & 1) << 4;
            *out = scales[i] * q as f32 - minimums[i];
        }
    }
}

/// Q6_K. Each half of the block, 128 weights, has 64 bytes of `ql` and 32 of `qh`; with `l` in 0..32:
///
/// ```text
/// weight     low four bits        upper two bits of qh[l], from bit
/// l          ql[l]      & 15      0
/// l + 32     ql[l + 32] & 15      2
/// l + 64     ql[l]      >> 4      4
/// l + 96     ql[l + 32] >> 4      6
/// ```
#[inline(always)]
pub(in crate::dequant) fn q6_k<I: Isa>(isa: I, block: &[u8; 210], out: &mut [f32; 256]) {
    let ql = field::<0, 128, _>(block).as_chunks::<32>().0;
    let qh = field::<128, 64, _>(block).as_chunks::<32>().0;
    let d = isa.f16(*field::<208, 2, _>(block));
    let scales = map(field::<192, 16, _>(block), |scale| d * (scale as i8) as f32);
    let mut codes = [0i8; 256];
    for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, quarter) = (i / 4, i % 4);
        let low = &ql[2 * half + quarter % 2];
        for ((code, low), high) in codes.iter_mut().zip(low).zip(&qh[half]) {
            let q = low >> (4 * (quarter / 2)) & 15 | (high >> (2 * quarter) & 3) << 4;
            *code = q as i8 - 32;
        }
    }
    scale_groups::<16>(out, &scales, &codes);
}

/// Q8_K, which ggml uses for activations but has a row function for.
#[inline(always)]
pub(in crate::dequant) fn q8_k<I: Isa>(_: I, block: &[u8; 292], out: &mut [f32; 256]) {
    let d = f32::from_le_bytes(*field::<0, 4, _>(block));
    let codes = map(field::<4, 256, _>(block), |q| q as i8);
    scale(out, d, &codes);
}
