//! Throughput of decoding, per type, output type and instruction set, in weights per second on one core.
//!
//! `cargo bench --bench dequant -- BF16/Avx512` limits it; names are `DTYPE/LEVEL/TYPE`. The input is real blocks (golden
//! files, repeated), the output a buffer of 256 Ki weights that stays in the L2 cache, as tiles do.

#[path = "../tests/common/golden.rs"]
mod golden;

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ggshard::dequant::{Dequantizer, FloatType, Simd};

const WEIGHTS: usize = 256 << 10;

fn decode(criterion: &mut Criterion) {
    let goldens = golden::read_folder(&golden::fixtures());
    for dtype in [FloatType::BF16, FloatType::F16, FloatType::F32] {
        for simd in Simd::available() {
            let mut group = criterion.benchmark_group(format!("{dtype}/{simd:?}"));
            group.throughput(Throughput::Elements(WEIGHTS as u64));
            let mut out = vec![0f32; WEIGHTS];
            let out = &mut bytemuck::cast_slice_mut(&mut out)[..WEIGHTS * dtype.bytes()];
            for golden in goldens.iter().filter(|golden| golden.name.ends_with("gguf: quantized")) {
                let Some(dequantizer) = Dequantizer::new(golden.ty, simd) else { continue };
                let size = WEIGHTS / golden.ty.block() as usize * golden.ty.block_bytes() as usize;
                let blocks: Vec<u8> = golden.blocks.iter().copied().cycle().take(size).collect();
                group.bench_function(golden.ty.name(), |bencher| {
                    bencher.iter(|| dequantizer.decode(black_box(&blocks), dtype, black_box(out)))
                });
            }
            group.finish();
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .without_plots();
    targets = decode
}
criterion_main!(benches);
