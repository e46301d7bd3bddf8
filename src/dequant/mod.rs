//! Dequantization of ggml blocks: packed bytes in, `f32`, `bf16` or `f16` out.
//!
//! Every value has exactly the bits that ggml's own C row functions give (NaN compares as a class), whatever the
//! instruction set: all products in all formats are exact in `f32` and each value rounds at most once, so neither the
//! width of the vectors nor the order of multiplications can change a result.
//!
//! The parts, in the order of the data flow:
//!
//! | part | what it is |
//! |---|---|
//! | `blocks` | one decoder per type, plain Rust on fixed-size arrays |
//! | `convert` | the one converter from `f32` to each output type |
//! | `isa` | the few steps that plain Rust cannot express well, per instruction set |
//! | `kernels` | the macro that compiles decoders and converters once per instruction set |
//! | [`Dequantizer`] | what callers use |
//!
//! `docs/add-a-type.md` says how to add a type.

mod blocks;
mod convert;
mod dequantizer;
mod f16;
mod float_type;
mod isa;
mod kernels;
mod nonfinite;
mod simd;

pub use convert::{convert, convert_computed};
pub use dequantizer::Dequantizer;
pub use float_type::FloatType;
pub use nonfinite::Nonfinite;
pub use simd::Simd;
