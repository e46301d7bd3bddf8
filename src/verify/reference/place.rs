//! Where in the whole tensor a rank's share lies, from the cut and the two shapes alone.
//!
//! The planner has its own arithmetic for this (it goes from heads and ranks to shapes); this one knows only what the
//! manifest says.

use std::ops::Range;

use crate::mapping::{CutKind, Matrix};

/// A rectangle of the whole tensor seen as a matrix, and rows of zeros after it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub rows: Range<u64>,
    pub cols: Range<u64>,
    /// Columns of the whole.
    pub width: u64,
    /// Rows of zeros that the share has after the rectangle.
    pub padding: u64,
}

impl Place {
    /// The elements of the rectangle in row-major order, as runs of consecutive elements of the whole.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Place { rows, cols, width, .. } = self.clone();
        // Whole rows follow each other.
        let whole = cols == (0..width);
        let (count, step) = if whole { (1, rows.end - rows.start) } else { (rows.end - rows.start, 1) };
        (0..count).map(move |i| {
            let row = rows.start + i * step;
            row * width + cols.start..(row + step - 1) * width + cols.end
        })
    }
}

/// The place of what `rank` of `tp` holds of a tensor of shape `whole`, in shape `held`; `rank` is `None` for a file that
/// has the whole model. `whole` must not overflow.
pub(super) fn place(
    cut: &str,
    whole: &[u64],
    held: &[u64],
    tp: u64,
    rank: Option<u64>,
    vocab_pad: u64,
) -> Result<Place, String> {
    let Matrix { rows, cols } = Matrix::of(whole);
    let everything = Place { rows: 0..rows, cols: 0..cols, width: cols, padding: 0 };
    let no_share = || format!("{held:?} on one of {tp} ranks, which is no share of {whole:?} by cut '{cut}'");
    let equal = || if held == whole { Ok(everything.clone()) } else { Err(no_share()) };
    let Some(rank) = rank else { return equal() };
    let kinds = [CutKind::Column, CutKind::Row, CutKind::Vocab, CutKind::Replicated];
    let Some(kind) = kinds.into_iter().find(|kind| kind.name() == cut) else {
        return Err(format!("the cut '{cut}', which is not known here"));
    };
    let (Some(first), Some(last), false) = (whole.first(), whole.last(), held.len() != whole.len()) else {
        return equal();
    };
    let axis = match kind {
        CutKind::Column | CutKind::Vocab => 0,
        CutKind::Row => whole.len() - 1,
        CutKind::Replicated => return equal(),
    };
    if (0..whole.len()).any(|i| i != axis && whole[i] != held[i]) {
        return Err(no_share());
    }
    let each = held[axis];
    if kind == CutKind::Vocab {
        let padded = first.checked_next_multiple_of(vocab_pad);
        if padded.is_none() || each.checked_mul(tp) != padded {
            return Err(no_share());
        }
        let (begin, end) = ((rank * each).min(*first), ((rank + 1) * each).min(*first));
        let per = rows.checked_div(*first).unwrap_or(1);
        return Ok(Place { rows: begin * per..end * per, padding: (each - (end - begin)) * per, ..everything });
    }
    let start = if each.checked_mul(tp) == Some(whole[axis]) {
        rank * each
    } else {
        // Fewer units than ranks: neighbouring ranks hold the same one.
        let units = whole[axis].checked_div(each).filter(|units| units * each == whole[axis]);
        match units {
            Some(units) if units > 0 && units < tp && tp.is_multiple_of(units) => rank / (tp / units) * each,
            Some(_) | None => return Err(no_share()),
        }
    };
    if axis == 0 {
        let per = rows.checked_div(*first).unwrap_or(1);
        return Ok(Place { rows: start * per..(start + each) * per, ..everything });
    }
    debug_assert_eq!(*last, cols);
    Ok(Place { cols: start..start + each, ..everything })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(cut: &str, whole: &[u64], held: &[u64], tp: u64, rank: u64) -> Result<Place, String> {
        place(cut, whole, held, tp, Some(rank), 64)
    }

    fn rect(rows: Range<u64>, cols: Range<u64>, width: u64, padding: u64) -> Result<Place, String> {
        Ok(Place { rows, cols, width, padding })
    }

    #[test]
    fn each_cut_has_its_place() {
        assert_eq!(at("column", &[8, 3], &[4, 3], 2, 1), rect(4..8, 0..3, 3, 0));
        assert_eq!(at("column", &[8], &[4], 2, 1), rect(4..8, 0..1, 1, 0));
        assert_eq!(at("column", &[4, 3, 5], &[2, 3, 5], 2, 1), rect(6..12, 0..5, 5, 0));
        assert_eq!(at("row", &[8, 6], &[8, 2], 3, 2), rect(0..8, 4..6, 6, 0));
        assert_eq!(at("row", &[8], &[2], 4, 3), rect(6..8, 0..1, 1, 0));
        assert_eq!(at("replicated", &[8, 6], &[8, 6], 3, 2), rect(0..8, 0..6, 6, 0));
        assert_eq!(at("vocab", &[100, 2], &[16, 2], 8, 6), rect(96..100, 0..2, 2, 12));
        assert_eq!(at("vocab", &[100, 2], &[16, 2], 8, 7), rect(100..100, 0..2, 2, 16));
        assert_eq!(place("column", &[8, 3], &[8, 3], 1, None, 64), rect(0..8, 0..3, 3, 0));
    }

    #[test]
    fn repeated_heads_are_those_of_the_neighbour() {
        let rows = |rank| at("column", &[128, 32], &[64, 32], 4, rank).unwrap().rows;
        assert_eq!([rows(0), rows(1), rows(2), rows(3)], [0..64, 0..64, 64..128, 64..128]);
        assert_eq!(at("column", &[64, 32], &[64, 32], 4, 3), rect(0..64, 0..32, 32, 0));
    }

    #[test]
    fn what_is_no_share_has_no_place() {
        for (cut, whole, held, tp) in [
            ("column", &[8, 3][..], &[3, 3][..], 2),
            ("column", &[8, 3], &[4, 2], 2),
            ("column", &[8, 3], &[4, 3], 3),
            ("column", &[8, 3], &[0, 3], 2),
            ("column", &[8, 3], &[4], 2),
            ("row", &[8, 6], &[4, 6], 2),
            ("vocab", &[100, 2], &[50, 2], 2),
            ("vocab", &[u64::MAX, 1], &[5, 1], 2),
            ("replicated", &[8], &[4], 2),
            ("diagonal", &[8], &[4], 2),
        ] {
            assert!(at(cut, whole, held, tp, 0).is_err(), "{cut} {whole:?} {held:?}");
        }
    }

    #[test]
    fn runs_are_row_major() {
        let runs = |place: Result<Place, String>| place.unwrap().runs().collect::<Vec<_>>();
        assert_eq!(runs(at("column", &[8, 3], &[4, 3], 2, 1)), std::slice::from_ref(&(12..24)));
        assert_eq!(runs(at("row", &[3, 6], &[3, 2], 3, 2)), [4..6, 10..12, 16..18]);
        assert!(runs(at("vocab", &[100, 2], &[16, 2], 8, 7)).iter().all(|run| run.is_empty()));
    }
}
