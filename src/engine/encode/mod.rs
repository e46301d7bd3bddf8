//! Encoded parameters: bands of whole blocks, gathered as f32 from every piece that reaches into them, then encoded.
//!
//! ```text
//! pieces ─► f32, 128 rows × some columns ─► bytes of the weight, and scales of its blocks ─► the sink
//! ```
//!
//! Where blocks have one more scale in common, it is found by a pass of its own over whole weights, just before (`measure`).
//!
//! A block takes elements of several pieces where a weight is put together head by head, so these tiles follow the output
//! and not the source. Row-parallel ranks hold columns of the same rows: their slices are gathered side by side, so that a
//! source block on the border of two is read once.

mod device;
mod gather;
mod measure;

pub(super) use measure::{Chunk, Measured, chunks};

use std::ops::Range;

use super::job::Wanted;
use super::tile::{Context, Scratch};
use crate::dequant::Nonfinite;
use crate::dtype::Dtype;
use crate::encode::{Deviation, fp8, nvfp4};
use crate::error::Result;
use crate::plan::{Code, Origin, ParamCut, Piece, Plan, Region};

/// Rows of a band: those of the tallest blocks.
const BAND: u64 = fp8::BLOCK as u64;
/// The fewest rows of a band of flat blocks: rows that a source stores as columns are gathered a band at a time.
const FLAT_BAND: u64 = 16;
/// Elements that a worker encodes before it hands the scales on: rows of scales are short, and go together.
pub(super) const TOGETHER: u64 = 4 << 20;
/// Elements of a band that is encoded, for each byte of a tile. Its values take four bytes each, those of one of several
/// slices as many again, and what comes of them one.
pub(super) const ENCODED_TILES: u64 = 2;

/// Slices of an encoded parameter that are gathered together.
#[derive(Debug)]
pub(super) struct Encoding {
    /// The encoded parameter.
    param: u32,
    /// The parameter that holds the scales of its blocks.
    scales: u32,
    code: Code,
    /// What fills the slices, side by side.
    pieces: Vec<Piece>,
    /// How many matrices are stacked, the first one's place in the stack of all ranks, and the rows of each.
    stack: u64,
    first: u64,
    rows: u64,
    /// The slices, from the first column to the last.
    targets: Vec<Target>,
}

/// A slice that some ranks hold alike, or its scales, or both: after an interruption, one of them may be finished.
#[derive(Debug)]
struct Target {
    /// Ranks whose slice of the weight is made.
    weights: Vec<u32>,
    /// Ranks whose scales are made.
    scales: Vec<u32>,
    /// Its columns among those of all slices.
    cols: Range<u64>,
}

impl Target {
    /// The columns of an area that it takes, if any.
    fn taken(&self, area: &Area) -> Option<Range<u64>> {
        let taken = self.cols.start.max(area.cols.start)..self.cols.end.min(area.cols.end);
        (taken.start < taken.end).then_some(taken)
    }
}

/// Bands of one matrix, from the first row of the stack on, and columns of all slices.
#[derive(Debug)]
pub(super) struct Area {
    rows: Range<u64>,
    cols: Range<u64>,
    /// Rows that are gathered at a time.
    band: u64,
}

/// The encodings of a parameter in a code, whose blocks' scales are those of parameter `scales`, for the wanted slices.
pub(super) fn encodings(plan: &Plan, index: u32, code: Code, scales: u32, wanted: &Wanted) -> Vec<Encoding> {
    let (param, held) = (&plan.params[index as usize], &plan.params[scales as usize]);
    let mut groups: Vec<(Range<u32>, Encoding)> = Vec::new();
    for (rank, (slice, scale)) in param.slices.iter().zip(&held.slices).enumerate() {
        let (makes, makes_scales) = (wanted.holds(rank, slice), wanted.holds(rank, scale));
        let ([lead @ .., rows, bytes], false) = (slice.shape.axes(), slice.pieces.is_empty()) else { continue };
        let cols = bytes * code.per_byte();
        if !makes && !makes_scales {
            continue;
        }
        if groups.last().is_none_or(|(pieces, _)| *pieces != slice.pieces) {
            let target = Target { weights: Vec::new(), scales: Vec::new(), cols: 0..cols };
            let encoding = Encoding {
                param: index,
                scales,
                code,
                pieces: plan.pieces_of(slice).to_vec(),
                stack: lead.iter().product(),
                first: if param.cut == ParamCut::Expert { rank as u64 * lead.iter().product::<u64>() } else { 0 },
                rows: *rows,
                targets: vec![target],
            };
            groups.push((slice.pieces.clone(), encoding));
        }
        if let Some((_, Encoding { targets, .. })) = groups.last_mut() {
            targets.iter_mut().for_each(|target| {
                target.weights.extend(makes.then_some(rank as u32));
                target.scales.extend(makes_scales.then_some(rank as u32));
            });
        }
    }
    let mut joined: Vec<Encoding> = Vec::new();
    for (_, next) in groups {
        match joined.last_mut() {
            Some(last) if last.is_beside(&next) => last.join(next),
            Some(_) | None => joined.push(next),
        }
    }
    joined
}

impl Encoding {
    fn width(&self) -> u64 {
        self.targets.last().map_or(0, |target| target.cols.end)
    }

    /// Whether another's pieces take the columns that follow this one's, of the same rows of the same sources.
    fn is_beside(&self, next: &Encoding) -> bool {
        let (width, next_width) = (self.width(), next.width());
        let follows = |(a, b): (&Piece, &Piece)| {
            let whole = (a.col, a.cols, b.col, b.cols) == (0, width, 0, next_width);
            let Origin::Source(a_region) = a.origin else { return false };
            let Origin::Source(b_region) = b.origin else { return false };
            let moved = Region { col: a_region.col + a.cols, ..a_region };
            whole && (a.row, a.rows) == (b.row, b.rows) && !a_region.transpose && moved == b_region
        };
        (self.stack, self.first, self.rows, self.pieces.len()) == (next.stack, next.first, next.rows, next.pieces.len())
            && self.pieces.iter().zip(&next.pieces).all(follows)
    }

    fn join(&mut self, next: Encoding) {
        let (first, added) = (self.width(), next.width());
        self.pieces.iter_mut().for_each(|piece| piece.cols += added);
        let moved = |t: Target| Target { cols: t.cols.start + first..t.cols.end + first, ..t };
        self.targets.extend(next.targets.into_iter().map(moved));
    }

    /// Areas of about `together` elements, of which a band has at most about `most`, between blocks of the sources.
    pub fn areas(&self, plan: &Plan, most: u64, together: u64) -> Vec<Area> {
        let (width, unit, band) = (self.width(), self.unit(plan), self.band_rows(most));
        let wide = if width * band <= most { width.max(1) } else { (most / band / unit).max(1) * unit };
        let tall = (together / (wide * band)).max(1) * band;
        let mut areas = Vec::new();
        for first in (0..self.stack).map(|element| element * self.rows) {
            for top in (0..self.rows).step_by(tall as usize) {
                let rows = first + top..first + (top + tall).min(self.rows);
                areas.extend(self.split(plan, &Area { rows, cols: 0..width, band }, most));
            }
        }
        areas
    }

    /// Parts of an area of which a band has at most about `most` elements.
    fn split(&self, plan: &Plan, area: &Area, most: u64) -> Vec<Area> {
        let unit = self.unit(plan);
        let first = self.regions().next();
        let before = first.map_or(0, |region| if region.transpose { region.row } else { region.col }) % unit;
        let band = self.band_rows(most);
        let wide = (most / band / unit).max(1) * unit;
        let mut areas = Vec::new();
        let mut col = area.cols.start;
        while col < area.cols.end {
            let all = (area.cols.end - col) * band <= most;
            let end = if all { area.cols.end } else { (before + col) / wide * wide + wide - before };
            areas.push(Area { rows: area.rows.clone(), cols: col..end.min(area.cols.end), band });
            col = end;
        }
        areas
    }

    /// Rows of a band of at most about `most` elements: those of a block, or where blocks are flat, as many as make it as wide
    /// as the slices. Parts of rows are written and hashed in small pieces.
    fn band_rows(&self, most: u64) -> u64 {
        match self.code {
            Code::Fp8 => BAND,
            Code::Nvfp4 => (most / self.width().max(1)).clamp(FLAT_BAND, BAND),
        }
    }

    /// What sources give.
    fn regions(&self) -> impl Iterator<Item = Region> {
        self.pieces.iter().filter_map(|piece| match piece.origin {
            Origin::Source(region) => Some(region),
            Origin::Fill(_) => None,
        })
    }

    /// Columns between which areas are parted.
    fn unit(&self, plan: &Plan) -> u64 {
        self.regions().map(|region| plan.sources[region.source as usize].ty.block()).fold(BAND, u64::max)
    }

    /// The first of the weights that share a scale, of which an area holds a part, if there is such a scale.
    pub fn leader(&self, plan: &Plan, area: &Area) -> Option<u32> {
        let content = &plan.params[self.param as usize].content;
        let element = self.first + area.rows.start / self.rows;
        let weight = content.weights().get(element as usize * content.parts())?;
        plan.scale_leader(*weight)
    }

    /// Source bytes that an area takes, about.
    pub fn reads(&self, plan: &Plan, area: &Area) -> u64 {
        let first = self.regions().next().map(|region| plan.sources[region.source as usize].ty);
        let elements = (area.rows.end - area.rows.start) * (area.cols.end - area.cols.start);
        first.map_or(0, |ty| elements / ty.block() * ty.block_bytes())
    }
}

/// Buffers of a worker.
#[derive(Default)]
pub(super) struct Buffers {
    /// A band of all slices.
    values: Vec<f32>,
    /// A band of one of several slices.
    part: Vec<f32>,
    bytes: Vec<u8>,
    /// By target, the scales of an area's bands.
    scales: Vec<Vec<u8>>,
    /// Scales of a band, where they are f32.
    floats: Vec<f32>,
    /// A run of a source whose rows are columns of the output.
    run: Vec<f32>,
}

impl Context<'_> {
    /// Encodes an area and hands it to the sink. Gives the number of bytes written. `weight_scale` is that of the weight
    /// where its code has one.
    pub fn encode(&self, encoding: &Encoding, area: &Area, weight_scale: f32, scratch: &mut Scratch) -> Result<u64> {
        let mut buffers = std::mem::take(&mut scratch.encode);
        let written = self.encode_with(encoding, area, weight_scale, scratch, &mut buffers);
        scratch.encode = buffers;
        written
    }

    fn encode_with(
        &self,
        encoding: &Encoding,
        area: &Area,
        weight_scale: f32,
        scratch: &mut Scratch,
        buffers: &mut Buffers,
    ) -> Result<u64> {
        let Buffers { values, part, bytes, scales, floats, run } = buffers;
        let width = (area.cols.end - area.cols.start) as usize;
        scales.resize_with(encoding.targets.len().max(scales.len()), Vec::new);
        scales.iter_mut().for_each(Vec::clear);
        let mut written = 0;
        for top in area.rows.clone().step_by(area.band as usize) {
            let rows = top..(top + area.band).min(area.rows.end);
            let height = (rows.end - rows.start) as usize;
            values.resize(height * width, 0.0);
            self.gather(&encoding.pieces, &rows, &area.cols, values, run, scratch)?;
            for (target, scales) in encoding.targets.iter().zip(scales.iter_mut()) {
                let Some(cols) = target.taken(area) else { continue };
                let taken = (cols.end - cols.start) as usize;
                let band = if taken == width {
                    &*values
                } else {
                    let first = (cols.start - area.cols.start) as usize;
                    part.clear();
                    values.chunks_exact(width).for_each(|row| part.extend_from_slice(&row[first..first + taken]));
                    &*part
                };
                self.accept_band(encoding, target, &rows, band)?;
                let makes = !target.weights.is_empty();
                let measured = makes && self.sink.wants_deviations();
                let found = self.band(encoding.code, band, taken, weight_scale, bytes, scales, floats, measured);
                if let Some(found) = found {
                    self.sink.deviate(encoding.param, &target.weights, &found);
                }
                if makes {
                    written += self.put_band(encoding, target, rows.start, &cols, bytes)?;
                }
            }
        }
        for (target, scales) in encoding.targets.iter().zip(scales.iter()) {
            if !target.scales.is_empty() && !scales.is_empty() {
                written += self.put_scales(encoding, target, area, scales)?;
            }
        }
        Ok(written)
    }

    /// Encodes a band of rows of `width` values: the numbers into `bytes`, the scales behind those that are there. Gives the
    /// deviation, if it is to be `measured`.
    #[expect(clippy::too_many_arguments, reason = "what goes in, what comes out, and a buffer")]
    fn band(
        &self,
        code: Code,
        values: &[f32],
        width: usize,
        weight_scale: f32,
        bytes: &mut Vec<u8>,
        scales: &mut Vec<u8>,
        floats: &mut Vec<f32>,
        measured: bool,
    ) -> Option<Deviation> {
        let simd = self.simd;
        bytes.resize(values.len() / code.per_byte() as usize, 0);
        match code {
            Code::Fp8 => {
                let height = values.len() / width;
                floats.resize(width.div_ceil(fp8::BLOCK) * height.div_ceil(fp8::BLOCK), 0.0);
                fp8::band_on(simd, values, height, width, bytes, floats);
                floats.iter().for_each(|scale| scales.extend_from_slice(&scale.to_le_bytes()));
                measured.then(|| fp8::deviation_on(simd, values, height, width, bytes, floats))
            }
            Code::Nvfp4 => {
                let known = scales.len();
                scales.resize(known + values.len() / nvfp4::BLOCK, 0);
                let how = self.plan.nvfp4.block_scale();
                nvfp4::rows_on(simd, values, width, weight_scale, how, bytes, &mut scales[known..]);
                measured.then(|| nvfp4::deviation_on(simd, values, width, weight_scale, bytes, &scales[known..]))
            }
        }
    }

    /// Counts what is not finite in a band of a slice.
    fn accept_band(&self, encoding: &Encoding, target: &Target, rows: &Range<u64>, band: &[f32]) -> Result<()> {
        if target.weights.is_empty() || nvfp4::amax_on(self.simd, band).is_finite() {
            return Ok(());
        }
        let count = |test: fn(f32) -> bool| band.iter().filter(|v| test(**v)).count() as u64;
        let found = Nonfinite { nan: count(f32::is_nan), inf: count(f32::is_infinite), overflow: 0 };
        let source = encoding.pieces.iter().filter(|p| p.row < rows.end && rows.start < p.row + p.rows).find_map(|p| {
            match p.origin {
                Origin::Source(region) => Some(region.source),
                Origin::Fill(_) => None,
            }
        });
        (self.accept)(encoding.param, &target.weights, source, found)
    }

    /// Hands on rows of a slice, from row `top` of its stack on.
    fn put_band(&self, encoding: &Encoding, target: &Target, top: u64, cols: &Range<u64>, bytes: &[u8]) -> Result<u64> {
        let in_bytes = |elements: u64| elements / encoding.code.per_byte();
        let width = in_bytes(target.cols.end - target.cols.start);
        let (skipped, taken) = (in_bytes(cols.start - target.cols.start), in_bytes(cols.end - cols.start));
        self.put_lines(encoding.param, &target.weights, top * width + skipped, taken, width, bytes)
    }

    /// Hands on the scales of an area's bands.
    fn put_scales(&self, encoding: &Encoding, target: &Target, area: &Area, scales: &[u8]) -> Result<u64> {
        let (block, each) = (encoding.code.block(), encoding.code.scale_dtype().bytes());
        let bands = |rows: u64| rows.div_ceil(block.rows);
        let (element, row) = (area.rows.start / encoding.rows, area.rows.start % encoding.rows);
        let width = (target.cols.end - target.cols.start).div_ceil(block.cols) * each;
        let skipped = area.cols.start.saturating_sub(target.cols.start) / block.cols * each;
        let taken = scales.len() as u64 / bands(area.rows.end - area.rows.start);
        let first = (element * bands(encoding.rows) + row / block.rows) * width + skipped;
        self.put_lines(encoding.scales, &target.scales, first, taken, width, scales)
    }

    /// Hands on lines of `taken` bytes of a slice whose lines have `width`, the first at byte `first`.
    fn put_lines(&self, param: u32, ranks: &[u32], first: u64, taken: u64, width: u64, bytes: &[u8]) -> Result<u64> {
        if taken == width {
            self.put_steps(param, ranks, first, bytes)?;
        } else {
            for (row, bytes) in bytes.chunks_exact(taken as usize).enumerate() {
                self.sink.put(param, ranks, first + row as u64 * width, bytes)?;
            }
        }
        Ok(bytes.len() as u64 * ranks.len() as u64)
    }

    /// Hands on the scales of whole weights, of which parameter `index` has one for each. Nothing of a slice whose scales are
    /// not found, because the run has failed: its file could be complete with it, and be kept.
    pub fn put_weight_scales(&self, index: u32, measured: &Measured, wanted: &Wanted) -> Result<u64> {
        let param = &self.plan.params[index as usize];
        let (weights, each) = (param.content.weights(), Dtype::F32.bytes() as usize);
        let mut written = 0;
        let mut bytes = Vec::new();
        let mut ranks: Vec<u32> = Vec::new();
        // Ranks hold the scales of all weights, or each of as many others.
        for (rank, slice) in param.slices.iter().enumerate() {
            let count = slice.shape.elements() as usize;
            let by_expert = param.cut == ParamCut::Expert;
            ranks.extend(wanted.holds(rank, slice).then_some(rank as u32));
            if (!by_expert && rank + 1 < param.slices.len()) || ranks.is_empty() {
                continue;
            }
            bytes.clear();
            for weight in &weights[if by_expert { rank * count } else { 0 }..][..count] {
                let Some(scale) = measured.scale(self.plan.scale_leader(*weight)) else { return Ok(written) };
                bytes.extend_from_slice(&scale.to_le_bytes());
            }
            self.put_steps(index, &ranks, 0, &bytes)?;
            written += (count * each * ranks.len()) as u64;
            ranks.clear();
        }
        Ok(written)
    }
}
