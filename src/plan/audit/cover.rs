//! Proof that rectangles cover a whole exactly once.

use super::holding::holdings;
use super::{fault, in_elements, pieces};
use crate::error::{Fault, Result};
use crate::gguf::GgmlType;
use crate::mapping::{Matrix, Set};
use crate::plan::{Origin, Plan};

/// Rows `row`, `row + step`, … (`rows` of them) by columns `col..col + cols`.
#[derive(Debug, Clone, Copy)]
struct Rect {
    row: u64,
    step: u64,
    rows: u64,
    col: u64,
    cols: u64,
}

impl Rect {
    /// Whether it has elements and all of them lie in `whole`. Until this is known, its numbers may be anything.
    fn is_inside(&self, whole: Matrix) -> bool {
        let steps = self.rows.checked_sub(1).and_then(|steps| steps.checked_mul(self.step));
        let last_row = steps.and_then(|steps| steps.checked_add(self.row));
        let end_col = self.col.checked_add(self.cols);
        // The step of a single row leads nowhere, but must not be absurd either.
        (1..=whole.rows).contains(&self.step)
            && self.cols > 0
            && last_row.is_some_and(|row| row < whole.rows)
            && end_col.is_some_and(|col| col <= whole.cols)
    }

    /// The last row of a rectangle that lies inside.
    fn last_row(&self) -> u64 {
        self.row + (self.rows - 1) * self.step
    }

    fn has_row(&self, row: u64) -> bool {
        row >= self.row && row <= self.last_row() && (row - self.row).is_multiple_of(self.step)
    }

    fn overlaps(&self, other: &Rect) -> bool {
        if self.col >= other.col + other.cols || other.col >= self.col + self.cols {
            return false;
        }
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        if few.step == 1 && many.step == 1 {
            return few.row <= many.last_row() && many.row <= few.last_row();
        }
        (0..few.rows).any(|i| many.has_row(few.row + i * few.step))
    }
}

/// What keeps rectangles from covering a matrix exactly once.
enum Flaw {
    Outside(Rect),
    Overlap(Rect, Rect),
    Area(u64),
}

impl std::fmt::Display for Flaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |r: &Rect| {
            let step = if r.step == 1 { String::new() } else { format!(" {} apart", r.step) };
            format!("{} rows{step} from row {} and {} columns from column {}", r.rows, r.row, r.cols, r.col)
        };
        match self {
            Flaw::Outside(r) => write!(f, "{} lie outside", show(r)),
            Flaw::Overlap(a, b) => write!(f, "{} and {} overlap", show(a), show(b)),
            Flaw::Area(area) => write!(f, "{area} elements are covered"),
        }
    }
}

/// Whether the rectangles cover `whole` exactly once: all inside, no two overlap, the areas add up.
fn exact(rects: &mut [Rect], whole: Matrix) -> std::result::Result<(), Flaw> {
    let mut area = 0u64;
    for r in rects.iter() {
        if !r.is_inside(whole) {
            return Err(Flaw::Outside(*r));
        }
        area = area.saturating_add(r.rows.saturating_mul(r.cols));
    }
    rects.sort_unstable_by_key(|r| (r.row, r.col));
    let mut active: Vec<Rect> = Vec::new();
    for r in rects.iter() {
        active.retain(|a| a.last_row() >= r.row);
        if let Some(a) = active.iter().find(|a| a.overlaps(r)) {
            return Err(Flaw::Overlap(*a, *r));
        }
        active.push(*r);
    }
    if area != whole.rows * whole.cols {
        return Err(Flaw::Area(area));
    }
    Ok(())
}

/// Every element of every slice is filled exactly once. Gives the number of slices.
pub(super) fn destinations(plan: &Plan) -> Result<u64> {
    let mut rects: Vec<Rect> = Vec::new();
    for param in plan.params.iter().filter(|p| !p.form.is_scales()) {
        for (rank, slice) in param.slices.iter().enumerate() {
            if rank > 0 && param.slices[rank - 1].pieces == slice.pieces && param.slices[rank - 1].shape == slice.shape
            {
                continue;
            }
            rects.clear();
            let Some(held) = pieces(plan, param, slice) else {
                return Err(fault(param, rank, "its pieces cut through blocks").audit());
            };
            rects.extend(held.iter().map(|p| Rect { row: p.row, step: 1, rows: p.rows, col: p.col, cols: p.cols }));
            let whole = Matrix::of(&in_elements(param, slice.shape.axes()));
            exact(&mut rects, whole).map_err(|flaw| {
                let expected = format!("all {} elements of its slice filled once", whole.rows * whole.cols);
                fault(param, rank, flaw).expected(expected).audit()
            })?;
        }
    }
    Ok(plan.params.iter().map(|p| p.slices.len() as u64).sum())
}

/// A rectangle of a source as one or more ranks of one stage of one set place it.
struct Placed {
    /// The parameter, for messages.
    param: u32,
    source: u32,
    set: Set,
    stage: u32,
    width: u64,
    rect: Rect,
    /// On how many ranks it was found, and on how many it belongs.
    times: u64,
    copies: u64,
}

impl Placed {
    fn key(&self) -> (u32, Set, u32, u64, u64, u64, u64, u64, u64) {
        let Rect { row, step, rows, col, cols } = self.rect;
        (self.source, self.set, self.stage, self.width, row, col, step, rows, cols)
    }
}

/// Every element of every source is placed exactly once per copy that its cut calls for, in every set and stage that
/// holds the source at all. Gives the number of sources.
pub(super) fn sources(plan: &Plan) -> Result<u64> {
    let mut scales = vec![false; plan.sources.len()];
    let mut placed = placements(plan, &mut scales)?;
    placed.sort_unstable_by_key(Placed::key);
    let mut rects: Vec<Rect> = Vec::new();
    let mut covered = vec![false; plan.sources.len()];
    for run in placed.chunk_by(|a, b| (a.source, a.set, a.stage) == (b.source, b.set, b.stage)) {
        let tensor = &plan.sources[run[0].source as usize];
        let width = run[0].width;
        let wrong = |found: String| {
            Fault::new(found)
                .tensor(&tensor.name)
                .expected(format!("each of its {} elements placed once", tensor.elements))
                .remedy("Two rules take the same elements, or none takes some; the plan was not executed")
                .audit()
        };
        if run.iter().any(|p| p.width != width) || !tensor.elements.is_multiple_of(width) {
            return Err(wrong(format!("it is seen with rows of {width} and of other lengths")));
        }
        rects.clear();
        for same in run.chunk_by(|a, b| a.key() == b.key()) {
            let (times, copies) = (same.iter().map(|p| p.times).sum::<u64>(), same[0].copies);
            if times != copies || same.iter().any(|p| p.copies != copies) {
                let rect = same[0].rect;
                let name = &plan.params[same[0].param as usize].name;
                let rows = format!(
                    "{} rows from row {} and {} columns from column {}",
                    rect.rows, rect.row, rect.cols, rect.col
                );
                return Err(wrong(format!("parameter '{name}' holds {rows} on {times} ranks instead of {copies}")));
            }
            rects.push(same[0].rect);
        }
        let whole = Matrix { rows: tensor.elements / width, cols: width };
        exact(&mut rects, whole).map_err(|flaw| wrong(flaw.to_string()))?;
        covered[run[0].source as usize] = true;
    }
    fates(plan, &covered, &scales)?;
    Ok(plan.sources.len() as u64)
}

fn placements(plan: &Plan, scales: &mut [bool]) -> Result<Vec<Placed>> {
    let mut placed: Vec<Placed> = Vec::new();
    for (index, param) in plan.params.iter().enumerate() {
        let mut rank = 0;
        while rank < param.slices.len() {
            let slice = &param.slices[rank];
            let alike = param.slices[rank..].iter().take_while(|s| s.pieces == slice.pieces).count();
            let parts = holdings(plan, param, rank as u64).unwrap_or_default();
            for piece in pieces(plan, param, slice).unwrap_or_default().iter() {
                let Origin::Source(region) = piece.origin else { continue };
                if region.source as usize >= plan.sources.len() || region.width == 0 {
                    return Err(fault(param, rank, format!("a piece of source {}", region.source)).audit());
                }
                if let Some((scale, element)) = region.op.scale {
                    match plan.sources.get(scale as usize) {
                        Some(s) if element < s.elements && s.ty == GgmlType::F32 => scales[scale as usize] = true,
                        Some(_) | None => {
                            return Err(fault(param, rank, "its scale is no F32 value of the file").audit());
                        }
                    }
                }
                let part = parts.partition_point(|h| h.start <= piece.row).checked_sub(1).and_then(|i| parts.get(i));
                let copies = part.map_or(0, |h| h.copies());
                let (rows, cols) = if region.transpose { (piece.cols, piece.rows) } else { (piece.rows, piece.cols) };
                placed.push(Placed {
                    param: index as u32,
                    source: region.source,
                    set: param.set,
                    stage: param.stage,
                    width: region.width,
                    rect: Rect { row: region.row, step: region.step, rows, col: region.col, cols },
                    times: alike as u64,
                    copies,
                });
            }
            rank += alike;
        }
    }
    Ok(placed)
}

/// Every source is placed, scales another, is ignored by a rule, or belongs to weights that the layout leaves out.
fn fates(plan: &Plan, covered: &[bool], scales: &[bool]) -> Result<()> {
    let mut ignored = vec![false; plan.sources.len()];
    for i in &plan.model.ignored {
        match ignored.get_mut(i.source as usize) {
            Some(slot) => *slot = true,
            None => return Err(Fault::new(format!("source {} is ignored, but does not exist", i.source)).audit()),
        }
    }
    let mut left_out = vec![false; plan.sources.len()];
    for part in plan.left_out.iter().flat_map(|(w, _)| &plan.model.weights[*w as usize].recipe.parts) {
        left_out[part.source as usize] = true;
        if let Some((scale, _)) = part.op.scale {
            left_out[scale as usize] = true;
        }
    }
    for (i, source) in plan.sources.iter().enumerate() {
        if source.ty.tensor_bytes(&[source.elements]) != Some(source.bytes) {
            let found = format!("{} elements of {} in {} bytes", source.elements, source.ty, source.bytes);
            return Err(Fault::new(found).tensor(&source.name).audit());
        }
        let used = covered[i] || (source.elements == 0 && !ignored[i]);
        let fates = [used, scales[i], ignored[i]];
        let count = fates.iter().filter(|f| **f).count();
        if count != 1 && !(count == 0 && left_out[i]) {
            let found = format!("placed: {}, used as a scale: {}, ignored: {}", covered[i], scales[i], ignored[i]);
            return Err(Fault::new(found).tensor(&source.name).expected("exactly one of these").audit());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rect(row: u64, step: u64, rows: u64, col: u64, cols: u64) -> Rect {
        Rect { row, step, rows, col, cols }
    }

    fn covers(rects: &[Rect], rows: u64, cols: u64) -> bool {
        exact(&mut rects.to_vec(), Matrix { rows, cols }).is_ok()
    }

    #[test]
    fn rectangles_that_tile_a_matrix_are_accepted() {
        assert!(covers(&[rect(0, 1, 4, 0, 3), rect(0, 1, 4, 3, 5), rect(4, 1, 2, 0, 8)], 6, 8));
        assert!(covers(&[rect(0, 2, 3, 0, 8), rect(1, 2, 3, 0, 8)], 6, 8));
        assert!(covers(&[], 0, 8));
    }

    #[test]
    fn a_gap_an_overlap_and_an_overhang_are_each_refused() {
        assert!(!covers(&[rect(0, 1, 5, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, 1, 4, 0, 8), rect(3, 1, 3, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, 1, 4, 0, 5), rect(0, 1, 4, 4, 4), rect(4, 1, 2, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, 2, 3, 0, 8), rect(0, 2, 3, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, 1, 7, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, 1, 6, 1, 8)], 6, 8));
        assert!(!covers(&[rect(0, 0, 6, 0, 8)], 6, 8));
        assert!(!covers(&[rect(0, u64::MAX, 1, 0, 8)], 1, 8));
        // The same area, but one row twice and one not at all.
        assert!(!covers(&[rect(0, 2, 3, 0, 8), rect(1, 1, 3, 0, 8)], 6, 8));
    }
}
