//! Profiles: how one serving stack lays a model out on a rank. TOML files under `mappings/profiles/`.

use serde::Deserialize;

use super::layout::LayoutRules;
use super::library::{RulesId, Text, builtin, embedded, find, listing};
use super::policy::Format;
use super::rules::PatternText;
use crate::error::{Error, Fault, Result};

/// Longest chain of `extends`.
const DEEPEST: usize = 8;
/// Most names of weights that belong together.
const MOST_TOGETHER: usize = 1 << 10;

/// A profile ready for use.
#[derive(Debug, Clone)]
pub struct Profile {
    /// What the file says, with what it takes from the profiles that it extends.
    pub rules: ProfileRules,
    texts: Vec<Text>,
}

/// A profile file as parsed.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileRules {
    /// The profile's name; built-in ones are addressed by it.
    pub name: String,
    /// Raised whenever a change can change a byte of the output.
    #[serde(default)]
    pub version: u32,
    /// The profile this one starts from.
    #[serde(default)]
    pub extends: Option<String>,
    /// One sentence: what the files are for.
    pub about: String,
    /// What the layout was checked against.
    pub checked: String,
    /// The launch that the layout assumes: load format, flags, kernels.
    #[serde(default)]
    pub launch: Vec<String>,
    /// How the vocabulary is padded.
    #[serde(default)]
    pub vocab: Vocab,
    /// File names.
    #[serde(default)]
    pub files: FileNames,
    /// Forms of weights that the stack loads beside plain floats; by default those of the profile that it extends.
    #[serde(default)]
    pub formats: Option<Vec<Format>>,
    /// What the stack expects of nvfp4; by default what the profile that it extends has.
    #[serde(default)]
    pub nvfp4: Option<Nvfp4Rules>,
    /// Weights that the stack makes one parameter of when it loads them, so that in nvfp4 they must share a scale.
    #[serde(default)]
    pub together: Vec<Together>,
    /// Layouts; the first that names a model's class is taken.
    #[serde(default, rename = "layout")]
    pub layouts: Vec<LayoutRules>,
}

/// What a stack expects of nvfp4.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nvfp4Rules {
    /// The axes of scales of which a weight has one.
    #[serde(default)]
    pub tensor_scales: TensorScales,
    /// There are input scales even where activations are not quantized.
    #[serde(default)]
    pub input_scales: bool,
}

/// The axes of scales of which each weight of a parameter has one. Those of stacks have axes in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorScales {
    /// None, unless the parameter has several parts.
    #[default]
    Scalar,
    /// One that counts the parts, of a single part as well.
    Parts,
}

/// Names of weights; those that are equal in all variables belong together.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Together {
    /// The names.
    pub weights: Vec<PatternText>,
}

/// How the vocabulary is padded with rows of zeros before it is cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocab {
    /// To a multiple of this.
    pub multiple: u64,
    /// On a single rank as well.
    #[serde(default)]
    pub always: bool,
}

/// File name templates. `{part}`, `{parts}`, `{rank}` and `{stage}` are replaced; `{part:05}` is padded with zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileNames {
    /// Names on a single rank, parts counted from 1; by default those of `ranked`.
    #[serde(default)]
    pub whole: Option<String>,
    /// The index file that goes with `whole`.
    #[serde(default)]
    pub index: Option<String>,
    /// Names per tensor-parallel rank, ranks and parts counted from 0.
    #[serde(default)]
    pub ranked: String,
    /// Names with several pipeline stages; none if the stack has no such files.
    #[serde(default)]
    pub pipelined: Option<String>,
}

/// Which file of a set a name is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSlot {
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// The tensor-parallel rank.
    pub rank: u32,
    /// The pipeline stage.
    pub stage: u32,
    /// The part, from 0.
    pub part: usize,
    /// Number of parts.
    pub parts: usize,
}

impl Profile {
    /// A built-in profile by name, or a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        let first = find(name_or_path, None, embedded::PROFILES, "profile")?;
        Profile::assemble(first, |parent, child| find(parent, Some(child), embedded::PROFILES, "profile"))
    }

    /// A built-in profile by name, and nothing else: for names that come from a file, which must not choose what is read.
    pub fn builtin(name: &str) -> Result<Self> {
        let text = |name: &str, _: &Text| builtin(name, embedded::PROFILES, "profile");
        Profile::assemble(builtin(name, embedded::PROFILES, "profile")?, text)
    }

    /// A profile from texts kept elsewhere (a manifest): the profile itself, then what it extends, one after the other. What
    /// the last of them extends is built in; no file is read.
    pub fn from_texts(texts: &[String]) -> Result<Self> {
        let mut recorded =
            texts.iter().map(|text| Text { origin: "the manifest".into(), builtin: false, text: text.clone() });
        let first = recorded.next().ok_or_else(|| Fault::new("no profile text").rules())?;
        let profile = Profile::assemble(first, |parent, _| match recorded.next() {
            Some(text) => Ok(text),
            None => builtin(parent, embedded::PROFILES, "profile"),
        })?;
        match recorded.next() {
            None => Ok(profile),
            Some(text) => Err(Fault::new("a text that no other extends").file(text.origin).key("extends").rules()),
        }
    }

    /// All built-in profiles, by name.
    pub fn all() -> Result<Vec<Profile>> {
        embedded::PROFILES.iter().map(|(name, _)| Profile::load(name)).collect()
    }

    fn assemble(first: Text, mut parent: impl FnMut(&str, &Text) -> Result<Text>) -> Result<Self> {
        let mut rules = parse(&first)?;
        let mut texts = vec![first];
        let mut next = rules.extends.clone();
        while let Some(name) = next {
            let child = &texts[texts.len() - 1];
            if texts.len() == DEEPEST {
                let fault = Fault::new(format!("more than {DEEPEST} profiles extend each other")).file(&child.origin);
                return Err(fault.key("extends").rules());
            }
            let text = parent(&name, child)?;
            let base = parse(&text)?;
            texts.push(text);
            if rules.vocab.multiple == 0 {
                rules.vocab = base.vocab;
            }
            if rules.files == FileNames::default() {
                rules.files = base.files;
            }
            rules.formats = rules.formats.or(base.formats);
            rules.nvfp4 = rules.nvfp4.or(base.nvfp4);
            rules.together.extend(base.together);
            if rules.launch.is_empty() {
                rules.launch = base.launch;
            }
            rules.layouts.extend(base.layouts);
            next = base.extends;
        }
        check(&rules).map_err(|e| Fault::new(e).file(&texts[0].origin).rules())?;
        Ok(Profile { rules, texts })
    }

    /// The texts it is made of, its own first.
    pub fn source(&self) -> String {
        listing(&self.texts)
    }

    /// Name, version and digest.
    pub fn id(&self) -> RulesId {
        RulesId::new(&self.rules.name, self.rules.version, &self.texts)
    }

    /// Whether the stack loads weights of this form.
    pub fn loads(&self, format: Format) -> bool {
        format.is_float() || self.rules.formats.iter().flatten().any(|f| *f == format)
    }

    /// The name of a file.
    pub fn file_name(&self, slot: FileSlot) -> Result<String> {
        let FileSlot { tp, pp, rank, stage, part, parts } = slot;
        let (rank, stage, part, parts) = (u64::from(rank), u64::from(stage), part as u64, parts as u64);
        let files = &self.rules.files;
        let broken = |e: String| Fault::new(e).file(&self.texts[0].origin).rules();
        if pp > 1 {
            let template = files.pipelined.as_ref().ok_or_else(|| {
                Fault::new(format!("profile '{}' has no files for pipeline stages", self.rules.name))
                    .remedy("Convert with --pp 1, or with a profile whose stack reads such files (vllm-0.32)")
                    .layout()
            })?;
            return fill(template, &[("stage", stage), ("rank", rank), ("part", part)]).map_err(broken);
        }
        match &files.whole {
            Some(template) if tp == 1 => fill(template, &[("part", part + 1), ("parts", parts)]),
            Some(_) | None => fill(&files.ranked, &[("rank", rank), ("part", part)]),
        }
        .map_err(broken)
    }

    /// Whether a single rank's files are those of an ordinary checkpoint, which belong to no rank.
    pub fn whole_at(&self, tp: u32, pp: u32) -> bool {
        tp == 1 && pp == 1 && self.rules.files.whole.is_some()
    }
}

fn parse(text: &Text) -> Result<ProfileRules, Error> {
    text.check_length(0)?;
    toml::from_str(&text.text).map_err(|e| Fault::new(e.to_string().trim_end().to_owned()).file(&text.origin).rules())
}

fn check(rules: &ProfileRules) -> Result<(), String> {
    let vocab = rules.vocab.multiple;
    if vocab == 0 || vocab > 1 << 16 {
        return Err(format!("vocab.multiple = {vocab}; it is between 1 and 65536"));
    }
    let files = &rules.files;
    let templates = [
        (files.whole.as_deref(), &["part", "parts"][..]),
        (Some(files.ranked.as_str()), &["rank", "part"][..]),
        (files.pipelined.as_deref(), &["stage", "rank", "part"][..]),
    ];
    for (template, needed) in templates {
        let Some(template) = template else { continue };
        let filled = fill(template, &needed.iter().map(|n| (*n, 0)).collect::<Vec<_>>())?;
        if !is_plain(&filled) || !filled.ends_with(".safetensors") {
            return Err(format!("'{template}' must be a plain file name that ends in .safetensors"));
        }
        if let Some(lacking) = needed.iter().find(|n| !template.contains(&format!("{{{n}"))) {
            return Err(format!("'{template}' lacks {{{lacking}}}"));
        }
    }
    if files.index.as_ref().is_some_and(|i| !is_plain(i) || !i.ends_with(".index.json")) {
        return Err("the index must be a plain file name that ends in .index.json".into());
    }
    let together = rules.together.iter().map(|rule| rule.weights.len()).sum::<usize>();
    if together > MOST_TOGETHER {
        return Err(format!("{together} names of weights that belong together; at most {MOST_TOGETHER} are read"));
    }
    super::layout::check(&rules.layouts)
}

/// Whether a name is that of a file in the folder itself, on any file system and in a line of text.
fn is_plain(name: &str) -> bool {
    name.len() <= 255 && !name.contains(['/', '\\']) && !name.chars().any(char::is_control)
}

/// Fills `{name}` and `{name:0N}`.
fn fill(template: &str, values: &[(&str, u64)]) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = template;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        let close = rest[open..].find('}').ok_or_else(|| format!("`{{` without `}}` in '{template}'"))? + open;
        let (name, width) = match rest[open + 1..close].split_once(":0") {
            None => (&rest[open + 1..close], 0),
            Some((name, width)) => {
                let width = width.parse::<usize>().ok().filter(|w| *w <= 20);
                (name, width.ok_or_else(|| format!("bad width in '{template}'"))?)
            }
        };
        let (_, value) = values
            .iter()
            .find(|(n, _)| *n == name)
            .ok_or_else(|| format!("'{template}' uses {{{name}}}, which is not known here"))?;
        out.push_str(&format!("{value:0width$}"));
        rest = &rest[close + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(tp: u32, pp: u32, rank: u32, stage: u32, part: usize) -> FileSlot {
        FileSlot { tp, pp, rank, stage, part, parts: 12 }
    }

    #[test]
    fn files_are_named_as_transformers_and_vllm_expect() {
        let hf = Profile::load("hf").unwrap();
        assert_eq!(hf.file_name(slot(1, 1, 0, 0, 0)).unwrap(), "model-00001-of-00012.safetensors");
        assert_eq!(hf.file_name(slot(8, 1, 3, 0, 1)).unwrap(), "model-rank-3-part-1.safetensors");
        assert!(hf.file_name(slot(8, 2, 3, 0, 1)).is_err());
        let vllm = Profile::load("vllm-0.32").unwrap();
        assert_eq!(vllm.file_name(slot(1, 1, 0, 0, 0)).unwrap(), "model-rank-0-part-0.safetensors");
        assert_eq!(vllm.file_name(slot(2, 4, 1, 3, 5)).unwrap(), "model-pp-3-tp-1-part-5.safetensors");
    }

    #[test]
    fn templates_that_would_leave_the_folder_or_collide_are_refused() {
        let text = include_str!("../../mappings/profiles/hf.toml");
        for (good, bad) in [
            ("model-rank-{rank}-part-{part}.safetensors", "../{rank}-{part}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{part}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{rank}-{part}-{x}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{rank}-{part:0999}.safetensors"),
            ("multiple = 64", "multiple = 0"),
            ("multiple = 64", "mutliple = 64"),
        ] {
            assert!(text.contains(good));
            assert!(Profile::from_texts(&[text.replace(good, bad)]).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_built_in_profile_says_what_it_was_checked_against() {
        let all = Profile::all().unwrap();
        assert!(all.len() >= 5);
        assert!(all.iter().all(|p| !p.rules.checked.is_empty() && !p.rules.about.is_empty()));
    }
}
