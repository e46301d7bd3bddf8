//! Reads golden blocks: as much of GGUF as those files use, by code that shares nothing with the crate's own reader.

use std::path::{Path, PathBuf};

use ggshard::gguf::GgmlType;

/// One tensor of blocks.
#[allow(dead_code)] // tests and benchmarks each use their part
pub struct Golden {
    /// File and tensor, for messages.
    pub name: String,
    /// Type of the blocks.
    pub ty: GgmlType,
    /// The blocks.
    pub blocks: Vec<u8>,
    /// Number of weights.
    pub weights: usize,
    /// What ggml decodes them to: little-endian `f32`, or the type's own numbers for F64 and integers.
    pub expected: Vec<u8>,
}

/// The folder in the repository.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/blocks")
}

/// All tensors of all files of a folder, in order of name.
pub fn read_folder(folder: &Path) -> Vec<Golden> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .collect();
    files.sort();
    files.iter().flat_map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Vec<Golden> {
    let bytes = std::fs::read(path).unwrap();
    let expected = std::fs::read(path.with_extension("expected.safetensors")).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();

    let mut cursor = Cursor { bytes: &bytes, at: 0 };
    assert_eq!(cursor.take(4), b"GGUF", "{}", path.display());
    assert_eq!(cursor.u32(), 3);
    let (tensors, keys) = (cursor.u64(), cursor.u64());
    for _ in 0..keys {
        cursor.string();
        assert_eq!(cursor.u32(), 8, "golden files have no other values than strings");
        cursor.string();
    }
    let infos: Vec<_> = (0..tensors)
        .map(|_| {
            let name = cursor.string();
            let weights: u64 = (0..cursor.u32()).map(|_| cursor.u64()).product();
            let ty = GgmlType::from_id(cursor.u32()).unwrap();
            (name, weights as usize, ty, cursor.u64() as usize)
        })
        .collect();
    let data = cursor.at.next_multiple_of(32);
    infos
        .into_iter()
        .map(|(name, weights, ty, offset)| {
            let size = weights / ty.block() as usize * ty.block_bytes() as usize;
            Golden {
                expected: expected.tensor(&name).unwrap().data().to_vec(),
                name: format!("{}: {name}", path.file_name().unwrap().display()),
                ty,
                blocks: bytes[data + offset..][..size].to_vec(),
                weights,
            }
        })
        .collect()
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        self.at += count;
        &self.bytes[self.at - count..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn string(&mut self) -> String {
        let length = self.u64() as usize;
        String::from_utf8(self.take(length).to_vec()).unwrap()
    }
}
