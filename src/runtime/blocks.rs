//! Kept blocks of an open checkpoint, decoded when they are asked for.

use std::sync::Mutex;

use super::checkpoint::RankCheckpoint;
use crate::dequant::{Dequantizer, FloatType, Nonfinite, Simd};
use crate::error::{Fault, Result};
use crate::gguf::GgmlType;
use crate::plan;
use crate::threads::{lock, on_threads};

/// Elements that a thread decodes at a time, about.
const TOGETHER: usize = 1 << 20;

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
        let pieces = Mutex::new(pieces.zip(to.chunks_mut(count * block * dtype.bytes())));
        let found = Mutex::new(Nonfinite::default());
        on_threads(self.threads(), || {
            loop {
                let next = lock(&pieces).next();
                let Some((from, to)) = next else { return };
                let seen = decoder.decode(from, dtype, to);
                *lock(&found) += seen;
            }
        });
        Ok(crate::threads::into_inner(found))
    }

    /// Decodes kept blocks into new memory, as [`RankCheckpoint::decode_to`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn decode(&self, name: &str, dtype: FloatType) -> Result<Vec<u8>> {
        let mut to = vec![0; self.blocks(name).map_or(0, |blocks| blocks.decoded_bytes(dtype))];
        self.decode_to(name, dtype, &mut to)?;
        Ok(to)
    }
}
