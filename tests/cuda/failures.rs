//! What is refused or fails, and what comes of it.

use std::fs::File;
use std::path::Path;
use std::process::Output;

use ggshard::gguf::GgmlType;

use super::double::{Double, compare, convert, files, fixture};
use super::gguf_writer::{BuiltTensor, GgufBuilder};

pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Nothing in the folder is what a program would load.
pub fn no_checkpoint(folder: &Path) {
    let passes = |name: &String| name.ends_with(".safetensors") || name.ends_with("ggshard.json");
    let files = files(folder);
    assert!(!files.keys().any(passes), "{:?}", files.keys());
}

/// Why nothing can be used, as settings of the double and a part of the message.
const ABSENCES: [(&str, &str); 9] = [
    ("devices=0", "finds no device"),
    ("init=100", "finds no device"),
    ("init=803", "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
    ("init=4242", "cuInit: a code without a name (4242)"),
    ("version=11080", "supports CUDA 11.8; CUDA 12.0 or later is needed"),
    ("capability=7.5", "no kernels for compute capability 7.5"),
    ("capability=11.0,version=12080", "compute capability 11.0 needs kernels that the driver compiles"),
    ("load=200", "refuses the kernels sm_90.cubin: cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE (200)"),
    ("load=200,capability=13.0,version=13000", "refuses the kernels compute_80.ptx"),
];

#[test]
fn every_absence_has_its_reason() {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("out");
    let conversion =
        convert(&fixture("blocks/Q4_K.gguf"), &output, &["--tp", "1", "--mapping", "raw", "--device", "cuda"]);
    let check = |double: &Double, reason: &str| {
        for json in [&["devices"][..], &["devices", "--json"]] {
            let (listed, _) = double.run(&json.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>());
            assert_eq!(listed.status.code(), Some(1), "{reason}");
            assert!(text(&listed).contains(reason), "{reason}: {}", text(&listed));
        }
        let (refused, _) = double.run(&conversion);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused).contains(reason), "{reason}: {}", text(&refused));
        assert!(text(&refused).contains("--device cuda:0") && text(&refused).contains("ggshard devices"));
        assert!(files(&output).is_empty());
    };
    for (settings, reason) in ABSENCES {
        check(&Double::with(settings), reason);
    }
    let (absent, _folder) = Double::absent();
    check(&absent, "the CUDA driver's library (libcuda.so.1) is not installed");
    let (listed, _) = Double::with("devices=2").run(&["devices".to_owned()]);
    assert!(listed.status.success() && text(&listed).contains("cuda:1"), "{}", text(&listed));
    let beyond =
        convert(&fixture("blocks/Q4_K.gguf"), &output, &["--tp", "1", "--mapping", "raw", "--device", "cuda:0,2"]);
    let (refused, _) = Double::with("devices=2").run(&beyond);
    assert!(text(&refused).contains("there is no CUDA device 2; there are 2, from 0"), "{}", text(&refused));
}

#[test]
fn architectures_take_their_kernels() {
    for (settings, kernels) in [
        ("capability=8.0", "sm_80.cubin"),
        ("capability=8.9,version=12000", "sm_80.cubin"),
        ("capability=9.0", "sm_90.cubin"),
        ("capability=10.3", "sm_100.cubin"),
        ("capability=12.1", "sm_120.cubin"),
        ("capability=13.0,version=12090", "compute_80.ptx"),
    ] {
        let (listed, _) = Double::with(settings).run(&["devices".to_owned()]);
        assert!(listed.status.success() && text(&listed).contains(kernels), "{settings}: {}", text(&listed));
    }
}

#[test]
fn short_memory_makes_tiles_smaller() {
    let temp = tempfile::tempdir().unwrap();
    let source = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    let cpu = temp.path().join("cpu");
    assert!(Double::with("").run(&convert(&source, &cpu, &["--tp", "2", "--device", "cpu"])).0.status.success());
    for (i, (settings, most)) in [
        ("device_bytes=20000000", 20_000_000),
        ("pinned_bytes=20000000", 20_000_000),
        ("device_bytes=2200000", 2_200_000),
        ("oom_device=1", 128 << 20),
        ("oom_device=2", 128 << 20),
        ("oom_device=5", 128 << 20),
        ("oom_pinned=1", 128 << 20),
        ("oom_pinned=6", 128 << 20),
    ]
    .into_iter()
    .enumerate()
    {
        let gpu = temp.path().join(format!("gpu-{i}"));
        let (done, seen) = Double::with(settings).run(&convert(&source, &gpu, &["--tp", "2", "--device", "cuda"]));
        assert!(done.status.success(), "{settings}: {}", text(&done));
        let name = if settings.contains("pinned") { "most_pinned_bytes" } else { "most_device_bytes" };
        assert!(seen[name] <= most && seen["launch"] > 50, "{settings}: {seen:?}");
        compare(&gpu, &cpu);
    }
    let gpu = temp.path().join("none");
    let (refused, _) =
        Double::with("device_bytes=1000000").run(&convert(&source, &gpu, &["--tp", "2", "--device", "cuda"]));
    assert_eq!(refused.status.code(), Some(1));
    let wanted = "CUDA device 0 (Double) has no buffers: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)";
    assert!(text(&refused).contains(wanted), "{}", text(&refused));
    no_checkpoint(&gpu);
}

/// Failures in the middle, as settings of the double.
pub const FAILURES: [&str; 8] =
    ["launch=1", "launch=7", "launch=100", "copy_in=1", "copy_in=20", "copy_out=1", "copy_out=33", "copy_out=150"];

#[test]
fn a_device_that_fails_is_an_error_that_names_the_tensor_and_leaves_no_checkpoint() {
    let source = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    for settings in FAILURES {
        let temp = tempfile::tempdir().unwrap();
        let output = temp.path().join("out");
        let arguments = convert(&source, &output, &["--tp", "2", "--device", "cuda:0"]);
        let (failed, _) = Double::with(settings).run(&arguments);
        assert_eq!(failed.status.code(), Some(1), "{settings}");
        let text = text(&failed);
        for part in [
            "error: tensor '",
            ".weight': CUDA device 0 (Double) failed on '",
            "CUDA_ERROR_LAUNCH_FAILED (719)",
            "--device cpu",
        ] {
            assert!(text.contains(part), "{settings}: {text}");
        }
        no_checkpoint(&output);
        // What was finished is kept; the CPU goes on there.
        let resumed = convert(&source, &output, &["--tp", "2", "--device", "cpu", "--resume"]);
        assert!(Double::with("").run(&resumed).0.status.success());
        let cpu = temp.path().join("cpu");
        assert!(Double::with("").run(&convert(&source, &cpu, &["--tp", "2", "--device", "cpu"])).0.status.success());
        compare(&output, &cpu);
    }
}

/// A sparse model that is large enough for `auto`: zeros, which decode to zeros.
fn large(path: &Path) {
    const ROWS: u64 = 40_000;
    let mut file = GgufBuilder::architecture("large");
    let shape = vec![1024, ROWS];
    file.tensors.push(BuiltTensor { name: "one.weight".into(), ty: GgmlType::Q8_0, ne: shape, bytes: Vec::new() });
    let header = file.build();
    std::fs::write(path, &header).unwrap();
    File::options().write(true).open(path).unwrap().set_len(header.len() as u64 + ROWS * 1024 / 32 * 34).unwrap();
}

#[test]
fn auto_takes_a_device_where_it_pays_and_the_cpu_goes_on_where_it_fails() {
    let temp = tempfile::tempdir().unwrap();
    let source = temp.path().join("large.gguf");
    large(&source);
    let arguments = |output: &Path, threads: &str, device: &str| {
        convert(&source, output, &["--tp", "1", "--mapping", "raw", "--threads", threads, "--device", device])
    };
    let cpu = temp.path().join("cpu");
    assert!(Double::with("").run(&arguments(&cpu, "2", "cpu")).0.status.success());
    let check = |double: &Double, threads: &str, launches: bool, warning: Option<&str>| {
        let output = temp.path().join("gpu");
        let (done, seen) = double.run(&arguments(&output, threads, "auto"));
        assert!(done.status.success(), "{}", text(&done));
        assert_eq!(seen.contains_key("launch"), launches, "{seen:?}");
        match warning {
            Some(warning) => assert!(text(&done).contains(warning), "{warning}: {}", text(&done)),
            None => assert!(!text(&done).contains("WARN"), "{}", text(&done)),
        }
        compare(&output, &cpu);
        std::fs::remove_dir_all(output).unwrap();
    };
    check(&Double::with(""), "4", true, None);
    check(&Double::with(""), "5", false, None);
    let lost = Some("tensor 'one.weight': CUDA device 0 (Double) failed, and the CPU goes on");
    check(&Double::with("launch=3"), "2", true, lost);
    check(&Double::with("copy_in=1"), "2", true, Some("failed, and the CPU goes on"));
    check(&Double::with("copy_out=3"), "2", true, Some("failed, and the CPU goes on"));
    check(
        &Double::with("device_bytes=1000"),
        "2",
        false,
        Some("decoding on the CPU: CUDA device 0 (Double) has no buffers"),
    );
    check(&Double::with("load=200"), "2", false, Some("decoding on the CPU: the CUDA driver refuses the kernels"));
    check(&Double::with("init=803"), "2", false, Some("decoding on the CPU: the CUDA driver fails"));
    check(&Double::with("devices=0"), "2", false, None);
    let (absent, _folder) = Double::absent();
    check(&absent, "2", false, None);
    // Too little for a device to begin.
    let small = fixture("models/glm_moe_dsa-UD-IQ2_XXS.gguf");
    let (done, seen) =
        Double::with("").run(&convert(&small, &temp.path().join("small"), &["--tp", "1", "--threads", "1"]));
    assert!(done.status.success() && seen.is_empty(), "{seen:?}");
}
