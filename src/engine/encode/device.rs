//! Areas that a device decodes and encodes: their blocks go in, codes and scales come back.
//!
//! A lane's input holds the blocks of every piece that reaches into an area, one after the other, and the device puts what it
//! decodes of each where the piece says. What a device cannot decode, and areas with values that are not finite, are the
//! CPU's: it counts those by bands, and names their source.

use std::ops::Range;

use super::super::Reads;
use super::super::stage::{CPU_TILE, Region, Stage, fill};
use super::super::tile::{Context, Scratch};
use super::{Area, Chunk, ENCODED_TILES, Encoding, Measured, Target};
use crate::cuda::{self, Format, Lane, Part};
use crate::dequant::FloatType;
use crate::encode::{Deviation, fp8};
use crate::error::Result;
use crate::plan::{Code, Origin, Plan};

/// Bytes of a lane's tile for each element of an area: four of its value, one of its code, and scales.
const BYTES: u64 = 6;
/// What regions of an input begin at multiples of.
const ALIGN: usize = 256;
/// Elements of a band that the CPU encodes in place of a device.
const CPU_BAND: u64 = CPU_TILE * ENCODED_TILES;

/// A region of a source in a lane's input, and where its elements go.
struct Placed {
    region: Region,
    source: u32,
    transpose: bool,
    start: usize,
    row: u64,
    col: u64,
}

impl Stage {
    /// The areas of an encoding, so large that a device has work.
    pub fn areas(&self, plan: &Plan, encoding: &Encoding) -> Vec<Area> {
        let slices = (encoding.targets.len() * Lane::SLICE) as u64;
        let most = self.tile().saturating_sub(slices) / BYTES;
        // Where a lane has no room for a block of every slice, the CPU encodes.
        let least = (encoding.targets.len() * fp8::BLOCK * fp8::BLOCK) as u64;
        let most = if most < least { CPU_BAND } else { most };
        encoding.areas(plan, most, most)
    }

    /// Elements of a source that are measured together.
    pub fn measures(&self) -> u64 {
        self.tile().saturating_sub(Lane::SLICE as u64) / BYTES
    }

    /// Encodes an area on the lane's device, or on the CPU where that is left to it, and hands it to the sink. Gives the
    /// number of bytes written.
    pub fn encode(
        &self,
        context: &Context<'_>,
        lane: &mut Lane,
        encoding: &Encoding,
        area: &Area,
        weight_scale: f32,
        scratch: &mut Scratch,
    ) -> Result<u64> {
        let plan = context.plan;
        let format = match encoding.code {
            Code::Fp8 => Format::Fp8 { measured: context.sink.wants_deviations() },
            Code::Nvfp4 => Format::Nvfp4 { scale_2: weight_scale, how: plan.nvfp4.block_scale() },
        };
        let taken: Vec<(&Target, Range<u64>)> =
            encoding.targets.iter().filter_map(|t| Some((t, t.taken(area)?))).collect();
        let from_first = |cols: &Range<u64>| cols.start - area.cols.start..cols.end - area.cols.start;
        let slices: Vec<Range<u64>> = taken.iter().map(|(_, cols)| from_first(cols)).collect();
        let (rows, cols) = (area.rows.end - area.rows.start, area.cols.end - area.cols.start);
        let fits = Lane::encodes(self.tile() as usize, rows, cols, &slices, format);
        let placed = if fits { self.placed(plan, encoding, area) } else { None };
        let Some(placed) = placed.filter(|placed| !placed.is_empty() && !self.has_failed()) else {
            return by_bands(context, encoding, area, weight_scale, scratch);
        };
        let (send, parts) = self.send(context, lane, &placed, scratch)?;
        let encoded = match lane.encode(send, cuda::Area { rows, cols, parts: &parts }, &slices, format) {
            Ok(encoded) => encoded,
            Err(error) => {
                let name = &plan.params[encoding.param as usize].name;
                self.fail(lane, name, &plan.sources[placed[0].source as usize], &error)?;
                return again(context, encoding, area, weight_scale, scratch);
            }
        };
        if encoded.iter().any(|slice| slice.found.any()) {
            return again(context, encoding, area, weight_scale, scratch);
        }
        let mut written = 0;
        for ((target, cols), slice) in taken.iter().zip(&encoded) {
            written += context.hand_on(encoding, target, area, cols, slice.codes, slice.scales, &slice.deviation)?;
        }
        Ok(written)
    }

    /// Finds the largest magnitude of a chunk, likewise.
    pub fn measure(
        &self,
        context: &Context<'_>,
        lane: &mut Lane,
        chunk: &Chunk,
        measured: &Measured,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (plan, count) = (context.plan, chunk.elements.end - chunk.elements.start);
        let region = Region::new(plan, chunk.source, chunk.op, chunk.elements.start, count, 1, count)
            .filter(|region| self.decodes(region.ty()) && region.bytes() <= self.tile() && !self.has_failed());
        let Some(region) = region.filter(|_| count <= self.measures()) else {
            return context.measure(chunk, CPU_BAND, measured, scratch);
        };
        let placed = [Placed { region, source: chunk.source, transpose: false, start: 0, row: 0, col: 0 }];
        let (send, parts) = self.send(context, lane, &placed, scratch)?;
        let reads = Reads::default();
        match lane.largest(send, cuda::Area { rows: 1, cols: count, parts: &parts }) {
            Ok(largest) if largest.is_finite() => measured.add(chunk.leader, largest),
            Ok(_) => context.again(&reads).measure(chunk, CPU_BAND, measured, scratch)?,
            Err(error) => {
                let name = &plan.model.weights[chunk.leader as usize].name;
                self.fail(lane, name, &plan.sources[chunk.source as usize], &error)?;
                context.again(&reads).measure(chunk, CPU_BAND, measured, scratch)?;
            }
        }
        Ok(())
    }

    /// What of each piece goes into a lane's input for an area; none if it does not fit, or no device decodes it.
    fn placed(&self, plan: &Plan, encoding: &Encoding, area: &Area) -> Option<Vec<Placed>> {
        let (mut placed, mut start) = (Vec::new(), 0);
        for piece in &encoding.pieces {
            let (top, bottom) = (piece.row.max(area.rows.start), (piece.row + piece.rows).min(area.rows.end));
            let (left, right) = (piece.col.max(area.cols.start), (piece.col + piece.cols).min(area.cols.end));
            if top >= bottom || left >= right {
                continue;
            }
            let from = match piece.origin {
                // What no piece fills is zero.
                Origin::Fill(value) if value.to_bits() == 0 => continue,
                Origin::Fill(_) => return None,
                Origin::Source(from) => from,
            };
            let (tall, wide) = (bottom - top, right - left);
            let (rows, cols) = if from.transpose { (wide, tall) } else { (tall, wide) };
            let first = from.element(top - piece.row, left - piece.col);
            let region = Region::new(plan, from.source, from.op, first, from.step * from.width, rows, cols)?;
            let end = start + usize::try_from(region.bytes()).ok()?;
            if !self.decodes(region.ty()) || end as u64 > self.tile() {
                return None;
            }
            let (row, col) = (top - area.rows.start, left - area.cols.start);
            placed.push(Placed { region, source: from.source, transpose: from.transpose, start, row, col });
            start = end.next_multiple_of(ALIGN);
        }
        Some(placed)
    }

    /// Fills the lane's input. Gives its length, and what becomes of it.
    fn send(
        &self,
        context: &Context<'_>,
        lane: &mut Lane,
        placed: &[Placed],
        scratch: &mut Scratch,
    ) -> Result<(usize, Vec<Part>)> {
        let (mut send, mut parts) = (0, Vec::with_capacity(placed.len()));
        for Placed { region, transpose, start, row, col, .. } in placed {
            fill(context, lane, *start, region, scratch)?;
            send = start + region.bytes() as usize;
            let values = region.values(context, FloatType::F32, scratch)?;
            parts.push(Part { values, piece: region.piece_at(*start, *transpose), row: *row, col: *col });
        }
        Ok((send, parts))
    }
}

/// Encodes an area on the CPU, in parts that its buffers take.
fn by_bands(
    context: &Context<'_>,
    encoding: &Encoding,
    area: &Area,
    weight_scale: f32,
    scratch: &mut Scratch,
) -> Result<u64> {
    let parts = encoding.split(context.plan, area, CPU_BAND);
    parts.iter().map(|part| context.encode(encoding, part, weight_scale, scratch)).sum()
}

/// The same for an area whose blocks were fetched before.
fn again(
    context: &Context<'_>,
    encoding: &Encoding,
    area: &Area,
    weight_scale: f32,
    scratch: &mut Scratch,
) -> Result<u64> {
    let reads = Reads::default();
    by_bands(&context.again(&reads), encoding, area, weight_scale, scratch)
}

impl Context<'_> {
    /// Hands on a slice's part of a whole area.
    #[expect(clippy::too_many_arguments, reason = "what was encoded, and where it goes")]
    fn hand_on(
        &self,
        encoding: &Encoding,
        target: &Target,
        area: &Area,
        cols: &Range<u64>,
        codes: &[u8],
        scales: &[u8],
        deviation: &Deviation,
    ) -> Result<u64> {
        let mut written = 0;
        if !target.weights.is_empty() {
            if self.sink.wants_deviations() {
                self.sink.deviate(encoding.param, &target.weights, deviation);
            }
            written += self.put_band(encoding, target, area.rows.start, cols, codes)?;
        }
        if !target.scales.is_empty() {
            written += self.put_scales(encoding, target, area, scales)?;
        }
        Ok(written)
    }
}
