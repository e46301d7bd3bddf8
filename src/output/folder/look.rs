//! What lies at an output path before a conversion begins there.

use std::fs;
use std::path::Path;

use crate::error::{Error, Fault, Result};
use crate::output::filename;

/// What lies at an output path.
pub(super) enum Found {
    /// Nothing, or an empty folder.
    Nothing,
    /// A checkpoint.
    Sealed,
    /// Work that has begun.
    Unfinished,
}

/// What lies at `path`. A file, a source part, or anything that no conversion put there is an error.
pub(super) fn look(path: &Path, sources: &[&Path]) -> Result<Found> {
    let status = match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(e) => return Err(Error::io("look at", path, e)),
        Ok(status) => status,
    };
    if !status.is_dir() {
        let fault = Fault::new("the output is a file").file(path).expected("a folder, or nothing yet");
        return Err(fault.output());
    }
    let entries = fs::read_dir(path).map_err(|e| Error::io("list", path, e))?;
    let mut names: Vec<String> = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Error::io("list", path, e))?;
        if let Some(source) = sources.iter().find(|s| same_file(s, &entry.path())) {
            return Err(Fault::new(format!("the output folder holds the source part '{}'", source.display()))
                .file(path)
                .expected("an empty folder away from the source")
                .output());
        }
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let Some(first) = names.first() else { return Ok(Found::Nothing) };
    let is = |name: &str| names.iter().any(|n| n == name);
    // A manifest is only ours if it is a file: a conversion that resumes reads it.
    if is(filename::MANIFEST) && path.join(filename::MANIFEST).is_file() {
        return Ok(Found::Sealed);
    }
    if is(filename::WORK) && path.join(filename::WORK).is_dir() {
        return Ok(Found::Unfinished);
    }
    Err(occupied(path, format!("{} entries, the first is '{first}'", names.len())))
}

pub(super) fn occupied(path: &Path, what: String) -> Error {
    Fault::new(format!("the output folder holds {what}"))
        .file(path)
        .expected("an empty folder, or none")
        .remedy("Choose another folder, or remove what is in it")
        .output()
}

pub(super) fn unfinished(path: &Path, what: &str) -> Error {
    Fault::new(format!("the output folder holds {what}"))
        .file(path)
        .expected("an empty folder, or none")
        .remedy("Go on with it by --resume, or remove the folder")
        .output()
}

/// Whether two paths lead to one file, through links as well.
fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
        (Err(_), _) | (_, Err(_)) => false,
    }
}
