//! A BLAKE3 digest as the manifest and `B3SUMS` write it.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::treehash::TreeHash;
use crate::error::{Error, Result};
use crate::threads::share_out;

/// A 32-byte BLAKE3 digest, written as 64 lower-case hexadecimal digits.
///
/// Reading is strict (exactly 64 digits, no capitals), so that every digest has one spelling and a changed letter in a
/// checked file is always a difference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        blake3::hash(bytes).into()
    }

    /// The digest of a file of `bytes` bytes, read by `threads` threads (0 for one per CPU) with plain reads. `each` is
    /// told of bytes done, and may end it with an error.
    pub fn of_file(
        file: &File,
        path: &Path,
        bytes: u64,
        threads: usize,
        each: &(dyn Fn(u64) -> Result<()> + Sync),
    ) -> Result<Self> {
        const TILE: u64 = 1 << 20;
        let hash = TreeHash::new(bytes);
        share_out(threads, bytes.div_ceil(TILE), |buffer: &mut Vec<u8>, tile| {
            let offset = tile * TILE;
            buffer.resize(TILE.min(bytes - offset) as usize, 0);
            file.read_exact_at(buffer, offset).map_err(|e| Error::io("read", path, e))?;
            hash.add(offset, buffer)?;
            each(buffer.len() as u64)
        })?;
        Ok(hash.finish()?.into())
    }

    /// The raw 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads 64 lower-case hexadecimal digits; `None` for everything else.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Some(Digest(bytes))
    }

    fn hex(&self) -> [u8; 64] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut hex = [0; 64];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(self.0) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        hex
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Digest(hash.into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.hex()))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&String::from_utf8_lossy(&self.hex()))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Hex;
        impl Visitor<'_> for Hex {
            type Value = Digest;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("64 lower-case hexadecimal digits")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Digest, E> {
                Digest::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Hex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_spelling_only() {
        let digest = Digest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(text, blake3::hash(b"abc").to_hex().as_str());
        assert_eq!(Digest::parse(&text), Some(digest));
        assert_eq!(Digest::parse(&text.to_uppercase()), None);
        assert_eq!(Digest::parse(&text[1..]), None);
        assert_eq!(Digest::parse(&format!("{text}0")), None);
        assert_eq!(Digest::parse(&"g".repeat(64)), None);
    }
}
