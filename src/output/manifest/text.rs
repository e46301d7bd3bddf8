//! The manifest's text: one line per list entry, the digest in the last line. It may be large, so it is written and read
//! piece by piece.

use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{FORMAT, FORMAT_VERSION, FileEntry, Manifest, OtherFile};
use crate::error::{Error, Fault, Result};
use crate::output::digest::Digest;

/// What precedes and follows the 64 digits at the end of the file.
const BEFORE_DIGEST: &[u8] = b"\n\"digest\":\"";
const AFTER_DIGEST: &[u8] = b"\"\n}\n";
const DIGITS: usize = 64;
const TAIL: usize = BEFORE_DIGEST.len() + DIGITS + AFTER_DIGEST.len();

/// Writes a manifest, file by file, with zeros in the place of its digest.
pub(crate) struct Text<'a, W> {
    to: W,
    /// For messages.
    path: &'a Path,
    hasher: blake3::Hasher,
    bytes: u64,
    files: usize,
}

impl<'a, W: Write> Text<'a, W> {
    /// Writes all of `manifest` that comes before its files.
    pub fn begin(to: W, path: &'a Path, manifest: &Manifest) -> Result<Self> {
        // Taken apart in full, so that a new field cannot be forgotten here.
        let Manifest {
            format,
            format_version,
            tool,
            plan,
            source,
            mapping,
            profile,
            topology,
            policy,
            warnings,
            ignored,
            parameters,
            files: _,
            others: _,
            digest: _,
        } = manifest;
        let mut text = Text { to, path, hasher: blake3::Hasher::new(), bytes: 0, files: 0 };
        text.raw(b"{")?;
        text.field("\n", "format", format)?;
        text.field(",", "format_version", format_version)?;
        text.field(",", "tool", tool)?;
        text.field(",\n", "plan", plan)?;
        text.raw(b",\n\"source\":{")?;
        text.field("", "architecture", &source.architecture)?;
        text.list(",", "parts", &source.parts)?;
        text.raw(b"}")?;
        text.field(",\n", "mapping", mapping)?;
        text.field(",\n", "profile", profile)?;
        text.field(",\n", "topology", topology)?;
        text.field(",\n", "policy", policy)?;
        text.list(",\n", "warnings", warnings)?;
        text.list(",\n", "ignored", ignored)?;
        text.list(",\n", "parameters", parameters)?;
        text.raw(b",\n\"files\":[")?;
        Ok(text)
    }

    /// Writes the next file.
    pub fn file(&mut self, file: &FileEntry) -> Result<()> {
        let FileEntry { name, rank, stage, bytes, header_bytes, blake3, tensors } = file;
        self.raw(if self.files == 0 { b"\n{" } else { b",\n{" })?;
        self.files += 1;
        self.field("", "name", name)?;
        self.field(",", "rank", rank)?;
        if stage.is_some() {
            self.field(",", "stage", stage)?;
        }
        self.field(",", "bytes", bytes)?;
        self.field(",", "header_bytes", header_bytes)?;
        self.field(",", "blake3", blake3)?;
        self.list(",", "tensors", tensors)?;
        self.raw(b"}")
    }

    /// Writes what comes after the files. Gives back the writer, the digest, and the place where it belongs.
    pub fn end(mut self, others: &[OtherFile]) -> Result<(W, Digest, Range<u64>)> {
        self.raw(if self.files == 0 { b"]" } else { b"\n]" })?;
        self.list(",\n", "others", others)?;
        self.raw(b",")?;
        self.raw(BEFORE_DIGEST)?;
        let place = self.bytes..self.bytes + DIGITS as u64;
        self.raw(&[b'0'; DIGITS])?;
        self.raw(AFTER_DIGEST)?;
        Ok((self.to, self.hasher.finalize().into(), place))
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|e| Error::io("write", self.path, e))
    }

    fn json<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        match serde_json::to_writer(&mut *self, value) {
            Ok(()) => Ok(()),
            Err(e) if e.is_io() => Err(Error::io("write", self.path, e.into())),
            Err(e) => Err(Fault::new(format!("a manifest value cannot be written as JSON: {e}")).audit()),
        }
    }

    fn field<T: Serialize + ?Sized>(&mut self, before: &str, name: &str, value: &T) -> Result<()> {
        self.raw(before.as_bytes())?;
        self.json(name)?;
        self.raw(b":")?;
        self.json(value)
    }

    fn list<T: Serialize>(&mut self, before: &str, name: &str, values: &[T]) -> Result<()> {
        self.raw(before.as_bytes())?;
        self.json(name)?;
        self.raw(b":[")?;
        for (i, value) in values.iter().enumerate() {
            self.raw(if i == 0 { b"\n" } else { b",\n" })?;
            self.json(value)?;
        }
        self.raw(if values.is_empty() { b"]" } else { b"\n]" })
    }
}

impl<W: Write> Write for Text<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// The whole text of a manifest.
pub(super) fn render(manifest: &Manifest) -> Result<Vec<u8>> {
    let mut text = Text::begin(Vec::new(), Path::new(""), manifest)?;
    manifest.files.iter().try_for_each(|file| text.file(file))?;
    let (mut bytes, digest, place) = text.end(&manifest.others)?;
    bytes[place.start as usize..place.end as usize].copy_from_slice(digest.to_string().as_bytes());
    Ok(bytes)
}

/// Hashes what is read: as it is, and with zeros in the place of the digest.
struct Hashing<R> {
    from: R,
    left: u64,
    whole: blake3::Hasher,
    zeroed: blake3::Hasher,
    /// The last bytes.
    tail: Vec<u8>,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        let bytes = &buffer[..read];
        self.whole.update(bytes);
        let before = self.left.saturating_sub(TAIL as u64).min(read as u64) as usize;
        self.left = self.left.saturating_sub(read as u64);
        self.zeroed.update(&bytes[..before]);
        self.tail.extend_from_slice(&bytes[before..]);
        // More than was promised: no manifest ends there, and only its end is of interest.
        if self.tail.len() > 2 * TAIL {
            self.tail.drain(..self.tail.len() - 2 * TAIL);
        }
        Ok(read)
    }
}

impl<R> Hashing<R> {
    /// The digest that the last line states; `None` if the text does not end with one.
    fn stated(&self) -> Option<Digest> {
        let digits = self.tail.strip_prefix(BEFORE_DIGEST)?.strip_suffix(AFTER_DIGEST)?;
        Digest::parse(std::str::from_utf8(digits).ok()?)
    }

    /// The digest of the text with zeros in the place of its digest.
    fn found(&mut self) -> Digest {
        self.zeroed.update(BEFORE_DIGEST).update(&[b'0'; DIGITS]).update(AFTER_DIGEST);
        self.zeroed.finalize().into()
    }
}

/// Reads a manifest of `length` bytes and checks the digest at its end. Also gives the digest of all of it.
pub(super) fn read<R: Read + Seek>(from: &mut R, length: u64, path: &Path) -> Result<(Manifest, Digest)> {
    let (whole, zeroed) = (blake3::Hasher::new(), blake3::Hasher::new());
    let hashing = Hashing { from: &mut *from, left: length, whole, zeroed, tail: Vec::new() };
    // Two hashes of a piece while it is in the cache; pieces long enough for their hashing to be fast.
    let mut reader = BufReader::with_capacity(128 << 10, hashing);
    let mut json = serde_json::Deserializer::from_reader(&mut reader);
    let parsed = Manifest::deserialize(&mut json).and_then(|manifest| json.end().map(|()| manifest));
    // What is wrong with JSON matters only if it is what was written.
    io::copy(&mut reader, &mut io::sink()).map_err(|e| Error::io("read", path, e))?;
    let mut hashing = reader.into_inner();
    let Some(stated) = hashing.stated() else {
        return Err(Fault::new("an edited or cut manifest: it does not end with its digest")
            .file(path)
            .key("digest")
            .remedy("Convert again; a manifest is not meant to be edited or reformatted")
            .checkpoint());
    };
    let (found, whole) = (hashing.found(), hashing.whole.finalize().into());
    if found != stated {
        return Err(Fault::new(format!("an edited manifest: its bytes have the digest {found}"))
            .file(path)
            .key("digest")
            .expected(stated.to_string())
            .remedy("Convert again, or fetch the manifest again; it is not meant to be edited")
            .checkpoint());
    }
    let manifest = parsed
        .map_err(|e| Fault::new(format!("not a manifest of version {FORMAT_VERSION}: {e}")).file(path).checkpoint())?;
    if manifest.digest != stated {
        return Err(Fault::new("the digest is not the manifest's last field").file(path).key("digest").checkpoint());
    }
    Ok((manifest, whole))
}

/// The error for a manifest that another version of the format explains; `None` when it is of this version.
pub(super) fn other_version<R: Read + Seek>(from: &mut R, path: &Path) -> Option<Error> {
    #[derive(Deserialize)]
    struct Probe {
        format: String,
        format_version: u64,
    }
    from.seek(SeekFrom::Start(0)).ok()?;
    let probe: Probe = serde_json::from_reader(BufReader::new(from)).ok()?;
    if probe.format != FORMAT {
        let fault = Fault::new(format!("a manifest of the format '{}'", probe.format));
        return Some(fault.file(path).key("format").expected(format!("'{FORMAT}'")).checkpoint());
    }
    (probe.format_version != u64::from(FORMAT_VERSION)).then(|| {
        Fault::new(format!("a manifest of format version {}", probe.format_version))
            .file(path)
            .key("format_version")
            .expected(format!("version {FORMAT_VERSION}"))
            .remedy("Use the ggshard that wrote it, or a newer one")
            .unsupported()
    })
}
