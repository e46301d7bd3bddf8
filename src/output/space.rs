//! Free space of the file system that will hold the output.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Bytes that an unprivileged process can still write to the file system that holds `path`, or that will hold it once
/// it is created: the nearest parent that exists is asked.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let existing = nearest_existing(path)?;
    let stat = rustix::fs::statvfs(&existing).map_err(|e| Error::io("ask for free space", &existing, e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// `path` itself or its nearest parent that exists.
fn nearest_existing(path: &Path) -> Result<PathBuf> {
    let whole = std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))?;
    let mut candidate = whole.as_path();
    loop {
        match std::fs::metadata(candidate) {
            Ok(_) => return Ok(candidate.to_path_buf()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => match candidate.parent() {
                Some(parent) => candidate = parent,
                None => return Err(Error::io("find", path, e)),
            },
            Err(e) => return Err(Error::io("look at", candidate, e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_does_not_exist_yet_is_asked_through_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("not/yet/there");
        assert_eq!(nearest_existing(&deep).unwrap(), dir.path());
        assert!(free_bytes(&deep).unwrap() > 0);
        assert!(free_bytes(Path::new("relative-and-absent")).unwrap() > 0);
    }
}
