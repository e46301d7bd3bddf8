//! Layouts that real files have and no file at hand shows: toy checkpoints go through what llama.cpp's converter does to
//! them, with every element numbered, and must come back position by position, or be refused for the right reason.

#[path = "variants/array.rs"]
mod array;
#[path = "variants/check.rs"]
mod check;
#[path = "variants/file.rs"]
mod file;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/golden.rs"]
mod golden;
#[path = "variants/toy.rs"]
mod toy;

#[path = "variants/choice.rs"]
mod choice;
#[path = "variants/experts.rs"]
mod experts;
#[path = "variants/families.rs"]
mod families;
#[path = "variants/indexer.rs"]
mod indexer;
#[path = "variants/kv_b.rs"]
mod kv_b;
#[path = "variants/language.rs"]
mod language;
#[path = "variants/metadata.rs"]
mod metadata;
#[path = "variants/mtp.rs"]
mod mtp;
#[path = "variants/refusals.rs"]
mod refusals;
#[path = "variants/sidecars.rs"]
mod sidecars;
