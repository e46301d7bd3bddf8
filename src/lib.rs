//! ggshard turns a GGUF model into pre-sharded, per-rank tensor-parallel safetensors, and proves that it did so
//! correctly: every source tensor is placed by a rule or ignored by a rule, or nothing is written.

pub mod bench;
pub mod check;
pub mod convert;
pub mod cuda;
pub mod dequant;
pub mod dtype;
pub mod encode;
pub mod engine;
pub mod error;
pub mod gguf;
pub mod mapping;
pub mod output;
pub mod plan;
mod regular;
pub mod runtime;
mod threads;
pub mod verify;

pub use error::{Error, Fault, Result};
