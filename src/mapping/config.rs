//! config.json: derived from a GGUF's metadata and tensors by the `[config]` table of a mapping, or taken from the user
//! and checked against the same derivation.
//!
//! A field of the table is a literal, or a table that says where its value comes from:
//!
//! | form | value |
//! |---|---|
//! | `{ key = "rope.freq_base" }` | a metadata value; the field is left out if the key is absent and there is no `default` |
//! | `{ key = "…", times = 10.0 }` | a number times another |
//! | `{ expr = "heads * 2" }` | an expression over the mapping's dimensions and `mtp_written`, the MTP blocks that are written |
//! | `{ test = "…", yes = …, no = … }` | one of two values |
//! | `{ choose = "…", cases = { 1 = …, 2 = … } }` | by an integer |
//! | `{ blocks = "layers", test = "…", yes = …, no = … }` | one value per block, the test asked with `layer`; `join = true` makes one text of them |
//! | `{ policy = "dtype" }` | the dtype that is written |
//! | `{ object = { … } }` | fields of its own |
//!
//! To each, `when = "…"` makes the field conditional (`null = true`: present as null where the condition fails), and
//! `check = false` exempts it from comparison with a config.json that the user gives.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Number, Value as Json};
use toml::Value as Toml;

use super::expr::{Expr, Value};
use super::facts::{Bound, Facts};
use super::{Mapping, Model};
use crate::dequant::FloatType;
use crate::error::{Fault, Result};
use crate::gguf::{GgufSet, Value as Field};

/// Most blocks that a list of one value per block may have.
const MOST_BLOCKS: u64 = 1 << 16;

/// A config.json and what is not certain about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The fields.
    pub fields: Map<String, Json>,
    /// What a GGUF does not say: assumed, left out, or changed in the user's config.
    pub notes: Vec<String>,
}

/// A field that says where its value comes from.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    key: Option<String>,
    default: Option<Toml>,
    times: Option<f64>,
    expr: Option<String>,
    test: Option<String>,
    yes: Option<Toml>,
    no: Option<Toml>,
    choose: Option<String>,
    cases: Option<toml::Table>,
    blocks: Option<String>,
    #[serde(default)]
    join: bool,
    policy: Option<String>,
    object: Option<toml::Table>,
    when: Option<String>,
    #[serde(default)]
    null: bool,
    #[serde(default = "yes")]
    check: bool,
}

fn yes() -> bool {
    true
}

/// Derives the config.json of a model. None for a mapping without a `[config]` table.
pub fn derive(mapping: &Mapping, set: &GgufSet, model: &Model, dtype: FloatType) -> Result<Option<Config>> {
    let rules = &mapping.rules;
    if rules.config.is_empty() {
        return Ok(None);
    }
    let facts = Facts::new(set, rules)?;
    let derivation = Derivation { facts: &facts, mtp: written_mtp_blocks(model), dtype };
    let mut fields = Map::new();
    fields.insert("architectures".into(), Json::from(vec![rules.class.clone()]));
    for (name, spec) in &rules.config {
        let value = derivation.field(spec).map_err(|why| {
            facts
                .fault(why)
                .key(format!("config.{name}"))
                .remedy("Give the model's own file with --config")
                .contradiction()
        })?;
        if let Some(value) = value {
            fields.insert(name.clone(), value);
        }
    }
    let notes =
        rules.config_unknown.iter().map(|note| format!("config.json is derived from the GGUF; {note}")).collect();
    Ok(Some(Config { fields, notes }))
}

/// Checks a config.json that the user gives against what the file says, and makes it agree about MTP blocks.
pub fn check(
    mapping: &Mapping,
    set: &GgufSet,
    model: &Model,
    dtype: FloatType,
    given: Map<String, Json>,
    path: &Path,
) -> Result<Config> {
    let mut fields = given;
    let mut notes = Vec::new();
    let Some(derived) = derive(mapping, set, model, dtype)? else { return Ok(Config { fields, notes }) };
    for (name, own) in &derived.fields {
        let Some(theirs) = fields.get(name) else { continue };
        let exempt = name != "architectures" && !is_checked(mapping.rules.config.get(name));
        if exempt || agree(own, theirs) {
            continue;
        }
        return Err(Fault::new(format!("it says {theirs}"))
            .file(path)
            .key(name)
            .expected(format!("{own}, by the metadata and tensors of '{}'", set.path().display()))
            .remedy("The config.json belongs to another model, or the wrong mapping was chosen (--mapping)")
            .contradiction());
    }
    const NEXTN: &str = "num_nextn_predict_layers";
    let written = written_mtp_blocks(model);
    let theirs = fields.get(NEXTN).and_then(Json::as_u64);
    if let Some(theirs) = theirs.filter(|n| *n != written) {
        notes.push(format!(
            "{NEXTN} of the given config.json was {theirs} and is now {written}, the MTP blocks that are written"
        ));
        fields.insert(NEXTN.into(), written.into());
    }
    Ok(Config { fields, notes })
}

impl Config {
    /// The text of the file.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(&self.fields)
            .map_err(|e| Fault::new(format!("config.json cannot be written: {e}")).audit())?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}

fn written_mtp_blocks(model: &Model) -> u64 {
    let mut blocks: Vec<u64> = model.weights.iter().filter(|w| w.mtp).filter_map(|w| w.block).collect();
    blocks.dedup();
    blocks.len() as u64
}

/// Whether a field is compared with a given config: one that the file decides and that is no object of its own.
fn is_checked(spec: Option<&Toml>) -> bool {
    match spec {
        Some(Toml::Table(table)) => {
            let decided = ["key", "expr", "choose", "blocks"].iter().any(|form| table.contains_key(*form));
            decided && table.get("check").and_then(Toml::as_bool) != Some(false)
        }
        Some(_) | None => false,
    }
}

/// Numbers agree within f32, everything else exactly.
fn agree(a: &Json, b: &Json) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b || (a - b).abs() <= f64::from(f32::EPSILON) * a.abs().max(b.abs()),
        (None, _) | (_, None) => a == b,
    }
}

struct Derivation<'a, 'b> {
    facts: &'b Facts<'a>,
    mtp: u64,
    dtype: FloatType,
}

impl<'a> Derivation<'a, '_> {
    fn field(&self, spec: &Toml) -> Result<Option<Json>, String> {
        let Toml::Table(table) = spec else { return literal(spec).map(Some) };
        let rule: Rule = table.clone().try_into().map_err(|e: toml::de::Error| e.message().to_owned())?;
        let _ = rule.check;
        if let Some(when) = &rule.when
            && !self.truth(when, None)?
        {
            return Ok(rule.null.then_some(Json::Null));
        }
        if let Some(key) = &rule.key {
            return self.key(key, &rule);
        }
        if let Some(object) = &rule.object {
            let mut fields = Map::new();
            for (name, spec) in object {
                if let Some(value) = self.field(spec)? {
                    fields.insert(name.clone(), value);
                }
            }
            return Ok(Some(Json::Object(fields)));
        }
        if let Some(blocks) = &rule.blocks {
            return self.per_block(blocks, &rule).map(Some);
        }
        if let Some(test) = &rule.test {
            let value = if self.truth(test, None)? { &rule.yes } else { &rule.no };
            return value.as_ref().map(literal).transpose();
        }
        if let Some(choose) = &rule.choose {
            let n = Expr::parse(choose)?.int(&self.scope(&[]))?;
            let case = rule.cases.as_ref().and_then(|cases| cases.get(&n.to_string())).or(rule.default.as_ref());
            return case.map(literal).transpose();
        }
        if let Some(expr) = &rule.expr {
            let vars = [("mtp_written", self.mtp)];
            return Ok(Some(match Expr::parse(expr)?.eval(&self.scope(&vars))? {
                Value::Int(n) => n.into(),
                Value::Bool(b) => b.into(),
                Value::Text(t) => t.into(),
            }));
        }
        match rule.policy.as_deref() {
            Some("dtype") => Ok(Some(Json::from(match self.dtype {
                FloatType::BF16 => "bfloat16",
                FloatType::F16 => "float16",
                FloatType::F32 => "float32",
            }))),
            Some(other) => Err(format!("policy '{other}' is not known; dtype is")),
            None => Err("the field names no key, expr, test, choose, blocks, policy or object".into()),
        }
    }

    fn scope<'v>(&'v self, vars: &'v [(&'v str, u64)]) -> Bound<'a, 'v> {
        Bound { facts: self.facts, vars }
    }

    fn truth(&self, text: &str, layer: Option<u64>) -> Result<bool, String> {
        let vars: Vec<(&str, u64)> = layer.map(|l| ("layer", l)).into_iter().collect();
        Expr::parse(text)?.truth(&self.scope(&vars))
    }

    fn key(&self, key: &str, rule: &Rule) -> Result<Option<Json>, String> {
        let full = self.facts.full_key(key);
        let Some(field) = self.facts.set().metadata().get(&full) else {
            return rule.default.as_ref().map(literal).transpose();
        };
        let value = field_json(&field.value())
            .ok_or_else(|| format!("metadata key '{full}' is {}", field.value().type_name()))?;
        match (rule.times, value.as_f64()) {
            (Some(times), Some(n)) => Ok(float(n * times).map(Json::Number)),
            (Some(_), None) => Err(format!("metadata key '{full}' is no number")),
            (None, _) => Ok(Some(value)),
        }
    }

    fn per_block(&self, blocks: &str, rule: &Rule) -> Result<Json, String> {
        let count = Expr::parse(blocks)?.size(&self.scope(&[]))?;
        let (Some(test), Some(yes), Some(no)) = (&rule.test, &rule.yes, &rule.no) else {
            return Err("a value per block needs test, yes and no".into());
        };
        if count > MOST_BLOCKS {
            return Err(format!("{count} blocks"));
        }
        let test = Expr::parse(test)?;
        let values = (0..count).map(|layer| {
            let vars = [("layer", layer)];
            literal(if test.truth(&self.scope(&vars))? { yes } else { no })
        });
        let values = values.collect::<Result<Vec<Json>, String>>()?;
        if rule.join {
            return Ok(Json::String(values.iter().filter_map(Json::as_str).collect()));
        }
        Ok(Json::Array(values))
    }
}

fn literal(value: &Toml) -> Result<Json, String> {
    Ok(match value {
        Toml::String(s) => Json::from(s.as_str()),
        Toml::Integer(n) => Json::from(*n),
        Toml::Float(x) => Json::Number(Number::from_f64(*x).ok_or("a number that is not finite")?),
        Toml::Boolean(b) => Json::from(*b),
        Toml::Array(list) => Json::Array(list.iter().map(literal).collect::<Result<_, _>>()?),
        Toml::Table(_) | Toml::Datetime(_) => return Err(format!("a {} is no literal", value.type_str())),
    })
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
