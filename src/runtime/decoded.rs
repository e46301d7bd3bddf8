//! A rank with its kept blocks decoded, tensor by tensor: in memory of the host, or of a CUDA device.
//!
//! ```text
//! kept blocks ─► host:   every thread decodes runs of blocks into new memory
//!             └► device: every lane takes runs of blocks there, where they are decoded into the tensor's memory
//! other tensors ─► host: views of the mapped file; device: copies
//! ```

use std::collections::BTreeMap;
use std::iter::FusedIterator;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use super::blocks::{Blocks, DecodeOptions};
use super::checkpoint::RankCheckpoint;
use super::resident::{self, DeviceLoaded};
use super::tensor::{SharedTensor, Tensor};
use crate::cuda::{Device, DriverError, Lane, Memory, Piece, Values, lanes};
use crate::dequant::{FloatType, Nonfinite};
use crate::dtype::Dtype;
use crate::error::{Fault, Result};
use crate::threads::{count, into_inner, lock, on_threads};

/// Bytes of blocks that go to a device at a time, where memory allows.
const TILE: usize = 16 << 20;
/// Most lanes: one is filled while others are on their way.
const LANES: usize = 3;

/// A tensor of a rank whose kept blocks are decoded.
#[derive(Debug, Clone)]
pub struct DecodedTensor {
    /// Its name; of kept blocks, that of the weight that they are.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on the rank, row-major, slowest axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// The elements, row-major and little-endian.
    pub bytes: DecodedBytes,
}

/// Where the elements of a tensor are.
#[derive(Clone)]
pub enum DecodedBytes {
    /// In its file, which stays mapped: it was not kept as blocks.
    Mapped(SharedTensor),
    /// In memory of its own.
    Decoded(Vec<u8>),
}

impl Deref for DecodedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            DecodedBytes::Mapped(tensor) => tensor.as_bytes(),
            DecodedBytes::Decoded(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for DecodedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for DecodedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            DecodedBytes::Mapped(_) => "Mapped",
            DecodedBytes::Decoded(_) => "Decoded",
        };
        f.debug_struct(name).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Where an iterator over a rank is.
struct Walk {
    rank: RankCheckpoint,
    options: DecodeOptions,
    next: usize,
    nonfinite: BTreeMap<String, Nonfinite>,
}

impl Walk {
    fn remaining(&self) -> usize {
        self.rank.len() - self.next
    }

    /// The next tensor as `make` makes it, with what it found. After an error there are no more.
    fn advance<T>(
        &mut self,
        make: impl FnOnce(&RankCheckpoint, Tensor<'_>, Option<&Blocks<'_>>) -> Result<(T, Nonfinite)>,
    ) -> Option<Result<T>> {
        let tensor = self.rank.at(self.next)?;
        let blocks = self.rank.blocks(tensor.name);
        let made = make(&self.rank, tensor, blocks.as_ref()).and_then(|(made, found)| {
            if let Some(blocks) = blocks.filter(|_| found.any()) {
                self.rank.accept(&blocks, self.options, found)?;
                self.nonfinite.insert(blocks.weight, found);
            }
            Ok(made)
        });
        self.next = if made.is_ok() { self.next + 1 } else { self.rank.len() };
        Some(made)
    }
}

/// The tensors of a rank in the plan's order, kept blocks decoded. One at a time is in memory, beside those that the
/// consumer keeps. After an error, which comes once, there are no more items.
pub struct DecodedTensors(Walk);

impl DecodedTensors {
    /// Number of tensors that are yet to come, if no error comes.
    pub fn remaining(&self) -> usize {
        self.0.remaining()
    }

    /// Weights with values that are not finite, where those are allowed, among those that came.
    pub fn nonfinite(&self) -> &BTreeMap<String, Nonfinite> {
        &self.0.nonfinite
    }
}

impl Iterator for DecodedTensors {
    type Item = Result<DecodedTensor>;

    fn next(&mut self) -> Option<Self::Item> {
        let dtype = self.0.options.dtype;
        self.0.advance(|rank, tensor, blocks| match blocks {
            Some(blocks) => {
                let mut bytes = vec![0; blocks.decoded_bytes(dtype)];
                let found = rank.decode_to(tensor.name, dtype, &mut bytes)?;
                let (name, shape) = (blocks.weight.clone(), blocks.shape.clone());
                let bytes = DecodedBytes::Decoded(bytes);
                Ok((DecodedTensor { name, dtype: dtype.into(), shape, bytes }, found))
            }
            None => {
                let (name, dtype, shape) = (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec());
                let lacking = || Fault::new("the tensor is gone").tensor(tensor.name).audit();
                let bytes = DecodedBytes::Mapped(rank.shared(tensor.name).ok_or_else(lacking)?);
                Ok((DecodedTensor { name, dtype, shape, bytes }, Nonfinite::default()))
            }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.remaining()))
    }
}

impl FusedIterator for DecodedTensors {}

/// As [`DecodedTensors`], in memory of a CUDA device.
pub struct DeviceDecoded {
    walk: Walk,
    device: Arc<Device>,
    lanes: Vec<Lane>,
}

impl DeviceDecoded {
    /// Number of tensors that are yet to come, if no error comes.
    pub fn remaining(&self) -> usize {
        self.walk.remaining()
    }

    /// As [`DecodedTensors::nonfinite`].
    pub fn nonfinite(&self) -> &BTreeMap<String, Nonfinite> {
        &self.walk.nonfinite
    }
}

impl Iterator for DeviceDecoded {
    type Item = Result<DeviceLoaded>;

    fn next(&mut self) -> Option<Self::Item> {
        let DeviceDecoded { walk, device, lanes } = self;
        let dtype = walk.options.dtype;
        walk.advance(|rank, tensor, blocks| match blocks {
            Some(blocks) => {
                let decoded = Memory::new(device, blocks.decoded_bytes(dtype)).and_then(|memory| {
                    let found = decode_into(lanes, blocks, dtype, &memory)?;
                    Ok((memory, found))
                });
                let (memory, found) = decoded.map_err(|error| resident::failed(rank, device, tensor.name, &error))?;
                let (name, shape) = (blocks.weight.clone(), blocks.shape.clone());
                Ok((DeviceLoaded { name, set: rank.set(), dtype: dtype.into(), shape, memory }, found))
            }
            None => Ok((resident::copy(rank, device, tensor)?, Nonfinite::default())),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.remaining()))
    }
}

impl FusedIterator for DeviceDecoded {}

impl RankCheckpoint {
    /// Every tensor of this rank, kept blocks decoded. Each is decoded in parallel when it is asked for.
    ///
    /// Items are errors as those of [`RankCheckpoint::decode`].
    pub fn decoded(&self, options: impl Into<DecodeOptions>) -> DecodedTensors {
        DecodedTensors(self.walk(options.into()))
    }

    /// As [`RankCheckpoint::decoded`], in memory of the CUDA device of this number: blocks are sent there and decoded where
    /// they stay; other tensors are copied. Buffers of up to 96 MiB of pinned memory, and as much of the device's, are held
    /// beside the tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) when the device cannot be used or has too little memory; as an item later.
    pub fn decoded_on(&self, options: impl Into<DecodeOptions>, device: u32) -> Result<DeviceDecoded> {
        let device = resident::open(device)?;
        let lanes = lanes(std::slice::from_ref(&device), count(self.threads()).min(LANES), TILE)
            .map_err(|(_, error)| Fault::new(format!("{} has no buffers: {error}", device.title())).device())?;
        Ok(DeviceDecoded { walk: self.walk(options.into()), device, lanes })
    }

    fn walk(&self, options: DecodeOptions) -> Walk {
        Walk { rank: self.clone(), options, next: 0, nonfinite: BTreeMap::new() }
    }
}

/// Decodes blocks into memory of the lanes' device.
fn decode_into(
    lanes: &mut [Lane],
    blocks: &Blocks<'_>,
    dtype: FloatType,
    memory: &Memory,
) -> Result<Nonfinite, DriverError> {
    let block_bytes = blocks.ty.block_bytes() as usize;
    let together = lanes.iter().map(Lane::tile).min().unwrap_or(TILE) / block_bytes;
    let runs = blocks.bytes.chunks(together * block_bytes);
    let threads = lanes.len().min(runs.len());
    let runs = Mutex::new(runs.zip((0..).step_by(together * blocks.ty.block() as usize)));
    let lanes = Mutex::new(lanes.iter_mut());
    let outcome = Mutex::new(Ok(Nonfinite::default()));
    on_threads(threads.max(1), || {
        let taken = lock(&lanes).next();
        let Some(lane) = taken else { return };
        loop {
            let next = lock(&runs).next();
            let Some((run, first)) = next else { return };
            lane.input()[..run.len()].copy_from_slice(run);
            let cols = (run.len() / block_bytes) as u64 * blocks.ty.block();
            let piece = Piece { source: 0, row_bytes: run.len(), skip: 0, rows: 1, cols, transpose: false };
            let values = Values { ty: blocks.ty, scale: None, add: None, dtype };
            let counts = lane.decode_into(values, run.len(), &[(piece, memory, first, cols)]);
            let mut outcome = lock(&outcome);
            match (&mut *outcome, counts) {
                (Ok(sum), Ok(counts)) => counts.into_iter().for_each(|found| *sum += found),
                (Ok(_), Err(error)) => *outcome = Err(error),
                (Err(_), _) => return,
            }
        }
    });
    into_inner(outcome)
}
