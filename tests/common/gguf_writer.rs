//! Writes sound GGUF version 3 files into memory, for tests that need a model of their own.
//!
//! Shares no code with the crate's reader. Files that are wrong on purpose are made by `tests/container/build.rs`.
#![allow(dead_code, reason = "each test binary uses some of it")]

use ggshard::gguf::GgmlType;

const ALIGNMENT: usize = 32;

/// A file in the making: metadata and tensors, in the order they are given.
#[derive(Debug, Clone, Default)]
pub struct GgufBuilder {
    /// Key, value type and the value's bytes.
    pub entries: Vec<(String, u32, Vec<u8>)>,
    /// The tensors.
    pub tensors: Vec<BuiltTensor>,
}

/// A tensor and its stored bytes.
#[derive(Debug, Clone)]
pub struct BuiltTensor {
    pub name: String,
    pub ty: GgmlType,
    /// Axes as GGUF writes them, fastest first.
    pub ne: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl GgufBuilder {
    pub fn new() -> Self {
        GgufBuilder::default()
    }

    /// A file with `general.architecture`.
    pub fn architecture(name: &str) -> Self {
        GgufBuilder::new().kv_str("general.architecture", name)
    }

    pub fn kv_u32(self, key: &str, value: u32) -> Self {
        self.kv(key, 4, &value.to_le_bytes())
    }

    pub fn kv_f32(self, key: &str, value: f32) -> Self {
        self.kv(key, 6, &value.to_le_bytes())
    }

    pub fn kv_bool(self, key: &str, value: bool) -> Self {
        self.kv(key, 7, &[u8::from(value)])
    }

    pub fn kv_str(self, key: &str, value: &str) -> Self {
        self.kv(key, 8, &string(value))
    }

    pub fn kv_bools(self, key: &str, values: &[bool]) -> Self {
        let bytes: Vec<u8> = values.iter().map(|v| u8::from(*v)).collect();
        self.kv(key, 9, &array(7, values.len(), &bytes))
    }

    pub fn kv_u32s(self, key: &str, values: &[u32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.kv(key, 9, &array(4, values.len(), &bytes))
    }

    pub fn kv_strs(self, key: &str, values: &[&str]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| string(v)).collect();
        self.kv(key, 9, &array(8, values.len(), &bytes))
    }

    /// A key with a value of GGUF's value type `ty`, given as it is stored.
    pub fn kv(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.entries.push((key.to_owned(), ty, value.to_vec()));
        self
    }

    /// A tensor; `ne` is GGUF's order of axes, fastest first.
    pub fn tensor(mut self, name: &str, ty: GgmlType, ne: &[u64], bytes: Vec<u8>) -> Self {
        let elements: u64 = ne.iter().product();
        assert_eq!(bytes.len() as u64, elements / ty.block() * ty.block_bytes(), "bytes of '{name}'");
        self.tensors.push(BuiltTensor { name: name.to_owned(), ty, ne: ne.to_vec(), bytes });
        self
    }

    /// A tensor of F32 values.
    pub fn f32s(self, name: &str, ne: &[u64], values: &[f32]) -> Self {
        self.tensor(name, GgmlType::F32, ne, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A tensor of random blocks whose values are all finite, by a seed.
    pub fn random(self, name: &str, ty: GgmlType, ne: &[u64], seed: u64) -> Self {
        let elements: u64 = ne.iter().product();
        self.tensor(name, ty, ne, random_blocks(ty, elements, seed))
    }

    /// The whole file.
    pub fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, ty, value) in &self.entries {
            out.extend(string(key));
            out.extend(ty.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            out.extend(tensor.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend((tensor.ty as u32).to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT) as u64;
        }
        pad(&mut out);
        for tensor in &self.tensors {
            out.extend(&tensor.bytes);
            pad(&mut out);
        }
        out
    }
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn array(ty: u32, count: usize, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &(count as u64).to_le_bytes(), elements].concat()
}

/// A generator of pseudo-random numbers (splitmix64): the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Random blocks of F32, F16, BF16, I32, Q8_0, Q4_0 or Q4_K whose values are all finite.
pub fn random_blocks(ty: GgmlType, elements: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let bytes = (elements / ty.block() * ty.block_bytes()) as usize;
    let mut out: Vec<u8> = Vec::with_capacity(bytes);
    // Half-precision scales around 2^-6, either sign.
    let half = |random: &mut Random| (0x2000 | (random.next() as u16 & 0x83FF)).to_le_bytes();
    while out.len() < bytes {
        let end = out.len() + ty.block_bytes() as usize;
        match ty {
            GgmlType::F32 => out.extend((random.next() as i32 as f32 / 65536.0).to_le_bytes()),
            GgmlType::BF16 => out.extend((0x3C00 | (random.next() as u16 & 0x83FF)).to_le_bytes()),
            GgmlType::F16 | GgmlType::Q8_0 | GgmlType::Q4_0 => out.extend(half(&mut random)),
            GgmlType::Q4_K => out.extend([half(&mut random), half(&mut random)].concat()),
            GgmlType::I32 => {}
            other => panic!("no random blocks of {other}"),
        }
        while out.len() < end {
            out.push(random.next() as u8);
        }
    }
    out
}
