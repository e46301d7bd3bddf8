//! The kernels that are part of this program, and which of them a device takes.

use super::absence::{Absence, Capability};
use super::driver::Version;

/// Kernels as a compiler left them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Artifact {
    /// Its file in `kernels/prebuilt/`.
    pub name: &'static str,
    /// What the driver takes: ELF, or text that ends with a zero byte.
    pub image: &'static [u8],
}

/// Machine code, by the major number of the architectures that run it.
const CUBINS: [(u32, Artifact); 4] = [
    (8, Artifact { name: "sm_80.cubin", image: include_bytes!("../../kernels/prebuilt/sm_80.cubin") }),
    (9, Artifact { name: "sm_90.cubin", image: include_bytes!("../../kernels/prebuilt/sm_90.cubin") }),
    (10, Artifact { name: "sm_100.cubin", image: include_bytes!("../../kernels/prebuilt/sm_100.cubin") }),
    (12, Artifact { name: "sm_120.cubin", image: include_bytes!("../../kernels/prebuilt/sm_120.cubin") }),
];

/// What the driver compiles for architectures that came later.
const PTX: Artifact = Artifact {
    name: "compute_80.ptx",
    image: concat!(include_str!("../../kernels/prebuilt/compute_80.ptx"), "\0").as_bytes(),
};
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
        assert!(CUBINS.iter().all(|(_, cubin)| cubin.image.starts_with(b"\x7fELF")));
        assert!(PTX.image.ends_with(b"\0") && PTX.image.windows(12).any(|w| w == b".version 8.8"));
    }
}
