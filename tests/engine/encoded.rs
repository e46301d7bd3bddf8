//! Random small models by random policies, next to an encoder that looks at one element at a time.

use ggshard::mapping::{MtpPolicy, OutputPolicy, Profile, resolve};
use ggshard::plan::PlanRequest;
use proptest::prelude::*;

use super::random::{model, model_truth};
use super::*;
use gguf_writer::Random;

/// The form that a policy gives a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Given {
    Float,
    Fp8,
    Nvfp4,
}

/// Non-negative numbers of E2M1 or E4M3, by code.
fn numbers(exponent: u32, mantissa: u32, count: u32) -> Vec<f64> {
    let bias = (1 << (exponent - 1)) - 1;
    let number = |code: u32| {
        let (high, low) = ((code >> mantissa) as i32, f64::from(code & ((1 << mantissa) - 1)));
        let fraction = low / f64::from(1 << mantissa);
        if high == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(high - bias) }
    };
    (0..count).map(number).collect()
}

/// The code of the nearest number, of two equally near ones the even one; beyond the last, the last.
fn nearest(numbers: &[f64], value: f32) -> u8 {
    let distance = |code: &usize| (numbers[*code] - f64::from(value.abs())).abs();
    let order = |a: &usize, b: &usize| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    (0..numbers.len()).min_by(order).unwrap() as u8
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The tensors of a weight's slice, by suffix: dtype, shape, bytes. `whole` is all of the weight.
fn nvfp4(shape: &[usize], values: &[f32], whole: &[f32]) -> Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)> {
    let (e2m1, e4m3) = (numbers(2, 1, 8), numbers(4, 3, 127));
    let amax = largest(whole.iter().copied());
    let scale_2 = if amax == 0.0 { 1.0 } else { amax / 2688.0 };
    let (mut nibbles, mut scales) = (Vec::new(), Vec::new());
    for block in values.chunks(16) {
        let ratio = largest(block.iter().copied()) / (6.0 * scale_2);
        let code = if ratio == 0.0 { 0x38 } else { nearest(&e4m3, ratio).max(1) };
        let step = e4m3[usize::from(code)] as f32 * scale_2;
        scales.push(code);
        nibbles.extend(block.iter().map(|v| nearest(&e2m1, v / step) | u8::from(v.is_sign_negative()) << 3));
    }
    let packed = nibbles.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
    vec![
        ("", "u8", vec![shape[0], shape[1] / 2], packed),
        ("_scale", "f8_e4m3", vec![shape[0], shape[1] / 16], scales),
        ("_scale_2", "f32", vec![], scale_2.to_le_bytes().to_vec()),
    ]
}

/// The same in fp8; `mixed`: beside nvfp4.
fn fp8(shape: &[usize], values: &[f32], mixed: bool) -> Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)> {
    let (e4m3, (rows, cols)) = (numbers(4, 3, 127), (shape[0], shape[1]));
    let (bands, blocks) = (rows.div_ceil(128), cols.div_ceil(128));
    let within = |at: usize| (at / cols / 128) * blocks + at % cols / 128;
    let mut amax = vec![0f32; bands * blocks];
    values.iter().enumerate().for_each(|(at, value)| amax[within(at)] = amax[within(at)].max(value.abs()));
    let scales: Vec<f32> =
        amax.iter().map(|a| if *a == 0.0 { 1.0 } else { (a / 448.0).max(f32::MIN_POSITIVE) }).collect();
    let code = |(at, value): (usize, &f32)| {
        nearest(&e4m3, value / scales[within(at)]) | u8::from(value.is_sign_negative()) << 7
    };
    let (suffix, axes) =
        if mixed { ("_scale", vec![bands, 1, blocks, 1]) } else { ("_scale_inv", vec![bands, blocks]) };
    let scales = truth::bytes(&scales, "f32");
    vec![("", "f8_e4m3", shape.to_vec(), values.iter().enumerate().map(code).collect()), (suffix, "f32", axes, scales)]
}

/// Whether a weight can have a form with so many ranks.
fn fits(truth: &Truth, given: Given, tp: usize) -> bool {
    let (shape, values) = truth.slice(tp, 0);
    let whole = |held: usize, of: usize, block: usize| held == of || held.is_multiple_of(block);
    match given {
        Given::Float => true,
        _ if values.is_empty() => false,
        Given::Nvfp4 => shape[1].is_multiple_of(16) && truth.shape[1].is_multiple_of(16),
        Given::Fp8 => whole(shape[0], truth.shape[0], 128) && whole(shape[1], truth.shape[1], 128),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_policies_encode_every_element(seed: u64, threads in 1usize..8, tile in 0u32..27) {
        let (file, mapping, sizes) = model(&mut Random(seed));
        let mut random = Random(seed ^ 0x5EED);
        for tp in [1usize, 2, 4].into_iter().filter(|tp| sizes[0] % *tp as u64 == 0) {
            let set = GgufSet::from_bytes("random.gguf", file.build()).unwrap();
            let truths = model_truth(&set, &sizes);
            let mut chosen: Vec<Given> = truths
                .iter()
                .map(|_| [Given::Float, Given::Fp8, Given::Nvfp4, Given::Nvfp4][random.below(4) as usize])
                .zip(&truths)
                .map(|(given, truth)| if fits(truth, given, tp) { given } else { Given::Float })
                .collect();
            let mixed = chosen.contains(&Given::Nvfp4);
            for (given, truth) in chosen.iter_mut().zip(&truths) {
                // Beside nvfp4, fp8 has whole blocks of columns.
                if mixed && *given == Given::Fp8 && truth.shape[1] % 128 != 0 {
                    *given = Given::Float;
                }
            }
            if chosen.iter().all(|given| *given == Given::Float) {
                continue;
            }
            let rule = |(truth, given): (&Truth, &Given)| match given {
                Given::Float => String::new(),
                Given::Fp8 => format!("[[rule]]\ndtype = \"fp8\"\nweights = [{:?}]\n", truth.name),
                Given::Nvfp4 => format!("[[rule]]\ndtype = \"nvfp4\"\nweights = [{:?}]\n", truth.name),
            };
            let rules: String = truths.iter().zip(&chosen).map(rule).collect();
            let forms = OutputPolicy::from_text(&format!("name = \"random\"\nabout = \"x\"\n{rules}")).unwrap();
            let model = resolve(&mapping, &set, MtpPolicy::Keep).unwrap();
            let policy = Policy { part_size: 1 << (8 + random.below(12)), ..plans::policy() };
            let request = PlanRequest::new(Profile::load("hf").unwrap(), tp as u32, policy);
            let plan = Plan::audited(&set, model, PlanRequest { forms: Some(forms), ..request }).unwrap();
            let planned = Planned { set, mapping: mapping.clone(), plan };
            let (files, _) = folder(&planned, options(threads, 1 << tile));
            for rank in 0..tp {
                let mut found = tensors(&files, tp, rank);
                for (truth, given) in truths.iter().zip(&chosen) {
                    let (shape, values) = truth.slice(tp, rank);
                    let expected = match given {
                        Given::Float => vec![("", "bf16", shape, truth::bytes(&values, "bf16"))],
                        Given::Fp8 => fp8(&shape, &values, mixed),
                        Given::Nvfp4 => nvfp4(&shape, &values, &truth.values),
                    };
                    for (suffix, dtype, shape, bytes) in expected {
                        let name = format!("{}{suffix}", truth.name);
                        let tensor = found.remove(&name);
                        let same = tensor == Some((dtype.to_owned(), shape, bytes));
                        prop_assert!(same, "rank {} of {}, '{}', {:?}, {:?}", rank, tp, name, given, sizes);
                    }
                }
                prop_assert!(found.is_empty(), "rank {rank} holds more: {:?}", found.keys());
            }
        }
    }
}
