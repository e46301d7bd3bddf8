//! Forms: how the elements of a parameter are stored, and which form the output policy gives it.

use super::Plan;
use crate::dtype::Dtype;
use crate::encode::{fp8, nvfp4};
use crate::error::{Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::layout::Asked;
use crate::mapping::{Format, Matrix, ParamSpec, Weight};

/// What the name of a module says that holds experts.
pub(crate) const EXPERTS: &str = ".experts.";

/// How the elements of a parameter are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As numbers of the parameter's dtype.
    Plain,
    /// In blocks of numbers of few bits, to be multiplied by the scale of their block. The last axis of every shape counts
    /// bytes; columns of pieces count elements.
    Encoded {
        /// The numbers and their blocks.
        code: Code,
        /// The parameter that holds the blocks' scales. Other scales follow it.
        scales: u32,
    },
    /// As the source's own blocks, without decoding: the last axis of every shape counts bytes, and so do the columns of
    /// pieces and their regions.
    Kept(
        /// The type of all blocks.
        GgmlType,
    ),
    /// As scales of another parameter, whose content it has.
    Scales {
        /// The encoded parameter.
        of: u32,
        /// Which of its scales.
        kind: Scale,
    },
}

/// Numbers of few bits, in blocks with a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// E4M3, blocks of 128 × 128 with an f32 scale.
    Fp8,
    /// E2M1, two in a byte; blocks of 16 columns with an E4M3 scale, and an f32 scale for the weight.
    Nvfp4,
}

/// What a scale is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// A block. Found when the block is encoded; there are no pieces.
    Block,
    /// A weight: all blocks of it. Found before the first of them is encoded; there are no pieces.
    Weight,
    /// What the weight is multiplied with. Known when planning, so that pieces hold constants.
    Input,
}

impl Code {
    /// Rows and columns of a block.
    pub fn block(self) -> Matrix {
        match self {
            Code::Fp8 => Matrix { rows: fp8::BLOCK as u64, cols: fp8::BLOCK as u64 },
            Code::Nvfp4 => Matrix { rows: 1, cols: nvfp4::BLOCK as u64 },
        }
    }

    /// Elements in a byte.
    pub fn per_byte(self) -> u64 {
        match self {
            Code::Fp8 => 1,
            Code::Nvfp4 => 2,
        }
    }

    /// The dtype that holds the numbers.
    pub fn dtype(self) -> Dtype {
        match self {
            Code::Fp8 => Dtype::F8E4M3,
            Code::Nvfp4 => Dtype::U8,
        }
    }

    /// The dtype of the blocks' scales.
    pub fn scale_dtype(self) -> Dtype {
        match self {
            Code::Fp8 => Dtype::F32,
            Code::Nvfp4 => Dtype::F8E4M3,
        }
    }

    /// The form of the output policy that it is.
    pub fn format(self) -> Format {
        match self {
            Code::Fp8 => Format::Fp8,
            Code::Nvfp4 => Format::Nvfp4,
        }
    }
}

impl Format {
    /// How it encodes, if it does.
    pub fn code(self) -> Option<Code> {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Keep => None,
            Format::Fp8 => Some(Code::Fp8),
            Format::Nvfp4 => Some(Code::Nvfp4),
        }
    }
}

impl Form {
    /// Elements and bytes of what a row is made of, where the last axis counts bytes; otherwise one and one.
    pub fn unit(self) -> (u64, u64) {
        match self {
            Form::Plain | Form::Scales { .. } => (1, 1),
            Form::Encoded { code, .. } => (code.per_byte(), 1),
            Form::Kept(ty) => (ty.block(), ty.block_bytes()),
        }
    }

    /// The type of blocks that are kept.
    pub fn blocks(self) -> Option<GgmlType> {
        match self {
            Form::Plain | Form::Encoded { .. } | Form::Scales { .. } => None,
            Form::Kept(ty) => Some(ty),
        }
    }

    /// How it is encoded.
    pub fn code(self) -> Option<Code> {
        match self {
            Form::Plain | Form::Scales { .. } | Form::Kept(_) => None,
            Form::Encoded { code, .. } => Some(code),
        }
    }

    /// Whether it is scales of another parameter.
    pub fn is_scales(self) -> bool {
        match self {
            Form::Plain | Form::Encoded { .. } | Form::Kept(_) => false,
            Form::Scales { .. } => true,
        }
    }
}

/// A shape whose last axis counts elements, as it is in the files.
pub(super) fn in_bytes(form: Form, mut axes: Vec<u64>) -> Vec<u64> {
    let (elements, bytes) = form.unit();
    if let (true, Some(last)) = (axes.len() > 1, axes.last_mut()) {
        *last = *last / elements * bytes;
    }
    axes
}

impl Plan {
    /// The types of a weight's sources.
    pub(crate) fn types<'a>(&'a self, weight: &'a Weight) -> impl Iterator<Item = GgmlType> + Clone + 'a {
        weight.recipe.parts.iter().map(|part| self.sources[part.source as usize].ty)
    }

    /// The form that a rule of the output policy gives a weight.
    pub(super) fn ruled(&self, weight: &Weight) -> Option<Format> {
        // A pinned dtype wins over every policy.
        let policy = self.forms.as_ref().filter(|_| weight.pinned.is_none())?;
        policy.format(&self.model.class, weight, self.types(weight))
    }

    /// What conditions of layouts may ask.
    pub(super) fn asked(&self) -> Asked {
        let has = |format| self.model.weights.iter().any(|weight| self.ruled(weight) == Some(format));
        Asked { tp: self.tp, pp: self.stages.count(), fp8: has(Format::Fp8), nvfp4: has(Format::Nvfp4) }
    }

    /// The form that the output policy gives a parameter. All its weights must agree, and the stack must load it.
    pub(super) fn format(&self, set: &GgufSet, spec: &ParamSpec) -> Result<Format> {
        let rest = Format::from(self.policy.dtype);
        let Some(policy) = self.forms.as_ref().filter(|_| spec.pinned.is_none()) else { return Ok(rest) };
        let mut first: Option<(&Weight, Format)> = None;
        for index in spec.content.weights() {
            let weight = &self.model.weights[*index as usize];
            let format = self.ruled(weight).unwrap_or(rest);
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
        let Some((_, format)) = first else { return Ok(rest) };
        let mut weights = spec.content.weights().iter().map(|w| &self.model.weights[*w as usize]);
        weights.try_for_each(|weight| self.check_form(set, weight, format))?;
        Ok(format)
    }

    /// A policy that says nothing about the model, and choices about forms that nothing has.
    pub(super) fn refuse_vain_policy(&self, set: &GgufSet) -> Result<()> {
        let rules = self.forms.iter().flat_map(|policy| &policy.rules.rules);
        let refused = |found: String, remedy: &str| Err(Fault::new(found).file(set.path()).remedy(remedy).layout());
        if self.keep_or.is_some() && !rules.into_iter().any(|rule| rule.dtype == Format::Keep) {
            return refused(
                "--keep-or has no effect: no policy keeps blocks".into(),
                "Leave it out, or choose --dtype keep",
            );
        }
        let nvfp4 = self.params.iter().any(|param| param.form.code() == Some(Code::Nvfp4));
        if !nvfp4 && (self.nvfp4.search || self.nvfp4.input_scales.is_some()) {
            let option = if self.nvfp4.search { "--nvfp4-search" } else { "--input-scales" };
            let found = format!("{option} has no effect: no weight is written as nvfp4");
            return refused(found, "Leave it out, or choose --dtype nvfp4");
        }
        let Some(policy) = &self.forms else { return Ok(()) };
        let class = &self.model.class;
        if self.model.weights.iter().any(|weight| policy.format(class, weight, self.types(weight)).is_some()) {
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
        // What is to be kept and cannot is decoded, and said.
        let Some(code) = format.code() else { return Ok(()) };
        if weight.shape.len() != 2 {
            let found = format!("its shape is {:?}, and {} has blocks of two axes", weight.shape, format.name());
            return Err(fault(found).remedy("Name only matrices in the policy's rules for it").layout());
        }
        match code {
            Code::Fp8 if self.mixes_codes => self.check_beside_nvfp4(weight).map_err(|found| {
                let expected = "fp8 that stacks load beside nvfp4: no experts, and columns in whole blocks";
                fault(found).expected(expected).remedy("Give such weights nvfp4 or a float type").layout()
            }),
            Code::Fp8 => Ok(()),
            Code::Nvfp4 if weight.shape[1].is_multiple_of(code.block().cols) => Ok(()),
            Code::Nvfp4 => {
                let found = format!("its shape is {:?}, and nvfp4 has blocks of 16 columns", weight.shape);
                Err(fault(found).remedy("Leave it out of the policy's rules for nvfp4").layout())
            }
        }
    }

    /// Beside nvfp4, stacks take fp8 as ModelOpt writes it: for linear modules whose columns are whole blocks.
    fn check_beside_nvfp4(&self, weight: &Weight) -> Result<(), String> {
        if weight.name.contains(EXPERTS) {
            return Err("experts in fp8, and nvfp4 elsewhere".into());
        }
        let cols = Code::Fp8.block().cols;
        if weight.shape[1].is_multiple_of(cols) {
            Ok(())
        } else {
            Err(format!("{} columns are no multiple of {cols}", weight.shape[1]))
        }
    }
}
