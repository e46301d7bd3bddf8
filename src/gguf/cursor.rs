//! Bounded little-endian reading of a file's header: nothing is read, allocated or looped over before its length is
//! checked against what is left of the file.

use std::ops::Range;
use std::path::Path;

use crate::error::{Fault, Result};

/// ggml's limit for the length of a string (bytes) and of an array (elements).
pub(crate) const LONGEST: u64 = 1 << 30;

/// What is being read, for error messages.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// The fixed fields at the start.
    Start,
    /// A metadata entry: its number, and its key once known.
    Key(u64, Option<&'a [u8]>),
    /// A tensor info: its number, and its name once known.
    Tensor(u64, Option<&'a [u8]>),
}

/// A position in the bytes of one file, of which only the start may be at hand.
///
/// Lengths are checked against the whole file. What lies inside it but beyond the bytes at hand ends the parsing:
/// [`Cursor::needs`] then says how many are needed, and the error is of no meaning.
pub(crate) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    /// Length of the file.
    length: u64,
    at: usize,
    needs: Option<u64>,
    /// What is being read.
    pub(crate) place: Place<'a>,
}

/// Text from a file, short enough for a message.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const LONGEST: usize = 200;
    match bytes.get(..LONGEST) {
        Some(start) if bytes.len() > LONGEST => format!("{}…", String::from_utf8_lossy(start)),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    }
}

impl<'a> Cursor<'a> {
    /// A cursor over the first bytes of a file of so many bytes.
    pub(crate) fn new(path: &'a Path, bytes: &'a [u8], length: u64) -> Self {
        Cursor { path, bytes, length, at: 0, needs: None, place: Place::Start }
    }

    /// How many bytes from the start must be at hand before parsing can go on where it ended.
    pub(crate) fn needs(&self) -> Option<u64> {
        self.needs
    }

    /// Makes sure that the first `end` bytes are at hand, as far as the file has them.
    pub(crate) fn reach(&mut self, end: u64) -> Result<()> {
        let end = end.min(self.length);
        if end <= self.bytes.len() as u64 {
            return Ok(());
        }
        self.needs = Some(end);
        Err(self.fault("more of the header has to be read").expected(format!("{end} bytes at hand")).truncated())
    }

    /// Bytes read so far.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Bytes left of the file.
    pub(crate) fn left(&self) -> u64 {
        self.length - self.at as u64
    }

    /// A fault that names the file, the place and a byte offset.
    pub(crate) fn fault_at(&self, offset: usize, found: impl Into<String>) -> Fault {
        let found = found.into();
        let (found, key, tensor) = match self.place {
            Place::Start => (found, None, None),
            Place::Key(_, Some(key)) => (found, Some(shown(key)), None),
            Place::Key(i, None) => (format!("metadata entry {}: {found}", i + 1), None, None),
            Place::Tensor(_, Some(name)) => (found, None, Some(shown(name))),
            Place::Tensor(i, None) => (format!("tensor info {}: {found}", i + 1), None, None),
        };
        Fault { key, tensor, ..Fault::new(found).file(self.path).offset(offset as u64) }
    }

    /// A fault at the current position.
    pub(crate) fn fault(&self, found: impl Into<String>) -> Fault {
        self.fault_at(self.at, found)
    }

    /// The next `length` bytes, as a range of the file.
    pub(crate) fn span(&mut self, length: u64, what: &str) -> Result<Range<usize>> {
        if length > self.left() {
            let found = format!("the file ends inside {what}");
            let fault = self.fault(found).expected(format!("{length} more bytes, of which {} are there", self.left()));
            return Err(fault.remedy(CUT_SHORT).truncated());
        }
        self.reach(self.at as u64 + length)?;
        // It ends inside a slice, so it fits.
        let start = self.at;
        self.at += length as usize;
        Ok(start..self.at)
    }

    /// The next `length` bytes.
    pub(crate) fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8]> {
        let span = self.span(length, what)?;
        Ok(&self.bytes[span])
    }

    /// The next `N` bytes.
    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length-prefixed string, as a range of the file without the length.
    pub(crate) fn string(&mut self, what: &str) -> Result<Range<usize>> {
        let at = self.at;
        let length = self.u64(what)?;
        if length > LONGEST {
            let found = format!("{what} claims to be {length} bytes long");
            return Err(self.fault_at(at, found).expected(format!("at most {LONGEST}")).container());
        }
        self.span(length, what)
    }

    /// The bytes of a range that this cursor gave.
    pub(crate) fn bytes(&self, span: Range<usize>) -> &'a [u8] {
        self.bytes.get(span).unwrap_or(&[])
    }
}

/// Remedy for a file that ends early.
pub(crate) const CUT_SHORT: &str = "The file is incomplete, or one piece of a file that was cut up for upload \
    (…part1of2, …split-a): fetch it again, or join the pieces, and compare the size.";
