//! Any bytes at all: a typed error or a sound set, in memory and time proportional to the file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use ggshard::gguf::{Description, GgufSet};
use proptest::prelude::*;

use crate::build::*;

/// The system's allocator, noting each thread's largest request.
struct Noting;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // A thread on its way out has no cell any more; it allocates for no test.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every method hands its arguments to the system's allocator unchanged; noting a size in a constant-initialised
// cell neither allocates nor unwinds.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Noting = Noting;

/// Opens the bytes and uses everything that a set offers.
fn exercise(bytes: Vec<u8>) -> Result<(), TestCaseError> {
    let length = bytes.len();
    LARGEST.set(0);
    let start = Instant::now();
    match GgufSet::from_bytes("any.gguf", bytes) {
        Ok(set) => {
            for (i, tensor) in set.tensors().iter().enumerate() {
                prop_assert_eq!(set.data(i).unwrap().len() as u64, tensor.bytes);
                prop_assert_eq!(tensor.rows() * tensor.row_bytes(), tensor.bytes);
                prop_assert_eq!(set.find(&tensor.name), Some(i));
            }
            for field in set.metadata().iter() {
                let found = set.metadata().get_typed(&field.key());
                let text = std::str::from_utf8(field.key_bytes()).is_ok();
                prop_assert_eq!(found, text);
            }
            let _ = set.refuse_nonmodel();
            prop_assert_eq!(set.parts()[0].header_blake3().unwrap().len(), 64);
            let _ = serde_json::to_string(&Description::from_set(&set)).unwrap();
            let _ = Description::from_set(&set).render(true);
        }
        Err(error) => prop_assert!(error.to_string().starts_with("any.gguf: "), "{}", error),
    }
    prop_assert!(LARGEST.get() <= (64 << 10) + 32 * length, "{} bytes at once for a file of {length}", LARGEST.get());
    prop_assert!(start.elapsed() < Duration::from_secs(5));
    Ok(())
}

/// Calls every typed getter; whether the key is found.
trait GetTyped {
    fn get_typed(&self, key: &str) -> bool;
}

impl GetTyped for ggshard::gguf::Metadata {
    fn get_typed(&self, key: &str) -> bool {
        let _ = (self.u64(key), self.f32(key), self.f64(key), self.bool(key), self.str(key));
        let _ = (self.u64_array(key), self.i64_array(key), self.bool_array(key), self.f32_array(key));
        let _ = self.string_array(key).map(|a| a.map(|a| a.strings().map(<[u8]>::len).sum::<usize>()));
        self.get(key).is_some()
    }
}

/// Numbers that lengths and counts go wrong at.
fn awkward() -> impl Strategy<Value = u64> {
    let near = |n: u64| [n.wrapping_sub(1), n, n.wrapping_add(1)];
    let numbers: Vec<u64> =
        [0, 32, 64, 1 << 16, 1 << 20, 1 << 30, 1 << 31, 1 << 32, 1 << 62, 1 << 63].map(near).concat();
    prop_oneof![proptest::sample::select(numbers), any::<u64>(), 0u64..300]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        exercise(bytes)?;
    }

    #[test]
    fn any_bytes_after_a_sound_start_are_handled(
        version in 2u32..4, tensors in 0u64..4, entries in 0u64..4, rest in proptest::collection::vec(0u8..16, 0..256)
    ) {
        let start = [b"GGUF", &version.to_le_bytes()[..], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat();
        exercise([start, rest].concat())?;
    }

    #[test]
    fn a_damaged_model_is_handled(
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), awkward(), 1usize..9), 1..4),
        cut in proptest::option::weighted(0.2, any::<proptest::sample::Index>()),
    ) {
        let mut bytes = Gguf::model().entry("general.alignment", U32, &[32, 0, 0, 0]).split(0, 0, 3).bytes();
        for (at, number, width) in damage {
            let at = at.index(bytes.len());
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        exercise(bytes)?;
    }

    #[test]
    fn any_shapes_and_types_are_handled(
        tensors in proptest::collection::vec((proptest::collection::vec(awkward(), 0..6), 0u32..45, awkward()), 0..4),
        alignment in prop_oneof![Just(32u32), Just(1), any::<u32>()],
    ) {
        let mut file = Gguf::empty().entry("general.alignment", U32, &alignment.to_le_bytes());
        for (i, (ne, ty, offset)) in tensors.into_iter().enumerate() {
            file = file.raw_tensor(format!("t{i}"), ty, &ne, &[0; 32]);
            file.tensors[i].offset = if i == 0 { None } else { Some(offset) };
        }
        exercise(file.bytes())?;
    }
}

#[test]
fn every_single_byte_of_a_model_can_be_damaged() {
    let sound = Gguf::model().bytes();
    for at in 0..sound.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = sound.clone();
            bytes[at] = value;
            exercise(bytes).unwrap();
        }
    }
}

#[test]
fn a_vocabulary_of_150_000_costs_no_allocation_per_token() {
    let tokens: Vec<u8> = (0..150_000).flat_map(|i| string(format!("token{i}").as_bytes())).collect();
    let merges: Vec<u8> = (0..150_000).flat_map(|i| string(format!("to ken{i}").as_bytes())).collect();
    let file = Gguf::model().entry("tokens", ARRAY, &array(STR, 150_000, &tokens)).entry(
        "tokenizer.ggml.merges",
        ARRAY,
        &array(STR, 150_000, &merges),
    );
    let bytes = file.bytes();
    LARGEST.set(0);
    let set = GgufSet::from_bytes("vocab.gguf", bytes).unwrap();
    assert!(LARGEST.get() < 1 << 16, "strings stay in the file, yet {} bytes were asked for", LARGEST.get());
    let strings = set.metadata().string_array("tokens").unwrap().unwrap();
    assert_eq!(strings.len(), 150_000);
    assert_eq!(strings.strings().last(), Some(&b"token149999"[..]));
}
