//! Mappings that would take long or much.

use std::fmt::Write;

use super::*;

fn toy() -> GgufSet {
    GgufSet::from_bytes("toy.gguf", toy::builder().build()).unwrap()
}

/// A thousand dimensions in layers, each made of all of the layer below. Explanations name dimensions with their origins,
/// so that without a bound each layer multiplies the message by sixty.
#[test]
fn explanations_that_multiply() {
    let set = toy();
    let mut text = String::from("[dims]\n");
    for level in 0..15 {
        for i in 0..60 {
            let sum: Vec<String> = (0..60).map(|j| format!("d{}_{j}", level - 1)).collect();
            let value = if level == 0 {
                "1".into()
            } else {
                format!("'0 * ({})'", sum.chunks(8).map(|c| c.join(" + ")).collect::<Vec<_>>().join(") + 0 * ("))
            };
            writeln!(text, "d{level}_{i} = {value}").unwrap();
        }
    }
    text += &weight("w", "['d14_0 + d14_1']", "from = { gguf = 'output.weight' }");
    bounded(64, || refused(mapping(&text).and_then(|m| planned(&set, &m, 1)), contradiction, "shape"));
}

/// The same with reasons why a dimension has no value.
#[test]
fn absences_that_multiply() {
    let set = toy();
    let mut text = String::from("[dims]\nd0 = { key = 'no.such.key' }\n");
    for level in 1..15 {
        writeln!(text, "d{level} = [{}]", vec![format!("'d{}'", level - 1); 400].join(", ")).unwrap();
    }
    text += &weight("w", "['d14']", "from = { gguf = 'output.weight' }");
    bounded(64, || refused(mapping(&text).and_then(|m| planned(&set, &m, 1)), contradiction, "no.such.key"));
}

#[test]
fn circles_are_found_at_once() {
    // Every dimension needs all that come before it, the first needs the last.
    let mut text = String::from("[dims]\n");
    for i in 0..1000 {
        let needs: Vec<String> = (i.max(120) - 120..i).map(|j| format!("'d{j}'")).collect();
        let needs = if i == 0 { "'d999'".into() } else { needs.join(", ") };
        writeln!(text, "d{i} = [{needs}]").unwrap();
    }
    let error = bounded(128, || refused(mapping(&text), rules, "is computed from itself"));
    assert!(error.contains("dimension 'd"), "{error}");
    let sound = text.replace("d0 = ['d999']", "d0 = 1");
    bounded(128, || {
        refused(
            mapping(&sound).and_then(|m| planned(&toy(), &m, 1)),
            |e| matches!(e, Error::UnknownTensor(_)),
            "no use",
        )
    });
}

/// Thousands of rules that differ in one digit in the middle of a long name: each pair must be compared.
#[test]
fn names_that_are_almost_alike() {
    let long = "x".repeat(120);
    let mut text = String::new();
    for i in 0..4000 {
        writeln!(text, "[[ignore]]\ngguf = '{{a}}{long}{i}{long}{{b}}'\nreason = 'y'").unwrap();
    }
    assert!(text.len() > 1 << 20, "longer than a mapping may be");
    bounded(64, || refused(mapping(&text), rules, "at most"));
    let text = text.replace(&long, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
    bounded(128, || mapping(&text).unwrap());
}

#[test]
fn sources_parts_and_rules_without_end() {
    let sources = vec!["{ gguf = 'a' }"; 50_000].join(", ");
    bounded(128, || refused(mapping(&weight("w", "[1]", &format!("from = [{sources}]"))), rules, "sources; at most"));
    let part = "{ gguf = 'output.weight', shape = [100, 32], rows = [0, 1] }";
    let parts = vec![part; 1000].join(", ");
    let text = weight("w", "[100, 32]", &format!("from = {{ per = 1, parts = [{parts}] }}"));
    bounded(128, || refused(mapping(&text), rules, "1000 parts; at most 16"));
    let remove = vec!["'x'"; 50_000].join(", ");
    bounded(128, || refused(mapping(&format!("remove = [{remove}]")), rules, "rules; at most"));
}

/// A condition that looks through all tensors again and again, in each of a million rounds.
#[test]
fn questions_that_search_the_whole_file() {
    let mut file = GgufBuilder::architecture("toy");
    for i in 0..3000 {
        file = file.f32s(&format!("blk.{i}.x"), &[1], &[0.0]);
    }
    let set = GgufSet::from_bytes("many.gguf", file.build()).unwrap();
    let search = vec!["has('blk.*.y')"; 30].join(" || ");
    let text = format!(
        "[loops]\nlayer = 1000\nm = 1000\n{}",
        weight("w.{layer}.{m}", "[1]", &format!("when = \"{search} && m < 0\"\nfrom = {{ gguf = 'blk.{{layer}}.x' }}"))
    );
    bounded(64, || refused(mapping(&text).and_then(|m| planned(&set, &m, 1)), contradiction, "steps"));
}

/// Tens of thousands of blocks and a list with a value for each: asking for one must not copy the list.
#[test]
fn a_long_list_per_block_is_not_copied_for_each_question() {
    const BLOCKS: usize = 20_000;
    let mut file = GgufBuilder::architecture("toy").kv_u32s("toy.list", &[1; BLOCKS]);
    for i in 0..BLOCKS {
        file = file.f32s(&format!("blk.{i}.x"), &[1], &[0.0]);
    }
    let set = GgufSet::from_bytes("blocks.gguf", file.build()).unwrap();
    let text = format!(
        "[dims]\nlist = {{ key = 'list', per_block = true }}\n[loops]\nlayer = {BLOCKS}\n{}",
        weight(
            "w.{layer}",
            "['list']",
            "when = 'list == 1 && list < 2 && list > 0'\nfrom = { gguf = 'blk.{layer}.x' }"
        )
    );
    let plan = bounded(256, || planned(&set, &mapping(&text).unwrap(), 1).unwrap());
    assert_eq!(plan.params.len(), BLOCKS);
}

#[test]
fn lists_per_block_of_lists_per_block() {
    let set = toy();
    let head = "[loops]\nlayer = 2\n";
    let mut nested = "yes = 1, no = 0".to_owned();
    for _ in 0..6 {
        nested = format!("yes = {{ blocks = 60000, test = 'true', {nested} }}, no = 0");
    }
    let long = "x".repeat(500_000);
    for field in [
        format!("{{ blocks = 60000, test = 'true', {nested} }}"),
        format!("{{ blocks = 60000, test = 'true', yes = '{long}', no = '' }}"),
        format!("{{ blocks = 60000, join = true, test = 'true', yes = '{long}', no = '' }}"),
        format!("{{ blocks = 60000, test = 'true', yes = [{}], no = 0 }}", vec!["0"; 100_000].join(", ")),
    ] {
        // The toy's own rules, with a config beside them.
        let text = toy::MAPPING.replacen("[loops]", &format!("[config]\nx = {field}\n\n[loops]"), 1);
        assert!(text.contains(head) || text.contains("[loops]"));
        let mapping = Mapping::from_texts(&[text]).unwrap();
        let model = resolve(&mapping, &set, MtpPolicy::Keep).unwrap();
        bounded(256, || refused(config::derive(&mapping, &set, &model, FloatType::BF16), contradiction, "bytes"));
    }
}

/// A name of ten thousand dots nests ten thousand tables without a bracket.
#[test]
fn nesting_by_dots() {
    for name in [".x".repeat(10_000), ".x".repeat(200_000)] {
        for text in [
            format!("a{name} = 1"),
            format!("[a{name}]"),
            format!("[[a{name}]]"),
            format!("[config]\na{name} = 1"),
            format!("[config]\na = {{ b{name} = 1 }}"),
        ] {
            bounded(256, || refused(mapping(&text), rules, ""));
            assert!(Profile::from_texts(&[text]).is_err());
        }
    }
}

/// What extends can name a device or a pipe: neither is waited for, and no more is read than rules may have.
#[test]
fn extends_that_names_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.toml");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in ["/dev/zero", pipe.to_str().unwrap()] {
        let child = folder.path().join("child.toml");
        std::fs::write(&child, format!("name = 'x'\nextends = '{path}'\n")).unwrap();
        let load = || Mapping::load(child.to_str().unwrap());
        bounded(16, || refused(load(), |e| matches!(e, Error::Io { .. }), "not a regular file"));
        bounded(16, || refused(Profile::load(path), |e| matches!(e, Error::Io { .. } | Error::Rules(_)), ""));
    }
    let large = folder.path().join("large.toml");
    std::fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    bounded(16, || refused(Mapping::load(large.to_str().unwrap()), rules, "1099511627776 bytes"));
}

/// A shape with an axis of 0 whose other axes multiply to more than 64 bits.
#[test]
fn empty_shapes_that_overflow() {
    let set =
        GgufSet::from_bytes("one.gguf", GgufBuilder::architecture("toy").f32s("x", &[1], &[0.0]).build()).unwrap();
    for shape in
        ["[0, 1099511627776, 1099511627776, 1]", "[1099511627776, 0, 1099511627776]", "[9223372036854775807, 0]"]
    {
        let source = "from = { gguf = 'x', shape = [1, 1], rows = [0, 0] }";
        let text = weight("w", shape, source);
        bounded(16, || refused(mapping(&text).and_then(|m| planned(&set, &m, 1)), contradiction, "too many elements"));
    }
}
