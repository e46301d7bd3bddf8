//! The GPU: kernels of `kernels/`, and what the host says to them.

pub mod launch;

pub use launch::{Grid, Launch};
