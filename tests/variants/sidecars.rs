//! Scales beside tensors: the real weight is their product (MAPPING, section 7).

use ggshard::convert::Request;
use ggshard::gguf::GgmlType;

use super::array::Array;
use super::check::{convert, converts, exact, refused, says};
use super::golden;
use super::toy::{Dims, Toy, experts, split_kv_b};

fn scale(values: &[f32]) -> Array {
    Array::new(&[values.len()], values.to_vec())
}

/// Multiplies some weights of the truth.
fn times(toy: &mut Toy, name: &str, by: f32) {
    let scaled = toy.truth[name].map(|x| x * by);
    toy.truth.insert(name.to_owned(), scaled);
}

#[test]
fn one_scale_multiplies_the_whole_tensor() {
    let mut toy = Toy::new(Dims::v3());
    toy.file.add("blk.0.attn_output.scale", &scale(&[0.1]));
    times(&mut toy, "model.layers.0.self_attn.o_proj.weight", 0.1);
    // One scale for a stack of experts, too.
    toy.file.add("blk.1.ffn_up_exps.scale", &scale(&[3.0]));
    (0..3).for_each(|e| times(&mut toy, &format!("model.layers.1.mlp.experts.{e}.up_proj.weight"), 3.0));
    toy.file.add("token_embd.scale", &scale(&[0.7]));
    times(&mut toy, "model.embed_tokens.weight", 0.7);
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn each_expert_has_its_own_scale() {
    let mut toy = Toy::new(Dims::v3());
    for (part, factors) in [("gate", [0.1, 0.3, 0.7]), ("down", [1.1, -1.3, 1.7])] {
        toy.file.add(&format!("blk.1.ffn_{part}_exps.scale"), &scale(&factors));
        for (e, by) in factors.into_iter().enumerate() {
            times(&mut toy, &format!("model.layers.1.mlp.experts.{e}.{part}_proj.weight"), by);
        }
    }
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn a_fused_tensor_gives_its_scale_to_both_halves() {
    let mut toy = Toy::new(Dims::v3());
    let pairs = experts(&toy.dims, &toy.truth, 1, "gate").into_iter().zip(experts(&toy.dims, &toy.truth, 1, "up"));
    let fused: Vec<Array> = pairs.map(|(gate, up)| Array::join(&[gate, up])).collect();
    toy.file.remove("blk.1.ffn_gate_exps.weight");
    toy.file.remove("blk.1.ffn_up_exps.weight");
    toy.file.add("blk.1.ffn_gate_up_exps.weight", &Array::stack(&fused));
    let factors = [0.1, 0.3, 0.7];
    toy.file.add("blk.1.ffn_gate_up_exps.scale", &scale(&factors));
    for (e, by) in factors.into_iter().enumerate() {
        times(&mut toy, &format!("model.layers.1.mlp.experts.{e}.gate_proj.weight"), by);
        times(&mut toy, &format!("model.layers.1.mlp.experts.{e}.up_proj.weight"), by);
    }
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn the_halves_of_kv_b_have_scales_of_their_own() {
    let mut toy = Toy::new(Dims::v3());
    toy.file.add("blk.2.attn_k_b.scale", &scale(&[0.1])).add("blk.2.attn_v_b.scale", &scale(&[0.3]));
    let name = "model.layers.2.self_attn.kv_b_proj.weight";
    let d = toy.dims.clone();
    let (k, v) = split_kv_b(&d, &toy.truth[name]);
    let (k, v) = (k.map(|x| x * 0.1), v.map(|x| x * 0.3));
    let k = k.swap();
    let heads: Vec<Array> = (0..d.heads)
        .flat_map(|h| {
            let one = |a: &Array, rows: usize| a.rows(h..h + 1).reshape(&[rows, d.kv_rank]);
            [one(&k, d.nope), one(&v, d.v_head)]
        })
        .collect();
    toy.truth.insert(name.into(), Array::join(&heads));
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn the_product_is_rounded_to_bf16_once() {
    let mut toy = Toy::new(Dims::v3());
    let factors = [1.0 / 3.0, 0.1, 1e-3];
    toy.file.add("blk.1.ffn_gate_exps.scale", &scale(&factors));
    let made = convert(&toy.file, &Request::default()).unwrap();
    let mut twice = 0;
    for (e, by) in factors.into_iter().enumerate() {
        let name = format!("model.layers.1.mlp.experts.{e}.gate_proj.weight");
        let values = &toy.truth[&name].data;
        let (dtype, _, bytes) = &made.ranks[0][&name];
        assert_eq!(dtype, "BF16");
        for (found, x) in bytes.chunks(2).zip(values) {
            let found = u16::from_le_bytes(found.try_into().unwrap());
            assert_eq!(found, bf16(x * by), "{x} * {by}");
            twice += usize::from(found != bf16(f32::from_bits(u32::from(bf16(*x)) << 16) * by));
        }
    }
    assert!(twice > 0, "values that tell one rounding from two");
}

/// Round to nearest even, by integer arithmetic.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let kept = (bits >> 16) as u16;
    match (bits & 0xFFFF).cmp(&0x8000) {
        std::cmp::Ordering::Less => kept,
        std::cmp::Ordering::Equal => kept + (kept & 1),
        std::cmp::Ordering::Greater => kept + 1,
    }
}

#[test]
fn an_nvfp4_tensor_is_its_blocks_times_its_scale() {
    let golden = golden::read_folder(&golden::fixtures());
    let blocks = golden.iter().find(|g| g.ty == GgmlType::NVFP4 && g.weights >= 64 * 40).expect("NVFP4 blocks");
    let decoded: Vec<f32> = blocks.expected.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(decoded.len(), blocks.weights, "{}", blocks.name);
    // [40, 64]: a row is one block of 36 bytes.
    let mut toy = Toy::new(Dims { heads: 4, v_head: 16, ..Dims::v3() });
    let name = "blk.0.attn_output.weight";
    toy.file.remove(name);
    toy.file.add_raw(name, &[40, 64], 40, blocks.blocks[..40 * 36].to_vec());
    let values = Array::new(&[40, 64], decoded[..40 * 64].to_vec());
    let o_proj = "model.layers.0.self_attn.o_proj.weight";
    toy.truth.insert(o_proj.into(), values.clone());
    converts(&toy.file, &exact(), &toy.truth);
    toy.file.add("blk.0.attn_output.scale", &scale(&[0.3]));
    toy.file.add("blk.0.attn_output.input_scale", &scale(&[7.0]));
    toy.truth.insert(o_proj.into(), values.map(|x| x * 0.3));
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert!(made.ignored()["blk.0.attn_output.input_scale"].contains("activation"));
    assert_eq!(made.ignored().len(), 1);
}

#[test]
fn a_scale_of_another_length_or_type_is_refused() {
    let cases: [(&str, &[f32]); 4] = [
        ("blk.0.attn_output.scale", &[1.0, 2.0]),
        ("blk.1.ffn_gate_exps.scale", &[1.0, 2.0]),
        ("blk.1.ffn_gate_exps.scale", &[1.0; 4]),
        ("blk.1.attn_k_b.scale", &[1.0; 4]),
    ];
    for (name, values) in cases {
        let mut toy = Toy::new(Dims::v3());
        toy.file.add(name, &scale(values));
        let owner = name.replace(".scale", ".weight");
        says(&refused(&toy.file, &exact()), "Contradiction", &[name, &owner, &format!("{}", values.len())]);
    }
    let mut toy = Toy::new(Dims::v3());
    toy.file.add_raw("blk.0.attn_output.scale", &[1], 1, vec![0, 0x3c]);
    says(&refused(&toy.file, &exact()), "Contradiction", &["blk.0.attn_output.scale", "F16", "F32"]);
}

#[test]
fn a_scale_without_an_owner_is_unknown() {
    for name in ["blk.0.attn_q.scale", "blk.0.attn_q.input_scale", "rope_freqs.scale", "blk.1.exp_probs_b.scale"] {
        let mut toy = Toy::new(Dims::v3());
        toy.file.add(name, &scale(&[1.0]));
        says(&refused(&toy.file, &exact()), "UnknownTensor", &[name]);
    }
}

#[test]
fn the_scale_of_an_ignored_tensor_goes_its_way() {
    let mut toy = Toy::new(Dims::v2());
    for layer in 0..3 {
        let whole = toy.truth[&format!("model.layers.{layer}.self_attn.kv_b_proj.weight")].clone();
        toy.file.add(&format!("blk.{layer}.attn_kv_b.weight"), &whole);
    }
    toy.file.add("blk.1.attn_k_b.scale", &scale(&[5.0]));
    toy.file.add("blk.1.attn_kv_b.scale", &scale(&[0.3]));
    times(&mut toy, "model.layers.1.self_attn.kv_b_proj.weight", 0.3);
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert!(made.ignored()["blk.1.attn_k_b.scale"].contains("attn_kv_b"));
    assert!(!made.ignored().contains_key("blk.1.attn_kv_b.scale"));
}

#[test]
fn rope_factors_are_ignored_by_a_named_rule() {
    let mut toy = Toy::new(Dims::v2());
    toy.file.add("rope_freqs.weight", &scale(&[1.0]));
    let made = converts(&toy.file, &exact(), &toy.truth);
    assert!(made.ignored()["rope_freqs.weight"].contains("RoPE"));
}
