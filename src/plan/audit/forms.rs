//! Proof that what is encoded is what the policy says, and that no block is cut.

use super::holding::{Holding, holdings};
use super::{fault, scales};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::gguf::GgmlType;
use crate::mapping::{Content, Format, Matrix, Part, PinnedDtype, Weight};
use crate::plan::{Code, Form, Param, Plan};

pub(super) fn check(plan: &Plan) -> Result<()> {
    let mixed = plan.forms.is_some() && scales::mixed(plan);
    for (index, param) in plan.params.iter().enumerate() {
        match param.form {
            Form::Plain => agreed(plan, param)?,
            Form::Encoded { code, scales } => {
                agreed(plan, param)?;
                encoded(plan, param, code)?;
                scales::linked(plan, index, code, scales, mixed)?;
            }
            Form::Kept(ty) => {
                agreed(plan, param)?;
                if kept(plan, param) != Some(ty) {
                    return Err(fault(param, 0, format!("it keeps blocks of {ty}"))
                        .expected("blocks that can be kept")
                        .audit());
                }
            }
            // Proven with the parameter that it belongs to, if that has it.
            Form::Scales { of, .. } => {
                let of = plan.params.get(of as usize);
                if !of.is_some_and(|of| scales::of(plan, of).any(|(_, held)| held == index)) {
                    return Err(fault(param, 0, "they are scales of no parameter")
                        .expected("an encoded parameter that they follow")
                        .audit());
                }
            }
        }
    }
    scales::shared(plan)
}

/// The form that the policy gives the first of a parameter's weights, by a reading of the rules of the audit's own.
pub(super) fn format(plan: &Plan, param: &Param) -> Format {
    let first = param.content.weights().first().and_then(|w| plan.model.weights.get(*w as usize));
    first.map_or(Format::from(plan.policy.dtype), |weight| of_weight(plan, weight))
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

/// The form that the policy gives a weight.
pub(super) fn of_weight(plan: &Plan, weight: &Weight) -> Format {
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
        let classed = rule.classes.is_empty() || rule.classes.contains(&plan.model.class);
        let in_kind = rule.mtp.unwrap_or(weight.mtp) == weight.mtp;
        if named
            && classed
            && in_kind
            && in_layers
            && typed
            && weight.shape.iter().product::<u64>() >= rule.min_elements
        {
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
            Form::Encoded { .. } | Form::Kept(_) | Form::Scales { .. } => {
                Err(fault(param, 0, "a constant is encoded").audit())
            }
        };
    }
    if param.pinned == Some(PinnedDtype::F32) {
        return match param.form {
            Form::Plain => Ok(()),
            Form::Encoded { .. } | Form::Kept(_) | Form::Scales { .. } => {
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
        Form::Plain | Form::Scales { .. } => stored(plan, param).is_float(),
        Form::Encoded { code: Code::Fp8, .. } => first == Format::Fp8,
        Form::Encoded { code: Code::Nvfp4, .. } => first == Format::Nvfp4,
        Form::Kept(_) => first == Format::Keep,
    };
    if !stored || !plan.profile.loads(first) {
        let found = format!("its form is {:?}", param.form);
        return Err(fault(param, 0, found).expected(format!("{}, which the stack loads", first.name())).audit());
    }
    Ok(())
}

/// No block lies on two ranks or in two parts.
fn encoded(plan: &Plan, param: &Param, code: Code) -> Result<()> {
    let (rows, cols): (u64, u64) = match code {
        Code::Fp8 => (128, 128),
        Code::Nvfp4 => (1, 16),
    };
    let vocab = plan.profile.rules.vocab.multiple;
    for rank in 0..param.slices.len() {
        let parts = holdings(plan, param, rank as u64).unwrap_or_default();
        let group = param.content.parts().max(1);
        let mut row = 0u64;
        for (i, part) in parts.iter().enumerate() {
            if i % group == 0 {
                row = 0;
            }
            let whole = Matrix::of(&part.weight.shape);
            let first = part.in_weight(0, 0, vocab);
            let (end_row, end_col) = (first.0 + part.real.rows, first.1 + part.real.cols);
            let begins = row.is_multiple_of(rows) && first.0.is_multiple_of(rows) && first.1.is_multiple_of(cols);
            let ends = (end_row == whole.rows || end_row.is_multiple_of(rows))
                && (end_col.is_multiple_of(cols) || (code == Code::Fp8 && end_col == whole.cols))
                && (code == Code::Fp8 || part.padded.cols.is_multiple_of(cols));
            if part.weight.shape.len() != 2 || !begins || !ends {
                let found = format!(
                    "rows {} to {end_row} and columns {} to {end_col} of '{}' are at row {row} of an element of its slice",
                    first.0, first.1, part.weight.name
                );
                return Err(fault(param, rank, found).expected(format!("whole blocks of {rows} x {cols}")).audit());
            }
            row += part.padded.rows;
        }
    }
    Ok(())
}
