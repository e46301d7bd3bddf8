//! Values of sources as f32, put where pieces say.

use std::ops::Range;

use super::super::tile::{Context, Scratch};
use crate::error::{Fault, Result};
use crate::mapping::ValueOp;
use crate::plan::{Origin, Piece};

impl Context<'_> {
    /// Decodes a rectangle of what pieces make up.
    pub(super) fn gather(
        &self,
        pieces: &[Piece],
        rows: &Range<u64>,
        cols: &Range<u64>,
        values: &mut [f32],
        run: &mut Vec<f32>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let width = (cols.end - cols.start) as usize;
        for piece in pieces {
            let (top, bottom) = (piece.row.max(rows.start), (piece.row + piece.rows).min(rows.end));
            let (left, right) = (piece.col.max(cols.start), (piece.col + piece.cols).min(cols.end));
            if top >= bottom || left >= right {
                continue;
            }
            let taken = (right - left) as usize;
            let at = |row: u64, col: u64| (row - rows.start) as usize * width + (col - cols.start) as usize;
            match piece.origin {
                Origin::Fill(value) => {
                    (top..bottom).for_each(|row| values[at(row, left)..][..taken].fill(value));
                }
                Origin::Source(region) if region.transpose => {
                    let tall = bottom - top;
                    run.resize(tall as usize, 0.0);
                    for col in left..right {
                        let first = region.element(top - piece.row, col - piece.col);
                        self.floats(region.source, first..first + tall, region.op, run, scratch)?;
                        for (row, value) in (top..bottom).zip(run.iter()) {
                            values[at(row, col)] = *value;
                        }
                    }
                }
                // Whole rows follow each other in the source as they do here.
                Origin::Source(region) if region.step == 1 && taken == width && taken as u64 == region.width => {
                    let first = region.element(top - piece.row, 0);
                    let count = (bottom - top) * region.width;
                    let out = &mut values[at(top, left)..][..count as usize];
                    self.floats(region.source, first..first + count, region.op, out, scratch)?;
                }
                Origin::Source(region) => {
                    for row in top..bottom {
                        let first = region.element(row - piece.row, left - piece.col);
                        let out = &mut values[at(row, left)..][..taken];
                        self.floats(region.source, first..first + taken as u64, region.op, out, scratch)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Decodes elements of a source to f32.
    pub(super) fn floats(
        &self,
        source: u32,
        elements: Range<u64>,
        op: ValueOp,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let tensor = &self.set.tensors()[source as usize];
        let (block, block_bytes) = (tensor.ty.block(), tensor.ty.block_bytes());
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let range = blocks.start * block_bytes..blocks.end * block_bytes;
        self.reads.record(source, range.clone());
        let scale = op.scale.map(|(source, element)| self.scale(source, element, scratch)).transpose()?;
        let decoder = self.decoders[source as usize]
            .ok_or_else(|| Fault::new(format!("type {} has no decoder", tensor.ty)).tensor(&tensor.name).audit())?;
        let bytes = self.fetch(source, range, &mut scratch.source)?;
        let (skipped, decoded) = (elements.start - blocks.start * block, (blocks.end - blocks.start) * block);
        if decoded == out.len() as u64 {
            decoder.to_f32(bytes, out);
        } else {
            scratch.floats.resize(decoded as usize, 0.0);
            decoder.to_f32(bytes, &mut scratch.floats);
            out.copy_from_slice(&scratch.floats[skipped as usize..][..out.len()]);
        }
        if let Some(scale) = scale {
            out.iter_mut().for_each(|v| *v *= scale);
        }
        if let Some(constant) = op.add {
            out.iter_mut().for_each(|v| *v += constant);
        }
        Ok(())
    }
}
