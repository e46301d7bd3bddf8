//! Output: safetensors files, digests and the manifest.

mod deviation;
pub mod digest;
pub(crate) mod file;
pub mod filename;
pub mod folder;
mod index;
pub mod lock;
pub mod manifest;
pub mod safetensors;
pub mod seal;
mod source_hash;
pub mod space;
pub mod sums;
pub mod treehash;
pub mod work;
mod writer;

pub use deviation::{Deviating, Deviation, Worst};
pub use digest::Digest;
pub use folder::OutputFolder;
pub(crate) use index::Index;
pub use manifest::Manifest;
pub use safetensors::{SafetensorsHeader, TensorInfo};
pub use source_hash::SourceHasher;
pub use sums::Sums;
pub use treehash::TreeHash;
pub use writer::Writer;
pub(crate) use writer::header_of;
