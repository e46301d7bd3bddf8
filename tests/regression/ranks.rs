//! What each rank holds: cuts, fused parameters, experts and draft blocks.

use std::collections::BTreeSet;
use std::fs;

use ggshard::Error;
use ggshard::convert::{self, Request};
use ggshard::mapping::MtpPolicy;
use ggshard::runtime::{OpenOptions, RankCheckpoint, Verify};
use serde_json::Value;

use super::check::{convert as make, exact, refused, says, with_mtp};
use super::folders::{converted_by, find};
use super::toy::{Dims, Toy};
use super::{Stored, f32s, family, family_written, planned, rows, small, written};

fn vllm(tp: u32) -> Request {
    Request { profile: "vllm-0.32".into(), tp, ..Request::default() }
}

fn toy(tp: u32) -> Result<convert::Planned, Error> {
    planned(small::builder().build(), small::mapping(), &super::exact("hf", tp))
}

/// The share of rank `rank` of `tp` of a matrix that is cut by rows.
fn share(whole: &Stored, tp: usize, rank: usize) -> &[u8] {
    let each = whole.0[0] / tp;
    rows(whole, rank * each..(rank + 1) * each)
}

#[test]
fn t2_places_come_from_the_plan_and_not_from_the_order_in_the_file() {
    let file = Toy::new(Dims::v3()).file;
    let request = Request { profile: "vllm-0.32".into(), ..Request { tp: 2, ..exact() } };
    let expected = make(&file, &request).unwrap().ranks;
    let mut orders = vec![file.clone(), file.clone(), file];
    orders[0].tensors.reverse();
    orders[1].tensors.sort_by(|a, b| a.name.cmp(&b.name));
    orders[2].tensors.rotate_left(17);
    for order in orders {
        assert_eq!(make(&order, &request).unwrap().ranks, expected);
    }
}

#[test]
fn t3_a_fused_projection_is_cut_part_by_part() {
    let whole = &family_written("qwen3.gguf", "hf", 1)[0];
    let part = |name: &str| &whole[&format!("model.layers.1.self_attn.{name}.weight")];
    for (rank, held) in family_written("qwen3.gguf", "vllm-0.32", 2).iter().enumerate() {
        let joined: Vec<u8> =
            ["q_proj", "k_proj", "v_proj"].iter().flat_map(|p| share(part(p), 2, rank).to_vec()).collect();
        assert_eq!(held["model.layers.1.self_attn.qkv_proj.weight"].1, joined, "rank {rank}");
        let uncut: Vec<u8> = ["q_proj", "k_proj", "v_proj"].iter().flat_map(|p| part(p).1.clone()).collect();
        assert_ne!(
            held["model.layers.1.self_attn.qkv_proj.weight"].1,
            uncut[rank * uncut.len() / 2..][..uncut.len() / 2]
        );
    }
}

#[test]
fn t4_more_ranks_than_key_heads() {
    let (ranks, _) = written(&toy(4).unwrap()).unwrap();
    let (whole, _) = written(&toy(1).unwrap()).unwrap();
    for (rank, held) in ranks.iter().enumerate() {
        // Two key heads on four ranks: neighbours hold the same whole head.
        assert_eq!(held["layers.0.k.weight"].1, share(&whole[0]["layers.0.k.weight"], 2, rank / 2), "rank {rank}");
        assert_eq!(held["layers.0.q.weight"].1, share(&whole[0]["layers.0.q.weight"], 4, rank), "rank {rank}");
    }
    // Eight ranks would hold parts of the four query heads.
    let error = toy(8).err().unwrap();
    says(
        &error,
        "Layout",
        &["4 heads cannot be divided among 8 ranks", "--tp values that work for this model: 1, 2, 4"],
    );
    assert!(matches!(toy(3), Err(Error::Layout(_))));
}

#[test]
fn t6_a_vocabulary_that_does_not_divide_is_padded_as_the_profile_says() {
    const { assert!(!small::VOCAB.is_multiple_of(64)) };
    let (whole, _) = written(&toy(1).unwrap()).unwrap();
    for tp in [2usize, 4] {
        let (ranks, _) = written(&toy(tp as u32).unwrap()).unwrap();
        let joined: Vec<f32> = ranks.iter().flat_map(|r| f32s(&r["head.weight"].1)).collect();
        let real = f32s(&whole[0]["head.weight"].1);
        assert_eq!(joined.len(), 128 * small::HIDDEN, "padded to a multiple of 64, the same for any number of ranks");
        assert_eq!(joined[..real.len()], real);
        assert!(joined[real.len()..].iter().all(|x| x.to_bits() == 0));
        assert!(ranks.iter().all(|r| r["head.weight"].0 == [128 / tp, small::HIDDEN]));
    }
}

#[test]
fn t7_a_number_of_ranks_that_would_cut_inside_is_refused_by_the_plan() {
    // Sixteen rows of each expert on 32 ranks. Outputs with block scales do not exist, so there is no finer grid to cut.
    let error = toy(32).err().unwrap();
    says(&error, "Layout", &["cannot be divided among 32 ranks", "--tp values that work for this model: 1, 2, 4"]);
    let error = convert::plan(&family("glm4_moe.gguf"), &vllm(32), false).err().unwrap();
    says(&error, "Layout", &["cannot be divided among 32 ranks"]);
}

/// The names that a real vLLM holds on its first rank.
fn oracle(model: &str) -> BTreeSet<String> {
    let path = format!("{}/fixtures/oracle/{model}.json", env!("CARGO_MANIFEST_DIR"));
    let oracle: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    oracle["vllm-0.32"]["tp2"][0].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn t8_the_names_are_those_that_the_stack_holds() {
    for model in ["glm4_moe", "deepseek_v32", "qwen3_moe", "llama"] {
        let held = &family_written(&format!("{model}.gguf"), "vllm-0.32", 2)[0];
        let names: BTreeSet<String> = held.keys().cloned().collect();
        assert_eq!(names, oracle(model), "{model}");
    }
}

#[test]
fn t9_the_bias_of_the_router_has_the_name_of_the_parameter() {
    let names = oracle("glm4_moe");
    let bias: Vec<&String> = names.iter().filter(|name| name.contains("correction_bias")).collect();
    assert!(!bias.is_empty() && bias.iter().all(|name| name.ends_with("e_score_correction_bias")), "{bias:?}");
    let held = &family_written("glm4_moe.gguf", "vllm-0.32", 2)[0];
    let hf = &family_written("glm4_moe.gguf", "hf", 1)[0];
    for name in bias {
        let values = hf
            .iter()
            .find(|(n, _)| n.ends_with("e_score_correction_bias") && n.contains(name.split('.').nth(2).unwrap()));
        assert_eq!(held[name].1, values.unwrap().1.1, "{name}");
    }
}

#[test]
fn t10_constants_that_the_stack_wants_are_in_the_file() {
    let held = &family_written("qwen3.gguf", "vllm-0.32", 2)[1];
    for layer in 0..2 {
        for scale in ["_k_scale", "_prob_scale", "_q_scale", "_v_scale"] {
            let name = format!("model.layers.{layer}.self_attn.attn.{scale}");
            assert_eq!(held[&name], (vec![], 1.0f32.to_le_bytes().to_vec()), "{name}");
        }
    }
    assert!(!family_written("qwen3.gguf", "hf", 1)[0].keys().any(|name| name.ends_with("_scale")));
}

#[test]
fn t11_another_shape_or_type_is_an_error_when_a_rank_is_opened() {
    let folder = converted_by(&family("qwen3.gguf"), &vllm(2));
    let name = "model.layers.0.mlp.down_proj.weight";
    let open = || RankCheckpoint::open(folder.path(), 1, OpenOptions::default());
    let (file, tensor) = find(folder.path(), name, 1);
    assert_eq!(open().unwrap().get(name).unwrap().shape, tensor.shape);
    let path = folder.path().join(&file.name);
    let sound = fs::read(&path).unwrap();
    // The same bytes under another shape, and under another type of the same size.
    let text = String::from_utf8(sound[8..file.header_bytes as usize].to_vec()).unwrap();
    let at = text.find(&format!("\"{name}\"")).unwrap();
    let entry = &text[at..at + text[at..].find('}').unwrap()];
    let shape = format!("[{},{}]", tensor.shape[0], tensor.shape[1]);
    for (from, to) in
        [(shape.clone(), format!("[{},{}]", tensor.shape[1], tensor.shape[0])), ("BF16".into(), "F16".into())]
    {
        let changed = entry.replace(&from, &to);
        assert_ne!(changed, entry);
        let header = format!("{:width$}", text.replacen(entry, &changed, 1), width = text.len());
        fs::write(&path, [&sound[..8], header.as_bytes(), &sound[8 + header.len()..]].concat()).unwrap();
        says(&open().unwrap_err(), "Checkpoint", &[name, "header"]);
    }
    fs::write(&path, sound).unwrap();
    open().unwrap();
}

#[test]
fn m2_experts_are_gate_then_up() {
    let whole = &family_written("qwen3_moe.gguf", "hf", 1)[0];
    let expert = |e: usize, name: &str| &whole[&format!("model.layers.0.mlp.experts.{e}.{name}.weight")];
    for (rank, held) in family_written("qwen3_moe.gguf", "vllm-0.32", 2).iter().enumerate() {
        let (name, w13) =
            held.iter().find(|(name, _)| name.starts_with("model.layers.0.") && name.ends_with("w13_weight")).unwrap();
        let each = w13.1.len() / w13.0[0];
        for e in 0..w13.0[0] {
            let gate_up = [share(expert(e, "gate_proj"), 2, rank), share(expert(e, "up_proj"), 2, rank)].concat();
            assert_eq!(w13.1[e * each..(e + 1) * each], gate_up, "{name}, expert {e} of rank {rank}");
        }
    }
}

#[test]
fn m4_a_checkpoint_gives_the_same_however_often_it_is_loaded() {
    let folder = converted_by(&family("qwen3_moe.gguf"), &vllm(2));
    let read = || -> Vec<(String, Vec<u8>)> {
        let open =
            RankCheckpoint::open(folder.path(), 1, OpenOptions { verify: Verify::Full, ..OpenOptions::default() })
                .unwrap();
        let twice = open.clone();
        let (a, b): (Vec<_>, Vec<_>) =
            open.iter().zip(twice.iter()).map(|(a, b)| (a.bytes.to_vec(), b.bytes.to_vec())).unzip();
        assert_eq!(a, b);
        open.names().map(str::to_owned).zip(a).collect()
    };
    let first = read();
    assert!(first == read() && first.len() > 10);
}

#[test]
fn x1_members_of_a_draft_block_that_may_be_absent() {
    for mtp_tables in [true, false] {
        let toy = Toy::new(Dims { mtp_tables, ..Dims::glm_lite() });
        let made = make(&toy.file, &exact()).unwrap();
        for name in ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"] {
            assert_eq!(made.ranks[0].contains_key(name), mtp_tables, "{name}");
        }
    }
    // The count without the block is a warning, and the config says how many there are.
    let mut toy = Toy::new(Dims::glm_lite());
    toy.file.remove_where(|name| name.starts_with("blk.3."));
    let made = make(&toy.file, &exact()).unwrap();
    assert!(made.warnings().contains("nextn_predict_layers"), "{}", made.warnings());
    for (mtp, count) in [(MtpPolicy::Keep, 1), (MtpPolicy::Drop, 0)] {
        let request = Request { mtp, ..super::exact("hf", 1) };
        let planned = convert::plan(&family("glm4_moe.gguf"), &request, false).unwrap();
        let extras = convert::extras(&planned, None).unwrap();
        let config: Value =
            serde_json::from_slice(&extras.files.iter().find(|(n, _)| n == "config.json").unwrap().1).unwrap();
        assert_eq!(config["num_nextn_predict_layers"].as_u64().unwrap_or(0), count);
    }
}

#[test]
fn x3_a_draft_block_is_kept_whole_or_refused() {
    let toy = Toy::new(Dims::glm_lite());
    let kept = make(&toy.file, &exact()).unwrap();
    let dropped = make(&toy.file, &with_mtp(MtpPolicy::Drop)).unwrap();
    let block: Vec<&String> = kept.ranks[0].keys().filter(|name| name.starts_with("model.layers.3.")).collect();
    assert!(block.len() > 15 && !dropped.ranks[0].keys().any(|name| name.starts_with("model.layers.3.")));
    for gone in [
        "blk.3.nextn.eh_proj.weight",
        "blk.3.nextn.enorm.weight",
        "blk.3.ffn_up_exps.weight",
        "blk.3.attn_output.weight",
    ] {
        let mut toy = toy.clone();
        toy.file.remove(gone);
        says(&refused(&toy.file, &exact()), "MissingTensor", &[gone]);
    }
    // In a stack's layout the draft model is a set of files of its own.
    let folder = converted_by(&family("glm4_moe.gguf"), &vllm(2));
    assert!(folder.path().join("mtp/model-rank-1-part-0.safetensors").is_file());
}
