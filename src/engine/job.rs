//! Jobs: a parameter's pieces on all ranks, grouped by the region of the source that they read.

use std::collections::{BTreeSet, HashMap};

use crate::mapping::ValueOp;
use crate::plan::{Origin, Param, Plan, Region, Slice};

/// A region of a source, and where it goes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Job {
    /// Index of the first parameter that it is for, which names it in messages and gives the dtype.
    pub param: u32,
    /// What is read.
    pub read: Read,
    /// Where it goes.
    pub outputs: Vec<Output>,
}

/// What a job reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Read {
    /// Nothing: `elements` times a constant.
    Fill { value: f32, elements: u64 },
    /// A run of elements, for every output.
    Run { source: u32, start: u64, elements: u64, op: ValueOp },
    /// Rows of elements, `stride` apart, the first row's first element being `start`; outputs take columns of them.
    Rows { source: u32, start: u64, stride: u64, rows: u64, op: ValueOp },
    /// As `Rows`, but the columns that an output takes become rows.
    Transposed { source: u32, start: u64, stride: u64, rows: u64, op: ValueOp },
}

impl Read {
    /// The source that is read; none for constants.
    pub fn source(&self) -> Option<u32> {
        match *self {
            Read::Fill { .. } => None,
            Read::Run { source, .. } | Read::Rows { source, .. } | Read::Transposed { source, .. } => Some(source),
        }
    }

    /// What two reads of one region have in common; none for constants, which cost nothing to make again.
    fn key(&self) -> Option<Key> {
        let (shape, source, [start, stride, rows], op) = match *self {
            Read::Fill { .. } => return None,
            Read::Run { source, start, elements, op } => (0, source, [start, 0, elements], op),
            Read::Rows { source, start, stride, rows, op } => (1, source, [start, stride, rows], op),
            Read::Transposed { source, start, stride, rows, op } => (2, source, [start, stride, rows], op),
        };
        Some((shape, source, [start, stride, rows], op.scale, op.add.map(f32::to_bits)))
    }
}

type Key = (u8, u32, [u64; 3], Option<(u32, u64)>, Option<u32>);

/// One place that a job's elements go to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Output {
    /// Index of the parameter.
    pub param: u32,
    /// The ranks that hold this very slice.
    pub ranks: Vec<u32>,
    /// First column of a `Rows` or `Transposed` read that it takes; 0 otherwise.
    pub col: u64,
    /// Columns that it takes, or all elements of a run.
    pub cols: u64,
    /// First element in the slice.
    pub start: u64,
    /// Elements of the slice between one row and the next.
    pub stride: u64,
}

/// Which slices are made.
#[derive(Debug)]
pub(super) struct Wanted {
    /// By rank, whether its files are made.
    pub ranks: Vec<bool>,
    /// Files of them that are not.
    pub skipped: BTreeSet<u32>,
}

impl Wanted {
    /// Whether the slice that `rank` holds of some parameter is made.
    pub fn holds(&self, rank: usize, slice: &Slice) -> bool {
        self.ranks[rank] && !self.skipped.contains(&slice.file)
    }
}

/// The jobs of a parameter, and of those that join it, for the wanted slices, in the order of the source.
pub(super) fn jobs(plan: &Plan, index: u32, joining: &[u32], wanted: &Wanted) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut known: HashMap<Key, usize> = HashMap::new();
    for param in std::iter::once(&index).chain(joining) {
        add_jobs(plan, *param, wanted, &mut jobs, &mut known);
    }
    jobs
}

fn add_jobs(plan: &Plan, index: u32, wanted: &Wanted, jobs: &mut Vec<Job>, known: &mut HashMap<Key, usize>) {
    let param = &plan.params[index as usize];
    for (ranks, pieces) in distinct(param, wanted) {
        let slice = &param.slices[ranks[0] as usize];
        let width = crate::mapping::Matrix::of(slice.shape.axes()).cols;
        for piece in plan.pieces_of(slice).iter().filter(|_| pieces.start < pieces.end) {
            let start = piece.row * width + piece.col;
            let elements = piece.rows * piece.cols;
            let in_one_run = piece.rows == 1 || piece.cols == width;
            let (read, output) = match piece.origin {
                Origin::Fill(value) if in_one_run => (Read::Fill { value, elements }, (0, elements, start, elements)),
                Origin::Fill(value) => {
                    for row in 0..piece.rows {
                        let output = Output {
                            param: index,
                            ranks: ranks.clone(),
                            col: 0,
                            cols: piece.cols,
                            start: start + row * width,
                            stride: piece.cols,
                        };
                        jobs.push(Job {
                            param: index,
                            read: Read::Fill { value, elements: piece.cols },
                            outputs: vec![output],
                        });
                    }
                    continue;
                }
                Origin::Source(region) => source_read(&region, piece.rows, piece.cols, start, width, in_one_run),
            };
            let (col, cols, start, stride) = output;
            let output = Output { param: index, ranks: ranks.clone(), col, cols, start, stride };
            // Row-parallel ranks take columns of the same rows: one job decodes them for all.
            match read.key().map(|key| known.entry(key).or_insert(jobs.len())) {
                Some(at) if *at < jobs.len() => jobs[*at].outputs.push(output),
                Some(_) | None => jobs.push(Job { param: index, read, outputs: vec![output] }),
            }
        }
    }
}

/// A region as a read, and the output's (col, cols, start, stride).
fn source_read(
    region: &Region,
    rows: u64,
    cols: u64,
    start: u64,
    width: u64,
    in_one_run: bool,
) -> (Read, (u64, u64, u64, u64)) {
    let Region { source, op, .. } = *region;
    let first = region.row * region.width;
    let stride = region.step * region.width;
    if region.transpose {
        return (Read::Transposed { source, start: first, stride, rows: cols, op }, (region.col, rows, start, width));
    }
    // A single row of which other ranks may take other columns is left to `Rows`, where they share its blocks.
    if in_one_run && (stride == cols || (rows == 1 && cols == region.width)) {
        let elements = rows * cols;
        return (Read::Run { source, start: first + region.col, elements, op }, (0, elements, start, elements));
    }
    // A step over several rows is one longer row of which some columns are taken.
    let begin = first / stride * stride;
    let col = first - begin + region.col;
    (Read::Rows { source, start: begin, stride, rows, op }, (col, cols, start, width))
}

/// Ranks that hold the very same wanted slice, with its pieces.
fn distinct(param: &Param, wanted: &Wanted) -> Vec<(Vec<u32>, std::ops::Range<u32>)> {
    let mut groups: Vec<(Vec<u32>, std::ops::Range<u32>)> = Vec::new();
    for (rank, slice) in param.slices.iter().enumerate().filter(|(r, s)| wanted.holds(*r, s)) {
        match groups.last_mut() {
            Some((ranks, pieces)) if *pieces == slice.pieces && pieces.start < pieces.end => ranks.push(rank as u32),
            Some(_) | None => groups.push((vec![rank as u32], slice.pieces.clone())),
        }
    }
    groups
}
