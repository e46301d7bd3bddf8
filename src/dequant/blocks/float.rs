//! Types that store each weight as a float of its own.

use super::super::f16;
use super::super::isa::Isa;

/// F32: `x = bits`.
#[inline(always)]
pub(in crate::dequant) fn f32<I: Isa>(_: I, block: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*block);
}

/// F64: rounded to the nearest `f32`, ties to even; overflow becomes infinity.
#[inline(always)]
pub(in crate::dequant) fn f64<I: Isa>(_: I, block: &[u8; 8], out: &mut [f32; 1]) {
    out[0] = f64::from_le_bytes(*block) as f32;
}

/// BF16: the upper half of an `f32`. A signalling NaN stays one, as in ggml.
#[inline(always)]
pub(in crate::dequant) fn bf16<I: Isa>(_: I, block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits((u16::from_le_bytes(*block) as u32) << 16);
}

/// F16. The arithmetic conversion vectorises over blocks, which one instruction per block would not.
#[inline(always)]
pub(in crate::dequant) fn f16<I: Isa>(_: I, block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16::to_f32(u16::from_le_bytes(*block));
}
