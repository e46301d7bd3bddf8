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
}

/// 1 sign, 4 exponent, 3 mantissa; the variant without infinity ("fn"), whose NaN is 0x7F. At most 448.
pub(super) const E4M3: Format = Format { mantissa: 3, smallest: -6, largest: 448.0, sign: 0x80 };

impl Format {
    /// The code of a value, rounded to nearest even. It is one more than the largest for NaN.
    #[inline(always)]
    pub(super) const fn code(&self, value: f32) -> u8 {
        let shift = 23 - self.mantissa;
        let bits = value.to_bits();
        let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
        let limit = self.largest.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        let magnitude = if magnitude > limit { limit } else { magnitude };
        // Normal: the exponent's bias shrinks; half a step less one, plus the lowest kept bit, is added, and the rest cut
        // off. A carry moves into the exponent, as it should.
        let bias = ((126 + self.smallest) as u32) << 23;
        let odd = (magnitude >> shift) & 1;
        let normal = magnitude.wrapping_sub(bias).wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
        // Below: added to the power of two whose last mantissa bit is a step, the FPU rounds at the right place.
        let steps = ((127 + shift as i32 + self.smallest) as u32) << 23;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(steps)).to_bits().wrapping_sub(steps);
        let code = if magnitude < ((127 + self.smallest) as u32) << 23 { subnormal } else { normal };
        let sign = if bits >> 31 != 0 { self.sign } else { 0 };
        (code + nan as u32) as u8 | sign
    }

    /// The value of a code, exactly.
    pub(super) const fn value(&self, code: u8) -> f32 {
        let magnitude = (code & (self.sign - 1)) as u32;
        let largest = self.code(self.largest) as u32;
        let exponent = (magnitude >> self.mantissa) as i32;
        let fraction = magnitude & ((1 << self.mantissa) - 1);
        // One step of the smallest exponent: subnormals count them.
        let step = f32::from_bits(((127 + self.smallest - self.mantissa as i32) as u32) << 23);
        let size = if magnitude > largest {
            f32::NAN
        } else if exponent == 0 {
            fraction as f32 * step
        } else {
            ((fraction + (1 << self.mantissa)) << (exponent - 1)) as f32 * step
        };
        if code & self.sign != 0 { -size } else { size }
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

    /// Every code, the middle to the next, and their neighbours: which of two is nearer is decided in f64.
    #[test]
    fn codes_are_the_nearest_and_ties_go_to_even() {
        for low in 0..0x7Eu8 {
            let (below, above) = (E4M3.value(low), E4M3.value(low + 1));
            let middle = ((below as f64 + above as f64) / 2.0) as f32;
            let even = if low % 2 == 0 { low } else { low + 1 };
            let cases = [(below, low), (middle.next_down(), low), (middle, even), (middle.next_up(), low + 1)];
            for (value, code) in cases {
                assert_eq!(E4M3.code(value), code, "{value:e}");
                assert_eq!(E4M3.code(-value), code | 0x80, "-{value:e}");
            }
        }
        for value in [448.0, 463.0, 465.0, f32::MAX, f32::INFINITY] {
            assert_eq!((E4M3.code(value), E4M3.code(-value)), (0x7E, 0xFE));
        }
        assert_eq!((E4M3.code(f32::NAN), E4M3.code(-f32::NAN)), (0x7F, 0xFF));
        assert_eq!((E4M3.code(f32::from_bits(1)), E4M3.code(-f32::from_bits(1))), (0, 0x80));
    }
}
