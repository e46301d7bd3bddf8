//! The single truth about ggml types: id, name, elements per block, bytes per block.
//!
//! Source of the numbers: ggml 0.25.3 (`ggml.h`, `ggml-common.h`). Tests compare the table against files that ggml's
//! own quantizer wrote.

/// A ggml tensor type that can occur in a GGUF file.
///
/// The discriminant is the id stored in the file.
#[allow(non_camel_case_types, missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum GgmlType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
}

/// One row of the type table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeInfo {
    /// The type.
    pub ty: GgmlType,
    /// ggml's name for it.
    pub name: &'static str,
    /// Elements per block. Blocks never cross rows.
    pub block: u32,
    /// Bytes per block.
    pub bytes: u32,
}

macro_rules! type_table {
    ($($ty:ident $block:literal $bytes:literal;)*) => {
        /// Every type that a file may hold, in order of id.
        pub const TYPES: &[TypeInfo] = &[
            $(TypeInfo { ty: GgmlType::$ty, name: stringify!($ty), block: $block, bytes: $bytes },)*
        ];

        impl GgmlType {
            /// The type's row in the table.
            pub const fn info(self) -> TypeInfo {
                match self {
                    $(GgmlType::$ty => TypeInfo { ty: self, name: stringify!($ty), block: $block, bytes: $bytes },)*
                }
            }
        }
    };
}

type_table! {
    F32     1   4;
    F16     1   2;
    Q4_0    32  18;
    Q4_1    32  20;
    Q5_0    32  22;
    Q5_1    32  24;
    Q8_0    32  34;
    Q8_1    32  36;
    Q2_K    256 84;
    Q3_K    256 110;
    Q4_K    256 144;
    Q5_K    256 176;
    Q6_K    256 210;
    Q8_K    256 292;
    IQ2_XXS 256 66;
    IQ2_XS  256 74;
    IQ3_XXS 256 98;
    IQ1_S   256 50;
    IQ4_NL  32  18;
    IQ3_S   256 110;
    IQ2_S   256 82;
    IQ4_XS  256 136;
    I8      1   1;
    I16     1   2;
    I32     1   4;
    I64     1   8;
    F64     1   8;
    IQ1_M   256 56;
    BF16    1   2;
    TQ1_0   256 54;
    TQ2_0   256 66;
    MXFP4   32  17;
    NVFP4   64  36;
    Q1_0    128 18;
    Q2_0    64  18;
}

/// Number of type ids that ggml 0.25.3 defines (`GGML_TYPE_COUNT`); ids from here on belong to other programs.
pub const TYPE_COUNT: u32 = 43;

impl GgmlType {
    /// The type with this id, or why there is none: a removed type says what it was.
    pub fn from_id(id: u32) -> Result<Self, String> {
        if let Some(info) = TYPES.iter().find(|t| t.ty as u32 == id) {
            return Ok(info.ty);
        }
        Err(match id {
            4 => "type id 4 (Q4_2), removed from ggml in 2023".into(),
            5 => "type id 5 (Q4_3), removed from ggml in 2023".into(),
            31 => "type id 31 (Q4_0_4_4, a repacked Q4_0), removed from the file format".into(),
            32 => "type id 32 (Q4_0_4_8, a repacked Q4_0), removed from the file format".into(),
            33 => "type id 33 (Q4_0_8_8, a repacked Q4_0), removed from the file format".into(),
            36 => "type id 36 (IQ4_NL_4_4, a repacked IQ4_NL), removed from the file format".into(),
            37 => "type id 37 (IQ4_NL_4_8, a repacked IQ4_NL), removed from the file format".into(),
            38 => "type id 38 (IQ4_NL_8_8, a repacked IQ4_NL), removed from the file format".into(),
            id => format!("type id {} ({}), unknown to ggml, whose ids are 0 to {}", id, id as i32, TYPE_COUNT - 1),
        })
    }

    /// ggml's name of the type.
    pub const fn name(self) -> &'static str {
        self.info().name
    }

    /// Elements per block.
    pub const fn block(self) -> u64 {
        self.info().block as u64
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> u64 {
        self.info().bytes as u64
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
