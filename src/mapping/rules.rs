//! The mapping language as it is written: TOML tables, checked when they are read.
//!
//! A mapping describes every weight of one model class by rules. Nothing here looks at a GGUF file; what a rule means
//! for a given file is `resolve`'s business. The language is documented for authors in `docs/add-a-model.md`.

use serde::Deserialize;
use std::collections::BTreeMap;

use super::expr::Expr;
use super::pattern::Pattern;

/// A mapping file as parsed, after `extends` has been followed.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// The mapping's name; built-in ones are addressed by it.
    pub name: String,
    /// Raised whenever a change of the rules can change a byte of the output.
    #[serde(default)]
    pub version: u32,
    /// The HF class (`architectures[0]` of the original config.json) whose checkpoint the weights make up.
    #[serde(default)]
    pub class: String,
    /// One sentence: which models this is for.
    #[serde(default)]
    pub about: String,
    /// The mapping this one starts from.
    #[serde(default)]
    pub extends: Option<String>,
    /// Weights and ignore rules of the parent that this mapping does without, by their pattern.
    #[serde(default)]
    pub remove: Vec<String>,
    /// Which files the mapping is for; a mapping without it is only used when named.
    #[serde(default, rename = "match")]
    pub matching: Option<Match>,
    /// Dimensions by name.
    #[serde(default)]
    pub dims: BTreeMap<String, OneOrMany<DimSource>>,
    /// Number of rounds of each loop variable, as expressions over the dimensions.
    #[serde(default)]
    pub loops: BTreeMap<String, ExprText>,
    /// Which blocks there are.
    #[serde(default)]
    pub blocks: Option<Blocks>,
    /// Groups of weights that a block has whole or not at all.
    #[serde(default)]
    pub groups: BTreeMap<String, Group>,
    /// Tensors that belong to another tensor.
    #[serde(default, rename = "sidecar")]
    pub sidecars: Vec<Sidecar>,
    /// The weights, in the order of the output.
    #[serde(default, rename = "weight")]
    pub weights: Vec<WeightRule>,
    /// Source tensors that are no weights.
    #[serde(default, rename = "ignore")]
    pub ignores: Vec<IgnoreRule>,
    /// Conditions that a file must meet.
    #[serde(default, rename = "check")]
    pub checks: Vec<CheckRule>,
    /// Fields of the model's config.json and where their values come from; see `config`.
    #[serde(default)]
    pub config: toml::Table,
    /// What a GGUF does not say about the config, in sentences for the user.
    #[serde(default)]
    pub config_unknown: Vec<String>,
    /// Takes every source tensor as a weight of the same name and shape (the `raw` mapping).
    #[serde(default)]
    pub every_tensor: bool,
}

/// Which files a mapping is for.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// Values of `general.architecture`.
    pub architecture: OneOrMany<String>,
    /// Further evidence, asked of metadata and tensors; dimensions of this mapping may be used.
    #[serde(default)]
    pub when: Option<ExprText>,
    /// Of several mappings that fit, the one with the highest priority is taken.
    #[serde(default)]
    pub priority: i32,
    /// The evidence in words, printed when the mapping is chosen.
    #[serde(default)]
    pub because: String,
}

/// One value or a list of them.
#[derive(Debug, Clone)]
pub enum OneOrMany<T> {
    /// A list.
    Many(Vec<T>),
    /// A single value.
    One(T),
}

impl<T> OneOrMany<T> {
    /// The values in order.
    pub fn as_slice(&self) -> &[T] {
        match self {
            OneOrMany::Many(list) => list,
            OneOrMany::One(one) => std::slice::from_ref(one),
        }
    }
}

/// Where a dimension comes from; of several, the first that the file can answer.
#[derive(Debug, Clone)]
pub enum DimSource {
    /// A number.
    Constant(i64),
    /// An expression over other dimensions and the file.
    Expr(ExprText),
    /// A metadata key, or the first present of several. `{architecture}.` is implied unless the key begins with
    /// `general.` or `tokenizer.`. An array of integers or truth values gives one value per block.
    Key {
        /// The keys in order of preference.
        key: OneOrMany<String>,
    },
    /// An axis of a tensor (row-major, 0 is the slowest), the first tensor that fits `of`.
    Axis {
        /// Which axis; negative counts from the fastest.
        axis: i32,
        /// The tensor; `*` stands for digits.
        of: String,
    },
}

/// An expression in a TOML string.
#[derive(Debug, Clone, PartialEq)]
pub struct ExprText(pub Expr);

/// A name pattern in a TOML string.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct PatternText(pub Pattern);

impl TryFrom<String> for PatternText {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Pattern::parse(&text).map(PatternText)
    }
}

/// A condition that a file must meet.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRule {
    /// The condition. If it uses `layer`, it is asked for every block that the file holds.
    pub that: ExprText,
    /// What is wrong when it does not hold; the dimensions it uses are added with their values.
    pub otherwise: String,
}

/// Blocks `0..count` of a GGUF: `blk.0.` to `blk.{count-1}.`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blocks {
    /// Number of blocks that the metadata counts.
    pub count: ExprText,
    /// Number of trunk blocks, which come first. The trunk is whole, or wholly absent in a file that holds the MTP
    /// blocks alone; each later block (multi-token prediction) is whole or absent.
    pub trunk: ExprText,
}

/// Weights that a block has whole or not at all.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// A per-block dimension that says which trunk blocks have the group; where the file has it, tensors must agree.
    #[serde(default)]
    pub declared: Option<String>,
    /// A warning when no block at all has the group.
    #[serde(default)]
    pub expected: bool,
}

/// A tensor that belongs to the source tensor whose name it shares: `X.scale` to `X.weight`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sidecar {
    /// What replaces `.weight` in the owner's name.
    pub suffix: String,
    /// What is done with it.
    pub role: SidecarRole,
    /// Why, for the manifest.
    pub reason: String,
}

/// What a sidecar tensor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SidecarRole {
    /// Multiplies the decoded owner: one value for the tensor, or one per unstacked slice.
    Scale,
    /// Is no part of the weight.
    Ignore,
}

/// One weight, or one per round of its loops.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightRule {
    /// The weight's name in the HF checkpoint.
    pub name: PatternText,
    /// Its shape, row-major.
    pub shape: Vec<ExprText>,
    /// How ranks share it.
    pub cut: CutRule,
    /// Whether the model has the weight at all, for this round of the loops. Default: it has.
    #[serde(default)]
    pub when: Option<ExprText>,
    /// Present with its group or not at all, per block.
    #[serde(default)]
    pub group: Option<String>,
    /// May be absent on its own.
    #[serde(default)]
    pub optional: bool,
    /// What to tell the user when an optional weight is absent.
    #[serde(default)]
    pub if_absent: Option<String>,
    /// A dtype that the checkpoint always stores this weight in.
    #[serde(default)]
    pub dtype: Option<PinnedDtype>,
    /// Where it comes from; of several, the first whose tensors are all there.
    pub from: OneOrMany<From>,
}

/// A dtype that does not follow the output policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PinnedDtype {
    /// 32-bit floats.
    F32,
}

/// How ranks share a weight.
#[derive(Debug, Clone)]
pub enum CutRule {
    /// A cut anywhere that divides evenly.
    Plain(CutKind),
    /// A cut between units.
    Units(CutUnits),
}

/// The kinds of cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutKind {
    /// Column-parallel: output features, axis 0.
    Column,
    /// Row-parallel: input features, the last axis.
    Row,
    /// Vocab-parallel: axis 0, padded as the profile says.
    Vocab,
    /// Every rank holds the whole.
    Replicated,
}

/// A cut that may not pass through a unit.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutUnits {
    /// Column-parallel between this many units (heads).
    #[serde(default)]
    pub column: Option<ExprText>,
    /// Row-parallel between this many units.
    #[serde(default)]
    pub row: Option<ExprText>,
    /// With fewer units than ranks, a unit is repeated on neighbouring ranks (key and value heads).
    #[serde(default)]
    pub repeat: bool,
}

/// Where a weight comes from.
#[derive(Debug, Clone)]
pub enum From {
    /// Several sources interleaved: for each of `per` units the rows of the first, then of the second, ….
    Interleaved(Interleaved),
    /// One source.
    One(Source),
}

/// Sources interleaved by unit.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interleaved {
    /// Number of units (heads).
    pub per: ExprText,
    /// The sources; each gives the same number of rows to every unit.
    pub parts: Vec<Source>,
}

/// One source tensor and what is done with it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The GGUF tensor.
    pub gguf: PatternText,
    /// The tensor's whole shape, row-major; default: the weight's (with the unstacked axis in front). Axes of 1 in
    /// front do not count.
    #[serde(default)]
    pub shape: Option<Vec<ExprText>>,
    /// The tensor may also be stored with all axes but the last merged into one.
    #[serde(default)]
    pub reshape: bool,
    /// The loop variable that indexes the slowest axis.
    #[serde(default)]
    pub unstack: Option<String>,
    /// First row and number of rows that are taken, of the tensor or of the unstacked slice.
    #[serde(default)]
    pub rows: Option<[ExprText; 2]>,
    /// Each unit's matrix is stored transposed.
    #[serde(default)]
    pub transpose: bool,
    /// Undoes llama.cpp's q/k permutation (rotate-half RoPE stored pairwise) in each of this many heads.
    #[serde(default)]
    pub unpermute: Option<ExprText>,
    /// A constant added to every element.
    #[serde(default)]
    pub add: Option<f32>,
}

/// A source tensor that is no weight.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IgnoreRule {
    /// The GGUF tensor; `{layer}` or `*` stand for digits.
    pub gguf: PatternText,
    /// Under which condition, asked with the variables that the name gives.
    #[serde(default)]
    pub when: Option<ExprText>,
    /// Why it is no weight.
    pub reason: String,
}

impl Rules {
    /// Parses one file's text; `extends` is not followed here.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())
    }

    /// Lays these rules over `parent`: dimensions, loops, groups and rules of the same name replace the parent's in
    /// place, others are added.
    pub fn over(mut self, parent: Rules) -> Result<Self, String> {
        let mut weights: Vec<WeightRule> = parent.weights;
        let mut ignores = parent.ignores;
        for gone in &self.remove {
            let before = weights.len() + ignores.len();
            weights.retain(|w| w.name.0.text() != gone);
            ignores.retain(|i| i.gguf.0.text() != gone);
            if weights.len() + ignores.len() == before {
                return Err(format!("`remove` names '{gone}', which '{}' does not have", parent.name));
            }
        }
        for rule in self.weights.drain(..) {
            match weights.iter_mut().find(|w| w.name == rule.name) {
                Some(old) => *old = rule,
                None => weights.push(rule),
            }
        }
        for rule in self.ignores.drain(..) {
            match ignores.iter_mut().find(|i| i.gguf == rule.gguf) {
                Some(old) => *old = rule,
                None => ignores.push(rule),
            }
        }
        let mut sidecars = parent.sidecars;
        sidecars.retain(|old| self.sidecars.iter().all(|new| new.suffix != old.suffix));
        sidecars.append(&mut self.sidecars);
        let mut checks = parent.checks;
        checks.append(&mut self.checks);
        for (name, dim) in parent.dims {
            self.dims.entry(name).or_insert(dim);
        }
        for (name, count) in parent.loops {
            self.loops.entry(name).or_insert(count);
        }
        for (name, field) in parent.config {
            self.config.entry(name).or_insert(field);
        }
        let mut config_unknown = parent.config_unknown;
        config_unknown.append(&mut self.config_unknown);
        for (name, group) in parent.groups {
            self.groups.entry(name).or_insert(group);
        }
        Ok(Rules {
            weights,
            ignores,
            sidecars,
            checks,
            config_unknown,
            blocks: self.blocks.or(parent.blocks),
            every_tensor: self.every_tensor || parent.every_tensor,
            ..self
        })
    }

    /// What can be wrong with rules before any file is seen: two rules for one name, unknown loops and groups,
    /// shapes and cuts that do not go together.
    pub fn check(&self) -> Result<(), String> {
        for rule in &self.weights {
            self.check_weight(rule).map_err(|e| format!("weight '{}': {e}", rule.name.0.text()))?;
        }
        for (i, a) in self.weights.iter().enumerate() {
            if let Some(b) = self.weights[..i].iter().find(|b| a.name.0.overlaps(&b.name.0)) {
                return Err(format!("two rules for one weight: '{}' and '{}'", b.name.0.text(), a.name.0.text()));
            }
        }
        self.check_sources()?;
        if let Some(name) = self.dims.keys().find(|n| self.loops.contains_key(*n)) {
            return Err(format!("'{name}' is both a dimension and a loop variable"));
        }
        for (name, group) in &self.groups {
            if let Some(dim) = group.declared.as_ref().filter(|d| !self.dims.contains_key(*d)) {
                return Err(format!("group '{name}' is declared by '{dim}', which is no dimension"));
            }
        }
        if self.every_tensor && !self.weights.is_empty() {
            return Err("`every_tensor` leaves no room for weight rules".into());
        }
        Ok(())
    }

    fn check_weight(&self, rule: &WeightRule) -> Result<(), String> {
        let bound = rule.name.0.variables();
        if rule.name.0.is_open() {
            return Err("a weight's name cannot hold `*`".into());
        }
        if let Some(unknown) = bound.iter().find(|v| !self.loops.contains_key(**v)) {
            return Err(format!("'{{{unknown}}}' is no loop; [loops] has {}", list(self.loops.keys())));
        }
        if let Some(group) = rule.group.as_ref().filter(|g| !self.groups.contains_key(*g)) {
            return Err(format!("group '{group}' is not in [groups]"));
        }
        if rule.group.is_some() && !bound.contains(&"layer") {
            return Err("a group counts per block: the name needs `{layer}`".into());
        }
        if rule.shape.is_empty() {
            return Err("a weight has at least one axis".into());
        }
        if let CutRule::Units(units) = &rule.cut {
            if units.column.is_some() == units.row.is_some() {
                return Err("a cut between units names `column` or `row`, one of them".into());
            }
            if units.repeat && units.row.is_some() {
                return Err("only column cuts repeat units".into());
            }
        }
        if rule.from.as_slice().is_empty() {
            return Err("`from` is empty".into());
        }
        for from in rule.from.as_slice() {
            let parts = match from {
                From::One(source) => std::slice::from_ref(source),
                From::Interleaved(interleaved) => &interleaved.parts,
            };
            if parts.is_empty() {
                return Err("`parts` is empty".into());
            }
            for source in parts {
                check_source(source, &bound, matches!(from, From::Interleaved(_)))?;
            }
        }
        Ok(())
    }

    /// No source tensor may be claimed twice, except by rules that each take a row range of it, and none may be both
    /// used and ignored unless the ignore rule has a condition.
    fn check_sources(&self) -> Result<(), String> {
        let used: Vec<(usize, &Source)> = self
            .weights
            .iter()
            .enumerate()
            .flat_map(|(i, w)| w.from.as_slice().iter().map(move |f| (i, f)))
            .flat_map(|(i, f)| match f {
                From::One(source) => vec![(i, source)],
                From::Interleaved(interleaved) => interleaved.parts.iter().map(|p| (i, p)).collect(),
            })
            .collect();
        for (n, (i, a)) in used.iter().enumerate() {
            for (j, b) in &used[..n] {
                let ranges = a.rows.is_some() && b.rows.is_some();
                if i != j && !ranges && a.gguf.0.overlaps(&b.gguf.0) {
                    return Err(format!(
                        "two rules for one tensor: '{}' is taken by weight '{}' and by weight '{}'",
                        a.gguf.0.text(),
                        self.weights[*j].name.0.text(),
                        self.weights[*i].name.0.text()
                    ));
                }
            }
        }
        for (n, ignore) in self.ignores.iter().enumerate() {
            if let Some(other) = self.ignores[..n]
                .iter()
                .find(|o| o.gguf.0.overlaps(&ignore.gguf.0) && (o.when.is_none() || ignore.when.is_none()))
            {
                return Err(format!(
                    "two ignore rules for one tensor: '{}' and '{}'",
                    other.gguf.0.text(),
                    ignore.gguf.0.text()
                ));
            }
            if ignore.when.is_none()
                && let Some((i, _)) = used.iter().find(|(_, s)| s.gguf.0.overlaps(&ignore.gguf.0))
            {
                return Err(format!(
                    "two rules for one tensor: '{}' is ignored without a condition and taken by weight '{}'",
                    ignore.gguf.0.text(),
                    self.weights[*i].name.0.text()
                ));
            }
        }
        Ok(())
    }
}

fn check_source(source: &Source, bound: &[&str], interleaved: bool) -> Result<(), String> {
    let text = source.gguf.0.text();
    if source.gguf.0.is_open() {
        return Err(format!("source '{text}' cannot hold `*`"));
    }
    if let Some(unknown) = source.gguf.0.variables().iter().find(|v| !bound.contains(*v)) {
        return Err(format!("source '{text}' uses '{{{unknown}}}', which the weight's name does not"));
    }
    if let Some(unknown) = source.unstack.as_ref().filter(|v| !bound.contains(&v.as_str())) {
        return Err(format!("source '{text}' is unstacked by '{unknown}', which the weight's name does not use"));
    }
    if interleaved && source.shape.is_none() {
        return Err(format!("source '{text}' is one of several parts and must state its shape"));
    }
    if source.rows.is_some() && source.shape.is_none() {
        return Err(format!("source '{text}' is taken by a row range and must state its shape"));
    }
    if source.transpose && source.unpermute.is_some() {
        return Err(format!("source '{text}': `transpose` and `unpermute` do not go together"));
    }
    if source.unpermute.is_some() && interleaved {
        return Err(format!("source '{text}': `unpermute` applies to a source of its own"));
    }
    if source.add.is_some_and(|x| !x.is_finite()) {
        return Err(format!("source '{text}': `add` must be finite"));
    }
    Ok(())
}

fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
