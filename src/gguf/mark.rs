//! A source file's marks: what tells that a file is not the one that it was, without reading all of it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use serde::{Deserialize, Serialize};

/// Pages that are sampled, and their size in bytes.
const PAGES: u64 = 64;
const PAGE: u64 = 4096;

/// What a file was like at one moment.
///
/// Time and inode change when a file is replaced by another, also by one that differs in a few bytes only, but also when
/// it is copied or touched. Samples tell a copy from another quantization of the same size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// When the contents changed last: seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// Number of the file in its file system.
    pub inode: u64,
    /// BLAKE3 over pages at even distances, in hexadecimal.
    pub samples: String,
}

impl Mark {
    /// The marks of an open file that had `bytes` bytes when it was opened.
    pub(super) fn of_file(file: &File, bytes: u64) -> std::io::Result<Mark> {
        let status = file.metadata()?;
        let mut hasher = blake3::Hasher::new();
        let mut page = [0; PAGE as usize];
        for at in samples(bytes) {
            let page = &mut page[..PAGE.min(bytes - at) as usize];
            file.read_exact_at(page, at)?;
            hasher.update(page);
        }
        let samples = hasher.finalize().to_hex().to_string();
        Ok(Mark { modified: (status.mtime(), status.mtime_nsec()), inode: status.ino(), samples })
    }

    /// The marks of bytes in memory.
    pub(super) fn of_bytes(bytes: &[u8]) -> Mark {
        Mark { modified: (0, 0), inode: 0, samples: blake3::hash(bytes).to_hex().to_string() }
    }
}

/// Where the sampled pages begin.
fn samples(bytes: u64) -> impl Iterator<Item = u64> {
    let last = bytes.saturating_sub(PAGE);
    let count = bytes.div_ceil(PAGE).min(PAGES);
    (0..count).map(move |i| if count > 1 { (last as u128 * u128::from(i) / u128::from(count - 1)) as u64 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_inside_the_file_and_reach_both_ends() {
        assert_eq!(samples(0).count(), 0);
        assert_eq!(samples(10).collect::<Vec<_>>(), [0]);
        for bytes in [4096, 4097, 10_000, 1 << 20, 402 << 30] {
            let at: Vec<u64> = samples(bytes).collect();
            assert!(at.iter().all(|at| at + PAGE.min(bytes) <= bytes) && at[0] == 0, "{bytes}");
            assert_eq!(at.last().copied(), Some(bytes - PAGE), "{bytes}");
            assert!(at.is_sorted_by(|a, b| a < b || bytes < 2 * PAGE), "{bytes}");
        }
    }

    #[test]
    fn another_file_of_the_same_size_has_other_marks() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let mark = || Mark::of_file(&File::open(&path).unwrap(), 1 << 20).unwrap();
        let first = mark();
        assert_eq!(first, mark());
        std::fs::write(temp.path().join("b"), vec![2; 1 << 20]).unwrap();
        std::fs::rename(temp.path().join("b"), &path).unwrap();
        let second = mark();
        assert!(second.samples != first.samples && second.inode != first.inode);
    }
}
