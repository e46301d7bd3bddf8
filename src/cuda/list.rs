//! The devices of this machine, for people who ask why one is not used.

use serde::Serialize;

use super::device::{Device, about};
use super::driver::driver;

/// The devices, or why there are none.
#[derive(Debug, Clone, Serialize)]
pub struct Devices {
    /// The newest version of CUDA that the driver knows.
    pub driver: Option<String>,
    /// Why there is no device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
    /// The devices.
    pub devices: Vec<DeviceInfo>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceInfo {
    /// Its number, as in `--device cuda:0`.
    pub ordinal: u32,
    /// Its name.
    pub name: Option<String>,
    /// Its architecture, such as 9.0.
    pub capability: Option<String>,
    /// Bytes of its memory.
    pub memory: Option<u64>,
    /// The kernels that it takes: a file of `kernels/prebuilt/`.
    pub kernels: Option<&'static str>,
    /// Why it cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

impl DeviceInfo {
    /// Whether it can be used.
    pub fn usable(&self) -> bool {
        self.absent.is_none()
    }
}

/// Lists the devices. Each is opened, and the kernels are loaded: what is called usable has been tried.
pub fn devices() -> Devices {
    let driver = match driver() {
        Ok(driver) => driver,
        Err(absence) => return Devices { driver: None, absent: Some(absence.to_string()), devices: Vec::new() },
    };
    let info = |ordinal| {
        let opened = Device::open(ordinal);
        let kernels = opened.as_ref().ok().map(|device| device.kernels());
        let absent = opened.err().map(|absence| absence.to_string());
        let about = about(driver, ordinal).ok();
        DeviceInfo {
            ordinal,
            name: about.as_ref().map(|about| about.name.clone()),
            capability: about.as_ref().map(|about| about.capability.to_string()),
            memory: about.map(|about| about.memory),
            kernels,
            absent,
        }
    };
    Devices { driver: Some(driver.version.to_string()), absent: None, devices: (0..driver.devices).map(info).collect() }
}
