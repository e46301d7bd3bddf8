//! Comparing with the source finds what no digest shows: a folder that was edited and sealed anew.

// Each test binary uses its own part of it.
#[allow(dead_code)]
#[path = "common/folders.rs"]
mod folders;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use folders::*;
use ggshard::convert::Request;
use ggshard::gguf::GgufSet;
use ggshard::output::{Digest, Manifest};
use ggshard::verify::{Against, Finding, Options, Report, Step, What, verify, verify_against};
use ggshard::{Error, Result};

const ALL: Options = Options { rank: None, threads: 2, cancel: None };

fn check(folder: &Path, source: &Path, options: Options) -> Result<Report> {
    verify_against(folder, options, Against { source: Some(source), ..Against::default() }, &|_| {})
}

fn passes(folder: &Path, source: &Path, options: Options) {
    let report = check(folder, source, options).unwrap();
    assert!(report.ok(), "{report}");
    assert_eq!(report.checks, ["folder", "source"]);
}

/// What is found after everything was sealed anew: the plain check must find nothing.
fn forged(folder: &Path, source: &Path) -> Vec<Finding> {
    let plain = verify(folder, ALL).unwrap();
    assert!(plain.ok(), "{plain}");
    let report = check(folder, source, ALL).unwrap();
    assert!(!report.ok());
    report.findings
}

fn kinds(findings: &[Finding]) -> Vec<(What, &str, Option<&str>)> {
    findings.iter().map(|f| (f.what, f.file.as_str(), f.tensor.as_deref())).collect()
}

const EMBED: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

#[test]
fn what_was_converted_passes() {
    for source in [glm(), deepseek()] {
        for tp in [1, 2, 4] {
            let folder = converted(&source, tp);
            passes(folder.path(), &source, ALL);
            passes(folder.path(), &source, Options { rank: Some(tp - 1), threads: 1, ..ALL });
        }
    }
}

#[test]
fn every_choice_is_taken_from_the_manifest() {
    let mtp = ggshard::mapping::MtpPolicy::Drop;
    let dtype = ggshard::dequant::FloatType::F16;
    let folder = converted_by(&glm(), &Request { tp: 2, mtp, dtype, part_size: 300_000, ..Request::default() });
    assert!(Manifest::read(folder.path()).unwrap().files.len() > 4);
    passes(folder.path(), &glm(), ALL);
}

#[test]
fn a_custom_mapping_and_profile_are_taken_from_the_manifest() {
    let rules = tempfile::tempdir().unwrap();
    let at = |name: &str| rules.path().join(name).to_string_lossy().into_owned();
    let base = "name = \"deepseek_v3\"\nversion = 7\nextends = \"deepseek_v3\"\nclass = \"C\"\nabout = \"x\"\n";
    let mine = "name = \"mine\"\nversion = 3\nextends = \"base.toml\"\nclass = \"C\"\nabout = \"x\"\n\
        [[weight]]\nname = \"my.norm\"\nshape = [\"hidden\"]\ncut = \"replicated\"\nfrom = { gguf = \"output_norm.weight\" }\n";
    fs::write(at("base.toml"), base).unwrap();
    fs::write(at("mine.toml"), mine.replace("about = \"x\"\n", "about = \"x\"\nremove = [\"model.norm.weight\"]\n"))
        .unwrap();
    let profile = include_str!("../mappings/profiles/hf.toml").replace("\"hf\"", "\"my\"").replace("-rank-", "-R-");
    fs::write(at("my.toml"), profile).unwrap();
    let request = Request { mapping: Some(at("mine.toml")), profile: at("my.toml"), tp: 2, ..Request::default() };
    let folder = converted_by(&deepseek(), &request);
    drop(rules);
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!((manifest.mapping.texts.len(), !manifest.profile.texts.is_empty()), (2, true));
    assert!(manifest.parameters.iter().any(|p| p.name == "my.norm"));
    passes(folder.path(), &deepseek(), ALL);
    // The recorded rules are what counts: changed ones are not those of the digest.
    edit_manifest(folder.path(), |m| m.mapping.texts[0].push('\n'));
    let error = check(folder.path(), &deepseek(), ALL).unwrap_err();
    assert_eq!(error.fault().key.as_deref(), Some("mapping"), "{error}");
}

#[test]
fn one_flipped_bit_is_found_where_it_is() {
    let folder = converted(&deepseek(), 2);
    let (file, tensor) = find(folder.path(), DOWN, 1);
    let at = (tensor.offsets.1 - tensor.offsets.0) / 2 + 77;
    edit_tensor(folder.path(), DOWN, 1, |bytes| bytes[at as usize] ^= 4);
    reseal(folder.path());
    let findings = forged(folder.path(), &deepseek());
    assert_eq!(kinds(&findings), [(What::SourceBytes, file.name.as_str(), Some(DOWN))]);
    assert_eq!((findings[0].offset, findings[0].differing), (Some(at), Some(1)));
    let text = findings[0].to_string();
    let in_file = file.header_bytes + tensor.offsets.0 + at;
    assert!(text.contains(&format!("at byte {at} (byte {in_file} of the file)")), "{text}");
    // The other rank is sound, and does not need this one's files.
    fs::remove_file(folder.path().join(&file.name)).unwrap();
    passes(folder.path(), &deepseek(), Options { rank: Some(0), threads: 2, ..ALL });
}

#[test]
fn all_differences_of_a_tensor_are_one_finding() {
    let folder = converted(&glm(), 4);
    // The first and the last byte, and one rank's copy of what all hold.
    let embed = edit_tensor(folder.path(), EMBED, 3, |bytes| {
        bytes[0] ^= 1;
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    });
    let norm = edit_tensor(folder.path(), NORM, 2, |bytes| bytes[10..20].iter_mut().for_each(|b| *b = !*b));
    reseal(folder.path());
    let findings = forged(folder.path(), &glm());
    let mut found = kinds(&findings);
    found.sort();
    assert_eq!(
        found,
        [(What::SourceBytes, norm.as_str(), Some(NORM)), (What::SourceBytes, embed.as_str(), Some(EMBED))]
    );
    let of = |name: &str| findings.iter().find(|f| f.tensor.as_deref() == Some(name)).unwrap();
    assert_eq!((of(EMBED).offset, of(EMBED).differing), (Some(0), Some(2)));
    assert_eq!((of(NORM).offset, of(NORM).differing), (Some(10), Some(10)));
}

#[test]
fn swapped_rank_files_are_found() {
    let folder = converted(&deepseek(), 2);
    let path = |rank: u32| folder.path().join(find(folder.path(), DOWN, rank).0.name);
    let (zero, one) = (path(0), path(1));
    let spare = folder.path().join("spare");
    fs::rename(&zero, &spare).unwrap();
    fs::rename(&one, &zero).unwrap();
    fs::rename(&spare, &one).unwrap();
    reseal(folder.path());
    let findings = forged(folder.path(), &deepseek());
    for rank in ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"] {
        for tensor in [EMBED, DOWN] {
            assert!(kinds(&findings).contains(&(What::SourceBytes, rank, Some(tensor))), "{rank} {tensor}");
        }
    }
    // Both hold the same of what is replicated.
    assert!(findings.iter().all(|f| f.tensor.as_deref() != Some(NORM)));
}

#[test]
fn an_edited_header_is_found() {
    let folder = converted(&deepseek(), 2);
    let (file, _) = find(folder.path(), DOWN, 0);
    let replace = |bytes: &mut Vec<u8>, from: &[u8], to: &[u8]| {
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to);
    };
    let path = folder.path().join(&file.name);
    edit(&path, |bytes| replace(bytes, b"\"format\":\"pt\"", b"\"format\":\"np\""));
    reseal(folder.path());
    let findings = forged(folder.path(), &deepseek());
    assert_eq!(kinds(&findings), [(What::Header, file.name.as_str(), None)]);
    // Two tensors of one size change names, in the manifest too.
    edit(&path, |bytes| replace(bytes, b"\"format\":\"np\"", b"\"format\":\"pt\""));
    let (up, gate) = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight");
    let swap = |name: &mut String| {
        if name == up {
            gate.clone_into(name);
        } else if name == gate {
            up.clone_into(name);
        }
    };
    let mut header = ggshard::output::SafetensorsHeader::read(&path).unwrap();
    header.tensors.iter_mut().for_each(|tensor| swap(&mut tensor.name));
    edit(&path, |bytes| bytes[..file.header_bytes as usize].copy_from_slice(&header.to_bytes().unwrap()));
    edit_manifest(folder.path(), |m| {
        let entry = m.files.iter_mut().find(|f| f.name == file.name).unwrap();
        entry.tensors.iter_mut().for_each(|tensor| swap(&mut tensor.name));
    });
    reseal(folder.path());
    let findings = forged(folder.path(), &deepseek());
    for name in [up, gate] {
        assert!(kinds(&findings).contains(&(What::Header, file.name.as_str(), Some(name))));
        assert!(kinds(&findings).contains(&(What::Record, "ggshard.json", Some(name))));
    }
}

#[test]
fn an_edited_manifest_is_found() {
    let folder = converted(&deepseek(), 1);
    let original = Manifest::read(folder.path()).unwrap();
    let with = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = original.clone();
        change(&mut manifest);
        write(folder.path(), &manifest);
        forged(folder.path(), &deepseek())
    };
    let found = with(&|m| m.parameters[3].sources[0].1 = "Q9".into());
    assert_eq!(kinds(&found), [(What::Record, "ggshard.json", Some(original.parameters[3].name.as_str()))]);
    let found = with(&|m| m.parameters[4].cut = "row".into());
    assert_eq!(kinds(&found), [(What::Record, "ggshard.json", Some(original.parameters[4].name.as_str()))]);
    let found = with(&|m| m.parameters.swap(1, 2));
    assert_eq!(kinds(&found), [(What::Record, "ggshard.json", Some(original.parameters[1].name.as_str()))]);
    let found = with(&|m| m.parameters[0].nan = 1);
    assert_eq!(kinds(&found), [(What::Nonfinite, "ggshard.json", Some(original.parameters[0].name.as_str()))]);
    let ignored = ggshard::output::manifest::Ignored { tensor: "x".into(), reason: "y".into() };
    let found = with(&|m| m.ignored.push(ignored.clone()));
    assert_eq!(kinds(&found), [(What::Record, "ggshard.json", Some("x"))]);
    let other_file = || with(&|m| m.files[0].rank = Some(0));
    assert_eq!(kinds(&other_file()), [(What::Record, "ggshard.json", None)]);
}

#[test]
fn a_deviation_that_the_source_does_not_give_is_found() {
    for dtype in ["fp8", "nvfp4"] {
        let request = Request { tp: 2, ..Request::default() }.typed(dtype, None).unwrap();
        let folder = converted_by(&glm(), &request);
        passes(folder.path(), &glm(), ALL);
        let original = Manifest::read(folder.path()).unwrap();
        let encoded = original.files[1].tensors.iter().position(|tensor| tensor.deviation.is_some()).unwrap();
        let tensor = &original.files[1].tensors[encoded];
        let mut other = tensor.deviation.unwrap();
        other.largest_error *= 2.0;
        for deviation in [Some(other), None] {
            edit_manifest(folder.path(), |m| m.files[1].tensors[encoded].deviation = deviation);
            let found = forged(folder.path(), &glm());
            assert_eq!(kinds(&found), [(What::Record, "ggshard.json", Some(tensor.name.as_str()))], "{dtype}");
        }
    }
}

#[test]
fn another_source_is_refused_by_name() {
    let folder = converted(&glm(), 2);
    let refused = |source: &Path| match check(folder.path(), source, ALL) {
        Err(Error::Checkpoint(fault)) => fault.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(&deepseek()).contains("a source of 4 parts; expected 1 parts"));
    let copies = tempfile::tempdir().unwrap();
    // The name does not matter.
    let copy = copies.path().join("renamed.gguf");
    fs::copy(glm(), &copy).unwrap();
    passes(folder.path(), &copy, ALL);
    // One letter of the metadata.
    let at = fs::read(&copy).unwrap().windows(12).position(|w| w == b"general.name").unwrap();
    edit(&copy, |bytes| bytes[at + 12 + 4 + 8] ^= 1);
    let text = refused(&copy);
    let header = Manifest::read(folder.path()).unwrap().source.parts[0].header_blake3;
    assert!(
        text.contains("renamed.gguf") && text.contains("part 1 of 1") && text.contains(&header.to_string()),
        "{text}"
    );
    // The same header, and more behind it.
    fs::copy(glm(), &copy).unwrap();
    edit(&copy, |bytes| bytes.extend_from_slice(&[0; 32]));
    assert!(refused(&copy).contains("a file of "));
    // One part of several.
    let folder = converted(&deepseek(), 1);
    edit_manifest(folder.path(), |m| m.source.parts[2].bytes += 1);
    let error = check(folder.path(), &deepseek(), ALL).unwrap_err().to_string();
    assert!(error.contains("part 3 of 4") && error.contains("00003-of-00004"), "{error}");
}

#[test]
fn other_data_behind_the_same_header_is_found() {
    let source = tempfile::tempdir().unwrap();
    let copy = source.path().join("copy.gguf");
    fs::copy(glm(), &copy).unwrap();
    let folder = converted(&copy, 2);
    let set = GgufSet::open(&copy).unwrap();
    let norm = &set.tensors()[set.find("output_norm.weight").unwrap()];
    let (at, bytes) = (norm.offset as usize, norm.bytes as usize);
    drop(set);
    edit(&copy, |file| file[at..at + bytes].fill(0xFF));
    let report = check(folder.path(), &copy, ALL).unwrap();
    let found = kinds(&report.findings);
    for rank in ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"] {
        assert!(found.contains(&(What::SourceBytes, rank, Some(NORM))), "{report}");
    }
    // All are NaN now, of which the manifest knows nothing. The check went on.
    assert_eq!(found.len(), 3);
    assert_eq!(found[2], (What::Nonfinite, "ggshard.json", Some(NORM)));
}

#[test]
fn values_that_were_let_through_pass() {
    let source = tempfile::tempdir().unwrap();
    let copy = source.path().join("copy.gguf");
    fs::copy(glm(), &copy).unwrap();
    let set = GgufSet::open(&copy).unwrap();
    let at = set.tensors()[set.find("output_norm.weight").unwrap()].offset as usize;
    drop(set);
    edit(&copy, |file| file[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes()));
    let folder = tempfile::tempdir().unwrap();
    let planned = ggshard::convert::plan(&copy, &Request { tp: 2, ..Request::default() }, false).unwrap();
    let options = ggshard::engine::Options { allow_nonfinite: true, ..Default::default() };
    ggshard::convert::convert(&planned, folder.path(), options, &ggshard::convert::Extras::default(), &|_| {}).unwrap();
    passes(folder.path(), &copy, ALL);
    passes(folder.path(), &copy, Options { rank: Some(1), threads: 2, ..ALL });
}

#[test]
fn other_rules_are_refused() {
    let folder = converted(&glm(), 2);
    let original = Manifest::read(folder.path()).unwrap();
    let refused = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = original.clone();
        change(&mut manifest);
        write(folder.path(), &manifest);
        assert!(verify(folder.path(), ALL).unwrap().ok());
        match check(folder.path(), &glm(), ALL) {
            Err(Error::Checkpoint(fault)) => (fault.key.clone().unwrap_or_default(), fault.to_string()),
            other => panic!("{other:?}"),
        }
    };
    let (key, text) = refused(&|m| m.mapping.digest = Digest::of(b"older"));
    assert!(key == "mapping" && text.contains("have changed since the conversion"), "{text}");
    assert!(text.contains(&original.tool), "{text}");
    assert_eq!(refused(&|m| m.profile.version = "9".into()).0, "profile");
    let (key, text) = refused(&|m| m.mapping.name = "../../etc/passwd".into());
    assert!(key == "mapping" && text.contains("no built-in mapping"), "{text}");
    assert_eq!(refused(&|m| m.policy.dtype = "f8".into()).0, "policy.dtype");
    assert_eq!(refused(&|m| m.policy.mtp = "perhaps".into()).0, "policy.mtp");
    assert_eq!(refused(&|m| m.policy.dtype = "f16".into()).0, "plan");
    assert_eq!(refused(&|m| m.plan = Digest::of(b"another")).0, "plan");
}

#[test]
fn some_ranks_are_enough() {
    let folder = tempfile::tempdir().unwrap();
    convert_ranks(&deepseek(), folder.path(), &Request { tp: 4, ..Request::default() }, &[1, 3]);
    passes(folder.path(), &deepseek(), ALL);
    passes(folder.path(), &deepseek(), Options { rank: Some(3), threads: 0, ..ALL });
    assert!(check(folder.path(), &deepseek(), Options { rank: Some(0), threads: 0, ..ALL }).is_err());
}

#[test]
fn files_that_are_gone_or_cut_are_one_finding() {
    let folder = converted(&deepseek(), 2);
    let [zero, one] = [0, 1].map(|rank| find(folder.path(), DOWN, rank).0.name);
    fs::remove_file(folder.path().join(&zero)).unwrap();
    let report = check(folder.path(), &deepseek(), ALL).unwrap();
    assert_eq!(kinds(&report.findings), [(What::Missing, zero.as_str(), None)]);
    edit(&folder.path().join(&one), |bytes| bytes.truncate(bytes.len() - 3));
    let report = check(folder.path(), &deepseek(), Options { rank: Some(1), threads: 2, ..ALL }).unwrap();
    let found = kinds(&report.findings);
    assert!(found.contains(&(What::Size, one.as_str(), None)), "{report}");
    let cut = report.findings.iter().find(|f| f.what == What::SourceBytes).unwrap();
    assert_eq!(cut.differing, Some(3));
    assert!(cut.to_string().contains("the end of the file"), "{cut}");
}

#[test]
fn the_command_says_so() {
    let folder = converted(&deepseek(), 2);
    let run = |source: &Path, more: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("ggshard").unwrap();
        command.arg("verify").arg(folder.path()).arg("--source").arg(source).args(more);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, _) = run(&deepseek(), &[]);
    assert_eq!(code, Some(0));
    assert!(out.starts_with("ok: 2 files") && out.contains("every byte compared") && out.ends_with('\n'), "{out}");
    edit_tensor(folder.path(), DOWN, 1, |bytes| bytes[5] ^= 1);
    reseal(folder.path());
    let (code, out, _) = run(&deepseek(), &["--threads", "1"]);
    assert_eq!(code, Some(1));
    assert!(out.contains(DOWN) && out.contains("model-rank-1") && out.contains("at byte 5"), "{out}");
    let (code, out, _) = run(&deepseek(), &["--json"]);
    assert_eq!(code, Some(1));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["ok"], false);
    assert_eq!(json["checks"], serde_json::json!(["folder", "source"]));
    assert_eq!(json["findings"][0]["what"], "source-bytes");
    assert_eq!(json["findings"][0]["tensor"], DOWN);
    assert_eq!(json["findings"][0]["offset"], 5);
    assert_eq!(json["findings"].as_array().unwrap().len(), 1);
    assert_eq!(run(&deepseek(), &["--rank", "0", "--json"]).0, Some(0));
    let (code, out, error) = run(&glm(), &["--json"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(error.contains("glm_moe_dsa-UD-IQ2_XXS.gguf") || error.contains("a source of 1 parts"), "{error}");
    assert_eq!(run(&deepseek(), &["--max-rms", "0.1"]).0, Some(2));
    assert_eq!(run(&deepseek(), &["--rank", "x"]).0, Some(2));
}

#[test]
fn a_comparison_with_the_source_ends_when_it_is_asked_to() {
    let (folder, cancel) = (converted(&glm(), 2), Arc::new(AtomicBool::new(false)));
    let stop = |step| {
        if matches!(step, Step::Begin { check: "source", .. }) {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let options = Options { cancel: Some(cancel.clone()), ..ALL };
    let against = Against { source: Some(&glm()), reference: None, ..Against::default() };
    let ended = verify_against(folder.path(), options, against, &stop);
    assert!(matches!(ended, Err(Error::Cancelled(_))), "{ended:?}");
}
