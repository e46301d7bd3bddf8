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
const FILES: [&str; 7] =
    ["dequant.cuh", "convert.cuh", "divide.cuh", "encode.cuh", "dequant.cu", "encode.cu", "grids.cuh"];

/// Changes after which the kernels do the same: a part of the line, the number, which other numbers, and why.
type Same = (&'static str, &'static str, fn(u64) -> bool, &'static str);
const SAME: &[Same] = &[
    (
        "permute(word, FRAME, 0x7540 | i)",
        "0x7540",
        |n| [0x7560, 0x7550, 0x7440, 0x7640].contains(&n),
        "bytes 4, 5 and 6 are all 0",
    ),
    (
        "* 0x00204081 & 0x01010101",
        "0x01010101",
        |n| n & 0x01E3_C78F == 0x0101_0101,
        "four copies of four bits, seven apart, leave the others 0",
    ),
    ("odd * 3 & 0x03000300", "0x03000300", |n| n & 0x03FF_03FF == 0x0300_0300, "a product has ten bits"),
    ("even * 3 >> 8 & 0x00030003", "0x00030003", |n| n & 0xFF03_FF03 == 0x0003_0003, "a product has ten bits"),
    (
        "point << 2) & 0x33333333",
        "0x33333333",
        |n| n & 0x3F3F_3F3F == 0x3333_3333,
        "the upper half of these nibbles is 0",
    ),
    ("i < end ? T::dq1", "0", |_| true, "lanes from `end` on are not placed"),
    (
        "u32 i = 1; i < 8",
        "1",
        |n| n < 8,
        "the first magnitude counts twice, and a sum that is too large takes the careful way",
    ),
    ("& 15) == 0", "15", |n| n & 14 == 14, "elements lie at even addresses"),
    ("u32 RESIDENT", "5", |_| true, "registers on the device; build.py --check sees what too few would do"),
    ("u32 words[8]", "8", |n| n > 8, "an array may be too long"),
    ("float values[8]", "8", |n| n > 8, "an array may be too long"),
    ("if constexpr (ALIGN >= 8)", "8", |n| n > 8, "two loads of four bytes are one of eight"),
    ("NAN_AFTER && wide >", "0x7F800000", |n| n > 0x7F00_0000, "finite values have no such quotients"),
    (
        "typedef Format<3, -6, 0x43E00000",
        "0x43E00000",
        |n| n.abs_diff(0x43E0_0000) < 0x0008_0000,
        "what is nearer to 448 than to its neighbours has its code",
    ),
    (
        "typedef Format<1, 0, 0x40C00000",
        "0x40C00000",
        |n| n.abs_diff(0x40C0_0000) < 0x0020_0000,
        "what is nearer to 6 than to its neighbours has its code",
    ),
    ("double lanes[16]", "16", |n| n > 16, "an array may be too long"),
    ("u32 highest = 0;", "0", |n| n < 0x0080_0000, "counts look for values that are not finite"),
    ("if (highest < 0x7F800000)", "0x7F800000", |n| n < 0x7F80_0000, "nothing is added where there is none"),
    ("if (place < -52 || place > 640 - 53)", "52", |n| n > 30, "no square of an f32 is so small"),
    ("if (place < -52 || place > 640 - 53)", "640", |n| n > 600, "no sum of squares is so large"),
    ("if (place < -52 || place > 640 - 53)", "53", |n| n < 100, "no sum of squares is so large"),
    ("(word & ((1ull << 52) - 1)) | 1ull << 52", "52", |n| n == 53, "that bit is set anyway"),
    ("(place < 0 ? -place : 0)", "0", |n| n == 1, "at 0 nothing is shifted either way"),
    ("place < 0 ? 0 : place, shift", "0", |n| n == 1, "at 0 either is 0"),
    ("scale < 1 ? 1 : scale", "1", |n| n == 0 || n == 2, "0 is never better, and 2 is tried anyway"),
    ("mul(least, 65535.0f / 65536)", "65536", |n| n > 16384, "errors that are so close do not occur"),
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
    fn why_same(&self, other: &str) -> Option<&'static str> {
        let digits = other.trim_end_matches('u');
        let other = digits.strip_prefix("0x").map_or(digits.parse(), |hex| u64::from_str_radix(hex, 16)).ok()?;
        let same = SAME
            .iter()
            .find(|(line, number, which, _)| self.line.contains(line) && self.text == *number && which(other));
        same.map(|(.., why)| *why)
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
        if !compile(folder, &library).status.success() {
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
    super::grids_fit_the_kernels(&library);
    checks::widths(&library);
    encoders::widths(&library);
    for sample in samples() {
        checks::weights(&library, &sample);
        checks::outputs(&library, &sample);
    }
    checks::rectangles(&library, 1, 1000);
    super::encoders_fit_the_kernels(&library);
    encoders::quotients(&library, 3, 1 << 18);
    encoders::fp8_blocks(&library);
    encoders::nvfp4_blocks(&library);
    encoders::shapes(&library, 2, 10);
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
        match number.why_same(&other) {
            None => chosen.push((number, other)),
            Some(why) => println!("makes no difference ({why}): {} became {other} in: {}", number.text, number.line),
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
                        None => {
                            println!("not noticed: {what}");
                            missed.lock().unwrap().push(what);
                        }
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
#[ignore = "twenty minutes: every number outside the tables"]
fn every_changed_number_is_noticed() {
    let mut random = Random(4);
    let numbers = FILES.iter().flat_map(|file| numbers(file)).filter(|number| number.file != "grids.cuh");
    let changed = numbers.map(|number| (number.clone(), number.changed(&mut random)));
    let chosen: Vec<_> = changed.filter(|(number, other)| number.why_same(other).is_none()).collect();
    judge(&chosen, 4);
}
