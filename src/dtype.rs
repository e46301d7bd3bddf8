//! Element types of output tensors, by their safetensors names.

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bytes:literal;)*) => {
        /// An element type that a safetensors file can hold, of one or more whole bytes.
        ///
        /// The sub-byte types of the format (`F4`, `F6_*`) are left out: serving stacks store such weights packed in
        /// [`Dtype::U8`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
        }

        impl Dtype {
            /// Every type, in the order of declaration.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// The name in safetensors headers and in the manifest.
            pub fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name,)*
                }
            }

            /// Bytes of one element.
            pub fn bytes(self) -> u64 {
                match self {
                    $(Dtype::$variant => $bytes,)*
                }
            }

            /// The type of that exact name; `None` for every other text.
            pub fn parse(name: &str) -> Option<Dtype> {
                match name {
                    $($name => Some(Dtype::$variant),)*
                    // Text, not one of our enums: everything else is unknown.
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    /// Truth value, one byte.
    Bool = "BOOL", 1;
    /// Unsigned byte; also the container of packed sub-byte weights.
    U8 = "U8", 1;
    /// Signed byte.
    I8 = "I8", 1;
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2 = "F8_E5M2", 1;
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
    F8E4M3 = "F8_E4M3", 1;
    /// 8-bit power-of-two scale.
    F8E8M0 = "F8_E8M0", 1;
    /// 8-bit float E4M3 without negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 1;
    /// 8-bit float E5M2 without negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 1;
    /// Signed 16-bit integer.
    I16 = "I16", 2;
    /// Unsigned 16-bit integer.
    U16 = "U16", 2;
    /// IEEE half precision.
    F16 = "F16", 2;
    /// Upper half of an IEEE single.
    BF16 = "BF16", 2;
    /// Signed 32-bit integer.
    I32 = "I32", 4;
    /// Unsigned 32-bit integer.
    U32 = "U32", 4;
    /// IEEE single precision.
    F32 = "F32", 4;
    /// Complex of two IEEE singles.
    C64 = "C64", 8;
    /// IEEE double precision.
    F64 = "F64", 8;
    /// Signed 64-bit integer.
    I64 = "I64", 8;
    /// Unsigned 64-bit integer.
    U64 = "U64", 8;
}

impl Dtype {
    /// Bytes of a tensor of this type and `shape`; `None` when the product overflows.
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        shape.iter().try_fold(self.bytes(), |n, &dim| n.checked_mul(dim))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Dtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a byte-sized safetensors dtype")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Dtype, E> {
                Dtype::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_those_of_the_official_crate() {
        for &dtype in Dtype::ALL {
            let official: safetensors::Dtype = serde_json::from_value(dtype.name().into()).unwrap();
            assert_eq!(official.bitsize() as u64, dtype.bytes() * 8, "{dtype}");
            assert_eq!(Dtype::parse(dtype.name()), Some(dtype));
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{dtype}\""));
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        for name in ["", "bf16", "F4", "F8", "BF16 "] {
            assert_eq!(Dtype::parse(name), None);
            assert!(serde_json::from_value::<Dtype>(name.into()).is_err());
        }
    }

    #[test]
    fn a_zero_dimension_hides_no_overflow_error() {
        assert_eq!(Dtype::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(Dtype::F32.tensor_bytes(&[3, 0]), Some(0));
        assert_eq!(Dtype::F32.tensor_bytes(&[1 << 62]), None);
        assert_eq!(Dtype::F32.tensor_bytes(&[u64::MAX, 2, 0]), None);
    }
}
