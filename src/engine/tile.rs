//! Tiles: as much of a job as fits the cache, and how one is decoded.

use std::ops::Range;

use super::encode::Buffers;
use super::job::{Job, Output, Read};
use super::{Observer, Reads, Resident, Sink};
use crate::dequant::{Dequantizer, FloatType, Nonfinite, Simd, convert, convert_computed};
use crate::dtype::Dtype;
use crate::error::{Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::ValueOp;
use crate::plan::Plan;

/// Bytes that are handed to the sink at a time; it goes over them several times.
const STEP: usize = 512 << 10;

/// A rectangle of a job: rows and columns of its read (a run has one row).
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tile {
    pub rows: Range<u64>,
    pub cols: Range<u64>,
}

impl Tile {
    /// Number of elements that are decoded for it.
    pub fn elements(&self) -> u64 {
        (self.rows.end - self.rows.start) * (self.cols.end - self.cols.start)
    }
}

/// Splits a job into tiles of about `target` elements, between blocks of `block` elements. Elements of the output have
/// `width` bytes; with a width of 0, tiles are not larger than `target` for the sake of hashing.
pub(super) fn tiles(job: &Job, block: u64, target: u64, width: u64) -> Vec<Tile> {
    // The columns that some output takes.
    let taken = || {
        let first = job.outputs.iter().map(|o| o.col).min().unwrap_or(0);
        first..job.outputs.iter().map(|o| o.col + o.cols).max().unwrap_or(0)
    };
    let whole = match job.read {
        Read::Fill { elements, .. } => Tile { rows: 0..1, cols: 0..elements },
        // Columns count from the source's first element, so that boundaries fall between blocks.
        Read::Run { start, elements, .. } => Tile { rows: 0..1, cols: start..start + elements },
        Read::Rows { rows, .. } | Read::Transposed { rows, .. } => Tile { rows: 0..rows, cols: taken() },
    };
    split(job, &whole, block, target, width)
}

/// Splits a tile of a job into smaller ones, as [`tiles`] splits the job.
pub(super) fn split(job: &Job, tile: &Tile, block: u64, target: u64, width: u64) -> Vec<Tile> {
    let target = target.max(block);
    let chunks = |range: Range<u64>, step: u64| -> Vec<Range<u64>> {
        let mut out = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let next = (at / step + 1).saturating_mul(step).min(range.end);
            out.push(at..next);
            at = next;
        }
        out
    };
    let grid = |rows: Vec<Range<u64>>, cols: Vec<Range<u64>>| -> Vec<Tile> {
        rows.iter().flat_map(|r| cols.iter().map(|c| Tile { rows: r.clone(), cols: c.clone() })).collect()
    };
    let Tile { rows, cols } = tile.clone();
    match job.read {
        Read::Fill { .. } => grid(vec![rows], chunks(cols, target)),
        Read::Run { .. } => grid(vec![rows], chunks(cols, target / block * block)),
        Read::Rows { .. } => {
            let span = (cols.end - cols.start).max(1);
            if span <= target {
                let each = job.outputs.iter().map(|output| output.cols * width).min().unwrap_or(1);
                grid(chunks(rows, whole_hashes(target / span, each)), vec![cols])
            } else {
                grid(rows.map(|r| r..r + 1).collect(), chunks(cols, target / block * block))
            }
        }
        Read::Transposed { .. } => {
            let count = rows.end - rows.start;
            let wide = (target / count.max(1) / block).max(1) * block;
            let tall = (target / wide).max(1);
            grid(chunks(rows, tall.max(count.min(4 * tall))), chunks(cols, wide))
        }
    }
}

/// About so many rows, but as many as make outputs of `bytes` per row end where BLAKE3 works on 16 chunks at once, if that
/// is at most twice the number. Chunks that are hashed one by one take ten times as long.
fn whole_hashes(rows: u64, bytes: u64) -> u64 {
    const TOGETHER: u64 = 16 << 10;
    let unit = TOGETHER >> bytes.trailing_zeros().min(TOGETHER.trailing_zeros());
    match rows / unit {
        0 if unit <= 2 * rows => unit,
        0 => rows,
        several => several * unit,
    }
}

impl Output {
    /// The columns of a tile that the output takes; none if the range's end is not beyond its start.
    pub(super) fn taken(&self, tile: &Tile) -> Range<u64> {
        self.col.max(tile.cols.start)..(self.col + self.cols).min(tile.cols.end)
    }
}

/// Buffers of one worker, reused from tile to tile.
#[derive(Default)]
pub(super) struct Scratch {
    decoded: Vec<u8>,
    pub(super) floats: Vec<f32>,
    out: Vec<u8>,
    pub(super) encode: Buffers,
    /// What is read from a source that is not mapped.
    pub(super) source: Vec<u8>,
    /// The scale that was read last: source, element and value.
    scale: Option<(u32, u64, f32)>,
}

/// Takes a parameter, the ranks, the source and what was found.
pub(super) type Accept<'a> = dyn Fn(u32, &[u32], Option<u32>, Nonfinite) -> Result<()> + Sync + 'a;

/// What tiles need to know.
pub(super) struct Context<'a> {
    pub plan: &'a Plan,
    pub set: &'a GgufSet,
    pub sink: &'a dyn Sink,
    pub observer: Option<&'a dyn Observer>,
    pub resident: Option<&'a dyn Resident>,
    pub reads: &'a Reads,
    pub simd: Simd,
    /// A decoder per source, none for types without one.
    pub decoders: &'a [Option<Dequantizer>],
    /// Counts the values of a tile that are not finite, for a parameter and the ranks that hold them, and refuses them
    /// where they are not allowed, before the sink sees any. The source is for the message.
    pub accept: &'a Accept<'a>,
}

impl Context<'_> {
    /// The same for source bytes that were fetched before, and are in the page cache: they are not noted again.
    pub fn again<'a>(&'a self, reads: &'a Reads) -> Context<'a> {
        Context { reads, observer: None, ..*self }
    }

    /// Decodes a tile and hands it to the sink. Gives the number of bytes written.
    pub fn execute(&self, job: &Job, tile: &Tile, scratch: &mut Scratch) -> Result<u64> {
        let dtype = self.plan.params[job.param as usize].dtype;
        match job.read {
            Read::Fill { value, .. } => self.fill(job, tile, value, dtype, scratch),
            Read::Run { source, op, .. } => {
                let found = self.decode(source, tile.cols.clone(), op, dtype, scratch, None)?;
                self.accept(job, tile, found)?;
                self.put_run(job, tile.cols.start - job_start(&job.read), dtype, &scratch.decoded)
            }
            Read::Rows { source, start, stride, op, .. } => {
                let found = self.decode_rows(source, start, stride, tile, op, dtype, scratch)?;
                self.accept(job, tile, found)?;
                let mut bytes = 0;
                for output in &job.outputs {
                    bytes += self.put_columns(output, tile, dtype, scratch)?;
                }
                Ok(bytes)
            }
            Read::Transposed { source, start, stride, op, .. } => {
                let found = self.decode_rows(source, start, stride, tile, op, dtype, scratch)?;
                self.accept(job, tile, found)?;
                let rows = (tile.rows.end - tile.rows.start) as usize;
                let cols = (tile.cols.end - tile.cols.start) as usize;
                let Scratch { decoded, out, .. } = scratch;
                match dtype.bytes() {
                    1 => transpose::<1>(decoded, rows, cols, out),
                    2 => transpose::<2>(decoded, rows, cols, out),
                    4 => transpose::<4>(decoded, rows, cols, out),
                    _ => transpose::<8>(decoded, rows, cols, out),
                }
                let mut bytes = 0;
                for output in &job.outputs {
                    bytes += self.put_transposed(output, tile, dtype, out)?;
                }
                Ok(bytes)
            }
        }
    }

    /// Counts what is not finite in a tile, output by output: a value may go to several, or to none.
    fn accept(&self, job: &Job, tile: &Tile, found: Nonfinite) -> Result<()> {
        if !found.any() {
            return Ok(());
        }
        for output in &job.outputs {
            let found = match job.read {
                Read::Fill { .. } | Read::Run { .. } => found,
                Read::Rows { source, start, stride, op, .. } | Read::Transposed { source, start, stride, op, .. } => {
                    self.count(output, tile, source, start, stride, op)?
                }
            };
            if found.any() {
                (self.accept)(output.param, &output.ranks, job.read.source(), found)?;
            }
        }
        Ok(())
    }

    /// Decodes an output's columns of a tile once more, only to count. Rare: sound files have nothing to count.
    fn count(
        &self,
        output: &Output,
        tile: &Tile,
        source: u32,
        start: u64,
        stride: u64,
        op: ValueOp,
    ) -> Result<Nonfinite> {
        let dtype = self.plan.params[output.param as usize].dtype;
        let taken = output.taken(tile);
        let mut found = Nonfinite::default();
        let mut scratch = Scratch::default();
        // These bytes were fetched before, and are in the page cache.
        let again = Context { reads: &Reads::default(), observer: None, ..*self };
        for row in tile.rows.clone().filter(|_| taken.start < taken.end) {
            let first = start + row * stride;
            found += again.decode(source, first + taken.start..first + taken.end, op, dtype, &mut scratch, None)?;
        }
        Ok(found)
    }

    fn fill(&self, job: &Job, tile: &Tile, value: f32, dtype: Dtype, scratch: &mut Scratch) -> Result<u64> {
        let n = (tile.cols.end - tile.cols.start) as usize;
        scratch.floats.clear();
        scratch.floats.resize(n, value);
        scratch.decoded.resize(n * dtype.bytes() as usize, 0);
        let found = match float_type(dtype) {
            Some(float) => convert(&scratch.floats, float, self.simd, &mut scratch.decoded),
            None => {
                // Only zero has the same bytes in every type.
                scratch.decoded.fill(0);
                Nonfinite::default()
            }
        };
        self.accept(job, tile, found)?;
        self.put_run(job, tile.cols.start, dtype, &scratch.decoded)
    }

    fn put_run(&self, job: &Job, first: u64, dtype: Dtype, bytes: &[u8]) -> Result<u64> {
        let mut written = 0;
        for output in &job.outputs {
            self.put_steps(output.param, &output.ranks, (output.start + first) * dtype.bytes(), bytes)?;
            written += bytes.len() as u64 * output.ranks.len() as u64;
        }
        Ok(written)
    }

    /// Hands on bytes that follow each other in the slice, in steps that stay in the sink's cache.
    pub(super) fn put_steps(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        let mut steps = bytes.chunks(STEP).zip((offset..).step_by(STEP));
        steps.try_for_each(|(step, at)| self.sink.put(param, ranks, at, step))
    }

    /// Decodes the tile's rows into `scratch.decoded`, one after the other.
    #[allow(clippy::too_many_arguments)]
    fn decode_rows(
        &self,
        source: u32,
        start: u64,
        stride: u64,
        tile: &Tile,
        op: ValueOp,
        dtype: Dtype,
        scratch: &mut Scratch,
    ) -> Result<Nonfinite> {
        let cols = tile.cols.end - tile.cols.start;
        if cols == stride {
            // Whole rows follow each other in the source: they are one run.
            let run = start + tile.rows.start * stride..start + tile.rows.end * stride;
            return self.decode(source, run, op, dtype, scratch, None);
        }
        let row_bytes = (cols * dtype.bytes()) as usize;
        let rows = (tile.rows.end - tile.rows.start) as usize;
        scratch.decoded.resize(rows * row_bytes, 0);
        let mut found = Nonfinite::default();
        for (i, row) in tile.rows.clone().enumerate() {
            let first = start + row * stride;
            let range = first + tile.cols.start..first + tile.cols.end;
            found += self.decode(source, range, op, dtype, scratch, Some(i * row_bytes..(i + 1) * row_bytes))?;
        }
        Ok(found)
    }

    /// Decodes elements of a source into a range of `scratch.decoded`, or into all of it.
    fn decode(
        &self,
        source: u32,
        elements: Range<u64>,
        op: ValueOp,
        dtype: Dtype,
        scratch: &mut Scratch,
        at: Option<Range<usize>>,
    ) -> Result<Nonfinite> {
        let tensor = &self.set.tensors()[source as usize];
        let ty = tensor.ty;
        let n = (elements.end - elements.start) as usize;
        let at = match at {
            Some(at) => at,
            None => {
                scratch.decoded.resize(n * dtype.bytes() as usize, 0);
                0..scratch.decoded.len()
            }
        };
        // The blocks that cover the elements.
        let (block, block_bytes) = unit(ty, dtype);
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let range = blocks.start * block_bytes..blocks.end * block_bytes;
        self.reads.record(source, range.clone());
        let scale = op.scale.map(|(source, element)| self.scale(source, element, scratch)).transpose()?;
        let bytes = self.fetch(source, range, &mut scratch.source)?;
        let skipped = (elements.start - blocks.start * block) as usize;
        let Some(float) = float_type(dtype) else {
            // Handed on as it is: blocks of one element.
            scratch.decoded[at].copy_from_slice(bytes);
            return Ok(Nonfinite::default());
        };
        let decoder = self.decoders[source as usize]
            .ok_or_else(|| Fault::new(format!("type {ty} has no decoder")).tensor(&tensor.name).audit())?;
        let whole = skipped == 0 && n as u64 == (blocks.end - blocks.start) * block;
        if whole && op.is_identity() {
            return Ok(decoder.decode(bytes, float, &mut scratch.decoded[at]));
        }
        scratch.floats.resize(((blocks.end - blocks.start) * block) as usize, 0.0);
        decoder.to_f32(bytes, &mut scratch.floats);
        let values = &mut scratch.floats[skipped..skipped + n];
        if let Some(scale) = scale {
            values.iter_mut().for_each(|v| *v *= scale);
        }
        if let Some(constant) = op.add {
            values.iter_mut().for_each(|v| *v += constant);
        }
        let out = &mut scratch.decoded[at];
        Ok(if decoder.computes() || !op.is_identity() {
            convert_computed(values, float, self.simd, out)
        } else {
            convert(values, float, self.simd, out)
        })
    }

    /// A byte range of a source, which the observer sees first.
    pub(super) fn fetch<'b>(&'b self, source: u32, range: Range<u64>, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        if let Some(observer) = self.observer {
            let tensor = &self.set.tensors()[source as usize];
            observer.before(tensor.part, tensor.offset + range.start..tensor.offset + range.end, buffer)?;
        }
        self.set.read(source as usize, range, buffer)
    }

    /// An element of a source of scales. Rows of a tensor share one, so the last is kept.
    pub(super) fn scale(&self, source: u32, element: u64, scratch: &mut Scratch) -> Result<f32> {
        if let Some((s, e, value)) = scratch.scale
            && (s, e) == (source, element)
        {
            return Ok(value);
        }
        let bytes = self.fetch(source, element * 4..element * 4 + 4, &mut scratch.source)?;
        let value = bytes.try_into().map(f32::from_le_bytes).map_err(|_| {
            Fault::new(format!("{} bytes for a scale", bytes.len()))
                .tensor(&self.set.tensors()[source as usize].name)
                .audit()
        })?;
        scratch.scale = Some((source, element, value));
        Ok(value)
    }

    /// Hands an output the columns that it takes of the decoded rows.
    fn put_columns(&self, output: &Output, tile: &Tile, dtype: Dtype, scratch: &mut Scratch) -> Result<u64> {
        let width = dtype.bytes();
        let taken = output.taken(tile);
        if taken.start >= taken.end {
            return Ok(0);
        }
        let cols = taken.end - taken.start;
        let (row_bytes, decoded_row) = ((cols * width) as usize, ((tile.cols.end - tile.cols.start) * width) as usize);
        let rows = (tile.rows.end - tile.rows.start) as usize;
        let skip = ((taken.start - tile.cols.start) * width) as usize;
        let first = output.start + tile.rows.start * output.stride + (taken.start - output.col);
        let gather = |decoded: &[u8], out: &mut Vec<u8>| {
            out.clear();
            for row in decoded.chunks_exact(decoded_row).take(rows) {
                out.extend_from_slice(&row[skip..skip + row_bytes]);
            }
        };
        gather(&scratch.decoded, &mut scratch.out);
        self.put_rows(output, first, cols, width, &scratch.out)
    }

    /// Hands an output the rows that it takes of the transposed tile.
    fn put_transposed(&self, output: &Output, tile: &Tile, dtype: Dtype, turned: &[u8]) -> Result<u64> {
        let taken = output.taken(tile);
        if taken.start >= taken.end {
            return Ok(0);
        }
        let rows = tile.rows.end - tile.rows.start;
        let at = |col: u64| ((col - tile.cols.start) * rows * dtype.bytes()) as usize;
        let first = output.start + (taken.start - output.col) * output.stride + tile.rows.start;
        self.put_rows(output, first, rows, dtype.bytes(), &turned[at(taken.start)..at(taken.end)])
    }

    /// Hands on rows of `cols` elements that lie `output.stride` apart in the slice, as one run where they touch.
    pub(super) fn put_rows(&self, output: &Output, first: u64, cols: u64, width: u64, bytes: &[u8]) -> Result<u64> {
        if cols == output.stride {
            self.put_steps(output.param, &output.ranks, first * width, bytes)?;
        } else {
            for (i, row) in bytes.chunks_exact((cols * width) as usize).enumerate() {
                self.put_steps(output.param, &output.ranks, (first + i as u64 * output.stride) * width, row)?;
            }
        }
        Ok(bytes.len() as u64 * output.ranks.len() as u64)
    }
}

pub(super) fn job_start(read: &Read) -> u64 {
    match read {
        Read::Fill { .. } => 0,
        Read::Run { start, .. } | Read::Rows { start, .. } | Read::Transposed { start, .. } => *start,
    }
}

/// Transposes a matrix of elements of `N` bytes, in squares that stay in the first-level cache.
fn transpose<const N: usize>(from: &[u8], rows: usize, cols: usize, to: &mut Vec<u8>) {
    const SIDE: usize = 32;
    to.resize(rows * cols * N, 0);
    let (from, _) = from.as_chunks::<N>();
    let (to, _) = to.as_chunks_mut::<N>();
    for row in (0..rows).step_by(SIDE) {
        for col in (0..cols).step_by(SIDE) {
            for i in row..rows.min(row + SIDE) {
                for j in col..cols.min(col + SIDE) {
                    to[j * rows + i] = from[i * cols + j];
                }
            }
        }
    }
}

/// Elements and bytes of a block of a source, as a parameter of this dtype is made of it. Kept blocks are U8, and bytes that
/// stay what they are.
pub(super) fn unit(ty: GgmlType, dtype: Dtype) -> (u64, u64) {
    if dtype == Dtype::U8 { (1, 1) } else { (ty.block(), ty.block_bytes()) }
}

/// As [`unit`], of the source that a job reads; constants are one element without any bytes.
pub(super) fn unit_of(plan: &Plan, job: &Job) -> (u64, u64) {
    let dtype = plan.params[job.param as usize].dtype;
    job.read.source().map_or((1, 0), |source| unit(plan.sources[source as usize].ty, dtype))
}

/// The float type behind an output dtype; none for elements that are handed on as they are.
pub(super) fn float_type(dtype: Dtype) -> Option<FloatType> {
    use Dtype::*;
    match dtype {
        F32 => Some(FloatType::F32),
        BF16 => Some(FloatType::BF16),
        F16 => Some(FloatType::F16),
        Bool | U8 | I8 | F8E5M2 | F8E4M3 | F8E8M0 | F8E4M3Fnuz | F8E5M2Fnuz | I16 | U16 | I32 | U32 | C64 | F64
        | I64 | U64 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(read: Read, outputs: Vec<Output>) -> Job {
        Job { param: 0, read, outputs }
    }

    fn output(col: u64, cols: u64) -> Output {
        Output { param: 0, ranks: vec![0], col, cols, start: 0, stride: cols }
    }

    /// Every tile's rectangle is disjoint from the others and together they are the job.
    fn cover(job: &Job, rows: u64, cols: Range<u64>, block: u64, target: u64) {
        let tiles = tiles(job, block, target, 2);
        let area: u64 = tiles.iter().map(|t| (t.rows.end - t.rows.start) * (t.cols.end - t.cols.start)).sum();
        assert_eq!(area, rows * (cols.end - cols.start));
        for (i, a) in tiles.iter().enumerate() {
            assert!(a.rows.end <= rows && a.cols.start >= cols.start && a.cols.end <= cols.end);
            for b in &tiles[..i] {
                let apart = a.rows.end <= b.rows.start
                    || b.rows.end <= a.rows.start
                    || a.cols.end <= b.cols.start
                    || b.cols.end <= a.cols.start;
                assert!(apart, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn tiles_cover_a_job_once_and_break_between_blocks() {
        let op = ValueOp::default();
        for target in [1, 32, 100, 4096] {
            let run = job(Read::Run { source: 0, start: 96, elements: 1000, op }, vec![output(0, 1000)]);
            cover(&run, 1, 96..1096, 32, target);
            assert!(tiles(&run, 32, target, 2).iter().all(|t| t.cols.start % 32 == 0));
            let rows = Read::Rows { source: 0, start: 0, stride: 512, rows: 7, op };
            cover(&job(rows, vec![output(64, 64), output(128, 64)]), 7, 64..192, 32, target);
            let turned = Read::Transposed { source: 0, start: 0, stride: 192, rows: 50, op };
            cover(&job(turned, vec![output(0, 192)]), 50, 0..192, 32, target);
            cover(&job(turned, vec![output(96, 16), output(112, 48)]), 50, 96..160, 32, target);
        }
    }

    #[test]
    fn transposing_twice_gives_the_same_bytes() {
        let (rows, cols) = (37, 65);
        let bytes: Vec<u8> = (0..rows * cols * 2).map(|i| (i * 31 % 251) as u8).collect();
        let (mut once, mut twice) = (Vec::new(), Vec::new());
        transpose::<2>(&bytes, rows, cols, &mut once);
        assert_eq!(once[2..4], bytes[cols * 2..cols * 2 + 2]);
        transpose::<2>(&once, cols, rows, &mut twice);
        assert_eq!(twice, bytes);
    }
}
