//! What config.json says of weights in a form of their own.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};

use crate::error::{Fault, Result};
use crate::mapping::{Format, OutputPolicy};
use crate::plan::{BLOCK, Form, Plan};

/// The field in which stacks look for it.
const FIELD: &str = "quantization_config";
/// The policy whose forms a stack expects of a checkpoint in fp8, unless it is told otherwise.
const EXPECTED: &str = "deepseek-fp8";
/// A block's experts are one module for stacks.
const EXPERTS: &str = ".experts.";

/// Makes a config.json say what is written: the text stays as it is where nothing has to be changed.
pub(super) fn stated(plan: &Plan, bytes: Vec<u8>, notes: &mut Vec<String>) -> Result<Vec<u8>> {
    let wrong = |e: serde_json::Error| Fault::new(format!("config.json cannot be read or written: {e}")).audit();
    let mut fields: Map<String, Json> = serde_json::from_slice(&bytes).map_err(wrong)?;
    let own = quantization(plan)?;
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
    let mut bytes = serde_json::to_vec_pretty(&fields).map_err(wrong)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The field for a plan; `None` where all weights are floats.
fn quantization(plan: &Plan) -> Result<Option<Json>> {
    if plan.params.iter().any(|param| param.form.blocks().is_some()) {
        // No stack knows this method, so none takes the folder for a checkpoint whose weights are missing.
        return Ok(Some(json!({ "quant_method": "ggml_blocks" })));
    }
    let expected = OutputPolicy::builtin(EXPECTED)?;
    let (mut quantized, mut plain) = (BTreeSet::new(), BTreeSet::new());
    for param in &plan.params {
        for weight in param.content.weights().iter().map(|w| &plan.model.weights[*w as usize]) {
            match param.form {
                Form::Fp8 { .. } => quantized.insert(weight.name.as_str()),
                Form::Plain if expected.format(weight, plan.types(weight)) == Some(Format::Fp8) => {
                    plain.insert(weight.name.as_str())
                }
                Form::Plain | Form::Kept(_) | Form::Scales { .. } => false,
            };
        }
    }
    if quantized.is_empty() {
        return Ok(None);
    }
    let mut field = json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    });
    // A block's experts are named together where none of them is quantized.
    let experts = |name: &str| name.find(EXPERTS).map(|at| name[..at + EXPERTS.len() - 1].to_owned());
    let mixed: BTreeSet<String> = quantized.iter().filter_map(|name| experts(name)).collect();
    let module = |name: &&str| {
        let together = experts(name).filter(|module| !mixed.contains(module));
        together.unwrap_or_else(|| name.strip_suffix(".weight").unwrap_or(name).to_owned())
    };
    let plain: BTreeSet<String> = plain.iter().map(module).collect();
    if !plain.is_empty() {
        field["modules_to_not_convert"] = plain.into_iter().collect();
    }
    Ok(Some(field))
}
