//! Floats of few bits: `f32` rounded to nearest even in integer arithmetic, without branches, so that loops vectorise.
//!
//! The formats have no infinity. What is too large becomes the largest value.

/// A float format: sign, exponent and mantissa, with subnormals.
pub(super) struct Format {
    /// Bits of the mantissa.
    mantissa: u32,
    /// Exponent of the smallest normal value.
    smallest: i32,
    /// The largest value.
    largest: f32,
    /// The sign bit of a code.
    sign: u8,
    /// Whether the code after the largest is NaN.
    nan: bool,
}

/// 1 sign, 4 exponent, 3 mantissa; the variant without infinity ("fn"), whose NaN is 0x7F. At most 448.
pub(super) const E4M3: Format = Format { mantissa: 3, smallest: -6, largest: 448.0, sign: 0x80, nan: true };

/// 1 sign, 2 exponent, 1 mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. There is no NaN.
pub(super) const E2M1: Format = Format { mantissa: 1, smallest: 0, largest: 6.0, sign: 8, nan: false };

impl Format {
    /// The code of a value, rounded to nearest even. NaN becomes NaN, or the largest value where there is none.
    #[inline(always)]
    pub(super) const fn code(&self, value: f32) -> u8 {
        let shift = 23 - self.mantissa;
        let bits = value.to_bits();
        let limit = self.largest.to_bits();
        let wide = bits & 0x7FFF_FFFF;
        let magnitude = if wide > limit { limit } else { wide };
        // Normal: the exponent's bias shrinks; half a step less one, plus the lowest kept bit, is added, and the rest cut
        // off. A carry moves into the exponent, as it should.
        let odd = (magnitude >> shift) & 1;
        let normal = magnitude.wrapping_sub(self.bias()).wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
        // Below: added to the power of two whose last mantissa bit is a step, the FPU rounds at the right place.
        let steps = (self.bias() + (1 << 23)).wrapping_add(shift << 23);
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(steps)).to_bits().wrapping_sub(steps);
        let code = if magnitude < self.bias() + (1 << 23) { subnormal } else { normal };
        let code = if self.nan && wide > 0x7F80_0000 { code + 1 } else { code };
        let sign = if bits >> 31 != 0 { self.sign } else { 0 };
        code as u8 | sign
    }

    /// The value of a code, exactly.
    #[inline(always)]
    pub(super) const fn value(&self, code: u8) -> f32 {
        let wide = ((code & (self.sign - 1)) as u32) << (23 - self.mantissa);
        let normal = f32::from_bits(wide + self.bias());
        // Subnormals lack the leading one: with the smallest exponent they have one too many, which is taken off again.
        let first = self.bias() + (1 << 23);
        let subnormal = f32::from_bits(wide + first) - f32::from_bits(first);
        let size = if wide < 1 << 23 { subnormal } else { normal };
        let size = if self.nan && size > self.largest { f32::NAN } else { size };
        f32::from_bits(size.to_bits() | if code & self.sign != 0 { 1 << 31 } else { 0 })
    }

    /// What the exponents of `f32` are larger by, as `f32` bits: a normal code, moved into place, plus this is its value.
    #[inline(always)]
    const fn bias(&self) -> u32 {
        ((126 + self.smallest) as u32) << 23
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_has_the_values_of_its_definition() {
        let value = |code| E4M3.value(code);
        assert_eq!(value(0).to_bits(), 0);
        assert_eq!(value(0x80).to_bits(), (-0.0f32).to_bits());
        assert_eq!([value(0x01), value(0x07), value(0x08)], [2f32.powi(-9), 7.0 * 2f32.powi(-9), 2f32.powi(-6)]);
        assert_eq!([value(0x38), value(0xB8), value(0x3C), value(0x7E)], [1.0, -1.0, 1.5, 448.0]);
        assert!(value(0x7F).is_nan() && value(0xFF).is_nan());
    }

    #[test]
    fn e2m1_has_the_values_of_its_definition() {
        let positive = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, value) in (0..).zip(positive) {
            assert_eq!(E2M1.value(code).to_bits(), value.to_bits());
            assert_eq!(E2M1.value(code | 8).to_bits(), (-value).to_bits());
        }
    }

    /// Every code, the middle to the next, and their neighbours: which of two is nearer is decided in f64.
    #[test]
    fn codes_are_the_nearest_and_ties_go_to_even() {
        for (format, codes) in [(E4M3, 0..0x7E), (E2M1, 0..7)] {
            for low in codes {
                let (below, above) = (format.value(low), format.value(low + 1));
                let middle = ((below as f64 + above as f64) / 2.0) as f32;
                let even = low + low % 2;
                let cases = [(below, low), (middle.next_down(), low), (middle, even), (middle.next_up(), low + 1)];
                for (value, code) in cases {
                    assert_eq!(format.code(value), code, "{value:e}");
                    assert_eq!(format.code(-value), code | format.sign, "-{value:e}");
                }
            }
            let largest = format.code(format.largest);
            for value in [format.largest, format.largest * 1.1, f32::MAX, f32::INFINITY] {
                assert_eq!((format.code(value), format.code(-value)), (largest, largest | format.sign));
            }
            assert_eq!(format.code(-f32::from_bits(1)), format.sign);
        }
        assert_eq!((E4M3.code(f32::NAN), E4M3.code(-f32::NAN)), (0x7F, 0xFF));
        assert_eq!((E2M1.code(f32::NAN), E2M1.code(-f32::NAN)), (7, 15));
    }
}
