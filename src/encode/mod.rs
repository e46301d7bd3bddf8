//! Encoders: decoded values become low-bit numbers and the scales that go with them. Pure functions of their input.

pub mod fp8;
