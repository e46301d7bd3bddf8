//! Exclusive locks between processes, also on different hosts of one network file system.
//!
//! A lock is a file that is locked (`flock`, which Linux passes on to NFS and SMB servers). The kernel releases it when
//! its process ends, however it ends, so a lock is never left behind.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A lock that is held until this is dropped.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock at `path`, whose folder must be there; `None` if another process, or another call in this one,
    /// holds it.
    pub fn take(path: &Path) -> Result<Option<Lock>> {
        Self::acquire(path, |file| match file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(e)) => Err(e),
        })
    }

    /// Takes the lock at `path`, after waiting for whoever holds it.
    pub fn wait(path: &Path) -> Result<Option<Lock>> {
        Self::acquire(path, |file| file.lock().map(|()| true))
    }

    fn acquire(path: &Path, lock: impl Fn(&File) -> std::io::Result<bool>) -> Result<Option<Lock>> {
        loop {
            let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
            let opened =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path);
            let file = opened.map_err(|e| Error::io("create", path, e))?;
            match lock(&file) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                // Some network and user-space file systems have no locks. To refuse them would help nobody.
                Err(e) if matches!(e.kind(), ErrorKind::Unsupported) || e.raw_os_error() == Some(NO_LOCKS) => {
                    tracing::warn!(path = %path.display(), "this file system has no locks: nothing keeps two runs apart");
                    return Ok(Some(Lock { path: path.to_path_buf(), _file: file }));
                }
                Err(e) => return Err(Error::io("lock", path, e)),
            }
            // Whoever held the lock may have removed its file since it was opened: then the lock is of no use.
            let held = file.metadata().map_err(|e| Error::io("look at", path, e))?;
            match std::fs::metadata(path) {
                Ok(there) if (there.dev(), there.ino()) == (held.dev(), held.ino()) => {
                    return Ok(Some(Lock { path: path.to_path_buf(), _file: file }));
                }
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io("look at", path, e)),
            }
        }
    }

    /// The lock's file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// `ENOLCK`: the server of a network file system keeps no locks.
const NO_LOCKS: i32 = rustix::io::Errno::NOLCK.raw_os_error();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_a_removed_file_is_no_lock() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("lock");
        let held = Lock::take(&path).unwrap().unwrap();
        assert!(Lock::take(&path).unwrap().is_none());
        drop(held);
        let held = Lock::take(&path).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| Lock::wait(&path).unwrap().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(50));
            std::fs::remove_file(held.path()).unwrap();
            drop(held);
            let second = waiter.join().unwrap();
            assert!(path.exists(), "the waiter locked the file that is there");
            assert!(Lock::take(&path).unwrap().is_none());
            drop(second);
        });
    }
}
