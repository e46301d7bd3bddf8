//! The audit: an independent pass over a finished plan that knows nothing of how it was made.
//!
//! It proves six things, each with code that the planner does not call:
//! - **layout**: every rank has every parameter once, in one file whose name is that rank's, with the dtype that policy
//!   and rules give and the shape its cut gives, aligned and without gaps; the ranks' shares join to the whole and no
//!   cut passes through a unit;
//! - **rules**: every parameter is made of the weights that a rule of the profile gives its name, in the rule's order;
//! - **forms**: what is encoded is what the output policy says, blocks lie whole on one rank and in one part, and every
//!   encoded parameter has its scales, on the same ranks, one for each block and where needed one for each weight; weights
//!   that a stack joins share theirs;
//! - **destination cover**: every element of every slice is filled exactly once;
//! - **source cover**: every element of every source is placed exactly once per copy that its cut calls for, or the
//!   source scales another or is ignored by a rule;
//! - **trace**: every piece, followed from slice to weight to source by the rules' own arithmetic, hits the elements
//!   that it names. Cover alone would accept `up` in the place of `gate`.
//!
//! A plan that fails is a defect of the planner and is never executed.

mod cover;
mod forms;
mod holding;
mod layout;
mod rules;
mod scales;
mod trace;

use std::borrow::Cow;

use super::{Code, Form, Origin, Param, Piece, Plan, Slice};
use crate::error::{Fault, Result};

/// What an audit looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AuditReport {
    /// Slices whose shape, place and cover were proven.
    pub slices: u64,
    /// Sources whose every element is accounted for.
    pub sources: u64,
    /// Positions that were traced to their source.
    pub positions: u64,
}

/// Audits a plan. The error names the first parameter, rank and source for which a proof fails.
pub fn audit(plan: &Plan) -> Result<AuditReport> {
    layout::check(plan)?;
    rules::check(plan)?;
    forms::check(plan)?;
    let slices = cover::destinations(plan)?;
    let sources = cover::sources(plan)?;
    let positions = trace::check(plan)?;
    Ok(AuditReport { slices, sources, positions })
}

/// The pieces of a slice with columns counted in elements, as the rules count them; none if they do not come out even.
fn pieces<'a>(plan: &'a Plan, param: &Param, slice: &Slice) -> Option<Cow<'a, [Piece]>> {
    let planned = plan.pieces_of(slice);
    let Some(ty) = param.form.blocks() else { return Some(Cow::Borrowed(planned)) };
    let elements = |bytes: u64| {
        Some(bytes.checked_div(ty.block_bytes())? * ty.block()).filter(|_| bytes.is_multiple_of(ty.block_bytes()))
    };
    let in_elements = |piece: &Piece| {
        let origin = match piece.origin {
            Origin::Source(region) => {
                let (col, width) = (elements(region.col)?, elements(region.width)?);
                Origin::Source(super::Region { col, width, ..region })
            }
            Origin::Fill(value) => Origin::Fill(value),
        };
        Some(Piece { col: elements(piece.col)?, cols: elements(piece.cols)?, origin, ..*piece })
    };
    planned.iter().map(in_elements).collect::<Option<Vec<_>>>().map(Cow::Owned)
}

/// A shape of a parameter with its last axis counted in elements.
fn in_elements(param: &Param, axes: &[u64]) -> Vec<u64> {
    let mut axes = axes.to_vec();
    let (elements, bytes) = match param.form {
        Form::Plain | Form::Scales { .. } | Form::Encoded { code: Code::Fp8, .. } => (1, 1),
        Form::Encoded { code: Code::Nvfp4, .. } => (2, 1),
        Form::Kept(ty) => (ty.block(), ty.block_bytes()),
    };
    if let Some(last) = axes.last_mut() {
        // Part of a block makes the shape one that no rule gives.
        *last = if last.is_multiple_of(bytes) { (*last / bytes).saturating_mul(elements) } else { u64::MAX };
    }
    axes
}

/// Starts the fault of a failed proof about one rank's slice.
fn fault(param: &Param, rank: usize, found: impl std::fmt::Display) -> Fault {
    Fault::new(format!("rank {rank}: {found}"))
        .tensor(&param.name)
        .remedy("The plan is wrong and was not executed: this is a defect of ggshard, please report it")
}
