//! Plan: where every element of every output file comes from. Plain data, made without reading tensor data.
//!
//! A **parameter** is a tensor of the output; each rank holds a **slice** of it. A slice is covered by **pieces**, each
//! a rectangle filled from a rectangle of one source tensor or with a constant. The plan is made by [`Plan::new`],
//! proven by the [`audit`](mod@audit) and executed by the engine.

pub mod audit;
mod build;
mod companions;
mod encoded;
mod files;
mod forms;
mod identity;
mod keep;
mod nvfp4;
mod picture;
mod share;
mod stages;
mod summary;

pub use build::PlanRequest;
pub use files::{DRAFT_FOLDER, PlannedFile};
pub(crate) use forms::EXPERTS;
pub use forms::{Code, Form, Scale};
pub use keep::weight_name;
pub use nvfp4::{InputScales, Nvfp4};
pub use picture::{Cell, Column, Group, Picture, Row, Section};
pub use stages::StageLayers;
pub use summary::{ParameterSummary, RankSummary, Summary, TypeSummary};

use std::ops::Range;

use crate::dequant::FloatType;
use crate::dtype::Dtype;
use crate::gguf::GgmlType;
use crate::mapping::{Content, CutKind, Model, MtpPolicy, OutputPolicy, PinnedDtype, Profile, Set, ValueOp};

/// What is written where, and from what.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The file as the mapping understands it.
    pub model: Model,
    /// The layout.
    pub profile: Profile,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Which blocks each pipeline stage holds.
    pub stages: StageLayers,
    /// Ranks hold whole experts instead of a slice of every expert.
    pub expert_parallel: bool,
    /// What the user chose about the values.
    pub policy: Policy,
    /// Which weights are written in a form of their own; `None` if all follow [`Policy::dtype`].
    pub forms: Option<OutputPolicy>,
    /// The type of weights whose blocks are to be kept, but are cut through; `None` if that is refused.
    pub keep_or: Option<FloatType>,
    /// What the user chose about nvfp4.
    pub nvfp4: Nvfp4,
    /// Whether some weights are fp8 and others nvfp4: the scales of fp8 then have the names and axes that ModelOpt gives them.
    pub mixes_codes: bool,
    /// By weight of the model, the first of those that share its `weight_scale_2`, or `u32::MAX` where it has none; empty if
    /// none is written as nvfp4.
    pub scale_leaders: Vec<u32>,
    /// The source tensors that pieces refer to by index.
    pub sources: Vec<PlannedSource>,
    /// Parameters in the one global order that every rank's files follow.
    pub params: Vec<Param>,
    /// Pieces, grouped by slice; ranks that hold the same share the same pieces.
    pub pieces: Vec<Piece>,
    /// Output files: set by set, stage by stage, rank by rank, part by part.
    pub files: Vec<PlannedFile>,
    /// Weights that the layout leaves out (indices of the model's), and why.
    pub left_out: Vec<(u32, String)>,
}

/// What the user chose about the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Dtype of every weight that is not pinned to another, and to which the output policy gives no form of its own.
    pub dtype: FloatType,
    /// What becomes of MTP blocks.
    pub mtp: MtpPolicy,
    /// Size in bytes at which a part is closed.
    pub part_size: u64,
    /// Each rank's rows of an expert's projections are padded with zeros to a multiple of this.
    pub moe_pad: Option<u64>,
}

/// A source tensor, as far as the plan needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSource {
    /// Its name in the GGUF.
    pub name: String,
    /// Its type.
    pub ty: GgmlType,
    /// Number of elements.
    pub elements: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A tensor of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Param {
    /// Its name in the files.
    pub name: String,
    /// The set of files it belongs to.
    pub set: Set,
    /// The pipeline stage that holds it.
    pub stage: u32,
    /// The weights it is made of.
    pub content: Content,
    /// A dtype that the layout or the weight pins.
    pub pinned: Option<PinnedDtype>,
    /// Its element type.
    pub dtype: Dtype,
    /// How its elements are stored.
    pub form: Form,
    /// Why its blocks, which were to be kept, are decoded.
    pub decoded: Option<String>,
    /// Its whole shape before any cut or padding, row-major.
    pub shape: Vec<u64>,
    /// How ranks share it.
    pub cut: ParamCut,
    /// An earlier parameter made of the same weights: both are decoded in one pass.
    pub joins: Option<u32>,
    /// What each rank holds, by rank.
    pub slices: Vec<Slice>,
}

impl Param {
    /// Number of elements of the whole. Of kept blocks, the shape counts bytes.
    pub fn elements(&self) -> u64 {
        let (block, block_bytes) = self.form.unit();
        self.shape.iter().product::<u64>() / block_bytes * block
    }

    /// The first of the ranks that hold the very same slice as `rank`.
    pub fn first_holder(&self, rank: u32) -> u32 {
        let pieces = |rank: u32| &self.slices[rank as usize].pieces;
        let mut first = rank;
        while first > 0 && !pieces(rank).is_empty() && pieces(first - 1) == pieces(rank) {
            first -= 1;
        }
        first
    }
}

/// How ranks share a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamCut {
    /// As each of its weights is cut; the kind is that of the first.
    Weights(CutKind),
    /// By whole experts.
    Expert,
}

impl ParamCut {
    /// The cut's name in manifests and reports.
    pub fn name(self) -> &'static str {
        match self {
            ParamCut::Weights(kind) => kind.name(),
            ParamCut::Expert => "expert",
        }
    }
}

/// What one rank holds of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// Its shape, row-major.
    pub shape: Shape,
    /// Its pieces, a range of [`Plan::pieces`].
    pub pieces: Range<u32>,
    /// The file that holds it, an index of [`Plan::files`].
    pub file: u32,
    /// Its first byte, counted from the start of the file's data section.
    pub offset: u64,
}

/// A shape of up to four axes, row-major, kept in place: a plan holds half a million of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [u64; 4],
    len: u8,
}

impl Shape {
    /// The shape with these axes; `None` for more than four.
    pub fn new(axes: &[u64]) -> Option<Shape> {
        let mut dims = [0; 4];
        dims.get_mut(..axes.len())?.copy_from_slice(axes);
        Some(Shape { dims, len: axes.len() as u8 })
    }

    /// The axes.
    pub fn axes(&self) -> &[u64] {
        &self.dims[..usize::from(self.len)]
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.axes().iter().product()
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.axes().fmt(f)
    }
}

/// A rectangle of a slice and what fills it. Slices and sources are seen as matrices ([`crate::mapping::Matrix`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// First row in the slice.
    pub row: u64,
    /// First column in the slice.
    pub col: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub cols: u64,
    /// What fills it.
    pub origin: Origin,
}

/// What fills a piece.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Origin {
    /// Elements of a source.
    Source(Region),
    /// A constant.
    Fill(f32),
}

/// Where in a source a piece's elements are. The source is seen as a matrix with rows of `width` elements.
///
/// Element (i, j) of the piece is element (`row` + i·`step`, `col` + j) of the source; with `transpose`, element
/// (`row` + j·`step`, `col` + i).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Region {
    /// Index of the source.
    pub source: u32,
    /// First row.
    pub row: u64,
    /// Distance between rows that follow each other in the piece.
    pub step: u64,
    /// First column.
    pub col: u64,
    /// Elements per row of the source.
    pub width: u64,
    /// Rows of the source are columns of the piece.
    pub transpose: bool,
    /// What happens to the values.
    pub op: ValueOp,
}

impl Region {
    /// The flat index in the source of element (i, j) of the piece.
    pub fn element(&self, i: u64, j: u64) -> u64 {
        let (along_rows, along_cols) = if self.transpose { (j, i) } else { (i, j) };
        (self.row + along_rows * self.step) * self.width + self.col + along_cols
    }
}

impl Plan {
    /// The pieces of a slice.
    pub fn pieces_of(&self, slice: &Slice) -> &[Piece] {
        &self.pieces[slice.pieces.start as usize..slice.pieces.end as usize]
    }

    /// The rank that a file is listed under; none for those of an ordinary checkpoint, which belong to every rank.
    pub fn rank_of(&self, file: &PlannedFile) -> Option<u32> {
        Some(file.rank).filter(|_| !self.profile.whole_at(self.tp, self.stages.count()))
    }

    /// Bytes of a slice.
    pub fn slice_bytes(&self, param: &Param, slice: &Slice) -> u64 {
        slice.shape.elements() * param.dtype.bytes()
    }
}
