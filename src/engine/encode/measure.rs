//! The scale that all blocks of a weight, and of the weights that it is joined with, have in common: found from the largest
//! magnitude, by a pass over their sources just before they are encoded.
//!
//! Whole weights are measured, whatever ranks are made, so that every rank has the scale that `--tp 1` gives.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex};

use super::super::tile::{Context, Scratch};
use crate::encode::nvfp4;
use crate::error::Result;
use crate::mapping::ValueOp;
use crate::plan::Plan;
use crate::threads::{lock, wait};

/// A run of a source that belongs to a weight whose scale is sought.
#[derive(Debug)]
pub(in super::super) struct Chunk {
    /// The first of the weights that share the scale.
    pub(super) leader: u32,
    pub(super) source: u32,
    pub(super) elements: Range<u64>,
    pub(super) op: ValueOp,
}

/// The runs of weights that share the scale of `leader`, of about `most` elements, between blocks.
pub(in super::super) fn chunks(plan: &Plan, groups: &BTreeMap<u32, Vec<u32>>, leader: u32, most: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for weight in groups.get(&leader).into_iter().flatten() {
        let recipe = &plan.model.weights[*weight as usize].recipe;
        for part in &recipe.parts {
            let block = plan.sources[part.source as usize].ty.block();
            let step = (most / block).max(1) * block;
            let (mut at, end) = (part.start, part.start + part.elements(recipe.units));
            while at < end {
                let next = (at / step + 1).saturating_mul(step).min(end);
                chunks.push(Chunk { leader, source: part.source, elements: at..next, op: part.op });
                at = next;
            }
        }
    }
    chunks
}

/// What is known of the scales, by the first of the weights that share one.
#[derive(Debug, Default)]
pub(in super::super) struct Measured {
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    by_leader: BTreeMap<u32, State>,
    stopped: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct State {
    /// Chunks that are not measured yet.
    left: usize,
    /// The largest magnitude so far.
    largest: f32,
}

impl Measured {
    /// Whether a leader's chunks are measured or going to be.
    pub fn knows(&self, leader: u32) -> bool {
        lock(&self.known).by_leader.contains_key(&leader)
    }

    /// So many chunks are going to be measured for a leader.
    pub fn expect(&self, leader: u32, chunks: usize) {
        lock(&self.known).by_leader.insert(leader, State { left: chunks, largest: 0.0 });
    }

    /// A chunk of a leader is measured.
    pub(super) fn add(&self, leader: u32, largest: f32) {
        let mut known = lock(&self.known);
        if let Some(state) = known.by_leader.get_mut(&leader) {
            state.left = state.left.saturating_sub(1);
            state.largest = state.largest.max(largest);
            if state.left == 0 {
                self.changed.notify_all();
            }
        }
    }

    /// The scale of the weights that a leader leads, once all its chunks are measured: their workers wait for nothing. 1
    /// without a leader. None where it is not known and nobody will find it: after [`Measured::stop`].
    pub fn scale(&self, leader: Option<u32>) -> Option<f32> {
        let Some(leader) = leader else { return Some(1.0) };
        let mut known = lock(&self.known);
        loop {
            match known.by_leader.get(&leader) {
                Some(state) if state.left == 0 => return Some(nvfp4::weight_scale_2(state.largest)),
                Some(_) if !known.stopped => known = wait(&self.changed, known),
                Some(_) | None => return None,
            }
        }
    }

    /// The run has failed: nobody is to wait for what is not coming.
    pub fn stop(&self) {
        lock(&self.known).stopped = true;
        self.changed.notify_all();
    }
}

impl Context<'_> {
    /// Finds the largest magnitude of a chunk. What is not finite does not count; encoding refuses or reports it.
    /// Of about `most` elements at a time.
    pub fn measure(&self, chunk: &Chunk, most: u64, measured: &Measured, scratch: &mut Scratch) -> Result<()> {
        let block = self.plan.sources[chunk.source as usize].ty.block();
        let step = (most / block).max(1) * block;
        let (mut at, mut largest) = (chunk.elements.start, 0.0_f32);
        while at < chunk.elements.end {
            let end = (at / step + 1).saturating_mul(step).min(chunk.elements.end);
            largest = largest.max(self.largest(chunk, at..end, scratch)?);
            at = end;
        }
        measured.add(chunk.leader, largest);
        Ok(())
    }

    fn largest(&self, chunk: &Chunk, elements: Range<u64>, scratch: &mut Scratch) -> Result<f32> {
        let mut values = std::mem::take(&mut scratch.encode.values);
        values.resize((elements.end - elements.start) as usize, 0.0);
        let done = self.floats(chunk.source, elements, chunk.op, &mut values, scratch);
        let largest = match nvfp4::amax_on(self.simd, &values) {
            largest if largest.is_finite() => largest,
            _ => values
                .iter()
                .filter(|value| value.is_finite())
                .fold(0.0, |largest: f32, value| largest.max(value.abs())),
        };
        scratch.encode.values = values;
        done.map(|()| largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_that_nobody_will_find_is_none() {
        let measured = Measured::default();
        measured.expect(3, 2);
        measured.expect(4, 1);
        measured.add(3, 2688.0);
        measured.add(4, 5376.0);
        let waiting = || measured.scale(Some(3));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(waiting);
            measured.stop();
            // Not 1, which would be written.
            assert_eq!(waiter.join().ok(), Some(None));
        });
        // What is known stays known, and what has no scale in common needs none.
        assert_eq!(measured.scale(Some(4)), Some(2.0));
        assert_eq!(measured.scale(None), Some(1.0));
        assert_eq!(measured.scale(Some(5)), None);
    }
}
