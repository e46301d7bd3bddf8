//! Positions followed from a slice through the weight to the source, by the rules' own arithmetic.

use super::holding::{Holding, holdings};
use super::{fault, pieces};
use crate::error::Result;
use crate::mapping::{Content, ValueOp, Weight};
use crate::plan::{Origin, Param, Plan};

/// What fills an element.
#[derive(Debug, Clone, Copy)]
enum Filling {
    Source(u32, u64, ValueOp),
    /// The bits of a constant.
    Constant(u32),
}

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
    for param in plan.params.iter().filter(|p| !p.form.is_scales()) {
        for (rank, slice) in param.slices.iter().enumerate() {
            let parts = holdings(plan, param, rank as u64).unwrap_or_default();
            for piece in pieces(plan, param, slice).unwrap_or_default().iter() {
                let mut top = 0;
                while top < piece.rows {
                    let rows = even_from(plan, &parts, piece.row + top, piece.col).min(piece.rows - top);
                    let (bottom, right) = (top + rows - 1, piece.cols - 1);
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let random = (top + (seed >> 33) % rows, (seed >> 17) % piece.cols);
                    for (i, j) in [(top, 0), (top, right), (bottom, 0), (bottom, right), random] {
                        let planned = match &piece.origin {
                            Origin::Source(region) => Filling::Source(region.source, region.element(i, j), region.op),
                            Origin::Fill(value) => Filling::Constant(value.to_bits()),
                        };
                        position(plan, param, &parts, rank, (piece.row + i, piece.col + j), planned)?;
                        traced += 1;
                    }
                    top += rows;
                }
            }
        }
    }
    Ok(traced)
}

/// For how many rows of a slice, from `row` on, the rule is even: to the end of what a weight holds or of its padding.
fn even_from(plan: &Plan, parts: &[Holding<'_>], row: u64, col: u64) -> u64 {
    let part = parts.partition_point(|h| h.start <= row).checked_sub(1).and_then(|i| parts.get(i));
    let Some(part) = part else { return u64::MAX };
    let local = row - part.start;
    if local >= part.real.rows {
        return part.padded.rows.saturating_sub(local).max(1);
    }
    let (weight_row, _) = part.in_weight(local, col, plan.profile.rules.vocab.multiple);
    even_rows(part.weight, weight_row).min(part.real.rows - local)
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
    parts: &[Holding<'_>],
    rank: usize,
    (row, col): (u64, u64),
    planned: Filling,
) -> Result<()> {
    let (ruled, of) = ruled(plan, param, parts, row, col);
    if ruled.is_some_and(|ruled| same(ruled, planned)) {
        return Ok(());
    }
    let show = |at: Option<Filling>| match at {
        None => "nothing".to_owned(),
        Some(Filling::Constant(bits)) => format!("the constant {}", f32::from_bits(bits)),
        Some(Filling::Source(source, element, op)) => {
            let name = plan.sources.get(source as usize).map_or("?", |s| s.name.as_str());
            let op = if op.is_identity() { String::new() } else { format!(" {op:?}") };
            format!("element {element} of '{name}'{op}")
        }
    };
    Err(fault(param, rank, format!("element ({row}, {col}) of its slice is filled from {}", show(Some(planned))))
        .expected(format!("{}{of}", show(ruled)))
        .audit())
}

/// Equality of places and of the arithmetic bit for bit: adding 0 and adding -0 are not the same.
fn same(a: Filling, b: Filling) -> bool {
    let bits = |op: ValueOp| (op.scale, op.add.map(f32::to_bits));
    match (a, b) {
        (Filling::Constant(a), Filling::Constant(b)) => a == b,
        (Filling::Source(s, e, a), Filling::Source(t, f, b)) => (s, e, bits(a)) == (t, f, bits(b)),
        (Filling::Constant(_), Filling::Source(..)) | (Filling::Source(..), Filling::Constant(_)) => false,
    }
}

/// By which rule an element is filled, for messages: made for every element, and written for hardly any.
enum Rule<'a> {
    None,
    Padding(&'a Weight),
    Element(u64, u64, &'a Weight),
}

impl std::fmt::Display for Rule<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rule::None => Ok(()),
            Rule::Padding(weight) => write!(f, ", the padding after weight '{}'", weight.name),
            Rule::Element(r, c, weight) => {
                write!(f, ", by the rule for element ({r}, {c}) of weight '{}'", weight.name)
            }
        }
    }
}

/// What the rules put at an element of a slice, and which element of which weight that is.
fn ruled<'a>(plan: &Plan, param: &Param, parts: &[Holding<'a>], row: u64, col: u64) -> (Option<Filling>, Rule<'a>) {
    if let Content::Constant(value) = param.content {
        return (((row, col) == (0, 0)).then_some(Filling::Constant(value.to_bits())), Rule::None);
    }
    let part = parts.partition_point(|h| h.start <= row).checked_sub(1).and_then(|i| parts.get(i));
    let Some(part) = part else { return (None, Rule::None) };
    let local = row - part.start;
    if local >= part.real.rows || col >= part.real.cols {
        return (Some(Filling::Constant(0)), Rule::Padding(part.weight));
    }
    let (r, c) = part.in_weight(local, col, plan.profile.rules.vocab.multiple);
    let filling = origin(part.weight, r, c).map(|(source, element, op)| Filling::Source(source, element, op));
    (filling, Rule::Element(r, c, part.weight))
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
