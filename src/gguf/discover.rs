//! Which files make up the set that a path stands for.
//!
//! Paths are used as given and never resolved: entries of a download cache are links to blobs named by hash, and the
//! other parts of a set lie beside the link, not beside the blob.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Fault, Result};

/// A file name of the form `<prefix>-00001-of-00003.gguf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitName {
    prefix: String,
    /// Number in the name, from 1 in a valid name.
    pub(crate) number: u32,
    /// Number of parts.
    pub(crate) count: u32,
}

impl SplitName {
    /// Reads a file name; none if it is not of this form.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let digits = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok())?;
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        Some(SplitName { prefix: prefix.to_owned(), number: digits(number)?, count: digits(count)? })
    }

    fn of(path: &Path) -> Option<Self> {
        Self::parse(path.file_name()?.to_str()?)
    }

    /// The file name of one part, numbered from 1.
    pub(crate) fn part(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

/// The files of one set, in order, and the split form of their names if they have it.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) split: Option<SplitName>,
}

/// Finds the set that a file, any part of a split set, or a folder stands for.
pub(crate) fn locate(path: &Path) -> Result<Located> {
    let meta = fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    let file = if meta.is_dir() { only_set(path)? } else { path.to_path_buf() };
    let Some(split) = SplitName::of(&file) else { return Ok(Located { files: vec![file], split: None }) };
    if split.number == 0 || split.number > split.count {
        let fault = Fault::new(format!("the name says part {} of {}", split.number, split.count)).file(&file);
        return Err(fault.expected(format!("a part from 1 to {}", split.count)).remedy("Rename the file.").split());
    }
    let files: Vec<PathBuf> = (1..=split.count).map(|i| file.with_file_name(split.part(i))).collect();
    missing(&files)?;
    Ok(Located { files, split: Some(split) })
}

fn missing(files: &[PathBuf]) -> Result<()> {
    let absent = |file: &&PathBuf| matches!(fs::metadata(file), Err(e) if e.kind() == ErrorKind::NotFound);
    let missing: Vec<&PathBuf> = files.iter().filter(absent).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let number = files.iter().position(|f| f == *first).unwrap_or(0) + 1;
    let mut found = format!("part {number} of {} is missing", files.len());
    if missing.len() > 1 {
        found += &format!(", as are {} more", missing.len() - 1);
    }
    let fault = Fault::new(found).file(first).expected(format!("all {} parts in one folder", files.len()));
    Err(fault
        .remedy("Download the missing parts. If this file is a whole model, take the '-of-' out of its name.")
        .split())
}

/// Some file of the one set that a folder holds.
fn only_set(folder: &Path) -> Result<PathBuf> {
    // A set is known by its prefix and count, a single file by its name; each with one file to open it by.
    let mut sets: BTreeMap<String, (PathBuf, usize)> = BTreeMap::new();
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io("list", folder, e))? {
        let path = entry.map_err(|e| Error::io("list", folder, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        // Hidden files are not models: macOS leaves `._model.gguf` beside `model.gguf`.
        if name.starts_with('.') {
            continue;
        } else if path.is_dir() {
            folders.push(name);
        } else if gguf {
            let key = match SplitName::of(&path) {
                Some(split) => format!("{}-*-of-{:05}.gguf", split.prefix, split.count),
                None => name,
            };
            sets.entry(key).or_insert((path, 0)).1 += 1;
        }
    }
    let mut all = sets.iter();
    if let (Some((_, (path, _))), None) = (all.next(), all.next()) {
        return Ok(path.clone());
    }
    let list = |mut names: Vec<String>| {
        names.sort();
        let more = names.len().saturating_sub(20);
        names.truncate(20);
        names.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
    };
    let fault = if sets.is_empty() {
        let fault = Fault::new("no .gguf file in this folder");
        match folders.is_empty() {
            true => fault,
            false => fault.remedy(format!("Subfolders are not searched; there are: {}.", list(folders))),
        }
    } else {
        let shown = |(key, (_, files)): (&String, &(PathBuf, usize))| match key.contains("-*-of-") {
            true => format!("{key} ({files} files)"),
            false => key.clone(),
        };
        let names = list(sets.iter().map(shown).collect());
        Fault::new(format!("{} models in this folder: {names}", sets.len())).remedy("Name the file that is meant.")
    };
    Err(fault.file(folder).expected("exactly one model: one file, or the parts of one split set").split())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_form_is_a_split_name() {
        let name = SplitName::parse("a-of-b-00002-of-00010.gguf").unwrap();
        assert_eq!((name.prefix.as_str(), name.number, name.count), ("a-of-b", 2, 10));
        assert_eq!(name.part(10), "a-of-b-00010-of-00010.gguf");
        for other in
            ["m.gguf", "m-1-of-2.gguf", "m-00001-of-00002.gguf.part", "m-00001-of-0000x.gguf", "00001-of-00002"]
        {
            assert_eq!(SplitName::parse(other), None, "{other}");
        }
    }
}
