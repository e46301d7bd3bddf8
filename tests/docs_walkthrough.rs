//! The walk-through of `docs/add-a-model.md`, followed to the letter in a folder outside the repository: its rules, its
//! commands and the output that it shows. What it makes of a renamed toy Llama must be, byte for byte, what the built-in
//! mapping makes of the file under its own name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use assert_cmd::Command;
use tempfile::TempDir;

const FIXTURE: &str = "fixtures/families/llama.gguf";

/// A fenced block: its language and its text.
struct Block {
    language: String,
    text: String,
}

/// The fenced blocks of the walk-through, which ends where the reference begins.
fn blocks() -> Vec<Block> {
    let document = fs::read_to_string(repository().join("docs/add-a-model.md")).unwrap();
    assert_eq!(document.matches("\n```toml\n").count(), 1, "the document has one mapping");
    let (walk, reference) = document.split_once("\n# Reference\n").expect("the reference follows the walk-through");
    assert!(!reference.contains("\n```sh\n"), "commands are in the walk-through, where this test runs them");
    let mut blocks = Vec::new();
    let mut lines = walk.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let text: String = lines.by_ref().take_while(|l| *l != "```").map(|l| format!("{l}\n")).collect();
            blocks.push(Block { language: language.to_owned(), text });
        }
    }
    blocks
}

fn rules() -> String {
    let mut toml = blocks().into_iter().filter(|b| b.language == "toml");
    toml.next().expect("a ```toml block").text
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder in which the repository's root may be, as far as the walk-through is concerned: it holds the one fixture.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    assert!(!folder.path().starts_with(repository()));
    fs::create_dir_all(folder.path().join(FIXTURE).parent().unwrap()).unwrap();
    fs::copy(repository().join(FIXTURE), folder.path().join(FIXTURE)).unwrap();
    folder
}

/// Runs commands in a folder, `ggshard` being the program that cargo built.
fn shell(folder: &Path, commands: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_ggshard"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.current_dir(folder).env("PATH", path).args(["-euc", commands]);
    shell
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

fn stderr_of_failure(command: &mut Command) -> String {
    String::from_utf8(command.assert().failure().get_output().stderr.clone()).unwrap()
}

/// Every tensor of a rank's files, or of an ordinary checkpoint: dtype, shape and bytes.
fn tensors(folder: &Path, prefix: &str) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with(prefix) || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let value = (format!("{:?}", tensor.dtype()), tensor.shape().to_vec(), tensor.data().to_vec());
            assert!(all.insert(name, value).is_none());
        }
    }
    all
}

/// The shown lines are in the output, in this order; `...` and `…` stand for what was left out.
fn assert_shows(output: &str, shown: &str) {
    let mut rest = output.lines();
    for line in shown.lines().filter(|l| *l != "...") {
        let wanted = |found: &str| match line.split_once('…') {
            None => found.trim_end().starts_with(line.trim_end()),
            Some((before, _)) => found.starts_with(before),
        };
        assert!(rest.any(wanted), "the document shows '{line}', which is not in:\n{output}");
    }
}

#[test]
fn the_walk_through_holds_to_the_letter() {
    let temp = folder();
    let here = temp.path();
    let blocks = blocks();
    let mut refusal = "";
    let mut last = String::new();
    let mut commands = 0;
    for block in &blocks {
        match block.language.as_str() {
            "sh" => {
                last = stdout(&mut shell(here, &block.text));
                commands += block.text.lines().count();
            }
            "toml" => fs::write(here.join("fable.toml"), &block.text).unwrap(),
            "text" if block.text.starts_with("error: ") => refusal = &block.text,
            "text" => assert_shows(&last, &block.text),
            other => panic!("a block of language '{other}'"),
        }
    }
    assert!(commands >= 10, "{commands} commands");
    // The refusal that brings the reader there.
    assert_shows(&stderr_of_failure(&mut shell(here, "ggshard plan model.gguf --tp 1")), refusal);

    // What the document's rules make of the file is what the built-in ones make of it under its own name.
    assert_ne!(fs::read(here.join("model.gguf")).unwrap(), fs::read(here.join(FIXTURE)).unwrap());
    for tp in ["1", "2"] {
        stdout(&mut shell(here, &format!("ggshard convert {FIXTURE} built-in-tp{tp} --tp {tp} --mapping llama")));
    }
    let whole = tensors(&here.join("out-tp1"), "model-");
    assert_eq!(whole.len(), 35);
    assert!(whole == tensors(&here.join("built-in-tp1"), "model-"), "tp 1 differs");
    for rank in ["model-rank-0-", "model-rank-1-"] {
        let held = tensors(&here.join("out-tp2"), rank);
        assert_eq!(held.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
        assert!(held == tensors(&here.join("built-in-tp2"), rank), "tp 2 differs on {rank}");
    }
}

#[test]
fn rules_without_the_permutation_pass_everything_but_the_reference() {
    let temp = folder();
    let here = temp.path();
    let own = rules();
    let wrong: String = own.lines().map(|l| l.split(", unpermute =").next().unwrap()).fold(String::new(), |all, l| {
        let close = if l.contains("from  = {") && !l.ends_with('}') { " }" } else { "" };
        all + l + close + "\n"
    });
    assert_eq!(own.matches("unpermute =").count(), 4);
    assert!(!wrong.contains("unpermute ="));
    fs::write(here.join("wrong.toml"), wrong).unwrap();
    let sed = &blocks().into_iter().find(|b| b.language == "sh").unwrap().text;
    stdout(&mut shell(here, sed));
    stdout(&mut shell(here, "ggshard convert model.gguf --tp 1 --mapping wrong.toml out && ggshard verify out"));
    stdout(&mut shell(here, "ggshard verify out --source model.gguf"));
    stdout(&mut shell(here, &format!("ggshard convert {FIXTURE} original-checkpoint --tp 1")));
    shell(here, "ggshard verify out --reference original-checkpoint").assert().failure().code(1);
}

#[test]
fn the_short_form_gives_the_same_as_the_long_one() {
    let temp = folder();
    let here = temp.path();
    let head = "name = \"fable\"\nversion = 1\nclass = \"LlamaForCausalLM\"\nextends = \"llama\"\n";
    fs::write(here.join("short.toml"), format!("{head}[match]\narchitecture = \"fable\"\n")).unwrap();
    fs::write(here.join("fable.toml"), rules()).unwrap();
    let sed = &blocks().into_iter().find(|b| b.language == "sh").unwrap().text;
    stdout(&mut shell(here, sed));
    for name in ["short", "fable"] {
        let command = format!("ggshard convert model.gguf {name} --tp 2 --profile vllm-0.32 --mapping {name}.toml");
        stdout(&mut shell(here, &command));
    }
    for rank in ["model-rank-0-", "model-rank-1-"] {
        assert!(tensors(&here.join("short"), rank) == tensors(&here.join("fable"), rank), "{rank}");
    }
}
