//! CUDA devices: whether there are any, the kernels, and buffers on both sides.
//!
//! | part | what it is |
//! |---|---|
//! | `driver` | the driver's functions, found in its library when first asked for |
//! | [`Absence`] | every reason why a device cannot be used |
//! | `artifact` | the kernels that are part of the program, and which of them a device takes |
//! | [`launch`] | what a decoding kernel is launched with |
//! | [`encode`] | what an encoding kernel is launched with, and what it finds |
//! | `device` | a device with its kernels, streams, events and memory, each freed when it is dropped |
//! | `lane` | buffers for one tile, and the way of a tile through them |
//! | `area` | the way of values that are encoded, through the same buffers |
//! | `trial` | work that is timed |
//! | [`devices`] | the list for people |
//!
//! Nothing here knows of plans: the engine's device stage does (`engine/stage.rs`). `docs/gpu.md` says the rest.

mod absence;
mod area;
mod artifact;
mod device;
mod driver;
pub mod encode;
mod lane;
pub mod launch;
mod list;
mod trial;

pub use absence::{Absence, Capability};
pub use device::Memory;
pub use driver::{DriverError, Version};
pub use encode::{Encode, Encoder, Found};
pub use launch::{Grid, Launch};
pub use list::{DeviceInfo, Devices, devices};

pub(crate) use area::{Area, Format, Part};
pub(crate) use device::Device;
pub(crate) use lane::{Lane, Piece, Values, lanes};
pub(crate) use trial::Trial;
