//! The main job: a GGUF becomes per-rank safetensors and a manifest.

mod extras;
mod inputs;
mod quantization;
mod record;
mod run;

use std::path::Path;

pub use extras::{Extras, extras};
pub use inputs::InputScalesFrom;
pub(crate) use record::{ignored, index, metadata, parameters, source_of};
pub use run::{Direct, Output, Report, Sealed, convert, seal};

use crate::dequant::FloatType;
use crate::error::{Fault, Result};
use crate::gguf::{GgufSet, OpenOptions};
use crate::mapping::{self, Mapping, MtpPolicy, OutputPolicy, Profile};
use crate::output::filename;
use crate::plan::{Nvfp4, Plan, PlanRequest, Policy};

/// Part size unless another is asked for: 5 GiB, as published checkpoints have it.
pub const PART_SIZE: u64 = 5 << 30;
/// The name of the manifest in an output folder.
pub const MANIFEST: &str = filename::MANIFEST;
/// Names of output types that stand for a built-in policy.
const POLICIES: [(&str, &str); 3] = [("fp8", "deepseek-fp8"), ("nvfp4", "modelopt-nvfp4"), ("keep", "keep")];
/// What the manifest's `tool` begins with; the version follows.
pub(crate) const TOOL: &str = "ggshard ";

/// What is to be converted, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// A mapping by name or path; by default the one whose `[match]` fits.
    pub mapping: Option<String>,
    /// A profile by name or path.
    pub profile: String,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// Output dtype of weights that are not pinned and that the output policy gives no form of its own.
    pub dtype: FloatType,
    /// An output policy by name or path.
    pub policy: Option<String>,
    /// The type of weights whose blocks the policy keeps, but a cut goes through; `None` to refuse that.
    pub keep_or: Option<FloatType>,
    /// Whether nvfp4's scales of blocks are searched by their error instead of taken from the largest value.
    pub nvfp4_search: bool,
    /// Where the scales of activations come from, which are then in nvfp4 as well.
    pub input_scales: Option<InputScalesFrom>,
    /// What becomes of MTP blocks.
    pub mtp: MtpPolicy,
    /// Size in bytes at which a part is closed.
    pub part_size: u64,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Blocks per pipeline stage; empty to divide them evenly.
    pub stage_layers: Vec<u64>,
    /// Ranks hold whole experts instead of a slice of every expert.
    pub expert_parallel: bool,
    /// Each rank's rows of an expert's projections are padded with zeros to a multiple of this.
    pub moe_pad: Option<u64>,
}

impl Default for Request {
    fn default() -> Self {
        Request {
            mapping: None,
            profile: "hf".into(),
            tp: 1,
            dtype: FloatType::BF16,
            policy: None,
            keep_or: None,
            nvfp4_search: false,
            input_scales: None,
            mtp: MtpPolicy::Keep,
            part_size: PART_SIZE,
            pp: 1,
            stage_layers: Vec::new(),
            expert_parallel: false,
            moe_pad: None,
        }
    }
}

impl Request {
    /// The request with the output types of these names: a float type and an output policy, or a name that stands for bf16
    /// and a policy: `fp8` for `deepseek-fp8`, `nvfp4` for `modelopt-nvfp4`, `keep` for `keep`.
    pub fn typed(self, dtype: &str, policy: Option<String>) -> Result<Self> {
        let floats = [FloatType::BF16, FloatType::F16, FloatType::F32];
        if let Some(dtype) = floats.into_iter().find(|float| float.name().to_lowercase() == dtype) {
            return Ok(Request { dtype, policy, ..self });
        }
        let wrong = |found: String, remedy: &str| Err(Fault::new(found).remedy(remedy).rules());
        let Some((_, implied)) = POLICIES.iter().find(|(name, _)| *name == dtype) else {
            return wrong(format!("'{dtype}' is no output type"), "Choose bf16, f16, f32, fp8, nvfp4 or keep");
        };
        match policy {
            None => Ok(Request { dtype: FloatType::BF16, policy: Some((*implied).to_owned()), ..self }),
            Some(policy) => {
                let found = format!("dtype {dtype} is policy '{implied}', but policy '{policy}' is asked for");
                wrong(found, "Give one of them; with --policy, --dtype is the float type of all other weights")
            }
        }
    }
}

/// A source with its audited plan.
pub struct Planned {
    /// The source.
    pub set: GgufSet,
    /// The mapping, which says why it was chosen.
    pub mapping: Mapping,
    /// The plan.
    pub plan: Plan,
}

/// Opens a source and plans its conversion. With `header_only` the source's data need not be there.
pub fn plan(source: &Path, request: &Request, header_only: bool) -> Result<Planned> {
    plan_set(GgufSet::open_with(source, OpenOptions { header_only, ..OpenOptions::default() })?, request)
}

/// Plans the conversion of an open source.
pub fn plan_set(set: GgufSet, request: &Request) -> Result<Planned> {
    set.refuse_nonmodel()?;
    let mapping = match &request.mapping {
        Some(name) => Mapping::load(name)?,
        None => mapping::choose(&set)?,
    };
    plan_with(set, mapping, Profile::load(&request.profile)?, request)
}

/// Plans the conversion of an open source by a mapping and a profile that are at hand.
pub fn plan_with(set: GgufSet, mapping: Mapping, profile: Profile, request: &Request) -> Result<Planned> {
    let policy = request.policy.as_deref().map(OutputPolicy::load).transpose()?;
    plan_by(set, mapping, profile, policy, request)
}

/// Plans the conversion of an open source by rules that are all at hand.
pub(crate) fn plan_by(
    set: GgufSet,
    mapping: Mapping,
    profile: Profile,
    policy: Option<OutputPolicy>,
    request: &Request,
) -> Result<Planned> {
    let plan = audited(&set, &mapping, profile, policy, request)?;
    Ok(Planned { set, mapping, plan })
}

/// The audited plan of a conversion.
pub(crate) fn audited(
    set: &GgufSet,
    mapping: &Mapping,
    profile: Profile,
    forms: Option<OutputPolicy>,
    request: &Request,
) -> Result<Plan> {
    let model = mapping::resolve(mapping, set, request.mtp)?;
    let input_scales = match &request.input_scales {
        None => None,
        Some(InputScalesFrom::Given(scales)) => Some(scales.clone()),
        Some(InputScalesFrom::Source) => Some(inputs::of_source(set, &model)?),
    };
    let Request { dtype, mtp, part_size, moe_pad, .. } = *request;
    let plan_request = PlanRequest {
        profile,
        tp: request.tp,
        pp: request.pp,
        stage_layers: request.stage_layers.clone(),
        expert_parallel: request.expert_parallel,
        policy: Policy { dtype, mtp, part_size, moe_pad },
        forms,
        keep_or: request.keep_or,
        nvfp4: Nvfp4 { search: request.nvfp4_search, input_scales },
    };
    Plan::audited(set, model, plan_request)
}
