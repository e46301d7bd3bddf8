//! The double, built once, and the program run with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Settings of a double; see `driver.cpp`.
pub struct Double {
    settings: String,
    folder: PathBuf,
}

impl Double {
    pub fn with(settings: &str) -> Self {
        Double { settings: settings.to_owned(), folder: library().to_path_buf() }
    }

    /// The folder with the library.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// No driver: what has its name is no library.
    pub fn absent() -> (Self, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        for name in NAMES {
            std::fs::write(folder.path().join(name), "no library").unwrap();
        }
        (Double { settings: String::new(), folder: folder.path().to_path_buf() }, folder)
    }

    /// Runs the program. Gives what the double counted, too.
    pub fn run(&self, arguments: &[String]) -> (Output, BTreeMap<String, u64>) {
        let report = tempfile::NamedTempFile::new().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_ggshard"))
            .args(arguments)
            .env("LD_LIBRARY_PATH", &self.folder)
            .env("GGSHARD_DOUBLE", format!("{},report={}", self.settings, report.path().display()))
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code().is_some_and(|code| code != 99), "{arguments:?}: {}: {stderr}", output.status);
        (output, counts(report.path()))
    }
}

/// What a double wrote to its report: how often each thing happened.
pub fn counts(report: &Path) -> BTreeMap<String, u64> {
    let lines = std::fs::read_to_string(report).unwrap();
    let count = |line: &str| {
        let (name, count) = line.split_once(' ').unwrap();
        (name.to_owned(), count.parse().unwrap())
    };
    lines.lines().map(count).collect()
}

/// The names that the library is looked for under, in the order in which they count here.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-double");
        std::fs::create_dir_all(&folder).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/driver.cpp");
        // Another run of these tests may be at it: each name appears complete.
        let built = folder.join(format!("{}.so", std::process::id()));
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let done = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra"])
            .args(["-Werror", "-Wno-unknown-pragmas", "-o"])
            .args([&built, &source])
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}: a C++ compiler is needed", compiler.display()));
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        for name in NAMES {
            let copy = folder.join(format!("{}.{name}", std::process::id()));
            std::fs::copy(&built, &copy).unwrap();
            std::fs::rename(copy, folder.join(name)).unwrap();
        }
        std::fs::remove_file(built).unwrap();
        folder
    })
}

/// A file or folder in `fixtures/`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// The arguments of a conversion.
pub fn convert(source: &Path, output: &Path, arguments: &[&str]) -> Vec<String> {
    let paths = ["convert".to_owned(), source.display().to_string(), output.display().to_string()];
    paths.into_iter().chain(arguments.iter().map(|a| (*a).to_owned())).collect()
}

/// Two folders hold the same files with the same bytes.
pub fn compare(one: &Path, other: &Path) {
    let (one, other) = (files(one), files(other));
    assert!(one.contains_key("ggshard.json") && one.keys().eq(other.keys()), "{:?}", one.keys());
    for (name, bytes) in &one {
        assert!(*bytes == other[name], "{name} differs");
    }
}

/// Every file in a folder and those below it.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return files };
    for entry in entries.map(Result::unwrap) {
        let (name, path) = (entry.file_name().into_string().unwrap(), entry.path());
        if path.is_dir() {
            files.extend(self::files(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else {
            files.insert(name, std::fs::read(path).unwrap());
        }
    }
    files
}
