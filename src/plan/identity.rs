//! The identity of a plan: equal for equal plans, another for plans that would write any other byte.

use super::{Form, Origin, Plan, Region};

impl Plan {
    /// BLAKE3 over rules, sources, parameters, pieces and files.
    pub fn identity(&self) -> blake3::Hash {
        let mut hasher = Hasher(blake3::Hasher::new());
        hasher.text("ggshard plan 1");
        hasher.text(&self.model.mapping.digest);
        hasher.text(&self.profile.id().digest);
        hasher.number(u64::from(self.tp));
        hasher.numbers(self.stages.counts());
        hasher.numbers(&[self.expert_parallel.into(), self.policy.moe_pad.unwrap_or(0)]);
        if let Some(policy) = &self.forms {
            hasher.text(&policy.id().digest);
        }
        hasher.number(self.nvfp4.search.into());
        self.scale_leaders.iter().for_each(|leader| hasher.number((*leader).into()));
        for source in &self.sources {
            hasher.text(&source.name);
            hasher.numbers(&[source.ty as u64, source.elements, source.bytes]);
        }
        for param in &self.params {
            hasher.text(&param.name);
            hasher.text(param.dtype.name());
            hasher.numbers(&[param.set as u64, param.stage.into()]);
            match param.form {
                Form::Plain => {}
                Form::Encoded { code, scales } => hasher.numbers(&[1, scales.into(), code as u64]),
                Form::Scales { of, kind } => hasher.numbers(&[2, of.into(), kind as u64]),
                Form::Kept(ty) => hasher.numbers(&[3, ty as u64]),
            }
            hasher.numbers(&param.shape);
            for slice in &param.slices {
                hasher.numbers(slice.shape.axes());
                hasher.numbers(&[slice.pieces.start.into(), slice.pieces.end.into(), slice.file.into(), slice.offset]);
            }
        }
        for piece in &self.pieces {
            hasher.numbers(&[piece.row, piece.col, piece.rows, piece.cols]);
            match piece.origin {
                Origin::Fill(value) => hasher.numbers(&[0, value.to_bits().into()]),
                Origin::Source(Region { source, row, step, col, width, transpose, op }) => {
                    hasher.numbers(&[1, source.into(), row, step, col, width, transpose.into()]);
                    let (scale, element) = op.scale.map_or((u64::MAX, 0), |(s, e)| (s.into(), e));
                    hasher.numbers(&[scale, element, op.add.map_or(u64::MAX, |a| a.to_bits().into())]);
                }
            }
        }
        for file in &self.files {
            hasher.text(&file.name);
            hasher.numbers(&[file.rank.into(), file.data_bytes]);
        }
        hasher.0.finalize()
    }
}

/// Length-prefixed fields, so that no two sequences of fields give the same bytes.
struct Hasher(blake3::Hasher);

impl Hasher {
    fn number(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }

    fn numbers(&mut self, list: &[u64]) {
        self.number(list.len() as u64);
        list.iter().for_each(|n| self.number(*n));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }
}
