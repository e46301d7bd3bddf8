//! Positions followed from a slice through the weight to the source, by the rules' own arithmetic.

use super::fault;
use crate::error::Result;
use crate::mapping::{CutKind, Matrix, ValueOp, Weight};
use crate::plan::{Origin, Param, Plan};

/// Traces every piece: by the corners of each run of rows over which the rule is even, and one seeded position of each.
///
/// Within such a run both the piece and the rule name a source element that grows by the same amount from row to row,
/// and from column to column; if they agree at the corners they agree everywhere. (The corners of a whole piece would
/// not do: a lost un-permutation moves every row of a head but the first and the last.)
///
/// Gives the number of positions.
pub(super) fn check(plan: &Plan) -> Result<u64> {
    let mut traced = 0;
    let mut seed = 0x9E37_79B9_7F4A_7C15u64;
    for param in &plan.params {
        let weight = &plan.model.weights[param.weight as usize];
        for (rank, slice) in param.slices.iter().enumerate() {
            for piece in plan.pieces_of(slice) {
                if matches!(piece.origin, Origin::Fill(value) if value.to_bits() != 0) {
                    return Err(fault(param, rank, "it is padded with something else than zero").audit());
                }
                let mut top = 0;
                while top < piece.rows {
                    let (weight_row, _) = in_weight(plan, weight, rank as u64, piece.row + top, piece.col);
                    let rows = even_rows(weight, weight_row).min(piece.rows - top);
                    let (bottom, right) = (top + rows - 1, piece.cols - 1);
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let random = (top + (seed >> 33) % rows, (seed >> 17) % piece.cols);
                    for (i, j) in [(top, 0), (top, right), (bottom, 0), (bottom, right), random] {
                        let planned = match &piece.origin {
                            Origin::Source(region) => Some((region.source, region.element(i, j), region.op)),
                            Origin::Fill(_) => None,
                        };
                        position(plan, param, weight, rank, (piece.row + i, piece.col + j), planned)?;
                        traced += 1;
                    }
                    top += rows;
                }
            }
        }
    }
    Ok(traced)
}

/// For how many rows of the weight, from `row` on, the rule goes evenly through one source: to the end of the part or,
/// where a permutation is undone, of the half head. Padding goes on for ever.
fn even_rows(weight: &Weight, row: u64) -> u64 {
    let recipe = &weight.recipe;
    let unit_rows: u64 = recipe.parts.iter().map(|p| p.rows).sum();
    if row.checked_div(unit_rows).is_none_or(|unit| unit >= recipe.units) {
        return u64::MAX;
    }
    let mut k = row % unit_rows;
    for part in &recipe.parts {
        if k < part.rows {
            let run = part.unpermute.map_or(part.rows, |heads| part.rows / heads / 2);
            return run - k % run;
        }
        k -= part.rows;
    }
    u64::MAX
}

fn position(
    plan: &Plan,
    param: &Param,
    weight: &Weight,
    rank: usize,
    (row, col): (u64, u64),
    planned: Option<(u32, u64, ValueOp)>,
) -> Result<()> {
    let (weight_row, weight_col) = in_weight(plan, weight, rank as u64, row, col);
    let ruled = origin(weight, weight_row, weight_col);
    if same(&ruled, &planned) {
        return Ok(());
    }
    let show = |at: &Option<(u32, u64, ValueOp)>| match at {
        None => "padding".to_owned(),
        Some((source, element, op)) => {
            let name = plan.sources.get(*source as usize).map_or("?", |s| s.name.as_str());
            let op = if op.is_identity() { String::new() } else { format!(" {op:?}") };
            format!("element {element} of '{name}'{op}")
        }
    };
    Err(fault(param, rank, format!("element ({row}, {col}) of its slice is filled from {}", show(&planned)))
        .expected(format!("{}, by the rule for element ({weight_row}, {weight_col}) of the weight", show(&ruled)))
        .audit())
}

/// Equality of places and of the arithmetic bit for bit: adding 0 and adding -0 are not the same.
fn same(a: &Option<(u32, u64, ValueOp)>, b: &Option<(u32, u64, ValueOp)>) -> bool {
    let bits = |at: &Option<(u32, u64, ValueOp)>| at.map(|(s, e, op)| (s, e, op.scale, op.add.map(f32::to_bits)));
    bits(a) == bits(b)
}

/// Where in the whole weight, seen as a matrix, an element of a rank's slice belongs.
fn in_weight(plan: &Plan, weight: &Weight, rank: u64, row: u64, col: u64) -> (u64, u64) {
    let tp = u64::from(plan.tp);
    let Matrix { rows, cols } = Matrix::of(&weight.shape);
    if tp == 1 {
        return (row, col);
    }
    match weight.cut.kind {
        CutKind::Replicated => (row, col),
        CutKind::Vocab => {
            let pad = plan.profile.rules.vocab_pad;
            let padded = rows.div_ceil(pad) * pad;
            (rank * (padded / tp) + row, col)
        }
        CutKind::Column => match weight.cut.units {
            Some(units) if weight.cut.repeat && units < tp => (rank * units / tp * (rows / units) + row, col),
            Some(_) | None => (rank * rows / tp + row, col),
        },
        CutKind::Row if weight.shape.len() == 1 => (rank * rows / tp + row, col),
        CutKind::Row => (row, rank * cols / tp + col),
    }
}

/// Which source element the recipe names for an element of the weight; none for padding rows.
fn origin(weight: &Weight, row: u64, col: u64) -> Option<(u32, u64, ValueOp)> {
    let recipe = &weight.recipe;
    let unit_rows: u64 = recipe.parts.iter().map(|p| p.rows).sum();
    let unit = row.checked_div(unit_rows)?;
    if unit >= recipe.units {
        return None;
    }
    let mut k = row % unit_rows;
    for part in &recipe.parts {
        if k >= part.rows {
            k -= part.rows;
            continue;
        }
        let unit_start = part.start + unit * part.rows * part.cols;
        let within = if part.transpose {
            col * part.rows + k
        } else {
            let stored = match part.unpermute {
                None => k,
                Some(heads) => {
                    let head = part.rows / heads;
                    let (h, inside) = (k / head, k % head);
                    let (t, i) = (inside / (head / 2), inside % (head / 2));
                    h * head + 2 * i + t
                }
            };
            stored * part.cols + col
        };
        return Some((part.source, unit_start + within, part.op));
    }
    None
}
