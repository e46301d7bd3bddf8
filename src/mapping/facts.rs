//! What rules may ask of a file: tensors, metadata, and the dimensions computed from them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use super::expr::{Expr, Scope, Value};
use super::pattern;
use super::rules::{DimSource, ExprText, Rules};
use crate::error::{Fault, Result};
use crate::gguf::{GgufSet, Value as Field};

/// Longest chain of dimensions that are computed from each other.
const DEEPEST: usize = 16;
/// Most steps that all expressions of a mapping may take for one file; those of GLM-5 take some hundred thousand.
const MOST_STEPS: u64 = 1 << 26;
/// Steps that looking up a name counts for; comparing a pattern with a tensor's name counts for one.
const NAME: u64 = 8;
/// About how many bytes of explanations go into one message. They name dimensions that are made of dimensions, so without
/// a bound they would double with each.
const LONGEST_REASONS: usize = 2000;
/// And how many characters of each.
const LONGEST_REASON: usize = 500;

/// A file seen through a mapping's dimensions, which are computed when first asked for.
pub struct Facts<'a> {
    set: &'a GgufSet,
    rules: &'a Rules,
    architecture: &'a str,
    dims: RefCell<HashMap<&'a str, Entry>>,
    /// How many dimensions are being computed, each for the one before.
    depth: Cell<usize>,
    /// Steps that expressions have taken.
    steps: Cell<u64>,
}

#[derive(Clone)]
enum Entry {
    InProgress,
    Done(Result<Dim, Absent>),
}

/// Why a dimension has no value.
#[derive(Debug, Clone)]
enum Absent {
    /// None of its sources is in the file.
    NotInFile(String),
    /// Its source is there but unusable.
    Broken(String),
}

/// The value of a dimension and where it came from.
#[derive(Debug, Clone)]
struct Dim {
    value: DimValue,
    origin: Rc<str>,
}

/// A dimension that differs from block to block.
pub struct PerBlock {
    /// Its values, block 0 first.
    pub values: Rc<[Value]>,
    /// Where they are from.
    pub origin: Rc<str>,
}

#[derive(Debug, Clone, PartialEq)]
enum DimValue {
    One(Value),
    PerBlock(Rc<[Value]>),
}

impl<'a> Facts<'a> {
    /// Binds rules to a file. Only rules that name tensors need to know the architecture.
    pub fn new(set: &'a GgufSet, rules: &'a Rules) -> Result<Self> {
        let architecture = if rules.every_tensor { "" } else { set.architecture()? };
        Ok(Facts { set, rules, architecture, dims: RefCell::default(), depth: Cell::new(0), steps: Cell::new(0) })
    }

    /// The file.
    pub fn set(&self) -> &'a GgufSet {
        self.set
    }

    /// The mapping's rules.
    pub fn rules(&self) -> &'a Rules {
        self.rules
    }

    /// The whole name of a metadata key: `{architecture}.` is implied.
    pub fn full_key(&self, key: &str) -> String {
        if key.starts_with("general.") || key.starts_with("tokenizer.") {
            key.to_owned()
        } else {
            format!("{}.{key}", self.architecture)
        }
    }

    /// A dimension that gives one value per block, if the file has it.
    pub fn per_block(&self, name: &str) -> Result<Option<PerBlock>> {
        match self.dim(name) {
            Ok(Dim { value: DimValue::PerBlock(values), origin }) => Ok(Some(PerBlock { values, origin })),
            Ok(Dim { value: DimValue::One(value), origin }) => {
                Err(self.fault(format!("{origin} is {value}; expected one value per block")).contradiction())
            }
            Err(Absent::NotInFile(_)) => Ok(None),
            Err(Absent::Broken(why)) => Err(self.fault(why).contradiction()),
        }
    }

    /// Counts the steps of all expressions together, and refuses rules that take too many.
    pub fn count_steps(&self, steps: u64) -> Result<(), String> {
        self.steps.set(self.steps.get().saturating_add(steps));
        match self.steps.get() {
            0..=MOST_STEPS => Ok(()),
            _ => Err(format!("the expressions of mapping '{}' take more than {MOST_STEPS} steps", self.rules.name)),
        }
    }

    /// Starts a fault that names the file.
    pub fn fault(&self, found: impl Into<String>) -> Fault {
        Fault::new(found).file(self.set.path())
    }

    fn dim(&self, name: &str) -> Result<Dim, Absent> {
        let Some((name, sources)) = self.rules.dims.get_key_value(name) else {
            return Err(Absent::Broken(format!("'{name}' is neither a dimension nor a loop variable")));
        };
        match self.dims.borrow().get(name.as_str()) {
            Some(Entry::Done(result)) => return result.clone(),
            Some(Entry::InProgress) => {
                return Err(Absent::Broken(format!("dimension '{name}' is defined by itself")));
            }
            None => {}
        }
        if self.depth.get() == DEEPEST {
            return Err(Absent::Broken(format!("dimension '{name}' is more than {DEEPEST} expressions away")));
        }
        self.dims.borrow_mut().insert(name, Entry::InProgress);
        self.depth.set(self.depth.get() + 1);
        let result = self.first_source(name, sources.as_slice());
        self.depth.set(self.depth.get() - 1);
        self.dims.borrow_mut().insert(name, Entry::Done(result.clone()));
        result
    }

    fn first_source(&self, name: &str, sources: &[DimSource]) -> Result<Dim, Absent> {
        let mut asked = Vec::new();
        for source in sources {
            match self.source(source) {
                Err(Absent::NotInFile(what)) => asked.push(what),
                Err(Absent::Broken(why)) => return Err(Absent::Broken(format!("dimension '{name}': {why}"))),
                Ok(mut dim) => {
                    if let (DimSource::Constant(_), Some(key)) = (source, asked.first()) {
                        dim.origin = format!("the mapping, for lack of {key}").into();
                    }
                    return Ok(dim);
                }
            }
        }
        Err(Absent::NotInFile(format!("dimension '{name}' needs {}", joined(asked.iter().map(String::as_str), " or "))))
    }

    fn source(&self, source: &DimSource) -> Result<Dim, Absent> {
        match source {
            DimSource::Constant(n) => Ok(Dim { value: DimValue::One(Value::Int(*n)), origin: "the mapping".into() }),
            DimSource::Expr(text) => {
                let expr = &text.0;
                let scope = Bound { facts: self, vars: &[] };
                let value = expr.eval(&scope).map_err(|why| {
                    // An expression over a dimension that the file lacks is itself not in the file.
                    match self.missing_name(expr) {
                        Some(what) => Absent::NotInFile(what),
                        None => Absent::Broken(scope.with_reasons(why, expr)),
                    }
                })?;
                let origin = scope.with_reasons(format!("`{}`", expr.text()), expr);
                Ok(Dim { value: DimValue::One(value), origin: origin.into() })
            }
            DimSource::Key { key, per_block } => {
                let keys = key.as_slice();
                for key in keys {
                    let full = self.full_key(key);
                    if let Some(field) = self.set.metadata().get(&full) {
                        let value = field_value(&field.value(), *per_block)
                            .map_err(|found| Absent::Broken(format!("metadata key '{full}' is {found}")))?;
                        return Ok(Dim { value, origin: format!("metadata key '{full}'").into() });
                    }
                }
                let names: Vec<String> = keys.iter().map(|k| format!("metadata key '{}'", self.full_key(k))).collect();
                Err(Absent::NotInFile(names.join(" or ")))
            }
            DimSource::Axis { axis, of } => {
                let not_there = || Absent::NotInFile(format!("a tensor '{of}'"));
                let tensor = self.first_tensor(of).map_err(Absent::Broken)?.ok_or_else(not_there)?;
                let tensor = &self.set.tensors()[tensor];
                let shape = tensor.shape();
                let index = if *axis < 0 { shape.len() as i64 + i64::from(*axis) } else { i64::from(*axis) };
                let size = usize::try_from(index).ok().and_then(|i| shape.get(i)).ok_or_else(|| {
                    Absent::Broken(format!("tensor '{}' of shape {shape:?} has no axis {axis}", tensor.name))
                })?;
                let size = i64::try_from(*size).map_err(|_| Absent::Broken(format!("axis of {size} elements")))?;
                Ok(Dim {
                    value: DimValue::One(Value::Int(size)),
                    origin: format!("axis {axis} of tensor '{}'", tensor.name).into(),
                })
            }
        }
    }

    /// The first dimension named in an expression that is not in the file, in words.
    fn missing_name(&self, expr: &Expr) -> Option<String> {
        expr.names().iter().find_map(|name| match self.dim(name) {
            Err(Absent::NotInFile(what)) => Some(what),
            Err(Absent::Broken(_)) | Ok(_) => None,
        })
    }

    fn first_tensor(&self, pattern: &str) -> Result<Option<usize>, String> {
        if !pattern.contains('*') {
            return Ok(self.set.find(pattern));
        }
        if pattern.matches('*').count() > 2 {
            return Err(format!("'{pattern}' has more than two `*`"));
        }
        self.count_steps(self.set.tensors().len() as u64)?;
        Ok(self.set.tensors().iter().position(|t| pattern::matches(pattern, &t.name)))
    }
}

/// A metadata value as a dimension: one value, or an array of them where the mapping expects one per block.
fn field_value(field: &Field<'_>, per_block: bool) -> Result<DimValue, String> {
    const MOST: u64 = 1 << 16;
    let scalar = |v: &Field<'_>| -> Result<Value, String> {
        match v {
            Field::Bool(b) => Ok(Value::Bool(*b)),
            Field::U8(_)
            | Field::I8(_)
            | Field::U16(_)
            | Field::I16(_)
            | Field::U32(_)
            | Field::I32(_)
            | Field::U64(_)
            | Field::I64(_) => match v.as_i64() {
                Ok(n) if n < 0 => Err(format!("{n}; a value that is not negative is needed")),
                Ok(n) => Ok(Value::Int(n)),
                Err(mismatch) => Err(mismatch.found),
            },
            Field::Str(_) | Field::F32(_) | Field::F64(_) | Field::Array(_) => {
                Err(format!("{}; an integer or a truth value is needed", v.type_name()))
            }
        }
    };
    match field {
        Field::Array(_) if !per_block => Err(format!("{}; one value is needed", field.type_name())),
        Field::Array(array) if array.len() > MOST => {
            Err(format!("an array of {} values; a dimension has one per block", array.len()))
        }
        Field::Array(array) => array.iter().map(|v| scalar(&v)).collect::<Result<Rc<[_]>, _>>().map(DimValue::PerBlock),
        one => scalar(one).map(DimValue::One),
    }
}

/// The beginnings of as many texts as a message can take, joined.
fn joined<'t>(texts: impl Iterator<Item = &'t str>, with: &str) -> String {
    let mut out = String::new();
    for text in texts {
        if !out.is_empty() {
            out.push_str(with);
        }
        if out.len() > LONGEST_REASONS {
            out.push('…');
            break;
        }
        out.extend(text.chars().take(LONGEST_REASON));
        if text.len() > LONGEST_REASON {
            out.push('…');
        }
    }
    out
}

/// Facts with values for the loop variables: what an expression of a rule sees.
pub struct Bound<'a, 'b> {
    /// The file.
    pub facts: &'b Facts<'a>,
    /// Loop variables and their values.
    pub vars: &'b [(&'b str, u64)],
}

impl Bound<'_, '_> {
    /// The value of a loop variable.
    pub fn var(&self, name: &str) -> Option<u64> {
        self.vars.iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
    }

    /// Evaluates to a size. The error says where the dimensions come from.
    pub fn size(&self, expr: &ExprText) -> Result<u64, String> {
        expr.0.size(self).map_err(|why| self.with_reasons(why, &expr.0))
    }

    /// Evaluates to a truth value. The error says where the dimensions come from.
    pub fn truth(&self, expr: &ExprText) -> Result<bool, String> {
        expr.0.truth(self).map_err(|why| self.with_reasons(why, &expr.0))
    }

    /// The dimensions of some expressions with their values and where those came from, for messages.
    pub fn explain<'e>(&self, list: impl IntoIterator<Item = &'e Expr>) -> String {
        let mut seen = BTreeSet::new();
        let mut out = Vec::new();
        for name in list.into_iter().flat_map(Expr::names) {
            let Ok(Dim { value, origin }) = self.facts.dim(&name) else { continue };
            if self.var(&name).is_some() || !seen.insert(name.clone()) {
                continue;
            }
            let value = match (value, self.var("layer")) {
                (DimValue::One(value), _) => Some(value),
                (DimValue::PerBlock(list), Some(layer)) => list.get(layer as usize).cloned(),
                (DimValue::PerBlock(_), None) => None,
            };
            let value = value.map_or("several values".to_owned(), |v| v.to_string());
            out.push(format!("{name} = {value} from {origin}"));
        }
        joined(out.iter().map(String::as_str), ", ")
    }

    /// A message about an expression, with the dimensions that it is made of.
    pub fn with_reasons(&self, message: String, expr: &Expr) -> String {
        let reasons = self.explain([expr]);
        if reasons.is_empty() { message } else { format!("{message} ({reasons})") }
    }
}

impl Scope for Bound<'_, '_> {
    fn name(&self, name: &str) -> Result<Value, String> {
        self.facts.count_steps(NAME)?;
        if let Some(value) = self.var(name) {
            return i64::try_from(value).map(Value::Int).map_err(|e| e.to_string());
        }
        let dim = self.facts.dim(name).map_err(|absent| match absent {
            Absent::NotInFile(why) => format!("{why}, which the file lacks"),
            Absent::Broken(why) => why,
        })?;
        match dim.value {
            DimValue::One(value) => Ok(value),
            DimValue::PerBlock(list) => match self.var("layer") {
                Some(layer) => list
                    .get(layer as usize)
                    .cloned()
                    .ok_or_else(|| format!("{} has {} values, none for block {layer}", dim.origin, list.len())),
                None => match list.split_first() {
                    Some((first, rest)) if rest.iter().all(|v| v == first) => Ok(first.clone()),
                    Some(_) => Err(format!("{} differs from block to block", dim.origin)),
                    None => Err(format!("{} has 0 values", dim.origin)),
                },
            },
        }
    }

    fn has(&self, pattern: &str) -> Result<bool, String> {
        self.facts.count_steps(NAME)?;
        let filled = if pattern.contains('{') {
            pattern::Pattern::parse(pattern)?
                .fill(|v| self.var(v))
                .ok_or_else(|| format!("'{pattern}' uses a variable that has no value here"))?
        } else {
            pattern.to_owned()
        };
        Ok(self.facts.first_tensor(&filled)?.is_some())
    }

    fn key(&self, key: &str) -> Result<bool, String> {
        self.facts.count_steps(NAME)?;
        Ok(self.facts.set.metadata().get(&self.facts.full_key(key)).is_some())
    }

    fn text(&self, key: &str) -> Result<String, String> {
        self.facts.count_steps(NAME)?;
        match self.facts.set.metadata().get(&self.facts.full_key(key)).map(|f| f.value()) {
            None => Ok(String::new()),
            Some(Field::Str(bytes)) => {
                self.facts.count_steps(bytes.len() as u64 / NAME)?;
                Ok(String::from_utf8_lossy(bytes).into_owned())
            }
            Some(other) => Err(format!("metadata key '{key}' is {}, not a text", other.type_name())),
        }
    }
}
