//! The device path without a device: the program runs with a test double of the driver's library in place of it
//! (`tests/cuda/driver.cpp`), whose kernels are the device's own, compiled for the host.
//!
//! What a conversion makes with it must be the bytes that the CPU makes, and whatever the double is told to refuse must
//! end in a message that says so, or in the CPU's bytes, and never in a folder that passes for a checkpoint. The double
//! ends the process when it is misused or when something was not freed.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

#[path = "common/gguf_writer.rs"]
mod gguf_writer;

#[path = "cuda/double.rs"]
mod double;
#[path = "cuda/encoding.rs"]
mod encoding;
#[path = "cuda/failures.rs"]
mod failures;
#[path = "cuda/resident.rs"]
mod resident;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use double::{Double, compare, convert, fixture};
use ggshard::dequant::{Dequantizer, Simd};
use ggshard::gguf::GgmlType;
use ggshard::gguf::types::TYPES;

/// Converts with both, compares every file, and gives what the double saw.
fn same(source: &Path, arguments: &[&str], double: &Double, device: &str) -> BTreeMap<String, u64> {
    let temp = tempfile::tempdir().unwrap();
    let [gpu, cpu] = ["gpu", "cpu"].map(|name| temp.path().join(name));
    let (done, seen) = double.run(&convert(source, &gpu, &[arguments, &["--device", device]].concat()));
    assert!(done.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&done.stderr));
    let (done, none) = double.run(&convert(source, &cpu, &[arguments, &["--device", "cpu"]].concat()));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(!none.contains_key("launch"));
    compare(&gpu, &cpu);
    seen
}

#[test]
fn models_are_the_same_bytes_on_every_number_of_ranks() {
    let double = Double::with("devices=3");
    for name in ["models/glm_moe_dsa-UD-IQ2_XXS.gguf", "models/deepseek_v3-split"] {
        for (tp, dtype, device, limit) in [
            ("1", "bf16", "cuda", "128M"),
            ("2", "f16", "cuda:0", "1G"),
            ("4", "bf16", "cuda:0,2", "64M"),
            ("4", "f32", "cuda:0,1,2", "128M"),
            // The smallest tiles: no parameter is in one.
            ("2", "bf16", "cuda:1", "1M"),
        ] {
            let arguments = ["--tp", tp, "--dtype", dtype, "--mem-limit", limit, "--threads", "2", "--allow-nonfinite"];
            let seen = same(&fixture(name), &arguments, &double, device);
            assert!(seen["launch"] > 50, "{name}: {seen:?}");
            let used: BTreeSet<&str> =
                seen.keys().filter_map(|key| key.strip_prefix("device_")).filter(|n| n.len() == 1).collect();
            let asked: BTreeSet<&str> = device.strip_prefix("cuda:").unwrap_or("0").split(',').collect();
            assert!(used.is_subset(&asked) && !used.is_empty(), "{device}: {used:?}");
        }
    }
}

#[test]
fn families_and_layouts_are_the_same_bytes() {
    let double = Double::with("");
    let families = std::fs::read_dir(fixture("families")).unwrap().map(|entry| entry.unwrap().path());
    for path in families.filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
        same(&path, &["--tp", "2"], &double, "cuda");
    }
    for arguments in [
        &["--tp", "2", "--profile", "vllm-0.32"][..],
        &["--tp", "4", "--profile", "sglang-0.5"],
        &["--tp", "2", "--profile", "vllm-0.32", "--ep", "--pp", "2"],
        &["--tp", "4", "--ranks", "1,3", "--seal"],
        &["--tp", "1", "--io", "pread", "--hash-source"],
    ] {
        same(&fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf"), arguments, &double, "cuda");
    }
}

#[test]
fn blocks_of_every_type_are_the_same_bytes_in_every_dtype() {
    let double = Double::with("");
    let mut launched = BTreeSet::new();
    let files: Vec<PathBuf> =
        std::fs::read_dir(fixture("blocks")).unwrap().map(|entry| entry.unwrap().path()).collect();
    for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
        for dtype in ["bf16", "f16", "f32"] {
            let seen =
                same(path, &["--tp", "1", "--mapping", "raw", "--dtype", dtype, "--allow-nonfinite"], &double, "cuda");
            launched.extend(seen.into_keys().filter(|key| key.starts_with("ggshard_")));
        }
    }
    // F64 stays what it is, so nothing decodes it.
    let decoded = TYPES.iter().filter(|info| info.ty != GgmlType::F64);
    for info in decoded.filter(|info| Dequantizer::new(info.ty, Simd::Baseline).is_some()) {
        assert!(launched.contains(&format!("ggshard_{}", info.name)), "{launched:?}");
    }
}

#[test]
fn pinned_and_device_memory_stay_within_the_limit() {
    let double = Double::with("devices=2");
    for (limit, device) in [(16 << 20, "cuda"), (64 << 20, "cuda:0,1"), (128 << 20, "cuda")] {
        let arguments = ["--tp", "2", "--mem-limit", &limit.to_string()];
        let seen = same(&fixture("models/deepseek_v3-split"), &arguments, &double, device);
        assert!(seen["most_pinned_bytes"] <= limit, "{limit}: {seen:?}");
        assert!(seen["most_device_bytes"] <= limit, "{limit}: {seen:?}");
    }
}

#[test]
fn the_check_for_a_real_device_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = std::process::Command::new(root.join("scripts/gpu-check.sh"))
        .args([Path::new(env!("CARGO_BIN_EXE_ggshard")), &root.join("fixtures")])
        .arg("cuda:1")
        .env("LD_LIBRARY_PATH", Double::with("").folder())
        .env("GGSHARD_DOUBLE", "devices=2")
        .envs([("SIZE", "128K"), ("MODEL_MB", "2")])
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("# cuda:1, ") && stdout.contains("| models at 1, 2 and 4 ranks | 12 | 0 |"), "{stdout}");
    for info in TYPES.iter().filter(|info| Dequantizer::new(info.ty, Simd::Baseline).is_some()) {
        assert!(stdout.contains(&format!("| cuda:1 | decode {} |", info.name)), "{stdout}");
    }
    assert!(stdout.contains("| models in fp8 and nvfp4, with and without search | 16 | 0 |"), "{stdout}");
    for what in
        ["encode fp8", "encode nvfp4", "encode nvfp4, searched", "convert Q4_K to bf16, ", "convert Q4_K to nvfp4, "]
    {
        assert!(stdout.contains(&format!("| cuda:1 | {what}")), "{stdout}");
    }
}

#[test]
fn a_device_is_measured_with_a_conversion() {
    let source = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf").display().to_string();
    let arguments = ["bench", "--device", "cuda:0,1", "--size", "128K", "--source", &source, "--tp", "2", "--json"];
    let temp = tempfile::tempdir().unwrap();
    let folder = ["--dir".to_owned(), temp.path().display().to_string()];
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).chain(folder).collect();
    let (done, _) = Double::with("devices=2").run(&arguments);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["devices"].as_array().unwrap().len(), 2);
    assert_eq!(report["conversions"][1]["device"], "cuda:0,1");
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
}
