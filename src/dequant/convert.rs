//! From `f32` to an output type: one converter per type, shared by all decoders.
//!
//! Chunks of values are converted on the assumption that all are finite, while an OR over the chunk notices if one is
//! not; only such a chunk is converted again, value by value, with NaN handled and everything counted. The notice: for a
//! magnitude `m` (the bits without the sign), `m + (2^31 - first)` has its top bit set exactly if `m >= first`.

use super::isa::Isa;
use super::kernels::Converter;
use super::{FloatType, Nonfinite, Simd, f16};

/// Values converted between two looks at the notice: 4 KiB of `f32`, well inside the L1 cache.
pub(super) const CHUNK: usize = 1024;

/// Converts `f32` values to little-endian `dtype`, rounded to nearest even, and counts what is not finite.
///
/// Overflow becomes infinity. NaN stays NaN with its sign and upper payload bits, and quiet: as ggml does for bf16,
/// `(bits >> 16) | 64`, and as F16C does for f16. `F32` copies the bits as they are.
///
/// # Panics
///
/// If `out` is not `values.len() * dtype.bytes()` bytes long, which is a programming error.
pub fn convert(values: &[f32], dtype: FloatType, simd: Simd, out: &mut [u8]) -> Nonfinite {
    assert_eq!(out.len(), values.len() * dtype.bytes(), "output bytes for {} values of {dtype}", values.len());
    let converter = Converter::new(dtype, simd);
    let mut found = Nonfinite::default();
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK * dtype.bytes())) {
        if converter.run(values, out) {
            found += careful(values, dtype, out);
        }
    }
    found
}

/// As [`convert()`], of values that come from arithmetic: every NaN becomes the positive quiet one without payload, which
/// `values` are left with.
///
/// # Panics
///
/// As [`convert()`].
pub fn convert_computed(values: &mut [f32], dtype: FloatType, simd: Simd, out: &mut [u8]) -> Nonfinite {
    let found = convert(values, dtype, simd, out);
    if found.nan > 0 {
        unify_nan(values);
        convert(values, dtype, simd, out);
    }
    found
}

/// Copies `f32`. True if a value is not finite. Like all functions below that return `bool`, it is compiled once per
/// instruction set, and `out` has the length that `values` and the type demand.
#[inline(always)]
pub(super) fn f32<I: Isa>(isa: I, values: &[f32], out: &mut [u8]) -> bool {
    for (value, out) in values.iter().zip(out.as_chunks_mut::<4>().0) {
        *out = value.to_le_bytes();
    }
    scan(isa, values)
}

/// True if a value is not finite.
#[inline(always)]
pub(super) fn scan<I: Isa>(_: I, values: &[f32]) -> bool {
    let mut seen = 0;
    for value in values {
        seen |= notice(value.to_bits(), FloatType::F32);
    }
    seen >> 31 != 0
}

/// Rounds to bf16. True if the result is wrong for some value because an output is not finite.
#[inline(always)]
pub(super) fn bf16<I: Isa>(_: I, values: &[f32], out: &mut [u8]) -> bool {
    let mut seen = 0;
    for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        let bits = value.to_bits();
        seen |= notice(bits, FloatType::BF16);
        *out = finite_to_bf16(bits).to_le_bytes();
    }
    seen >> 31 != 0
}

/// Rounds to f16. True if an output is not finite.
#[inline(always)]
pub(super) fn f16<I: Isa>(isa: I, values: &[f32], out: &mut [u8]) -> bool {
    let mut seen = 0;
    for value in values {
        seen |= notice(value.to_bits(), FloatType::F16);
    }
    let (groups, rest) = values.as_chunks::<16>();
    let (group_outs, rest_out) = out.as_chunks_mut::<32>();
    for (group, out) in groups.iter().zip(group_outs) {
        isa.narrow_f16(group, out);
    }
    for (value, out) in rest.iter().zip(rest_out.as_chunks_mut::<2>().0) {
        *out = f16::from_f32(*value).to_le_bytes();
    }
    seen >> 31 != 0
}

/// Copies bf16 that stays bf16. True if a value is not finite.
#[inline(always)]
pub(super) fn copy_bf16<I: Isa>(_: I, values: &[u8], out: &mut [u8]) -> bool {
    copy_halves(values, out, 0x7F80)
}

/// Copies f16 that stays f16. True if a value is not finite.
#[inline(always)]
pub(super) fn copy_f16<I: Isa>(_: I, values: &[u8], out: &mut [u8]) -> bool {
    copy_halves(values, out, 0x7C00)
}

#[inline(always)]
fn copy_halves(values: &[u8], out: &mut [u8], infinity: u16) -> bool {
    let mut seen = 0;
    for (value, out) in values.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0) {
        seen |= (u16::from_le_bytes(*value) & 0x7FFF) + (0x8000 - infinity);
        *out = *value;
    }
    seen >> 15 != 0
}

/// Top bit set if these `f32` bits are NaN or infinite, or become infinite in `dtype`.
#[inline(always)]
fn notice(bits: u32, dtype: FloatType) -> u32 {
    (bits & 0x7FFF_FFFF) + (0x8000_0000 - dtype.first_infinite())
}

/// Round to nearest even on the upper half; right for everything but NaN, whose payload the carry would spoil.
#[inline(always)]
fn finite_to_bf16(bits: u32) -> u16 {
    (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Converts values of which some are not finite, and counts those.
#[cold]
#[inline(never)]
pub(super) fn careful(values: &[f32], dtype: FloatType, out: &mut [u8]) -> Nonfinite {
    let mut found = Nonfinite::default();
    for (value, out) in values.iter().zip(out.chunks_exact_mut(dtype.bytes())) {
        if value.is_nan() {
            found.nan += 1;
        } else if value.is_infinite() {
            found.inf += 1;
        } else if value.to_bits() & 0x7FFF_FFFF >= dtype.first_infinite() {
            found.overflow += 1;
        }
        let bits = value.to_bits();
        match dtype {
            FloatType::F32 => out.copy_from_slice(&bits.to_le_bytes()),
            FloatType::BF16 if value.is_nan() => out.copy_from_slice(&((bits >> 16) as u16 | 64).to_le_bytes()),
            FloatType::BF16 => out.copy_from_slice(&finite_to_bf16(bits).to_le_bytes()),
            FloatType::F16 => out.copy_from_slice(&f16::from_f32(*value).to_le_bytes()),
        }
    }
    found
}

/// Gives every NaN one bit pattern, the positive quiet NaN without payload.
///
/// Which NaN an operation yields depends on the processor (x86 makes `inf * 0` negative, ARM positive) and on the
/// compiler's choice of operand order. Output bytes must not.
#[cold]
#[inline(never)]
pub(super) fn unify_nan(values: &mut [f32]) {
    for value in values.iter_mut().filter(|value| value.is_nan()) {
        *value = f32::from_bits(0x7FC0_0000);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computed_nan_have_one_pattern_and_are_counted() {
        // What x86 makes of infinity times 0, and a NaN with a payload.
        let mut values = [1.0, f32::from_bits(0xFFC0_0000), f32::INFINITY, f32::from_bits(0x7F81_2345)];
        for (dtype, nan) in [(FloatType::BF16, 0x7FC0u16), (FloatType::F16, 0x7E00)] {
            let mut out = [0; 8];
            let found = convert_computed(&mut values, dtype, Simd::Baseline, &mut out);
            assert_eq!(found, Nonfinite { nan: 2, inf: 1, overflow: 0 });
            assert_eq!([&out[2..4], &out[6..8]], [nan.to_le_bytes(); 2]);
        }
    }
}
