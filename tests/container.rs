//! GGUF files as containers: what is accepted, what is refused, and how a set of parts becomes one model.

#[path = "container/arbitrary.rs"]
mod arbitrary;
#[path = "container/attacks.rs"]
mod attacks;
#[path = "container/build.rs"]
mod build;
#[path = "container/describe.rs"]
mod describe;
#[path = "container/reading.rs"]
mod reading;
#[path = "container/splits.rs"]
mod splits;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use ggshard::error::{Error, Result};
use ggshard::gguf::{Description, GgmlType, GgufSet, Io, OpenOptions, Value};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The folders of container files at hand: the fixtures, and a whole corpus where `GGSHARD_CORPUS` names one.
fn containers() -> Vec<PathBuf> {
    let corpus = std::env::var_os("GGSHARD_CORPUS").map(|corpus| Path::new(&corpus).join("container"));
    std::iter::once(fixtures().join("container")).chain(corpus).collect()
}

/// Opens a path both ways, mapped and read, which must give the same set, with the same bytes, or the same error.
fn open_with(path: impl AsRef<Path>, header_only: bool) -> Result<GgufSet> {
    let path = path.as_ref();
    let [mapped, read] = [Io::Mmap, Io::Pread]
        .map(|io| GgufSet::open_with(path, OpenOptions { header_only, io, ..OpenOptions::default() }));
    match (&mapped, &read) {
        (Err(mapped), Err(read)) => {
            assert_eq!(mapped.to_string(), read.to_string());
            assert_eq!(std::mem::discriminant(mapped), std::mem::discriminant(read), "{read}");
        }
        (Ok(mapped), Ok(read)) => {
            assert_eq!(format!("{:?}", Description::from_set(mapped)), format!("{:?}", Description::from_set(read)));
            for (mapped, read) in mapped.parts().iter().zip(read.parts()) {
                assert!(!read.is_mapped());
                assert_eq!(mapped.header_blake3().unwrap(), read.header_blake3().unwrap());
            }
            for i in (0..read.tensors().len()).filter(|_| !header_only) {
                assert_eq!(mapped.data(i).unwrap(), read.data(i).unwrap(), "{}", path.display());
            }
        }
        (mapped, read) => panic!("{}: mapped {mapped:?}, read {read:?}", path.display()),
    }
    read
}

fn open(path: impl AsRef<Path>) -> Result<GgufSet> {
    open_with(path, false)
}

/// The error of a refused file, which must name the file.
fn refusal(path: &Path, opened: Result<GgufSet>) -> Error {
    let error = opened.err().unwrap_or_else(|| panic!("{} was accepted", path.display()));
    assert_eq!(error.fault().file.as_deref(), Some(path), "{error}");
    assert!(error.to_string().contains(&*path.file_name().unwrap().to_string_lossy()), "{error}");
    error
}

#[test]
fn every_container_file_gets_its_verdict() {
    #[derive(serde::Deserialize)]
    struct Verdict {
        want: String,
        note: String,
    }
    for folder in containers() {
        let verdicts = fs::read_to_string(folder.join("verdicts.json")).unwrap();
        let verdicts: BTreeMap<String, Verdict> = serde_json::from_str(&verdicts).unwrap();
        assert!(verdicts.len() > 60);
        for (name, verdict) in &verdicts {
            let path = folder.join(name);
            let opened = open(&path);
            match verdict.want.as_str() {
                "accept" => drop(opened.unwrap_or_else(|e| panic!("{name} ({}): {e}", verdict.note))),
                "refuse" => drop(refusal(&path, opened)),
                "either" if opened.is_err() => drop(refusal(&path, opened)),
                "either" => {}
                other => panic!("{name}: unknown verdict {other}"),
            }
        }
        let files =
            fs::read_dir(&folder).unwrap().filter(|f| f.as_ref().unwrap().path().extension() == Some("gguf".as_ref()));
        assert_eq!(files.count(), verdicts.len(), "every file has a verdict");
    }
}

#[test]
fn what_ggml_accepts_by_its_header_alone_is_accepted_header_only() {
    let folder = fixtures().join("container");
    for name in ["ok-data-truncated-meta.gguf", "ok-metadata-only.gguf"] {
        let path = folder.join(name);
        assert!(matches!(refusal(&path, open(&path)), Error::Truncated(_)), "{name}");
        let set = open_with(&path, true).unwrap();
        assert!(set.header_only() && !set.tensors().is_empty());
        let error = set.data(0).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)) && error.fault().tensor.is_some(), "{error}");
    }
    for name in ["ok-empty.gguf", "ok-dims0.gguf", "ok-ne-zero.gguf", "ok-name-empty.gguf", "ok-align1.gguf"] {
        let set = open(folder.join(name)).unwrap();
        for (i, tensor) in set.tensors().iter().enumerate() {
            assert_eq!(set.data(i).unwrap().len() as u64, tensor.bytes, "{name}");
            assert_eq!(tensor.rows() * tensor.row_elements(), tensor.elements(), "{name}");
        }
    }
}

#[test]
fn headers_of_whole_models_read_as_planned() {
    #[derive(serde::Deserialize)]
    struct Plan {
        tensors: usize,
        data_bytes: u64,
        data_start: u64,
        full_file_bytes: u64,
    }
    for folder in containers() {
        let plans = fs::read_to_string(folder.join("plan/plan.json")).unwrap();
        let plans: BTreeMap<String, Plan> = serde_json::from_str(&plans).unwrap();
        for (name, plan) in plans {
            let path = folder.join("plan").join(&name);
            let set = open_with(&path, true).unwrap();
            assert_eq!(set.tensors().len(), plan.tensors, "{name}");
            assert_eq!(set.parts()[0].header_bytes(), plan.data_start, "{name}");
            let end = set.tensors().iter().map(|t| t.offset + t.bytes).max().unwrap();
            assert_eq!(end.next_multiple_of(32), plan.full_file_bytes, "{name}");
            assert_eq!(plan.data_start + plan.data_bytes, plan.full_file_bytes, "{name}");
            // The same header without its data is a truncated model.
            assert!(matches!(refusal(&path, open(&path)), Error::Truncated(_)), "{name}");
        }
    }
}

#[test]
fn tensors_keep_their_order_shape_and_bytes() {
    let bytes = build::Gguf::model().bytes();
    let set = GgufSet::from_bytes("model.gguf", bytes).unwrap();
    let table: Vec<_> =
        set.tensors().iter().map(|t| (t.name.as_str(), t.ty, t.shape(), t.rows(), t.row_bytes())).collect();
    let expected = [
        ("token_embd.weight", GgmlType::F32, vec![3, 4], 3, 16),
        ("blk.0.attn_q.weight", GgmlType::Q8_0, vec![3, 32], 3, 34),
        ("output_norm.weight", GgmlType::F32, vec![4], 1, 16),
    ];
    assert_eq!(table, expected);
    for (i, tensor) in set.tensors().iter().enumerate() {
        assert_eq!(set.find(&tensor.name), Some(i));
        assert_eq!(set.data(i).unwrap(), vec![i as u8 + 1; tensor.bytes as usize], "each tensor's own bytes");
    }
    assert_eq!(set.find("output.weight"), None);
    assert!(set.data(3).is_err());
    set.refuse_nonmodel().unwrap();
}

#[test]
fn every_value_type_reads_exactly() {
    let set = open(fixtures().join("container/ok-all-kv-types.gguf")).unwrap();
    let types: std::collections::BTreeSet<_> = set.metadata().iter().map(|f| f.value().ty().name()).collect();
    assert_eq!(types.len(), 13, "{types:?}");
    // Every array gives as many elements, of its own type, as it says.
    for field in set.metadata().iter() {
        if let Value::Array(array) = field.value() {
            assert_eq!(array.iter().count() as u64, array.len(), "{}", field.key());
            assert!(array.iter().all(|v| v.ty() == array.ty()));
        }
    }
}

#[test]
fn typed_getters_never_cast() {
    use build::*;
    let file = Gguf::empty()
        .entry("u8", U8, &[7])
        .entry("i64", I64, &(-1i64).to_le_bytes())
        .entry("u64", U64, &u64::MAX.to_le_bytes())
        .entry("f32", F32, &0.5f32.to_le_bytes())
        .entry("bool", BOOL, &[2])
        .entry("text", STR, &string("é".as_bytes()))
        .entry("bytes", STR, &string(b"\xff"))
        .entry("i32s", ARRAY, &array(I32, 2, &[1i32.to_le_bytes(), (-2i32).to_le_bytes()].concat()))
        .entry("bools", ARRAY, &array(BOOL, 3, &[0, 1, 255]))
        .entry("strings", ARRAY, &array(STR, 2, &[string(b"x"), string(b"")].concat()));
    let set = GgufSet::from_bytes("kv.gguf", file.bytes()).unwrap();
    let m = set.metadata();
    assert_eq!(m.u64("u8").unwrap(), Some(7));
    assert_eq!(m.u64("u64").unwrap(), Some(u64::MAX));
    assert_eq!(m.u64("absent").unwrap(), None);
    assert_eq!(m.f32("f32").unwrap(), Some(0.5));
    assert_eq!(m.f64("f32").unwrap(), Some(0.5));
    assert_eq!(m.bool("bool").unwrap(), Some(true));
    assert_eq!(m.str("text").unwrap(), Some("é"));
    assert_eq!(m.require("bytes").unwrap().value().as_bytes().unwrap(), b"\xff");
    assert_eq!(m.i64_array("i32s").unwrap(), Some(vec![1, -2]));
    assert_eq!(m.bool_array("bools").unwrap(), Some(vec![false, true, true]));
    let strings = m.string_array("strings").unwrap().unwrap();
    assert_eq!((strings.len(), strings.strings().collect::<Vec<_>>()), (2, vec![&b"x"[..], b""]));

    let wrong: [(Result<()>, &str, &str); 9] = [
        (m.u64("i64").map(drop), "i64", "is -1"),
        (m.u64("f32").map(drop), "f32", "has type f32"),
        (m.u64("bool").map(drop), "bool", "expected an integer"),
        (m.f32("u8").map(drop), "u8", "expected f32"),
        (m.bool("u8").map(drop), "u8", "expected bool"),
        (m.str("bytes").map(drop), "bytes", "not UTF-8"),
        (m.u64_array("i32s").map(drop), "i32s", "element 1 is -2"),
        (m.u64_array("bools").map(drop), "bools", "array of 3 bool"),
        (m.require("absent").map(drop), "absent", "absent"),
    ];
    for (result, key, message) in wrong {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Contradiction(_)), "{error}");
        assert_eq!(error.fault().key.as_deref(), Some(key));
        assert!(error.to_string().starts_with("kv.gguf: ") && error.to_string().contains(message), "{error}");
    }
}
