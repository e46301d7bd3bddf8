//! The engine: the same bytes however it is run, the right values, every source byte fetched once.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;
#[path = "common/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

#[path = "engine/deviations.rs"]
mod deviations;
#[path = "engine/encoded.rs"]
mod encoded;
#[path = "engine/random.rs"]
mod random;
#[path = "engine/reads.rs"]
mod reads;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use ggshard::convert::{Extras, Output, Planned, Report, convert};
use ggshard::dequant::FloatType;
use ggshard::engine::{Engine, Options, Sink};
use ggshard::error::{Error, Result};
use ggshard::gguf::{GgmlType, GgufSet, Io, OpenOptions};
use ggshard::mapping::{Mapping, choose};
use ggshard::plan::audit::audit;
use ggshard::plan::{Plan, Policy};
use gguf_writer::GgufBuilder;
use plans::{DEEPSEEK, GLM};
use truth::Truth;

/// An audited plan with its source.
fn planned(set: GgufSet, mapping: &Mapping, tp: u32, dtype: FloatType) -> Planned {
    let plan = plans::plan(&set, mapping, tp, Policy { dtype, part_size: 1 << 20, ..plans::policy() });
    audit(&plan).unwrap();
    Planned { set, mapping: mapping.clone(), plan }
}

fn toy(tp: u32, dtype: FloatType) -> Planned {
    planned(toy::set(), &toy::mapping(), tp, dtype)
}

fn fixture(name: &str, tp: u32, dtype: FloatType) -> Planned {
    let set = plans::open(name);
    let mapping = choose(&set).unwrap();
    planned(set, &mapping, tp, dtype)
}

fn options(threads: usize, tile_bytes: u64) -> Options {
    Options { threads, tile_bytes, allow_nonfinite: true, ..Options::default() }
}

/// Converts into a new folder. Gives every file by name.
fn folder(planned: &Planned, options: Options) -> (BTreeMap<String, Vec<u8>>, Report) {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("out");
    let sealed = Output { seal: Some(true), ..Output::from(&output) };
    let report = convert(planned, sealed, options, &Extras::default(), &|_| {}).unwrap();
    (read(&output), report)
}

fn read(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// Keeps the bytes of every slice in memory and counts how often each came.
struct Slices {
    /// By parameter, then by rank.
    slices: Vec<Vec<Mutex<Slice>>>,
}

/// The bytes of a slice, and how often each came.
type Slice = (Vec<u8>, Vec<u8>);

impl Slices {
    fn new(plan: &Plan) -> Self {
        let empty = |param: &ggshard::plan::Param, slice| {
            let bytes = plan.slice_bytes(param, slice) as usize;
            Mutex::new((vec![0; bytes], vec![0; bytes]))
        };
        Slices { slices: plan.params.iter().map(|p| p.slices.iter().map(|s| empty(p, s)).collect()).collect() }
    }

    /// The bytes of a slice, each of which must have come exactly once.
    fn of(&self, param: usize, rank: usize) -> Vec<u8> {
        let slice = self.slices[param][rank].lock().unwrap();
        assert!(slice.1.iter().all(|n| *n == 1), "parameter {param}, rank {rank}: a byte came twice or never");
        slice.0.clone()
    }
}

impl Sink for Slices {
    fn put(&self, param: u32, ranks: &[u32], offset: u64, bytes: &[u8]) -> Result<()> {
        for rank in ranks {
            let mut slice = self.slices[param as usize][*rank as usize].lock().unwrap();
            let at = offset as usize..offset as usize + bytes.len();
            slice.0[at.clone()].copy_from_slice(bytes);
            slice.1[at].iter_mut().for_each(|n| *n += 1);
        }
        Ok(())
    }
}

fn run(planned: &Planned, options: Options) -> (Slices, ggshard::engine::Outcome) {
    let sink = Slices::new(&planned.plan);
    let outcome = Engine::new(&planned.plan, &planned.set, options).run(&sink, &|_| {}).unwrap();
    (sink, outcome)
}

/// The dtype, shape and bytes of a rank's tensors, by name.
fn tensors(
    files: &BTreeMap<String, Vec<u8>>,
    tp: usize,
    rank: usize,
) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let prefix = if tp == 1 { "model-".to_owned() } else { format!("model-rank-{rank}-part-") };
    let mut found = BTreeMap::new();
    let parts = files.iter().filter(|(n, _)| n.starts_with(&prefix) && n.ends_with(".safetensors"));
    for (_, bytes) in parts {
        for (name, view) in safetensors::SafeTensors::deserialize(bytes).unwrap().tensors() {
            let entry = (format!("{:?}", view.dtype()).to_lowercase(), view.shape().to_vec(), view.data().to_vec());
            assert!(found.insert(name, entry).is_none());
        }
    }
    found
}

/// Compares files with the truth: exactly its tensors on every rank, each with its shape, dtype and bytes.
fn compare(files: &BTreeMap<String, Vec<u8>>, truths: &[Truth], tp: usize, policy: &str) {
    for rank in 0..tp {
        let mut found = tensors(files, tp, rank);
        for truth in truths {
            let name = &truth.name;
            let (dtype, shape, bytes) = found.remove(name).unwrap_or_else(|| panic!("rank {rank} lacks '{name}'"));
            let (wanted_shape, values) = truth.slice(tp, rank);
            assert_eq!(shape, wanted_shape, "{name}");
            assert_eq!(dtype, if truth.f32 { "f32" } else { policy }, "{name}");
            let wanted = truth::bytes(&values, &dtype);
            let width = wanted.len() / values.len().max(1);
            if let Some(at) = (0..values.len()).find(|i| bytes[i * width..][..width] != wanted[i * width..][..width]) {
                panic!("rank {rank} of {tp}, '{name}', element {at}: not {}", values[at]);
            }
        }
        assert!(found.is_empty(), "rank {rank} holds more: {:?}", found.keys());
    }
}

#[test]
fn folders_are_the_same_whatever_threads_and_tiles() {
    for tp in [1, 2, 4] {
        let planned = toy(tp, FloatType::BF16);
        let (reference, _) = folder(&planned, options(1, 64 << 20));
        for (threads, tile) in [(1, 1), (2, 1), (7, 1), (1, 100), (2, 777), (7, 4096), (7, 64 << 20), (2, 512 << 10)] {
            let (again, _) = folder(&planned, options(threads, tile));
            assert!(again == reference, "tp {tp}, {threads} threads, tiles of {tile} bytes");
        }
    }
}

#[test]
fn fixture_folders_are_the_same_whatever_threads_and_tiles() {
    for (name, tp) in [(GLM, 1), (GLM, 4), (DEEPSEEK, 2)] {
        let planned = fixture(name, tp, FloatType::BF16);
        let (reference, _) = folder(&planned, options(2, 64 << 20));
        for (threads, tile) in [(1, 512 << 10), (7, 3000)] {
            let (again, _) = folder(&planned, options(threads, tile));
            assert!(again == reference, "{name}, tp {tp}, {threads} threads, tiles of {tile} bytes");
        }
    }
}

#[test]
fn every_byte_comes_once_even_in_tiles_of_one_byte() {
    for (planned, tile) in
        [(toy(1, FloatType::F32), 1), (toy(4, FloatType::F16), 1), (fixture(GLM, 2, FloatType::BF16), 1)]
    {
        let (reference, _) = run(&planned, options(2, 64 << 20));
        let (tiny, _) = run(&planned, options(7, tile));
        for (index, param) in planned.plan.params.iter().enumerate() {
            for rank in 0..planned.plan.tp as usize {
                assert!(tiny.of(index, rank) == reference.of(index, rank), "'{}', rank {rank}", param.name);
            }
        }
    }
}

#[test]
fn toy_values_equal_a_plain_recomputation() {
    for (dtype, name) in [(FloatType::BF16, "bf16"), (FloatType::F16, "f16"), (FloatType::F32, "f32")] {
        for tp in [1, 2, 4] {
            let planned = toy(tp, dtype);
            let truths = toy::truth(&planned.set);
            compare(&folder(&planned, options(2, 1000)).0, &truths, tp as usize, name);
        }
    }
}

#[test]
fn fixture_values_equal_a_plain_recomputation() {
    for fixture_name in [GLM, DEEPSEEK] {
        let truths = truth::mla_moe(&plans::open(fixture_name));
        for (tp, dtype, name) in
            [(1, FloatType::F32, "f32"), (2, FloatType::BF16, "bf16"), (4, FloatType::BF16, "bf16")]
        {
            let planned = fixture(fixture_name, tp, dtype);
            compare(&folder(&planned, Options::default()).0, &truths, tp as usize, name);
        }
    }
}

#[test]
fn some_ranks_give_the_files_that_all_ranks_give() {
    for planned in [toy(4, FloatType::BF16), fixture(GLM, 4, FloatType::BF16)] {
        let (whole, _) = folder(&planned, options(2, 10_000));
        for ranks in [vec![0], vec![3], vec![2, 1], vec![0, 3]] {
            let (some, report) =
                folder(&planned, Options { ranks: ranks.clone(), track_reads: true, ..options(2, 10_000) });
            assert_eq!(report.repeated_bytes, Some(0));
            let mut count = 0;
            for (name, bytes) in some.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
                assert!(ranks.iter().any(|r| name.starts_with(&format!("model-rank-{r}-"))), "{name}");
                assert!(*bytes == whole[name], "{name}");
                count += 1;
            }
            let wanted = whole.keys().filter(|n| ranks.iter().any(|r| n.starts_with(&format!("model-rank-{r}-part-"))));
            assert_eq!(count, wanted.count());
        }
    }
}

#[test]
fn a_plan_for_another_file_is_not_executed() {
    let planned = toy(2, FloatType::BF16);
    let sink = Slices::new(&planned.plan);
    // One tensor of another type with blocks of the same size, one renamed, one longer, one less.
    let mut others = Vec::new();
    for change in 0..4 {
        let mut builder = toy::builder();
        let index = builder.tensors.iter().position(|t| t.name == "blk.0.attn_qkv.weight").unwrap();
        match change {
            0 => builder.tensors[index].ty = ggshard::gguf::GgmlType::F16,
            1 => builder.tensors[index].name = "blk.0.attn_qkv2.weight".into(),
            2 => builder.tensors.swap(index, index + 1),
            _ => drop(builder.tensors.pop()),
        }
        others.push(GgufSet::from_bytes("other.gguf", builder.build()).unwrap());
    }
    for other in others {
        match Engine::new(&planned.plan, &other, options(1, 1000)).run(&sink, &|_| {}) {
            Err(Error::Audit(_)) => {}
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("a plan was executed on a file that it was not made for"),
        }
    }
}

#[test]
fn mapped_or_read_the_bytes_are_the_same_and_fetched_once() {
    for name in [GLM, DEEPSEEK] {
        let [mapped, read] = [Io::Mmap, Io::Pread].map(|io| {
            let opening = OpenOptions { io, ..OpenOptions::default() };
            let set = GgufSet::open_with(plans::fixture(name), opening).unwrap();
            let mapping = choose(&set).unwrap();
            let planned = planned(set, &mapping, 2, FloatType::BF16);
            let (files, report) = folder(&planned, Options { track_reads: true, ..options(3, 4096) });
            assert_eq!(report.repeated_bytes, Some(0));
            (files, report.source_bytes)
        });
        assert!(mapped == read, "{name}");
    }
}

#[test]
fn a_nan_has_the_same_bits_whether_its_block_is_decoded_whole_or_not() {
    // Infinity times 0, of which x86 makes a negative NaN and ARM a positive one.
    let block = [&0x7C00u16.to_le_bytes()[..], &[0; 32]].concat();
    let file = GgufBuilder::architecture("nan").tensor("o.weight", GgmlType::Q8_0, &[32, 1], block);
    let text = r#"
name = "nan"
extends = "common"
[[weight]]
name = "o"
shape = [1, 32]
cut = { row = 2 }
from = { gguf = "o.weight" }
"#;
    let mapping = Mapping::from_texts(&[text.to_owned()]).unwrap();
    let set = GgufSet::from_bytes("nan.gguf", file.build()).unwrap();
    let planned = planned(set, &mapping, 2, FloatType::BF16);
    // Both ranks together take the block whole, one rank alone takes a half.
    for ranks in [vec![0, 1], vec![1]] {
        let (slices, _) = run(&planned, Options { ranks: ranks.clone(), ..options(1, 4096) });
        assert_eq!(slices.of(0, 1), [0xC0u8, 0x7F].repeat(16), "ranks {ranks:?}");
    }
}
