//! Layouts for serving stacks beyond what the oracles hold: pipeline stages, padded experts, draft models without a trunk,
//! and what a profile refuses or leaves out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ggshard::convert::{Extras, Report, Request, convert, plan};
use ggshard::engine::Options;
use ggshard::error::Error;
use ggshard::mapping::MtpPolicy;
use ggshard::output::{Manifest, SafetensorsHeader};

/// A tensor as a file holds it.
type Tensor = (Vec<u64>, Vec<u8>);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

const GLM: &str = "models/glm_moe_dsa-UD-IQ2_XXS.gguf";
const DEEPSEEK: &str = "models/deepseek_v3-split";

fn vllm(tp: u32) -> Request {
    Request { profile: "vllm-0.32".into(), tp, ..Request::default() }
}

fn run(source: &str, request: &Request) -> Result<(tempfile::TempDir, Report), Error> {
    let planned = plan(&fixture(source), request, false)?;
    let folder = tempfile::tempdir().unwrap();
    let options = Options { allow_nonfinite: true, track_reads: true, ..Options::default() };
    let report = convert(&planned, folder.path(), options, &Extras::default(), &|_| {})?;
    assert_eq!(report.repeated_bytes, Some(0), "{source}");
    assert!(ggshard::verify::verify(folder.path(), Default::default()).unwrap().ok());
    Ok((folder, report))
}

/// The tensors of the files whose names begin so, by name; none may be there twice.
fn tensors(folder: &Path, prefix: &str) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let name = entry.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with(prefix) || !name.ends_with(".safetensors") {
            continue;
        }
        let header = SafetensorsHeader::read(&entry).unwrap();
        let bytes = std::fs::read(&entry).unwrap();
        for t in header.tensors {
            let at = |offset: u64| (header.header_bytes + offset) as usize;
            let data = bytes[at(t.offsets.0)..at(t.offsets.1)].to_vec();
            assert!(all.insert(t.name.clone(), (t.shape, data)).is_none(), "{} twice", t.name);
        }
    }
    all
}

fn layer(name: &str) -> Option<u64> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

#[test]
fn pipeline_stages_divide_the_model_and_nothing_else_changes() {
    for (tp, pp, layers, holds) in [(1, 3, vec![], [0, 1, 2]), (2, 2, vec![], [0, 0, 1]), (1, 2, vec![1, 2], [0, 1, 1])]
    {
        let (whole, _) = run(DEEPSEEK, &vllm(tp)).unwrap();
        let request = Request { pp, stage_layers: layers, ..vllm(tp) };
        let (staged, _) = run(DEEPSEEK, &request).unwrap();
        for rank in 0..tp {
            let all = tensors(whole.path(), &format!("model-rank-{rank}-"));
            let mut joined = BTreeMap::new();
            for stage in 0..pp {
                let own = tensors(staged.path(), &format!("model-pp-{stage}-tp-{rank}-"));
                for name in own.keys() {
                    let expected = match (layer(name), name.as_str()) {
                        (Some(layer), _) => holds[layer as usize],
                        (None, "model.embed_tokens.weight") => 0,
                        (None, _) => pp - 1,
                    };
                    assert_eq!(stage, expected, "{name}");
                }
                joined.extend(own);
            }
            assert!(joined.len() > 40 && joined == all);
        }
        let manifest = Manifest::read(staged.path()).unwrap();
        assert_eq!(manifest.topology.pp, pp);
        assert!(manifest.files.iter().all(|f| f.stage.is_some() && f.rank.is_some()));
    }
}

#[test]
fn tied_embeddings_are_on_both_ends_of_a_pipeline_and_once_without() {
    let (one, _) = run("families/gemma3.gguf", &vllm(2)).unwrap();
    let whole = tensors(one.path(), "model-rank-1-");
    assert!(whole.contains_key("lm_head.weight") && !whole.contains_key("model.embed_tokens.weight"));
    let (two, report) = run("families/gemma3.gguf", &Request { pp: 2, ..vllm(2) }).unwrap();
    let (first, last) = (tensors(two.path(), "model-pp-0-tp-1-"), tensors(two.path(), "model-pp-1-tp-1-"));
    assert_eq!(first["model.embed_tokens.weight"], whole["lm_head.weight"]);
    assert_eq!(last["lm_head.weight"], whole["lm_head.weight"]);
    assert!(!last.contains_key("model.embed_tokens.weight") && !first.contains_key("lm_head.weight"));
    assert_eq!(report.repeated_bytes, Some(0));
}

#[test]
fn stages_that_do_not_fit_are_refused_with_the_numbers() {
    for (pp, layers) in [(4, vec![]), (2, vec![1, 1]), (2, vec![2, 2]), (2, vec![u64::MAX, 3])] {
        let error = plan(&fixture(DEEPSEEK), &Request { pp, stage_layers: layers, ..vllm(1) }, false).err().unwrap();
        assert!(matches!(error, Error::Layout(_)), "{error}");
        assert!(error.to_string().contains('3'), "{error}");
    }
    let error = plan(&fixture(DEEPSEEK), &Request { pp: 2, profile: "hf".into(), ..vllm(1) }, false).err().unwrap();
    assert!(error.to_string().contains("pipeline"), "{error}");
}

/// Rows of `width` bytes.
fn rows(bytes: &[u8], width: usize) -> Vec<&[u8]> {
    bytes.chunks_exact(width).collect()
}

#[test]
fn padded_experts_have_zeros_after_gate_and_after_up_and_zero_columns_in_down() {
    const W13: &str = "model.layers.1.mlp.experts.routed_experts.w13_weight";
    const W2: &str = "model.layers.1.mlp.experts.routed_experts.w2_weight";
    let (plain, _) = run(DEEPSEEK, &vllm(4)).unwrap();
    let (padded, _) = run(DEEPSEEK, &Request { moe_pad: Some(128), ..vllm(4) }).unwrap();
    for rank in 0..4 {
        let prefix = format!("model-rank-{rank}-");
        let (plain, padded) = (tensors(plain.path(), &prefix), tensors(padded.path(), &prefix));
        // 8 experts; 64 of 256 rows each of gate and up, padded to 128; hidden size 256.
        assert_eq!((&plain[W13].0, &padded[W13].0), (&vec![8, 128, 256], &vec![8, 256, 256]));
        assert_eq!((&plain[W2].0, &padded[W2].0), (&vec![8, 256, 64], &vec![8, 256, 128]));
        let (from, to) = (rows(&plain[W13].1, 512), rows(&padded[W13].1, 512));
        for expert in 0..8 {
            for half in 0..2 {
                let (from, to) = (&from[expert * 128 + half * 64..], &to[expert * 256 + half * 128..]);
                assert_eq!(from[..64], to[..64], "expert {expert}, half {half}");
                assert!(to[64..128].iter().all(|row| row.iter().all(|b| *b == 0)));
            }
        }
        let (from, to) = (rows(&plain[W2].1, 128), rows(&padded[W2].1, 256));
        for (from, to) in from.iter().zip(&to) {
            assert!(**from == to[..128] && to[128..].iter().all(|b| *b == 0));
        }
        let others = |all: &BTreeMap<String, Tensor>| {
            all.iter()
                .filter(|(n, _)| !n.contains("routed_experts"))
                .map(|(n, t)| (n.clone(), t.clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(others(&plain), others(&padded));
    }
}

#[test]
fn ragged_experts_are_warned_about_unless_padded() {
    let warned = |request: &Request| {
        let planned = plan(&fixture(DEEPSEEK), request, false).unwrap();
        planned.plan.model.warnings.iter().any(|w| w.contains("--moe-pad 128"))
    };
    assert!(!warned(&vllm(2)));
    assert!(warned(&vllm(4)));
    assert!(!warned(&Request { moe_pad: Some(128), ..vllm(4) }));
    assert!(!warned(&Request { expert_parallel: true, ..vllm(4) }));
}

#[test]
fn the_draft_set_is_the_same_whether_the_trunk_is_there_or_not() {
    let (both, _) = run(GLM, &vllm(2)).unwrap();
    let (only, _) = run(GLM, &Request { mtp: MtpPolicy::Only, ..vllm(2) }).unwrap();
    for rank in 0..2 {
        let prefix = format!("model-rank-{rank}-");
        let draft = tensors(&both.path().join("mtp"), &prefix);
        assert!(draft.len() > 20);
        assert_eq!(draft, tensors(&only.path().join("mtp"), &prefix));
        assert!(tensors(only.path(), &prefix).is_empty());
        // Embedding and head are the main model's, for the file has none of its own.
        let main = tensors(both.path(), &prefix);
        assert_eq!(draft["model.embed_tokens.weight"], main["model.embed_tokens.weight"]);
        assert_eq!(draft["model.layers.2.shared_head.head.weight"], main["lm_head.weight"]);
    }
    let manifest = Manifest::read(only.path()).unwrap();
    assert!(manifest.ignored.iter().any(|i| i.tensor == "output_norm.weight" && i.reason.contains("trunk")));
    let (dropped, _) = run(GLM, &Request { mtp: MtpPolicy::Drop, ..vllm(2) }).unwrap();
    assert!(!dropped.path().join("mtp").exists());
    assert_eq!(tensors(dropped.path(), "model-rank-0-"), tensors(both.path(), "model-rank-0-"));
}

#[test]
fn what_a_stack_has_no_layout_for_is_left_out_by_name() {
    let (folder, _) = run(GLM, &Request { profile: "sglang-0.5".into(), ..vllm(2) }).unwrap();
    let manifest = Manifest::read(folder.path()).unwrap();
    let mtp: Vec<_> = manifest.ignored.iter().filter(|i| i.tensor.starts_with("blk.2.")).collect();
    assert!(mtp.len() > 20 && mtp.iter().all(|i| i.reason.contains("MTP block 2")));
    assert!(!manifest.profile.launch.is_empty());
}

#[test]
fn a_profile_refuses_what_it_does_not_cover() {
    let refused = |source: &str, request: &Request| match plan(&fixture(source), request, false) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{source} was accepted"),
    };
    let raw = Request { mapping: Some("raw".into()), ..vllm(1) };
    assert!(refused(GLM, &raw).contains("--profile hf"));
    assert!(
        refused("families/llama.gguf", &Request { profile: "sglang-0.5".into(), ..vllm(1) })
            .contains("LlamaForCausalLM")
    );
    let experts = Request { expert_parallel: true, ..vllm(16) };
    let message = refused(DEEPSEEK, &experts);
    assert!(message.contains("1, 2, 4, 8"), "{message}");
}

#[test]
fn cuda_fuses_the_indexer_where_the_checked_profile_does_not() {
    let (apart, _) = run(GLM, &Request { profile: "sglang-0.5".into(), ..vllm(1) }).unwrap();
    let (fused, _) = run(GLM, &Request { profile: "sglang-0.5-cuda".into(), ..vllm(1) }).unwrap();
    let (apart, fused) = (tensors(apart.path(), "model-rank-0-"), tensors(fused.path(), "model-rank-0-"));
    for block in 0..2 {
        let indexer = format!("model.layers.{block}.self_attn.indexer");
        let mut joined = apart[&format!("{indexer}.wk.weight")].1.clone();
        joined.extend(&apart[&format!("{indexer}.weights_proj.weight")].1);
        assert_eq!(fused[&format!("{indexer}.wk_weights_proj.weight")].1, joined);
    }
}

#[test]
fn choices_that_would_change_or_write_nothing_are_refused() {
    let refused = |source: &str, request: &Request| plan(&fixture(source), request, false).err().unwrap().to_string();
    let hf = Request { profile: "hf".into(), ..vllm(2) };
    assert!(refused(GLM, &Request { expert_parallel: true, ..hf.clone() }).contains("--ep"));
    assert!(refused(GLM, &Request { moe_pad: Some(128), ..hf }).contains("--moe-pad"));
    assert!(refused("families/llama.gguf", &Request { expert_parallel: true, ..vllm(2) }).contains("--ep"));
    let empty = Request { profile: "sglang-0.5".into(), mtp: MtpPolicy::Only, ..vllm(1) };
    assert!(refused(GLM, &empty).contains("makes no parameter"));
}
