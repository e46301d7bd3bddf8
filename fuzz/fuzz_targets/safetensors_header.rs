#![no_main]

#[path = "../../tests/common/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::safetensors_header(bytes));
