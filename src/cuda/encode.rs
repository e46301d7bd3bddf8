//! What an encoding kernel is given, and what it finds: the host's side of `kernels/encode.cu`.

use std::ops::AddAssign;

use super::launch::Grid;
use crate::dequant::Nonfinite;
use crate::encode::{Deviation, fp8, nvfp4};

/// Threads of a block, in both dimensions together (`ENCODE_THREADS` in `encode.cu`).
const THREADS: u64 = 256;
/// Threads in x where a block has two dimensions.
const THREADS_IN_X: u64 = 32;
/// Columns that a thread takes of a row, where it takes several rows.
const GROUP: u64 = 8;
/// Rows that it takes (`STRIP` in `encode.cu`).
const STRIP: u64 = 16;
/// Lanes of a block of fp8.
const LANES: u64 = 16;
/// Blocks that a grid can have in y; kernels take strides over what is left.
const MOST_IN_Y: u64 = 65535;
/// Rows, and columns, of a launch: kernels count both in 31 bits.
const MOST: u64 = i32::MAX as u64;

/// The one argument of every encoding kernel, by value. Addresses are the device's.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Encode {
    /// Decoded values as `f32`: row `r` begins at element `r * stride`. A multiple of 16.
    pub values: u64,
    /// Elements from one row to the next; a multiple of 4.
    pub stride: u64,
    /// Rows; fewer than 2^31.
    pub rows: u64,
    /// Columns; fewer than 2^31, and for nvfp4 a multiple of 16.
    pub cols: u64,
    /// Codes, in dense rows: a byte per value of fp8, per two of nvfp4. A multiple of 8.
    pub codes: u64,
    /// Scales, in dense rows: `f32` per block of fp8, a byte per 16 columns of nvfp4.
    pub scales: u64,
    /// As `u32`, the bits of the largest magnitude of every block of fp8, or of all values. Zeros at first.
    pub largest: u64,
    /// [`Encode::SUMS`] `f64` per block of fp8.
    pub sums: u64,
    /// [`Encode::SLOTS`] of [`Found`], which kernels add to.
    pub found: u64,
    /// If not zero, [`Encoder::Amax`] has one result.
    pub whole: u32,
    /// The `weight_scale_2` of nvfp4.
    pub scale_2: f32,
}

impl Encode {
    /// How many of [`Found`] there are, over which threads spread (`SLOTS` in `encode.cu`).
    pub const SLOTS: usize = 64;
    /// Sums of a block: one for each lane's errors, and one for its values.
    pub const SUMS: u64 = 2 * LANES;
}

/// What is found in values and in what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Found {
    /// The sum of squared errors, in words that are added to without carrying: word `i` counts 2^(32 * `i` - 320).
    pub errors: [u64; 20],
    /// The sum of the values' squares, likewise.
    pub values: [u64; 20],
    /// The largest error, as bits of its magnitude.
    pub largest_error: u32,
    /// The largest value, likewise.
    pub largest_value: u32,
    /// Values that are NaN.
    pub nan: u64,
    /// Values that are infinite.
    pub inf: u64,
}

impl AddAssign for Found {
    fn add_assign(&mut self, other: Found) {
        // Words have room for 2^32 numbers.
        let add = |word: &mut u64, more: u64| *word = word.wrapping_add(more);
        self.errors.iter_mut().zip(other.errors).for_each(|(word, more)| add(word, more));
        self.values.iter_mut().zip(other.values).for_each(|(word, more)| add(word, more));
        self.largest_error = self.largest_error.max(other.largest_error);
        self.largest_value = self.largest_value.max(other.largest_value);
        add(&mut self.nan, other.nan);
        add(&mut self.inf, other.inf);
    }
}

impl Found {
    /// The deviation, and the counts of what is not finite. Where anything is not finite, the deviation means nothing.
    pub fn end(&self) -> (Deviation, Nonfinite) {
        let deviation = Deviation::from_words(&self.errors, &self.values, self.largest_error, self.largest_value);
        (deviation, Nonfinite { nan: self.nan, inf: self.inf, overflow: 0 })
    }

    /// Reads what a device wrote.
    pub(super) fn read(bytes: &[u8; size_of::<Found>()]) -> Self {
        let word = |i: usize| bytes[8 * i..][..8].try_into().map_or(0, u64::from_le_bytes);
        Found {
            errors: std::array::from_fn(word),
            values: std::array::from_fn(|i| word(20 + i)),
            largest_error: word(40) as u32,
            largest_value: (word(40) >> 32) as u32,
            nan: word(41),
            inf: word(42),
        }
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Encoder {
    /// Largest magnitudes.
    Amax,
    /// fp8: codes and scales, from the largest magnitudes of blocks.
    Fp8,
    /// fp8: sums of every lane, from codes and scales.
    Fp8Measure,
    /// fp8: all sums.
    Fp8Sum,
    /// nvfp4 with block scales from the largest magnitude, and how far that is from the values.
    Nvfp4,
    /// nvfp4 with block scales that are searched, likewise.
    Nvfp4Searched,
}

impl Encoder {
    /// All of them.
    pub const ALL: [Encoder; 6] =
        [Encoder::Amax, Encoder::Fp8, Encoder::Fp8Measure, Encoder::Fp8Sum, Encoder::Nvfp4, Encoder::Nvfp4Searched];

    /// The kernel's name.
    pub const fn kernel(self) -> &'static str {
        match self {
            Encoder::Amax => "ggshard_amax",
            Encoder::Fp8 => "ggshard_fp8",
            Encoder::Fp8Measure => "ggshard_fp8_measure",
            Encoder::Fp8Sum => "ggshard_fp8_sum",
            Encoder::Nvfp4 => "ggshard_nvfp4",
            Encoder::Nvfp4Searched => "ggshard_nvfp4_searched",
        }
    }

    /// The grid that covers so many rows and columns. None if there are none, or too many for one launch.
    pub fn grid(self, rows: u64, cols: u64) -> Option<Grid> {
        if rows == 0 || cols == 0 || rows > MOST || cols > MOST {
            return None;
        }
        let block = fp8::BLOCK as u64;
        let (across, bands) = (cols.div_ceil(block), rows.div_ceil(block));
        // Threads in x of a block, and threads that are needed in x and y.
        let (x, width, height) = match self {
            Encoder::Amax | Encoder::Fp8 => (THREADS_IN_X, cols.div_ceil(GROUP), rows.div_ceil(STRIP)),
            Encoder::Fp8Measure => (THREADS, across * LANES, bands),
            Encoder::Fp8Sum => (THREADS, across * bands, 1),
            Encoder::Nvfp4 | Encoder::Nvfp4Searched => (THREADS_IN_X, cols.div_ceil(nvfp4::BLOCK as u64), rows),
        };
        let wide = u32::try_from(width.div_ceil(x)).ok().filter(|wide| *wide <= i32::MAX as u32)?;
        let high = height.div_ceil(THREADS / x).min(MOST_IN_Y) as u32;
        Some(Grid { blocks: [wide, high, 1], threads: [x as u32, (THREADS / x) as u32, 1] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_covers_all_values() {
        let grid = |encoder: Encoder, rows, cols| encoder.grid(rows, cols).map(|grid| (grid.blocks, grid.threads));
        assert_eq!(grid(Encoder::Fp8, 4096, 2048), Some(([8, 32, 1], [32, 8, 1])));
        assert_eq!(grid(Encoder::Amax, 129, 257), Some(([2, 2, 1], [32, 8, 1])));
        assert_eq!(grid(Encoder::Fp8Measure, 129, 2049), Some(([2, 2, 1], [256, 1, 1])));
        assert_eq!(grid(Encoder::Fp8Sum, 129, 128 * 128), Some(([1, 1, 1], [256, 1, 1])));
        assert_eq!(grid(Encoder::Fp8Sum, 129, 128 * 128 + 1), Some(([2, 1, 1], [256, 1, 1])));
        assert_eq!(grid(Encoder::Nvfp4, 9, 528), Some(([2, 2, 1], [32, 8, 1])));
        assert_eq!(grid(Encoder::Nvfp4Searched, 1 << 30, 16), Some(([1, 65535, 1], [32, 8, 1])));
        for encoder in Encoder::ALL {
            assert_eq!((grid(encoder, 0, 8), grid(encoder, 8, 0), grid(encoder, MOST + 1, 1)), (None, None, None));
        }
    }

    #[test]
    fn what_was_found_is_read_as_it_was_written() {
        let mut bytes = [0; size_of::<Found>()];
        bytes.as_chunks_mut().0.iter_mut().enumerate().for_each(|(i, word)| *word = (i as u64).to_le_bytes());
        bytes[8 * 40 + 4] = 7;
        let found = Found::read(&bytes);
        assert_eq!((found.errors[19], found.values[0], found.values[19]), (19, 20, 39));
        assert_eq!((found.largest_error, found.largest_value, found.nan, found.inf), (40, 7, 41, 42));
    }

    #[test]
    fn squares_of_found_are_a_deviation() {
        let mut found = Found { largest_error: 2f32.to_bits(), largest_value: 3f32.to_bits(), ..Found::default() };
        // 1 is at bit 320: word 10. Words may hold more than 32 bits.
        found.errors[10] = 4;
        found.values[9] = 9 << 32;
        found.nan = 1;
        let (deviation, nonfinite) = found.end();
        assert_eq!((deviation.squared_error(), deviation.largest_error(), deviation.largest_value()), (4.0, 2.0, 3.0));
        assert_eq!((deviation.relative_rms(), nonfinite.any()), ((4f64 / 9.0).sqrt(), true));
    }
}
