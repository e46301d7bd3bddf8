//! Pipeline stages: which blocks each holds.

use crate::mapping::Place;

/// The blocks of each pipeline stage, in order. One stage holds everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageLayers(Vec<u64>);

impl StageLayers {
    /// One stage.
    pub fn single() -> Self {
        StageLayers(vec![u64::MAX])
    }

    /// `layers` blocks over `stages` stages as vLLM divides them: as many for each, and each block that remains goes to
    /// one stage, from the last but one backwards (`vllm.distributed.utils.get_pp_indices`).
    pub fn divide(layers: u64, stages: u32) -> Result<Self, String> {
        if stages == 0 || u64::from(stages) > layers.max(1) {
            return Err(format!("{layers} blocks cannot be divided among {stages} pipeline stages"));
        }
        if stages == 1 {
            return Ok(StageLayers::single());
        }
        let mut counts = vec![layers / u64::from(stages); stages as usize];
        for i in 0..(layers % u64::from(stages)) as usize {
            counts[stages as usize - 2 - i] += 1;
        }
        Ok(StageLayers(counts))
    }

    /// Blocks per stage as given.
    pub fn given(counts: &[u64], layers: u64) -> Result<Self, String> {
        let sum = counts.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
        if sum != Some(layers) || counts.is_empty() {
            return Err(format!("the stages hold {counts:?} blocks; the model has {layers}"));
        }
        Ok(if counts.len() == 1 { StageLayers::single() } else { StageLayers(counts.to_vec()) })
    }

    /// Number of stages.
    pub fn count(&self) -> u32 {
        self.0.len() as u32
    }

    /// Blocks of each stage; for one stage, a number that stands for all.
    pub fn counts(&self) -> &[u64] {
        &self.0
    }

    /// The stage of a place in the model.
    pub fn of(&self, place: Place) -> u32 {
        let last = self.count() - 1;
        match place {
            Place::Before => 0,
            Place::After => last,
            Place::Block(block) => {
                let mut end = 0u64;
                let stage = self.0.iter().position(|n| {
                    end = end.saturating_add(*n);
                    block < end
                });
                stage.map_or(last, |s| s as u32)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_blocks_go_backwards_from_the_last_but_one_stage() {
        assert_eq!(StageLayers::divide(61, 4).unwrap().counts(), [15, 15, 16, 15]);
        assert_eq!(StageLayers::divide(11, 4).unwrap().counts(), [3, 3, 3, 2]);
        assert_eq!(StageLayers::divide(78, 8).unwrap().counts(), [9, 10, 10, 10, 10, 10, 10, 9]);
        assert!(StageLayers::divide(3, 4).is_err());
        assert!(StageLayers::given(&[1, 2], 4).is_err());
        let stages = StageLayers::given(&[1, 3], 4).unwrap();
        let of = |p| stages.of(p);
        assert_eq!([of(Place::Before), of(Place::Block(0)), of(Place::Block(1)), of(Place::After)], [0, 0, 1, 1]);
    }
}
