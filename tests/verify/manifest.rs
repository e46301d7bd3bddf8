//! The manifest: it reads back as written, and one that is changed or contradicts itself is refused.

use std::fs;
use std::path::Path;

use ggshard::Error;
use ggshard::dtype::Dtype;
use ggshard::output::{Digest, Manifest, Sums};
use proptest::prelude::*;

use super::{Folder, checkpoint, parameter};

#[test]
fn a_manifest_reads_back_as_written_and_its_bytes_do_not_vary() {
    let folder = Folder::new();
    let bytes = fs::read(folder.path("ggshard.json")).unwrap();
    let mut read = Manifest::read(folder.dir.path()).unwrap();
    assert_eq!(read.to_bytes().unwrap(), bytes);
    let digest = std::mem::take(&mut read.digest);
    assert_eq!(read, folder.manifest);
    let zeroed = String::from_utf8(bytes).unwrap().replace(&digest.to_string(), &"0".repeat(64));
    assert_eq!(Digest::of(zeroed.as_bytes()), digest);
    assert!(!zeroed.contains(&folder.dir.path().to_string_lossy().into_owned()));
}

#[test]
fn one_flipped_bit_anywhere_in_the_manifest_is_found() {
    let folder = Folder::new();
    let intact = fs::read(folder.path("ggshard.json")).unwrap();
    for at in 0..intact.len() {
        let mut bytes = intact.clone();
        bytes[at] ^= 1 << (at % 8);
        let error = Manifest::parse(&bytes, Path::new("ggshard.json")).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(_) | Error::Unsupported(_)), "byte {at}: {error}");
    }
    folder.edit("ggshard.json", |bytes| bytes[40] ^= 1);
    assert!(folder.verify().is_err());
}

#[test]
fn an_edited_manifest_is_refused() {
    let folder = Folder::new();
    folder.edit("ggshard.json", |bytes| {
        *bytes = String::from_utf8(bytes.clone()).unwrap().replace("\"tp\":2", "\"tp\":4").into_bytes();
    });
    let error = folder.verify().unwrap_err().to_string();
    assert!(error.contains("edited manifest"), "{error}");
}

/// What `change` makes of the manifest must be refused, on writing and (sealed with a right digest) on reading.
#[track_caller]
fn refused(manifest: &Manifest, with: &str, change: impl FnOnce(&mut Manifest)) {
    let mut changed = manifest.clone();
    change(&mut changed);
    let error = changed.to_bytes().unwrap_err();
    assert!(matches!(error, Error::Audit(_)));
    assert!(error.to_string().contains(with), "{error}");
}

#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let folder = Folder::new();
    let m = &folder.manifest;
    refused(m, "rank 1 of 1", |m| m.topology.tp = 1);
    refused(m, "no rank", |m| m.topology.tp = 0);
    refused(m, "no rank", |m| m.topology.ranks.clear());
    refused(m, "ascending", |m| m.topology.ranks = vec![1, 0]);
    refused(m, "ascending", |m| m.topology.ranks = vec![0, 0]);
    refused(m, "not in this folder", |m| m.topology.ranks = vec![0]);
    for name in ["../x", "/x", "a//b", "a/b/c", "a\\b", "", "x\0"] {
        refused(m, "", |m| m.files[0].name = name.into());
    }
    refused(m, "twice", |m| m.others[0].name = m.files[0].name.clone());
    refused(m, "reserved", |m| m.others[0].name = "B3SUMS".into());
    refused(m, "reserved", |m| m.files[0].name = "ggshard.json".into());
    refused(m, "folder", |m| m.others[0].name = "mtp".into());
    refused(m, "plain", |m| m.source.parts[0].name = "/data/x.gguf".into());
    refused(m, "listed twice", |m| m.parameters[1].name = "embed".into());
    refused(m, "not among", |m| m.parameters[1].name = "other".into());
    refused(m, "no file holds", |m| m.parameters.push(parameter("lost", Dtype::F32, &[1], "column")));
    refused(m, "dtype", |m| m.parameters[1].dtype = Dtype::F16);
    refused(m, "once more", |m| m.files[2].rank = Some(0));
    refused(m, "once more", |m| m.files[2].rank = None);
    refused(m, "offsets", |m| m.files[0].tensors[1].offsets.0 += 2);
    refused(m, "offsets", |m| m.files[0].tensors.swap(0, 1));
    refused(m, "overflows", |m| m.files[0].tensors[0].shape = vec![u64::MAX, 2]);
    refused(m, "multiple of 4096", |m| m.files[0].header_bytes = 4000);
    refused(m, "multiple of 4096", |m| m.files[0].header_bytes = 0);
    refused(m, "bytes", |m| m.files[0].bytes += 1);
    refused(m, "version", |m| m.format_version = 2);
    refused(m, "format", |m| m.format = "other".into());
}

/// The manifest's text after a replacement, with its digest made right.
fn resealed(text: &str, from: &str, to: &str) -> String {
    let end = text.rfind("\"digest\":\"").unwrap() + 10;
    let changed = text[..end].replacen(from, to, 1);
    assert_ne!(changed, text[..end], "{from}");
    let zeroed = format!("{changed}{}\"\n}}\n", "0".repeat(64));
    format!("{changed}{}\"\n}}\n", Digest::of(zeroed.as_bytes()))
}

#[test]
fn a_well_sealed_manifest_of_another_shape_is_refused() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.path("ggshard.json")).unwrap();
    let parse = |text: &str| Manifest::parse(text.as_bytes(), Path::new("ggshard.json"));
    assert!(parse(&text).is_ok());
    for (from, to, with) in [
        ("\"tool\"", "\"more\":1,\"tool\"", "unknown field"),
        ("\"tool\":\"ggshard 0.1.0\",", "", "missing field"),
        ("\"rank\":0,", "", "missing field"),
        ("\"tp\":2", "\"tp\":2,\"tp\":2", "duplicate field"),
        ("\"tp\":2", "\"tp\":-2", "invalid value"),
        ("\"format_version\":1", "\"format_version\":7", "format version 7"),
        ("\"format\":\"ggshard\"", "\"format\":\"x\"", "format 'x'"),
        ("BF16", "Q4_K", "dtype"),
        ("\"offsets\":[0,1280]", "\"offsets\":[0,1281]", "offsets"),
        ("model-rank-0-part-0.safetensors", "../evil.safetensors", "leaves its folder"),
    ] {
        let error = parse(&resealed(&text, from, to)).unwrap_err().to_string();
        assert!(error.contains(with), "{from} → {to}: {error}");
    }
    for text in ["", "{", "null", &text[..text.len() - 1], &format!("{text} ")] {
        assert!(parse(text).is_err());
    }
}

proptest! {
    #[test]
    fn arbitrary_changes_to_a_sealed_manifest_never_panic(at in 0_usize..4000, with in "\\PC{0,8}", cut in 0_usize..8) {
        let folder = tempfile::tempdir().unwrap();
        checkpoint(folder.path());
        let text = fs::read_to_string(folder.path().join("ggshard.json")).unwrap();
        let at = at % (text.len() - 100);
        prop_assume!(text.is_char_boundary(at) && text.is_char_boundary(at + cut));
        let changed = format!("{}{with}{}", &text[..at], &text[at + cut..]);
        let end = changed.rfind("\"digest\":\"").map_or(0, |i| i + 10);
        let zeroed = format!("{}{}\"\n}}\n", &changed[..end], "0".repeat(64));
        let sealed = format!("{}{}\"\n}}\n", &changed[..end], Digest::of(zeroed.as_bytes()));
        let _ = Manifest::parse(sealed.as_bytes(), Path::new("x"));
        let _ = Sums::parse(changed.as_bytes(), Path::new("x"));
    }
}
