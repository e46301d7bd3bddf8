//! Proof of shapes, cuts and places in files.

use std::collections::HashMap;

use super::holding::{Holding, holdings};
use super::{fault, in_elements};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::mapping::{Content, CutKind, Format, Matrix, PinnedDtype, Set, Weight};
use crate::plan::{DRAFT_FOLDER, Param, ParamCut, Plan, PlannedFile};

/// Largest multiple that anything is padded to.
const MOST_PADDING: u64 = 1 << 16;

pub(super) fn check(plan: &Plan) -> Result<()> {
    let padding = 1..=MOST_PADDING;
    let (vocab, lanes) = (plan.profile.rules.vocab.multiple, plan.policy.moe_pad.unwrap_or(1));
    if plan.tp == 0 || !padding.contains(&vocab) || !padding.contains(&lanes) {
        let found = format!("{} ranks, padding to multiples of {vocab} (vocabulary) and {lanes} (experts)", plan.tp);
        return Err(Fault::new(found).expected(format!("at least 1, padding at most {MOST_PADDING}")).audit());
    }
    for weight in &plan.model.weights {
        recipe(plan, weight)?;
    }
    for param in &plan.params {
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
        // The scales of another parameter are proven with it.
        if param.form.is_scales() {
            continue;
        }
        content(plan, param)?;
        dtype(plan, param)?;
        let mut held = vec![(0u64, 0u64); param.content.weights().len()];
        for rank in 0..param.slices.len() {
            slice(plan, param, rank, &mut held)?;
        }
        whole(plan, param, &held)?;
    }
    every_weight(plan)?;
    files(plan)
}

/// The weights exist, are as many as the stack needs, and give the whole shape.
fn content(plan: &Plan, param: &Param) -> Result<()> {
    let weights = param.content.weights();
    if let Some(beyond) = weights.iter().find(|w| **w as usize >= plan.model.weights.len()) {
        return Err(fault(param, 0, format!("it stands for weight {beyond}, which does not exist")).audit());
    }
    let parts = param.content.parts();
    let by_expert = plan.expert_parallel && matches!(param.content, Content::Stacked { .. });
    let cut = match weights.first() {
        Some(_) if by_expert => ParamCut::Expert,
        Some(first) => ParamCut::Weights(plan.model.weights[*first as usize].cut.kind),
        None => ParamCut::Weights(CutKind::Replicated),
    };
    if param.cut != cut {
        return Err(fault(param, 0, format!("its cut is {}", param.cut.name())).expected(cut.name()).audit());
    }
    let whole: Vec<u64> = match param.content {
        Content::Constant(_) => Vec::new(),
        Content::Joined(_) | Content::Stacked { .. } => {
            if parts == 0 || weights.is_empty() || !weights.len().is_multiple_of(parts) {
                return Err(
                    fault(param, 0, format!("{} weights do not make elements of {parts}", weights.len())).audit()
                );
            }
            let shapes = || weights.iter().map(|w| &plan.model.weights[*w as usize].shape);
            let rows: u64 = shapes().take(parts).map(|s| s[0]).sum();
            let tail = &plan.model.weights[weights[0] as usize].shape[1..];
            let alike = shapes()
                .enumerate()
                .all(|(i, s)| s[1..] == *tail && s[0] == plan.model.weights[weights[i % parts] as usize].shape[0]);
            if !alike {
                return Err(fault(param, 0, "its weights have different shapes").audit());
            }
            let stack = matches!(param.content, Content::Stacked { .. }).then_some((weights.len() / parts) as u64);
            stack.into_iter().chain([rows]).chain(tail.iter().copied()).collect()
        }
    };
    if whole != in_elements(param, &param.shape) {
        let found = format!("its whole shape is planned as {:?}", param.shape);
        return Err(fault(param, 0, found).expected(format!("{whole:?}, by its weights")).audit());
    }
    Ok(())
}

/// The recipe makes up the weight's matrix and nothing else.
fn recipe(plan: &Plan, weight: &Weight) -> Result<()> {
    let recipe = &weight.recipe;
    let wrong = |found: String| {
        Fault::new(found).tensor(&weight.name).expected(format!("a recipe for shape {:?}", weight.shape)).audit()
    };
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
fn dtype(plan: &Plan, param: &Param) -> Result<()> {
    let policy = match super::forms::stored(plan, param) {
        Format::F32 => Dtype::F32,
        Format::F16 => Dtype::F16,
        Format::Bf16 => Dtype::BF16,
        Format::Fp8 => Dtype::F8E4M3,
        Format::Nvfp4 | Format::Keep => Dtype::U8,
    };
    let weights = || param.content.weights().iter().map(|w| &plan.model.weights[*w as usize]);
    // A layout may pin what the checkpoint does not; it never unpins.
    let pinned = weights().any(|w| w.pinned == Some(PinnedDtype::F32)) || param.pinned == Some(PinnedDtype::F32);
    let mut ruled = if pinned { Dtype::F32 } else { policy };
    for source in weights().flat_map(|w| &w.recipe.parts).filter_map(|part| plan.sources.get(part.source as usize)) {
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

/// A slice's shape follows from what the rank holds of each weight; cuts fall between units.
fn slice(plan: &Plan, param: &Param, rank: usize, held: &mut [(u64, u64)]) -> Result<()> {
    let axes = in_elements(param, param.slices[rank].shape.axes());
    let wrong = |expected: String| -> Error {
        fault(param, rank, format!("its slice has shape {axes:?} of {:?}", param.shape)).expected(expected).audit()
    };
    let mut expected = in_elements(param, &param.shape);
    let parts = holdings(plan, param, rank as u64).ok_or_else(|| wrong("weights that exist".into()))?;
    if let Some(first) = parts.first() {
        let stacked = usize::from(matches!(param.content, Content::Stacked { .. }));
        let group = &parts[..param.content.parts().min(parts.len())];
        let rows: u64 = group.iter().map(|h| h.padded.rows).sum();
        let inner: u64 = first.weight.shape.iter().skip(1).take(first.weight.shape.len().saturating_sub(2)).product();
        expected[stacked] = rows.checked_div(inner).unwrap_or(expected[stacked]);
        if first.weight.shape.len() > 1 {
            let last = expected.len() - 1;
            expected[last] = first.padded.cols;
        }
        if stacked == 1 {
            expected[0] = (parts.len() / param.content.parts()) as u64;
        }
    }
    if axes != expected {
        return Err(wrong(format!("{expected:?}, by the cuts of its weights")));
    }
    let offset = parts.first().map_or(0, |first| {
        param
            .content
            .weights()
            .iter()
            .position(|w| std::ptr::eq(&plan.model.weights[*w as usize], first.weight))
            .unwrap_or(0)
    });
    for (i, part) in parts.iter().enumerate() {
        between_units(part).map_err(&wrong)?;
        let sum = &mut held[offset + i];
        sum.0 += part.real.rows * part.real.cols;
        sum.1 += part.padded.rows;
    }
    Ok(())
}

fn between_units(part: &Holding<'_>) -> std::result::Result<(), String> {
    let Some(units) = part.weight.cut.units.filter(|_| part.ways > 1) else { return Ok(()) };
    let whole = Matrix::of(&part.weight.shape);
    let (axis, held) = match part.weight.cut.kind {
        CutKind::Column => (whole.rows, part.real.rows),
        CutKind::Row => (whole.cols, part.real.cols),
        CutKind::Vocab | CutKind::Replicated => return Ok(()),
    };
    let unit = axis / units.max(1);
    if unit == 0 || axis % units != 0 || held % unit != 0 {
        return Err(format!("a cut of '{}' between its {units} units of {unit}", part.weight.name));
    }
    Ok(())
}

/// The ranks' shares join to the whole of every weight, as many times over as there are copies.
fn whole(plan: &Plan, param: &Param, held: &[(u64, u64)]) -> Result<()> {
    for (i, index) in param.content.weights().iter().enumerate() {
        let weight = &plan.model.weights[*index as usize];
        let elements: u64 = weight.shape.iter().product();
        let by_expert = plan.expert_parallel && matches!(param.content, Content::Stacked { .. });
        let tp = u64::from(plan.tp);
        let times = match (weight.cut.kind, weight.cut.units) {
            _ if by_expert => 1,
            (CutKind::Replicated, _) => tp,
            (CutKind::Column, Some(units)) if weight.cut.repeat && units < tp => tp / units.max(1),
            (CutKind::Column | CutKind::Row | CutKind::Vocab, _) => 1,
        };
        if held[i].0 != elements * times {
            let found = format!("the ranks hold {} elements of weight '{}'", held[i].0, weight.name);
            return Err(fault(param, 0, found).expected(format!("{elements}, {times} times")).audit());
        }
    }
    Ok(())
}

/// Every weight is laid out or left out for a reason, and only a set of its own or a further pipeline stage holds it again.
fn every_weight(plan: &Plan) -> Result<()> {
    let mut uses: Vec<Vec<(Set, u32)>> = vec![Vec::new(); plan.model.weights.len()];
    for param in plan.params.iter().filter(|p| !p.form.is_scales()) {
        for weight in param.content.weights() {
            let place = (param.set, param.stage);
            if uses[*weight as usize].contains(&place) {
                let name = &plan.model.weights[*weight as usize].name;
                return Err(fault(param, 0, format!("weight '{name}' is planned twice")).audit());
            }
            uses[*weight as usize].push(place);
        }
    }
    for (weight, _) in &plan.left_out {
        match uses.get_mut(*weight as usize) {
            Some(places) if places.is_empty() => places.push((Set::Main, u32::MAX)),
            Some(_) | None => {
                let found = format!("weight {weight} is both laid out and left out, or does not exist");
                return Err(Fault::new(found).audit());
            }
        }
    }
    if let Some(missing) = uses.iter().position(Vec::is_empty) {
        let name = &plan.model.weights[missing].name;
        return Err(Fault::new("the weight has no parameter in the plan").tensor(name).audit());
    }
    let mut names: Vec<(Set, u32, &str)> = plan.params.iter().map(|p| (p.set, p.stage, p.name.as_str())).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(Fault::new("two parameters have this name")
            .tensor(twice[0].2)
            .remedy("Two rules, or two rounds of one rule's loops, give the same name; the plan was not executed")
            .audit()),
        None => Ok(()),
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
    let mut parts: HashMap<(Set, u32, u32), u64> = HashMap::new();
    for file in &plan.files {
        if file.rank >= plan.tp {
            return Err(Fault::new(format!("rank {} of {tp}", file.rank)).file(&file.name).audit());
        }
        *parts.entry((file.set, file.stage, file.rank)).or_default() += 1;
    }
    let mut next_part: HashMap<(Set, u32, u32), u64> = HashMap::new();
    let mut placed = vec![false; plan.params.len() * tp];
    for (index, file) in plan.files.iter().enumerate() {
        let rank = file.rank as usize;
        let stream = (file.set, file.stage, file.rank);
        let part = next_part.entry(stream).or_default();
        let name = name(plan, file, *part, parts[&stream]);
        *part += 1;
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
            if (param.set, param.stage) != (file.set, file.stage) {
                let found = format!("it is in '{}', a file of another set or stage", file.name);
                return Err(fault(param, rank, found).audit());
            }
            let slice = &param.slices[rank];
            let width = param.dtype.bytes();
            if std::mem::replace(&mut placed[*p as usize * tp + rank], true) {
                return Err(
                    fault(param, rank, format!("its slice is twice in the files, again in '{}'", file.name)).audit()
                );
            }
            if slice.file as usize != index || slice.offset != offset || !offset.is_multiple_of(width) {
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
fn name(plan: &Plan, file: &PlannedFile, part: u64, parts: u64) -> String {
    let files = &plan.profile.rules.files;
    let pipelined = plan.stages.count() > 1 && file.set == Set::Main;
    let (template, first) = match (pipelined, plan.tp, &files.whole) {
        (true, _, _) => (files.pipelined.clone().unwrap_or_default(), 0),
        (false, 1, Some(whole)) => (whole.clone(), 1),
        (false, _, _) => (files.ranked.clone(), 0),
    };
    let mut name = match file.set {
        Set::Main => template,
        Set::Draft => format!("{DRAFT_FOLDER}/{template}"),
    };
    let values = [("rank", file.rank.into()), ("stage", file.stage.into()), ("part", part + first), ("parts", parts)];
    for (key, value) in values {
        name = name.replace(&format!("{{{key}}}"), &value.to_string());
        // Few templates ask for zeros in front, and there may be many files.
        if !name.contains(&format!("{{{key}:0")) {
            continue;
        }
        for width in 0..=20 {
            name = name.replace(&format!("{{{key}:0{width}}}"), &format!("{value:0width$}"));
        }
    }
    name
}
