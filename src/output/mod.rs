//! Output: safetensors files, digests and the manifest.
