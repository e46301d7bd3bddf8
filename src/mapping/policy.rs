//! Output policies: which weights are written in which form. TOML files under `mappings/policies/`; the language is
//! documented in `docs/low-bits.md`.
//!
//! Rules are tried in order and the first that fits a weight decides. A weight that none fits follows the float type that
//! was asked for.

use serde::Deserialize;

use super::library::{RulesId, Text, builtin, embedded, find, listing};
use super::recipe::Weight;
use super::rules::PatternText;
use crate::dequant::FloatType;
use crate::error::{Fault, Result};
use crate::gguf::GgmlType;

/// Most rules of a policy, and most names of all of them.
const MOST_RULES: usize = 256;
const MOST_NAMES: usize = 1 << 12;
/// Most ranges of layers that one rule lists.
const MOST_RANGES: usize = 256;

/// The form in which a weight is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// The upper halves of 32-bit floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// E4M3 in blocks of 128 × 128, with an f32 scale for each block.
    Fp8,
    /// E2M1 with an E4M3 scale for every 16 columns, and an f32 scale for the weight.
    Nvfp4,
    /// The source's own quantized blocks, moved without decoding.
    Keep,
}

impl Format {
    /// Its name in policies, profiles and messages.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::F16 => "f16",
            Format::Fp8 => "fp8",
            Format::Nvfp4 => "nvfp4",
            Format::Keep => "keep",
        }
    }

    /// Whether every stack takes it; the others must be declared by the profile.
    pub fn is_float(self) -> bool {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => true,
            Format::Fp8 | Format::Nvfp4 | Format::Keep => false,
        }
    }
}

impl From<FloatType> for Format {
    fn from(ty: FloatType) -> Self {
        match ty {
            FloatType::F32 => Format::F32,
            FloatType::BF16 => Format::Bf16,
            FloatType::F16 => Format::F16,
        }
    }
}

/// An output policy ready for use.
#[derive(Debug, Clone)]
pub struct OutputPolicy {
    /// What the file says.
    pub rules: PolicyRules,
    text: Text,
}

/// A policy file as parsed.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyRules {
    /// The policy's name; built-in ones are addressed by it.
    pub name: String,
    /// Raised whenever a change can change a byte of the output.
    #[serde(default)]
    pub version: u32,
    /// One sentence: what it is for.
    pub about: String,
    /// The rules in order.
    #[serde(default, rename = "rule")]
    pub rules: Vec<FormatRule>,
}

/// Which weights a rule is for, and their form. What is left out does not matter.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormatRule {
    /// The form.
    pub dtype: Format,
    /// Names of weights. Without them, weights of two axes of any name.
    #[serde(default)]
    pub weights: Vec<PatternText>,
    /// Classes of models. Without them, all.
    #[serde(default)]
    pub classes: Vec<String>,
    /// Blocks that the weight belongs to.
    #[serde(default)]
    pub layers: Option<Layers>,
    /// Whether the weight belongs to a block for multi-token prediction, or to none.
    #[serde(default)]
    pub mtp: Option<bool>,
    /// Types of which every source of the weight has one.
    #[serde(default)]
    pub types: Vec<TypeName>,
    /// The fewest elements of the whole weight.
    #[serde(default)]
    pub min_elements: u64,
}

/// Numbers of blocks, as in `0,3-60`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Layers(Vec<(u64, u64)>);

impl TryFrom<String> for Layers {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let number = |t: &str| t.trim().parse::<u64>().map_err(|_| format!("'{text}' are no layers; write 0,3-60"));
        let range = |item: &str| match item.split_once('-') {
            None => number(item).map(|n| (n, n)),
            Some((first, last)) => Ok((number(first)?, number(last)?)),
        };
        let ranges = text.split(',').take(MOST_RANGES + 1).map(range).collect::<Result<Vec<_>, _>>()?;
        match ranges.iter().find(|(first, last)| last < first) {
            _ if ranges.len() > MOST_RANGES => Err(format!("more than {MOST_RANGES} ranges of layers")),
            Some((first, last)) => Err(format!("layers {first}-{last} are none")),
            None => Ok(Layers(ranges)),
        }
    }
}

impl Layers {
    /// Whether a block is among them.
    pub fn contain(&self, block: u64) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&block))
    }
}

/// A ggml type by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct TypeName(pub GgmlType);

impl TryFrom<String> for TypeName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        GgmlType::from_name(&text).map(TypeName).ok_or_else(|| format!("'{text}' is no ggml type; write Q4_K"))
    }
}

impl FormatRule {
    /// Whether it decides about a weight of a model of this class, whose sources have these types.
    fn fits(&self, class: &str, weight: &Weight, mut types: impl Iterator<Item = GgmlType>) -> bool {
        let named = match self.weights.as_slice() {
            [] => weight.shape.len() == 2,
            names => names.iter().any(|name| name.0.capture(&weight.name).is_some()),
        };
        named
            && (self.classes.is_empty() || self.classes.iter().any(|named| named == class))
            && self.mtp.is_none_or(|mtp| mtp == weight.mtp)
            && self.layers.as_ref().is_none_or(|layers| weight.block.is_some_and(|block| layers.contain(block)))
            && weight.shape.iter().product::<u64>() >= self.min_elements
            && (self.types.is_empty() || types.all(|ty| self.types.contains(&TypeName(ty))))
    }
}

impl OutputPolicy {
    /// A built-in policy by name, or a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        OutputPolicy::parse(find(name_or_path, None, embedded::POLICIES, "policy")?)
    }

    /// A built-in policy by name, and nothing else.
    pub fn builtin(name: &str) -> Result<Self> {
        OutputPolicy::parse(builtin(name, embedded::POLICIES, "policy")?)
    }

    /// A policy from the text that a manifest holds.
    pub fn from_text(text: &str) -> Result<Self> {
        OutputPolicy::parse(Text { origin: "the manifest".into(), builtin: false, text: text.to_owned() })
    }

    /// All built-in policies, by name.
    pub fn all() -> Result<Vec<OutputPolicy>> {
        embedded::POLICIES.iter().map(|(name, _)| OutputPolicy::builtin(name)).collect()
    }

    fn parse(text: Text) -> Result<Self> {
        text.check_length(0)?;
        let fault = |what: String| Fault::new(what).file(&text.origin).rules();
        let rules: PolicyRules = toml::from_str(&text.text).map_err(|e| fault(e.to_string().trim_end().to_owned()))?;
        let names = rules.rules.iter().map(|rule| rule.weights.len()).sum::<usize>();
        if rules.rules.len() > MOST_RULES || names > MOST_NAMES {
            let found = format!("{} rules with {names} names", rules.rules.len());
            return Err(fault(format!("{found}; at most {MOST_RULES} with {MOST_NAMES} are read")));
        }
        Ok(OutputPolicy { rules, text })
    }

    /// The form of a weight of a model of this class, whose sources have these types; `None` where no rule fits.
    pub fn format(
        &self,
        class: &str,
        weight: &Weight,
        types: impl Iterator<Item = GgmlType> + Clone,
    ) -> Option<Format> {
        self.rules.rules.iter().find(|rule| rule.fits(class, weight, types.clone())).map(|rule| rule.dtype)
    }

    /// Its text, under its origin.
    pub fn source(&self) -> String {
        listing(std::slice::from_ref(&self.text))
    }

    /// Name, version and digest.
    pub fn id(&self) -> RulesId {
        RulesId::new(&self.rules.name, self.rules.version, std::slice::from_ref(&self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Cut, CutKind, Recipe};

    fn weight(name: &str, block: Option<u64>, shape: &[u64]) -> Weight {
        Weight {
            name: name.into(),
            shape: shape.to_vec(),
            cut: Cut { kind: CutKind::Replicated, units: None, repeat: false },
            pinned: None,
            recipe: Recipe { units: 1, parts: Vec::new() },
            block,
            mtp: false,
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let policy = OutputPolicy::from_text(
            r#"
            name = "mine"
            about = "x"
            [[rule]]
            dtype = "f32"
            weights = ["model.layers.{layer}.a.weight"]
            layers = "0,3-4"
            [[rule]]
            dtype = "f16"
            types = ["Q4_K", "Q6_K"]
            [[rule]]
            dtype = "fp8"
            min_elements = 64
            "#,
        )
        .unwrap();
        let format = |name: &str, block, shape: &[u64], types: &[GgmlType]| {
            policy.format("LlamaForCausalLM", &weight(name, block, shape), types.iter().copied()).map(Format::name)
        };
        let (q4, q8) = (GgmlType::Q4_K, GgmlType::Q8_0);
        assert_eq!(format("model.layers.3.a.weight", Some(3), &[8, 8], &[q8]), Some("f32"));
        assert_eq!(format("model.layers.2.a.weight", Some(2), &[8, 8], &[q8]), Some("fp8"));
        assert_eq!(format("b", None, &[8, 8], &[q4, q4]), Some("f16"));
        assert_eq!(format("b", None, &[8, 8], &[q4, q8]), Some("fp8"));
        assert_eq!(format("b", None, &[8, 7], &[q8]), None);
        // Without names a rule is for matrices only.
        assert_eq!(format("b", None, &[640], &[q4]), None);
    }

    #[test]
    fn what_no_policy_can_mean_is_refused() {
        for rule in [
            "dtype = \"fp9\"",
            "dtype = \"fp8\"\nlayers = \"4-3\"",
            "dtype = \"fp8\"\ntypes = [\"Q9\"]",
            "layers = \"1\"",
        ] {
            let text = format!("name = \"x\"\nabout = \"x\"\n[[rule]]\n{rule}\n");
            assert!(OutputPolicy::from_text(&text).is_err(), "{rule}");
        }
        assert!(OutputPolicy::builtin("no-such").is_err());
        assert!(!OutputPolicy::all().unwrap().is_empty());
    }
}
