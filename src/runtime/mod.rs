//! Runtime: a model's weights in the memory of the program that serves it.
//!
//! ```text
//! converted folder ─► RankCheckpoint: one rank's files, checked against the manifest, mapped ─► views, prefetch, copies
//!                                                                                            └► kept blocks, decoded
//! GGUF ─► Source ─► plan, audited ─► engine ─► Weights: parameters in the plan's order, decoded ahead of the consumer
//! ```
//!
//! Nothing here trusts the program that loads: names, dtypes and shapes are compared with the manifest or come from an
//! audited plan, and every difference is an error that names the file and the tensor.

mod blocks;
mod buffer;
mod checkpoint;
mod decoded;
mod load;
mod resident;
mod source;
mod stream;
mod tensor;

pub use blocks::{Blocks, DecodeOptions};
pub use checkpoint::{OpenOptions, RankCheckpoint, Verify};
pub use decoded::{DecodedBytes, DecodedTensor, DecodedTensors, DeviceDecoded};
pub use resident::{DeviceLoaded, DeviceWeights};
pub use source::{RankOptions, Source, WeightOptions};
pub use stream::{Loaded, WeightSpec, Weights};
pub use tensor::{SharedTensor, Tensor};

pub use crate::mapping::Set;
