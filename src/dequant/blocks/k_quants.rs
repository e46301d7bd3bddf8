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
use super::{affine, field, in_memory, map, one_at_a_time, scale, scale_groups};

/// Scales codes in groups of `GROUP` and takes a minimum off, each group by what `of_group` gives for its number.
#[inline(always)]
fn affine_groups<const GROUP: usize>(out: &mut [f32; 256], codes: &[u8; 256], of_group: impl Fn(usize) -> (f32, f32)) {
    let groups = out.as_chunks_mut::<GROUP>().0.iter_mut().zip(codes.as_chunks::<GROUP>().0);
    for (i, (out, codes)) in groups.enumerate() {
        let (scale, minimum) = of_group(i);
        affine(out, scale, codes, -minimum);
        one_at_a_time();
    }
}

/// Q2_K. `scales[i]`: low nibble `sc`, high nibble `m` of sub-block `i`. Codes of two bits: byte `l` of 32 bytes holds
/// weights `l`, `l + 32`, `l + 64`, `l + 96` of its half of the block, from the lowest bits up.
#[inline(always)]
pub(in crate::dequant) fn q2_k<I: Isa>(isa: I, block: &[u8; 84], out: &mut [f32; 256]) {
    let packed = field::<0, 16, _>(block);
    let d = isa.f16(*field::<80, 2, _>(block));
    let dmin = isa.f16(*field::<82, 2, _>(block));
    let scales = in_memory(map(packed, |byte| d * (byte & 15) as f32));
    let minimums = in_memory(map(packed, |byte| dmin * (byte >> 4) as f32));
    affine_groups::<16>(out, &two_bits(field::<16, 64, _>(block)), |i| (scales[i], minimums[i]));
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
    let d = isa.f16(*field::<108, 2, _>(block));
    let mut codes = two_bits(field::<32, 64, _>(block));
    for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, mask) in codes.iter_mut().zip(hmask) {
            *code = (*code | (mask >> i & 1) << 2).wrapping_sub(4);
        }
    }
    // Eight scales at a time, one to a byte.
    const NIBBLES: u64 = 0x0F0F_0F0F_0F0F_0F0F;
    const PAIRS: u64 = 0x0303_0303_0303_0303;
    let low = u64::from_le_bytes(*field::<96, 8, _>(block));
    let high = u32::from_le_bytes(*field::<104, 4, _>(block)) as u64;
    let first = low & NIBBLES | ((high | (high << 30)) & PAIRS) << 4;
    let second = low >> 4 & NIBBLES | (((high >> 4) | (high << 26)) & PAIRS) << 4;
    let scales: [u8; 16] = bytemuck::cast([first.to_le_bytes(), second.to_le_bytes()]);
    let scales = in_memory(map(&scales, |scale| d * (scale as i8 - 32) as f32));
    scale_groups::<16>(out, &scales, &map(&codes, |code| code as i8));
}

/// The first 16 bytes of Q4_K and Q5_K: `d`, `dmin`, and 6-bit scales and minimums, eight each.
///
/// ```text
/// byte   4..8              8..12             12..16
/// bits   hhssssss          hhmmmmmm          mmmmssss
///        sc[0..4], and     m[0..4], and      low nibbles: sc[4..8], high: m[4..8]
///        hh of sc[4..8]    hh of m[4..8]
/// ```
///
/// Gives `d * sc[0..4]`, `dmin * m[0..4]`, `d * sc[4..8]`, `dmin * m[4..8]`.
#[inline(always)]
fn scales_and_minimums<I: Isa>(isa: I, head: &[u8; 16]) -> [f32; 16] {
    const NIBBLES: u64 = 0x0F0F_0F0F_0F0F_0F0F;
    const HIGH: u64 = 0x3030_3030_3030_3030;
    let d = isa.f16(*field::<0, 2, _>(head));
    let dmin = isa.f16(*field::<2, 2, _>(head));
    // Eight at a time, one to a byte.
    let low = u64::from_le_bytes(*field::<4, 8, _>(head));
    let nibbles = u32::from_le_bytes(*field::<12, 4, _>(head)) as u64;
    let first = low & (HIGH | NIBBLES);
    let second = (nibbles | (nibbles << 28)) & NIBBLES | low >> 2 & HIGH;
    let codes: [u8; 16] = bytemuck::cast([first.to_le_bytes(), second.to_le_bytes()]);
    let mut products = [0.0; 16];
    for (i, (product, code)) in products.iter_mut().zip(codes).enumerate() {
        *product = if i & 4 == 0 { d } else { dmin } * code as f32;
    }
    in_memory(products)
}

/// Q4_K. Each 32 bytes of `qs` hold two sub-blocks: low nibbles the first, high nibbles the second.
#[inline(always)]
pub(in crate::dequant) fn q4_k<I: Isa>(isa: I, block: &[u8; 144], out: &mut [f32; 256]) {
    let qs = field::<16, 128, _>(block).as_chunks::<32>().0;
    let mut codes = [0; 256];
    for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, byte) in codes.iter_mut().zip(&qs[i / 2]) {
            *code = byte >> (4 * (i % 2)) & 15;
        }
    }
    let products = scales_and_minimums(isa, field::<0, 16, _>(block));
    affine_groups::<32>(out, &codes, |i| (products[i / 4 * 8 + i % 4], products[i / 4 * 8 + i % 4 + 4]));
}

/// Q5_K. As Q4_K; bit `i` of `qh[l]` is the fifth bit of weight `l` of sub-block `i`.
#[inline(always)]
pub(in crate::dequant) fn q5_k<I: Isa>(isa: I, block: &[u8; 176], out: &mut [f32; 256]) {
    let qh = field::<16, 32, _>(block);
    let qs = field::<48, 128, _>(block).as_chunks::<32>().0;
    let mut codes = [0; 256];
    for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for ((code, byte), high) in codes.iter_mut().zip(&qs[i / 2]).zip(qh) {
            *code = byte >> (4 * (i % 2)) & 15 | (high >> i & 1) << 4;
        }
    }
    let products = scales_and_minimums(isa, field::<0, 16, _>(block));
    affine_groups::<32>(out, &codes, |i| (products[i / 4 * 8 + i % 4], products[i / 4 * 8 + i % 4 + 4]));
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
