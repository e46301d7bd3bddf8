//! Whatever goes wrong, and whenever: the source is untouched, and nothing passes for a checkpoint.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;

fn toy() -> Planned {
    planned(&toy::builder(), 2, FloatType::BF16).unwrap()
}

/// Small tiles and one worker, so that a conversion has many moments.
fn slowly() -> Options {
    Options { threads: 1, tile_bytes: 512, ..Options::default() }
}

/// No file that a loader would take, and no manifest.
fn nothing_passes(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let loadable = [".safetensors", ".json", ".bin", "B3SUMS"].iter().any(|ending| name.ends_with(ending));
        assert!(!loadable || entry.path().is_dir(), "'{name}' is left");
    }
}

#[test]
fn an_output_that_is_a_file_or_lies_below_one_is_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, b"precious").unwrap();
    for output in [file.clone(), file.join("out")] {
        let error = convert(&toy(), &output, slowly(), &Extras::default(), &|_| {}).expect_err("a file is in the way");
        assert!(matches!(error, Error::Output(_) | Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("file"), "{error}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
}

#[test]
fn a_folder_with_anything_in_it_is_left_alone() {
    for name in ["notes.txt", "model.safetensors", "ggshard.json", "model-rank-0-part-0.safetensors.partial", "sub"] {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(name), b"precious").unwrap();
        let error =
            convert(&toy(), temp.path(), slowly(), &Extras::default(), &|_| {}).expect_err("the folder is not empty");
        assert!(matches!(error, Error::Output(_)) && error.to_string().contains(name), "{error}");
        assert_eq!(read(temp.path()), BTreeMap::from([(name.to_owned(), b"precious".to_vec())]));
    }
}

/// Puts something in the way when the first bytes are done: a folder, over which no file can be renamed.
fn in_the_way(name: &str) {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("out");
    let placed = AtomicBool::new(false);
    let obstruct = |_| {
        if !placed.swap(true, Ordering::Relaxed) {
            std::fs::create_dir(output.join(name)).unwrap();
            std::fs::write(output.join(name).join("precious"), b"precious").unwrap();
        }
    };
    let error = convert(&toy(), &output, slowly(), &config_json(), &obstruct);
    let error = error.expect_err(name);
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(&output.display().to_string()), "{error}");
    nothing_passes(&output);
    assert_eq!(std::fs::read(output.join(name).join("precious")).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(&output).unwrap().count(), 1, "only what is in the way is left");
}

#[test]
fn something_in_the_way_of_any_file_leaves_nothing() {
    for name in [
        "model-rank-1-part-0.safetensors.done",
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
        "config.json",
        "config.json.partial",
        "B3SUMS",
        "B3SUMS.partial",
        "ggshard.json",
        "ggshard.json.partial",
    ] {
        in_the_way(name);
    }
}

#[test]
fn a_folder_that_goes_away_is_an_error() {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("out");
    let gone = AtomicBool::new(false);
    let remove = |_| {
        if !gone.swap(true, Ordering::Relaxed) {
            std::fs::remove_dir_all(&output).unwrap();
        }
    };
    convert(&toy(), &output, slowly(), &Extras::default(), &remove).expect_err("the folder is gone");
    assert!(!output.exists());
}

#[test]
fn a_panic_half_way_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("a/b/out");
    let explode = |_| panic!("half way");
    let planned = toy();
    catch_unwind(AssertUnwindSafe(|| convert(&planned, &output, slowly(), &Extras::default(), &explode)))
        .expect_err("it panics");
    assert!(!temp.path().join("a").exists());
}

#[test]
fn a_stop_half_way_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("a/b/out");
    let cancel = Arc::new(AtomicBool::new(false));
    let options = Options { cancel: Some(cancel.clone()), ..slowly() };
    let stop = |_| cancel.store(true, Ordering::Relaxed);
    let error = convert(&toy(), &output, options, &Extras::default(), &stop).expect_err("it is stopped");
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    assert!(!temp.path().join("a").exists());
}

/// The program on a fixture model that was copied to `temp`.
fn program(temp: &Path, wrap: Option<&str>) -> (Command, PathBuf, PathBuf) {
    let (source, output) = (temp.join("source.gguf"), temp.join("out"));
    std::fs::copy(plans::fixture(plans::GLM), &source).unwrap();
    let ggshard = env!("CARGO_BIN_EXE_ggshard");
    let mut command = match wrap {
        None => Command::new(ggshard),
        Some(wrap) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("{wrap}; exec \"$0\" \"$@\""), ggshard]);
            shell
        }
    };
    command.arg("convert").arg(&source).arg(&output).args(["--tp", "2", "--tile-size", "4K", "--threads", "2"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    (command, source, output)
}

#[test]
fn a_kill_at_any_moment_leaves_no_checkpoint_or_a_whole_one() {
    let original = std::fs::read(plans::fixture(plans::GLM)).unwrap();
    let (mut killed, mut finished) = (0, 0);
    for round in 0u64.. {
        let temp = tempfile::tempdir().unwrap();
        let (mut command, source, output) = program(temp.path(), None);
        let mut child = command.spawn().unwrap();
        // Later and later, until it has had the time to finish.
        std::thread::sleep(Duration::from_millis(round * round * 3));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(std::fs::read(&source).unwrap() == original, "the source was changed");
        if output.join("ggshard.json").exists() {
            finished += 1;
            let report = ggshard::verify::verify(&output, ggshard::verify::Options::default()).unwrap();
            assert!(report.ok(), "{report:?}");
        } else {
            killed += 1;
        }
        if finished > 0 || round == 60 {
            break;
        }
    }
    assert!(killed > 0 && finished > 0, "{killed} killed, {finished} finished");
}

#[test]
fn a_disk_that_fills_up_leaves_nothing() {
    // Files of at most 600 KiB (of about 3 MiB), and the signal that this raises ignored: writes fail.
    let temp = tempfile::tempdir().unwrap();
    let (mut command, source, output) = program(temp.path(), Some("trap '' XFSZ; ulimit -f 1200"));
    let status = command.status().unwrap();
    assert!(!status.success() && status.code().is_some(), "{status}");
    assert!(!output.exists(), "{:?}", read(&output).keys());
    assert!(std::fs::read(&source).unwrap() == std::fs::read(plans::fixture(plans::GLM)).unwrap());
}

fn config_json() -> Extras {
    Extras { files: vec![("config.json".into(), b"{}".to_vec())], notes: Vec::new() }
}
