//! A bounded fuzz of everything that reads what nobody vouches for. Deterministic: the same inputs in every run.
//!
//! The inputs are sound and hostile files of the repository, changed in a few places. Every one must give a value or a
//! typed error, in bounded time and memory; `common/drive.rs` says what is asked of each, and the long-running targets in
//! `fuzz/` ask the same.

#[path = "common/allocations.rs"]
mod allocations;
#[path = "common/drive.rs"]
mod drive;
#[allow(dead_code)]
#[path = "common/folders.rs"]
mod folders;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "fuzz/model.rs"]
mod model;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ggshard::convert::{self, InputScalesFrom, Request};
use ggshard::gguf::GgufSet;
use ggshard::mapping::{MtpPolicy, choose, resolve};
use ggshard::output::{Digest, Manifest, Sums};
use ggshard::plan::InputScales;
use ggshard::verify::{Against, Options, Reference, verify_against};
use gguf_writer::Random;
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

/// Files of some folders of the repository, sorted.
fn files(folders: &[&str], ending: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).into_iter().flatten())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no {ending} in {folders:?}");
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Inputs that fuzzing found before, kept for good.
fn regressions(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/regressions");
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        entries.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with(target)).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

static GGUFS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| files(&["fixtures/attacks", "fixtures/container"], ".gguf"));
/// Headers of models, without their data.
static HEADERS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let header = |bytes: Vec<u8>| {
        let set = GgufSet::from_bytes("x.gguf", bytes.clone()).unwrap();
        bytes[..set.parts()[0].header_bytes() as usize].to_vec()
    };
    files(&["fixtures/families"], ".gguf").into_iter().map(header).collect()
});
static MAPPINGS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| files(&["mappings/models"], ".toml"));
static POLICIES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let all = files(&["mappings/policies"], ".toml").into_iter();
    all.chain([drive::MIXED.as_bytes().to_vec(), drive::FILTERED.as_bytes().to_vec()]).collect()
});
static PROFILES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| files(&["mappings/profiles"], ".toml"));
static SAFETENSORS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let all = files(&["fixtures/blocks"], ".safetensors");
    all.into_iter().filter(|bytes| bytes.len() < 20_000).collect()
});

/// Numbers that counts and lengths go wrong at.
const AWKWARD: [u64; 12] =
    [0, 1, 2, 3, 0xff, 0xffff, 1 << 20, 1 << 31, u32::MAX as u64, 1 << 40, i64::MAX as u64, u64::MAX];

/// An input, changed once for each seed; `others` are what is spliced in.
fn mutated(input: &[u8], others: &[Vec<u8>], seeds: &[u64]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for seed in seeds {
        let mut random = Random(*seed);
        let mut at = |bytes: &[u8]| random.below(bytes.len() as u64 + 1) as usize;
        let (i, j) = (at(&bytes), at(&bytes));
        let (low, high) = (i.min(j), i.max(j));
        let span = low..high.min(low + 1 + random.below(40) as usize).max(low);
        let number = AWKWARD[random.below(AWKWARD.len() as u64) as usize];
        match random.below(10) {
            0 => bytes.get_mut(i).into_iter().for_each(|byte| *byte ^= 1 << (seed % 8)),
            1 => bytes.get_mut(i).into_iter().for_each(|byte| *byte = (seed >> 8) as u8),
            2 => bytes[low..].iter_mut().zip(number.to_le_bytes()).for_each(|(byte, new)| *byte = new),
            3 => bytes[low..].iter_mut().zip((number as u32).to_le_bytes()).for_each(|(byte, new)| *byte = new),
            4 => drop(bytes.drain(span)),
            5 => bytes.truncate(high),
            6 => {
                let copied = bytes[span].to_vec();
                bytes.splice(high..high, copied);
            }
            7 => {
                let other = &others[random.below(others.len() as u64) as usize];
                let from = random.below(other.len() as u64 + 1) as usize;
                let piece = other[from..].iter().take(1 + random.below(200) as usize).copied().collect::<Vec<_>>();
                bytes.splice(low..low, piece);
            }
            8 => {
                // A number in a text becomes another.
                let digits = |byte: &u8| byte.is_ascii_digit();
                if let Some(start) = bytes[low..].iter().position(digits).map(|n| low + n) {
                    let end = bytes[start..].iter().position(|byte| !digits(byte)).map_or(bytes.len(), |n| start + n);
                    bytes.splice(start..end, number.to_string().into_bytes());
                }
            }
            _ => {
                let words: [&[u8]; 12] =
                    [b"\"", b"[", b"{", b"]]", b"}", b"..", b"/", b"\n", b"\0", b"\xff\xfe", b"{layer}", b"null"];
                bytes.splice(low..low, words[random.below(12) as usize].to_vec());
            }
        }
    }
    bytes
}

/// A text whose lines and words were moved about, so that most of it stays sound.
fn reworded(input: &[u8], others: &[Vec<u8>], seeds: &[u64]) -> Vec<u8> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut lines: Vec<String> = text(input).lines().map(str::to_owned).collect();
    for seed in seeds {
        let mut random = Random(*seed);
        let mut below = |n: usize| random.below(n.max(1) as u64) as usize;
        let other = text(&others[below(others.len())]);
        let (from, at) =
            (other.lines().nth(below(other.lines().count())).unwrap_or_default().to_owned(), below(lines.len()));
        let Some(line) = lines.get_mut(at) else { continue };
        match below(6) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, from),
            2 => *line = from,
            _ => {
                let words: Vec<&str> = from.split([' ', '"', ',']).filter(|word| !word.is_empty()).collect();
                let parts: Vec<&str> = line.split_inclusive([' ', '"', ',', '.', '{', '}']).collect();
                let (new, gone) = (words.get(below(words.len())).copied().unwrap_or("0"), below(parts.len()));
                let end = |part: &str| part.chars().last().filter(|c| !c.is_alphanumeric()).map(String::from);
                let put = |(i, part): (usize, &&str)| match i == gone {
                    true => new.to_owned() + &end(part).unwrap_or_default(),
                    false => (*part).to_owned(),
                };
                *line = parts.iter().enumerate().map(put).collect();
            }
        }
    }
    lines.join("\n").into_bytes()
}

/// A header whose metadata and tensors were changed, and which is a sound file again.
fn remodelled(input: &[u8], seeds: &[u64]) -> Vec<u8> {
    let mut file = model::read(input);
    for seed in seeds {
        let mut random = Random(*seed);
        let mut below = |n: usize| random.below(n.max(1) as u64) as usize;
        let (key, tensor, other) = (below(file.entries.len()), below(file.tensors.len()), below(file.tensors.len()));
        let number = AWKWARD[below(AWKWARD.len())];
        if file.entries.is_empty() || file.tensors.is_empty() {
            break;
        }
        match below(9) {
            0 | 1 => {
                let value = &mut file.entries[key].2;
                let small = (below(9) as u64).to_le_bytes();
                let new = if below(2) == 0 { number.to_le_bytes() } else { small };
                value.iter_mut().take(8).zip(new).for_each(|(byte, new)| *byte = new);
            }
            2 => drop(file.entries.remove(key)),
            3 => drop(file.tensors.remove(tensor)),
            4 => file.tensors.swap(tensor, other),
            5 => {
                let name = file.tensors[other].name.replace(|c: char| c.is_ascii_digit(), &below(4).to_string());
                file.tensors[tensor].name = name;
            }
            6 => file.tensors[tensor].ne = file.tensors[other].ne.clone(),
            7 => {
                let axis = below(file.tensors[tensor].ne.len());
                file.tensors[tensor]
                    .ne
                    .get_mut(axis)
                    .into_iter()
                    .for_each(|n| *n = [0, 1, *n / 2, *n * 2, 32][below(5)]);
            }
            _ => file.tensors[tensor].ty = [0, 1, 8, 12, 26, 30, 9][below(7)],
        }
    }
    model::write(&file)
}

static ALONE: Mutex<()> = Mutex::new(());

/// Runs one input, one at a time so that the memory counted is its own.
fn bounded(bytes: usize, work: impl FnOnce()) -> Result<(), TestCaseError> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = allocations::HELD.load(Ordering::Relaxed);
    allocations::PEAK.store(before, Ordering::Relaxed);
    let start = Instant::now();
    work();
    let (took, peak) = (start.elapsed(), allocations::PEAK.load(Ordering::Relaxed).saturating_sub(before));
    prop_assert!(took < Duration::from_secs(5), "{:?} for {} bytes", took, bytes);
    prop_assert!(peak < (64 << 20) + 64 * bytes, "{} bytes of memory for {}", peak, bytes);
    Ok(())
}

/// Drives inputs as they are, those that fuzzing found before, and so many changed ones.
fn fuzz(target: &str, cases: u32, inputs: &[Vec<u8>], drive: impl Fn(&[u8])) {
    fuzz_by(mutated, target, cases, inputs, drive);
}

/// As [`fuzz`], with inputs changed in another way.
fn fuzz_by(
    change: impl Fn(&[u8], &[Vec<u8>], &[u64]) -> Vec<u8>,
    target: &str,
    cases: u32,
    inputs: &[Vec<u8>],
    drive: impl Fn(&[u8]),
) {
    for bytes in inputs.iter().chain(&regressions(target)) {
        bounded(bytes.len(), || drive(bytes)).unwrap();
    }
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(cases.into()),
        ..ProptestConfig::default()
    };
    let changes = (any::<prop::sample::Index>(), prop::collection::vec(any::<u64>(), 1..5));
    let outcome = TestRunner::new(config).run(&changes, |(which, seeds)| {
        let bytes = change(&inputs[which.index(inputs.len())], inputs, &seeds);
        bounded(bytes.len(), || drive(&bytes))
    });
    outcome.unwrap();
}

#[test]
fn gguf_files() {
    fuzz("gguf", 20_000, &GGUFS, drive::gguf);
}

#[test]
fn headers_of_models() {
    fuzz("gguf", 4000, &HEADERS, drive::gguf);
}

#[test]
fn plans_of_headers() {
    fuzz("plan", 2000, &HEADERS, drive::plan);
    fuzz_by(|input, _, seeds| remodelled(input, seeds), "plan", 2500, &HEADERS, drive::plan);
}

#[test]
fn plans_by_arbitrary_policies() {
    let names = ["models/glm_moe_dsa-UD-IQ2_XXS.gguf", "models/deepseek_v3-split", "families/mixtral.gguf"];
    let (mut fp8, mut nvfp4, mut mixed) = (0, 0, 0);
    const CASES: usize = 600;
    for name in names {
        let set = GgufSet::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)).unwrap();
        let model = resolve(&choose(&set).unwrap(), &set, MtpPolicy::Keep).unwrap();
        for (has_fp8, has_nvfp4) in (0..CASES).map(|seed| drive::plan_by_policy(&set, &model, seed)) {
            fp8 += usize::from(has_fp8);
            nvfp4 += usize::from(has_nvfp4);
            mixed += usize::from(has_fp8 && has_nvfp4);
        }
    }
    // So many are plans, and not refused, that the audit has something to look at.
    assert!(fp8 > CASES / 10 && nvfp4 > CASES / 4 && mixed > CASES / 50, "fp8 {fp8}, nvfp4 {nvfp4}, both {mixed}");
}

#[test]
fn mappings() {
    let drive = |bytes: &[u8]| drive::mapping_toml(&String::from_utf8_lossy(bytes));
    fuzz("mapping_toml", 1000, &MAPPINGS, drive);
    fuzz_by(reworded, "mapping_toml", 2500, &MAPPINGS, drive);
}

#[test]
fn policies() {
    let drive = |bytes: &[u8]| drive::policy_toml(&String::from_utf8_lossy(bytes));
    fuzz("policy_toml", 1000, &POLICIES, drive);
    fuzz_by(reworded, "policy_toml", 1000, &POLICIES, drive);
}

#[test]
fn profiles() {
    let drive = |bytes: &[u8]| drive::profile_toml(&String::from_utf8_lossy(bytes));
    fuzz("profile_toml", 1000, &PROFILES, drive);
    fuzz_by(reworded, "profile_toml", 2500, &PROFILES, drive);
}

#[test]
fn safetensors_headers() {
    fuzz("safetensors_header", 20_000, &SAFETENSORS, drive::safetensors_header);
}

#[test]
fn manifests() {
    fuzz("manifest", 6000, &MANIFESTS, drive::manifest);
}

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families/qwen3.gguf")
}

/// A converted folder, whose files the tests below replace one at a time.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| folders::converted(&small(), 1));
/// Its manifest, without the digest at its end.
static MANIFESTS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let bytes = fs::read(FOLDER.path().join("ggshard.json")).unwrap();
    let staged = Request { tp: 2, pp: 2, profile: "vllm-0.32".into(), ..Request::default() };
    let other = fs::read(folders::converted_by(&small(), &staged).path().join("ggshard.json")).unwrap();
    let weights = convert::plan(&small(), &Request::default(), false).unwrap().plan.model.weights;
    let by_name = weights.iter().map(|weight| (InputScales::name(&weight.name), 0.5)).collect();
    let input_scales = Some(InputScalesFrom::Given(InputScales { by_name, place: PathBuf::new() }));
    let encoded = Request { nvfp4_search: true, input_scales, ..Request::default() }.typed("nvfp4", None).unwrap();
    let encoded = fs::read(folders::converted_by(&small(), &encoded).path().join("ggshard.json")).unwrap();
    [bytes, other, encoded].map(|bytes| bytes[..bytes.len() - 79].to_vec()).to_vec()
});

/// A copy of the folder by links, in which files can be replaced.
fn linked() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(FOLDER.path()).unwrap().map(Result::unwrap) {
        std::os::unix::fs::symlink(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// Verifies a folder in which one file is another, against its source and against itself.
fn verified(name: &str, bytes: &[u8]) {
    let folder = linked();
    fs::remove_file(folder.path().join(name)).unwrap();
    fs::write(folder.path().join(name), bytes).unwrap();
    let options = Options { threads: 1, ..Options::default() };
    let reference = Some(Reference { folder: folder.path(), max_rms: 0.0 });
    for against in
        [Against { source: Some(&small()), ..Against::default() }, Against { reference, ..Against::default() }]
    {
        match verify_against(folder.path(), options.clone(), against, &|_| {}) {
            Ok(report) => assert!(!report.to_string().is_empty() && report.to_json().is_ok()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let _ = ggshard::runtime::RankCheckpoint::open(folder.path(), 0, Default::default());
}

/// What ends the manifest of these bytes.
fn sealed(body: &[u8]) -> Vec<u8> {
    let zeros = [body, b"\n\"digest\":\"", &[b'0'; 64], b"\"\n}\n"].concat();
    let digest = Digest::of(&zeros).to_string();
    [body, b"\n\"digest\":\"", digest.as_bytes(), b"\"\n}\n"].concat()
}

static SUMS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| vec![fs::read(FOLDER.path().join("B3SUMS")).unwrap()]);
static INDICES: LazyLock<Vec<Vec<u8>>> =
    LazyLock::new(|| vec![fs::read(FOLDER.path().join("model.safetensors.index.json")).unwrap()]);
static CONFIGS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let planned = convert::plan(&small(), &Request::default(), false).unwrap();
    vec![convert::extras(&planned, None).unwrap().files.remove(0).1]
});

#[test]
fn folders_with_another_manifest() {
    fuzz("folder", 300, &MANIFESTS, |bytes| verified("ggshard.json", &sealed(bytes)));
}

#[test]
fn folders_with_another_index() {
    const NAME: &str = "model.safetensors.index.json";
    fuzz("index", 300, &INDICES, |bytes| {
        // Listed with its digest, so that it is read as an index.
        let folder = linked();
        fs::remove_file(folder.path().join(NAME)).unwrap();
        fs::write(folder.path().join(NAME), bytes).unwrap();
        let mut manifest = Manifest::read(folder.path()).unwrap();
        let other = manifest.others.iter_mut().find(|o| o.name == NAME).unwrap();
        (other.bytes, other.blake3) = (bytes.len() as u64, Digest::of(bytes));
        for name in ["ggshard.json", "B3SUMS"] {
            fs::remove_file(folder.path().join(name)).unwrap();
        }
        folders::write(folder.path(), &manifest);
        let reference = Some(Reference { folder: folder.path(), max_rms: 0.0 });
        let options = Options { threads: 1, ..Options::default() };
        let _ = verify_against(folder.path(), options, Against { reference, ..Against::default() }, &|_| {});
    });
}

#[test]
fn lists_of_digests() {
    fuzz("sums", 10_000, &SUMS, |bytes| {
        if let Ok(sums) = Sums::parse(bytes, Path::new("B3SUMS")) {
            assert_eq!(sums.to_text().as_bytes(), bytes, "only what is written is read");
        }
    });
}

#[test]
fn given_configs() {
    let planned = convert::plan(&small(), &Request::default(), false).unwrap();
    fuzz("config", 2000, &CONFIGS, |bytes| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, bytes).unwrap();
        if let Err(error) = convert::extras(&planned, Some(&path)) {
            assert!(!error.to_string().is_empty());
        }
    });
}

#[test]
fn the_same_inputs_in_every_run() {
    let changed = || (0..200).map(|seed| mutated(&GGUFS[3], &GGUFS, &[seed, seed * 7])).collect::<Vec<_>>();
    assert_eq!(changed(), changed());
    assert!(changed().iter().filter(|bytes| **bytes != GGUFS[3]).count() > 150);
}
