//! Mappings and profiles of any content: a typed error in bounded time, never a panic; and what resolves against a
//! file plans to something that its audit accepts or refuses.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use ggshard::mapping::{Mapping, MtpPolicy, Profile, resolve};
use ggshard::plan::{Plan, PlanRequest};
use proptest::prelude::*;

use super::*;

static TOY: LazyLock<GgufSet> = LazyLock::new(toy::set);
static GLM: LazyLock<GgufSet> = LazyLock::new(|| plans::open(plans::GLM));

const MODELS: [&str; 3] = [
    include_str!("../../mappings/models/mla_moe.toml"),
    include_str!("../../mappings/models/glm_moe_dsa.toml"),
    include_str!("../../mappings/models/deepseek_v32.toml"),
];
const PROFILE: &str = include_str!("../../mappings/profiles/hf.toml");

/// Reads texts as a mapping and goes as far with it as it lets.
fn try_mapping(texts: &[String], set: &GgufSet) {
    let start = Instant::now();
    let request = |tp| PlanRequest::new(Profile::load("hf").unwrap(), tp, plans::policy());
    let outcome = Mapping::from_texts(texts)
        .and_then(|mapping| resolve(&mapping, set, MtpPolicy::Keep))
        .and_then(|model| Plan::audited(set, model.clone(), request(1)).and(Plan::audited(set, model, request(2))));
    if let Err(error) = outcome {
        assert!(!error.to_string().is_empty());
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?} for {texts:?}", start.elapsed());
}

/// Changes of a text that keep most of it sound.
fn mutated(text: &str, seeds: &[u64]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for seed in seeds {
        let mut random = Random(*seed);
        let at = random.below(lines.len() as u64) as usize;
        let other = lines[random.below(lines.len() as u64) as usize].clone();
        let words = [
            "heads",
            "hidden",
            "experts",
            "layer",
            "0",
            "-1",
            "1",
            "3",
            "9223372036854775807",
            "18446744073709551616",
            "true",
            "'replicated'",
            "row",
            "column",
            "vocab",
            "{layer}",
            "{expert}",
            "*",
            "blocks - 1",
            "heads * heads * heads * heads",
            "min(heads, 2)",
            "((((((((",
            "\u{0}",
            "\"",
            "[",
            "]",
            "{",
            "}",
            "=",
            "",
        ];
        let word = words[random.below(words.len() as u64) as usize];
        let line = &mut lines[at];
        match random.below(8) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, other),
            2 => *line = other,
            3 => {
                // A word becomes another.
                let tokens: Vec<&str> = line.split_inclusive(|c: char| !c.is_alphanumeric()).collect();
                let i = random.below(tokens.len().max(1) as u64) as usize;
                *line = tokens.iter().enumerate().map(|(n, t)| if n == i { word } else { t }).collect();
            }
            4 => line.push_str(word),
            5 => line.insert_str(0, word),
            6 => {
                let digits = |c: char| c.is_ascii_digit();
                *line = line.replace(digits, word);
            }
            _ => {
                let cut = line.char_indices().map(|(i, _)| i).nth(random.below(line.len().max(1) as u64) as usize);
                line.truncate(cut.unwrap_or(0));
            }
        }
        if lines.is_empty() {
            lines.push(String::new());
        }
    }
    lines.join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_built_in_mappings(which in 0usize..3, seeds in prop::collection::vec(any::<u64>(), 1..4)) {
        let mut texts: Vec<String> = MODELS.iter().map(|t| t.to_string()).collect();
        texts[which] = mutated(&texts[which], &seeds);
        // The first is the mapping itself, the others are what it extends.
        texts.swap(0, 1);
        try_mapping(&texts, &GLM);
    }

    #[test]
    fn mutated_toys(seeds in prop::collection::vec(any::<u64>(), 1..4)) {
        try_mapping(&[mutated(toy::MAPPING, &seeds)], &TOY);
    }

    #[test]
    fn mutated_profiles(seeds in prop::collection::vec(any::<u64>(), 1..4)) {
        let Ok(profile) = Profile::from_texts(&[mutated(PROFILE, &seeds)]) else { return Ok(()) };
        let model = resolve(&toy::mapping(), &TOY, MtpPolicy::Keep).unwrap();
        for tp in [1, 4] {
            let request = PlanRequest::new(profile.clone(), tp, plans::policy());
            if let Err(error) = Plan::audited(&TOY, model.clone(), request) {
                prop_assert!(matches!(error, Error::Layout(_) | Error::Rules(_)), "{}", error);
            }
        }
    }

    #[test]
    fn arbitrary_texts(text in "\\PC{0,400}", toml in "(\\[\\[?[a-z.]{1,9}\\]\\]?\n|[a-z]{1,6} = [\\PC]{0,20}\n){0,12}") {
        try_mapping(std::slice::from_ref(&text), &TOY);
        try_mapping(std::slice::from_ref(&toml), &TOY);
        let _ = Profile::from_texts(&[text]);
        let _ = Profile::from_texts(&[toml]);
    }
}

/// A mapping that begins like any other, with one weight.
fn one(rest: &str) -> Vec<String> {
    vec![format!("name = 'x'\n{rest}")]
}

#[test]
fn rules_made_to_take_long_or_much_are_refused_in_time() {
    let nest = |open: &str, close: &str, n: usize| format!("{}1{}", open.repeat(n), close.repeat(n));
    let weight = |name: &str, shape: &str, more: &str| {
        format!(
            "[[weight]]\nname = '{name}'\nshape = {shape}\ncut = 'replicated'\n{more}\nfrom = {{ gguf = 'output.weight' }}\n"
        )
    };
    for text in [
        // Deep nesting, of values and of expressions.
        format!("x = {}", nest("[", "]", 100_000)),
        format!("x = {}", nest("{a = ", "}", 100_000)),
        weight("w", &format!("[\"{}\"]", nest("(", ")", 30_000)), ""),
        weight("w", &format!("[\"{}\"]", nest("(", ")", 900)), ""),
        weight("w", &format!("[\"{}1\"]", "-".repeat(1900)), ""),
        weight("w", &format!("[\"{}1\"]", "!".repeat(1900)), ""),
        // Numbers that overflow.
        weight("w", "['9223372036854775807 * 9223372036854775807']", ""),
        weight("w", "['9223372036854775807 + 1']", ""),
        weight("w", "['0 - 9223372036854775807 - 2']", ""),
        weight("w", "['(0 - 9223372036854775807 - 1) / (0 - 1)']", ""),
        weight("w", "['(0 - 9223372036854775807 - 1) % (0 - 1)']", ""),
        weight("w", "['-(0 - 9223372036854775807 - 1)']", ""),
        weight("w", "[9223372036854775807, 9223372036854775807]", ""),
        weight("w", "['1 / 0']", ""),
        weight("w", "['1 % 0']", ""),
        // Dimensions that need each other.
        format!("[dims]\na = 'b'\nb = 'a'\n{}", weight("w", "['a']", "")),
        // Loops without end: nothing, or the same, again and again.
        format!("[loops]\nn = 1048576\nm = 1048576\n{}", weight("w.{n}.{m}", "[1]", "when = 'n < 0 && m < 0'")),
        format!(
            "[loops]\nlayer = 1048576\nm = 1048576\n{}",
            weight("w.{layer}.{m}", "[1]", "when = 'layer < 0 && m < 0'")
        ),
        format!("[loops]\nlayer = 1048576\nm = 1048576\n{}", weight("w.{layer}.{m}", "[100, 32]", "")),
        format!("[loops]\nm = 1048576\n{}", weight("w.{m}", "[100, 32]", "when = 'm >= 0'")),
        format!("[loops]\nm = 9223372036854775807\n{}", weight("w.{m}", "[100, 32]", "")),
        format!("[loops]\nm = '0 - 1'\n{}", weight("w.{m}", "[100, 32]", "")),
        // One name from two rounds: 1 and 11, 11 and 1.
        format!("[loops]\nlayer = 12\nm = 12\n{}", weight("w.{layer}{m}", "[100, 32]", "")),
        // Patterns that can be matched in many ways.
        format!("[[ignore]]\ngguf = '{}x'\nreason = 'y'\n", "{a}{b}{c}{d}{e}{f}{g}{h}".repeat(40)),
        format!("[[ignore]]\ngguf = '{}'\nreason = 'y'\n", "*".repeat(200)),
        format!("[[ignore]]\ngguf = 'a'\nwhen = \"has('{}')\"\nreason = 'y'\n", "*".repeat(200)),
    ] {
        try_mapping(&one(&text), &TOY);
        // A file whose names invite it.
        let long = format!("blk.{}.y", "1".repeat(55));
        let digits = GgufBuilder::architecture("toy").random(&long, GgmlType::F32, &[1], 1);
        let digits = digits.random(&"1".repeat(63), GgmlType::F32, &[1], 1);
        let digits = digits.random("output.weight", GgmlType::F32, &[32, 100], 1);
        try_mapping(&one(&text), &GgufSet::from_bytes("digits.gguf", digits.build()).unwrap());
    }
}
