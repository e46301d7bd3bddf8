//! What is done with an input that nobody vouches for: the same by the fuzz targets (`fuzz/`) and by the bounded fuzz in
//! `tests/fuzz.rs`. Any input gives a value or a typed error; a panic is a finding.
#![allow(dead_code, reason = "each fuzz target uses one of them")]

use std::path::Path;
use std::sync::LazyLock;

use ggshard::dequant::FloatType;
use ggshard::gguf::{Description, GgufSet};
use ggshard::mapping::{
    Format, Mapping, Model, MtpPolicy, OutputPolicy, Profile, builtin_mappings, choose, config, resolve,
};
use ggshard::output::{Digest, Manifest, SafetensorsHeader, Sums};
use ggshard::plan::{Code, InputScales, Nvfp4, Plan, PlanRequest, Policy};
use ggshard::{Error, Result};

/// A small model with attention and experts, and what the mapping makes of it.
static MOE: LazyLock<GgufSet> = LazyLock::new(|| {
    let bytes = include_bytes!("../../fixtures/families/qwen3_moe.gguf");
    GgufSet::from_bytes("qwen3_moe.gguf", bytes.to_vec()).unwrap()
});
static MODEL: LazyLock<Model> = LazyLock::new(|| resolve(&choose(&MOE).unwrap(), &MOE, MtpPolicy::Keep).unwrap());

/// Another, whose matrices have whole blocks of nvfp4.
static BLOCKS: LazyLock<GgufSet> = LazyLock::new(|| {
    let bytes = include_bytes!("../../fixtures/families/mixtral.gguf");
    GgufSet::from_bytes("mixtral.gguf", bytes.to_vec()).unwrap()
});
static OF_BLOCKS: LazyLock<Model> =
    LazyLock::new(|| resolve(&choose(&BLOCKS).unwrap(), &BLOCKS, MtpPolicy::Keep).unwrap());
/// Experts in nvfp4 and an output projection, whose columns are whole blocks, in fp8 beside it.
pub const MIXED: &str = r#"
name = "mixed"
about = "x"
[[rule]]
dtype = "nvfp4"
weights = [
  "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
  "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
  "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
]
[[rule]]
dtype = "fp8"
weights = ["model.layers.{layer}.self_attn.o_proj.weight"]
"#;

/// A policy whose rules ask everything that a rule can ask.
pub const FILTERED: &str = r#"
name = "filtered"
about = "x"
[[rule]]
dtype = "nvfp4"
classes = ["MixtralForCausalLM", "Qwen3MoeForCausalLM"]
mtp = false
layers = "0,1-9"
types = ["BF16", "F32"]
min_elements = 100
[[rule]]
dtype = "fp8"
mtp = true
weights = ["model.layers.*.self_attn.o_proj.weight"]
[[rule]]
dtype = "keep"
types = ["Q4_K"]
"#;

/// The profiles that a header is planned for, parsed once.
static PROFILES: LazyLock<Vec<Profile>> = LazyLock::new(|| Profile::all().unwrap());

/// The built-in mappings, parsed once: `choose` reads them all again for each file.
static MAPPINGS: LazyLock<Vec<Mapping>> = LazyLock::new(|| builtin_mappings().unwrap());

/// The built-in output policies.
static POLICIES: LazyLock<Vec<OutputPolicy>> = LazyLock::new(|| OutputPolicy::all().unwrap());

/// Profiles whose stacks load nvfp4, one that joins weights and one that says which will be.
static LOADING: LazyLock<[Profile; 2]> = LazyLock::new(|| ["hf", "vllm-0.32"].map(|name| Profile::load(name).unwrap()));

/// Bytes of zeros that stand for tensor data, so that a header alone makes a file.
const DATA: usize = 256 << 10;

/// Every error says something, on one or few lines, and never pastes an input of any length.
fn told(error: &Error) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.len() < 100_000, "{} bytes of message", text.len());
}

fn policy() -> Policy {
    Policy { dtype: FloatType::BF16, mtp: MtpPolicy::Keep, part_size: 1 << 20, moe_pad: None }
}

/// Opens a GGUF file and asks for everything that `ggshard inspect` shows.
pub fn gguf(bytes: &[u8]) {
    match GgufSet::from_bytes("fuzz.gguf", bytes.to_vec()) {
        Ok(set) => {
            for (i, tensor) in set.tensors().iter().enumerate() {
                assert_eq!(set.data(i).unwrap().len() as u64, tensor.bytes);
                assert_eq!(set.find(&tensor.name), Some(i));
            }
            let _ = set.refuse_nonmodel();
            let description = Description::from_set(&set);
            assert!(!description.render(true).is_empty());
            assert!(serde_json::to_string(&description).is_ok());
        }
        Err(error) => told(&error),
    }
}

/// Plans a GGUF header, whose data are zeros, by every built-in mapping for its architecture. The header decides which
/// of the profiles, how many ranks and what else.
pub fn plan(header: &[u8]) {
    let mut bytes = header.to_vec();
    bytes.resize(header.len() + DATA, 0);
    let Ok(set) = GgufSet::from_bytes("fuzz.gguf", bytes) else { return };
    let seed = header.iter().fold(0usize, |n, byte| n.wrapping_mul(31).wrapping_add(usize::from(*byte)));
    let architecture = set.architecture().unwrap_or_default();
    let is_for = |m: &&Mapping| match &m.rules.matching {
        Some(matching) => matching.architecture.as_slice().iter().any(|a| a == architecture),
        None => m.rules.every_tensor,
    };
    for mapping in MAPPINGS.iter().filter(is_for) {
        if let Err(error) = plan_by(&set, mapping, seed) {
            // A plan that its own audit refuses was made by a planner that is wrong: rules that are built in do not overlap.
            assert!(!matches!(error, Error::Audit(_)), "{error}");
            told(&error);
        }
    }
}

fn plan_by(set: &GgufSet, mapping: &Mapping, seed: usize) -> Result<()> {
    let mtp = [MtpPolicy::Keep, MtpPolicy::Drop, MtpPolicy::Only][seed % 3];
    let model = resolve(mapping, set, mtp)?;
    config::derive(mapping, set, &model, FloatType::BF16)?;
    let profile = &PROFILES[seed / 3 % PROFILES.len()];
    let mut request = PlanRequest::new(profile.clone(), [1, 2, 4, 3][seed / 16 % 4], policy());
    request.expert_parallel = seed / 64 % 4 == 1;
    request.policy.moe_pad = (seed / 256 % 4 == 1).then_some(96);
    let forms = match seed / 1024 % 4 {
        0 => None,
        1 => Some(POLICIES[seed / 4096 % POLICIES.len()].clone()),
        _ => Some(arbitrary_policy(&model, seed / 4096)),
    };
    let request = with_forms(&model, request, forms, seed);
    audited(set, model, request).map(drop)
}

/// Plans a sound model by a policy that the seed decides, for a stack that loads nvfp4. Whether the plan has fp8 and nvfp4.
pub fn plan_by_policy(set: &GgufSet, model: &Model, seed: usize) -> (bool, bool) {
    let (profile, tp) = (&LOADING[seed % 2], [1, 2, 4][seed / 2 % 3]);
    let mut request = PlanRequest::new(profile.clone(), tp, policy());
    request.expert_parallel = seed / 6 % 8 == 1;
    let request = with_forms(model, request, Some(arbitrary_policy(model, seed)), seed);
    match audited(set, model.clone(), request) {
        Ok(plan) => {
            let has = |code| plan.params.iter().any(|param| param.form.code() == Some(code));
            (has(Code::Fp8), has(Code::Nvfp4))
        }
        Err(error) => {
            assert!(!matches!(error, Error::Audit(_)), "{error}");
            told(&error);
            (false, false)
        }
    }
}

/// A request with a policy, and what goes with it.
fn with_forms(model: &Model, mut request: PlanRequest, forms: Option<OutputPolicy>, seed: usize) -> PlanRequest {
    request.forms = forms;
    let has = |format| request.forms.iter().flat_map(|policy| &policy.rules.rules).any(|rule| rule.dtype == format);
    request.keep_or = has(Format::Keep).then_some(FloatType::F16);
    if has(Format::Nvfp4) {
        request.nvfp4.search = seed / 7 % 3 == 1;
        request.nvfp4.input_scales = (seed / 21 % 3 == 1).then(|| inputs(model, seed));
    }
    request
}

fn audited(set: &GgufSet, model: Model, request: PlanRequest) -> Result<Plan> {
    let plan = Plan::audited(set, model, request)?;
    let summary = plan.summary("by fuzz", true);
    assert!(summary.parameters > 0 && !summary.render().is_empty());
    plan.identity();
    Ok(plan)
}

/// A policy of some rules, most of which fit some weights of the model.
fn arbitrary_policy(model: &Model, seed: usize) -> OutputPolicy {
    let mut left = seed as u64;
    let mut below = |n: usize| {
        left = left.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (left >> 33) as usize % n
    };
    let mut text = "name = \"arbitrary\"\nabout = \"x\"\n".to_owned();
    for _ in 0..=below(3) {
        let dtype = ["nvfp4", "nvfp4", "fp8", "keep", "f16"][below(5)];
        text += &format!("[[rule]]\ndtype = \"{dtype}\"\nmin_elements = {}\n", below(3) * 1000);
        match below(4) {
            0 => text += "mtp = false\n",
            1 => text += "mtp = true\n",
            2 => text += &format!("classes = [\"NoSuchForCausalLM\", {:?}]\n", model.class),
            _ => text += &format!("layers = \"{}-9\"\n", below(3)),
        }
        if below(4) > 0 && !model.weights.is_empty() {
            // Whole families of weights, by any numbers.
            let matrices = || model.weights.iter().filter(|weight| weight.shape.len() == 2);
            let count = matrices().count().max(1);
            let chosen: Vec<usize> = (0..1 + below(4)).map(|_| below(count)).collect();
            let any = |name: &str| {
                name.split('.')
                    .map(|part| if part.parse::<u64>().is_ok() { "*" } else { part })
                    .collect::<Vec<_>>()
                    .join(".")
            };
            let names: Vec<String> =
                chosen.iter().filter_map(|i| matrices().nth(*i)).map(|weight| any(&weight.name)).collect();
            text += &format!("weights = {names:?}\n");
        }
    }
    OutputPolicy::from_text(&text).unwrap()
}

/// Scales of activations for all weights, seldom for all but one.
fn inputs(model: &Model, seed: usize) -> InputScales {
    let lacking = seed.is_multiple_of(5).then_some(seed / 5 % model.weights.len().max(1));
    let named = model.weights.iter().enumerate().filter(|(i, _)| Some(*i) != lacking);
    let by_name = named.map(|(i, weight)| (InputScales::name(&weight.name), 1.0 + i as f32)).collect();
    InputScales { by_name, place: "fuzz.safetensors".into() }
}

/// Reads a mapping, resolves it against a model and plans what comes of it. The audit may refuse: rules can overlap.
pub fn mapping_toml(text: &str) {
    let outcome = Mapping::from_texts(&[text.to_owned()]).and_then(|mapping| {
        let model = resolve(&mapping, &MOE, MtpPolicy::Keep)?;
        let _ = config::derive(&mapping, &MOE, &model, FloatType::BF16).map_err(|error| told(&error));
        for tp in [1, 2] {
            Plan::audited(&MOE, model.clone(), PlanRequest::new(PROFILES[0].clone(), tp, policy()))?;
        }
        Ok(())
    });
    if let Err(error) = outcome {
        told(&error);
    }
}

/// Reads a profile and plans a model by it.
pub fn profile_toml(text: &str) {
    let outcome = Profile::from_texts(&[text.to_owned()]).and_then(|profile| {
        for tp in [1, 2] {
            Plan::audited(&MOE, MODEL.clone(), PlanRequest::new(profile.clone(), tp, policy()))?;
        }
        for input_scales in [None, Some(inputs(&OF_BLOCKS, 1))] {
            let forms = Some(OutputPolicy::from_text(MIXED)?);
            let nvfp4 = Nvfp4 { search: false, input_scales };
            let request = PlanRequest { forms, nvfp4, ..PlanRequest::new(profile.clone(), 1, policy()) };
            Plan::audited(&BLOCKS, OF_BLOCKS.clone(), request)?;
        }
        Ok(())
    });
    if let Err(error) = outcome {
        told(&error);
    }
}

/// Reads an output policy and plans a model by it.
pub fn policy_toml(text: &str) {
    let policy = match OutputPolicy::from_text(text) {
        Ok(policy) => policy,
        Err(error) => return told(&error),
    };
    for (set, model) in [(&*MOE, &*MODEL), (&*BLOCKS, &*OF_BLOCKS)] {
        for (profile, tp) in LOADING.iter().flat_map(|profile| [(profile, 1), (profile, 2)]) {
            let mut request = PlanRequest::new(profile.clone(), tp, self::policy());
            request.forms = Some(policy.clone());
            if let Err(error) = Plan::audited(set, model.clone(), request) {
                // What a policy says is planned or refused, and never planned wrongly.
                assert!(!matches!(error, Error::Audit(_)), "{error}");
                told(&error);
            }
        }
    }
}

/// Reads the header of a safetensors file. What is accepted is contiguous, and written again it reads the same.
pub fn safetensors_header(bytes: &[u8]) {
    match SafetensorsHeader::read_from(&mut &bytes[..], bytes.len() as u64, Path::new("fuzz.safetensors")) {
        Ok(header) => {
            let mut end = 0;
            for tensor in &header.tensors {
                assert_eq!(tensor.offsets.0, end);
                end = tensor.offsets.1;
            }
            assert_eq!(header.header_bytes + end, bytes.len() as u64);
        }
        Err(error) => told(&error),
    }
}

/// Reads a manifest, whose digest at the end is put right first: anyone who forges one would do that as well.
pub fn manifest(body: &[u8]) {
    const END: &[u8] = b"\"\n}\n";
    let mut bytes = [body, b"\n\"digest\":\"", &[b'0'; 64], END].concat();
    let digest = blake3::hash(&bytes).to_hex();
    let at = bytes.len() - END.len() - 64;
    bytes[at..at + 64].copy_from_slice(digest.as_bytes());
    match Manifest::parse(&bytes, Path::new("ggshard.json")) {
        Ok(manifest) => {
            let again = manifest.to_bytes().unwrap();
            assert_eq!(Manifest::parse(&again, Path::new("ggshard.json")).unwrap().files, manifest.files);
            let sums = Sums::of(&manifest, Digest::of(&again));
            assert_eq!(Sums::parse(sums.to_text().as_bytes(), Path::new("B3SUMS")).unwrap(), sums);
        }
        Err(error) => told(&error),
    }
    let _ = Sums::parse(body, Path::new("B3SUMS")).map_err(|error| told(&error));
}
