//! The safetensors header: the official crate reads what is written, and hostile headers are refused one by one.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use ggshard::dtype::Dtype;
use ggshard::output::safetensors::{DATA_ALIGNMENT, READ_LIMIT, SafetensorsHeader, entry_bytes, sort_wide_first};
use ggshard::{Error, Result};
use proptest::prelude::*;

fn layout(tensors: &[(&str, Dtype, &[u64])]) -> Result<SafetensorsHeader> {
    let tensors = tensors.iter().map(|&(name, dtype, shape)| (name, dtype, shape.to_vec()));
    SafetensorsHeader::layout(tensors, BTreeMap::from([("format".into(), "pt".into())]))
}

/// A file of this JSON and `data` zero bytes, as the reader sees it.
fn read(json: &str, data: usize) -> Result<SafetensorsHeader> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    read_bytes(&bytes)
}

fn read_bytes(bytes: &[u8]) -> Result<SafetensorsHeader> {
    SafetensorsHeader::read_from(&mut &bytes[..], bytes.len() as u64, Path::new("x.safetensors"))
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, with: &str) {
    let message = result.unwrap_err().to_string();
    assert!(message.contains(with), "{message}");
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn the_official_crate_reads_what_is_written() {
    let mut tensors: Vec<(&str, Dtype, &[u64])> = vec![
        ("a\"quote\\and\nline", Dtype::BF16, &[3, 5]),
        ("scalar", Dtype::F32, &[]),
        ("größe.重み", Dtype::U8, &[7]),
        ("empty", Dtype::F16, &[0, 4]),
        ("wide", Dtype::I64, &[2]),
        ("x", Dtype::F8E4M3, &[1, 1, 3]),
    ];
    sort_wide_first(&mut tensors, |t| t.1);
    let order: Vec<_> = tensors.iter().map(|t| t.0).collect();
    assert_eq!(order, ["wide", "scalar", "a\"quote\\and\nline", "empty", "größe.重み", "x"]);
    let header = layout(&tensors).unwrap();
    let mut bytes = header.to_bytes().unwrap();
    assert_eq!(bytes.len() as u64, header.header_bytes);
    assert_eq!(header.header_bytes % DATA_ALIGNMENT, 0);
    assert_eq!(bytes, header.to_bytes().unwrap());
    bytes.extend((0..header.data_bytes).map(|i| i as u8));
    assert_eq!(bytes.len() as u64, header.file_bytes());

    let official = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(official.len(), tensors.len());
    for tensor in &header.tensors {
        let view = official.tensor(&tensor.name).unwrap();
        assert_eq!(view.shape().iter().map(|&d| d as u64).collect::<Vec<_>>(), tensor.shape);
        assert_eq!(serde_json::to_value(view.dtype()).unwrap(), tensor.dtype.name());
        let (begin, end) = tensor.offsets;
        assert_eq!(view.data(), (begin..end).map(|i| i as u8).collect::<Vec<_>>());
        assert_eq!(begin % tensor.dtype.bytes(), 0);
    }
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");

    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    assert_eq!(SafetensorsHeader::read(file.path()).unwrap(), header);
}

#[test]
fn what_the_official_crate_writes_is_read() {
    let data = [1_u8; 24];
    let view = |dtype, shape: &[usize], n: usize| {
        safetensors::tensor::TensorView::new(dtype, shape.to_vec(), &data[..n]).unwrap()
    };
    let views = [("b", view(safetensors::Dtype::F32, &[2, 3], 24)), ("a", view(safetensors::Dtype::U8, &[3], 3))];
    let header = read_bytes(&safetensors::serialize(views, None).unwrap()).unwrap();
    assert_eq!(header.tensors.len(), 2);
    assert_eq!(header.data_bytes, 27);
}

#[test]
fn an_empty_file_of_tensors_is_valid() {
    let header = SafetensorsHeader::layout(Vec::<(String, Dtype, Vec<u64>)>::new(), BTreeMap::new()).unwrap();
    let bytes = header.to_bytes().unwrap();
    assert_eq!(bytes.len(), 4096);
    assert_eq!(read_bytes(&bytes).unwrap(), header);
}

#[test]
fn the_bound_of_an_entry_holds() {
    let many: Vec<_> =
        (0..50_u64).map(|i| (format!("t\n\"{i}\""), Dtype::BF16, vec![i, u64::from(u16::MAX)])).collect();
    let bound: u64 = many.iter().map(|(n, d, s)| entry_bytes(n, *d, s)).sum();
    let bytes = SafetensorsHeader::layout(many, BTreeMap::new()).unwrap().to_bytes().unwrap();
    let json = bytes[8..].trim_ascii_end().len() as u64;
    assert!(json <= bound + 2 && bound < 2 * json, "{json} {bound}");
}

#[test]
fn a_header_beyond_what_readers_take_is_not_written() {
    let name = |i: u32| format!("{i:01000}");
    let result = SafetensorsHeader::layout((0..90_000).map(|i| (name(i), Dtype::U8, vec![1])), BTreeMap::new());
    assert!(matches!(result, Err(Error::Layout(_))));
    refused(result, "--part-size");
}

#[test]
fn misaligned_order_is_not_written() {
    let result = layout(&[("a", Dtype::U8, &[3]), ("b", Dtype::F32, &[1])]);
    assert!(matches!(result, Err(Error::Audit(_))));
    refused(result, "'b'");
}

#[test]
fn reserved_empty_and_repeated_names_are_not_written() {
    refused(layout(&[("__metadata__", Dtype::U8, &[1])]), "__metadata__");
    refused(layout(&[("", Dtype::U8, &[1])]), "name");
    refused(layout(&[("x", Dtype::U8, &[1]), ("x", Dtype::U8, &[1])]), "'x'");
    refused(layout(&[("x", Dtype::U16, &[1 << 63])]), "overflows");
}

#[test]
fn header_too_small() {
    refused(read_bytes(&[]), "not a safetensors file");
    refused(read_bytes(&[0; 7]), "not a safetensors file");
    refused(read_bytes(&[0; 8]), "not a JSON object");
}

#[test]
fn header_too_large() {
    struct Endless(u64);
    impl std::io::Read for Endless {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            let field = (READ_LIMIT + 1).to_le_bytes();
            for (i, byte) in buf.iter_mut().enumerate() {
                *byte = field.get(self.0 as usize + i).copied().unwrap_or(b' ');
            }
            self.0 += buf.len() as u64;
            Ok(buf.len())
        }
    }
    let mut source = Endless(0);
    refused(SafetensorsHeader::read_from(&mut source, 1 << 40, Path::new("x")), "too large");
    assert_eq!(source.0, 8, "the header must not be read");
}

#[test]
fn length_beyond_file() {
    refused(read_bytes(b"GGUF\x03\0\0\0 and more"), "not a safetensors file");
    refused(read_bytes(&[255; 64]), "not a safetensors file");
}

#[test]
fn header_is_not_json() {
    refused(read("[]", 0), "not a JSON object");
    refused(read("{", 0), "at byte");
    refused(read("{} x", 0), "at byte 11");
    refused(read("{\"a\":\u{0}}", 0), "at byte 13");
    refused(read_bytes(b"\x04\0\0\0\0\0\0\0{\"\xff\""), "at byte");
}

#[test]
fn deep_nesting() {
    refused(read(&format!("{{\"a\":{}", "[".repeat(1_000_000)), 0), "'a'");
    refused(read(&format!("{{\"a\":{{\"x\":{}", "[".repeat(1_000_000)), 0), "'a'");
}

#[test]
fn duplicate_tensor() {
    let json = format!(r#"{{"a":{},"a":{}}}"#, entry("U8", "[1]", "[0,1]"), entry("U8", "[1]", "[1,2]"));
    refused(read(&json, 2), "two tensors");
}

#[test]
fn duplicate_metadata() {
    refused(read(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), "duplicate");
    refused(read(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0), "twice");
    refused(read(r#"{"__metadata__":{"a":1}}"#, 0), "string");
}

#[test]
fn duplicate_unknown_or_missing_field() {
    refused(read(r#"{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}"#, 1), "duplicate");
    refused(read(r#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"more":0}}"#, 1), "unknown field");
    refused(read(r#"{"a":{"dtype":"U8","shape":[]}}"#, 1), "missing field");
    refused(read(r#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1,2]}}"#, 1), "'a'");
}

#[test]
fn unknown_dtype() {
    refused(read(&format!(r#"{{"a":{}}}"#, entry("Q4_K", "[1]", "[0,1]")), 1), "Q4_K");
}

#[test]
fn negative_or_fractional_numbers() {
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[-1]", "[0,1]")), 1), "'a'");
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[1.0]", "[0,1]")), 1), "'a'");
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[1]", "[0,18446744073709551616]")), 1), "'a'");
}

#[test]
fn too_many_dimensions() {
    let shape = format!("[{}1]", "1,".repeat(64));
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", &shape, "[0,1]")), 1), "64 dimensions");
}

#[test]
fn gap_between_tensors() {
    let json = format!(r#"{{"a":{},"b":{}}}"#, entry("U8", "[1]", "[0,1]"), entry("U8", "[1]", "[2,3]"));
    refused(read(&json, 3), "gap");
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[1]", "[1,2]")), 2), "gap");
}

#[test]
fn overlap() {
    let json = format!(r#"{{"a":{},"b":{}}}"#, entry("U8", "[2]", "[0,2]"), entry("U8", "[2]", "[1,3]"));
    refused(read(&json, 3), "overlaps");
    let json = format!(r#"{{"a":{},"b":{}}}"#, entry("U8", "[2]", "[0,2]"), entry("U8", "[2]", "[0,2]"));
    refused(read(&json, 2), "overlaps");
}

#[test]
fn end_before_begin() {
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[1]", "[1,0]")), 1), "before it begins");
}

#[test]
fn shape_product_overflow() {
    let shape = "[4294967296,4294967296,2]";
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", shape, "[0,0]")), 0), "overflows");
    refused(read(&format!(r#"{{"a":{}}}"#, entry("F32", "[4611686018427387905]", "[0,4]")), 4), "overflows");
}

#[test]
fn shape_differs_from_offsets() {
    refused(read(&format!(r#"{{"a":{}}}"#, entry("F32", "[2]", "[0,7]")), 7), "8 bytes");
}

#[test]
fn truncated_data() {
    let result = read(&format!(r#"{{"a":{}}}"#, entry("U8", "[4]", "[0,4]")), 3);
    assert!(matches!(result, Err(Error::Truncated(_))));
    refused(result, "ends 1 bytes before");
}

#[test]
fn trailing_bytes() {
    refused(read(&format!(r#"{{"a":{}}}"#, entry("U8", "[4]", "[0,4]")), 5), "1 trailing bytes");
    refused(read("{}", 5), "5 trailing bytes");
}

#[test]
fn not_a_regular_file() {
    let dir = tempfile::tempdir().unwrap();
    assert!(SafetensorsHeader::read(dir.path()).is_err());
    assert!(SafetensorsHeader::read(&dir.path().join("absent")).is_err());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_bytes(&bytes);
        let mut framed = (bytes.len() as u64).to_le_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        let _ = read_bytes(&framed);
    }

    #[test]
    fn a_changed_byte_never_panics(at in 8_usize..500, to in any::<u8>()) {
        let mut bytes = layout(&[("a", Dtype::F32, &[2, 2]), ("b.c", Dtype::U8, &[3])]).unwrap().to_bytes().unwrap();
        bytes.resize(bytes.len() + 19, 7);
        bytes[at] = to;
        let ours = read_bytes(&bytes).is_ok();
        // Whatever is accepted here, the official crate accepts as well.
        prop_assert!(!ours || safetensors::SafeTensors::deserialize(&bytes).is_ok());
    }

    #[test]
    fn round_trip(
        names in prop::collection::btree_set("\\PC{1,12}", 0..20),
        shapes in prop::collection::vec((0_usize..Dtype::ALL.len(), prop::collection::vec(0_u64..6, 0..4)), 20),
    ) {
        let mut tensors: Vec<_> =
            names.into_iter().zip(shapes).map(|(name, (d, shape))| (name, Dtype::ALL[d], shape)).collect();
        sort_wide_first(&mut tensors, |t| t.1);
        let header = SafetensorsHeader::layout(tensors, BTreeMap::new()).unwrap();
        let mut bytes = header.to_bytes().unwrap();
        bytes.resize(header.file_bytes() as usize, 0);
        prop_assert_eq!(read_bytes(&bytes).unwrap(), header);
        prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
    }
}
