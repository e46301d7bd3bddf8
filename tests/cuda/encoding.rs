//! Parameters that the device encodes.

use std::path::{Path, PathBuf};

use ggshard::gguf::GgmlType;

use crate::double::{Double, compare, convert, fixture};
use crate::failures::{FAILURES, no_checkpoint, text};
use crate::gguf_writer::{BuiltTensor, GgufBuilder, random_blocks};
use crate::same;

/// Tensors of a folder that were encoded.
fn encoded(folder: &Path) -> usize {
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("ggshard.json")).unwrap()).unwrap();
    let files = manifest["files"].as_array().unwrap().iter();
    let tensors = files.flat_map(|file| file["tensors"].as_array().unwrap());
    tensors.filter(|tensor| tensor.get("deviation").is_some()).count()
}

/// A policy that gives weights one form: all that have two axes, or those that are named.
fn policy(folder: &Path, form: &str, weights: &str) -> PathBuf {
    let path = folder.join(format!("{form}.toml"));
    let rule = format!("[[rule]]\ndtype = \"{form}\"\n{weights}");
    std::fs::write(&path, format!("name = \"test\"\nversion = 1\nabout = \"A test.\"\n{rule}")).unwrap();
    path
}

#[test]
fn models_are_encoded_to_the_same_bytes() {
    let double = Double::with("devices=2");
    for model in ["models/glm_moe_dsa-UD-IQ2_XXS.gguf", "models/deepseek_v3-split"] {
        for (tp, profile, dtype, device, limit) in [
            ("2", "hf", "fp8", "cuda:1", "1G"),
            ("2", "vllm-0.32", "fp8", "cuda:0,1", "64M"),
            ("2", "hf", "nvfp4", "cuda", "1G"),
            ("1", "vllm-0.32", "nvfp4", "cuda:0,1", "64M"),
            // The smallest tiles: weights are in several areas.
            ("2", "hf", "fp8", "cuda", "1M"),
            ("1", "hf", "nvfp4", "cuda", "1M"),
        ] {
            let arguments =
                ["--tp", tp, "--profile", profile, "--dtype", dtype, "--mem-limit", limit, "--threads", "2"];
            let seen = same(&fixture(model), &arguments, &double, device);
            let kernel = if dtype == "fp8" { "ggshard_fp8_sum" } else { "ggshard_nvfp4" };
            assert!(seen[kernel] > 4, "{model} {tp} {dtype} {limit}: {seen:?}");
        }
    }
}

#[test]
fn every_weight_of_a_model_is_encoded_by_the_device() {
    let temp = tempfile::tempdir().unwrap();
    let double = Double::with("");
    for (model, dtype, kernel) in [
        ("models/glm_moe_dsa-UD-IQ2_XXS.gguf", "fp8", "ggshard_fp8"),
        ("models/deepseek_v3-split", "nvfp4", "ggshard_nvfp4"),
    ] {
        let run = |limit: &str| {
            let output = temp.path().join(format!("{dtype}-{limit}"));
            let arguments = ["--tp", "1", "--dtype", dtype, "--device", "cuda", "--mem-limit", limit];
            let (done, seen) = double.run(&convert(&fixture(model), &output, &arguments));
            assert!(done.status.success(), "{}", text(&done));
            (seen[kernel] as usize, encoded(&output))
        };
        // Each is one area, or several where tiles are small.
        let (areas, weights) = run("1G");
        assert_eq!(areas, weights, "{model}");
        let (areas, weights) = run("1M");
        assert!(areas >= weights, "{model}: {areas} areas of {weights} weights");
    }
}

#[test]
fn blocks_of_every_type_are_encoded_to_the_same_bytes() {
    let (double, temp) = (Double::with(""), tempfile::tempdir().unwrap());
    let [fp8, nvfp4] = ["fp8", "nvfp4"].map(|form| policy(temp.path(), form, "").display().to_string());
    let files = std::fs::read_dir(fixture("blocks")).unwrap().map(|entry| entry.unwrap().path());
    let mut by_device = 0;
    for path in files.filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
        // Of types that are decoded to other floats.
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if ["I8", "I16", "I32", "I64", "F64"].contains(&name.as_str()) {
            continue;
        }
        for choice in [&["--policy", &fp8][..], &["--policy", &nvfp4], &["--policy", &nvfp4, "--nvfp4-search"]] {
            let arguments = [&["--tp", "1", "--mapping", "raw", "--allow-nonfinite"], choice].concat();
            let seen = same(&path, &arguments, &double, "cuda");
            by_device += usize::from(
                ["ggshard_fp8", "ggshard_nvfp4", "ggshard_nvfp4_searched"].iter().any(|k| seen.contains_key(*k)),
            );
        }
    }
    assert!(by_device > 90, "{by_device}");
}

#[test]
fn memory_stays_within_the_limit_while_encoding() {
    let double = Double::with("devices=2");
    for (limit, device, dtype) in [(16 << 20, "cuda", "fp8"), (64 << 20, "cuda:0,1", "nvfp4")] {
        let arguments = ["--tp", "2", "--mem-limit", &limit.to_string(), "--dtype", dtype];
        let seen = same(&fixture("models/deepseek_v3-split"), &arguments, &double, device);
        assert!(seen["most_pinned_bytes"] <= limit && seen["most_device_bytes"] <= limit, "{limit}: {seen:?}");
    }
}

#[test]
fn a_device_that_fails_is_an_error_also_while_it_measures_and_encodes() {
    let temp = tempfile::tempdir().unwrap();
    let source = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    let cpu = temp.path().join("cpu");
    let low = ["--tp", "2", "--dtype", "nvfp4"];
    let run =
        |double: Double, output: &Path, more: &[&str]| double.run(&convert(&source, output, &[&low, more].concat())).0;
    assert!(run(Double::with(""), &cpu, &["--device", "cpu"]).status.success());
    for settings in FAILURES {
        let output = temp.path().join(settings);
        let failed = run(Double::with(settings), &output, &["--device", "cuda:0"]);
        let said = text(&failed);
        assert_eq!(failed.status.code(), Some(1), "{settings}: {said}");
        for part in ["error: tensor '", "CUDA device 0 (Double) failed on '", "CUDA_ERROR_LAUNCH_FAILED (719)"] {
            assert!(said.contains(part), "{settings}: {said}");
        }
        no_checkpoint(&output);
        assert!(run(Double::with(""), &output, &["--device", "cpu", "--resume"]).status.success());
        compare(&output, &cpu);
    }
}

/// A weight of random blocks, and as many zeros as `auto` needs to take a device.
fn large(path: &Path) {
    const ROWS: u64 = 16_640;
    let mut file = GgufBuilder::architecture("large");
    let bytes = random_blocks(GgmlType::Q8_0, 1024 * 512, 3);
    let low = BuiltTensor { name: "a.weight".into(), ty: GgmlType::Q8_0, ne: vec![1024, 512], bytes };
    let rest = vec![0; (ROWS * 1024 / 32 * 34) as usize];
    let zeros = BuiltTensor { name: "b.weight".into(), ty: GgmlType::Q8_0, ne: vec![1024, ROWS], bytes: rest };
    file.tensors.extend([low, zeros]);
    std::fs::write(path, file.build()).unwrap();
}

#[test]
fn the_cpu_goes_on_where_a_device_fails_while_it_measures_and_encodes() {
    let temp = tempfile::tempdir().unwrap();
    let source = temp.path().join("large.gguf");
    large(&source);
    for (form, failures) in [
        // Without a failure; the decoding of the area, the kernels of it, and the way back.
        ("fp8", &["", "launch=1", "launch=2", "launch=5", "copy_in=1", "copy_out=1"][..]),
        // Decoding and finding the largest magnitude, then decoding and encoding.
        ("nvfp4", &["", "launch=1", "launch=2", "launch=3", "launch=4", "copy_in=2", "copy_out=1", "copy_out=2"]),
    ] {
        let policy = policy(temp.path(), form, "weights = [\"a.weight\"]").display().to_string();
        let run = |settings: &str, output: &Path, device: &str| {
            let arguments =
                ["--tp", "1", "--mapping", "raw", "--dtype", "f32", "--policy", &policy, "--threads", "1", "--device"];
            Double::with(settings).run(&convert(&source, output, &[&arguments[..], &[device]].concat()))
        };
        let cpu = temp.path().join(format!("{form}-cpu"));
        assert!(run("", &cpu, "cpu").0.status.success());
        let mut encoding = false;
        for settings in failures {
            let output = temp.path().join(format!("{form}-{settings}"));
            let (done, seen) = run(settings, &output, "auto");
            assert!(done.status.success() && seen.contains_key("launch"), "{form} {settings}: {}", text(&done));
            let warned = text(&done).contains("CUDA device 0 (Double) failed, and the CPU goes on");
            assert_eq!(warned, !settings.is_empty(), "{form} {settings}: {}", text(&done));
            // Workers are at both weights.
            encoding |= text(&done).contains("tensor 'a.weight': CUDA device 0 (Double) failed");
            compare(&output, &cpu);
            std::fs::remove_dir_all(output).unwrap();
        }
        assert!(encoding, "{form}: no failure while it was encoded");
    }
}
