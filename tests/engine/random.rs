//! Random small files.

use ggshard::gguf::GgmlType;
use proptest::prelude::*;

use super::*;
use gguf_writer::{GgufBuilder, Random};

const TYPES: [GgmlType; 6] =
    [GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q8_0, GgmlType::Q4_0, GgmlType::Q4_K];

/// Heads, head size, width, and everything else of a model by numbers: a q that is un-permuted, k and v heads that
/// interleave, an output that is cut by columns, a stack of experts with scales, and a vocabulary.
pub fn model(random: &mut Random) -> (GgufBuilder, Mapping, Vec<u64>) {
    let mut pick = |list: &[u64]| list[random.below(list.len() as u64) as usize];
    let (heads, head, experts, vocab) =
        (pick(&[1, 2, 4, 8]), pick(&[2, 4, 6, 64]), pick(&[1, 3]), pick(&[1, 63, 130, 256]));
    let width = pick(&[32, 96, 256, 512]);
    let mut ty = |row: u64| {
        let fitting: Vec<GgmlType> = TYPES.into_iter().filter(|t| row.is_multiple_of(t.block())).collect();
        fitting[pick(&[0, 1, 2, 3, 4, 5]) as usize % fitting.len()]
    };
    let rows = heads * head;
    let types = [ty(width), ty(head), ty(width), ty(rows), ty(width), ty(width)];
    let seed = random.next() >> 8;
    let file = GgufBuilder::architecture("random")
        .random("q.weight", types[0], &[width, rows], seed)
        .random("k_b.weight", types[1], &[head, width, heads], seed + 1)
        .random("v_b.weight", types[2], &[width, head, heads], seed + 2)
        .random("o.weight", types[3], &[rows, 5], seed + 3)
        .random("exps.weight", types[4], &[width, 8, experts], seed + 4)
        .random("exps.scale", GgmlType::F32, &[experts], seed + 5)
        .random("embd.weight", types[5], &[width, vocab], seed + 6);
    let text = format!(
        r#"
name = "random"
extends = "common"
[loops]
expert = {experts}
[[weight]]
name = "q"
shape = [{rows}, {width}]
cut = {{ column = {heads} }}
from = {{ gguf = "q.weight", unpermute = {heads} }}
[[weight]]
name = "kv"
shape = [{}, {width}]
cut = {{ column = {heads} }}
from = {{ per = {heads}, parts = [
  {{ gguf = "k_b.weight", shape = [{heads}, {width}, {head}], transpose = true }},
  {{ gguf = "v_b.weight", shape = [{heads}, {head}, {width}] }},
] }}
[[weight]]
name = "o"
shape = [5, {rows}]
cut = {{ row = {heads} }}
from = {{ gguf = "o.weight" }}
[[weight]]
name = "e.{{expert}}"
shape = [8, {width}]
cut = "column"
from = {{ gguf = "exps.weight", unstack = "expert", add = 0.5 }}
[[weight]]
name = "embd"
shape = [{vocab}, {width}]
cut = "vocab"
from = {{ gguf = "embd.weight" }}
"#,
        2 * rows
    );
    (file, Mapping::from_texts(&[text]).unwrap(), vec![heads, head, width, experts, vocab])
}

pub fn model_truth(set: &GgufSet, sizes: &[u64]) -> Vec<Truth> {
    use truth::{Shared::*, decode};
    let [heads, head, width, experts, vocab] = std::array::from_fn(|i| sizes[i] as usize);
    let rows = heads * head;
    let (q, k, v) = (decode(set, "q.weight"), decode(set, "k_b.weight"), decode(set, "v_b.weight"));
    let stored = |row: usize| row / head * head + 2 * (row % (head / 2)) + row % head / (head / 2);
    let q = (0..rows * width).map(|at| q[stored(at / width) * width + at % width]).collect();
    let kv = (0..2 * rows * width).map(|at| {
        let (row, col) = (at / width, at % width);
        let (h, inside) = (row / (2 * head), row % (2 * head));
        if inside < head { k[(h * width + col) * head + inside] } else { v[(h * head + inside - head) * width + col] }
    });
    let mut out = vec![
        Truth::new("q", &[rows, width], Heads(heads), q),
        Truth::new("kv", &[2 * rows, width], Heads(heads), kv.collect()),
        Truth::new("o", &[5, rows], Row, decode(set, "o.weight")),
        Truth::new("embd", &[vocab, width], Vocab, decode(set, "embd.weight")),
    ];
    let scales = decode(set, "exps.scale");
    for (e, values) in decode(set, "exps.weight").chunks(8 * width).enumerate().take(experts) {
        let values = values.iter().map(|v| v * scales[e] + 0.5).collect();
        out.push(Truth::new(format!("e.{e}"), &[8, width], Column, values));
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn models_convert_to_their_truth(seed: u64, threads in 1usize..8, tile in 0u32..27, dtype in 0usize..3) {
        let (file, mapping, sizes) = model(&mut Random(seed));
        let (dtype, name) = [(FloatType::BF16, "bf16"), (FloatType::F16, "f16"), (FloatType::F32, "f32")][dtype];
        for tp in [1, 2, 4, 8].into_iter().filter(|tp| sizes[0] % u64::from(*tp) == 0) {
            let set = GgufSet::from_bytes("random.gguf", file.build()).unwrap();
            let truths = model_truth(&set, &sizes);
            let planned = planned(set, &mapping, tp, dtype);
            let (files, report) = folder(&planned, Options { track_reads: true, ..options(threads, 1 << tile) });
            compare(&files, &truths, tp as usize, name);
            prop_assert_eq!(report.repeated_bytes, Some(0), "tp {}, {:?}", tp, sizes);
        }
    }

    #[test]
    fn any_file_converts_under_raw(seed: u64, threads in 1usize..8, tile in 0u32..27, tp in 1u32..4) {
        let mut random = Random(seed);
        let mut file = GgufBuilder::architecture("whatever");
        let count = random.below(6) + 1;
        for i in 0..count {
            let ty = [GgmlType::I32, TYPES[random.below(6) as usize]][usize::from(random.below(4) > 0)];
            let mut ne = vec![ty.block() * (1 + random.below(5))];
            // Now and then an axis of nothing.
            ne.extend((0..random.below(3)).map(|_| random.below(9)));
            file = file.random(&format!("tensor {i}"), ty, &ne, seed ^ i);
        }
        let set = GgufSet::from_bytes("raw.gguf", file.build()).unwrap();
        let planned = planned(set, &Mapping::load("raw").unwrap(), tp, FloatType::BF16);
        let (slices, outcome) = run(&planned, Options { track_reads: true, ..options(threads, 1 << tile) });
        prop_assert_eq!(outcome.reads.repeated(), Some(0));
        for (index, tensor) in file.tensors.iter().enumerate() {
            let wanted = match tensor.ty {
                GgmlType::I32 => tensor.bytes.clone(),
                _ => truth::bytes(&truth::decode(&planned.set, &tensor.name), "bf16"),
            };
            for rank in 0..tp as usize {
                prop_assert!(slices.of(index, rank) == wanted, "{}", tensor.name);
            }
        }
        let (files, _) = folder(&planned, options(threads, 1 << tile));
        for (_, bytes) in files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            safetensors::SafeTensors::deserialize(bytes).unwrap();
        }
    }
}
