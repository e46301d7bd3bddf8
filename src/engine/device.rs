//! What decodes: the CPU or CUDA devices.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::cuda::{self, Absence};
use crate::error::{Fault, Result};

/// Conversions with more threads than this are no faster with a device: that many cores already decode, hash and write
/// as fast as a disk takes the bytes.
const FEW_THREADS: usize = 4;
/// Below this many bytes of output, a conversion is over before a device has begun.
const SMALLEST: u64 = 64 << 20;

/// What decodes. It changes no byte of the output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// The first CUDA device, where there is one and it pays: with at most 4 threads and at least 64 MiB of output. If
    /// it fails, the CPU goes on.
    Auto,
    /// The CUDA devices with these numbers. That one is missing or fails is an error.
    Cuda(Vec<u32>),
}

impl FromStr for Device {
    type Err = String;

    /// Reads `auto`, `cpu`, `cuda` (the first device), `cuda:N` or `cuda:N,M`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no device; write auto, cpu, cuda, cuda:0 or cuda:0,1");
        let numbers = match (text, text.split_once(':')) {
            ("auto", _) => return Ok(Device::Auto),
            ("cpu", _) => return Ok(Device::Cpu),
            ("cuda", _) => return Ok(Device::Cuda(vec![0])),
            (_, Some(("cuda", numbers))) => numbers,
            (_, Some(_) | None) => return Err(wrong()),
        };
        let mut ordinals: Vec<u32> =
            numbers.split(',').map(|number| number.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
        ordinals.sort_unstable();
        ordinals.dedup();
        Ok(Device::Cuda(ordinals))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Auto => f.write_str("auto"),
            Device::Cuda(ordinals) => {
                let numbers: Vec<String> = ordinals.iter().map(u32::to_string).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
        }
    }
}

impl Device {
    /// The devices to work with, none for the CPU, given how many threads make how many bytes.
    pub(super) fn open(&self, threads: usize, bytes: u64) -> Result<Vec<Arc<cuda::Device>>> {
        match self {
            Device::Cpu => Ok(Vec::new()),
            Device::Auto if threads > FEW_THREADS || bytes < SMALLEST => Ok(Vec::new()),
            Device::Auto => match cuda::Device::open(0) {
                Ok(device) => Ok(vec![device]),
                // A machine without CUDA is no less than any other.
                Err(absence @ (Absence::NoLibrary | Absence::NoDevice)) => {
                    tracing::info!("decoding on the CPU: {absence}");
                    Ok(Vec::new())
                }
                Err(absence) => {
                    tracing::warn!("decoding on the CPU: {absence}");
                    Ok(Vec::new())
                }
            },
            Device::Cuda(ordinals) => {
                let opened = ordinals.iter().map(|ordinal| cuda::Device::open(*ordinal));
                opened.collect::<Result<_, _>>().map_err(|absence| {
                    let fault = Fault::new(format!("--device {self}: {absence}"));
                    fault.remedy("See `ggshard devices`, or decode with --device cpu").device()
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_written() {
        for (text, device) in [
            ("cpu", Device::Cpu),
            ("auto", Device::Auto),
            ("cuda:0", Device::Cuda(vec![0])),
            ("cuda:0,3", Device::Cuda(vec![0, 3])),
        ] {
            assert_eq!(text.parse(), Ok(device.clone()));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(vec![0])));
        assert_eq!("cuda:3,0,3".parse(), Ok(Device::Cuda(vec![0, 3])));
        for text in ["", "gpu", "cuda:", "cuda:a", "cuda:0,", "cuda:-1", "rocm:0", "CUDA"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
