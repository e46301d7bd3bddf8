//! One decoder per type: a block of bytes in, its weights out.
//!
//! Every decoder is `fn(isa, &[u8; BYTES], &mut [f32; WEIGHTS])`, inlined into loops over blocks that are compiled once
//! per instruction set. Loops have fixed bounds and run over arrays, so that the compiler unrolls and vectorises them;
//! where one weight's code is spread over several bits, codes are first gathered as bytes and then scaled.
//!
//! Drawings show a block from its first byte on; `f16` and integers are little-endian; `x[i]` is weight `i` of the block.
//! Layouts and formulas are those of ggml 0.25.3 (`ggml-common.h`, `ggml-quants.c`).

pub(super) mod float;
pub(super) mod fp4;
mod grids;
pub(super) mod iq1;
pub(super) mod iq2;
pub(super) mod iq3;
pub(super) mod iq4;
pub(super) mod k_quants;
pub(super) mod legacy;
pub(super) mod low_bits;
mod signs;
pub(super) mod ternary;

/// Ends the work on a block or a group of weights. Keeps the compiler from vectorising across blocks or groups, which it
/// does with gathers and scatters that take four times as long as vectors within one. The fence emits no instruction.
#[inline(always)]
pub(super) fn one_at_a_time() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

/// Makes the compiler compute an array as vectors and store it, where it would otherwise compute every element by itself
/// and keep it in a register. For scales: a load broadcasts one to all lanes at no cost.
#[inline(always)]
fn in_memory<T>(array: T) -> T {
    std::hint::black_box(array)
}

/// `N` bytes of a block from byte `AT` on; the compiler checks that they lie inside.
#[inline(always)]
fn field<const AT: usize, const N: usize, const BYTES: usize>(block: &[u8; BYTES]) -> &[u8; N] {
    const { assert!(AT + N <= BYTES, "field outside the block") };
    let mut field = &[0; N];
    if let Some(found) = block[AT..].first_chunk() {
        field = found;
    }
    field
}

/// `array.map(convert)`, but always inlined: left as a call, the standard one is compiled without the instruction set.
#[inline(always)]
fn map<const N: usize, T: Copy, U: Copy + Default>(array: &[T; N], convert: impl Fn(T) -> U) -> [U; N] {
    let mut converted = [U::default(); N];
    for (to, from) in converted.iter_mut().zip(array) {
        *to = convert(*from);
    }
    converted
}

/// `out[i] = scale * codes[i] + offset`.
#[inline(always)]
fn affine<const N: usize>(out: &mut [f32; N], scale: f32, codes: &[u8; N], offset: f32) {
    for (out, code) in out.iter_mut().zip(codes) {
        *out = scale * *code as f32 + offset;
    }
}

/// `out[i] = scale * codes[i]`.
#[inline(always)]
fn scale<const N: usize, C: Copy + Into<f32>>(out: &mut [f32; N], scale: f32, codes: &[C; N]) {
    for (out, code) in out.iter_mut().zip(codes) {
        *out = scale * (*code).into();
    }
}

/// Scales codes in groups of `GROUP`, each by its own scale.
#[inline(always)]
fn scale_groups<const GROUP: usize>(out: &mut [f32; 256], scales: &[f32], codes: &[i8; 256]) {
    let groups = out.as_chunks_mut::<GROUP>().0.iter_mut().zip(codes.as_chunks::<GROUP>().0);
    for ((out, codes), factor) in groups.zip(scales) {
        scale(out, *factor, codes);
    }
}
