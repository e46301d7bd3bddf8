//! Profiles: how one serving stack lays a model out on a rank. TOML files under `mappings/profiles/`.

use serde::Deserialize;

use super::library::{RulesId, Text, builtin, embedded, find};
use crate::error::{Fault, Result};

/// A profile ready for use.
#[derive(Debug, Clone)]
pub struct Profile {
    /// What the file says.
    pub rules: ProfileRules,
    text: Text,
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
    /// One sentence: what the files are for.
    pub about: String,
    /// What the layout was checked against.
    pub checked: String,
    /// The launch that the layout assumes: load format, flags.
    #[serde(default)]
    pub launch: Vec<String>,
    /// At tp > 1, vocabulary rows are padded with zeros to a multiple of this before they are cut.
    pub vocab_pad: u64,
    /// File names.
    pub files: FileNames,
}

/// File name templates. `{part}`, `{parts}` and `{rank}` are replaced; `{part:05}` is padded with zeros.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileNames {
    /// Names at tp 1, parts counted from 1.
    pub whole: String,
    /// The index file that goes with `whole`.
    #[serde(default)]
    pub index: Option<String>,
    /// Names at tp > 1, ranks and parts counted from 0.
    pub ranked: String,
}

impl Profile {
    /// A built-in profile by name, or a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        Profile::parse(find(name_or_path, None, embedded::PROFILES, "profile")?)
    }

    /// A built-in profile by name, and nothing else: for names that come from a file.
    pub fn builtin(name: &str) -> Result<Self> {
        Profile::parse(builtin(name, embedded::PROFILES, "profile")?)
    }

    /// A profile from a text kept elsewhere (a manifest).
    pub fn from_text(text: &str) -> Result<Self> {
        Profile::parse(Text { origin: "the manifest".into(), builtin: false, text: text.to_owned() })
    }

    fn parse(text: Text) -> Result<Self> {
        let at = |e: String| Fault::new(e).file(&text.origin).rules();
        let rules: ProfileRules =
            toml::from_str(&text.text).map_err(|e| at(e.to_string().trim_end().to_owned()))?;
        if rules.vocab_pad == 0 || rules.vocab_pad > 1 << 16 {
            return Err(at(format!("vocab_pad = {}; it is a multiple between 1 and 65536", rules.vocab_pad)));
        }
        let names = [(&rules.files.whole, &["part", "parts"][..]), (&rules.files.ranked, &["rank", "part"][..])];
        for (template, needed) in names {
            let filled = fill(template, &needed.iter().map(|n| (*n, 0)).collect::<Vec<_>>()).map_err(&at)?;
            if filled.contains(['/', '\\']) || !filled.ends_with(".safetensors") {
                return Err(at(format!("'{template}' must be a plain file name that ends in .safetensors")));
            }
            if let Some(lacking) = needed.iter().find(|n| !template.contains(&format!("{{{n}"))) {
                return Err(at(format!("'{template}' lacks {{{lacking}}}")));
            }
        }
        if rules.files.index.as_ref().is_some_and(|i| i.contains(['/', '\\']) || !i.ends_with(".json")) {
            return Err(at("the index must be a plain file name that ends in .json".into()));
        }
        Ok(Profile { rules, text })
    }

    /// Name, version and digest.
    pub fn id(&self) -> RulesId {
        RulesId::new(&self.rules.name, self.rules.version, std::slice::from_ref(&self.text))
    }

    /// The name of a rank's part. `part` counts from 0.
    pub fn file_name(&self, tp: u32, rank: u32, part: usize, parts: usize) -> Result<String> {
        let (part, parts, rank) = (part as u64, parts as u64, u64::from(rank));
        let name = if tp == 1 {
            fill(&self.rules.files.whole, &[("part", part + 1), ("parts", parts)])
        } else {
            fill(&self.rules.files.ranked, &[("rank", rank), ("part", part)])
        };
        name.map_err(|e| Fault::new(e).file(&self.text.origin).rules())
    }
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

    #[test]
    fn the_hf_profile_names_files_as_transformers_and_vllm_expect() {
        let hf = Profile::load("hf").unwrap();
        assert_eq!(hf.file_name(1, 0, 0, 12).unwrap(), "model-00001-of-00012.safetensors");
        assert_eq!(hf.file_name(8, 3, 1, 12).unwrap(), "model-rank-3-part-1.safetensors");
    }

    #[test]
    fn templates_that_would_leave_the_folder_or_collide_are_refused() {
        let text = include_str!("../../mappings/profiles/hf.toml");
        for (good, bad) in [
            ("model-rank-{rank}-part-{part}.safetensors", "../{rank}-{part}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{part}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{rank}-{part}-{x}.safetensors"),
            ("model-rank-{rank}-part-{part}.safetensors", "model-{rank}-{part:0999}.safetensors"),
            ("vocab_pad = 64", "vocab_pad = 0"),
            ("vocab_pad = 64", "vocab_pda = 64"),
        ] {
            assert!(text.contains(good));
            assert!(Profile::from_text(&text.replace(good, bad)).is_err(), "{bad}");
        }
    }
}
