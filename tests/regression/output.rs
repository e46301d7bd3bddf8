//! Memory, speed and what is on the disk.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use ggshard::Error;
use ggshard::convert::{self, Extras, Request};
use ggshard::dequant::{Dequantizer, Simd};
use ggshard::engine::{Engine, Options, Sink};
use ggshard::gguf::GgmlType;
use ggshard::runtime::{OpenOptions, RankCheckpoint};

use super::check::says;
use super::folders::{converted_by, edit_tensor};
use super::gguf_writer::random_blocks;
use super::{family, planned, small, written};

/// A file of one tensor of zeros, of which hardly a block is on the disk.
fn sparse(folder: &Path, ty: GgmlType, ne: [u64; 2], tensors: u64) -> PathBuf {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend(tensors.to_le_bytes());
    header.extend(1u64.to_le_bytes());
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    header.extend([string("general.architecture"), 8u32.to_le_bytes().to_vec(), string("toy")].concat());
    let bytes = ne[0] * ne[1] / ty.block() * ty.block_bytes();
    for i in 0..tensors {
        header.extend([string(&format!("t{i}.weight")), 2u32.to_le_bytes().to_vec()].concat());
        header.extend(ne.iter().flat_map(|n| n.to_le_bytes()));
        header.extend((ty as u32).to_le_bytes());
        header.extend((i * bytes).to_le_bytes());
    }
    header.resize(header.len().next_multiple_of(32), 0);
    let path = folder.join("sparse.gguf");
    fs::write(&path, &header).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(header.len() as u64 + tensors * bytes).unwrap();
    path
}

/// Converts by the program itself, which may hold so many MiB of memory of its own (a mapped file does not count).
fn converts_within(mebibytes: u64, source: &Path, folder: &Path, more: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_ggshard");
    let line = format!(
        "ulimit -d {} && exec {program} convert '{}' '{}' --tp 2 --mapping raw --threads 2 {more}",
        mebibytes << 10,
        source.display(),
        folder.join("out").display()
    );
    Command::new("sh").arg("-c").arg(line).output().unwrap()
}

#[track_caller]
fn fits(ty: GgmlType, ne: [u64; 2], tensors: u64, more: &str) {
    const LIMIT: u64 = 48;
    let folder = tempfile::tempdir().unwrap();
    let source = sparse(folder.path(), ty, ne, tensors);
    assert!(ne[0] * ne[1] * tensors * 2 > LIMIT << 20, "in BF16 it would not fit");
    let run = converts_within(LIMIT, &source, folder.path(), more);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(folder.path().join("out/ggshard.json").is_file());
}

#[test]
fn f2_the_narrow_type_is_made_tile_by_tile() {
    // 64 MiB of BF16 from one tensor; staged as F32 it would take 128.
    fits(GgmlType::BF16, [8192, 4096], 1, "");
}

#[test]
fn r1_memory_does_not_depend_on_the_model() {
    fits(GgmlType::F16, [4096, 1024], 16, "");
}

#[test]
fn r3_a_small_quantized_file_is_not_decoded_as_a_whole() {
    fits(GgmlType::Q2_K, [8192, 4096], 1, "--dtype f32");
}

#[test]
fn r2_the_source_is_read_once_however_many_ranks_there_are() {
    for tp in [1, 2, 4] {
        let planned = planned(small::builder().build(), small::mapping(), &super::exact("hf", tp)).unwrap();
        let ignored: HashSet<String> = planned.plan.unused_sources().map(|(name, _)| name).collect();
        let used: u64 = planned
            .set
            .tensors()
            .iter()
            .filter(|t| !ignored.contains(&t.name) && !t.name.ends_with(".scale"))
            .map(|t| t.bytes)
            .sum();
        let (_, report) = written(&planned).unwrap();
        assert_eq!((report.source_bytes, report.repeated_bytes), (used, Some(0)), "{tp} ranks");
    }
}

/// Notes which threads hand bytes over, and takes its time.
struct Slow(Mutex<HashSet<ThreadId>>);

impl Sink for Slow {
    fn put(&self, _: u32, _: &[u32], _: u64, _: &[u8]) -> ggshard::Result<()> {
        self.0.lock().unwrap().insert(std::thread::current().id());
        std::thread::sleep(Duration::from_millis(2));
        Ok(())
    }
}

#[test]
fn r4_the_work_is_done_by_all_threads() {
    let planned = planned(small::builder().build(), small::mapping(), &super::exact("hf", 2)).unwrap();
    for threads in [1, 4] {
        let sink = Slow(Mutex::default());
        let options = Options { threads, tile_bytes: 1024, ..Options::default() };
        Engine::new(&planned.plan, &planned.set, options).run(&sink, &|_| {}).unwrap();
        assert_eq!(sink.0.into_inner().unwrap().len(), threads);
    }
}

#[test]
fn r5_decoding_uses_what_the_processor_has() {
    // There is no GPU path; on a CPU the widest instruction set is the default, and gives the bits of the narrowest.
    assert_eq!(Options::default().simd, Simd::detect());
    for ty in [GgmlType::Q4_K, GgmlType::Q8_0, GgmlType::Q4_0] {
        let blocks = random_blocks(ty, ty.block() * 64, 3);
        let decode = |simd| {
            let mut out = vec![0.0f32; (ty.block() * 64) as usize];
            Dequantizer::new(ty, simd).unwrap().to_f32(&blocks, &mut out);
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(decode(Simd::detect()), decode(Simd::Baseline), "{ty}");
    }
}

#[test]
fn r6_what_an_interrupted_conversion_leaves_is_no_checkpoint() {
    let planned = planned(small::builder().build(), small::mapping(), &super::exact("hf", 2)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let cancel = Arc::new(AtomicBool::new(false));
    let seen = Mutex::new(BTreeMap::new());
    let options = Options { threads: 1, tile_bytes: 512, cancel: Some(Arc::clone(&cancel)), ..Options::default() };
    let result = convert::convert(&planned, &out, options, &Extras::default(), &|_| {
        // In the middle there is nothing that a loader would take.
        for entry in fs::read_dir(&out).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            *seen.lock().unwrap().entry(name).or_insert(0) += 1;
        }
        cancel.store(seen.lock().unwrap().len() > 1, Ordering::Relaxed);
    });
    assert!(matches!(result, Err(Error::Cancelled(_))));
    let seen = seen.into_inner().unwrap();
    assert!(
        !seen.is_empty() && seen.keys().all(|name| !name.ends_with(".safetensors") && !name.ends_with(".json")),
        "{seen:?}"
    );
    assert!(ggshard::verify::verify(&out, Default::default()).is_err());
    // More than the disk holds is refused before the first byte.
    let giant = tempfile::tempdir().unwrap();
    let source = sparse(giant.path(), GgmlType::Q1_0, [1 << 30, 1 << 10], 1);
    let run = converts_within(256, &source, giant.path(), "");
    assert!(!run.status.success() && String::from_utf8_lossy(&run.stderr).contains("bytes are free"));
    assert!(!giant.path().join("out").exists());
}

#[test]
fn r8_damage_on_the_way_is_found_and_named() {
    let folder = converted_by(&family("qwen3.gguf"), &Request { tp: 2, ..Request::default() });
    let verify = || Command::new(env!("CARGO_BIN_EXE_ggshard")).arg("verify").arg(folder.path()).output().unwrap();
    assert_eq!(verify().status.code(), Some(0));
    let name = "model.layers.1.mlp.up_proj.weight";
    edit_tensor(folder.path(), name, 1, |bytes| bytes[100] ^= 4);
    let run = verify();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.code() == Some(1) && text.contains(name) && text.contains("model-rank-1"), "{text}");
}

#[test]
fn r11_a_part_that_is_not_there_is_an_error() {
    let request = Request { tp: 2, part_size: 20_000, ..Request::default() };
    let folder = converted_by(&family("qwen3.gguf"), &request);
    let manifest = ggshard::output::Manifest::read(folder.path()).unwrap();
    let own: Vec<_> = manifest.files_of(1).collect();
    assert!(own.len() > 2);
    fs::remove_file(folder.path().join(&own[1].name)).unwrap();
    let error = RankCheckpoint::open(folder.path(), 1, OpenOptions::default()).unwrap_err();
    says(&error, "Checkpoint", &[&own[1].name, "missing"]);
    // Nor is it one if the manifest does not list it either: every parameter must be held by every rank.
    let gone = own[1].name.clone();
    let tensors: Vec<String> = own[1].tensors.iter().map(|t| t.name.clone()).collect();
    super::folders::edit_manifest(folder.path(), |m| m.files.retain(|f| f.name != gone));
    let error = RankCheckpoint::open(folder.path(), 1, OpenOptions::default()).unwrap_err();
    says(&error, "Checkpoint", &[&tensors[0], "no file of rank 1 holds"]);
}

#[test]
fn r12_a_rank_needs_its_own_files_and_no_others() {
    let folder =
        converted_by(&family("qwen3_moe.gguf"), &Request { profile: "vllm-0.32".into(), tp: 4, ..Request::default() });
    let manifest = ggshard::output::Manifest::read(folder.path()).unwrap();
    for file in manifest.files.iter().filter(|f| f.rank != Some(2)) {
        fs::remove_file(folder.path().join(&file.name)).unwrap();
    }
    let open = RankCheckpoint::open(folder.path(), 2, OpenOptions::default()).unwrap();
    assert!(open.files().iter().all(|f| f.to_string_lossy().contains("model-rank-2-")));
    let whole: u64 = manifest.files.iter().map(|f| f.bytes - f.header_bytes).sum();
    assert!(open.total_bytes() * 3 < whole, "{} of {whole}", open.total_bytes());
}
