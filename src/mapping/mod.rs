//! Mapping: from GGUF tensors to the weights of the original (HF) checkpoint, by rules in TOML.

mod blocks;
pub mod config;
pub mod expr;
mod facts;
pub mod layout;
mod layout_rules;
mod leftovers;
mod library;
mod lint;
mod pattern;
mod policy;
mod profile;
pub mod recipe;
mod resolve;
pub mod rules;
mod sources;
mod toml_forms;

pub use blocks::MtpPolicy;
pub use layout::{Content, LaidOut, ParamSpec, Place, Set};
pub use library::{Mapping, RulesId, builtin_mappings, choose};
pub(crate) use pattern::Pattern;
pub use policy::{Format, FormatRule, OutputPolicy, PolicyRules};
pub use profile::{FileNames, FileSlot, Nvfp4Rules, Profile, ProfileRules, TensorScales, Together, Vocab};
pub use recipe::{Cut, Matrix, Part, Recipe, ValueOp, Weight};
pub use resolve::resolve;
pub use rules::{CutKind, PinnedDtype};

/// A file understood through a mapping: the weights it holds, and what of it is no weight.
#[derive(Debug, Clone)]
pub struct Model {
    /// The mapping that was used.
    pub mapping: RulesId,
    /// The HF class of the checkpoint; empty for `raw`.
    pub class: String,
    /// `general.architecture` of the file.
    pub architecture: String,
    /// Tensors are taken as they are (the `raw` mapping): integers and F64 pass unchanged.
    pub verbatim: bool,
    /// The weights in the order of the output.
    pub weights: Vec<Weight>,
    /// Source tensors that are no weights, in file order.
    pub ignored: Vec<Ignored>,
    /// What the user should know before relying on the result.
    pub warnings: Vec<String>,
}

/// A source tensor that no weight uses, and the rule's reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// Index of the tensor in the set.
    pub source: u32,
    /// Why it is no weight.
    pub reason: String,
}
