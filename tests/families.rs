//! Every model family against a real serving stack: what vLLM 0.32 holds in its parameters after it has loaded the
//! original checkpoint, and the checkpoint itself.
//!
//! The fixtures and their digests come from `families/make_fixtures.py`, which does not use ggshard. With
//! `GGSHARD_CORPUS` set to a folder with `models/NAME/NAME.tar.zst` and `oracle/NAME.json`, those are compared as well.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ggshard::convert::{Request, convert, plan};
use ggshard::engine::Options;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// Dtype, shape, and the first 32 hexadecimal digits of the SHA-256 of the bytes.
type Expected = (String, Vec<usize>, String);
/// The parameters of a rank by name.
type Rank = BTreeMap<String, Expected>;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// One output: `tp4`, `tp2-ep` (whole experts per rank) or `tp2-mtp` (the draft model's files).
struct Size {
    tp: u32,
    expert_parallel: bool,
    draft: bool,
}

impl Size {
    fn parse(text: &str) -> Self {
        let (tp, mode) = text.split_once('-').unwrap_or((text, ""));
        assert!(matches!(mode, "" | "ep" | "mtp"), "unknown size '{text}'");
        let tp = tp.strip_prefix("tp").unwrap().parse().unwrap();
        Size { tp, expert_parallel: mode == "ep", draft: mode == "mtp" }
    }
}

fn converted(source: &Path, profile: &str, size: &Size) -> Result<TempDir, ggshard::Error> {
    let out = tempfile::tempdir().unwrap();
    let request =
        Request { profile: profile.into(), tp: size.tp, expert_parallel: size.expert_parallel, ..Request::default() };
    let planned = plan(source, &request, false)?;
    convert(&planned, &out.path().join("out"), Options::default(), &ggshard::convert::Extras::default(), &|_| {})?;
    Ok(out)
}

/// What a folder's files hold: those of one rank, or of a whole checkpoint, which have no rank in their names.
fn held(folder: &Path, rank: Option<usize>) -> Rank {
    let mut all = Rank::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let ours = rank.is_none_or(|r| name.starts_with(&format!("model-rank-{r}-part-")));
        if !ours || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, tensor) in file.tensors() {
            let digest: String = Sha256::digest(tensor.data())[..16].iter().map(|b| format!("{b:02x}")).collect();
            let value = (format!("{:?}", tensor.dtype()), tensor.shape().to_vec(), digest);
            assert!(all.insert(name.clone(), value).is_none(), "{name} twice");
        }
    }
    all
}

/// Converts for one size and compares every rank. Returns the number of tensors that were compared.
fn compare(label: &str, source: &Path, profile: &str, size: &str, expected: &Value) -> usize {
    let wanted = Size::parse(size);
    let outcome = converted(source, profile, &wanted);
    if let Some(why) = expected.as_str() {
        assert!(outcome.is_err(), "{label}: should be refused ({why})");
        return 1;
    }
    let out = outcome.unwrap_or_else(|e| panic!("{label}: {e}"));
    let folder = out.path().join(if wanted.draft { "out/mtp" } else { "out" });
    let ranks: Vec<Rank> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(ranks.len(), wanted.tp as usize, "{label}: ranks");
    let mut compared = 0;
    for (rank, expected) in ranks.iter().enumerate() {
        let held = held(&folder, (profile != "hf").then_some(rank));
        let names: BTreeSet<&String> = held.keys().chain(expected.keys()).collect();
        for name in names {
            assert_eq!(held.get(name), expected.get(name), "{label}, rank {rank}: {name}");
            compared += 1;
        }
    }
    compared
}

/// Compares everything that the JSON has of one file: profile, then size, then ranks.
fn compare_all(label: &str, source: &Path, profiles: &Value) -> usize {
    let mut compared = 0;
    for (profile, sizes) in profiles.as_object().unwrap() {
        for (size, ranks) in sizes.as_object().unwrap() {
            let found = compare(&format!("{label}, {profile} {size}"), source, profile, size, ranks);
            assert!(found > 0, "{label}, {profile} {size}: nothing to compare");
            compared += found;
        }
    }
    compared
}

fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

/// One test per family, so that they run side by side and a failure names its family.
fn family(name: &str, files: &[&str]) {
    let oracle = json(&repository().join(format!("fixtures/oracle/{name}.json")));
    let served = oracle.as_object().unwrap().iter().find(|(profile, _)| profile.starts_with("vllm-"));
    let (_, sizes) = served.expect("digests of vLLM");
    for needed in ["tp1", "tp2"] {
        assert!(sizes[needed][0].as_object().is_some_and(|rank| rank.len() > 10), "{name}: no digests for {needed}");
    }
    assert!(oracle["hf"]["tp1"][0].as_object().is_some_and(|rank| rank.len() > 10), "{name}: no checkpoint");
    for file in files {
        compare_all(file, &repository().join("fixtures/families").join(file), &oracle);
    }
}

#[test]
fn llama_with_biases() {
    family("llama", &["llama.gguf"]);
}

#[test]
fn mixtral_with_experts_stacked_and_apart() {
    family("mixtral", &["mixtral.gguf", "mixtral.per_expert.gguf"]);
}

#[test]
fn qwen2() {
    family("qwen2", &["qwen2.gguf"]);
}

#[test]
fn qwen2_moe_with_a_gated_shared_expert() {
    family("qwen2_moe", &["qwen2_moe.gguf"]);
}

#[test]
fn qwen3() {
    family("qwen3", &["qwen3.gguf"]);
}

#[test]
fn qwen3_moe() {
    family("qwen3_moe", &["qwen3_moe.gguf"]);
}

#[test]
fn gemma3_with_norms_plus_one_and_tied_embeddings() {
    family("gemma3", &["gemma3.gguf"]);
}

#[test]
fn glm4_moe_with_fused_qkv_and_an_mtp_block() {
    family("glm4_moe", &["glm4_moe.gguf"]);
}

#[test]
fn glm4_moe_lite_with_latent_attention_and_an_mtp_block() {
    family("glm4_moe_lite", &["glm4_moe_lite.gguf"]);
}

#[test]
fn deepseek_v32_with_an_indexer_and_an_mtp_block() {
    family("deepseek_v32", &["deepseek_v32.gguf"]);
}

#[test]
fn every_fixture_has_a_test_and_every_oracle_a_fixture() {
    let stems = |folder: &str| -> BTreeSet<String> {
        let names = fs::read_dir(repository().join("fixtures").join(folder)).unwrap();
        names.map(|e| e.unwrap().file_name().to_str().unwrap().split('.').next().unwrap().to_owned()).collect()
    };
    let (files, oracles) = (stems("families"), stems("oracle"));
    assert_eq!(files, oracles);
    let tests = include_str!("families.rs");
    for name in files {
        assert!(tests.contains(&format!("family(\"{name}\"")), "no test for {name}");
    }
}

#[test]
fn a_stack_whose_names_nobody_has_checked_is_refused() {
    let source = repository().join("fixtures/families/llama.gguf");
    let error = converted(&source, "sglang-0.5", &Size::parse("tp2")).unwrap_err();
    assert!(error.to_string().contains("LlamaForCausalLM"), "{error}");
}

#[test]
fn the_corpus_if_there_is_one() {
    let Some(corpus) = std::env::var_os("GGSHARD_CORPUS").map(PathBuf::from) else { return };
    let mut compared = 0;
    for entry in fs::read_dir(corpus.join("oracle")).unwrap() {
        let path = entry.unwrap().path();
        let model = path.file_stem().unwrap().to_str().unwrap();
        let archive = corpus.join("models").join(model).join(format!("{model}.tar.zst"));
        let unpacked = tempfile::tempdir().unwrap();
        let script = "set -o pipefail; zstd -q -d --long=27 -c \"$0\" | tar -x -C \"$1\"";
        let status = Command::new("bash").arg("-c").arg(script).arg(&archive).arg(unpacked.path()).status().unwrap();
        assert!(status.success(), "{} cannot be unpacked", archive.display());
        for (file, profiles) in json(&path).as_object().unwrap() {
            compared += compare_all(file, &unpacked.path().join(model).join(file), profiles);
        }
    }
    assert!(compared > 1000, "only {compared} tensors");
}
