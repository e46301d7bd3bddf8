//! Comparing with an original checkpoint: exactly, or as near as asked.

// Each test binary uses its own part of it.
#[allow(dead_code)]
#[path = "common/folders.rs"]
mod folders;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use folders::*;
use ggshard::convert::Request;
use ggshard::dequant::FloatType;
use ggshard::dtype::Dtype;
use ggshard::verify::{Against, Finding, Options, Reference, Report, Step, What, verify, verify_against};
use ggshard::{Error, Result};

const ALL: Options = Options { rank: None, threads: 2, cancel: None };
const EMBED: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

fn compare(folder: &Path, reference: &Path, max_rms: f64, options: Options) -> Result<Report> {
    let against = Against { reference: Some(Reference { folder: reference, max_rms }), ..Against::default() };
    verify_against(folder, options, against, &|_| {})
}

fn report(folder: &Path, reference: &Path, max_rms: f64) -> Report {
    compare(folder, reference, max_rms, ALL).unwrap()
}

fn kinds(findings: &[Finding]) -> Vec<(What, &str, Option<&str>)> {
    findings.iter().map(|f| (f.what, f.file.as_str(), f.tensor.as_deref())).collect()
}

/// A folder with one `model.safetensors`, as authors publish it: not one of ours.
fn original(tensors: &[Whole]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_tensors(&folder.path().join("model.safetensors"), tensors);
    folder
}

/// The deepseek fixture's values as a reference of one type.
fn truth(dtype: FloatType) -> Vec<Whole> {
    let whole = converted_by(&deepseek(), &Request { dtype, ..Request::default() });
    tensors(whole.path())
}

fn change(tensors: &[Whole], name: &str, edit: impl FnOnce(&mut Whole)) -> Vec<Whole> {
    let mut all = tensors.to_vec();
    edit(all.iter_mut().find(|t| t.name == name).unwrap());
    all
}

fn floats(tensor: &Whole) -> Vec<f64> {
    let wide = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    match tensor.dtype {
        Dtype::BF16 => tensor.bytes.chunks(2).map(|b| wide(u16::from_le_bytes([b[0], b[1]]))).collect(),
        Dtype::F32 => tensor.bytes.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
        other => panic!("{other}"),
    }
}

#[test]
fn every_number_of_ranks_joins_to_the_original() {
    let truth = truth(FloatType::BF16);
    let reference = original(&truth);
    for tp in [1, 2, 4] {
        let folder = converted(&deepseek(), tp);
        let report = report(folder.path(), reference.path(), 0.0);
        assert!(report.ok(), "{report}");
        assert_eq!(report.checks, ["folder", "reference"]);
        let summary = report.reference.as_ref().unwrap();
        assert_eq!((summary.tensors, summary.exact), (truth.len() as u64, truth.len() as u64));
        assert_eq!(summary.values, truth.iter().map(|t| t.shape.iter().product::<u64>()).sum::<u64>());
        assert!(summary.worst.is_empty() && report.to_string().contains("tensors equal"), "{report}");
        let one =
            compare(folder.path(), reference.path(), 0.0, Options { rank: Some(tp - 1), threads: 1, ..ALL }).unwrap();
        assert!(one.ok(), "{one}");
    }
    let some = tempfile::tempdir().unwrap();
    convert_ranks(&deepseek(), some.path(), &Request { tp: 4, ..Request::default() }, &[1, 2]);
    assert!(report(some.path(), reference.path(), 0.0).ok());
}

#[test]
fn types_may_differ() {
    let wide = original(&truth(FloatType::F32));
    let exact = converted_by(&deepseek(), &Request { tp: 2, dtype: FloatType::F32, ..Request::default() });
    assert!(report(exact.path(), wide.path(), 0.0).ok());
    for (dtype, near) in [(FloatType::BF16, 2e-3), (FloatType::F16, 3e-4)] {
        let folder = converted_by(&deepseek(), &Request { tp: 2, dtype, ..Request::default() });
        let strict = report(folder.path(), wide.path(), 0.0);
        assert!(strict.findings.iter().all(|f| f.what == What::ReferenceValues) && !strict.ok());
        let tolerant = report(folder.path(), wide.path(), near);
        assert!(tolerant.ok(), "{tolerant}");
        let worst = &tolerant.reference.unwrap().worst;
        assert_eq!(worst.len(), 10);
        assert!(worst.windows(2).all(|w| w[0].relative_rms >= w[1].relative_rms));
        assert!(worst.iter().all(|d| d.relative_rms.is_some_and(|rms| rms > near / 10.0)), "{worst:?}");
    }
}

#[test]
fn the_distance_is_that_of_the_definition() {
    let truth = truth(FloatType::BF16);
    let ours = floats(truth.iter().find(|t| t.name == DOWN).unwrap());
    // Every third value is larger by a hundredth, in f32 beside our bf16.
    let noisy = change(&truth, DOWN, |tensor| {
        let value = |(i, v): (usize, &f64)| (*v as f32) * if i % 3 == 0 { 1.01 } else { 1.0 };
        tensor.bytes = ours.iter().enumerate().map(value).flat_map(f32::to_le_bytes).collect();
        tensor.dtype = Dtype::F32;
    });
    let theirs = floats(noisy.iter().find(|t| t.name == DOWN).unwrap());
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let want = (square(&mut ours.iter().zip(&theirs).map(|(a, b)| a - b)) / square(&mut theirs.iter().copied())).sqrt();
    let unequal = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
    let reference = original(&noisy);
    for tp in [1, 2] {
        let folder = converted(&deepseek(), tp);
        let report = report(folder.path(), reference.path(), 0.0);
        assert_eq!(report.findings.len(), 1, "{report}");
        assert_eq!(
            (report.findings[0].what, report.findings[0].tensor.as_deref()),
            (What::ReferenceValues, Some(DOWN))
        );
        let text = report.findings[0].found.as_deref().unwrap();
        assert!(text.starts_with(&format!("{want:.6e}, {unequal} of {} values differ", ours.len())), "{text} {want:e}");
        let summary = report.reference.unwrap();
        assert_eq!((summary.worst.len(), summary.worst[0].tensor.as_str()), (1, DOWN));
        assert!((summary.worst[0].relative_rms.unwrap() / want - 1.0).abs() < 1e-9);
        assert!(!compare(folder.path(), reference.path(), want * 0.999, ALL).unwrap().ok());
        assert!(compare(folder.path(), reference.path(), want * 1.001, ALL).unwrap().ok());
    }
}

#[test]
fn the_first_value_that_differs_is_named_by_place_and_file() {
    let truth = truth(FloatType::BF16);
    let (rows, cols) = (truth.iter().find(|t| t.name == DOWN).unwrap().shape[0], 512);
    // Row-parallel: the last column of a row lies on the last rank.
    let reference = original(&change(&truth, DOWN, |t| {
        assert_eq!(t.shape, [rows, cols]);
        let at = ((7 * cols + cols - 1) * 2) as usize;
        t.bytes[at..at + 2].copy_from_slice(&0x4040_u16.to_le_bytes());
    }));
    let folder = converted(&deepseek(), 4);
    let report = report(folder.path(), reference.path(), 0.0);
    assert_eq!(kinds(&report.findings), [(What::ReferenceValues, "model-rank-3-part-0.safetensors", Some(DOWN))]);
    let text = report.findings[0].to_string();
    assert!(text.contains("1 of ") && text.contains(&format!("instead of 3 at [7, {}]", cols - 1)), "{text}");
}

#[test]
fn values_that_are_not_finite_do_not_pass() {
    let truth = truth(FloatType::BF16);
    let reference = original(&change(&truth, NORM, |t| t.bytes[..2].copy_from_slice(&0x7FC0_u16.to_le_bytes())));
    let folder = converted(&deepseek(), 2);
    let report = report(folder.path(), reference.path(), 1e30);
    assert_eq!(kinds(&report.findings), [(What::ReferenceValues, "model-rank-0-part-0.safetensors", Some(NORM))]);
    assert_eq!(report.reference.as_ref().unwrap().worst[0].relative_rms, None);
    let json = report.to_json().unwrap();
    assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
}

#[test]
fn tensors_of_one_side_only_are_found() {
    let truth = truth(FloatType::BF16);
    let mut others = truth.clone();
    others.retain(|t| t.name != NORM);
    others.push(Whole { name: "model.layers.9.x".into(), dtype: Dtype::BF16, shape: vec![2], bytes: vec![0; 4] });
    let folder = converted(&deepseek(), 2);
    let report = report(folder.path(), original(&others).path(), 1.0);
    let found = kinds(&report.findings);
    assert_eq!(found[0], (What::ReferenceLacks, "model-rank-0-part-0.safetensors", Some(NORM)));
    assert_eq!(found[1..], [(What::ReferenceExtra, "model.safetensors", Some("model.layers.9.x"))]);
}

#[test]
fn what_cannot_be_compared_does_not_pass() {
    let truth = truth(FloatType::BF16);
    let folder = converted(&deepseek(), 2);
    let packed = change(&truth, NORM, |t| {
        t.dtype = Dtype::F8E4M3;
        t.bytes.truncate(t.bytes.len() / 2);
    });
    let report_of = |tensors: &[Whole]| report(folder.path(), original(tensors).path(), 1.0);
    let report = report_of(&packed);
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].what, What::NotComparable);
    assert!(report.to_string().contains("F8_E4M3"), "{report}");
    let turned = change(&truth, DOWN, |t| t.shape.reverse());
    let report = report_of(&turned);
    assert_eq!((report.findings.len(), report.findings[0].what), (1, What::ReferenceShape));
    assert_eq!(report.reference.unwrap().tensors, truth.len() as u64 - 1);
}

#[test]
fn a_forged_rank_is_found() {
    let reference = original(&truth(FloatType::BF16));
    let folder = converted(&deepseek(), 2);
    // Rank 1's copy of what both hold, and its own part of the embedding.
    let name = edit_tensor(folder.path(), NORM, 1, |bytes| bytes[0] ^= 1);
    edit_tensor(folder.path(), EMBED, 1, |bytes| bytes[0] ^= 1);
    reseal(folder.path());
    assert!(verify(folder.path(), ALL).unwrap().ok());
    let report = report(folder.path(), reference.path(), 0.0);
    let mut found = kinds(&report.findings);
    found.sort();
    assert_eq!(
        found,
        [(What::ReferenceValues, name.as_str(), Some(EMBED)), (What::Replica, name.as_str(), Some(NORM))]
    );
    let one = compare(folder.path(), reference.path(), 0.0, Options { rank: Some(1), threads: 1, ..ALL }).unwrap();
    assert_eq!(one.findings.len(), 2, "{one}");
}

/// A profile with another padding, under the name that reference needs.
fn padded_profile(folder: &Path) -> String {
    let text = include_str!("../mappings/profiles/hf.toml").replace("multiple = 64", "multiple = 384");
    let path = folder.join("padded.toml");
    fs::write(&path, text).unwrap();
    path.to_string_lossy().into_owned()
}

#[test]
fn padding_is_zero() {
    let reference = original(&truth(FloatType::BF16));
    let rules = tempfile::tempdir().unwrap();
    let profile = padded_profile(rules.path());
    // 512 rows, padded to 768: rank 2 of 4 holds 128 and 64 of zeros, rank 3 nothing but zeros.
    let folder = converted_by(&deepseek(), &Request { tp: 4, profile, ..Request::default() });
    assert_eq!(find(folder.path(), EMBED, 3).1.shape[0], 192);
    let first = report(folder.path(), reference.path(), 0.0);
    assert!(first.ok(), "{first}");
    let name = edit_tensor(folder.path(), EMBED, 3, |bytes| bytes[bytes.len() / 2] = 1);
    reseal(folder.path());
    let report = report(folder.path(), reference.path(), 1.0);
    assert_eq!(kinds(&report.findings), [(What::Padding, name.as_str(), Some(EMBED))]);
    assert!(report.to_string().contains("row 96"), "{report}");
}

#[test]
fn repeated_units_are_compared_where_they_belong() {
    let reference = original(&truth(FloatType::BF16));
    let rules = tempfile::tempdir().unwrap();
    let text = "name = \"repeated\"\nversion = 1\nextends = \"deepseek_v3\"\nclass = \"C\"\nabout = \"x\"\n\
        [[weight]]\nname = \"model.norm.weight\"\nshape = [\"hidden\"]\ncut = { column = \"2\", repeat = true }\n\
        from = { gguf = \"output_norm.weight\" }\n";
    let mapping = rules.path().join("repeated.toml");
    fs::write(&mapping, text).unwrap();
    let mapping = Some(mapping.to_string_lossy().into_owned());
    let folder = converted_by(&deepseek(), &Request { tp: 4, mapping, ..Request::default() });
    assert_eq!(find(folder.path(), NORM, 3).1.shape, [128]);
    assert!(report(folder.path(), reference.path(), 0.0).ok());
    edit_tensor(folder.path(), NORM, 3, |bytes| bytes[0] ^= 1);
    reseal(folder.path());
    let report = report(folder.path(), reference.path(), 0.0);
    assert_eq!(kinds(&report.findings), [(What::Replica, "model-rank-3-part-0.safetensors", Some(NORM))]);
}

#[test]
fn an_index_says_which_files_count() {
    let whole = converted_by(&deepseek(), &Request { part_size: 2_000_000, ..Request::default() });
    let index = whole.path().join("model.safetensors.index.json");
    assert!(index.is_file());
    let folder = converted(&deepseek(), 2);
    // A stray copy of a tensor does not count, since the index does not name the file.
    let stray = tensors(whole.path())[0].clone();
    write_tensors(&whole.path().join("stray.safetensors"), std::slice::from_ref(&stray));
    assert!(report(folder.path(), whole.path(), 0.0).ok());
    let refused = || compare(folder.path(), whole.path(), 0.0, ALL).unwrap_err().to_string();
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replacen("model.norm.weight", "model.gone.weight", 1)).unwrap();
    assert!(refused().contains("model.gone.weight"));
    fs::write(&index, text.replace("model-00001-of", "../model-00001-of")).unwrap();
    assert!(refused().contains("leaves its folder"));
    fs::write(&index, "{").unwrap();
    assert!(refused().contains("not an index"));
    // Without an index every file counts.
    fs::remove_file(&index).unwrap();
    let text = refused();
    assert!(text.contains(&stray.name) && text.contains("one copy"), "{text}");
    fs::remove_file(whole.path().join("stray.safetensors")).unwrap();
    assert!(report(folder.path(), whole.path(), 0.0).ok());
}

#[test]
fn what_is_no_reference_is_refused() {
    let folder = converted(&deepseek(), 2);
    let empty = tempfile::tempdir().unwrap();
    let refused = |folder: &Path, max: f64| match compare(folder, empty.path(), max, ALL) {
        Err(Error::Checkpoint(fault)) => fault.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(folder.path(), 0.0).contains("no safetensors file"));
    assert!(refused(folder.path(), f64::NAN).contains("0 or more"));
    assert!(matches!(compare(folder.path(), &empty.path().join("x"), 0.0, ALL), Err(Error::Io { .. })));
    edit_manifest(folder.path(), |m| m.profile.name = "vllm".into());
    assert!(refused(folder.path(), 0.0).contains("--profile hf"));
}

#[test]
fn files_that_are_gone_are_one_finding() {
    let reference = original(&truth(FloatType::BF16));
    let folder = converted(&deepseek(), 2);
    let (file, _) = find(folder.path(), DOWN, 1);
    fs::remove_file(folder.path().join(&file.name)).unwrap();
    let report = report(folder.path(), reference.path(), 0.0);
    assert_eq!(kinds(&report.findings), [(What::Missing, file.name.as_str(), None)]);
    // Only what rank 0 holds as well was compared as a whole.
    let parameters = ggshard::output::Manifest::read(folder.path()).unwrap().parameters;
    let both = parameters.iter().filter(|p| p.cut == "replicated").count();
    assert_eq!(report.reference.unwrap().tensors, both as u64);
}

#[test]
fn the_command_says_so() {
    let truth = truth(FloatType::BF16);
    let far = original(&change(&truth, DOWN, |t| t.bytes.iter_mut().skip(1).step_by(2).for_each(|b| *b ^= 0x80)));
    let near = original(&truth);
    let folder = converted(&deepseek(), 2);
    let run = |reference: &Path, more: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("ggshard").unwrap();
        command.arg("verify").arg(folder.path()).arg("--reference").arg(reference).args(more);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(run(near.path(), &["--source", &deepseek().to_string_lossy()]).0, Some(0));
    let (code, out) = run(far.path(), &["--max-rms", "1.9"]);
    assert_eq!(code, Some(1));
    assert!(out.contains(DOWN) && out.contains("2.000000e0"), "{out}");
    assert_eq!(run(far.path(), &["--max-rms", "2.1"]).0, Some(0));
    let (code, out) = run(far.path(), &["--json", "--source", &deepseek().to_string_lossy()]);
    assert_eq!(code, Some(1));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["checks"], serde_json::json!(["folder", "source", "reference"]));
    assert_eq!(json["reference"]["worst"][0], serde_json::json!({ "tensor": DOWN, "relative_rms": 2.0 }));
    assert_eq!(json["findings"][0]["what"], "reference-values");
    for wrong in ["-1", "nan", "x"] {
        assert_eq!(run(near.path(), &[&format!("--max-rms={wrong}")]).0, Some(2));
    }
}

/// A model of the corpus: its folder with the GGUF files and the checkpoint in `hf/`, unpacked where it is an archive.
fn corpus_model(name: &str, scratch: &Path) -> Option<PathBuf> {
    let corpus = PathBuf::from(std::env::var_os("GGSHARD_CORPUS")?);
    let folder = corpus.join("models").join(name);
    if folder.join("hf").is_dir() {
        return Some(folder);
    }
    let archive = folder.join(format!("{name}.tar.zst"));
    let unpacked = std::process::Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(scratch).status().unwrap();
    assert!(unpacked.success(), "{}", archive.display());
    Some(if scratch.join("hf").is_dir() { scratch.to_path_buf() } else { scratch.join(name) })
}

#[test]
fn the_corpus_agrees_with_its_originals() {
    for name in ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm_moe_dsa"] {
        let scratch = tempfile::tempdir().unwrap();
        let Some(model) = corpus_model(name, scratch.path()) else { return };
        let held = |findings: &[Finding]| findings.iter().filter(|f| f.what != What::ReferenceExtra).count();
        for (quantized, limit, fails) in [("BF16", 0.0, false), ("Q4_K_M", 0.1, false), ("Q4_K_M", 0.01, true)] {
            let folder = converted(&model.join(format!("{name}-{quantized}.gguf")), 2);
            let report = report(folder.path(), &model.join("hf"), limit);
            assert_eq!(held(&report.findings) > 0, fails, "{name} {quantized}: {report}");
            // Only the MTP block, which converters drop for these models, may be missing.
            let extra = report.findings.iter().filter(|f| f.what == What::ReferenceExtra);
            let block = |f: &Finding| f.tensor.as_ref().map(|t| t.split('.').take(3).collect::<Vec<_>>().join("."));
            let blocks: std::collections::BTreeSet<_> = extra.map(block).collect();
            assert!(blocks.len() <= 1, "{name} {quantized}: {blocks:?}");
            assert!(report.reference.unwrap().tensors > 0);
        }
    }
}

#[test]
fn a_comparison_with_a_reference_ends_when_it_is_asked_to() {
    let reference = original(&truth(FloatType::BF16));
    let (folder, cancel) = (converted(&deepseek(), 2), Arc::new(AtomicBool::new(false)));
    let stop = |step| {
        if matches!(step, Step::Begin { check: "reference", .. }) {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let options = Options { cancel: Some(cancel.clone()), ..ALL };
    let against = Against {
        source: None,
        reference: Some(Reference { folder: reference.path(), max_rms: 0.0 }),
        ..Against::default()
    };
    let ended = verify_against(folder.path(), options, against, &stop);
    assert!(matches!(ended, Err(Error::Cancelled(_))), "{ended:?}");
}
