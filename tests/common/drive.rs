//! What is done with an input that nobody vouches for: the same by the fuzz targets (`fuzz/`) and by the bounded fuzz in
//! `tests/fuzz.rs`. Any input gives a value or a typed error; a panic is a finding.
#![allow(dead_code, reason = "each fuzz target uses one of them")]

use std::path::Path;
use std::sync::LazyLock;

use ggshard::dequant::FloatType;
use ggshard::gguf::{Description, GgufSet};
use ggshard::mapping::{Mapping, Model, MtpPolicy, OutputPolicy, Profile, builtin_mappings, choose, config, resolve};
use ggshard::output::{Digest, Manifest, SafetensorsHeader, Sums};
use ggshard::plan::{Plan, PlanRequest, Policy};
use ggshard::{Error, Result};

/// A small model with attention and experts, and what the mapping makes of it.
static MOE: LazyLock<GgufSet> = LazyLock::new(|| {
    let bytes = include_bytes!("../../fixtures/families/qwen3_moe.gguf");
    GgufSet::from_bytes("qwen3_moe.gguf", bytes.to_vec()).unwrap()
});
static MODEL: LazyLock<Model> = LazyLock::new(|| resolve(&choose(&MOE).unwrap(), &MOE, MtpPolicy::Keep).unwrap());

/// The profiles that a header is planned for, parsed once.
static PROFILES: LazyLock<Vec<Profile>> = LazyLock::new(|| Profile::all().unwrap());

/// The built-in mappings, parsed once: `choose` reads them all again for each file.
static MAPPINGS: LazyLock<Vec<Mapping>> = LazyLock::new(|| builtin_mappings().unwrap());

/// The built-in output policies.
static POLICIES: LazyLock<Vec<OutputPolicy>> = LazyLock::new(|| OutputPolicy::all().unwrap());

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
    let profile = PROFILES[seed / 3 % PROFILES.len()].clone();
    let mut request = PlanRequest::new(profile, [1, 2, 4, 3][seed / 16 % 4], policy());
    request.expert_parallel = seed / 64 % 4 == 1;
    request.policy.moe_pad = (seed / 256 % 4 == 1).then_some(96);
    request.forms = (seed / 1024 % 2 == 1).then(|| POLICIES[seed / 2048 % POLICIES.len()].clone());
    let keeps = request.forms.as_ref().is_some_and(|policy| policy.rules.name == "keep");
    request.keep_or = keeps.then_some(FloatType::F16);
    let plan = Plan::audited(set, model, request)?;
    let summary = plan.summary("by fuzz", true);
    assert!(summary.parameters > 0 && !summary.render().is_empty());
    plan.identity();
    Ok(())
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
        Ok(())
    });
    if let Err(error) = outcome {
        told(&error);
    }
}

/// Reads an output policy and plans a model by it.
pub fn policy_toml(text: &str) {
    let outcome = OutputPolicy::from_text(text).and_then(|policy| {
        for tp in [1, 2] {
            let mut request = PlanRequest::new(PROFILES[0].clone(), tp, self::policy());
            request.forms = Some(policy.clone());
            Plan::audited(&MOE, MODEL.clone(), request)?;
        }
        Ok(())
    });
    if let Err(error) = outcome {
        // What a policy says is planned or refused, and never planned wrongly.
        assert!(!matches!(error, Error::Audit(_)), "{error}");
        told(&error);
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
