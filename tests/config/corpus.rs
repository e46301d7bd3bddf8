//! Derived configs against the originals of a corpus, if there is one.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use super::*;

/// Which fields may differ, in which models, and why.
const MAY_DIFFER: &[(&str, &[&str], &str)] = &[
    ("", &["transformers_version"], "who wrote it"),
    (
        "",
        &["bos_token_id", "eos_token_id", "pad_token_id"],
        "the corpus's configs do not follow its tokenizer, whose ids a GGUF has",
    ),
    ("", &["rope_theta"], "written beside rope_parameters for readers from before transformers 5"),
    ("deepseek glm_moe_dsa", &["ep_size", "mlp_bias"], "defaults of the class that nothing reads"),
    ("deepseek", &["num_nextn_predict_layers"], "the converter drops MTP blocks"),
    ("deepseek", &["rope_parameters.type"], "an older name of rope_type"),
    ("glm_moe_dsa", &["index_topk_pattern"], "vLLM's form of indexer_types"),
    ("glm_moe_dsa", &["layer_types"], "default of the class"),
    (
        "llama",
        &[
            "rope_parameters.factor",
            "rope_parameters.high_freq_factor",
            "rope_parameters.low_freq_factor",
            "rope_parameters.original_max_position_embeddings",
            "rope_parameters.rope_type",
        ],
        "llama3 parameters are not in a GGUF",
    ),
    (
        "qwen3",
        &["layer_types", "max_window_layers", "sliding_window"],
        "defaults of the class without a sliding window",
    ),
    ("qwen3_moe", &["num_experts"], "the name from before transformers 5, which vLLM reads"),
    ("qwen3_moe", &["router_aux_loss_coef", "sliding_window"], "training only; null without a sliding window"),
    ("gemma3", &["_sliding_window_pattern", "use_bidirectional_attention"], "defaults of the class"),
    ("gemma3", &["attn_logit_softcapping", "final_logit_softcapping"], "null, which is the class's default"),
    ("gemma3", &["hidden_act", "rope_local_base_freq"], "written for readers from before transformers 5"),
    ("gemma3", &["vocab_size"], "the converter cuts the embeddings to the tokenizer's size"),
];

/// The paths of fields that differ, into objects.
fn differences(prefix: &str, a: &Fields, b: &Fields, found: &mut BTreeSet<String>) {
    for name in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
        let path = format!("{prefix}{name}");
        match (a.get(name), b.get(name)) {
            (Some(Value::Object(a)), Some(Value::Object(b))) => differences(&format!("{path}."), a, b, found),
            (Some(a), Some(b)) if same(a, b) => {}
            _ => drop(found.insert(path)),
        }
    }
}

#[test]
fn derived_configs_differ_from_the_originals_only_where_they_must() {
    let Some(corpus) = std::env::var_os("GGSHARD_CORPUS").map(PathBuf::from) else { return };
    let mut used = BTreeSet::new();
    let mut compared = 0;
    for entry in fs::read_dir(corpus.join("models")).unwrap() {
        let folder = entry.unwrap().path();
        let model = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let Ok(original) = fs::read(folder.join("config.json")) else { continue };
        let original: Fields = serde_json::from_slice(&original).unwrap();
        let unpacked = tempfile::tempdir().unwrap();
        let script = "set -o pipefail; zstd -q -d --long=27 -c \"$0\" | tar -x -C \"$1\"";
        let archive = folder.join(format!("{model}.tar.zst"));
        let status = Command::new("bash").arg("-c").arg(script).arg(&archive).arg(unpacked.path()).status().unwrap();
        assert!(status.success(), "{} cannot be unpacked", archive.display());
        for file in fs::read_dir(unpacked.path().join(&model)).unwrap().map(|e| e.unwrap().path()) {
            if file.extension().is_none_or(|e| e != "gguf") {
                continue;
            }
            let label = file.file_name().unwrap().to_str().unwrap().to_owned();
            let (derived, _) = derive(&file, &bf16());
            let mut found = BTreeSet::new();
            differences("", &derived, &original, &mut found);
            for field in &found {
                let allowed = MAY_DIFFER.iter().position(|(models, fields, _)| {
                    (models.is_empty() || models.split(' ').any(|m| is(&model, m))) && fields.contains(&field.as_str())
                });
                let (a, b) = (derived.get(field), original.get(field));
                used.insert((allowed.unwrap_or_else(|| panic!("{label}: {field} is {a:?}, not {b:?}")), field.clone()));
            }
            // The original itself passes the check, unless the file has other sizes than the checkpoint had.
            let (outcome, _) = give_fields(&file, &bf16(), &original);
            match outcome {
                Ok(_) => assert_ne!(model, "gemma3"),
                Err(error) => {
                    assert!(model == "gemma3" && error.to_string().contains("vocab_size"), "{label}: {error}")
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 20, "only {compared} files");
    for (i, (models, fields, why)) in MAY_DIFFER.iter().enumerate() {
        for field in *fields {
            assert!(used.contains(&(i, (*field).to_owned())), "{field} of '{models}' differs nowhere any more ({why})");
        }
    }
}

fn is(model: &str, named: &str) -> bool {
    model == named
        || named == "deepseek" && model.starts_with("deepseek")
        || named == "glm_moe_dsa" && model.starts_with(named)
}
