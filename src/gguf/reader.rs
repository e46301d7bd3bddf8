//! The bytes of one part, behind one interface: mapped, or read with `pread` into the caller's buffer.
//!
//! | | mapped | read |
//! |---|---|---|
//! | a copy of each byte | none | one, into a buffer that is used again |
//! | the file becomes shorter, or its disk or server fails | SIGBUS ends the process | an error |
//!
//! So a library reads, because a signal would end a process that is not its own, and only a program that has a handler
//! for the signal maps.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::filesystem;
use super::header::{self, Header};
use super::map::{Advice, Map, regular};
use super::mark::Mark;
use crate::error::{Error, Fault, Result};

/// How many bytes of a file are read for its header at first.
const FIRST_WINDOW: u64 = 256 << 10;

/// How the bytes of a source are fetched. None of it changes a byte of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// Read into a buffer: a file that becomes shorter, or a disk or server that fails, is an error.
    #[default]
    Pread,
    /// Mapped into memory, which saves a copy: a file that becomes shorter, or a disk or server that fails, is SIGBUS,
    /// which ends a process that has no handler for it.
    Mmap,
    /// Mapped where the file system is known to be local, read where it is a network's, a user-space one or not known.
    /// It is asked for each part, since parts can be links to several places.
    MmapIfLocal,
}

/// How a set is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// The source's data need not be there: every check but that of extents, and reading a tensor is an error.
    pub header_only: bool,
    /// How bytes are fetched.
    pub io: Io,
    /// Told of each file that is mapped and of the addresses that it is mapped to, before any byte of it is read, so
    /// that a handler of SIGBUS can name the file.
    pub on_map: Option<fn(&Path, Range<usize>)>,
}

/// One file, open for reading.
#[derive(Debug)]
pub(crate) struct Reader {
    path: PathBuf,
    /// Length at the moment of opening.
    bytes: u64,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// All of it is in memory, and no file's.
    Memory(Arc<Map>),
    Mapped(Arc<Map>, File),
    File(File),
}

impl Reader {
    /// Opens a regular file.
    pub(crate) fn open(path: &Path, options: OpenOptions) -> Result<Self> {
        let (file, bytes) = regular(path)?;
        let map = match options.io {
            Io::Pread => false,
            Io::Mmap => true,
            Io::MmapIfLocal => filesystem::is_local(&file),
        };
        tracing::debug!(path = %path.display(), map, "opened");
        if !map {
            return Ok(Reader { path: path.to_path_buf(), bytes, form: Form::File(file) });
        }
        let map = Map::of(path, &file, bytes)?;
        if let Some(told) = options.on_map {
            let addresses = map.as_ptr_range();
            told(path, addresses.start.addr()..addresses.end.addr());
        }
        Ok(Reader { path: path.to_path_buf(), bytes, form: Form::Mapped(Arc::new(map), file) })
    }

    /// Bytes that are in memory already.
    pub(crate) fn memory(path: &Path, map: Map) -> Self {
        Reader { path: path.to_path_buf(), bytes: map.len() as u64, form: Form::Memory(Arc::new(map)) }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length at the moment of opening.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of it, where that is in memory, which for a file means mapped.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        match &self.form {
            Form::Memory(map) | Form::Mapped(map, _) => Some(map),
            Form::File(_) => None,
        }
    }

    /// What tells this file from another of the same size and header. Reads a few pages.
    pub(crate) fn mark(&self) -> Result<Mark> {
        match &self.form {
            Form::Memory(map) => Ok(Mark::of_bytes(map)),
            Form::Mapped(_, file) | Form::File(file) => {
                Mark::of_file(file, self.bytes).map_err(|e| Error::io("read", &self.path, e))
            }
        }
    }

    /// The parsed header, with the bytes that it was read from: those of the whole file where they are in memory, else
    /// as many as it needs and at most as many again.
    pub(crate) fn header(&self) -> Result<(Arc<Map>, Header)> {
        let mut window = FIRST_WINDOW.min(self.bytes);
        loop {
            let map = match &self.form {
                Form::Memory(map) | Form::Mapped(map, _) => Arc::clone(map),
                Form::File(_) => Arc::new(Map::from_vec(self.start(window)?)),
            };
            match header::read(&self.path, &map, self.bytes)? {
                header::Read::Whole(header) => return Ok((map, header)),
                header::Read::Needs(bytes) => window = window.saturating_mul(2).max(bytes).min(self.bytes),
            }
        }
    }

    /// The first `bytes` bytes, as a copy.
    fn start(&self, bytes: u64) -> Result<Vec<u8>> {
        let mut start = Vec::new();
        self.read(0..bytes, None, &mut start)?;
        Ok(start)
    }

    /// A range of the file that lies within the length that it had at opening; in `buffer`, whose content and length
    /// are of no meaning afterwards, where it is not in memory. `tensor` is for messages.
    pub(crate) fn read<'a>(
        &'a self,
        range: Range<u64>,
        tensor: Option<&str>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let fault = |found: String| {
            let fault = Fault::new(found).file(&self.path).offset(range.start);
            tensor.into_iter().fold(fault, Fault::tensor)
        };
        let span = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
        let Some((start, end)) = span.filter(|(start, end)| start <= end && range.end <= self.bytes) else {
            let expected = format!("a range within its {} bytes", self.bytes);
            return Err(fault(format!("bytes {range:?} are needed")).expected(expected).audit());
        };
        let file = match &self.form {
            // The map is as long as the file was.
            Form::Memory(map) | Form::Mapped(map, _) => return Ok(&map[start..end]),
            Form::File(file) => file,
        };
        let length = end - start;
        if buffer.len() < length {
            // Nothing of the old content is kept, and the memory of a length that a file made up may not be there.
            buffer.clear();
            buffer.try_reserve_exact(length).map_err(|e| Error::io("read", &self.path, e.into()))?;
            buffer.resize(length, 0);
        }
        let target = &mut buffer[..length];
        let read = read_up_to(file, target, range.start).map_err(|e| Error::io("read", &self.path, e))?;
        if read < length {
            let end = range.start + read as u64;
            let now = file.metadata().map_or(end, |status| status.len().min(end));
            return Err(fault(format!("the file became shorter while it was read, {now} bytes, and ends"))
                .expected(format!("{} bytes, as when it was opened", self.bytes))
                .remedy("Something else writes to it, or its download began anew: wait for that, compare the size, and run again.")
                .truncated());
        }
        Ok(target)
    }

    /// Tells the system what to expect of a byte range, which is cut to the file.
    pub(crate) fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let clamp = |n: u64| usize::try_from(n.min(self.bytes)).unwrap_or(usize::MAX);
        let advised = match &self.form {
            Form::Memory(map) | Form::Mapped(map, _) => map.advise(clamp(range.start)..clamp(range.end), advice),
            Form::File(file) => advise(file, range.start.min(self.bytes)..range.end.min(self.bytes), advice),
        };
        advised.map_err(|e| Error::io("give the system advice about", &self.path, e))
    }
}

/// Reads until the buffer is full or the file ends, and gives the number of bytes.
pub(crate) fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(target_os = "linux")]
fn advise(file: &File, range: Range<u64>, advice: Advice) -> std::io::Result<()> {
    let advice = match advice {
        Advice::Sequential => rustix::fs::Advice::Sequential,
        Advice::WillNeed => rustix::fs::Advice::WillNeed,
        // Nothing of the file is this process's memory, and the page cache is not this process's to drop.
        Advice::DontNeed => return Ok(()),
        // These concern maps.
        Advice::LargePages | Advice::Populate => return Ok(()),
    };
    // A length of 0 would mean "to the end".
    let Some(length) = std::num::NonZeroU64::new(range.end.saturating_sub(range.start)) else { return Ok(()) };
    Ok(rustix::fs::fadvise(file, range.start, Some(length), advice)?)
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: Range<u64>, _: Advice) -> std::io::Result<()> {
    Ok(())
}
