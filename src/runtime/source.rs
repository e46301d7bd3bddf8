//! A GGUF whose weights are decoded straight into memory, without a folder in between.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::resident::{self, DeviceWeights};
use super::stream::Weights;
use crate::convert::{self, InputScalesFrom, Request};
use crate::dequant::FloatType;
use crate::engine;
use crate::error::{Fault, Result};
use crate::gguf::{self, GgufSet};
use crate::mapping::{self, Mapping, MtpPolicy, OutputPolicy, Profile, Set};
use crate::plan::{Param, Plan};

/// Which weights are decoded, and how.
#[derive(Debug, Clone)]
pub struct WeightOptions {
    /// A mapping by name or path; by default the one whose `[match]` fits.
    pub mapping: Option<String>,
    /// Element type of weights that are not pinned and that the output policy gives no form of its own.
    pub dtype: FloatType,
    /// An output policy by name or path: which weights are encoded, or come as the blocks that they are in the source.
    pub policy: Option<String>,
    /// The type of weights whose blocks the policy keeps, but a cut goes through; `None` to refuse that.
    pub keep_or: Option<FloatType>,
    /// Whether nvfp4's scales of blocks are searched by their error instead of taken from the largest value.
    pub nvfp4_search: bool,
    /// Where the scales of activations come from, which are then in nvfp4 as well.
    pub input_scales: Option<InputScalesFrom>,
    /// What becomes of MTP blocks.
    pub mtp: MtpPolicy,
    /// Only the parameters of these names (of any set); `None` for all. The order stays the plan's. An encoded weight and
    /// its scales come together, whichever is named.
    pub names: Option<Vec<String>>,
    /// Number of workers; 0 for one per CPU.
    pub threads: usize,
    /// How many bytes of parameters may be in memory before they are delivered. A parameter that is larger still comes,
    /// alone, or with its scales. What the consumer keeps does not count.
    pub memory: u64,
    /// Whether NaN, infinities and overflows are let through (and counted).
    pub allow_nonfinite: bool,
}

impl Default for WeightOptions {
    fn default() -> Self {
        WeightOptions {
            mapping: None,
            dtype: FloatType::BF16,
            policy: None,
            keep_or: None,
            nvfp4_search: false,
            input_scales: None,
            mtp: MtpPolicy::Keep,
            names: None,
            threads: 0,
            memory: 1 << 30,
            allow_nonfinite: false,
        }
    }
}

impl WeightOptions {
    /// The options with the output types of these names, as [`Request::typed`] takes them.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn typed(self, dtype: &str, policy: Option<String>) -> Result<Self> {
        let Request { dtype, policy, .. } = Request::default().typed(dtype, policy)?;
        Ok(WeightOptions { dtype, policy, ..self })
    }
}

/// Which rank of which layout is decoded, and how.
#[derive(Debug, Clone)]
pub struct RankOptions {
    /// A profile by name or path.
    pub profile: String,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    /// The rank.
    pub rank: u32,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Blocks per pipeline stage; empty to divide them evenly.
    pub stage_layers: Vec<u64>,
    /// The pipeline stage; `None` for all of them. The draft model is not divided and comes with every stage.
    pub stage: Option<u32>,
    /// Ranks hold whole experts instead of a slice of every expert.
    pub expert_parallel: bool,
    /// Each rank's rows of an expert's projections are padded with zeros to a multiple of this.
    pub moe_pad: Option<u64>,
    /// Only the model itself or only the draft model; `None` for both.
    pub set: Option<Set>,
    /// Which weights, and how they are decoded.
    pub weights: WeightOptions,
}

impl Default for RankOptions {
    fn default() -> Self {
        RankOptions {
            profile: "hf".into(),
            tp: 1,
            rank: 0,
            pp: 1,
            stage_layers: Vec::new(),
            stage: None,
            expert_parallel: false,
            moe_pad: None,
            set: None,
            weights: WeightOptions::default(),
        }
    }
}

/// An open GGUF. A clone shares it.
#[derive(Clone)]
pub struct Source(Arc<GgufSet>);

impl Source {
    /// Opens a GGUF file, any part of a split one, or a folder that holds one.
    ///
    /// # Errors
    ///
    /// Those of [`GgufSet::open`], and [`Error::Unsupported`](crate::Error::Unsupported) for a file that is no model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, gguf::OpenOptions::default())
    }

    /// As [`Source::open`], with a choice of how bytes are fetched.
    pub fn open_with(path: impl AsRef<Path>, options: gguf::OpenOptions) -> Result<Self> {
        let set = GgufSet::open_with(path, options)?;
        set.refuse_nonmodel()?;
        Ok(Source(Arc::new(set)))
    }

    /// The set of files.
    pub fn set(&self) -> &GgufSet {
        &self.0
    }

    /// The weights under their names in the original checkpoint (profile `hf`, one rank), decoded as they are asked for.
    ///
    /// # Errors
    ///
    /// Those of a plan and of an output policy, before anything is decoded, and [`Error::Layout`](crate::Error::Layout) for a
    /// name that there is not. Whatever goes wrong later is an item.
    pub fn weights(&self, options: WeightOptions) -> Result<Weights> {
        self.rank(RankOptions { weights: options, ..RankOptions::default() })
    }

    /// One rank's parameters of a layout, decoded as they are asked for.
    ///
    /// # Errors
    ///
    /// As [`Source::weights`], and [`Error::Layout`](crate::Error::Layout) for a rank or stage beyond the last.
    pub fn rank(&self, options: RankOptions) -> Result<Weights> {
        self.start(options, None)
    }

    /// As [`Source::rank`], but the parameters come to be in the memory of the CUDA device of this number: quantized
    /// bytes are sent there and decoded where they stay. [`WeightOptions::memory`] bounds memory of the device.
    ///
    /// # Errors
    ///
    /// As [`Source::rank`], and [`Error::Device`](crate::Error::Device) when the device cannot be used.
    pub fn rank_on(&self, options: RankOptions, device: u32) -> Result<DeviceWeights> {
        self.start(options, Some(device)).map(DeviceWeights)
    }

    fn start(&self, options: RankOptions, device: Option<u32>) -> Result<Weights> {
        let RankOptions { tp, rank, pp, stage, .. } = options;
        if rank >= tp {
            return Err(Fault::new(format!("rank {rank} of {tp}")).expected(format!("a rank below {tp}")).layout());
        }
        if let Some(stage) = stage.filter(|stage| *stage >= pp) {
            let fault = Fault::new(format!("pipeline stage {stage} of {pp}"));
            return Err(fault.expected(format!("a stage below {pp}")).layout());
        }
        let WeightOptions { names, threads, memory, allow_nonfinite, .. } = options.weights;
        let mapping = match options.weights.mapping {
            Some(name) => Mapping::load(&name)?,
            None => mapping::choose(&self.0)?,
        };
        let forms = options.weights.policy.as_deref().map(OutputPolicy::load).transpose()?;
        let request = Request {
            dtype: options.weights.dtype,
            keep_or: options.weights.keep_or,
            nvfp4_search: options.weights.nvfp4_search,
            input_scales: options.weights.input_scales,
            mtp: options.weights.mtp,
            tp,
            pp,
            stage_layers: options.stage_layers,
            expert_parallel: options.expert_parallel,
            moe_pad: options.moe_pad,
            ..Request::default()
        };
        let mut plan = convert::audited(&self.0, &mapping, Profile::load(&options.profile)?, forms, &request)?;
        let held = |param: &Param| {
            let staged = match param.set {
                Set::Main => stage.is_none_or(|stage| stage == param.stage),
                Set::Draft => true,
            };
            staged && options.set.is_none_or(|set| set == param.set)
        };
        match names {
            None => plan.narrow(held),
            Some(names) => {
                let names: BTreeSet<String> = names.into_iter().collect();
                self.check_names(&plan, &held, &names)?;
                plan.narrow(|param| held(param) && names.contains(&param.name));
            }
        }
        let decoder = device.map_or(engine::Device::Cpu, |ordinal| engine::Device::Cuda(vec![ordinal]));
        let engine =
            engine::Options { ranks: vec![rank], threads, allow_nonfinite, device: decoder, ..Default::default() };
        let device = device.map(resident::open).transpose()?;
        Weights::start(Arc::clone(&self.0), plan, rank, engine, memory, device)
    }

    /// Every name is that of a parameter that is held.
    fn check_names(&self, plan: &Plan, held: &dyn Fn(&Param) -> bool, names: &BTreeSet<String>) -> Result<()> {
        let known: BTreeSet<&str> = plan.params.iter().filter(|param| held(param)).map(|p| p.name.as_str()).collect();
        let mut unknown = names.iter().map(String::as_str).filter(|name| !known.contains(name));
        let Some(first) = unknown.next() else { return Ok(()) };
        let others: Vec<&str> = unknown.collect();
        let found = match others.as_slice() {
            [] => "the model has no such parameter in this layout".to_owned(),
            others => format!("the model has no such parameter in this layout, nor {}", others.join(", ")),
        };
        Err(Fault::new(found).file(self.0.path()).tensor(first).layout())
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("path", &self.0.path()).finish_non_exhaustive()
    }
}
