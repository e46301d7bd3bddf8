//! kv_b_proj and its halves, in every form that was ever written (MAPPING, sections 2 and 7).

use super::array::Array;
use super::check::{converts, exact, refused, says};
use super::file::{File, Kv};
use super::toy::{Dims, Toy};

fn k_b(layer: usize) -> String {
    format!("blk.{layer}.attn_k_b.weight")
}

fn v_b(layer: usize) -> String {
    format!("blk.{layer}.attn_v_b.weight")
}

fn kv_b(toy: &Toy, layer: usize) -> Array {
    toy.truth[&format!("model.layers.{layer}.self_attn.kv_b_proj.weight")].clone()
}

/// The metadata of files from before the MLA split.
fn legacy_metadata(toy: &mut Toy) {
    let n = |n: usize| Kv::U32(n as u32);
    let d = toy.dims.clone();
    toy.unset("attention.key_length_mla").unset("attention.value_length_mla");
    toy.set("attention.key_length", n(d.nope + d.rope)).set("attention.value_length", n(d.v_head));
    toy.set("attention.head_count_kv", n(d.heads));
}

/// `attn_k_b` and `attn_v_b` with heads merged into rows.
fn two_dimensional(file: &mut File, d: &Dims) {
    for layer in 0..d.layers {
        file.reshape(&k_b(layer), &[d.heads * d.kv_rank, d.nope]);
        file.reshape(&v_b(layer), &[d.heads * d.v_head, d.kv_rank]);
    }
}

#[test]
fn deepseek_v2_with_and_without_q_lora() {
    for q_rank in [Some(10), None] {
        let toy = Toy::new(Dims { q_rank, ..Dims::v2() });
        let made = converts(&toy.file, &exact(), &toy.truth);
        assert_eq!(made.class(), "DeepseekV2ForCausalLM");
        assert!(made.ignored().is_empty() && made.warnings() == "[]");
    }
}

#[test]
fn unsplit_kv_b_of_legacy_files_is_taken_as_it_is() {
    for q_rank in [Some(10), None] {
        let mut toy = Toy::new(Dims { q_rank, ..Dims::v2() });
        legacy_metadata(&mut toy);
        for layer in 0..toy.dims.layers {
            toy.file.remove(&k_b(layer));
            toy.file.remove(&v_b(layer));
            let whole = kv_b(&toy, layer);
            toy.file.add(&format!("blk.{layer}.attn_kv_b.weight"), &whole);
        }
        converts(&toy.file, &exact(), &toy.truth);
    }
}

#[test]
fn unsplit_kv_b_wins_over_the_halves_of_transitional_files() {
    for flat in [true, false] {
        let mut toy = Toy::new(Dims::v2());
        let d = toy.dims.clone();
        legacy_metadata(&mut toy);
        for layer in 0..d.layers {
            let whole = kv_b(&toy, layer);
            toy.file.add(&format!("blk.{layer}.attn_kv_b.weight"), &whole);
            // The halves of such files were quantized on their own and never agree bit for bit.
            for name in [k_b(layer), v_b(layer)] {
                toy.file.tensor(&name).data.fill(0x41);
            }
        }
        if flat {
            two_dimensional(&mut toy.file, &d);
        }
        let made = converts(&toy.file, &exact(), &toy.truth);
        let ignored = made.ignored();
        assert_eq!(ignored.len(), 2 * d.layers);
        for layer in 0..d.layers {
            assert!(ignored[&k_b(layer)].contains("attn_kv_b"), "{ignored:?}");
            assert!(ignored[&v_b(layer)].contains("attn_kv_b"), "{ignored:?}");
        }
    }
}

#[test]
fn halves_with_heads_merged_into_rows_are_the_same_bytes() {
    let mut toy = Toy::new(Dims::v2());
    let d = toy.dims.clone();
    two_dimensional(&mut toy.file, &d);
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn one_head_loses_its_axis_to_the_quantizer() {
    let mut toy = Toy::new(Dims { heads: 1, ..Dims::v2() });
    let d = toy.dims.clone();
    two_dimensional(&mut toy.file, &d);
    let made = super::check::convert(&toy.file, &exact()).unwrap();
    assert_eq!(made.ranks[0].len(), toy.truth.len());
    let (_, shape, bytes) = &made.ranks[0]["model.layers.2.self_attn.kv_b_proj.weight"];
    let expected = kv_b(&toy, 2);
    assert_eq!(shape, &expected.shape);
    assert_eq!(bytes, &expected.data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
}

#[test]
fn one_half_without_the_other_is_an_error_that_names_it() {
    for (gone, there) in [(v_b(1), k_b(1)), (k_b(1), v_b(1))] {
        let mut toy = Toy::new(Dims::v2());
        toy.file.remove(&gone);
        let error = refused(&toy.file, &exact());
        says(&error, "MissingTensor", &[&gone, "model.layers.1.self_attn.kv_b_proj.weight"]);
        assert_ne!(error.fault().tensor.as_deref(), Some(there.as_str()));
    }
}

#[test]
fn halves_with_swapped_axes_are_refused() {
    let mut toy = Toy::new(Dims::v2());
    let d = toy.dims.clone();
    toy.file.reshape(&k_b(0), &[d.heads, d.nope, d.kv_rank]);
    says(&refused(&toy.file, &exact()), "Contradiction", &[&k_b(0), "[4, 6, 12]", "[4, 12, 6]"]);
    let mut toy = Toy::new(Dims::v2());
    toy.file.reshape(&v_b(0), &[d.heads, d.kv_rank, d.v_head]);
    says(&refused(&toy.file, &exact()), "Contradiction", &[&v_b(0), "[4, 12, 5]", "[4, 5, 12]"]);
    let mut toy = Toy::new(Dims::v2());
    toy.file.reshape(&k_b(0), &[d.nope * d.kv_rank, d.heads]);
    says(&refused(&toy.file, &exact()), "Contradiction", &[&k_b(0), "[72, 4]"]);
}

#[test]
fn legacy_lengths_beside_split_halves_are_a_contradiction() {
    // Only one of the two keys: key_length then is that of the absorbed head and fits nothing.
    for key in ["attention.key_length_mla", "attention.value_length_mla"] {
        let mut toy = Toy::new(Dims::v2());
        toy.unset(key);
        says(&refused(&toy.file, &exact()), "Contradiction", &[key.trim_end_matches("_mla")]);
    }
}
