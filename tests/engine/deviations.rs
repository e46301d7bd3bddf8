//! How far encoded weights are from the source is found for those who want to know, and for nobody else.

use std::sync::atomic::{AtomicUsize, Ordering};

use ggshard::convert::{Request, plan};
use ggshard::encode::Deviation;

use super::*;

/// Keeps slices, and counts what it is told of deviations.
struct Told {
    slices: Slices,
    wants: bool,
    told: AtomicUsize,
}

impl Sink for Told {
    fn put(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        self.slices.put(param, ranks, offset, bytes)
    }

    fn wants_deviations(&self) -> bool {
        self.wants
    }

    fn deviate(&self, _param: u32, ranks: &[u32], _found: &Deviation) {
        self.told.fetch_add(ranks.len(), Ordering::Relaxed);
    }
}

#[test]
fn nobody_is_told_who_does_not_want_to_know_and_the_bytes_are_the_same() {
    for dtype in ["fp8", "nvfp4"] {
        let request = Request { tp: 2, ..Request::default() }.typed(dtype, None).unwrap();
        let planned = plan(&plans::fixture(GLM), &request, false).unwrap();
        let [wanting, other] = [true, false].map(|wants| {
            let sink = Told { slices: Slices::new(&planned.plan), wants, told: AtomicUsize::new(0) };
            Engine::new(&planned.plan, &planned.set, options(2, 20_000)).run(&sink, &|_| {}).unwrap();
            sink
        });
        assert!(wanting.told.into_inner() > 10, "{dtype}");
        assert_eq!(other.told.into_inner(), 0, "{dtype}");
        for (index, param) in planned.plan.params.iter().enumerate() {
            for rank in 0..2 {
                assert!(wanting.slices.of(index, rank) == other.slices.of(index, rank), "{dtype} '{}'", param.name);
            }
        }
    }
}
