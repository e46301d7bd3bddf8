//! What goes beside weights in a form of their own, so that stacks know it: a field of config.json, and a file.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

use crate::error::{Fault, Result};
use crate::mapping::{Format, OutputPolicy};
use crate::plan::{Code, EXPERTS, Plan};

/// The field in which stacks look for it.
const FIELD: &str = "quantization_config";
/// The file in which they look for what ModelOpt writes.
pub(super) const FILE: &str = "hf_quant_config.json";
/// The policy whose forms a stack expects of a checkpoint in fp8, unless it is told otherwise.
const EXPECTED: &str = "deepseek-fp8";
/// A part of a module that vLLM joins, and that module: its draft models do not know the one by the other.
const JOINED: (&str, &str) = (".q_a_proj", ".fused_qkv_a_proj");
/// The head of a block for multi-token prediction, which stacks make whether there are weights for it or not; and what vLLM
/// calls it when it looks here.
const MTP_HEADS: [&str; 2] = ["shared_head.head", "head"];
/// What every block's modules are below.
const LAYERS: [&str; 2] = ["model", "layers"];

/// Makes a config.json say what is written: the text stays as it is where nothing has to be changed.
pub(super) fn stated(plan: &Plan, bytes: Vec<u8>, notes: &mut Vec<String>) -> Result<Vec<u8>> {
    let wrong = |e: serde_json::Error| Fault::new(format!("config.json cannot be read or written: {e}")).audit();
    let mut fields: Map<String, Json> = serde_json::from_slice(&bytes).map_err(wrong)?;
    let own = field(plan)?;
    if fields.get(FIELD) == own.as_ref() {
        return Ok(bytes);
    }
    match own {
        Some(own) => {
            if fields.insert(FIELD.into(), own).is_some() {
                notes.push(format!(
                    "{FIELD} of the given config.json was replaced by that of the weights as they are written"
                ));
            }
        }
        None => {
            fields.remove(FIELD);
            notes.push(format!("{FIELD} of the given config.json was left out: the weights are written as floats"));
        }
    }
    text(&fields).map_err(wrong)
}

/// The file beside the weights, for forms that ModelOpt writes.
pub(super) fn file(plan: &Plan) -> Result<Option<Vec<u8>>> {
    let modules = Modules::of(plan);
    if !modules.has(Code::Nvfp4) {
        return Ok(None);
    }
    let mut quantization = json!({ "quant_algo": modules.algorithm(), "kv_cache_quant_algo": null });
    match modules.has(Code::Fp8) {
        true => quantization["quantized_layers"] = modules.algorithms(),
        false => {
            quantization["group_size"] = Code::Nvfp4.block().cols.into();
            quantization["exclude_modules"] = modules.others().into_iter().collect();
        }
    }
    let file = json!({ "producer": producer(), "quantization": quantization });
    text(&file).map(Some).map_err(|e| Fault::new(format!("{FILE} cannot be written: {e}")).audit())
}

fn text(value: &impl serde::Serialize) -> serde_json::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn producer() -> Json {
    json!({ "name": "ggshard", "version": env!("CARGO_PKG_VERSION") })
}

/// The field for a plan; `None` where all weights are floats.
fn field(plan: &Plan) -> Result<Option<Json>> {
    if plan.params.iter().any(|param| param.form.blocks().is_some()) {
        // No stack knows this method, so none takes the folder for a checkpoint whose weights are missing.
        return Ok(Some(json!({ "quant_method": "ggml_blocks" })));
    }
    let modules = Modules::of(plan);
    Ok(match (modules.has(Code::Fp8), modules.has(Code::Nvfp4)) {
        (false, false) => None,
        (true, false) => Some(modules.fp8()?),
        (_, true) => Some(modules.modelopt()),
    })
}

/// Modules whose weights have codes, and which.
struct Modules<'a> {
    plan: &'a Plan,
    coded: BTreeMap<&'a str, Code>,
}

impl<'a> Modules<'a> {
    fn of(plan: &'a Plan) -> Self {
        let mut coded = BTreeMap::new();
        for param in &plan.params {
            let Some(code) = param.form.code() else { continue };
            let names = param.content.weights().iter().map(|w| module(&plan.model.weights[*w as usize].name));
            coded.extend(names.map(|name| (name, code)));
        }
        Modules { plan, coded }
    }

    fn has(&self, code: Code) -> bool {
        self.coded.values().any(|other| *other == code)
    }

    /// As DeepSeek writes it.
    fn fp8(&self) -> Result<Json> {
        let (expected, model) = (OutputPolicy::builtin(EXPECTED)?, &self.plan.model);
        let block = Code::Fp8.block();
        let mut field = json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block.rows, block.cols],
        });
        let left = model.weights.iter().filter(|weight| {
            let form = expected.format(&model.class, weight, self.plan.types(weight));
            form == Some(Format::Fp8) && !self.coded.contains_key(module(&weight.name))
        });
        // A block's experts are named together where none of them is quantized.
        let mixed: BTreeSet<&str> = self.coded.keys().filter_map(|name| experts(name)).collect();
        let named = |name: &'a str| experts(name).filter(|experts| !mixed.contains(experts)).unwrap_or(name);
        let left: BTreeSet<&str> = left.map(|weight| named(module(&weight.name))).collect();
        if !left.is_empty() {
            field["modules_to_not_convert"] = left.into_iter().collect();
        }
        Ok(field)
    }

    /// As ModelOpt writes it.
    fn modelopt(&self) -> Json {
        let mut field = json!({ "quant_method": "modelopt", "quant_algo": self.algorithm(), "producer": producer() });
        if self.has(Code::Fp8) {
            field["quantized_layers"] = self.algorithms();
            return field;
        }
        let group = Code::Nvfp4.block().cols;
        let numbers = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": group });
        let inputs = self.plan.nvfp4.input_scales.as_ref().map(|_| numbers.clone());
        field["group_size"] = group.into();
        field["config_groups"] =
            json!({ "group_0": { "input_activations": inputs, "weights": numbers, "targets": ["Linear"] } });
        field["ignore"] = self.others().into_iter().collect();
        field
    }

    /// ModelOpt's name for all of it.
    fn algorithm(&self) -> &'static str {
        if self.has(Code::Fp8) { "MIXED_PRECISION" } else { self.of_code(Code::Nvfp4) }
    }

    /// ModelOpt's name of a code.
    fn of_code(&self, code: Code) -> &'static str {
        match code {
            Code::Fp8 => "FP8_PB_WO",
            Code::Nvfp4 if self.plan.nvfp4.input_scales.is_some() => "NVFP4",
            // Four bits for weights, sixteen for activations.
            Code::Nvfp4 => "W4A16_NVFP4",
        }
    }

    /// By module, what its weights have; a block's experts are one.
    fn algorithms(&self) -> Json {
        let mut all = Map::new();
        for (name, code) in &self.coded {
            let algorithm = json!({ "quant_algo": self.of_code(*code), "group_size": code.block().cols });
            let names = [Some(experts(name).unwrap_or(name).to_owned()), joined(name)];
            all.extend(names.into_iter().flatten().map(|name| (name, algorithm.clone())));
        }
        all.into()
    }

    /// The other modules with matrices. Where all modules below another are, that one with a `*`.
    fn others(&self) -> BTreeSet<String> {
        let mut above: BTreeSet<&str> = BTreeSet::new();
        self.coded.keys().for_each(|name| above.extend(prefixes(name)));
        let matrices = self.plan.model.weights.iter().filter(|weight| weight.shape.len() == 2);
        let names = matrices.map(|weight| module(&weight.name)).filter(|name| !self.coded.contains_key(name));
        let mut names: BTreeSet<String> =
            names.flat_map(|name| [Some(name.to_owned()), joined(name)]).flatten().collect();
        let blocks = self.plan.model.weights.iter().filter(|weight| weight.mtp).filter_map(|weight| weight.block);
        names.extend(blocks.flat_map(|block| MTP_HEADS.map(|head| format!("{}.{block}.{head}", LAYERS.join(".")))));
        let listed = |name: &String| {
            let whole = prefixes(name).find(|prefix| !above.contains(prefix)).unwrap_or(name);
            let numbered = whole.ends_with(|c: char| c.is_ascii_digit());
            match whole == name {
                true => name.clone(),
                // Block 1 is not block 10.
                false => format!("{whole}{}", if numbered { ".*" } else { "*" }),
            }
        };
        names.iter().map(listed).collect()
    }
}

/// The module of a weight.
fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// The module that vLLM makes of this one and others.
fn joined(module: &str) -> Option<String> {
    let (part, whole) = JOINED;
    module.strip_suffix(part).map(|stem| format!("{stem}{whole}"))
}

/// The module of which an expert's module is one of many.
fn experts(module: &str) -> Option<&str> {
    module.find(EXPERTS).map(|at| &module[..at + EXPERTS.len() - 1])
}

/// A module's name and those of the modules that it is in, from the outermost on; not the model and its list of blocks.
fn prefixes(module: &str) -> impl Iterator<Item = &str> {
    let ends = module.match_indices('.').map(|(at, _)| at).chain([module.len()]);
    ends.map(|end| &module[..end]).filter(|prefix| {
        let mut parts = prefix.split('.');
        !LAYERS.iter().zip(&mut parts).all(|(layer, part)| *layer == part) || parts.next().is_some()
    })
}
