//! Kept blocks, decoded when they are asked for, against a conversion that decodes them.

use ggshard::convert::Request;
use ggshard::dequant::FloatType;
use ggshard::runtime::{OpenOptions, RankCheckpoint};

use super::folders::{converted_by, deepseek, glm};

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
                }
            }
        }
    }
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
