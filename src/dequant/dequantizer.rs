//! The decoder of one type, ready to run.

use std::fmt;

use super::convert::{CHUNK, careful, unify_nan};
use super::kernels::{Converter, Copier, Decoder, Scanner};
use super::{FloatType, Nonfinite, Simd};
use crate::gguf::GgmlType;

/// Decodes blocks of one ggml type on one instruction set.
///
/// Small, copyable, shareable between threads; holds function pointers chosen once.
///
/// ```
/// use ggshard::dequant::{Dequantizer, FloatType, Simd};
/// use ggshard::gguf::GgmlType;
///
/// let q8_0 = Dequantizer::new(GgmlType::Q8_0, Simd::detect()).expect("Q8_0 has a decoder");
/// let mut block = [0u8; 34]; // f16 scale, then 32 signed bytes
/// block[..2].copy_from_slice(&0x3800u16.to_le_bytes()); // 0.5
/// block[2] = 3;
/// let mut out = [0u8; 64];
/// let found = q8_0.decode(&block, FloatType::BF16, &mut out);
/// assert!(!found.any());
/// assert_eq!(out[..2], 0x3FC0u16.to_le_bytes()); // 1.5
/// ```
#[derive(Clone, Copy)]
pub struct Dequantizer {
    ty: GgmlType,
    decoder: Decoder,
    to_f32: Converter,
    to_bf16: Converter,
    to_f16: Converter,
    scanner: Scanner,
    copier: Option<(FloatType, Copier)>,
}

impl Dequantizer {
    /// The decoder of a type, or nothing for types that have none (the integers, and Q8_1, which is for activations).
    ///
    /// A level that this CPU lacks is replaced by the best that it has.
    pub fn new(ty: GgmlType, simd: Simd) -> Option<Self> {
        let copier = if ty == GgmlType::BF16 {
            Some((FloatType::BF16, Copier::bf16(simd)))
        } else if ty == GgmlType::F16 {
            Some((FloatType::F16, Copier::f16(simd)))
        } else {
            None
        };
        Some(Dequantizer {
            ty,
            decoder: Decoder::new(ty, simd)?,
            to_f32: Converter::new(FloatType::F32, simd),
            to_bf16: Converter::new(FloatType::BF16, simd),
            to_f16: Converter::new(FloatType::F16, simd),
            scanner: Scanner::new(simd),
            copier,
        })
    }

    /// The type that this decodes.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// Decodes whole blocks to `f32`, bit-identical to ggml's row functions; which NaN a NaN is, is not defined.
    ///
    /// # Panics
    ///
    /// If `blocks` is not exactly the blocks that hold `out.len()` elements, which is a programming error.
    pub fn to_f32(&self, blocks: &[u8], out: &mut [f32]) {
        self.check(blocks.len(), out.len());
        self.decoder.run(blocks, out);
    }

    /// Decodes whole blocks to little-endian `dtype`, rounded to nearest even from `f32`, and counts elements that are not
    /// finite.
    ///
    /// Overflow becomes infinity. A NaN that arises in decoding becomes the positive quiet NaN without payload, so that
    /// bytes are the same on every machine; a NaN that a float type holds keeps its sign and payload as [`convert`] says.
    ///
    /// `out` needs no alignment; aligned to 4, `F32` is decoded in place.
    ///
    /// [`convert`]: super::convert()
    ///
    /// # Panics
    ///
    /// If `out` is not a whole number of elements, or `blocks` is not exactly the blocks that hold them; these are
    /// programming errors.
    pub fn decode(&self, blocks: &[u8], dtype: FloatType, out: &mut [u8]) -> Nonfinite {
        assert!(out.len().is_multiple_of(dtype.bytes()), "{} bytes are not whole elements of {dtype}", out.len());
        self.check(blocks.len(), out.len() / dtype.bytes());

        let mut found = Nonfinite::default();
        let mut stage = [0f32; CHUNK];
        let chunk_bytes = CHUNK / self.ty.block() as usize * self.ty.block_bytes() as usize;
        let chunks = blocks.chunks(chunk_bytes).zip(out.chunks_mut(CHUNK * dtype.bytes()));
        for (blocks, out) in chunks {
            let stage = &mut stage[..out.len() / dtype.bytes()];
            match self.copier {
                Some((own, copier)) if own == dtype => {
                    if copier.run(blocks, out) {
                        found += self.staged(blocks, stage, dtype, out);
                    }
                }
                _ => found += self.chunk(blocks, stage, dtype, out),
            }
        }
        found
    }

    /// Decodes at most `CHUNK` elements, in place where bytes of `out` are `f32` in memory.
    #[inline]
    fn chunk(&self, blocks: &[u8], stage: &mut [f32], dtype: FloatType, out: &mut [u8]) -> Nonfinite {
        if dtype == FloatType::F32
            && cfg!(target_endian = "little")
            && let Ok(values) = bytemuck::try_cast_slice_mut::<u8, f32>(out)
        {
            self.decoder.run(blocks, values);
            if !self.scanner.run(values) {
                return Nonfinite::default();
            }
        }
        self.staged(blocks, stage, dtype, out)
    }

    /// Decodes at most `CHUNK` elements by way of `stage`, which is as long as they are and stays in the L1 cache.
    fn staged(&self, blocks: &[u8], stage: &mut [f32], dtype: FloatType, out: &mut [u8]) -> Nonfinite {
        self.decoder.run(blocks, stage);
        let converter = match dtype {
            FloatType::F32 => self.to_f32,
            FloatType::BF16 => self.to_bf16,
            FloatType::F16 => self.to_f16,
        };
        if !converter.run(stage, out) {
            return Nonfinite::default();
        }
        if self.computes() {
            unify_nan(stage);
        }
        careful(stage, dtype, out)
    }

    /// Whether decoding is arithmetic, in which a NaN can arise that has no payload of its own.
    pub fn computes(&self) -> bool {
        !matches!(self.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
    }

    fn check(&self, bytes: usize, elements: usize) {
        let (block, block_bytes) = (self.ty.block() as usize, self.ty.block_bytes() as usize);
        assert!(
            elements.is_multiple_of(block) && bytes == elements / block * block_bytes,
            "{bytes} bytes are not the blocks of {elements} elements of {}",
            self.ty
        );
    }
}

impl fmt::Debug for Dequantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dequantizer").field("ty", &self.ty).finish_non_exhaustive()
    }
}
