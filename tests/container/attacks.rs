//! Files made to break a reader. Each test is named after the failure that it prevents.

use std::fs;

use ggshard::error::Error;
use ggshard::gguf::{Description, GgufSet};

use crate::build::*;
use crate::{fixtures, refusal};

fn open(file: &Gguf) -> ggshard::Result<GgufSet> {
    GgufSet::from_bytes("attack.gguf", file.bytes())
}

/// The message of a file that must be refused as a bad container.
fn container(file: &Gguf) -> String {
    match open(file) {
        Err(error @ Error::Container(_)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The attacks that are also files, for fuzzers and other tools, with what their refusal says.
fn seeds() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let model = Gguf::model;
    // With one more entry the header ends where rounding to 32 and to 64 differ.
    let late = Gguf::model().text("pad", "").entry("general.alignment", U32, &64u32.to_le_bytes());
    vec![
        (
            "alignment-2pow30",
            model().entry("general.alignment", U32, &(1u32 << 30).to_le_bytes()).bytes(),
            "1073741824",
        ),
        ("alignment-as-i32", model().entry("general.alignment", I32, &32i32.to_le_bytes()).bytes(), "expected u32"),
        ("alignment-64-laid-out-at-32", late.bytes(), "lay the data out at 32"),
        ("dims-wrap-to-4-bytes", model().raw_tensor("w", 0, &[u64::MAX, 2, 1, 1], &[0; 4]).bytes(), "dimension of -1"),
        ("dims-wrap-elements", model().raw_tensor("w", 0, &[1 << 32, 1 << 32], &[0; 4]).bytes(), "overflows"),
        (
            "tensor-count-max",
            Gguf { tensor_count: Some(i64::MAX as u64), ..model() }.bytes(),
            "9223372036854775807 tensors",
        ),
        ("entry-count-max", Gguf { entry_count: Some(i64::MAX as u64), ..model() }.bytes(), "metadata entries"),
        ("string-2pow30", Gguf::empty().entry("k", STR, &(1u64 << 30).to_le_bytes()).bytes(), "ends inside the value"),
        ("string-2pow62", Gguf::empty().entry("k", STR, &(1u64 << 62).to_le_bytes()).bytes(), "bytes long"),
        (
            "array-2pow30-strings",
            Gguf::empty().entry("k", ARRAY, &array(STR, 1 << 30, &[0; 64])).bytes(),
            "1073741824 str",
        ),
        ("array-of-arrays", Gguf::empty().entry("k", ARRAY, &array(ARRAY, 1, &array(U8, 1, &[0]))).bytes(), "arrays"),
        ("name-with-zero-byte", model().tensor("a\0b", 0, &[4]).bytes(), "zero byte"),
        (
            "git-lfs-pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n".to_vec(),
            "git lfs pull",
        ),
    ]
}

#[test]
fn seed_files_are_refused_and_are_what_the_builder_makes() {
    let folder = fixtures().join("attacks");
    if std::env::var_os("GGSHARD_BLESS").is_some() {
        for (name, bytes, _) in seeds() {
            fs::write(folder.join(name).with_extension("gguf"), bytes).unwrap();
        }
    }
    for (name, bytes, message) in seeds() {
        let path = folder.join(format!("{name}.gguf"));
        assert!(fs::read(&path).unwrap() == bytes, "{name}: run with GGSHARD_BLESS=1 after changing the builder");
        let error = refusal(&path, crate::open(&path));
        assert!(error.to_string().contains(message), "{name}: {error}");
    }
}

#[test]
fn p2_alignment_cannot_make_padding_overflow() {
    let with = |a: u32| {
        Gguf { alignment: a.max(1) as usize, ..Gguf::model() }.entry("general.alignment", U32, &a.to_le_bytes())
    };
    for good in [1, 2, 32, 64, 4096, 1 << 20] {
        open(&with(good)).unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for bad in [0u32, 3, 48, (1 << 20) + 1, 1 << 21, 1 << 31, u32::MAX] {
        let file = Gguf::model().entry("general.alignment", U32, &bad.to_le_bytes());
        let message = container(&file);
        assert!(message.contains("general.alignment") && message.contains(&bad.to_string()), "{message}");
    }
    for (ty, value) in [(U64, &32u64.to_le_bytes()[..]), (I32, &[32, 0, 0, 0]), (STR, &string(b"32")), (U16, &[32, 0])]
    {
        assert!(container(&Gguf::model().entry("general.alignment", ty, value)).contains("expected u32"));
    }
}

#[test]
fn p3_dimensions_cannot_wrap_sizes_or_index_past_four() {
    for ne in [vec![u64::MAX, 2, 1, 1], vec![1 << 63], vec![1 << 31, 1 << 31, 2], vec![1 << 62], vec![0, 1 << 62, 4]] {
        let message = container(&Gguf::model().raw_tensor("w", 0, &ne, &[0; 4]));
        assert!(message.contains("'w'"), "{message}");
    }
    for dims in [5, 64] {
        assert!(container(&Gguf::model().raw_tensor("w", 0, &vec![1; dims], &[0; 4])).contains("dimensions"));
    }
    // An honest 4-byte row count, but the blocks would cross rows.
    assert!(container(&Gguf::model().raw_tensor("w", 12, &[128, 2], &[0; 144])).contains("block of 256"));
    assert!(container(&Gguf::model().raw_tensor("w", 8, &[], &[0; 34])).contains("block of 32"));
    // Sizes that only together pass 64 bits: offsets are a running sum.
    let huge = |name: &str| Tensor { name: name.into(), ne: vec![i64::MAX as u64], ty: 24, data: vec![], offset: None };
    let mut file = Gguf::empty();
    file.tensors = vec![huge("a"), Tensor { offset: Some(1 << 63), ..huge("b") }, huge("c")];
    assert!(container(&file).contains("overflow"));
}

#[test]
fn p3_data_outside_the_file_is_never_a_slice() {
    let file = Gguf::model().raw_tensor("w", 0, &[1 << 40], &[0; 4]);
    let error = open(&file).unwrap_err();
    assert!(matches!(error, Error::Truncated(_)) && error.fault().tensor.as_deref() == Some("w"), "{error}");
}

#[test]
fn p4_an_array_of_u8_is_not_read_as_f32_or_i32() {
    let file = Gguf::model().entry("tokenizer.ggml.scores", ARRAY, &array(U8, 100, &[1; 100]));
    let set = open(&file).unwrap();
    let error = set.metadata().f32_array("tokenizer.ggml.scores").unwrap_err();
    let message = error.to_string();
    assert!(message.contains("tokenizer.ggml.scores") && message.contains("array of 100 u8"), "{message}");
    assert!(set.metadata().string_array("tokenizer.ggml.scores").is_err());
    // Integers of another width are widened one by one, so no byte past the array is looked at.
    assert_eq!(set.metadata().u64_array("tokenizer.ggml.scores").unwrap(), Some(vec![1; 100]));
}

#[test]
fn p5_every_prefix_of_a_sound_file_is_refused() {
    let bytes = Gguf::model().bytes();
    // The padding after the last tensor may be absent: 16 bytes of data, 16 of padding.
    for end in 0..bytes.len() - 16 {
        let error = GgufSet::from_bytes("cut.gguf", bytes[..end].to_vec()).expect_err("a prefix was accepted");
        assert!(matches!(error, Error::Truncated(_)), "cut at {end}: {error}");
        assert!(error.to_string().starts_with("cut.gguf: "), "{error}");
    }
    GgufSet::from_bytes("cut.gguf", bytes[..bytes.len() - 16].to_vec()).unwrap();
}

#[test]
fn p5_lengths_beyond_the_file_are_refused_before_use() {
    for length in [1u64 << 20, 1 << 30, (1 << 30) + 1, 1 << 62, u64::MAX] {
        for file in [
            Gguf::empty().entry("k", STR, &length.to_le_bytes()),
            Gguf::empty().entry("k", ARRAY, &array(STR, length, &[])),
            Gguf::empty().entry("k", ARRAY, &array(U8, length, &[])),
            Gguf::empty().entry("k", ARRAY, &array(U64, length, &[])),
            Gguf { tensor_count: Some(length), ..Gguf::model() },
            Gguf { entry_count: Some(length), ..Gguf::model() },
        ] {
            let error = open(&file).expect_err("accepted");
            assert!(matches!(error, Error::Truncated(_) | Error::Container(_)), "{error}");
        }
    }
}

#[test]
fn p6_the_last_of_two_tensors_or_keys_does_not_win() {
    let message = container(&Gguf::model().tensor("output_norm.weight", 0, &[4]));
    assert!(message.contains("'output_norm.weight'") && message.contains("second time"), "{message}");
    let message = container(&Gguf::model().entry("llama.block_count", U32, &[9, 0, 0, 0]));
    assert!(message.contains("'llama.block_count'") && message.contains("second time"), "{message}");
}

#[test]
fn p7_truncated_data_is_noticed_at_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = Gguf::model().bytes();
    fs::write(&path, &bytes[..bytes.len() - 17]).unwrap();
    let error = refusal(&path, crate::open(&path));
    let fault = error.fault();
    assert!(matches!(error, Error::Truncated(_)) && fault.tensor.as_deref() == Some("output_norm.weight"), "{error}");
    assert!(fault.expected.as_deref().unwrap().contains(&(bytes.len() - 16).to_string()), "{error}");
}

#[test]
fn p7_a_file_without_tensors_is_not_a_model() {
    let set = open(&Gguf::empty().text("general.architecture", "llama")).unwrap();
    assert!(matches!(set.refuse_nonmodel().unwrap_err(), Error::Unsupported(_)));
}

#[test]
fn p8_an_absent_tensor_is_not_reported_as_truncation() {
    let set = open(&Gguf::model()).unwrap();
    assert_eq!(set.find("blk.0.ffn_gate.weight"), None);
    let mut cut = Gguf::model().bytes();
    cut.truncate(cut.len() - 40);
    assert!(matches!(GgufSet::from_bytes("cut.gguf", cut).unwrap_err(), Error::Truncated(_)));
}

#[test]
fn p10_no_tensor_of_a_mixed_file_is_dropped() {
    let file = Gguf::model().tensor("v.blk.0.attn_q.weight", 0, &[4]).tensor("mm.0.weight", 0, &[4]);
    let names: Vec<_> = open(&file).unwrap().tensors().iter().map(|t| t.name.clone()).collect();
    assert_eq!(names.len(), 5);
    assert!(names.ends_with(&["v.blk.0.attn_q.weight".into(), "mm.0.weight".into()]));
}

#[test]
fn p11_byte_order_is_told_by_the_version_alone() {
    open(&Gguf { version: 2, ..Gguf::model() }).unwrap();
    for version in [2u32, 3] {
        let error = open(&Gguf { version: version.swap_bytes(), ..Gguf::model() }).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)) && error.to_string().contains("big-endian"), "{error}");
    }
    for (version, message) in [(0, "version 0"), (1, "32-bit"), (4, "version 4"), (u32::MAX, "version 4294967295")] {
        let message = (open(&Gguf { version, ..Gguf::model() }).unwrap_err().to_string(), message);
        assert!(message.0.contains(message.1) && !message.0.contains("big-endian"), "{message:?}");
    }
}

#[test]
fn p12_names_too_long_to_look_up_are_refused() {
    open(&Gguf::model().tensor("x".repeat(63), 0, &[4])).unwrap();
    assert!(container(&Gguf::model().tensor("x".repeat(64), 0, &[4])).contains("64 bytes"));
    assert!(container(&Gguf::model().tensor(b"x\xff", 0, &[4])).contains("UTF-8"));
}

#[test]
fn r8_a_damaged_header_changes_its_digest_and_damaged_data_does_not() {
    let digest = |bytes| GgufSet::from_bytes("m.gguf", bytes).unwrap().parts()[0].header_blake3().unwrap();
    let sound = Gguf::model().bytes();
    let header = sound.len() - 32 - 128 - 64;
    assert_eq!(digest(sound.clone()), blake3::hash(&sound[..header]).to_hex().to_string());
    let mut data = sound.clone();
    *data.last_mut().unwrap() ^= 1;
    assert_eq!(digest(data), digest(sound.clone()));
    let mut name = sound.clone();
    let at = name.windows(3).position(|w| w == b"toy").unwrap();
    name[at] = b'T';
    assert_ne!(digest(name), digest(sound));
}

#[test]
fn adapters_projectors_and_matrices_are_refused_by_name_but_can_be_inspected() {
    for kind in ["adapter", "mmproj", "imatrix", "something-new"] {
        let set = open(&Gguf::model().text("general.type", kind)).unwrap();
        let error = set.refuse_nonmodel().unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)) && error.to_string().contains(kind), "{error}");
        assert!(Description::from_set(&set).render(true).contains(kind));
    }
    open(&Gguf::model().text("general.type", "model")).unwrap().refuse_nonmodel().unwrap();
    let clip = open(&Gguf::empty().text("general.architecture", "clip").tensor("v", 0, &[4])).unwrap();
    assert!(clip.refuse_nonmodel().unwrap_err().to_string().contains("clip"));
    assert_eq!(clip.architecture().unwrap(), "clip");
}

#[test]
fn data_in_the_header_padding_of_a_badly_split_file_is_noticed() {
    // Laid out at 32 with the key saying 64; half of all headers end where the two differ.
    let mut seen = 0;
    for pad in 0..64 {
        let file = Gguf::model().text("pad", &"x".repeat(pad)).entry("general.alignment", U32, &64u32.to_le_bytes());
        let header = file.header().len();
        // The tensors' sizes must agree with 64 for the offsets to pass: one tensor does.
        let file = Gguf { tensors: file.tensors[..1].to_vec(), ..file };
        let differ = file.header().len().next_multiple_of(32) != file.header().len().next_multiple_of(64);
        let mut bytes = file.bytes();
        bytes.resize(header + 4096, 0);
        let opened = GgufSet::from_bytes("split.gguf", bytes);
        assert_eq!(opened.is_err(), differ, "{opened:?}");
        if let Err(error) = opened {
            seen += 1;
            assert!(error.to_string().contains("general.alignment"), "{error}");
        }
    }
    assert!(seen > 16);
}
