//! The fields of a `[config]` table as they are written, checked when the mapping is read.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, de::Error};
use serde_json::{Number, Value as Json};
use toml::Value as Toml;

use super::super::rules::ExprText;

/// The fields of a config.json and where their values come from.
#[derive(Debug, Clone, Default)]
pub struct ConfigRules(pub BTreeMap<String, FieldRule>);

/// One field.
#[derive(Debug, Clone)]
pub struct FieldRule {
    /// Where its value comes from.
    pub form: Form,
    /// Whether the field is there at all.
    pub when: Option<ExprText>,
    /// Where `when` does not hold, the field is there as null. Null then has a meaning of its own: in a config.json that
    /// the user gives it is compared, and not taken as nothing said.
    pub null: bool,
    /// Whether a config.json that the user gives must agree.
    pub check: Check,
}

/// Whether a config.json that the user gives must agree about a field that the file decides.
#[derive(Debug, Clone)]
pub enum Check {
    /// Always or never.
    Fixed(bool),
    /// Where the condition holds.
    If(ExprText),
}

/// Where a value comes from.
#[derive(Debug, Clone)]
pub enum Form {
    /// The mapping itself.
    Literal(Json),
    /// A metadata key.
    Key {
        /// Its name, as in the expression `key('…')`.
        key: String,
        /// The value is multiplied by this.
        times: Option<f64>,
        /// The value is divided by this.
        over: Option<ExprText>,
        /// The value where the file lacks the key.
        default: Option<Box<FieldRule>>,
    },
    /// An expression.
    Expr(ExprText),
    /// One of two values; one that is not stated leaves the field out.
    Test {
        /// Which.
        test: ExprText,
        /// The value where it holds.
        yes: Option<Box<FieldRule>>,
        /// The value where it does not.
        no: Option<Box<FieldRule>>,
    },
    /// One of several values.
    Choose {
        /// The expression whose value is looked up.
        choose: ExprText,
        /// Values by the decimal number, the text, `true` or `false`.
        cases: BTreeMap<String, FieldRule>,
        /// The value for everything else; without it the field is left out.
        default: Option<Box<FieldRule>>,
    },
    /// A list of one value per block.
    Blocks {
        /// How many.
        blocks: ExprText,
        /// The value of a block, asked with `layer`.
        each: Box<Form>,
        /// The values are texts and are written as one.
        join: bool,
    },
    /// The dtype that is written.
    Dtype,
    /// Fields of its own.
    Object(BTreeMap<String, FieldRule>),
}

impl<'de> Deserialize<'de> for ConfigRules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        fields(toml::Table::deserialize(deserializer)?, "config.").map(ConfigRules).map_err(D::Error::custom)
    }
}

fn fields(table: toml::Table, prefix: &str) -> Result<BTreeMap<String, FieldRule>, String> {
    let parse = |(name, value)| match FieldRule::parse(value) {
        Ok(rule) => Ok((name, rule)),
        Err(why) => Err(format!("{prefix}{name}: {why}")),
    };
    table.into_iter().map(parse).collect()
}

impl FieldRule {
    fn parse(value: Toml) -> Result<Self, String> {
        let Toml::Table(table) = value else {
            let form = Form::Literal(literal(value)?);
            return Ok(FieldRule { form, when: None, null: false, check: Check::Fixed(true) });
        };
        let mut table = Attributes(table);
        let when = table.expr("when")?;
        let null = table.flag("null")?;
        if null && when.is_none() {
            return Err("`null` needs `when`".into());
        }
        let check = match table.0.remove("check") {
            None => Check::Fixed(true),
            Some(Toml::Boolean(fixed)) => Check::Fixed(fixed),
            Some(other) => Check::If(expr("check", other)?),
        };
        let form = Form::parse(&mut table)?;
        match table.0.keys().next() {
            None => Ok(FieldRule { form, when, null, check }),
            Some(extra) => Err(format!("`{extra}` has no meaning here; {FORMS}")),
        }
    }

    /// Calls `see` with each expression and whether it can ask for `layer`.
    pub fn each_expr<E>(&self, see: &mut dyn FnMut(&ExprText, bool) -> Result<(), E>) -> Result<(), E> {
        if let Some(when) = &self.when {
            see(when, false)?;
        }
        if let Check::If(check) = &self.check {
            see(check, false)?;
        }
        self.form.each_expr(false, see)
    }
}

const FORMS: &str = "a field is a value, or a table with one of key, expr, test, choose, blocks, policy and object";

impl Form {
    fn parse(table: &mut Attributes) -> Result<Self, String> {
        if let Some(key) = table.text("key")? {
            let times = match table.0.remove("times") {
                None => None,
                Some(Toml::Float(x)) if x.is_finite() => Some(x),
                Some(Toml::Integer(n)) => Some(n as f64),
                Some(other) => return Err(format!("`times` is {other}, not a number")),
            };
            return Ok(Form::Key { key, times, over: table.expr("over")?, default: table.rule("default")? });
        }
        if let Some(blocks) = table.expr("blocks")? {
            let join = table.flag("join")?;
            let each = match (table.expr("expr")?, table.expr("test")?) {
                (Some(expr), None) => Form::Expr(expr),
                (None, Some(test)) => {
                    let (yes, no) = (table.rule("yes")?, table.rule("no")?);
                    if yes.is_none() || no.is_none() {
                        return Err("a value per block needs both `yes` and `no`".into());
                    }
                    Form::Test { test, yes, no }
                }
                (Some(_), Some(_)) | (None, None) => return Err("`blocks` goes with `expr` or with `test`".into()),
            };
            return Ok(Form::Blocks { blocks, each: Box::new(each), join });
        }
        if let Some(expr) = table.expr("expr")? {
            return Ok(Form::Expr(expr));
        }
        if let Some(test) = table.expr("test")? {
            let (yes, no) = (table.rule("yes")?, table.rule("no")?);
            if yes.is_none() && no.is_none() {
                return Err("`test` needs `yes` or `no`".into());
            }
            return Ok(Form::Test { test, yes, no });
        }
        if let Some(choose) = table.expr("choose")? {
            let cases = table.table("cases")?.ok_or("`choose` needs `cases`")?;
            return Ok(Form::Choose { choose, cases: fields(cases, "case ")?, default: table.rule("default")? });
        }
        if let Some(policy) = table.text("policy")? {
            return match policy.as_str() {
                "dtype" => Ok(Form::Dtype),
                other => Err(format!("policy '{other}' is not known; 'dtype' is")),
            };
        }
        if let Some(object) = table.table("object")? {
            return Ok(Form::Object(fields(object, "")?));
        }
        Err(FORMS.into())
    }

    fn each_expr<E>(&self, layer: bool, see: &mut dyn FnMut(&ExprText, bool) -> Result<(), E>) -> Result<(), E> {
        let inner: Vec<&FieldRule> = match self {
            Form::Literal(_) | Form::Dtype => Vec::new(),
            Form::Key { over, default, .. } => {
                over.iter().try_for_each(|e| see(e, layer))?;
                default.iter().map(|d| &**d).collect()
            }
            Form::Expr(expr) => {
                see(expr, layer)?;
                Vec::new()
            }
            Form::Test { test, yes, no } => {
                see(test, layer)?;
                yes.iter().chain(no).map(|rule| &**rule).collect()
            }
            Form::Choose { choose, cases, default } => {
                see(choose, layer)?;
                cases.values().chain(default.iter().map(|d| &**d)).collect()
            }
            Form::Blocks { blocks, each, .. } => {
                see(blocks, layer)?;
                each.each_expr(true, see)?;
                Vec::new()
            }
            Form::Object(fields) => fields.values().collect(),
        };
        inner.into_iter().try_for_each(|rule| rule.each_expr(see))
    }
}

/// What is left of a table while it is read.
struct Attributes(toml::Table);

impl Attributes {
    fn expr(&mut self, name: &str) -> Result<Option<ExprText>, String> {
        self.0.remove(name).map(|value| expr(name, value)).transpose()
    }

    fn rule(&mut self, name: &str) -> Result<Option<Box<FieldRule>>, String> {
        let rule = self.0.remove(name).map(FieldRule::parse).transpose();
        rule.map(|r| r.map(Box::new)).map_err(|why| format!("`{name}`: {why}"))
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, String> {
        match self.0.remove(name) {
            None => Ok(None),
            Some(Toml::String(text)) => Ok(Some(text)),
            Some(other) => Err(format!("`{name}` is {other}, not a text")),
        }
    }

    fn table(&mut self, name: &str) -> Result<Option<toml::Table>, String> {
        match self.0.remove(name) {
            None => Ok(None),
            Some(Toml::Table(table)) => Ok(Some(table)),
            Some(other) => Err(format!("`{name}` is {other}, not a table")),
        }
    }

    fn flag(&mut self, name: &str) -> Result<bool, String> {
        match self.0.remove(name) {
            None => Ok(false),
            Some(Toml::Boolean(flag)) => Ok(flag),
            Some(other) => Err(format!("`{name}` is {other}, not true or false")),
        }
    }
}

fn expr(name: &str, value: Toml) -> Result<ExprText, String> {
    value.try_into().map_err(|e: toml::de::Error| format!("`{name}`: {}", e.message()))
}

fn literal(value: Toml) -> Result<Json, String> {
    Ok(match value {
        Toml::String(text) => Json::from(text),
        Toml::Integer(n) => Json::from(n),
        Toml::Float(x) => Json::Number(Number::from_f64(x).ok_or("a number that is not finite")?),
        Toml::Boolean(b) => Json::from(b),
        Toml::Array(list) => Json::Array(list.into_iter().map(literal).collect::<Result<_, _>>()?),
        Toml::Table(_) | Toml::Datetime(_) => return Err(format!("a {} is no value of a field", value.type_str())),
    })
}
