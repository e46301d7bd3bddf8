#![no_main]

#[path = "../../tests/common/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|text: &str| drive::policy_toml(text));
