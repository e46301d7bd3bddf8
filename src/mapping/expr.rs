//! The small expression language of mapping and profile files: integers, comparisons, and questions about the file.
//!
//! ```text
//! layer >= dense && !has('blk.{layer}.attn_kv_b.weight')
//! heads * (nope + v_head)
//! text('tokenizer.ggml.pre') == 'glm4' || vocab == 154880
//! ```
//!
//! Operators, loosest first: `||`, `&&`, comparisons (`== != < <= > >=`), `+ -`, `* / %`, `!` and unary `-`.
//! Division must leave no remainder: a dimension that does not divide is a contradiction, not a rounding.
//! Functions: `has('tensor')`, `key('metadata key')`, `text('metadata key')`, `min(a, b)`, `max(a, b)`. In the argument of `has`,
//! `{name}` stands for a loop variable and `*` for any run of digits.

use std::collections::BTreeSet;
use std::fmt;

use super::pattern::Pattern;

/// Longest expression, in bytes, and deepest nesting that is read.
const MAX_LEN: usize = 2000;
const MAX_DEPTH: usize = 40;

/// A value of the language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// An integer.
    Int(i64),
    /// A truth value.
    Bool(bool),
    /// A text, from a literal or from metadata.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(n) => write!(f, "{n}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Text(t) => write!(f, "'{t}'"),
        }
    }
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Value::Int(_) => "an integer",
            Value::Bool(_) => "a truth value",
            Value::Text(_) => "a text",
        }
    }
}

/// What an expression can ask about its surroundings.
pub trait Scope {
    /// The value of a name: a loop variable or a dimension.
    fn name(&self, name: &str) -> Result<Value, String>;
    /// Whether a tensor is there; `pattern` may hold `{loop}` and `*`.
    fn has(&self, pattern: &str) -> Result<bool, String>;
    /// Whether a metadata key is there.
    fn key(&self, key: &str) -> Result<bool, String>;
    /// A text from the metadata, empty when absent.
    fn text(&self, key: &str) -> Result<String, String>;
}

/// A parsed expression, with its text for messages.
#[derive(Debug, Clone, PartialEq)]
pub struct Expr {
    text: String,
    root: Node,
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Value(Value),
    Name(String),
    Not(Box<Node>),
    Neg(Box<Node>),
    Call(Function, Vec<Node>),
    Binary(Op, Box<Node>, Box<Node>),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Function {
    Has,
    Key,
    Text,
    Min,
    Max,
}

impl Function {
    /// Whether it can be called with these arguments.
    fn check(self, args: &[Node]) -> Result<(), String> {
        let wanted = match self {
            Function::Has | Function::Key | Function::Text => 1,
            Function::Min | Function::Max => 2,
        };
        if args.len() != wanted {
            return Err(format!("{} arguments where {wanted} are needed", args.len()));
        }
        match self {
            Function::Has => Pattern::parse(literal(&args[0])?).map(drop),
            Function::Key | Function::Text => literal(&args[0]).map(drop),
            Function::Min | Function::Max => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Op {
    Or,
    And,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Add,
    Sub,
    Mul,
    Div,
    Rem,
}

/// Binary operators from loosest to tightest; those of one row have the same strength and associate to the left.
const LEVELS: &[&[(&str, Op)]] = &[
    &[("||", Op::Or)],
    &[("&&", Op::And)],
    &[("==", Op::Eq), ("!=", Op::Ne), ("<=", Op::Le), (">=", Op::Ge), ("<", Op::Lt), (">", Op::Gt)],
    &[("+", Op::Add), ("-", Op::Sub)],
    &[("*", Op::Mul), ("/", Op::Div), ("%", Op::Rem)],
];

impl Expr {
    /// Parses a text. The error says what is wrong and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_LEN {
            return Err(format!("expression of {} bytes; at most {MAX_LEN} are read", text.len()));
        }
        let mut parser = Parser { text, at: 0, depth: 0 };
        let root = parser.binary(0)?;
        parser.skip_space();
        if parser.at != text.len() {
            return Err(parser.fail("unexpected text"));
        }
        if depth(&root) > MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} operators in a row in `{text}`"));
        }
        Ok(Expr { text: text.to_owned(), root })
    }

    /// An expression that is a plain number.
    pub fn constant(n: i64) -> Self {
        Expr { text: n.to_string(), root: Node::Value(Value::Int(n)) }
    }

    /// The text it was parsed from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The dimensions and loop variables that it asks for, those in the argument of `has` included.
    pub fn names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        collect(&self.root, &mut names);
        names
    }

    /// Evaluates. The error names the expression.
    pub fn eval(&self, scope: &dyn Scope) -> Result<Value, String> {
        eval(&self.root, scope).map_err(|e| if e.contains(" in `") { e } else { format!("{e} in `{}`", self.text) })
    }

    /// Evaluates to an integer.
    pub fn int(&self, scope: &dyn Scope) -> Result<i64, String> {
        match self.eval(scope)? {
            Value::Int(n) => Ok(n),
            other @ (Value::Bool(_) | Value::Text(_)) => {
                Err(format!("`{}` is {}, not an integer", self.text, other.kind()))
            }
        }
    }

    /// Evaluates to a size: an integer that is not negative.
    pub fn size(&self, scope: &dyn Scope) -> Result<u64, String> {
        let n = self.int(scope)?;
        u64::try_from(n).map_err(|_| format!("`{}` is {n}, a negative size", self.text))
    }

    /// Evaluates to a truth value.
    pub fn truth(&self, scope: &dyn Scope) -> Result<bool, String> {
        match self.eval(scope)? {
            Value::Bool(b) => Ok(b),
            other @ (Value::Int(_) | Value::Text(_)) => {
                Err(format!("`{}` is {}, not a truth value", self.text, other.kind()))
            }
        }
    }
}

/// How deep evaluation will go.
fn depth(node: &Node) -> usize {
    1 + match node {
        Node::Value(_) | Node::Name(_) => 0,
        Node::Not(a) | Node::Neg(a) => depth(a),
        Node::Call(_, args) => args.iter().map(depth).max().unwrap_or(0),
        Node::Binary(_, a, b) => depth(a).max(depth(b)),
    }
}

fn collect(node: &Node, names: &mut BTreeSet<String>) {
    match node {
        Node::Value(_) => {}
        Node::Name(name) => drop(names.insert(name.clone())),
        Node::Not(a) | Node::Neg(a) => collect(a, names),
        Node::Call(Function::Has, args) => {
            let pattern = args.first().and_then(|a| literal(a).ok()).and_then(|text| Pattern::parse(text).ok());
            names.extend(pattern.iter().flat_map(|p| p.variables()).map(str::to_owned));
        }
        Node::Call(Function::Key | Function::Text | Function::Min | Function::Max, args) => {
            args.iter().for_each(|a| collect(a, names));
        }
        Node::Binary(_, a, b) => {
            collect(a, names);
            collect(b, names);
        }
    }
}

fn eval(node: &Node, scope: &dyn Scope) -> Result<Value, String> {
    Ok(match node {
        Node::Value(v) => v.clone(),
        Node::Name(n) => scope.name(n)?,
        Node::Not(a) => match eval(a, scope)? {
            Value::Bool(b) => Value::Bool(!b),
            other @ (Value::Int(_) | Value::Text(_)) => return Err(format!("`!` before {}", other.kind())),
        },
        Node::Neg(a) => Value::Int(int(a, scope)?.checked_neg().ok_or("overflow")?),
        Node::Call(function, args) => call(*function, args, scope)?,
        Node::Binary(op, a, b) => binary(*op, a, b, scope)?,
    })
}

fn int(node: &Node, scope: &dyn Scope) -> Result<i64, String> {
    match eval(node, scope)? {
        Value::Int(n) => Ok(n),
        other @ (Value::Bool(_) | Value::Text(_)) => Err(format!("{} where an integer is needed", other.kind())),
    }
}

fn truth(node: &Node, scope: &dyn Scope) -> Result<bool, String> {
    match eval(node, scope)? {
        Value::Bool(b) => Ok(b),
        other @ (Value::Int(_) | Value::Text(_)) => Err(format!("{} where a truth value is needed", other.kind())),
    }
}

fn literal(node: &Node) -> Result<&str, String> {
    match node {
        Node::Value(Value::Text(t)) => Ok(t),
        Node::Value(_) | Node::Name(_) | Node::Not(_) | Node::Neg(_) | Node::Call(..) | Node::Binary(..) => {
            Err("this function takes a text in single quotes".into())
        }
    }
}

fn call(function: Function, args: &[Node], scope: &dyn Scope) -> Result<Value, String> {
    let arg = |i: usize| args.get(i).ok_or_else(|| "too few arguments".to_owned());
    Ok(match function {
        Function::Has => Value::Bool(scope.has(literal(arg(0)?)?)?),
        Function::Key => Value::Bool(scope.key(literal(arg(0)?)?)?),
        Function::Text => Value::Text(scope.text(literal(arg(0)?)?)?),
        Function::Min => Value::Int(int(arg(0)?, scope)?.min(int(arg(1)?, scope)?)),
        Function::Max => Value::Int(int(arg(0)?, scope)?.max(int(arg(1)?, scope)?)),
    })
}

fn binary(op: Op, a: &Node, b: &Node, scope: &dyn Scope) -> Result<Value, String> {
    let arithmetic = |f: fn(i64, i64) -> Option<i64>| -> Result<Value, String> {
        let (x, y) = (int(a, scope)?, int(b, scope)?);
        f(x, y).map(Value::Int).ok_or_else(|| format!("overflow or division by zero between {x} and {y}"))
    };
    let compare =
        |f: fn(&i64, &i64) -> bool| -> Result<Value, String> { Ok(Value::Bool(f(&int(a, scope)?, &int(b, scope)?))) };
    let equal = || -> Result<bool, String> {
        let (x, y) = (eval(a, scope)?, eval(b, scope)?);
        if x.kind() != y.kind() {
            return Err(format!("{} is compared with {}", x.kind(), y.kind()));
        }
        Ok(x == y)
    };
    match op {
        Op::Or => Ok(Value::Bool(truth(a, scope)? || truth(b, scope)?)),
        Op::And => Ok(Value::Bool(truth(a, scope)? && truth(b, scope)?)),
        Op::Eq => Ok(Value::Bool(equal()?)),
        Op::Ne => Ok(Value::Bool(!equal()?)),
        Op::Lt => compare(i64::lt),
        Op::Le => compare(i64::le),
        Op::Gt => compare(i64::gt),
        Op::Ge => compare(i64::ge),
        Op::Add => arithmetic(i64::checked_add),
        Op::Sub => arithmetic(i64::checked_sub),
        Op::Mul => arithmetic(i64::checked_mul),
        Op::Div => {
            let (x, y) = (int(a, scope)?, int(b, scope)?);
            match x.checked_rem(y) {
                Some(0) => Ok(Value::Int(x / y)),
                Some(_) => Err(format!("{x} is no multiple of {y}")),
                None => Err(format!("{x} is divided by {y}")),
            }
        }
        Op::Rem => arithmetic(i64::checked_rem),
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn fail(&self, what: &str) -> String {
        format!("{what} at `{}` in `{}`", self.rest().chars().take(20).collect::<String>(), self.text)
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn binary(&mut self, level: usize) -> Result<Node, String> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(&(_, op)) = operators.iter().find(|(token, _)| self.take(token)) {
            left = Node::Binary(op, Box::new(left), Box::new(self.binary(level + 1)?));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.fail("nested too deeply"));
        }
        let node = if self.take("!") {
            Node::Not(Box::new(self.unary()?))
        } else if self.take("-") {
            Node::Neg(Box::new(self.unary()?))
        } else {
            self.atom()?
        };
        self.depth -= 1;
        Ok(node)
    }

    fn atom(&mut self) -> Result<Node, String> {
        if self.take("(") {
            let inner = self.binary(0)?;
            return if self.take(")") { Ok(inner) } else { Err(self.fail("missing `)`")) };
        }
        if self.take("'") {
            let end = self.rest().find('\'').ok_or_else(|| self.fail("text without closing quote"))?;
            let text = self.rest()[..end].to_owned();
            self.at += end + 1;
            return Ok(Node::Value(Value::Text(text)));
        }
        let word: String = self.rest().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if word.is_empty() {
            return Err(self.fail("a value is missing"));
        }
        let number = word.starts_with(|c: char| c.is_ascii_digit());
        if number {
            let n = word.parse().map_err(|_| self.fail("not a number"))?;
            self.at += word.len();
            return Ok(Node::Value(Value::Int(n)));
        }
        self.at += word.len();
        if self.take("(") {
            let function = match word.as_str() {
                "has" => Function::Has,
                "key" => Function::Key,
                "text" => Function::Text,
                "min" => Function::Min,
                "max" => Function::Max,
                other => return Err(self.fail(&format!("unknown function {other}"))),
            };
            let args = self.arguments()?;
            function.check(&args).map_err(|why| self.fail(&format!("{word}: {why}")))?;
            return Ok(Node::Call(function, args));
        }
        Ok(match word.as_str() {
            "true" => Node::Value(Value::Bool(true)),
            "false" => Node::Value(Value::Bool(false)),
            name => Node::Name(name.to_owned()),
        })
    }

    fn arguments(&mut self) -> Result<Vec<Node>, String> {
        let mut args = vec![self.binary(0)?];
        while self.take(",") {
            args.push(self.binary(0)?);
        }
        if self.take(")") { Ok(args) } else { Err(self.fail("missing `)`")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Toy;

    impl Scope for Toy {
        fn name(&self, name: &str) -> Result<Value, String> {
            match name {
                "heads" => Ok(Value::Int(8)),
                "nope" => Ok(Value::Int(64)),
                other => Err(format!("unknown name {other}")),
            }
        }
        fn has(&self, pattern: &str) -> Result<bool, String> {
            Ok(pattern == "blk.0.x")
        }
        fn key(&self, key: &str) -> Result<bool, String> {
            Ok(key == "k")
        }
        fn text(&self, key: &str) -> Result<String, String> {
            Ok(if key == "pre" { "glm4".into() } else { String::new() })
        }
    }

    fn value(text: &str) -> Result<Value, String> {
        Expr::parse(text)?.eval(&Toy)
    }

    #[test]
    fn precedence_and_associativity_are_the_usual_ones() {
        assert_eq!(value("2 + 3 * 4 - 1"), Ok(Value::Int(13)));
        assert_eq!(value("20 - 5 - 3"), Ok(Value::Int(12)));
        assert_eq!(value("heads * (nope + 64) / 4"), Ok(Value::Int(256)));
        assert_eq!(value("1 < 2 && 2 <= 2 || 1 == 2"), Ok(Value::Bool(true)));
        assert_eq!(value("!has('blk.0.x') || key('k') && text('pre') == 'glm4'"), Ok(Value::Bool(true)));
        assert_eq!(value("-3 + max(1, min(9, 5))"), Ok(Value::Int(2)));
        assert_eq!(value("7 % 4"), Ok(Value::Int(3)));
    }

    #[test]
    fn a_division_that_leaves_a_remainder_is_refused() {
        assert!(value("heads / 3").unwrap_err().contains("8 is no multiple of 3"));
        assert!(value("heads / 0").is_err());
        assert!(value("9223372036854775807 + 1").is_err());
    }

    #[test]
    fn types_do_not_mix() {
        for text in ["1 && true", "1 == true", "'a' + 1", "!1", "has(1)", "min(1)"] {
            assert!(value(text).is_err(), "{text}");
        }
    }

    #[test]
    fn malformed_text_is_an_error_that_shows_it() {
        for text in ["", "1 +", "(1", "a b", "'x", "1..2", "foo(1)", "99999999999999999999"] {
            let message = Expr::parse(text).expect_err(text);
            assert!(message.contains(text), "{message}");
        }
        assert!(Expr::parse(&"(".repeat(500)).is_err());
        assert!(Expr::parse(&"1+".repeat(2000)).is_err());
    }
}
