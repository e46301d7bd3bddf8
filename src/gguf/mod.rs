//! Source: GGUF files, read with bounds and as one set of parts.

pub mod types;

pub use types::GgmlType;
