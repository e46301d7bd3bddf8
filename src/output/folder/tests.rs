use super::*;

const FILES: [&str; 3] = ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "mtp/a.safetensors"];

fn record() -> Record {
    let zero = "0".repeat(64);
    let rules = serde_json::json!({ "name": "n", "version": "1", "digest": zero, "launch": [] });
    let mut mapping = rules.clone();
    mapping.as_object_mut().unwrap().remove("launch");
    let files: Vec<_> = FILES.iter().map(|name| serde_json::json!({ "name": name, "rank": 0 })).collect();
    let record = serde_json::json!({
        "format": "ggshard work", "format_version": 1, "tool": "t", "plan": zero,
        "source": { "architecture": "a", "parts": [] }, "marks": [], "mapping": mapping, "profile": rules,
        "topology": { "tp": 1, "ranks": [0] },
        "policy": { "dtype": "bf16", "mtp": "keep", "part_size": 1, "allow_nonfinite": false },
        "warnings": [], "ignored": [], "parameters": [], "others": [], "files": files, "index": null,
    });
    Record::parse(&serde_json::to_vec(&record).unwrap()).unwrap()
}

fn claim(path: &Path, resume: bool) -> OutputFolder {
    let record = record();
    let claim =
        Claim { ranks: &[0], record: &record, others: &[], sources: &[], resume, keep: true, same_source: false };
    match OutputFolder::claim(path, &claim).unwrap() {
        Claimed::Open(folder) => *folder,
        Claimed::Sealed(..) => panic!("it is sealed"),
    }
}

fn entry(name: &str) -> FileEntry {
    let (name, blake3) = (name.to_owned(), Digest::of(b""));
    FileEntry { name, rank: None, stage: None, bytes: 0, header_bytes: 0, blake3, tensors: Vec::new() }
}

/// Finishes the files and writes the manifest.
fn fill(folder: &OutputFolder) {
    for (index, name) in FILES.iter().enumerate() {
        let file = folder.open_partial(name, 0, false).unwrap();
        folder.complete(index, entry(name), Vec::new(), file.file()).unwrap();
    }
    write_manifest(folder);
}

fn write_manifest(folder: &OutputFolder) {
    folder.begin_manifest().unwrap().write_all(b"manifest").unwrap();
}

/// A process that dies between any two steps leaves nothing that passes for a checkpoint: no manifest, and nothing
/// that a stack reads first (config.json, an index) unless every weight is in place under its name. And whatever it
/// leaves, the next one can finish.
#[test]
fn a_death_after_any_step_leaves_no_checkpoint() {
    let others = [("config.json".to_owned(), b"{}".to_vec()), ("mtp/config.json".to_owned(), b"{}".to_vec())];
    let all = steps(&FILES, &others, b"sums");
    let last = all.iter().rposition(|s| matches!(s, Step::Manifest)).unwrap();
    for dies_after in 0..=all.len() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("out");
        let folder = claim(&path, false);
        fill(&folder);
        for step in &all[..dies_after] {
            folder.take(*step).unwrap();
        }
        // No destructor runs in a process that is killed, but its locks are released.
        let mut folder = std::mem::ManuallyDrop::new(folder);
        folder.work.release();
        let is = |name: &str| path.join(name).exists();
        assert_eq!(is(filename::MANIFEST), dies_after > last, "after {dies_after} steps");
        if is("config.json") || is("mtp/config.json") || is(filename::SUMS) {
            assert!(FILES.iter().all(|name| is(name)), "after {dies_after} steps");
        }
        let complete =
            || FILES.iter().all(|name| is(name)) && is("config.json") && is("mtp/config.json") && is(filename::SUMS);
        if dies_after > last {
            assert!(complete());
            continue;
        }
        let folder = claim(&path, true);
        let finished = folder.finished(&record(), &[0], 1, &|_| Ok(())).unwrap();
        assert_eq!(finished.len(), FILES.len(), "after {dies_after} steps");
        write_manifest(&folder);
        folder.commit(&FILES, &others, b"sums").unwrap();
        assert!(complete() && is(filename::MANIFEST) && !is(filename::WORK), "after {dies_after} steps");
    }
}

/// A process that has looked at a folder which is then sealed by another one takes nothing from the checkpoint.
#[test]
fn whoever_comes_as_it_is_sealed_leaves_the_checkpoint_alone() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("out");
    let folder = claim(&path, false);
    fill(&folder);
    folder.commit(&FILES, &[("config.json".to_owned(), b"{}".to_vec())], b"sums").unwrap();
    let record = record();
    for resume in [false, true] {
        let claim =
            Claim { ranks: &[0], record: &record, others: &[], sources: &[], resume, keep: true, same_source: false };
        // As if the look had been before the commit. The manifest of this test is none, so neither goes on.
        OutputFolder::enter(&path, &claim).unwrap_err();
        let is = |name: &str| path.join(name).is_file();
        assert!(FILES.iter().all(|name| is(name)) && is("config.json") && is(filename::SUMS) && is(filename::MANIFEST));
        assert!(!path.join(filename::WORK).exists());
    }
}

/// Weights that must be made again go only after what makes the folder look complete.
#[test]
fn what_is_redone_takes_the_config_away_first() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("out");
    let folder = claim(&path, false);
    fill(&folder);
    for step in steps(&FILES, &[], b"sums").iter().take(5) {
        folder.take(*step).unwrap();
    }
    drop(folder);
    std::fs::write(path.join(filename::SUMS), b"sums").unwrap();
    std::fs::write(path.join(FILES[1]), b"damaged").unwrap();
    let folder = claim(&path, true);
    let finished = folder.finished(&record(), &[0], 2, &|_| Ok(())).unwrap();
    assert_eq!(finished.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 2]);
    assert!(!path.join(filename::SUMS).exists() && !path.join(FILES[1]).exists());
}

#[test]
fn a_run_that_does_not_resume_leaves_unfinished_work_alone() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("out");
    let folder = claim(&path, false);
    fill(&folder);
    drop(folder);
    let record = record();
    let claim = Claim {
        ranks: &[0],
        record: &record,
        others: &[],
        sources: &[],
        resume: false,
        keep: false,
        same_source: false,
    };
    let error = OutputFolder::claim(&path, &claim).unwrap_err().to_string();
    assert!(error.contains("--resume"), "{error}");
    assert!(FILES.iter().all(|name| path.join(format!("{name}{DONE}")).exists()));
}
