//! Metadata values: 13 types, scalars decoded, strings and arrays left where they are in the file.

/// A value of another type than was asked for, or out of range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// What the value is.
    pub found: String,
    /// What was asked for.
    pub expected: &'static str,
}

impl Mismatch {
    fn new(found: impl Into<String>, expected: &'static str) -> Self {
        Mismatch { found: found.into(), expected }
    }
}

/// The type of a metadata value. The discriminant is the id stored in the file.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this id.
    pub const fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => ValueType::U8,
            1 => ValueType::I8,
            2 => ValueType::U16,
            3 => ValueType::I16,
            4 => ValueType::U32,
            5 => ValueType::I32,
            6 => ValueType::F32,
            7 => ValueType::Bool,
            8 => ValueType::Str,
            9 => ValueType::Array,
            10 => ValueType::U64,
            11 => ValueType::I64,
            12 => ValueType::F64,
            _ => return None,
        })
    }

    /// The type's short name.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::Str => "str",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }

    /// Bytes of one value; none for strings and arrays, whose size varies.
    pub const fn size(self) -> Option<u64> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::Str | ValueType::Array => None,
        }
    }
}

impl std::fmt::Display for ValueType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Not necessarily UTF-8.
    Str(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value's type.
    pub const fn ty(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The type in words: an array says of what and how many.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {} {}", array.len(), array.ty()),
            value => value.ty().name().to_owned(),
        }
    }

    /// An integer of any integer type, if it is not negative.
    pub fn as_u64(&self) -> Result<u64, Mismatch> {
        let signed = |v: i64| u64::try_from(v).map_err(|_| Mismatch::new(format!("is {v}"), "no negative number"));
        match *self {
            Value::U8(v) => Ok(v.into()),
            Value::U16(v) => Ok(v.into()),
            Value::U32(v) => Ok(v.into()),
            Value::U64(v) => Ok(v),
            Value::I8(v) => signed(v.into()),
            Value::I16(v) => signed(v.into()),
            Value::I32(v) => signed(v.into()),
            Value::I64(v) => signed(v),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => {
                Err(self.unlike("an integer"))
            }
        }
    }

    /// An integer of any integer type, if it fits.
    pub fn as_i64(&self) -> Result<i64, Mismatch> {
        match *self {
            Value::U8(v) => Ok(v.into()),
            Value::U16(v) => Ok(v.into()),
            Value::U32(v) => Ok(v.into()),
            Value::U64(v) => {
                i64::try_from(v).map_err(|_| Mismatch::new(format!("is {v}"), "at most 9223372036854775807"))
            }
            Value::I8(v) => Ok(v.into()),
            Value::I16(v) => Ok(v.into()),
            Value::I32(v) => Ok(v.into()),
            Value::I64(v) => Ok(v),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => {
                Err(self.unlike("an integer"))
            }
        }
    }

    /// An f32, exactly as stored. An f64 is not narrowed.
    pub fn as_f32(&self) -> Result<f32, Mismatch> {
        match *self {
            Value::F32(v) => Ok(v),
            _ => Err(self.unlike("f32")),
        }
    }

    /// An f64, or an f32, which an f64 holds exactly.
    pub fn as_f64(&self) -> Result<f64, Mismatch> {
        match *self {
            Value::F32(v) => Ok(v.into()),
            Value::F64(v) => Ok(v),
            _ => Err(self.unlike("f32 or f64")),
        }
    }

    /// A bool. Any non-zero byte is true.
    pub fn as_bool(&self) -> Result<bool, Mismatch> {
        match *self {
            Value::Bool(v) => Ok(v),
            _ => Err(self.unlike("bool")),
        }
    }

    /// The bytes of a string.
    pub fn as_bytes(&self) -> Result<&'a [u8], Mismatch> {
        match *self {
            Value::Str(v) => Ok(v),
            _ => Err(self.unlike("str")),
        }
    }

    /// A string that must be UTF-8.
    pub fn as_str(&self) -> Result<&'a str, Mismatch> {
        std::str::from_utf8(self.as_bytes()?).map_err(|e| Mismatch::new(format!("is not UTF-8: {e}"), "text"))
    }

    /// An array of any element type.
    pub fn as_array(&self) -> Result<Array<'a>, Mismatch> {
        match *self {
            Value::Array(v) => Ok(v),
            _ => Err(self.unlike("an array")),
        }
    }

    /// An array of integers of any integer type, none negative.
    pub fn as_u64s(&self) -> Result<Vec<u64>, Mismatch> {
        let array = self.integers()?;
        array.iter().enumerate().map(|(i, v)| v.as_u64().map_err(|f| element(f, i))).collect()
    }

    /// An array of integers of any integer type, all fitting an i64.
    pub fn as_i64s(&self) -> Result<Vec<i64>, Mismatch> {
        let array = self.integers()?;
        array.iter().enumerate().map(|(i, v)| v.as_i64().map_err(|f| element(f, i))).collect()
    }

    fn integers(&self) -> Result<Array<'a>, Mismatch> {
        let expected = "an array of integers";
        let Value::Array(array) = *self else { return Err(self.unlike(expected)) };
        match array.ty {
            ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => Ok(array),
            ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => Ok(array),
            ValueType::F32 | ValueType::F64 | ValueType::Bool | ValueType::Str | ValueType::Array => {
                Err(self.unlike(expected))
            }
        }
    }

    /// An array of bools. Any non-zero byte is true.
    pub fn as_bools(&self) -> Result<Vec<bool>, Mismatch> {
        match *self {
            Value::Array(array) if array.ty == ValueType::Bool => Ok(array.bytes.iter().map(|&b| b != 0).collect()),
            _ => Err(self.unlike("an array of bool")),
        }
    }

    /// An array of f32.
    pub fn as_f32s(&self) -> Result<Vec<f32>, Mismatch> {
        match *self {
            Value::Array(array) if array.ty == ValueType::F32 => {
                Ok(array.bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
            }
            _ => Err(self.unlike("an array of f32")),
        }
    }

    /// An array of strings, whose bytes [`Array::strings`] then gives.
    pub fn as_strings(&self) -> Result<Array<'a>, Mismatch> {
        match *self {
            Value::Array(array) if array.ty == ValueType::Str => Ok(array),
            _ => Err(self.unlike("an array of str")),
        }
    }

    fn unlike(&self, expected: &'static str) -> Mismatch {
        Mismatch::new(format!("has type {}", self.type_name()), expected)
    }
}

fn element(mismatch: Mismatch, i: usize) -> Mismatch {
    Mismatch { found: format!("element {i} {}", mismatch.found), ..mismatch }
}

/// An array value: its bytes as the file holds them, decoded on demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(crate) ty: ValueType,
    pub(crate) len: u64,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Type of the elements.
    pub const fn ty(&self) -> ValueType {
        self.ty
    }

    /// Number of elements.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let Array { ty, mut bytes, .. } = *self;
        std::iter::from_fn(move || {
            fn next<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
                let (first, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(*first)
            }
            match ty {
                ValueType::U8 => next(&mut bytes).map(|b| Value::U8(u8::from_le_bytes(b))),
                ValueType::I8 => next(&mut bytes).map(|b| Value::I8(i8::from_le_bytes(b))),
                ValueType::U16 => next(&mut bytes).map(|b| Value::U16(u16::from_le_bytes(b))),
                ValueType::I16 => next(&mut bytes).map(|b| Value::I16(i16::from_le_bytes(b))),
                ValueType::U32 => next(&mut bytes).map(|b| Value::U32(u32::from_le_bytes(b))),
                ValueType::I32 => next(&mut bytes).map(|b| Value::I32(i32::from_le_bytes(b))),
                ValueType::F32 => next(&mut bytes).map(|b| Value::F32(f32::from_le_bytes(b))),
                ValueType::Bool => next(&mut bytes).map(|[b]| Value::Bool(b != 0)),
                ValueType::U64 => next(&mut bytes).map(|b| Value::U64(u64::from_le_bytes(b))),
                ValueType::I64 => next(&mut bytes).map(|b| Value::I64(i64::from_le_bytes(b))),
                ValueType::F64 => next(&mut bytes).map(|b| Value::F64(f64::from_le_bytes(b))),
                ValueType::Str => {
                    let length = usize::try_from(u64::from_le_bytes(next(&mut bytes)?)).ok()?;
                    let (string, rest) = bytes.split_at_checked(length)?;
                    bytes = rest;
                    Some(Value::Str(string))
                }
                // Nested arrays are refused when the file is read.
                ValueType::Array => None,
            }
        })
    }

    /// The strings of an array of strings, as bytes; nothing for other element types.
    pub fn strings(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.iter().filter_map(|value| match value {
            Value::Str(bytes) => Some(bytes),
            _ => None,
        })
    }
}
