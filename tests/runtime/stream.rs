//! Weights straight from a source.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use ggshard::Error;
use ggshard::convert::{self, Request};
use ggshard::engine::{Engine, Sink};
use ggshard::gguf::GgmlType;
use ggshard::output::Manifest;
use ggshard::runtime::{Loaded, RankOptions, Set, Source, WeightOptions, Weights};

use super::folders::{converted, converted_by, deepseek, glm};
use super::gguf_writer::GgufBuilder;
use super::{Tensors, parse, vllm};

pub fn small(threads: usize, memory: u64) -> WeightOptions {
    WeightOptions { threads, memory, ..WeightOptions::default() }
}

pub fn collect(weights: Weights, set: Set) -> Tensors {
    let specs = weights.specs().to_vec();
    let loaded: Vec<Loaded> = weights.map(Result::unwrap).collect();
    assert_eq!(specs.len(), loaded.len());
    for (spec, l) in specs.iter().zip(&loaded) {
        assert_eq!((&spec.name, spec.set, spec.dtype, &spec.shape), (&l.name, l.set, l.dtype, &l.shape));
        assert_eq!(spec.bytes, l.bytes.len() as u64);
    }
    loaded.into_iter().filter(|l| l.set == set).map(|l| (l.name, (l.shape, l.bytes))).collect()
}

#[test]
fn weights_are_those_of_a_folder_for_one_rank_in_its_order() {
    for path in [glm(), deepseek()] {
        let folder = converted(&path, 1);
        let expected = parse(folder.path(), |_| true);
        let order: Vec<String> =
            Manifest::read(folder.path()).unwrap().parameters.into_iter().map(|p| p.name).collect();
        let source = Source::open(&path).unwrap();
        for (threads, memory) in [(1, 1), (2, 1), (8, 1), (1, 100_000), (2, 1 << 30), (8, 100_000), (0, 1 << 30)] {
            let weights = source.weights(small(threads, memory)).unwrap();
            assert!(weights.specs().iter().map(|s| &s.name).eq(&order));
            assert!(collect(weights, Set::Main) == expected, "{threads} threads, {memory} bytes");
        }
    }
}

#[test]
fn ranks_are_those_of_a_folder_with_the_draft_model() {
    let folder = converted_by(&glm(), &vllm(2));
    let source = Source::open(glm()).unwrap();
    for rank in 0..2 {
        for (threads, memory) in [(1, 1), (2, 50_000), (8, 1 << 30)] {
            let weights = small(threads, memory);
            let options = RankOptions { profile: "vllm-0.32".into(), tp: 2, rank, weights, ..RankOptions::default() };
            for (set, prefix) in [(Set::Main, "model-rank-"), (Set::Draft, "mtp/model-rank-")] {
                let expected = parse(folder.path(), |name| name.starts_with(&format!("{prefix}{rank}-")));
                assert!(expected.len() > 10);
                assert!(collect(source.rank(options.clone()).unwrap(), set) == expected, "{set:?} of rank {rank}");
                let only = RankOptions { set: Some(set), ..options.clone() };
                assert!(collect(source.rank(only).unwrap(), set) == expected);
            }
        }
    }
}

#[test]
fn a_stage_and_whole_experts_are_those_of_a_folder() {
    let folder = converted_by(&deepseek(), &Request { pp: 2, expert_parallel: true, ..vllm(2) });
    let source = Source::open(deepseek()).unwrap();
    for stage in 0..2 {
        let options = RankOptions {
            profile: "vllm-0.32".into(),
            tp: 2,
            rank: 1,
            pp: 2,
            stage: Some(stage),
            expert_parallel: true,
            weights: small(2, 1 << 20),
            ..RankOptions::default()
        };
        let expected = parse(folder.path(), |name| name.starts_with(&format!("model-pp-{stage}-tp-1-")));
        assert!(collect(source.rank(options).unwrap(), Set::Main) == expected, "stage {stage}");
    }
}

#[test]
fn only_the_names_asked_for_come() {
    let source = Source::open(glm()).unwrap();
    let all = collect(source.weights(small(2, 1 << 30)).unwrap(), Set::Main);
    let names: Vec<String> = all.keys().rev().step_by(5).cloned().collect();
    let some = source.weights(WeightOptions { names: Some(names.clone()), ..small(2, 1) }).unwrap();
    let some = collect(some, Set::Main);
    assert_eq!(some.len(), names.len());
    assert!(some.iter().all(|(name, tensor)| all[name] == *tensor));
    let names = Some(vec!["model.norm.weight".into(), "no.such".into(), "none".into()]);
    let error = source.weights(WeightOptions { names, ..small(2, 1) }).unwrap_err().to_string();
    assert!(error.contains("no.such") && error.contains("none"), "{error}");
    let none = source.weights(WeightOptions { names: Some(Vec::new()), ..small(2, 1) }).unwrap();
    assert_eq!(none.count(), 0);
}

#[test]
fn a_consumer_may_stop_at_any_time() {
    let source = Source::open(glm()).unwrap();
    for (taken, threads, memory) in [(0, 8, 1), (3, 1, 1), (3, 8, 1), (3, 8, 200_000), (3, 2, 1 << 30)] {
        let mut weights = source.weights(small(threads, memory)).unwrap();
        for _ in 0..taken {
            weights.next().unwrap().unwrap();
        }
        // Workers get as far as they may.
        std::thread::sleep(Duration::from_millis(30));
        let start = Instant::now();
        drop(weights);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}

#[test]
fn what_is_not_finite_is_one_error_that_names_the_tensor() {
    let mut file = GgufBuilder::architecture("toy");
    for i in 0..24 {
        let mut values = vec![1.0f32; 4096];
        if i == 5 {
            values[4095] = f32::NAN;
        }
        file = file.f32s(&format!("{i}.weight"), &[64, 64], &values);
    }
    file = file.random("last", GgmlType::Q8_0, &[64, 64], 1);
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("toy.gguf");
    std::fs::write(&path, file.build()).unwrap();
    let source = Source::open(&path).unwrap();
    for (threads, memory) in [(1, 1), (2, 1), (8, 1), (8, 30_000), (2, 1 << 30)] {
        let options = WeightOptions { mapping: Some("raw".into()), ..small(threads, memory) };
        let mut weights = source.weights(options.clone()).unwrap();
        let items: Vec<_> = weights.by_ref().collect();
        let (error, before) = items.split_last().unwrap();
        assert!(before.len() <= 5 && before.iter().all(Result::is_ok), "{} items", items.len());
        let error = error.as_ref().unwrap_err();
        assert!(matches!(error, Error::Nonfinite(_)) && error.to_string().contains("5.weight"), "{error}");
        assert!(weights.next().is_none() && weights.remaining() == 0);

        let mut weights = source.weights(WeightOptions { allow_nonfinite: true, ..options }).unwrap();
        assert_eq!(weights.by_ref().filter(Result::is_ok).count(), 25);
        assert_eq!(weights.nonfinite().iter().map(|(n, f)| (&**n, f.nan)).collect::<Vec<_>>(), [("5.weight", 1)]);
    }
}

/// A sink that keeps every worker waiting but the one that panics.
#[derive(Default)]
struct Panicking {
    stopped: Mutex<bool>,
    changed: Condvar,
    came: AtomicBool,
}

impl Sink for Panicking {
    fn put(&self, _: u32, _: &[u32], _: u64, _: &[u8]) -> ggshard::Result<()> {
        if !self.came.swap(true, Ordering::Relaxed) {
            panic!("on purpose");
        }
        let stopped = self.stopped.lock().unwrap();
        drop(self.changed.wait_while(stopped, |stopped| !*stopped).unwrap());
        Ok(())
    }

    fn stop(&self) {
        *self.stopped.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

#[test]
fn a_worker_that_panics_lets_those_go_that_wait_for_it() {
    let planned = convert::plan(&glm(), &Request::default(), false).unwrap();
    let options = ggshard::engine::Options { threads: 4, ..Default::default() };
    let sink = Panicking::default();
    let run = AssertUnwindSafe(|| Engine::new(&planned.plan, &planned.set, options).run(&sink, &|_| {}));
    assert!(catch_unwind(run).is_err());
}

#[test]
fn what_cannot_be_planned_is_refused_before_anything_is_decoded() {
    let source = Source::open(glm()).unwrap();
    let vllm = RankOptions { profile: "vllm-0.32".into(), ..RankOptions::default() };
    for (options, part) in [
        (RankOptions { tp: 2, rank: 2, ..vllm.clone() }, "rank 2"),
        (RankOptions { pp: 2, stage: Some(2), ..vllm.clone() }, "stage 2"),
        (RankOptions { tp: 3, ..vllm.clone() }, "3"),
        (RankOptions { profile: "no-such".into(), ..vllm.clone() }, "no-such"),
    ] {
        let error = source.rank(options).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert!(Source::open("/no/such/file.gguf").is_err());
}
