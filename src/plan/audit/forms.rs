//! Proof that what is encoded is what the policy says, and that blocks and their scales agree.

use super::fault;
use super::holding::{Holding, holdings};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::gguf::GgmlType;
use crate::mapping::{Content, Format, Matrix, Part, PinnedDtype, Weight};
use crate::plan::{Form, Param, Plan};

/// Rows and columns of a block.
const BLOCK: u64 = 128;

pub(super) fn check(plan: &Plan) -> Result<()> {
    for (index, param) in plan.params.iter().enumerate() {
        match param.form {
            Form::Plain => agreed(plan, param)?,
            Form::Fp8 { scales } => {
                agreed(plan, param)?;
                encoded(plan, param)?;
                linked(plan, index, scales)?;
            }
            Form::Kept(ty) => {
                agreed(plan, param)?;
                if kept(plan, param) != Some(ty) {
                    return Err(fault(param, 0, format!("it keeps blocks of {ty}"))
                        .expected("blocks that can be kept")
                        .audit());
                }
            }
            // Proven with the parameter that it belongs to, if that names it.
            Form::Scales { of } => match plan.params.get(of as usize).map(|of| of.form) {
                Some(Form::Fp8 { scales }) if scales as usize == index => {}
                Some(Form::Fp8 { .. } | Form::Plain | Form::Kept(_) | Form::Scales { .. }) | None => {
                    return Err(fault(param, 0, format!("they are the scales of parameter {of}"))
                        .expected("an encoded parameter that names them")
                        .audit());
                }
            },
        }
    }
    Ok(())
}

/// The form that the policy gives the first of a parameter's weights, by a reading of the rules of the audit's own.
pub(super) fn format(plan: &Plan, param: &Param) -> Format {
    let first = param.content.weights().first().and_then(|w| plan.model.weights.get(*w as usize));
    first.map_or(Format::F32, |weight| of_weight(plan, weight))
}

/// The form that a parameter is stored in: blocks that are to be kept, but cannot be, are decoded.
pub(super) fn stored(plan: &Plan, param: &Param) -> Format {
    let ruled = format(plan, param);
    // `raw` takes numbers that are no weights as they are, whatever the policy says.
    if ruled != Format::Keep || kept(plan, param).is_some() {
        return ruled;
    }
    let mut sources = param.content.weights().iter().flat_map(|w| &plan.model.weights[*w as usize].recipe.parts);
    let floats = sources.all(|part| plan.sources[part.source as usize].ty.block() == 1);
    plan.keep_or.filter(|_| !floats).unwrap_or(plan.policy.dtype).into()
}

/// The type of a parameter's blocks, if they can be kept: one type, whole rows, no arithmetic, no cut through a block.
fn kept(plan: &Plan, param: &Param) -> Option<GgmlType> {
    let weights = || param.content.weights().iter().map(|w| &plan.model.weights[*w as usize]);
    let mut types = weights().flat_map(|w| &w.recipe.parts).map(|part| plan.sources[part.source as usize].ty);
    let ty = types.next().filter(|ty| ty.block() > 1 && types.all(|other| other == *ty))?;
    let moved = |part: &Part| {
        !part.transpose
            && part.op.is_identity()
            && part.cols.is_multiple_of(ty.block())
            && part.start.is_multiple_of(part.cols.max(1))
    };
    let vocab = plan.profile.rules.vocab.multiple;
    let on_blocks = |part: &Holding<'_>| {
        let first = part.in_weight(0, 0, vocab).1;
        let ends = [first, first + part.real.cols];
        part.real == part.padded && ends.iter().all(|col| col.is_multiple_of(ty.block()))
    };
    let ranks = 0..param.slices.len() as u64;
    let held = |rank: u64| holdings(plan, param, rank).is_some_and(|parts| parts.iter().all(on_blocks));
    (weights().flat_map(|w| &w.recipe.parts).all(moved) && ranks.into_iter().all(held)).then_some(ty)
}

fn of_weight(plan: &Plan, weight: &Weight) -> Format {
    let mut format = Format::from(plan.policy.dtype);
    // From the last rule to the first, so that the first that fits is what remains.
    for rule in plan.forms.iter().flat_map(|policy| policy.rules.rules.iter().rev()) {
        let named = rule.weights.iter().any(|name| name.0.capture(&weight.name).is_some())
            || (rule.weights.is_empty() && weight.shape.len() == 2);
        let in_layers = match (&rule.layers, weight.block) {
            (None, _) => true,
            (Some(layers), Some(block)) => layers.contain(block),
            (Some(_), None) => false,
        };
        let listed = |source: u32| rule.types.iter().any(|ty| ty.0 == plan.sources[source as usize].ty);
        let typed = rule.types.is_empty() || weight.recipe.parts.iter().all(|part| listed(part.source));
        if named && in_layers && typed && weight.shape.iter().product::<u64>() >= rule.min_elements {
            format = rule.dtype;
        }
    }
    format
}

/// All weights of a parameter have one form, and an encoded one is marked as such.
fn agreed(plan: &Plan, param: &Param) -> Result<()> {
    if let Content::Constant(_) = param.content {
        return match param.form {
            Form::Plain => Ok(()),
            Form::Fp8 { .. } | Form::Kept(_) | Form::Scales { .. } => {
                Err(fault(param, 0, "a constant is encoded").audit())
            }
        };
    }
    if param.pinned == Some(PinnedDtype::F32) {
        return match param.form {
            Form::Plain => Ok(()),
            Form::Fp8 { .. } | Form::Kept(_) | Form::Scales { .. } => {
                Err(fault(param, 0, "it is encoded, though pinned").audit())
            }
        };
    }
    let (first, weights) = (format(plan, param), param.content.weights());
    // Under `raw`, numbers that are no weights stay what they are.
    let mut sources = weights.iter().flat_map(|w| &plan.model.weights[*w as usize].recipe.parts);
    let numbers = |ty: GgmlType| !matches!(Dtype::parse(ty.name()), None | Some(Dtype::F32 | Dtype::F16 | Dtype::BF16));
    if plan.model.verbatim && sources.any(|part| numbers(plan.sources[part.source as usize].ty)) {
        return Ok(());
    }
    let other = weights.iter().map(|w| &plan.model.weights[*w as usize]).find(|w| of_weight(plan, w) != first);
    if let Some(other) = other {
        let found = format!("the policy gives weight '{}' another form", other.name);
        return Err(fault(param, 0, found).expected(first.name()).audit());
    }
    let stored = match param.form {
        Form::Plain | Form::Scales { .. } => !matches!(stored(plan, param), Format::Fp8 | Format::Keep),
        Form::Fp8 { .. } => first == Format::Fp8,
        Form::Kept(_) => first == Format::Keep,
    };
    if !stored || !plan.profile.loads(first) {
        let found = format!("its form is {:?}", param.form);
        return Err(fault(param, 0, found).expected(format!("{}, which the stack loads", first.name())).audit());
    }
    Ok(())
}

/// No block lies on two ranks or in two parts.
fn encoded(plan: &Plan, param: &Param) -> Result<()> {
    let vocab = plan.profile.rules.vocab.multiple;
    for rank in 0..param.slices.len() {
        let parts = holdings(plan, param, rank as u64).unwrap_or_default();
        let group = param.content.parts().max(1);
        let mut row = 0;
        for (i, part) in parts.iter().enumerate() {
            if i % group == 0 {
                row = 0;
            }
            let whole = Matrix::of(&part.weight.shape);
            let first = part.in_weight(0, 0, vocab);
            let (end_row, end_col) = (first.0 + part.real.rows, first.1 + part.real.cols);
            let ends = |end: u64, of: u64| end == of || end.is_multiple_of(BLOCK);
            let begins = [row, first.0, first.1].iter().all(|n| n.is_multiple_of(BLOCK));
            if part.weight.shape.len() != 2 || !begins || !ends(end_row, whole.rows) || !ends(end_col, whole.cols) {
                let found = format!(
                    "rows {} to {end_row} and columns {} to {end_col} of '{}' are at row {row} of an element of its slice",
                    first.0, first.1, part.weight.name
                );
                return Err(fault(param, rank, found).expected(format!("whole blocks of {BLOCK}")).audit());
            }
            row += part.padded.rows;
        }
    }
    Ok(())
}

/// An encoded parameter's scales are there, under its name, in its set and stage, and one for each block on every rank.
fn linked(plan: &Plan, index: usize, scales: u32) -> Result<()> {
    let param = &plan.params[index];
    let Some(held) = plan.params.get(scales as usize) else {
        return Err(fault(param, 0, format!("its scales are parameter {scales}, which does not exist")).audit());
    };
    let wrong = |rank: usize, found: String| Err(fault(held, rank, found).audit());
    if held.form != (Form::Scales { of: index as u32 }) || held.dtype != Dtype::F32 {
        return wrong(0, format!("the scales of '{}' are {:?} in {}", param.name, held.form, held.dtype));
    }
    if held.name.strip_suffix("_scale_inv") != Some(param.name.as_str()) {
        return wrong(0, format!("it holds the scales of '{}'", param.name));
    }
    if (held.set, held.stage, held.cut, held.joins) != (param.set, param.stage, param.cut, None)
        || held.content != param.content
        || held.slices.len() != param.slices.len()
    {
        return wrong(0, format!("it is laid out unlike '{}', whose scales it holds", param.name));
    }
    let of_blocks = |axes: &[u64], held: &[u64]| match (axes, held) {
        ([lead @ .., rows, cols], [held_lead @ .., bands, blocks]) => {
            let covers = |n: u64, blocks: u64| n <= blocks * BLOCK && blocks * BLOCK < n + BLOCK;
            lead == held_lead && covers(*rows, *bands) && covers(*cols, *blocks)
        }
        ([] | [_], _) | (_, [] | [_]) => false,
    };
    if !of_blocks(&param.shape, &held.shape) {
        return wrong(0, format!("shape {:?} for the blocks of {:?}", held.shape, param.shape));
    }
    for (rank, (slice, of)) in held.slices.iter().zip(&param.slices).enumerate() {
        if !of_blocks(of.shape.axes(), slice.shape.axes()) {
            return wrong(rank, format!("shape {:?} for the blocks of {:?}", slice.shape, of.shape));
        }
        if !slice.pieces.is_empty() {
            return wrong(rank, format!("it has pieces {:?}", slice.pieces));
        }
    }
    Ok(())
}
