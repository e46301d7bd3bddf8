//! What encoders of the kernels must do, against those of Rust. A check panics at the first difference.

use ggshard::dequant::Simd;
use ggshard::encode::nvfp4::BlockScale;
use ggshard::encode::{fp8, nvfp4};

use crate::gguf_writer::Random;
use crate::library::Library;
use crate::samples::hard_values;

/// Values of much the same size, values of any size, and those at which a rounding can go wrong; all finite.
fn samples() -> Vec<Vec<f32>> {
    let mut random = Random(9);
    let mut uniform = move || random.next() as i32 as f32 / 2f32.powi(31);
    let plain = (0..20_000).map(|_| uniform()).collect();
    let sizes = (0..20_000).map(|i| uniform() * 2f32.powi(i / 160 - 62)).collect();
    let spread = (0..20_000).map(|i| uniform() * 2f32.powi(i % 24 - 20)).collect();
    let hard: Vec<f32> = hard_values().into_iter().filter(|value| value.is_finite()).collect();
    // Values of a size together, so that their block's scale does not make zeros of most.
    let mut sorted = hard.clone();
    sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    // Quotients with a scale of 1: what lies between codes, and beside that.
    let codes = (0..0x7E).map(|code| [fp8::value(code), fp8::value(code + 1)]);
    let middles = codes.flat_map(|[low, high]| [low, (low + high) / 2.0]);
    let mut ties: Vec<f32> = middles.flat_map(|x| [x, -x, x.next_up(), x.next_down()]).collect();
    ties.extend([448.0, -448.0]);
    vec![plain, sizes, spread, hard, sorted, ties, [0.0, -0.0, 0.0, 0.0].repeat(16), vec![f32::from_bits(1); 32]]
}

/// Bands of several shapes.
pub fn fp8_bands(library: &Library) {
    for values in samples() {
        for (rows, cols) in [(128, 156), (1, 1000), (3, 129), (1, 16)] {
            for values in values.chunks_exact(rows * cols) {
                let (mut codes, mut scales) = (vec![0; rows * cols], vec![0.0; cols.div_ceil(fp8::BLOCK)]);
                fp8::band_on(Simd::detect(), values, rows, cols, &mut codes, &mut scales);
                let got = library.fp8(values, rows, cols);
                assert_eq!(got.1, scales);
                let wrong = (0..codes.len()).find(|at| got.0[*at] != codes[*at]);
                assert_eq!(wrong, None, "{rows} x {cols}: codes differ here");
            }
        }
    }
}

/// Blocks, with the scale of their weight and with others.
pub fn nvfp4_blocks(library: &Library) {
    for values in samples() {
        let values = &values[..values.len() / 16 * 16];
        let own = nvfp4::weight_scale_2(nvfp4::amax(values));
        assert_eq!(library.scale_2(values), own);
        for part in values.chunks(512) {
            let scale = nvfp4::weight_scale_2(nvfp4::amax(part));
            assert_eq!(library.scale_2(part), scale);
            for scale_2 in [scale, own, 1.0, scale / 16.0] {
                for how in [BlockScale::Amax, BlockScale::Searched] {
                    let (mut packed, mut scales) = (vec![0; part.len() / 2], vec![0; part.len() / 16]);
                    nvfp4::rows_on(Simd::detect(), part, part.len(), scale_2, how, &mut packed, &mut scales);
                    let got = library.nvfp4(part, scale_2, how == BlockScale::Searched);
                    assert_eq!(got.1, scales, "{how:?}, weight_scale_2 {scale_2:e}");
                    assert_eq!(got.0, packed, "{how:?}, weight_scale_2 {scale_2:e}");
                }
            }
        }
    }
}
