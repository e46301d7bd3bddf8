//! Doubtful sources: values that are not finite, tensors of zeros, and digests of whole files, each byte read once.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;

use std::path::{Path, PathBuf};
use std::process::Command;

use ggshard::check::{self, Options, check};
use ggshard::convert::{Extras, Output, Planned, Request, convert, plan_set};
use ggshard::engine;
use ggshard::gguf::{GgmlType, GgufSet, Io, OpenOptions};
use ggshard::output::{Digest, Manifest};
use ggshard::verify::{Against, Report, What, verify_against};
use gguf_writer::{GgufBuilder, Random};

/// A model with one of each finding, and tensors that neither begin nor end with a window of 1 MiB.
fn doubtful() -> Vec<u8> {
    let mut f32s = vec![0.5f32; 300_000];
    (f32s[7], f32s[262_144], f32s[299_999]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let mut q8 = gguf_writer::random_blocks(GgmlType::Q8_0, 32 * 1000, 3);
    q8[34 * 999..34 * 999 + 2].copy_from_slice(&[0x00, 0x7e]);
    let mut zeros = vec![0u8; 4 * 300_000];
    zeros[3] = 0x80;
    GgufBuilder::architecture("doubtful")
        .f32s("odd.weight", &[300_000], &f32s)
        .tensor("scales.weight", GgmlType::Q8_0, &[32, 1000], q8)
        .tensor("zeros.weight", GgmlType::F32, &[300_000], zeros)
        .tensor("almost.weight", GgmlType::BF16, &[300_000], [vec![0; 599_999], vec![1]].concat())
        .random("numbers", GgmlType::I32, &[1000], 5)
        .random("sound.weight", GgmlType::Q4_K, &[256, 9000], 4)
        .build()
}

fn open(path: &Path, io: Io) -> GgufSet {
    GgufSet::open_with(path, OpenOptions { io, ..OpenOptions::default() }).unwrap()
}

#[test]
fn every_value_is_looked_at_and_every_byte_hashed() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("doubtful.gguf");
    let bytes = doubtful();
    std::fs::write(&path, &bytes).unwrap();
    for (io, threads) in [(Io::Mmap, 1), (Io::Pread, 1), (Io::Pread, 3)] {
        let set = open(&path, io);
        let report = check(&set, &Options { hash: true, threads, cancel: None }, &|_| {}).unwrap();
        let found: Vec<_> = report.tensors.iter().map(|t| (t.name.as_str(), t.checked, t.nan, t.inf, t.zero)).collect();
        let expected = [
            ("odd.weight", true, 1, 2, false),
            ("scales.weight", true, 32, 0, false),
            ("zeros.weight", true, 0, 0, true),
            ("almost.weight", true, 0, 0, false),
            ("numbers", false, 0, 0, false),
            ("sound.weight", true, 0, 0, false),
        ];
        assert_eq!(found, expected);
        assert!(!report.ok());
        assert_eq!(report.parts[0].blake3, Some(Digest::of(&bytes)));
        let text = report.render();
        assert!(text.contains("not finite scales.weight (Q8_0): 32 NaN, 0 infinite of 32000 values"), "{text}");
        assert!(text.contains(&format!("{}  doubtful.gguf\n", blake3::hash(&bytes))), "{text}");
    }
}

#[test]
fn the_command_fails_for_values_that_are_not_finite_and_only_for_them() {
    let temp = tempfile::tempdir().unwrap();
    let run = |name: &str, bytes: Vec<u8>| {
        let path = temp.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggshard"));
        let output = command.arg("inspect").arg(path).args(["--check", "--hash", "--json"]).output().unwrap();
        (output.status.code(), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    let (status, json) = run("doubtful.gguf", doubtful());
    assert_eq!((status, &json["check"]["tensors"][0]["nan"]), (Some(1), &1.into()));
    let zeros = GgufBuilder::architecture("zeros").f32s("zeros.weight", &[3], &[0.0; 3]).build();
    let (status, json) = run("zeros.gguf", zeros.clone());
    assert_eq!((status, &json["check"]["tensors"][0]["zero"]), (Some(0), &true.into()));
    assert_eq!(json["check"]["parts"][0]["blake3"], blake3::hash(&zeros).to_hex().as_str());
}

#[test]
fn a_check_of_headers_alone_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("doubtful.gguf");
    std::fs::write(&path, &doubtful()[..500]).unwrap();
    let set = GgufSet::open_header_only(&path).unwrap();
    check(&set, &Options::default(), &|_| {}).unwrap_err();
    assert!(check::bytes(&set) > 0);
}

/// A model of which `raw` needs everything and of which a mapping ignores a tensor of several windows.
fn partly_ignored(path: &Path, io: Io) -> Planned {
    let mut random = Random(11);
    let file = GgufBuilder::architecture("partly")
        .random("a.weight", GgmlType::Q8_0, &[64, 20_000], random.next())
        .random("ignored.weight", GgmlType::F32, &[1_000_003], random.next())
        .random("b.weight", GgmlType::BF16, &[64, 3], random.next());
    if !path.exists() {
        std::fs::write(path, file.build()).unwrap();
    }
    let rules = path.with_file_name("partly.toml");
    let text = "name = 'partly'\n\
        [[weight]]\nname = 'a'\nshape = [20000, 64]\ncut = 'column'\nfrom = { gguf = 'a.weight' }\n\
        [[weight]]\nname = 'b'\nshape = [3, 64]\ncut = 'row'\nfrom = { gguf = 'b.weight' }\n\
        [[ignore]]\ngguf = 'ignored.weight'\nreason = 'it is of no use'\n";
    std::fs::write(&rules, text).unwrap();
    let request = Request { mapping: Some(rules.to_str().unwrap().into()), tp: 2, ..Request::default() };
    plan_set(open(path, io), &request).unwrap()
}

fn converted(planned: &Planned, folder: &Path, hash_source: bool) -> Manifest {
    let options = engine::Options { threads: 3, tile_bytes: 5000, track_reads: true, ..engine::Options::default() };
    let output = Output { hash_source, ..Output::from(folder) };
    let report = convert(planned, output, options, &Extras::default(), &|_| {}).unwrap();
    assert_eq!(report.repeated_bytes, Some(0));
    Manifest::read(folder).unwrap()
}

fn verified(folder: &Path, source: &Path) -> Report {
    let against = Against { source: Some(source), ..Against::default() };
    verify_against(folder, Default::default(), against, &|_| {}).unwrap()
}

#[test]
fn a_conversion_records_the_digest_of_every_part() {
    let temp = tempfile::tempdir().unwrap();
    let split: Vec<PathBuf> =
        open(&plans::fixture(plans::DEEPSEEK), Io::Pread).parts().iter().map(|p| p.path().into()).collect();
    for io in [Io::Mmap, Io::Pread] {
        let one = temp.path().join("partly.gguf");
        let set = plan_set(open(&split[0], io), &Request { tp: 2, ..Request::default() }).unwrap();
        for (planned, files) in [(partly_ignored(&one, io), vec![one.clone()]), (set, split.clone())] {
            let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let mut manifest = converted(&planned, with.path(), true);
            let digests: Vec<_> = manifest.source.parts.iter().map(|part| part.blake3).collect();
            let expected: Vec<_> = files.iter().map(|file| Some(Digest::of(&std::fs::read(file).unwrap()))).collect();
            assert_eq!(digests, expected);
            // Nothing else differs, but for the digest of the manifest itself.
            let plain = converted(&planned, without.path(), false);
            manifest.source.parts.iter_mut().for_each(|part| part.blake3 = None);
            manifest.digest = plain.digest;
            assert_eq!(manifest, plain);
            assert!(verified(with.path(), &files[0]).ok());
        }
    }
}

#[test]
fn a_recorded_digest_shows_a_change_that_no_output_shows() {
    let temp = tempfile::tempdir().unwrap();
    let source = temp.path().join("partly.gguf");
    let planned = partly_ignored(&source, Io::Pread);
    let ignored = planned.set.tensors()[1].offset as usize;
    let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    converted(&planned, with.path(), true);
    converted(&planned, without.path(), false);
    let mut bytes = std::fs::read(&source).unwrap();
    bytes[ignored + 2_000_000] ^= 1;
    std::fs::write(&source, &bytes).unwrap();
    let kinds = |folder: &Path| verified(folder, &source).findings.iter().map(|f| f.what).collect::<Vec<_>>();
    assert_eq!(kinds(with.path()), [What::SourceDigest]);
    assert_eq!(kinds(without.path()), []);
}
