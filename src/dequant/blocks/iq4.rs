//! Non-linear 4-bit types: a nibble picks one of 16 uneven steps.
//!
//! ```text
//! IQ4_NL  d f16 | qs 16 B                                      32 weights: x = d * STEPS[q]
//! IQ4_XS  d f16 | scales_h u16 | scales_l 4 B | qs 128 B       8 x 32 weights: x = d*(sc - 32) * STEPS[q]
//! ```
//!
//! In each sub-block of 16 bytes, low nibbles are weights 0..16 and high nibbles weights 16..32.

use super::super::isa::Isa;
use super::{field, scale};

/// The steps (`kvalues_iq4nl` in ggml).
const STEPS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// IQ4_NL.
#[inline(always)]
pub(in crate::dequant) fn iq4_nl<I: Isa>(isa: I, block: &[u8; 18], out: &mut [f32; 32]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    scale(out, d, &isa.nibbles(&STEPS, field::<2, 16, _>(block)));
}

/// IQ4_XS. The scale of sub-block `i` has 6 bits: nibble `i` of `scales_l`, below bits `2 * i` and `2 * i + 1` of `scales_h`.
#[inline(always)]
pub(in crate::dequant) fn iq4_xs<I: Isa>(isa: I, block: &[u8; 136], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<0, 2, _>(block));
    let high = u16::from_le_bytes(*field::<2, 2, _>(block));
    let low = u32::from_le_bytes(*field::<4, 4, _>(block));
    let qs = field::<8, 128, _>(block).as_chunks::<16>().0;
    for (i, (out, qs)) in out.as_chunks_mut::<32>().0.iter_mut().zip(qs).enumerate() {
        let sc = (low >> (4 * i) & 15) as i32 | ((high >> (2 * i) & 3) << 4) as i32;
        scale(out, d * (sc - 32) as f32, &isa.nibbles(&STEPS, qs));
    }
}
