//! The BLAKE3 of every file of a source, while something else reads it.
//!
//! ```text
//!   part:    | header | tensor | pad | tensor that nobody reads | tensor |
//!   windows: |--------|--------|--------|--------|--------|--------|-----|
//! ```
//!
//! A file is hashed in aligned windows. Whoever first needs a byte of a window hashes all of it, padding and neighbours
//! included, and what nobody needed is hashed at the end; [`TreeHash`] puts the windows together. So a disk reads each
//! byte once: the bytes that the window was for are then in the page cache.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Digest, TreeHash};
use crate::engine::{Observer, check_cancel};
use crate::error::Result;
use crate::gguf::{Advice, GgufSet};
use crate::threads::share_out;

/// Bytes of a window; a power of two, so that it is one subtree of the hash.
const WINDOW: u64 = 1 << 20;
/// How many windows are requested ahead of the threads that hash the rest.
const AHEAD: u64 = 16;

/// Hashes the files of a source as their bytes are first needed.
#[derive(Debug)]
pub struct SourceHasher<'a> {
    set: &'a GgufSet,
    parts: Vec<PartHash>,
}

/// One file.
#[derive(Debug)]
struct PartHash {
    bytes: u64,
    tree: TreeHash,
    /// A bit per window: whether someone hashes it or has done so.
    taken: Vec<AtomicU64>,
}

impl PartHash {
    fn windows(&self) -> u64 {
        self.bytes.div_ceil(WINDOW)
    }

    /// Whether the window was free until now.
    fn take(&self, window: u64) -> bool {
        let (word, bit) = (&self.taken[(window / 64) as usize], 1 << (window % 64));
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

impl<'a> SourceHasher<'a> {
    /// A hasher of which nothing is done yet.
    pub fn new(set: &'a GgufSet) -> Self {
        let part = |bytes: u64| PartHash {
            bytes,
            tree: TreeHash::new(bytes),
            taken: (0..bytes.div_ceil(WINDOW).div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        };
        SourceHasher { set, parts: set.parts().iter().map(|p| part(p.bytes())).collect() }
    }

    /// Hashes what nobody needed, on so many threads (0 for one per CPU), and gives the digest of each file.
    ///
    /// # Errors
    ///
    /// Those of reading the source, and [`Error::Cancelled`](crate::Error::Cancelled) once `cancel` is set.
    pub fn finish(&self, threads: usize, cancel: Option<&AtomicBool>) -> Result<Vec<Digest>> {
        for (index, part) in self.parts.iter().enumerate() {
            share_out(threads, part.windows(), |buffer, window| {
                if !part.take(window) {
                    return Ok(());
                }
                let ahead = (window + AHEAD) * WINDOW;
                // Advice only: what the system makes of it changes nothing but speed.
                let _ = self.set.advise(index, ahead..ahead + WINDOW, Advice::WillNeed);
                check_cancel(cancel)?;
                self.hash(index, window, buffer)
            })?;
        }
        self.parts.iter().map(|part| part.tree.finish().map(Digest::from)).collect()
    }

    fn hash(&self, part: usize, window: u64, buffer: &mut Vec<u8>) -> Result<()> {
        let start = window * WINDOW;
        let end = (start + WINDOW).min(self.parts[part].bytes);
        self.parts[part].tree.add(start, self.set.read_part(part, start..end, buffer)?)
    }
}

impl Observer for SourceHasher<'_> {
    fn before(&self, part: usize, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<()> {
        for window in range.start / WINDOW..range.end.div_ceil(WINDOW) {
            if self.parts[part].take(window) {
                self.hash(part, window, buffer)?;
            }
        }
        Ok(())
    }
}
