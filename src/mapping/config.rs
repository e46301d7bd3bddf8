//! config.json: derived from a GGUF's metadata and tensors by the `[config]` table of a mapping, or taken from the user
//! and checked against the same derivation.
//!
//! A field of the table is a value, or a table that says where its value comes from:
//!
//! | form | value |
//! |---|---|
//! | `{ key = "rope.freq_base" }` | a metadata value; if the file lacks the key, `default`, and without one the field is left out |
//! | `{ key = "…", times = 10.0 }`, `{ key = "…", over = "head" }` | a number times another, or divided by an expression |
//! | `{ expr = "heads * 2" }` | an expression |
//! | `{ test = "…", yes = …, no = … }` | one of two values |
//! | `{ choose = "…", cases = { 1 = …, 2 = … } }` | by an integer, a text or a truth value; `default` for any other |
//! | `{ blocks = "layers", test = "…", yes = …, no = … }` | a list of one value per block, the test asked with `layer`; `join = true` makes one text of them |
//! | `{ blocks = "dense", expr = "layer" }` | the same with an expression |
//! | `{ policy = "dtype" }` | the dtype that is written |
//! | `{ object = { … } }` | fields of its own |
//!
//! `default`, `yes`, `no` and each of `cases` are values or such tables again. Expressions are over the mapping's
//! dimensions and `mtp_written`, the number of MTP blocks that are written.
//!
//! To each, `when = "…"` makes the field conditional (`null = true`: present as null where the condition fails), and
//! `check = false`, or a condition, exempts it from comparison with a config.json that the user gives. Only what the file
//! decides is compared: metadata that are there, expressions, cases and lists; no values of the mapping's own.

mod forms;

use std::cell::Cell;
use std::path::Path;

use serde_json::{Map, Number, Value as Json};

pub use forms::{Check, ConfigRules, FieldRule, Form};

use super::expr::Value;
use super::facts::{Bound, Facts};
use super::rules::ExprText;
use super::{Mapping, Model};
use crate::dequant::FloatType;
use crate::error::{Fault, Result};
use crate::gguf::{GgufSet, Value as Field};

/// Most blocks that a list of one value per block may have.
const MOST_BLOCKS: u64 = 1 << 16;
/// Most bytes that the values of a derived config.json may take, about. Lists per block may hold lists per block.
const MOST_BYTES: usize = 16 << 20;
/// The number of MTP blocks, which follows from what is written.
const NEXTN: &str = "num_nextn_predict_layers";

/// A config.json and what is not certain about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The text of the file.
    pub bytes: Vec<u8>,
    /// What a GGUF does not say: assumed, left out, or changed in the user's config.
    pub notes: Vec<String>,
}

/// A config.json that the user gives.
pub struct Given<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// Its text.
    pub bytes: Vec<u8>,
    /// What the text says.
    pub fields: Map<String, Json>,
}

/// Derives the config.json of a model. None for a mapping without a `[config]` table.
pub fn derive(mapping: &Mapping, set: &GgufSet, model: &Model, dtype: FloatType) -> Result<Option<Config>> {
    let rules = &mapping.rules;
    if rules.config.0.is_empty() {
        return Ok(None);
    }
    let facts = Facts::new(set, rules)?;
    let derivation = Derivation { facts: &facts, mtp: written_mtp_blocks(model), dtype, made: Cell::new(0) };
    let fault = |name: &str, why: String| {
        let fault = facts.fault(why).key(name).remedy("Give the model's own config.json with --config");
        fault.contradiction()
    };
    let mut fields = Map::new();
    fields.insert("architectures".into(), Json::from(vec![rules.class.clone()]));
    for (name, rule) in &rules.config.0 {
        if let Some(field) = derivation.field(rule).map_err(|why| fault(&format!("config.{name}"), why))? {
            fields.insert(name.clone(), field.value);
        }
    }
    let mut notes = Vec::new();
    for unknown in &rules.config_unknown {
        let holds = unknown.when.as_ref().map_or(Ok(true), |when| derivation.truth(when));
        if holds.map_err(|why| fault("config_unknown", why))? {
            notes.push(format!("config.json is derived from the GGUF; {}", unknown.say));
        }
    }
    Ok(Some(Config { bytes: to_bytes(&fields)?, notes }))
}

/// Checks a config.json that the user gives against what the file says, and makes it agree about MTP blocks. Where
/// nothing has to be changed it stays as it is, byte for byte.
pub fn check(
    mapping: &Mapping,
    set: &GgufSet,
    model: &Model,
    dtype: FloatType,
    mut given: Given<'_>,
) -> Result<Config> {
    let rules = &mapping.rules;
    let mut notes = Vec::new();
    if rules.config.0.is_empty() {
        return Ok(Config { bytes: given.bytes, notes });
    }
    let facts = Facts::new(set, rules)?;
    let written = written_mtp_blocks(model);
    let derivation = Derivation { facts: &facts, mtp: written, dtype, made: Cell::new(0) };
    let differs = |name: &str, own: &Json, theirs: &Json| {
        Fault::new(format!("it says {theirs}"))
            .file(given.path)
            .key(name)
            .expected(format!("{own}, by the metadata and tensors of '{}'", set.path().display()))
            .remedy("The config.json belongs to another model, or the wrong mapping was chosen (--mapping)")
            .contradiction()
    };
    if let Some(theirs) = given.fields.get("architectures") {
        let named = |class: &String| *theirs == Json::from(vec![class.clone()]);
        if let Some(alike) = rules.class_alike.iter().find(|class| named(class)) {
            notes.push(format!("the given config.json is of {alike}, whose weights are laid out as {}'s", rules.class));
        } else if !named(&rules.class) {
            return Err(differs("architectures", &Json::from(vec![rules.class.clone()]), theirs));
        }
    }
    for (name, rule) in &rules.config.0 {
        let Some(theirs) = given.fields.get(name) else { continue };
        // What cannot be derived here is what the user gives the file for.
        let Ok(Some(own)) = derivation.field(rule) else { continue };
        if let Some((name, own, theirs)) = own.disagrees(name, theirs) {
            return Err(differs(&name, own, theirs));
        }
    }
    match given.fields.get(NEXTN) {
        None if written > 0 => notes.push(format!(
            "the given config.json has no {NEXTN}, and MTP blocks are written: without {written} there, they are not used"
        )),
        None => {}
        Some(theirs) if theirs.as_u64() == Some(written) || theirs.is_null() && written == 0 => {}
        Some(theirs) => {
            notes.push(format!(
                "{NEXTN} of the given config.json was {theirs} and is now {written}, the MTP blocks that are written"
            ));
            given.fields.insert(NEXTN.into(), written.into());
            given.bytes = to_bytes(&given.fields)?;
        }
    }
    Ok(Config { bytes: given.bytes, notes })
}

fn to_bytes(fields: &Map<String, Json>) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(fields)
        .map_err(|e| Fault::new(format!("config.json cannot be written: {e}")).audit())?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn written_mtp_blocks(model: &Model) -> u64 {
    let mut blocks: Vec<u64> = model.weights.iter().filter(|w| w.mtp).filter_map(|w| w.block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks.len() as u64
}

/// Numbers agree within f32 unless both are whole, everything else exactly.
fn agree(a: &Json, b: &Json) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(x), Some(y)) if a.is_f64() || b.is_f64() => {
            x == y || (x - y).abs() <= f64::from(f32::EPSILON) * x.abs().max(y.abs())
        }
        _ => a == b,
    }
}

/// A derived field.
struct Derived {
    value: Json,
    /// Whether a given config.json must have the same value.
    checked: bool,
    /// Null in a given config.json says something.
    null: bool,
    /// The fields of an object, which are checked one by one.
    parts: Vec<(String, Derived)>,
}

impl Derived {
    fn free(value: Json) -> Self {
        Derived { value, checked: false, null: false, parts: Vec::new() }
    }

    fn decided(value: Json) -> Self {
        Derived { checked: true, ..Derived::free(value) }
    }

    /// The first contradiction in a given value: the field's name, the derived and the given value.
    fn disagrees<'a>(&'a self, name: &str, theirs: &'a Json) -> Option<(String, &'a Json, &'a Json)> {
        let silent = theirs.is_null() && !self.null;
        if self.checked && !silent && !agree(&self.value, theirs) {
            return Some((name.to_owned(), &self.value, theirs));
        }
        self.parts.iter().find_map(|(part, own)| {
            theirs.get(part).and_then(|theirs| own.disagrees(&format!("{name}.{part}"), theirs))
        })
    }
}

struct Derivation<'a, 'b> {
    facts: &'b Facts<'a>,
    mtp: u64,
    dtype: FloatType,
    /// Bytes of all values so far, about.
    made: Cell<usize>,
}

impl<'a> Derivation<'a, '_> {
    fn field(&self, rule: &FieldRule) -> Result<Option<Derived>, String> {
        let holds = rule.when.as_ref().map_or(Ok(true), |when| self.truth(when))?;
        let derived = match holds {
            true => self.form(&rule.form, None)?,
            false => rule.null.then(|| Derived::decided(Json::Null)),
        };
        let Some(mut derived) = derived else { return Ok(None) };
        derived.null = rule.null;
        let exempt = match &rule.check {
            Check::Fixed(check) => !check,
            Check::If(condition) => !self.truth(condition)?,
        };
        if exempt {
            derived.checked = false;
            derived.parts.clear();
        }
        Ok(Some(derived))
    }

    fn optional(&self, rule: Option<&FieldRule>) -> Result<Option<Derived>, String> {
        rule.map_or(Ok(None), |rule| self.field(rule))
    }

    fn form(&self, form: &Form, layer: Option<u64>) -> Result<Option<Derived>, String> {
        Ok(Some(match form {
            Form::Literal(value) => Derived::free(value.clone()),
            Form::Dtype => Derived::free(Json::from(match self.dtype {
                FloatType::BF16 => "bfloat16",
                FloatType::F16 => "float16",
                FloatType::F32 => "float32",
            })),
            Form::Expr(expr) => Derived::decided(match self.eval(expr, layer)? {
                Value::Int(n) => n.into(),
                Value::Bool(b) => b.into(),
                Value::Text(t) => t.into(),
            }),
            Form::Key { key, times, over, default } => {
                let full = self.facts.full_key(key);
                let Some(field) = self.facts.set().metadata().get(&full) else {
                    let default = self.optional(default.as_deref())?;
                    return Ok(default.map(|d| Derived::free(d.value)));
                };
                Derived::decided(self.key_value(&full, &field.value(), *times, over.as_ref())?)
            }
            Form::Test { test, yes, no } => {
                let taken = if self.bound_truth(test, layer)? { yes } else { no };
                return Ok(self.optional(taken.as_deref())?.map(|taken| Derived::free(taken.value)));
            }
            Form::Choose { choose, cases, default } => {
                let case = match self.eval(choose, layer)? {
                    Value::Text(text) => text,
                    other @ (Value::Int(_) | Value::Bool(_)) => other.to_string(),
                };
                match cases.get(&case) {
                    Some(case) => return Ok(self.field(case)?.map(|case| Derived::decided(case.value))),
                    None => return Ok(self.optional(default.as_deref())?.map(|d| Derived::free(d.value))),
                }
            }
            Form::Blocks { blocks, each, join } => Derived::decided(self.per_block(blocks, each, *join)?),
            Form::Object(fields) => {
                let mut parts = Vec::new();
                for (name, rule) in fields {
                    let part = self.field(rule).map_err(|why| format!("'{name}': {why}"))?;
                    parts.extend(part.map(|part| (name.clone(), part)));
                }
                let value = parts.iter().map(|(name, part)| (name.clone(), part.value.clone())).collect();
                Derived { parts, ..Derived::free(Json::Object(value)) }
            }
        }))
    }

    fn key_value(
        &self,
        full: &str,
        field: &Field<'_>,
        times: Option<f64>,
        over: Option<&ExprText>,
    ) -> Result<Json, String> {
        let value =
            field_json(field).ok_or_else(|| format!("metadata key '{full}' is {}, no usable value", shown(field)))?;
        self.count(&value)?;
        if times.is_none() && over.is_none() {
            return Ok(value);
        }
        let number = value.as_f64().ok_or_else(|| format!("metadata key '{full}' is {value}, no number"))?;
        let over = match over {
            None => 1.0,
            Some(expr) => match self.eval(expr, None)? {
                Value::Int(n) => n as f64,
                other @ (Value::Bool(_) | Value::Text(_)) => {
                    return Err(format!("`{}` is {other}, no number", expr.0.text()));
                }
            },
        };
        let result = float(number * times.unwrap_or(1.0) / over);
        result
            .map(Json::Number)
            .ok_or_else(|| format!("metadata key '{full}' is {number}, which gives no finite number"))
    }

    /// Counts what the config.json will hold.
    fn count(&self, value: &Json) -> Result<(), String> {
        self.made.set(self.made.get() + bytes_of(value));
        match self.made.get() {
            0..=MOST_BYTES => Ok(()),
            _ => Err(format!("values of more than {MOST_BYTES} bytes")),
        }
    }

    fn per_block(&self, blocks: &ExprText, each: &Form, join: bool) -> Result<Json, String> {
        let count = Bound { facts: self.facts, vars: &[("mtp_written", self.mtp)] }.size(blocks)?;
        if count > MOST_BLOCKS {
            return Err(format!("{count} blocks; at most {MOST_BLOCKS} are listed"));
        }
        let value = |layer| self.form(each, Some(layer)).map(|derived| derived.map_or(Json::Null, |d| d.value));
        let counted = |value: Json| {
            self.count(&value)?;
            Ok(value)
        };
        let values = (0..count).map(|layer| value(layer).and_then(counted)).collect::<Result<Vec<Json>, String>>()?;
        if !join {
            return Ok(Json::Array(values));
        }
        let texts =
            values.iter().map(|value| value.as_str().ok_or_else(|| format!("{value} cannot be joined, it is no text")));
        texts.collect::<Result<String, String>>().map(Json::String)
    }

    fn vars(&self, layer: Option<u64>) -> Vec<(&'static str, u64)> {
        layer.map(|l| ("layer", l)).into_iter().chain([("mtp_written", self.mtp)]).collect()
    }

    fn eval(&self, expr: &ExprText, layer: Option<u64>) -> Result<Value, String> {
        let scope: Bound<'a, '_> = Bound { facts: self.facts, vars: &self.vars(layer) };
        expr.0.eval(&scope).map_err(|why| scope.with_reasons(why, &expr.0))
    }

    fn bound_truth(&self, expr: &ExprText, layer: Option<u64>) -> Result<bool, String> {
        Bound { facts: self.facts, vars: &self.vars(layer) }.truth(expr)
    }

    fn truth(&self, expr: &ExprText) -> Result<bool, String> {
        self.bound_truth(expr, None)
    }
}

/// About how many bytes a value takes.
fn bytes_of(value: &Json) -> usize {
    size_of::<Json>()
        + match value {
            Json::Null | Json::Bool(_) | Json::Number(_) => 0,
            Json::String(text) => text.len(),
            Json::Array(values) => values.iter().map(bytes_of).sum(),
            Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + bytes_of(value)).sum(),
        }
}

/// A value or its type, for messages.
fn shown(field: &Field<'_>) -> String {
    match field {
        Field::F32(x) => x.to_string(),
        Field::F64(x) => x.to_string(),
        other => other.type_name().to_string(),
    }
}

fn field_json(field: &Field<'_>) -> Option<Json> {
    match field {
        Field::Bool(b) => Some((*b).into()),
        Field::Str(bytes) => Some(String::from_utf8_lossy(bytes).into()),
        Field::F32(x) => float(f64::from(*x)).map(Json::Number),
        Field::F64(x) => Number::from_f64(*x).map(Json::Number),
        Field::U8(_) | Field::U16(_) | Field::U32(_) | Field::U64(_) => field.as_u64().ok().map(Json::from),
        Field::I8(_) | Field::I16(_) | Field::I32(_) | Field::I64(_) => field.as_i64().ok().map(Json::from),
        Field::Array(_) => None,
    }
}

/// A number that was an f32, in the shortest form that reads back as the same f32: 1e-6, not 9.99999997e-7.
fn float(x: f64) -> Option<Number> {
    let short: f64 = (x as f32).to_string().parse().ok()?;
    Number::from_f64(short)
}
