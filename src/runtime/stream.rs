//! Parameters decoded ahead of their consumer, in memory of bounded size.
//!
//! ```text
//! engine's workers ─► put: wait until the parameter may begin ─► its buffer ─► complete ─► consumer, in order
//! ```
//!
//! A parameter may begin when it fits the budget beside those that are in memory, or when it is the next to be
//! delivered. Tiles begin in the plan's order, so the tiles of the next one are with workers that never wait: what such a
//! tile makes beside it, the scales of an encoded weight, may begin as well.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use super::buffer::Buffer;
use crate::cuda::{self, DriverError, Memory};
use crate::dequant::Nonfinite;
use crate::dtype::Dtype;
use crate::engine::{self, Engine, Resident, Sink};
use crate::error::{Error, Fault, Result};
use crate::gguf::GgufSet;
use crate::mapping::Set;
use crate::plan::Plan;
use crate::threads::{lock, wait};

/// A parameter that is to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSpec {
    /// Its name.
    pub name: String,
    /// The model itself, or the draft model.
    pub set: Set,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on the rank, row-major, slowest axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A parameter with its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Its name.
    pub name: String,
    /// The model itself, or the draft model.
    pub set: Set,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on the rank, row-major, slowest axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// The elements, row-major and little-endian.
    pub bytes: Vec<u8>,
}

/// Parameters in the plan's order, decoded in parallel ahead of the consumer.
///
/// After an error, which comes once, there are no more items. Dropping it stops the workers and waits for them, which
/// takes as long as the tiles that they are at.
pub struct Weights {
    shared: Arc<Shared>,
    runner: Option<JoinHandle<()>>,
    specs: Arc<[WeightSpec]>,
    warnings: Vec<String>,
    next: usize,
    over: bool,
    nonfinite: BTreeMap<String, Nonfinite>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    budget: u64,
    /// For each parameter, the one that it is made together with ([`Plan::made_with`]).
    made_with: Vec<u32>,
    /// The device in whose memory parameters come to be; none for the host's.
    device: Option<Arc<cuda::Device>>,
}

struct State {
    slots: Vec<Slot>,
    /// The parameter that is to be delivered next.
    next: usize,
    /// Bytes of parameters that have begun and were not delivered.
    held: u64,
    /// Nobody waits for more, or the engine has failed.
    stopped: bool,
    /// What the engine gave, once it ended.
    outcome: Option<Result<BTreeMap<u32, Nonfinite>>>,
}

/// Where a parameter's bytes come to be.
#[derive(Clone)]
enum Room {
    Host(Arc<Buffer>),
    Device(Arc<Memory>),
}

impl Room {
    fn new(bytes: u64, device: Option<&Arc<cuda::Device>>) -> Result<Self> {
        match device {
            None => Ok(Room::Host(Arc::new(Buffer::new(bytes)?))),
            Some(device) => {
                let fault = |e: DriverError| Fault::new(format!("{}: {bytes} bytes: {e}", device.title())).device();
                let size = usize::try_from(bytes).map_err(|_| Fault::new(format!("{bytes} bytes")).device())?;
                Ok(Room::Device(Arc::new(Memory::new(device, size).map_err(fault)?)))
            }
        }
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Room::Host(buffer) => buffer.put(offset, bytes),
            Room::Device(memory) => {
                memory.write(offset as usize, bytes).map_err(|error| Fault::new(error.to_string()).device())
            }
        }
    }

    /// What nobody else holds; none if somebody does.
    fn into_bytes(self) -> Option<Bytes> {
        match self {
            Room::Host(buffer) => Some(Bytes::Host(Arc::into_inner(buffer)?.into_vec())),
            Room::Device(memory) => Some(Bytes::Device(Arc::into_inner(memory)?)),
        }
    }
}

/// A complete parameter.
pub(super) enum Bytes {
    Host(Vec<u8>),
    Device(Memory),
}

enum Slot {
    /// Nothing of so many bytes has come.
    Waiting(u64),
    /// So many bytes have yet to come.
    Filling(Room, u64),
    Complete(Bytes),
    Delivered,
}

impl Weights {
    /// Starts to decode what `plan` holds for `rank`.
    pub(super) fn start(
        set: Arc<GgufSet>,
        plan: Plan,
        rank: u32,
        options: engine::Options,
        memory: u64,
        device: Option<Arc<cuda::Device>>,
    ) -> Result<Self> {
        let specs: Arc<[WeightSpec]> = plan
            .params
            .iter()
            .map(|param| {
                let slice = &param.slices[rank as usize];
                WeightSpec {
                    name: param.name.clone(),
                    set: param.set,
                    dtype: param.dtype,
                    shape: slice.shape.axes().to_vec(),
                    bytes: plan.slice_bytes(param, slice),
                }
            })
            .collect();
        let slot = |spec: &WeightSpec| match spec.bytes {
            0 => Ok(Room::new(0, device.as_ref())?.into_bytes().map_or(Slot::Delivered, Slot::Complete)),
            bytes => Ok(Slot::Waiting(bytes)),
        };
        let slots = specs.iter().map(slot).collect::<Result<_>>()?;
        let state = State { slots, next: 0, held: 0, stopped: false, outcome: None };
        let made_with = (0..plan.params.len() as u32).map(|index| plan.made_with(index)).collect();
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { state, changed, budget: memory, made_with, device });
        let warnings = plan.model.warnings.clone();
        let runner = {
            let shared = Arc::clone(&shared);
            let run = move || {
                let ended = Ended(&shared);
                let resident = shared.device.is_some().then_some(&*shared as &dyn Resident);
                let engine = Engine::new(&plan, &set, options).resident(resident);
                let outcome = engine.run(&*shared, &|_| {}).map(|o| o.nonfinite);
                lock(&shared.state).outcome = Some(outcome);
                drop(ended);
            };
            std::thread::Builder::new().name("ggshard-weights".into()).spawn(run)
        };
        let runner = runner.map_err(|e| Fault::new(format!("no thread can be started: {e}")).layout())?;
        let (next, over, nonfinite) = (0, false, BTreeMap::new());
        Ok(Weights { shared, runner: Some(runner), specs, warnings, next, over, nonfinite })
    }

    /// Everything that is delivered from beginning to end, in order.
    pub fn specs(&self) -> &[WeightSpec] {
        &self.specs
    }

    /// Number of parameters that are yet to be delivered, if no error comes.
    pub fn remaining(&self) -> usize {
        if self.over { 0 } else { self.specs.len() - self.next }
    }

    /// Bytes of all parameters.
    pub fn total_bytes(&self) -> u64 {
        self.specs.iter().map(|spec| spec.bytes).sum()
    }

    /// What the user should know, in sentences.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Parameters with values that are not finite, where those are allowed. Empty until the last item was asked for.
    pub fn nonfinite(&self) -> &BTreeMap<String, Nonfinite> {
        &self.nonfinite
    }

    /// Waits for the engine, which has ended or is about to, and gives its error.
    fn finish(&mut self) -> Option<Error> {
        self.over = true;
        self.join();
        match lock(&self.shared.state).outcome.take() {
            Some(Ok(found)) => {
                self.nonfinite = found.into_iter().map(|(p, n)| (self.specs[p as usize].name.clone(), n)).collect();
                None
            }
            Some(Err(error)) => Some(error),
            None => Some(Fault::new("the decoder ended without a result").audit()),
        }
    }

    fn join(&mut self) {
        if let Some(runner) = self.runner.take() {
            // A panic was reported by its thread; that there is no outcome makes it an error here.
            let _ = runner.join();
        }
    }
}

impl Weights {
    /// The next parameter, wherever its bytes are.
    pub(super) fn advance(&mut self) -> Option<Result<(WeightSpec, Bytes)>> {
        if self.over {
            return None;
        }
        let Some(spec) = self.specs.get(self.next) else {
            return self.finish().map(Err);
        };
        let taken = {
            let mut state = lock(&self.shared.state);
            loop {
                let slot = &mut state.slots[self.next];
                if matches!(slot, Slot::Complete(_)) {
                    break Some(std::mem::replace(slot, Slot::Delivered));
                }
                if state.outcome.is_some() || state.stopped {
                    break None;
                }
                state = wait(&self.shared.changed, state);
            }
        };
        let bytes = match taken {
            Some(Slot::Complete(bytes)) => bytes,
            Some(Slot::Waiting(_) | Slot::Filling(..) | Slot::Delivered) | None => {
                let (index, count) = (self.next, self.specs.len());
                let lacking = || Fault::new(format!("parameter {index} of {count} was not completed")).audit();
                return Some(Err(self.finish().unwrap_or_else(lacking)));
            }
        };
        {
            let mut state = lock(&self.shared.state);
            state.held -= spec.bytes;
            state.next += 1;
        }
        self.shared.changed.notify_all();
        self.next += 1;
        Some(Ok((spec.clone(), bytes)))
    }
}

impl Iterator for Weights {
    type Item = Result<Loaded>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance()?;
        Some(next.and_then(|(WeightSpec { name, set, dtype, shape, .. }, bytes)| match bytes {
            Bytes::Host(bytes) => Ok(Loaded { name, set, dtype, shape, bytes }),
            Bytes::Device(_) => Err(Fault::new("the bytes are on a device").tensor(name).audit()),
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error may come at any time, even after the last parameter.
        (0, (!self.over).then(|| self.remaining() + 1).or(Some(0)))
    }
}

impl std::iter::FusedIterator for Weights {}

impl Drop for Weights {
    fn drop(&mut self) {
        self.shared.stop();
        self.join();
    }
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights").field("len", &self.specs.len()).field("next", &self.next).finish_non_exhaustive()
    }
}

/// Wakes the consumer when the engine ends, even by a panic.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Shared {
    /// The room of a parameter, as soon as it may begin.
    fn begin(&self, param: usize) -> Result<Room> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                // Never seen: either the consumer is gone or an earlier error is delivered.
                return Err(Fault::new("decoding was stopped").audit());
            }
            match state.slots.get(param) {
                Some(Slot::Filling(room, _)) => return Ok(room.clone()),
                Some(&Slot::Waiting(bytes)) => {
                    let is_next = self.made_with[param] as usize <= state.next;
                    if is_next || state.held.saturating_add(bytes) <= self.budget {
                        let room = Room::new(bytes, self.device.as_ref())?;
                        state.held += bytes;
                        state.slots[param] = Slot::Filling(room.clone(), bytes);
                        return Ok(room);
                    }
                }
                Some(Slot::Complete(_) | Slot::Delivered) | None => {
                    return Err(Fault::new(format!("bytes for parameter {param}, which is complete")).audit());
                }
            }
            state = wait(&self.changed, state);
        }
    }

    /// So many bytes of a parameter have come, and their worker no longer holds the buffer.
    fn arrived(&self, param: usize, bytes: u64) -> Result<()> {
        let mut state = lock(&self.state);
        let wrong = || Fault::new(format!("more bytes for parameter {param} than it has")).audit();
        let slot = &mut state.slots[param];
        match slot {
            Slot::Filling(_, missing) => *missing = missing.checked_sub(bytes).ok_or_else(wrong)?,
            Slot::Waiting(_) | Slot::Complete(_) | Slot::Delivered => return Err(wrong()),
        }
        if matches!(slot, Slot::Filling(_, 0))
            && let Slot::Filling(room, _) = std::mem::replace(slot, Slot::Delivered)
        {
            *slot = Slot::Complete(room.into_bytes().ok_or_else(wrong)?);
            let next = state.next == param;
            drop(state);
            if next {
                self.changed.notify_all();
            }
        }
        Ok(())
    }
}

impl Sink for Shared {
    fn put(&self, param: u32, _ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        let room = self.begin(param as usize)?;
        room.put(offset, bytes)?;
        drop(room);
        self.arrived(param as usize, bytes.len() as u64)
    }

    /// There is no manifest that would hold them.
    fn wants_deviations(&self) -> bool {
        false
    }

    fn stop(&self) {
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }
}

impl Resident for Shared {
    fn memory(&self, param: u32) -> Result<Arc<Memory>> {
        match self.begin(param as usize)? {
            Room::Device(memory) => Ok(memory),
            Room::Host(_) => Err(Fault::new(format!("parameter {param} has no memory on a device")).audit()),
        }
    }

    fn arrived(&self, param: u32, memory: Arc<Memory>, bytes: u64) -> Result<()> {
        // The last to arrive gives the memory away, which nobody else may hold then.
        drop(memory);
        Shared::arrived(self, param as usize, bytes)
    }
}
