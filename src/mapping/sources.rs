//! A weight's sources in a file: which of them are there, whether their shapes agree with the metadata, and which
//! elements they give.

use super::facts::Bound;
use super::recipe::{Cut, Matrix, Part, Recipe, ValueOp, Weight};
use super::resolve::{Found, Resolver, Step};
use super::rules::{CutKind, CutRule, ExprText, From, SidecarRole, Source, WeightRule};
use crate::error::Result;
use crate::gguf::GgmlType;

/// Most elements of one weight: 2^48, some hundred times the largest models as a whole.
const MOST_ELEMENTS: u64 = 1 << 48;

impl<'a> Resolver<'a> {
    /// What a rule means for one round of its loops.
    pub(super) fn find(&self, rule: &'a WeightRule, vars: &[(&str, u64)]) -> Result<Found> {
        self.count_question(rule)?;
        let scope = Bound { facts: self.facts, vars };
        let name = rule.name.0.fill(|v| scope.var(v)).unwrap_or_default();
        let broken = |why: String| self.facts.fault(why).tensor(name.clone()).contradiction();
        if let Some(when) = &rule.when
            && !scope.truth(when).map_err(broken)?
        {
            return Ok(Found::NotApplicable);
        }
        let mut lacking: Vec<(usize, String)> = Vec::new();
        for from in rule.from.as_slice() {
            let sources = from.sources();
            let names: Vec<String> =
                sources.iter().map(|s| s.gguf.0.fill(|v| scope.var(v)).unwrap_or_default()).collect();
            let found: Vec<Option<usize>> = names.iter().map(|n| self.set.find(n)).collect();
            if let Some(found) = found.iter().copied().collect::<Option<Vec<usize>>>() {
                let (weight, steps) = self.build(rule, &name, &scope, from, &found)?;
                return Ok(Found::Weight(weight, steps));
            }
            let gone: Vec<&str> =
                names.iter().zip(&found).filter(|(_, f)| f.is_none()).map(|(n, _)| n.as_str()).collect();
            lacking.push((found.len() - gone.len(), gone.join(" and ")));
        }
        // The form of which the file has a part is the one that it means.
        lacking.sort_by_key(|(there, _)| std::cmp::Reverse(*there));
        let lacking: Vec<String> = lacking.into_iter().map(|(_, names)| names).collect();
        Ok(Found::Absent(lacking.join(", or ")))
    }

    fn sizes(&self, list: &[ExprText], scope: &Bound<'_, '_>, name: &str) -> Result<Vec<u64>> {
        let sizes: Result<Vec<u64>, String> = list.iter().map(|e| scope.size(e)).collect();
        sizes.map_err(|why| self.facts.fault(why).tensor(name).contradiction())
    }

    fn build(
        &self,
        rule: &WeightRule,
        name: &str,
        scope: &Bound<'_, '_>,
        from: &From,
        found: &[usize],
    ) -> Result<(Weight, Vec<Step>)> {
        let broken = |why: String| self.facts.fault(why).tensor(name).contradiction();
        let shape = self.sizes(&rule.shape, scope, name)?;
        // As in a GGUF header, an axis of 0 counts as one, so that no product of some of the axes overflows either.
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul((*d).max(1)));
        if elements.is_none_or(|n| n > MOST_ELEMENTS) {
            let because = scope.explain(rule.shape.iter().map(|e| &e.0));
            return Err(broken(format!("shape {shape:?} has too many elements ({because})")));
        }
        let matrix = Matrix::of(&shape);
        let units = match from {
            From::One(_) => 1,
            From::Interleaved(interleaved) => scope.size(&interleaved.per).map_err(broken)?,
        };
        if units == 0 {
            return Err(broken("interleaved by 0 units".into()));
        }
        let mut parts = Vec::new();
        let mut steps = Vec::new();
        for (source, &index) in from.sources().iter().zip(found) {
            let (part, step) = self.part(source, index, scope, &rule.shape, matrix, units)?;
            if let Some((start, scale)) = step {
                steps.push(Step { part: parts.len(), start, scale });
            }
            parts.push(part);
        }
        let rows = parts.iter().try_fold(0u64, |n, p| n.checked_add(p.rows)).and_then(|n| n.checked_mul(units));
        if rows != Some(matrix.rows) {
            let rows = rows.map_or("too many".to_owned(), |n| n.to_string());
            let expected = format!("{} ({})", matrix.rows, scope.explain(rule.shape.iter().map(|e| &e.0)));
            return Err(broken(format!("its sources give {rows} rows; expected {expected}")));
        }
        let block = scope.var("layer");
        let weight = Weight {
            name: name.to_owned(),
            cut: self.cut(&rule.cut, scope).map_err(broken)?,
            shape,
            pinned: rule.dtype,
            recipe: Recipe { units, parts },
            block,
            mtp: block.is_some_and(|b| self.blocks.is_mtp(b)),
        };
        Ok((weight, steps))
    }

    fn cut(&self, rule: &CutRule, scope: &Bound<'_, '_>) -> Result<Cut, String> {
        Ok(match rule {
            CutRule::Plain(kind) => Cut { kind: *kind, units: None, repeat: false },
            CutRule::Units(cut) => {
                let (kind, units) = match (&cut.column, &cut.row) {
                    (Some(units), _) => (CutKind::Column, units),
                    (None, Some(units)) => (CutKind::Row, units),
                    (None, None) => return Err("a cut without units".into()),
                };
                Cut { kind, units: Some(scope.size(units)?), repeat: cut.repeat }
            }
        })
    }

    /// One source of a weight: its shape is compared with what the rule says, then the taken elements are located.
    /// The second value says how far an unstacked part and its scale move per round.
    fn part(
        &self,
        source: &Source,
        index: usize,
        scope: &Bound<'_, '_>,
        weight_shape: &[ExprText],
        weight: Matrix,
        units: u64,
    ) -> Result<(Part, Option<(u64, u64)>)> {
        let tensor = &self.set.tensors()[index];
        let name = tensor.name.as_str();
        let broken = |why: String| self.facts.fault(why).tensor(name).contradiction();
        let inner = source.shape.as_deref().unwrap_or(weight_shape);
        let inner_shape = self.sizes(inner, scope, name)?;
        let mut expected = inner_shape.clone();
        let mut slices = 1;
        if let Some(variable) = &source.unstack {
            slices = self.rounds(variable, scope.vars)?;
            expected.insert(0, slices);
        }
        let actual = tensor.shape();
        let merged = || match expected.split_last() {
            Some((last, lead)) => {
                let rows = lead.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
                source.reshape && rows.is_some_and(|rows| actual == [rows, *last])
            }
            None => false,
        };
        let agree = without_leading_ones(&actual) == without_leading_ones(&expected) || merged();
        if !agree {
            let count = source.unstack.as_ref().and_then(|v| self.rules.loops.get(v));
            let axes: Vec<&str> = count.into_iter().chain(inner).map(|e| e.0.text()).collect();
            let because = scope.explain(count.into_iter().chain(inner).map(|e| &e.0));
            let because = if because.is_empty() { String::new() } else { format!(", where {because}") };
            return Err(self
                .facts
                .fault(format!("its shape is {actual:?}"))
                .tensor(name)
                .expected(format!("{expected:?}, that is [{}]{because}", axes.join(", ")))
                .remedy(format!("Metadata and tensors disagree, or mapping '{}' is not for this file", self.rules.name))
                .contradiction());
        }
        let slice = tensor.elements().checked_div(slices).unwrap_or(0);
        if source.unstack.is_some() && slice == 0 {
            // Otherwise a header of some bytes would make any number of weights.
            let fault = self.facts.fault(format!("shape {actual:?} has no elements to unstack")).tensor(name);
            return Err(fault.expected("at least one element for each").contradiction());
        }
        let round = source.unstack.as_deref().and_then(|v| scope.var(v)).unwrap_or(0);
        let taken = Matrix::of(&inner_shape);
        let (first, elements) = match &source.rows {
            None => (0, slice),
            Some([first, count]) => {
                let first = scope.size(first).map_err(broken)?;
                let count = scope.size(count).map_err(broken)?;
                if first.checked_add(count).is_none_or(|end| end > taken.rows) {
                    return Err(broken(format!("rows {first}..+{count} of {} are taken", taken.rows)));
                }
                (first * taken.cols, count * taken.cols)
            }
        };
        let per_unit = units.checked_mul(weight.cols).filter(|n| *n > 0 && elements % n == 0);
        let rows = match per_unit {
            Some(n) => elements / n,
            None if elements == 0 => 0,
            None => {
                return Err(broken(format!(
                    "{elements} elements do not make {units} units of rows of {}",
                    weight.cols
                )));
            }
        };
        let fits = if source.transpose { taken.cols == rows } else { taken.cols == weight.cols || rows == 0 };
        if !fits {
            return Err(broken(format!(
                "its rows of {} elements do not fit the weight's of {}",
                taken.cols, weight.cols
            )));
        }
        let unpermute = source.unpermute.as_ref().map(|heads| scope.size(heads)).transpose().map_err(broken)?;
        if let Some(heads) = unpermute
            && (heads == 0 || rows % (2 * heads) != 0)
        {
            return Err(broken(format!("{rows} rows are not {heads} heads of an even number of rows")));
        }
        let scale = self.scale(name, source.unstack.is_some().then_some(slices))?;
        let step = source.unstack.as_ref().map(|_| (slice, u64::from(scale.is_some_and(|(_, per_slice)| per_slice))));
        let part = Part {
            source: index as u32,
            start: slice * round + first,
            rows,
            cols: weight.cols,
            transpose: source.transpose,
            unpermute,
            op: ValueOp {
                scale: scale.map(|(index, per_slice)| (index, if per_slice { round } else { 0 })),
                add: source.add,
            },
        };
        Ok((part, step))
    }

    /// The scale sidecar of a tensor, and whether it has one value per slice.
    fn scale(&self, owner: &str, slices: Option<u64>) -> Result<Option<(u32, bool)>> {
        for sidecar in self.rules.sidecars.iter().filter(|s| s.role == SidecarRole::Scale) {
            let Some(stem) = owner.strip_suffix(".weight") else { continue };
            let Some(index) = self.set.find(&format!("{stem}{}", sidecar.suffix)) else { continue };
            let tensor = &self.set.tensors()[index];
            let n = tensor.elements();
            let per_slice = n != 1 && slices == Some(n);
            if tensor.ty != GgmlType::F32 || (n != 1 && !per_slice) {
                let wanted = slices.filter(|s| *s != 1).map(|s| format!(" or {s}")).unwrap_or_default();
                return Err(self
                    .facts
                    .fault(format!("a scale of {n} {} values", tensor.ty))
                    .tensor(&tensor.name)
                    .expected(format!("1{wanted} F32 values, which multiply '{owner}'"))
                    .contradiction());
            }
            return Ok(Some((index as u32, per_slice)));
        }
        Ok(None)
    }
}

/// llama-quantize writes the shortest shape; a stored axis of 1 in front does not count.
fn without_leading_ones(shape: &[u64]) -> &[u64] {
    let ones = shape.iter().take_while(|d| **d == 1).count();
    &shape[ones..]
}
