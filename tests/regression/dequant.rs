//! Decoding quantized blocks.

use std::fs;

use ggshard::Error;
use ggshard::convert::{self, Request};
use ggshard::dequant::{Dequantizer, FloatType, Simd};
use ggshard::gguf::{GgmlType, GgufSet, types::TYPES};
use ggshard::mapping::Mapping;
use half::{bf16, f16};

use super::check::says;
use super::gguf_writer::{GgufBuilder, random_blocks};
use super::{exact, f32s, planned, small, written};

fn decode(ty: GgmlType, simd: Simd, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / ty.block_bytes() as usize * ty.block() as usize];
    Dequantizer::new(ty, simd).unwrap().to_f32(blocks, &mut out);
    out
}

/// A file of one tensor, to be taken as it is.
fn one(name: &str, ty: GgmlType, ne: &[u64], bytes: Vec<u8>) -> Vec<u8> {
    GgufBuilder::architecture("toy").tensor(name, ty, ne, bytes).build()
}

fn raw() -> Mapping {
    Mapping::load("raw").unwrap()
}

#[test]
fn d2_sixteen_scales_that_all_differ() {
    // | 16 × (scale, min) in 4 bits each | 64 × four 2-bit numbers | d | dmin |
    let scales: Vec<u8> = (0..16u8).map(|i| i | (15 - i) << 4).collect();
    let quants: Vec<u8> = (0..64u32).map(|i| (i * 73 + 19) as u8).collect();
    let (d, dmin) = (f16::from_f32(0.25), f16::from_f32(0.5));
    let block = [&scales[..], &quants, &d.to_le_bytes(), &dmin.to_le_bytes()].concat();
    let expected: Vec<f32> = (0..256)
        .map(|i| {
            let (half, shift, sixteen, lane) = (i / 128, i % 128 / 32, i % 32 / 16, i % 16);
            let scale = scales[half * 8 + shift * 2 + sixteen];
            let q = quants[half * 32 + sixteen * 16 + lane] >> (2 * shift) & 3;
            0.25 * f32::from(scale & 15) * f32::from(q) - 0.5 * f32::from(scale >> 4)
        })
        .collect();
    for simd in [Simd::Baseline, Simd::detect()] {
        assert_eq!(decode(GgmlType::Q2_K, simd, &block), expected);
    }
}

#[test]
fn d3_every_block_of_a_tensor_is_decoded() {
    let bytes = |ty: GgmlType| (ty.block(), ty.block_bytes());
    assert_eq!(
        (bytes(GgmlType::Q2_K), bytes(GgmlType::Q3_K), bytes(GgmlType::Q4_K)),
        ((256, 84), (256, 110), (256, 144))
    );
    for (ty, blocks) in [(GgmlType::Q4_K, 5), (GgmlType::Q8_0, 7), (GgmlType::Q4_0, 3)] {
        let stored = random_blocks(ty, ty.block() * blocks, 7);
        let whole = decode(ty, Simd::detect(), &stored);
        let alone: Vec<f32> =
            stored.chunks(ty.block_bytes() as usize).flat_map(|b| decode(ty, Simd::Baseline, b)).collect();
        assert_eq!(whole, alone, "{ty}");
        let (first, last) = (&whole[..ty.block() as usize], &whole[whole.len() - ty.block() as usize..]);
        assert!(first != last && last.iter().any(|x| *x != 0.0), "{ty}");
    }
}

#[test]
fn d4_an_unknown_type_is_no_f32() {
    let mut bytes = one("strange.weight", GgmlType::F32, &[64], vec![1; 256]);
    let at = bytes.windows(14).position(|w| w == b"strange.weight").unwrap() + 14 + 4 + 8;
    for id in [4u32, 31, 43, 1000] {
        bytes[at..at + 4].copy_from_slice(&id.to_le_bytes());
        says(
            &GgufSet::from_bytes("x.gguf", bytes.clone()).unwrap_err(),
            "Unsupported",
            &["'strange.weight'", &format!("type id {id}")],
        );
    }
    // A type that the format knows and nobody decodes is refused before anything is written.
    let file = one("strange.weight", GgmlType::Q8_1, &[64], vec![1; 72]);
    says(&planned(file, raw(), &Request::default()).err().unwrap(), "Unsupported", &["'strange.weight'", "Q8_1"]);
}

#[test]
fn d5_nibbles_dtype_and_names_are_what_they_are_said_to_be() {
    // Q4_0: d, then 16 bytes; the low nibbles are the first half, the high ones the second, each 8 too large.
    let block =
        [&f16::from_f32(1.0).to_le_bytes()[..], &(0..16u8).map(|i| i | (15 - i) << 4).collect::<Vec<_>>()].concat();
    let expected: Vec<f32> = (0..32).map(|i| if i < 16 { i as f32 - 8.0 } else { (31 - i) as f32 - 8.0 }).collect();
    let file = one("a.weight", GgmlType::Q4_0, &[32], block);
    let (ranks, _) = written(&planned(file.clone(), raw(), &exact("hf", 1)).unwrap()).unwrap();
    assert_eq!(f32s(&ranks[0]["a.weight"].1), expected);
    let (ranks, _) = written(&planned(file, raw(), &Request::default()).unwrap()).unwrap();
    let narrow: Vec<u8> = expected.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    assert_eq!(ranks[0]["a.weight"].1, narrow, "BF16 by default, and not half precision under its name");
    let (ranks, _) = written(&planned(small::builder().build(), small::mapping(), &exact("hf", 1)).unwrap()).unwrap();
    assert!(ranks[0].keys().all(|name| !name.contains("blk.")));
}

#[test]
fn d6_every_instruction_set_decodes_every_type() {
    for info in TYPES {
        let sets = [Simd::Baseline, Simd::Avx2, Simd::Avx512].map(|simd| Dequantizer::new(info.ty, simd).is_some());
        assert!(sets.iter().all(|there| *there == sets[0]), "{}", info.name);
    }
    // What none decodes is refused by the plan, and not in the middle of a conversion.
    let file =
        GgufBuilder::architecture("toy").f32s("a", &[4], &[0.0; 4]).tensor("z", GgmlType::Q8_1, &[32], vec![0; 36]);
    assert!(matches!(planned(file.build(), raw(), &Request::default()).err(), Some(Error::Unsupported(_))));
}

#[test]
fn d7_blocks_that_are_not_numbers() {
    let mut blocks = random_blocks(GgmlType::Q4_K, 256 * 3, 5);
    blocks[144..146].copy_from_slice(&f16::NAN.to_le_bytes());
    let planned = planned(one("bad.weight", GgmlType::Q4_K, &[256, 3], blocks), raw(), &Request::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let run = |allow_nonfinite| {
        let options = ggshard::engine::Options { allow_nonfinite, ..Default::default() };
        convert::convert(&planned, &out, options, &convert::Extras::default(), &|_| {})
    };
    says(&run(false).unwrap_err(), "Nonfinite", &["bad.weight", "256 NaN"]);
    assert!(!out.exists());
    run(true).unwrap();
    assert!(fs::read_to_string(out.join("ggshard.json")).unwrap().contains("\"nan\":256"));
}

#[test]
fn d8_a_file_named_after_one_type_that_holds_several() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model-Q8_0.gguf");
    fs::write(&path, small::builder().build()).unwrap();
    let mapping = folder.path().join("toy.toml");
    fs::write(&mapping, small::MAPPING).unwrap();
    let request = Request { mapping: Some(mapping.to_str().unwrap().into()), ..exact("hf", 1) };
    let planned = convert::plan(&path, &request, false).unwrap();
    let summary = planned.plan.summary("", false);
    let types: Vec<&str> = summary.types.iter().map(|t| t.name).collect();
    assert_eq!(types.len(), 5, "{types:?}");
    assert!(types.contains(&"Q8_0") && types.contains(&"BF16") && types.contains(&"Q4_0"), "{types:?}");
    let (ranks, _) = written(&planned).unwrap();
    for truth in small::truth(&planned.set) {
        assert_eq!(f32s(&ranks[0][&truth.name].1), truth.values, "{}", truth.name);
    }
}

#[test]
fn f1_values_beyond_half_precision() {
    let file = || {
        one(
            "norm.weight",
            GgmlType::F32,
            &[4],
            [1.0f32, 70000.0, -65504.0, 65519.0].iter().flat_map(|x| x.to_le_bytes()).collect(),
        )
    };
    let half = Request { dtype: FloatType::F16, ..Request::default() };
    let error = written(&planned(file(), raw(), &half).unwrap()).unwrap_err();
    says(&error, "Nonfinite", &["norm.weight", "1 values that overflow"]);
    // Not under the default, which has the range of F32.
    let (ranks, report) = written(&planned(file(), raw(), &Request::default()).unwrap()).unwrap();
    assert_eq!(ranks[0]["norm.weight"].1[2..4], bf16::from_f32(70000.0).to_le_bytes());
    assert!(report.nonfinite.is_empty());
}
