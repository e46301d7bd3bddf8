//! Folders that somebody else filled: manifests that are sealed well and ask for too much, pipes and links in the place
//! of files, names that lead elsewhere. Each gives findings or a typed error, soon.

// Each test binary uses its own part of it.
#[allow(dead_code)]
#[path = "common/folders.rs"]
mod folders;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use folders::*;
use ggshard::convert::{self, Request};
use ggshard::engine;
use ggshard::output::manifest::{FileEntry, Parameter, TensorEntry};
use ggshard::output::{Digest, Manifest, SafetensorsHeader, Sums};
use ggshard::runtime::{OpenOptions, RankCheckpoint};
use ggshard::verify::{Against, Options, Reference, Report, What, verify, verify_against};
use ggshard::{Error, Result};
use tempfile::TempDir;

const ALL: Options = Options { rank: None, threads: 2, cancel: None };

/// A small model of two blocks.
fn qwen() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families/qwen3.gguf")
}

fn converted_small(tp: u32) -> TempDir {
    converted(&qwen(), tp)
}

/// Runs what must end soon.
#[track_caller]
fn soon<T>(work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    result
}

fn against_source(folder: &Path) -> Result<Report> {
    verify_against(folder, ALL, Against { source: Some(&qwen()), ..Against::default() }, &|_| {})
}

fn against_reference(folder: &Path, reference: &Path) -> Result<Report> {
    let reference = Some(Reference { folder: reference, max_rms: 0.0 });
    verify_against(folder, ALL, Against { reference, ..Against::default() }, &|_| {})
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Whatever a manifest asks of the planner, `--source` plans it only if a command line could ask for it.
#[test]
fn choices_in_a_manifest_that_no_command_line_could_make() {
    let folder = converted_small(1);
    let sound = Manifest::read(folder.path()).unwrap();
    let changes: [fn(&mut Manifest); 9] = [
        |m| m.policy.moe_pad = Some(0),
        |m| m.policy.moe_pad = Some(u64::MAX),
        |m| m.policy.part_size = 0,
        |m| m.topology.tp = u32::MAX,
        |m| m.topology.pp = u32::MAX,
        |m| (m.topology.pp, m.topology.stage_layers) = (2, vec![u64::MAX, 3]),
        |m| m.mapping.texts = vec!["x".repeat(2 << 20)],
        |m| m.profile.texts = vec![format!("a{} = 1", ".x".repeat(100_000))],
        |m| m.mapping.name = "../../etc/passwd".into(),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut manifest = sound.clone();
        change(&mut manifest);
        write(folder.path(), &manifest);
        let error = soon(|| against_source(folder.path())).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(_) | Error::Layout(_)), "{i}: {error:?}");
    }
}

/// Sizes that are possible one by one, and together more than 64 bits hold.
#[test]
fn sizes_that_overflow_together() {
    let folder = converted_small(2);
    edit_manifest(folder.path(), |m| {
        for (i, file) in m.files.iter_mut().enumerate() {
            let end = 1u64 << 63;
            let name = format!("giant{i}");
            let dtype = ggshard::dtype::Dtype::U8;
            let tensor = TensorEntry {
                name: name.clone(),
                dtype,
                shape: vec![end],
                offsets: (0, end),
                blake3: Digest::default(),
                deviation: None,
            };
            *file = FileEntry { bytes: file.header_bytes + end, tensors: vec![tensor], ..file.clone() };
            let sources = vec![("x".into(), "Q4_K".into())];
            let parameter = Parameter {
                name,
                set: String::new(),
                shape: vec![end],
                dtype,
                cut: "column".into(),
                sources,
                blocks: None,
                decoded: None,
                nan: 0,
                inf: 0,
                overflow: 0,
            };
            m.parameters.retain(|p| p.name.starts_with("giant"));
            m.parameters.push(parameter);
        }
    });
    let report = soon(|| verify(folder.path(), ALL)).unwrap();
    assert!(report.findings.iter().any(|f| f.what == What::Size), "{report}");
    assert!(report.findings.iter().any(|f| f.what == What::NothingChecked), "{report}");
    let reference = tempfile::tempdir().unwrap();
    write_tensors(&reference.path().join("a.safetensors"), &[]);
    assert!(!soon(|| against_reference(folder.path(), reference.path())).unwrap().ok());
    assert!(RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).is_err());
}

/// A manifest of very many entries takes time in proportion to them, also where every one of them differs.
#[test]
fn a_hundred_thousand_entries() {
    const FILES: usize = 100_000;
    let folder = converted_small(1);
    edit_manifest(folder.path(), |m| {
        let model = m.files[0].clone();
        let parameter = m.parameters[0].clone();
        let tensor = model.tensors.iter().find(|tensor| tensor.name == parameter.name).unwrap().clone();
        m.parameters = vec![Parameter { shape: vec![0], ..parameter }];
        m.topology.tp = FILES as u32;
        m.topology.ranks = (0..FILES as u32).collect();
        let file = |i: usize| {
            let name = format!("{i}.safetensors");
            let tensors = vec![TensorEntry { shape: vec![0], offsets: (0, 0), ..tensor.clone() }];
            FileEntry { name, rank: Some(i as u32), bytes: model.header_bytes, tensors, ..model.clone() }
        };
        m.files = (0..FILES).map(file).collect();
    });
    let report = soon(|| verify(folder.path(), ALL)).unwrap();
    assert!(report.findings.iter().filter(|f| f.what == What::Missing).count() == FILES, "{report}");
    let tensor = Manifest::read(folder.path()).unwrap().parameters[0].clone();
    let reference = tempfile::tempdir().unwrap();
    write_tensors(
        &reference.path().join("a.safetensors"),
        &[Whole { name: tensor.name, dtype: tensor.dtype, shape: vec![0], bytes: Vec::new() }],
    );
    assert!(!soon(|| against_reference(folder.path(), reference.path())).unwrap().ok());
}

/// Opening a pipe would wait for a writer, for ever.
#[test]
fn pipes_in_the_place_of_files() {
    let folder = converted_small(1);
    for name in ["B3SUMS", "model.safetensors.index.json", "model-00001-of-00001.safetensors", "ggshard.json"] {
        let path = folder.path().join(name);
        fs::rename(&path, folder.path().join("aside")).unwrap();
        pipe(&path);
        match soon(|| against_source(folder.path())) {
            Ok(report) => {
                assert!(!report.ok() && report.to_string().contains("not a regular file"), "{name}: {report}")
            }
            Err(error) => {
                assert!(name == "ggshard.json" && error.to_string().contains("not a regular file"), "{name}: {error}")
            }
        }
        assert!(
            soon(|| RankCheckpoint::open(folder.path(), 0, OpenOptions::default())).is_err()
                || !name.starts_with("model-")
        );
        fs::remove_file(&path).unwrap();
        fs::rename(folder.path().join("aside"), &path).unwrap();
    }
    assert!(against_source(folder.path()).unwrap().ok());

    let reference = tempfile::tempdir().unwrap();
    pipe(&reference.path().join("a.safetensors"));
    assert!(soon(|| against_reference(folder.path(), reference.path())).is_err());
    pipe(&reference.path().join("model.safetensors.index.json"));
    assert!(soon(|| against_reference(folder.path(), reference.path())).is_err());

    let planned = convert::plan(&qwen(), &Request::default(), false).unwrap();
    pipe(&reference.path().join("config.json"));
    for config in [reference.path().join("config.json"), reference.path().to_path_buf(), "/dev/zero".into()] {
        assert!(soon(|| convert::extras(&planned, Some(&config))).is_err());
    }
}

/// A download cache is made of links to blobs; what they lead to is checked like any file. Only names are held to the
/// folder, since whoever can put a link there can put the file there.
#[test]
fn links_are_followed_and_what_they_lead_to_is_checked() {
    let folder = converted_small(1);
    let blobs = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let blob = blobs.path().join(Digest::of(entry.file_name().as_encoded_bytes()).to_string());
        fs::rename(entry.path(), &blob).unwrap();
        symlink(&blob, entry.path()).unwrap();
    }
    let report = against_source(folder.path()).unwrap();
    assert!(report.ok(), "{report}");
    RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    let part = folder.path().join("model-00001-of-00001.safetensors");
    for (target, what) in [
        ("/dev/zero", What::Unreadable),
        ("/nowhere", What::Missing),
        ("/dev", What::Unreadable),
        ("/proc/self/status", What::Size),
    ] {
        fs::remove_file(&part).unwrap();
        symlink(target, &part).unwrap();
        let report = soon(|| verify(folder.path(), ALL)).unwrap();
        assert!(report.findings.iter().any(|f| f.what == what), "{target}: {report}");
        assert!(RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).is_err());
    }
    // Links that lead in a circle, and to the folder itself.
    fs::remove_file(&part).unwrap();
    symlink(&part, &part).unwrap();
    symlink(folder.path(), folder.path().join("again")).unwrap();
    assert!(!soon(|| verify(folder.path(), ALL)).unwrap().ok());
}

/// Names in an index lead to no other folder.
#[test]
fn an_index_that_names_files_elsewhere() {
    let folder = converted_small(1);
    let reference = tempfile::tempdir().unwrap();
    write_tensors(&reference.path().join("model.safetensors"), &tensors(folder.path()));
    assert!(against_reference(folder.path(), reference.path()).unwrap().ok());
    let name = Manifest::read(folder.path()).unwrap().parameters[0].name.clone();
    let index = reference.path().join("model.safetensors.index.json");
    for file in ["../model.safetensors", "/etc/passwd", "a/../../x", "a\\b", "", ".", "..", "x\u{0}", "a/b/c"] {
        let text = serde_json::json!({ "weight_map": { name.clone(): file } });
        fs::write(&index, text.to_string()).unwrap();
        let error = against_reference(folder.path(), reference.path()).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(_)), "{file}: {error:?}");
    }
    for text in
        ["{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}", "{\"weight_map\":[]}", "[[[[[[", "{}", &"[".repeat(100_000)]
    {
        fs::write(&index, text).unwrap();
        assert!(matches!(soon(|| against_reference(folder.path(), reference.path())), Err(Error::Checkpoint(_))));
    }
}

/// Nothing that is read into memory whole has a length of somebody else's choosing.
#[test]
fn files_of_any_length_that_hold_nothing() {
    let folder = converted_small(1);
    let giant = |name: &str| fs::File::create(folder.path().join(name)).unwrap().set_len(1 << 42).unwrap();
    for name in ["B3SUMS", "model.safetensors.index.json"] {
        let kept = fs::read(folder.path().join(name)).unwrap();
        giant(name);
        assert!(!soon(|| verify(folder.path(), ALL)).unwrap().ok());
        fs::write(folder.path().join(name), kept).unwrap();
    }
    let planned = convert::plan(&qwen(), &Request::default(), false).unwrap();
    giant("config.json");
    assert!(soon(|| convert::extras(&planned, Some(folder.path()))).is_err());
    giant("ggshard.json");
    let error = soon(|| verify(folder.path(), ALL)).unwrap_err();
    assert!(error.to_string().contains("a manifest of 4398046511104 bytes"), "{error}");
    giant("x.safetensors");
    let error = soon(|| SafetensorsHeader::read(&folder.path().join("x.safetensors"))).unwrap_err();
    assert!(error.to_string().contains("not a JSON object"), "{error}");
    giant("B3SUMS");
    assert!(soon(|| Sums::read(folder.path())).is_err());
}

/// A folder in which one of two ranks is converted, with a file beside it that nobody may touch.
fn begun(source: &Path, profile: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let request = Request { tp: 2, profile: profile.into(), ..Request::default() };
    let planned = convert::plan(source, &request, false).unwrap();
    let options = engine::Options { ranks: vec![0], threads: 1, ..engine::Options::default() };
    convert::convert(&planned, &out, options, &convert::Extras::default(), &|_| {}).unwrap();
    assert!(out.join("ggshard.work/record.json").is_file());
    for name in ["victim", "victim.safetensors"] {
        fs::write(folder.path().join(name), "precious").unwrap();
    }
    (folder, out)
}

#[track_caller]
fn unharmed(folder: &Path) {
    for name in ["victim", "victim.safetensors"] {
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), "precious", "{name}");
    }
}

/// A folder is sealed by the record that lies in it.
#[test]
fn a_record_of_work_that_names_files_elsewhere() {
    let (folder, out) = begun(&qwen(), "hf");
    let record = out.join("ggshard.work/record.json");
    let sound = fs::read_to_string(&record).unwrap();
    let name = "model-rank-0-part-0.safetensors";
    for (from, to) in [
        (name, "../victim.safetensors"),
        (name, "/etc/hostname"),
        (name, "a/b/c"),
        (name, "ggshard.json"),
        (name, "ggshard.work/record.json"),
        (name, "model-rank-1-part-0.safetensors"),
        ("\"tp\":2", "\"tp\":4294967295"),
        ("\"tp\":2", "\"tp\":0"),
        ("\"tp\":2", "\"tp\":1"),
        ("\"index\":null", "\"index\":\"../victim\""),
        (
            "\"others\":[]",
            "\"others\":[{\"name\":\"../victim\",\"bytes\":1,\"blake3\":\"0000000000000000000000000000000000000000000000000000000000000000\"}]",
        ),
    ] {
        let changed = sound.replace(from, to);
        assert_ne!(changed, sound, "{from}");
        fs::write(&record, changed).unwrap();
        for ranks in [&[][..], &[0]] {
            let error = soon(|| convert::seal(&out, ranks)).unwrap_err();
            assert!(matches!(error, Error::Output(_)), "{to}: {error:?}");
        }
        unharmed(folder.path());
    }
    for bytes in [b"".to_vec(), vec![b'['; 100_000], vec![0; 1000]] {
        fs::write(&record, bytes).unwrap();
        assert!(soon(|| convert::seal(&out, &[])).is_err());
    }
    fs::remove_file(&record).unwrap();
    pipe(&record);
    assert!(soon(|| convert::seal(&out, &[])).is_err());
}

/// What is in the work folder is removed in the end, so it may not be somebody's own.
#[test]
fn links_in_the_place_of_folders_that_are_written_to() {
    let (folder, out) = begun(&qwen(), "hf");
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(out.join("ggshard.work"), &elsewhere).unwrap();
    symlink(&elsewhere, out.join("ggshard.work")).unwrap();
    let before = fs::read_dir(&elsewhere).unwrap().count();
    let error = convert::seal(&out, &[0]).unwrap_err();
    assert!(error.to_string().contains("a link in the place of the work folder"), "{error}");
    let planned = convert::plan(&qwen(), &Request { tp: 2, ..Request::default() }, false).unwrap();
    let options = || engine::Options { ranks: vec![1], threads: 1, ..engine::Options::default() };
    assert!(convert::convert(&planned, &out, options(), &convert::Extras::default(), &|_| {}).is_err());
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), before);

    // Temporary names are not written through either.
    fs::remove_file(out.join("ggshard.work")).unwrap();
    fs::rename(&elsewhere, out.join("ggshard.work")).unwrap();
    for name in ["record.json.1.tmp", "receipt-1.json.1.tmp", "rank-1.lock"] {
        let path = out.join("ggshard.work").join(name);
        let _ = fs::remove_file(&path);
        symlink(folder.path().join("victim"), path).unwrap();
    }
    let _ = convert::convert(&planned, &out, options(), &convert::Extras::default(), &|_| {});
    unharmed(folder.path());

    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families/glm4_moe.gguf");
    let (folder, out) = begun(&source, "vllm-0.32");
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(out.join("mtp"), &elsewhere).unwrap();
    symlink(&elsewhere, out.join("mtp")).unwrap();
    let before = fs::read_dir(&elsewhere).unwrap().count();
    let planned =
        convert::plan(&source, &Request { tp: 2, profile: "vllm-0.32".into(), ..Request::default() }, false).unwrap();
    let error = convert::convert(&planned, &out, options(), &convert::Extras::default(), &|_| {}).unwrap_err();
    assert!(error.to_string().contains("a link in the place of a sub-folder"), "{error}");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), before);
}
