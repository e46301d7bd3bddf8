//! Rules meet a file: which weights it holds, where each comes from, and that nothing is left over.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::blocks::{BlockMap, MtpPolicy};
use super::facts::{Bound, Facts};
use super::recipe::{Cut, Matrix, Part, Recipe, ValueOp, Weight};
use super::rules::{
    CutKind, CutRule, ExprText, From, Group, OneOrMany, Rules, SidecarRole, Source, WeightRule,
};
use super::{Ignored, Mapping, Model, pattern};
use crate::error::{Error, Result};
use crate::gguf::{GgmlType, GgufSet};

/// Most weights that a model may have; GLM-5 and Kimi-K2 have about 60,000 and 70,000.
const MOST_WEIGHTS: usize = 1 << 22;
/// Most rounds of one loop.
const MOST_ROUNDS: u64 = 1 << 20;
/// Most times that rules are asked for a weight, over all loops; rules that only unstack are asked once for a whole loop.
const MOST_QUESTIONS: u64 = 1 << 20;

/// Resolves a mapping against a file: every source tensor is used by a weight or ignored by a named rule, every weight that the
/// model must have is there, and the shapes agree with the metadata.
pub fn resolve(mapping: &Mapping, set: &GgufSet, mtp: MtpPolicy) -> Result<Model> {
    let rules = &mapping.rules;
    let facts = Facts::new(set, rules)?;
    let mut resolver = Resolver {
        set,
        rules,
        facts: &facts,
        blocks: BlockMap::default(),
        used: vec![false; set.tensors().len()],
        weights: Vec::new(),
        warnings: Vec::new(),
        group_seen: BTreeMap::new(),
        asked: Cell::new(0),
    };
    if rules.every_tensor {
        resolver.take_every_tensor()?;
    } else {
        resolver.blocks = BlockMap::read(&facts, mtp, &mut resolver.warnings)?;
        resolver.check()?;
        resolver.expand()?;
    }
    let ignored = resolver.leftovers()?;
    resolver.warn_of_expected_groups();
    Ok(Model {
        mapping: mapping.id(),
        class: rules.class.clone(),
        architecture: set.architecture().unwrap_or_default().to_owned(),
        verbatim: rules.every_tensor,
        weights: resolver.weights,
        ignored,
        warnings: resolver.warnings,
    })
}

struct Resolver<'a> {
    set: &'a GgufSet,
    rules: &'a Rules,
    facts: &'a Facts<'a>,
    blocks: BlockMap,
    used: Vec<bool>,
    weights: Vec<Weight>,
    warnings: Vec<String>,
    /// For each group that some block could have: whether one has it.
    group_seen: BTreeMap<&'a str, bool>,
    /// How often rules were asked for a weight.
    asked: Cell<u64>,
}

/// Loop variables and their values.
type Vars<'v> = Vec<(&'v str, u64)>;

/// A rule's answer for one round of its loops.
enum Found {
    /// The weight, and how it changes with each loop variable that only unstacks.
    Weight(Weight, Vec<Step>),
    /// The model has no such weight.
    NotApplicable,
    /// It has, but the file lacks these tensors.
    Absent(String),
}

/// How a part moves when an unstacking loop variable advances by one.
struct Step {
    part: usize,
    start: u64,
    scale: u64,
}

impl<'a> Resolver<'a> {
    fn take_every_tensor(&mut self) -> Result<()> {
        for (index, tensor) in self.set.tensors().iter().enumerate() {
            let shape = tensor.shape();
            let Matrix { rows, cols } = Matrix::of(&shape);
            let part = Part {
                source: index as u32,
                start: 0,
                rows,
                cols,
                transpose: false,
                unpermute: None,
                op: ValueOp::default(),
            };
            self.used[index] = true;
            self.weights.push(Weight {
                name: tensor.name.clone(),
                shape,
                cut: Cut { kind: CutKind::Replicated, units: None, repeat: false },
                pinned: None,
                recipe: Recipe { units: 1, parts: vec![part] },
                block: None,
                mtp: false,
            });
        }
        Ok(())
    }

    /// The mapping's own conditions.
    fn check(&self) -> Result<()> {
        for check in &self.rules.checks {
            let text = check.that.0.text();
            let per_block = pattern::words(text).any(|w| w == "layer");
            let rounds: Vec<Vars> = if per_block {
                self.blocks.present().map(|b| vec![("layer", b)]).collect()
            } else {
                vec![Vec::new()]
            };
            for vars in &rounds {
                let broken = |why: String| self.facts.fault(why).contradiction();
                if !check.that.0.truth(&Bound { facts: self.facts, vars }).map_err(broken)? {
                    let place = value(vars, "layer").map(|b| format!("block {b}: ")).unwrap_or_default();
                    let because = self.facts.explain(text);
                    return Err(self
                        .facts
                        .fault(format!("{place}{} ({because})", check.otherwise))
                        .expected(format!("`{text}`"))
                        .remedy("Metadata and tensors contradict each other; convert the original checkpoint again")
                        .contradiction());
                }
            }
        }
        Ok(())
    }

    /// All rules in the order of the output: those before the first that loops over layers, then the layers with
    /// every layered rule in each, then the rest.
    fn expand(&mut self) -> Result<()> {
        let rules = self.rules;
        let layered = |r: &&WeightRule| r.name.0.variables().contains(&"layer");
        let first = rules.weights.iter().position(|r| layered(&r)).unwrap_or(rules.weights.len());
        let before: Vec<&WeightRule> = rules.weights[..first].iter().collect();
        let after: Vec<&WeightRule> = rules.weights[first..].iter().filter(|r| !layered(r)).collect();
        let per_layer: Vec<&WeightRule> = rules.weights.iter().filter(layered).collect();
        self.emit(&before, None)?;
        if !per_layer.is_empty() {
            for layer in 0..self.rounds("layer", &[])? {
                if self.blocks.wanted(layer) {
                    self.emit(&per_layer, Some(layer))?;
                }
            }
        }
        self.emit(&after, None)
    }

    fn emit(&mut self, rules: &[&'a WeightRule], layer: Option<u64>) -> Result<()> {
        let base: Vars = layer.map(|l| ("layer", l)).into_iter().collect();
        let skipped = self.absent_groups(rules, &base)?;
        let extra = |r: &WeightRule| -> Vec<String> {
            r.name.0.variables().into_iter().filter(|v| *v != "layer").map(str::to_owned).collect()
        };
        for run in rules.chunk_by(|a, b| extra(a) == extra(b)) {
            let run: Vec<&WeightRule> =
                run.iter().copied().filter(|r| r.group.as_deref().is_none_or(|g| !skipped.contains(g))).collect();
            if run.is_empty() {
                continue;
            }
            match extra(run[0]).as_slice() {
                [] => {
                    for rule in run {
                        self.emit_one(rule, &base)?;
                    }
                }
                [variable] => self.emit_loop(&run, &base, variable)?,
                [..] => {
                    let name = run[0].name.0.text();
                    let fault = self.facts.fault("a weight with more than two loop variables").key(name);
                    return Err(fault.rules());
                }
            }
        }
        Ok(())
    }

    fn emit_one(&mut self, rule: &'a WeightRule, vars: &[(&str, u64)]) -> Result<()> {
        match self.find(rule, vars)? {
            Found::Weight(weight, _) => self.push(weight),
            Found::NotApplicable => Ok(()),
            Found::Absent(_) if rule.optional => {
                self.warnings.extend(rule.if_absent.clone());
                Ok(())
            }
            Found::Absent(needs) => Err(self.missing(rule, vars, &needs)),
        }
    }

    /// A run of rules that share one inner loop (experts): the loop is outside, the rules inside. A rule that only
    /// unstacks by the variable is resolved once and then stepped.
    fn emit_loop(&mut self, run: &[&'a WeightRule], base: &[(&str, u64)], variable: &str) -> Result<()> {
        let at = |round: u64| -> Vars { base.iter().copied().chain([(variable, round)]).collect() };
        let mut stepped: Vec<Option<Option<(Weight, Vec<Step>)>>> = Vec::new();
        for rule in run {
            stepped.push(if depends_on(rule, variable) {
                None
            } else {
                match self.find(rule, &at(0))? {
                    Found::Weight(weight, steps) => Some(Some((weight, steps))),
                    Found::NotApplicable => Some(None),
                    Found::Absent(_) if rule.optional => Some(None),
                    Found::Absent(needs) => return Err(self.missing(rule, &at(0), &needs)),
                }
            });
        }
        if stepped.iter().all(|s| matches!(s, Some(None))) {
            return Ok(());
        }
        for round in 0..self.rounds(variable, base)? {
            for (rule, template) in run.iter().zip(&stepped) {
                match template {
                    None => self.emit_one(rule, &at(round))?,
                    Some(None) => {}
                    Some(Some((weight, steps))) => {
                        let mut weight = weight.clone();
                        weight.name = rule.name.0.fill(|v| value(&at(round), v)).unwrap_or_default();
                        for step in steps {
                            let part = &mut weight.recipe.parts[step.part];
                            part.start += step.start * round;
                            if let Some((_, element)) = &mut part.op.scale {
                                *element += step.scale * round;
                            }
                        }
                        self.push(weight)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, weight: Weight) -> Result<()> {
        if self.weights.len() >= MOST_WEIGHTS {
            let found = format!("more than {MOST_WEIGHTS} weights");
            let fault = self.facts.fault(found).remedy("Check the layer and expert counts of the metadata");
            return Err(fault.contradiction());
        }
        for part in &weight.recipe.parts {
            self.used[part.source as usize] = true;
            if let Some((scale, _)) = part.op.scale {
                self.used[scale as usize] = true;
            }
        }
        self.weights.push(weight);
        Ok(())
    }

    /// Groups that this block has not. A group is whole or absent, and where the metadata speaks of it, as it says.
    fn absent_groups(&mut self, rules: &[&'a WeightRule], vars: &[(&str, u64)]) -> Result<BTreeSet<&'a str>> {
        let mut members: BTreeMap<&'a str, (Vec<String>, Vec<String>)> = BTreeMap::new();
        for rule in rules {
            let Some(group) = rule.group.as_deref() else { continue };
            let vars: Vars = rule
                .name
                .0
                .variables()
                .into_iter()
                .map(|v| (v, value(vars, v).unwrap_or(0)))
                .collect();
            let entry = members.entry(group).or_default();
            match self.find(rule, &vars)? {
                Found::Weight(weight, _) => {
                    entry.0.push(self.set.tensors()[weight.recipe.parts[0].source as usize].name.clone())
                }
                Found::NotApplicable => {}
                Found::Absent(_) if rule.optional => {}
                Found::Absent(needs) => entry.1.push(needs),
            }
        }
        let mut skipped = BTreeSet::new();
        for (group, (there, lacking)) in members {
            if there.is_empty() && lacking.is_empty() {
                continue;
            }
            let present = !there.is_empty();
            *self.group_seen.entry(group).or_default() |= present;
            if present && !lacking.is_empty() {
                return Err(self
                    .facts
                    .fault(format!("group '{group}' is incomplete: there is {}, but not {}", there.join(", "), lacking.join(", ")))
                    .tensor(lacking[0].clone())
                    .expected(format!("all tensors of '{group}' in a block, or none"))
                    .remedy("The file is damaged or was made by an unfinished converter; get a complete one")
                    .missing_tensor());
            }
            if let Some(layer) = value(vars, "layer") {
                self.check_declared(group, layer, present, there.first().or(lacking.first()))?;
            }
            if !present {
                skipped.insert(group);
            }
        }
        Ok(skipped)
    }

    fn check_declared(&self, group: &str, layer: u64, present: bool, example: Option<&String>) -> Result<()> {
        let Some(Group { declared: Some(dim), .. }) = self.rules.groups.get(group) else { return Ok(()) };
        let Some(declared) = self.facts.per_block(dim, layer)? else { return Ok(()) };
        if declared == super::expr::Value::Bool(present) {
            return Ok(());
        }
        let has = if present { "has" } else { "has not" };
        Err(self
            .facts
            .fault(format!("metadata says {declared} for block {layer} in '{dim}', but block {layer} {has} the tensors of group '{group}'"))
            .tensor(example.cloned().unwrap_or_default())
            .expected("metadata and tensors to agree on which blocks have the group")
            .remedy("The file contradicts itself: convert the original checkpoint again, or remove the metadata key to go by the tensors")
            .contradiction())
    }

    fn warn_of_expected_groups(&mut self) {
        for (name, group) in &self.rules.groups {
            if group.expected && self.group_seen.get(name.as_str()) == Some(&false) {
                self.warnings.push(format!(
                    "no block has the tensors of group '{name}': the checkpoint will lack weights that a model of class {} has",
                    self.rules.class
                ));
            }
        }
    }

    fn rounds(&self, variable: &str, vars: &[(&str, u64)]) -> Result<u64> {
        let broken = |why: String| self.facts.fault(why).key(format!("loops.{variable}")).contradiction();
        let count = self.rules.loops.get(variable).ok_or_else(|| broken(format!("'{variable}' is no loop")))?;
        let n = count.0.size(&Bound { facts: self.facts, vars }).map_err(broken)?;
        if n > MOST_ROUNDS {
            return Err(broken(format!("{n} rounds of loop '{variable}'; at most {MOST_ROUNDS} are possible")));
        }
        Ok(n)
    }

    fn missing(&self, rule: &WeightRule, vars: &[(&str, u64)], needs: &str) -> Error {
        let name = rule.name.0.fill(|v| value(vars, v)).unwrap_or_else(|| rule.name.0.text().to_owned());
        let block = value(vars, "layer").map(|l| format!(" of block {l}")).unwrap_or_default();
        self.facts
            .fault(format!("weight '{name}'{block} has no source: the file lacks {needs}"))
            .tensor(needs.split([' ', ',']).next().unwrap_or_default())
            .expected(format!("every weight that mapping '{}' requires", self.rules.name))
            .remedy("The file is incomplete or belongs to another model class; choose one with --mapping")
            .missing_tensor()
    }

    fn find(&self, rule: &'a WeightRule, vars: &[(&str, u64)]) -> Result<Found> {
        self.asked.set(self.asked.get() + 1);
        if self.asked.get() > MOST_QUESTIONS {
            let found = format!("the loops of rules take more than {MOST_QUESTIONS} rounds together");
            let fault = self.facts.fault(found).key(rule.name.0.text());
            return Err(fault.remedy("Check the layer and expert counts of the metadata, and [loops]").contradiction());
        }
        let scope = Bound { facts: self.facts, vars };
        let name = rule.name.0.fill(|v| scope.var(v)).unwrap_or_default();
        let broken = |why: String| self.facts.fault(why).tensor(name.clone()).contradiction();
        if let Some(when) = &rule.when
            && !when.0.truth(&scope).map_err(broken)?
        {
            return Ok(Found::NotApplicable);
        }
        let mut lacking: Vec<String> = Vec::new();
        for from in rule.from.as_slice() {
            let sources: &[Source] = match from {
                From::One(source) => std::slice::from_ref(source),
                From::Interleaved(interleaved) => &interleaved.parts,
            };
            let names: Vec<String> =
                sources.iter().map(|s| s.gguf.0.fill(|v| scope.var(v)).unwrap_or_default()).collect();
            let found: Vec<Option<usize>> = names.iter().map(|n| self.set.find(n)).collect();
            if let Some(found) = found.iter().copied().collect::<Option<Vec<usize>>>() {
                let (weight, steps) = self.build(rule, &name, &scope, from, &found)?;
                return Ok(Found::Weight(weight, steps));
            }
            let gone: Vec<&str> =
                names.iter().zip(&found).filter(|(_, f)| f.is_none()).map(|(n, _)| n.as_str()).collect();
            lacking.push(gone.join(" and "));
        }
        Ok(Found::Absent(lacking.join(", or ")))
    }

    fn sizes(&self, list: &[ExprText], scope: &Bound<'_, '_>, name: &str) -> Result<Vec<u64>> {
        let sizes: Result<Vec<u64>, String> = list.iter().map(|e| e.0.size(scope)).collect();
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
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        elements.ok_or_else(|| broken(format!("shape {shape:?} has too many elements")))?;
        let matrix = Matrix::of(&shape);
        let (units, sources) = match from {
            From::One(source) => (1, std::slice::from_ref(source)),
            From::Interleaved(i) => (i.per.0.size(scope).map_err(broken)?, i.parts.as_slice()),
        };
        if units == 0 {
            return Err(broken("interleaved by 0 units".into()));
        }
        let mut parts = Vec::new();
        let mut steps = Vec::new();
        for (source, &index) in sources.iter().zip(found) {
            let (part, step) = self.part(source, index, scope, &rule.shape, matrix, units)?;
            if let Some((start, scale)) = step {
                steps.push(Step { part: parts.len(), start, scale });
            }
            parts.push(part);
        }
        let rows: u64 = parts.iter().map(|p| p.rows).sum::<u64>() * units;
        if rows != matrix.rows {
            let expected = format!("{} ({})", matrix.rows, self.explain(&rule.shape));
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
                Cut { kind, units: Some(units.0.size(scope)?), repeat: cut.repeat }
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
            let explained: Vec<ExprText> = count.into_iter().chain(inner).cloned().collect();
            let because = self.explain(&explained);
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
        let round = source.unstack.as_deref().and_then(|v| scope.var(v)).unwrap_or(0);
        let taken = Matrix::of(&inner_shape);
        let (first, elements) = match &source.rows {
            None => (0, slice),
            Some([first, count]) => {
                let first = first.0.size(scope).map_err(broken)?;
                let count = count.0.size(scope).map_err(broken)?;
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
                return Err(broken(format!("{elements} elements do not make {units} units of rows of {}", weight.cols)));
            }
        };
        let fits = if source.transpose { taken.cols == rows } else { taken.cols == weight.cols || rows == 0 };
        if !fits {
            return Err(broken(format!("its rows of {} elements do not fit the weight's of {}", taken.cols, weight.cols)));
        }
        let unpermute = source.unpermute.as_ref().map(|heads| heads.0.size(scope)).transpose().map_err(broken)?;
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

    /// Where the dimensions of some expressions come from.
    fn explain(&self, list: &[ExprText]) -> String {
        let text: Vec<&str> = list.iter().map(|e| e.0.text()).collect();
        self.facts.explain(&text.join(" "))
    }

    /// Every tensor that no weight uses must be ignored by a rule.
    fn leftovers(&self) -> Result<Vec<Ignored>> {
        let mut ignored: HashMap<usize, String> = HashMap::new();
        let mut unknown: Vec<&str> = Vec::new();
        for (index, tensor) in self.set.tensors().iter().enumerate() {
            if self.used[index] {
                continue;
            }
            match self.reason(&tensor.name)? {
                Some(reason) => drop(ignored.insert(index, reason)),
                None => unknown.push(&tensor.name),
            }
        }
        if let Some(first) = unknown.first() {
            let total = self.set.tensors().len();
            let shown: Vec<&str> = unknown.iter().take(8).copied().collect();
            let more = unknown.len() - shown.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return Err(self
                .facts
                .fault(format!(
                    "{} of {total} tensors have no rule in mapping '{}': {}{more}",
                    unknown.len(),
                    self.rules.name,
                    shown.join(", ")
                ))
                .tensor(*first)
                .expected("every tensor to be used by a weight or ignored by a rule with a reason")
                .remedy("Add rules to a copy of the mapping (docs/add-a-model.md) and give it with --mapping")
                .unknown_tensor());
        }
        let mut ignored: Vec<(usize, String)> = ignored.into_iter().collect();
        ignored.sort();
        Ok(ignored.into_iter().map(|(source, reason)| Ignored { source: source as u32, reason }).collect())
    }

    fn reason(&self, name: &str) -> Result<Option<String>> {
        if let Some(reason) = self.blocks.unwanted_reason(name) {
            return Ok(Some(reason));
        }
        for rule in &self.rules.ignores {
            let Some(vars) = rule.gguf.0.capture(name) else { continue };
            let vars: Vars = vars.iter().map(|(n, v)| (n.as_str(), *v)).collect();
            let broken = |why: String| self.facts.fault(why).tensor(name).contradiction();
            let applies = match &rule.when {
                None => true,
                Some(when) => when.0.truth(&Bound { facts: self.facts, vars: &vars }).map_err(broken)?,
            };
            if applies {
                return Ok(Some(rule.reason.clone()));
            }
        }
        for sidecar in &self.rules.sidecars {
            let Some(stem) = name.strip_suffix(sidecar.suffix.as_str()) else { continue };
            let Some(owner) = self.set.find(&format!("{stem}.weight")) else { continue };
            match sidecar.role {
                SidecarRole::Ignore => return Ok(Some(sidecar.reason.clone())),
                // A scale whose owner is no weight goes the owner's way.
                SidecarRole::Scale if !self.used[owner] => return self.reason(&self.set.tensors()[owner].name),
                SidecarRole::Scale => {}
            }
        }
        Ok(None)
    }
}

fn value(vars: &[(&str, u64)], name: &str) -> Option<u64> {
    vars.iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
}

/// Whether a rule's outcome depends on a loop variable other than by unstacking and in its name.
fn depends_on(rule: &WeightRule, variable: &str) -> bool {
    let expr = |e: &ExprText| pattern::words(e.0.text()).any(|w| w == variable);
    let source = |s: &Source| {
        s.gguf.0.variables().contains(&variable)
            || s.shape.iter().flatten().any(expr)
            || s.rows.iter().flatten().any(expr)
            || s.unpermute.iter().any(expr)
    };
    let from = |f: &From| match f {
        From::One(s) => source(s),
        From::Interleaved(i) => expr(&i.per) || i.parts.iter().any(source),
    };
    let cut = match &rule.cut {
        CutRule::Plain(_) => false,
        CutRule::Units(units) => units.column.iter().chain(&units.row).any(expr),
    };
    cut || rule.when.iter().any(expr) || rule.shape.iter().any(expr) || OneOrMany::as_slice(&rule.from).iter().any(from)
}

/// llama-quantize writes the shortest shape; a stored axis of 1 in front does not count.
fn without_leading_ones(shape: &[u64]) -> &[u64] {
    let ones = shape.iter().take_while(|d| **d == 1).count();
    &shape[ones..]
}
