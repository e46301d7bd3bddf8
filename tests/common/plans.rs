//! Plans of the fixture models and of the toy.
#![allow(dead_code, reason = "each test binary uses some of it")]

use std::path::PathBuf;

use ggshard::dequant::FloatType;
use ggshard::gguf::GgufSet;
use ggshard::mapping::{Mapping, MtpPolicy, Profile, choose, resolve};
use ggshard::plan::{Plan, PlanRequest, Policy};

/// A file of `fixtures/models`.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
}

pub const GLM: &str = "glm_moe_dsa-UD-IQ2_XXS.gguf";
pub const DEEPSEEK: &str = "deepseek_v3-split";

pub fn open(name: &str) -> GgufSet {
    GgufSet::open(fixture(name)).unwrap()
}

pub fn policy() -> Policy {
    Policy { dtype: FloatType::BF16, mtp: MtpPolicy::Keep, part_size: 5 << 30, moe_pad: None }
}

/// A plan that has not been audited.
pub fn plan(set: &GgufSet, mapping: &Mapping, tp: u32, policy: Policy) -> Plan {
    let model = resolve(mapping, set, policy.mtp).unwrap();
    Plan::new(set, model, PlanRequest::new(Profile::load("hf").unwrap(), tp, policy)).unwrap()
}

/// The plan of a fixture model.
pub fn fixture_plan(name: &str, tp: u32) -> Plan {
    let set = open(name);
    plan(&set, &choose(&set).unwrap(), tp, policy())
}
