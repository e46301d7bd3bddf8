//! From the GGUF's names to the checkpoint's: what is missing, renamed, split or shifted.

use std::collections::BTreeSet;

use ggshard::Error;
use ggshard::convert::{self, Request};
use ggshard::gguf::{GgmlType, GgufSet};
use ggshard::mapping::{MtpPolicy, builtin_mappings, choose, resolve};

use super::array::Array;
use super::check::{convert as make, converts, exact, refused, says};
use super::file::Kv;
use super::gguf_writer::GgufBuilder;
use super::toy::{Dims, Toy};
use super::{f32s, family, family_written, planned, rows, small, truth, written};

#[test]
fn n1_both_halves_of_kv_b_are_found_and_needed() {
    let toy = Toy::new(Dims::glm_dsa(&[true; 3], 0));
    let made = make(&toy.file, &exact()).unwrap();
    assert_eq!(made.ranks[0].keys().filter(|name| name.ends_with("self_attn.kv_b_proj.weight")).count(), 3);
    for half in ["blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"] {
        let mut toy = toy.clone();
        toy.file.remove(half);
        says(&refused(&toy.file, &exact()), "MissingTensor", &[half, "model.layers.1.self_attn.kv_b_proj.weight"]);
    }
    // And the other way round: a tensor that no name asks for.
    let mut more = toy.clone();
    more.file.add("blk.1.attn_w_b.weight", &Array::new(&[4], vec![1.0; 4]));
    says(&refused(&more.file, &exact()), "UnknownTensor", &["blk.1.attn_w_b.weight"]);
}

#[test]
fn n2_latent_attention_split_unsplit_and_both() {
    let split = Toy::new(Dims::v2());
    converts(&split.file, &exact(), &split.truth);
    let mut unsplit = split.clone();
    for layer in 0..3 {
        let whole = split.truth[&format!("model.layers.{layer}.self_attn.kv_b_proj.weight")].clone();
        unsplit.file.add(&format!("blk.{layer}.attn_kv_b.weight"), &whole);
        // Where both are there, the halves are another rounding of the same, and not read.
        for half in ["attn_k_b", "attn_v_b"] {
            unsplit.file.tensor(&format!("blk.{layer}.{half}.weight")).data.fill(0x41);
        }
    }
    converts(&unsplit.file, &exact(), &split.truth);
    unsplit.file.remove_where(|name| name.contains("attn_k_b") || name.contains("attn_v_b"));
    converts(&unsplit.file, &exact(), &split.truth);
}

#[test]
fn n3_stacked_experts_have_a_name_each() {
    let stacked = family_written("mixtral.gguf", "hf", 1);
    let apart = family_written("mixtral.per_expert.gguf", "hf", 1);
    assert_eq!(stacked, apart);
    let experts: Vec<&String> = stacked[0].keys().filter(|name| name.contains("block_sparse_moe.experts.")).collect();
    assert!(experts.len() >= 12 && experts.iter().all(|name| name.ends_with(".weight")), "{experts:?}");
}

#[test]
fn n4_helper_tensors_have_a_rule_and_unknown_ones_are_listed() {
    let mut toy = Toy::new(Dims::v2());
    toy.file.add("rope_freqs.weight", &Array::new(&[1], vec![1.0]));
    let made = make(&toy.file, &exact()).unwrap();
    assert!(made.ignored()["rope_freqs.weight"].len() > 10, "a reason in words");
    assert!(!made.ranks[0].keys().any(|name| name.contains("rope_freqs")));
    for i in 0..27 {
        toy.file.add(&format!("tail.{i}.weight"), &Array::new(&[1], vec![1.0]));
    }
    let folder = tempfile::tempdir().unwrap();
    let source = toy.file.write(folder.path(), 1);
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_ggshard"));
    let run = program.arg("plan").arg(source).args(["--tp", "1"]).output().unwrap();
    let text = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && text.contains("27 of") && text.contains("tail.0.weight"), "{text}");
}

#[test]
fn n6_no_tensor_can_be_absent_without_an_error() {
    let whole = Toy::new(Dims::v3());
    // Without a head of its own, a model uses its embeddings: that is a warning.
    let needed = whole.file.tensors.iter().map(|t| &t.name).filter(|name| *name != "output.weight");
    for name in needed {
        let mut toy = whole.clone();
        toy.file.remove(name);
        let error = refused(&toy.file, &exact());
        assert!(matches!(error, Error::MissingTensor(_) | Error::Contradiction(_)), "without {name}: {error}");
        assert!(error.to_string().contains(name.split(".weight").next().unwrap()), "without {name}: {error}");
    }
}

#[test]
fn n8_no_name_is_made_of_nothing() {
    for fixture in ["qwen3.gguf", "glm4_moe.gguf", "deepseek_v32.gguf", "gemma3.gguf"] {
        let set = GgufSet::open(family(fixture)).unwrap();
        let model = resolve(&choose(&set).unwrap(), &set, MtpPolicy::Keep).unwrap();
        let names: BTreeSet<&str> = model.weights.iter().map(|w| w.name.as_str()).collect();
        assert_eq!(names.len(), model.weights.len(), "{fixture}");
        let sound = |n: &str| {
            (n.starts_with("model.") || n == "lm_head.weight") && !n.contains(['{', '}', '*']) && !n.contains("None")
        };
        assert!(names.iter().all(|name| sound(name) && !name.contains("..")), "{names:?}");
    }
}

#[test]
fn n9_a_quantized_embedding_arrives_under_its_name() {
    let planned = planned(small::builder().build(), small::mapping(), &super::exact("hf", 2)).unwrap();
    let at = planned.set.find("token_embd.weight").unwrap();
    assert_eq!(planned.set.tensors()[at].ty, GgmlType::Q8_0);
    let (ranks, _) = written(&planned).unwrap();
    let values = truth::decode(&planned.set, "token_embd.weight");
    let held: Vec<f32> = ranks.iter().flat_map(|rank| f32s(&rank["embed.weight"].1)).collect();
    assert_eq!(held[..values.len()], values);
    assert!(held[values.len()..].iter().all(|x| *x == 0.0));
}

#[test]
fn a1_kv_b_is_rows_of_k_then_rows_of_v_head_by_head() {
    let mut toy = Toy::new(Dims::v2());
    let Dims { heads, nope, v_head, kv_rank, .. } = toy.dims;
    let made = make(&toy.file, &exact()).unwrap();
    let kv_b = f32s(&made.ranks[0]["model.layers.1.self_attn.kv_b_proj.weight"].2);
    let (k, v) =
        (f32s(&toy.file.tensor("blk.1.attn_k_b.weight").data), f32s(&toy.file.tensor("blk.1.attn_v_b.weight").data));
    for head in 0..heads {
        for col in 0..kv_rank {
            for row in 0..nope {
                // Stored with the axes exchanged: [head][rank][row].
                let at = (head * (nope + v_head) + row) * kv_rank + col;
                assert_eq!(kv_b[at], k[(head * kv_rank + col) * nope + row]);
            }
            for row in 0..v_head {
                let at = (head * (nope + v_head) + nope + row) * kv_rank + col;
                assert_eq!(kv_b[at], v[(head * v_head + row) * kv_rank + col]);
            }
        }
    }
}

#[test]
fn a2_two_ways_to_write_the_head_sizes() {
    let new = Toy::new(Dims::v2());
    let mut old = new.clone();
    let d = new.dims.clone();
    old.unset("attention.key_length_mla").unset("attention.value_length_mla");
    old.set("attention.key_length", Kv::U32((d.nope + d.rope) as u32))
        .set("attention.value_length", Kv::U32(d.v_head as u32));
    old.set("attention.head_count_kv", Kv::U32(d.heads as u32));
    assert_eq!(make(&new.file, &exact()).unwrap().ranks, make(&old.file, &exact()).unwrap().ranks);
    let mut wrong = new.clone();
    wrong.set("attention.key_length_mla", Kv::U32((d.nope + d.rope + 1) as u32));
    says(&refused(&wrong.file, &exact()), "Contradiction", &["key_length_mla", "attn_q_b"]);
}

#[test]
fn a3_each_projection_is_unpermuted_by_its_own_number_of_heads() {
    let planned = planned(small::builder().build(), small::mapping(), &super::exact("hf", 1)).unwrap();
    let (ranks, _) = written(&planned).unwrap();
    // Fewer key than query heads: permuted by the number of query heads, the keys would be others.
    const { assert!(small::KV < small::HEADS) };
    for (name, source, heads) in [("q", "attn_q", small::HEADS), ("k", "attn_k", small::KV)] {
        let stored = truth::decode(&planned.set, &format!("blk.0.{source}.weight"));
        let made = f32s(&ranks[0][&format!("layers.0.{name}.weight")].1);
        for row in 0..heads * small::HEAD {
            let (head, half, i) = (row / small::HEAD, row % small::HEAD / 4, row % 4);
            let from = head * small::HEAD + 2 * i + half;
            let width = small::HIDDEN;
            assert_eq!(made[row * width..][..width], stored[from * width..][..width], "{name} row {row}");
        }
    }
    // What was not permuted stays: values, and other families' queries.
    let v = truth::decode(&planned.set, "blk.0.attn_v.weight");
    assert_eq!(f32s(&ranks[0]["layers.0.v.weight"].1), v);
    let set = GgufSet::open(family("qwen3.gguf")).unwrap();
    let q = truth::decode(&set, "blk.0.attn_q.weight");
    assert_eq!(f32s(&family_written("qwen3.gguf", "hf", 1)[0]["model.layers.0.self_attn.q_proj.weight"].1), q);
}

#[test]
fn a4_norms_lose_the_one_only_where_the_converter_added_it() {
    for (fixture, shift) in [("gemma3.gguf", 1.0), ("qwen3.gguf", 0.0)] {
        let set = GgufSet::open(family(fixture)).unwrap();
        let stored = truth::decode(&set, "output_norm.weight");
        let made = f32s(&family_written(fixture, "hf", 1)[0]["model.norm.weight"].1);
        assert_eq!(made, stored.iter().map(|x| x - shift).collect::<Vec<_>>(), "{fixture}");
    }
}

#[test]
fn a7_the_indexer_is_not_rearranged_and_keeps_its_precision() {
    let toy = Toy::new(Dims::glm_dsa(&[true; 3], 0));
    let made = make(&toy.file, &exact()).unwrap();
    for (gguf, name) in [("attn_q_b", "wq_b"), ("attn_k", "wk"), ("k_norm", "k_norm"), ("proj", "weights_proj")] {
        let mut file = toy.file.clone();
        let stored = file.tensor(&format!("blk.1.indexer.{gguf}.weight")).data.clone();
        assert_eq!(made.ranks[0][&format!("model.layers.1.self_attn.indexer.{name}.weight")].2, stored, "{name}");
    }
    assert!(made.ranks[0].contains_key("model.layers.1.self_attn.indexer.k_norm.bias"));
    // Where everything else is BF16, the stack's LayerNorm is not.
    let request = Request { profile: "vllm-0.32".into(), tp: 2, ..Request::default() };
    let planned = convert::plan(&family("deepseek_v32.gguf"), &request, false).unwrap();
    let norms: Vec<_> = planned.plan.params.iter().filter(|p| p.name.contains("indexer.k_norm")).collect();
    assert!(norms.len() >= 2 && norms.iter().all(|p| p.dtype.name() == "F32"));
    assert!(planned.plan.params.iter().any(|p| p.dtype.name() == "BF16"));
}

#[test]
fn a8_fused_names_belong_to_a_profile_with_a_version() {
    let hf = &family_written("deepseek_v32.gguf", "hf", 1)[0];
    let vllm = &family_written("deepseek_v32.gguf", "vllm-0.32", 1)[0];
    let at = "model.layers.0.self_attn.indexer";
    let fused = &vllm[&format!("{at}.wk_weights_proj.weight")];
    let (wk, proj) = (&hf[&format!("{at}.wk.weight")], &hf[&format!("{at}.weights_proj.weight")]);
    assert_eq!(fused.0[0], wk.0[0] + proj.0[0]);
    assert_eq!((rows(fused, 0..wk.0[0]), rows(fused, wk.0[0]..fused.0[0])), (&wk.1[..], &proj.1[..]));
    assert!(!vllm.contains_key(&format!("{at}.wk.weight")) && !hf.keys().any(|name| name.contains("wk_weights_proj")));
    let folder = super::folders::converted_by(
        &family("qwen3.gguf"),
        &Request { profile: "vllm-0.32".into(), ..Request::default() },
    );
    let manifest = ggshard::output::Manifest::read(folder.path()).unwrap();
    assert_eq!((manifest.profile.name.as_str(), manifest.profile.digest.to_string().len()), ("vllm-0.32", 64));
}

#[test]
fn m5_a_scale_that_is_stored_is_the_one_that_is_used() {
    let file = small::builder();
    let mut reversed = file.clone();
    reversed.tensors.reverse();
    let expected = written(&planned(file.build(), small::mapping(), &super::exact("hf", 1)).unwrap()).unwrap().0;
    for order in [file.clone(), reversed] {
        let planned = planned(order.build(), small::mapping(), &super::exact("hf", 1)).unwrap();
        let stored = truth::decode(&planned.set, "blk.0.ffn_gate_up_exps.weight");
        let scales = truth::decode(&planned.set, "blk.0.ffn_gate_up_exps.scale");
        assert!(scales.iter().all(|s| *s != 1.0));
        let (ranks, _) = written(&planned).unwrap();
        let each = 2 * small::MOE * small::HIDDEN;
        for (expert, scale) in scales.iter().enumerate() {
            let made = f32s(&ranks[0][&format!("layers.0.experts.{expert}.gate.weight")].1);
            let scaled: Vec<f32> = stored[expert * each..][..each / 2].iter().map(|x| x * scale).collect();
            assert_eq!(made, scaled, "expert {expert}");
        }
        assert_eq!(ranks, expected);
    }
    // Without the sidecar the values are the stored ones, and no scale is made up.
    let mut plain = file;
    plain.tensors.retain(|t| !t.name.ends_with(".scale"));
    let planned = planned(plain.build(), small::mapping(), &super::exact("hf", 1)).unwrap();
    let stored = truth::decode(&planned.set, "blk.0.ffn_down_exps.weight");
    let made = f32s(&written(&planned).unwrap().0[0]["layers.0.experts.0.down.weight"].1);
    assert_eq!(made, stored[..made.len()]);
}

#[test]
fn m6_architectures_are_listed_and_not_spelled_by_rule() {
    let open = |architecture: &str| {
        GgufSet::from_bytes("x.gguf", GgufBuilder::architecture(architecture).f32s("a", &[1], &[0.0]).build())
    };
    for unknown in ["qwen3_moe", "qwen3-moe", "Qwen3MoeForCausalLM", "deepseek_v3"] {
        let error = choose(&open(unknown).unwrap()).unwrap_err();
        says(&error, "NoMapping", &[unknown, "qwen3moe", "--mapping"]);
    }
    let classes: BTreeSet<String> = builtin_mappings().unwrap().into_iter().map(|m| m.rules.class).collect();
    assert!(classes.contains("Qwen3MoeForCausalLM") && classes.contains("DeepseekV3ForCausalLM"));
    assert_eq!(choose(&GgufSet::open(family("qwen3_moe.gguf")).unwrap()).unwrap().rules.class, "Qwen3MoeForCausalLM");
}
