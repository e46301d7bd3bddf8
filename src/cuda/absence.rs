//! Why there is no CUDA device to work with.

use super::driver::{DriverError, Version};

/// Why a machine, or one of its devices, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absence {
    /// No library of the driver was found.
    #[error("the CUDA driver's library (libcuda.so.1) is not installed, or not where the loader looks")]
    NoLibrary,
    /// The library lacks a function.
    #[error("the CUDA driver has no function {0}: it is older than CUDA 12, or a stub")]
    NoFunction(&'static str),
    /// The driver is too old for the kernels.
    #[error("the driver supports CUDA {found}; CUDA {oldest} or later is needed")]
    OldDriver {
        /// What the driver supports.
        found: Version,
        /// What is needed.
        oldest: Version,
    },
    /// The driver sees no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,
    /// The driver refused to begin, or to open a device.
    #[error("the CUDA driver fails: {0}")]
    Driver(#[from] DriverError),
    /// There is no device of this number.
    #[error("there is no CUDA device {ordinal}; there are {devices}, from 0")]
    NoSuchDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// There are no kernels for the device's architecture.
    #[error("there are no kernels for compute capability {0}")]
    NoKernels(Capability),
    /// The only kernels for the device are PTX that the driver cannot compile.
    #[error(
        "compute capability {capability} needs kernels that the driver compiles, which takes CUDA {needed} or later; it \
         supports CUDA {found}"
    )]
    OldCompiler {
        /// The device's architecture.
        capability: Capability,
        /// What the driver supports.
        found: Version,
        /// What the kernels need.
        needed: Version,
    },
    /// The driver refuses the kernels.
    #[error("the CUDA driver refuses the kernels {artifact}: {error}")]
    Refused {
        /// Name of the file with the kernels.
        artifact: &'static str,
        /// What the driver says.
        error: DriverError,
    },
}

/// The architecture of a device, as CUDA numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    /// 9 of 9.0.
    pub major: u32,
    /// 0 of 9.0.
    pub minor: u32,
}

impl std::fmt::Display for Capability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
