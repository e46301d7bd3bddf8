//! Layouts as they are written: TOML tables of a profile, checked when they are read. The language is documented for authors
//! in `docs/serving.md`.

use serde::Deserialize;

use super::pattern::Pattern;
use super::rules::{ExprText, PinnedDtype};

/// The prefix of a block in the HF checkpoint, and so of `{block}` in a weight's name.
pub(crate) const WEIGHT_BLOCK: &str = "model.layers.{layer}.";
/// Names that conditions may ask for.
pub(super) const NAMES: [&str; 4] = ["tp", "pp", "fp8", "nvfp4"];
/// Longest chain of `extends` among the layouts of a profile.
const DEEPEST: usize = 8;

/// A layout as it is written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutRules {
    /// Its name, for `extends`.
    pub name: String,
    /// The model classes that it is for; `*` for all.
    #[serde(default)]
    pub classes: Vec<String>,
    /// The layout of this profile that it starts from.
    #[serde(default)]
    pub extends: Option<String>,
    /// Every weight is a parameter of its own name (the `hf` profile); there are no other rules.
    #[serde(default)]
    pub verbatim: bool,
    /// Weights that are parameters of their own name.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Parameters made of weights.
    #[serde(default, rename = "param")]
    pub params: Vec<ParamRule>,
    /// Parameters of constant values.
    #[serde(default, rename = "constant")]
    pub constants: Vec<ConstantRule>,
    /// The constants of the layout it starts from do not apply.
    #[serde(default)]
    pub without_constants: bool,
    /// Parameters that stand in for an absent weight.
    #[serde(default)]
    pub tied: Vec<TiedRule>,
    /// The draft model's own set of files.
    #[serde(default)]
    pub draft: Option<DraftRules>,
    /// Why MTP blocks are left out, for stacks without a draft layout.
    #[serde(default)]
    pub no_draft: Option<String>,
}

/// A parameter made of one or more weights, joined along their rows in the order of `parts`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamRule {
    /// Its name.
    pub name: String,
    /// Condition; `has('weight')`, `tp`, `pp`, `fp8` and `nvfp4` may be asked.
    #[serde(default)]
    pub when: Option<ExprText>,
    /// The loop variable whose rounds are stacked along a new axis in front.
    #[serde(default)]
    pub stack: Option<String>,
    /// The weights, all of which must be there.
    pub parts: Vec<String>,
    /// A dtype that does not follow the output policy.
    #[serde(default)]
    pub dtype: Option<PinnedDtype>,
}

/// Scalars that the stack wants in the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantRule {
    /// Their names.
    pub names: Vec<String>,
    /// The weight that they follow; there are as many.
    pub after: String,
    /// The value.
    pub value: f32,
    /// Condition, as of a parameter.
    #[serde(default)]
    pub when: Option<ExprText>,
    /// Its dtype is that of weights which no policy gives a form of their own, instead of F32.
    #[serde(default)]
    pub follows: bool,
}

impl ConstantRule {
    /// The dtype that does not follow the output policy, if there is one.
    pub fn pinned(&self) -> Option<PinnedDtype> {
        (!self.follows).then_some(PinnedDtype::F32)
    }
}

/// A parameter that is a further copy of a weight where another weight is absent.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TiedRule {
    /// Its name.
    pub name: String,
    /// The weight that it is.
    pub of: String,
    /// The weight whose presence makes it unnecessary.
    pub unless: String,
    /// The pipeline stage that holds it.
    pub stage: EndStage,
}

/// The first or the last pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndStage {
    /// Before the first block.
    First,
    /// After the last block.
    Last,
}

/// The draft model: a set of files of its own.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRules {
    /// What `{block}` stands for in the names of its parameters.
    pub block: String,
    /// Its parameters outside the block.
    #[serde(rename = "param")]
    pub params: Vec<DraftRule>,
}

/// A parameter of the draft model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRule {
    /// Its name.
    pub name: String,
    /// The weight that it is: the first that the model has.
    pub from: Vec<String>,
}

impl LayoutRules {
    /// How many names its rules list, which is what reading and applying them takes.
    pub(super) fn names(&self) -> usize {
        let params = self.params.iter().map(|p| 1 + p.parts.len()).sum::<usize>();
        let constants = self.constants.iter().map(|c| 1 + c.names.len()).sum::<usize>();
        let drafted = self.draft.iter().flat_map(|d| &d.params).map(|p| 1 + p.from.len()).sum::<usize>();
        params + constants + drafted + self.keep.len() + self.classes.len() + 3 * self.tied.len()
    }

    /// Names and conditions that no model could ever make sense of.
    pub(super) fn check_names(&self) -> Result<(), String> {
        let of_constants = self.constants.iter().filter_map(|c| c.when.as_ref());
        for when in self.params.iter().filter_map(|p| p.when.as_ref()).chain(of_constants) {
            if let Some(unknown) = when.0.names().iter().find(|n| !NAMES.contains(&n.as_str())) {
                let known = NAMES.join(", ");
                return Err(format!("'{unknown}' in `{}` is not known in a layout; {known} are", when.0.text()));
            }
        }
        let drafted = self.draft.iter().flat_map(|d| &d.params).flat_map(|p| p.from.iter().chain([&p.name]));
        let tied = self.tied.iter().flat_map(|t| [&t.name, &t.of, &t.unless]);
        for (text, allowed) in drafted.map(|t| (t, &["layer"][..])).chain(tied.map(|t| (t, &[][..]))) {
            let pattern = Pattern::parse(text)?;
            if let Some(unknown) = pattern.variables().iter().find(|v| !allowed.contains(v)) {
                return Err(format!("'{text}' uses '{{{unknown}}}', which has no value there"));
            }
        }
        Ok(())
    }
}

/// A layout and those it extends, itself first.
pub(super) fn chain<'a>(layouts: &'a [LayoutRules], layout: &'a LayoutRules) -> Result<Vec<&'a LayoutRules>, String> {
    let mut chain = vec![layout];
    while let Some(parent) = &chain[chain.len() - 1].extends {
        if chain.len() == DEEPEST {
            return Err(format!("more than {DEEPEST} layouts extend each other, at '{parent}'"));
        }
        let found = layouts.iter().find(|l| l.name == *parent);
        chain.push(found.ok_or_else(|| format!("layout '{parent}', which '{}' extends, does not exist", layout.name))?);
    }
    Ok(chain)
}

/// The layout for a class.
pub fn for_class<'a>(layouts: &'a [LayoutRules], class: &str) -> Option<&'a LayoutRules> {
    layouts.iter().find(|l| l.classes.iter().any(|c| c == class || c == "*"))
}
