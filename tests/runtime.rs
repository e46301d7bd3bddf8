//! The runtime: one rank of a folder, and weights straight from a source, against an independent reader of the files.

#[allow(dead_code, reason = "this binary uses some of it")]
#[path = "common/folders.rs"]
mod folders;
#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/golden.rs"]
mod golden;

#[path = "runtime/blocks.rs"]
mod blocks;
#[path = "runtime/forms.rs"]
mod forms;
#[path = "runtime/kept_types.rs"]
mod kept_types;
#[path = "runtime/open.rs"]
mod open;
#[path = "runtime/stream.rs"]
mod stream;

use std::collections::BTreeMap;
use std::path::Path;

use ggshard::convert::Request;
use ggshard::output::Manifest;
use safetensors::SafeTensors;

/// Shape and bytes by name.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

/// The tensors of the files that `wanted` accepts, by the official reader.
fn parse(folder: &Path, wanted: impl Fn(&str) -> bool) -> Tensors {
    let mut all = Tensors::new();
    for file in Manifest::read(folder).unwrap().files.iter().filter(|f| wanted(&f.name)) {
        let bytes = std::fs::read(folder.join(&file.name)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let shape = view.shape().iter().map(|n| *n as u64).collect();
            assert!(all.insert(name.clone(), (shape, view.data().to_vec())).is_none(), "{name} twice");
        }
    }
    all
}

fn vllm(tp: u32) -> Request {
    Request { profile: "vllm-0.32".into(), tp, ..Request::default() }
}
