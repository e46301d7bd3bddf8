//! Encoders against numbers of an independent implementation (`tests/python/make_encode_fixtures.py`), against each other on
//! every instruction set, and against what they promise.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;

use std::path::{Path, PathBuf};

use ggshard::dequant::{Dequantizer, Simd};
use ggshard::encode::nvfp4::{self, BlockScale};
use ggshard::encode::{Deviation, fp8};
use ggshard::gguf::GgufSet;
use gguf_writer::Random;
use safetensors::SafeTensors;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A file of cases.
struct Cases(Vec<u8>);

impl Cases {
    fn read(file: &str) -> Cases {
        Cases(std::fs::read(fixtures().join("encode").join(file)).unwrap())
    }

    fn names(&self, marked: &str) -> Vec<String> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let names = tensors.names().into_iter().filter_map(|name| name.strip_suffix(marked)).map(str::to_owned);
        names.collect()
    }

    /// Shape and bytes of a tensor.
    fn tensor(&self, name: &str) -> Option<(Vec<usize>, Vec<u8>)> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.tensor(name).ok().map(|tensor| (tensor.shape().to_vec(), tensor.data().to_vec()))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.tensor(name).unwrap_or_else(|| panic!("{name} is missing")).1
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// The values of a case of so many rows and columns: those stored, or the upper left of a weight of the model.
    fn values(&self, case: &str, rows: usize, cols: usize) -> Vec<f32> {
        let stored = format!("{case}.values");
        if self.tensor(&stored).is_some() {
            return self.f32s(&stored);
        }
        let set = GgufSet::open(fixtures().join("models/glm_moe_dsa-UD-IQ2_XXS.gguf")).unwrap();
        let index = set.find(case).unwrap_or_else(|| panic!("the model has no {case}"));
        let tensor = &set.tensors()[index];
        let mut all = vec![0.0; tensor.elements() as usize];
        Dequantizer::new(tensor.ty, Simd::detect()).unwrap().to_f32(&set.data(index).unwrap(), &mut all);
        all.chunks(tensor.row_elements() as usize).take(rows).flat_map(|row| &row[..cols]).copied().collect()
    }

    #[track_caller]
    fn check_figures(&self, case: &str, found: Deviation) {
        let want: Vec<f64> = self
            .bytes(&format!("{case}.figures"))
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f64::from_le_bytes(*bytes))
            .collect();
        let rms = found.relative_rms();
        assert!((rms - want[0]).abs() <= 1e-12 * want[0], "{case}: {rms:e} is not {:e}", want[0]);
        // Theirs is a difference in f64.
        let largest = found.largest_error() as f64;
        assert!((largest - want[1]).abs() <= 1e-7 * want[1], "{case}: {largest:e} is not {:e}", want[1]);
    }
}

#[track_caller]
fn assert_same<T: PartialEq + std::fmt::Debug>(case: &str, simd: Simd, got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len(), "{case}, {simd:?}");
    if let Some(at) = (0..got.len()).find(|at| got[*at] != want[*at]) {
        panic!("{case}, {simd:?}, element {at}: {:?} is not {:?}", got[at], want[at]);
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

struct Fp8 {
    codes: Vec<u8>,
    scales: Vec<f32>,
    deviation: Deviation,
}

fn to_fp8(simd: Simd, values: &[f32], rows: usize, cols: usize) -> Fp8 {
    let (mut codes, mut scales) = (vec![0xAA; values.len()], vec![-1.0; cols.div_ceil(fp8::BLOCK)]);
    fp8::band_on(simd, values, rows, cols, &mut codes, &mut scales);
    let deviation = fp8::deviation_on(simd, values, rows, cols, &codes, &scales);
    Fp8 { codes, scales, deviation }
}

struct Nvfp4 {
    packed: Vec<u8>,
    scales: Vec<u8>,
    deviation: Deviation,
}

fn to_nvfp4(simd: Simd, values: &[f32], cols: usize, scale_2: f32, how: BlockScale) -> Nvfp4 {
    let (mut packed, mut scales) = (vec![0xAA; values.len() / 2], vec![0xAA; values.len() / nvfp4::BLOCK]);
    nvfp4::rows_on(simd, values, cols, scale_2, how, &mut packed, &mut scales);
    let deviation = nvfp4::deviation_on(simd, values, cols, scale_2, &packed, &scales);
    Nvfp4 { packed, scales, deviation }
}

#[test]
fn fp8_is_what_an_independent_encoder_gives() {
    let cases = Cases::read("fp8.safetensors");
    let names = cases.names(".codes");
    assert_eq!(names.len(), 10);
    for case in names {
        let (shape, codes) = cases.tensor(&format!("{case}.codes")).unwrap();
        let values = cases.values(&case, shape[0], shape[1]);
        for simd in Simd::available() {
            let found = to_fp8(simd, &values, shape[0], shape[1]);
            assert_same(&case, simd, &bits(&found.scales), &bits(&cases.f32s(&format!("{case}.scales"))));
            assert_same(&case, simd, &found.codes, &codes);
            cases.check_figures(&case, found.deviation);
        }
    }
}

#[test]
fn nvfp4_is_what_an_independent_encoder_gives() {
    let cases = Cases::read("nvfp4.safetensors");
    let names = cases.names(".codes");
    assert_eq!(names.len(), 22);
    for case in names {
        let (source, how) = match case.strip_suffix(".searched") {
            Some(source) => (source, BlockScale::Searched),
            None => (case.as_str(), BlockScale::Amax),
        };
        let (shape, codes) = cases.tensor(&format!("{case}.codes")).unwrap();
        let values = cases.values(source, shape[0], 2 * shape[1]);
        let scale_2 = cases.f32s(&format!("{case}.scale_2"))[0];
        if !["ties", "scale ties", "shared", "cut off"].contains(&source) {
            assert_eq!(nvfp4::weight_scale_2(nvfp4::amax(&values)), scale_2, "{case}");
        }
        for simd in Simd::available() {
            let found = to_nvfp4(simd, &values, 2 * shape[1], scale_2, how);
            assert_same(&case, simd, &found.scales, &cases.bytes(&format!("{case}.scales")));
            assert_same(&case, simd, &found.packed, &codes);
            cases.check_figures(&case, found.deviation);
        }
    }
}

#[test]
fn every_code_has_its_value() {
    // NaN as one.
    let class = |x: &f32| if x.is_nan() { 0 } else { x.to_bits() };
    let classes = |values: &[f32]| values.iter().map(class).collect::<Vec<_>>();
    let e4m3 = classes(&Cases::read("fp8.safetensors").f32s("all codes"));
    assert_eq!(classes(&(0..=255).map(fp8::value).collect::<Vec<_>>()), e4m3);
    assert_eq!(classes(&(0..=255).map(nvfp4::scale_value).collect::<Vec<_>>()), e4m3);
    let e2m1 = classes(&Cases::read("nvfp4.safetensors").f32s("all codes"));
    assert_eq!(classes(&(0..16).map(nvfp4::value).collect::<Vec<_>>()), e2m1);
    assert_eq!(nvfp4::value(0x5A), nvfp4::value(0x0A), "the high bits are of the other value");
}

/// Sums of twelve uniform numbers, less their mean.
fn bell(random: &mut Random) -> f32 {
    (0..12).map(|_| random.below(1 << 24) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
}

/// Any finite bits, half of them of much the same size.
fn wild(random: &mut Random) -> f32 {
    match random.below(4) {
        0 => f32::from_bits(random.next() as u32 & 0xBFFF_FFFF),
        1 => [0.0, -0.0, 1.0, f32::MIN_POSITIVE, f32::from_bits(3), -448.0][random.below(6) as usize],
        _ => bell(random),
    }
}

#[test]
fn instruction_sets_agree_on_any_bits() {
    let mut random = Random(5);
    for case in 0..200 {
        let (rows, cols) = (1 + random.below(128) as usize, 16 * (1 + random.below(24) as usize));
        let cols = if case % 3 == 0 { cols + random.below(16) as usize } else { cols };
        let values: Vec<f32> = (0..rows * cols).map(|_| if case % 2 == 0 { wild } else { bell }(&mut random)).collect();
        let first = to_fp8(Simd::Baseline, &values, rows, cols);
        for simd in Simd::available() {
            let other = to_fp8(simd, &values, rows, cols);
            assert_same("fp8", simd, &other.codes, &first.codes);
            assert_same("fp8", simd, &bits(&other.scales), &bits(&first.scales));
            assert_eq!(other.deviation, first.deviation, "{simd:?}");
        }
        if !cols.is_multiple_of(nvfp4::BLOCK) {
            continue;
        }
        let amax = nvfp4::amax_on(Simd::Baseline, &values);
        let scale_2 = nvfp4::weight_scale_2(amax);
        for how in [BlockScale::Amax, BlockScale::Searched] {
            let first = to_nvfp4(Simd::Baseline, &values, cols, scale_2, how);
            for simd in Simd::available() {
                assert_eq!(nvfp4::amax_on(simd, &values).to_bits(), amax.to_bits());
                let other = to_nvfp4(simd, &values, cols, scale_2, how);
                assert_same("nvfp4", simd, &other.packed, &first.packed);
                assert_same("nvfp4", simd, &other.scales, &first.scales);
                assert_eq!(other.deviation, first.deviation, "{simd:?}");
            }
        }
    }
}

#[test]
fn no_bits_make_an_encoder_panic() {
    let mut random = Random(6);
    let values: Vec<f32> = (0..64 * 256).map(|_| f32::from_bits(random.next() as u32)).collect();
    let scale_2 = nvfp4::weight_scale_2(nvfp4::amax(&values));
    for simd in Simd::available() {
        to_fp8(simd, &values, 64, 256);
        for scale_2 in [scale_2, 1.0, f32::MAX, f32::INFINITY, 0.0] {
            to_nvfp4(simd, &values, 256, scale_2, BlockScale::Amax);
            to_nvfp4(simd, &values, 256, scale_2, BlockScale::Searched);
        }
    }
}

/// Squared error of every block, in f64, from the formulas of the format.
fn squared_errors(values: &[f32], scale_2: f32, found: &Nvfp4) -> Vec<f64> {
    let blocks = values.chunks(nvfp4::BLOCK).zip(found.packed.chunks(nvfp4::BLOCK / 2)).zip(&found.scales);
    let errors = blocks.map(|((values, packed), scale)| {
        let codes = packed.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        let step = nvfp4::scale_value(*scale) * scale_2;
        values.iter().zip(codes).map(|(value, code)| (*value as f64 - (nvfp4::value(code) * step) as f64).powi(2)).sum()
    });
    errors.collect()
}

#[test]
fn a_search_is_never_worse_in_any_block() {
    let mut random = Random(7);
    let mut samples: Vec<Vec<f32>> = vec![
        (0..1 << 17).map(|_| bell(&mut random) * 0.02).collect(),
        (0..1 << 15).map(|_| wild(&mut random).clamp(-8.0, 8.0)).collect(),
        (0..1 << 15).map(|_| bell(&mut random) * 2f32.powi(random.below(20) as i32)).collect(),
        // Weights that were quantized before, to four bits.
        (0..1 << 15).map(|_| (bell(&mut random) * 3.0).round().clamp(-8.0, 7.0) * 0.01).collect(),
    ];
    let cases = Cases::read("nvfp4.safetensors");
    samples.extend(["blk.0.attn_output.weight", "output.weight"].map(|case| cases.values(case, 256, 256)));
    for (i, values) in samples.iter().enumerate() {
        let scale_2 = nvfp4::weight_scale_2(nvfp4::amax(values));
        let [plain, searched] =
            [BlockScale::Amax, BlockScale::Searched].map(|how| to_nvfp4(Simd::detect(), values, 16, scale_2, how));
        let errors = [&plain, &searched].map(|found| squared_errors(values, scale_2, found));
        for (block, (plain, searched)) in errors[0].iter().zip(&errors[1]).enumerate() {
            assert!(searched <= plain, "sample {i}, block {block}: {searched:e} after {plain:e}");
        }
        let ratio = searched.deviation.squared_error() / plain.deviation.squared_error();
        let [before, after] = [&plain, &searched].map(|found| found.deviation.relative_rms());
        println!("sample {i}: relative RMS {before:.5}, with search {after:.5}; squared error x {ratio:.4}");
        assert!(ratio < if i == 0 { 0.8 } else { 1.0 }, "sample {i}: the search brings too little, {ratio}");
    }
}

#[test]
fn a_deviation_does_not_depend_on_how_a_weight_is_cut() {
    let (rows, cols) = (128, 128 * 3);
    let mut random = Random(8);
    let values: Vec<f32> = (0..rows * cols).map(|_| wild(&mut random)).collect();
    let part =
        |from: usize, to: usize| values.chunks(cols).flat_map(|row| &row[from..to]).copied().collect::<Vec<f32>>();
    let whole = to_fp8(Simd::detect(), &values, rows, cols).deviation;
    let mut parts = to_fp8(Simd::detect(), &part(256, 384), rows, 128).deviation;
    parts += to_fp8(Simd::detect(), &part(0, 256), rows, 256).deviation;
    assert_eq!(parts, whole);

    let scale_2 = nvfp4::weight_scale_2(nvfp4::amax(&values));
    let encode = |values: &[f32], cols| to_nvfp4(Simd::detect(), values, cols, scale_2, BlockScale::Amax).deviation;
    let whole = encode(&values, cols);
    let mut parts = Deviation::default();
    for (from, to) in [(368, 384), (0, 48), (48, 368)] {
        // Rows in any order, too.
        for half in part(from, to).chunks(64 * (to - from)).rev() {
            parts += encode(half, to - from);
        }
    }
    assert_eq!(parts, whole);
}
