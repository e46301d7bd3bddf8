//! One file, mapped read-only into memory. The only `unsafe` of this layer.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::ops::{Deref, Range};
use std::path::Path;

use crate::error::{Error, Fault, Result};

/// What the operating system should expect of a byte range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Read once, front to back: read ahead generously.
    Sequential,
    /// Needed soon: start reading now.
    WillNeed,
    /// Done with: the pages no longer count as this process's memory. They stay in the page cache until the system
    /// wants them back, and reading them again gives the same bytes.
    DontNeed,
    /// To be kept in large pages, as far as it is not in the page cache yet: the file is read in pieces of 2 MiB, and
    /// mapping one of them costs as much as mapping a small page.
    LargePages,
    /// Read what is not in memory, and map all of it before returning.
    Populate,
}

/// The bytes of one file: mapped, or owned where there is nothing to map.
///
/// The length is that of the moment of opening.
#[derive(Debug)]
pub struct Map(Bytes);

#[derive(Debug)]
enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

/// Opens a regular file and gives its length.
pub(super) fn regular(path: &Path) -> Result<(File, u64)> {
    let length = |meta: &Metadata| {
        if meta.is_file() {
            return Ok(meta.len());
        }
        let fault = Fault::new("not a regular file").file(path).expected("a GGUF file on disk");
        Err(fault.remedy("Pipes and devices have no length to check; save the model to a file first.").unsupported())
    };
    // Asked before it is opened: opening a pipe would wait for a writer.
    length(&std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?)?;
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let bytes = length(&file.metadata().map_err(|e| Error::io("read the size of", path, e))?)?;
    Ok((file, bytes))
}

impl Map {
    /// Maps a regular file. An empty file, which cannot be mapped, gives no bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, bytes) = regular(path)?;
        Self::of(path, &file, bytes)
    }

    /// Maps an open file of so many bytes.
    pub(super) fn of(path: &Path, file: &File, bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Ok(Map(Bytes::Owned(Vec::new())));
        }
        let length = usize::try_from(bytes).map_err(|_| Error::io("map", path, ErrorKind::FileTooLarge.into()))?;
        // SAFETY: the map is read-only and private to this type, which hands out `&[u8]` bounded by its own lifetime.
        // What no process can rule out is another one that writes to or truncates the file meanwhile. Truncation ends
        // this process with SIGBUS, which no output survives as a checkpoint; changed bytes are only ever read as
        // plain bytes (every later use of a length or offset is checked again), so no type invariant hangs on them.
        let map = unsafe { memmap2::MmapOptions::new().len(length).map(file) };
        Ok(Map(Bytes::Mapped(map.map_err(|e| Error::io("map", path, e))?)))
    }

    /// Bytes already in memory, treated like a file's.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Map(Bytes::Owned(bytes))
    }

    /// Tells the system what to expect of a byte range. Ranges are cut to the file; bytes in memory need no advice.
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> std::io::Result<()> {
        let Bytes::Mapped(map) = &self.0 else { return Ok(()) };
        let start = range.start.min(map.len());
        let length = range.end.min(map.len()).saturating_sub(start);
        if length == 0 {
            return Ok(());
        }
        advise(map, start, length, advice)
    }
}

#[cfg(unix)]
fn advise(map: &memmap2::Mmap, start: usize, length: usize, advice: Advice) -> std::io::Result<()> {
    match advice {
        Advice::Sequential => map.advise_range(memmap2::Advice::Sequential, start, length),
        Advice::WillNeed => map.advise_range(memmap2::Advice::WillNeed, start, length),
        #[cfg(target_os = "linux")]
        Advice::LargePages => map.advise_range(memmap2::Advice::HugePage, start, length),
        #[cfg(target_os = "linux")]
        Advice::Populate => map.advise_range(memmap2::Advice::PopulateRead, start, length),
        #[cfg(not(target_os = "linux"))]
        Advice::LargePages | Advice::Populate => Err(std::io::ErrorKind::Unsupported.into()),
        Advice::DontNeed => {
            // SAFETY: the range lies inside the map (cut to it by the caller). MADV_DONTNEED discards modified private
            // pages, and this map has none: it is read-only and backed by the file, so a later access faults the same
            // bytes in again, for borrowers of this page's neighbours too.
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, length) }
        }
    }
}

#[cfg(not(unix))]
fn advise(_: &memmap2::Mmap, _: usize, _: usize, advice: Advice) -> std::io::Result<()> {
    match advice {
        Advice::Sequential | Advice::WillNeed | Advice::DontNeed => Ok(()),
        Advice::LargePages | Advice::Populate => Err(std::io::ErrorKind::Unsupported.into()),
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
