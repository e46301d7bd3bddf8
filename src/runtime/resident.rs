//! Parameters in the memory of a CUDA device.

use std::sync::Arc;

use super::checkpoint::RankCheckpoint;
use super::stream::{Bytes, WeightSpec, Weights};
use super::tensor::Tensor;
use crate::cuda::{Device, DriverError, Memory};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::mapping::Set;

/// Opens a device.
pub(super) fn open(ordinal: u32) -> Result<Arc<Device>> {
    Device::open(ordinal).map_err(|absence| Fault::new(absence.to_string()).remedy("See `ggshard devices`").device())
}

/// A parameter on a device.
#[derive(Debug)]
pub struct DeviceLoaded {
    /// Its name.
    pub name: String,
    /// The model itself, or the draft model.
    pub set: Set,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on the rank, row-major, slowest axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// The elements, row-major and little-endian. Freed when this is dropped.
    pub memory: Memory,
}

/// As [`Weights`], on a device.
pub struct DeviceWeights(pub(super) Weights);

impl DeviceWeights {
    /// What is delivered, and what is known about it.
    pub fn weights(&self) -> &Weights {
        &self.0
    }
}

impl Iterator for DeviceWeights {
    type Item = Result<DeviceLoaded>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.0.advance()?;
        Some(next.and_then(|(WeightSpec { name, set, dtype, shape, .. }, bytes)| match bytes {
            Bytes::Device(memory) => Ok(DeviceLoaded { name, set, dtype, shape, memory }),
            Bytes::Host(_) => Err(Fault::new("the bytes are not on a device").tensor(name).audit()),
        }))
    }
}

impl RankCheckpoint {
    /// Copies every tensor of this rank into the memory of the CUDA device of this number, in the plan's order.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) when the device cannot be used or has too little memory; the message names
    /// the tensor.
    pub fn load_to_device(&self, device: u32) -> Result<Vec<DeviceLoaded>> {
        let device = open(device)?;
        self.iter().map(|tensor| copy(self, &device, tensor)).collect()
    }
}

/// Copies a tensor to a device.
pub(super) fn copy(rank: &RankCheckpoint, device: &Arc<Device>, tensor: Tensor<'_>) -> Result<DeviceLoaded> {
    let copied = Memory::new(device, tensor.bytes.len()).and_then(|memory| {
        memory.write(0, tensor.bytes)?;
        Ok(memory)
    });
    let (name, dtype, shape) = (tensor.name.to_owned(), tensor.dtype, tensor.shape.to_vec());
    let memory = copied.map_err(|error| failed(rank, device, &name, &error))?;
    Ok(DeviceLoaded { name, set: rank.set(), dtype, shape, memory })
}

/// What a device did not do for a tensor.
pub(super) fn failed(rank: &RankCheckpoint, device: &Device, tensor: &str, error: &DriverError) -> Error {
    Fault::new(format!("{}: {error}", device.title())).file(rank.dir()).tensor(tensor).device()
}
