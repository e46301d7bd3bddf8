//! Files that a stranger may have put there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Result};

/// Opens a regular file for reading and gives its length. Links are followed.
///
/// Anything else is refused without waiting for it: opening a pipe the usual way would last until somebody writes to it.
pub(crate) fn open(path: &Path) -> io::Result<(File, u64)> {
    // Of no meaning for a regular file.
    let file = OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(path)?;
    let status = file.metadata()?;
    match status.is_file() {
        true => Ok((file, status.len())),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_devices_and_folders_are_refused_at_once_and_links_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, file, link) = (folder.path().join("pipe"), folder.path().join("file"), folder.path().join("link"));
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::write(&file, "four").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&pipe, folder.path(), Path::new("/dev/zero")] {
            assert_eq!(open(path).unwrap_err().to_string(), "not a regular file", "{}", path.display());
        }
        assert_eq!((open(&file).unwrap().1, open(&link).unwrap().1), (4, 4));
    }
}
