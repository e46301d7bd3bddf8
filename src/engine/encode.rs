//! Encoded parameters: bands of whole blocks, gathered as f32 from every piece that reaches into them, then encoded.
//!
//! ```text
//! pieces ─► f32, 128 rows × some columns ─► bytes of the weight, and a row of its scales ─► the sink
//! ```
//!
//! A block takes elements of several pieces where a weight is put together head by head, so these tiles follow the output
//! and not the source. Row-parallel ranks hold columns of the same rows: their slices are gathered side by side, so that a
//! source block on the border of two is read once.

use std::ops::Range;

use super::job::Wanted;
use super::tile::{Context, Scratch};
use crate::dequant::Nonfinite;
use crate::encode::fp8;
use crate::error::{Fault, Result};
use crate::mapping::ValueOp;
use crate::plan::{BLOCK, Origin, Piece, Plan};

/// Elements that a worker encodes before it hands the scales on: rows of scales are short, and go together.
const TOGETHER: u64 = 4 << 20;

/// Slices of an encoded parameter that are gathered together.
#[derive(Debug)]
pub(super) struct Encoding {
    /// The encoded parameter.
    param: u32,
    /// The parameter that holds its scales.
    scales: u32,
    /// What fills the slices, side by side.
    pieces: Vec<Piece>,
    /// How many matrices are stacked, and the rows of each.
    stack: u64,
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

/// Bands of one matrix, from the first row of the stack on, and columns of all slices.
#[derive(Debug)]
pub(super) struct Area {
    rows: Range<u64>,
    cols: Range<u64>,
}

/// The encodings of a parameter for the wanted slices.
pub(super) fn encodings(plan: &Plan, index: u32, scales: u32, wanted: &Wanted) -> Vec<Encoding> {
    let (param, held) = (&plan.params[index as usize], &plan.params[scales as usize]);
    let mut groups: Vec<(Range<u32>, Encoding)> = Vec::new();
    for (rank, (slice, scale)) in param.slices.iter().zip(&held.slices).enumerate() {
        let (makes, makes_scales) = (wanted.holds(rank, slice), wanted.holds(rank, scale));
        let ([lead @ .., rows, cols], false) = (slice.shape.axes(), slice.pieces.is_empty()) else { continue };
        if !makes && !makes_scales {
            continue;
        }
        if groups.last().is_none_or(|(pieces, _)| *pieces != slice.pieces) {
            let target = Target { weights: Vec::new(), scales: Vec::new(), cols: 0..*cols };
            let encoding = Encoding {
                param: index,
                scales,
                pieces: plan.pieces_of(slice).to_vec(),
                stack: lead.iter().product(),
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
            let moved = crate::plan::Region { col: a_region.col + a.cols, ..a_region };
            whole && (a.row, a.rows) == (b.row, b.rows) && !a_region.transpose && moved == b_region
        };
        (self.stack, self.rows, self.pieces.len()) == (next.stack, next.rows, next.pieces.len())
            && self.pieces.iter().zip(&next.pieces).all(follows)
    }

    fn join(&mut self, next: Encoding) {
        let (first, added) = (self.width(), next.width());
        self.pieces.iter_mut().for_each(|piece| piece.cols += added);
        let moved = |t: Target| Target { cols: t.cols.start + first..t.cols.end + first, ..t };
        self.targets.extend(next.targets.into_iter().map(moved));
    }

    /// Areas of which a band has at most about `most` elements, between blocks of the sources.
    pub fn areas(&self, plan: &Plan, most: u64) -> Vec<Area> {
        let regions = || {
            self.pieces.iter().filter_map(|p| match p.origin {
                Origin::Source(region) => Some(region),
                Origin::Fill(_) => None,
            })
        };
        let block = |source: u32| plan.sources[source as usize].ty.block();
        let unit = regions().map(|region| block(region.source)).fold(BLOCK, u64::max);
        let before = regions().next().map_or(0, |region| if region.transpose { region.row } else { region.col }) % unit;
        let width = self.width();
        let wide = if width * BLOCK <= most { width.max(1) } else { (most / BLOCK / unit).max(1) * unit };
        let tall = (TOGETHER / (wide * BLOCK)).max(1) * BLOCK;
        let mut areas = Vec::new();
        for first in (0..self.stack).map(|element| element * self.rows) {
            for top in (0..self.rows).step_by(tall as usize) {
                let rows = first + top..first + (top + tall).min(self.rows);
                let mut col = 0;
                while col < width {
                    let end =
                        if wide >= width { width } else { ((before + col) / wide * wide + wide - before).min(width) };
                    areas.push(Area { rows: rows.clone(), cols: col..end });
                    col = end;
                }
            }
        }
        areas
    }

    /// Source bytes that an area takes, about.
    pub fn reads(&self, plan: &Plan, area: &Area) -> u64 {
        let first = self.pieces.iter().find_map(|p| match p.origin {
            Origin::Source(region) => Some(plan.sources[region.source as usize].ty),
            Origin::Fill(_) => None,
        });
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
    scales: Vec<Vec<f32>>,
    /// A run of a source whose rows are columns of the output.
    run: Vec<f32>,
}

impl Context<'_> {
    /// Encodes an area and hands it to the sink. Gives the number of bytes written.
    pub fn encode(&self, encoding: &Encoding, area: &Area, scratch: &mut Scratch) -> Result<u64> {
        let mut buffers = std::mem::take(&mut scratch.encode);
        let written = self.encode_with(encoding, area, scratch, &mut buffers);
        scratch.encode = buffers;
        written
    }

    fn encode_with(
        &self,
        encoding: &Encoding,
        area: &Area,
        scratch: &mut Scratch,
        buffers: &mut Buffers,
    ) -> Result<u64> {
        let Buffers { values, part, bytes, scales, run } = buffers;
        let width = (area.cols.end - area.cols.start) as usize;
        scales.resize_with(encoding.targets.len().max(scales.len()), Vec::new);
        scales.iter_mut().for_each(Vec::clear);
        let mut written = 0;
        for top in area.rows.clone().step_by(BLOCK as usize) {
            let rows = top..(top + BLOCK).min(area.rows.end);
            let height = (rows.end - rows.start) as usize;
            values.resize(height * width, 0.0);
            self.gather(&encoding.pieces, &rows, &area.cols, values, run, scratch)?;
            for (target, scales) in encoding.targets.iter().zip(scales.iter_mut()) {
                let cols = target.cols.start.max(area.cols.start)..target.cols.end.min(area.cols.end);
                if cols.start >= cols.end {
                    continue;
                }
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
                bytes.resize(band.len(), 0);
                let known = scales.len();
                scales.resize(known + taken.div_ceil(BLOCK as usize), 0.0);
                fp8::band_on(self.simd, band, height, taken, bytes, &mut scales[known..]);
                if !target.weights.is_empty() {
                    let found = fp8::deviation_on(self.simd, band, height, taken, bytes, &scales[known..]);
                    self.sink.deviate(encoding.param, &target.weights, &found);
                    written += self.put_band(encoding.param, target, rows.start, &cols, bytes)?;
                }
            }
        }
        for (target, scales) in encoding.targets.iter().zip(scales.iter()) {
            if !target.scales.is_empty() && !scales.is_empty() {
                written += self.put_scales(encoding, target, area, scales, bytes)?;
            }
        }
        Ok(written)
    }

    /// Counts what is not finite in a band of a slice.
    fn accept_band(&self, encoding: &Encoding, target: &Target, rows: &Range<u64>, band: &[f32]) -> Result<()> {
        let largest = band.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7FFF_FFFF));
        if largest < f32::INFINITY.to_bits() || target.weights.is_empty() {
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
    fn put_band(&self, param: u32, target: &Target, top: u64, cols: &Range<u64>, bytes: &[u8]) -> Result<u64> {
        let width = target.cols.end - target.cols.start;
        let (first, taken) = (top * width + cols.start - target.cols.start, cols.end - cols.start);
        if taken == width {
            self.put_steps(param, &target.weights, first, bytes)?;
        } else {
            for (row, bytes) in bytes.chunks_exact(taken as usize).enumerate() {
                self.sink.put(param, &target.weights, first + row as u64 * width, bytes)?;
            }
        }
        Ok(bytes.len() as u64 * target.weights.len() as u64)
    }

    /// Hands on the scales of an area's bands.
    fn put_scales(
        &self,
        encoding: &Encoding,
        target: &Target,
        area: &Area,
        scales: &[f32],
        bytes: &mut Vec<u8>,
    ) -> Result<u64> {
        bytes.clear();
        scales.iter().for_each(|scale| bytes.extend_from_slice(&scale.to_le_bytes()));
        let blocks = |elements: u64| elements.div_ceil(BLOCK);
        let (element, row) = (area.rows.start / encoding.rows, area.rows.start % encoding.rows);
        let width = blocks(target.cols.end - target.cols.start);
        let col = area.cols.start.saturating_sub(target.cols.start) / BLOCK;
        let bands = blocks(area.rows.end - area.rows.start);
        let taken = scales.len() as u64 / bands;
        let first = (element * blocks(encoding.rows) + row / BLOCK) * width + col;
        if taken == width {
            self.put_steps(encoding.scales, &target.scales, first * 4, bytes)?;
        } else {
            for (band, bytes) in bytes.chunks_exact(taken as usize * 4).enumerate() {
                self.sink.put(encoding.scales, &target.scales, (first + band as u64 * width) * 4, bytes)?;
            }
        }
        Ok(bytes.len() as u64 * target.scales.len() as u64)
    }

    /// Decodes a rectangle of what pieces make up.
    fn gather(
        &self,
        pieces: &[Piece],
        rows: &Range<u64>,
        cols: &Range<u64>,
        values: &mut [f32],
        run: &mut Vec<f32>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let width = (cols.end - cols.start) as usize;
        for piece in pieces {
            let (top, bottom) = (piece.row.max(rows.start), (piece.row + piece.rows).min(rows.end));
            let (left, right) = (piece.col.max(cols.start), (piece.col + piece.cols).min(cols.end));
            if top >= bottom || left >= right {
                continue;
            }
            let taken = (right - left) as usize;
            let at = |row: u64, col: u64| (row - rows.start) as usize * width + (col - cols.start) as usize;
            match piece.origin {
                Origin::Fill(value) => {
                    (top..bottom).for_each(|row| values[at(row, left)..][..taken].fill(value));
                }
                Origin::Source(region) if region.transpose => {
                    let tall = bottom - top;
                    run.resize(tall as usize, 0.0);
                    for col in left..right {
                        let first = region.element(top - piece.row, col - piece.col);
                        self.floats(region.source, first..first + tall, region.op, run, scratch)?;
                        for (row, value) in (top..bottom).zip(run.iter()) {
                            values[at(row, col)] = *value;
                        }
                    }
                }
                // Whole rows follow each other in the source as they do here.
                Origin::Source(region) if region.step == 1 && taken == width && taken as u64 == region.width => {
                    let first = region.element(top - piece.row, 0);
                    let count = (bottom - top) * region.width;
                    let out = &mut values[at(top, left)..][..count as usize];
                    self.floats(region.source, first..first + count, region.op, out, scratch)?;
                }
                Origin::Source(region) => {
                    for row in top..bottom {
                        let first = region.element(row - piece.row, left - piece.col);
                        let out = &mut values[at(row, left)..][..taken];
                        self.floats(region.source, first..first + taken as u64, region.op, out, scratch)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Decodes elements of a source to f32.
    fn floats(
        &self,
        source: u32,
        elements: Range<u64>,
        op: ValueOp,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let tensor = &self.set.tensors()[source as usize];
        let (block, block_bytes) = (tensor.ty.block(), tensor.ty.block_bytes());
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let range = blocks.start * block_bytes..blocks.end * block_bytes;
        self.reads.record(source, range.clone());
        let scale = op.scale.map(|(source, element)| self.scale(source, element, scratch)).transpose()?;
        let decoder = self.decoders[source as usize]
            .ok_or_else(|| Fault::new(format!("type {} has no decoder", tensor.ty)).tensor(&tensor.name).audit())?;
        let bytes = self.fetch(source, range, &mut scratch.source)?;
        let (skipped, decoded) = (elements.start - blocks.start * block, (blocks.end - blocks.start) * block);
        if decoded == out.len() as u64 {
            decoder.to_f32(bytes, out);
        } else {
            scratch.floats.resize(decoded as usize, 0.0);
            decoder.to_f32(bytes, &mut scratch.floats);
            out.copy_from_slice(&scratch.floats[skipped as usize..][..out.len()]);
        }
        if let Some(scale) = scale {
            out.iter_mut().for_each(|v| *v *= scale);
        }
        if let Some(constant) = op.add {
            out.iter_mut().for_each(|v| *v += constant);
        }
        Ok(())
    }
}
