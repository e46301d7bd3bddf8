//! A receipt: what a finished file holds, written before the file is called finished.

use serde::{Deserialize, Serialize};

use super::record::Counted;
use crate::error::{Fault, Result};
use crate::output::digest::Digest;
use crate::output::manifest::FileEntry;

/// What is known about a finished file, for the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// BLAKE3 of the record of the conversion that made the file.
    pub record: Digest,
    /// The manifest's entry.
    pub file: FileEntry,
    /// Tensors with values that are not finite.
    pub counted: Vec<Counted>,
}

impl Receipt {
    /// The receipt's bytes: JSON, and its digest in a line of its own.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self);
        let mut bytes = json.map_err(|e| Fault::new(format!("a receipt cannot be written: {e}")).audit())?;
        let digest = Digest::of(&bytes);
        bytes.extend_from_slice(format!("\n{digest}\n").as_bytes());
        Ok(bytes)
    }

    /// Reads a receipt; `None` for bytes that are not a whole one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (rest, digest) = bytes.strip_suffix(b"\n")?.split_last_chunk::<64>()?;
        let json = rest.strip_suffix(b"\n")?;
        if Digest::parse(std::str::from_utf8(digest).ok()?)? != Digest::of(json) {
            return None;
        }
        serde_json::from_slice(json).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_that_is_cut_or_changed_is_none() {
        let receipt = Receipt {
            record: Digest::of(b"record"),
            file: FileEntry {
                name: "a.safetensors".into(),
                rank: None,
                stage: None,
                bytes: 4096,
                header_bytes: 4096,
                blake3: Digest::of(b""),
                tensors: Vec::new(),
            },
            counted: vec![Counted { tensor: 0, first_rank: 1, nan: 2, inf: 0, overflow: 0 }],
        };
        let bytes = receipt.to_bytes().unwrap();
        assert_eq!(Receipt::parse(&bytes), Some(receipt));
        for cut in 0..bytes.len() {
            assert_eq!(Receipt::parse(&bytes[..cut]), None, "cut to {cut}");
            let mut changed = bytes.clone();
            changed[cut] ^= 4;
            assert_eq!(Receipt::parse(&changed), None, "changed at {cut}");
        }
    }
}
