//! The planner: weights, a profile and a topology become parameters, slices and pieces.

use std::ops::Range;

use super::forms::in_bytes;
use super::share::{Share, share};
use super::{
    Form, Nvfp4, Origin, Param, ParamCut, Piece, Plan, PlannedSource, Policy, Region, Shape, Slice, StageLayers, files,
};
use crate::dequant::{Dequantizer, FloatType, Simd};
use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgmlType, GgufSet, SourceTensor};
use crate::mapping::layout::{self, Asked, Content, LaidOut, ParamSpec, Set};
use crate::mapping::{CutKind, Format, Model, OutputPolicy, Part, PinnedDtype, Profile, Weight};

/// Most ranks of one tensor-parallel group, and most pipeline stages.
const MOST_RANKS: u32 = 1024;
/// Most pieces of one plan; GLM-5 has about half a million at tp 8 and four at tp 64. Time and memory of a plan are
/// proportional to these and to the shares.
const MOST_PIECES: u64 = 1 << 23;
/// Most shares of weights on ranks, and slices, counted together: about two per piece, and smaller. Kimi-K2 has nine million
/// at tp 64, which is as many ranks as it has heads.
const MOST_SHARES: u64 = 1 << 24;
/// Most elements of all sources together (zero-sized axes counted as one), and most bytes of all output: far beyond any
/// model, and so far below 2^64 that no sum over a plan overflows.
const MOST_ELEMENTS: u64 = 1 << 48;
const MOST_BYTES: u64 = 1 << 59;
/// Largest multiple that the rows of experts are padded to.
const MOST_PADDING: u64 = 1 << 16;

/// What is to be planned.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// The layout.
    pub profile: Profile,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Blocks per stage; empty to divide them evenly.
    pub stage_layers: Vec<u64>,
    /// Ranks hold whole experts.
    pub expert_parallel: bool,
    /// What the user chose about the values.
    pub policy: Policy,
    /// Which weights are written in a form of their own.
    pub forms: Option<OutputPolicy>,
    /// The type of weights whose blocks are to be kept, but are cut through; `None` to refuse that.
    pub keep_or: Option<FloatType>,
    /// How weights are written as nvfp4.
    pub nvfp4: Nvfp4,
}

impl PlanRequest {
    /// One pipeline stage, every expert cut.
    pub fn new(profile: Profile, tp: u32, policy: Policy) -> Self {
        PlanRequest {
            profile,
            tp,
            pp: 1,
            stage_layers: Vec::new(),
            expert_parallel: false,
            policy,
            forms: None,
            keep_or: None,
            nvfp4: Nvfp4::default(),
        }
    }
}

impl Plan {
    /// Plans every rank's files. The result has not been audited yet; [`Plan::audited`] does both.
    pub fn new(set: &GgufSet, model: Model, request: PlanRequest) -> Result<Plan> {
        let PlanRequest { profile, tp, pp, stage_layers, expert_parallel, policy, forms, keep_or, nvfp4 } = request;
        for (what, number, most) in [
            ("tp", u64::from(tp), u64::from(MOST_RANKS)),
            ("pp", u64::from(pp), u64::from(MOST_RANKS)),
            ("a padding of experts to a multiple of", policy.moe_pad.unwrap_or(1), MOST_PADDING),
        ] {
            if !(1..=most).contains(&number) {
                return Err(Fault::new(format!("{what} {number}")).expected(format!("1 to {most}")).layout());
            }
        }
        let counted = |n: u64, t: &SourceTensor| {
            let elements = t.ne.iter().try_fold(1u64, |n, d| n.checked_mul((*d).max(1)))?;
            n.checked_add(elements).filter(|n| *n <= MOST_ELEMENTS)
        };
        if set.tensors().iter().try_fold(0, counted).is_none() {
            let fault = Fault::new("tensors of more elements than any model has").file(set.path());
            return Err(fault.expected(format!("at most {MOST_ELEMENTS}")).layout());
        }
        let refused = |why: String| Fault::new(why).file(set.path());
        let stages = stages(&model, pp, &stage_layers).map_err(|why| refused(why).layout())?;
        let sources = set
            .tensors()
            .iter()
            .map(|t| PlannedSource { name: t.name.clone(), ty: t.ty, elements: t.elements(), bytes: t.bytes })
            .collect();
        let mut plan = Plan {
            model,
            profile,
            tp,
            stages,
            expert_parallel,
            policy,
            forms,
            keep_or,
            nvfp4,
            mixes_codes: false,
            scale_leaders: Vec::new(),
            sources,
            params: Vec::new(),
            pieces: Vec::new(),
            files: Vec::new(),
            left_out: Vec::new(),
        };
        let asked = plan.asked();
        plan.mixes_codes = asked.fp8 && asked.nvfp4;
        let LaidOut { params: specs, left_out } = plan.lay_out(set, asked)?;
        plan.left_out = left_out;
        plan.params.reserve(specs.len());
        let mut first_use: Vec<Option<u32>> = vec![None; plan.model.weights.len()];
        let mut size = Size::default();
        for spec in specs {
            let mut param = plan.param(set, spec, &mut size)?;
            if let [weight] = *param.content.weights() {
                let first = first_use[weight as usize].get_or_insert(plan.params.len() as u32);
                let earlier = plan.params.get(*first as usize);
                let encoded = param.form.code().is_some();
                let alike = |e: &&Param| e.dtype == param.dtype && e.form == param.form && !encoded;
                param.joins = earlier.filter(alike).map(|_| *first);
            }
            let scales = plan.scales_of(set, &param, &mut size)?;
            if let Form::Encoded { scales, .. } = &mut param.form {
                *scales = plan.params.len() as u32 + 1;
            }
            plan.params.push(param);
            plan.params.extend(scales);
        }
        plan.share_scales();
        plan.forget_unused_inputs();
        plan.warn_of_decoded_blocks();
        plan.refuse_vain_choices(set)?;
        plan.warn_of_padding_kernels();
        files::assign(&mut plan)?;
        Ok(plan)
    }

    /// Plans, audits, and gives the plan only if the audit holds.
    pub fn audited(set: &GgufSet, model: Model, request: PlanRequest) -> Result<Plan> {
        let plan = Plan::new(set, model, request)?;
        super::audit::audit(&plan)?;
        Ok(plan)
    }

    /// What the profile makes of the model's weights.
    pub(super) fn lay_out(&self, set: &GgufSet, asked: Asked) -> Result<LaidOut> {
        let Profile { rules, .. } = &self.profile;
        let class = self.model.class.as_str();
        let refused = |why: String| Fault::new(why).file(set.path());
        let layout = layout::for_class(&rules.layouts, class).ok_or_else(|| {
            let classes: Vec<&str> = rules.layouts.iter().flat_map(|l| &l.classes).map(String::as_str).collect();
            let class = if class.is_empty() { "without a class (mapping 'raw')" } else { class };
            refused(format!("profile '{}' has no layout for a model {class}", rules.name))
                .expected(format!("one of {}", classes.join(", ")))
                .remedy("Choose --profile hf, or write a profile with a layout for the class")
                .layout()
        })?;
        layout::lay_out(&rules.layouts, layout, &self.model.weights, asked)
            .map_err(|why| refused(format!("profile '{}': {why}", rules.name)).layout())
    }

    fn param(&mut self, set: &GgufSet, mut spec: ParamSpec, size: &mut Size) -> Result<Param> {
        let (dtype, form, decoded) = match &spec.content {
            Content::Constant(_) => (dtype(set, &self.model, &spec, self.policy.dtype.into())?, Form::Plain, None),
            Content::Joined(_) | Content::Stacked { .. } => self.form(set, &spec)?,
        };
        if let Form::Kept(_) = form {
            spec.name = super::keep::blocks_name(&spec.name);
        }
        let expert = self.expert_parallel && matches!(spec.content, Content::Stacked { .. });
        let cut = match (spec.content.weights().first(), expert) {
            (Some(_), true) => ParamCut::Expert,
            (Some(w), false) => ParamCut::Weights(self.model.weights[*w as usize].cut.kind),
            (None, _) => ParamCut::Weights(CutKind::Replicated),
        };
        let mut slices: Vec<Slice> = Vec::with_capacity(self.tp as usize);
        let mut last: Option<Held> = None;
        for rank in 0..u64::from(self.tp) {
            let held = self.held(set, &spec, expert, rank)?;
            if let Some(code) = form.code() {
                self.check_blocks(set, &spec, code, &held)?;
            }
            size.shares += 1 + held.0.len() as u64;
            if size.shares > MOST_SHARES {
                return Err(self.too_large(set, &spec.name, &format!("{MOST_SHARES} shares")));
            }
            // Ranks that hold the same, as of a replicated weight, share their pieces.
            let same = slices.last().filter(|_| last.as_ref() == Some(&held)).cloned();
            let slice = match same {
                Some(slice) => slice,
                None => self.slice(set, &spec, form, &held)?,
            };
            size.add(dtype, slice.shape.axes()).ok_or_else(|| {
                let fault = Fault::new(format!("with {dtype} {:?} the output", slice.shape)).file(set.path());
                fault.tensor(&spec.name).expected(format!("at most {MOST_BYTES} bytes in all")).layout()
            })?;
            slices.push(slice);
            last = Some(held);
        }
        let shape = in_bytes(form, whole_shape(&self.model, &spec.content));
        Ok(Param {
            stage: match spec.set {
                Set::Main => self.stages.of(spec.place),
                Set::Draft => 0,
            },
            name: spec.name,
            set: spec.set,
            content: spec.content,
            pinned: spec.pinned,
            dtype,
            form,
            decoded,
            shape,
            cut,
            joins: None,
            slices,
        })
    }

    /// What a rank holds of each weight of a parameter.
    pub(super) fn held(&self, set: &GgufSet, spec: &ParamSpec, expert: bool, rank: u64) -> Result<Held> {
        let tp = u64::from(self.tp);
        let vocab = self.profile.rules.vocab;
        let weights = spec.content.weights();
        let stacked = matches!(spec.content, Content::Stacked { .. });
        let (first, count) = if expert {
            let elements = weights.len() as u64 / spec.content.parts().max(1) as u64;
            if !elements.is_multiple_of(tp) {
                let weight = &self.model.weights[weights[0] as usize];
                return Err(indivisible(set, self, weight, &format!("{elements} experts"), Some(elements)));
            }
            let each = elements / tp * spec.content.parts() as u64;
            (rank * each, each)
        } else {
            (0, weights.len() as u64)
        };
        let pad = self.policy.moe_pad.filter(|_| stacked);
        let chosen = &weights[first as usize..(first + count) as usize];
        let parts = chosen.iter().map(|index| {
            let weight = &self.model.weights[*index as usize];
            let of = if expert { 1 } else { tp };
            let share = share(&weight.cut, &weight.shape, of, if expert { 0 } else { rank }, vocab)
                .map_err(|e| indivisible(set, self, weight, &e.what, None))?;
            let rows = share.rows.end - share.rows.start + share.padding;
            let cols = share.cols.end - share.cols.start;
            let (rows, cols) = match (pad, weight.cut.kind) {
                (Some(n), CutKind::Column) => (rows.next_multiple_of(n), cols),
                (Some(n), CutKind::Row) => (rows, cols.next_multiple_of(n)),
                (Some(_), CutKind::Vocab | CutKind::Replicated) | (None, _) => (rows, cols),
            };
            Ok(HeldPart { weight: *index, share, rows, cols })
        });
        Ok(Held(parts.collect::<Result<Vec<_>>>()?))
    }

    fn slice(&mut self, set: &GgufSet, spec: &ParamSpec, form: Form, held: &Held) -> Result<Slice> {
        let start = self.pieces.len() as u32;
        if let Content::Constant(value) = spec.content {
            self.pieces.push(Piece { row: 0, col: 0, rows: 1, cols: 1, origin: Origin::Fill(value) });
        }
        let width = held.0.first().map_or(1, |p| p.cols);
        let mut row = 0;
        for part in &held.0 {
            if part.cols != width {
                let weight = &self.model.weights[part.weight as usize];
                let found = format!("it has {} columns, the parts before it in '{}' {width}", part.cols, spec.name);
                return Err(Fault::new(found).file(set.path()).tensor(&weight.name).layout());
            }
            let weight = &self.model.weights[part.weight as usize];
            if (self.pieces.len() as u64).saturating_add(most_pieces(weight, part)) > MOST_PIECES {
                return Err(self.too_large(set, &spec.name, &format!("{MOST_PIECES} pieces")));
            }
            lower(weight, part, row, &mut self.pieces);
            row += part.rows;
        }
        self.pieces[start as usize..].iter_mut().for_each(|piece| super::keep::piece_in_bytes(form, piece));
        let shape = slice_shape(&self.model, &spec.content, form, held)
            .ok_or_else(|| Fault::new("a shape of more than 4 axes").file(set.path()).tensor(&spec.name).layout())?;
        Ok(Slice { shape, pieces: start..self.pieces.len() as u32, file: 0, offset: 0 })
    }

    fn too_large(&self, set: &GgufSet, name: &str, most: &str) -> Error {
        let weights = self.model.weights.len();
        Fault::new(format!("{weights} weights on {} ranks make more than {most}", self.tp))
            .file(set.path())
            .tensor(name)
            .remedy("Choose fewer ranks, or whole experts per rank (--ep); check the expert and head counts of the metadata")
            .layout()
    }

    /// What would write nothing, or change nothing, is not what the user wants.
    fn refuse_vain_choices(&self, set: &GgufSet) -> Result<()> {
        let refused = |found: String, remedy: &str| Err(Fault::new(found).file(set.path()).remedy(remedy).layout());
        let name = &self.profile.rules.name;
        if self.params.is_empty() {
            let why = self.left_out.first().map(|(_, why)| format!(": {why}")).unwrap_or_default();
            let found = format!("profile '{name}' makes no parameter of this file{why}");
            return refused(found, "Choose another profile, or another --mtp");
        }
        self.refuse_vain_policy(set)?;
        let stacked = self.params.iter().any(|p| matches!(p.content, Content::Stacked { .. }));
        if self.expert_parallel && !stacked {
            let found = format!("--ep has no effect: under profile '{name}' the model has no stacked experts");
            return refused(found, "Leave it out, or choose the profile of a serving stack");
        }
        if self.policy.moe_pad.is_some() && !stacked {
            let found = format!("--moe-pad has no effect: under profile '{name}' the model has no stacked experts");
            return refused(found, "Leave it out, or choose the profile of a serving stack");
        }
        Ok(())
    }

    /// Kernels that pad an expert's rows place `up` where plain files do not have it, and vLLM only warns.
    fn warn_of_padding_kernels(&mut self) {
        const LANES: u64 = 128;
        let mut values = self.params.iter().filter(|p| !p.form.is_scales());
        let ragged = values.find_map(|p| {
            let Content::Stacked { parts, .. } = p.content else { return None };
            let axes = p.slices.first()?.shape.axes();
            let rows = axes.get(1)? / u64::from(parts.max(1));
            let cut = matches!(p.cut, ParamCut::Weights(CutKind::Column)) || parts == 2;
            (cut && rows % LANES != 0).then_some(rows)
        });
        if let Some(rows) = ragged {
            self.model.warnings.push(format!(
                "each rank holds {rows} rows of every expert's gate and up, no multiple of {LANES}: a stack whose MoE kernel \
                 pads them (FlashInfer TRT-LLM, AITER) would read `up` from the wrong rows without an error; \
                 use kernels that do not pad (Triton, CUTLASS), or --moe-pad {LANES}"
            ));
        }
    }
}

/// What a rank holds of each weight of a parameter, in the order of the slice.
#[derive(Debug, PartialEq)]
pub(super) struct Held(pub Vec<HeldPart>);

/// What a rank holds of one weight, and the rows and columns that it takes in the slice, padding included.
#[derive(Debug, PartialEq)]
pub(super) struct HeldPart {
    pub weight: u32,
    pub share: Share,
    pub rows: u64,
    pub cols: u64,
}

/// What a plan has come to while it is made.
#[derive(Default)]
pub(super) struct Size {
    /// Shares of weights on ranks, and slices.
    shares: u64,
    /// Bytes of output.
    bytes: u64,
}

impl Size {
    /// Adds a slice; `None` when the output becomes too large.
    pub fn add(&mut self, dtype: Dtype, axes: &[u64]) -> Option<()> {
        let bytes = dtype.tensor_bytes(axes).and_then(|bytes| self.bytes.checked_add(bytes));
        self.bytes = bytes.filter(|bytes| *bytes <= MOST_BYTES)?;
        Some(())
    }
}

fn stages(model: &Model, pp: u32, given: &[u64]) -> Result<StageLayers, String> {
    let layers = model.weights.iter().filter(|w| !w.mtp).filter_map(|w| w.block).max().map_or(0, |b| b + 1);
    match given {
        [] if pp == 1 => Ok(StageLayers::single()),
        [] => StageLayers::divide(layers, pp),
        given if given.len() != pp as usize => {
            Err(format!("blocks are given for {} stages, but there are {pp}", given.len()))
        }
        given => StageLayers::given(given, layers),
    }
}

/// The shape of a whole parameter before cuts and padding.
fn whole_shape(model: &Model, content: &Content) -> Vec<u64> {
    let weights = content.weights();
    let Some(first) = weights.first() else { return Vec::new() };
    let mut shape = model.weights[*first as usize].shape.clone();
    shape[0] = weights[..content.parts()].iter().map(|w| model.weights[*w as usize].shape[0]).sum();
    if let Content::Stacked { parts, .. } = content {
        shape.insert(0, (weights.len() / *parts as usize) as u64);
    }
    shape
}

/// The element type of a weight in the output. Under `raw`, integers and F64 stay what they are.
pub(super) fn dtype(set: &GgufSet, model: &Model, spec: &ParamSpec, asked: Format) -> Result<Dtype> {
    let mut last = u32::MAX;
    for part in spec.content.weights().iter().flat_map(|w| &model.weights[*w as usize].recipe.parts) {
        // The experts of a stack come from one source, over and over.
        if std::mem::replace(&mut last, part.source) == part.source {
            continue;
        }
        let tensor = &set.tensors()[part.source as usize];
        if let Some(dtype) = unchanged(tensor.ty).filter(|_| model.verbatim) {
            return Ok(dtype);
        }
        if Dequantizer::new(tensor.ty, Simd::Baseline).is_none() {
            return Err(Fault::new(format!("type {} cannot be decoded to a weight", tensor.ty))
                .file(set.parts()[tensor.part].path())
                .tensor(&tensor.name)
                .expected("a type with a dequantizer")
                .remedy("Integer tensors pass unchanged under --mapping raw; Q8_1 has no dequantizer anywhere")
                .unsupported());
        }
    }
    Ok(match spec.pinned {
        Some(PinnedDtype::F32) => Dtype::F32,
        None => stored(asked),
    })
}

/// The element type of a form.
pub(super) fn stored(format: Format) -> Dtype {
    match format {
        Format::F32 => Dtype::F32,
        Format::Bf16 => Dtype::BF16,
        Format::F16 => Dtype::F16,
        Format::Fp8 => Dtype::F8E4M3,
        Format::Nvfp4 | Format::Keep => Dtype::U8,
    }
}

/// The dtype of a type that can be handed on as it is.
fn unchanged(ty: GgmlType) -> Option<Dtype> {
    use GgmlType::*;
    match ty {
        I8 => Some(Dtype::I8),
        I16 => Some(Dtype::I16),
        I32 => Some(Dtype::I32),
        I64 => Some(Dtype::I64),
        F64 => Some(Dtype::F64),
        F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q8_1 | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | Q8_K
        | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS | TQ1_0 | TQ2_0 | MXFP4
        | NVFP4 | Q1_0 | Q2_0 => None,
    }
}

/// The shape of a slice: that of its weights, with the rows joined and the cut axis as held.
fn slice_shape(model: &Model, content: &Content, form: Form, held: &Held) -> Option<Shape> {
    let Some(first) = held.0.first() else { return Shape::new(&[]) };
    let mut axes = model.weights[first.weight as usize].shape.clone();
    let last = axes.len() - 1;
    let rows_per_step: u64 = axes.iter().skip(1).take(last.saturating_sub(1)).product();
    let group = &held.0[..content.parts().min(held.0.len())];
    if last > 0 {
        axes[last] = first.cols;
    }
    // Of a weight without elements the cut axis is as it was: only whole ones are without.
    if let Some(first_axis) = group.iter().map(|p| p.rows).sum::<u64>().checked_div(rows_per_step) {
        axes[0] = first_axis;
    }
    if let Content::Stacked { parts, .. } = content {
        axes.insert(0, (held.0.len() / *parts as usize) as u64);
    }
    Shape::new(&in_bytes(form, axes))
}

/// At most how many pieces [`lower`] makes, padding included.
fn most_pieces(weight: &Weight, held: &HeldPart) -> u64 {
    let recipe = &weight.recipe;
    let per_unit: u64 = recipe.parts.iter().map(|p| p.rows).sum();
    let rows = &held.share.rows;
    let units = rows.end.checked_div(per_unit).map_or(0, |_| rows.end.div_ceil(per_unit) - rows.start / per_unit);
    let runs = |p: &Part| match p.unpermute {
        None => 1,
        Some(heads) => 2 * heads_of(heads, p.rows, rows, 0).count() as u64,
    };
    recipe.parts.iter().map(runs).fold(0, u64::saturating_add).saturating_mul(units).saturating_add(2)
}

/// The heads of a part of `rows` rows, of which the first is row `first` of the weight, that have a row in `share`.
fn heads_of(heads: u64, rows: u64, share: &Range<u64>, first: u64) -> Range<u64> {
    let head = (rows / heads).max(1);
    share.start.saturating_sub(first) / head..share.end.saturating_sub(first).div_ceil(head).min(heads)
}

/// Writes the part of a weight's recipe that a rank holds as pieces, from row `at` of the slice on.
fn lower(weight: &Weight, held: &HeldPart, at: u64, pieces: &mut Vec<Piece>) {
    let recipe = &weight.recipe;
    let share = &held.share;
    let per_unit: u64 = recipe.parts.iter().map(|p| p.rows).sum();
    let rows = share.rows.end - share.rows.start;
    let cols = share.cols.end - share.cols.start;
    if per_unit > 0 && rows > 0 {
        for unit in share.rows.start / per_unit..share.rows.end.div_ceil(per_unit) {
            let mut first = unit * per_unit;
            for part in &recipe.parts {
                lower_part(part, unit, first, share, at, pieces);
                first += part.rows;
            }
        }
    }
    let zero = |row, col, rows, cols| Piece { row, col, rows, cols, origin: Origin::Fill(0.0) };
    if held.cols > cols && rows > 0 {
        pieces.push(zero(at, cols, rows, held.cols - cols));
    }
    if held.rows > rows {
        pieces.push(zero(at + rows, 0, held.rows - rows, held.cols));
    }
}

/// One part of one unit, whose first row in the weight is `first`, clipped to the share, which begins at row `at` of the
/// slice.
fn lower_part(part: &Part, unit: u64, first: u64, share: &Share, at: u64, pieces: &mut Vec<Piece>) {
    let mut place = |local: u64, rows: u64, source_row: u64, step: u64| {
        let row = first + local;
        let clipped = row.max(share.rows.start)..(row + rows).min(share.rows.end);
        if clipped.start >= clipped.end || share.cols.start >= share.cols.end {
            return;
        }
        let skipped = clipped.start - row;
        let region = Region {
            source: part.source,
            row: source_row + if part.transpose { share.cols.start } else { skipped * step },
            step,
            col: if part.transpose { skipped } else { share.cols.start },
            width: if part.transpose { part.rows } else { part.cols },
            transpose: part.transpose,
            op: part.op,
        };
        pieces.push(Piece {
            row: at + clipped.start - share.rows.start,
            col: 0,
            rows: clipped.end - clipped.start,
            cols: share.cols.end - share.cols.start,
            origin: Origin::Source(region),
        });
    };
    if part.rows == 0 || part.cols == 0 {
        return;
    }
    if part.transpose {
        place(0, part.rows, part.start / part.rows + unit * part.cols, 1);
        return;
    }
    let source_row = part.start / part.cols + unit * part.rows;
    match part.unpermute {
        None => place(0, part.rows, source_row, 1),
        Some(heads) => {
            // Stored pairwise: row 2·i + t of a head is row t·half + i of the checkpoint.
            let head_rows = part.rows / heads;
            let half = head_rows / 2;
            for head in heads_of(heads, part.rows, &share.rows, first) {
                for t in 0..2 {
                    place(head * head_rows + t * half, half, source_row + head * head_rows + t, 2);
                }
            }
        }
    }
}

/// The error for a tp that does not fit, with the values that would. `experts` is their number where whole experts are
/// divided.
fn indivisible(set: &GgufSet, plan: &Plan, weight: &Weight, what: &str, experts: Option<u64>) -> Error {
    let vocab = plan.profile.rules.vocab;
    let fits = |n: u64| {
        experts.is_none_or(|e| e % n == 0)
            && plan.model.weights.iter().all(|w| share(&w.cut, &w.shape, n, 0, vocab).is_ok())
    };
    let working: Vec<String> = (1..=128).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
    let found = format!(
        "{what} cannot be divided among {} ranks ({}, shape {:?})",
        plan.tp,
        ParamCut::Weights(weight.cut.kind).name(),
        weight.shape
    );
    Fault::new(found)
        .file(set.path())
        .tensor(&weight.name)
        .remedy(format!("--tp values that work for this model: {}", working.join(", ")))
        .layout()
}
