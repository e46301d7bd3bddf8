//! Checking a checkpoint: what was written passes, and whatever is changed afterwards is found.

#[path = "verify/manifest.rs"]
mod manifest;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ggshard::dtype::Dtype;
use ggshard::output::manifest::{
    FORMAT, FORMAT_VERSION, FileEntry, Ignored, Manifest, Mapping, OtherFile, Parameter, Policy, Profile, Source,
    SourcePart, TensorEntry, Topology,
};
use ggshard::output::safetensors::SafetensorsHeader;
use ggshard::output::{Digest, Sums, TreeHash};
use ggshard::verify::{Against, Options, Report, Step, What, verify, verify_against};
use ggshard::{Error, Result};

const ALL: Options = Options { rank: None, threads: 2, cancel: None };

type Shapes<'a> = &'a [(&'a str, Dtype, &'a [u64])];

/// Writes one safetensors file with data that depends on its name, and describes it.
fn write_file(dir: &Path, name: &str, rank: Option<u32>, tensors: Shapes<'_>) -> FileEntry {
    let tensors = tensors.iter().map(|&(name, dtype, shape)| (name, dtype, shape.to_vec()));
    let header = SafetensorsHeader::layout(tensors, BTreeMap::from([("format".into(), "pt".into())])).unwrap();
    let mut bytes = header.to_bytes().unwrap();
    let mut seed = blake3::Hasher::new();
    seed.update(name.as_bytes());
    let mut data = vec![0; header.data_bytes as usize];
    seed.finalize_xof().fill(&mut data);
    bytes.extend_from_slice(&data);
    let hash = TreeHash::new(bytes.len() as u64);
    for (i, tile) in bytes.chunks(1000).enumerate() {
        hash.add(i as u64 * 1000, tile).unwrap();
    }
    fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
    fs::write(dir.join(name), &bytes).unwrap();
    let entry = |t: ggshard::output::TensorInfo| TensorEntry {
        blake3: Digest::of(&data[t.offsets.0 as usize..t.offsets.1 as usize]),
        name: t.name,
        dtype: t.dtype,
        shape: t.shape,
        offsets: t.offsets,
        deviation: None,
    };
    FileEntry {
        name: name.into(),
        rank,
        stage: None,
        bytes: bytes.len() as u64,
        header_bytes: header.header_bytes,
        blake3: hash.finish().unwrap().into(),
        tensors: header.tensors.into_iter().map(entry).collect(),
    }
}

fn write_other(dir: &Path, name: &str, text: &str) -> OtherFile {
    fs::write(dir.join(name), text).unwrap();
    OtherFile { name: name.into(), bytes: text.len() as u64, blake3: Digest::of(text.as_bytes()) }
}

fn parameter(name: &str, dtype: Dtype, shape: &[u64], cut: &str) -> Parameter {
    let sources = vec![("blk.0.x".into(), "Q4_K".into())];
    Parameter {
        name: name.into(),
        set: String::new(),
        shape: shape.to_vec(),
        dtype,
        cut: cut.into(),
        sources,
        blocks: None,
        decoded: None,
        nan: 0,
        inf: 0,
        overflow: 0,
    }
}

/// Two ranks of two parts each, a shared draft part, and what lies beside them.
fn checkpoint(dir: &Path) -> Manifest {
    let first: Shapes =
        &[("embed", Dtype::F32, &[40, 8]), ("q", Dtype::BF16, &[9, 16]), ("none", Dtype::BF16, &[0, 4])];
    let second: Shapes = &[("big", Dtype::BF16, &[700, 1024]), ("norm", Dtype::BF16, &[5])];
    let mut files = Vec::new();
    for rank in 0..2 {
        files.push(write_file(dir, &format!("model-rank-{rank}-part-0.safetensors"), Some(rank), first));
        files.push(write_file(dir, &format!("model-rank-{rank}-part-1.safetensors"), Some(rank), second));
    }
    files.push(write_file(dir, "mtp/model.safetensors", None, &[("embed", Dtype::F32, &[80, 8])]));
    let index = r#"{"metadata":{"total_size":1},"weight_map":{
        "embed":"model-rank-0-part-0.safetensors","q":"model-rank-1-part-0.safetensors",
        "none":"model-rank-0-part-0.safetensors","big":"model-rank-0-part-1.safetensors",
        "norm":"model-rank-0-part-1.safetensors"}}"#;
    let others = vec![
        write_other(dir, "config.json", r#"{"architectures":["X"]}"#),
        write_other(dir, "model.safetensors.index.json", index),
        write_other(dir, "empty.txt", ""),
    ];
    let manifest = Manifest {
        format: FORMAT.into(),
        format_version: FORMAT_VERSION,
        tool: "ggshard 0.1.0".into(),
        plan: Digest::of(b"plan"),
        source: Source {
            architecture: "glm-dsa".into(),
            parts: vec![SourcePart {
                name: "x-00001-of-00001.gguf".into(),
                bytes: 10,
                header_bytes: 5,
                header_blake3: Digest::of(b"header"),
                blake3: None,
            }],
        },
        mapping: Mapping {
            name: "m".into(),
            version: "1".into(),
            class: Some("C".into()),
            digest: Digest::of(b"m"),
            texts: Vec::new(),
        },
        profile: Profile {
            name: "p".into(),
            version: "1".into(),
            digest: Digest::of(b"p"),
            texts: vec!["name = \"p\"\n".into()],
            launch: vec!["--load-format".into(), "sharded_state".into()],
        },
        topology: Topology { tp: 2, pp: 1, stage_layers: Vec::new(), expert_parallel: false, ranks: vec![0, 1] },
        policy: Policy {
            dtype: "bf16".into(),
            rules: None,
            keep_or: None,
            nvfp4_search: false,
            input_scales: BTreeMap::new(),
            mtp: "keep".into(),
            part_size: 1 << 20,
            moe_pad: None,
            allow_nonfinite: false,
        },
        warnings: vec!["a \"warning\"\nof two lines".into()],
        ignored: vec![Ignored { tensor: "rope_freqs.weight".into(), reason: "computed".into() }],
        parameters: vec![
            parameter("embed", Dtype::F32, &[80, 8], "vocab"),
            Parameter { nan: 3, ..parameter("q", Dtype::BF16, &[18, 16], "column") },
            parameter("none", Dtype::BF16, &[0, 4], "replicated"),
            parameter("big", Dtype::BF16, &[700, 2048], "row"),
            parameter("norm", Dtype::BF16, &[5], "replicated"),
            Parameter { set: "mtp".into(), ..parameter("embed", Dtype::F32, &[80, 8], "replicated") },
        ],
        files,
        others,
        digest: Digest::default(),
    };
    seal(dir, &manifest);
    manifest
}

/// Writes manifest and `B3SUMS`, in the order of a commit.
fn seal(dir: &Path, manifest: &Manifest) {
    let bytes = manifest.to_bytes().unwrap();
    fs::write(dir.join("B3SUMS"), Sums::of(manifest, Digest::of(&bytes)).to_text()).unwrap();
    fs::write(dir.join("ggshard.json"), bytes).unwrap();
}

struct Folder {
    dir: tempfile::TempDir,
    manifest: Manifest,
}

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let manifest = checkpoint(dir.path());
        Folder { dir, manifest }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn verify(&self) -> Result<Report> {
        verify(self.dir.path(), ALL)
    }

    fn report(&self) -> Report {
        self.verify().unwrap()
    }

    fn edit(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(name)).unwrap();
        change(&mut bytes);
        fs::write(self.path(name), bytes).unwrap();
    }

    /// The findings after `change` to the bytes of `name`, which are restored.
    fn with(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Vec<(What, String, Option<String>)> {
        let original = fs::read(self.path(name)).unwrap();
        self.edit(name, change);
        let findings = self.report().findings.into_iter().map(|f| (f.what, f.file, f.tensor)).collect();
        fs::write(self.path(name), original).unwrap();
        findings
    }
}

fn found(what: What, file: &str, tensor: Option<&str>) -> (What, String, Option<String>) {
    (what, file.into(), tensor.map(Into::into))
}

const PART: &str = "model-rank-1-part-0.safetensors";

#[test]
fn a_check_ends_when_it_is_asked_to() {
    let folder = Folder::new();
    let cancel = Arc::new(AtomicBool::new(false));
    let options = Options { cancel: Some(cancel.clone()), ..ALL };
    assert!(verify(folder.dir.path(), options.clone()).unwrap().ok());
    let stop = |step| {
        if matches!(step, Step::Bytes(_)) {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let ended = verify_against(folder.dir.path(), options, Against::default(), &stop);
    assert!(matches!(ended, Err(Error::Cancelled(_))), "{ended:?}");
}

#[test]
fn intact_passes() {
    let folder = Folder::new();
    for threads in [0, 1, 5] {
        let report = verify(folder.dir.path(), Options { rank: None, threads, ..ALL }).unwrap();
        assert!(report.ok(), "{report}");
        assert_eq!((report.files, report.tensors), (8, 11));
        let listed =
            folder.manifest.files.iter().map(|f| f.bytes).chain(folder.manifest.others.iter().map(|f| f.bytes));
        assert_eq!(report.bytes, listed.sum::<u64>());
        assert!(report.to_string().starts_with("ok: 8 files, 11 tensors"), "{report}");
    }
}

#[test]
fn one_flipped_bit_in_a_header_is_found() {
    let folder = Folder::new();
    for file in &folder.manifest.files {
        let json = SafetensorsHeader::read(&folder.path(&file.name)).unwrap();
        assert_eq!(json.header_bytes, file.header_bytes);
        let padding = file.header_bytes as usize - 1;
        // Length field, JSON, padding.
        for at in (0..8).chain((8..150).step_by(7)).chain([padding]) {
            for bit in [0, 5] {
                let findings = folder.with(&file.name, |bytes| bytes[at] ^= 1 << bit);
                assert!(
                    findings.contains(&found(What::FileDigest, &file.name, None)),
                    "{} byte {at} bit {bit}: {findings:?}",
                    file.name
                );
                assert!(findings.iter().all(|f| f.0 != What::TensorDigest), "no data was touched: {findings:?}");
            }
        }
    }
}

#[test]
fn one_flipped_bit_in_a_tensor_is_found_and_named() {
    let folder = Folder::new();
    for file in &folder.manifest.files {
        for tensor in &file.tensors {
            let (begin, end) = (file.header_bytes + tensor.offsets.0, file.header_bytes + tensor.offsets.1);
            if begin == end {
                continue;
            }
            for at in [begin, (begin + end) / 2, end - 1] {
                let findings = folder.with(&file.name, |bytes| bytes[at as usize] ^= 0x10);
                let expected = [
                    found(What::FileDigest, &file.name, None),
                    found(What::TensorDigest, &file.name, Some(&tensor.name)),
                ];
                assert_eq!(findings, expected, "{} byte {at}", file.name);
            }
        }
    }
}

#[test]
fn one_flipped_bit_in_another_file_is_found() {
    let folder = Folder::new();
    for file in folder.manifest.others.iter().filter(|file| file.bytes > 0) {
        for at in [0, file.bytes as usize / 2, file.bytes as usize - 1] {
            let findings = folder.with(&file.name, |bytes| bytes[at] ^= 1);
            assert!(findings.contains(&found(What::FileDigest, &file.name, None)), "{findings:?}");
        }
    }
}

#[test]
fn one_flipped_bit_anywhere_in_the_sums_is_found() {
    let folder = Folder::new();
    let len = fs::read(folder.path("B3SUMS")).unwrap().len();
    for at in (0..len).step_by(3).chain([len - 1]) {
        let findings = folder.with("B3SUMS", |bytes| bytes[at] ^= 1 << (at % 8));
        assert!(findings.iter().any(|f| f.0 == What::Sums), "byte {at}: {findings:?}");
    }
    let findings = folder.with("B3SUMS", |bytes| bytes.truncate(len - 66));
    assert!(findings.iter().any(|f| f.0 == What::Sums));
    let findings = folder.with("B3SUMS", |bytes| bytes.extend(format!("{}  zzz\n", Digest::default()).bytes()));
    assert_eq!(findings, [found(What::Sums, "B3SUMS", None)]);
}

#[test]
#[ignore = "needs the b3sum program"]
fn the_b3sum_program_takes_the_sums() {
    let folder = Folder::new();
    let check =
        || std::process::Command::new("b3sum").args(["--check", "B3SUMS"]).current_dir(&folder.dir).output().unwrap();
    let output = check();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout.split(|&b| b == b'\n').filter(|line| line.ends_with(b": OK")).count(), 9);
    folder.edit(PART, |bytes| bytes[5000] ^= 1);
    assert!(!check().status.success());
}

#[test]
fn every_missing_file_is_found() {
    let folder = Folder::new();
    let files = folder.manifest.files.iter().map(|f| &f.name).chain(folder.manifest.others.iter().map(|f| &f.name));
    for name in files.map(String::as_str).chain(["B3SUMS"]) {
        fs::rename(folder.path(name), folder.path("aside")).unwrap();
        let findings: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file, f.tensor)).collect();
        assert_eq!(findings, [found(What::Missing, name, None)]);
        fs::rename(folder.path("aside"), folder.path(name)).unwrap();
    }
    fs::remove_file(folder.path("ggshard.json")).unwrap();
    let error = folder.verify().unwrap_err().to_string();
    assert!(error.contains("not a checkpoint"), "{error}");
}

#[test]
fn files_that_a_loader_would_pick_up_are_found() {
    let folder = Folder::new();
    let extra = ["extra.safetensors", "mtp/extra.safetensors", "other/x.safetensors", "a.partial", "b.done", "c.bin"];
    fs::create_dir(folder.path("other")).unwrap();
    for name in extra.iter().chain(&["README.md", ".gitattributes", "other/note.txt"]) {
        fs::write(folder.path(name), "x").unwrap();
    }
    let mut names: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file)).collect();
    names.sort();
    let mut expected: Vec<_> = extra.iter().map(|name| (What::Extra, name.to_string())).collect();
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn a_tensor_more_in_a_file_is_found() {
    let folder = Folder::new();
    let tensors: Shapes = &[
        ("embed", Dtype::F32, &[40, 8]),
        ("q", Dtype::BF16, &[9, 16]),
        ("none", Dtype::BF16, &[0, 4]),
        ("more", Dtype::BF16, &[1]),
    ];
    write_file(folder.dir.path(), PART, Some(1), tensors);
    let findings: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file, f.tensor)).collect();
    assert_eq!(findings, [found(What::Header, PART, Some("more")), found(What::Size, PART, None)]);
}

#[test]
fn another_dtype_of_the_same_size_is_found_in_the_header() {
    let folder = Folder::new();
    let tensors: Shapes =
        &[("embed", Dtype::F32, &[40, 8]), ("q", Dtype::F16, &[16, 9]), ("none", Dtype::BF16, &[0, 4])];
    write_file(folder.dir.path(), PART, Some(1), tensors);
    let report = folder.report();
    let header = report.findings.iter().find(|f| f.what == What::Header).unwrap();
    assert_eq!(header.tensor.as_deref(), Some("q"));
    assert_eq!(header.expected.as_deref(), Some("BF16 [9, 16] at [1280,1568]"));
    assert_eq!(header.found.as_deref(), Some("F16 [16, 9] at [1280,1568]"));
    assert!(report.findings.iter().any(|f| f.what == What::FileDigest));
    assert!(report.to_string().contains("tensor 'q'"), "{report}");
}

#[test]
fn truncated_and_appended_files_are_found() {
    let folder = Folder::new();
    for name in [PART, "mtp/model.safetensors", "config.json"] {
        for change in
            [|b: &mut Vec<u8>| b.truncate(b.len() - 1), |b: &mut Vec<u8>| b.push(0), |b: &mut Vec<u8>| b.clear()]
        {
            let findings = folder.with(name, change);
            assert!(findings.contains(&found(What::Size, name, None)), "{findings:?}");
        }
    }
}

#[test]
fn swapped_files_of_two_ranks_are_found_and_named() {
    let folder = Folder::new();
    let other = "model-rank-0-part-0.safetensors";
    fs::rename(folder.path(PART), folder.path("aside")).unwrap();
    fs::rename(folder.path(other), folder.path(PART)).unwrap();
    fs::rename(folder.path("aside"), folder.path(other)).unwrap();
    let report = folder.report();
    let digests: Vec<_> = report.findings.iter().filter(|f| f.what == What::FileDigest).collect();
    assert_eq!(digests.len(), 2);
    assert!(digests[0].found.as_ref().unwrap().ends_with(&format!("which is '{PART}'")));
    assert!(digests[1].found.as_ref().unwrap().ends_with(&format!("which is '{other}'")));
}

#[test]
fn one_rank_needs_only_its_own_files() {
    let folder = Folder::new();
    fs::remove_file(folder.path("model-rank-0-part-0.safetensors")).unwrap();
    folder.edit("model-rank-0-part-1.safetensors", |bytes| bytes.push(1));
    let rank = |rank| verify(folder.dir.path(), Options { rank: Some(rank), threads: 1, ..ALL });
    let report = rank(1).unwrap();
    assert!(report.ok(), "{report}");
    assert_eq!((report.files, report.tensors, report.rank), (6, 6, Some(1)));
    assert_eq!(rank(0).unwrap().findings.len(), 3);
    assert!(matches!(rank(2), Err(Error::Checkpoint(_))));
    folder.edit("mtp/model.safetensors", |bytes| bytes[5000] ^= 1);
    assert!(!rank(1).unwrap().ok(), "shared files are every rank's");
}

#[test]
fn a_consistently_resealed_manifest_does_not_excuse_other_bytes() {
    let mut folder = Folder::new();
    folder.manifest.files[2].blake3 = Digest::of(b"another");
    let bytes = folder.manifest.to_bytes().unwrap();
    fs::write(folder.path("ggshard.json"), &bytes).unwrap();
    let findings: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file, f.tensor)).collect();
    // The file's own digest, and the lines of B3SUMS for the file and for the manifest.
    let sums = || found(What::Sums, "B3SUMS", None);
    assert_eq!(findings, [found(What::FileDigest, PART, None), sums(), sums()]);
    folder.manifest.files[2].tensors[1].blake3 = Digest::of(b"another");
    seal(folder.dir.path(), &folder.manifest);
    let findings: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file, f.tensor)).collect();
    assert_eq!(findings, [found(What::FileDigest, PART, None), found(What::TensorDigest, PART, Some("q"))]);
}

#[test]
fn an_index_that_names_the_wrong_file_is_found() {
    let mut folder = Folder::new();
    let cases = [
        (r#""norm":"model-rank-0-part-1.safetensors""#, r#""norm":"model-rank-0-part-0.safetensors""#, Some("norm")),
        (r#""norm":"model-rank-0-part-1.safetensors""#, r#""norm":"mtp/model.safetensors""#, Some("norm")),
        (r#""q":"#, r#""Q":"#, Some("q")),
        (r#""q":"#, r#""norm":"#, Some("norm")),
        ("weight_map", "weightmap", None),
    ];
    let index = fs::read_to_string(folder.path("model.safetensors.index.json")).unwrap();
    for (from, to, tensor) in cases {
        let text = index.replace(from, to);
        assert_ne!(text, index);
        folder.manifest.others[1] = write_other(folder.dir.path(), "model.safetensors.index.json", &text);
        seal(folder.dir.path(), &folder.manifest);
        let report = folder.report();
        assert!(!report.findings.is_empty());
        assert!(report.findings.iter().all(|f| f.what == What::Index), "{report}");
        assert!(report.findings.iter().any(|f| f.tensor.as_deref() == tensor), "{report}");
    }
}

#[test]
fn no_tensor_checked_is_a_failure() {
    let mut folder = Folder::new();
    for file in std::mem::take(&mut folder.manifest.files) {
        fs::remove_file(folder.path(&file.name)).unwrap();
    }
    folder.manifest.parameters.clear();
    folder.manifest.others.remove(1);
    fs::remove_file(folder.path("model.safetensors.index.json")).unwrap();
    seal(folder.dir.path(), &folder.manifest);
    let report = folder.report();
    assert!(!report.ok());
    assert_eq!(report.findings.iter().map(|f| f.what).collect::<Vec<_>>(), [What::NothingChecked]);
}

#[test]
fn a_file_that_is_a_folder_or_a_pipe_is_found() {
    let folder = Folder::new();
    fs::remove_file(folder.path("config.json")).unwrap();
    fs::create_dir(folder.path("config.json")).unwrap();
    fs::remove_file(folder.path(PART)).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(folder.path(PART)).status().unwrap().success());
    let mut findings: Vec<_> = folder.report().findings.into_iter().map(|f| (f.what, f.file)).collect();
    findings.sort();
    assert_eq!(findings, [(What::Unreadable, "config.json".into()), (What::Unreadable, PART.into())]);
}
