//! Which file holds which slice, and at which offset.

use std::cmp::Reverse;

use super::Plan;
use crate::error::Result;

/// A header entry takes its name's length and about this many bytes more.
const ENTRY_BYTES: u64 = 120;
/// A part is closed before its header grows past this; readers refuse headers of 100,000,000 bytes.
const HEADER_BYTES: u64 = 60_000_000;

/// A file that the plan will write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its name in the output folder.
    pub name: String,
    /// The rank whose slices it holds.
    pub rank: u32,
    /// The parameters it holds, as indices of [`Plan::params`], in the order of the file: wide dtypes first, so that
    /// every tensor is aligned to its element size, and within a dtype in the global order.
    pub params: Vec<u32>,
    /// Bytes of its data section.
    pub data_bytes: u64,
}

/// Distributes every rank's slices over parts: in the global order, a part is closed when the next slice would take it
/// past the part size. A slice never spans parts; a larger one has a part of its own.
pub(super) fn assign(plan: &mut Plan) -> Result<()> {
    for rank in 0..plan.tp {
        let mut parts: Vec<Vec<u32>> = Vec::new();
        let (mut data, mut header) = (0u64, 0u64);
        for (index, param) in plan.params.iter().enumerate() {
            let bytes = plan.slice_bytes(param, &param.slices[rank as usize]);
            let entry = param.name.len() as u64 + ENTRY_BYTES;
            let full = data + bytes > plan.policy.part_size || header + entry > HEADER_BYTES;
            match parts.last_mut() {
                Some(part) if !full => part.push(index as u32),
                Some(_) | None => {
                    parts.push(vec![index as u32]);
                    (data, header) = (0, 0);
                }
            }
            data += bytes;
            header += entry;
        }
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        let count = parts.len();
        for (part, mut params) in parts.into_iter().enumerate() {
            params.sort_by_key(|p| Reverse(plan.params[*p as usize].dtype.bytes()));
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
            let name = plan.profile.file_name(plan.tp, rank, part, count)?;
            plan.files.push(PlannedFile { name, rank, params, data_bytes: offset });
        }
    }
    Ok(())
}
