//! The index that loaders look for beside the parts of a whole checkpoint.

use super::manifest::FileEntry;
use crate::error::{Fault, Result};

/// In which file each tensor is.
#[derive(Debug, Default)]
pub(crate) struct Index {
    weight_map: serde_json::Map<String, serde_json::Value>,
    total: u64,
}

impl Index {
    /// Adds the tensors of a file.
    pub fn add(&mut self, file: &FileEntry) {
        for tensor in &file.tensors {
            self.weight_map.insert(tensor.name.clone(), file.name.clone().into());
            self.total += tensor.offsets.1 - tensor.offsets.0;
        }
    }

    /// The bytes of the index.
    pub fn into_bytes(self) -> Result<Vec<u8>> {
        let index = serde_json::json!({ "metadata": { "total_size": self.total }, "weight_map": self.weight_map });
        let mut bytes = serde_json::to_vec_pretty(&index)
            .map_err(|e| Fault::new(format!("the index cannot be written: {e}")).audit())?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}
