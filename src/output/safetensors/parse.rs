//! Strict parsing of a safetensors header's JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{LENGTH_FIELD, METADATA_KEY, MOST_DIMENSIONS, SafetensorsHeader, TensorInfo};
use crate::dtype::Dtype;
use crate::error::{Fault, Result};

/// Parses `json` (padding included) and checks it against the `data_bytes` that follow it in the file.
pub(super) fn header(json: &[u8], data_bytes: u64, path: &Path) -> Result<SafetensorsHeader> {
    if json.first() != Some(&b'{') {
        return Err(Fault::new("not a safetensors file: the header is not a JSON object")
            .file(path)
            .offset(LENGTH_FIELD)
            .expected("'{'")
            .checkpoint());
    }
    let mut current = None;
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let parsed = Seed { current: &mut current }.deserialize(&mut deserializer).and_then(|h| {
        deserializer.end()?;
        Ok(h)
    });
    let (mut tensors, metadata) = match parsed {
        Ok(header) => header,
        Err(e) => {
            let fault = Fault::new(format!("the header is not a safetensors header: {e}"))
                .file(path)
                .offset(LENGTH_FIELD + byte_of(json, &e));
            return Err(match current {
                Some(name) => fault.tensor(name).checkpoint(),
                None => fault.checkpoint(),
            });
        }
    };
    if let Some(name) = first_duplicate(&tensors) {
        return Err(Fault::new("two tensors of the file have this name").file(path).tensor(name).checkpoint());
    }
    tensors.sort_by_key(|tensor| tensor.offsets);
    contiguous(&tensors, data_bytes, path)?;
    Ok(SafetensorsHeader { tensors, metadata, header_bytes: LENGTH_FIELD + json.len() as u64, data_bytes })
}

/// The first name, in alphabetical order, that two of `tensors` share.
pub(super) fn first_duplicate(tensors: &[TensorInfo]) -> Option<&str> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Proves that the tensors, sorted by offset, fill `data_bytes` exactly and that each has the size of its shape.
fn contiguous(tensors: &[TensorInfo], data_bytes: u64, path: &Path) -> Result<()> {
    let mut reached = 0;
    let fault = |tensor: &TensorInfo, found: String| Fault::new(found).file(path).tensor(&tensor.name);
    for tensor in tensors {
        let (begin, end) = tensor.offsets;
        if end < begin {
            return Err(fault(tensor, format!("its data ends ({end}) before it begins ({begin})")).checkpoint());
        }
        if begin > reached {
            let found = format!("a gap of {} bytes before its data", begin - reached);
            return Err(fault(tensor, found).expected(format!("data at {reached}")).checkpoint());
        }
        if begin < reached {
            let found = format!("its data at {begin} overlaps the tensor before it");
            return Err(fault(tensor, found).expected(format!("data at {reached}")).checkpoint());
        }
        let Some(size) = tensor.dtype.tensor_bytes(&tensor.shape) else {
            let found = format!("the size of {} {:?} overflows", tensor.dtype, tensor.shape);
            return Err(fault(tensor, found).checkpoint());
        };
        if end - begin != size {
            let found = format!("{} bytes of data", end - begin);
            let expected = format!("{size} bytes for {} {:?}", tensor.dtype, tensor.shape);
            return Err(fault(tensor, found).expected(expected).checkpoint());
        }
        if end > data_bytes {
            return Err(fault(tensor, format!("the file ends {} bytes before its data does", end - data_bytes))
                .remedy("The file was cut: copy or convert it again")
                .truncated());
        }
        reached = end;
    }
    if reached < data_bytes {
        return Err(Fault::new(format!("{} trailing bytes that belong to no tensor", data_bytes - reached))
            .file(path)
            .remedy("Something was appended to the file: copy or convert it again")
            .checkpoint());
    }
    Ok(())
}

/// The byte of `json` that an error's line and column stand for.
fn byte_of(json: &[u8], error: &serde_json::Error) -> u64 {
    let lines = error.line().saturating_sub(1);
    let line_start: usize = json.split_inclusive(|&b| b == b'\n').take(lines).map(<[u8]>::len).sum();
    (line_start + error.column().saturating_sub(1)) as u64
}

/// The whole object. Tensors are listed as they come, so that a name given twice is seen (a map would keep the last).
struct Seed<'a> {
    /// The tensor being read, for messages.
    current: &'a mut Option<String>,
}

type Parsed = (Vec<TensorInfo>, BTreeMap<String, String>);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Parsed;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Parsed, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                if metadata.is_some() {
                    return Err(de::Error::duplicate_field(METADATA_KEY));
                }
                metadata = Some(map.next_value::<Strings>()?.0);
            } else {
                *self.current = Some(name);
                let entry: Entry = map.next_value()?;
                let name = self.current.take().unwrap_or_default();
                tensors.push(TensorInfo {
                    name,
                    dtype: entry.dtype,
                    shape: entry.shape.0,
                    offsets: (entry.data_offsets[0], entry.data_offsets[1]),
                });
            }
        }
        Ok((tensors, metadata.unwrap_or_default()))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// Dimensions, with a bound on their number so that a header cannot ask for much more memory than its own size.
pub(crate) struct Shape(pub(crate) Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MOST_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == MOST_DIMENSIONS {
                        return Err(de::Error::invalid_length(shape.len() + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}

/// A map of strings without a key given twice.
struct Strings(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                let mut strings = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if strings.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("the metadata key '{key}' is given twice")));
                    }
                    strings.insert(key, value);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
