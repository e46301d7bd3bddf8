//! Memory between pages that nobody may touch: an access outside ends the process.

/// Bytes with an untouchable page on either side, placed so that they end, or begin, at one.
pub struct Guarded {
    map: *mut u8,
    mapped: usize,
    start: usize,
    len: usize,
}

/// Which end lies at an untouchable page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Touching {
    Start,
    End,
}

const PAGE: usize = 65536; // a multiple of every page size

impl Guarded {
    /// Zeroed bytes.
    pub fn new(len: usize, touching: Touching) -> Guarded {
        let inner = len.next_multiple_of(PAGE).max(PAGE);
        let mapped = inner + 2 * PAGE;
        // SAFETY: a new private mapping at an address of the system's choice.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        let map = map.cast::<u8>();
        // SAFETY: the inner pages are part of the mapping above.
        let opened = unsafe { libc::mprotect(map.add(PAGE).cast(), inner, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(opened, 0);
        let start = if touching == Touching::Start { PAGE } else { PAGE + inner - len };
        Guarded { map, mapped, start, len }
    }

    /// A copy of some bytes.
    pub fn copy(bytes: &[u8], touching: Touching) -> Guarded {
        let mut guarded = Guarded::new(bytes.len(), touching);
        guarded.bytes_mut().copy_from_slice(bytes);
        guarded
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: these bytes are mapped, readable and initialized for as long as this lives.
        unsafe { std::slice::from_raw_parts(self.map.add(self.start), self.len) }
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.add(self.start), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more.
        unsafe { libc::munmap(self.map.cast(), self.mapped) };
    }
}
