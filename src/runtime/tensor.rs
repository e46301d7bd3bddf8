//! A tensor of an open checkpoint: a view of its file's mapped bytes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::Dtype;
use crate::gguf::Map;

/// A tensor, borrowed from its checkpoint.
///
/// The bytes are row-major and little-endian. They begin at a multiple of the element's size: files are mapped at page
/// boundaries, their data begins at a multiple of 4,096 and wide element types come first. No more is promised: two
/// neighbours of a narrow type may share a cache line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// Its name in the serving stack.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on this rank, row-major, slowest axis first; empty for a scalar.
    pub shape: &'a [u64],
    /// The elements.
    pub bytes: &'a [u8],
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "Tensor", self.name, self.dtype, self.shape)
    }
}

/// As [`Tensor`], but keeps its file mapped by itself, however long the checkpoint lives.
#[derive(Clone)]
pub struct SharedTensor {
    pub(super) name: Arc<str>,
    pub(super) dtype: Dtype,
    pub(super) shape: Arc<[u64]>,
    pub(super) map: Arc<Map>,
    /// Inside the map.
    pub(super) range: Range<usize>,
}

impl SharedTensor {
    /// Its name in the serving stack.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Shape on this rank, row-major, slowest axis first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The elements, aligned as [`Tensor`] says. The address is the same for as long as this tensor or a clone lives.
    pub fn as_bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

impl fmt::Debug for SharedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "SharedTensor", &self.name, self.dtype, &self.shape)
    }
}

/// Without the bytes, of which there may be gigabytes.
fn debug(f: &mut fmt::Formatter<'_>, what: &str, name: &str, dtype: Dtype, shape: &[u64]) -> fmt::Result {
    f.debug_struct(what).field("name", &name).field("dtype", &dtype).field("shape", &shape).finish_non_exhaustive()
}
