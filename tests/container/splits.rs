//! Sets of parts: one model or an error that names the part.

use std::fs;
use std::path::{Path, PathBuf};

use ggshard::error::Error;
use ggshard::gguf::GgufSet;
use tempfile::TempDir;

use crate::build::*;
use crate::refusal;

/// The model cut into parts of these sizes, as real splitters write it: metadata in the first part only.
fn parts(sizes: &[usize]) -> Vec<Gguf> {
    let model = Gguf::model();
    let (count, total) = (sizes.len() as u16, model.tensors.len() as i32);
    assert_eq!(sizes.iter().sum::<usize>(), model.tensors.len());
    let mut first = 0;
    let cut = sizes.iter().enumerate().map(|(i, size)| {
        let metadata = if i == 0 { Gguf { tensors: vec![], ..model.clone() } } else { Gguf::empty() };
        let tensors = model.tensors[first..first + size].to_vec();
        first += size;
        Gguf { tensors, ..metadata.split(i as u16, count, total) }
    });
    cut.collect()
}

fn name(i: usize, count: usize) -> String {
    format!("m-Q4_K_M-{:05}-of-{count:05}.gguf", i + 1)
}

fn write(folder: &Path, parts: &[Gguf]) -> Vec<PathBuf> {
    let write = |(i, part): (usize, &Gguf)| {
        let path = folder.join(name(i, parts.len()));
        fs::write(&path, part.bytes()).unwrap();
        path
    };
    parts.iter().enumerate().map(write).collect()
}

fn set(parts: &[Gguf]) -> (TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), parts);
    (folder, paths)
}

/// The message of a set that must be refused, naming the part.
fn refused(parts: &[Gguf], part: usize) -> String {
    let (_folder, paths) = set(parts);
    for path in &paths {
        let error = crate::open(path).expect_err("the set was accepted");
        assert!(matches!(error, Error::Split(_)), "{error}");
        assert_eq!(error.fault().file.as_ref(), Some(&paths[part]), "{error}");
    }
    crate::open(&paths[0]).unwrap_err().to_string()
}

/// What must be the same however a model is cut: names, types, shapes and bytes, in order, and the metadata.
fn contents(set: &GgufSet) -> Vec<String> {
    let tensors = set.tensors().iter().enumerate();
    let tensors = tensors.map(|(i, t)| format!("{} {} {:?} {:?}", t.name, t.ty, t.ne, set.data(i).unwrap()));
    let keys = set.metadata().iter().filter(|f| !f.key().starts_with("split."));
    tensors.chain(keys.map(|f| format!("{} {:?}", f.key(), f.value()))).collect()
}

#[test]
fn any_part_or_the_folder_opens_the_whole_model() {
    let whole = contents(&GgufSet::from_bytes("m.gguf", Gguf::model().bytes()).unwrap());
    for sizes in [&[1, 1, 1][..], &[0, 2, 1], &[3, 0], &[0, 3]] {
        let (folder, paths) = set(&parts(sizes));
        for path in paths.iter().map(PathBuf::as_path).chain([folder.path()]) {
            let set = crate::open(path).unwrap();
            assert_eq!(contents(&set), whole);
            assert_eq!(set.path(), path);
            let counts: Vec<_> = set.parts().iter().map(|p| p.tensors().len()).collect();
            assert_eq!(counts, sizes);
            assert!(set.tensors().iter().all(|t| set.parts()[t.part].tensors().contains(&set.find(&t.name).unwrap())));
        }
    }
}

#[test]
fn a_metadata_only_first_part_may_end_without_padding() {
    let parts = parts(&[0, 3]);
    let (_folder, paths) = set(&parts);
    fs::write(&paths[0], parts[0].header()).unwrap();
    let set = crate::open(&paths[1]).unwrap();
    assert_eq!(set.parts()[0].header_bytes(), set.parts()[0].bytes());
    assert_eq!(set.parts()[0].header_blake3().unwrap(), blake3::hash(&parts[0].header()).to_hex().to_string());
}

#[test]
fn a_set_without_data_opens_header_only() {
    let parts = parts(&[1, 1, 1]);
    let (folder, paths) = set(&parts);
    for (path, part) in paths.iter().zip(&parts) {
        fs::write(path, part.header()).unwrap();
    }
    assert!(matches!(crate::open(folder.path()).unwrap_err(), Error::Truncated(_)));
    assert_eq!(crate::open_with(folder.path(), true).unwrap().tensors().len(), 3);
}

#[test]
fn a_missing_part_is_named() {
    let (folder, paths) = set(&parts(&[1, 1, 1]));
    fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2], &folder.path().to_path_buf()] {
        let error = crate::open(path).unwrap_err();
        assert!(matches!(error, Error::Split(_)), "{error}");
        assert_eq!(error.fault().file.as_ref(), Some(&paths[1]));
        assert!(error.to_string().contains("part 2 of 3 is missing"), "{error}");
    }
}

#[test]
fn swapped_parts_are_noticed() {
    let mut parts = parts(&[1, 1, 1]);
    parts.swap(1, 2);
    let message = refused(&parts, 1);
    assert!(message.contains("part 3 of its set (split.no 2)") && message.contains("expected part 2"), "{message}");
}

#[test]
fn a_part_of_another_set_is_noticed() {
    let mut wrong_count = parts(&[1, 1, 1]);
    wrong_count[1] = Gguf { tensors: wrong_count[1].tensors.clone(), ..Gguf::empty().split(1, 4, 3) };
    assert!(refused(&wrong_count, 1).contains("set of 4 parts"));

    let mut wrong_total = parts(&[1, 1, 1]);
    wrong_total[2] = Gguf { tensors: wrong_total[2].tensors.clone(), ..Gguf::empty().split(2, 3, 4) };
    assert!(refused(&wrong_total, 2).contains("should have 4 tensors"));

    let mut no_keys = parts(&[1, 1, 1]);
    no_keys[1].entries.clear();
    assert!(refused(&no_keys, 1).contains("lacks split.no, split.count, split.tensors.count"));

    let mut mixed = parts(&[1, 1, 1]);
    mixed[0].entries.retain(|(key, ..)| key != b"split.count");
    assert!(refused(&mixed, 0).contains("lacks split.count"));

    let mut text = parts(&[1, 1, 1]);
    text[1].entries[0] = (b"split.no".to_vec(), STR, string(b"1"));
    assert!(refused(&text, 1).contains("has type str"));
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let mut parts = parts(&[1, 1, 1]);
    parts[2].tensors[0].name = parts[0].tensors[0].name.clone();
    let message = refused(&parts, 2);
    assert!(message.contains("'token_embd.weight'") && message.contains(&name(0, 3)), "{message}");
}

#[test]
fn a_part_with_too_few_tensors_is_noticed_by_the_total() {
    let mut parts = parts(&[1, 1, 1]);
    parts[1].tensors.clear();
    assert!(refused(&parts, 0).contains("should have 3 tensors"));
}

#[test]
fn later_parts_must_not_contradict_the_metadata() {
    let mut same = parts(&[1, 1, 1]);
    same[1] = same[1].clone().text("general.architecture", "llama");
    let (folder, _) = set(&same);
    crate::open(folder.path()).unwrap();

    let mut other = parts(&[1, 1, 1]);
    other[1] = other[1].clone().text("general.architecture", "qwen2");
    assert!(refused(&other, 1).contains("differs from the first part's"));

    let mut more = parts(&[1, 1, 1]);
    more[2] = more[2].clone().text("general.author", "x");
    assert!(refused(&more, 2).contains("'general.author'"));
}

#[test]
fn each_part_has_its_own_alignment() {
    let mut parts = parts(&[1, 1, 1]);
    for (part, alignment) in parts.iter_mut().zip([4096u32, 32, 64]).filter(|(_, a)| *a != 32) {
        part.alignment = alignment as usize;
        *part = part.clone().entry("general.alignment", U32, &alignment.to_le_bytes());
    }
    let (folder, _) = set(&parts);
    let set = crate::open(folder.path()).unwrap();
    assert_eq!(set.parts().iter().map(|p| p.alignment()).collect::<Vec<_>>(), [4096, 32, 64]);
    assert!(set.tensors().iter().all(|t| t.offset % set.parts()[t.part].alignment() == 0));
}

#[test]
fn python_writers_may_type_the_keys_otherwise_or_leave_them_out_of_the_first_part() {
    let keys = |file: Gguf, no: u64| {
        file.entry("split.no", U64, &no.to_le_bytes()).entry("split.count", I32, &3i32.to_le_bytes()).entry(
            "split.tensors.count",
            U16,
            &3u16.to_le_bytes(),
        )
    };
    let mut parts = parts(&[0, 1, 2]);
    for (i, part) in parts.iter_mut().enumerate() {
        part.entries.retain(|(key, ..)| !key.starts_with(b"split."));
        *part = keys(part.clone(), i as u64);
    }
    let (folder, paths) = set(&parts);
    assert_eq!(crate::open(folder.path()).unwrap().tensors().len(), 3);
    parts[0].entries.retain(|(key, ..)| !key.starts_with(b"split."));
    fs::write(&paths[0], parts[0].bytes()).unwrap();
    assert_eq!(crate::open(folder.path()).unwrap().tensors().len(), 3);
}

#[test]
fn a_part_under_another_name_is_not_a_model() {
    let parts = parts(&[1, 1, 1]);
    let folder = tempfile::tempdir().unwrap();
    for (i, other) in ["model.gguf", "m-1-of-3.gguf", "0fd3a1c9"].iter().enumerate() {
        let path = folder.path().join(other);
        fs::write(&path, parts[i].bytes()).unwrap();
        let error = refusal(&path, crate::open(&path));
        assert!(matches!(error, Error::Split(_)), "{error}");
        assert!(error.to_string().contains(&format!("part {} of a set of 3", i + 1)), "{error}");
    }
    for bad in ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf"] {
        let path = folder.path().join(bad);
        fs::write(&path, parts[0].bytes()).unwrap();
        assert!(matches!(refusal(&path, crate::open(&path)), Error::Split(_)));
    }
}

#[test]
fn a_set_of_one_and_a_merged_set_are_single_files() {
    let folder = tempfile::tempdir().unwrap();
    let one = folder.path().join("m-00001-of-00001.gguf");
    for file in [Gguf::model(), Gguf::model().split(0, 1, 3), Gguf::model().split(0, 0, 3)] {
        fs::write(&one, file.bytes()).unwrap();
        assert_eq!(crate::open(&one).unwrap().parts().len(), 1);
    }
    let merged = folder.path().join("merged.gguf");
    fs::write(&merged, Gguf::model().split(0, 0, 4).bytes()).unwrap();
    assert!(refusal(&merged, crate::open(&merged)).to_string().contains("should have 4 tensors"));
}

#[cfg(unix)]
#[test]
fn parts_are_found_beside_the_links_of_a_download_cache() {
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (i, part) in parts(&[1, 1, 1]).iter().enumerate() {
        fs::write(blobs.join(format!("{i}f00d")), part.bytes()).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{i}f00d"), snapshot.join(name(i, 3))).unwrap();
    }
    let path = snapshot.join(name(1, 3));
    let set = crate::open(&path).unwrap();
    assert_eq!((set.tensors().len(), set.path()), (3, path.as_path()));
    assert_eq!(set.parts()[2].path(), snapshot.join(name(2, 3)));
    assert_eq!(crate::open(&snapshot).unwrap().tensors().len(), 3);
    // The blob itself does not say where the others are; a link whose blob was deleted is a missing part.
    assert!(matches!(crate::open(blobs.join("1f00d")).unwrap_err(), Error::Split(_)));
    fs::remove_file(blobs.join("2f00d")).unwrap();
    assert!(crate::open(&path).unwrap_err().to_string().contains("part 3 of 3 is missing"));
}

#[test]
fn a_folder_must_hold_exactly_one_model() {
    let (folder, _) = set(&parts(&[1, 1, 1]));
    fs::write(folder.path().join("README.md"), "").unwrap();
    fs::write(folder.path().join("._m.gguf"), "resource fork").unwrap();
    crate::open(folder.path()).unwrap();
    fs::write(folder.path().join("mmproj-F16.gguf"), Gguf::model().bytes()).unwrap();
    let error = refusal(folder.path(), crate::open(folder.path()));
    assert!(matches!(error, Error::Split(_)), "{error}");
    let message = error.to_string();
    assert!(message.contains("mmproj-F16.gguf") && message.contains("m-Q4_K_M-*-of-00003.gguf (3 files)"), "{message}");

    let outer = tempfile::tempdir().unwrap();
    fs::create_dir(outer.path().join("Q4_K_M")).unwrap();
    let error = refusal(outer.path(), crate::open(outer.path()));
    assert!(error.to_string().contains("no .gguf file") && error.to_string().contains("Q4_K_M"), "{error}");

    let absent = outer.path().join("absent.gguf");
    assert!(matches!(refusal(&absent, crate::open(&absent)), Error::Io { .. }));
    let empty = outer.path().join("empty.gguf");
    fs::write(&empty, "").unwrap();
    assert!(refusal(&empty, crate::open(&empty)).to_string().contains("empty"));
}
