//! Rules meet a file: which weights it holds, where each comes from, and that nothing is left over.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use super::blocks::{BlockMap, MtpPolicy};
use super::expr::Value;
use super::facts::{Bound, Facts, PerBlock};
use super::recipe::{Cut, Matrix, Part, Recipe, ValueOp, Weight};
use super::rules::{CutKind, Group, Rules, WeightRule};
use super::{Mapping, Model};
use crate::error::{Error, Result};
use crate::gguf::GgufSet;

/// Most weights that a model may have; GLM-5 and Kimi-K2 have about 60,000 and 70,000.
const MOST_WEIGHTS: usize = 1 << 18;
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
        uses: vec![Use::default(); set.tensors().len()],
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

pub(super) struct Resolver<'a> {
    pub(super) set: &'a GgufSet,
    pub(super) rules: &'a Rules,
    pub(super) facts: &'a Facts<'a>,
    pub(super) blocks: BlockMap,
    /// What weights take of each source tensor.
    pub(super) uses: Vec<Use>,
    weights: Vec<Weight>,
    warnings: Vec<String>,
    /// For each group that some block could have: whether one has it.
    group_seen: BTreeMap<&'a str, bool>,
    /// How often rules were asked for a weight.
    asked: Cell<u64>,
}

/// What weights take of a source tensor.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Use {
    /// Whether some weight takes anything.
    pub(super) used: bool,
    /// Elements taken by all weights together.
    pub(super) elements: u64,
}

/// Loop variables and their values.
pub(super) type Vars<'v> = Vec<(&'v str, u64)>;

/// A rule's answer for one round of its loops.
pub(super) enum Found {
    /// The weight, and how it changes with each loop variable that only unstacks.
    Weight(Weight, Vec<Step>),
    /// The model has no such weight.
    NotApplicable,
    /// It has, but the file lacks these tensors.
    Absent(String),
}

/// How a rule gives its weights in the rounds of an inner loop.
enum Template {
    /// It is resolved anew in each round.
    EachRound,
    /// It gives none.
    Nothing,
    /// The weight of round 0, and how it moves from round to round.
    Stepped(Weight, Vec<Step>),
}

/// How a part moves when an unstacking loop variable advances by one.
pub(super) struct Step {
    pub(super) part: usize,
    pub(super) start: u64,
    pub(super) scale: u64,
}

impl<'a> Resolver<'a> {
    fn take_every_tensor(&mut self) -> Result<()> {
        for (index, tensor) in self.set.tensors().iter().enumerate() {
            // ggml has no scalars: a tensor without axes is one of one element.
            let shape = if tensor.ne.is_empty() { vec![1] } else { tensor.shape() };
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
            self.uses[index] = Use { used: true, elements: tensor.elements() };
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
            let rounds: Vec<Vars> = if check.that.0.names().contains("layer") {
                self.blocks.present().map(|b| vec![("layer", b)]).collect()
            } else {
                vec![Vec::new()]
            };
            for vars in &rounds {
                let scope = Bound { facts: self.facts, vars };
                let broken = |why: String| self.facts.fault(why).contradiction();
                if !scope.truth(&check.that).map_err(broken)? {
                    let place = value(vars, "layer").map(|b| format!("block {b}: ")).unwrap_or_default();
                    let found = scope.with_reasons(format!("{place}{}", check.otherwise), &check.that.0);
                    return Err(self
                        .facts
                        .fault(found)
                        .expected(format!("`{}`", check.that.0.text()))
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
                self.warn_of_absence(rule);
                Ok(())
            }
            Found::Absent(needs) => Err(self.missing(rule, vars, &needs)),
        }
    }

    /// A run of rules that share one inner loop (experts): the loop is outside, the rules inside. A rule that only
    /// unstacks by the variable is resolved once and then stepped.
    fn emit_loop(&mut self, run: &[&'a WeightRule], base: &[(&str, u64)], variable: &str) -> Result<()> {
        let at = |round: u64| -> Vars { base.iter().copied().chain([(variable, round)]).collect() };
        let mut templates: Vec<Template> = Vec::new();
        if matches!(self.rounds(variable, base), Ok(0)) {
            return Ok(());
        }
        for rule in run {
            templates.push(if rule.depends_on(variable) {
                Template::EachRound
            } else {
                match self.find(rule, &at(0))? {
                    Found::Weight(weight, steps) => Template::Stepped(weight, steps),
                    Found::NotApplicable => Template::Nothing,
                    Found::Absent(_) if rule.optional => {
                        self.warn_of_absence(rule);
                        Template::Nothing
                    }
                    Found::Absent(needs) => return Err(self.missing(rule, &at(0), &needs)),
                }
            });
        }
        if templates.iter().all(|t| matches!(t, Template::Nothing)) {
            return Ok(());
        }
        for round in 0..self.rounds(variable, base)? {
            for (rule, template) in run.iter().zip(&templates) {
                match template {
                    Template::EachRound => self.emit_one(rule, &at(round))?,
                    Template::Nothing => {}
                    Template::Stepped(weight, steps) => {
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

    /// Says once what the absence of an optional weight means.
    fn warn_of_absence(&mut self, rule: &WeightRule) {
        let said = |text: &&String| !self.warnings.contains(text);
        if let Some(text) = rule.if_absent.as_ref().filter(said) {
            self.warnings.push(text.clone());
        }
    }

    /// Bounds the work of all loops together.
    pub(super) fn count_question(&self, rule: &WeightRule) -> Result<()> {
        self.asked.set(self.asked.get() + 1);
        if self.asked.get() <= MOST_QUESTIONS {
            return Ok(());
        }
        let found = format!("the loops of rules take more than {MOST_QUESTIONS} rounds together");
        let fault = self.facts.fault(found).key(rule.name.0.text());
        Err(fault.remedy("Check the layer and expert counts of the metadata, and [loops]").contradiction())
    }

    fn push(&mut self, weight: Weight) -> Result<()> {
        if self.weights.len() >= MOST_WEIGHTS {
            let found = format!("more than {MOST_WEIGHTS} weights");
            let fault = self.facts.fault(found).remedy("Check the layer and expert counts of the metadata");
            return Err(fault.contradiction());
        }
        for part in &weight.recipe.parts {
            let source = &mut self.uses[part.source as usize];
            source.used = true;
            source.elements = source.elements.saturating_add(part.elements(weight.recipe.units));
            if let Some((scale, _)) = part.op.scale {
                let elements = self.set.tensors()[scale as usize].elements();
                self.uses[scale as usize] = Use { used: true, elements };
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
            let vars: Vars = rule.name.0.variables().into_iter().map(|v| (v, value(vars, v).unwrap_or(0))).collect();
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
                    .fault(format!(
                        "group '{group}' is incomplete: there is {}, but not {}",
                        there.join(", "),
                        lacking.join(", ")
                    ))
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
        let Some(PerBlock { values, origin }) = self.facts.per_block(dim)? else { return Ok(()) };
        if !self.blocks.can_be_listed(values.len() as u64) {
            let (trunk, found) = (self.blocks.trunk(), values.len());
            return Err(self
                .facts
                .fault(format!("{origin} has {found} values for {trunk} trunk blocks"))
                .expected("one value per block")
                .contradiction());
        }
        let Some(declared) = values.get(layer as usize) else { return Ok(()) };
        if *declared == Value::Bool(present) {
            return Ok(());
        }
        let has = if present { "has" } else { "lacks" };
        Err(self
            .facts
            .fault(format!("{origin} says {declared} for block {layer}, but the block {has} the tensors of group '{group}'"))
            .tensor(example.cloned().unwrap_or_default())
            .expected("true for blocks that have the tensors, false for others")
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

    pub(super) fn rounds(&self, variable: &str, vars: &[(&str, u64)]) -> Result<u64> {
        let broken = |why: String| self.facts.fault(why).contradiction();
        let count = self.rules.loops.get(variable).ok_or_else(|| broken(format!("'{variable}' is no loop")))?;
        let scope = Bound { facts: self.facts, vars };
        let n = scope.size(count).map_err(broken)?;
        if n > MOST_ROUNDS {
            let found = format!("{n} rounds of loop '{variable}'; at most {MOST_ROUNDS} are possible");
            return Err(broken(scope.with_reasons(found, &count.0)));
        }
        Ok(n)
    }

    fn missing(&self, rule: &WeightRule, vars: &[(&str, u64)], needs: &str) -> Error {
        let name = rule.name.0.fill(|v| value(vars, v)).unwrap_or_else(|| rule.name.0.text().to_owned());
        let block = value(vars, "layer").map(|l| format!(" of block {l}")).unwrap_or_default();
        let scope = Bound { facts: self.facts, vars };
        let when = rule.when.as_ref().map(|when| scope.with_reasons(format!(", because `{}`", when.0.text()), &when.0));
        self.facts
            .fault(format!("weight '{name}'{block} has no source: the file lacks {needs}"))
            .tensor(needs.split([' ', ',']).next().unwrap_or_default())
            .expected(format!("every weight that mapping '{}' requires{}", self.rules.name, when.unwrap_or_default()))
            .remedy("The file is incomplete or belongs to another model class; choose one with --mapping")
            .missing_tensor()
    }
}

pub(super) fn value(vars: &[(&str, u64)], name: &str) -> Option<u64> {
    vars.iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
}
