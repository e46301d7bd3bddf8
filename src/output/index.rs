//! The index that loaders look for beside the parts of a whole checkpoint.

use super::manifest::FileEntry;
use crate::error::{Fault, Result};

/// The bytes of the index of `files`: in which file each tensor is.
pub(crate) fn index<'a>(files: impl IntoIterator<Item = &'a FileEntry>) -> Result<Vec<u8>> {
    let mut weight_map = serde_json::Map::new();
    let mut total = 0;
    for file in files {
        for tensor in &file.tensors {
            weight_map.insert(tensor.name.clone(), file.name.clone().into());
            total += tensor.offsets.1 - tensor.offsets.0;
        }
    }
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let mut bytes = serde_json::to_vec_pretty(&index)
        .map_err(|e| Fault::new(format!("the index cannot be written: {e}")).audit())?;
    bytes.push(b'\n');
    Ok(bytes)
}
