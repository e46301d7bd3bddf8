//! The steps of decoding for which instruction sets differ.
//!
//! Decoders are plain Rust, generic over an [`Isa`] token that they receive. A token of an instruction set exists only
//! in code compiled for that set, so its methods are safe to call.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

use super::f16;

/// What a decoder or converter may ask of an instruction set. Implementations differ in speed, never in results.
pub(super) trait Isa: Copy {
    /// The `f32` of a little-endian `f16`.
    fn f16(self, bytes: [u8; 2]) -> f32;

    /// Looks up the low nibbles of 16 bytes, then the high nibbles, in a table of 16 bytes.
    fn nibbles(self, table: &[i8; 16], packed: &[u8; 16]) -> [i8; 32];

    /// 16 `f32` as little-endian `f16`, rounded to nearest even.
    fn narrow_f16(self, values: &[f32; 16], out: &mut [u8; 32]);
}

/// Whatever the compilation target has.
#[derive(Clone, Copy)]
pub(super) struct Baseline;

impl Isa for Baseline {
    #[inline(always)]
    fn f16(self, bytes: [u8; 2]) -> f32 {
        f16::to_f32(u16::from_le_bytes(bytes))
    }

    #[inline(always)]
    fn nibbles(self, table: &[i8; 16], packed: &[u8; 16]) -> [i8; 32] {
        let mut codes = [0; 32];
        for (i, byte) in packed.iter().enumerate() {
            codes[i] = table[(byte & 15) as usize];
            codes[i + 16] = table[(byte >> 4) as usize];
        }
        codes
    }

    #[inline(always)]
    fn narrow_f16(self, values: &[f32; 16], out: &mut [u8; 32]) {
        for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = f16::from_f32(*value).to_le_bytes();
        }
    }
}
