//! What ends a running program: Ctrl-C, SIGTERM, and a source that becomes shorter under it.
//!
//! Each test stops the program (SIGSTOP) once it has begun to write, so that what is done to it happens in the middle of
//! its work on any machine.
#![cfg(target_os = "linux")]

#[path = "common/gguf_writer.rs"]
mod gguf_writer;

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ggshard::gguf::GgmlType;
use gguf_writer::{BuiltTensor, GgufBuilder};

/// Rows of 2 KiB: 512 MiB, of which the disk holds nothing but the header.
const ROWS: u64 = 256 << 10;

/// Writes a sparse model of two tensors, and gives the length of its header.
fn sparse(path: &Path) -> u64 {
    let mut file = GgufBuilder::architecture("sparse");
    let tensor = |name: &str, rows| BuiltTensor {
        name: name.into(),
        ty: GgmlType::BF16,
        ne: vec![1024, rows],
        bytes: Vec::new(),
    };
    file.tensors.push(tensor("big.weight", ROWS));
    let header = file.build();
    std::fs::write(path, &header).unwrap();
    File::options().write(true).open(path).unwrap().set_len(header.len() as u64 + ROWS * 2048).unwrap();
    header.len() as u64
}

struct Running {
    child: Child,
    source: PathBuf,
    output: PathBuf,
    header: u64,
    _temp: tempfile::TempDir,
}

impl Running {
    /// Starts a conversion and stops it when its first file is there.
    fn stopped(arguments: &[&str]) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let (source, output) = (temp.path().join("sparse.gguf"), temp.path().join("out"));
        let header = sparse(&source);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggshard"));
        command.arg("convert").arg(&source).arg(&output).args(["--tp", "1", "--mapping", "raw", "--threads", "2"]);
        command.args(["--tile-size", "64K"]).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        let running = Running { child: command.spawn().unwrap(), source, output, header, _temp: temp };
        let begun = || names(&running.output).iter().any(|name| name.ends_with(".partial"));
        let start = Instant::now();
        while !begun() {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing was written");
            std::thread::sleep(Duration::from_millis(1));
        }
        running.signal("STOP");
        running
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", self.child.id())]).status().unwrap();
        assert!(sent.success(), "the program ended before it was stopped");
    }

    /// Lets it go on to its end. Gives what it said, and the names that are in the output folder.
    fn end(self) -> (Output, Vec<String>) {
        self.signal("CONT");
        let output = self.child.wait_with_output().unwrap();
        (output, names(&self.output))
    }
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// No name that a loader would take.
fn nothing_passes(names: &[String]) {
    let endings = [".safetensors", ".json", ".bin", "B3SUMS"];
    assert!(!names.iter().any(|name| endings.iter().any(|ending| name.ends_with(ending))), "{names:?}");
}

#[test]
fn ctrl_c_and_sigterm_end_a_conversion_in_good_order() {
    for (signal, status, name) in [("INT", 130, "SIGINT"), ("TERM", 143, "SIGTERM")] {
        let running = Running::stopped(&[]);
        running.signal(signal);
        let (output, names) = running.end();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(name) && said.contains("--resume"), "{said}");
        nothing_passes(&names);
    }
}

#[test]
fn a_mapped_source_that_becomes_shorter_is_an_error_message_and_no_crash() {
    let running = Running::stopped(&["--io", "mmap"]);
    let source = running.source.clone();
    OpenOptions::new().write(true).open(&source).unwrap().set_len(running.header).unwrap();
    let (output, names) = running.end();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("error: {}: ", source.display())) && said.contains("became shorter"), "{said}");
    assert!(said.contains("--resume") && said.contains("--io pread"), "{said}");
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    nothing_passes(&names);
}

#[test]
fn a_source_that_is_read_and_becomes_shorter_is_an_ordinary_error() {
    let running = Running::stopped(&["--io", "pread"]);
    let (source, header) = (running.source.clone(), running.header);
    OpenOptions::new().write(true).open(&source).unwrap().set_len(header).unwrap();
    let (output, names) = running.end();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error: ") && said.contains("tensor 'big.weight'"), "{said}");
    assert!(said.contains("became shorter") && said.contains(&format!("{header} bytes")), "{said}");
    nothing_passes(&names);
}
