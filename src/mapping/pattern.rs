//! Names with loop variables: `blk.{layer}.ffn_up.{expert}.weight`.

/// Longest pattern, in bytes, and most variables in one: matching tries every way to share digits among them.
const LONGEST: usize = 300;
const MOST_VARIABLES: usize = 4;

/// A name in which `{variable}` stands for a loop variable (a run of digits) and `*` for any run of digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pattern {
    text: String,
    tokens: Vec<Token>,
    /// The text with `0` for every run of digits, whether literal or variable.
    skeleton: String,
    /// Those runs in order.
    runs: Vec<Run>,
}

/// A run of digits: literal ones, and after them at most one variable or `*`, since digits must end before the next.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Run {
    digits: String,
    open: bool,
}

impl Run {
    /// Whether some run of digits fits both.
    fn overlaps(&self, other: &Run) -> bool {
        let (a, b) = (self.digits.as_str(), other.digits.as_str());
        match (self.open, other.open) {
            (false, false) => a == b,
            (true, false) => b.len() > a.len() && b.starts_with(a),
            (false, true) => a.len() > b.len() && a.starts_with(b),
            (true, true) => a.starts_with(b) || b.starts_with(a),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Token {
    Literal(String),
    Variable(String),
    AnyDigits,
}

impl Pattern {
    /// Parses a pattern. The error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut rest = text;
        if text.len() > LONGEST {
            return Err(format!("a name of {} bytes; at most {LONGEST} are read", text.len()));
        }
        if text.matches(['{', '*']).count() > MOST_VARIABLES {
            return Err(format!("more than {MOST_VARIABLES} variables in '{text}'"));
        }
        while let Some(at) = rest.find(['{', '}', '*']) {
            if at > 0 {
                tokens.push(Token::Literal(rest[..at].to_owned()));
            }
            match rest.as_bytes()[at] {
                b'*' => {
                    tokens.push(Token::AnyDigits);
                    rest = &rest[at + 1..];
                }
                b'{' => {
                    let end = rest[at..].find('}').ok_or_else(|| format!("`{{` without `}}` in '{text}'"))? + at;
                    let name = &rest[at + 1..end];
                    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
                        return Err(format!("'{{{name}}}' is no variable in '{text}'"));
                    }
                    tokens.push(Token::Variable(name.to_owned()));
                    rest = &rest[end + 1..];
                }
                _ => return Err(format!("`}}` without `{{` in '{text}'")),
            }
        }
        if !rest.is_empty() {
            tokens.push(Token::Literal(rest.to_owned()));
        }
        // So that a name is read in one way only: at once, and never as 1 and 11 here and as 11 and 1 there.
        let runs_on = |pair: &[Token]| match pair {
            [Token::Literal(_), _] => false,
            [_, Token::Literal(next)] => next.starts_with(|c: char| c.is_ascii_digit()),
            _ => true,
        };
        if tokens.windows(2).any(runs_on) {
            return Err(format!("digits must end before the next variable, `*` or digit in '{text}'"));
        }
        let (skeleton, runs) = runs(&tokens);
        Ok(Pattern { text: text.to_owned(), tokens, skeleton, runs })
    }

    /// The text it was parsed from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The variables, each once.
    pub fn variables(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for token in &self.tokens {
            match token {
                Token::Variable(name) if !names.contains(&name.as_str()) => names.push(name),
                Token::Variable(_) | Token::Literal(_) | Token::AnyDigits => {}
            }
        }
        names
    }

    /// Whether it contains `*`.
    pub fn is_open(&self) -> bool {
        self.tokens.contains(&Token::AnyDigits)
    }

    /// The name for given values of the variables; `None` when one has no value. `*` stays `*`.
    pub fn fill(&self, value: impl Fn(&str) -> Option<u64>) -> Option<String> {
        let mut name = String::with_capacity(self.text.len() + 8);
        for token in &self.tokens {
            match token {
                Token::Literal(text) => name.push_str(text),
                Token::Variable(variable) => name.push_str(&value(variable)?.to_string()),
                Token::AnyDigits => name.push('*'),
            }
        }
        Some(name)
    }

    /// The values of the variables with which this pattern gives `name`; `None` when it cannot.
    pub fn capture(&self, name: &str) -> Option<Vec<(String, u64)>> {
        let mut values = Vec::new();
        capture(&self.tokens, name, &mut values).then_some(values)
    }

    /// Whether some name fits both patterns, each variable and `*` standing for one or more digits.
    ///
    /// The runs of digits of such a name are the runs of either pattern, one by one, and everything between them is equal.
    pub fn overlaps(&self, other: &Pattern) -> bool {
        // Last runs first: many rules differ only there.
        self.runs.len() == other.runs.len()
            && self.runs.iter().zip(&other.runs).rev().all(|(a, b)| a.overlaps(b))
            && self.skeleton == other.skeleton
    }
}

/// The text of a pattern with its runs of digits taken out.
fn runs(tokens: &[Token]) -> (String, Vec<Run>) {
    let (mut skeleton, mut runs) = (String::new(), Vec::new());
    let mut run: Option<Run> = None;
    for token in tokens {
        match token {
            Token::Variable(_) | Token::AnyDigits => run.get_or_insert_default().open = true,
            Token::Literal(text) => {
                for c in text.chars() {
                    if c.is_ascii_digit() {
                        run.get_or_insert_default().digits.push(c);
                        continue;
                    }
                    if let Some(run) = run.take() {
                        skeleton.push('0');
                        runs.push(run);
                    }
                    skeleton.push(c);
                }
            }
        }
    }
    if let Some(run) = run {
        skeleton.push('0');
        runs.push(run);
    }
    (skeleton, runs)
}

/// The number that a run of digits is, if it is written as numbers are: `7`, not `007`.
pub fn number(digits: &str) -> Option<u64> {
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    (plain && (digits == "0" || !digits.starts_with('0'))).then(|| digits.parse().ok())?
}

fn capture(tokens: &[Token], name: &str, values: &mut Vec<(String, u64)>) -> bool {
    let Some((first, rest)) = tokens.split_first() else { return name.is_empty() };
    let digits = || name.bytes().take_while(u8::is_ascii_digit).count();
    match first {
        Token::Literal(text) => name.strip_prefix(text.as_str()).is_some_and(|tail| capture(rest, tail, values)),
        Token::AnyDigits => (1..=digits()).rev().any(|n| capture(rest, &name[n..], values)),
        Token::Variable(variable) => (1..=digits()).rev().any(|n| {
            let Some(value) = number(&name[..n]) else { return false };
            if values.iter().any(|(v, old)| v == variable && *old != value) {
                return false;
            }
            let before = values.len();
            values.push((variable.clone(), value));
            let fits = capture(rest, &name[n..], values);
            if !fits {
                values.truncate(before);
            }
            fits
        }),
    }
}

/// Whether `name` fits `pattern`, in which `*` stands for one or more digits.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (p, n) = (pattern.as_bytes(), name.as_bytes());
    let Some(star) = pattern.find('*') else { return pattern == name };
    if !n.starts_with(&p[..star]) {
        return false;
    }
    let digits = n[star..].iter().take_while(|b| b.is_ascii_digit()).count();
    (1..=digits).any(|taken| matches(&pattern[star + 1..], &name[star + taken..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlap(a: &str, b: &str) -> bool {
        let (a, b) = (Pattern::parse(a).unwrap(), Pattern::parse(b).unwrap());
        assert_eq!(a.overlaps(&b), b.overlaps(&a));
        a.overlaps(&b)
    }

    #[test]
    fn patterns_overlap_only_where_a_name_fits_both() {
        assert!(overlap("blk.{layer}.x", "blk.{other}.x"));
        assert!(overlap("blk.{layer}.x", "blk.12.x"));
        assert!(overlap("a{x}", "a1{y}"));
        assert!(overlap("a{x}b", "a1b"));
        assert!(!overlap("blk.{layer}.x", "blk.{layer}.y"));
        assert!(!overlap("blk.{layer}.x", "blk.a.x"));
        assert!(!overlap("blk.{layer}", "blk."));
        assert!(overlap("", ""));
        assert!(overlap("a1{x}.b", "a1{y}.b") && overlap("a1{x}.b", "a12{y}.b") && overlap("a{x}.2", "a1.{y}"));
        assert!(!overlap("a1{x}.b", "a2{y}.b") && !overlap("a1{x}.b", "a1.b") && !overlap("a{x}.2", "a{y}.3"));
    }

    #[test]
    fn a_star_is_digits_only() {
        assert!(matches("blk.*.attn_q.weight", "blk.12.attn_q.weight"));
        assert!(!matches("blk.*.attn_q.weight", "blk..attn_q.weight"));
        assert!(!matches("blk.*.attn_q.weight", "blk.x.attn_q.weight"));
        assert!(matches("a*1", "a11"));
        assert!(!matches("a*", "a1b"));
    }

    #[test]
    fn filling_needs_every_variable() {
        let p = Pattern::parse("m.{layer}.e.{expert}").unwrap();
        assert_eq!(p.variables(), ["layer", "expert"]);
        assert_eq!(p.fill(|v| Some(if v == "layer" { 3 } else { 7 })), Some("m.3.e.7".into()));
        assert_eq!(p.fill(|v| (v == "layer").then_some(3)), None);
        assert_eq!(p.capture("m.3.e.17"), Some(vec![("layer".into(), 3), ("expert".into(), 17)]));
        assert_eq!(p.capture("m.3.e."), None);
        assert_eq!(p.capture("m.03.e.17"), None);
        assert_eq!(p.capture("m.0.e.0"), Some(vec![("layer".into(), 0), ("expert".into(), 0)]));
        assert_eq!(Pattern::parse("{a}.{a}").unwrap().capture("1.2"), None);
        for unclear in ["{a}{b}", "{a}5", "a*1", "**", "*{a}"] {
            assert!(Pattern::parse(unclear).is_err(), "{unclear}");
        }
        assert!(Pattern::parse("a{").is_err() && Pattern::parse("a}").is_err() && Pattern::parse("a{b c}").is_err());
    }
}
