//! Kernels with one number changed: the checks must notice every one of them, or they would not notice a mistake there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::gguf_writer::Random;
use crate::library::{Library, compile, sources};
use crate::samples::samples;
use crate::{checks, encoders};

/// Sources whose numbers are changed. `machine.cuh` is left out: what it says for the device, the host does not run.
const FILES: [&str; 5] = ["dequant.cuh", "convert.cuh", "encode.cuh", "dequant.cu", "grids.cuh"];

/// Changes after which the kernels do the same: a part of the line, the number, and why.
const SAME: &[(&str, &str, &str)] = &[
    ("if constexpr (ALIGN >= 8)", "8", "two loads of four bytes are one of eight"),
    ("NAN_AFTER && wide >", "0x7F800000", "finite values have no such quotient"),
    ("typedef Format<1, 0,", "0x40C00000", "a little more than 6 still rounds to its code"),
    ("for (u32 i = 0; i < 16; i++)", "16", "what is done past a block goes nowhere on the host"),
    ("float squares[16]", "16", "room that nobody uses"),
    ("scale < 1 ? 1 : scale", "1", "a scale of 0 is never better"),
    ("mul(least, 1.0f - 1.0f / 65536)", "1.0f", "errors that are so close do not occur"),
    ("mul(least, 1.0f - 1.0f / 65536)", "65536", "errors that are so close do not occur"),
];

/// A number of a source.
#[derive(Debug, Clone)]
struct Number {
    file: &'static str,
    at: usize,
    text: String,
    line: String,
}

/// The numbers of a source, outside comments, strings and directives.
fn numbers(file: &'static str) -> Vec<Number> {
    let text = fs::read_to_string(sources().join(file)).unwrap();
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = if line.starts_with('#') { "" } else { &line[..line.find("//").unwrap_or(line.len())] };
        let mut strings = 0;
        let mut at = 0;
        while at < code.len() {
            let rest = &code[at..];
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
            let length = rest.find(|c| !word(c)).unwrap_or(rest.len());
            if length == 0 {
                strings += rest.starts_with('"') as usize;
                at += 1;
            } else {
                if rest.starts_with(|c: char| c.is_ascii_digit()) && strings % 2 == 0 {
                    let text = rest[..length].to_owned();
                    found.push(Number { file, at: start + at, text, line: line.trim().to_owned() });
                }
                at += length;
            }
        }
        start += line.len();
    }
    found
}

impl Number {
    /// Another number in its place.
    fn changed(&self, random: &mut Random) -> String {
        let digits = self.text.trim_end_matches('u');
        let hex = digits.strip_prefix("0x").filter(|digits| !digits.contains('p'));
        let value = match hex {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => digits.parse::<u64>().ok(),
        };
        let Some(value) = value else {
            return format!("(2 * {} + 1)", self.text); // a float
        };
        let bits = u64::BITS - value.leading_zeros();
        let value = match random.below(3) {
            0 => value + 1,
            1 if value > 0 => value - 1,
            _ => value ^ 1 << random.below(bits.max(1) as u64),
        };
        if hex.is_some() { format!("{value:#x}u") } else { value.to_string() }
    }

    /// Why a change makes no difference, if that is known.
    fn why_same(&self) -> Option<&'static str> {
        let same = SAME.iter().find(|(line, number, _)| self.line.contains(line) && self.text == *number);
        same.map(|(_, _, why)| *why)
    }

    /// What notices that the number is another one; nothing if nobody does.
    fn caught(&self, other: &str, folder: &Path) -> Option<&'static str> {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).unwrap();
        for entry in fs::read_dir(sources()).unwrap().map(|entry| entry.unwrap()) {
            if entry.file_type().unwrap().is_file() {
                fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
            }
        }
        let mut text = fs::read_to_string(folder.join(self.file)).unwrap();
        text.replace_range(self.at..self.at + self.text.len(), other);
        fs::write(folder.join(self.file), text).unwrap();
        let library = folder.join("mutant.so");
        if !compile(folder, &library, &["-O1", "-w"]).status.success() {
            return Some("the compiler");
        }
        // In a process of its own: it may crash, or never end.
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "mutants::examine", "--ignored"])
            .env("GGSHARD_MUTANT", &library)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return (!status.success()).then_some("the checks");
            }
            if begun.elapsed() > Duration::from_secs(120) {
                child.kill().unwrap();
                child.wait().unwrap();
                return Some("the clock");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
#[ignore = "examines the library that GGSHARD_MUTANT names; the tests below run it"]
fn examine() {
    let library = Library::load(Path::new(&std::env::var_os("GGSHARD_MUTANT").unwrap()));
    super::every_type_has_its_block(&library);
    for sample in samples() {
        checks::weights(&library, &sample);
        checks::outputs(&library, &sample);
    }
    checks::rectangles(&library, 1, 1000);
    encoders::fp8_bands(&library);
    encoders::nvfp4_blocks(&library);
}

/// Changes so many numbers, chosen by a seed, and panics with those that nobody noticed.
fn sample(count: usize, seed: u64) {
    let mut random = Random(seed);
    // The tables have most of the numbers: one in ten of a sample.
    let (tables, rest): (Vec<_>, Vec<_>) =
        FILES.iter().flat_map(|file| numbers(file)).partition(|n| n.file == "grids.cuh");
    let mut chosen = Vec::new();
    while chosen.len() < count {
        let from = if chosen.len() % 10 == 9 { &tables } else { &rest };
        let number = from[random.below(from.len() as u64) as usize].clone();
        let other = number.changed(&mut random);
        if number.why_same().is_none() {
            chosen.push((number, other));
        }
    }
    judge(&chosen, seed);
}

fn judge(chosen: &[(Number, String)], seed: u64) {
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (next, missed) = (&next, &missed);
            scope.spawn(move || {
                let name = format!("mutants-{}-{seed}-{worker}", std::process::id());
                let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
                while let Some((number, other)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let what = format!("{}: {} became {other} in: {}", number.file, number.text, number.line);
                    match number.caught(other, &folder) {
                        Some(by) => println!("caught by {by}: {what}"),
                        None => missed.lock().unwrap().push(what),
                    }
                }
                let _ = fs::remove_dir_all(&folder);
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "{} of {} were not noticed:\n{}", missed.len(), chosen.len(), missed.join("\n"));
}

#[test]
fn a_changed_number_is_noticed() {
    sample(8, 1);
}

#[test]
#[ignore = "a minute or two"]
fn fifty_changed_numbers_are_noticed() {
    sample(50, 2);
}

#[test]
#[ignore = "half an hour: every number outside the tables"]
fn every_changed_number_is_noticed() {
    let mut random = Random(3);
    let numbers =
        FILES.iter().flat_map(|file| numbers(file)).filter(|n| n.file != "grids.cuh" && n.why_same().is_none());
    let chosen: Vec<_> = numbers.map(|number| (number.clone(), number.changed(&mut random))).collect();
    judge(&chosen, 3);
}
