//! The `[config]` table as it is written.

use ggshard::mapping::Mapping;
use serde_json::json;

use super::*;

/// Reads a mapping with this `[config]`.
fn read(config: &str) -> Result<Mapping, Error> {
    let text = format!("name = \"own\"\nversion = 1\nextends = \"llama\"\nclass = \"LlamaForCausalLM\"\n\n{config}\n");
    Mapping::from_texts(&[text])
}

#[test]
fn what_is_wrong_with_a_field_is_said_when_the_mapping_is_read() {
    for (field, parts) in [
        ("x = { policy = \"dtyp\" }", &["dtyp", "dtype"][..]),
        ("x = { polcy = \"dtype\" }", &["a field is a value, or a table"]),
        ("x = {}", &["a field is a value, or a table"]),
        ("x = { key = \"a\", yes = 1 }", &["`yes` has no meaning here"]),
        ("x = { key = \"a\", expr = \"hidden\" }", &["`expr` has no meaning here"]),
        ("x = { key = 3 }", &["`key`", "not a text"]),
        ("x = { key = \"a\", times = \"2\" }", &["`times`", "not a number"]),
        ("x = { key = \"a\", over = \"hidden +\" }", &["`over`", "hidden +"]),
        ("x = { key = \"a\", default = { expr = \"nothing\" } }", &["nothing"]),
        ("x = { expr = \"nothing\" }", &["nothing"]),
        ("x = { expr = \"layer\" }", &["layer"]),
        ("x = { expr = true }", &["`expr`"]),
        ("x = { test = \"heads > 1\" }", &["`yes` or `no`"]),
        ("x = { test = \"heads > 1\", yes = { polcy = 1 } }", &["`yes`"]),
        ("x = { choose = \"heads\" }", &["`cases`"]),
        ("x = { choose = \"heads\", cases = 3 }", &["`cases`"]),
        ("x = { choose = \"heads\", cases = { 1 = { key = 3 } } }", &["case 1"]),
        ("x = { blocks = \"layers\", test = \"layer > 1\", yes = 1 }", &["both `yes` and `no`"]),
        ("x = { blocks = \"layers\" }", &["`expr` or with `test`"]),
        ("x = { blocks = \"layers\", expr = \"layer\", join = 1 }", &["`join`"]),
        ("x = { expr = \"heads\", when = 1.5 }", &["`when`"]),
        ("x = { expr = \"heads\", when = \"nothing\" }", &["nothing"]),
        ("x = { expr = \"heads\", null = true }", &["`null` needs `when`"]),
        ("x = { expr = \"heads\", check = \"nothing\" }", &["nothing"]),
        ("x = { object = 3 }", &["`object`"]),
        ("x = { object = { inner = { policy = \"p\" } } }", &["inner", "'p'"]),
        ("x = nan", &["not finite"]),
        ("x = 2020-01-01", &["no value of a field"]),
    ] {
        let error = read(&format!("[config]\n{field}")).map(drop).expect_err(field);
        check::says(&error, "Rules", &["config.x"]);
        check::says(&error, "Rules", parts);
    }
    let error = read("config_unknown = [{ say = \"x\", when = \"nothing\" }]").unwrap_err();
    check::says(&error, "Rules", &["config_unknown", "nothing"]);
    assert!(read("config_unknown = [{ say = \"x\" }]").is_err());
}

#[test]
fn every_form_gives_its_value() {
    let mapping = r#"
config_unknown = ["always", { say = "biased", when = "has('blk.*.attn_q.bias')" }, { say = "never", when = "heads == 5" }]

[config]
literal   = [1, "two", 0.5, true]
missing   = { key = "not.there" }
defaulted = { key = "not.there", default = { expr = "heads + 1" } }
half      = { key = "attention.key_length", over = "2 * head" }
double    = { key = "embedding_length", times = 2 }
text      = { key = "general.architecture" }
mtp       = { expr = "mtp_written" }
nested    = { test = "heads == 4", yes = { test = "layers == 2", yes = "both", no = "one" }, no = "none" }
nothing   = { test = "heads == 5", yes = 1 }
number    = { choose = "heads", cases = { 4 = "four" } }
word      = { choose = "text('general.architecture')", cases = { llama = { expr = "hidden" } } }
truth     = { choose = "heads == 4", cases = { true = 1, false = 0 } }
other     = { choose = "heads", cases = { 5 = "five" }, default = "other" }
list      = { blocks = "layers", expr = "layer * 10" }
joined    = { blocks = "layers", test = "layer == 0", yes = "A", no = "B", join = true }
gone      = { expr = "heads", when = "heads == 5" }
null      = { expr = "heads", when = "heads == 5", null = true }
object    = { object = { inner = { expr = "heads" }, gone = { key = "not.there" }, deep = { object = { x = 1 } } } }
"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own.toml");
    let head = "name = \"own\"\nversion = 1\nextends = \"llama\"\nclass = \"LlamaForCausalLM\"\n";
    std::fs::write(&path, format!("{head}{mapping}")).unwrap();
    let request = Request { mapping: Some(path.to_str().unwrap().into()), ..bf16() };
    let (fields, notes) = derive(&family("llama"), &request);
    let expected = json!({
        "literal": [1, "two", 0.5, true], "defaulted": 5, "half": 0.5, "double": 64, "text": "llama", "mtp": 0,
        "nested": "both", "number": "four", "word": 32, "truth": 1, "other": "other", "list": [0, 10], "joined": "AB",
        "null": null, "object": { "inner": 4, "deep": { "x": 1 } },
    });
    holds("forms", &fields, expected);
    for gone in ["missing", "nothing", "gone"] {
        assert!(!fields.contains_key(gone), "{gone}");
    }
    let said = |what: &str| notes.iter().any(|n| n.ends_with(&format!("; {what}")));
    assert!(said("always") && said("biased") && !said("never"), "{notes:?}");
    // What a test chooses is no evidence, what is looked up is.
    for (text, accepted) in [
        (r#"{"nested": "x", "other": "x", "literal": 2, "defaulted": 1}"#, true),
        (r#"{"number": "five"}"#, false),
        (r#"{"list": [0, 11]}"#, false),
        (r#"{"joined": "AA"}"#, false),
        (r#"{"half": 0.25}"#, false),
        (r#"{"null": 4}"#, false),
        (r#"{"object": {"inner": 5}}"#, false),
        (r#"{"object": {"deep": {"x": 2}}}"#, true),
        (r#"{"object": 3}"#, true),
    ] {
        assert_eq!(give(&family("llama"), &request, text.as_bytes()).0.is_ok(), accepted, "{text}");
    }
}

#[test]
fn values_that_cannot_be_are_errors_of_the_file() {
    for (field, part) in [
        ("x = { key = \"embedding_length\", over = \"heads - 4\" }", "no finite number"),
        ("x = { key = \"general.architecture\", times = 2 }", "no number"),
        ("x = { blocks = \"100000\", expr = \"layer\" }", "at most 65536"),
        ("x = { blocks = \"layers\", expr = \"layer\", join = true }", "no text"),
        ("x = { expr = \"hidden / 5\" }", "no multiple"),
    ] {
        let mapping = read(&format!("[config]\n{field}")).unwrap();
        let set = ggshard::gguf::GgufSet::open(family("llama")).unwrap();
        let profile = ggshard::mapping::Profile::load("hf").unwrap();
        let planned = convert::plan_with(set, mapping, profile, &bf16()).unwrap();
        let error = convert::extras(&planned, None).unwrap_err();
        check::says(&error, "Contradiction", &["config.x", part, "--config"]);
    }
}
