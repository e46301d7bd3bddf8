//! TOML values that come in several forms: one or many, number or expression, name or table.
//!
//! Each is told apart by its TOML type, so that an error inside a form keeps its own words.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use toml::Value;

use super::expr::Expr;
use super::rules::{CutRule, DimSource, ExprText, From, OneOrMany, Unknown};

impl<'de, T: DeserializeOwned> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Array(items) => {
                items.into_iter().map(|v| v.try_into()).collect::<Result<_, _>>().map(OneOrMany::Many)
            }
            other => other.try_into().map(OneOrMany::One),
        }
        .map_err(|e| D::Error::custom(e.message()))
    }
}

impl<'de> Deserialize<'de> for ExprText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Integer(n) => Ok(ExprText(Expr::constant(n))),
            Value::String(text) => Expr::parse(&text).map(ExprText).map_err(D::Error::custom),
            other => Err(D::Error::custom(format!("{} where a number or an expression is needed", other.type_str()))),
        }
    }
}

impl<'de> Deserialize<'de> for DimSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            key: Option<OneOrMany<String>>,
            axis: Option<i32>,
            of: Option<String>,
            #[serde(default)]
            per_block: bool,
        }
        let wrong = "a dimension is a number, an expression, { key = … } or { axis = …, of = … }";
        match Value::deserialize(deserializer)? {
            Value::Integer(n) => Ok(DimSource::Constant(n)),
            Value::String(text) => Expr::parse(&text).map(|e| DimSource::Expr(ExprText(e))).map_err(D::Error::custom),
            table @ Value::Table(_) => {
                let table: Table = table.try_into().map_err(|e: toml::de::Error| D::Error::custom(e.message()))?;
                match table {
                    Table { key: Some(key), axis: None, of: None, per_block } => Ok(DimSource::Key { key, per_block }),
                    Table { key: None, axis: Some(axis), of: Some(of), per_block: false } => {
                        Ok(DimSource::Axis { axis, of })
                    }
                    Table { .. } => Err(D::Error::custom(wrong)),
                }
            }
            _ => Err(D::Error::custom(wrong)),
        }
    }
}

impl<'de> Deserialize<'de> for Unknown {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            say: String,
            when: ExprText,
        }
        match Value::deserialize(deserializer)? {
            Value::String(say) => Ok(Unknown { say, when: None }),
            other => {
                let table: Table = other.try_into().map_err(|e: toml::de::Error| D::Error::custom(e.message()))?;
                Ok(Unknown { say: table.say, when: Some(table.when) })
            }
        }
    }
}

impl<'de> Deserialize<'de> for CutRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            table @ Value::Table(_) => table.try_into().map(CutRule::Units),
            other => other.try_into().map(CutRule::Plain),
        }
        .map_err(|e: toml::de::Error| D::Error::custom(e.message()))
    }
}

impl<'de> Deserialize<'de> for From {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        if value.get("parts").is_some() || value.get("per").is_some() {
            value.try_into().map(From::Interleaved)
        } else {
            value.try_into().map(From::One)
        }
        .map_err(|e: toml::de::Error| D::Error::custom(e.message()))
    }
}
