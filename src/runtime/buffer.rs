//! Memory that many workers fill at once. The only `unsafe` of this layer.

use std::alloc::{Layout, alloc_zeroed};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::error::{Fault, Result};
use crate::threads::lock;

/// Bytes that one lock guards: larger than a tile, so that workers on neighbouring tiles seldom meet.
const STRIPE: usize = 1 << 20;

/// A zeroed allocation of fixed length, written through shared references and then given away as a `Vec`.
///
/// Bytes of stripe `i` are only touched by who holds lock `i`, so writes never race, whatever ranges callers give.
pub(super) struct Buffer {
    start: NonNull<u8>,
    len: usize,
    locks: Box<[Mutex<()>]>,
}

// SAFETY: the allocation is owned by this value alone, and bytes have no thread affinity.
unsafe impl Send for Buffer {}
// SAFETY: through `&Buffer`, memory is only reached by `put`, which holds the lock of the stripe that it writes to.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `len` zeros, which the system provides page by page as they are written to.
    pub fn new(len: u64) -> Result<Self> {
        let refuse = || Fault::new(format!("{len} bytes of memory cannot be had")).layout();
        let size = usize::try_from(len).map_err(|_| refuse())?;
        let layout = Layout::array::<u8>(size).map_err(|_| refuse())?;
        let start = if size == 0 {
            NonNull::dangling()
        } else {
            // SAFETY: the layout's size is not zero.
            NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refuse)?
        };
        Ok(Buffer { start, len: size, locks: (0..size.div_ceil(STRIPE)).map(|_| Mutex::default()).collect() })
    }

    /// Writes `bytes` from `offset` on.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end =
            usize::try_from(offset).ok().and_then(|at| at.checked_add(bytes.len())).filter(|end| *end <= self.len);
        let Some(end) = end else {
            let found = format!("{} bytes at {offset} of a parameter of {} bytes", bytes.len(), self.len);
            return Err(Fault::new(found).audit());
        };
        let mut at = end - bytes.len();
        let mut rest = bytes;
        while !rest.is_empty() {
            let stripe = at / STRIPE;
            let (now, later) = rest.split_at(rest.len().min((stripe + 1) * STRIPE - at));
            let _guard = lock(&self.locks[stripe]);
            // SAFETY: `at + now.len()` is at most `end`, which is at most the allocation's length; the range lies in
            // one stripe, whose lock is held, and no reference to the allocation exists before `into_vec`, so `now` is
            // other memory and nobody else reads or writes this range.
            unsafe { self.start.as_ptr().add(at).copy_from_nonoverlapping(now.as_ptr(), now.len()) };
            at += now.len();
            rest = later;
        }
        Ok(())
    }

    /// The bytes.
    pub fn into_vec(self) -> Vec<u8> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again and never dropped.
        let (vec, locks) = unsafe { (this.take(), std::ptr::read(&this.locks)) };
        drop(locks);
        vec
    }

    /// The allocation as a `Vec`.
    ///
    /// # Safety
    ///
    /// At most once, and nothing may touch the allocation through `self` afterwards.
    unsafe fn take(&mut self) -> Vec<u8> {
        // SAFETY: `start` is the global allocator's, for `len` bytes of alignment 1 that are all initialised, or
        // dangling where `len` is 0; the caller gives up `self`'s claim to it.
        unsafe { Vec::from_raw_parts(self.start.as_ptr(), self.len, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: a value is dropped once, and `into_vec` prevents that it is.
        drop(unsafe { self.take() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_a_buffer_across_stripes() {
        let len = 2 * STRIPE + 12_345;
        let expected: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let buffer = Buffer::new(len as u64).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (buffer, expected) = (&buffer, &expected);
                scope.spawn(move || {
                    // Every range comes from two threads, which is as harmless as it is wrong.
                    for (i, chunk) in expected.chunks(300_001).enumerate().filter(|(i, _)| i % 2 == thread % 2) {
                        buffer.put(i as u64 * 300_001, chunk).unwrap();
                    }
                });
            }
        });
        assert!(buffer.into_vec() == expected);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let buffer = Buffer::new(10).unwrap();
        for (offset, bytes) in [(1, &[0; 10][..]), (11, &[]), (u64::MAX, &[0; 2])] {
            assert!(buffer.put(offset, bytes).is_err(), "{offset}");
        }
        buffer.put(8, &[1, 2]).unwrap();
        assert_eq!(buffer.into_vec(), [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        Buffer::new(0).unwrap().put(0, &[]).unwrap();
        assert!(Buffer::new(0).unwrap().into_vec().is_empty());
        assert!(Buffer::new(u64::MAX).is_err() && Buffer::new(i64::MAX as u64).is_err());
    }
}
