//! `ggshard devices`

use std::process::ExitCode;

use anyhow::Result;
use ggshard::cuda::{self, DeviceInfo};

use super::args::Devices;
use super::print::{print, print_json};

/// Lists the devices. Exit status 1 if none can be used.
pub fn devices(args: &Devices) -> Result<ExitCode> {
    let found = cuda::devices();
    if args.json {
        print_json(&found)?;
    } else {
        let driver = found.driver.iter().map(|version| format!("driver     CUDA {version}\n"));
        let absent = found.absent.iter().map(|absent| format!("no device  {absent}\n"));
        let lines = driver.chain(absent).chain(found.devices.iter().map(line));
        print(&lines.collect::<String>())?;
    }
    let usable = found.devices.iter().any(DeviceInfo::usable);
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn line(device: &DeviceInfo) -> String {
    let name = device.name.as_deref().unwrap_or("(no name)");
    let about = match (&device.capability, device.memory) {
        (Some(capability), Some(memory)) => {
            format!(", compute capability {capability}, {:.1} GB", memory as f64 / 1e9)
        }
        (_, _) => String::new(),
    };
    let state = match (&device.absent, device.kernels) {
        (Some(absent), _) => absent,
        (None, Some(kernels)) => kernels,
        (None, None) => "usable",
    };
    format!("cuda:{:<5} {name}{about}: {state}\n", device.ordinal)
}
