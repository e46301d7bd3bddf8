//! The header of a safetensors file: what ggshard writes, and a strict reader.
//!
//! ```text
//! 0        8                                    header_bytes (a multiple of 4,096)             end of file
//! | u64 LE | JSON, padded with spaces           | tensor | tensor | …  no gap, no overlap      |
//! ```
//!
//! The JSON is one object: tensor name → `{"dtype","shape","data_offsets":[begin,end]}`, offsets relative to the end of
//! the header, and the optional `__metadata__`, a map of strings.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::Serialize;

use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::regular;

mod parse;

pub(crate) use parse::Shape;

/// Data starts at a multiple of this many bytes, so that a mapped or directly read file is page-aligned.
pub const DATA_ALIGNMENT: u64 = 4096;
/// The largest header JSON that is written. Readers refuse more than [`READ_LIMIT`].
pub const WRITE_LIMIT: u64 = 90_000_000;
/// The largest header JSON that the official readers accept.
pub const READ_LIMIT: u64 = 100_000_000;
/// The most dimensions a tensor may have; PyTorch allows no more.
pub const MOST_DIMENSIONS: usize = 64;

/// Bytes of the length field in front of the JSON.
const LENGTH_FIELD: u64 = 8;
const METADATA_KEY: &str = "__metadata__";

/// One tensor of a file, in file order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name that loaders look up.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major, slowest axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// First byte and the byte after the last, relative to the data section.
    pub offsets: (u64, u64),
}

/// The header of one safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsHeader {
    /// The tensors, in the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// The `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// Bytes before the data section: length field, JSON and padding.
    pub header_bytes: u64,
    /// Bytes of the data section.
    pub data_bytes: u64,
}

/// Sorts tensors into an order in which none is misaligned: wide element types first, otherwise as given.
///
/// Then every tensor's offset is a multiple of its element size, because every earlier tensor's length is a multiple of
/// a size at least as large (sizes are powers of two).
pub fn sort_wide_first<T>(tensors: &mut [T], dtype: impl Fn(&T) -> Dtype) {
    tensors.sort_by_key(|tensor| std::cmp::Reverse(dtype(tensor).bytes()));
}

/// The most bytes that one tensor adds to the header's JSON, whatever its offsets turn out to be. A planner adds these
/// up to split parts before [`WRITE_LIMIT`].
pub fn entry_bytes(name: &str, dtype: Dtype, shape: &[u64]) -> u64 {
    const LONGEST_NUMBER: u64 = 20;
    let escaped = serde_json::to_string(name).map_or(6 * name.len(), |text| text.len());
    let fixed = r#":{"dtype":"","shape":[],"data_offsets":[,]},"#.len() + dtype.name().len();
    (escaped + fixed) as u64 + shape.len() as u64 * (LONGEST_NUMBER + 1) + 2 * LONGEST_NUMBER
}

impl SafetensorsHeader {
    /// Lays out `tensors` (name, dtype, shape), given in file order, without a gap.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] for a name that is empty, reserved or given twice, a shape whose size overflows, or a header
    /// beyond [`WRITE_LIMIT`]; [`Error::Audit`] when the order leaves a tensor misaligned for its element size (see
    /// [`sort_wide_first`]).
    pub fn layout<N: Into<String>>(
        tensors: impl IntoIterator<Item = (N, Dtype, Vec<u64>)>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut laid_out = Vec::new();
        let mut begin = 0_u64;
        for (name, dtype, shape) in tensors {
            let name = name.into();
            if name.is_empty() || name == METADATA_KEY {
                return Err(Fault::new("this name cannot be written to a safetensors file").tensor(name).layout());
            }
            if shape.len() > MOST_DIMENSIONS {
                let found = format!("{} dimensions", shape.len());
                return Err(Fault::new(found).tensor(name).expected(format!("at most {MOST_DIMENSIONS}")).layout());
            }
            let end = dtype.tensor_bytes(&shape).and_then(|bytes| begin.checked_add(bytes));
            let Some(end) = end else {
                return Err(Fault::new(format!("the size of {dtype} {shape:?} overflows")).tensor(name).layout());
            };
            // The data section starts at a multiple of 4,096, so relative alignment is absolute alignment.
            if !begin.is_multiple_of(dtype.bytes()) {
                return Err(Fault::new(format!("{dtype} data would be misaligned"))
                    .tensor(name)
                    .offset(begin)
                    .expected("wide element types first")
                    .audit());
            }
            laid_out.push(TensorInfo { name, dtype, shape, offsets: (begin, end) });
            begin = end;
        }
        if let Some(name) = parse::first_duplicate(&laid_out) {
            return Err(Fault::new("two tensors of one file have this name").tensor(name).layout());
        }
        let mut header = SafetensorsHeader { tensors: laid_out, metadata, header_bytes: 0, data_bytes: begin };
        header.header_bytes = header.to_bytes()?.len() as u64;
        if begin.checked_add(header.header_bytes).is_none() {
            return Err(Fault::new("the size of the file overflows").layout());
        }
        Ok(header)
    }

    /// The bytes of the file before its data: length, JSON and padding. The same header gives the same bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; LENGTH_FIELD as usize];
        bytes.push(b'{');
        if !self.metadata.is_empty() {
            push_json(&mut bytes, METADATA_KEY)?;
            bytes.push(b':');
            push_json(&mut bytes, &self.metadata)?;
        }
        for tensor in &self.tensors {
            if bytes.len() > LENGTH_FIELD as usize + 1 {
                bytes.push(b',');
            }
            push_json(&mut bytes, &tensor.name)?;
            bytes.extend_from_slice(br#":{"dtype":"#);
            push_json(&mut bytes, &tensor.dtype)?;
            bytes.extend_from_slice(br#","shape":"#);
            push_json(&mut bytes, &tensor.shape)?;
            bytes.extend_from_slice(br#","data_offsets":"#);
            push_json(&mut bytes, &tensor.offsets)?;
            bytes.push(b'}');
        }
        bytes.push(b'}');
        bytes.resize((bytes.len() as u64).next_multiple_of(DATA_ALIGNMENT) as usize, b' ');
        let json = bytes.len() as u64 - LENGTH_FIELD;
        if json > WRITE_LIMIT {
            return Err(Fault::new(format!("a header of {json} bytes for {} tensors", self.tensors.len()))
                .expected(format!("at most {WRITE_LIMIT} bytes, since readers refuse more than {READ_LIMIT}"))
                .remedy("choose a smaller --part-size, so that a part holds fewer tensors")
                .layout());
        }
        bytes[..LENGTH_FIELD as usize].copy_from_slice(&json.to_le_bytes());
        Ok(bytes)
    }

    /// Length of the whole file, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.header_bytes.saturating_add(self.data_bytes)
    }

    /// Reads and checks the header of the file at `path`. Reads no tensor data.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] for a file that is not safetensors or whose header contradicts itself or the file's
    /// length, [`Error::Truncated`] for one that ends before its last tensor, [`Error::Io`] otherwise.
    pub fn read(path: &Path) -> Result<Self> {
        let (mut file, length) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
        Self::read_from(&mut file, length, path)
    }

    /// As [`SafetensorsHeader::read`], from a reader at the beginning of a file of `file_bytes` bytes; `path` is for
    /// messages only.
    pub fn read_from(reader: &mut impl Read, file_bytes: u64, path: &Path) -> Result<Self> {
        let Some(most) = file_bytes.checked_sub(LENGTH_FIELD) else {
            return Err(Fault::new(format!("a file of {file_bytes} bytes is not a safetensors file"))
                .file(path)
                .expected("at least the 8 bytes of the header's length")
                .checkpoint());
        };
        let mut field = [0; LENGTH_FIELD as usize];
        reader.read_exact(&mut field).map_err(|e| Error::io("read the header's length of", path, e))?;
        let json_bytes = u64::from_le_bytes(field);
        if json_bytes > most {
            return Err(Fault::new(format!(
                "not a safetensors file, or one that was cut: its first 8 bytes promise a header of {json_bytes} bytes"
            ))
            .file(path)
            .expected(format!("at most the {most} bytes that follow"))
            .remedy("Check that this is the file you mean; if it is, copy or convert it again")
            .checkpoint());
        }
        if json_bytes > READ_LIMIT {
            return Err(Fault::new(format!("a header of {json_bytes} bytes is too large"))
                .file(path)
                .expected(format!("at most {READ_LIMIT} bytes"))
                .remedy("Write the tensors to more, smaller files")
                .checkpoint());
        }
        let mut json = vec![0; json_bytes as usize];
        reader.read_exact(&mut json).map_err(|e| Error::io("read the header of", path, e))?;
        parse::header(&json, most - json_bytes, path)
    }
}

fn push_json<T: Serialize + ?Sized>(bytes: &mut Vec<u8>, value: &T) -> Result<()> {
    serde_json::to_writer(bytes, value)
        .map_err(|e| Fault::new(format!("a header value cannot be written as JSON: {e}")).audit())
}
