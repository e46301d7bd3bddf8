//! Kept blocks: quantized weights whose bytes are moved, cut and joined without decoding.
//!
//! ```text
//! X.weight [R, C] in blocks of Q4_K  ─►  X.qweight [R, C/256 · 144] U8
//! ```
//!
//! Rows may be cut and permuted anywhere, columns between blocks. Whatever else is done to values needs the values: such
//! weights are decoded, and said to be.

use super::build::dtype;
use super::share::share;
use super::{Form, Origin, Piece, Plan};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::{Content, CutKind, Format, Matrix, ParamSpec, Weight};

/// What the names of weights end with, and of their kept blocks.
const WEIGHT: &str = "weight";
const BLOCKS: &str = "qweight";
/// Most weights that a warning names.
const MOST_NAMED: usize = 4;

/// The name of a parameter's kept blocks.
pub(super) fn blocks_name(name: &str) -> String {
    match name.strip_suffix(WEIGHT) {
        Some(stem) => format!("{stem}{BLOCKS}"),
        None => format!("{name}.{BLOCKS}"),
    }
}

/// The name of the parameter whose kept blocks have this name, if it ends with `weight`.
pub fn weight_name(blocks: &str) -> Option<String> {
    blocks.strip_suffix(BLOCKS).map(|stem| format!("{stem}{WEIGHT}"))
}

/// Why a weight's blocks cannot be kept.
enum Obstacle {
    /// They are no blocks: it follows the float type like any other weight.
    Floats,
    /// Its values are needed.
    Values(String),
    /// A cut goes through blocks of so many elements.
    Cut(u64),
}

impl Plan {
    /// The dtype and form of a parameter, and why it is decoded if its blocks were to be kept.
    pub(super) fn form(&self, set: &GgufSet, spec: &ParamSpec) -> Result<(Dtype, Form, Option<String>)> {
        let model = &self.model;
        let format = self.format(set, spec)?;
        let stored = dtype(set, model, spec, format)?;
        // Under `raw`, numbers that are no weights stay what they are.
        if let Some(code) = format.code().filter(|code| stored == code.dtype()) {
            return Ok((stored, Form::Encoded { code, scales: 0 }, None));
        }
        let plain = |format, why| Ok((dtype(set, model, spec, format)?, Form::Plain, why));
        if format != Format::Keep || stored != Dtype::U8 {
            return plain(format, None);
        }
        let rest = self.keep_or.unwrap_or(self.policy.dtype).into();
        match self.obstacle(set, spec)? {
            Ok(ty) => Ok((Dtype::U8, Form::Kept(ty), None)),
            Err((_, Obstacle::Floats)) => plain(self.policy.dtype.into(), None),
            Err((_, Obstacle::Values(why))) => plain(rest, Some(why)),
            Err((_, Obstacle::Cut(block))) if self.keep_or.is_some() => {
                plain(rest, Some(format!("tp {} cuts through its blocks of {block} columns", self.tp)))
            }
            Err((weight, Obstacle::Cut(block))) => Err(self.through_blocks(set, weight, block)),
        }
    }

    /// The one type of a parameter's blocks, or the first weight that cannot be kept.
    fn obstacle(&self, set: &GgufSet, spec: &ParamSpec) -> Result<std::result::Result<GgmlType, (&Weight, Obstacle)>> {
        let mut ty = None;
        for index in spec.content.weights() {
            let weight = &self.model.weights[*index as usize];
            match self.block_type(weight) {
                Err(obstacle) => return Ok(Err((weight, obstacle))),
                Ok(own) if *ty.get_or_insert(own) != own => {
                    let why = "it is joined of parts whose types differ".to_owned();
                    return Ok(Err((weight, Obstacle::Values(why))));
                }
                Ok(_) => {}
            }
        }
        let Some(ty) = ty else { return Ok(Err((&self.model.weights[0], Obstacle::Floats))) };
        let expert = self.expert_parallel && matches!(spec.content, Content::Stacked { .. });
        for rank in 0..u64::from(self.tp) {
            for part in self.held(set, spec, expert, rank)?.0 {
                let weight = &self.model.weights[part.weight as usize];
                let (share, whole) = (&part.share, Matrix::of(&weight.shape));
                if part.rows != share.rows.end - share.rows.start || part.cols != share.cols.end - share.cols.start {
                    return Ok(Err((weight, Obstacle::Values("it is padded with zeros".into()))));
                }
                let between = |col: u64| col == whole.cols || col.is_multiple_of(ty.block());
                if !between(share.cols.start) || !between(share.cols.end) {
                    return Ok(Err((weight, Obstacle::Cut(ty.block()))));
                }
            }
        }
        Ok(Ok(ty))
    }

    /// The type of a weight's blocks, if its rows are rows of blocks.
    fn block_type(&self, weight: &Weight) -> std::result::Result<GgmlType, Obstacle> {
        let values = |why: &str| Err(Obstacle::Values(why.to_owned()));
        let mut types = self.types(weight);
        if types.clone().all(|ty| ty.block() == 1) {
            return Err(Obstacle::Floats);
        }
        let first = types.next();
        let Some(ty) = first.filter(|ty| types.all(|other| other == *ty)) else {
            return values("it is made of sources of several types");
        };
        for part in &weight.recipe.parts {
            if part.transpose {
                return values("its source is stored transposed");
            }
            if !part.op.is_identity() {
                return values("its values are scaled or added to");
            }
            if !part.cols.is_multiple_of(ty.block()) || !part.start.is_multiple_of(part.cols.max(1)) {
                return values("its rows are no whole blocks");
            }
        }
        Ok(ty)
    }

    /// The error for a tp that cuts through blocks, with the values that do not.
    fn through_blocks(&self, set: &GgufSet, weight: &Weight, block: u64) -> Error {
        let vocab = self.profile.rules.vocab;
        let kept = |w: &Weight| {
            let ty = self.block_type(w).ok().filter(|_| self.ruled(w) == Some(Format::Keep));
            ty.filter(|_| w.cut.kind == CutKind::Row)
        };
        let kept: Vec<Option<GgmlType>> = self.model.weights.iter().map(kept).collect();
        let fits = |n: u64| {
            self.model.weights.iter().zip(&kept).all(|(w, kept)| match (share(&w.cut, &w.shape, n, 0, vocab), kept) {
                (Err(_), _) => false,
                (Ok(_), None) => true,
                (Ok(share), Some(ty)) => n == 1 || share.cols.end.is_multiple_of(ty.block()),
            })
        };
        let working: Vec<String> = (1..=128).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
        let cut = format!("its {} columns, cut among {} ranks", Matrix::of(&weight.shape).cols, self.tp);
        Fault::new(format!("{cut}, end within blocks of {block}, which were to be kept"))
            .file(set.path())
            .tensor(&weight.name)
            .remedy(format!(
                "--tp values that work for this model with this policy: {}; --keep-or bf16 decodes such weights instead",
                working.join(", ")
            ))
            .layout()
    }

    /// What was to be kept and is decoded is no secret.
    pub(super) fn warn_of_decoded_blocks(&mut self) {
        let mut reasons: std::collections::BTreeMap<&str, Vec<&str>> = std::collections::BTreeMap::new();
        for param in &self.params {
            if let Some(why) = &param.decoded {
                reasons.entry(why).or_default().push(&param.name);
            }
        }
        let dtype = self.keep_or.unwrap_or(self.policy.dtype).name().to_lowercase();
        let warning = |(why, names): (&str, Vec<&str>)| {
            let shown = names[..names.len().min(MOST_NAMED)].join(", ");
            let more = if names.len() > MOST_NAMED { ", …" } else { "" };
            format!("{} parameters are decoded to {dtype} instead of kept, because {why}: {shown}{more}", names.len())
        };
        let warnings: Vec<String> = reasons.into_iter().map(warning).collect();
        self.model.warnings.extend(warnings);
    }
}

/// A piece in elements, as it is in the plan.
pub(super) fn piece_in_bytes(form: Form, piece: &mut Piece) {
    let Form::Kept(ty) = form else { return };
    let (block, block_bytes) = (ty.block(), ty.block_bytes());
    let scaled = |n: u64| n / block * block_bytes;
    (piece.col, piece.cols) = (scaled(piece.col), scaled(piece.cols));
    match &mut piece.origin {
        Origin::Source(region) => (region.col, region.width) = (scaled(region.col), scaled(region.width)),
        Origin::Fill(_) => {}
    }
}
