//! Ternary types: 256 weights of -1, 0 or 1 times one `f16` scale.
//!
//! ```text
//! TQ1_0  qs 48 B | qh 4 B | d f16     five weights to a byte (qs), four (qh)
//! TQ2_0  qs 64 B | d f16              two bits per weight, x = d * (q - 1)
//! ```

use super::super::isa::Isa;
use super::{field, scale};

/// TQ1_0. A byte is a fixed-point fraction in base 3 whose digits are weights: digit `n` of byte `b` is
/// `floor(3 * (b * 3^n mod 256) / 256)`. Digit `n` of a group of bytes precedes digit `n + 1` of the group; the groups are
/// `qs[0..32]`, `qs[32..48]` with five digits and `qh` with four.
#[inline(always)]
pub(in crate::dequant) fn tq1_0<I: Isa>(isa: I, block: &[u8; 54], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<52, 2, _>(block));
    let mut codes = [0i16; 256];
    let (first, rest) = codes.split_at_mut(160);
    let (second, third) = rest.split_at_mut(80);
    digits(field::<0, 32, _>(block), first);
    digits(field::<32, 16, _>(block), second);
    digits(field::<48, 4, _>(block), third);
    scale(out, d, &codes);
}

/// Minus one, as many digits of each byte as `codes` has room for.
#[inline(always)]
fn digits<const N: usize>(bytes: &[u8; N], codes: &mut [i16]) {
    for (codes, power) in codes.as_chunks_mut::<N>().0.iter_mut().zip([1, 3, 9, 27, 81]) {
        for (code, byte) in codes.iter_mut().zip(bytes) {
            // Both steps on the upper byte of 16 bits, where what is over 256 overflows.
            let fraction = (*byte as u16).wrapping_mul(power << 8);
            *code = ((3 * fraction as u32) >> 16) as i16 - 1;
        }
    }
}

/// TQ2_0. Byte `l` of 32 bytes holds weights `l`, `l + 32`, `l + 64`, `l + 96` of its half, from the lowest bits up. Code 3,
/// which no quantizer writes, is 2.
#[inline(always)]
pub(in crate::dequant) fn tq2_0<I: Isa>(isa: I, block: &[u8; 66], out: &mut [f32; 256]) {
    let d = isa.f16(*field::<64, 2, _>(block));
    let qs = field::<0, 64, _>(block).as_chunks::<32>().0;
    let mut codes = [0i8; 256];
    for (codes, qs) in codes.as_chunks_mut::<128>().0.iter_mut().zip(qs) {
        for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(qs) {
                *code = (byte >> (2 * i) & 3) as i8 - 1;
            }
        }
    }
    scale(out, d, &codes);
}
