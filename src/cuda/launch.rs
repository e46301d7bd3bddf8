//! What a kernel is launched with.

use crate::gguf::GgmlType;

/// The argument of every kernel, by value; `kernels/dequant.cu` declares the same.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Launch {
    /// Whole blocks; row `r` begins at `source + r * row_bytes`.
    pub source: u64,
    /// Where elements go.
    pub out: u64,
    /// Bytes from one row to the next.
    pub row_bytes: u64,
    /// Elements of the row's first block before the first that is wanted.
    pub skip: u64,
    /// Rows.
    pub rows: u64,
    /// Wanted columns.
    pub cols: u64,
    /// Element of `out` that the first goes to.
    pub out_start: u64,
    /// Elements of `out` between one row, or column of a transpose, and the next.
    pub out_stride: u64,
    /// 0 bf16, 1 f16, 2 f32.
    pub dtype: u32,
    /// Whether columns become rows.
    pub transpose: u32,
    /// Whether values are multiplied by `scale`.
    pub has_scale: u32,
    /// Whether `add` is added then.
    pub has_add: u32,
    pub scale: f32,
    pub add: f32,
    /// NaN, infinite and overflowing values are added to these three.
    pub counts: u64,
}

/// The name of a type's kernel; none for types without one.
pub(super) fn kernel(ty: GgmlType) -> Option<String> {
    crate::dequant::Dequantizer::new(ty, crate::dequant::Simd::Baseline)?;
    Some(format!("ggshard_{}", ty.name()))
}

/// Blocks of a grid and threads of a block, each (x, y).
pub(super) type Grid = ((u32, u32), (u32, u32));

impl Launch {
    /// Threads for every group of eight weights of every row.
    pub(super) fn grid(&self) -> Grid {
        let groups = (self.skip + self.cols).div_ceil(8) - self.skip / 8;
        let (width, height) = if self.transpose != 0 { (self.rows, groups) } else { (groups, self.rows) };
        let blocks = |n: u64, threads: u64, most: u64| n.div_ceil(threads).clamp(1, most) as u32;
        ((blocks(width, 32, 1 << 30), blocks(height, 8, 65535)), (32, 8))
    }
}
