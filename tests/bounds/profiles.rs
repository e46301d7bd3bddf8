//! Profiles that would take long or much.

use super::*;

const HEAD: &str = "name = 'x'\nabout = 'x'\nchecked = 'x'\nvocab = { multiple = 64 }\nfiles = { ranked = 'm-{rank}-{part}.safetensors' }\n";

fn profile(layouts: &str) -> Result<Profile> {
    Profile::from_texts(&[format!("{HEAD}{layouts}")])
}

#[test]
fn layouts_and_rules_without_end() {
    let layout = |i: usize, more: &str| format!("[[layout]]\nname = 'l{i}'\nclasses = ['c{i}']\n{more}\n");
    let many: String = (0..10_000).map(|i| layout(i, "")).collect();
    bounded(128, || refused(profile(&many), rules, "10000 layouts"));
    let base = layout(0, &format!("keep = [{}]", vec!["'w{layer}'"; 20_000].join(", ")));
    let extending: String = (1..100).map(|i| layout(i, "extends = 'l0'")).collect();
    bounded(128, || refused(profile(&(base + &extending)), rules, "are read"));
    let names = vec!["'c'"; 50_000].join(", ");
    let constant =
        format!("{}[[layout.constant]]\nnames = [{names}]\nafter = 'w{{layer}}'\nvalue = 1.0\n", layout(0, ""));
    bounded(128, || refused(profile(&constant), rules, "are read"));
    let circle = layout(0, "extends = 'l1'") + &layout(1, "extends = 'l0'");
    bounded(16, || refused(profile(&circle), rules, "extend each other"));
}

/// A stack of which the last round is incomplete is followed to its end for every weight.
#[test]
fn rules_that_almost_fit_every_weight() {
    const WEIGHTS: usize = 20_000;
    let mut file = GgufBuilder::architecture("toy");
    for i in 0..WEIGHTS {
        file = file.f32s(&format!("w{i}"), &[1], &[0.0]);
    }
    let set = GgufSet::from_bytes("many.gguf", file.build()).unwrap();
    let text = format!("[loops]\nn = {WEIGHTS}\n{}", weight("a.{n}", "[1]", "from = { gguf = 'w{n}' }"));
    let model = resolve(&mapping(&text).unwrap(), &set, MtpPolicy::Keep).unwrap();
    // The second part of the last round is not there.
    let stack = "[[layout]]\nname = 'l'\nclasses = ['*']\n[[layout.param]]\nname = 'x'\nstack = 'n'\nparts = ['a.{n}', 'a.{n}']\n".to_owned()
        + "[[layout.param]]\nname = 'y.{n}'\nstack = 'm'\nparts = ['a.{n}', 'a.{m}']\n";
    let never = stack.replace("parts = ['a.{n}', 'a.{n}']", "parts = ['a.{n}', 'b.{n}']");
    for text in [stack, never] {
        let Ok(profile) = profile(&text) else { continue };
        let request = PlanRequest::new(profile, 1, plans::policy());
        bounded(256, || assert!(Plan::audited(&set, model.clone(), request).is_err()));
    }
    let constants = vec!["'c{n}'"; 4000].join(", ");
    let text = "[[layout]]\nname = 'l'\nclasses = ['*']\nkeep = ['a.{n}']\n".to_owned()
        + &format!("[[layout.constant]]\nnames = [{constants}]\nafter = 'a.{{n}}'\nvalue = 1.0\n");
    let request = PlanRequest::new(profile(&text).unwrap(), 1, plans::policy());
    bounded(300, || refused(Plan::audited(&set, model, request), layout, "more than 524288 parameters"));
}

#[test]
fn file_names_that_are_no_plain_names() {
    for bad in [
        "../{rank}-{part}.safetensors",
        "a\\n{rank}-{part}.safetensors",
        "{rank}/{part}.safetensors",
        "a\\u001b[2J{rank}-{part}.safetensors",
    ] {
        let text = HEAD.replace("'m-{rank}-{part}.safetensors'", &format!("\"{bad}\""));
        bounded(16, || refused(Profile::from_texts(&[text]), rules, "plain file name"));
    }
    for index in ["config.json", "ggshard.json", "../x.index.json", "a/b.index.json", "a\\tb.index.json"] {
        let text = HEAD.replace(
            "files = {",
            &format!("files = {{ whole = '{{part}}-{{parts}}.safetensors', index = \"{index}\","),
        );
        bounded(16, || refused(Profile::from_texts(&[text]), rules, "index"));
    }
}
