//! Opening one rank of a folder.

use std::fs;
use std::path::Path;

use ggshard::Error;
use ggshard::convert::Request;
use ggshard::output::Manifest;
use ggshard::runtime::{OpenOptions, RankCheckpoint, Set, Verify};

use super::folders::{converted, converted_by, deepseek, edit, edit_manifest, edit_tensor, find, glm, reseal, write};
use super::{Tensors, parse, vllm};

fn full() -> OpenOptions {
    OpenOptions { verify: Verify::Full, threads: 2, ..OpenOptions::default() }
}

/// Everything that an open checkpoint gives, in four ways that must agree.
fn held(open: &RankCheckpoint) -> Tensors {
    let mut all = Tensors::new();
    let mut copies: Vec<Vec<u8>> = open.iter().map(|t| vec![0xAA; t.bytes.len()]).collect();
    let mut places = copies.iter_mut();
    assert_eq!(open.copy_all(|_| places.next().map(Vec::as_mut_slice)).unwrap(), open.total_bytes());
    for ((tensor, name), copy) in open.iter().zip(open.names()).zip(&copies) {
        assert_eq!((tensor.name, Some(tensor)), (name, open.get(name)));
        let shared = open.shared(name).unwrap();
        assert_eq!((shared.name(), shared.dtype(), shared.shape()), (name, tensor.dtype, tensor.shape));
        assert_eq!(shared.as_bytes(), tensor.bytes);
        assert_eq!(copy, tensor.bytes);
        let mut one = vec![0; tensor.bytes.len()];
        open.copy_to(name, &mut one).unwrap();
        assert_eq!(one, tensor.bytes);
        assert!((tensor.bytes.as_ptr() as u64).is_multiple_of(tensor.dtype.bytes()), "{name}");
        assert!(all.insert(name.to_owned(), (tensor.shape.to_vec(), tensor.bytes.to_vec())).is_none());
    }
    assert_eq!(all.len(), open.len());
    all
}

#[test]
fn every_rank_holds_what_an_independent_reader_finds() {
    for tp in [1, 2, 4] {
        for request in [Request { tp, ..Request::default() }, vllm(tp)] {
            let folder = converted_by(&glm(), &request);
            let manifest = Manifest::read(folder.path()).unwrap();
            for rank in 0..tp {
                let own = |name: &str| manifest.files_of(rank).any(|f| f.name == name);
                let open = RankCheckpoint::open(folder.path(), rank, full()).unwrap();
                assert_eq!(held(&open), parse(folder.path(), |name| own(name) && !name.contains('/')));
                assert_eq!((open.tp(), open.pp(), open.profile(), open.dtype()), (tp, 1, &*request.profile, "bf16"));
                assert_eq!(open.plan_digest(), manifest.plan);
                let order: Vec<&str> =
                    manifest.parameters.iter().filter(|p| p.set.is_empty()).map(|p| &*p.name).collect();
                assert!(open.names().eq(order));
                let draft = OpenOptions { set: Set::Draft, ..full() };
                if request.profile == "hf" {
                    let error = RankCheckpoint::open(folder.path(), rank, draft).unwrap_err();
                    assert!(error.to_string().contains("no draft model"), "{error}");
                } else {
                    let open = RankCheckpoint::open(folder.path(), rank, draft).unwrap();
                    assert_eq!(held(&open), parse(folder.path(), |name| own(name) && name.starts_with("mtp/")));
                }
            }
        }
    }
}

#[test]
fn stages_are_opened_one_at_a_time_or_together() {
    let folder = converted_by(&deepseek(), &Request { pp: 2, ..vllm(2) });
    for rank in 0..2 {
        let mut joined = Tensors::new();
        for stage in 0..2 {
            let options = OpenOptions { stage: Some(stage), ..full() };
            let open = RankCheckpoint::open(folder.path(), rank, options).unwrap();
            let expected = parse(folder.path(), |name| name.starts_with(&format!("model-pp-{stage}-tp-{rank}-")));
            assert!(expected.len() > 10);
            assert_eq!(held(&open), expected);
            joined.extend(expected);
        }
        assert_eq!(held(&RankCheckpoint::open(folder.path(), rank, full()).unwrap()), joined);
    }
    let error = RankCheckpoint::open(folder.path(), 0, OpenOptions { stage: Some(2), ..full() }).unwrap_err();
    assert!(error.to_string().contains("pipeline stage 2"), "{error}");
}

#[test]
fn a_rank_opens_without_the_files_of_the_others_and_maps_only_its_own() {
    let folder = converted_by(&glm(), &vllm(2));
    let manifest = Manifest::read(folder.path()).unwrap();
    for file in manifest.files.iter().filter(|f| f.rank != Some(1) || f.name.contains('/')) {
        fs::rename(folder.path().join(&file.name), folder.path().join(format!("{}.away", file.name))).unwrap();
    }
    let open = RankCheckpoint::open(folder.path(), 1, full()).unwrap();
    assert_eq!(open.prefetch(), manifest.files_of(1).filter(|f| !f.name.contains('/')).map(|f| f.bytes).sum::<u64>());
    for path in open.files() {
        assert!(path.file_name().unwrap().to_string_lossy().starts_with("model-rank-1-"), "{path:?}");
    }
    let error = RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap_err();
    assert!(error.to_string().contains("model-rank-0-part-0.safetensors"), "{error}");
}

/// Every page of this rank's files is resident after prefetch, and nothing of another rank's is mapped at all.
#[cfg(target_os = "linux")]
#[test]
fn prefetch_maps_every_page_of_this_rank_and_none_of_another() {
    let folder = converted_by(&glm(), &vllm(2));
    let open = RankCheckpoint::open(folder.path(), 1, OpenOptions { threads: 2, ..OpenOptions::default() }).unwrap();
    let bytes = open.prefetch();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let here = fs::canonicalize(folder.path()).unwrap();
    let (mut ours, mut resident) = (false, 0);
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if first.contains('-') {
            ours = line.contains(&*here.to_string_lossy());
            assert!(!ours || line.contains("model-rank-1-"), "{line}");
        } else if ours && first == "Rss:" {
            resident += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024;
        }
    }
    assert!(resident >= bytes, "{resident} of {bytes} bytes are resident");
}

fn crosses_threads<T: Send + Sync + 'static>() {}

#[test]
fn tensors_outlive_their_checkpoint_and_cross_threads() {
    crosses_threads::<RankCheckpoint>();
    crosses_threads::<ggshard::runtime::SharedTensor>();
    crosses_threads::<ggshard::runtime::Source>();
    crosses_threads::<ggshard::runtime::Weights>();
    let folder = converted(&glm(), 1);
    let open = RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    let clone = open.clone();
    let name = open.names().next().unwrap().to_owned();
    let (shared, expected) = (open.shared(&name).unwrap(), open.get(&name).unwrap().bytes.to_vec());
    drop(open);
    drop(clone);
    std::thread::spawn(move || assert_eq!(shared.as_bytes(), expected)).join().unwrap();
}

/// The error of opening rank 0, which must be about the checkpoint and name everything given.
fn refused(folder: &Path, options: OpenOptions, names: &[&str]) {
    let error = RankCheckpoint::open(folder, 0, options).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(_) | Error::Truncated(_)), "{error}");
    for name in names {
        assert!(error.to_string().contains(name), "'{name}' is not in: {error}");
    }
}

const FILE: &str = "model-rank-0-part-0.safetensors";
const NORM: &str = "model.norm.weight";

#[test]
fn whatever_differs_is_refused_by_name() {
    let source = glm();
    let fresh = || converted_by(&source, &vllm(2));

    let folder = fresh();
    let error = RankCheckpoint::open(folder.path(), 2, full()).unwrap_err();
    assert!(error.to_string().contains("rank 2 is not in this folder"), "{error}");
    refused(folder.path(), OpenOptions { stage: Some(1), ..full() }, &["pipeline stage 1"]);

    fs::remove_file(folder.path().join(FILE)).unwrap();
    refused(folder.path(), OpenOptions::default(), &[FILE, "missing"]);

    let folder = fresh();
    edit(&folder.path().join(FILE), |bytes| bytes.truncate(bytes.len() - 1));
    refused(folder.path(), OpenOptions::default(), &[FILE, "differ"]);

    // A flipped bit is only seen by who reads it.
    let folder = fresh();
    edit_tensor(folder.path(), NORM, 0, |bytes| bytes[5] ^= 16);
    edit_tensor(folder.path(), "model.embed_tokens.weight", 0, |bytes| bytes[7] ^= 1);
    assert!(RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).is_ok());
    assert!(RankCheckpoint::open(folder.path(), 1, full()).is_ok());
    refused(folder.path(), full(), &[FILE, NORM, "model.embed_tokens.weight", "3 differences"]);

    // One tensor renamed in the file's own header, same length: one is lacking and one too many.
    let folder = fresh();
    edit(&folder.path().join(FILE), |bytes| {
        let at = bytes.windows(NORM.len()).position(|w| w == NORM.as_bytes()).unwrap();
        bytes[at..at + NORM.len()].copy_from_slice(b"model.sorm.weight");
    });
    refused(folder.path(), OpenOptions::default(), &[FILE, NORM, "model.sorm.weight"]);

    // The manifest edited without its digest.
    let folder = fresh();
    edit(&folder.path().join("ggshard.json"), |bytes| {
        let at = bytes.windows(NORM.len()).position(|w| w == NORM.as_bytes()).unwrap();
        bytes[at] = b'n';
    });
    refused(folder.path(), OpenOptions::default(), &["ggshard.json"]);
}

#[test]
fn a_resealed_folder_that_lacks_a_parameter_for_one_rank_is_refused() {
    let folder = converted_by(&glm(), &vllm(2));
    let (file, last) = (find(folder.path(), NORM, 0).0, find(folder.path(), NORM, 0).0.tensors.pop().unwrap());
    let bytes = fs::read(folder.path().join(&file.name)).unwrap();
    let header = ggshard::output::SafetensorsHeader::layout(
        file.tensors[..file.tensors.len() - 1].iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone())),
        Default::default(),
    )
    .unwrap();
    let mut new = header.to_bytes().unwrap();
    let header_bytes = new.len() as u64;
    new.extend_from_slice(&bytes[file.header_bytes as usize..(file.header_bytes + last.offsets.0) as usize]);
    fs::write(folder.path().join(&file.name), &new).unwrap();
    edit_manifest(folder.path(), |manifest| {
        let entry = manifest.files.iter_mut().find(|f| f.name == file.name).unwrap();
        entry.tensors.pop();
        (entry.header_bytes, entry.bytes) = (header_bytes, new.len() as u64);
    });
    reseal(folder.path());
    refused(folder.path(), OpenOptions::default(), &[&last.name, "no file of rank 0 holds"]);
    assert!(RankCheckpoint::open(folder.path(), 1, full()).is_ok());
}

#[test]
fn another_layout_than_expected_is_refused_with_both_and_a_remedy() {
    let folder = converted_by(&glm(), &vllm(2));
    let mut manifest = Manifest::read(folder.path()).unwrap();
    let open = RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    open.expect(2, 1, "vllm-0.32").unwrap();
    for (tp, pp, profile, what) in
        [(4, 1, "vllm-0.32", "number of ranks"), (2, 2, "vllm-0.32", "stages"), (2, 1, "hf", "the profile differs")]
    {
        let error = open.expect(tp, pp, profile).unwrap_err().to_string();
        for part in [what, "tp 2, pp 1, profile 'vllm-0.32'", &format!("--profile {profile} --tp {tp}")] {
            assert!(error.contains(part), "{error}");
        }
    }
    // A folder of some ranks opens for those only.
    manifest.topology.ranks = vec![1];
    manifest.files.retain(|f| f.rank == Some(1));
    write(folder.path(), &manifest);
    refused(folder.path(), OpenOptions::default(), &["rank 0 is not in this folder"]);
    assert_eq!(RankCheckpoint::open(folder.path(), 1, OpenOptions::default()).unwrap().tp(), 2);
}

#[test]
fn copies_need_memory_of_the_very_length() {
    let folder = converted(&glm(), 1);
    let open = RankCheckpoint::open(folder.path(), 0, OpenOptions::default()).unwrap();
    let error = open.copy_to(NORM, &mut [0; 3]).unwrap_err().to_string();
    assert!(error.contains(NORM) && error.contains("3 bytes"), "{error}");
    let error = open.copy_to("nothing", &mut []).unwrap_err().to_string();
    assert!(error.contains("nothing"), "{error}");
    assert_eq!(open.copy_all(|_| None).unwrap(), 0);
    let mut short = [0; 1];
    let mut place = Some(&mut short[..]);
    assert!(open.copy_all(|_| place.take()).is_err());
}
