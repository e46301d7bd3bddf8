//! Encoded parameters: cuts between blocks, and the scales that go with them.
//!
//! ```text
//! fp8     X.weight            E4M3  [.., R, C]
//!         X.weight_scale_inv  F32   [.., ceil(R/128), ceil(C/128)]
//! nvfp4   X.weight            U8    [.., R, C/2]
//!         X.weight_scale      E4M3  [.., R, C/16]
//!         X.weight_scale_2    F32   one for each weight
//!         X.input_scale       F32   as many, where the stack wants them
//! ```
//!
//! Grids of scales are cut and joined with their weights, so a block never lies on two ranks or in two parts: every cut and
//! every boundary between joined parts is between blocks. Only the last part may end within a block of fp8.

use super::build::{Held, Size, stored};
use super::share::share;
use super::{Code, Form, InputScales, Origin, Param, ParamCut, Piece, Plan, Scale, Shape, Slice};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::GgufSet;
use crate::mapping::{Content, Matrix, ParamSpec, TensorScales, Weight};

/// The name of scales of the parameter with this name. `mixed`: beside nvfp4, fp8 has ModelOpt's names.
fn scales_name(name: &str, code: Code, kind: Scale, mixed: bool) -> String {
    match (kind, code) {
        (Scale::Block, Code::Fp8) if !mixed => format!("{name}_scale_inv"),
        (Scale::Block, Code::Fp8 | Code::Nvfp4) => format!("{name}_scale"),
        (Scale::Weight, Code::Fp8 | Code::Nvfp4) => format!("{name}_scale_2"),
        (Scale::Input, Code::Fp8 | Code::Nvfp4) => InputScales::name(name),
    }
}

/// The shape of the blocks' scales of a tensor of two axes or more, elements of which are given. ModelOpt gives those of
/// fp8 an axis of one after each of the last two.
fn grid(axes: &[u64], code: Code, mixed: bool) -> Vec<u64> {
    let ([lead @ .., rows, cols], block) = (axes, code.block()) else { return axes.to_vec() };
    let (rows, cols) = (rows.div_ceil(block.rows), cols.div_ceil(block.cols));
    let matrix = match code {
        Code::Fp8 if mixed => vec![rows, 1, cols, 1],
        Code::Fp8 | Code::Nvfp4 => vec![rows, cols],
    };
    lead.iter().copied().chain(matrix).collect()
}

impl Plan {
    /// A rank's share of an encoded parameter begins and ends between blocks, and so does every part of it but the last.
    pub(super) fn check_blocks(&self, set: &GgufSet, spec: &ParamSpec, code: Code, held: &Held) -> Result<()> {
        let parts = spec.content.parts().max(1);
        let block = code.block();
        for (i, part) in held.0.iter().enumerate() {
            let weight = &self.model.weights[part.weight as usize];
            let (rows, cols) = (&part.share.rows, &part.share.cols);
            let last = i % parts == parts - 1;
            let ends = |end: u64, of: u64, block: u64| self.tp == 1 || whole_blocks(end, of, block);
            let found = if !rows.start.is_multiple_of(block.rows) || !ends(rows.end, weight.shape[0], block.rows) {
                format!("a rank holds rows {} to {} of {:?}", rows.start, rows.end, weight.shape)
            } else if !cols.start.is_multiple_of(block.cols) || !ends(cols.end, weight.shape[1], block.cols) {
                format!("a rank holds columns {} to {} of {:?}", cols.start, cols.end, weight.shape)
            } else if !last && !part.rows.is_multiple_of(block.rows) {
                format!("it takes {} rows of '{}', and another part follows", part.rows, spec.name)
            } else if code == Code::Nvfp4 && !part.cols.is_multiple_of(block.cols) {
                format!("padded, it takes {} columns", part.cols)
            } else {
                continue;
            };
            return Err(self.between_blocks(set, weight, code, &found));
        }
        Ok(())
    }

    /// The error for a tp that cuts through blocks, with the values that do not.
    fn between_blocks(&self, set: &GgufSet, weight: &Weight, code: Code, found: &str) -> Error {
        let vocab = self.profile.rules.vocab;
        let codes: Vec<Option<Code>> = self.model.weights.iter().map(|w| self.ruled(w)?.code()).collect();
        let followed = self.followed(set);
        let fits = |n: u64| {
            self.model.weights.iter().enumerate().all(|(i, w)| match (share(&w.cut, &w.shape, n, 0, vocab), codes[i]) {
                (Err(_), _) => false,
                (Ok(_), None) => true,
                (Ok(share), Some(code)) => {
                    let (rows, cols, block) = (share.rows.end, share.cols.end, code.block());
                    let joined = !followed[i] || rows.is_multiple_of(block.rows);
                    joined
                        && whole_blocks(rows, w.shape[0], block.rows)
                        && w.shape.get(1).is_none_or(|all| whole_blocks(cols, *all, block.cols))
                }
            })
        };
        let working: Vec<String> = (1..=128).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
        let (Matrix { rows, cols }, name) = (code.block(), code.format().name());
        let fault = Fault::new(format!("{found}, which cuts through a block of {rows} x {cols} of {name}"));
        let remedy = match working.as_slice() {
            [] => "No --tp works for this model with this policy: leave the weight out of it".to_owned(),
            working => format!("--tp values that work for this model with this policy: {}", working.join(", ")),
        };
        fault.file(set.path()).tensor(&weight.name).remedy(remedy).layout()
    }

    /// By weight, whether another part follows it in a parameter.
    fn followed(&self, set: &GgufSet) -> Vec<bool> {
        let mut followed = vec![false; self.model.weights.len()];
        for spec in self.lay_out(set, self.asked()).iter().flat_map(|laid_out| &laid_out.params) {
            let parts = spec.content.parts().max(1);
            let before_last = spec.content.weights().iter().enumerate().filter(|(i, _)| i % parts + 1 < parts);
            before_last.for_each(|(_, weight)| followed[*weight as usize] = true);
        }
        followed
    }

    /// The scales of an encoded parameter that is about to be planned, in their order.
    pub(super) fn scales_of(&mut self, set: &GgufSet, param: &Param, size: &mut Size) -> Result<Vec<Param>> {
        let Form::Encoded { code, .. } = param.form else { return Ok(Vec::new()) };
        let mut all = vec![self.scales(param, code, Scale::Block, size)?];
        match code {
            Code::Fp8 => {}
            Code::Nvfp4 => {
                all.push(self.scales(param, code, Scale::Weight, size)?);
                if self.nvfp4.input_scales.is_some() || self.profile.rules.nvfp4.unwrap_or_default().input_scales {
                    let mut inputs = self.scales(param, code, Scale::Input, size)?;
                    self.fill_inputs(set, &mut inputs)?;
                    all.push(inputs);
                }
            }
        }
        Ok(all)
    }

    /// Scales of an encoded parameter, without pieces.
    fn scales(&self, param: &Param, code: Code, kind: Scale, size: &mut Size) -> Result<Param> {
        let dtype = match kind {
            Scale::Block => code.scale_dtype(),
            // Where vLLM does not look at them, those of linear modules have the model's dtype.
            Scale::Input if self.nvfp4.input_scales.is_none() && matches!(param.content, Content::Joined(_)) => {
                stored(self.policy.dtype.into())
            }
            Scale::Weight | Scale::Input => Dtype::F32,
        };
        let axes = |axes: &[u64]| match kind {
            Scale::Block => {
                let mut elements = axes.to_vec();
                elements.iter_mut().last().into_iter().for_each(|last| *last *= code.per_byte());
                grid(&elements, code, self.mixes_codes)
            }
            Scale::Weight | Scale::Input => self.per_weight(&param.content, axes),
        };
        let none = self.pieces.len() as u32;
        let slices = param.slices.iter().map(|slice| {
            let axes = axes(slice.shape.axes());
            let shape = Shape::new(&axes).filter(|_| size.add(dtype, &axes).is_some());
            Some(Slice { shape: shape?, pieces: none..none, file: 0, offset: 0 })
        });
        let slices = slices.collect::<Option<Vec<_>>>();
        Ok(Param {
            name: scales_name(&param.name, code, kind, self.mixes_codes),
            dtype,
            form: Form::Scales { of: self.params.len() as u32, kind },
            shape: axes(&param.shape),
            decoded: None,
            joins: None,
            slices: slices.ok_or_else(|| Fault::new("its scales are too large").tensor(&param.name).layout())?,
            ..param.clone()
        })
    }

    /// The shape of scales of which each weight has one: those of a stack by element, then by part.
    fn per_weight(&self, content: &Content, axes: &[u64]) -> Vec<u64> {
        let parts = content.parts() as u64;
        let several = (parts > 1).then_some(parts);
        match (content, self.profile.rules.nvfp4.unwrap_or_default().tensor_scales) {
            (Content::Stacked { .. }, _) => axes.first().copied().into_iter().chain(several).collect(),
            (Content::Joined(_) | Content::Constant(_), TensorScales::Scalar) => several.into_iter().collect(),
            (Content::Joined(_) | Content::Constant(_), TensorScales::Parts) => vec![parts],
        }
    }

    /// Fills in the input scales: those that were given, otherwise 1, which no stack looks at then.
    fn fill_inputs(&mut self, set: &GgufSet, param: &mut Param) -> Result<()> {
        let mut last: Option<std::ops::Range<u32>> = None;
        let weights = param.content.weights().to_vec();
        let by_expert = param.cut == ParamCut::Expert;
        if by_expert && self.tp > 1 && self.nvfp4.input_scales.is_some() {
            let found =
                "input scales of experts that ranks hold whole: some kernels want those of all experts on every rank";
            let fault = Fault::new(found).file(set.path()).tensor(&param.name);
            return Err(fault.remedy("Leave out --ep, or --input-scales").layout());
        }
        for (rank, slice) in param.slices.iter_mut().enumerate() {
            if let Some(same) = last.as_ref().filter(|_| !by_expert) {
                slice.pieces = same.clone();
                continue;
            }
            let Matrix { rows, cols } = Matrix::of(slice.shape.axes());
            let count = slice.shape.elements() as usize;
            let held = &weights[if by_expert { rank * count } else { 0 }..][..count];
            let start = self.pieces.len() as u32;
            match &self.nvfp4.input_scales {
                None => {
                    self.pieces.push(Piece { row: 0, col: 0, rows, cols, origin: Origin::Fill(1.0) });
                }
                Some(scales) => {
                    for (i, weight) in held.iter().enumerate() {
                        let (row, col) = (i as u64 / cols, i as u64 % cols);
                        let weight = &self.model.weights[*weight as usize];
                        let value = scales.of(&weight.name).map_err(|fault| fault.layout())?;
                        self.pieces.push(Piece { row, col, rows: 1, cols: 1, origin: Origin::Fill(value) });
                    }
                }
            }
            slice.pieces = start..self.pieces.len() as u32;
            last = Some(slice.pieces.clone());
        }
        Ok(())
    }
}

/// Whether a share that ends here ends with a block, the last of which may be ragged.
fn whole_blocks(end: u64, of: u64, block: u64) -> bool {
    end == of || end.is_multiple_of(block)
}
