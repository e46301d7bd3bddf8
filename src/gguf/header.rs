//! The header of one GGUF file, versions 2 and 3.
//!
//! ```text
//! "GGUF" | u32 version | u64 tensor count | u64 metadata count
//! metadata:     string key | u32 value type | value
//! tensor infos: string name | u32 n_dims | n_dims × u64 ne | u32 ggml type | u64 offset in the data section
//! zero padding to general.alignment | data section
//! ```
//! A string is a u64 length and that many bytes. Everything that ggml refuses is refused here, plus what later code
//! relies on: alignments up to 1 MiB only, tensor names that are UTF-8 without NUL.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::cursor::{CUT_SHORT, Cursor, LONGEST, Place, shown};
use super::map::Map;
use super::metadata::{Entry, Metadata, Stored};
use super::tensor::SourceTensor;
use super::types::GgmlType;
use super::value::{Value, ValueType};
use crate::error::{Error, Fault, Result};

/// Alignment where `general.alignment` is absent.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment taken. Real files have 32; one page would be 4 KiB.
pub(crate) const MAX_ALIGNMENT: u64 = 1 << 20;
/// ggml keeps names in 64 bytes with a terminating zero.
pub(crate) const MAX_NAME: usize = 63;
/// Most axes of a ggml tensor.
pub(crate) const MAX_DIMS: u32 = 4;

const ALIGNMENT: &[u8] = b"general.alignment";
/// Bytes of the smallest metadata entry: key length, one byte of key, type, one byte of value.
const MIN_ENTRY: u64 = 8 + 1 + 4 + 1;
/// Bytes of the smallest tensor info: name length, n_dims, type, offset.
const MIN_INFO: u64 = 8 + 4 + 4 + 8;
/// Entries to make room for before any is seen; more grow with what the file really holds.
const FIRST_ROOM: u64 = 4096;

/// A parsed header. Tensor offsets are absolute; whether the data is there is not checked.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<SourceTensor>,
    /// Start of the data section.
    pub(crate) data_start: u64,
}

/// What the bytes at hand give.
pub(crate) enum Read {
    /// The header.
    Whole(Header),
    /// The header goes on: so many bytes from the start are needed, at least.
    Needs(u64),
}

/// Reads the header of one file of `length` bytes, of which `map` holds all or the first ones.
pub(crate) fn read(path: &Path, map: &Arc<Map>, length: u64) -> Result<Read> {
    let mut cursor = Cursor::new(path, map, length);
    let parsed = parse(path, &mut cursor, map);
    match cursor.needs() {
        Some(bytes) => Ok(Read::Needs(bytes)),
        None => parsed.map(Read::Whole),
    }
}

fn parse(path: &Path, cursor: &mut Cursor<'_>, map: &Arc<Map>) -> Result<Header> {
    let version = magic_and_version(path, cursor)?;
    let tensor_count = count(cursor, "tensors")?;
    let entry_count = count(cursor, "metadata entries")?;
    fits(cursor, entry_count, MIN_ENTRY, "metadata entries")?;

    let entries = entries(cursor, entry_count)?;
    let metadata = Metadata::new(path, Arc::clone(map), entries);
    let alignment = alignment(&metadata)?;

    cursor.place = Place::Start;
    fits(cursor, tensor_count, MIN_INFO, "tensors")?;
    let mut tensors = tensors(cursor, tensor_count, alignment)?;

    cursor.place = Place::Start;
    let end = cursor.at();
    let data_start = (end as u64).next_multiple_of(alignment);
    cursor.reach(data_start)?;
    if alignment > DEFAULT_ALIGNMENT {
        laid_out_at_default(cursor, end, data_start, map)?;
    }
    for tensor in &mut tensors {
        tensor.offset = tensor.offset.checked_add(data_start).ok_or_else(|| {
            Fault::new("ends beyond the largest file offset").file(path).tensor(&tensor.name).container()
        })?;
    }
    Ok(Header { version, alignment, metadata, tensors, data_start })
}

fn magic_and_version(path: &Path, cursor: &mut Cursor<'_>) -> Result<u32> {
    let start = cursor.bytes(0..usize::try_from(cursor.left().min(64)).unwrap_or(64));
    if start.is_empty() {
        return Err(Fault::new("the file is empty").file(path).expected("a GGUF file").remedy(CUT_SHORT).truncated());
    }
    if !start.starts_with(b"GGUF") && !b"GGUF".starts_with(start) {
        let fault = Fault::new(not_gguf(start)).file(path).offset(0).expected("the magic bytes 'GGUF'");
        return Err(fault.remedy("Give the GGUF file itself.").container());
    }
    cursor.take(4, "the magic bytes")?;
    let version = cursor.u32("the version")?;
    let fault = |found: String| Fault::new(found).file(path).offset(4).expected("version 2 or 3, little-endian");
    match version {
        2 | 3 => Ok(version),
        0 => Err(fault("GGUF version 0, which never existed".into()).remedy("The file is damaged.").container()),
        1 => Err(fault("GGUF version 1, with 32-bit lengths, which ggml no longer reads either".into())
            .remedy("Convert the original model again with a current converter.")
            .unsupported()),
        v if v & 0xffff == 0 => Err(fault(format!("a big-endian GGUF file (version {})", v.swap_bytes()))
            .remedy("Use the little-endian file of the same model; big-endian quantized data is not reliably swapped.")
            .unsupported()),
        v => Err(fault(format!("GGUF version {v}")).remedy("A newer format needs a newer ggshard.").unsupported()),
    }
}

/// What a file without the magic probably is.
fn not_gguf(start: &[u8]) -> String {
    let kinds: &[(&[u8], &str)] = &[
        (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded (`git lfs pull`)"),
        (b"<", "a web page or XML, probably the error page of a failed download"),
        (b"PK\x03\x04", "a ZIP archive, as PyTorch checkpoints are"),
        (b"\x28\xb5\x2f\xfd", "zstd-compressed data: decompress it first"),
        (b"\x1f\x8b", "gzip-compressed data: decompress it first"),
        (b"lmgg", "a GGML file from before GGUF"),
        (b"fmgg", "a GGMF file from before GGUF"),
        (b"tjgg", "a GGJT file from before GGUF"),
        (b"algg", "a GGLA adapter from before GGUF"),
        (b"gguf", "the magic in lower case, which is not GGUF"),
        (b"FUGG", "the magic with its bytes swapped, which no version of GGUF has"),
    ];
    if let Some((_, kind)) = kinds.iter().find(|(magic, _)| start.starts_with(magic)) {
        return format!("not a GGUF file but {kind}");
    }
    if start.get(8) == Some(&b'{') {
        return "not a GGUF file but probably a safetensors file".into();
    }
    format!("not a GGUF file: it starts with bytes {:02x?}", start.get(..4).unwrap_or(start))
}

fn count(cursor: &mut Cursor<'_>, what: &str) -> Result<u64> {
    let at = cursor.at();
    let count = cursor.u64(&format!("the number of {what}"))?;
    if i64::try_from(count).is_err() {
        let fault = cursor.fault_at(at, format!("the number of {what} is {}", count.cast_signed()));
        return Err(fault.expected("no negative number").container());
    }
    Ok(count)
}

/// Refuses a count that what is left of the file cannot hold.
fn fits(cursor: &Cursor<'_>, count: u64, smallest: u64, what: &str) -> Result<()> {
    if count <= cursor.left() / smallest {
        return Ok(());
    }
    let fault = cursor.fault(format!("the header promises {count} {what}, but only {} bytes are left", cursor.left()));
    Err(fault.expected(format!("at least {smallest} bytes for each")).remedy(CUT_SHORT).truncated())
}

fn room(count: u64) -> usize {
    usize::try_from(count.min(FIRST_ROOM)).unwrap_or(0)
}

fn entries(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(room(count));
    let mut seen: HashMap<&[u8], usize> = HashMap::with_capacity(room(count));
    for i in 0..count {
        cursor.place = Place::Key(i, None);
        let offset = cursor.at();
        let key = cursor.string("the key")?;
        if key.is_empty() {
            return Err(cursor.fault_at(offset, "the key is empty").expected("a name").container());
        }
        let name = cursor.bytes(key.clone());
        cursor.place = Place::Key(i, Some(name));
        match seen.entry(name) {
            Slot::Occupied(first) => return Err(twice(cursor, offset, *first.get(), "key")),
            Slot::Vacant(slot) => _ = slot.insert(offset),
        }
        let at = cursor.at();
        let id = cursor.u32("the type of the value")?;
        let ty = value_type(cursor, at, id)?;
        let value = value(cursor, ty)?;
        if name == ALIGNMENT && ty != ValueType::U32 {
            let fault = cursor.fault_at(at, format!("has type {ty}")).expected("u32");
            return Err(fault.container());
        }
        entries.push(Entry { key, offset, value });
    }
    Ok(entries)
}

fn twice(cursor: &Cursor<'_>, offset: usize, first: usize, what: &str) -> Error {
    let fault = cursor.fault_at(offset, format!("the same {what} a second time (first at byte {first})"));
    fault
        .expected(format!("every {what} once"))
        .remedy("Which one is meant cannot be known; rewrite the file.")
        .container()
}

fn value_type(cursor: &Cursor<'_>, at: usize, id: u32) -> Result<ValueType> {
    ValueType::from_id(id).ok_or_else(|| {
        let fault = cursor.fault_at(at, format!("value type {}, unknown to GGUF", id.cast_signed()));
        fault.expected("0 to 12").container()
    })
}

fn value(cursor: &mut Cursor<'_>, ty: ValueType) -> Result<Stored> {
    const WHAT: &str = "the value";
    Ok(Stored::Scalar(match ty {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::Bool => Value::Bool(u8::from_le_bytes(cursor.array(WHAT)?) != 0),
        ValueType::U64 => Value::U64(u64::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(WHAT)?)),
        ValueType::Str => return Ok(Stored::Str(cursor.string(WHAT)?)),
        ValueType::Array => return array(cursor),
    }))
}

fn array(cursor: &mut Cursor<'_>) -> Result<Stored> {
    let at = cursor.at();
    let id = cursor.u32("the type of the elements")?;
    let ty = value_type(cursor, at, id)?;
    let at = cursor.at();
    let len = cursor.u64("the length of the array")?;
    if ty == ValueType::Array {
        let fault = cursor.fault_at(at, "an array of arrays").expected("an array of plain values");
        return Err(fault.remedy("ggml does not read nested arrays either.").unsupported());
    }
    if len > LONGEST {
        let fault = cursor.fault_at(at, format!("an array of {len} elements"));
        return Err(fault.expected(format!("at most {LONGEST}")).container());
    }
    let smallest = ty.size().unwrap_or(8);
    if len > cursor.left() / smallest {
        let fault = cursor.fault_at(at, format!("an array of {len} {ty}, but only {} bytes are left", cursor.left()));
        return Err(fault.remedy(CUT_SHORT).truncated());
    }
    let bytes: Range<usize> = match ty.size() {
        // At most 2^30 elements of 8 bytes.
        Some(size) => cursor.span(len * size, "an array")?,
        None => {
            let start = cursor.at();
            for _ in 0..len {
                cursor.string("a string of an array")?;
            }
            start..cursor.at()
        }
    };
    Ok(Stored::Array { ty, len, bytes })
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    let Some(field) = metadata.get_bytes(ALIGNMENT) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = field.u64()?;
    if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
        return Ok(alignment);
    }
    let fault = field.fault(format!("is {alignment}"));
    Err(fault.expected(format!("a power of two from 1 to {MAX_ALIGNMENT}")).container())
}

fn tensors(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Result<Vec<SourceTensor>> {
    let mut tensors = Vec::with_capacity(room(count));
    let mut seen: HashMap<&[u8], usize> = HashMap::with_capacity(room(count));
    let mut next = 0u64;
    for i in 0..count {
        cursor.place = Place::Tensor(i, None);
        let info = cursor.at();
        let span = cursor.string("the name")?;
        let bytes = cursor.bytes(span);
        let name = name(cursor, info, bytes)?;
        cursor.place = Place::Tensor(i, Some(bytes));
        match seen.entry(bytes) {
            Slot::Occupied(first) => return Err(twice(cursor, info, *first.get(), "tensor")),
            Slot::Vacant(slot) => _ = slot.insert(info),
        }
        let at = cursor.at();
        let n_dims = cursor.u32("the number of dimensions")?;
        if n_dims > MAX_DIMS {
            let fault = cursor.fault_at(at, format!("{n_dims} dimensions")).expected(format!("at most {MAX_DIMS}"));
            return Err(fault.container());
        }
        let at = cursor.at();
        let mut ne = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            ne.push(cursor.u64("a dimension")?);
        }
        let id_at = cursor.at();
        let id = cursor.u32("the type")?;
        let ty = GgmlType::from_id(id).map_err(|found| {
            let fault = cursor.fault_at(id_at, found).expected("a type that a file can hold");
            fault.remedy("Quantize the original model again with current tools.").unsupported()
        })?;
        let bytes = size(cursor, at, ty, &ne)?;
        let at = cursor.at();
        let offset = cursor.u64("the offset")?;
        if offset != next {
            let fault = cursor.fault_at(at, format!("the data's offset is {offset}"));
            let fault = fault.expected(format!("{next}, where the tensor before ends, padded to {alignment}"));
            let remedy = match alignment > DEFAULT_ALIGNMENT {
                true => "A splitter may have kept the key but laid the data out at 32: use the unsplit file.",
                false => "The writer left a hole, an overlap or another order; ggml refuses the file too.",
            };
            return Err(fault.remedy(remedy).container());
        }
        next =
            bytes.checked_next_multiple_of(alignment).and_then(|padded| next.checked_add(padded)).ok_or_else(|| {
                cursor.fault_at(at, "the sizes of the tensors up to this one overflow 64 bits").container()
            })?;
        tensors.push(SourceTensor { name, ty, ne, part: 0, offset, bytes });
    }
    Ok(tensors)
}

fn name(cursor: &Cursor<'_>, at: usize, bytes: &[u8]) -> Result<String> {
    let bad = |found: String, expected: String| {
        let fault = cursor.fault_at(at, format!("the name '{}' {found}", shown(bytes))).expected(expected);
        fault.container()
    };
    if bytes.len() > MAX_NAME {
        return Err(bad(format!("is {} bytes long", bytes.len()), format!("at most {MAX_NAME}, as ggml's loader")));
    }
    if bytes.contains(&0) {
        return Err(bad("contains a zero byte, where C programs see its end".into(), "a name without".into()));
    }
    match std::str::from_utf8(bytes) {
        Ok(name) => Ok(name.to_owned()),
        Err(e) => Err(bad(format!("is not UTF-8 ({e})"), "text, which every rule can match exactly".into())),
    }
}

fn size(cursor: &Cursor<'_>, at: usize, ty: GgmlType, ne: &[u64]) -> Result<u64> {
    if let Some(bad) = ne.iter().find(|&&n| i64::try_from(n).is_err()) {
        let fault = cursor.fault_at(at, format!("a dimension of {} in shape {ne:?}", bad.cast_signed()));
        return Err(fault.expected("no negative dimension").container());
    }
    let row = ne.first().copied().unwrap_or(1);
    if !row.is_multiple_of(ty.block()) {
        let fault = cursor.fault_at(at, format!("rows of {row} elements, type {ty}"));
        return Err(fault.expected(format!("a multiple of the type's block of {} elements", ty.block())).container());
    }
    ty.tensor_bytes(ne).ok_or_else(|| {
        let fault = cursor.fault_at(at, format!("shape {ne:?} of type {ty} overflows 63 bits"));
        fault.expected("a tensor that a file can hold").container()
    })
}

/// Recognises what llama-gguf-split writes for a source whose alignment is larger than 32: it keeps the key and lays
/// the data out at 32, so that every reader sees every tensor some bytes late. The data then begins inside what should
/// be zero padding.
fn laid_out_at_default(cursor: &Cursor<'_>, end: usize, data_start: u64, map: &Map) -> Result<()> {
    let at = end.next_multiple_of(DEFAULT_ALIGNMENT as usize);
    let stop = usize::try_from(data_start).unwrap_or(usize::MAX).min(map.len());
    let Some(padding) = map.get(at..stop) else { return Ok(()) };
    let Some(first) = padding.iter().position(|&b| b != 0) else { return Ok(()) };
    let mut fault = cursor.fault_at(at + first, "data where the header is padded to the alignment");
    fault.key = Some(shown(ALIGNMENT));
    let fault = fault.expected(format!("zeros up to byte {data_start}"));
    Err(fault
        .remedy(
            "Some splitters keep the key but lay the data out at 32, which shifts every tensor; use the unsplit file.",
        )
        .container())
}
