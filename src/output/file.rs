//! A file that is written to in any order, by way of the page cache or past it.
//!
//! Past the page cache (`O_DIRECT`), memory, place and length must be whole pages. The pages that a piece fills go there from
//! a buffer that begins at a page; what it has of the pages at its two ends goes through the page cache. No page is ever
//! written both ways: one that two pieces share is filled by neither.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const PAGE: u64 = 4096;
/// Bytes that are copied and written at a time.
const STEP: usize = 256 << 10;

thread_local! {
    /// Whole pages on their way to a file.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Whether writing past the page cache was measured to be at least as fast on the file system of a folder: on ext4.
#[cfg(target_os = "linux")]
pub(crate) fn direct_is_fast(folder: &Path) -> bool {
    /// `EXT4_SUPER_MAGIC` of `linux/magic.h`.
    const EXT4: u32 = 0xEF53;
    rustix::fs::statfs(folder).is_ok_and(|status| status.f_type as u32 == EXT4)
}

/// Whether writing past the page cache was measured to be at least as fast on the file system of a folder: nowhere.
#[cfg(not(target_os = "linux"))]
pub(crate) fn direct_is_fast(_: &Path) -> bool {
    false
}

/// A new file.
#[derive(Debug)]
pub(super) struct OutputFile {
    file: File,
    /// The same file, opened for writing past the page cache.
    direct: Option<File>,
}

impl OutputFile {
    /// Creates a file that will have `bytes` bytes. With `direct` it is written past the page cache, if its file system
    /// knows how; the room that it will take is then taken at once.
    pub fn create(path: &Path, bytes: u64, direct: bool) -> Result<Self> {
        let file = File::create_new(path)?;
        if !direct {
            return Ok(OutputFile { file, direct: None });
        }
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        let direct = match OpenOptions::new().write(true).custom_flags(flags).open(path) {
            Ok(direct) => direct,
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                tracing::warn!("the file system does not write past the page cache (O_DIRECT), so it is not done");
                return Ok(OutputFile { file, direct: None });
            }
            Err(e) => return Err(e),
        };
        // Into room that it has, a file can be written by several threads at once.
        match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(OutputFile { file, direct: Some(direct) }),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes all of `bytes` at a place.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> Result<()> {
        let end = at + bytes.len() as u64;
        let (first, last) = (at.next_multiple_of(PAGE), end / PAGE * PAGE);
        let direct = match &self.direct {
            Some(direct) if first < last => direct,
            Some(_) | None => return self.file.write_all_at(bytes, at),
        };
        let (head, rest) = bytes.split_at((first - at) as usize);
        let (pages, tail) = rest.split_at((last - first) as usize);
        self.file.write_all_at(head, at)?;
        self.file.write_all_at(tail, last)?;
        BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(STEP + PAGE as usize, 0);
            let start = buffer.as_ptr().align_offset(PAGE as usize);
            for (i, pages) in pages.chunks(STEP).enumerate() {
                let aligned = &mut buffer[start..start + pages.len()];
                aligned.copy_from_slice(pages);
                direct.write_all_at(aligned, first + (i * STEP) as u64)?;
            }
            Ok(())
        })
    }

    /// The file, to be synced.
    pub fn file(&self) -> &File {
        &self.file
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn pieces_in_any_order_make_the_file_either_way(
            len in 0_usize..3_000_000, cuts in prop::collection::vec(0.0..1.0_f64, 0..12), seed in any::<u64>(),
        ) {
            // Not in /tmp: that is often a file system in memory, and such know no O_DIRECT.
            let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/target").unwrap();
            let bytes: Vec<u8> = (0..len).map(|i| (i as u64).wrapping_mul(seed | 1).to_le_bytes()[2]).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| (cut * len as f64) as usize).chain([0, len]).collect();
            at.sort_unstable();
            let mut pieces: Vec<_> = at.windows(2).map(|ends| ends[0]..ends[1]).collect();
            pieces.sort_by_key(|piece| (piece.start as u64).wrapping_mul(seed | 1));
            for direct in [false, true] {
                let path = folder.path().join(format!("{direct}"));
                let file = OutputFile::create(&path, len as u64, direct).unwrap();
                std::thread::scope(|scope| {
                    for pieces in pieces.chunks(pieces.len().div_ceil(3)) {
                        let (file, bytes) = (&file, &bytes);
                        scope.spawn(move || {
                            for piece in pieces {
                                file.write_all_at(&bytes[piece.clone()], piece.start as u64).unwrap();
                            }
                        });
                    }
                });
                file.file().sync_all().unwrap();
                prop_assert!(std::fs::read(&path).unwrap() == bytes);
            }
        }
    }
}
