//! `B3SUMS`: the digests of a folder's files in the form that `b3sum --check` takes.

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Fault, Result};
use crate::output::digest::Digest;
use crate::output::filename;
use crate::output::manifest::Manifest;
use crate::regular;

/// The largest list that is read, in bytes.
const READ_LIMIT: u64 = 64 << 20;

/// The digests of all files of a folder except `B3SUMS` itself, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sums {
    entries: Vec<(String, Digest)>,
}

impl Sums {
    /// The list for a folder with these files and a manifest with the digest `manifest`.
    pub fn new(files: impl Iterator<Item = (String, Digest)>, manifest: Digest) -> Self {
        let mut entries: Vec<_> = files.chain([(filename::MANIFEST.to_string(), manifest)]).collect();
        entries.sort();
        Sums { entries }
    }

    /// The list for a folder with this manifest, the digest of whose bytes is `digest`.
    pub fn of(manifest: &Manifest, digest: Digest) -> Self {
        let files = manifest.files.iter().map(|file| (file.name.clone(), file.blake3));
        let others = manifest.others.iter().map(|file| (file.name.clone(), file.blake3));
        Sums::new(files.chain(others), digest)
    }

    /// Names and digests, sorted by name.
    pub fn entries(&self) -> &[(String, Digest)] {
        &self.entries
    }

    /// One line `digest`, two spaces, `name` per file.
    pub fn to_text(&self) -> String {
        self.entries.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect()
    }

    /// Reads the list in `dir`, strictly: exactly what [`Sums::to_text`] writes.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] with the line's offset for anything else, [`Error::Io`] when it cannot be read.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(filename::SUMS);
        let (file, length) = regular::open(&path).map_err(|e| Error::io("open", &path, e))?;
        if length > READ_LIMIT {
            let found = format!("not a list of digests: {length} bytes");
            return Err(Fault::new(found).file(path).checkpoint());
        }
        let mut bytes = Vec::new();
        file.take(READ_LIMIT).read_to_end(&mut bytes).map_err(|e| Error::io("read", &path, e))?;
        Self::parse(&bytes, &path)
    }

    /// Parses the bytes of a list; `path` is for messages only.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let mut entries: Vec<(String, Digest)> = Vec::new();
        let mut offset = 0;
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let fault = |found: String| Fault::new(found).file(path).offset(offset);
            let Some((digest, name)) = entry(line) else {
                return Err(fault("not a line of digests".into())
                    .expected("64 lower-case hexadecimal digits, two spaces and a file name")
                    .checkpoint());
            };
            if let Some(objection) = filename::objection(name) {
                return Err(fault(format!("{objection}: '{name}'")).checkpoint());
            }
            if entries.last().is_some_and(|(last, _)| last.as_str() >= name) {
                return Err(fault(format!("'{name}' is out of order, or listed twice")).checkpoint());
            }
            entries.push((name.to_string(), digest));
            offset += line.len() as u64;
        }
        Ok(Sums { entries })
    }
}

fn entry(line: &[u8]) -> Option<(Digest, &str)> {
    let line = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let (digest, name) = line.split_once("  ")?;
    Some((Digest::parse(digest)?, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_is_read() {
        let sums = Sums { entries: vec![("a b".into(), Digest::of(b"a")), ("mtp/x".into(), Digest::of(b"b"))] };
        let text = sums.to_text();
        let parse = |text: &str| Sums::parse(text.as_bytes(), Path::new("B3SUMS"));
        assert_eq!(parse(&text).unwrap(), sums);
        assert_eq!(parse("").unwrap(), Sums::default());
        let lines: Vec<_> = text.split_inclusive('\n').collect();
        for bad in [
            text.trim_end().to_string(),
            text.to_uppercase(),
            text.replace("  ", " "),
            text.replace("mtp/x", "../x"),
            format!("{}{}", lines[1], lines[0]),
            format!("{}{}", lines[0], lines[0]),
            format!("{text}\n"),
            text.replace('\n', "\r\n"),
        ] {
            assert!(parse(&bad).is_err(), "{bad}");
        }
    }
}
