//! A GGUF model as one set of parts: a single file, or a split set checked as a whole.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cursor::CUT_SHORT;
use super::discover::{self, SplitName};
use super::header::Header;
use super::map::{Advice, Map};
use super::mark::Mark;
use super::metadata::{Field, Metadata};
use super::reader::{OpenOptions, Reader};
use super::tensor::SourceTensor;
use super::value::Value;
use crate::error::{Error, Fault, Result};

const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// One file of a set.
#[derive(Debug)]
pub struct Part {
    reader: Reader,
    /// The file from its start, at least up to the end of the header.
    start: Arc<Map>,
    header_bytes: u64,
    version: u32,
    alignment: u64,
    tensors: Range<usize>,
}

impl Part {
    /// The file, as it was given or found beside the file that was given.
    pub fn path(&self) -> &Path {
        self.reader.path()
    }

    /// Size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.reader.bytes()
    }

    /// Whether the file is mapped (or was in memory from the start), rather than read into buffers.
    pub fn is_mapped(&self) -> bool {
        self.reader.whole().is_some()
    }

    /// Bytes up to the start of the data section, or the whole file if it ends before.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// GGUF version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the data section and of every tensor in it.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Indices of this part's tensors in [`GgufSet::tensors`].
    pub fn tensors(&self) -> Range<usize> {
        self.tensors.clone()
    }

    /// BLAKE3 of the first [`Part::header_bytes`] bytes, in hexadecimal: it identifies names, shapes, types and metadata.
    pub fn header_blake3(&self) -> Result<String> {
        let header = usize::try_from(self.header_bytes).ok().and_then(|end| self.start.get(..end));
        let header =
            header.ok_or_else(|| Fault::new("the file ends inside its header").file(self.path()).truncated())?;
        Ok(blake3::hash(header).to_hex().to_string())
    }

    /// What tells this file from another of the same size and header. Reads a few pages.
    pub fn mark(&self) -> Result<Mark> {
        self.reader.mark()
    }
}

/// A whole GGUF model: the parts, the metadata of the first, and the tensors of all.
#[derive(Debug)]
pub struct GgufSet {
    path: PathBuf,
    parts: Vec<Part>,
    metadata: Metadata,
    tensors: Vec<SourceTensor>,
    /// Indices into `tensors`, sorted by name.
    by_name: Vec<usize>,
    header_only: bool,
}

impl GgufSet {
    /// Opens the model that a path stands for: a file, any part of a split set, or a folder that holds exactly one model.
    /// Its bytes are read, not mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read; [`Error::Container`], [`Error::Unsupported`] or [`Error::Truncated`] if
    /// one is not a sound GGUF file; [`Error::Split`] if the parts are not one complete set, or the folder not one model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, OpenOptions::default())
    }

    /// Opens a model whose data may be absent: every check but that of extents, and [`GgufSet::read`] is an error.
    pub fn open_header_only(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, OpenOptions { header_only: true, ..OpenOptions::default() })
    }

    /// As [`GgufSet::open`], with a choice of how bytes are fetched and whether they must be there.
    pub fn open_with(path: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        let path = path.as_ref();
        let located = discover::locate(path)?;
        let mut files = Vec::with_capacity(located.files.len());
        for (i, file) in located.files.into_iter().enumerate() {
            let reader = Reader::open(&file, options)?;
            let (start, header) = reader.header()?;
            match &located.split {
                Some(split) if split.count > 1 => check_part(&header.metadata, i, split)?,
                _ => check_single(&header.metadata, &file)?,
            }
            if !options.header_only {
                extents(&reader, &header)?;
            }
            files.push((reader, start, header));
        }
        Self::assemble(path, options.header_only, located.split, files)
    }

    /// A single whole file that is already in memory. The path is only a name, for messages.
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self> {
        let path = path.as_ref();
        let reader = Reader::memory(path, Map::from_vec(bytes));
        let (start, header) = reader.header()?;
        check_single(&header.metadata, path)?;
        extents(&reader, &header)?;
        Self::assemble(path, false, None, vec![(reader, start, header)])
    }

    fn assemble(
        path: &Path,
        header_only: bool,
        split: Option<SplitName>,
        files: Vec<(Reader, Arc<Map>, Header)>,
    ) -> Result<Self> {
        let total: usize = files.iter().map(|(_, _, header)| header.tensors.len()).sum();
        let mut parts: Vec<Part> = Vec::with_capacity(files.len());
        let mut tensors = Vec::with_capacity(total);
        let mut metadata: Option<Metadata> = None;
        for (i, (reader, start, header)) in files.into_iter().enumerate() {
            check_total(&header.metadata, total, split.as_ref().map_or(1, |s| s.count))?;
            let first = tensors.len();
            tensors.extend(header.tensors.into_iter().map(|tensor| SourceTensor { part: i, ..tensor }));
            parts.push(Part {
                header_bytes: header.data_start.min(reader.bytes()),
                reader,
                start,
                version: header.version,
                alignment: header.alignment,
                tensors: first..tensors.len(),
            });
            match &metadata {
                None => metadata = Some(header.metadata),
                Some(model) => check_keys(model, &header.metadata)?,
            }
        }
        let metadata = metadata.ok_or_else(|| Fault::new("a set without files").file(path).split())?;

        let mut by_name: Vec<usize> = (0..tensors.len()).collect();
        by_name.sort_unstable_by(|&a, &b| tensors[a].name.cmp(&tensors[b].name).then(a.cmp(&b)));
        if let Some(twice) = by_name.windows(2).find(|w| tensors[w[0]].name == tensors[w[1]].name) {
            let (first, second) = (&tensors[twice[0]], &tensors[twice[1]]);
            let found = format!("also in {}", parts[first.part].path().display());
            let fault = Fault::new(found).file(parts[second.part].path()).tensor(&second.name);
            let fault = fault.expected("every tensor in one part only");
            return Err(fault.remedy("The parts are not of one split; download the set again.").split());
        }
        Ok(GgufSet { path: path.to_path_buf(), parts, metadata, tensors, by_name, header_only })
    }

    /// The path that was opened, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The model's metadata: that of the first part.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Every tensor: part after part, in the order of each file.
    pub fn tensors(&self) -> &[SourceTensor] {
        &self.tensors
    }

    /// Index of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        let found = self.by_name.binary_search_by(|&i| self.tensors[i].name.as_str().cmp(name)).ok()?;
        Some(self.by_name[found])
    }

    /// The stored bytes of a tensor, padding not included. Where the file is not mapped, that is a copy of all of them;
    /// [`GgufSet::read`] takes a part into a buffer.
    pub fn data(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let (tensor, part) = self.tensor(index)?;
        let range = self.place(tensor, 0..tensor.bytes)?;
        let in_memory = part.reader.whole().and_then(|whole| whole.get(range.start as usize..range.end as usize));
        if let Some(data) = in_memory {
            return Ok(Cow::Borrowed(data));
        }
        let mut buffer = Vec::new();
        let length = part.reader.read(range, Some(&tensor.name), &mut buffer)?.len();
        buffer.truncate(length);
        Ok(Cow::Owned(buffer))
    }

    /// A byte range of a tensor's stored bytes. Where the file is not mapped they are read into `buffer`, whose length
    /// and content are of no meaning afterwards; it is meant to be used again and again.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the file has become shorter since it was opened, [`Error::Io`] if it cannot be read,
    /// [`Error::Unsupported`] if the set was opened for its headers only, [`Error::Audit`] for a range that is not the
    /// tensor's.
    pub fn read<'a>(&'a self, index: usize, range: Range<u64>, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let (tensor, part) = self.tensor(index)?;
        part.reader.read(self.place(tensor, range)?, Some(&tensor.name), buffer)
    }

    /// A byte range of a part's file, as [`GgufSet::read`] gives one of a tensor.
    pub fn read_part<'a>(&'a self, part: usize, range: Range<u64>, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let Some(part) = self.parts.get(part) else {
            let fault = Fault::new(format!("part {part} was asked for")).file(&self.path);
            return Err(fault.expected(format!("an index below {}", self.parts.len())).audit());
        };
        part.reader.read(range, None, buffer)
    }

    fn tensor(&self, index: usize) -> Result<(&SourceTensor, &Part)> {
        let tensor = self.tensors.get(index).ok_or_else(|| {
            let fault = Fault::new(format!("tensor {index} was asked for")).file(&self.path);
            fault.expected(format!("an index below {}", self.tensors.len())).contradiction()
        })?;
        Ok((tensor, &self.parts[tensor.part]))
    }

    /// Where a range of a tensor's bytes is in its file.
    fn place(&self, tensor: &SourceTensor, range: Range<u64>) -> Result<Range<u64>> {
        let path = self.parts[tensor.part].path();
        let fault = |found: String| Fault::new(found).file(path).tensor(&tensor.name).offset(tensor.offset);
        if self.header_only {
            let fault = fault("the set was opened for its headers only".into());
            return Err(fault.expected("files with their data").unsupported());
        }
        if range.start > range.end || range.end > tensor.bytes {
            let fault = fault(format!("bytes {range:?} of {} are needed", tensor.bytes));
            return Err(fault.expected("a range of the tensor's bytes").audit());
        }
        if range.start == range.end {
            // An empty tensor may be said to begin behind the end of its file.
            return Ok(0..0);
        }
        // Extents were checked: the sum is within the file.
        Ok(tensor.offset + range.start..tensor.offset + range.end)
    }

    /// Tells the system what to expect of a byte range of a part's file.
    pub fn advise(&self, part: usize, range: Range<u64>, advice: Advice) -> Result<()> {
        self.parts.get(part).map_or(Ok(()), |part| part.reader.advise(range, advice))
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Result<&str> {
        self.metadata.require("general.architecture")?.str()
    }

    /// Whether the set was opened without its data.
    pub fn header_only(&self) -> bool {
        self.header_only
    }

    /// Refuses files that are GGUF but hold no model to convert: adapters, multimodal projectors, importance matrices,
    /// and files without a single tensor.
    pub fn refuse_nonmodel(&self) -> Result<()> {
        const CONVERTED: &str = "a model to convert";
        if let Some(field) = self.metadata.get("general.type") {
            let what = match field.str()? {
                "model" => None,
                "adapter" => Some("a LoRA adapter (general.type 'adapter')".to_owned()),
                "mmproj" => Some("a multimodal projector (general.type 'mmproj')".to_owned()),
                "imatrix" => Some("an importance matrix (general.type 'imatrix')".to_owned()),
                other => Some(format!("a file of general.type '{other}'")),
            };
            if let Some(what) = what {
                let fault = field.fault(what).expected(CONVERTED);
                return Err(fault.remedy("Give the model's own file.").unsupported());
            }
        }
        if let Some(field) = self.metadata.get("general.architecture")
            && field.str()? == "clip"
        {
            let fault = field.fault("a multimodal projector (architecture 'clip')").expected(CONVERTED);
            return Err(fault.remedy("Give the language model's own file.").unsupported());
        }
        if self.tensors.is_empty() {
            let fault = Fault::new("a file without tensors, such as a vocabulary alone").file(&self.path);
            return Err(fault.expected(CONVERTED).unsupported());
        }
        Ok(())
    }
}

/// Checks that every tensor's bytes lie inside the file.
fn extents(reader: &Reader, header: &Header) -> Result<()> {
    let size = reader.bytes();
    let end = |t: &SourceTensor| if t.bytes == 0 { Some(0) } else { t.offset.checked_add(t.bytes) };
    let outside = |t: &&SourceTensor| end(t).is_none_or(|end| end > size);
    let Some(first) = header.tensors.iter().find(outside) else { return Ok(()) };
    let count = header.tensors.iter().filter(outside).count();
    let last = header.tensors.iter().map(end).try_fold(0, |a, b| b.map(|b| b.max(a)));
    let needed = last.map_or("more than 2^64".to_owned(), |last| last.to_string());
    let others = if count > 1 { format!(" (as does that of {} more tensors)", count - 1) } else { String::new() };
    let found = format!("the file has {size} bytes and ends before the tensor's data does{others}; it begins");
    let fault = Fault::new(found).file(reader.path()).tensor(&first.name).offset(first.offset);
    Err(fault.expected(format!("a file of at least {needed} bytes")).remedy(CUT_SHORT).truncated())
}

fn split_error(error: Error) -> Error {
    error.fault().clone().split()
}

fn split_key<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<(Field<'a>, u64)>> {
    let Some(field) = metadata.get(key) else { return Ok(None) };
    let value = field.u64().map_err(split_error)?;
    Ok(Some((field, value)))
}

/// Checks the split keys of one part (numbered from 0) of a set of several.
///
/// Writers differ in the integer types, and the first part may lack the keys; the others need them to be told apart.
fn check_part(metadata: &Metadata, index: usize, split: &SplitName) -> Result<()> {
    let number = index + 1;
    let keys = [SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS];
    let absent: Vec<&str> = keys.into_iter().filter(|key| metadata.get(key).is_none()).collect();
    if index == 0 && absent.len() == keys.len() {
        return Ok(());
    }
    if !absent.is_empty() {
        let fault = Fault::new(format!("part {number} of {} lacks {}", split.count, absent.join(", ")));
        let fault = fault.file(metadata.path()).expected(format!("all of {}", keys.join(", ")));
        return Err(fault.remedy("The file is not the part that its name says.").split());
    }
    const MIXED: &str = "Files of different sets were mixed or renamed; download the set again.";
    if let Some((field, no)) = split_key(metadata, SPLIT_NO)?
        && no != index as u64
    {
        let fault = field.fault(format!("the file is part {} of its set (split.no {no})", no.saturating_add(1)));
        return Err(fault.expected(format!("part {number}, as its name says")).remedy(MIXED).split());
    }
    if let Some((field, count)) = split_key(metadata, SPLIT_COUNT)?
        && count != u64::from(split.count)
    {
        let fault = field.fault(format!("the file is of a set of {count} parts"));
        return Err(fault.expected(format!("{}, as its name says", split.count)).remedy(MIXED).split());
    }
    Ok(())
}

/// Checks that a file opened by itself is not a part of a set. Merged sets keep the keys, with a count of 0.
fn check_single(metadata: &Metadata, file: &Path) -> Result<()> {
    let no = split_key(metadata, SPLIT_NO)?.map_or(0, |(_, no)| no);
    let Some((field, count)) = split_key(metadata, SPLIT_COUNT)? else { return Ok(()) };
    if count <= 1 && no == 0 {
        return Ok(());
    }
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let fault = field.fault(format!("the file is part {} of a set of {count} parts", no.saturating_add(1)));
    let fault =
        fault.expected(format!("a whole model, since the name '{name}' does not say where the other parts are"));
    Err(fault
        .remedy(
            "Give the part under its own name, <prefix>-00001-of-0000N.gguf, with the others beside it; in a download \
             cache that is the link, not the blob that it points to.",
        )
        .split())
}

/// Checks the number of tensors that a part says the set has.
fn check_total(metadata: &Metadata, total: usize, parts: u32) -> Result<()> {
    match split_key(metadata, SPLIT_TENSORS)? {
        Some((field, count)) if count != total as u64 => {
            let fault = field.fault(format!("the set should have {count} tensors"));
            let fault = fault.expected(format!("{total}, which is what its {parts} parts hold together"));
            Err(fault.remedy("A part is from another split of the model; download the set again.").split())
        }
        _ => Ok(()),
    }
}

/// Checks that a later part carries nothing that the first, whose metadata is the model's, does not say too.
fn check_keys(model: &Metadata, part: &Metadata) -> Result<()> {
    for field in part.iter() {
        let key = field.key_bytes();
        if key.starts_with(b"split.") || key == b"general.alignment" {
            continue;
        }
        let fault = match model.get_bytes(key) {
            Some(same) if equal(same.value(), field.value()) => continue,
            Some(_) => field.fault("the value differs from the first part's"),
            None => field.fault("the first part, whose metadata is the model's, lacks this key"),
        };
        let fault = fault.expected(format!("metadata as in {}", model.path().display()));
        return Err(fault.remedy("The parts are not of one split; download the set again.").split());
    }
    Ok(())
}

/// Equality of type and bits.
fn equal(a: Value<'_>, b: Value<'_>) -> bool {
    match (a, b) {
        (Value::F32(a), Value::F32(b)) => a.to_bits() == b.to_bits(),
        (Value::F64(a), Value::F64(b)) => a.to_bits() == b.to_bits(),
        (a, b) => a == b,
    }
}
