//! Mapped or read: the same header, the same bytes, and what happens when a file becomes shorter.

use std::fs::{self, OpenOptions as FileOptions};
use std::path::Path;

use ggshard::error::Error;
use ggshard::gguf::{Advice, GgufSet, Io, OpenOptions};

use crate::build::*;

fn set(path: &Path, io: Io) -> GgufSet {
    GgufSet::open_with(path, OpenOptions { io, ..OpenOptions::default() }).unwrap()
}

/// A header of about 1.5 MB: a long string, many strings, many keys and many tensors.
fn long_header() -> Vec<u8> {
    let mut file = Gguf::model().text("long", &"x".repeat(500_000));
    file = file.entry("strings", ARRAY, &array(STR, 40_000, &string(b"token").repeat(40_000)));
    file = file.entry("numbers", ARRAY, &array(U32, 50_000, &[7; 200_000]));
    for i in 0..2_000 {
        file = file.entry(format!("key.{i}"), U32, &[1; 4]);
    }
    for i in 0..200 {
        file = file.tensor(format!("blk.{i}.weight"), 0, &[4]);
    }
    file.bytes()
}

#[test]
fn a_header_longer_than_the_first_read_is_read_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = long_header();
    fs::write(&path, &bytes).unwrap();
    let set = crate::open(&path).unwrap();
    assert!(set.parts()[0].header_bytes() > 1 << 20);
    assert_eq!(set.metadata().str("long").unwrap().unwrap().len(), 500_000);
    // Cut anywhere, near the lengths at which reading goes on or not: the same error as of the mapped file.
    let near = |n: usize| [n - 1, n, n + 1];
    let header = set.parts()[0].header_bytes() as usize;
    let cuts = (18..21).flat_map(|k| near(1 << k)).chain((0..header).step_by(199_999)).chain(near(header));
    for cut in cuts {
        fs::write(&path, &bytes[..cut]).unwrap();
        assert!(matches!(crate::open(&path), Err(Error::Truncated(_))), "cut at {cut}");
        let _ = crate::open_with(&path, true);
    }
}

#[test]
fn a_file_that_becomes_shorter_while_it_is_read_is_an_error_that_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, Gguf::model().tensor("big", 0, &[4096, 5]).bytes()).unwrap();
    let set = set(&path, Io::Pread);
    let (big, whole) = (set.find("big").unwrap(), set.parts()[0].bytes());
    let mut buffer = vec![9; 3];
    assert_eq!(set.read(big, 8..20, &mut buffer).unwrap(), &set.data(big).unwrap()[8..20]);
    let end = set.tensors()[big].offset + 100;
    FileOptions::new().write(true).open(&path).unwrap().set_len(end).unwrap();
    assert_eq!(set.read(big, 0..100, &mut buffer).unwrap().len(), 100);
    for range in [0..101, 99..101, 100..200, 5000..5001] {
        let error = set.read(big, range.clone(), &mut buffer).unwrap_err();
        assert!(matches!(error, Error::Truncated(_)), "{error}");
        let fault = error.fault();
        assert_eq!((fault.file.as_deref(), fault.tensor.as_deref()), (Some(path.as_path()), Some("big")));
        assert_eq!(fault.offset, Some(set.tensors()[big].offset + range.start));
        let text = error.to_string();
        assert!(text.contains(&format!("{end} bytes")) && text.contains(&format!("{whole} bytes")), "{text}");
        assert!(text.contains("became shorter") && fault.remedy.is_some(), "{text}");
    }
    assert!(matches!(set.data(big).unwrap_err(), Error::Truncated(_)));
    assert!(matches!(set.read_part(0, end..whole, &mut buffer).unwrap_err(), Error::Truncated(_)));
}

#[test]
fn a_range_outside_a_tensor_or_a_part_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, Gguf::model().bytes()).unwrap();
    for io in [Io::Mmap, Io::Pread, Io::MmapIfLocal] {
        let set = set(&path, io);
        let (bytes, whole) = (set.tensors()[0].bytes, set.parts()[0].bytes());
        let mut buffer = Vec::new();
        #[expect(clippy::reversed_empty_ranges, reason = "it must be refused")]
        for range in [0..bytes + 1, bytes + 1..bytes + 2, 5..4, 0..u64::MAX] {
            assert!(matches!(set.read(0, range, &mut buffer), Err(Error::Audit(_))));
        }
        assert!(matches!(set.read_part(0, 0..whole + 1, &mut buffer), Err(Error::Audit(_))));
        assert!(set.read_part(1, 0..1, &mut buffer).is_err() && set.read(99, 0..1, &mut buffer).is_err());
        assert_eq!(set.read_part(0, 0..whole, &mut buffer).unwrap(), fs::read(&path).unwrap());
        assert_eq!(set.read(0, bytes..bytes, &mut buffer).unwrap(), b"");
    }
}

#[test]
fn whoever_asks_is_told_where_a_file_is_mapped() {
    use std::sync::Mutex;
    static TOLD: Mutex<Vec<(std::path::PathBuf, usize)>> = Mutex::new(Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, Gguf::model().bytes()).unwrap();
    let on_map = Some(
        (|path, addresses| TOLD.lock().unwrap().push((path.to_path_buf(), addresses.len())))
            as fn(&Path, std::ops::Range<usize>),
    );
    GgufSet::open_with(&path, OpenOptions { io: Io::Pread, on_map, ..OpenOptions::default() }).unwrap();
    assert!(TOLD.lock().unwrap().is_empty());
    let set = GgufSet::open_with(&path, OpenOptions { io: Io::Mmap, on_map, ..OpenOptions::default() }).unwrap();
    assert!(set.parts()[0].is_mapped());
    assert_eq!(*TOLD.lock().unwrap(), [(path.clone(), fs::metadata(&path).unwrap().len() as usize)]);
}

#[test]
fn advice_about_any_range_changes_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, Gguf::model().tensor("big", 0, &[4096, 5]).bytes()).unwrap();
    for io in [Io::Mmap, Io::Pread] {
        let set = set(&path, io);
        let before: Vec<Vec<u8>> = (0..4).map(|i| set.data(i).unwrap().to_vec()).collect();
        for advice in [Advice::Sequential, Advice::WillNeed, Advice::DontNeed] {
            for range in [0..1, 4095..4097, 5000..9000, 0..u64::MAX, u64::MAX - 1..u64::MAX, 7..7] {
                set.advise(0, range.clone(), advice).unwrap_or_else(|e| panic!("{advice:?} {range:?}: {e}"));
            }
        }
        set.advise(9, 0..1, Advice::WillNeed).unwrap();
        assert!((0..4).all(|i| set.data(i).unwrap() == before[i]));
    }
}
