//! Finding mappings: the built-in ones, files, and the one whose `[match]` fits a GGUF.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::facts::{Bound, Facts};
use super::rules::Rules;
use crate::error::{Error, Fault, Result};
use crate::gguf::GgufSet;
use crate::regular;

/// The TOML files under `mappings/`, embedded when the crate is built.
pub(crate) mod embedded {
    include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
}

/// Longest rules file that is read, in bytes.
const LONGEST: u64 = 1 << 20;
/// Longest chain of `extends`.
const DEEPEST: usize = 8;

/// A mapping ready for use.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// Its rules, with those of the mappings it extends.
    pub rules: Rules,
    /// How it was found, in words.
    pub chosen: String,
    texts: Vec<Text>,
}

/// One TOML text that a mapping or profile is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// A built-in name or a path.
    pub origin: String,
    /// Whether it is embedded in the program.
    pub builtin: bool,
    /// The text.
    pub text: String,
}

/// Which rules were used, for the manifest: by name, version and digest, and word for word unless built in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RulesId {
    /// The name inside the file.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// BLAKE3 over the texts of the file and of all that it extends, in hexadecimal.
    pub digest: String,
    /// The texts that are not built in, the file itself first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<String>,
}

impl Text {
    /// Refuses more than can be read in a moment, of a file that has `bytes` bytes, or from a manifest.
    pub(super) fn check_length(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.max(self.text.len() as u64);
        if bytes <= LONGEST {
            return Ok(());
        }
        let fault = Fault::new(format!("{bytes} bytes")).file(&self.origin);
        Err(fault.expected(format!("rules of at most {LONGEST} bytes")).rules())
    }
}

impl RulesId {
    /// The identity of rules made of these texts.
    pub fn new(name: &str, version: u32, texts: &[Text]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for text in texts {
            hasher.update(&(text.text.len() as u64).to_le_bytes());
            hasher.update(text.text.as_bytes());
        }
        RulesId {
            name: name.to_owned(),
            version,
            digest: hasher.finalize().to_hex().to_string(),
            texts: texts.iter().filter(|t| !t.builtin).map(|t| t.text.clone()).collect(),
        }
    }
}

impl Mapping {
    /// A built-in mapping by name, or a TOML file.
    pub fn load(name_or_path: &str) -> Result<Self> {
        let first = find(name_or_path, None, embedded::MODELS, "mapping")?;
        Mapping::assemble(first, &format!("named '{name_or_path}'"), |parent, child| {
            find(parent, Some(child), embedded::MODELS, "mapping")
        })
    }

    /// A built-in mapping by name, and nothing else: for names that come from a file, which must not choose what is read.
    pub fn builtin(name: &str) -> Result<Self> {
        let text = |name: &str, _: &Text| builtin(name, embedded::MODELS, "mapping");
        Mapping::assemble(builtin(name, embedded::MODELS, "mapping")?, &format!("built in as '{name}'"), text)
    }

    /// A mapping from texts kept elsewhere (a manifest): the mapping itself, then what it extends, one after the other,
    /// as [`RulesId::texts`] has them. What the last of them extends is built in; no file is read.
    pub fn from_texts(texts: &[String]) -> Result<Self> {
        let mut recorded =
            texts.iter().map(|text| Text { origin: "the manifest".into(), builtin: false, text: text.clone() });
        let first = recorded.next().ok_or_else(|| Fault::new("no mapping text").rules())?;
        // By position, not by name: a text may extend a file by its path, or a mapping of its own name.
        let mapping = Mapping::assemble(first, "recorded in the manifest", |parent, _| match recorded.next() {
            Some(text) => Ok(text),
            None => builtin(parent, embedded::MODELS, "mapping"),
        })?;
        match recorded.next() {
            None => Ok(mapping),
            Some(text) => Err(Fault::new("a text that no other extends").file(text.origin).key("extends").rules()),
        }
    }

    /// Follows `extends` from the first text and lays each mapping over the one it extends.
    fn assemble(first: Text, chosen: &str, mut parent: impl FnMut(&str, &Text) -> Result<Text>) -> Result<Self> {
        let mut texts = vec![first];
        let mut chain: Vec<Rules> = Vec::new();
        loop {
            let child = &texts[texts.len() - 1];
            let rules = parse(child)?;
            let next = rules.extends.clone();
            chain.push(rules);
            let Some(name) = next else { break };
            if texts.len() == DEEPEST {
                let fault = Fault::new(format!("more than {DEEPEST} mappings extend each other")).file(&child.origin);
                return Err(fault.key("extends").rules());
            }
            let next = parent(&name, child).map_err(|e| extended_by(child, e))?;
            if texts.contains(&next) {
                let chain: Vec<&str> = texts.iter().chain([&next]).map(|t| t.origin.as_str()).collect();
                let found = format!("mappings extend each other in a circle: {}", chain.join(" extends "));
                return Err(Fault::new(found).file(&child.origin).key("extends").rules());
            }
            texts.push(next);
        }
        let at = |e: String| Fault::new(e).file(&texts[0].origin).rules();
        let merged = chain.into_iter().rev().try_fold(None, |base: Option<Rules>, child| match base {
            None => Ok(Some(child)),
            Some(base) => child.over(base).map(Some),
        });
        let rules = merged.map_err(at)?.ok_or_else(|| at("no rules".into()))?;
        rules.check().map_err(at)?;
        Ok(Mapping { rules, chosen: chosen.to_owned(), texts })
    }

    /// The texts it is made of, its own first.
    pub fn source(&self) -> String {
        listing(&self.texts)
    }

    /// Name, version and digest.
    pub fn id(&self) -> RulesId {
        RulesId::new(&self.rules.name, self.rules.version, &self.texts)
    }

    /// Whether the mapping says of itself that it is for this file, and how strongly.
    fn fits(&self, set: &GgufSet) -> Result<Option<i32>> {
        let Some(matching) = &self.rules.matching else { return Ok(None) };
        let architecture = set.architecture()?;
        if !matching.architecture.as_slice().iter().any(|a| a == architecture) {
            return Ok(None);
        }
        let facts = Facts::new(set, &self.rules)?;
        let applies = match &matching.when {
            None => true,
            Some(when) => Bound { facts: &facts, vars: &[] }.truth(when).map_err(|why| {
                facts.fault(why).key(format!("match.when of mapping '{}'", self.rules.name)).contradiction()
            })?,
        };
        Ok(applies.then_some(matching.priority))
    }
}

/// An error about a mapping that cannot be extended names the one that asks for it.
fn extended_by(child: &Text, error: Error) -> Error {
    match error {
        Error::Rules(fault) if fault.file.is_none() => fault.file(&child.origin).key("extends").rules(),
        other => other,
    }
}

fn parse(text: &Text) -> Result<Rules> {
    text.check_length(0)?;
    Rules::parse(&text.text).map_err(|e| Fault::new(e).file(&text.origin).rules())
}

/// Texts one after the other, each under its origin.
pub(super) fn listing(texts: &[Text]) -> String {
    texts.iter().map(|t| format!("# --- {}\n{}", t.origin, t.text)).collect()
}

/// The built-in text of that name.
pub(super) fn builtin(name: &str, builtin: &[(&str, &str)], kind: &str) -> Result<Text> {
    if let Some((_, text)) = builtin.iter().find(|(n, _)| *n == name) {
        return Ok(Text { origin: name.to_owned(), builtin: true, text: (*text).to_owned() });
    }
    let names: Vec<&str> = builtin.iter().map(|(n, _)| *n).collect();
    Err(Fault::new(format!("there is no built-in {kind} '{name}'"))
        .expected(format!("one of {}", names.join(", ")))
        .rules())
}

/// The text behind a name or path. What looks like a path (a separator, or `.toml` at the end) is one; a file's
/// `extends` may also name a file beside it.
pub(super) fn find(name: &str, child: Option<&Text>, builtin: &[(&str, &str)], kind: &str) -> Result<Text> {
    let is_path = name.contains(['/', '\\']) || name.ends_with(".toml");
    if !is_path {
        if let Some((_, text)) = builtin.iter().find(|(n, _)| *n == name) {
            return Ok(Text { origin: name.to_owned(), builtin: true, text: (*text).to_owned() });
        }
        if let Some(beside) = child
            .filter(|c| !c.builtin)
            .and_then(|c| Path::new(&c.origin).parent())
            .map(|folder| folder.join(format!("{name}.toml")))
            .filter(|path| path.is_file())
        {
            return read(&beside);
        }
        let names: Vec<&str> = builtin.iter().map(|(n, _)| *n).collect();
        return Err(Fault::new(format!("there is no {kind} '{name}'"))
            .expected(format!("one of {}, or the path of a TOML file", names.join(", ")))
            .rules());
    }
    let path = match child.filter(|c| !c.builtin).and_then(|c| Path::new(&c.origin).parent()) {
        Some(folder) => folder.join(name),
        None => PathBuf::from(name),
    };
    read(&path)
}

fn read(path: &Path) -> Result<Text> {
    let (file, bytes) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut text = String::new();
    // One more than is read, so that a file that grows is noticed as well.
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(|e| Error::io("read", path, e))?;
    let text = Text { origin: path.to_string_lossy().into_owned(), builtin: false, text };
    text.check_length(bytes)?;
    Ok(text)
}

/// All built-in mappings, by name.
pub fn builtin_mappings() -> Result<Vec<Mapping>> {
    embedded::MODELS.iter().map(|(name, _)| Mapping::load(name)).collect()
}

/// The built-in mapping whose `[match]` fits the file.
pub fn choose(set: &GgufSet) -> Result<Mapping> {
    let mut fitting: Vec<(i32, Mapping)> = Vec::new();
    for mapping in builtin_mappings()? {
        if let Some(priority) = mapping.fits(set)? {
            fitting.push((priority, mapping));
        }
    }
    let best = fitting.iter().map(|(p, _)| *p).max();
    fitting.retain(|(p, _)| Some(*p) == best);
    let architecture = set.architecture()?;
    let fault = |found: String| Fault::new(found).file(set.path()).key("general.architecture");
    match fitting.len() {
        1 => {
            let (_, mut mapping) = fitting.remove(0);
            let because = mapping.rules.matching.as_ref().map(|m| m.because.clone()).unwrap_or_default();
            let because = if because.is_empty() { String::new() } else { format!(": {because}") };
            mapping.chosen = format!("general.architecture is '{architecture}'{because}");
            Ok(mapping)
        }
        0 => {
            let known: Vec<String> = builtin_mappings()?
                .iter()
                .filter_map(|m| {
                    let matching = m.rules.matching.as_ref()?;
                    Some(format!("{} ({})", m.rules.name, matching.architecture.as_slice().join(", ")))
                })
                .collect();
            Err(fault(format!("no built-in mapping is for architecture '{architecture}'"))
                .expected(format!("one of {}", known.join("; ")))
                .remedy(
                    "Write a mapping (docs/add-a-model.md) and give it with --mapping FILE, or keep the GGUF's own names \
                     with --mapping raw",
                )
                .no_mapping())
        }
        _ => {
            let names: Vec<&str> = fitting.iter().map(|(_, m)| m.rules.name.as_str()).collect();
            Err(fault(format!("several mappings fit this file: {}", names.join(", ")))
                .remedy("Name the right one with --mapping")
                .no_mapping())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_texts_give_the_mapping_that_was_used() {
        let folder = tempfile::tempdir().unwrap();
        // A file that extends another by path, which extends a built-in mapping of its own name.
        let own = "name = \"deepseek_v3\"\nversion = 2\nextends = \"deepseek_v3\"\nclass = \"C\"\nabout = \"x\"\n";
        let outer = "name = \"mine\"\nversion = 1\nextends = \"own.toml\"\nclass = \"C\"\nabout = \"x\"\n";
        std::fs::write(folder.path().join("own.toml"), own).unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, outer).unwrap();
        let used = Mapping::load(&path.to_string_lossy()).unwrap().id();
        assert_eq!(used.texts, [outer, own]);
        drop(folder);
        assert_eq!(Mapping::from_texts(&used.texts).unwrap().id(), used);
        // A text too many was not part of the mapping.
        let raw = "name = \"raw2\"\nversion = 1\nabout = \"x\"\nevery_tensor = true\n".to_owned();
        assert!(Mapping::from_texts(&[raw.clone(), raw]).is_err());
        assert!(Mapping::from_texts(&[]).is_err());
    }

    #[test]
    fn recorded_texts_and_names_read_no_file() {
        let outer = "name = \"mine\"\nversion = 1\nextends = \"/etc/x.toml\"\nclass = \"C\"\nabout = \"x\"\n";
        let error = Mapping::from_texts(&[outer.to_owned()]).unwrap_err();
        assert!(error.to_string().contains("no built-in mapping '/etc/x.toml'"), "{error}");
        assert!(Mapping::builtin("./x.toml").is_err());
        assert_eq!(Mapping::builtin("raw").unwrap().id(), Mapping::load("raw").unwrap().id());
    }
}
