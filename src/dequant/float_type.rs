//! The output types of a decoded weight.

use std::fmt;

use crate::dtype::Dtype;

/// Output dtype of a decoded weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FloatType {
    /// IEEE 754 binary32: the decoded value itself.
    F32,
    /// bfloat16: the upper half of an `f32`, rounded to nearest even.
    BF16,
    /// IEEE 754 binary16, rounded to nearest even.
    F16,
}

impl FloatType {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::BF16 | FloatType::F16 => 2,
        }
    }

    /// The name that safetensors uses.
    pub const fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "F32",
            FloatType::BF16 => "BF16",
            FloatType::F16 => "F16",
        }
    }

    /// The magnitude, as `f32` bits without the sign, from which the output is infinite or NaN.
    ///
    /// The largest finite bf16 is `0x7F7F` and the largest finite f16 is 65504; both end in an odd bit, so the value
    /// half-way to the next step rounds to even, which is infinity.
    pub(super) const fn first_infinite(self) -> u32 {
        match self {
            FloatType::F32 => 0x7F80_0000,
            FloatType::BF16 => 0x7F7F_8000,
            FloatType::F16 => 0x477F_F000, // 65520.0
        }
    }
}

impl From<FloatType> for Dtype {
    fn from(ty: FloatType) -> Self {
        match ty {
            FloatType::F32 => Dtype::F32,
            FloatType::BF16 => Dtype::BF16,
            FloatType::F16 => Dtype::F16,
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
