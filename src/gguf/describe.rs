//! A summary of a set as plain data, for `ggshard inspect`: what is in the file, whether or not it can be converted.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::set::GgufSet;
use super::types::GgmlType;
use super::value::{Array, Value};

/// Characters of a string value that a preview shows.
const PREVIEW_CHARS: usize = 120;
/// Elements of an array that a preview shows.
const PREVIEW_ELEMENTS: usize = 8;

/// What a set of GGUF files holds. Serialises to the JSON of `ggshard inspect`.
#[derive(Debug, Clone, Serialize)]
pub struct Description {
    /// The path that was opened.
    pub path: PathBuf,
    /// Whether the data was absent or ignored.
    pub header_only: bool,
    /// `general.architecture`, if it is there and text.
    pub architecture: Option<String>,
    /// `general.name`, if it is there and text.
    pub name: Option<String>,
    /// `general.type`, if it is there and text.
    pub general_type: Option<String>,
    /// `general.file_type`, if it is there: what the quantizer was asked for, not what the tensors are.
    pub file_type: Option<FileType>,
    /// Number of elements of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors, padding not included.
    pub tensor_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// The files, in order.
    pub parts: Vec<PartDescription>,
    /// How many tensors and bytes there are of each type, most bytes first.
    pub types: Vec<TypeDescription>,
    /// The model's metadata, in file order.
    pub metadata: Vec<KeyDescription>,
    /// Every tensor, in file order.
    pub tensors: Vec<TensorDescription>,
}

/// The value of `general.file_type`.
#[derive(Debug, Clone, Serialize)]
pub struct FileType {
    /// The number in the file.
    pub id: u64,
    /// llama.cpp's name for it, if it has one.
    pub name: Option<&'static str>,
}

/// One file of the set.
#[derive(Debug, Clone, Serialize)]
pub struct PartDescription {
    /// The file.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
    /// Bytes before the data section.
    pub header_bytes: u64,
    /// GGUF version.
    pub version: u32,
    /// Alignment of the data.
    pub alignment: u64,
    /// Number of tensors in this file.
    pub tensors: usize,
}

/// All tensors of one type.
#[derive(Debug, Clone, Serialize)]
pub struct TypeDescription {
    /// ggml's name of the type.
    pub ty: &'static str,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements.
    pub elements: u64,
    /// Bytes, padding not included.
    pub bytes: u64,
}

/// One metadata key.
#[derive(Debug, Clone, Serialize)]
pub struct KeyDescription {
    /// The key.
    pub key: String,
    /// Type of the value.
    pub ty: &'static str,
    /// For an array, the type of its elements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub element: Option<&'static str>,
    /// Elements of an array, or bytes of a string.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// The value; long strings are cut (they end with `…`), of arrays the first elements are here. Floats are the
    /// shortest number that reads back as the stored one; what JSON has no number for (NaN, infinity) is a string.
    pub value: serde_json::Value,
}

/// One tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorDescription {
    /// The name.
    pub name: String,
    /// ggml's name of the type.
    pub ty: &'static str,
    /// Dimensions row-major, the slowest axis first.
    pub shape: Vec<u64>,
    /// Index of the part.
    pub part: usize,
    /// Offset of the data in the part's file.
    pub offset: u64,
    /// Bytes of data, padding not included.
    pub bytes: u64,
}

impl Description {
    /// Describes a set. Wrong types of well-known keys are no error here: the metadata list shows them.
    pub fn from_set(set: &GgufSet) -> Self {
        let metadata = set.metadata();
        let text = |key: &str| metadata.str(key).ok().flatten().map(cut);
        let file_type = metadata.u64("general.file_type").ok().flatten();
        let mut types: BTreeMap<GgmlType, TypeDescription> = BTreeMap::new();
        for tensor in set.tensors() {
            let empty = TypeDescription { ty: tensor.ty.name(), tensors: 0, elements: 0, bytes: 0 };
            let row = types.entry(tensor.ty).or_insert(empty);
            // Headers alone are not held to any file's size, so sums can pass 64 bits.
            row.tensors += 1;
            row.elements = row.elements.saturating_add(tensor.elements());
            row.bytes = row.bytes.saturating_add(tensor.bytes);
        }
        let mut types: Vec<TypeDescription> = types.into_values().collect();
        types.sort_by_key(|t| std::cmp::Reverse(t.bytes));
        let sum = |values: &mut dyn Iterator<Item = u64>| values.fold(0u64, u64::saturating_add);
        Description {
            path: set.path().to_path_buf(),
            header_only: set.header_only(),
            architecture: text("general.architecture"),
            name: text("general.name"),
            general_type: text("general.type"),
            file_type: file_type.map(|id| FileType { id, name: file_type_name(id) }),
            parameters: sum(&mut types.iter().map(|t| t.elements)),
            tensor_bytes: sum(&mut types.iter().map(|t| t.bytes)),
            file_bytes: sum(&mut set.parts().iter().map(|p| p.bytes())),
            parts: set
                .parts()
                .iter()
                .map(|part| PartDescription {
                    path: part.path().to_path_buf(),
                    bytes: part.bytes(),
                    header_bytes: part.header_bytes(),
                    version: part.version(),
                    alignment: part.alignment(),
                    tensors: part.tensors().len(),
                })
                .collect(),
            types,
            metadata: metadata.iter().map(|field| key(cut(&field.key()), field.value())).collect(),
            tensors: set
                .tensors()
                .iter()
                .map(|tensor| TensorDescription {
                    name: tensor.name.clone(),
                    ty: tensor.ty.name(),
                    shape: tensor.shape(),
                    part: tensor.part,
                    offset: tensor.offset,
                    bytes: tensor.bytes,
                })
                .collect(),
        }
    }
}

fn key(key: String, value: Value<'_>) -> KeyDescription {
    let (element, length) = match value {
        Value::Array(array) => (Some(array.ty().name()), Some(array.len())),
        Value::Str(bytes) => (None, Some(bytes.len() as u64)),
        _ => (None, None),
    };
    KeyDescription { key, ty: value.ty().name(), element, length, value: preview(value) }
}

fn preview(value: Value<'_>) -> serde_json::Value {
    match value {
        Value::U8(v) => v.into(),
        Value::I8(v) => v.into(),
        Value::U16(v) => v.into(),
        Value::I16(v) => v.into(),
        Value::U32(v) => v.into(),
        Value::I32(v) => v.into(),
        // Through the shortest decimal: 1e-5 as f32 is 9.999999747378752e-6 as f64, which nobody wrote.
        Value::F32(v) => v.to_string().parse().map_or(serde_json::Value::Null, float),
        Value::F64(v) => float(v),
        Value::Bool(v) => v.into(),
        Value::Str(bytes) => bytes_cut(bytes).into(),
        Value::Array(array) => elements(array),
        Value::U64(v) => v.into(),
        Value::I64(v) => v.into(),
    }
}

fn elements(array: Array<'_>) -> serde_json::Value {
    array.iter().take(PREVIEW_ELEMENTS).map(preview).collect()
}

fn float(value: f64) -> serde_json::Value {
    serde_json::Number::from_f64(value).map_or_else(|| value.to_string().into(), serde_json::Value::Number)
}

fn bytes_cut(bytes: &[u8]) -> String {
    // Four bytes are the longest character, so this prefix decides the preview.
    let start = bytes.get(..4 * (PREVIEW_CHARS + 1)).unwrap_or(bytes);
    cut(&String::from_utf8_lossy(start))
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(PREVIEW_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// llama.cpp's name of a `general.file_type`.
fn file_type_name(id: u64) -> Option<&'static str> {
    // 1024 is added when the type was guessed.
    Some(match id & !1024 {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4 MoE",
        _ => return None,
    })
}
