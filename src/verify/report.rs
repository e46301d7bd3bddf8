//! What a check of a checkpoint found.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Fault;

/// The result of one or more checks of one checkpoint folder.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// The one rank that was checked; `None` for all of them.
    pub rank: Option<u32>,
    /// Which checks were made: `folder` first; checks against a source or a reference add their names.
    pub checks: Vec<String>,
    /// Files read from the first to the last byte.
    pub files: u64,
    /// Tensors whose bytes were hashed, counted once per file they are in.
    pub tensors: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Every difference.
    pub findings: Vec<Finding>,
}

/// One difference between what was promised and what is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The file, relative to the checkpoint's folder.
    pub file: String,
    /// The tensor, where one is concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// The kind of difference.
    pub what: What,
    /// What was promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

/// The kinds of difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum What {
    /// A listed file is not there.
    Missing,
    /// A file is there that the manifest does not list and that a loader might pick up.
    Extra,
    /// A file is there but cannot be read.
    Unreadable,
    /// A file's length differs.
    Size,
    /// A file's safetensors header differs from the manifest, or is none.
    Header,
    /// The BLAKE3 of a file differs.
    FileDigest,
    /// The BLAKE3 of a tensor differs.
    TensorDigest,
    /// `B3SUMS` contradicts the manifest, or is malformed.
    Sums,
    /// `model.safetensors.index.json` contradicts the manifest, or is malformed.
    Index,
    /// No tensor was checked at all.
    NothingChecked,
}

impl What {
    /// The difference in words.
    pub fn text(self) -> &'static str {
        match self {
            What::Missing => "the file is missing",
            What::Extra => "the manifest does not list this file",
            What::Unreadable => "the file cannot be read",
            What::Size => "the length differs",
            What::Header => "the safetensors header differs",
            What::FileDigest => "the file's BLAKE3 differs",
            What::TensorDigest => "the tensor's BLAKE3 differs",
            What::Sums => "the list of digests differs",
            What::Index => "the index differs",
            What::NothingChecked => "no tensor was checked",
        }
    }

    /// What to do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            What::Missing | What::Size | What::Header | What::FileDigest | What::TensorDigest => {
                "Copy the files named above again from where they were written, or convert again"
            }
            What::Extra => {
                "Remove files that the manifest does not list: loaders find files by pattern and would read them too"
            }
            What::Unreadable => "Check the permissions and the disk",
            What::Sums | What::Index => "Copy the list or index again from where it was written, or convert again",
            What::NothingChecked => "A checkpoint without tensors is not usable: convert again",
        }
    }
}

impl Finding {
    /// A difference in `file`.
    pub fn new(file: impl Into<String>, what: What) -> Self {
        Finding { file: file.into(), tensor: None, what, expected: None, found: None }
    }

    /// Names the tensor.
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Says what was promised.
    pub fn expected(mut self, expected: impl ToString) -> Self {
        self.expected = Some(expected.to_string());
        self
    }

    /// Says what is there.
    pub fn found(mut self, found: impl ToString) -> Self {
        self.found = Some(found.to_string());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Through Fault, which escapes control characters of names that nobody vouches for.
        let text = match &self.found {
            Some(found) => format!("{}: found {found}", self.what.text()),
            None => self.what.text().to_string(),
        };
        let mut fault = Fault::new(text).file(&self.file);
        fault.tensor.clone_from(&self.tensor);
        fault.expected.clone_from(&self.expected);
        f.write_str(&fault.to_string().replace('\n', "\\n"))
    }
}

impl Report {
    /// An empty report on `rank`, or on all ranks.
    pub fn new(rank: Option<u32>) -> Self {
        Report { rank, ..Report::default() }
    }

    /// Adds a difference.
    pub fn push(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Whether tensors were checked and no difference was found.
    pub fn ok(&self) -> bool {
        self.findings.is_empty() && self.tensors > 0
    }

    /// The report as one line of JSON, with `ok` as its first field.
    pub fn to_json(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct WithVerdict<'a> {
            ok: bool,
            #[serde(flatten)]
            report: &'a Report,
        }
        serde_json::to_string(&WithVerdict { ok: self.ok(), report: self })
    }
}

/// For people: the verdict, the differences (the first 50), and what to do.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 50;
        let verdict = if self.ok() { "ok".to_string() } else { format!("FAILED, {} differences", self.findings.len()) };
        write!(f, "{verdict}: {} files, {} tensors, {} bytes checked", self.files, self.tensors, self.bytes)?;
        if let Some(rank) = self.rank {
            write!(f, " for rank {rank}")?;
        }
        for finding in self.findings.iter().take(SHOWN) {
            write!(f, "\n  {finding}")?;
        }
        if self.findings.len() > SHOWN {
            write!(f, "\n  … and {} more", self.findings.len() - SHOWN)?;
        }
        let kinds: BTreeSet<What> = self.findings.iter().map(|finding| finding.what).collect();
        let mut remedies: Vec<&str> = kinds.into_iter().map(What::remedy).collect();
        remedies.dedup();
        let mut shown = BTreeSet::new();
        for remedy in remedies {
            if shown.insert(remedy) {
                write!(f, "\n{remedy}.")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_cut_with_a_count() {
        let mut report = Report::new(None);
        report.tensors = 1;
        for i in 0..53 {
            report.push(Finding::new(format!("f{i}"), What::TensorDigest).tensor("a\u{1b}[2J\nb"));
        }
        let text = report.to_string();
        assert!(text.starts_with("FAILED, 53 differences"));
        assert!(text.contains("f49") && !text.contains("f50") && text.contains("and 3 more"));
        assert!(!text.contains('\u{1b}'));
        assert_eq!(text.lines().count(), 53);
        assert_eq!(text.matches("convert again").count(), 1);
    }

    #[test]
    fn nothing_checked_is_not_ok() {
        assert!(!Report::new(None).ok());
    }

    #[test]
    fn json_says_the_verdict_and_round_trips() {
        let mut report = Report::new(Some(3));
        report.push(Finding::new("x", What::FileDigest).expected("a").found("b"));
        let json = report.to_json().unwrap();
        assert!(json.starts_with(r#"{"ok":false,"rank":3,"#) && json.contains(r#""what":"file-digest""#), "{json}");
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
    }
}
