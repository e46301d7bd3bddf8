//! Files whose metadata or shapes would make a plan of any size, and choices that would.

use super::*;
use gguf_writer::BuiltTensor;

/// A tensor whose data are not there.
fn claimed(mut file: GgufBuilder, name: &str, ty: GgmlType, ne: &[u64]) -> GgufBuilder {
    file.tensors.push(BuiltTensor { name: name.into(), ty, ne: ne.to_vec(), bytes: Vec::new() });
    file
}

/// A model of one block with stacked experts, whose number is `experts`.
fn experts(count: u64, ne: &[u64]) -> GgufBuilder {
    claimed(GgufBuilder::architecture("toy").kv("toy.expert_count", 10, &count.to_le_bytes()), "e", GgmlType::F32, ne)
}

const EXPERTS: &str = "[dims]\nexperts = { key = 'expert_count' }\n[loops]\nexpert = 'experts'\n";

#[test]
fn experts_that_no_tensor_holds() {
    let text = EXPERTS.to_owned() + &weight("e.{expert}", "[0]", "from = { gguf = 'e', unstack = 'expert' }");
    let mapping = mapping(&text).unwrap();
    for count in [1u64 << 17, 1 << 20, 1 << 31, 1 << 40, i64::MAX as u64] {
        let set = GgufSet::from_bytes("experts.gguf", experts(count, &[0, count]).build());
        let Ok(set) = set else { continue };
        bounded(16, || refused(planned(&set, &mapping, 1), contradiction, ""));
    }
    // As many as the tensor has, but no data: a header may claim any number.
    let text = EXPERTS.to_owned() + &weight("e.{expert}", "[1]", "from = { gguf = 'e', unstack = 'expert' }");
    let mapping = super::mapping(&text).unwrap();
    let set = header_only(experts(1 << 20, &[1, 1 << 20]));
    bounded(300, || refused(planned(&set, &mapping, 1), contradiction, "more than 262144 weights"));
}

#[test]
fn counts_of_blocks_that_the_file_lacks() {
    for (name, key) in [
        ("qwen3.gguf", "qwen3.block_count"),
        ("glm4_moe.gguf", "glm4moe.block_count"),
        ("glm4_moe.gguf", "glm4moe.nextn_predict_layers"),
        ("qwen3_moe.gguf", "qwen3moe.expert_count"),
        ("qwen3_moe.gguf", "qwen3moe.attention.head_count"),
        ("qwen3_moe.gguf", "qwen3moe.attention.head_count_kv"),
        ("qwen3_moe.gguf", "qwen3moe.embedding_length"),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families").join(name);
        let sound = std::fs::read(path).unwrap();
        let at = sound
            .windows(key.len() + 4)
            .position(|w| w.starts_with(key.as_bytes()) && w.ends_with(&4u32.to_le_bytes()));
        let at = at.unwrap_or_else(|| panic!("{name} has no u32 '{key}'")) + key.len() + 4;
        for value in [0u32, 1 << 16, 1 << 20, 1 << 31, u32::MAX] {
            let mut bytes = sound.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let set = GgufSet::from_bytes(name, bytes).unwrap();
            let result = bounded(64, || choose(&set).and_then(|mapping| planned(&set, &mapping, 2)));
            let error = result.expect_err(key);
            assert!(
                matches!(error, Error::Contradiction(_) | Error::MissingTensor(_) | Error::UnknownTensor(_)),
                "{key} = {value}: {error}"
            );
        }
    }
}

/// A header may claim shapes of which no sum fits 64 bits.
#[test]
fn shapes_larger_than_any_model() {
    let raw = Mapping::load("raw").unwrap();
    for ne in [&[1 << 60][..], &[0, 1 << 40, 1 << 12], &[1 << 49]] {
        let set = header_only(claimed(GgufBuilder::architecture("toy"), "x", GgmlType::F32, ne));
        bounded(16, || refused(planned(&set, &raw, 1), layout, "more elements than any model"));
    }
    // On many ranks, or in a wider type, what still fits would not.
    let set = header_only(claimed(GgufBuilder::architecture("toy"), "x", GgmlType::F16, &[1 << 48]));
    let policy = Policy { dtype: FloatType::F32, ..plans::policy() };
    let model = resolve(&raw, &set, MtpPolicy::Keep).unwrap();
    bounded(16, || plan_model(&set, model.clone(), 1, policy).unwrap());
    bounded(16, || refused(plan_model(&set, model, 1024, policy), layout, "bytes in all"));
}

/// As many heads as rows, so that each row would be a piece of its own, on every rank.
#[test]
fn heads_without_end() {
    const ROWS: u64 = 1 << 40;
    let text = "[dims]\nheads = { key = 'heads' }\n".to_owned()
        + "[[weight]]\nname = 'q'\nshape = ['2 * heads', 1]\ncut = { column = 'heads' }\nfrom = { gguf = 'q', unpermute = 'heads' }\n";
    let interleaved = "[dims]\nheads = { key = 'heads' }\n".to_owned()
        + "[[weight]]\nname = 'q'\nshape = ['2 * heads', 1]\ncut = { column = 'heads' }\nfrom = { per = 'heads', parts = [{ gguf = 'q', shape = ['2 * heads', 1] }] }\n";
    let file = GgufBuilder::architecture("toy").kv("toy.heads", 10, &(ROWS / 2).to_le_bytes());
    let set = header_only(claimed(file, "q", GgmlType::F32, &[1, ROWS]));
    for text in [text, interleaved] {
        let mapping = mapping(&text).unwrap();
        for tp in [1, 2, 1024] {
            bounded(16, || refused(planned(&set, &mapping, tp), layout, "pieces"));
        }
    }
}

#[test]
fn choices_that_no_machine_has() {
    let set = GgufSet::from_bytes("toy.gguf", toy::builder().build()).unwrap();
    let model = resolve(&toy::mapping(), &set, MtpPolicy::Keep).unwrap();
    let request = |tp, policy| PlanRequest::new(Profile::load("hf").unwrap(), tp, policy);
    let plan = |request| bounded(16, || Plan::audited(&set, model.clone(), request));
    for tp in [0, 1025, u32::MAX] {
        refused(plan(request(tp, plans::policy())), layout, "expected 1 to 1024");
    }
    for pp in [0, 1025, u32::MAX] {
        refused(plan(PlanRequest { pp, ..request(1, plans::policy()) }), layout, "pp ");
    }
    for pad in [0, (1 << 16) + 1, u64::MAX] {
        let policy = Policy { moe_pad: Some(pad), ..plans::policy() };
        refused(plan(request(1, policy)), layout, "padding of experts");
    }
    let stages = PlanRequest { pp: 2, stage_layers: vec![u64::MAX, 3], ..request(1, plans::policy()) };
    refused(plan(stages), layout, "blocks; the model has");
}

/// A part of one byte gives each tensor of each rank a file.
#[test]
fn files_without_end() {
    let mut file = GgufBuilder::architecture("toy");
    for i in 0..700 {
        file = file.f32s(&format!("t{i}"), &[1], &[0.0]);
    }
    let set = GgufSet::from_bytes("many.gguf", file.build()).unwrap();
    let model = resolve(&Mapping::load("raw").unwrap(), &set, MtpPolicy::Keep).unwrap();
    let policy = Policy { part_size: 1, ..plans::policy() };
    let plan = |tp| bounded(300, || plan_model(&set, model.clone(), tp, policy));
    assert_eq!(plan(2).unwrap().files.len(), 1400);
    refused(plan(1024), layout, "larger --part-size");
}

/// Tensors times ranks: what a plan holds of each is small, but there are many.
#[test]
fn slices_without_end() {
    let plan = |tensors| {
        let mut file = GgufBuilder::architecture("toy");
        for i in 0..tensors {
            file = file.f32s(&format!("t{i}"), &[1], &[0.0]);
        }
        let set = GgufSet::from_bytes("many.gguf", file.build()).unwrap();
        let model = resolve(&Mapping::load("raw").unwrap(), &set, MtpPolicy::Keep).unwrap();
        bounded(700, || plan_model(&set, model, 1024, plans::policy()))
    };
    // As many as Kimi-K2 has at tp 64.
    assert_eq!(plan(4500).unwrap().params.len(), 4500);
    refused(plan(9000), layout, "more than 16777216 shares");
}

/// A pipe that is named like a model is not waited for.
#[test]
fn a_pipe_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.gguf", "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"] {
        assert!(std::process::Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap().success());
        let open = || GgufSet::open(folder.path().join(name));
        bounded(1, || refused(open(), |e| matches!(e, Error::Unsupported(_) | Error::Split(_)), ""));
    }
}

/// A tensor may have no axes, and is then of one element.
#[test]
fn a_tensor_without_axes() {
    let file = GgufBuilder::architecture("toy").f32s("x", &[], &[7.0]).f32s("y", &[2], &[1.0, 2.0]);
    let set = GgufSet::from_bytes("scalar.gguf", file.build()).unwrap();
    for tp in [1, 2] {
        let plan = bounded(16, || planned(&set, &Mapping::load("raw").unwrap(), tp)).unwrap();
        assert_eq!((plan.params[0].name.as_str(), plan.params[0].shape.as_slice()), ("x", &[1][..]));
    }
}
