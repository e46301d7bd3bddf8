//! What a decoding kernel is given, and how many threads it needs: the host's side of `kernels/dequant.cu`.

use crate::dequant::FloatType;
use crate::gguf::GgmlType;

/// Threads of a block, in both dimensions together (`THREADS` in `dequant.cu`).
const THREADS: u32 = 256;
/// Groups that a thread decodes in x (`ROUNDS` in `dequant.cu`).
const ROUNDS: u64 = 4;
/// Blocks that a grid can have in y; kernels take strides over what is left.
const MOST_IN_Y: u64 = 65535;
/// Rows, and columns with what is skipped, of a launch: kernels count both in 31 bits.
const MOST: u64 = i32::MAX as u64;
/// Threads in x of a transposing block: rows, whose elements lie together in the output.
const TURNED_X: u32 = 32;

/// The one argument of every decoding kernel, by value. Addresses are the device's.
///
/// A kernel decodes `rows` by `cols` elements, columns counted from `skip` elements after the start of a row's first block
/// on. Column ranges that begin at a later block are said by `source` alone.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Launch {
    /// Blocks: row `r` begins at `source + r * row_bytes`. A multiple of [`alignment`] of the type, as is `row_bytes`.
    pub source: u64,
    /// The output; a multiple of 16.
    pub out: u64,
    /// Bytes from one row's first block to the next's: a whole number of blocks.
    pub row_bytes: u64,
    /// Elements of a row's first block before the first wanted column; fewer than a block.
    pub skip: u64,
    /// Rows wanted; fewer than 2^31.
    pub rows: u64,
    /// Columns wanted; with `skip`, fewer than 2^31.
    pub cols: u64,
    /// Element of the output that takes row 0, column 0.
    pub out_start: u64,
    /// Elements of the output from one row to the next or, transposed, from one column to the next.
    pub out_stride: u64,
    /// Output type: see [`dtype`].
    pub dtype: u32,
    /// If not zero, row `r`, column `c` goes to element `out_start + c * out_stride + r`, else to
    /// `out_start + r * out_stride + c`.
    pub transpose: u32,
    /// If not zero, every value is multiplied by `scale`.
    pub has_scale: u32,
    /// If not zero, `add` is added to every value, after the scale.
    pub has_add: u32,
    /// The scale.
    pub scale: f32,
    /// The summand.
    pub add: f32,
    /// Three counters of 64 bits that the kernel adds to: NaN, infinite, overflowing, as
    /// [`Nonfinite`](crate::dequant::Nonfinite) counts them.
    pub counts: u64,
}

/// Threads for a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y and z.
    pub threads: [u32; 3],
}

impl Launch {
    /// The grid that covers the rectangle. None if the rectangle is empty or too large for one launch.
    pub fn grid(&self) -> Option<Grid> {
        let end = self.skip.checked_add(self.cols)?;
        if self.rows == 0 || self.cols == 0 || self.rows > MOST || end > MOST {
            return None;
        }
        let groups = end.div_ceil(8) - self.skip / 8;
        let (width, height) = if self.transpose != 0 { (self.rows, groups) } else { (groups, self.rows) };
        let x = if self.transpose != 0 { TURNED_X } else { threads_in_x(width) };
        let y = THREADS / x;
        let wide = width.div_ceil(x as u64 * ROUNDS) as u32;
        let high = height.div_ceil(y as u64).min(MOST_IN_Y) as u32;
        Some(Grid { blocks: [wide, high, 1], threads: [x, y, 1] })
    }
}

/// As many threads in x as leave the fewest idle. From one round to the next a kernel moves by whole blocks of weights, the
/// largest of which are 32 groups, so fewer than 32 threads must do with one round.
fn threads_in_x(width: u64) -> u32 {
    if width <= 16 {
        return (width as u32).next_power_of_two();
    }
    let covered = |x: u32| width.next_multiple_of(x as u64);
    [256, 128, 64, 32].into_iter().min_by_key(|x| covered(*x)).unwrap_or(THREADS)
}

/// The name of a type's kernel; none for types without a decoder.
pub const fn kernel(ty: GgmlType) -> Option<&'static str> {
    macro_rules! names {
        ($($ty:ident)*; none $($none:ident)*) => {
            match ty {
                $(GgmlType::$ty => Some(concat!("ggshard_", stringify!($ty))),)*
                $(GgmlType::$none)|* => None,
            }
        };
    }
    names! {
        F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S
        IQ4_XS F64 IQ1_M BF16 TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0 Q2_0;
        none Q8_1 I8 I16 I32 I64
    }
}

/// The number that kernels know an output type by.
pub const fn dtype(ty: FloatType) -> u32 {
    match ty {
        FloatType::BF16 => 0,
        FloatType::F16 => 1,
        FloatType::F32 => 2,
    }
}

/// What the address of a block must be a multiple of: the largest power of two that divides a block, 16 at most.
pub const fn alignment(ty: GgmlType) -> u64 {
    let power = 1 << ty.block_bytes().trailing_zeros();
    if power < 16 { power } else { 16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequant::{Dequantizer, Simd};
    use crate::gguf::types::TYPES;

    fn launch(rows: u64, cols: u64, skip: u64, transpose: u32) -> Launch {
        Launch { rows, cols, skip, transpose, ..Launch::default() }
    }

    #[test]
    fn types_with_a_decoder_have_a_kernel_of_their_name() {
        for info in TYPES {
            let decodes = Dequantizer::new(info.ty, Simd::Baseline).is_some();
            assert_eq!(kernel(info.ty), decodes.then(|| format!("ggshard_{}", info.ty)).as_deref());
        }
    }

    #[test]
    fn blocks_are_aligned_as_far_as_their_size_allows() {
        for (ty, want) in [(GgmlType::MXFP4, 1), (GgmlType::Q8_0, 2), (GgmlType::Q2_K, 4), (GgmlType::Q4_K, 16)] {
            assert_eq!(alignment(ty), want, "{ty}");
        }
    }

    #[test]
    fn a_grid_covers_its_rectangle_and_idles_little() {
        let grid = |rows, cols, skip, turned| launch(rows, cols, skip, turned).grid().unwrap();
        assert_eq!(grid(1, 1 << 20, 0, 0), Grid { blocks: [128, 1, 1], threads: [256, 1, 1] });
        assert_eq!(grid(4096, 2048, 0, 0), Grid { blocks: [1, 4096, 1], threads: [256, 1, 1] });
        assert_eq!(grid(10, 768, 0, 0), Grid { blocks: [1, 2, 1], threads: [32, 8, 1] });
        assert_eq!(grid(10, 64, 0, 0), Grid { blocks: [1, 1, 1], threads: [8, 32, 1] });
        // Eight columns that lie in two groups.
        assert_eq!(grid(1, 8, 4, 0).threads, [2, 128, 1]);
        assert_eq!(grid(1 << 30, 8, 0, 0).blocks, [1, 65535, 1]);
        assert_eq!(grid(512, 128, 0, 1), Grid { blocks: [4, 2, 1], threads: [32, 8, 1] });
        for (rows, cols, skip) in [(0, 8, 0), (8, 0, 0), (1, u64::MAX, 1), (1, MOST, 1), (MOST + 1, 1, 0)] {
            assert_eq!(launch(rows, cols, skip, 0).grid(), None);
        }
    }
}
