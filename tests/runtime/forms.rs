//! Output policies straight from a source: what comes is what a conversion writes, and no buffer is too small for it.

use std::sync::mpsc;
use std::time::Duration;

use ggshard::convert::Request;
use ggshard::dequant::FloatType;
use ggshard::gguf::GgmlType;
use ggshard::runtime::{RankOptions, Set, Source, WeightOptions};

use super::folders::{converted_by, deepseek, glm};
use super::gguf_writer::GgufBuilder;
use super::stream::{collect, small};
use super::{Tensors, parse};

/// Budgets and threads that must not matter.
const WAYS: [(usize, u64); 6] = [(1, 0), (1, 1 << 30), (2, 1), (8, 0), (8, 60_000), (33, 1)];

/// The request of a conversion, as options of a rank.
fn of(request: &Request, rank: u32, weights: WeightOptions) -> RankOptions {
    let Request { profile, tp, dtype, policy, keep_or, nvfp4_search, .. } = request.clone();
    let weights = WeightOptions { dtype, policy, keep_or, nvfp4_search, ..weights };
    RankOptions { profile, tp, rank, weights, ..Default::default() }
}

/// Everything that comes, unless it stands still.
fn in_time(source: &Source, options: RankOptions) -> Tensors {
    let set = options.set.unwrap_or(Set::Main);
    let (source, (done, waiting)) = (source.clone(), mpsc::channel());
    std::thread::spawn(move || done.send(collect(source.rank(options).unwrap(), set)));
    waiting.recv_timeout(Duration::from_secs(60)).expect("it stands still, or has failed")
}

fn same(found: &Tensors, expected: &Tensors, way: &str) {
    let differ: Vec<&String> = expected.keys().filter(|name| found.get(*name) != expected.get(*name)).collect();
    assert!(differ.is_empty() && found.len() == expected.len(), "{way}: {differ:?}");
}

#[test]
fn encoded_and_kept_weights_are_those_of_a_folder() {
    for path in [glm(), deepseek()] {
        let source = Source::open(&path).unwrap();
        for tp in [1, 2] {
            let plain = Request { tp, ..Request::default() };
            let vllm = Request { profile: "vllm-0.32".into(), ..plain.clone() };
            let keep = Request { keep_or: Some(FloatType::F16), ..plain.clone() };
            let searched = Request { nvfp4_search: true, ..plain.clone() };
            for (request, dtype) in
                [(plain, "fp8"), (vllm.clone(), "fp8"), (searched, "nvfp4"), (vllm, "nvfp4"), (keep, "keep")]
            {
                let request = request.typed(dtype, None).unwrap();
                let folder = converted_by(&path, &request);
                for rank in 0..tp {
                    for (set, draft) in [(Set::Main, false), (Set::Draft, true)] {
                        let own = |name: &str| tp == 1 || name.contains(&format!("rank-{rank}-"));
                        let expected = parse(folder.path(), |name| own(name) && name.starts_with("mtp/") == draft);
                        assert!(expected.len() > 10 || draft);
                        for (threads, memory) in WAYS {
                            let options = RankOptions { set: Some(set), ..of(&request, rank, small(threads, memory)) };
                            let found = in_time(&source, options);
                            let way = format!("{dtype} {tp} {rank} {set:?}: {threads} threads, {memory} bytes");
                            same(&found, &expected, &way);
                        }
                    }
                }
            }
        }
    }
}

/// A model of weights that are encoded in several steps each, so that their scales come before they are complete.
fn large(form: &str) -> (tempfile::TempDir, Source, String) {
    let temp = tempfile::tempdir().unwrap();
    let (model, policy) = (temp.path().join("large.gguf"), temp.path().join("all.toml"));
    let mut file = GgufBuilder::architecture("large");
    for i in 0..6 {
        file = file.random(&format!("{i}.weight"), GgmlType::Q8_0, &[16384, 384], i);
        file = file.f32s(&format!("{i}.norm"), &[64], &[1.0; 64]);
    }
    std::fs::write(&model, file.build()).unwrap();
    let rules = format!("name = \"all\"\nversion = 1\nabout = \"All of it.\"\n[[rule]]\ndtype = \"{form}\"\n");
    std::fs::write(&policy, rules).unwrap();
    let source = Source::open(model).unwrap();
    (temp, source, policy.to_str().unwrap().to_owned())
}

#[test]
fn scales_never_wait_for_their_own_weight() {
    for (form, tensors) in [("fp8", 18), ("nvfp4", 24)] {
        let (temp, source, policy) = large(form);
        let policy = Some(policy);
        let request = Request { mapping: Some("raw".into()), policy: policy.clone(), ..Request::default() };
        let folder = converted_by(&temp.path().join("large.gguf"), &request);
        let expected = parse(folder.path(), |_| true);
        assert_eq!(expected.len(), tensors);
        for (threads, memory) in WAYS.into_iter().chain([(1, 7_000_000), (8, 7_000_000)]) {
            let weights =
                WeightOptions { mapping: Some("raw".into()), policy: policy.clone(), ..small(threads, memory) };
            let options = RankOptions { weights, ..RankOptions::default() };
            same(&in_time(&source, options), &expected, &format!("{form}: {threads} threads, {memory} bytes"));
        }
    }
}

#[test]
fn a_weight_and_its_scales_come_together_whichever_is_named() {
    let source = Source::open(glm()).unwrap();
    let module = "model.layers.1.mlp.experts.2.up_proj";
    for (dtype, scales) in [("fp8", &["weight_scale_inv"][..]), ("nvfp4", &["weight_scale", "weight_scale_2"])] {
        let all = collect(source.weights(small(2, 1).typed(dtype, None).unwrap()).unwrap(), Set::Main);
        let own: Vec<String> = ["weight"].iter().chain(scales).map(|leaf| format!("{module}.{leaf}")).collect();
        let norm = "model.norm.weight".to_owned();
        let mut with_norm = own.clone();
        with_norm.push(norm.clone());
        for (names, expected) in [
            (vec![own[0].clone()], &own),
            (vec![own[own.len() - 1].clone(), norm.clone()], &with_norm),
            (vec![norm.clone()], &vec![norm]),
        ] {
            let options = WeightOptions { names: Some(names), ..small(2, 1) }.typed(dtype, None).unwrap();
            let some = collect(source.weights(options).unwrap(), Set::Main);
            assert!(some.keys().eq(expected), "{:?}", some.keys());
            assert!(some.iter().all(|(name, tensor)| all[name] == *tensor), "{dtype}");
        }
    }
}

#[test]
fn forms_that_cannot_be_are_refused_before_anything_is_decoded() {
    let source = Source::open(glm()).unwrap();
    let keep = WeightOptions::default().typed("keep", None).unwrap();
    let floats = WeightOptions { keep_or: Some(FloatType::BF16), ..WeightOptions::default() };
    for (profile, tp, weights, part) in [
        ("vllm-0.32", 1, keep.clone(), "keep"),
        ("hf", 4, WeightOptions { keep_or: None, ..keep }, "--keep-or"),
        ("hf", 1, floats, "--keep-or has no effect"),
        ("hf", 1, WeightOptions { policy: Some("no-such".into()), ..WeightOptions::default() }, "no-such"),
    ] {
        let options = RankOptions { profile: profile.into(), tp, weights, ..RankOptions::default() };
        let error = source.rank(options).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert!(WeightOptions::default().typed("fp8", Some("keep".into())).is_err());
}
