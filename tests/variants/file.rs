//! A GGUF file in the making: metadata and tensors that a test may change before it is written.

use std::path::{Path, PathBuf};

use ggshard::gguf::GgmlType;

use super::array::Array;
use super::gguf_writer::GgufBuilder;

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Kv {
    U32(u32),
    U64(u64),
    I32(i32),
    U16(u16),
    F32(f32),
    Bool(bool),
    Str(&'static str),
    U32s(Vec<u32>),
    Bools(Vec<bool>),
    F32s(Vec<f32>),
    Strs(Vec<&'static str>),
}

/// A tensor: shape row-major, type by its id.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub ty: u32,
    pub data: Vec<u8>,
}

/// A file.
#[derive(Clone, Debug, Default)]
pub struct File {
    pub kv: Vec<(String, Kv)>,
    pub tensors: Vec<Tensor>,
}

impl File {
    pub fn set(&mut self, key: &str, value: Kv) -> &mut Self {
        match self.kv.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.kv.push((key.to_owned(), value)),
        }
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        let before = self.kv.len();
        self.kv.retain(|(k, _)| k != key);
        assert_eq!(self.kv.len(), before - 1, "{key}");
        self
    }

    pub fn add(&mut self, name: &str, array: &Array) -> &mut Self {
        let data = array.data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.add_raw(name, &array.shape, 0, data)
    }

    pub fn add_raw(&mut self, name: &str, shape: &[usize], ty: u32, data: Vec<u8>) -> &mut Self {
        assert!(self.tensors.iter().all(|t| t.name != name), "{name} is there");
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), ty, data });
        self
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn remove(&mut self, name: &str) -> Tensor {
        let at = self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
        self.tensors.remove(at)
    }

    pub fn remove_where(&mut self, gone: impl Fn(&str) -> bool) -> &mut Self {
        let before = self.tensors.len();
        self.tensors.retain(|t| !gone(&t.name));
        assert!(self.tensors.len() < before);
        self
    }

    /// Another shape for the same data.
    pub fn reshape(&mut self, name: &str, shape: &[usize]) -> &mut Self {
        let tensor = self.tensor(name);
        assert_eq!(tensor.shape.iter().product::<usize>(), shape.iter().product::<usize>());
        tensor.shape = shape.to_vec();
        self
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut file = GgufBuilder::new();
        for (key, value) in &self.kv {
            file = value.write(file, key);
        }
        for Tensor { name, shape, ty, data } in &self.tensors {
            let ne: Vec<u64> = shape.iter().rev().map(|n| *n as u64).collect();
            file = file.tensor(name, GgmlType::from_id(*ty).unwrap(), &ne, data.clone());
        }
        file.build()
    }

    /// Writes the file into a folder, in `parts` parts as llama-gguf-split names and marks them.
    pub fn write(&self, dir: &Path, parts: usize) -> PathBuf {
        if parts == 1 {
            let path = dir.join("model.gguf");
            std::fs::write(&path, self.to_bytes()).unwrap();
            return path;
        }
        let each = self.tensors.len().div_ceil(parts);
        for (no, tensors) in self.tensors.chunks(each).enumerate() {
            let mut part = File { kv: if no == 0 { self.kv.clone() } else { Vec::new() }, tensors: tensors.to_vec() };
            part.set("split.no", Kv::U16(no as u16))
                .set("split.count", Kv::U16(parts as u16))
                .set("split.tensors.count", Kv::I32(self.tensors.len() as i32));
            std::fs::write(dir.join(format!("model-{:05}-of-{parts:05}.gguf", no + 1)), part.to_bytes()).unwrap();
        }
        dir.join(format!("model-00001-of-{parts:05}.gguf"))
    }
}

impl Kv {
    fn write(&self, file: GgufBuilder, key: &str) -> GgufBuilder {
        match self {
            Kv::U16(n) => file.kv(key, 2, &n.to_le_bytes()),
            Kv::U32(n) => file.kv_u32(key, *n),
            Kv::I32(n) => file.kv(key, 5, &n.to_le_bytes()),
            Kv::U64(n) => file.kv(key, 10, &n.to_le_bytes()),
            Kv::F32(x) => file.kv_f32(key, *x),
            Kv::Bool(b) => file.kv_bool(key, *b),
            Kv::Str(text) => file.kv_str(key, text),
            Kv::U32s(list) => file.kv_u32s(key, list),
            Kv::Bools(list) => file.kv_bools(key, list),
            Kv::Strs(list) => file.kv_strs(key, list),
            Kv::F32s(list) => {
                let head = [&6u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes()].concat();
                file.kv(key, 9, &[head, list.iter().flat_map(|x| x.to_le_bytes()).collect()].concat())
            }
        }
    }
}
