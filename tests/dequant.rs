//! Decoders and converters against ggml's own numbers, against an independent rounding, and against each other.

#[path = "common/golden.rs"]
mod golden;

use std::path::PathBuf;

use ggshard::dequant::{Dequantizer, FloatType, Nonfinite, Simd, convert};
use ggshard::gguf::GgmlType;
use ggshard::gguf::types::TYPES;
use golden::{Golden, read_folder};
use proptest::prelude::*;

const DTYPES: [FloatType; 3] = [FloatType::F32, FloatType::BF16, FloatType::F16];

/// The repository's golden blocks, and those of the conformance corpus where `GGSHARD_CORPUS` names it.
fn goldens() -> Vec<Golden> {
    let mut goldens = read_folder(&golden::fixtures());
    if let Some(corpus) = std::env::var_os("GGSHARD_CORPUS") {
        goldens.extend(read_folder(&PathBuf::from(corpus).join("blocks")));
    }
    goldens
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn dequantizer(ty: GgmlType, simd: Simd) -> Dequantizer {
    Dequantizer::new(ty, simd).unwrap_or_else(|| panic!("{ty} has a decoder"))
}

fn decodable() -> Vec<GgmlType> {
    TYPES.iter().map(|info| info.ty).filter(|ty| Dequantizer::new(*ty, Simd::Baseline).is_some()).collect()
}

/// Bits of an `f32`, with all NaN as one.
fn class(value: f32) -> u32 {
    if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() }
}

#[track_caller]
fn assert_same(name: &str, simd: Simd, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}, {simd:?}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(class(*got), class(*want), "{name}, {simd:?}, weight {i}: {got:e} is not {want:e}");
    }
}

/// The nearest `f32`, found by comparing with the neighbours.
fn assert_nearest(value: f64, got: f32) {
    if value.is_nan() {
        assert!(got.is_nan());
    } else if got.is_infinite() {
        // Half-way between the largest f32 and 2^128; the tie goes to even, which is infinity.
        assert!(value.abs() >= 2f64.powi(128) - 2f64.powi(103), "{value:e} is not infinite");
        assert_eq!(got.is_sign_negative(), value.is_sign_negative());
    } else {
        assert_eq!(got.is_sign_negative(), value.is_sign_negative(), "{value:e}");
        let error = (got as f64 - value).abs();
        for neighbour in [got.next_up(), got.next_down()].into_iter().filter(|neighbour| neighbour.is_finite()) {
            let other = (neighbour as f64 - value).abs();
            assert!(error < other || error == other && got.to_bits() & 1 == 0, "{value:e} became {got:e}");
        }
    }
}

/// Counts by definition, and bytes by the `half` crate.
fn by_half_crate(values: &[f32], dtype: FloatType) -> (Vec<u8>, Nonfinite) {
    let mut found = Nonfinite::default();
    let mut bytes = Vec::new();
    for value in values {
        let narrow = match dtype {
            FloatType::F32 => {
                bytes.extend(value.to_le_bytes());
                *value
            }
            FloatType::BF16 => {
                let narrow = half::bf16::from_f32(*value);
                bytes.extend(narrow.to_le_bytes());
                narrow.to_f32()
            }
            FloatType::F16 => {
                let narrow = half::f16::from_f32(*value);
                bytes.extend(narrow.to_le_bytes());
                narrow.to_f32()
            }
        };
        found.nan += value.is_nan() as u64;
        found.inf += value.is_infinite() as u64;
        found.overflow += (value.is_finite() && narrow.is_infinite()) as u64;
    }
    (bytes, found)
}

/// Decoded NaN as the crate promises it: from arithmetic always the same, from a float type its own.
fn unified(ty: GgmlType, values: &[f32]) -> Vec<f32> {
    match ty {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => values.to_vec(),
        _ => values.iter().map(|value| f32::from_bits(class(*value))).collect(),
    }
}

#[test]
fn every_decoder_has_a_golden_file_with_enough_blocks() {
    let goldens = read_folder(&golden::fixtures());
    for ty in decodable() {
        for kind in ["quantized", "random_bits"] {
            let found = goldens.iter().find(|golden| golden.ty == ty && golden.name == format!("{ty}.gguf: {kind}"));
            let golden = found.unwrap_or_else(|| panic!("no golden file has a tensor '{kind}' of type {ty}"));
            // A decoder that stops after the first block must not pass.
            assert!(golden.weights / ty.block() as usize >= 3, "{}", golden.name);
        }
    }
}

#[test]
fn types_without_a_decoder_are_those_that_ggml_has_none_for() {
    use GgmlType::*;
    let none: Vec<_> = TYPES.iter().map(|info| info.ty).filter(|ty| !decodable().contains(ty)).collect();
    assert_eq!(none, [Q8_1, I8, I16, I32, I64]);
}

#[test]
fn f32_has_the_bits_that_ggml_gives() {
    for golden in goldens() {
        for simd in Simd::available() {
            let Some(dequantizer) = Dequantizer::new(golden.ty, simd) else { continue };
            assert_eq!(dequantizer.ty(), golden.ty);
            let mut got = vec![0.0; golden.weights];
            dequantizer.to_f32(&golden.blocks, &mut got);
            if golden.ty == GgmlType::F64 {
                for (bytes, got) in golden.expected.as_chunks::<8>().0.iter().zip(&got) {
                    assert_nearest(f64::from_le_bytes(*bytes), *got);
                }
            } else {
                assert_same(&golden.name, simd, &got, &f32s(&golden.expected));
            }
        }
    }
}

#[test]
fn counts_of_blocks_that_fit_no_vector_decode_alike() {
    for golden in goldens() {
        let (block, bytes) = (golden.ty.block() as usize, golden.ty.block_bytes() as usize);
        for simd in Simd::available() {
            let Some(dequantizer) = Dequantizer::new(golden.ty, simd) else { continue };
            let mut whole = vec![0.0; golden.weights];
            dequantizer.to_f32(&golden.blocks, &mut whole);
            for blocks in [0, 1, 2, 3, 5, 7].into_iter().filter(|blocks| blocks * block <= golden.weights) {
                let mut got = vec![0.0; blocks * block];
                dequantizer.to_f32(&golden.blocks[..blocks * bytes], &mut got);
                assert_same(&golden.name, simd, &got, &whole[..blocks * block]);
            }
        }
    }
}

#[test]
fn outputs_are_rounded_and_counted_as_the_half_crate_does() {
    for golden in goldens().iter().filter(|golden| golden.ty != GgmlType::F64) {
        let expected = unified(golden.ty, &f32s(&golden.expected));
        for simd in Simd::available() {
            let Some(dequantizer) = Dequantizer::new(golden.ty, simd) else { continue };
            for dtype in DTYPES {
                let (want, found) = by_half_crate(&expected, dtype);
                // One byte in front: `out` needs no alignment.
                for lead in [0, 1] {
                    let mut out = vec![0xAA; lead + golden.weights * dtype.bytes()];
                    let counted = dequantizer.decode(&golden.blocks, dtype, &mut out[lead..]);
                    assert_eq!(counted, found, "{}, {simd:?}, {dtype}", golden.name);
                    assert!(same_output(dtype, &out[lead..], &want), "{}, {simd:?}, {dtype}", golden.name);
                }
            }
        }
    }
}

/// Equal bytes; signalling NaN in the goldens of the float types may have been quieted by C.
fn same_output(dtype: FloatType, got: &[u8], want: &[u8]) -> bool {
    let quiet = |bytes: &[u8]| match dtype {
        FloatType::F32 => {
            f32s(bytes).into_iter().map(|v| v.to_bits() | if v.is_nan() { 1 << 22 } else { 0 }).collect::<Vec<_>>()
        }
        FloatType::BF16 | FloatType::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|v| u16::from_le_bytes(*v) as u32).collect()
        }
    };
    quiet(got) == quiet(want)
}

/// `f32` bit patterns at which a rounding can go wrong.
fn hard_values() -> Vec<f32> {
    let mut bits: Vec<u32> = Vec::new();
    // Around every f16 and every bf16: exact, ties, and one step beside a tie.
    for half in (0..=u16::MAX).step_by(7).chain(0x7B00..0x7D00).chain(0..0x0410).chain(0x7F00..=0x7FFF) {
        for centre in [half::f16::from_bits(half).to_f32().to_bits(), (half as u32) << 16] {
            for nudge in [0u32, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                bits.extend([centre.wrapping_add(nudge), centre.wrapping_sub(nudge)]);
            }
        }
    }
    // f16 subnormals and what rounds to zero; f32 subnormals; the overflow edges; NaN of all kinds.
    for exponent in 0..=255u32 {
        for mantissa in [0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x3F_FFFF, 0x40_0000, 0x7F_FFFF] {
            bits.extend([exponent << 23 | mantissa, 1 << 31 | exponent << 23 | mantissa]);
        }
    }
    bits.into_iter().map(f32::from_bits).collect()
}

#[test]
fn hard_values_round_as_the_half_crate_does() {
    let values = hard_values();
    for simd in Simd::available() {
        for dtype in DTYPES {
            // Alone (only the careful path sees them), in their neighbourhood, and among finite values only.
            let finite: Vec<f32> = values.iter().copied().filter(|value| value.abs() < 60000.0).collect();
            for values in [&values, &finite] {
                for length in [1, 3, 16, 37, 1024, values.len()] {
                    for chunk in values.chunks(length).step_by(1 + 4096 / length / 16) {
                        let (want, found) = by_half_crate(chunk, dtype);
                        let mut out = vec![0; want.len()];
                        assert_eq!(convert(chunk, dtype, simd, &mut out), found, "{simd:?} {dtype}");
                        assert_eq!(out, want, "{simd:?} {dtype} {chunk:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn bf16_nan_follows_ggmls_rule() {
    for simd in Simd::available() {
        for bits in [0x7F80_0001u32, 0xFF80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FA1_2345] {
            let mut out = [0; 2];
            let found = convert(&[f32::from_bits(bits)], FloatType::BF16, simd, &mut out);
            assert_eq!(found, Nonfinite { nan: 1, ..Default::default() });
            assert_eq!(u16::from_le_bytes(out), (bits >> 16) as u16 | 64);
        }
    }
}

#[test]
fn zeros_keep_their_sign_and_subnormals_their_value() {
    let values = [-0.0, 0.0, f32::from_bits(1), -f32::from_bits(0x0001_8000), 5.960_464_5e-8];
    for simd in Simd::available() {
        let mut out = [0; 10];
        convert(&values, FloatType::BF16, simd, &mut out);
        assert_eq!(out.as_chunks::<2>().0.map_to_u16(), [0x8000, 0, 0, 0x8002, 0x3380]);
        convert(&values, FloatType::F16, simd, &mut out);
        assert_eq!(out.as_chunks::<2>().0.map_to_u16(), [0x8000, 0, 0, 0x8000, 0x0001]);
    }
}

trait MapToU16 {
    fn map_to_u16(&self) -> Vec<u16>;
}

impl MapToU16 for [[u8; 2]] {
    fn map_to_u16(&self) -> Vec<u16> {
        self.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }
}

#[test]
fn all_sixteen_scales_of_a_super_block_land_on_their_own_weights() {
    // Q2_K with sub-block scales 0..16, no minimums and all codes 1: weight i is i / 16.
    let mut block = [0; 84];
    for (i, scale) in block[..16].iter_mut().enumerate() {
        *scale = i as u8;
    }
    block[16..80].fill(0b0101_0101);
    block[80..82].copy_from_slice(&half::f16::ONE.to_le_bytes());
    for simd in Simd::available() {
        let mut out = [0.0; 256];
        dequantizer(GgmlType::Q2_K, simd).to_f32(&block, &mut out);
        for (i, value) in out.iter().enumerate() {
            assert_eq!(*value, (i / 16) as f32, "weight {i}");
        }
    }
}

#[test]
fn a_level_that_the_cpu_lacks_is_replaced() {
    let available = Simd::available();
    assert_eq!(available[0], Simd::Baseline);
    assert_eq!(available.last(), Some(&Simd::detect()));
    // Runs on any machine: asking for more than there is must not crash.
    let mut out = [1.0; 32];
    dequantizer(GgmlType::Q8_0, Simd::Avx512).to_f32(&[0; 34], &mut out);
    assert_eq!(out, [0.0; 32]);
}

#[test]
#[should_panic(expected = "33 bytes are not the blocks of 32 elements of Q8_0")]
fn a_wrong_length_is_a_programming_error() {
    dequantizer(GgmlType::Q8_0, Simd::Baseline).to_f32(&[0; 33], &mut [0.0; 32]);
}

/// A type and some blocks of random bits: scales of every kind, infinite and NaN among them.
fn random_blocks() -> impl Strategy<Value = (GgmlType, Vec<u8>)> {
    (prop::sample::select(decodable()), 0usize..20).prop_flat_map(|(ty, count)| {
        // Enough blocks of any type to cross the boundaries of the 1024 weights that are converted at once.
        let count = count * (128 / ty.block() as usize).max(1);
        (Just(ty), prop::collection::vec(any::<u8>(), count * ty.block_bytes() as usize))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn levels_agree_and_blocks_are_independent((ty, blocks) in random_blocks()) {
        let (block, bytes) = (ty.block() as usize, ty.block_bytes() as usize);
        let mut single = vec![0.0; blocks.len() / bytes * block];
        let baseline = dequantizer(ty, Simd::Baseline);
        for (blocks, out) in blocks.chunks(bytes).zip(single.chunks_mut(block)) {
            baseline.to_f32(blocks, out);
        }
        let single = unified(ty, &single);
        for simd in Simd::available() {
            let dequantizer = dequantizer(ty, simd);
            let mut all = vec![0.0; single.len()];
            dequantizer.to_f32(&blocks, &mut all);
            assert_same(ty.name(), simd, &all, &single);
            for dtype in DTYPES {
                // Bytes, NaN included, are the same on every level, and equal to decoding and then converting.
                let mut want = vec![0; single.len() * dtype.bytes()];
                let want_found = convert(&single, dtype, Simd::Baseline, &mut want);
                prop_assert_eq!(want_found, by_half_crate(&single, dtype).1);
                let mut out = vec![0; want.len()];
                let found = dequantizer.decode(&blocks, dtype, &mut out);
                prop_assert_eq!(found, want_found, "{} {:?} {}", ty, simd, dtype);
                prop_assert!(out == want, "{} {:?} {}", ty, simd, dtype);
            }
        }
    }

    #[test]
    fn random_values_convert_as_the_half_crate_does(bits in prop::collection::vec(any::<u32>(), 0..2500)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for simd in Simd::available() {
            for dtype in DTYPES {
                let (want, found) = by_half_crate(&values, dtype);
                let mut out = vec![0; want.len()];
                prop_assert_eq!(convert(&values, dtype, simd, &mut out), found);
                prop_assert!(out == want, "{:?} {}", simd, dtype);
            }
        }
    }
}
