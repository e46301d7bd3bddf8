//! Kept blocks, decoded when they are asked for, against a conversion that decodes them.

use ggshard::convert::Request;
use ggshard::dequant::FloatType;
use ggshard::error::Error;
use ggshard::gguf::GgmlType;
use ggshard::runtime::{DecodeOptions, DecodedBytes, OpenOptions, RankCheckpoint};

use super::folders::{converted_by, deepseek, edit_tensor, glm};
use super::gguf_writer::GgufBuilder;

#[test]
fn kept_blocks_decode_to_what_a_conversion_writes() {
    for (source, most) in [(deepseek(), 4), (glm(), 4)] {
        for tp in [1, 2, most] {
            for dtype in [FloatType::BF16, FloatType::F32] {
                let plain = Request { tp, dtype, ..Request::default() };
                let kept = Request { policy: Some("keep".into()), keep_or: Some(dtype), ..plain.clone() };
                let (plain, kept) = (converted_by(&source, &plain), converted_by(&source, &kept));
                for rank in 0..tp {
                    let open = |folder: &tempfile::TempDir| {
                        RankCheckpoint::open(folder.path(), rank, OpenOptions::default()).unwrap()
                    };
                    let (plain, kept) = (open(&plain), open(&kept));
                    assert_eq!(plain.len(), kept.len());
                    let mut decoded = 0;
                    for tensor in kept.iter() {
                        let Some(blocks) = kept.blocks(tensor.name) else {
                            assert_eq!(Some(tensor), plain.get(tensor.name));
                            continue;
                        };
                        decoded += 1;
                        let expected = plain.get(&blocks.weight).unwrap();
                        assert_eq!(blocks.shape, expected.shape, "{}", tensor.name);
                        assert!(kept.decode(tensor.name, dtype).unwrap() == expected.bytes, "{} {rank}", tensor.name);
                    }
                    assert!(decoded > 20, "{decoded}");
                    rank_is(&kept, &plain, dtype);
                }
            }
        }
    }
}

/// A rank decoded on the way is another one, tensor by tensor and in its order; what was no block is not copied.
fn rank_is(kept: &RankCheckpoint, plain: &RankCheckpoint, dtype: FloatType) {
    let mut decoded = kept.decoded(dtype);
    for (expected, name) in plain.iter().zip(kept.names()) {
        assert_eq!(decoded.remaining(), plain.len() - kept.names().position(|other| other == name).unwrap());
        let tensor = decoded.next().unwrap().unwrap();
        assert_eq!((&*tensor.name, tensor.dtype, &*tensor.shape), (expected.name, expected.dtype, expected.shape));
        assert!(*tensor.bytes == *expected.bytes, "{name}");
        match tensor.bytes {
            DecodedBytes::Mapped(shared) => {
                assert_eq!(shared.as_bytes().as_ptr(), kept.get(name).unwrap().bytes.as_ptr())
            }
            DecodedBytes::Decoded(_) => assert_ne!(tensor.name, name),
        }
    }
    assert!(decoded.next().is_none() && decoded.nonfinite().is_empty());
}

#[test]
fn many_threads_decode_a_tensor_of_many_pieces() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let file = GgufBuilder::architecture("large").random("0.weight", GgmlType::Q4_K, &[4096, 1500], 7);
    std::fs::write(&path, file.build()).unwrap();
    let raw = Request { mapping: Some("raw".into()), ..Request::default() };
    let (plain, kept) = (converted_by(&path, &raw), converted_by(&path, &raw.typed("keep", None).unwrap()));
    for threads in [1, 2, 16] {
        let open = |folder: &tempfile::TempDir| {
            RankCheckpoint::open(folder.path(), 0, OpenOptions { threads, ..OpenOptions::default() }).unwrap()
        };
        rank_is(&open(&kept), &open(&plain), FloatType::BF16);
    }
}

#[test]
fn values_that_are_not_finite_are_refused_unless_allowed() {
    let folder = converted_by(&deepseek(), &Request { policy: Some("keep".into()), ..Request::default() });
    let open = || RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    let is_q4 = |name: &&str| open().blocks(name).is_some_and(|blocks| blocks.ty == GgmlType::Q4_K);
    let name = open().names().find(is_q4).unwrap().to_owned();
    // The scale of the second block, in half precision, becomes a NaN: 256 values are.
    edit_tensor(folder.path(), &name, 0, |bytes| bytes[144..146].copy_from_slice(&0x7E00_u16.to_le_bytes()));
    let open = open();
    let weight = open.blocks(&name).unwrap().weight;
    let before = open.names().position(|other| other == name).unwrap();
    let error = open.decode(&name, FloatType::BF16).unwrap_err();
    let mut decoded = open.decoded(FloatType::BF16);
    assert_eq!(decoded.by_ref().take_while(Result::is_ok).count(), before);
    assert!(decoded.next().is_none() && decoded.remaining() == 0);
    for error in [error, open.decoded(FloatType::BF16).nth(before).unwrap().unwrap_err()] {
        assert!(matches!(error, Error::Nonfinite(_)), "{error}");
        for part in [&*weight, "Q4_K", "256 NaN", "allow_nonfinite"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    let options = DecodeOptions { dtype: FloatType::BF16, allow_nonfinite: true };
    assert!(open.decode(&name, options).is_ok());
    let mut decoded = open.decoded(options);
    assert_eq!(decoded.by_ref().filter(Result::is_ok).count(), open.len());
    assert_eq!(decoded.nonfinite().iter().map(|(name, found)| (name, found.nan)).collect::<Vec<_>>(), [(&weight, 256)]);
}

#[test]
fn what_is_no_block_is_not_decoded() {
    let folder = converted_by(&glm(), &Request { policy: Some("keep".into()), ..Request::default() });
    let open = RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    for name in ["model.norm.weight", "no.such"] {
        assert_eq!(open.blocks(name), None);
        let error = open.decode(name, FloatType::BF16).unwrap_err().to_string();
        assert!(error.contains("no such blocks") && error.contains(name), "{error}");
    }
    let (name, blocks) = open.names().find_map(|name| Some((name, open.blocks(name)?))).unwrap();
    let mut short = vec![0; blocks.decoded_bytes(FloatType::F16) - 1];
    assert!(open.decode_to(name, FloatType::F16, &mut short).unwrap_err().to_string().contains("bytes of memory"));
}
