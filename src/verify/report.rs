//! What a check of a checkpoint found.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Fault;

/// The name of the comparison with a source in [`Report::checks`].
pub(super) const SOURCE: &str = "source";
/// The name of the comparison with a reference in [`Report::checks`].
pub(super) const REFERENCE: &str = "reference";

/// The result of one or more checks of one checkpoint folder.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Report {
    /// The one rank that was checked; `None` for all of them.
    pub rank: Option<u32>,
    /// Which checks were made, in this order: `folder`, `source`, `reference`.
    pub checks: Vec<String>,
    /// Files read from the first to the last byte.
    pub files: u64,
    /// Tensors whose bytes were hashed, counted once per file they are in.
    pub tensors: u64,
    /// Bytes read.
    pub bytes: u64,
    /// What the comparison with a reference amounts to, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Summary>,
    /// Every difference.
    pub findings: Vec<Finding>,
}

/// The comparison with a reference in numbers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// The largest relative RMS difference that passes.
    pub max_rms: f64,
    /// Tensors whose values were compared, each counted once.
    pub tensors: u64,
    /// Of them, those whose values are all equal.
    pub exact: u64,
    /// Values compared.
    pub values: u64,
    /// Values that differ.
    pub unequal: u64,
    /// The tensors with the largest differences, at most ten, the largest first.
    pub worst: Vec<Distance>,
}

/// How far a tensor is from the reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// The tensor.
    pub tensor: String,
    /// rms(checkpoint − reference) / rms(reference); `None` (`null`) when that is not a finite number, as when one side
    /// is NaN or the reference is all zero.
    pub relative_rms: Option<f64>,
}

/// One difference between what was promised and what is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The file, relative to the checkpoint's folder; for [`What::ReferenceExtra`] to the reference's.
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
    /// The first byte of the tensor that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// How many bytes of the tensor differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differing: Option<u64>,
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
    /// A tensor's bytes are not those that the source gives.
    SourceBytes,
    /// The BLAKE3 of a part of the source is not the recorded one.
    SourceDigest,
    /// The manifest is not the one that the source gives.
    Record,
    /// The number of values that are not finite is not the recorded one.
    Nonfinite,
    /// A tensor's values are further from the reference than allowed.
    ReferenceValues,
    /// The reference's tensor has another shape, or what a rank holds is no share of it.
    ReferenceShape,
    /// Tensor and reference have types between which values cannot be compared.
    NotComparable,
    /// The reference lacks the tensor.
    ReferenceLacks,
    /// The reference holds a tensor that the checkpoint lacks.
    ReferenceExtra,
    /// Rows that pad the vocabulary are not zero.
    Padding,
    /// Ranks that should hold the same hold different bytes.
    Replica,
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
            What::SourceBytes => "the bytes are not those that the source gives",
            What::SourceDigest => "the source's BLAKE3 differs",
            What::Record => "the manifest is not what the source gives",
            What::Nonfinite => "other values are not finite than those recorded",
            What::ReferenceValues => "the values are too far from the reference",
            What::ReferenceShape => "the shape does not fit the reference",
            What::NotComparable => "these types cannot be compared by value",
            What::ReferenceLacks => "the reference has no such tensor",
            What::ReferenceExtra => "the reference has a tensor that the checkpoint lacks",
            What::Padding => "the rows that pad the vocabulary are not zero",
            What::Replica => "ranks that should hold the same differ",
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
            What::SourceBytes | What::SourceDigest | What::Record | What::Nonfinite => {
                "Convert the source again: the folder, or the source's tensor data, was changed after the conversion"
            }
            What::ReferenceValues | What::Padding | What::Replica => {
                "Check that the reference is the model that the GGUF was made from; allow for quantization with --max-rms"
            }
            What::ReferenceShape | What::ReferenceLacks | What::ReferenceExtra => {
                "Compare with the checkpoint that the GGUF was made from. What the GGUF does not hold (converters drop some \
                 MTP blocks), or --mtp left out, cannot be compared"
            }
            What::NotComparable => "Compare with a reference in BF16, F16 or F32",
            What::NothingChecked => "A checkpoint without tensors is not usable: convert again",
        }
    }
}

impl Finding {
    /// A difference in `file`.
    pub fn new(file: impl Into<String>, what: What) -> Self {
        Finding { file: file.into(), tensor: None, what, expected: None, found: None, offset: None, differing: None }
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
        if self.checks.iter().any(|check| check == SOURCE) {
            write!(f, "; every byte compared with what the source gives")?;
        }
        if let Some(summary) = &self.reference {
            write!(f, "\n{summary}")?;
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

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reference: {} of {} tensors equal", self.exact, self.tensors)?;
        if self.unequal > 0 {
            write!(f, ", {} of {} values differ", self.unequal, self.values)?;
            write!(f, "; relative RMS (at most {} passes):", self.max_rms)?;
        }
        for distance in &self.worst {
            match distance.relative_rms {
                Some(rms) => write!(f, "\n  {rms:<12.6e}")?,
                None => write!(f, "\n  {:<12}", "not finite")?,
            }
            write!(f, " {}", distance.tensor.escape_debug())?;
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
