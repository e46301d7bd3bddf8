//! Layouts: which parameters a stack makes of the weights of a model class.
//!
//! Rules are tried in order, a layout's own before those of the layout that it extends, parameters before `keep`. Every
//! weight must be taken by one rule; a weight that none takes means that the profile does not cover the model.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};

use super::expr::{Scope, Value};
pub(crate) use super::layout_rules::WEIGHT_BLOCK;
pub use super::layout_rules::{
    ConstantRule, DraftRule, DraftRules, EndStage, LayoutRules, ParamRule, TiedRule, for_class,
};
use super::layout_rules::{NAMES, chain};
use super::pattern::Pattern;
use super::recipe::Weight;
use super::rules::{ExprText, PinnedDtype};

/// Which set of files a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Set {
    /// The model itself.
    Main,
    /// The draft model made of the MTP blocks, in the folder `mtp/`.
    Draft,
}

/// Where along the model a parameter belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Before the blocks.
    Before,
    /// In a block.
    Block(u64),
    /// After the blocks.
    After,
}

/// A parameter, as a layout makes it of weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Its name.
    pub name: String,
    /// The set it belongs to.
    pub set: Set,
    /// Where it belongs.
    pub place: Place,
    /// What it is made of.
    pub content: Content,
    /// A dtype that does not follow the output policy.
    pub pinned: Option<PinnedDtype>,
}

/// What a parameter is made of.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Weights joined along their rows.
    Joined(Vec<u32>),
    /// As many joined weights for each element of a new axis in front: `parts` weights each.
    Stacked {
        /// All weights, element by element.
        weights: Vec<u32>,
        /// Weights per element.
        parts: u32,
    },
    /// A scalar.
    Constant(f32),
}

/// What a layout makes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct LaidOut {
    /// The parameters in the global order.
    pub params: Vec<ParamSpec>,
    /// Weights that are not laid out, and why.
    pub left_out: Vec<(u32, String)>,
}

/// Most layouts of a profile, and most rules of all of them, each name that a rule lists counted as one.
const MOST_LAYOUTS: usize = 128;
const MOST_RULES: usize = 1 << 12;
/// Most parameters that a layout makes of a model.
const MOST_PARAMS: usize = 1 << 19;
/// Most times that weights are compared with rules; those of GLM-5 and Kimi-K2 take some million.
const MOST_STEPS: u64 = 1 << 27;

/// Checks the layouts of a profile against each other.
pub(super) fn check(layouts: &[LayoutRules]) -> Result<(), String> {
    let rules = layouts.iter().map(LayoutRules::names).sum::<usize>();
    if layouts.len() > MOST_LAYOUTS || rules > MOST_RULES {
        let found = format!("{} layouts with {rules} rules", layouts.len());
        return Err(format!("{found}; at most {MOST_LAYOUTS} with {MOST_RULES} are read"));
    }
    for layout in layouts {
        let chain = chain(layouts, layout)?;
        let at = |e: String| format!("layout '{}': {e}", layout.name);
        for part in &chain {
            let draft = part.draft.as_ref().map(|d| d.block.as_str());
            for block in draft.into_iter().chain([WEIGHT_BLOCK]) {
                Compiled::new(part, block).map_err(at)?;
            }
        }
        layout.check_names().map_err(at)?;
        if layout.verbatim && (!layout.params.is_empty() || layout.extends.is_some()) {
            return Err(at("a verbatim layout has no other rules".into()));
        }
    }
    Ok(())
}

/// Rules of one layout with their patterns parsed.
struct Compiled<'a> {
    rules: Vec<CompiledRule<'a>>,
    constants: Vec<CompiledConstants<'a>>,
}

struct CompiledConstants<'a> {
    after: Pattern,
    names: Vec<Pattern>,
    rule: &'a ConstantRule,
}

struct CompiledRule<'a> {
    name: Pattern,
    parts: Vec<Pattern>,
    stack: Option<&'a str>,
    when: Option<&'a ExprText>,
    pinned: Option<PinnedDtype>,
}

impl<'a> Compiled<'a> {
    /// `block` is what `{block}` stands for in names.
    fn new(layout: &'a LayoutRules, block: &str) -> Result<Self, String> {
        let weight = |text: &str| Pattern::parse(&text.replace("{block}", WEIGHT_BLOCK));
        let name = |text: &str| Pattern::parse(&text.replace("{block}", block));
        let mut rules = Vec::new();
        for rule in &layout.params {
            if rule.parts.is_empty() {
                return Err(format!("'{}' has no parts", rule.name));
            }
            rules.push(CompiledRule {
                name: name(&rule.name)?,
                parts: rule.parts.iter().map(|p| weight(p)).collect::<Result<_, _>>()?,
                stack: rule.stack.as_deref(),
                when: rule.when.as_ref(),
                pinned: rule.dtype,
            });
        }
        for kept in &layout.keep {
            let parts = vec![weight(kept)?];
            rules.push(CompiledRule { name: name(kept)?, parts, stack: None, when: None, pinned: None });
        }
        for rule in &rules {
            let bound = rule.parts[0].variables();
            if let Some(free) = rule.name.variables().iter().find(|v| !bound.contains(v)) {
                return Err(format!("'{}' uses '{{{free}}}', which its first part does not", rule.name.text()));
            }
            if rule.stack.is_some_and(|s| rule.parts.iter().any(|p| !p.variables().contains(&s))) {
                return Err(format!("every part of '{}' must use its stack variable", rule.name.text()));
            }
        }
        let constants = layout.constants.iter().map(|rule| {
            let names = rule.names.iter().map(|n| name(n)).collect::<Result<_, String>>()?;
            Ok(CompiledConstants { after: weight(&rule.after)?, names, rule })
        });
        let constants = constants.collect::<Result<_, String>>()?;
        Ok(Compiled { rules, constants })
    }
}

/// What conditions of a layout may ask.
struct LayoutScope<'a> {
    index: &'a HashMap<&'a str, u32>,
    asked: Asked,
}

/// What conditions of a layout may ask, beside the weights that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Whether some weights are written as fp8.
    pub fp8: bool,
    /// Whether some weights are written as nvfp4.
    pub nvfp4: bool,
}

impl Scope for LayoutScope<'_> {
    fn name(&self, name: &str) -> Result<Value, String> {
        match name {
            "tp" => Ok(Value::Int(self.asked.tp.into())),
            "pp" => Ok(Value::Int(self.asked.pp.into())),
            "fp8" => Ok(Value::Bool(self.asked.fp8)),
            "nvfp4" => Ok(Value::Bool(self.asked.nvfp4)),
            other => Err(format!("'{other}' is not known in a layout; {} are", NAMES.join(", "))),
        }
    }
    fn has(&self, pattern: &str) -> Result<bool, String> {
        Ok(self.index.contains_key(pattern))
    }
    fn key(&self, _: &str) -> Result<bool, String> {
        Err("a layout knows weights, not metadata".into())
    }
    fn text(&self, _: &str) -> Result<String, String> {
        Err("a layout knows weights, not metadata".into())
    }
}

/// Lays a model's weights out. The error names what the layout does not cover.
pub fn lay_out(
    layouts: &[LayoutRules],
    layout: &LayoutRules,
    weights: &[Weight],
    asked: Asked,
) -> Result<LaidOut, String> {
    if layout.verbatim {
        let params = weights
            .iter()
            .enumerate()
            .map(|(i, w)| ParamSpec {
                name: w.name.clone(),
                set: Set::Main,
                place: w.block.map_or(Place::Before, Place::Block),
                content: Content::Joined(vec![i as u32]),
                pinned: w.pinned,
            })
            .collect();
        return Ok(LaidOut { params, left_out: Vec::new() });
    }
    let chain = chain(layouts, layout)?;
    let draft = chain.iter().find_map(|l| l.draft.as_ref());
    let draft_block = draft.map_or(WEIGHT_BLOCK, |d| d.block.as_str());
    let compile =
        |block: &str| -> Result<Vec<Compiled<'_>>, String> { chain.iter().map(|l| Compiled::new(l, block)).collect() };
    let without = chain.iter().position(|l| l.without_constants).unwrap_or(chain.len());
    let mut job = Layout {
        weights,
        index: weights.iter().enumerate().map(|(i, w)| (w.name.as_str(), i as u32)).collect(),
        claimed: vec![false; weights.len()],
        first_block: weights.iter().position(|w| w.block.is_some()).unwrap_or(0),
        constants_of: without,
        asked,
        params: Vec::new(),
        left_out: Vec::new(),
        uncovered: Vec::new(),
        steps: Cell::new(0),
    };
    let headless = weights.iter().any(|w| w.mtp) && !weights.iter().any(|w| w.block.is_some() && !w.mtp);
    job.main(&compile(WEIGHT_BLOCK)?, headless)?;
    let no_draft = chain.iter().find_map(|l| l.no_draft.as_deref());
    match draft {
        Some(rules) => job.draft(rules, &compile(draft_block)?)?,
        None => job.without_draft(no_draft.unwrap_or("the layout has no draft model")),
    }
    job.tied(&chain, headless)?;
    let laid_out: HashSet<u32> = job.params.iter().flat_map(|p| p.content.weights()).copied().collect();
    job.left_out.retain(|(weight, _)| !laid_out.contains(weight));
    if !job.uncovered.is_empty() {
        let shown: Vec<&str> = job.uncovered.iter().take(6).map(String::as_str).collect();
        return Err(format!(
            "layout '{}' does not cover {} of {} weights: {}{}",
            layout.name,
            job.uncovered.len(),
            weights.len(),
            shown.join(", "),
            if job.uncovered.len() > shown.len() { ", …" } else { "" }
        ));
    }
    Ok(LaidOut { params: job.params, left_out: job.left_out })
}

struct Layout<'a> {
    weights: &'a [Weight],
    index: HashMap<&'a str, u32>,
    claimed: Vec<bool>,
    first_block: usize,
    /// How many layouts of the chain contribute constants.
    constants_of: usize,
    asked: Asked,
    params: Vec<ParamSpec>,
    left_out: Vec<(u32, String)>,
    uncovered: Vec<String>,
    /// How often weights were compared with rules.
    steps: Cell<u64>,
}

impl Layout<'_> {
    /// Bounds the work of all rules together.
    fn count_steps(&self, steps: usize) -> Result<(), String> {
        self.steps.set(self.steps.get() + steps as u64);
        match self.steps.get() {
            0..=MOST_STEPS => Ok(()),
            _ => Err(format!("its rules take more than {MOST_STEPS} steps for {} weights", self.weights.len())),
        }
    }

    fn add(&mut self, param: ParamSpec) -> Result<(), String> {
        if self.params.len() == MOST_PARAMS {
            return Err(format!("more than {MOST_PARAMS} parameters, at '{}'", param.name));
        }
        self.params.push(param);
        Ok(())
    }

    fn place(&self, weight: usize) -> Place {
        match self.weights[weight].block {
            Some(block) => Place::Block(block),
            None if weight < self.first_block => Place::Before,
            None => Place::After,
        }
    }

    /// The main model's parameters. Without a trunk there is no main model, and what belongs to it is left out.
    fn main(&mut self, compiled: &[Compiled<'_>], headless: bool) -> Result<(), String> {
        for i in 0..self.weights.len() {
            if self.weights[i].mtp || self.claimed[i] {
                continue;
            }
            if headless {
                let reason = "the file holds no trunk, so only the draft model is laid out";
                self.left_out.push((i as u32, reason.into()));
            } else {
                self.take(i, compiled, Set::Main)?;
            }
        }
        Ok(())
    }

    /// Finds the rule for a weight and takes all that the rule takes.
    fn take(&mut self, i: usize, compiled: &[Compiled<'_>], set: Set) -> Result<(), String> {
        let name = self.weights[i].name.as_str();
        for layout in compiled {
            for rule in &layout.rules {
                self.count_steps(rule.parts.len())?;
                let Some(vars) = rule.parts.iter().find_map(|p| p.capture(name)) else { continue };
                let scope = LayoutScope { index: &self.index, asked: self.asked };
                if let Some(when) = rule.when
                    && !when.0.truth(&scope)?
                {
                    continue;
                }
                let Some(content) = self.content(rule, &vars)? else { continue };
                let weights = content.weights();
                weights.iter().for_each(|w| self.claimed[*w as usize] = true);
                let first = self.weights[weights[0] as usize].pinned;
                let name = fill(&rule.name, &vars);
                let (place, pinned) = (self.place(i), rule.pinned.or(first));
                self.add(ParamSpec { name, set, place, content, pinned })?;
                return self.constants(i, compiled, set);
            }
        }
        // A tied weight's own place may be elsewhere: `tied` settles it.
        self.uncovered.push(name.to_owned());
        Ok(())
    }

    /// The weights of a rule's parts; none if any is absent or taken.
    fn content(&self, rule: &CompiledRule<'_>, vars: &[(String, u64)]) -> Result<Option<Content>, String> {
        let free = |name: &str| self.index.get(name).copied().filter(|w| !self.claimed[*w as usize]);
        let Some(stack) = rule.stack else {
            let joined = rule.parts.iter().map(|p| free(&fill(p, vars))).collect::<Option<Vec<_>>>();
            return Ok(joined.map(Content::Joined));
        };
        let mut weights = Vec::new();
        for round in 0.. {
            self.count_steps(rule.parts.len())?;
            let vars: Vec<(String, u64)> =
                vars.iter().map(|(n, v)| (n.clone(), if n == stack { round } else { *v })).collect();
            let found: Vec<Option<u32>> = rule.parts.iter().map(|p| free(&fill(p, &vars))).collect();
            match found.iter().copied().collect::<Option<Vec<u32>>>() {
                Some(found) => weights.extend(found),
                None if found.iter().all(Option::is_none) && round > 0 => break,
                None => return Ok(None),
            }
        }
        Ok(Some(Content::Stacked { weights, parts: rule.parts.len() as u32 }))
    }

    /// The constants that follow a weight.
    fn constants(&mut self, i: usize, compiled: &[Compiled<'_>], set: Set) -> Result<(), String> {
        let place = self.place(i);
        for layout in compiled.iter().take(self.constants_of.saturating_add(1)) {
            self.count_steps(layout.constants.len())?;
            for CompiledConstants { after, names, rule } in &layout.constants {
                let Some(vars) = after.capture(&self.weights[i].name) else { continue };
                let scope = LayoutScope { index: &self.index, asked: self.asked };
                if let Some(when) = &rule.when
                    && !when.0.truth(&scope)?
                {
                    continue;
                }
                for name in names {
                    let (name, content) = (fill(name, &vars), Content::Constant(rule.value));
                    self.add(ParamSpec { name, set, place, content, pinned: rule.pinned() })?;
                }
            }
        }
        Ok(())
    }

    /// The draft model: its block by the same rules under its own prefix, then what surrounds the block.
    fn draft(&mut self, rules: &DraftRules, compiled: &[Compiled<'_>]) -> Result<(), String> {
        let layers: Vec<u64> = {
            let mut all: Vec<u64> = self.weights.iter().filter(|w| w.mtp).filter_map(|w| w.block).collect();
            all.dedup();
            all
        };
        let mut around: Vec<(usize, ParamSpec)> = Vec::new();
        for layer in &layers {
            for rule in &rules.params {
                self.count_steps(around.len() + rule.from.len())?;
                let vars = [("layer".to_owned(), *layer)];
                let name = fill(&Pattern::parse(&rule.name)?, &vars);
                let from = rule
                    .from
                    .iter()
                    .map(|f| Ok(fill(&Pattern::parse(f)?, &vars)))
                    .collect::<Result<Vec<_>, String>>()?;
                let found = from.iter().find_map(|f| self.index.get(f.as_str()).copied());
                let Some(weight) = found else {
                    return Err(format!(
                        "the draft model needs '{name}', but the file has no {}; leave it out with --mtp drop",
                        from.join(", no ")
                    ));
                };
                if let Some((_, twin)) = around.iter().find(|(_, p)| p.name == name) {
                    if twin.content == Content::Joined(vec![weight]) {
                        continue;
                    }
                    return Err(format!("two MTP blocks have a '{name}' of their own, and the draft model holds one"));
                }
                if self.weights[weight as usize].mtp {
                    self.claimed[weight as usize] = true;
                }
                let content = Content::Joined(vec![weight]);
                let pinned = self.weights[weight as usize].pinned;
                let place = Place::Block(*layer);
                around.push((weight as usize, ParamSpec { name, set: Set::Draft, place, content, pinned }));
            }
        }
        for i in 0..self.weights.len() {
            if !self.weights[i].mtp {
                continue;
            }
            self.count_steps(around.len())?;
            match around.iter().position(|(w, _)| *w == i) {
                Some(at) => self.add(around.remove(at).1)?,
                None if self.claimed[i] => {}
                None => self.take(i, compiled, Set::Draft)?,
            }
        }
        self.params.extend(around.into_iter().map(|(_, spec)| spec));
        Ok(())
    }

    fn without_draft(&mut self, reason: &str) {
        for (i, weight) in self.weights.iter().enumerate().filter(|(_, w)| w.mtp) {
            self.claimed[i] = true;
            self.left_out.push((i as u32, format!("MTP block {}: {reason}", weight.block.unwrap_or_default())));
        }
    }

    /// Copies of a weight under the name of an absent one.
    fn tied(&mut self, chain: &[&LayoutRules], headless: bool) -> Result<(), String> {
        for rule in chain.iter().flat_map(|l| &l.tied) {
            if headless || self.index.contains_key(rule.unless.as_str()) {
                continue;
            }
            let Some(weight) = self.index.get(rule.of.as_str()).copied() else { continue };
            self.uncovered.retain(|name| *name != rule.of);
            self.claimed[weight as usize] = true;
            let place = match rule.stage {
                EndStage::First => Place::Before,
                EndStage::Last => Place::After,
            };
            let content = Content::Joined(vec![weight]);
            let pinned = self.weights[weight as usize].pinned;
            self.params.push(ParamSpec { name: rule.name.clone(), set: Set::Main, place, content, pinned });
        }
        Ok(())
    }
}

impl Content {
    /// The weights that it is made of.
    pub fn weights(&self) -> &[u32] {
        match self {
            Content::Joined(weights) | Content::Stacked { weights, .. } => weights,
            Content::Constant(_) => &[],
        }
    }

    /// Weights per element of the stack, or all of them.
    pub fn parts(&self) -> usize {
        match self {
            Content::Joined(weights) => weights.len(),
            Content::Stacked { parts, .. } => *parts as usize,
            Content::Constant(_) => 0,
        }
    }
}

fn fill(pattern: &Pattern, vars: &[(String, u64)]) -> String {
    pattern.fill(|v| vars.iter().find(|(n, _)| n == v).map(|(_, v)| *v)).unwrap_or_default()
}
