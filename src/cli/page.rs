//! Writing one file so that it is either the old one or the new one, whole.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use ggshard::error::{Error, Fault, Result};

/// Writes `bytes` to `path`, beside it first. The error names the file that was asked for.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let Some(name) = path.file_name().filter(|_| !path.is_dir()) else {
        return Err(Fault::new("not a file name").file(path).expected("a file to write, as in plan.html").output());
    };
    let partial = path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let failed = |e| Error::io("write", path, e);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&partial).map_err(failed)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&partial, path));
    written.map_err(|e| {
        // What is left of an attempt is of no use; that it cannot be removed is no further error.
        let _ = fs::remove_file(&partial);
        failed(e)
    })
}
