//! The kernels that are part of this program, and which of them a device takes.

use super::absence::{Absence, Capability};
use super::driver::Version;

/// Kernels as a compiler left them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Artifact {
    /// Its name: that of its file in `kernels/prebuilt/`, without `.z`.
    pub name: &'static str,
    /// The file, which zlib has packed: a sixth of the image.
    packed: &'static [u8],
}

impl Artifact {
    /// What the driver takes, with a zero byte at its end: ELF, or text.
    pub fn image(&self) -> Result<Vec<u8>, String> {
        let mut image = miniz_oxide::inflate::decompress_to_vec_zlib(self.packed).map_err(|e| e.to_string())?;
        image.push(0);
        Ok(image)
    }
}

/// Machine code, by the major number of the architectures that run it.
const CUBINS: [(u32, Artifact); 4] = [
    (8, Artifact { name: "sm_80.cubin", packed: include_bytes!("../../kernels/prebuilt/sm_80.cubin.z") }),
    (9, Artifact { name: "sm_90.cubin", packed: include_bytes!("../../kernels/prebuilt/sm_90.cubin.z") }),
    (10, Artifact { name: "sm_100.cubin", packed: include_bytes!("../../kernels/prebuilt/sm_100.cubin.z") }),
    (12, Artifact { name: "sm_120.cubin", packed: include_bytes!("../../kernels/prebuilt/sm_120.cubin.z") }),
];

/// What the driver compiles for architectures that came later.
const PTX: Artifact =
    Artifact { name: "compute_80.ptx", packed: include_bytes!("../../kernels/prebuilt/compute_80.ptx.z") };
/// The oldest driver that compiles it: it is PTX 8.8.
const PTX_NEEDS: Version = Version { major: 12, minor: 9 };

/// The kernels for an architecture: those compiled for it, or else, if it is a later one, PTX.
pub(super) fn choose(capability: Capability, driver: Version) -> Result<Artifact, Absence> {
    if let Some((_, cubin)) = CUBINS.iter().find(|(major, _)| *major == capability.major) {
        return Ok(*cubin);
    }
    if capability.major < CUBINS[0].0 {
        return Err(Absence::NoKernels(capability));
    }
    if driver < PTX_NEEDS {
        return Err(Absence::OldCompiler { capability, found: driver, needed: PTX_NEEDS });
    }
    Ok(PTX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_takes_the_kernels_of_its_architecture_and_ptx_last() {
        let choose = |major, minor, version: (u32, u32)| {
            choose(Capability { major, minor }, Version { major: version.0, minor: version.1 })
        };
        for (major, minor, name) in [
            (8, 0, "sm_80.cubin"),
            (8, 9, "sm_80.cubin"),
            (9, 0, "sm_90.cubin"),
            (10, 3, "sm_100.cubin"),
            (12, 1, "sm_120.cubin"),
        ] {
            assert_eq!(choose(major, minor, (12, 0)).unwrap().name, name);
        }
        for (major, minor) in [(11, 0), (13, 0)] {
            assert_eq!(choose(major, minor, (12, 9)).unwrap().name, "compute_80.ptx");
            assert!(matches!(choose(major, minor, (12, 8)), Err(Absence::OldCompiler { .. })));
        }
        assert!(matches!(choose(7, 5, (13, 0)), Err(Absence::NoKernels(_))));
    }

    #[test]
    fn kernels_are_what_their_names_say() {
        assert!(CUBINS.iter().all(|(_, cubin)| cubin.image().unwrap().starts_with(b"\x7fELF")));
        let text = PTX.image().unwrap();
        assert!(text.ends_with(b"\n\0") && text.windows(12).any(|w| w == b".version 8.8"));
    }
}
