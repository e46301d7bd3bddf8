//! The metadata of a model: keys and values in file order, and getters that refuse a wrong type.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cursor::shown;
use super::map::Map;
use super::value::{Array, Mismatch, Value, ValueType};
use crate::error::{Error, Fault, Result};

/// One entry as kept in memory: scalars decoded, everything else a range of the mapped file.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) key: Range<usize>,
    pub(crate) offset: usize,
    pub(crate) value: Stored,
}

/// A value as kept in memory.
#[derive(Debug, Clone)]
pub(crate) enum Stored {
    Scalar(Value<'static>),
    Str(Range<usize>),
    Array { ty: ValueType, len: u64, bytes: Range<usize> },
}

/// The metadata of one file.
///
/// Every getter of one key returns `Ok(None)` if the key is absent, and [`Error::Contradiction`], naming file, key, type
/// found and type expected, if the value is of another type: nothing is ever cast silently. [`Metadata::require`]
/// makes absence an error, too: `metadata.require("general.architecture")?.str()?`.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    map: Arc<Map>,
    entries: Vec<Entry>,
    /// Indices into `entries`, sorted by key.
    by_key: Vec<usize>,
}

impl Metadata {
    pub(crate) fn new(path: &Path, map: Arc<Map>, entries: Vec<Entry>) -> Self {
        let mut by_key: Vec<usize> = (0..entries.len()).collect();
        by_key.sort_unstable_by_key(|&i| &map[entries[i].key.clone()]);
        Metadata { path: path.to_path_buf(), map, entries, by_key }
    }

    /// The file that the metadata is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every key with its value, in file order.
    pub fn iter(&self) -> impl Iterator<Item = Field<'_>> {
        self.entries.iter().map(|entry| self.field(entry))
    }

    /// A key's value, if the key is there.
    pub fn get(&self, key: &str) -> Option<Field<'_>> {
        self.get_bytes(key.as_bytes())
    }

    pub(crate) fn get_bytes(&self, key: &[u8]) -> Option<Field<'_>> {
        let found = self.by_key.binary_search_by(|&i| self.bytes(&self.entries[i].key).cmp(key)).ok()?;
        Some(self.field(&self.entries[self.by_key[found]]))
    }

    /// A key's value; it is an error if the key is absent.
    pub fn require(&self, key: &str) -> Result<Field<'_>> {
        self.get(key).ok_or_else(|| {
            let fault = Fault::new("absent from the metadata").file(&self.path).key(key);
            fault
                .remedy("The file lacks what its kind of model needs; `ggshard inspect` lists what it has.")
                .contradiction()
        })
    }

    /// An integer of any integer type that is not negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.get(key).map(|field| field.u64()).transpose()
    }

    /// An f32, exactly as stored.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.get(key).map(|field| field.f32()).transpose()
    }

    /// An f64, or an f32 widened.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|field| field.f64()).transpose()
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|field| field.bool()).transpose()
    }

    /// A string that must be UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.get(key).map(|field| field.str()).transpose()
    }

    /// An array of integers of any integer type, none negative.
    pub fn u64_array(&self, key: &str) -> Result<Option<Vec<u64>>> {
        self.get(key).map(|field| field.u64_array()).transpose()
    }

    /// An array of integers of any integer type, all fitting an i64.
    pub fn i64_array(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.get(key).map(|field| field.i64_array()).transpose()
    }

    /// An array of bools.
    pub fn bool_array(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.get(key).map(|field| field.bool_array()).transpose()
    }

    /// An array of f32.
    pub fn f32_array(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.get(key).map(|field| field.f32_array()).transpose()
    }

    /// An array of strings: its length costs nothing, [`Array::strings`] decodes them.
    pub fn string_array(&self, key: &str) -> Result<Option<Array<'_>>> {
        self.get(key).map(|field| field.string_array()).transpose()
    }

    fn bytes(&self, span: &Range<usize>) -> &[u8] {
        self.map.get(span.clone()).unwrap_or(&[])
    }

    fn field<'a>(&'a self, entry: &'a Entry) -> Field<'a> {
        let value = match &entry.value {
            Stored::Scalar(value) => *value,
            Stored::Str(span) => Value::Str(self.bytes(span)),
            Stored::Array { ty, len, bytes } => Value::Array(Array { ty: *ty, len: *len, bytes: self.bytes(bytes) }),
        };
        Field { path: &self.path, offset: entry.offset, key: self.bytes(&entry.key), value }
    }
}

/// One key and its value, with the file that they are from.
///
/// The typed getters are those of [`Value`], their errors made [`Error::Contradiction`]s that name file, key and offset.
#[derive(Debug, Clone, Copy)]
pub struct Field<'a> {
    path: &'a Path,
    offset: usize,
    key: &'a [u8],
    value: Value<'a>,
}

impl<'a> Field<'a> {
    /// The key; bytes that are not UTF-8 are replaced.
    pub fn key(&self) -> std::borrow::Cow<'a, str> {
        String::from_utf8_lossy(self.key)
    }

    /// The key as stored.
    pub fn key_bytes(&self) -> &'a [u8] {
        self.key
    }

    /// The value.
    pub fn value(&self) -> Value<'a> {
        self.value
    }

    /// A fault at this entry, for checks of a value's meaning.
    pub fn fault(&self, found: impl Into<String>) -> Fault {
        Fault::new(found).file(self.path).key(shown(self.key)).offset(self.offset as u64)
    }

    /// As [`Value::as_u64`].
    pub fn u64(&self) -> Result<u64> {
        self.value.as_u64().map_err(|m| self.error(m))
    }

    /// As [`Value::as_i64`].
    pub fn i64(&self) -> Result<i64> {
        self.value.as_i64().map_err(|m| self.error(m))
    }

    /// As [`Value::as_f32`].
    pub fn f32(&self) -> Result<f32> {
        self.value.as_f32().map_err(|m| self.error(m))
    }

    /// As [`Value::as_f64`].
    pub fn f64(&self) -> Result<f64> {
        self.value.as_f64().map_err(|m| self.error(m))
    }

    /// As [`Value::as_bool`].
    pub fn bool(&self) -> Result<bool> {
        self.value.as_bool().map_err(|m| self.error(m))
    }

    /// As [`Value::as_str`].
    pub fn str(&self) -> Result<&'a str> {
        self.value.as_str().map_err(|m| self.error(m))
    }

    /// As [`Value::as_u64s`].
    pub fn u64_array(&self) -> Result<Vec<u64>> {
        self.value.as_u64s().map_err(|m| self.error(m))
    }

    /// As [`Value::as_i64s`].
    pub fn i64_array(&self) -> Result<Vec<i64>> {
        self.value.as_i64s().map_err(|m| self.error(m))
    }

    /// As [`Value::as_bools`].
    pub fn bool_array(&self) -> Result<Vec<bool>> {
        self.value.as_bools().map_err(|m| self.error(m))
    }

    /// As [`Value::as_f32s`].
    pub fn f32_array(&self) -> Result<Vec<f32>> {
        self.value.as_f32s().map_err(|m| self.error(m))
    }

    /// As [`Value::as_strings`].
    pub fn string_array(&self) -> Result<Array<'a>> {
        self.value.as_strings().map_err(|m| self.error(m))
    }

    fn error(&self, mismatch: Mismatch) -> Error {
        self.fault(mismatch.found).expected(mismatch.expected).contradiction()
    }
}
