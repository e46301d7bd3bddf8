//! Source: GGUF files, read with bounds and as one set of parts.
//!
//! [`GgufSet::open`] opens the parts, parses their headers and checks everything that can be checked without reading
//! tensor data. What it returns can be trusted: names are unique across the set, shapes and sizes do not overflow, and
//! every tensor's bytes lie inside its file.

mod cursor;
mod describe;
mod discover;
mod filesystem;
mod header;
mod map;
mod mark;
mod metadata;
mod reader;
mod render;
mod set;
mod tensor;
pub mod types;
mod value;

pub use describe::{Description, FileType, KeyDescription, PartDescription, TensorDescription, TypeDescription};
pub use map::Advice;
pub(crate) use map::Map;
pub use mark::Mark;
pub use metadata::{Field, Metadata};
pub(crate) use reader::read_up_to;
pub use reader::{Io, OpenOptions};
pub use set::{GgufSet, Part};
pub use tensor::SourceTensor;
pub use types::GgmlType;
pub use value::{Array, Mismatch, Value, ValueType};
