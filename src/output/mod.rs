//! Output: safetensors files, digests and the manifest.

pub mod digest;
pub mod filename;
pub mod folder;
pub mod manifest;
pub mod safetensors;
mod source_hash;
pub mod space;
pub mod sums;
pub mod treehash;
mod writer;

pub use digest::Digest;
pub use folder::OutputFolder;
pub use manifest::Manifest;
pub use safetensors::{SafetensorsHeader, TensorInfo};
pub use source_hash::SourceHasher;
pub use sums::Sums;
pub use treehash::TreeHash;
pub use writer::Writer;
pub(crate) use writer::header_of;
