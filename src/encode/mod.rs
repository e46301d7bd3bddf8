//! Encoding of decoded weights in few bits: `f32` in, codes and their scales out.
//!
//! Pure functions of slices: what they give depends on the values alone, not on the instruction set, on threads or on how a
//! weight is cut into calls, as long as calls take whole blocks. Every step is one `f32` operation, rounded to nearest even,
//! or integer arithmetic, so that any device can give the same bits.
//!
//! The parts, in the order of the data flow:
//!
//! | part | what it is |
//! |---|---|
//! | `minifloat` | one value, rounded to a float of few bits |
//! | [`fp8`] | E4M3 with a scale per block of 128 x 128 |
//! | [`nvfp4`] | E2M1 with a scale per 16 values, and one per weight |
//! | [`Deviation`] | how far the encoded weights are from the values |
//! | `kernels` | the macro that compiles them once per instruction set |

mod deviation;
pub mod fp8;
mod kernels;
mod minifloat;
pub mod nvfp4;

pub use deviation::Deviation;
