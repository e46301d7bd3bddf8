//! Throughput of encoding in few bits, per encoder and instruction set, in weights per second on one core.
//!
//! `cargo bench --bench encode -- fp8/Avx512` limits it; names are `ENCODER/LEVEL/WHAT`. Values are random, of a bell's shape,
//! as weights are; a band of 128 rows of 1024 stays in a second-level cache, as tiles do. `decode` is what every conversion
//! does before, from Q4_K to the `f32` that encoders take; `bf16` is what it does instead where the output is bf16.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use ggshard::dequant::{Dequantizer, FloatType, Simd};
use ggshard::encode::nvfp4::BlockScale;
use ggshard::encode::{fp8, nvfp4};
use ggshard::gguf::GgmlType;

const ROWS: usize = 128;
const COLS: usize = 1024;
const WEIGHTS: usize = ROWS * COLS;

/// Sums of twelve uniform numbers, less their mean.
fn values() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..WEIGHTS).map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 0.02).collect()
}

fn group<'a>(criterion: &'a mut Criterion, encoder: &str, simd: Simd) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(format!("{encoder}/{simd:?}"));
    group.throughput(Throughput::Elements(WEIGHTS as u64));
    group
}

fn encode(criterion: &mut Criterion) {
    let values = values();
    for simd in Simd::available() {
        let mut decoded = vec![0f32; WEIGHTS];
        let blocks = vec![0x35; WEIGHTS / 256 * 144];
        let dequantizer = Dequantizer::new(GgmlType::Q4_K, simd).expect("Q4_K has a decoder");
        let mut source = group(criterion, "source", simd);
        source.bench_function("decode", |bencher| {
            bencher.iter(|| dequantizer.to_f32(black_box(&blocks), black_box(&mut decoded)))
        });
        let mut halves = vec![0; 2 * WEIGHTS];
        source.bench_function("bf16", |bencher| {
            bencher.iter(|| dequantizer.decode(black_box(&blocks), FloatType::BF16, black_box(&mut halves)))
        });
        source.finish();

        let (mut codes, mut scales) = (vec![0; WEIGHTS], vec![0.0; COLS / fp8::BLOCK]);
        let mut fp8 = group(criterion, "fp8", simd);
        fp8.bench_function("encode", |bencher| {
            bencher.iter(|| fp8::band_on(simd, black_box(&values), ROWS, COLS, black_box(&mut codes), &mut scales))
        });
        fp8.bench_function("deviation", |bencher| {
            bencher.iter(|| fp8::deviation_on(simd, black_box(&values), ROWS, COLS, black_box(&codes), &scales))
        });
        fp8.finish();

        let (mut packed, mut scales) = (vec![0; WEIGHTS / 2], vec![0; WEIGHTS / nvfp4::BLOCK]);
        let scale = nvfp4::weight_scale_2(nvfp4::amax(&values));
        let mut nvfp4 = group(criterion, "nvfp4", simd);
        nvfp4.bench_function("amax", |bencher| bencher.iter(|| nvfp4::amax_on(simd, black_box(&values))));
        for (name, how) in [("encode", BlockScale::Amax), ("search", BlockScale::Searched)] {
            nvfp4.bench_function(name, |bencher| {
                bencher.iter(|| {
                    nvfp4::rows_on(simd, black_box(&values), COLS, scale, how, black_box(&mut packed), &mut scales)
                })
            });
        }
        nvfp4.bench_function("deviation", |bencher| {
            bencher.iter(|| nvfp4::deviation_on(simd, black_box(&values), COLS, scale, black_box(&packed), &scales))
        });
        nvfp4.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .without_plots();
    targets = encode
}
criterion_main!(benches);
