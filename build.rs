//! Embeds every mapping, profile and policy under `mappings/`, so that a new one is a new file and nothing else.

use std::path::Path;
use std::{env, fs};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let out = env::var("OUT_DIR").expect("set by cargo");
    let mut code = String::new();
    for (constant, folder) in [("MODELS", "models"), ("PROFILES", "profiles"), ("POLICIES", "policies")] {
        let folder = Path::new(&root).join("mappings").join(folder);
        println!("cargo::rerun-if-changed={}", folder.display());
        let mut files: Vec<_> = fs::read_dir(&folder)
            .expect("mappings/ is part of the source tree")
            .map(|entry| entry.expect("readable folder").path())
            .filter(|path| path.extension().is_some_and(|e| e == "toml"))
            .collect();
        files.sort();
        code.push_str(&format!("pub(crate) const {constant}: &[(&str, &str)] = &[\n"));
        for file in files {
            let stem = file.file_stem().expect("has a name").to_string_lossy().into_owned();
            code.push_str(&format!("    ({stem:?}, include_str!({:?})),\n", file.display().to_string()));
        }
        code.push_str("];\n");
    }
    fs::write(Path::new(&out).join("embedded.rs"), code).expect("OUT_DIR is writable");
}
