//! Kept blocks of an open checkpoint, decoded when they are asked for.

use std::sync::Mutex;

use super::checkpoint::RankCheckpoint;
use crate::dequant::{Dequantizer, FloatType, Nonfinite, Simd};
use crate::error::{Fault, Result};
use crate::gguf::GgmlType;
use crate::plan;
use crate::threads::{self, lock, on_threads};

/// Elements that a thread decodes at a time, about.
const TOGETHER: usize = 1 << 20;

/// How kept blocks are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeOptions {
    /// The type that their weights get. Tensors that are not kept as blocks have their own.
    pub dtype: FloatType,
    /// Whether NaN, infinities and overflows are let through.
    pub allow_nonfinite: bool,
}

impl From<FloatType> for DecodeOptions {
    /// What is not finite is refused.
    fn from(dtype: FloatType) -> Self {
        DecodeOptions { dtype, allow_nonfinite: false }
    }
}

/// A tensor of quantized blocks, borrowed from its checkpoint. Its name there ends with `qweight`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks<'a> {
    /// The name of the weight that they decode to.
    pub weight: String,
    /// The type of all blocks.
    pub ty: GgmlType,
    /// Shape of the weight on this rank, in elements, row-major, slowest axis first.
    pub shape: Vec<u64>,
    /// The blocks, row after row.
    pub bytes: &'a [u8],
}

impl Blocks<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }

    /// Number of bytes that they decode to.
    pub fn decoded_bytes(&self, dtype: FloatType) -> usize {
        self.elements() * dtype.bytes()
    }
}

impl RankCheckpoint {
    /// The kept blocks of that name; `None` where there is no such tensor, or it is none of blocks.
    pub fn blocks(&self, name: &str) -> Option<Blocks<'_>> {
        let tensor = self.get(name)?;
        let ty = self.block_type(name)?;
        let weight = plan::weight_name(name).unwrap_or_else(|| name.to_owned());
        let (last, lead) = tensor.shape.split_last()?;
        let cols = last / ty.block_bytes() * ty.block();
        let shape = lead.iter().copied().chain([cols]).collect();
        Some(Blocks { weight, ty, shape, bytes: tensor.bytes })
    }

    /// Decodes kept blocks into `to`, which must have exactly [`Blocks::decoded_bytes`] bytes, in parallel: the same bytes
    /// as a conversion to that type writes. Counts values that are not finite.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) when there are no such blocks or the length differs.
    pub fn decode_to(&self, name: &str, dtype: FloatType, to: &mut [u8]) -> Result<Nonfinite> {
        let fault = |found: String| Fault::new(found).file(self.dir()).tensor(name);
        let none = || fault(format!("rank {} has no such blocks", self.rank())).checkpoint();
        let blocks = self.blocks(name).ok_or_else(none)?;
        let decoder = Dequantizer::new(blocks.ty, Simd::detect()).ok_or_else(none)?;
        let wanted = blocks.decoded_bytes(dtype);
        if to.len() != wanted {
            let found = fault(format!("{} bytes of memory were given", to.len()));
            return Err(found.expected(format!("{wanted} bytes, for {dtype} {:?}", blocks.shape)).checkpoint());
        }
        let block = blocks.ty.block() as usize;
        let count = TOGETHER / block;
        let pieces = blocks.bytes.chunks(count * blocks.ty.block_bytes() as usize);
        let threads = threads::count(self.threads()).min(pieces.len()).max(1);
        let pieces = Mutex::new(pieces.zip(to.chunks_mut(count * block * dtype.bytes())));
        let found = Mutex::new(Nonfinite::default());
        on_threads(threads, || {
            loop {
                let next = lock(&pieces).next();
                let Some((from, to)) = next else { return };
                let seen = decoder.decode(from, dtype, to);
                *lock(&found) += seen;
            }
        });
        Ok(threads::into_inner(found))
    }

    /// Decodes kept blocks into new memory, as [`RankCheckpoint::decode_to`].
    ///
    /// # Errors
    ///
    /// As there, and [`Error::Nonfinite`](crate::Error::Nonfinite) for values that are not finite, unless they are allowed.
    pub fn decode(&self, name: &str, options: impl Into<DecodeOptions>) -> Result<Vec<u8>> {
        let options = options.into();
        let blocks = self.blocks(name);
        let mut to = vec![0; blocks.as_ref().map_or(0, |blocks| blocks.decoded_bytes(options.dtype))];
        let found = self.decode_to(name, options.dtype, &mut to)?;
        blocks.map_or(Ok(()), |blocks| self.accept(&blocks, options, found))?;
        Ok(to)
    }

    /// Refuses what is not finite among decoded values, unless it is allowed.
    pub(super) fn accept(&self, blocks: &Blocks<'_>, options: DecodeOptions, found: Nonfinite) -> Result<()> {
        let DecodeOptions { dtype, allow_nonfinite } = options;
        if allow_nonfinite || !found.any() {
            return Ok(());
        }
        let Nonfinite { nan, inf, overflow } = found;
        let what = format!("{nan} NaN, {inf} infinite and {overflow} values that overflow {dtype}");
        let fault = Fault::new(format!("{} blocks that decode to {what}", blocks.ty)).file(self.dir());
        let remedy = if nan + inf == 0 {
            "Decode to bf16 or f32, which have the range"
        } else {
            "The source of the folder was damaged or made from a damaged model; let the values through with allow_nonfinite"
        };
        Err(fault.tensor(&blocks.weight).expected("finite values").remedy(remedy).nonfinite())
    }
}
