//! Experts: fused, single, absent.

use super::array::Array;
use super::check::{converts, exact, refused, says};
use super::file::Kv;
use super::toy::{Dims, Toy, experts};

/// Replaces gate and up of a layer by one fused tensor: per expert M rows of gate, then M rows of up.
fn fuse(toy: &mut Toy, layer: usize) {
    let fused: Vec<Array> = experts(&toy.dims, &toy.truth, layer, "gate")
        .into_iter()
        .zip(experts(&toy.dims, &toy.truth, layer, "up"))
        .map(|(gate, up)| Array::join(&[gate, up]))
        .collect();
    toy.file.remove(&format!("blk.{layer}.ffn_gate_exps.weight"));
    toy.file.remove(&format!("blk.{layer}.ffn_up_exps.weight"));
    toy.file.add(&format!("blk.{layer}.ffn_gate_up_exps.weight"), &Array::stack(&fused));
}

#[test]
fn fused_gate_up_is_gate_first_in_each_expert() {
    let mut toy = Toy::new(Dims::v3());
    fuse(&mut toy, 1);
    converts(&toy.file, &exact(), &toy.truth);
    fuse(&mut toy, 2);
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn fused_gate_up_of_another_height_is_refused() {
    let mut toy = Toy::new(Dims::v3());
    fuse(&mut toy, 1);
    toy.file.reshape("blk.1.ffn_gate_up_exps.weight", &[6, 12, 40]);
    let parts = ["blk.1.ffn_gate_up_exps.weight", "[6, 12, 40]", "[3, 24, 40]", "expert_count"];
    says(&refused(&toy.file, &exact()), "Contradiction", &parts);
}

#[test]
fn fused_gate_up_beside_an_own_gate_or_up_is_never_half_used() {
    for kept in ["gate", "up"] {
        let mut toy = Toy::new(Dims::v3());
        fuse(&mut toy, 1);
        let own = Array::stack(&experts(&toy.dims, &toy.truth, 1, kept));
        toy.file.add(&format!("blk.1.ffn_{kept}_exps.weight"), &own);
        let error = refused(&toy.file, &exact());
        says(&error, "Contradiction", &["blk.1.ffn_gate_up_exps.weight", "1440 of its 2880 elements"]);
    }
    let mut toy = Toy::new(Dims::v3());
    let gate = Array::stack(&experts(&toy.dims, &toy.truth, 1, "gate"));
    let up = Array::stack(&experts(&toy.dims, &toy.truth, 1, "up"));
    fuse(&mut toy, 1);
    toy.file.add("blk.1.ffn_gate_exps.weight", &gate).add("blk.1.ffn_up_exps.weight", &up);
    says(&refused(&toy.file, &exact()), "UnknownTensor", &["blk.1.ffn_gate_up_exps.weight"]);
}

#[test]
fn a_single_expert_loses_its_axis_to_the_quantizer() {
    let mut toy = Toy::new(Dims { experts: 1, ..Dims::v3() });
    converts(&toy.file, &exact(), &toy.truth);
    for layer in [1, 2] {
        for (name, shape) in [("gate", [12, 40]), ("up", [12, 40]), ("down", [40, 12])] {
            toy.file.reshape(&format!("blk.{layer}.ffn_{name}_exps.weight"), &shape);
        }
        toy.file.reshape(&format!("blk.{layer}.ffn_gate_inp.weight"), &[40]);
    }
    converts(&toy.file, &exact(), &toy.truth);
    // Fused as well.
    fuse(&mut toy, 2);
    toy.file.reshape("blk.2.ffn_gate_up_exps.weight", &[24, 40]);
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn no_shared_expert() {
    let mut toy = Toy::new(Dims { shared: 0, ..Dims::v3() });
    converts(&toy.file, &exact(), &toy.truth);
    toy.unset("expert_shared_count");
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn a_dense_model_has_no_expert_keys() {
    for q_rank in [Some(10), None] {
        let toy = Toy::new(Dims { experts: 0, shared: 0, q_rank, ..Dims::v2() });
        assert!(!toy.file.kv.iter().any(|(k, _)| k.contains("expert")));
        converts(&toy.file, &exact(), &toy.truth);
    }
}

#[test]
fn no_dense_layer_and_only_dense_layers() {
    for dense in [0, 3] {
        let toy = Toy::new(Dims { dense, ..Dims::v3() });
        let mut file = toy.file.clone();
        if dense == 0 {
            file.unset(&toy.key("leading_dense_block_count"));
        }
        let truth = &toy.truth;
        let class = converts(&file, &exact(), truth).class().to_owned();
        assert_eq!(class, "DeepseekV3ForCausalLM");
    }
}

#[test]
fn missing_expert_width_is_read_off_the_tensors() {
    let mut toy = Toy::new(Dims::v3());
    toy.unset("expert_feed_forward_length");
    converts(&toy.file, &exact(), &toy.truth);
}

#[test]
fn widths_that_are_arrays_count_when_they_agree() {
    let mut toy = Toy::new(Dims::v3());
    toy.set("feed_forward_length", Kv::U32s(vec![36; 3])).set("expert_feed_forward_length", Kv::U32s(vec![12; 3]));
    toy.set("attention.head_count", Kv::U32s(vec![4; 3]));
    converts(&toy.file, &exact(), &toy.truth);
    // One that differs in a dense block is wrong for that block.
    toy.set("feed_forward_length", Kv::U32s(vec![35, 36, 36]));
    says(&refused(&toy.file, &exact()), "Contradiction", &["blk.0.ffn_gate.weight", "35", "feed_forward_length"]);
    toy.set("feed_forward_length", Kv::U32s(vec![]));
    says(&refused(&toy.file, &exact()), "Contradiction", &["feed_forward_length", "0 values"]);
}
