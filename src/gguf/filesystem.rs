//! Which file systems are local: where a mapped file can only fail with its own disk, not with a network or a server.

use std::fs::File;

/// File systems whose files can become shorter or unreachable by what happens on another machine or in another process,
/// by the `f_type` of `statfs(2)`. Up to "OCFS2" the numbers are those of `linux/magic.h`; those after it are in the file
/// systems' own headers and in the table of GNU coreutils' `stat`. An overlay, as containers have, counts as local, as
/// almost all are.
#[cfg(target_os = "linux")]
const REMOTE: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9P"),
    (0x00C3_6400, "Ceph"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "kAFS"),
    (0x7375_7245, "Coda"),
    (0x564C, "NCP"),
    (0x7461_636F, "OCFS2"),
    (0x786F_4256, "vboxsf"),
    (0x0116_1970, "GFS2"),
    (0x2003_0528, "OrangeFS"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0xAAD7_AAEA, "PanFS"),
    (0x6163_6673, "ACFS"),
    (0x0131_11A8, "IBRIX"),
    (0xBEEF_DEAD, "StorNext"),
    (0x7C7C_6673, "Parallels shared folders"),
    (0xBACB_ACBC, "VMware shared folders"),
];

/// Whether a file is known to be on a local file system.
#[cfg(target_os = "linux")]
pub(super) fn is_local(file: &File) -> bool {
    let Ok(status) = rustix::fs::fstatfs(file) else { return false };
    // The numbers have 32 bits; the field's width and sign depend on the architecture.
    let kind = status.f_type as u32;
    match REMOTE.iter().find(|(number, _)| *number == kind) {
        Some((_, name)) => {
            tracing::debug!("not mapped, because it is on {name}");
            false
        }
        None => true,
    }
}

/// Whether a file is known to be on a local file system: nothing is known here.
#[cfg(not(target_os = "linux"))]
pub(super) fn is_local(_: &File) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_listed_once_and_the_build_folder_is_local() {
        let mut numbers: Vec<u32> = REMOTE.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        let here = File::open(file!()).or_else(|_| File::open("Cargo.toml")).unwrap();
        let kind = rustix::fs::fstatfs(&here).unwrap().f_type as u32;
        assert_eq!(is_local(&here), numbers.binary_search(&kind).is_err());
    }
}
