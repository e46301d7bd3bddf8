//! Engine: executes a plan in one pass over the sources.
//!
//! ```text
//! parameters in the plan's order ─► jobs ─► tiles ─► workers: decode, then hand the bytes to the sink
//!                                                             (hash and write while they are in cache)
//! ```
//!
//! A **job** is a region of one source and every place that it goes to, on whatever ranks; a **tile** is as much of a
//! job as fits the cache. Workers take tiles in order and finish them in any order: the sink hashes out of order, so
//! nothing waits for a neighbour, memory is bounded by (workers × tile), and the bytes depend on neither. Encoded
//! parameters are tiled by their own blocks instead.

mod device;
mod encode;
mod job;
mod reads;
mod run;
mod stage;
mod tile;

pub use device::Device;
pub use reads::Reads;
pub(crate) use run::check_cancel;
pub use run::{Engine, Options, Outcome};

use std::ops::Range;
use std::sync::Arc;

use crate::dequant::Nonfinite;
use crate::encode::Deviation;
use crate::error::Result;

/// Sees which bytes of the source are needed, before they are read.
pub trait Observer: Sync {
    /// A worker is about to read a byte range of a part's file. It lends a buffer, whose content is of no meaning.
    ///
    /// Ranges come in any order and from any worker.
    fn before(&self, part: usize, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<()>;
}

/// Takes what devices decode where it is, in memory of the device. What the CPU makes goes to the [`Sink`].
pub(crate) trait Resident: Sync {
    /// The memory of a parameter's slice, which may make a worker wait as [`Sink::put`] may.
    fn memory(&self, param: u32) -> Result<Arc<crate::cuda::Memory>>;

    /// So many bytes of it are there.
    fn arrived(&self, param: u32, memory: Arc<crate::cuda::Memory>, bytes: u64) -> Result<()>;
}

/// Takes the finished bytes.
pub trait Sink: Sync {
    /// Takes `bytes` that begin at byte `offset` of the slice that each of `ranks` holds of parameter `param`.
    ///
    /// Every byte of every slice comes exactly once, in any order and from any worker. `ranks` hold equal slices.
    ///
    /// Tiles begin in the plan's order, so a sink may keep a worker waiting until earlier parameters are complete.
    fn put(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()>;

    /// Told of values that are not finite, before `put` brings them: so many more are in the slice that each of `ranks`
    /// holds of parameter `param`.
    fn note(&self, _param: u32, _ranks: &[u32], _found: Nonfinite) {}

    /// Whether it is to be told how far encoded bytes are from the values. Finding that out takes a pass over both.
    fn wants_deviations(&self) -> bool {
        true
    }

    /// Told how far encoded bytes are from the values, before `put` brings them: that much more of the slice that each of
    /// `ranks` holds of parameter `param`. Not called if it [does not want](Sink::wants_deviations) that.
    fn deviate(&self, _param: u32, _ranks: &[u32], _found: &Deviation) {}

    /// The run has failed and no more is coming: a sink that keeps workers waiting must let them go.
    fn stop(&self) {}
}
