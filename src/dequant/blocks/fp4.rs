//! Microscaling FP4: 4-bit floats (E2M1) with 8-bit scales.
//!
//! ```text
//! MXFP4  e u8 | qs 16 B             32 weights: x = 2^(e - 128) * TWICE[q]
//! NVFP4  scales 4 B | qs 32 B       4 x 16 weights: x = ue4m3(scale) / 2 * TWICE[q]
//! ```
//!
//! Low nibbles of a sub-block are its first half, high nibbles its second.

use super::super::isa::Isa;
use super::{field, scale};

/// Twice the E2M1 values, which makes them integers. Code 8, -0 in E2M1, is +0 in ggml.
const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// MXFP4. ggml has no NaN here: `e` = 255 acts as 2^127 like the others, and larger codes overflow to infinity.
#[inline(always)]
pub(in crate::dequant) fn mxfp4<I: Isa>(isa: I, block: &[u8; 17], out: &mut [f32; 32]) {
    let [e] = *field::<0, 1, _>(block);
    // 2^(e - 128): for e = 0 and 1 a subnormal f32, else an exponent field of e - 1.
    let bits = if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 };
    scale(out, f32::from_bits(bits), &isa.nibbles(&TWICE, field::<1, 16, _>(block)));
}

/// NVFP4.
#[inline(always)]
pub(in crate::dequant) fn nvfp4<I: Isa>(isa: I, block: &[u8; 36], out: &mut [f32; 64]) {
    let scales = field::<0, 4, _>(block).as_chunks::<2>().0;
    let qs = field::<4, 32, _>(block).as_chunks::<16>().0;
    for ((out, qs), scales) in out.as_chunks_mut::<32>().0.iter_mut().zip(qs).zip(scales) {
        // 16 bytes are two sub-blocks of 8: their low nibbles come first, then their high nibbles.
        let [low0, low1, high0, high1] = bytemuck::cast::<[i8; 32], [u64; 4]>(isa.nibbles(&TWICE, qs));
        let codes: [[i8; 16]; 2] = bytemuck::cast([low0, high0, low1, high1]);
        for ((out, codes), byte) in out.as_chunks_mut::<16>().0.iter_mut().zip(&codes).zip(scales) {
            scale(out, HALF_UE4M3[*byte as usize], codes);
        }
    }
}

/// Half the value of each scale byte, an unsigned E4M3 with bias 7: `2^(e - 7) * (1 + m / 8)`, or `2^-9 * m` for `e` = 0.
///
/// As in ggml the top bit is ignored, except that 0x7F (NaN in E4M3) is 0 and 0xFF is not: it is 480 like any other
/// pattern.
const HALF_UE4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        table[byte] = if byte == 0x7F {
            0.0
        } else if exponent == 0 {
            mantissa as f32 / 1024.0
        } else {
            // Half of it: one less in the exponent.
            f32::from_bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20)
        };
        byte += 1;
    }
    table
};
