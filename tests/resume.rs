//! Conversions that go on: after an end in the middle, or rank by rank in one folder.
//!
//! What a crash leaves at every point: `tests/crash/`. Processes side by side: `tests/python/test_deploy.py`.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;
#[path = "common/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ggshard::convert::{Direct, Extras, Output, Planned, Report, Request, convert, plan, plan_with, seal};
use ggshard::dequant::FloatType;
use ggshard::engine::Options;
use ggshard::error::{Error, Result};
use ggshard::gguf::{GgmlType, GgufSet};
use ggshard::mapping::{Mapping, Profile};

const TP: u32 = 4;

/// The toy model with values that are not finite in weights of every cut: replicated, column-parallel with repeated
/// heads, row-parallel (whose tiles go to several ranks), by vocabulary, transposed, with a scale.
fn sick() -> Planned {
    let mut file = toy::builder();
    for tensor in file.tensors.iter_mut().filter(|t| t.ty == GgmlType::F32 && t.bytes.len() > 64) {
        let values = tensor.bytes.len() / 4;
        for (i, at) in [values / 7, values / 3, values / 2, values - 1].into_iter().enumerate() {
            let value = [f32::NAN, f32::INFINITY, f32::MAX, f32::NEG_INFINITY][i];
            tensor.bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
    let set = GgufSet::from_bytes("toy.gguf", file.build()).unwrap();
    let request = Request { tp: TP, dtype: FloatType::BF16, ..Request::default() };
    plan_with(set, toy::mapping(), Profile::load("hf").unwrap(), &request).unwrap()
}

fn options(ranks: &[u32]) -> Options {
    Options { ranks: ranks.to_vec(), threads: 2, tile_bytes: 1000, allow_nonfinite: true, ..Options::default() }
}

fn extras() -> Extras {
    Extras { files: vec![("config.json".into(), b"{}".to_vec())], notes: vec!["a note".into()] }
}

fn read(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file());
    files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())).collect()
}

/// The folder of an undisturbed run.
fn undisturbed(planned: &Planned, options: Options) -> BTreeMap<String, Vec<u8>> {
    let temp = tempfile::tempdir().unwrap();
    convert(planned, &temp.path().join("out"), options, &extras(), &|_| {}).unwrap();
    read(&temp.path().join("out"))
}

fn resume(planned: &Planned, folder: &Path, options: Options) -> Result<Report> {
    let output = Output { resume: true, keep: true, ..Output::from(folder) };
    convert(planned, output, options, &extras(), &|_| {})
}

/// A plan of small parts, from a file of its own.
fn small_parts(temp: &Path) -> (PathBuf, Planned) {
    let source = temp.join("source.gguf");
    fs::copy(plans::fixture(plans::GLM), &source).unwrap();
    let planned = planned(&source);
    (source, planned)
}

fn planned(source: &Path) -> Planned {
    plan(source, &Request { tp: 2, part_size: 1 << 20, ..Request::default() }, false).unwrap()
}

/// Converts until `files` files are finished, then stops.
fn begin(planned: &Planned, folder: &Path, files: usize) -> Error {
    let cancel = Arc::new(AtomicBool::new(false));
    let options = Options { threads: 1, tile_bytes: 4096, cancel: Some(cancel.clone()), ..Options::default() };
    let output = Output { keep: true, ..Output::from(folder) };
    let stop = |_| {
        if done(folder).len() >= files {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    convert(planned, output, options, &extras(), &stop).unwrap_err()
}

fn done(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut done: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    done.retain(|path| path.extension().is_some_and(|ending| ending == "done"));
    done.sort();
    done
}

#[test]
fn ranks_one_by_one_then_sealed_are_a_single_run_down_to_the_counts() {
    let planned = sick();
    let expected = undisturbed(&planned, options(&[]));
    let manifest = String::from_utf8(expected["ggshard.json"].clone()).unwrap();
    for counted in ["\"nan\":", "\"inf\":", "\"overflow\":"] {
        assert!(manifest.matches(counted).count() > 5, "{counted}: {manifest}");
    }
    for groups in [vec![vec![0], vec![1], vec![2], vec![3]], vec![vec![3, 1], vec![0, 2]], vec![vec![1, 2, 3], vec![0]]]
    {
        let temp = tempfile::tempdir().unwrap();
        for ranks in &groups {
            let report = convert(&planned, temp.path(), options(ranks), &extras(), &|_| {}).unwrap();
            assert!(!report.sealed && report.manifest_blake3.is_none() && !report.nonfinite.is_empty());
            assert!(!temp.path().join("config.json").exists());
        }
        let sealed = seal(temp.path(), &[]).unwrap();
        assert!(!sealed.already && sealed.ranks == [0, 1, 2, 3]);
        assert!(read(temp.path()) == expected, "{groups:?}");
        assert!(seal(temp.path(), &[]).unwrap().already);
        assert!(!temp.path().join("ggshard.work").exists());
    }
}

#[test]
fn what_is_finished_is_kept_and_its_source_is_not_read_again() {
    let temp = tempfile::tempdir().unwrap();
    let (_, planned) = small_parts(temp.path());
    let expected = undisturbed(&planned, Options::default());
    let whole = convert(&planned, &temp.path().join("whole"), Options::default(), &extras(), &|_| {}).unwrap();
    for files in [1, 3] {
        let out = temp.path().join(format!("out-{files}"));
        assert!(matches!(begin(&planned, &out, files), Error::Cancelled(_)));
        assert!(done(&out).len() >= files && done(&out).len() < whole.files);
        let told = AtomicU64::new(0);
        let output = Output { resume: true, ..Output::from(&out) };
        let progress = |bytes| _ = told.fetch_add(bytes, Ordering::Relaxed);
        let report = convert(&planned, output, Options::default(), &extras(), &progress).unwrap();
        assert!(report.kept_files >= files && report.sealed);
        assert!(report.source_bytes < whole.source_bytes, "{} of {}", report.source_bytes, whole.source_bytes);
        assert_eq!((report.files, report.output_bytes), (whole.files, whole.output_bytes));
        assert!(read(&out) == expected);
        let data: u64 = planned.plan.files.iter().map(|file| file.data_bytes).sum();
        assert_eq!(told.load(Ordering::Relaxed), data, "progress counts what is kept");
    }
}

#[test]
fn a_finished_file_that_is_damaged_cut_or_without_a_receipt_is_made_again() {
    let temp = tempfile::tempdir().unwrap();
    let (_, planned) = small_parts(temp.path());
    let expected = undisturbed(&planned, Options::default());
    // What happens to the folder, or to its first finished file.
    type Damage<'a> = &'a dyn Fn(&Path, &Path);
    let damage: [Damage<'_>; 5] = [
        &|_, file| {
            let mut bytes = fs::read(file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(file, bytes).unwrap();
        },
        &|_, file| fs::write(file, b"").unwrap(),
        &|_, file| fs::remove_file(file).unwrap(),
        &|out, _| {
            for entry in fs::read_dir(out.join("ggshard.work")).unwrap() {
                let path = entry.unwrap().path();
                if path.to_string_lossy().contains("receipt") {
                    fs::write(path, b"{}").unwrap();
                }
            }
        },
        &|out, file| fs::rename(file, out.join(file.file_stem().unwrap())).unwrap(),
    ];
    for (i, damage) in damage.iter().enumerate() {
        let out = temp.path().join(format!("out-{i}"));
        begin(&planned, &out, 2);
        let finished = done(&out);
        damage(&out, &finished[0]);
        let report = resume(&planned, &out, Options::default()).unwrap();
        let kept = match i {
            3 => 0,
            // A file under its final name is as good.
            4 => finished.len(),
            _ => finished.len() - 1,
        };
        assert_eq!(report.kept_files, kept, "case {i}");
        assert!(read(&out) == expected, "case {i}");
    }
}

/// Whatever differs, the refusal names it, and what there is stays to be resumed.
#[test]
fn another_conversion_does_not_mix() {
    let temp = tempfile::tempdir().unwrap();
    let (source, planned) = small_parts(temp.path());
    let expected = undisturbed(&planned, Options::default());
    let out = temp.path().join("out");
    begin(&planned, &out, 2);
    let before = read(&out);
    let request = Request { tp: 2, part_size: 1 << 20, ..Request::default() };
    let text = fs::read_to_string("mappings/models/glm_moe_dsa.toml").unwrap() + "\n# another text\n";
    let mapping = temp.path().join("glm_moe_dsa.toml");
    fs::write(&mapping, text).unwrap();
    let others = [
        ("topology", Request { tp: 4, ..request.clone() }),
        ("policy", Request { dtype: FloatType::F32, ..request.clone() }),
        ("policy", Request { part_size: 2 << 20, ..request.clone() }),
        ("profile", Request { profile: "vllm-0.32".into(), ..request.clone() }),
        ("mapping", Request { mapping: Some(mapping.to_str().unwrap().into()), ..request.clone() }),
    ];
    for (what, request) in others {
        let error = resume(&plan(&source, &request, false).unwrap(), &out, Options::default()).unwrap_err();
        assert!(matches!(error, Error::Output(_)) && error.to_string().contains(what), "{what}: {error}");
    }
    let allowing = Options { allow_nonfinite: true, ..Options::default() };
    assert!(resume(&planned, &out, allowing).unwrap_err().to_string().contains("allow-nonfinite"));
    let output = Output { resume: true, keep: true, ..Output::from(&out) };
    let error = convert(&planned, output, Options::default(), &Extras::default(), &|_| {}).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
    // The record of another version.
    let record = out.join("ggshard.work/record.json");
    let mine = fs::read_to_string(&record).unwrap();
    fs::write(&record, mine.replace("\"tool\":\"ggshard ", "\"tool\":\"ggshard 9.")).unwrap();
    assert!(resume(&planned, &out, Options::default()).unwrap_err().to_string().contains("tool"));
    for damaged in ["", "{}", &mine[..mine.len() / 2]] {
        fs::write(&record, damaged).unwrap();
        let error = resume(&planned, &out, Options::default()).unwrap_err();
        assert!(error.to_string().contains("record.json"), "{error}");
    }
    fs::write(&record, mine).unwrap();
    assert!(read(&out) == before, "nothing was lost");
    resume(&planned, &out, Options::default()).unwrap();
    assert!(read(&out) == expected);
}

#[test]
fn another_source_of_the_same_size_and_header_is_noticed() {
    let temp = tempfile::tempdir().unwrap();
    let (source, first) = small_parts(temp.path());
    let expected = undisturbed(&first, Options::default());
    let out = temp.path().join("out");
    begin(&first, &out, 2);
    let original = fs::read(&source).unwrap();
    // The same tensors with other values, as from another calibration.
    let data = first.set.parts()[0].header_bytes() as usize;
    let mut quantized_again = original.clone();
    quantized_again[data..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&source, quantized_again).unwrap();
    for same_source in [false, true] {
        let output = Output { resume: true, keep: true, same_source, ..Output::from(&out) };
        let error = convert(&planned(&source), output, Options::default(), &extras(), &|_| {}).unwrap_err();
        assert!(error.to_string().contains("sampled"), "{error}");
    }
    // The bytes that it had, at another time: the user must say that it is the same.
    fs::write(&source, original).unwrap();
    let error = resume(&planned(&source), &out, Options::default()).unwrap_err().to_string();
    assert!(error.contains("source.gguf") && error.contains("--same-source"), "{error}");
    let output = Output { resume: true, same_source: true, ..Output::from(&out) };
    convert(&planned(&source), output, Options::default(), &extras(), &|_| {}).unwrap();
    assert!(read(&out) == expected);
}

#[test]
fn a_source_that_is_written_to_meanwhile_is_noticed() {
    let temp = tempfile::tempdir().unwrap();
    let (source, planned) = small_parts(temp.path());
    let out = temp.path().join("out");
    let written = AtomicBool::new(false);
    let write = |_| {
        if !written.swap(true, Ordering::Relaxed) {
            let bytes = fs::read(&source).unwrap();
            fs::write(&source, bytes).unwrap();
        }
    };
    let output = Output { keep: true, ..Output::from(&out) };
    let error = convert(&planned, output, Options::default(), &extras(), &write).unwrap_err();
    assert!(error.to_string().contains("changed or replaced while it was read"), "{error}");
    assert!(!out.exists(), "what was made from two files is not kept");
}

#[test]
fn digests_of_the_source_do_not_depend_on_who_computes_them() {
    let temp = tempfile::tempdir().unwrap();
    let (source, planned) = small_parts(temp.path());
    let hashing = |out: &Path, resume: bool, ranks: &[u32]| {
        let output = Output { hash_source: true, resume, ..Output::from(out) };
        let options = Options { ranks: ranks.to_vec(), ..Options::default() };
        convert(&planned, output, options, &extras(), &|_| {}).unwrap();
    };
    let whole = temp.path().join("whole");
    hashing(&whole, false, &[]);
    let expected = read(&whole);
    let digest = blake3::hash(&fs::read(source).unwrap()).to_hex().to_string();
    assert!(String::from_utf8(expected["ggshard.json"].clone()).unwrap().contains(&digest));
    let out = temp.path().join("out");
    hashing(&out, false, &[1]);
    convert(&planned, &out, Options { ranks: vec![0], ..Options::default() }, &extras(), &|_| {}).unwrap();
    seal(&out, &[]).unwrap();
    assert!(read(&out) == expected);
    let out = temp.path().join("again");
    begin(&planned, &out, 2);
    hashing(&out, true, &[]);
    assert!(read(&out) == expected);
}

#[test]
fn sealing_names_what_is_missing_and_refuses_what_nobody_would_vouch_for() {
    let temp = tempfile::tempdir().unwrap();
    let planned = sick();
    let absent = temp.path().join("absent");
    assert!(seal(&absent, &[]).unwrap_err().to_string().contains("no conversion has begun"));
    assert!(!absent.exists());
    let out = temp.path().join("out");
    for ranks in [[0], [2]] {
        convert(&planned, &out, options(&ranks), &extras(), &|_| {}).unwrap();
    }
    let error = seal(&out, &[]).unwrap_err().to_string();
    assert!(error.contains("2 of 4 files") && error.contains("--ranks 1,3 --resume"), "{error}");
    let error = seal(&out, &[0]).unwrap_err().to_string();
    assert!(error.contains("rank 2"), "{error}");
    assert!(seal(&out, &[4]).unwrap_err().to_string().contains("rank 4 of 4"));
    let sealed = seal(&out, &[0, 2]).unwrap();
    assert_eq!(sealed.ranks, [0, 2]);
    assert!(seal(&out, &[0, 1]).unwrap_err().to_string().contains("[0, 2]"));
    // A sealed folder takes no further rank.
    let error = resume(&planned, &out, options(&[1])).unwrap_err().to_string();
    assert!(error.contains("sealed without rank 1"), "{error}");
    let again = resume(&planned, &out, options(&[2])).unwrap();
    assert!(again.sealed && again.kept_files == 1 && again.source_bytes == 0);
    let report = ggshard::verify::verify(&out, ggshard::verify::Options::default()).unwrap();
    assert!(report.ok(), "{report}");
}

#[test]
fn an_error_that_would_come_again_leaves_nothing_to_resume() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("a/out");
    let output = Output { keep: true, ..Output::from(&out) };
    let refusing = Options { allow_nonfinite: false, threads: 1, tile_bytes: 1000, ..Options::default() };
    let error = convert(&sick(), output, refusing, &extras(), &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Nonfinite(_)), "{error}");
    assert!(!temp.path().join("a").exists());
}

#[test]
fn mappings_given_as_texts_resume_as_well() {
    let temp = tempfile::tempdir().unwrap();
    let set = || GgufSet::from_bytes("toy.gguf", toy::builder().build()).unwrap();
    let make = |mapping: Mapping| {
        plan_with(set(), mapping, Profile::load("hf").unwrap(), &Request { tp: TP, ..Request::default() }).unwrap()
    };
    let planned = make(toy::mapping());
    convert(&planned, temp.path(), options(&[0]), &extras(), &|_| {}).unwrap();
    let report = resume(&make(toy::mapping()), temp.path(), options(&[])).unwrap();
    assert!(report.kept_files == 1 && report.sealed);
    assert!(read(temp.path()) == undisturbed(&planned, options(&[])));
}

/// In the build folder and with tiles of many pages: /tmp is often a file system that does not know O_DIRECT.
#[test]
fn files_written_past_the_page_cache_are_the_same() {
    let temp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_, planned) = small_parts(temp.path());
    let expected = undisturbed(&planned, options(&[]));
    for (threads, tile_bytes) in [(0, 512 << 10), (1, 1000), (3, 20_000)] {
        let out = temp.path().join(format!("{tile_bytes}"));
        let options = Options { threads, tile_bytes, ..options(&[]) };
        let output = Output { direct: Direct::On, ..Output::from(&out) };
        convert(&planned, output, options, &extras(), &|_| {}).unwrap();
        assert!(read(&out) == expected, "{threads} threads, tiles of {tile_bytes} bytes");
    }
}
