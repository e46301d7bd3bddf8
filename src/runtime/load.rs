//! Reading a checkpoint's tensors in parallel: into the page cache, or into the caller's memory.

use std::hint::black_box;
use std::sync::Mutex;

use super::checkpoint::RankCheckpoint;
use super::tensor::Tensor;
use crate::error::{Fault, Result};
use crate::gguf::Advice;
use crate::threads::{lock, on_threads};

/// Bytes that a thread takes at a time.
const CHUNK: usize = 4 << 20;
/// The smallest page of the systems that we run on; touching every one of a larger size twice costs nothing.
const PAGE: usize = 4096;

impl RankCheckpoint {
    /// Reads every byte of this rank's files into memory, in parallel, and no other file. Gives the number of bytes.
    ///
    /// Afterwards the pages are mapped and views are read without waiting, unless the system takes pages back because
    /// memory is short.
    pub fn prefetch(&self) -> u64 {
        let pieces = self.maps().iter().flat_map(|map| (0..map.len()).step_by(CHUNK).map(move |start| (map, start)));
        let pieces = Mutex::new(pieces);
        on_threads(self.threads(), || {
            loop {
                let next = lock(&pieces).next();
                let Some((map, start)) = next else { return };
                let piece = start..map.len().min(start + CHUNK);
                // One call instead of a fault for every few pages; where the system has none, the faults.
                if map.advise(piece.clone(), Advice::Populate).is_err() {
                    black_box(map[piece].iter().step_by(PAGE).fold(0, |sum, byte| sum ^ byte));
                }
            }
        });
        self.maps().iter().map(|map| map.len() as u64).sum()
    }

    /// Copies a tensor's bytes into `to`, which must have exactly their length, in parallel.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) when there is no such tensor or the length differs.
    pub fn copy_to(&self, name: &str, to: &mut [u8]) -> Result<()> {
        let tensor = self.get(name).ok_or_else(|| {
            Fault::new(format!("rank {} has no such tensor", self.rank())).file(self.dir()).tensor(name).checkpoint()
        })?;
        let mut copies = Vec::new();
        self.add(tensor, to, &mut copies)?;
        self.copy(copies);
        Ok(())
    }

    /// Copies tensors into the memory that `place` gives for each, in parallel; those for which it gives none are left
    /// out. Nothing is copied unless every length is right. Gives the number of bytes copied.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) when a length differs.
    pub fn copy_all<'d>(&self, mut place: impl FnMut(Tensor<'_>) -> Option<&'d mut [u8]>) -> Result<u64> {
        let mut copies = Vec::new();
        let mut bytes = 0;
        for tensor in self.iter() {
            if let Some(to) = place(tensor) {
                bytes += to.len() as u64;
                self.add(tensor, to, &mut copies)?;
            }
        }
        self.copy(copies);
        Ok(bytes)
    }

    fn add<'s, 'd>(
        &self,
        tensor: Tensor<'s>,
        to: &'d mut [u8],
        copies: &mut Vec<(&'s [u8], &'d mut [u8])>,
    ) -> Result<()> {
        if to.len() != tensor.bytes.len() {
            return Err(Fault::new(format!("{} bytes of memory were given", to.len()))
                .file(self.dir())
                .tensor(tensor.name)
                .expected(format!("{} bytes, for {} {:?}", tensor.bytes.len(), tensor.dtype, tensor.shape))
                .checkpoint());
        }
        copies.extend(tensor.bytes.chunks(CHUNK).zip(to.chunks_mut(CHUNK)));
        Ok(())
    }

    fn copy(&self, copies: Vec<(&[u8], &mut [u8])>) {
        let threads = if copies.len() == 1 { 1 } else { self.threads() };
        let copies = Mutex::new(copies.into_iter());
        on_threads(threads, || {
            loop {
                let next = lock(&copies).next();
                let Some((from, to)) = next else { return };
                to.copy_from_slice(from);
            }
        });
    }
}
