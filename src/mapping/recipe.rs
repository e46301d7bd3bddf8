//! What a rule means for one file: which elements of which sources make up a weight.

use super::rules::{CutKind, PinnedDtype};

/// A weight of the HF checkpoint, resolved against a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Weight {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<u64>,
    /// How ranks share it.
    pub cut: Cut,
    /// A dtype that it keeps whatever the output policy.
    pub pinned: Option<PinnedDtype>,
    /// Where its elements come from.
    pub recipe: Recipe,
    /// The block it belongs to.
    pub block: Option<u64>,
    /// Whether that block is one of the multi-token-prediction blocks after the trunk.
    pub mtp: bool,
}

/// How ranks share a weight, with the unit that no cut may pass through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The kind of cut.
    pub kind: CutKind,
    /// Number of units along the cut axis, where cuts may only fall between units.
    pub units: Option<u64>,
    /// With fewer units than ranks, neighbouring ranks hold the same unit.
    pub repeat: bool,
}

/// A weight seen as a matrix: rows are all axes but the last, columns the last. A weight of one axis is a matrix of
/// one column, so that a cut of its axis is a cut of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

impl Matrix {
    /// The matrix that a shape is seen as.
    pub fn of(shape: &[u64]) -> Matrix {
        match shape {
            [] => Matrix { rows: 1, cols: 1 },
            [n] => Matrix { rows: *n, cols: 1 },
            [lead @ .., last] => Matrix { rows: lead.iter().product(), cols: *last },
        }
    }
}

/// The declarative form of a weight's origin: for each of `units`, the rows of each part in turn.
///
/// The planner lowers it into pieces; the audit traces positions through it by arithmetic of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Number of units that the parts are interleaved by; 1 for a single source.
    pub units: u64,
    /// The parts in order.
    pub parts: Vec<Part>,
}

/// What one source gives to a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Index of the source tensor in the set.
    pub source: u32,
    /// First element of the source that is taken; the rest follows without gaps.
    pub start: u64,
    /// Rows of the weight that it gives to each unit.
    pub rows: u64,
    /// Columns of the weight.
    pub cols: u64,
    /// Each unit's matrix is stored as `cols` rows of `rows` elements.
    pub transpose: bool,
    /// llama.cpp's q/k permutation within each of this many heads is undone.
    pub unpermute: Option<u64>,
    /// What happens to the decoded values.
    pub op: ValueOp,
}

impl Part {
    /// Elements taken from the source for `units` units.
    pub fn elements(&self, units: u64) -> u64 {
        units * self.rows * self.cols
    }
}

/// Arithmetic on decoded f32 values, in this order, each step rounding once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ValueOp {
    /// Multiply by an element of a sidecar tensor: (source, element).
    pub scale: Option<(u32, u64)>,
    /// Add a constant.
    pub add: Option<f32>,
}

impl ValueOp {
    /// Whether values pass unchanged.
    pub fn is_identity(&self) -> bool {
        *self == ValueOp::default()
    }
}
