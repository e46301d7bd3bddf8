//! Parameters that stay on the device. The library loads its driver once, so a child process does the work: this very
//! program, asked for the one test below that is ignored otherwise.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use ggshard::convert::{self, Extras, Output, Request};
use ggshard::dequant::FloatType;
use ggshard::engine::Options;
use ggshard::error::Error;
use ggshard::gguf::GgmlType;
use ggshard::runtime::{OpenOptions, RankCheckpoint, RankOptions, Source, WeightOptions};

use super::double::{Double, counts, fixture};
use super::gguf_writer::GgufBuilder;

/// Runs the ignored test with a double. Gives what the double counted, too.
fn child(settings: &str) -> (bool, String, BTreeMap<String, u64>) {
    let report = tempfile::NamedTempFile::new().unwrap();
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "resident::in_the_child", "--ignored", "--nocapture", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", Double::with("").folder())
        .env("GGSHARD_DOUBLE", format!("{settings},report={}", report.path().display()))
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    (done.status.success() && text.contains("1 passed"), text, counts(report.path()))
}

#[test]
fn parameters_on_a_device_are_those_of_the_host() {
    // With little memory of the device, lanes are so small that a tensor goes in several runs of blocks.
    for settings in ["devices=2", "devices=2,device_bytes=16000000"] {
        let (passed, text, seen) = child(settings);
        assert!(passed, "{settings}: {text}");
        // It encodes, and does not find out what nobody asks for.
        assert!(seen["ggshard_fp8"] > 4 && seen["ggshard_nvfp4"] > 4, "{settings}: {seen:?}");
        assert!(!seen.contains_key("ggshard_fp8_measure") && !seen.contains_key("ggshard_fp8_sum"), "{seen:?}");
    }
}

#[test]
fn a_device_that_fails_is_one_error_and_nothing_is_left() {
    for settings in ["devices=2,launch=9", "devices=2,copy_in=3", "devices=2,device_bytes=6000000"] {
        let (passed, text, _) = child(settings);
        let named = text.contains("CUDA_ERROR_LAUNCH_FAILED") || text.contains("CUDA_ERROR_OUT_OF_MEMORY");
        assert!(!passed && named && !text.contains("driver double"), "{settings}: {text}");
    }
}

#[test]
#[ignore = "run by the tests above, with a double"]
fn in_the_child() {
    let model = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    let source = Source::open(&model).unwrap();
    for (rank, memory, threads) in [(0, 1 << 30, 2), (1, 1, 1), (3, 100_000, 4)] {
        let weights = WeightOptions { memory, threads, ..WeightOptions::default() };
        let options = RankOptions { profile: "vllm-0.32".into(), tp: 4, rank, weights, ..RankOptions::default() };
        let host: Vec<_> = source.rank(options.clone()).unwrap().map(Result::unwrap).collect();
        let mut device = source.rank_on(options, 1).unwrap();
        assert_eq!(device.weights().remaining(), host.len());
        for want in host {
            let got = device.next().unwrap().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((&got.name, got.set, got.dtype, &got.shape), (&want.name, want.set, want.dtype, &want.shape));
            assert_eq!((got.memory.device(), got.memory.len()), (1, want.bytes.len()));
            assert!(got.memory.read().unwrap() == want.bytes, "'{}' of rank {rank}", want.name);
        }
        assert!(device.next().is_none());
    }
    // One that is not consumed to its end.
    let options = RankOptions { tp: 4, ..RankOptions::default() };
    drop(source.rank_on(options.clone(), 0).unwrap().next().unwrap().unwrap());
    assert!(matches!(source.rank_on(options, 2).err(), Some(Error::Device(_))));

    // Encoded weights come from the device by way of the host, and kept ones are only moved.
    for (dtype, memory, threads) in [("fp8", 0, 1), ("nvfp4", 50_000, 3), ("keep", 0, 2)] {
        let keep_or = (dtype == "keep").then_some(FloatType::BF16);
        let weights = WeightOptions { memory, threads, keep_or, ..WeightOptions::default() };
        let options =
            RankOptions { tp: 2, rank: 1, weights: weights.typed(dtype, None).unwrap(), ..RankOptions::default() };
        let host = source.rank(options.clone()).unwrap().map(Result::unwrap);
        let device = source.rank_on(options, 0).unwrap().map(Result::unwrap);
        let same = host.zip(device).map(|(want, got)| {
            assert_eq!((&got.name, got.dtype, &got.shape), (&want.name, want.dtype, &want.shape));
            assert!(got.memory.read().unwrap() == want.bytes, "{dtype}: '{}'", want.name);
        });
        assert!(same.count() > 50);
    }

    let convert = |model: &Path, request: Request, rank: u32| {
        let folder = tempfile::tempdir().unwrap();
        let planned = convert::plan(model, &request, false).unwrap();
        let options = Options::default();
        convert::convert(&planned, Output::from(folder.path()), options, &Extras::default(), &|_| {}).unwrap();
        let checkpoint = RankCheckpoint::open(folder.path(), rank, OpenOptions { threads: 2, ..Default::default() });
        (checkpoint.unwrap(), folder)
    };
    let large = tempfile::tempdir().unwrap();
    let path = large.path().join("large.gguf");
    let file = GgufBuilder::architecture("large").random("0.weight", GgmlType::Q8_0, &[2048, 1100], 3);
    std::fs::write(&path, file.build()).unwrap();
    let raw = Request { mapping: Some("raw".into()), ..Request::default() };
    for (model, request, rank) in [(&path, raw, 0), (&model, Request { tp: 2, ..Request::default() }, 1)] {
        let keep_or = (model != &path).then_some(FloatType::BF16);
        let keep = Request { keep_or, ..request.clone() }.typed("keep", None).unwrap();
        let ((plain, _plain), (kept, _kept)) = (convert(model, request, rank), convert(model, keep, rank));
        let mut decoded = kept.decoded_on(FloatType::BF16, 1).unwrap();
        assert_eq!(decoded.remaining(), plain.len());
        for (tensor, got) in plain.iter().zip(decoded.by_ref()) {
            let got = got.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((tensor.name, tensor.dtype, tensor.shape), (&*got.name, got.dtype, &*got.shape));
            assert!(got.memory.read().unwrap() == tensor.bytes, "{}", tensor.name);
        }
        assert!(decoded.next().is_none() && decoded.nonfinite().is_empty());
        assert!(matches!(kept.decoded_on(FloatType::BF16, 2).err(), Some(Error::Device(_))));
    }

    let (checkpoint, _folder) = convert(&model, Request { tp: 2, ..Request::default() }, 1);
    let loaded = checkpoint.load_to_device(1).unwrap();
    assert_eq!(loaded.len(), checkpoint.len());
    for (tensor, got) in checkpoint.iter().zip(&loaded) {
        assert_eq!((tensor.name, tensor.dtype, tensor.shape), (got.name.as_str(), got.dtype, got.shape.as_slice()));
        assert!(got.memory.read().unwrap() == tensor.bytes, "{}", tensor.name);
    }
}
