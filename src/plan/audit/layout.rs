//! Proof of shapes, cuts and places in files.

use super::fault;
use super::holding::{Holding, holdings};
use crate::error::{Error, Fault, Result};
use crate::mapping::{Content, CutKind, Set};
use crate::plan::{Param, Plan};

pub(super) fn check(plan: &Plan) -> Result<()> {
    for param in &plan.params {
        if param.slices.len() != plan.tp as usize {
            let found = format!("{} slices", param.slices.len());
            return Err(fault(param, 0, found).expected(format!("one for each of {} ranks", plan.tp)).audit());
        }
        content(plan, param)?;
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
    let whole: Vec<u64> = match param.content {
        Content::Constant(_) => Vec::new(),
        Content::Joined(_) | Content::Stacked { .. } => {
            if parts == 0 || weights.is_empty() || weights.len() % parts != 0 {
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
    if whole != param.shape {
        let found = format!("its whole shape is planned as {:?}", param.shape);
        return Err(fault(param, 0, found).expected(format!("{whole:?}, by its weights")).audit());
    }
    Ok(())
}

/// A slice's shape follows from what the rank holds of each weight; cuts fall between units.
fn slice(plan: &Plan, param: &Param, rank: usize, held: &mut [(u64, u64)]) -> Result<()> {
    let axes = param.slices[rank].shape.axes();
    let wrong = |expected: String| -> Error {
        fault(param, rank, format!("its slice has shape {axes:?} of {:?}", param.shape)).expected(expected).audit()
    };
    let mut expected = param.shape.clone();
    let parts = holdings(plan, param, rank as u64).ok_or_else(|| wrong("weights that exist".into()))?;
    if let Some(first) = parts.first() {
        let stacked = usize::from(matches!(param.content, Content::Stacked { .. }));
        let group = &parts[..param.content.parts().min(parts.len())];
        let rows: u64 = group.iter().map(|h| h.padded.rows).sum();
        let inner: u64 = first.weight.shape.iter().skip(1).take(first.weight.shape.len().saturating_sub(2)).product();
        expected[stacked] = rows / inner.max(1);
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
    let whole = crate::mapping::Matrix::of(&part.weight.shape);
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
    for param in &plan.params {
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
    match uses.iter().position(Vec::is_empty) {
        Some(missing) => {
            let name = &plan.model.weights[missing].name;
            Err(Fault::new("the weight has no parameter in the plan").tensor(name).audit())
        }
        None => Ok(()),
    }
}

/// Every slice lies in one file of its rank; a file's slices follow each other without gap, wide dtypes first.
fn files(plan: &Plan) -> Result<()> {
    let mut placed = vec![0u32; plan.params.len()];
    let mut names: Vec<&str> = plan.files.iter().map(|f| f.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
        return Err(Fault::new(format!("two files are named '{}'", twice[0])).audit());
    }
    for (index, file) in plan.files.iter().enumerate() {
        let mut offset = 0;
        for p in &file.params {
            let rank = file.rank as usize;
            let held = plan.params.get(*p as usize).and_then(|param| Some((param, param.slices.get(rank)?)));
            let Some((param, slice)) = held else {
                return Err(Fault::new(format!("parameter {p} of rank {rank} does not exist"))
                    .file(&file.name)
                    .audit());
            };
            if (param.set, param.stage) != (file.set, file.stage) {
                let found = format!("it is in '{}', a file of another set or stage", file.name);
                return Err(fault(param, rank, found).audit());
            }
            let width = param.dtype.bytes();
            placed[*p as usize] += 1;
            if slice.file as usize != index || slice.offset != offset || offset % width != 0 {
                let found = format!("its slice is at byte {} of file {}", slice.offset, slice.file);
                return Err(fault(param, rank, found)
                    .expected(format!("byte {offset} of file {index} ('{}'), a multiple of {width}", file.name))
                    .audit());
            }
            offset += slice.shape.elements() * width;
        }
        if offset != file.data_bytes {
            let found = format!("its slices take {offset} bytes, its size is planned as {}", file.data_bytes);
            return Err(Fault::new(found).file(&file.name).audit());
        }
    }
    match placed.iter().position(|n| *n != plan.tp) {
        Some(p) => {
            let found = format!("its slices are in {} files", placed[p]);
            Err(fault(&plan.params[p], 0, found).expected(format!("one for each of {} ranks", plan.tp)).audit())
        }
        None => Ok(()),
    }
}
