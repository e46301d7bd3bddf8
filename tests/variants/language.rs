//! The mapping language: what is wrong with a file is said when it is read, with the file and the rule.

use std::path::Path;

use ggshard::error::Error;
use ggshard::mapping::Mapping;

use super::check::{convert, exact, refused, says, with_mapping};
use super::toy::{Dims, Toy};

const HEAD: &str = r#"
name = "toy"
[dims]
hidden = { key = "embedding_length" }
heads = { key = "attention.head_count" }
[loops]
layer = 3
expert = 2
[groups.pair]
"#;

const RULE: &str = r#"
[[weight]]
name = "model.{layer}.a"
shape = ["hidden"]
cut = "replicated"
from = { gguf = "blk.{layer}.a" }
"#;

fn load(dir: &Path, text: &str) -> Result<Mapping, Error> {
    let path = dir.join("toy.toml");
    std::fs::write(&path, text).unwrap();
    Mapping::load(path.to_str().unwrap())
}

/// Loads `HEAD`, one good rule and `more`, which must be refused with all of `parts` and the file's name.
#[track_caller]
fn wrong(more: &str, parts: &[&str]) {
    wrong_text(&format!("{HEAD}{RULE}{more}"), parts);
}

#[track_caller]
fn wrong_text(text: &str, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let error = load(dir.path(), text).expect_err("this should be refused");
    says(&error, "Rules", &["toy.toml"]);
    says(&error, "Rules", parts);
}

fn rule(name: &str, from: &str) -> String {
    format!("[[weight]]\nname = \"{name}\"\nshape = [\"hidden\"]\ncut = \"replicated\"\nfrom = {from}\n")
}

#[test]
fn the_rules_that_the_others_vary_are_right() {
    let dir = tempfile::tempdir().unwrap();
    load(dir.path(), &format!("{HEAD}{RULE}")).unwrap();
}

#[test]
fn two_rules_for_one_weight() {
    let second = rule("model.{layer}.a", r#"{ gguf = "blk.{layer}.b" }"#);
    wrong(&second, &["two rules for one weight", "model.{layer}.a"]);
    let second = rule("model.1.a", r#"{ gguf = "blk.b" }"#);
    wrong(&second, &["two rules for one weight", "model.{layer}.a", "model.1.a"]);
}

#[test]
fn two_rules_for_one_source() {
    let second = rule("model.{layer}.b", r#"{ gguf = "blk.{layer}.a" }"#);
    wrong(&second, &["two rules for one tensor", "blk.{layer}.a", "model.{layer}.a", "model.{layer}.b"]);
    let second = rule("model.b", r#"{ gguf = "blk.2.a" }"#);
    wrong(&second, &["two rules for one tensor", "blk.2.a", "model.{layer}.a", "model.b"]);
    let twice =
        rule("b", r#"{ per = 1, parts = [{ gguf = "x", shape = ["hidden"] }, { gguf = "x", shape = ["hidden"] }] }"#);
    wrong(&twice, &["'x'", "weight 'b'", "twice"]);
}

#[test]
fn a_source_that_is_both_used_and_ignored() {
    let ignored = "[[ignore]]\ngguf = \"blk.{layer}.a\"\nreason = \"no\"\n";
    wrong(ignored, &["blk.{layer}.a", "ignored", "model.{layer}.a"]);
    let twice = "[[ignore]]\ngguf = \"x.*\"\nreason = \"no\"\n[[ignore]]\ngguf = \"x.1\"\nreason = \"no\"\n";
    wrong(twice, &["two ignore rules", "x.*", "x.1"]);
}

#[test]
fn names_that_nothing_defines() {
    wrong(&rule("model.{layr}.b", r#"{ gguf = "blk.{layr}.b" }"#), &["layr", "model.{layr}.b", "expert, layer"]);
    wrong(&rule("b", r#"{ gguf = "blk.{layer}.b" }"#), &["{layer}", "weight 'b'", "blk.{layer}.b"]);
    wrong(&rule("b", r#"{ gguf = "b", unstack = "expert" }"#), &["expert", "weight 'b'"]);
    let text = rule("model.{layer}.b", r#"{ gguf = "blk.{layer}.b" }"#) + "group = \"pears\"\n";
    wrong(&text, &["pears", "model.{layer}.b", "[groups]"]);
    // Names in expressions, wherever an expression may be.
    wrong(&rule("b", r#"{ gguf = "b" }"#).replace("hidden", "hiden"), &["hiden", "weight 'b'"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"headz > 1\"\n"), &["headz", "headz > 1", "weight 'b'"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"layer > 1\"\n"), &["layer", "weight 'b'"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"has('blk.{layer}.x')\"\n"), &["{layer}", "weight 'b'"]);
    wrong(
        &rule("b", r#"{ gguf = "b" }"#).replace("\"replicated\"", "{ column = \"headz\" }"),
        &["headz", "weight 'b'"],
    );
    wrong(&rule("b", r#"{ gguf = "b", unpermute = "headz" }"#), &["headz", "weight 'b'"]);
    wrong(&rule("b", r#"{ gguf = "b", shape = ["hidden"], rows = [0, "headz"] }"#), &["headz", "weight 'b'"]);
    wrong("[[ignore]]\ngguf = \"x\"\nreason = \"no\"\nwhen = \"headz > 1\"\n", &["headz", "ignore", "'x'"]);
    wrong("[[check]]\nthat = \"headz > 1\"\notherwise = \"no\"\n", &["headz", "check"]);
    wrong("[blocks]\ncount = \"headz\"\ntrunk = 1\n", &["headz", "blocks"]);
    wrong("[match]\narchitecture = \"x\"\nwhen = \"headz > 1\"\n", &["headz", "match"]);
    wrong_text(&format!("{}{RULE}", HEAD.replace("layer = 3", "layer = \"headz\"")), &["headz", "loop", "layer"]);
    wrong_text(&format!("{}{RULE}", HEAD.replace("[loops]", "two = \"2 * headz\"\n[loops]")), &["headz", "two"]);
}

#[test]
fn a_dimension_that_is_defined_by_itself() {
    let text = format!("{}{RULE}", HEAD.replace("[loops]", "a = \"b + 1\"\nb = \"a - 1\"\n[loops]"));
    wrong_text(&text, &["'a'", "itself"]);
}

#[test]
fn typos_and_malformed_values() {
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "optonal = true\n"), &["optonal"]);
    wrong(&rule("b", r#"{ ggfu = "b" }"#), &["ggfu"]);
    wrong(&rule("b", r#"{ gguf = "b", transpos = true }"#), &["transpos"]);
    wrong(&rule("b", r#"{ gguf = "b" }"#).replace("replicated", "colum"), &["colum", "column"]);
    wrong(&rule("b", r#"{ gguf = "b" }"#).replace("\"replicated\"", "{ colum = 2 }"), &["colum"]);
    wrong(&rule("b", r#"{ gguf = "b{" }"#), &["b{"]);
    wrong(&rule("b", r#"{ gguf = "b" }"#).replace("hidden", "hidden +* 2"), &["hidden +* 2", "* 2"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"has(hidden)\"\n"), &["has", "single quotes"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"min(1)\"\n"), &["min", "min(1)"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "when = \"has('a', 'b')\"\n"), &["has"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "dtype = \"f64\"\n"), &["f64", "f32"]);
    wrong("x = [\n", &["toy.toml"]);
    wrong("[[weight]]\nname = \"b\"\n", &["shape"]);
    wrong_text("", &["name"]);
}

#[test]
fn cuts_and_parts_that_do_not_go_together() {
    let cut = |cut: &str| rule("b", r#"{ gguf = "b" }"#).replace("\"replicated\"", cut);
    wrong(&cut("{ column = 2, row = 2 }"), &["weight 'b'", "column", "row"]);
    wrong(&cut("{ row = 2, repeat = true }"), &["weight 'b'", "repeat"]);
    wrong(&cut("{}"), &["weight 'b'"]);
    wrong(&rule("b", "[]"), &["weight 'b'", "from"]);
    wrong(&rule("b", "{ per = 2, parts = [] }"), &["weight 'b'", "parts"]);
    wrong(&rule("b", r#"{ per = 2, parts = [{ gguf = "b" }] }"#), &["weight 'b'", "shape"]);
    wrong(&rule("b", r#"{ gguf = "b", rows = [0, 1] }"#), &["weight 'b'", "shape"]);
    wrong(&rule("b", r#"{ gguf = "b", transpose = true, unpermute = 2 }"#), &["weight 'b'", "unpermute"]);
    wrong(&rule("b", r#"{ gguf = "b", add = inf }"#), &["weight 'b'", "finite"]);
    wrong(&rule("b.*", r#"{ gguf = "b" }"#), &["b.*"]);
    wrong(&rule("b", r#"{ gguf = "b.*" }"#), &["b.*"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + "group = \"pair\"\n"), &["weight 'b'", "{layer}"]);
    wrong(&rule("b", r#"{ gguf = "b" }"#).replace("[\"hidden\"]", "[]"), &["weight 'b'", "axis"]);
}

#[test]
fn rules_that_would_cost_too_much_are_not_read() {
    wrong(&rule("b", &format!("{{ gguf = \"{}\" }}", "b".repeat(400))), &["400 bytes"]);
    wrong("[[ignore]]\ngguf = \"b.*.*.*.*.*.*\"\nreason = \"no\"\n", &["variables"]);
    wrong(&(rule("b", r#"{ gguf = "b" }"#) + &format!("when = \"1{} == 1\"\n", "+1".repeat(500))), &["in a row"]);
    wrong("[[sidecar]]\nsuffix = \".weight\"\nrole = \"scale\"\nreason = \"no\"\n", &["sidecar", "'.weight'"]);
    let dims =
        |n: usize| (0..n).map(|i| format!("d{i} = \"d{} + 1\"\n", i + 1)).collect::<String>() + &format!("d{n} = 1\n");
    let with = |dims: String| format!("{}{RULE}", HEAD.replace("[loops]", &format!("{dims}[loops]")));
    wrong_text(&with(dims(2000)), &["2003 dimensions"]);
    // A chain of dimensions may be written, but not climbed without end.
    let dir = tempfile::tempdir().unwrap();
    let text = with(dims(900)).replace("shape = [\"hidden\"]", "shape = [\"d0\"]");
    load(dir.path(), &text.replace("blk.{layer}.a", "blk.{layer}.attn_norm.weight")).unwrap();
    let path = dir.path().join("toy.toml");
    let error = refused(&Toy::new(Dims::v3()).file, &with_mapping(path.to_str().unwrap()));
    says(&error, "Contradiction", &["expressions away"]);
}

#[test]
fn extends_that_leads_nowhere_or_in_a_circle() {
    wrong_text("name = \"toy\"\nextends = \"absent\"\n", &["absent", "deepseek_v3"]);
    wrong_text("name = \"toy\"\nextends = \"toy.toml\"\n", &["extends", "toy.toml"]);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("other.toml"), "name = \"other\"\nextends = \"toy\"\n").unwrap();
    let error = load(dir.path(), "name = \"toy\"\nextends = \"other\"\n").unwrap_err();
    says(&error, "Rules", &["toy.toml", "other.toml", "each other"]);
    let error = Mapping::load(dir.path().join("gone.toml").to_str().unwrap()).unwrap_err();
    says(&error, "Io", &["gone.toml"]);
    wrong_text("name = \"toy\"\nextends = \"deepseek_v3\"\nremove = [\"rope_freqs\"]\n", &["rope_freqs", "remove"]);
}

#[test]
fn a_huge_file_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("toy.toml")).unwrap();
    file.set_len(1 << 40).unwrap();
    let error = Mapping::load(dir.path().join("toy.toml").to_str().unwrap()).unwrap_err();
    says(&error, "Rules", &["toy.toml", "1099511627776 bytes", "at most"]);
}

#[test]
fn many_rules_are_checked_in_bounded_time() {
    let mut text = HEAD.to_owned();
    for n in 0..4000 {
        text += &rule(&format!("m.{{layer}}.{n}x{n}x"), &format!("{{ gguf = \"blk.{{layer}}.{n}x{n}x\" }}"));
    }
    let dir = tempfile::tempdir().unwrap();
    let start = std::time::Instant::now();
    load(dir.path(), &text).unwrap();
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn a_file_extends_a_built_in_mapping_and_another_file_extends_it_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write(
        "house.toml",
        "name = \"house\"\nextends = \"deepseek_v3\"\nclass = \"House\"\n[[ignore]]\ngguf = \"house.note\"\nreason = \"ours\"\n",
    );
    write(
        "child.toml",
        "name = \"child\"\nextends = \"house\"\n[[weight]]\nname = \"extra.weight\"\nshape = [\"hidden\"]\n\
         cut = \"replicated\"\nfrom = { gguf = \"extra.weight\", add = 1.0 }\n",
    );
    let mut toy = Toy::new(Dims::v3());
    toy.file.add_raw("house.note", &[1], 0, vec![0; 4]);
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let made = convert(&toy.file, &with_mapping(path("house.toml"))).unwrap();
    assert_eq!(made.class(), "House");
    assert_eq!(made.ignored()["house.note"], "ours");
    toy.file.add_raw("extra.weight", &[40], 0, 1f32.to_le_bytes().repeat(40));
    let made = convert(&toy.file, &with_mapping(path("child.toml"))).unwrap();
    assert_eq!(made.ranks[0]["extra.weight"].2, 2f32.to_le_bytes().repeat(40));
    assert_eq!(made.ranks[0].len(), toy.truth.len() + 1);
    // Both texts are in the manifest, from which the mapping can be had again.
    let texts: Vec<String> = serde_json::from_value(made.manifest["mapping"]["texts"].clone()).unwrap();
    assert_eq!(texts.len(), 2);
    assert_eq!(Mapping::from_texts(&texts).unwrap().rules.name, "child");
    assert!(convert(&toy.file, &exact()).is_err());
}
