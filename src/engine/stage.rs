//! The device stage: tiles that a CUDA device decodes. Areas that it encodes are in `encode/device.rs`.
//!
//! A worker has a lane: it fills the lane's input from the source, has the device decode every piece of the tile, and
//! hands the pieces to the sink, in steps that stay in its cache, while other workers' tiles are on their way. The jobs,
//! the order of tiles and the sink are those of the CPU; only the tiles are larger.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::job::{Job, Output, Read};
use super::tile::{Context, Scratch, Tile, float_type, job_start, split, tiles, unit_of};
use super::{Device, Options, Reads, Resident};
use crate::cuda::{self, Lane, Piece, Values};
use crate::dequant::FloatType;
use crate::error::{Error, Fault, Result};
use crate::gguf::GgmlType;
use crate::mapping::ValueOp;
use crate::plan::{Plan, PlannedSource};
use crate::threads::lock;

/// Tiles for devices, where memory allows: large enough for copies at full speed.
const TILES: Range<u64> = 16 << 20..64 << 20;
/// Tiles that the CPU decodes beside them: constants, and elements that no device decodes.
pub(super) const CPU_TILE: u64 = 128 << 10;
/// What a worker takes for those, in such tiles.
const CPU_TILES: u64 = 16;
/// Lanes of a device, where memory allows: one goes in, one is decoded or comes out, one is hashed and written.
const LANES: usize = 3;
/// Source bytes that are fetched at a time, where they are not mapped.
const FETCH: u64 = 1 << 20;

/// The devices of a run.
pub(super) struct Stage {
    lanes: Mutex<Vec<Lane>>,
    devices: Vec<std::sync::Arc<cuda::Device>>,
    workers: usize,
    tile: u64,
    /// Whether the CPU goes on where a device fails.
    fallback: bool,
    failed: AtomicBool,
}

/// A rectangle of a source, as blocks.
pub(super) struct Region {
    source: u32,
    op: ValueOp,
    ty: GgmlType,
    /// The first element of the first row.
    first: u64,
    /// Elements from one row to the next.
    stride: u64,
    rows: u64,
    cols: u64,
    /// Elements before the first in its block, alike in every row.
    skip: u64,
    /// Bytes of the blocks that cover a row.
    row_bytes: u64,
}

impl Region {
    /// The region of a tile; none for constants, and where rows do not begin alike in their blocks.
    fn of(plan: &Plan, job: &Job, tile: &Tile) -> Option<Region> {
        let (rows, cols) = (tile.rows.end - tile.rows.start, tile.cols.end - tile.cols.start);
        let (source, op, first, stride) = match job.read {
            Read::Fill { .. } => return None,
            Read::Run { source, op, .. } => (source, op, tile.cols.start, cols),
            Read::Rows { source, start, stride, op, .. } | Read::Transposed { source, start, stride, op, .. } => {
                (source, op, start + tile.rows.start * stride + tile.cols.start, stride)
            }
        };
        Region::new(plan, source, op, first, stride, rows, cols)
    }

    /// Rows of `cols` elements, `stride` apart, of a source; none where they do not begin alike in their blocks.
    pub fn new(plan: &Plan, source: u32, op: ValueOp, first: u64, stride: u64, rows: u64, cols: u64) -> Option<Region> {
        let ty = plan.sources[source as usize].ty;
        if rows > 1 && !stride.is_multiple_of(ty.block()) {
            return None;
        }
        let skip = first % ty.block();
        let row_bytes = (skip + cols).div_ceil(ty.block()) * ty.block_bytes();
        Some(Region { source, op, ty, first, stride, rows, cols, skip, row_bytes })
    }

    /// The type of its elements.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// Bytes that are sent.
    pub fn bytes(&self) -> u64 {
        self.rows * self.row_bytes
    }

    /// The byte ranges of the source that are sent, one after the other.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        // Whole rows follow each other.
        let together = self.skip == 0 && self.cols == self.stride && self.cols.is_multiple_of(self.ty.block());
        let (count, bytes) = if together { (1, self.bytes()) } else { (self.rows, self.row_bytes) };
        (0..count).map(move |row| {
            let start = (self.first + row * self.stride) / self.ty.block() * self.ty.block_bytes();
            start..start + bytes
        })
    }

    /// Columns, counted from the first, as a piece of an input that begins with this region.
    pub fn piece(&self, cols: Range<u64>, transpose: bool) -> Piece {
        let skip = self.skip + cols.start;
        Piece {
            source: (skip / self.ty.block() * self.ty.block_bytes()) as usize,
            row_bytes: self.row_bytes as usize,
            skip: skip % self.ty.block(),
            rows: self.rows,
            cols: cols.end - cols.start,
            transpose,
        }
    }

    /// All columns, likewise, where the region begins at a byte of the input.
    pub fn piece_at(&self, start: usize, transpose: bool) -> Piece {
        let piece = self.piece(0..self.cols, transpose);
        Piece { source: start + piece.source, ..piece }
    }

    /// What is made of the elements.
    pub fn values(&self, context: &Context<'_>, dtype: FloatType, scratch: &mut Scratch) -> Result<Values> {
        let scale = self.op.scale.map(|(source, element)| context.scale(source, element, scratch)).transpose()?;
        Ok(Values { ty: self.ty, scale, add: self.op.add, dtype })
    }
}

/// Why a tile was not decoded.
enum Failure {
    /// The device failed when so many outputs were done.
    Device(cuda::DriverError, usize),
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Other(error)
    }
}

impl Stage {
    /// Opens the devices that the options ask for, and makes lanes for them; none if the CPU is to decode `bytes` bytes.
    pub fn open(options: &Options, bytes: u64) -> Result<Option<Self>> {
        let devices = options.device.open(options.threads, bytes)?;
        if devices.is_empty() {
            return Ok(None);
        }
        let fallback = options.device == Device::Auto;
        let (each, tile) = share(options.buffer_bytes, options.threads, devices.len());
        match cuda::lanes(&devices, each, tile as usize) {
            Ok(lanes) => {
                let (workers, tile) = (lanes.len(), lanes.iter().map(Lane::tile).min().unwrap_or(0) as u64);
                let failed = AtomicBool::new(false);
                Ok(Some(Stage { lanes: Mutex::new(lanes), devices, workers, tile, fallback, failed }))
            }
            Err((device, error)) if fallback => {
                tracing::warn!("decoding on the CPU: {} has no buffers: {error}", devices[device].title());
                Ok(None)
            }
            Err((device, error)) => {
                let fault = Fault::new(format!("{} has no buffers: {error}", devices[device].title()));
                Err(fault
                    .remedy("Free memory of the device or lower --mem-limit, or decode with --device cpu")
                    .device())
            }
        }
    }

    /// How many workers there are, each with a lane.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// A worker's lane.
    pub fn lane(&self) -> Option<Lane> {
        lock(&self.lanes).pop()
    }

    /// Splits a job into tiles that fit a lane, or into smaller ones if the CPU is to decode it.
    pub fn tiles(&self, plan: &Plan, job: &Job, block: u64) -> Vec<Tile> {
        let dtype = plan.params[job.param as usize].dtype;
        let decodes = |source: u32| self.decodes(plan.sources[source as usize].ty);
        let on_device = job.read.source().is_some_and(decodes) && float_type(dtype).is_some();
        let mut target = if on_device { self.tile } else { CPU_TILE } / dtype.bytes();
        loop {
            let tiles = tiles(job, block, target, 0);
            if !on_device || target <= block || tiles.iter().all(|tile| self.fits(plan, job, tile)) {
                return tiles;
            }
            target /= 2;
        }
    }

    /// Whether the CPU does everything from now on.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// A device has failed on a source of the tensor `name`: an error, unless the CPU is to go on.
    pub fn fail(&self, lane: &Lane, name: &str, source: &PlannedSource, error: &cuda::DriverError) -> Result<()> {
        let device = lane.device().title();
        if !self.fallback {
            let fault = Fault::new(format!("{device} failed on '{}' ({}): {error}", source.name, source.ty));
            let remedy = "See `ggshard devices`; decode with --device cpu, which gives the same bytes";
            return Err(fault.tensor(name).remedy(remedy).device());
        }
        if !self.failed.swap(true, Ordering::Relaxed) {
            tracing::warn!("tensor '{name}': {device} failed, and the CPU goes on: {error}");
        }
        Ok(())
    }

    /// Bytes of a tile's input, and of its output.
    pub fn tile(&self) -> u64 {
        self.tile
    }

    /// Whether every device decodes a type.
    pub fn decodes(&self, ty: GgmlType) -> bool {
        self.devices.iter().all(|device| device.decodes(ty))
    }

    /// Whether a tile's blocks, and what comes of them, each fit a lane.
    fn fits(&self, plan: &Plan, job: &Job, tile: &Tile) -> bool {
        let width = plan.params[job.param as usize].dtype.bytes();
        Region::of(plan, job, tile).is_some_and(|r| r.bytes() <= self.tile && r.rows * r.cols * width <= self.tile)
    }

    /// Decodes a tile on the lane's device, or on the CPU where the device has failed and that is allowed, and hands it to
    /// the sink. Gives the number of bytes written.
    pub fn execute(
        &self,
        context: &Context<'_>,
        lane: &mut Lane,
        job: &Job,
        tile: &Tile,
        scratch: &mut Scratch,
    ) -> Result<u64> {
        let plan = context.plan;
        let param = &plan.params[job.param as usize];
        let region = Region::of(plan, job, tile).filter(|r| self.decodes(r.ty) && self.fits(plan, job, tile));
        let (Some(region), Some(dtype)) = (region, float_type(param.dtype)) else {
            return on_cpu(context, job, tile, scratch);
        };
        if self.has_failed() {
            return on_cpu(context, job, tile, scratch);
        }
        let mut written = 0;
        match on_device(context, lane, &region, dtype, job, tile, scratch, &mut written) {
            Ok(()) => Ok(written),
            Err(Failure::Other(error)) => Err(error),
            Err(Failure::Device(error, done)) => {
                self.fail(lane, &param.name, &plan.sources[region.source as usize], &error)?;
                let reads = Reads::default();
                let again = context.again(&reads);
                let rest = Job { outputs: job.outputs[done..].to_vec(), ..job.clone() };
                Ok(written + on_cpu(&again, &rest, tile, scratch)?)
            }
        }
    }
}

/// Lanes of each device and bytes of a tile that keep pinned memory, and a worker's own, within `budget`.
fn share(budget: u64, threads: usize, devices: usize) -> (usize, u64) {
    let tile = |each: usize| {
        let lane = budget / (each * devices) as u64;
        lane.saturating_sub(CPU_TILE * CPU_TILES + Lane::overhead()) / 2
    };
    let mut each = threads.div_ceil(devices).max(LANES);
    while each > 2 && tile(each) < TILES.start {
        each -= 1;
    }
    (each, tile(each).clamp(1 << 20, TILES.end))
}

fn on_cpu(context: &Context<'_>, job: &Job, tile: &Tile, scratch: &mut Scratch) -> Result<u64> {
    let dtype = context.plan.params[job.param as usize].dtype;
    let (block, _) = unit_of(context.plan, job);
    let mut written = 0;
    for tile in split(job, tile, block, CPU_TILE / dtype.bytes(), dtype.bytes()) {
        written += context.execute(job, &tile, scratch)?;
    }
    Ok(written)
}

#[expect(clippy::too_many_arguments, reason = "they are what `Stage::execute` found out")]
fn on_device(
    context: &Context<'_>,
    lane: &mut Lane,
    region: &Region,
    dtype: FloatType,
    job: &Job,
    tile: &Tile,
    scratch: &mut Scratch,
    written: &mut u64,
) -> Result<(), Failure> {
    let values = region.values(context, dtype, scratch)?;
    fill(context, lane, 0, region, scratch)?;
    let transpose = matches!(job.read, Read::Transposed { .. });
    // Outputs that take the same columns one after the other share a piece.
    let taken: Vec<Range<u64>> = job.outputs.iter().map(|output| columns(job, output, tile)).collect();
    let mut done = 0;
    let mut send = region.bytes() as usize;
    if let Some(resident) = context.resident {
        return stay(context, resident, lane, region, values, job, tile, &taken, written);
    }
    while done < taken.len() {
        if taken[done].is_empty() {
            done += 1;
            continue;
        }
        let mut distinct: Vec<(Range<u64>, Range<usize>)> = Vec::new();
        for (output, cols) in taken.iter().enumerate().skip(done) {
            match distinct.last_mut() {
                Some((last, outputs)) if last == cols || cols.is_empty() => outputs.end = output + 1,
                Some(_) | None => distinct.push((cols.clone(), output..output + 1)),
            }
        }
        let from_first = |cols: &Range<u64>| cols.start - tile.cols.start..cols.end - tile.cols.start;
        let pieces: Vec<Piece> = distinct.iter().map(|(cols, _)| region.piece(from_first(cols), transpose)).collect();
        let decoded = lane.decode(values, send, &pieces).map_err(|error| Failure::Device(error, done))?;
        send = 0;
        for ((found, bytes), (cols, outputs)) in decoded.into_iter().zip(distinct) {
            done = outputs.end;
            for output in outputs.filter(|output| !taken[*output].is_empty()) {
                let output = &job.outputs[output];
                if found.any() {
                    (context.accept)(output.param, &output.ranks, job.read.source(), found)?;
                }
                *written += put(context, job, output, tile, &cols, bytes)?;
            }
        }
    }
    Ok(())
}

/// Decodes every output's columns into its memory on the device.
#[expect(clippy::too_many_arguments, reason = "they are what `on_device` found out")]
fn stay(
    context: &Context<'_>,
    resident: &dyn Resident,
    lane: &mut Lane,
    region: &Region,
    values: Values,
    job: &Job,
    tile: &Tile,
    taken: &[Range<u64>],
    written: &mut u64,
) -> Result<(), Failure> {
    let transpose = matches!(job.read, Read::Transposed { .. });
    let mut send = region.bytes() as usize;
    let some: Vec<(&Output, &Range<u64>)> =
        job.outputs.iter().zip(taken).filter(|(_, cols)| !cols.is_empty()).collect();
    for outputs in some.chunks(Lane::MOST) {
        let memory = outputs.iter().map(|(output, _)| resident.memory(output.param)).collect::<Result<Vec<_>>>()?;
        let pieces: Vec<_> = outputs
            .iter()
            .zip(&memory)
            .map(|((output, cols), memory)| {
                let piece = region.piece(cols.start - tile.cols.start..cols.end - tile.cols.start, transpose);
                (piece, &**memory, first(job, output, tile, cols), output.stride)
            })
            .collect();
        let counts = lane.decode_into(values, send, &pieces).map_err(|error| Failure::Device(error, 0))?;
        send = 0;
        drop(pieces);
        for (((output, cols), memory), found) in outputs.iter().zip(memory).zip(counts) {
            if found.any() {
                (context.accept)(output.param, &output.ranks, job.read.source(), found)?;
            }
            let bytes = region.rows * (cols.end - cols.start) * values.dtype.bytes() as u64;
            resident.arrived(output.param, memory, bytes)?;
            *written += bytes;
        }
    }
    Ok(())
}

/// The element of an output's slice that the first of its columns of a tile goes to.
fn first(job: &Job, output: &Output, tile: &Tile, cols: &Range<u64>) -> u64 {
    match job.read {
        Read::Fill { .. } | Read::Run { .. } => output.start + tile.cols.start - job_start(&job.read),
        Read::Rows { .. } => output.start + tile.rows.start * output.stride + (cols.start - output.col),
        Read::Transposed { .. } => output.start + (cols.start - output.col) * output.stride + tile.rows.start,
    }
}

/// The columns of a tile that an output takes.
fn columns(job: &Job, output: &Output, tile: &Tile) -> Range<u64> {
    match job.read {
        Read::Fill { .. } | Read::Run { .. } => tile.cols.clone(),
        Read::Rows { .. } | Read::Transposed { .. } => {
            let taken = output.taken(tile);
            taken.start..taken.end.max(taken.start)
        }
    }
}

/// Copies the blocks of a region into the lane's input, from a byte on.
pub(super) fn fill(
    context: &Context<'_>,
    lane: &mut Lane,
    mut at: usize,
    region: &Region,
    scratch: &mut Scratch,
) -> Result<()> {
    for range in region.ranges() {
        context.reads.record(region.source, range.clone());
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + FETCH);
            let bytes = context.fetch(region.source, start..end, &mut scratch.source)?;
            lane.input()[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            start = end;
        }
    }
    Ok(())
}

/// Hands an output its columns of a tile.
fn put(context: &Context<'_>, job: &Job, output: &Output, tile: &Tile, cols: &Range<u64>, bytes: &[u8]) -> Result<u64> {
    let width = context.plan.params[job.param as usize].dtype.bytes();
    let first = first(job, output, tile, cols);
    match job.read {
        Read::Fill { .. } | Read::Run { .. } => {
            context.put_steps(output.param, &output.ranks, first * width, bytes)?;
            Ok(bytes.len() as u64 * output.ranks.len() as u64)
        }
        Read::Rows { .. } => context.put_rows(output, first, cols.end - cols.start, width, bytes),
        Read::Transposed { .. } => context.put_rows(output, first, tile.rows.end - tile.rows.start, width, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_share_memory() {
        const MIB: u64 = 1 << 20;
        for (budget, threads, devices) in [(128, 2, 1), (128, 16, 1), (128, 64, 4), (1024, 16, 1), (4096, 16, 2)] {
            let (each, tile) = share(budget * MIB, threads, devices);
            let lane = 2 * tile + Lane::overhead() + CPU_TILE * CPU_TILES;
            assert!(lane * (each * devices) as u64 <= budget * MIB, "{budget} {threads} {devices}");
            assert!(each >= 2 && tile <= TILES.end);
        }
        assert_eq!(share(128 * MIB, 16, 1).0, 3);
        assert_eq!(share(4096 * MIB, 16, 1), (16, TILES.end));
        assert_eq!(share(1, 1, 1), (2, MIB));
    }
}
