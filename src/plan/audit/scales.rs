//! Proof that encoded parameters have their scales, and that weights share one where a stack has but one.

use super::fault;
use super::forms::of_weight;
use crate::dequant::FloatType;
use crate::dtype::Dtype;
use crate::error::{Fault, Result};
use crate::mapping::{Content, Format, Matrix, TensorScales};
use crate::plan::{Code, Form, InputScales, Origin, Param, ParamCut, Plan, Scale};

/// The scales that an encoded parameter has, by the rules, and where in the plan they are.
pub(super) fn of<'a>(plan: &'a Plan, param: &'a Param) -> impl Iterator<Item = (Scale, usize)> + 'a {
    let inputs = plan.nvfp4.input_scales.is_some() || plan.profile.rules.nvfp4.is_some_and(|rules| rules.input_scales);
    let (first, kinds) = match param.form {
        Form::Plain | Form::Kept(_) | Form::Scales { .. } => (0, &[][..]),
        Form::Encoded { code: Code::Fp8, scales } => (scales, &[Scale::Block][..]),
        Form::Encoded { code: Code::Nvfp4, scales } if inputs => {
            (scales, &[Scale::Block, Scale::Weight, Scale::Input][..])
        }
        Form::Encoded { code: Code::Nvfp4, scales } => (scales, &[Scale::Block, Scale::Weight][..]),
    };
    kinds.iter().enumerate().map(move |(i, kind)| (*kind, first as usize + i))
}

/// Whether the policy has fp8 for some weights and nvfp4 for others, so that stacks expect ModelOpt's scales of fp8.
pub(super) fn mixed(plan: &Plan) -> bool {
    let mut weights = plan.model.weights.iter().filter(|weight| weight.pinned.is_none());
    weights.clone().any(|w| of_weight(plan, w) == Format::Fp8) && weights.any(|w| of_weight(plan, w) == Format::Nvfp4)
}

/// An encoded parameter's scales follow it, under its name, in its set and stage, with the shapes that its weights give.
pub(super) fn linked(plan: &Plan, index: usize, code: Code, scales: u32, mixed: bool) -> Result<()> {
    let param = &plan.params[index];
    if scales as usize != index + 1 {
        return Err(fault(param, 0, format!("its scales are parameter {scales}")).expected("the next one").audit());
    }
    for (kind, at) in of(plan, param) {
        let Some(held) = plan.params.get(at) else {
            return Err(fault(param, 0, format!("its scales are parameter {at}, which does not exist")).audit());
        };
        let wrong = |rank: usize, found: String| Err(fault(held, rank, found).audit());
        let dtype = match (kind, code) {
            (Scale::Block, Code::Nvfp4) => Dtype::F8E4M3,
            (Scale::Input, _) if plan.nvfp4.input_scales.is_none() && matches!(param.content, Content::Joined(_)) => {
                match plan.policy.dtype {
                    FloatType::F32 => Dtype::F32,
                    FloatType::BF16 => Dtype::BF16,
                    FloatType::F16 => Dtype::F16,
                }
            }
            (Scale::Block, Code::Fp8) | (Scale::Weight | Scale::Input, _) => Dtype::F32,
        };
        if held.form != (Form::Scales { of: index as u32, kind }) || held.dtype != dtype {
            return wrong(0, format!("the scales of '{}' are {:?} in {}", param.name, held.form, held.dtype));
        }
        if !is_named(param, held, code, kind, mixed) {
            return wrong(0, format!("it holds scales of '{}'", param.name));
        }
        if (held.set, held.stage, held.cut, held.joins) != (param.set, param.stage, param.cut, None)
            || held.content != param.content
            || held.slices.len() != param.slices.len()
        {
            return wrong(0, format!("it is laid out unlike '{}', whose scales it holds", param.name));
        }
        let fits = |of: &[u64], axes: &[u64]| match kind {
            Scale::Block => of_blocks(of, axes, code, mixed),
            Scale::Weight | Scale::Input => of_weights(plan, param, of, axes),
        };
        if !fits(&param.shape, &held.shape) {
            return wrong(0, format!("shape {:?} for scales of {:?}", held.shape, param.shape));
        }
        for (rank, (slice, of)) in held.slices.iter().zip(&param.slices).enumerate() {
            if !fits(of.shape.axes(), slice.shape.axes()) {
                return wrong(rank, format!("shape {:?} for scales of {:?}", slice.shape, of.shape));
            }
            match kind {
                Scale::Input => inputs(plan, held, rank)?,
                Scale::Block | Scale::Weight if slice.pieces.is_empty() => {}
                Scale::Block | Scale::Weight => return wrong(rank, format!("it has pieces {:?}", slice.pieces)),
            }
        }
    }
    Ok(())
}

/// Whether scales have the name that stacks look for.
fn is_named(param: &Param, held: &Param, code: Code, kind: Scale, mixed: bool) -> bool {
    let suffix = match (kind, code) {
        (Scale::Block, Code::Fp8) if !mixed => "_scale_inv",
        (Scale::Block, Code::Fp8 | Code::Nvfp4) => "_scale",
        (Scale::Weight, _) => "_scale_2",
        (Scale::Input, _) => {
            let stem = param.name.strip_suffix("weight").map_or(format!("{}_", param.name), str::to_owned);
            return held.name.strip_suffix("input_scale") == Some(&stem);
        }
    };
    held.name.strip_suffix(suffix) == Some(param.name.as_str())
}

/// Whether axes count the blocks of others. ModelOpt's fp8 has axes of one between them.
fn of_blocks(of: &[u64], axes: &[u64], code: Code, mixed: bool) -> bool {
    let covers = |n: u64, blocks: u64, block: u64| n <= blocks * block && blocks * block < n + block;
    match (code, of, axes) {
        (Code::Fp8, [rows, cols], [bands, 1, blocks, 1]) if mixed => {
            covers(*rows, *bands, 128) && covers(*cols, *blocks, 128)
        }
        (Code::Fp8, [lead @ .., rows, cols], [held_lead @ .., bands, blocks]) => {
            !mixed && lead == held_lead && covers(*rows, *bands, 128) && covers(*cols, *blocks, 128)
        }
        (Code::Nvfp4, [lead @ .., bytes], [held_lead @ .., blocks]) => lead == held_lead && blocks * 8 == *bytes,
        (Code::Fp8 | Code::Nvfp4, _, _) => false,
    }
}

/// Whether axes count the weights of a parameter with other axes.
fn of_weights(plan: &Plan, param: &Param, of: &[u64], axes: &[u64]) -> bool {
    let parts = param.content.parts() as u64;
    let vector = plan.profile.rules.nvfp4.is_some_and(|rules| rules.tensor_scales == TensorScales::Parts);
    match (&param.content, axes) {
        (Content::Stacked { .. }, [elements]) => parts == 1 && of.first() == Some(elements),
        (Content::Stacked { .. }, [elements, each]) => parts > 1 && *each == parts && of.first() == Some(elements),
        (Content::Joined(_), []) => parts == 1 && !vector,
        (Content::Joined(_), [each]) => *each == parts && (parts > 1 || vector),
        (Content::Stacked { .. } | Content::Joined(_) | Content::Constant(_), _) => false,
    }
}

/// A rank's input scales are those of its weights, or 1 where none are given.
fn inputs(plan: &Plan, held: &Param, rank: usize) -> Result<()> {
    let slice = &held.slices[rank];
    let Matrix { rows, cols } = Matrix::of(slice.shape.axes());
    let mut values = vec![None; (rows * cols) as usize];
    for piece in plan.pieces_of(slice) {
        for (row, col) in
            (piece.row..piece.row + piece.rows).flat_map(|r| (piece.col..piece.col + piece.cols).map(move |c| (r, c)))
        {
            let place = values.get_mut((row * cols + col) as usize).filter(|place| place.is_none() && col < cols);
            let (Some(place), Origin::Fill(value)) = (place, piece.origin) else {
                return Err(fault(held, rank, format!("a piece {piece:?} of {:?}", slice.shape)).audit());
            };
            *place = Some(value);
        }
    }
    let first = if held.cut == ParamCut::Expert { rank * values.len() } else { 0 };
    for (weight, value) in held.content.weights().iter().skip(first).zip(&values) {
        let name = &plan.model.weights[*weight as usize].name;
        let given = |scales: &InputScales| scales.by_name.get(&InputScales::name(name)).copied();
        let expected = plan.nvfp4.input_scales.as_ref().map_or(Some(1.0), given);
        if *value != expected {
            return Err(fault(held, rank, format!("the input scale of '{name}' is {value:?}"))
                .expected(format!("{expected:?}"))
                .audit());
        }
    }
    Ok(())
}

/// Weights share a scale where they are parts of one parameter, or of one element of a stack, or where the profile names
/// them together, and where a chain of these joins them; no others do.
pub(super) fn shared(plan: &Plan) -> Result<()> {
    let nvfp4 = || plan.params.iter().filter(|param| param.form.code() == Some(Code::Nvfp4));
    let mut chained: Vec<Option<u32>> = vec![None; plan.model.weights.len()];
    nvfp4().flat_map(|param| param.content.weights()).for_each(|w| chained[*w as usize] = Some(*w));
    // What must be alike, pair by pair, until nothing changes: chains are a few weights long.
    let mut pairs: Vec<(u32, u32)> = Vec::new();
    for param in nvfp4() {
        let elements = param.content.weights().chunks(param.content.parts().max(1));
        pairs.extend(elements.flat_map(|element| element.windows(2).map(|pair| (pair[0], pair[1]))));
    }
    for rule in &plan.profile.rules.together {
        let mut named: Vec<(Vec<(String, u64)>, u32)> = Vec::new();
        for (index, weight) in plan.model.weights.iter().enumerate().filter(|(i, _)| chained[*i].is_some()) {
            let mut vars = rule.weights.iter().find_map(|name| name.0.capture(&weight.name));
            vars.iter_mut().for_each(|vars| vars.sort());
            named.extend(vars.map(|vars| (vars, index as u32)));
        }
        named.sort();
        pairs.extend(named.windows(2).filter(|two| two[0].0 == two[1].0).map(|two| (two[0].1, two[1].1)));
    }
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for (a, b) in &pairs {
            let least = chained[*a as usize].min(chained[*b as usize]);
            for weight in [a, b] {
                changed |= std::mem::replace(&mut chained[*weight as usize], least) != least;
            }
        }
    }
    let planned = |index: usize| plan.scale_leaders.get(index).copied().filter(|leader| *leader != u32::MAX);
    match (0..chained.len()).find(|index| planned(*index) != chained[*index]) {
        None => Ok(()),
        Some(index) => {
            let name = |w: Option<u32>| w.map(|w| plan.model.weights.get(w as usize).map(|w| w.name.as_str()));
            let found = format!("its weight_scale_2 is that of {:?}", name(planned(index)));
            Err(Fault::new(found)
                .tensor(&plan.model.weights[index].name)
                .expected(format!("that of {:?}", name(chained[index])))
                .remedy("The plan is wrong and was not executed: this is a defect of ggshard, please report it")
                .audit())
        }
    }
}
