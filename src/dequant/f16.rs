//! Half-precision conversions in integer arithmetic, without branches, so that loops over them vectorise on any target.
//!
//! They agree bit for bit with the F16C instructions, NaN included: sign and upper payload bits are kept, the quiet bit
//! is set.

/// `f16` bits to `f32`, exact.
#[inline(always)]
pub(super) fn to_f32(half: u16) -> f32 {
    // Exponent and mantissa move into f32 position; the exponent bias grows from 15 to 127.
    let magnitude = ((half & 0x7FFF) as u32) << 13;
    let exponent = magnitude & 0x0F80_0000;
    let normal = magnitude + ((127 - 15) << 23);
    // Zero and subnormals: build 2^-14 + value, subtract 2^-14; both steps are exact.
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    // Infinity and NaN: exponent 31 becomes 255.
    let nonfinite = magnitude | 0x7F80_0000 | if magnitude > 0x0F80_0000 { 0x0040_0000 } else { 0 };
    let bits = if exponent == 0 { subnormal } else { normal };
    let bits = if exponent == 0x0F80_0000 { nonfinite } else { bits };
    f32::from_bits(bits | ((half & 0x8000) as u32) << 16)
}

/// `f32` to `f16` bits, rounded to nearest even; overflow gives infinity.
#[inline(always)]
pub(super) fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal: add half a step less one, plus the lowest kept bit, and cut. A carry moves into the exponent, as it should.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0FFF + odd) >> 13;
    // Below 2^-14: adding 0.5, whose last mantissa bit is worth 2^-24, makes the FPU round at the right place.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7E00 | (magnitude >> 13) & 0x03FF;
    let half = if magnitude < 113 << 23 { subnormal } else { normal };
    let half = if magnitude >= 143 << 23 { 0x7C00 } else { half };
    let half = if magnitude > 0x7F80_0000 { nan } else { half };
    (half | (bits >> 16) & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let want = half::f16::from_bits(bits).to_f32();
            assert_eq!(to_f32(bits).to_bits(), want.to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn narrowing_agrees_with_the_half_crate_around_every_half() {
        for half in 0..=u16::MAX {
            let centre = half::f16::from_bits(half).to_f32().to_bits();
            for nudge in [0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x1FFF] {
                for bits in [centre.wrapping_add(nudge), centre.wrapping_sub(nudge)] {
                    let value = f32::from_bits(bits);
                    assert_eq!(from_f32(value), half::f16::from_f32(value).to_bits(), "{bits:#010x}");
                }
            }
        }
    }
}
