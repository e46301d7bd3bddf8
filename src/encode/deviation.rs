//! How far encoded weights are from what was encoded.

use std::ops::AddAssign;

/// Values that are compared side by side, so that loops over them vectorise.
pub(super) const LANES: usize = 16;

/// The deviation of encoded weights from the values that they stand for.
///
/// Parts of a weight are measured apart and added. The sum does not depend on the order, nor on how the weight was cut into
/// parts, bit for bit: within a block of the encoding, squares are added as `f64` in one order; blocks are added exactly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Deviation {
    errors: Sum,
    values: Sum,
    /// As bits of magnitudes, whose order is that of the values.
    largest_error: u32,
    largest_value: u32,
}

impl Deviation {
    /// The root of the mean squared error over the root of the mean square of the values; 0 where there is no error.
    pub fn relative_rms(&self) -> f64 {
        let errors = self.errors.nearest();
        if errors == 0.0 { 0.0 } else { (errors / self.values.nearest()).sqrt() }
    }

    /// The sum of the squared errors.
    pub fn squared_error(&self) -> f64 {
        self.errors.nearest()
    }

    /// The largest magnitude of an error, in the units of the weights.
    pub fn largest_error(&self) -> f32 {
        f32::from_bits(self.largest_error)
    }

    /// What a device found: sums in words, of which the first counts 2^-320, and each is worth 2^32 of the one before;
    /// maxima as bits of magnitudes.
    pub(crate) fn from_words(
        errors: &[u64; 20],
        values: &[u64; 20],
        largest_error: u32,
        largest_value: u32,
    ) -> Deviation {
        Deviation { errors: Sum::of_words(errors), values: Sum::of_words(values), largest_error, largest_value }
    }

    /// The largest magnitude of a value.
    pub fn largest_value(&self) -> f32 {
        f32::from_bits(self.largest_value)
    }
}

impl AddAssign for Deviation {
    fn add_assign(&mut self, other: Deviation) {
        self.errors += other.errors;
        self.values += other.values;
        self.largest_error = self.largest_error.max(other.largest_error);
        self.largest_value = self.largest_value.max(other.largest_value);
    }
}

/// The deviation while blocks are measured, lane by lane: squares are those of the current block, maxima those of all.
#[derive(Default)]
pub(super) struct Measure {
    all_errors: Running,
    all_values: Running,
    errors: [f64; LANES],
    values: [f64; LANES],
    largest_error: [u32; LANES],
    largest_value: [u32; LANES],
}

impl Measure {
    /// Takes values of the current block and what they were encoded as.
    #[inline(always)]
    pub(super) fn take(&mut self, values: &[f32; LANES], decoded: &[f32; LANES]) {
        for lane in 0..LANES {
            let error = values[lane] - decoded[lane];
            self.errors[lane] += error as f64 * error as f64;
            self.values[lane] += values[lane] as f64 * values[lane] as f64;
            self.largest_error[lane] = self.largest_error[lane].max(error.to_bits() & 0x7FFF_FFFF);
            self.largest_value[lane] = self.largest_value[lane].max(values[lane].to_bits() & 0x7FFF_FFFF);
        }
    }

    /// Ends a block of the encoding.
    #[inline(always)]
    pub(super) fn end_block(&mut self) {
        self.all_errors.add(fold(self.errors));
        self.all_values.add(fold(self.values));
        self.errors = [0.0; LANES];
        self.values = [0.0; LANES];
    }

    /// The deviation of all blocks that were ended.
    #[inline(always)]
    pub(super) fn end(self) -> Deviation {
        Deviation {
            errors: self.all_errors.end(),
            values: self.all_values.end(),
            largest_error: self.largest_error.into_iter().fold(0, u32::max),
            largest_value: self.largest_value.into_iter().fold(0, u32::max),
        }
    }
}

/// The deviation of blocks that are as long as there are lanes, of which as many are measured at a time.
#[derive(Default)]
pub(super) struct Blocks {
    errors: SideBySide,
    values: SideBySide,
    largest_error: [u32; LANES],
    largest_value: [u32; LANES],
}

impl Blocks {
    /// Takes up to [`LANES`] blocks; `decoded` gives what the numbers of one were encoded as.
    #[inline(always)]
    pub(super) fn take(&mut self, blocks: &[[f32; LANES]], decoded: impl Fn(usize) -> [f32; LANES]) {
        let (mut errors, mut values) = ([0.0; LANES], [0.0; LANES]);
        for (i, block) in blocks.iter().enumerate() {
            let decoded = decoded(i);
            let (mut error_squares, mut value_squares) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                let error = block[lane] - decoded[lane];
                error_squares[lane] = error as f64 * error as f64;
                value_squares[lane] = block[lane] as f64 * block[lane] as f64;
                self.largest_error[lane] = self.largest_error[lane].max(error.to_bits() & 0x7FFF_FFFF);
                self.largest_value[lane] = self.largest_value[lane].max(block[lane].to_bits() & 0x7FFF_FFFF);
            }
            [errors[i], values[i]] = fold_two(&error_squares, &value_squares);
        }
        self.errors.add(&errors, blocks.len());
        self.values.add(&values, blocks.len());
    }

    /// The deviation of all blocks that were taken.
    #[inline(always)]
    pub(super) fn end(self) -> Deviation {
        Deviation {
            errors: self.errors.end(),
            values: self.values.end(),
            largest_error: self.largest_error.into_iter().fold(0, u32::max),
            largest_value: self.largest_value.into_iter().fold(0, u32::max),
        }
    }
}

/// The sum of all lanes: halves are added, then halves of those.
#[inline(always)]
pub(super) fn fold<T: Copy + AddAssign>(lanes: [T; LANES]) -> T {
    let mut lanes = lanes;
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] += other;
        }
    }
    lanes[0]
}

/// [`fold`] of two, side by side.
#[inline(always)]
fn fold_two(a: &[f64; LANES], b: &[f64; LANES]) -> [f64; 2] {
    let mut four = [0.0; 8];
    for lane in 0..4 {
        four[lane] = (a[lane] + a[lane + 8]) + (a[lane + 4] + a[lane + 12]);
        four[lane + 4] = (b[lane] + b[lane + 8]) + (b[lane + 4] + b[lane + 12]);
    }
    let two = [four[0] + four[2], four[1] + four[3], four[4] + four[6], four[5] + four[7]];
    [two[0] + two[1], two[2] + two[3]]
}

/// An exact sum of numbers that are not negative: an integer of 640 bits that counts 2^-320, the lowest limb first.
///
/// A square of an `f32` is between 2^-298 and 2^256, and 2^64 of the largest do not fill it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum([u64; 10]);

/// A sum that is added to often. Blocks of a weight have squares of much the same size: those go into a window of the large
/// integer that stays in registers, the others where they belong. That suffices for 2^27 numbers.
#[derive(Default)]
struct Running {
    window: u128,
    /// What bit 0 of the window is worth, as a place in `far`.
    start: usize,
    far: Sum,
}

/// Places of a window at which a number of 53 bits may begin.
const WINDOW: usize = 48;

impl Running {
    /// Adds a number. What it has below 2^-320 is cut off. Those that are not finite count nothing.
    #[inline(always)]
    fn add(&mut self, number: f64) {
        let bits = number.to_bits();
        let mantissa = bits & ((1 << 52) - 1) | 1 << 52;
        // The place of the lowest mantissa bit; far too large for a number below 2^-320.
        let place = (bits >> 52).wrapping_sub(1075 - 320) as usize;
        let offset = place.wrapping_sub(self.start);
        if offset < WINDOW {
            self.window += (mantissa as u128) << offset;
        } else {
            self.add_far(place as isize, mantissa);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_far(&mut self, place: isize, mantissa: u64) {
        if !(-52..=640 - 53).contains(&place) {
            return;
        }
        self.far.add_at(place.max(0) as usize, (mantissa >> (-place).max(0)) as u128);
        if self.window == 0 {
            self.start = (place.max(0) as usize).saturating_sub(WINDOW / 2);
        }
    }

    fn end(mut self) -> Sum {
        self.far.add_at(self.start, self.window);
        self.far
    }
}

/// A sum to which as many numbers as there are lanes are added at a time. Those that are near each other go into integers of
/// 96 bits side by side, three words each; all others, and those of an incomplete group, one by one.
#[derive(Default)]
struct SideBySide {
    one_by_one: Running,
    /// What bit 0 of the integers is worth. It stays once one of them is used.
    start: u64,
    used: bool,
    low: [u64; LANES],
    middle: [u64; LANES],
    high: [u64; LANES],
}

/// Places at which a number may begin to go side by side; a power of two.
const NEAR: u64 = 32;

impl SideBySide {
    /// Adds the first `count` numbers; the others are zeros.
    #[inline(always)]
    fn add(&mut self, numbers: &[f64; LANES], count: usize) {
        let (mut mantissas, mut offsets, mut beyond) = ([0; LANES], [0; LANES], 0);
        for lane in 0..LANES {
            let bits = numbers[lane].to_bits();
            mantissas[lane] = bits & ((1 << 52) - 1) | 1 << 52;
            offsets[lane] = (bits >> 52).wrapping_sub(1075 - 320).wrapping_sub(self.start);
            beyond |= offsets[lane] & !(NEAR - 1);
        }
        if beyond != 0 || count < LANES {
            return self.add_one_by_one(&numbers[..count]);
        }
        self.used = true;
        for lane in 0..LANES {
            let offset = offsets[lane] & (NEAR - 1);
            let shifted = mantissas[lane] << offset;
            self.low[lane] += shifted & u64::from(u32::MAX);
            self.middle[lane] += shifted >> 32;
            self.high[lane] += mantissas[lane] >> 1 >> (63 - offset);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_one_by_one(&mut self, numbers: &[f64]) {
        numbers.iter().for_each(|number| self.one_by_one.add(*number));
        if !self.used {
            // In the middle of what is near.
            self.start = self.one_by_one.start as u64 + (WINDOW as u64 - NEAR) / 2;
        }
    }

    fn end(self) -> Sum {
        let mut sum = self.one_by_one.end();
        for (words, place) in [(self.low, 0), (self.middle, 32), (self.high, 64)] {
            let total = words.iter().map(|word| u128::from(*word)).sum();
            sum.add_at(self.start as usize + place, total);
        }
        sum
    }
}

impl Sum {
    /// Adds a multiple of 2^(place - 320).
    fn add_at(&mut self, place: usize, count: u128) {
        let shift = place % 64;
        let mut more = Sum::default();
        let (low, high) = (count << shift, if shift == 0 { 0 } else { count >> (128 - shift) });
        let limbs = [low as u64, (low >> 64) as u64, high as u64];
        for (limb, count) in more.0.iter_mut().skip(place / 64).zip(limbs) {
            *limb = count;
        }
        *self += more;
    }

    /// The sum of words that are 32 bits apart.
    fn of_words(words: &[u64; 20]) -> Sum {
        let mut sum = Sum::default();
        words.iter().enumerate().for_each(|(i, word)| sum.add_at(32 * i, *word as u128));
        sum
    }

    /// The sum, rounded.
    fn nearest(&self) -> f64 {
        // From the top, so that only what is below the result's precision is lost.
        self.0.iter().rev().fold(0.0, |sum, limb| sum * 2f64.powi(64) + *limb as f64) * 2f64.powi(-320)
    }
}

impl AddAssign for Sum {
    fn add_assign(&mut self, other: Sum) {
        let mut carry = 0;
        for (limb, more) in self.0.iter_mut().zip(other.0) {
            carry += *limb as u128 + more as u128;
            *limb = carry as u64;
            carry >>= 64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(numbers: &[f64]) -> Sum {
        let mut sum = Running::default();
        numbers.iter().for_each(|number| sum.add(*number));
        sum.end()
    }

    #[test]
    fn sums_are_exact_from_the_smallest_square_to_the_largest() {
        let smallest = (f32::from_bits(1) as f64).powi(2);
        let largest = (f32::MAX as f64).powi(2);
        assert_eq!(sum(&[smallest]).nearest(), smallest);
        assert_eq!(sum(&[largest, smallest, 1.0]).nearest(), largest);
        let mut left = sum(&[largest, 0.1]);
        left += sum(&[0.2, smallest]);
        assert_eq!(left, sum(&[smallest, 0.2, 0.1, largest]));
    }

    #[test]
    fn numbers_side_by_side_have_the_sum_of_numbers_one_by_one() {
        let mut random = 0x9E37_79B9_7F4A_7C15u64;
        let mut next = |spread: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exponent = 990 - (random >> 20) % spread;
            f64::from_bits(exponent << 52 | random >> 12)
        };
        // Alike, some apart, far apart, from the smallest to the largest; and zeros among them.
        for (spread, zeros) in [(3, 0), (30, 0), (60, 0), (700, 0), (3, 7)] {
            let mut all = Vec::new();
            let mut side = SideBySide::default();
            for group in 0..200 {
                let mut numbers = std::array::from_fn(|_| next(spread));
                if zeros != 0 {
                    numbers[group % zeros] = 0.0;
                }
                let count = if group % 50 == 49 { 5 } else { LANES };
                side.add(&numbers, count);
                all.extend_from_slice(&numbers[..count]);
            }
            assert!(side.used || spread > 32 || zeros != 0, "{spread}");
            assert_eq!(side.end(), sum(&all), "{spread} {zeros}");
        }
    }

    #[test]
    fn carries_run_through() {
        let ones = sum(&[2f64.powi(127), 2f64.powi(126), 2f64.powi(126), 3.0]);
        assert_eq!(ones.nearest(), 2f64.powi(128));
        assert_eq!(sum(&[1.0 - f64::EPSILON / 2.0; 1 << 16]).nearest(), 65536.0 - f64::EPSILON * 32768.0);
        let full = Sum([u64::MAX, u64::MAX, u64::MAX, 0, 0, 0, 0, 0, 0, 0]);
        let mut twice = full;
        twice += full;
        assert_eq!(twice.0[..4], [u64::MAX - 1, u64::MAX, u64::MAX, 1]);
        let mut next = full;
        next += sum(&[2f64.powi(-320)]);
        assert_eq!(next.0[..4], [0, 0, 0, 1]);
    }

    #[test]
    fn words_of_a_device_are_carried() {
        let mut words = [0; 20];
        words[1] = u64::MAX;
        words[2] = 1 << 32 | 3;
        words[19] = 5;
        // Bit 32 on: 2^64 - 1. Bit 64 on: 2^32 + 3, to which the former carries 2^32 - 1.
        assert_eq!(Sum::of_words(&words).0, [0xFFFF_FFFF_0000_0000, (1 << 33) + 2, 0, 0, 0, 0, 0, 0, 0, 5 << 32]);
    }

    #[test]
    fn what_is_no_square_counts_nothing() {
        assert_eq!(sum(&[0.0, f64::NAN, -f64::NAN, f64::INFINITY, f64::MIN_POSITIVE]), Sum::default());
    }

    #[test]
    fn no_error_is_none_also_of_nothing() {
        assert_eq!(Deviation::default().relative_rms(), 0.0);
    }

    #[test]
    fn figures_are_those_of_the_definition() {
        let mut measure = Measure::default();
        let mut values = [0.0; LANES];
        values[..3].copy_from_slice(&[3.0, -4.0, 1.0]);
        let mut decoded = values;
        decoded[1] = -3.5;
        measure.take(&values, &decoded);
        measure.end_block();
        let found = measure.end();
        assert_eq!((found.squared_error(), found.largest_error(), found.largest_value()), (0.25, 0.5, 4.0));
        assert_eq!(found.relative_rms(), (0.25f64 / 26.0).sqrt());
    }
}
