//! Which file holds which slice, and at which offset.

use std::cmp::Reverse;

use super::{Form, Param, Plan};
use crate::error::{Fault, Result};
use crate::mapping::{FileSlot, Set};

/// Bytes of a chunk of BLAKE3. Hashing what does not begin or end with one takes longer.
const CHUNK: u64 = 1024;
/// A header entry takes its name's length and about this many bytes more.
const ENTRY_BYTES: u64 = 120;
/// A part is closed before its header grows past this; readers refuse headers of 100,000,000 bytes.
const HEADER_BYTES: u64 = 60_000_000;

/// Most files of one plan.
const MOST_FILES: usize = 1 << 16;

/// The folder of a draft model's files, below that of the model.
pub const DRAFT_FOLDER: &str = "mtp";

/// A file that the plan will write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its name, relative to the output folder.
    pub name: String,
    /// The set that it belongs to.
    pub set: Set,
    /// The pipeline stage whose parameters it holds.
    pub stage: u32,
    /// The tensor-parallel rank whose slices it holds.
    pub rank: u32,
    /// The parameters it holds, as indices of [`Plan::params`], in the order of the file: wide dtypes first, so that
    /// every tensor is aligned to its element size, and within a dtype in the global order. Those that are no whole KiB
    /// come after all others, which then begin where a chunk of the file's hash does.
    pub params: Vec<u32>,
    /// Bytes of its data section.
    pub data_bytes: u64,
}

/// Distributes every rank's slices over parts: in the global order, a part is closed when the next slice would take it
/// past the part size. A slice never spans parts; a larger one has a part of its own.
pub(super) fn assign(plan: &mut Plan) -> Result<()> {
    for set in [Set::Main, Set::Draft] {
        let stages = match set {
            Set::Main => plan.stages.count(),
            Set::Draft => 1,
        };
        for stage in 0..stages {
            let held = |(_, param): &(usize, &Param)| param.set == set && param.stage == stage;
            let params: Vec<u32> = plan.params.iter().enumerate().filter(held).map(|(i, _)| i as u32).collect();
            if params.is_empty() {
                continue;
            }
            for rank in 0..plan.tp {
                stream(plan, set, stage, rank, &params)?;
            }
        }
    }
    Ok(())
}

/// The parts of one rank of one stage.
fn stream(plan: &mut Plan, set: Set, stage: u32, rank: u32, params: &[u32]) -> Result<()> {
    let mut parts: Vec<Vec<u32>> = Vec::new();
    let (mut data, mut header) = (0u64, 0u64);
    for index in params {
        let param = &plan.params[*index as usize];
        let bytes = plan.slice_bytes(param, &param.slices[rank as usize]);
        // Kept blocks are named once more, with their type.
        let named = match param.form {
            Form::Plain | Form::Encoded { .. } | Form::Scales { .. } => 1,
            Form::Kept(_) => 2,
        };
        let entry = named * param.name.len() as u64 + ENTRY_BYTES;
        let full = data.saturating_add(bytes) > plan.policy.part_size || header + entry > HEADER_BYTES;
        match parts.last_mut() {
            Some(part) if !full => part.push(*index),
            Some(_) | None => {
                parts.push(vec![*index]);
                (data, header) = (0, 0);
            }
        }
        data = data.saturating_add(bytes);
        header += entry;
    }
    let count = parts.len();
    if plan.files.len() + count > MOST_FILES {
        let found = format!("more than {MOST_FILES} files with parts of {} bytes", plan.policy.part_size);
        return Err(Fault::new(found).remedy("Choose a larger --part-size").layout());
    }
    for (part, mut params) in parts.into_iter().enumerate() {
        params.sort_by_key(|p| {
            let param = &plan.params[*p as usize];
            let bytes = plan.slice_bytes(param, &param.slices[rank as usize]);
            (!bytes.is_multiple_of(CHUNK), Reverse(param.dtype.bytes()))
        });
        let file = plan.files.len() as u32;
        let mut offset = 0;
        for index in &params {
            let param = &mut plan.params[*index as usize];
            let width = param.dtype.bytes();
            let slice = &mut param.slices[rank as usize];
            slice.file = file;
            slice.offset = offset;
            offset += slice.shape.elements() * width;
        }
        let pp = match set {
            Set::Main => plan.stages.count(),
            Set::Draft => 1,
        };
        let slot = FileSlot { tp: plan.tp, pp, rank, stage, part, parts: count };
        let name = plan.profile.file_name(slot)?;
        let name = match set {
            Set::Main => name,
            Set::Draft => format!("{DRAFT_FOLDER}/{name}"),
        };
        plan.files.push(PlannedFile { name, set, stage, rank, params, data_bytes: offset });
    }
    Ok(())
}
