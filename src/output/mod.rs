//! Output: safetensors files, digests and the manifest.

pub mod digest;
pub mod filename;
pub mod safetensors;
pub mod space;
pub mod treehash;

pub use digest::Digest;
pub use safetensors::{SafetensorsHeader, TensorInfo};
pub use treehash::TreeHash;
