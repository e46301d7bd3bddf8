//! The planner: weights, a profile and a topology become parameters, slices and pieces.

use super::share::{Share, share};
use super::{Origin, Param, Piece, Plan, PlannedSource, Policy, Region, Shape, Slice, files};
use crate::dequant::{Dequantizer, FloatType, Simd};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::{CutKind, Matrix, Model, Part, PinnedDtype, Profile, Weight};

/// Most ranks of one tensor-parallel group.
const MOST_RANKS: u32 = 1024;
/// Most pieces of one plan; GLM-5 at tp 8 has about half a million.
const MOST_PIECES: usize = 1 << 26;

/// What is to be planned.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// The layout.
    pub profile: Profile,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// What the user chose about the values.
    pub policy: Policy,
}

impl Plan {
    /// Plans every rank's files. The result has not been audited yet; [`Plan::audited`] does both.
    pub fn new(set: &GgufSet, model: Model, request: PlanRequest) -> Result<Plan> {
        let PlanRequest { profile, tp, policy } = request;
        if tp == 0 || tp > MOST_RANKS {
            let fault = Fault::new(format!("tp {tp}")).expected(format!("1 to {MOST_RANKS} ranks"));
            return Err(fault.layout());
        }
        let sources = set
            .tensors()
            .iter()
            .map(|t| PlannedSource { name: t.name.clone(), ty: t.ty, elements: t.elements(), bytes: t.bytes })
            .collect();
        let mut plan = Plan { model, profile, tp, policy, sources, params: Vec::new(), pieces: Vec::new(), files: Vec::new() };
        plan.params.reserve(plan.model.weights.len());
        for index in 0..plan.model.weights.len() {
            let param = plan.param(set, index)?;
            plan.params.push(param);
        }
        files::assign(&mut plan)?;
        Ok(plan)
    }

    /// Plans, audits, and gives the plan only if the audit holds.
    pub fn audited(set: &GgufSet, model: Model, request: PlanRequest) -> Result<Plan> {
        let plan = Plan::new(set, model, request)?;
        super::audit::audit(&plan)?;
        Ok(plan)
    }

    fn param(&mut self, set: &GgufSet, index: usize) -> Result<Param> {
        let weight = &self.model.weights[index];
        let dtype = dtype(set, &self.model, weight, self.policy.dtype)?;
        let (tp, pad) = (u64::from(self.tp), self.profile.rules.vocab_pad);
        let mut slices: Vec<Slice> = Vec::with_capacity(self.tp as usize);
        let mut last: Option<Share> = None;
        for rank in 0..tp {
            let share = share(&weight.cut, &weight.shape, tp, rank, pad)
                .map_err(|e| indivisible(set, &self.model, weight, &e.what, self.tp, pad))?;
            // Ranks that hold the same, as of a replicated weight, share their pieces.
            let same = slices.last().filter(|_| last.as_ref() == Some(&share)).cloned();
            slices.push(match same {
                Some(slice) => slice,
                None => {
                    let start = self.pieces.len() as u32;
                    lower(weight, &share, &mut self.pieces);
                    if self.pieces.len() > MOST_PIECES {
                        let fault = Fault::new(format!("more than {MOST_PIECES} pieces")).file(set.path());
                        return Err(fault.tensor(&weight.name).layout());
                    }
                    let shape = slice_shape(weight, &share).ok_or_else(|| {
                        Fault::new(format!("shape {:?} has more than 4 axes", weight.shape)).tensor(&weight.name).layout()
                    })?;
                    Slice { shape, pieces: start..self.pieces.len() as u32, file: 0, offset: 0 }
                }
            });
            last = Some(share);
        }
        Ok(Param { name: weight.name.clone(), weight: index as u32, dtype, shape: weight.shape.clone(), cut: weight.cut, slices })
    }
}

/// The element type of a weight in the output. Under `raw`, integers and F64 stay what they are.
fn dtype(set: &GgufSet, model: &Model, weight: &Weight, asked: FloatType) -> Result<Dtype> {
    for part in &weight.recipe.parts {
        let tensor = &set.tensors()[part.source as usize];
        if let Some(dtype) = unchanged(tensor.ty).filter(|_| model.verbatim) {
            return Ok(dtype);
        }
        if Dequantizer::new(tensor.ty, Simd::Baseline).is_none() {
            return Err(Fault::new(format!("type {} cannot be decoded to a weight", tensor.ty))
                .file(set.parts()[tensor.part].path())
                .tensor(&tensor.name)
                .expected("a type with a dequantizer")
                .remedy("Integer tensors pass unchanged under --mapping raw; Q8_1 has no dequantizer anywhere")
                .unsupported());
        }
    }
    Ok(match (weight.pinned, asked) {
        (Some(PinnedDtype::F32), _) | (None, FloatType::F32) => Dtype::F32,
        (None, FloatType::BF16) => Dtype::BF16,
        (None, FloatType::F16) => Dtype::F16,
    })
}

/// The dtype of a type that can be handed on as it is.
fn unchanged(ty: GgmlType) -> Option<Dtype> {
    use GgmlType::*;
    match ty {
        I8 => Some(Dtype::I8),
        I16 => Some(Dtype::I16),
        I32 => Some(Dtype::I32),
        I64 => Some(Dtype::I64),
        F64 => Some(Dtype::F64),
        F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q8_1 | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | Q8_K | IQ1_S
        | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS | TQ1_0 | TQ2_0 | MXFP4 | NVFP4 | Q1_0
        | Q2_0 => None,
    }
}

fn slice_shape(weight: &Weight, share: &Share) -> Option<Shape> {
    let mut shape = Shape::new(&weight.shape)?;
    let whole = Matrix::of(&weight.shape);
    let rows = share.rows.end - share.rows.start + share.padding;
    let cols = share.cols.end - share.cols.start;
    let len = usize::from(shape.len);
    if rows != whole.rows {
        let per_step: u64 = weight.shape.iter().skip(1).take(len.saturating_sub(2)).product();
        shape.dims[0] = rows / per_step;
    }
    if cols != whole.cols {
        shape.dims[len - 1] = cols;
    }
    Some(shape)
}

/// Writes a weight's recipe out as pieces of one share.
fn lower(weight: &Weight, share: &Share, pieces: &mut Vec<Piece>) {
    let recipe = &weight.recipe;
    let per_unit: u64 = recipe.parts.iter().map(|p| p.rows).sum();
    let held = share.rows.end - share.rows.start;
    if per_unit > 0 && held > 0 {
        for unit in share.rows.start / per_unit..share.rows.end.div_ceil(per_unit) {
            let mut first = unit * per_unit;
            for part in &recipe.parts {
                lower_part(part, unit, first, share, pieces);
                first += part.rows;
            }
        }
    }
    if share.padding > 0 {
        let cols = share.cols.end - share.cols.start;
        pieces.push(Piece { row: held, col: 0, rows: share.padding, cols, origin: Origin::Fill(0.0) });
    }
}

/// One part of one unit, whose first row in the weight is `first`, clipped to the share.
fn lower_part(part: &Part, unit: u64, first: u64, share: &Share, pieces: &mut Vec<Piece>) {
    let mut place = |local: u64, rows: u64, source_row: u64, step: u64| {
        let row = first + local;
        let clipped = row.max(share.rows.start)..(row + rows).min(share.rows.end);
        if clipped.start >= clipped.end || share.cols.start >= share.cols.end {
            return;
        }
        let skipped = clipped.start - row;
        let region = Region {
            source: part.source,
            row: source_row + if part.transpose { share.cols.start } else { skipped * step },
            step,
            col: if part.transpose { skipped } else { share.cols.start },
            width: if part.transpose { part.rows } else { part.cols },
            transpose: part.transpose,
            op: part.op,
        };
        pieces.push(Piece {
            row: clipped.start - share.rows.start,
            col: 0,
            rows: clipped.end - clipped.start,
            cols: share.cols.end - share.cols.start,
            origin: Origin::Source(region),
        });
    };
    if part.rows == 0 || part.cols == 0 {
        return;
    }
    if part.transpose {
        place(0, part.rows, part.start / part.rows + unit * part.cols, 1);
        return;
    }
    let source_row = part.start / part.cols + unit * part.rows;
    match part.unpermute {
        None => place(0, part.rows, source_row, 1),
        Some(heads) => {
            // Stored pairwise: row 2·i + t of a head is row t·half + i of the checkpoint.
            let head_rows = part.rows / heads;
            let half = head_rows / 2;
            for head in 0..heads {
                for t in 0..2 {
                    place(head * head_rows + t * half, half, source_row + head * head_rows + t, 2);
                }
            }
        }
    }
}

/// The error for a tp that does not fit, with the values that would.
fn indivisible(set: &GgufSet, model: &Model, weight: &Weight, what: &str, tp: u32, pad: u64) -> Error {
    let fits = |n: u64| model.weights.iter().all(|w| share(&w.cut, &w.shape, n, 0, pad).is_ok());
    let working: Vec<String> = (1..=128).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
    let kind = match weight.cut.kind {
        CutKind::Column => "column-parallel",
        CutKind::Row => "row-parallel",
        CutKind::Vocab => "vocab-parallel",
        CutKind::Replicated => "replicated",
    };
    Fault::new(format!("{what} cannot be divided among {tp} ranks ({kind}, shape {:?})", weight.shape))
        .file(set.path())
        .tensor(&weight.name)
        .remedy(format!("--tp values that work for this model: {}", working.join(", ")))
        .layout()
}
