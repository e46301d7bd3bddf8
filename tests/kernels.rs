//! The CUDA kernels, compiled by the host's C++ compiler and run on the CPU, against the Rust decoders
//! and encoders. No GPU is needed.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/golden.rs"]
mod golden;

#[path = "kernels/checks.rs"]
mod checks;
#[path = "kernels/encoders.rs"]
mod encoders;
#[path = "kernels/library.rs"]
mod library;
#[path = "kernels/memory.rs"]
mod memory;
#[path = "kernels/mutants.rs"]
mod mutants;
#[path = "kernels/samples.rs"]
mod samples;

use std::mem::offset_of;
use std::sync::LazyLock;

use ggshard::cuda::{Encode, Encoder, Found, Launch};
use ggshard::gguf::types::TYPES;
use library::{Library, sources};
use samples::{decodable, samples};

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::build);

#[test]
fn weights_have_the_bits_of_the_rust_decoders() {
    samples().iter().for_each(|sample| checks::weights(&LIBRARY, sample));
}

#[test]
fn outputs_and_counts_are_those_of_the_rust_converters() {
    samples().iter().for_each(|sample| checks::outputs(&LIBRARY, sample));
}

#[test]
fn rectangles_go_where_they_belong_and_nowhere_else() {
    checks::rectangles(&LIBRARY, 1, 3000);
}

#[test]
fn fp8_has_the_bits_of_the_rust_encoder() {
    encoders::fp8_blocks(&LIBRARY);
}

#[test]
fn nvfp4_has_the_bits_of_the_rust_encoder() {
    encoders::nvfp4_blocks(&LIBRARY);
}

#[test]
fn any_shape_is_encoded_and_what_is_not_finite_is_counted() {
    encoders::shapes(&LIBRARY, 1, 30);
}

#[test]
fn quotients_are_those_of_ieee_division() {
    encoders::quotients(&LIBRARY, 1, 4 << 20);
}

#[test]
#[ignore = "minutes"]
fn many_more_quotients_are_those_of_ieee_division() {
    encoders::quotients(&LIBRARY, 2, 256 << 20);
}

/// Types with a decoder, and no others, have a kernel, with the blocks of the type table.
fn every_type_has_its_block(library: &Library) {
    for info in TYPES {
        let want = decodable().contains(&info.ty).then_some((info.block, info.bytes));
        assert_eq!(library.block(info.name), want, "{}", info.name);
    }
}

#[test]
fn types_with_a_decoder_have_a_kernel_with_the_blocks_of_the_type_table() {
    every_type_has_its_block(&LIBRARY);
}

#[test]
fn the_argument_of_a_kernel_has_one_layout() {
    macro_rules! offsets {
        ($($field:ident)*) => { [$(offset_of!(Launch, $field),)* size_of::<Launch>()] };
    }
    let want = offsets! {
        source out row_bytes skip rows cols out_start out_stride dtype transpose has_scale has_add scale add counts
    };
    assert_eq!(LIBRARY.layout().map(|at| at as usize), want);
}

/// An argument with another layout, another grid, or another number of places would be another kernel's.
fn encoders_fit_the_kernels(library: &Library) {
    macro_rules! offsets {
        ($of:ty: $($field:ident)*) => { [$(offset_of!($of, $field),)* size_of::<$of>()] };
    }
    let encode = offsets! { Encode: values stride rows cols codes scales largest sums found whole scale_2 };
    let found = offsets! { Found: errors values largest_error largest_value nan inf };
    let want: Vec<u32> = encode.into_iter().chain(found).map(|at| at as u32).collect();
    assert_eq!(library.encode_layout().to_vec(), want);
    let [threads, strip, slots] = library.encode_shape();
    assert_eq!(slots as usize, Encode::SLOTS);
    for encoder in Encoder::ALL {
        let grid = encoder.grid(1, 16).unwrap();
        assert_eq!(grid.threads.iter().product::<u32>(), threads);
    }
    let rows = Encoder::Fp8.grid(1, 8).unwrap().threads[1] * strip;
    assert_eq!(Encoder::Fp8.grid(rows as u64, 8).unwrap().blocks[1], 1);
    assert_eq!(Encoder::Fp8.grid(rows as u64 + 1, 8).unwrap().blocks[1], 2);
}

#[test]
fn the_arguments_of_encoders_have_one_layout_and_grids_fit() {
    encoders_fit_the_kernels(&LIBRARY);
}

/// One group more than a block of threads has rounds for takes a second block.
fn grids_fit_the_kernels(library: &Library) {
    let (threads, rounds) = library.shape();
    let mut launch = Launch { rows: 1, cols: 8 * (threads * rounds) as u64, ..Launch::default() };
    assert_eq!(launch.grid().unwrap().blocks, [1, 1, 1]);
    launch.cols += 1;
    let grid = launch.grid().unwrap();
    assert!(grid.blocks[0] > 1);
    assert_eq!(grid.threads.iter().product::<u32>(), threads);
}

#[test]
fn grids_are_computed_for_the_shape_that_kernels_have() {
    grids_fit_the_kernels(&LIBRARY);
}

#[test]
fn accesses_are_as_wide_as_they_can_be() {
    checks::widths(&LIBRARY);
    encoders::widths(&LIBRARY);
}

/// The numbers of every table of a source, by the table's first word.
fn tables(text: &str, is_table: impl Fn(&str) -> Option<String>) -> Vec<(String, Vec<u16>)> {
    let mut tables: Vec<(String, Vec<u16>)> = Vec::new();
    for line in text.lines() {
        if let Some(name) = is_table(line) {
            tables.push((name, Vec::new()));
        } else if let Some((_, numbers)) = tables.last_mut()
            && line.trim_start().starts_with("0x")
        {
            let words = line.split(',').map(str::trim).filter(|word| !word.is_empty());
            numbers.extend(words.map(|word| u16::from_str_radix(&word[2..], 16).unwrap()));
        }
    }
    tables
}

#[test]
fn codebooks_are_those_of_the_rust_decoders() {
    let between = |line: &str, before: &str, after: &str| {
        let rest = line.strip_prefix(before)?;
        Some(rest[..rest.find(after)?].to_owned())
    };
    let ours = std::fs::read_to_string(sources().join("grids.cuh")).unwrap();
    let theirs = std::fs::read_to_string(sources().join("../src/dequant/blocks/grids.rs")).unwrap();
    let ours = tables(&ours, |line| between(line, "TABLE u16 ", "["));
    let theirs = tables(&theirs, |line| between(line, "const ", "_PACKED"));
    assert_eq!(ours.iter().map(|(_, numbers)| numbers.len()).sum::<usize>(), 4608);
    assert_eq!(ours, theirs);
}
