//! Failures of encoded parameters, of their scales and of kept blocks.

use ggshard::dtype::Dtype;
use ggshard::gguf::GgmlType;
use ggshard::mapping::{Nvfp4Rules, OutputPolicy, Profile, TensorScales, choose, resolve};
use ggshard::plan::{Form, InputScales, Origin, PlanRequest, Scale, Shape};

use super::*;

/// The plan of a fixture model by a built-in policy.
fn formed(name: &str, tp: u32, profile: &str, policy: &str) -> Plan {
    let set = plans::open(name);
    let model = resolve(&choose(&set).unwrap(), &set, plans::policy().mtp).unwrap();
    let mut request = PlanRequest::new(Profile::load(profile).unwrap(), tp, plans::policy());
    request.forms = Some(OutputPolicy::builtin(policy).unwrap());
    request.keep_or = (policy == "keep").then_some(request.policy.dtype);
    Plan::new(&set, model, request).unwrap()
}

fn fp8() -> Plan {
    formed(DEEPSEEK, 2, "vllm-0.32", "deepseek-fp8")
}

fn keep() -> Plan {
    formed(GLM, 2, "hf", "keep")
}

fn nvfp4() -> Plan {
    formed(DEEPSEEK, 2, "vllm-0.32", "modelopt-nvfp4")
}

macro_rules! planted {
    ($($name:ident: $plan:expr, $plant:expr => [$($named:expr),+];)*) => {
        $(#[test] fn $name() { refused($plan, $plant, &[$($named),+]); })*
    };
}

const KV_B: &str = "model.layers.1.self_attn.kv_b_proj.weight";
const W13: &str = "model.layers.1.mlp.experts.routed_experts.w13_weight";
const W13_SCALES: &str = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale_inv";
const W13_CODED: &str = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale";
const W13_SHARED: &str = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale_2";
const W13_INPUTS: &str = "model.layers.1.mlp.experts.routed_experts.w13_input_scale";
const GATE: &str = "model.layers.1.mlp.experts.3.gate_proj.weight";
const UP: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
const Q_B: &str = "model.layers.1.self_attn.q_b_proj.qweight";

planted! {
    scales_of_two_parameters_exchanged: fp8(), |p| {
        let (a, b) = (param(p, KV_B), param(p, W13));
        let form = p.params[a].form;
        p.params[a].form = p.params[b].form;
        p.params[b].form = form;
    } => [KV_B, W13, W13_SCALES];
    scales_under_another_name: fp8(), |p| {
        let at = param(p, W13_SCALES);
        p.params[at].name = "model.layers.1.mlp.experts.routed_experts.w13_scale_inv".into();
    } => ["w13_scale_inv"];
    scales_that_belong_to_none: fp8(), |p| {
        let at = param(p, W13_SCALES);
        p.params[at].form = Form::Scales { of: 0, kind: Scale::Block };
    } => [W13_SCALES];
    scales_side_by_side_instead_of_one_above_the_other: fp8(), |p| {
        let at = param(p, W13_SCALES);
        let axes = p.params[at].slices[1].shape.axes().to_vec();
        p.params[at].slices[1].shape = Shape::new(&[axes[0], axes[1] / 2, axes[2] * 2]).unwrap();
    } => [W13_SCALES];
    scales_that_are_filled_from_the_source: fp8(), |p| {
        let (of, at) = (param(p, W13), param(p, W13_SCALES));
        p.params[at].slices[0].pieces = p.params[of].slices[0].pieces.clone();
    } => [W13_SCALES];
    scales_that_are_integers: fp8(), |p| {
        let at = param(p, W13_SCALES);
        p.params[at].dtype = Dtype::I32;
    } => [W13_SCALES];
    an_encoded_parameter_that_says_it_is_not: fp8(), |p| {
        let at = param(p, KV_B);
        p.params[at].form = Form::Plain;
    } => [KV_B];
    another_policy_than_the_one_that_was_planned: fp8(), |p| p.forms = None => ["_proj.weight"];
    a_stack_that_loads_no_fp8: fp8(), |p| p.profile.rules.formats = None => ["_proj.weight"];
    the_rows_of_two_bands_exchanged: fp8(), |p| edit(p, KV_B, 0, |pieces| {
        let (first, last) = (pieces[0].row, pieces.len() - 2);
        pieces[0].row = pieces[last].row;
        pieces[last].row = first;
    }) => [KV_B];

    scales_of_blocks_for_those_of_weights: nvfp4(), |p| {
        let (a, b) = (param(p, W13_CODED), param(p, W13_SHARED));
        p.params.swap(a, b);
    } => [W13_CODED, W13_SHARED];
    one_scale_for_two_parts: nvfp4(), |p| {
        let at = param(p, W13_SHARED);
        p.params[at].shape = vec![8];
    } => [W13_SHARED];
    a_scale_for_each_rank: nvfp4(), |p| {
        let at = param(p, W13_SHARED);
        p.params[at].slices[1].shape = Shape::new(&[2, 8]).unwrap();
    } => [W13_SHARED];
    gate_and_up_with_a_scale_each: nvfp4(), |p| {
        let up = p.model.weights.iter().position(|w| w.name == UP).unwrap();
        p.scale_leaders[up] = up as u32;
    } => [UP];
    two_experts_with_one_scale: nvfp4(), |p| {
        let at = |name: &str| p.model.weights.iter().position(|w| w.name == name).unwrap();
        let (gate, up, other) = (at(GATE), at(UP), at(&GATE.replace(".3.", ".2.")));
        p.scale_leaders[gate] = other as u32;
        p.scale_leaders[up] = other as u32;
    } => [GATE];
    a_scale_for_what_has_none: nvfp4(), |p| {
        let norm = p.model.weights.iter().position(|w| w.name == "model.norm.weight").unwrap();
        p.scale_leaders[norm] = norm as u32;
    } => ["model.norm.weight"];
    gate_and_up_with_a_scale_each_where_stacks_join_them: formed(DEEPSEEK, 1, "hf", "modelopt-nvfp4"), |p| {
        p.scale_leaders = (0..p.scale_leaders.len() as u32).map(|w| match p.scale_leaders[w as usize] {
            u32::MAX => u32::MAX,
            _ => w,
        }).collect();
    } => ["up_proj", "gate_proj"];
    scales_of_inputs_that_the_stack_does_not_want: nvfp4(), |p| {
        p.profile.rules.nvfp4 = Some(Nvfp4Rules { tensor_scales: TensorScales::Parts, input_scales: false });
    } => ["input_scale"];
    scales_of_weights_in_the_place_of_those_of_inputs: nvfp4(), |p| {
        let at = param(p, W13_INPUTS);
        p.params[at].form = p.params[param(p, W13_SHARED)].form;
    } => [W13_INPUTS];
    an_input_scale_other_than_given: nvfp4(), |p| {
        let at = param(p, W13_INPUTS);
        let first = p.params[at].slices[0].pieces.start as usize;
        p.pieces[first].origin = Origin::Fill(0.5);
    } => [W13_INPUTS];
    input_scales_that_were_not_given: nvfp4(), |p| {
        p.nvfp4.input_scales = Some(InputScales::default());
    } => ["input_scale"];

    blocks_said_to_be_of_another_type: keep(), |p| {
        let at = param(p, Q_B);
        // The same bytes per block.
        let other = match p.params[at].form { Form::Kept(GgmlType::Q2_K) => GgmlType::Q3_K, _ => GgmlType::Q2_K };
        p.params[at].form = Form::Kept(other);
    } => [Q_B];
    blocks_under_the_name_of_numbers: keep(), |p| {
        let at = param(p, Q_B);
        p.params[at].name = "model.layers.1.self_attn.q_b_proj.weight".into();
    } => ["q_b_proj"];
    a_row_of_blocks_shifted: keep(), |p| edit(p, Q_B, 1, |pieces| region(&mut pieces[0]).row -= 1) => [Q_B, "attn_q_b"];
    a_piece_that_begins_within_a_block: keep(), |p| edit(p, Q_B, 0, |pieces| {
        pieces[0].cols -= 1;
    }) => [Q_B];
    blocks_that_were_decoded_for_no_reason: keep(), |p| {
        let at = param(p, Q_B);
        p.params[at].form = Form::Plain;
    } => [Q_B];
}

#[test]
fn sound_plans_of_every_form_pass() {
    for (name, tp, profile, policy) in [
        (GLM, 1, "hf", "deepseek-fp8"),
        (GLM, 2, "vllm-0.32", "deepseek-fp8"),
        (DEEPSEEK, 2, "hf", "deepseek-fp8"),
        (GLM, 2, "vllm-0.32", "modelopt-nvfp4"),
        (DEEPSEEK, 4, "hf", "modelopt-nvfp4"),
        (GLM, 4, "hf", "keep"),
        (DEEPSEEK, 1, "hf", "keep"),
    ] {
        audit(&formed(name, tp, profile, policy)).unwrap();
    }
}
