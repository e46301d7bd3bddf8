//! Proof of names, dtypes, shapes, cuts and places in files.

use super::fault;
use crate::dequant::FloatType;
use crate::dtype::Dtype;
use crate::error::{Fault, Result};
use crate::mapping::{CutKind, Matrix, PinnedDtype, Weight};
use crate::plan::{Param, Plan};

pub(super) fn check(plan: &Plan) -> Result<()> {
    if plan.tp == 0 || plan.profile.rules.vocab_pad == 0 {
        let found = format!("{} ranks, a vocabulary padded to a multiple of {}", plan.tp, plan.profile.rules.vocab_pad);
        return Err(Fault::new(found).expected("neither to be 0").audit());
    }
    for param in &plan.params {
        let weight = weight_of(plan, param)?;
        if param.slices.len() != plan.tp as usize {
            let found = format!("{} slices", param.slices.len());
            return Err(fault(param, 0, found).expected(format!("one for each of {} ranks", plan.tp)).audit());
        }
        for (rank, slice) in param.slices.iter().enumerate() {
            if plan.pieces.get(slice.pieces.start as usize..slice.pieces.end as usize).is_none() {
                let found = format!("its pieces are {:?} of {}", slice.pieces, plan.pieces.len());
                return Err(fault(param, rank, found).audit());
            }
        }
        recipe(plan, param, weight)?;
        dtype(plan, param, weight)?;
        shapes(plan, param, weight)?;
    }
    every_weight_once(plan)?;
    files(plan)
}

fn weight_of<'a>(plan: &'a Plan, param: &Param) -> Result<&'a Weight> {
    let weight = plan.model.weights.get(param.weight as usize);
    match weight {
        Some(w) if w.name == param.name && w.shape == param.shape && w.cut == param.cut => Ok(w),
        Some(w) => {
            let found = format!("it stands for weight '{}' of shape {:?}", w.name, w.shape);
            Err(fault(param, 0, found).expected(format!("the weight of its name, shape {:?}", param.shape)).audit())
        }
        None => Err(fault(param, 0, format!("it stands for weight {}, which does not exist", param.weight)).audit()),
    }
}

fn every_weight_once(plan: &Plan) -> Result<()> {
    let mut seen = vec![false; plan.model.weights.len()];
    for param in &plan.params {
        if std::mem::replace(&mut seen[param.weight as usize], true) {
            return Err(fault(param, 0, "it is planned twice").audit());
        }
    }
    if let Some(missing) = seen.iter().position(|s| !s) {
        let name = &plan.model.weights[missing].name;
        return Err(Fault::new("the weight has no parameter in the plan").tensor(name).audit());
    }
    let mut names: Vec<&str> = plan.params.iter().map(|p| p.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(Fault::new("two parameters have this name")
            .tensor(twice[0])
            .remedy("Two rules, or two rounds of one rule's loops, give the same name; the plan was not executed")
            .audit()),
        None => Ok(()),
    }
}

/// The recipe makes up the weight's matrix and nothing else.
fn recipe(plan: &Plan, param: &Param, weight: &Weight) -> Result<()> {
    let recipe = &weight.recipe;
    let wrong =
        |found: String| fault(param, 0, found).expected(format!("a recipe for shape {:?}", weight.shape)).audit();
    if weight.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).is_none() {
        return Err(wrong("its shape has too many elements".into()));
    }
    let whole = Matrix::of(&weight.shape);
    let mut rows = Some(0u64);
    for part in &recipe.parts {
        let Some(source) = plan.sources.get(part.source as usize) else {
            return Err(wrong(format!("it is made of source {}, which does not exist", part.source)));
        };
        let taken = recipe.units.checked_mul(part.rows).and_then(|n| n.checked_mul(part.cols));
        if taken.and_then(|n| n.checked_add(part.start)).is_none_or(|end| end > source.elements) {
            return Err(wrong(format!("it takes elements of '{}' that are not there", source.name)));
        }
        let even = part.unpermute.is_none_or(|heads| heads > 0 && part.rows.is_multiple_of(heads.saturating_mul(2)));
        if (part.rows > 0 && part.cols != whole.cols) || !even || (part.transpose && part.unpermute.is_some()) {
            return Err(wrong(format!("'{}' gives it {} rows of {} columns", source.name, part.rows, part.cols)));
        }
        rows = rows.and_then(|n| n.checked_add(part.rows));
    }
    match rows.and_then(|n| n.checked_mul(recipe.units)) {
        Some(rows) if rows == whole.rows => Ok(()),
        Some(_) | None => Err(wrong(format!("its sources do not give {} rows", whole.rows))),
    }
}

/// The element type is the pinned one, or that of the policy; under `raw` numbers that are no weights keep theirs.
fn dtype(plan: &Plan, param: &Param, weight: &Weight) -> Result<()> {
    let policy = match plan.policy.dtype {
        FloatType::F32 => Dtype::F32,
        FloatType::F16 => Dtype::F16,
        FloatType::BF16 => Dtype::BF16,
    };
    let mut ruled = match weight.pinned {
        Some(PinnedDtype::F32) => Dtype::F32,
        None => policy,
    };
    for source in weight.recipe.parts.iter().filter_map(|part| plan.sources.get(part.source as usize)) {
        match Dtype::parse(source.ty.name()) {
            None | Some(Dtype::F32 | Dtype::F16 | Dtype::BF16) => {}
            Some(own) if plan.model.verbatim => ruled = own,
            Some(own) => return Err(fault(param, 0, format!("it is made of {own} numbers")).audit()),
        }
    }
    if param.dtype != ruled {
        return Err(fault(param, 0, format!("its dtype is {}", param.dtype)).expected(ruled.name()).audit());
    }
    Ok(())
}

/// The slices' shapes follow from the cut, fall between units, and join to the whole.
fn shapes(plan: &Plan, param: &Param, weight: &Weight) -> Result<()> {
    let tp = u64::from(plan.tp);
    let whole = &weight.shape;
    let axis = match weight.cut.kind {
        _ if tp == 1 => None,
        CutKind::Replicated => None,
        CutKind::Column | CutKind::Vocab => Some(0),
        CutKind::Row => Some(whole.len().saturating_sub(1)),
    };
    let joined = match axis.map(|axis| (axis, whole.get(axis).copied())) {
        None => None,
        Some((_, None)) => return Err(fault(param, 0, "a scalar is cut").audit()),
        Some((axis, Some(length))) => Some((axis, joined_length(plan, weight, length))),
    };
    for (rank, slice) in param.slices.iter().enumerate() {
        let axes = slice.shape.axes();
        let wrong = |expected: String| {
            fault(param, rank, format!("its slice has shape {axes:?} of {whole:?}")).expected(expected).audit()
        };
        if axes.len() != whole.len() {
            return Err(wrong("as many axes as the whole".into()));
        }
        for (i, (held, all)) in axes.iter().zip(whole).enumerate() {
            if Some(i) != axis && held != all {
                return Err(wrong(format!("axis {i} to be whole")));
            }
        }
        let Some((axis, joined)) = joined else { continue };
        match joined {
            Some(joined) if axes[axis].checked_mul(tp) == Some(joined) => {}
            Some(joined) => {
                return Err(wrong(format!("each of {tp} ranks to hold the same of {joined} on axis {axis}")));
            }
            None => return Err(wrong("an axis of whole units".into())),
        }
        if let Some(units) = weight.cut.units {
            let unit = whole[axis] / units.max(1);
            if unit == 0 || axes[axis] % unit != 0 {
                return Err(wrong(format!("a cut between its {units} units of {unit}")));
            }
        }
    }
    Ok(())
}

/// What the ranks' shares of the cut axis add up to; none if the axis is not made of whole units.
fn joined_length(plan: &Plan, weight: &Weight, length: u64) -> Option<u64> {
    let tp = u64::from(plan.tp);
    match (weight.cut.kind, weight.cut.units) {
        (CutKind::Vocab, _) => length.checked_next_multiple_of(plan.profile.rules.vocab_pad),
        (_, Some(units)) if units == 0 || length % units != 0 => None,
        (CutKind::Column, Some(units)) if weight.cut.repeat && units < tp => (length / units).checked_mul(tp),
        (CutKind::Column | CutKind::Row | CutKind::Replicated, _) => Some(length),
    }
}

/// Every slice lies once in one file of its rank; a file's slices follow each other without gap, each aligned to its
/// element size; a file's name says which rank and part it is.
fn files(plan: &Plan) -> Result<()> {
    let tp = plan.tp as usize;
    let mut names: Vec<&str> = plan.files.iter().map(|f| f.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
        return Err(Fault::new("two files have this name").file(twice[0]).audit());
    }
    let mut parts = vec![0u64; tp];
    for file in &plan.files {
        match parts.get_mut(file.rank as usize) {
            Some(parts) => *parts += 1,
            None => return Err(Fault::new(format!("rank {} of {tp}", file.rank)).file(&file.name).audit()),
        }
    }
    let mut next_part = vec![0u64; tp];
    let mut placed = vec![false; plan.params.len() * tp];
    for (index, file) in plan.files.iter().enumerate() {
        let rank = file.rank as usize;
        let name = name(plan, file.rank, next_part[rank], parts[rank]);
        next_part[rank] += 1;
        if file.name != name {
            let found = format!("a file of rank {rank} has this name");
            return Err(Fault::new(found).file(&file.name).expected(format!("'{name}'")).audit());
        }
        let mut offset = 0u64;
        for p in &file.params {
            let Some(param) = plan.params.get(*p as usize) else {
                return Err(Fault::new(format!("it holds parameter {p}, which does not exist"))
                    .file(&file.name)
                    .audit());
            };
            let slice = &param.slices[rank];
            let width = param.dtype.bytes();
            if std::mem::replace(&mut placed[*p as usize * tp + rank], true) {
                return Err(
                    fault(param, rank, format!("its slice is twice in the files, again in '{}'", file.name)).audit()
                );
            }
            if slice.file as usize != index || slice.offset != offset || offset % width != 0 {
                let found = format!("its slice is at byte {} of file {}", slice.offset, slice.file);
                return Err(fault(param, rank, found)
                    .expected(format!("byte {offset} of file {index} ('{}'), a multiple of {width}", file.name))
                    .audit());
            }
            let end = param.dtype.tensor_bytes(slice.shape.axes()).and_then(|bytes| offset.checked_add(bytes));
            offset = end.ok_or_else(|| fault(param, rank, "its end is beyond what a file can hold").audit())?;
        }
        if offset != file.data_bytes {
            let found = format!("its slices take {offset} bytes, its size is planned as {}", file.data_bytes);
            return Err(Fault::new(found).file(&file.name).audit());
        }
    }
    match placed.iter().position(|p| !p) {
        Some(at) => Err(fault(&plan.params[at / tp], at % tp, "its slice is in no file of its rank").audit()),
        None => Ok(()),
    }
}

/// The profile's name for a part, by replacing what stands between braces.
fn name(plan: &Plan, rank: u32, part: u64, parts: u64) -> String {
    let files = &plan.profile.rules.files;
    let (template, values) = match plan.tp {
        1 => (&files.whole, [("rank", 0), ("part", part + 1), ("parts", parts)]),
        _ => (&files.ranked, [("rank", u64::from(rank)), ("part", part), ("parts", parts)]),
    };
    let mut name = template.clone();
    for (key, value) in values {
        name = name.replace(&format!("{{{key}}}"), &value.to_string());
        for width in 0..=20 {
            name = name.replace(&format!("{{{key}:0{width}}}"), &format!("{value:0width$}"));
        }
    }
    name
}
