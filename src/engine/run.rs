//! The engine's workers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::encode::{Area, Chunk, ENCODED_TILES, Encoding, Measured, TOGETHER, chunks, encodings};
use super::job::{Job, Wanted, jobs};
use super::stage::Stage;
use super::tile::{Context, Scratch, Tile, tiles, unit, unit_of};
use super::{Device, Observer, Reads, Resident, Sink};
use crate::dequant::{Dequantizer, Nonfinite, Simd};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::{Advice, GgufSet, SourceTensor};
use crate::plan::{Code, Form, Origin, Param, Plan, PlannedSource, Scale};
use crate::threads::{count, into_inner, lock, on_threads};

/// How to execute a plan. None of it changes a byte of the output.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ranks to make; empty for all.
    pub ranks: Vec<u32>,
    /// Files of them that are not to be made, as indices of [`Plan::files`].
    pub skip: Vec<u32>,
    /// Number of workers; 0 for one per CPU.
    pub threads: usize,
    /// About how many bytes of output a tile makes. The default stays in a second-level cache.
    pub tile_bytes: u64,
    /// The most bytes that the workers' buffers may take together: with many workers tiles become smaller, and with very
    /// many there are fewer workers.
    pub buffer_bytes: u64,
    /// How many bytes of the sources are requested ahead of the workers.
    pub readahead: u64,
    /// Whether NaN, infinities and overflows are let through (and counted).
    pub allow_nonfinite: bool,
    /// Remember every fetched range, to prove that none was fetched twice.
    pub track_reads: bool,
    /// What decodes.
    pub device: Device,
    /// The best instruction set that may be used on the CPU.
    pub simd: Simd,
    /// Set by whoever wants the work to stop: it ends with [`Error::Cancelled`] within a tile per worker.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// Tiles are not made smaller than this to save memory: there would be more to do around them than in them.
const SMALLEST_TILE: u64 = 64 << 10;
/// The most that a worker's buffers take, in tiles: a transposed tile is up to four tiles large, and there are its values,
/// the same as `f32` before they are bf16, and turned.
const TILES_PER_WORKER: u64 = 16;

impl Options {
    /// The number of workers, and bytes of output per tile, that stay within [`Options::buffer_bytes`].
    fn share_buffers(&self) -> (usize, u64) {
        let tiles = self.buffer_bytes / TILES_PER_WORKER;
        let smallest = SMALLEST_TILE.min(self.tile_bytes).max(1);
        let threads = count(self.threads).min(usize::try_from(tiles / smallest).unwrap_or(usize::MAX)).max(1);
        (threads, self.tile_bytes.min(tiles / threads as u64).max(smallest))
    }

    /// Refuses to go on once [`Options::cancel`] is set.
    pub(crate) fn check_cancel(&self) -> Result<()> {
        check_cancel(self.cancel.as_deref())
    }
}

/// Refuses to go on once the flag is set.
pub(crate) fn check_cancel(cancel: Option<&AtomicBool>) -> Result<()> {
    match cancel {
        Some(cancel) if cancel.load(Ordering::Relaxed) => Err(Fault::new("stopped as asked").cancelled()),
        Some(_) | None => Ok(()),
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            ranks: Vec::new(),
            skip: Vec::new(),
            threads: 0,
            tile_bytes: 512 << 10,
            buffer_bytes: 128 << 20,
            readahead: 64 << 20,
            allow_nonfinite: false,
            track_reads: false,
            device: Device::default(),
            simd: Simd::detect(),
            cancel: None,
        }
    }
}

/// What an execution saw.
#[derive(Debug)]
pub struct Outcome {
    /// Source bytes that were fetched.
    pub reads: Reads,
    /// Parameters with values that are not finite, and how many.
    pub nonfinite: BTreeMap<u32, Nonfinite>,
}

/// A plan bound to its source.
pub struct Engine<'a> {
    plan: &'a Plan,
    set: &'a GgufSet,
    options: Options,
    observer: Option<&'a dyn Observer>,
    resident: Option<&'a dyn Resident>,
}

impl<'a> Engine<'a> {
    /// Binds a plan to the set that it was made for.
    pub fn new(plan: &'a Plan, set: &'a GgufSet, options: Options) -> Self {
        let (threads, tile_bytes) = options.share_buffers();
        let options = Options { threads, tile_bytes, ..options };
        Engine { plan, set, options, observer: None, resident: None }
    }

    /// Has an observer see what is needed of the source.
    pub fn observed(self, observer: Option<&'a dyn Observer>) -> Self {
        Engine { observer, ..self }
    }

    /// Leaves what devices decode in their memory.
    pub(crate) fn resident(self, resident: Option<&'a dyn Resident>) -> Self {
        Engine { resident, ..self }
    }

    /// Makes every byte of the wanted ranks and hands it to the sink; `progress` is told of output bytes done.
    pub fn run(&self, sink: &dyn Sink, progress: &(dyn Fn(u64) + Sync)) -> Result<Outcome> {
        let plan = self.plan;
        self.check_sources()?;
        let wanted = self.wanted()?;
        let decoders: Vec<Option<Dequantizer>> =
            plan.sources.iter().map(|s| Dequantizer::new(s.ty, self.options.simd)).collect();
        let nonfinite = Mutex::new(BTreeMap::<u32, Nonfinite>::new());
        let accept = |param: u32, ranks: &[u32], source: Option<u32>, found: Nonfinite| {
            *lock(&nonfinite).entry(param).or_default() += found;
            sink.note(param, ranks, found);
            if self.options.allow_nonfinite { Ok(()) } else { Err(refusal(plan, param, source, found)) }
        };
        let reads = Reads::new(plan.sources.len(), self.options.track_reads);
        let context = Context {
            plan,
            set: self.set,
            sink,
            observer: self.observer,
            resident: self.resident,
            reads: &reads,
            simd: self.options.simd,
            decoders: &decoders,
            accept: &accept,
        };
        let stage = match self.options.device {
            Device::Cpu => None,
            Device::Auto | Device::Cuda(_) => Stage::open(&self.options, self.output_bytes(&wanted))?,
        };
        let stage = stage.as_ref();
        let measured = Measured::default();
        let shared = Shared {
            queue: Mutex::new(Queue {
                engine: self,
                stage,
                wanted: &wanted,
                joining: joining(plan),
                scale_groups: plan.scale_groups(),
                measured: &measured,
                param: 0,
                ready: Vec::new(),
                ahead: Ahead::default(),
            }),
            wanted: &wanted,
            measured: &measured,
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        };
        let workers = stage.map_or(self.options.threads, Stage::workers);
        on_threads(workers, || shared.work(&context, stage, &self.options, progress));
        match into_inner(shared.failure) {
            Some(error) => Err(error),
            None => Ok(Outcome { reads, nonfinite: into_inner(nonfinite) }),
        }
    }
}

impl Engine<'_> {
    /// Which slices are to be made.
    fn wanted(&self) -> Result<Wanted> {
        let (tp, Options { ranks, skip, .. }) = (self.plan.tp, &self.options);
        if let Some(rank) = ranks.iter().find(|rank| **rank >= tp) {
            return Err(Fault::new(format!("rank {rank} of {tp}")).layout());
        }
        let ranks = (0..tp).map(|rank| ranks.is_empty() || ranks.contains(&rank)).collect();
        Ok(Wanted { ranks, skipped: skip.iter().copied().collect() })
    }

    /// Bytes of the slices that are to be made.
    fn output_bytes(&self, wanted: &Wanted) -> u64 {
        let slices = |param: &Param| {
            let held = param.slices.iter().enumerate().filter(|(rank, slice)| wanted.holds(*rank, slice));
            held.map(|(_, slice)| self.plan.slice_bytes(param, slice)).sum::<u64>()
        };
        self.plan.params.iter().map(slices).sum()
    }

    /// The set has the very tensors that the plan was made for. With others, types of equal size would pass for each
    /// other without any error.
    fn check_sources(&self) -> Result<()> {
        let (planned, held) = (&self.plan.sources, self.set.tensors());
        let same = |(p, t): (&PlannedSource, &SourceTensor)| {
            p.name == t.name && p.ty == t.ty && p.bytes == t.bytes && p.elements == t.elements()
        };
        if planned.len() == held.len() && planned.iter().zip(held).all(same) {
            return Ok(());
        }
        let different = planned.iter().zip(held).find(|pair| !same(*pair)).map(|(p, _)| p.name.clone());
        let fault = Fault::new("the source's tensors are not those that the plan was made for").file(self.set.path());
        Err(different.into_iter().fold(fault, Fault::tensor).audit())
    }
}

struct Shared<'a> {
    queue: Mutex<Queue<'a>>,
    wanted: &'a Wanted,
    measured: &'a Measured,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Shared<'_> {
    fn work(&self, context: &Context<'_>, stage: Option<&Stage>, options: &Options, progress: &(dyn Fn(u64) + Sync)) {
        let _guard = StopOnPanic { shared: self, sink: context.sink };
        let mut scratch = Scratch::default();
        let mut lane = stage.and_then(|stage| Some((stage, stage.lane()?)));
        while !self.stop.load(Ordering::Relaxed) {
            let next = lock(&self.queue).next();
            let Some(work) = next else { return };
            let done = options.check_cancel().and_then(|()| match (&work, &mut lane) {
                (Work::Measure(chunk), Some((stage, lane))) => {
                    stage.measure(context, lane, chunk, self.measured, &mut scratch).map(|()| 0)
                }
                (Work::Measure(chunk), None) => {
                    context.measure(chunk, u64::MAX, self.measured, &mut scratch).map(|()| 0)
                }
                (Work::Encode(encoding, area), lane) => {
                    match (self.measured.scale(encoding.leader(context.plan, area)), lane) {
                        // Without its scale it is not encoded: the run has failed.
                        (None, _) => Ok(0),
                        (Some(scale), Some((stage, lane))) => {
                            stage.encode(context, lane, encoding, area, scale, &mut scratch)
                        }
                        (Some(scale), None) => context.encode(encoding, area, scale, &mut scratch),
                    }
                }
                (Work::WeightScales(param), _) => context.put_weight_scales(*param, self.measured, self.wanted),
                (Work::Decode(job, tile), Some((stage, lane))) => stage.execute(context, lane, job, tile, &mut scratch),
                (Work::Decode(job, tile), None) => context.execute(job, tile, &mut scratch),
            });
            match done {
                Ok(bytes) => progress(bytes),
                Err(error) => {
                    lock(&self.failure).get_or_insert(error);
                    self.stop(context.sink);
                }
            }
        }
    }
}

impl Shared<'_> {
    /// Ends the run: whoever waits for what is not coming any more is let go.
    fn stop(&self, sink: &dyn Sink) {
        self.stop.store(true, Ordering::Relaxed);
        self.measured.stop();
        sink.stop();
    }
}

/// A worker that panics ends the run: without it, others might wait for what it did not finish.
struct StopOnPanic<'a, 'q> {
    shared: &'a Shared<'q>,
    sink: &'a dyn Sink,
}

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.stop(self.sink);
        }
    }
}

fn refusal(plan: &Plan, param: u32, source: Option<u32>, found: Nonfinite) -> Error {
    let param = &plan.params[param as usize];
    let source = source.map(|source| &plan.sources[source as usize]);
    let source = source.map_or("a constant".to_owned(), |s| format!("source tensor '{}' ({})", s.name, s.ty));
    Fault::new(format!(
        "{source} decodes to {} NaN, {} infinite and {} values that overflow {} in one tile",
        found.nan, found.inf, found.overflow, param.dtype
    ))
    .tensor(&param.name)
    .expected("finite values")
    .remedy(if found.overflow > 0 && found.nan + found.inf == 0 {
        "Choose --dtype bf16 or f32, or let the overflows become infinite with --allow-nonfinite"
    } else {
        "The quantized file is damaged or was made from a damaged model; let the values through with --allow-nonfinite"
    })
    .nonfinite()
}

/// What a worker does at a time.
enum Work {
    /// Decodes a tile.
    Decode(Arc<Job>, Tile),
    /// Measures a run of a weight for the scale that all its blocks have in common.
    Measure(Chunk),
    /// Encodes an area.
    Encode(Arc<Encoding>, Area),
    /// Hands on a parameter that holds such scales.
    WeightScales(u32),
}

/// The tiles in order, made as they are asked for.
struct Queue<'a> {
    engine: &'a Engine<'a>,
    stage: Option<&'a Stage>,
    wanted: &'a Wanted,
    /// Later parameters that are decoded together with an earlier one, by that one.
    joining: BTreeMap<u32, Vec<u32>>,
    /// By the first of them, the weights that share a scale.
    scale_groups: BTreeMap<u32, Vec<u32>>,
    measured: &'a Measured,
    param: usize,
    /// Work on the current parameter, last first.
    ready: Vec<Work>,
    ahead: Ahead,
}

impl Queue<'_> {
    fn next(&mut self) -> Option<Work> {
        while self.ready.is_empty() {
            let param = self.engine.plan.params.get(self.param)?;
            if param.joins.is_some() {
                self.param += 1;
                continue;
            }
            self.ahead.advance(self.engine, self.param, self.wanted);
            let lists = match param.form {
                // What is kept is read and handed on like numbers of one byte.
                Form::Plain | Form::Kept(_) | Form::Scales { kind: Scale::Input, .. } => self.decoding(param.dtype),
                Form::Encoded { code, scales } => self.encoding(code, scales),
                // Made with the parameter whose blocks they scale.
                Form::Scales { kind: Scale::Block, .. } => Vec::new(),
                Form::Scales { kind: Scale::Weight, .. } => self.weight_scales(param),
            };
            // Workers that write to one file at a time wait for each other, so work that is likely to be for several ranks
            // takes turns, as far as its bytes are requested ahead together.
            let (mut together, mut bytes) = (Vec::new(), 0);
            let mut all = Vec::new();
            for (work, reads) in lists {
                if bytes + reads > self.engine.options.readahead {
                    all.extend(by_turns(std::mem::take(&mut together)));
                    bytes = 0;
                }
                together.push(work);
                bytes += reads;
            }
            all.extend(by_turns(together));
            self.ready = self.measured_first(all);
            self.ready.reverse();
            self.param += 1;
        }
        self.ready.pop()
    }

    /// For each job of the current parameter, its tiles and the bytes that they read.
    fn decoding(&self, dtype: Dtype) -> Vec<(Vec<Work>, u64)> {
        let (plan, index, width) = (self.engine.plan, self.param as u32, dtype.bytes());
        let target = self.engine.options.tile_bytes / width;
        let joining = self.joining.get(&index).map_or(&[][..], Vec::as_slice);
        let work = |job: Job| {
            let (block, block_bytes) = unit_of(plan, &job);
            let job = Arc::new(job);
            let tiles = match self.stage {
                Some(stage) => stage.tiles(plan, &job, block),
                None => tiles(&job, block, target, width),
            };
            let reads = tiles.iter().map(|tile| tile.elements() / block * block_bytes).sum();
            (tiles.into_iter().map(|tile| Work::Decode(job.clone(), tile)).collect(), reads)
        };
        jobs(plan, index, joining, self.wanted).into_iter().map(work).collect()
    }

    /// For each encoding of the current parameter, its areas and the bytes that they read.
    fn encoding(&self, code: Code, scales: u32) -> Vec<(Vec<Work>, u64)> {
        let plan = self.engine.plan;
        let most = self.engine.options.tile_bytes * ENCODED_TILES;
        let work = |encoding: Encoding| {
            let encoding = Arc::new(encoding);
            let areas = match self.stage {
                Some(stage) => stage.areas(plan, &encoding),
                None => encoding.areas(plan, most, TOGETHER),
            };
            let reads = areas.iter().map(|area| encoding.reads(plan, area)).sum();
            (areas.into_iter().map(|area| Work::Encode(encoding.clone(), area)).collect(), reads)
        };
        encodings(plan, self.param as u32, code, scales, self.wanted).into_iter().map(work).collect()
    }

    /// The work on a parameter that holds the scales of whole weights.
    fn weight_scales(&self, param: &Param) -> Vec<(Vec<Work>, u64)> {
        let wanted = param.slices.iter().enumerate().any(|(rank, slice)| self.wanted.holds(rank, slice));
        if wanted { vec![(vec![Work::WeightScales(self.param as u32)], 0)] } else { Vec::new() }
    }

    /// The work with that before it which finds the scales that it needs. Those of the weights after it are found before
    /// it is done, so that a worker that comes to them seldom has to wait; it waits only for work that was handed out.
    fn measured_first(&self, all: Vec<Work>) -> Vec<Work> {
        if self.scale_groups.is_empty() {
            return all;
        }
        let plan = self.engine.plan;
        let most = self.stage.map_or(self.engine.options.tile_bytes * ENCODED_TILES / 4, Stage::measures);
        let (mut ready, mut held) = (Vec::with_capacity(all.len()), Vec::new());
        for work in all {
            let leaders: Vec<u32> = match &work {
                Work::Decode(..) | Work::Measure(_) => Vec::new(),
                Work::Encode(encoding, area) => encoding.leader(plan, area).into_iter().collect(),
                Work::WeightScales(param) => {
                    let weights = plan.params[*param as usize].content.weights();
                    weights.iter().filter_map(|weight| plan.scale_leader(*weight)).collect()
                }
            };
            for leader in leaders.into_iter().filter(|leader| !self.measured.knows(*leader)) {
                let chunks = chunks(plan, &self.scale_groups, leader, most);
                self.measured.expect(leader, chunks.len());
                ready.extend(chunks.into_iter().map(Work::Measure));
                ready.append(&mut held);
            }
            held.push(work);
        }
        ready.append(&mut held);
        ready
    }
}

/// The first of each, the second of each, and so on.
fn by_turns<T>(lists: Vec<Vec<T>>) -> Vec<T> {
    let mut left: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    while !left.is_empty() {
        left.retain_mut(|list| list.next().map(|item| all.push(item)).is_some());
    }
    all
}

/// For each parameter that later ones join, those.
fn joining(plan: &Plan) -> BTreeMap<u32, Vec<u32>> {
    let mut joining: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (index, param) in plan.params.iter().enumerate() {
        if let Some(first) = param.joins {
            joining.entry(first).or_default().push(index as u32);
        }
    }
    joining
}

/// Requests source bytes before workers need them: parameters ahead of the current one, as many bytes as allowed.
#[derive(Default)]
struct Ahead {
    /// The next parameter whose bytes are requested.
    param: usize,
    /// Bytes requested for parameters from the current one on.
    pending: u64,
}

impl Ahead {
    fn advance(&mut self, engine: &Engine<'_>, current: usize, wanted: &Wanted) {
        let plan = engine.plan;
        if self.param > current {
            self.pending -= self.pending.min(spans(plan, current, wanted).map(|(_, r)| r.end - r.start).sum());
        }
        self.param = self.param.max(current);
        while self.pending < engine.options.readahead.max(1) && self.param < plan.params.len() {
            if plan.params[self.param].joins.is_some() {
                self.param += 1;
                continue;
            }
            for (source, range) in spans(plan, self.param, wanted) {
                let tensor = &engine.set.tensors()[source as usize];
                let range = tensor.offset + range.start..tensor.offset + range.end;
                self.pending += range.end - range.start;
                // Advice only: what the system makes of it changes nothing but speed.
                if let Err(error) = engine.set.advise(tensor.part, range, Advice::WillNeed) {
                    tracing::debug!(%error, "no readahead");
                }
            }
            self.param += 1;
        }
    }
}

/// The byte range of each source that a parameter reads, over the wanted slices.
fn spans(plan: &Plan, param: usize, wanted: &Wanted) -> impl Iterator<Item = (u32, Range<u64>)> {
    let mut spans: BTreeMap<u32, Range<u64>> = BTreeMap::new();
    let slices = plan.params[param].slices.iter().enumerate();
    for (_, slice) in slices.filter(|(rank, slice)| wanted.holds(*rank, slice)) {
        for piece in plan.pieces_of(slice) {
            let Origin::Source(region) = piece.origin else { continue };
            let ty = plan.sources[region.source as usize].ty;
            let (block, block_bytes) = match plan.params[param].form.code() {
                Some(_) => (ty.block(), ty.block_bytes()),
                None => unit(ty, plan.params[param].dtype),
            };
            let first = region.element(0, 0) / block * block_bytes;
            let last = (region.element(piece.rows - 1, piece.cols - 1) / block + 1) * block_bytes;
            let span = spans.entry(region.source).or_insert(first..last);
            *span = span.start.min(first)..span.end.max(last);
        }
    }
    spans.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_shared_without_a_worker_too_many() {
        let share = |threads, tile_bytes, buffer_bytes| {
            Options { threads, tile_bytes, buffer_bytes, ..Options::default() }.share_buffers()
        };
        const MIB: u64 = 1 << 20;
        assert_eq!(share(2, MIB / 2, 128 * MIB), (2, MIB / 2));
        assert_eq!(share(16, MIB / 2, 128 * MIB), (16, MIB / 2));
        assert_eq!(share(64, MIB / 2, 128 * MIB), (64, MIB / 8));
        assert_eq!(share(1000, MIB / 2, 128 * MIB), (128, MIB / 16));
        assert_eq!(share(8, MIB / 2, 16 * MIB), (8, MIB / 8));
        assert_eq!(share(8, MIB / 2, 0), (1, MIB / 16));
        assert_eq!(share(3, 512, 128 * MIB), (3, 512));
        for (threads, buffer_bytes) in [(1, MIB), (7, 3 * MIB), (333, 64 * MIB), (4096, 1 << 30)] {
            let (workers, tile) = share(threads, MIB / 2, buffer_bytes);
            assert!(workers as u64 * tile * TILES_PER_WORKER <= buffer_bytes.max(MIB), "{threads} {buffer_bytes}");
        }
    }
}
