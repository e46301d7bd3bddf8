//! The manifest's text: one line per list entry, the digest in the last line.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{FORMAT, FORMAT_VERSION, FileEntry, Manifest};
use crate::error::{Error, Fault, Result};
use crate::output::digest::Digest;

/// What precedes and follows the 64 digits at the end of the file.
const BEFORE_DIGEST: &[u8] = b"\n\"digest\":\"";
const AFTER_DIGEST: &[u8] = b"\"\n}\n";
const DIGITS: usize = 64;

/// Writes the manifest and fills in its digest.
pub(super) fn render(manifest: &Manifest) -> Result<Vec<u8>> {
    // Taken apart in full, so that a new field cannot be forgotten here.
    let Manifest {
        format,
        format_version,
        tool,
        plan,
        source,
        mapping,
        profile,
        topology,
        policy,
        warnings,
        ignored,
        parameters,
        files,
        others,
        digest: _,
    } = manifest;
    let mut text = Text { bytes: b"{".to_vec() };
    text.field("\n", "format", format)?;
    text.field(",", "format_version", format_version)?;
    text.field(",", "tool", tool)?;
    text.field(",\n", "plan", plan)?;
    text.raw(",\n\"source\":{");
    text.field("", "architecture", &source.architecture)?;
    text.list(",", "parts", &source.parts)?;
    text.raw("}");
    text.field(",\n", "mapping", mapping)?;
    text.field(",\n", "profile", profile)?;
    text.field(",\n", "topology", topology)?;
    text.field(",\n", "policy", policy)?;
    text.list(",\n", "warnings", warnings)?;
    text.list(",\n", "ignored", ignored)?;
    text.list(",\n", "parameters", parameters)?;
    text.raw(",\n\"files\":[");
    for (i, FileEntry { name, rank, stage, bytes, header_bytes, blake3, tensors }) in files.iter().enumerate() {
        text.raw(if i == 0 { "\n{" } else { ",\n{" });
        text.field("", "name", name)?;
        text.field(",", "rank", rank)?;
        if stage.is_some() {
            text.field(",", "stage", stage)?;
        }
        text.field(",", "bytes", bytes)?;
        text.field(",", "header_bytes", header_bytes)?;
        text.field(",", "blake3", blake3)?;
        text.list(",", "tensors", tensors)?;
        text.raw("}");
    }
    text.raw(if files.is_empty() { "]" } else { "\n]" });
    text.list(",\n", "others", others)?;
    text.raw(",");
    let mut bytes = text.bytes;
    bytes.extend_from_slice(BEFORE_DIGEST);
    let digits = bytes.len()..bytes.len() + DIGITS;
    bytes.resize(digits.end, b'0');
    bytes.extend_from_slice(AFTER_DIGEST);
    let digest = Digest::of(&bytes).to_string();
    bytes[digits].copy_from_slice(digest.as_bytes());
    Ok(bytes)
}

struct Text {
    bytes: Vec<u8>,
}

impl Text {
    fn raw(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn json<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        serde_json::to_writer(&mut self.bytes, value)
            .map_err(|e| Fault::new(format!("a manifest value cannot be written as JSON: {e}")).audit())
    }

    fn field<T: Serialize + ?Sized>(&mut self, before: &str, name: &str, value: &T) -> Result<()> {
        self.raw(before);
        self.json(name)?;
        self.raw(":");
        self.json(value)
    }

    fn list<T: Serialize>(&mut self, before: &str, name: &str, values: &[T]) -> Result<()> {
        self.raw(before);
        self.json(name)?;
        self.raw(":[");
        for (i, value) in values.iter().enumerate() {
            self.raw(if i == 0 { "\n" } else { ",\n" });
            self.json(value)?;
        }
        self.raw(if values.is_empty() { "]" } else { "\n]" });
        Ok(())
    }
}

/// Checks the digest at the end of `bytes`, then reads them.
pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Manifest> {
    let stated = bytes
        .strip_suffix(AFTER_DIGEST)
        .and_then(|rest| rest.split_last_chunk::<DIGITS>())
        .filter(|(before, _)| before.ends_with(BEFORE_DIGEST))
        .and_then(|(before, digits)| Some((before, Digest::parse(std::str::from_utf8(digits).ok()?)?)));
    let Some((before, stated)) = stated else {
        return Err(Fault::new("an edited or cut manifest: it does not end with its digest")
            .file(path)
            .key("digest")
            .remedy("Convert again; a manifest is not meant to be edited or reformatted")
            .checkpoint());
    };
    let mut hasher = blake3::Hasher::new();
    hasher.update(before).update(&[b'0'; DIGITS]).update(AFTER_DIGEST);
    let found = Digest::from(hasher.finalize());
    if found != stated {
        return Err(Fault::new(format!("an edited manifest: its bytes have the digest {found}"))
            .file(path)
            .key("digest")
            .expected(stated.to_string())
            .remedy("Convert again, or fetch the manifest again; it is not meant to be edited")
            .checkpoint());
    }
    let manifest: Manifest = serde_json::from_slice(bytes)
        .map_err(|e| Fault::new(format!("not a manifest of version {FORMAT_VERSION}: {e}")).file(path).checkpoint())?;
    if manifest.digest != stated {
        return Err(Fault::new("the digest is not the manifest's last field").file(path).key("digest").checkpoint());
    }
    Ok(manifest)
}

/// The error for a manifest that another version of the format explains; `None` when it is of this version.
pub(super) fn other_version(bytes: &[u8], path: &Path) -> Option<Error> {
    #[derive(Deserialize)]
    struct Probe {
        format: String,
        format_version: u64,
    }
    let probe: Probe = serde_json::from_slice(bytes).ok()?;
    if probe.format != FORMAT {
        let fault = Fault::new(format!("a manifest of the format '{}'", probe.format));
        return Some(fault.file(path).key("format").expected(format!("'{FORMAT}'")).checkpoint());
    }
    (probe.format_version != u64::from(FORMAT_VERSION)).then(|| {
        Fault::new(format!("a manifest of format version {}", probe.format_version))
            .file(path)
            .key("format_version")
            .expected(format!("version {FORMAT_VERSION}"))
            .remedy("Use the ggshard that wrote it, or a newer one")
            .unsupported()
    })
}
