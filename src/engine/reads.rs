//! What was fetched from the sources: the engine's own count of bytes, and on request proof that none came twice.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::threads::lock;

/// Counts fetched source bytes.
#[derive(Debug, Default)]
pub struct Reads {
    bytes: AtomicU64,
    ranges: Option<Vec<Mutex<Ranges>>>,
}

/// Byte ranges of one source, start to end, neighbours joined, and how many bytes came again.
#[derive(Debug, Default)]
struct Ranges {
    seen: BTreeMap<u64, u64>,
    repeated: u64,
}

impl Reads {
    /// Counts bytes. With `track`, every range of each of `sources` is remembered, which costs memory.
    pub(super) fn new(sources: usize, track: bool) -> Self {
        let ranges = track.then(|| (0..sources).map(|_| Mutex::default()).collect());
        Reads { bytes: AtomicU64::new(0), ranges }
    }

    pub(super) fn record(&self, source: u32, range: Range<u64>) {
        self.bytes.fetch_add(range.end - range.start, Ordering::Relaxed);
        if let Some(ranges) = &self.ranges {
            lock(&ranges[source as usize]).add(range);
        }
    }

    /// Bytes fetched.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were fetched more than once, if ranges were tracked.
    pub fn repeated(&self) -> Option<u64> {
        let ranges = self.ranges.as_ref()?;
        Some(ranges.iter().map(|r| lock(r).repeated).sum())
    }
}

impl Ranges {
    fn add(&mut self, new: Range<u64>) {
        let (mut start, mut end) = (new.start, new.end);
        // Every remembered range that touches the new one is merged into it.
        while let Some((&s, &e)) = self.seen.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.repeated += e.min(new.end).saturating_sub(s.max(new.start));
            self.seen.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.seen.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_are_joined_and_overlaps_are_counted() {
        let mut r = Ranges::default();
        for range in [10..20, 30..40, 20..30, 0..5] {
            r.add(range);
        }
        assert_eq!(r.repeated, 0);
        assert_eq!(r.seen, BTreeMap::from([(0, 5), (10, 40)]));
        r.add(15..35);
        assert_eq!(r.repeated, 20);
        r.add(4..11);
        assert_eq!(r.repeated, 22);
        assert_eq!(r.seen, BTreeMap::from([(0, 40)]));
    }
}
