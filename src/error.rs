//! The one error type of the library.
//!
//! Every variant says which promise could not be kept; the [`Fault`] inside says where (file, tensor, key, byte
//! offset), what was expected, what was found and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why ggshard stopped. Nothing that passes for a checkpoint exists after any of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file or folder.
    #[error("{fault}")]
    Io {
        /// What was being done, and to which file.
        fault: Box<Fault>,
        /// The operating system's own words.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are not a GGUF container as the format defines it.
    #[error("{0}")]
    Container(Box<Fault>),
    /// A file ends before the bytes that its own header promises.
    #[error("{0}")]
    Truncated(Box<Fault>),
    /// A valid file of a kind that ggshard does not read: another version, byte order, or a removed or unknown type.
    #[error("{0}")]
    Unsupported(Box<Fault>),
    /// The parts of a split set are incomplete or contradict each other.
    #[error("{0}")]
    Split(Box<Fault>),
    /// A mapping, profile or policy file is malformed or contradicts itself.
    #[error("{0}")]
    Rules(Box<Fault>),
    /// No mapping, or more than one, fits the file.
    #[error("{0}")]
    NoMapping(Box<Fault>),
    /// A weight that the model must have has no source tensor in the file.
    #[error("{0}")]
    MissingTensor(Box<Fault>),
    /// A source tensor that no rule of the mapping uses or ignores.
    #[error("{0}")]
    UnknownTensor(Box<Fault>),
    /// Metadata and tensors of one file contradict each other: a dimension, a count, a declared group.
    #[error("{0}")]
    Contradiction(Box<Fault>),
    /// The model cannot be laid out as asked: not divisible, not covered by the profile, not representable.
    #[error("{0}")]
    Layout(Box<Fault>),
    /// A plan failed its audit. This is a defect of ggshard; the plan is never executed.
    #[error("{0}")]
    Audit(Box<Fault>),
    /// Decoded values are NaN or infinite, or overflow the output type.
    #[error("{0}")]
    Nonfinite(Box<Fault>),
    /// The output folder cannot be used: not empty, holds a source part, too little space. Or what is in it is further from
    /// the source than was allowed.
    #[error("{0}")]
    Output(Box<Fault>),
    /// A written checkpoint (manifest, safetensors file, index, digest) is not what it claims to be.
    #[error("{0}")]
    Checkpoint(Box<Fault>),
    /// A CUDA device that was asked for is not there, or failed.
    #[error("{0}")]
    Device(Box<Fault>),
    /// Whoever asked for the work asked for its end before it was done.
    #[error("{0}")]
    Cancelled(Box<Fault>),
}

impl Error {
    /// An I/O error with its file and the operation that failed (`"open"`, `"write"`, …).
    pub fn io(operation: &str, path: &Path, source: std::io::Error) -> Self {
        let fault = Fault::new(format!("cannot {operation}: {source}")).file(path);
        Error::Io { fault: Box::new(fault), source }
    }

    /// Where and why, for programs that show the parts separately.
    pub fn fault(&self) -> &Fault {
        match self {
            Error::Io { fault, .. }
            | Error::Container(fault)
            | Error::Truncated(fault)
            | Error::Unsupported(fault)
            | Error::Split(fault)
            | Error::Rules(fault)
            | Error::NoMapping(fault)
            | Error::MissingTensor(fault)
            | Error::UnknownTensor(fault)
            | Error::Contradiction(fault)
            | Error::Layout(fault)
            | Error::Audit(fault)
            | Error::Nonfinite(fault)
            | Error::Output(fault)
            | Error::Checkpoint(fault)
            | Error::Device(fault)
            | Error::Cancelled(fault) => fault,
        }
    }
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $variant:ident;)*) => {
        impl Fault {
            $($(#[$doc])* pub fn $name(self) -> Error { Error::$variant(Box::new(self)) })*
        }
    };
}

constructors! {
    /// As [`Error::Container`].
    container => Container;
    /// As [`Error::Truncated`].
    truncated => Truncated;
    /// As [`Error::Unsupported`].
    unsupported => Unsupported;
    /// As [`Error::Split`].
    split => Split;
    /// As [`Error::Rules`].
    rules => Rules;
    /// As [`Error::NoMapping`].
    no_mapping => NoMapping;
    /// As [`Error::MissingTensor`].
    missing_tensor => MissingTensor;
    /// As [`Error::UnknownTensor`].
    unknown_tensor => UnknownTensor;
    /// As [`Error::Contradiction`].
    contradiction => Contradiction;
    /// As [`Error::Layout`].
    layout => Layout;
    /// As [`Error::Audit`].
    audit => Audit;
    /// As [`Error::Nonfinite`].
    nonfinite => Nonfinite;
    /// As [`Error::Output`].
    output => Output;
    /// As [`Error::Checkpoint`].
    checkpoint => Checkpoint;
    /// As [`Error::Device`].
    device => Device;
    /// As [`Error::Cancelled`].
    cancelled => Cancelled;
}

/// Where something went wrong, what was found and expected, and what to do.
///
/// Built in one expression: `Fault::new("what was found").file(path).tensor(name).expected("…").remedy("…")`, then
/// turned into an [`Error`] by the constructor named after the variant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fault {
    /// The file or folder concerned.
    pub file: Option<PathBuf>,
    /// The tensor, weight or parameter concerned.
    pub tensor: Option<String>,
    /// The metadata key, TOML rule or manifest field concerned.
    pub key: Option<String>,
    /// Byte offset in the file.
    pub offset: Option<u64>,
    /// What was found, as a phrase that reads on after the place.
    pub found: String,
    /// What was expected instead.
    pub expected: Option<String>,
    /// What the user can do.
    pub remedy: Option<String>,
}

impl Fault {
    /// Starts a fault with what was found.
    pub fn new(found: impl Into<String>) -> Self {
        Fault { found: found.into(), ..Fault::default() }
    }

    /// Names the file.
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        self.file = Some(path.as_ref().to_path_buf());
        self
    }

    /// Names the tensor.
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Names the metadata key, rule or field.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Gives the byte offset in the file.
    pub fn offset(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    /// Says what was expected.
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = Some(expected.into());
        self
    }

    /// Says what to do.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name is on one line; what was found may be a list.
        let name = |text: &str| Printable(text).to_string().replace('\n', "\\n");
        if let Some(file) = &self.file {
            write!(f, "{}: ", name(&file.to_string_lossy()))?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor '{}': ", name(tensor))?;
        }
        if let Some(key) = &self.key {
            write!(f, "key '{}': ", name(key))?;
        }
        write!(f, "{}", Printable(&self.found))?;
        if let Some(offset) = self.offset {
            write!(f, " at byte {offset}")?;
        }
        if let Some(expected) = &self.expected {
            write!(f, "; expected {}", Printable(expected))?;
        }
        if let Some(remedy) = &self.remedy {
            write!(f, ". {}", Printable(remedy))?;
        }
        Ok(())
    }
}

/// Text from a file that nobody vouches for: control characters are escaped and long text is cut, so that an error
/// stays short and cannot drive a terminal.
struct Printable<'a>(&'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 2000;
        for (i, c) in self.0.chars().enumerate() {
            if i == LONGEST {
                return f.write_str("…");
            }
            if c.is_control() && c != '\n' {
                write!(f, "{}", c.escape_default())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_on_one_line_and_drive_no_terminal() {
        let name = "a\nerror: all is well\u{1b}[2J";
        let error = Fault::new("odd\nlist").file(name).tensor(name).key(name).offset(7).container().to_string();
        assert_eq!(error.matches('\n').count(), 1, "{error}");
        assert_eq!(error.matches("a\\nerror: all is well\\u{1b}[2J").count(), 3, "{error}");
        assert!(error.ends_with("odd\nlist at byte 7"), "{error}");
        assert!(Fault::new("x".repeat(1 << 20)).container().to_string().len() < 3000);
    }
}
