//! Counts of values that are not what a weight should be.

use std::ops::AddAssign;

/// Values that an output cannot represent as they were meant.
///
/// A published file can hold blocks with NaN scales (bad importance matrices made some), and `f16` overflows at 65520;
/// a conversion counts such values per tensor and refuses them unless told otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Nonfinite {
    /// Elements whose decoded `f32` is NaN.
    pub nan: u64,
    /// Elements whose decoded `f32` is infinite.
    pub inf: u64,
    /// Elements whose decoded `f32` is finite but becomes infinite in the output type.
    pub overflow: u64,
}

impl Nonfinite {
    /// Whether anything was counted.
    pub const fn any(&self) -> bool {
        self.nan | self.inf | self.overflow != 0
    }
}

impl AddAssign for Nonfinite {
    fn add_assign(&mut self, other: Self) {
        self.nan += other.nan;
        self.inf += other.inf;
        self.overflow += other.overflow;
    }
}
