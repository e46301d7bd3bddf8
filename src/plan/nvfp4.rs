//! What nvfp4 needs beyond blocks: choices, and the weights that share a scale.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use super::{Code, Plan};
use crate::encode::nvfp4::BlockScale;
use crate::error::Fault;

/// What the user chose about nvfp4.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Nvfp4 {
    /// Scales of blocks are searched by their error instead of taken from the largest value.
    pub search: bool,
    /// The scales of activations, which are then in four bits as well; without them, in 16.
    pub input_scales: Option<InputScales>,
}

impl Nvfp4 {
    /// How scales of blocks are chosen.
    pub fn block_scale(&self) -> BlockScale {
        if self.search { BlockScale::Searched } else { BlockScale::Amax }
    }
}

/// Scales of activations, one for each weight that is written as nvfp4.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InputScales {
    /// By name, as in `model.layers.0.mlp.up_proj.input_scale`.
    pub by_name: BTreeMap<String, f32>,
    /// Where they were read, for messages.
    pub place: PathBuf,
}

impl InputScales {
    /// The name of the scale of a weight, or of those of a parameter made of weights.
    pub fn name(weight: &str) -> String {
        match weight.strip_suffix("weight") {
            Some(stem) => format!("{stem}input_scale"),
            None => format!("{weight}_input_scale"),
        }
    }

    /// The scale of the weight with this name.
    pub(super) fn of(&self, weight: &str) -> Result<f32, Box<Fault>> {
        let name = InputScales::name(weight);
        let expected = "a positive number, from a calibration with activations";
        let fault = |found: String| {
            let fault = Fault::new(found).file(&self.place).tensor(&name).expected(expected);
            fault.remedy(
                "Give the scales of a checkpoint that ModelOpt made of this model, or write weights alone as nvfp4",
            )
        };
        let found = match self.by_name.get(&name) {
            Some(scale) if scale.is_finite() && *scale > 0.0 => return Ok(*scale),
            Some(scale) => format!("the scale of the activations is {scale}"),
            None => format!("no scale of the activations of '{weight}' is given"),
        };
        Err(Box::new(fault(found)))
    }
}

/// What weights have that share a scale.
const NONE: u32 = u32::MAX;

impl Plan {
    /// Finds the weights that share a `weight_scale_2`: the parts of one parameter, or of one element of a stack, and those
    /// that the profile names together, because stacks make one parameter of them when they load.
    pub(super) fn share_scales(&mut self) {
        let mut leaders = vec![NONE; self.model.weights.len()];
        for param in self.params.iter().filter(|param| param.form.code() == Some(Code::Nvfp4)) {
            let parts = param.content.parts().max(1);
            for element in param.content.weights().chunks(parts) {
                element.iter().for_each(|weight| join(&mut leaders, element[0], *weight));
            }
        }
        if leaders.iter().any(|leader| *leader != NONE) {
            self.join_named(&mut leaders);
            // Weights are led by the first of their own, and leaders by themselves.
            let led = |i: u32| if leaders[i as usize] == NONE { NONE } else { leader(&leaders, i) };
            self.scale_leaders = (0..leaders.len() as u32).map(led).collect();
        }
    }

    /// Forgets the scales of activations that no weight in nvfp4 has: they change no byte, and could be any number.
    pub(super) fn forget_unused_inputs(&mut self) {
        let encoded = self.model.weights.iter().enumerate().filter(|(i, _)| self.scale_leader(*i as u32).is_some());
        let used: BTreeSet<String> = encoded.map(|(_, weight)| InputScales::name(&weight.name)).collect();
        self.nvfp4.input_scales.iter_mut().for_each(|scales| scales.by_name.retain(|name, _| used.contains(name)));
    }

    fn join_named(&self, leaders: &mut [u32]) {
        for rule in &self.profile.rules.together {
            let mut first: HashMap<Vec<(String, u64)>, u32> = HashMap::new();
            for (index, weight) in self.model.weights.iter().enumerate() {
                if leaders[index] == NONE {
                    continue;
                }
                let Some(mut vars) = rule.weights.iter().find_map(|name| name.0.capture(&weight.name)) else {
                    continue;
                };
                vars.sort_unstable();
                let vars = vars.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                join(leaders, *first.entry(vars).or_insert(index as u32), index as u32);
            }
        }
    }

    /// The first of the weights that share the `weight_scale_2` of a weight that is written as nvfp4.
    pub(crate) fn scale_leader(&self, weight: u32) -> Option<u32> {
        self.scale_leaders.get(weight as usize).copied().filter(|leader| *leader != NONE)
    }

    /// By the first of them, the weights that share a `weight_scale_2`.
    pub(crate) fn scale_groups(&self) -> BTreeMap<u32, Vec<u32>> {
        let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for weight in 0..self.scale_leaders.len() as u32 {
            if let Some(leader) = self.scale_leader(weight) {
                groups.entry(leader).or_default().push(weight);
            }
        }
        groups
    }
}

/// Has two weights, and all that share with them, led by the first.
fn join(leaders: &mut [u32], a: u32, b: u32) {
    for weight in [a, b] {
        if leaders[weight as usize] == NONE {
            leaders[weight as usize] = weight;
        }
    }
    let (a, b) = (leader(leaders, a), leader(leaders, b));
    leaders[a.max(b) as usize] = a.min(b);
}

fn leader(leaders: &[u32], mut weight: u32) -> u32 {
    while leaders[weight as usize] != weight {
        weight = leaders[weight as usize];
    }
    weight
}
