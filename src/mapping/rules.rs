//! The mapping language as it is written: TOML tables, checked when they are read.
//!
//! A mapping describes every weight of one model class by rules. Nothing here looks at a GGUF file; what a rule means
//! for a given file is `resolve`'s business. The language is documented for authors in `docs/add-a-model.md`.

use serde::Deserialize;
use std::collections::BTreeMap;

use super::config::ConfigRules;
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
    /// Other HF classes with weights of the same names and shapes, which a given config.json may name.
    #[serde(default)]
    pub class_alike: Vec<String>,
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
    pub config: ConfigRules,
    /// What a GGUF does not say about the config, in sentences for the user.
    #[serde(default)]
    pub config_unknown: Vec<Unknown>,
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

/// Something that a GGUF does not say about the config.
#[derive(Debug, Clone)]
pub struct Unknown {
    /// The sentence, which reads on after "config.json is derived from the GGUF;".
    pub say: String,
    /// For which files it is said. Default: for all.
    pub when: Option<ExprText>,
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
    /// `general.` or `tokenizer.`.
    Key {
        /// The keys in order of preference.
        key: OneOrMany<String>,
        /// The value may be an array of integers or truth values, one per block.
        per_block: bool,
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

impl CutKind {
    /// The cut's name in manifests and reports.
    pub fn name(self) -> &'static str {
        match self {
            CutKind::Column => "column",
            CutKind::Row => "row",
            CutKind::Vocab => "vocab",
            CutKind::Replicated => "replicated",
        }
    }
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
        let rules: Rules = toml::from_str(text).map_err(|e| {
            let (shown, at) = (e.to_string(), e.span().map_or(0, |s| s.start));
            // The usual form repeats the line; of a long one nothing else would be left of the message.
            match shown.len() {
                0..1000 => shown.trim_end().to_owned(),
                1000.. => {
                    format!("line {}: {}", text.get(..at).unwrap_or_default().lines().count().max(1), e.message())
                }
            }
        })?;
        rules.check_counts()?;
        Ok(rules)
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
        for (name, field) in parent.config.0 {
            self.config.0.entry(name).or_insert(field);
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
}
