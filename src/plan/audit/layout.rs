//! Proof of shapes, cuts and places in files.

use super::fault;
use crate::error::{Fault, Result};
use crate::mapping::{CutKind, Weight};
use crate::plan::{Param, Plan};

pub(super) fn check(plan: &Plan) -> Result<()> {
    for param in &plan.params {
        let weight = weight_of(plan, param)?;
        if param.slices.len() != plan.tp as usize {
            let found = format!("{} slices", param.slices.len());
            return Err(fault(param, 0, found).expected(format!("one for each of {} ranks", plan.tp)).audit());
        }
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
    match seen.iter().position(|s| !s) {
        Some(missing) => {
            let name = &plan.model.weights[missing].name;
            Err(Fault::new("the weight has no parameter in the plan").tensor(name).audit())
        }
        None => Ok(()),
    }
}

/// The slices' shapes follow from the cut, fall between units, and join to the whole.
fn shapes(plan: &Plan, param: &Param, weight: &Weight) -> Result<()> {
    let tp = u64::from(plan.tp);
    let whole = &weight.shape;
    let axis = match weight.cut.kind {
        _ if tp == 1 => None,
        CutKind::Replicated => None,
        CutKind::Column | CutKind::Vocab => Some(0),
        CutKind::Row => Some(whole.len() - 1),
    };
    let mut joined = 0;
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
        let Some(axis) = axis else { continue };
        joined += axes[axis];
        if let Some(units) = weight.cut.units {
            let unit = whole[axis] / units.max(1);
            if unit == 0 || axes[axis] % unit != 0 {
                return Err(wrong(format!("a cut between its {units} units of {unit}")));
            }
        }
    }
    let Some(axis) = axis else { return Ok(()) };
    let expected = match (weight.cut.kind, weight.cut.units) {
        (CutKind::Vocab, _) => whole[axis].next_multiple_of(plan.profile.rules.vocab_pad),
        (CutKind::Column, Some(units)) if weight.cut.repeat && units < tp => whole[axis] / units * tp,
        (CutKind::Column | CutKind::Row | CutKind::Replicated, _) => whole[axis],
    };
    if joined != expected {
        let found = format!("the ranks' shares of axis {axis} add up to {joined}");
        return Err(fault(param, 0, found).expected(format!("{expected}")).audit());
    }
    Ok(())
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
            let param = &plan.params[*p as usize];
            let rank = file.rank as usize;
            let slice = &param.slices[rank];
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
