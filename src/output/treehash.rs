//! BLAKE3 of a file whose bytes arrive in any order, from any thread.
//!
//! BLAKE3 is a binary tree over chunks of 1,024 bytes. The node over the aligned chunks `[i·2^k, (i+1)·2^k)` depends
//! only on those bytes and their position, so whoever holds such a range can compute its chaining value alone:
//!
//! ```text
//!   one added range:      ...|frag|1|2|  4  |      8      |  4  |2|frag|...
//!                             ▲     └─ aligned power-of-two subtrees ─┘  ▲
//!                             └── bytes of a chunk that neighbours share ┘
//! ```
//!
//! Subtrees are hashed by the caller's thread before the lock is taken, as one slice each, so BLAKE3's SIMD sees whole
//! subtrees. Under the lock only buddies are merged and fragments copied. What is kept is proportional to the number of
//! gaps in what was added so far (ranges in flight), never to the file's length.
//!
//! The root is finalised with a flag of its own. So the one node that spans the whole file is never made as an inner
//! node: for a power of two of chunks the two halves are kept apart until [`TreeHash::finish`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::error::{Fault, Result};
use crate::threads::lock;

const CHUNK: u64 = blake3::CHUNK_LEN as u64;

/// The plain BLAKE3 of a file of known length, from byte ranges given in any order.
#[derive(Debug)]
pub struct TreeHash {
    len: u64,
    chunks: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Disjoint byte ranges given so far, start to end, neighbours joined.
    given: BTreeMap<u64, u64>,
    /// Roots of finished subtrees that still wait for their buddy, by first chunk.
    nodes: HashMap<u64, Node>,
    /// Chunks of which only some bytes were given, by chunk number.
    partial: HashMap<u64, Box<Partial>>,
    /// Bytes whose chaining value has reached `nodes` (for a file of one chunk: that were given).
    landed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    /// The subtree has `2^level` chunks.
    level: u32,
    value: ChainingValue,
}

#[derive(Debug)]
struct Partial {
    bytes: [u8; CHUNK as usize],
    /// How many of them were given.
    given: usize,
}

/// A subtree hashed outside the lock.
struct Subtree {
    first: u64,
    bytes: u64,
    node: Node,
}

impl TreeHash {
    /// A hash of `len` bytes, none of which are given yet.
    pub fn new(len: u64) -> Self {
        TreeHash { len, chunks: len.div_ceil(CHUNK), state: Mutex::default() }
    }

    /// Length of the whole, in bytes.
    pub fn expected_bytes(&self) -> u64 {
        self.len
    }

    /// Gives the bytes at `offset`. Every byte is given exactly once; ranges may come in any order and from any thread.
    /// Aligned ranges of many chunks are fastest.
    ///
    /// # Errors
    ///
    /// [`Error::Audit`](crate::Error::Audit) when the range reaches beyond the end or overlaps one given before. The
    /// hash is then as it was.
    pub fn add(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = match offset.checked_add(bytes.len() as u64) {
            Some(end) if end <= self.len => end,
            _ => {
                return Err(Fault::new(format!("{} bytes to be hashed reach beyond the end", bytes.len()))
                    .offset(offset)
                    .expected(format!("ranges within {} bytes", self.len))
                    .audit());
            }
        };
        if bytes.is_empty() {
            return Ok(());
        }
        // Chunks that lie in the range as a whole. A file of one chunk has no inner node: it is kept as a fragment.
        let first_whole = offset.div_ceil(CHUNK);
        let end_whole = if end == self.len { self.chunks } else { end / CHUNK };
        let whole = if self.chunks > 1 && first_whole < end_whole { first_whole..end_whole } else { 0..0 };

        let slice = |from: u64, to: u64| &bytes[(from - offset) as usize..(to - offset) as usize];
        let mut subtrees = Vec::new();
        let mut next = whole.start;
        while next < whole.end {
            let level = self.largest_subtree(next, whole.end);
            let (from, to) = (next * CHUNK, ((next + (1 << level)) * CHUNK).min(self.len));
            let node = Node { level, value: subtree_value(next, slice(from, to)) };
            subtrees.push(Subtree { first: next, bytes: to - from, node });
            next += 1 << level;
        }

        let mut completed: [Option<(u64, Box<Partial>)>; 2] = [None, None];
        {
            let mut state = self.lock();
            state.claim(offset, end)?;
            for subtree in subtrees {
                self.insert(&mut state, subtree);
            }
            if whole.is_empty() {
                // At most two chunks are touched, since none lies inside as a whole.
                let boundary = ((offset / CHUNK + 1) * CHUNK).min(end);
                completed[0] = self.fragment(&mut state, offset, slice(offset, boundary));
                completed[1] = self.fragment(&mut state, boundary, slice(boundary, end));
            } else {
                completed[0] = self.fragment(&mut state, offset, slice(offset, whole.start * CHUNK));
                let tail = (whole.end * CHUNK).min(end);
                completed[1] = self.fragment(&mut state, tail, slice(tail, end));
            }
        }
        for (chunk, partial) in completed.into_iter().flatten() {
            let node = Node { level: 0, value: subtree_value(chunk, &partial.bytes[..partial.given]) };
            self.insert(&mut self.lock(), Subtree { first: chunk, bytes: partial.given as u64, node });
        }
        Ok(())
    }

    /// Whether every byte was given and hashed.
    pub fn is_complete(&self) -> bool {
        self.lock().landed == self.len
    }

    /// The BLAKE3 of the whole, the one that `b3sum` prints.
    ///
    /// # Errors
    ///
    /// [`Error::Audit`](crate::Error::Audit) when bytes are missing; it names the first one.
    pub fn finish(&self) -> Result<blake3::Hash> {
        let state = self.lock();
        if state.landed != self.len {
            let gap = match state.given.first_key_value() {
                Some((&0, &end)) => end,
                Some(_) | None => 0,
            };
            return Err(Fault::new(format!("only {} bytes were hashed, the first gap is", state.landed))
                .offset(gap)
                .expected(format!("all {} bytes", self.len))
                .audit());
        }
        if self.chunks <= 1 {
            let bytes = state.partial.get(&0).map_or(&[][..], |partial| &partial.bytes[..partial.given]);
            return Ok(blake3::hash(bytes));
        }
        // The subtrees left, from left to right, are those of the binary digits of the number of chunks (or two halves);
        // in BLAKE3's tree each is the left child of a node whose right child holds all that follow.
        let mut row = Vec::new();
        let mut next = 0;
        while next < self.chunks {
            let Some(node) = state.nodes.get(&next) else {
                return Err(Fault::new("a subtree is missing").offset(next * CHUNK).audit());
            };
            row.push(&node.value);
            next += 1 << node.level;
        }
        let (Some((first, middle)), Some(mut right)) = (row.split_first(), row.last().map(|v| **v)) else {
            return Err(Fault::new("no subtree at all").audit());
        };
        for left in middle.iter().rev().skip(1) {
            right = merge_subtrees_non_root(left, &right, Mode::Hash);
        }
        Ok(merge_subtrees_root(first, &right, Mode::Hash))
    }

    /// The level of the largest inner node that starts at chunk `first`, ends at or before chunk `end`, and is not the
    /// root.
    fn largest_subtree(&self, first: u64, end: u64) -> u32 {
        let aligned = if first == 0 { u64::BITS } else { first.trailing_zeros() };
        let fits = (end - first).ilog2();
        let level = aligned.min(fits);
        if 1 << level == self.chunks { level - 1 } else { level }
    }

    /// Adds a finished subtree and merges upwards while the buddy is there and the parent is not the root.
    fn insert(&self, state: &mut State, subtree: Subtree) {
        state.landed += subtree.bytes;
        let Subtree { mut first, mut node, .. } = subtree;
        loop {
            let size = 1_u64 << node.level;
            let buddy = first ^ size;
            let parent = first & !size;
            let parent_is_inner = parent + 2 * size <= self.chunks && 2 * size < self.chunks;
            let joins = parent_is_inner && state.nodes.get(&buddy).is_some_and(|other| other.level == node.level);
            let other = if joins { state.nodes.remove(&buddy) } else { None };
            let Some(other) = other else {
                state.nodes.insert(first, node);
                return;
            };
            let (left, right) = if first == parent { (node.value, other.value) } else { (other.value, node.value) };
            node = Node { level: node.level + 1, value: merge_subtrees_non_root(&left, &right, Mode::Hash) };
            first = parent;
        }
    }

    /// Copies bytes of one chunk; gives the chunk back when it is whole, for hashing outside the lock.
    fn fragment(&self, state: &mut State, offset: u64, bytes: &[u8]) -> Option<(u64, Box<Partial>)> {
        if bytes.is_empty() {
            return None;
        }
        let chunk = offset / CHUNK;
        let partial =
            state.partial.entry(chunk).or_insert_with(|| Box::new(Partial { bytes: [0; CHUNK as usize], given: 0 }));
        let at = (offset % CHUNK) as usize;
        partial.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        partial.given += bytes.len();
        if self.chunks <= 1 {
            state.landed += bytes.len() as u64;
            return None;
        }
        let chunk_len = CHUNK.min(self.len - chunk * CHUNK);
        if partial.given as u64 == chunk_len { state.partial.remove_entry(&chunk) } else { None }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two writes to the state.
        lock(&self.state)
    }
}

impl State {
    /// Notes that `[start, end)` is given, or says which earlier range it overlaps.
    fn claim(&mut self, mut start: u64, mut end: u64) -> Result<()> {
        let before = self.given.range(..end).next_back().map(|(&s, &e)| (s, e));
        if let Some((s, e)) = before {
            if e > start {
                return Err(Fault::new(format!("bytes {start}..{end} were given for hashing again"))
                    .offset(start.max(s))
                    .expected(format!("bytes outside {s}..{e}, which are done"))
                    .audit());
            }
            if e == start {
                self.given.remove(&s);
                start = s;
            }
        }
        if let Some(after) = self.given.remove(&end) {
            end = after;
        }
        self.given.insert(start, end);
        Ok(())
    }
}

/// The chaining value of the subtree of `bytes` whose first chunk is `first`.
fn subtree_value(first: u64, bytes: &[u8]) -> ChainingValue {
    blake3::Hasher::new().set_input_offset(first * CHUNK).update(bytes).finalize_non_root()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn data(len: usize) -> Vec<u8> {
        let mut x = 0x9e37_79b9_u32;
        (0..len)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 17;
                x ^= x << 5;
                x as u8
            })
            .collect()
    }

    /// Lengths near everything that matters: chunk boundaries and powers of two.
    fn length() -> impl Strategy<Value = usize> {
        prop_oneof![
            2 => 0_usize..3000,
            2 => (0_usize..64, 0_usize..5).prop_map(|(n, d)| (n * 1024 + d).saturating_sub(2)),
            3 => (0_u32..23, 0_usize..5).prop_map(|(k, d)| ((1_usize << k) + d).saturating_sub(2)),
            2 => (10_u32..22, 1_usize..3, 0_usize..3).prop_map(|(k, m, d)| ((3 * m) << k.min(20)) + d * 1024),
            1 => 0_usize..5_000_000,
        ]
    }

    /// A partition of `0..len` by relative cut positions, in an order given by sort keys.
    fn partition(len: usize, cuts: &[(f64, u16, bool)]) -> Vec<std::ops::Range<usize>> {
        let mut at: Vec<usize> = cuts
            .iter()
            .map(|&(x, _, aligned)| {
                let cut = (x * len as f64) as usize;
                if aligned { cut / 1024 * 1024 } else { cut }
            })
            .chain([0, len])
            .collect();
        at.sort_unstable();
        at.dedup();
        let mut ranges: Vec<_> = at.windows(2).map(|w| w[0]..w[1]).collect();
        ranges.sort_by_key(|r| cuts.get(r.start % cuts.len().max(1)).map_or(0, |c| c.1) ^ (r.start as u16));
        ranges
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn any_partition_in_any_order_is_plain_blake3(
            len in length(),
            cuts in prop::collection::vec((0.0..1.0_f64, any::<u16>(), any::<bool>()), 0..40),
        ) {
            let bytes = data(len);
            let tree = TreeHash::new(len as u64);
            let ranges = partition(len, &cuts);
            for (i, range) in ranges.iter().enumerate() {
                prop_assert!(!tree.is_complete(), "complete before range {i}");
                prop_assert!(tree.finish().is_err());
                tree.add(range.start as u64, &bytes[range.clone()]).unwrap();
            }
            prop_assert!(tree.is_complete());
            prop_assert_eq!(tree.finish().unwrap(), blake3::hash(&bytes));
            // What is left over is the row of subtrees, not the file.
            prop_assert!(tree.lock().nodes.len() <= 64);
            prop_assert_eq!(tree.lock().given.len(), usize::from(len > 0));
        }

        #[test]
        fn a_range_that_touches_given_bytes_is_refused_and_changes_nothing(
            len in 1_usize..20_000, a in 0.0..1.0_f64, b in 0.0..1.0_f64, c in 0.0..1.0_f64, d in 0.0..1.0_f64,
        ) {
            let bytes = data(len);
            let at = |x: f64| (x * len as f64) as usize;
            let (first, second) = ((at(a).min(at(b)), at(a).max(at(b)) + 1), (at(c).min(at(d)), at(c).max(at(d)) + 1));
            let tree = TreeHash::new(len as u64);
            tree.add(first.0 as u64, &bytes[first.0..first.1]).unwrap();
            let overlaps = first.0 < second.1 && second.0 < first.1;
            let again = tree.add(second.0 as u64, &bytes[second.0..second.1]);
            prop_assert_eq!(again.is_err(), overlaps);
            let mut rest: Vec<usize> = (0..len).collect();
            rest.retain(|i| !(first.0..first.1).contains(i) && (overlaps || !(second.0..second.1).contains(i)));
            for run in rest.chunk_by(|x, y| x + 1 == *y) {
                tree.add(run[0] as u64, &bytes[run[0]..run[0] + run.len()]).unwrap();
            }
            prop_assert_eq!(tree.finish().unwrap(), blake3::hash(&bytes));
        }
    }

    #[test]
    fn every_small_length_in_one_byte_steps() {
        for len in (0..40).chain(1020..1030).chain(2046..2052).chain(3070..3076).chain(4094..4099) {
            let bytes = data(len);
            let tree = TreeHash::new(len as u64);
            for i in (0..len).rev().step_by(2).chain((0..len).rev().skip(1).step_by(2)) {
                tree.add(i as u64, &bytes[i..=i]).unwrap();
            }
            assert_eq!(tree.finish().unwrap(), blake3::hash(&bytes), "{len}");
        }
    }

    #[test]
    fn threads_give_tiles_in_any_order() {
        for len in [1 << 20, (1 << 22) - 1, (1 << 22) + 1, 5_000_123] {
            let bytes = data(len);
            for tile in [700, 4096, 65_536, 1 << 20] {
                let tree = TreeHash::new(len as u64);
                let next = std::sync::atomic::AtomicUsize::new(0);
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| {
                            loop {
                                let at = next.fetch_add(tile, std::sync::atomic::Ordering::Relaxed);
                                if at >= len {
                                    break;
                                }
                                tree.add(at as u64, &bytes[at..len.min(at + tile)]).unwrap();
                            }
                        });
                    }
                });
                assert_eq!(tree.finish().unwrap(), blake3::hash(&bytes), "{len} by {tile}");
            }
        }
    }

    #[test]
    fn a_range_beyond_the_end_is_refused() {
        let tree = TreeHash::new(10);
        assert!(tree.add(5, &[0; 6]).is_err());
        assert!(tree.add(u64::MAX, &[0; 2]).is_err());
        assert!(tree.add(11, &[]).is_err());
        assert!(tree.add(10, &[]).is_ok());
        let missing = tree.finish().unwrap_err();
        assert!(matches!(missing, crate::Error::Audit(_)), "{missing}");
    }

    #[test]
    fn memory_follows_what_is_in_flight() {
        // 64 MiB given front to back in 1 MiB steps: only the row of binary digits stays.
        let zeros = vec![0; 1 << 20];
        let tree = TreeHash::new(64 << 20);
        for i in 0..64_u64 {
            tree.add(i << 20, &zeros).unwrap();
            let state = tree.lock();
            assert!(state.nodes.len() <= 7 && state.partial.is_empty() && state.given.len() == 1);
        }
        assert!(tree.is_complete());
    }
}
