//! Which part of a weight a rank holds.

use std::ops::Range;

use crate::mapping::{Cut, CutKind, Matrix, Vocab};

/// A rank's part of a weight seen as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Share {
    /// Rows of the weight.
    pub rows: Range<u64>,
    /// Columns of the weight.
    pub cols: Range<u64>,
    /// Rows of zeros after them.
    pub padding: u64,
}

/// Why a weight cannot be cut for a number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Indivisible {
    /// What was to be divided, and into how many units.
    pub what: String,
}

/// The part of a weight of `shape` that `rank` of `tp` holds.
pub(super) fn share(cut: &Cut, shape: &[u64], tp: u64, rank: u64, vocab: Vocab) -> Result<Share, Indivisible> {
    let Matrix { rows, cols } = Matrix::of(shape);
    let whole = Share { rows: 0..rows, cols: 0..cols, padding: 0 };
    if tp == 1 && !(vocab.always && cut.kind == CutKind::Vocab) {
        return Ok(whole);
    }
    match cut.kind {
        CutKind::Replicated => Ok(whole),
        CutKind::Column => Ok(Share { rows: between_units(cut, rows, shape[0], tp, rank)?, ..whole }),
        CutKind::Row if shape.len() == 1 => Ok(Share { rows: between_units(cut, rows, rows, tp, rank)?, ..whole }),
        CutKind::Row => Ok(Share { cols: between_units(cut, cols, cols, tp, rank)?, ..whole }),
        CutKind::Vocab => {
            let padded = rows.next_multiple_of(vocab.multiple);
            if padded % tp != 0 {
                let what = match padded == rows {
                    true => format!("{rows} vocabulary rows"),
                    false => format!("{rows} vocabulary rows, padded to {padded},"),
                };
                return Err(Indivisible { what });
            }
            let each = padded / tp;
            let held = (rank * each).min(rows)..((rank + 1) * each).min(rows);
            let padding = each - (held.end - held.start);
            Ok(Share { rows: held, padding, ..whole })
        }
    }
}

/// The range of an axis of `length` that a rank holds: whole units, as many for each rank, or the same unit for
/// neighbouring ranks.
fn between_units(cut: &Cut, length: u64, finest: u64, tp: u64, rank: u64) -> Result<Range<u64>, Indivisible> {
    let units = cut.units.unwrap_or(finest);
    let what = || match cut.units {
        Some(_) => format!("{units} heads"),
        None => format!("an axis of {units}"),
    };
    if units == 0 || !length.is_multiple_of(units) {
        return Err(Indivisible { what: format!("an axis of {length}, which is not {} whole units,", units) });
    }
    let unit = length / units;
    if units.is_multiple_of(tp) {
        let each = unit * (units / tp);
        Ok(rank * each..(rank + 1) * each)
    } else if cut.repeat && units < tp && tp.is_multiple_of(units) {
        let which = rank / (tp / units);
        Ok(which * unit..(which + 1) * unit)
    } else {
        Err(Indivisible { what: what() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAD: Vocab = Vocab { multiple: 64, always: false };

    fn cut(kind: CutKind, units: Option<u64>, repeat: bool) -> Cut {
        Cut { kind, units, repeat }
    }

    #[test]
    fn key_and_value_heads_are_repeated_when_ranks_outnumber_them() {
        let kv = cut(CutKind::Column, Some(2), true);
        let rows = |rank| share(&kv, &[128, 32], 4, rank, PAD).unwrap().rows;
        assert_eq!([rows(0), rows(1), rows(2), rows(3)], [0..64, 0..64, 64..128, 64..128]);
        assert!(share(&cut(CutKind::Column, Some(2), false), &[128, 32], 4, 0, PAD).is_err());
        assert!(share(&cut(CutKind::Column, Some(3), true), &[96, 32], 4, 0, PAD).is_err());
    }

    #[test]
    fn the_last_ranks_of_a_short_vocabulary_hold_padding() {
        let vocab = cut(CutKind::Vocab, None, false);
        let of = |rank| share(&vocab, &[100, 8], 8, rank, PAD).unwrap();
        assert_eq!((of(5).rows, of(5).padding), (80..96, 0));
        assert_eq!((of(6).rows, of(6).padding), (96..100, 12));
        assert_eq!((of(7).rows, of(7).padding), (100..100, 16));
        assert_eq!(share(&vocab, &[100, 8], 1, 0, PAD).unwrap().rows, 0..100);
        assert!(share(&vocab, &[100, 8], 3, 0, PAD).is_err());
        let always = Vocab { always: true, ..PAD };
        assert_eq!(share(&vocab, &[100, 8], 1, 0, always).unwrap().padding, 28);
    }

    #[test]
    fn a_row_cut_takes_columns_and_a_column_cut_takes_rows_of_axis_0() {
        let row = share(&cut(CutKind::Row, Some(4), false), &[10, 16], 2, 1, PAD).unwrap();
        assert_eq!((row.rows, row.cols), (0..10, 8..16));
        let stacked = share(&cut(CutKind::Column, None, false), &[4, 3, 16], 2, 1, PAD).unwrap();
        assert_eq!((stacked.rows, stacked.cols), (6..12, 0..16));
        assert!(share(&cut(CutKind::Column, Some(4), false), &[10, 16], 2, 1, PAD).is_err());
    }
}
