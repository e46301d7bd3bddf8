//! Forms: which parameters are encoded in blocks, and the scales that go with them.
//!
//! ```text
//! weight   [.., R, C]                      E4M3     bands of 128 rows, blocks of 128 columns
//! scales   [.., ceil(R/128), ceil(C/128)]  F32      one for each block, under the weight's name and `_scale_inv`
//! ```
//!
//! The grid of scales is cut and joined with its weight, so a block never lies on two ranks or in two parts: every cut and
//! every boundary between joined parts is a multiple of 128. Only the last part may end within a block.

use super::build::{Held, Size};
use super::share::share;
use super::{Param, Plan, Shape, Slice};
use crate::dtype::Dtype;
use crate::encode::fp8;
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::{Content, Format, ParamSpec, PinnedDtype, Weight, layout};

/// Rows and columns of a block.
pub const BLOCK: u64 = fp8::BLOCK as u64;
/// What the name of a parameter's scales adds to its own.
pub const SCALES_SUFFIX: &str = "_scale_inv";

/// How the elements of a parameter are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As numbers of the parameter's dtype.
    Plain,
    /// As E4M3, to be multiplied by the scale of their block.
    Fp8 {
        /// The parameter that holds the scales.
        scales: u32,
    },
    /// As the source's own blocks, without decoding: the last axis of every shape counts bytes, and so do the columns of
    /// pieces and their regions.
    Kept(
        /// The type of all blocks.
        GgmlType,
    ),
    /// As the scales of another parameter's blocks. Its content is that parameter's, and it has no pieces.
    Scales {
        /// The encoded parameter.
        of: u32,
    },
}

impl Form {
    /// Elements and bytes of what a row is made of, where rows are counted in bytes; otherwise one and one.
    pub fn unit(self) -> (u64, u64) {
        match self {
            Form::Plain | Form::Fp8 { .. } | Form::Scales { .. } => (1, 1),
            Form::Kept(ty) => (ty.block(), ty.block_bytes()),
        }
    }

    /// The type of blocks that are kept.
    pub fn blocks(self) -> Option<GgmlType> {
        match self {
            Form::Plain | Form::Fp8 { .. } | Form::Scales { .. } => None,
            Form::Kept(ty) => Some(ty),
        }
    }
}

/// The shape of the scales of a tensor of two axes or more.
pub(super) fn grid(axes: &[u64]) -> Vec<u64> {
    let mut grid = axes.to_vec();
    let matrix = grid.len().saturating_sub(2);
    grid[matrix..].iter_mut().for_each(|n| *n = n.div_ceil(BLOCK));
    grid
}

impl Plan {
    /// The types of a weight's sources.
    pub(crate) fn types<'a>(&'a self, weight: &'a Weight) -> impl Iterator<Item = GgmlType> + Clone + 'a {
        weight.recipe.parts.iter().map(|part| self.sources[part.source as usize].ty)
    }

    /// The form that the output policy gives a parameter. All its weights must agree, and the stack must load it.
    pub(super) fn format(&self, set: &GgufSet, spec: &ParamSpec) -> Result<Format> {
        let rest = Format::from(self.policy.dtype);
        // A pinned dtype wins over every policy.
        let Some(policy) = self.forms.as_ref().filter(|_| spec.pinned.is_none()) else { return Ok(rest) };
        let mut first: Option<(&Weight, Format)> = None;
        for index in spec.content.weights() {
            let weight = &self.model.weights[*index as usize];
            let format = policy.format(weight, self.types(weight)).unwrap_or(rest);
            match first {
                None => first = Some((weight, format)),
                Some((_, same)) if same == format => {}
                Some((other, before)) => {
                    let found = format!(
                        "policy '{}' writes '{}' as {} and '{}' as {}, which are one parameter",
                        policy.rules.name,
                        other.name,
                        before.name(),
                        weight.name,
                        format.name()
                    );
                    let fault = Fault::new(found).file(set.path()).tensor(&spec.name);
                    return Err(fault.remedy("Give all parts of a fused parameter the same dtype").layout());
                }
            }
        }
        let Some((weight, format)) = first else { return Ok(rest) };
        self.check_form(set, weight, format)?;
        Ok(format)
    }

    /// A policy that says nothing about the model, and a choice about kept blocks where none are to be kept.
    pub(super) fn refuse_vain_policy(&self, set: &GgufSet) -> Result<()> {
        let rules = self.forms.iter().flat_map(|policy| &policy.rules.rules);
        let refused = |found: String, remedy: &str| Err(Fault::new(found).file(set.path()).remedy(remedy).layout());
        if self.keep_or.is_some() && !rules.into_iter().any(|rule| rule.dtype == Format::Keep) {
            return refused(
                "--keep-or has no effect: no policy keeps blocks".into(),
                "Leave it out, or choose --dtype keep",
            );
        }
        let Some(policy) = &self.forms else { return Ok(()) };
        if self.model.weights.iter().any(|weight| policy.format(weight, self.types(weight)).is_some()) {
            return Ok(());
        }
        let found = format!("policy '{}' has no rule for any weight of this model", policy.rules.name);
        refused(
            found,
            "Leave it out, or write a policy with the names that `ggshard plan --json` shows under profile hf",
        )
    }

    /// The stack loads the form, and the weight can have it.
    fn check_form(&self, set: &GgufSet, weight: &Weight, format: Format) -> Result<()> {
        let fault = |found: String| Fault::new(found).file(set.path()).tensor(&weight.name);
        let rules = &self.profile.rules;
        if !self.profile.loads(format) {
            let floats = [Format::Bf16, Format::F16, Format::F32];
            let loads: Vec<&str> =
                floats.iter().chain(rules.formats.iter().flatten()).map(|format| format.name()).collect();
            let found = format!("the stack of profile '{}' is not known to load {}", rules.name, format.name());
            return Err(fault(found)
                .expected(format!("one of {}", loads.join(", ")))
                .remedy("Choose another --profile, or a --policy and --dtype of these")
                .layout());
        }
        match format {
            Format::F32 | Format::Bf16 | Format::F16 => Ok(()),
            // What cannot be kept is decoded, and said.
            Format::Keep => Ok(()),
            Format::Fp8 if weight.shape.len() == 2 => Ok(()),
            Format::Fp8 => Err(fault(format!("its shape is {:?}, and fp8 has blocks of two axes", weight.shape))
                .remedy("Name only matrices in the policy's rules for fp8")
                .layout()),
        }
    }

    /// A rank's share of an encoded parameter begins and ends between blocks, and so does every part of it but the last.
    pub(super) fn check_blocks(&self, set: &GgufSet, spec: &ParamSpec, held: &Held) -> Result<()> {
        let parts = spec.content.parts().max(1);
        for (i, part) in held.0.iter().enumerate() {
            let weight = &self.model.weights[part.weight as usize];
            let (rows, cols) = (&part.share.rows, &part.share.cols);
            let last = i % parts == parts - 1;
            let found = if !rows.start.is_multiple_of(BLOCK)
                || (self.tp > 1 && !whole_blocks(rows.end, weight.shape[0]))
            {
                format!("a rank holds rows {} to {} of {:?}", rows.start, rows.end, weight.shape)
            } else if !cols.start.is_multiple_of(BLOCK) || (self.tp > 1 && !whole_blocks(cols.end, weight.shape[1])) {
                format!("a rank holds columns {} to {} of {:?}", cols.start, cols.end, weight.shape)
            } else if !last && !part.rows.is_multiple_of(BLOCK) {
                format!("it takes {} rows of '{}', and another part follows", part.rows, spec.name)
            } else {
                continue;
            };
            return Err(self.between_blocks(set, weight, &found));
        }
        Ok(())
    }

    /// The error for a tp that cuts through blocks, with the values that do not.
    fn between_blocks(&self, set: &GgufSet, weight: &Weight, found: &str) -> Error {
        let vocab = self.profile.rules.vocab;
        let encoded = |w: &Weight| {
            let format = self.forms.as_ref().and_then(|policy| policy.format(w, self.types(w)));
            w.pinned != Some(PinnedDtype::F32) && format == Some(Format::Fp8)
        };
        let encoded: Vec<bool> = self.model.weights.iter().map(encoded).collect();
        let followed = self.followed();
        let fits = |n: u64| {
            self.model.weights.iter().enumerate().all(|(i, w)| match share(&w.cut, &w.shape, n, 0, vocab) {
                Err(_) => false,
                Ok(_) if !encoded[i] => true,
                Ok(share) => {
                    let (rows, cols) = (share.rows.end, share.cols.end);
                    let joined = !followed[i] || rows.is_multiple_of(BLOCK);
                    joined
                        && whole_blocks(rows, w.shape[0])
                        && w.shape.get(1).is_none_or(|all| whole_blocks(cols, *all))
                }
            })
        };
        let working: Vec<String> = (1..=128).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
        let fault = Fault::new(format!("{found}, which cuts through a block of {BLOCK} x {BLOCK} of fp8"));
        let remedy = match working.as_slice() {
            [] => "No --tp works for this model with this policy: leave the weight out of it".to_owned(),
            working => format!("--tp values that work for this model with this policy: {}", working.join(", ")),
        };
        fault.file(set.path()).tensor(&weight.name).remedy(remedy).layout()
    }

    /// By weight, whether another part follows it in a parameter.
    fn followed(&self) -> Vec<bool> {
        let mut followed = vec![false; self.model.weights.len()];
        let layouts = &self.profile.rules.layouts;
        let laid_out = layout::for_class(layouts, &self.model.class).and_then(|layout| {
            layout::lay_out(layouts, layout, &self.model.weights, self.tp, self.stages.count()).ok()
        });
        for spec in laid_out.iter().flat_map(|laid_out| &laid_out.params) {
            let parts = spec.content.parts().max(1);
            let before_last = spec.content.weights().iter().enumerate().filter(|(i, _)| i % parts + 1 < parts);
            before_last.for_each(|(_, weight)| followed[*weight as usize] = true);
        }
        followed
    }

    /// The scales of a parameter that is about to be planned, if it is encoded, and their link to it.
    pub(super) fn scales_of(&self, param: &mut Param, size: &mut Size) -> Result<Option<Param>> {
        if param.dtype != Dtype::F8E4M3 || matches!(param.content, Content::Constant(_)) {
            return Ok(None);
        }
        let of = self.params.len() as u32;
        param.form = Form::Fp8 { scales: of + 1 };
        let none = self.pieces.len() as u32;
        let slices = param.slices.iter().map(|slice| {
            let axes = grid(slice.shape.axes());
            let shape = Shape::new(&axes).filter(|_| size.add(Dtype::F32, &axes).is_some());
            Some(Slice { shape: shape?, pieces: none..none, file: 0, offset: 0 })
        });
        let slices = slices.collect::<Option<Vec<_>>>();
        Ok(Some(Param {
            name: format!("{}{SCALES_SUFFIX}", param.name),
            dtype: Dtype::F32,
            form: Form::Scales { of },
            shape: grid(&param.shape),
            decoded: None,
            joins: None,
            slices: slices.ok_or_else(|| Fault::new("its scales are too large").tensor(&param.name).layout())?,
            ..param.clone()
        }))
    }
}

/// Whether a share that ends here ends with a block, the last of which may be ragged.
fn whole_blocks(end: u64, of: u64) -> bool {
    end == of || end.is_multiple_of(BLOCK)
}
