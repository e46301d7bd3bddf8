//! Builds GGUF files byte by byte, sound by default and wrong wherever a test says so.

pub const U8: u32 = 0;
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STR: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;
pub const I64: u32 = 11;

/// A tensor info and its data.
#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    pub ne: Vec<u64>,
    pub ty: u32,
    pub data: Vec<u8>,
    /// Offset to write instead of the right one.
    pub offset: Option<u64>,
}

/// A file in the making.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub alignment: usize,
    /// Key, value type, bytes of the value.
    pub entries: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    /// Counts to write instead of the right ones.
    pub entry_count: Option<u64>,
    pub tensor_count: Option<u64>,
}

pub fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

pub fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

impl Gguf {
    /// A header without metadata or tensors.
    pub fn empty() -> Self {
        Gguf {
            version: 3,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
            entry_count: None,
            tensor_count: None,
        }
    }

    /// A small sound model.
    pub fn model() -> Self {
        Gguf::empty()
            .text("general.architecture", "llama")
            .text("general.name", "toy")
            .entry("llama.block_count", U32, &2u32.to_le_bytes())
            .entry("llama.rope.freq_base", F32, &1e-5f32.to_le_bytes())
            .entry("tokenizer.ggml.tokens", ARRAY, &array(STR, 2, &[string(b"a"), string(b"\xff")].concat()))
            .tensor("token_embd.weight", 0, &[4, 3])
            .tensor("blk.0.attn_q.weight", 8, &[32, 3])
            .tensor("output_norm.weight", 0, &[4])
    }

    pub fn entry(mut self, key: impl AsRef<[u8]>, ty: u32, value: &[u8]) -> Self {
        self.entries.push((key.as_ref().to_vec(), ty, value.to_vec()));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, STR, &string(value.as_bytes()))
    }

    /// A tensor of F32 (0) or Q8_0 (8), its data numbered so that no two tensors are alike.
    pub fn tensor(self, name: impl AsRef<[u8]>, ty: u32, ne: &[u64]) -> Self {
        let elements = ne.iter().product::<u64>() as usize;
        let bytes = if ty == 8 { elements / 32 * 34 } else { elements * 4 };
        let seed = self.tensors.len() as u8 + 1;
        self.raw_tensor(name, ty, ne, &vec![seed; bytes])
    }

    pub fn raw_tensor(mut self, name: impl AsRef<[u8]>, ty: u32, ne: &[u64], data: &[u8]) -> Self {
        let name = name.as_ref().to_vec();
        self.tensors.push(Tensor { name, ne: ne.to_vec(), ty, data: data.to_vec(), offset: None });
        self
    }

    /// The three keys of a part, as real writers type them.
    pub fn split(self, no: u16, count: u16, tensors: i32) -> Self {
        self.entry("split.no", U16, &no.to_le_bytes()).entry("split.count", U16, &count.to_le_bytes()).entry(
            "split.tensors.count",
            I32,
            &tensors.to_le_bytes(),
        )
    }

    /// Bytes up to the end of the tensor infos, without padding.
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, ty, value) in &self.entries {
            out.extend(string(key));
            out.extend(ty.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            out.extend(tensor.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(tensor.ty.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(self.alignment) as u64;
        }
        out
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        for tensor in &self.tensors {
            out.extend(&tensor.data);
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out
    }
}
