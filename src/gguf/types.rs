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

    /// The type of that exact name.
    pub fn from_name(name: &str) -> Option<Self> {
        TYPES.iter().find(|t| t.name == name).map(|t| t.ty)
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

    /// Bytes of a tensor with these dimensions (fastest first; none for a single element).
    ///
    /// None if a row is not whole blocks, or if elements or bytes, counting a zero-sized axis as one, pass 2^63 - 1:
    /// so no product of some of the axes overflows either.
    pub fn tensor_bytes(self, ne: &[u64]) -> Option<u64> {
        let fits = |n: u64| i64::try_from(n).is_ok().then_some(n);
        let row = ne.first().copied().unwrap_or(1);
        if !row.is_multiple_of(self.block()) {
            return None;
        }
        let elements = ne.iter().try_fold(1u64, |n, &d| n.checked_mul(d.max(1)).and_then(fits))?;
        let blocks = elements.div_ceil(self.block());
        let bytes = blocks.checked_mul(self.block_bytes()).and_then(fits)?;
        Some(if ne.contains(&0) { 0 } else { bytes })
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of ids as ggml documents it, typed in a second time from `ggml.h` and `ggml-common.h`.
    const DOCUMENTED: &str = "0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, \
        9 Q8_1 32 36, 10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, \
        15 Q8_K 256 292, 16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, \
        21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136, 24 I8 1 1, 25 I16 1 2, 26 I32 1 4, 27 I64 1 8, \
        28 F64 1 8, 29 IQ1_M 256 56, 30 BF16 1 2, 34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36, \
        41 Q1_0 128 18, 42 Q2_0 64 18";

    #[test]
    fn every_id_has_its_documented_block() {
        let table: Vec<String> =
            TYPES.iter().map(|t| format!("{} {} {} {}", t.ty as u32, t.name, t.block, t.bytes)).collect();
        assert_eq!(table.join(", "), DOCUMENTED);
        assert!(TYPES.iter().all(|t| t.ty.info() == *t && t.ty.to_string() == t.name));
    }

    #[test]
    fn all_43_ids_are_known_or_refused_by_name() {
        for id in 0..TYPE_COUNT {
            match GgmlType::from_id(id) {
                Ok(ty) => assert_eq!(ty as u32, id),
                Err(why) => assert!(why.contains(&format!("id {id} (")) && why.contains("removed"), "{why}"),
            }
        }
        assert_eq!((0..TYPE_COUNT).filter(|&id| GgmlType::from_id(id).is_err()).count(), 8);
        for id in [TYPE_COUNT, 1000, u32::MAX] {
            assert!(GgmlType::from_id(id).unwrap_err().contains("unknown"));
        }
        assert!(GgmlType::from_id(u32::MAX).unwrap_err().contains("-1"));
    }

    #[test]
    fn sizes_that_overflow_or_split_a_block_are_none() {
        assert_eq!(GgmlType::Q4_K.tensor_bytes(&[512, 3]), Some(6 * 144));
        assert_eq!(GgmlType::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(GgmlType::Q8_0.tensor_bytes(&[]), None);
        assert_eq!(GgmlType::Q4_K.tensor_bytes(&[128, 2]), None);
        assert_eq!(GgmlType::Q8_0.tensor_bytes(&[0]), Some(0));
        assert_eq!(GgmlType::F32.tensor_bytes(&[4, 0, 7]), Some(0));
        assert_eq!(GgmlType::F32.tensor_bytes(&[0, 1 << 40, 1 << 40]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[u64::MAX, 2]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[1 << 62]), None);
        assert_eq!(GgmlType::I8.tensor_bytes(&[i64::MAX as u64]), Some(i64::MAX as u64));
        assert_eq!(GgmlType::I8.tensor_bytes(&[1 << 63]), None);
    }
}
