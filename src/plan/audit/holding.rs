//! Which part of which weight each row of a slice must hold, by arithmetic of the audit's own.

use crate::mapping::{Content, CutKind, Matrix, Weight};
use crate::plan::{Param, Plan};

/// A weight's part in a slice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding<'a> {
    /// The weight.
    pub weight: &'a Weight,
    /// Among how many ranks it is divided.
    pub ways: u64,
    /// Which of them this is.
    pub rank: u64,
    /// First row in the slice.
    pub start: u64,
    /// Rows and columns of the weight.
    pub real: Matrix,
    /// Rows and columns of the slice, padding included.
    pub padded: Matrix,
}

impl Holding<'_> {
    /// How many ranks hold the same as this one.
    pub fn copies(&self) -> u64 {
        match (self.weight.cut.kind, self.weight.cut.units) {
            (CutKind::Replicated, _) => self.ways,
            (CutKind::Column, Some(units)) if self.repeats(units) => self.ways / units.max(1),
            (CutKind::Column | CutKind::Row | CutKind::Vocab, _) => 1,
        }
    }

    fn repeats(&self, units: u64) -> bool {
        self.weight.cut.repeat && units < self.ways
    }

    /// Where in the whole weight, seen as a matrix, an element of this part belongs.
    pub fn in_weight(&self, row: u64, col: u64, vocab: u64) -> (u64, u64) {
        let Matrix { rows, cols } = Matrix::of(&self.weight.shape);
        if self.ways == 1 {
            return (row, col);
        }
        match self.weight.cut.kind {
            CutKind::Replicated => (row, col),
            CutKind::Vocab => (self.rank * (rows.div_ceil(vocab) * vocab / self.ways) + row, col),
            CutKind::Column => match self.weight.cut.units {
                Some(units) if self.repeats(units) => (self.rank * units / self.ways * (rows / units) + row, col),
                Some(_) | None => (self.rank * rows / self.ways + row, col),
            },
            CutKind::Row if self.weight.shape.len() == 1 => (self.rank * rows / self.ways + row, col),
            CutKind::Row => (row, self.rank * cols / self.ways + col),
        }
    }
}

/// The parts that a rank's slice of a parameter must hold, from its first row to its last.
pub(super) fn holdings<'a>(plan: &'a Plan, param: &Param, rank: u64) -> Option<Vec<Holding<'a>>> {
    let weights = param.content.weights();
    let tp = u64::from(plan.tp);
    let stacked = matches!(param.content, Content::Stacked { .. });
    let by_expert = stacked && plan.expert_parallel;
    let total = weights.len() as u64;
    let (mine, ways, rank) =
        if by_expert { (rank * total / tp..(rank + 1) * total / tp, 1, 0) } else { (0..total, tp, rank) };
    let mut start = 0;
    let mut out = Vec::with_capacity((mine.end - mine.start) as usize);
    for index in mine {
        let weight = plan.model.weights.get(*weights.get(index as usize)? as usize)?;
        let (real, mut padded) = extent(plan, weight, ways, rank);
        if let Some(lanes) = plan.policy.moe_pad.filter(|_| stacked) {
            match weight.cut.kind {
                CutKind::Column => padded.rows = padded.rows.div_ceil(lanes) * lanes,
                CutKind::Row => padded.cols = padded.cols.div_ceil(lanes) * lanes,
                CutKind::Vocab | CutKind::Replicated => {}
            }
        }
        out.push(Holding { weight, ways, rank, start, real, padded });
        start += padded.rows;
    }
    Some(out)
}

/// What one of `ways` ranks holds of a weight, without and with vocabulary padding.
fn extent(plan: &Plan, weight: &Weight, ways: u64, rank: u64) -> (Matrix, Matrix) {
    let whole = Matrix::of(&weight.shape);
    let vocab = plan.profile.rules.vocab;
    match weight.cut.kind {
        CutKind::Vocab if ways > 1 || vocab.always => {
            let each = whole.rows.div_ceil(vocab.multiple) * vocab.multiple / ways;
            let rows = whole.rows.saturating_sub(rank * each).min(each);
            (Matrix { rows, ..whole }, Matrix { rows: each, ..whole })
        }
        CutKind::Column if ways > 1 => {
            let rows = match weight.cut.units {
                Some(units) if weight.cut.repeat && units < ways => whole.rows / units.max(1),
                Some(_) | None => whole.rows / ways,
            };
            (Matrix { rows, ..whole }, Matrix { rows, ..whole })
        }
        CutKind::Row if ways > 1 && weight.shape.len() == 1 => {
            let rows = whole.rows / ways;
            (Matrix { rows, ..whole }, Matrix { rows, ..whole })
        }
        CutKind::Row if ways > 1 => {
            let cols = whole.cols / ways;
            (Matrix { cols, ..whole }, Matrix { cols, ..whole })
        }
        CutKind::Column | CutKind::Row | CutKind::Vocab | CutKind::Replicated => (whole, whole),
    }
}
