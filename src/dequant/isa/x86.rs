//! x86-64 tokens. One of the two files of this folder with `unsafe`: intrinsics called from inlined helpers.

use std::arch::asm;
use std::arch::x86_64::*;

use super::Isa;

/// Proof that the running CPU has the features of [`Simd::Avx2`](crate::dequant::Simd::Avx2).
#[derive(Clone, Copy)]
pub(in crate::dequant) struct Avx2(());

/// Proof that the running CPU has the features of [`Simd::Avx512`](crate::dequant::Simd::Avx512).
#[derive(Clone, Copy)]
pub(in crate::dequant) struct Avx512(());

impl Avx2 {
    /// Safe to call only where the compiler knows these features to be enabled.
    #[inline]
    #[target_feature(enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt")]
    pub(in crate::dequant) fn new() -> Self {
        Avx2(())
    }
}

impl Avx512 {
    /// Safe to call only where the compiler knows these features to be enabled.
    #[inline]
    #[target_feature(enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
    pub(in crate::dequant) fn new() -> Self {
        Avx512(())
    }
}

impl Isa for Avx2 {
    #[inline(always)]
    fn f16(self, bytes: [u8; 2]) -> f32 {
        let value: __m128;
        // In assembly, because of the intrinsic the compiler knows that lanes other than the first don't matter. It then
        // loads the half into a register without clearing that, so that a block waits for whatever was computed in it,
        // which is the block before. (Q8_0 was half as fast.)
        // SAFETY: the token exists only where F16C is enabled; the instruction touches nothing but its register.
        unsafe {
            let bits = _mm_castsi128_ps(_mm_cvtsi32_si128(u16::from_le_bytes(bytes) as i32));
            asm!("vcvtph2ps {0}, {0}", inlateout(xmm_reg) bits => value, options(pure, nomem, nostack, preserves_flags));
            _mm_cvtss_f32(value)
        }
    }

    #[inline(always)]
    fn nibbles(self, table: &[i8; 16], packed: &[u8; 16]) -> [i8; 32] {
        let mut codes = [0; 32];
        // SAFETY: the token exists only where AVX2 is enabled; loads and the store are unaligned and of the arrays' sizes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let low = _mm_loadu_si128(packed.as_ptr().cast());
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
            let nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_shuffle_epi8(table, nibbles));
        }
        codes
    }

    #[inline(always)]
    fn narrow_f16(self, values: &[f32; 16], out: &mut [u8; 32]) {
        // SAFETY: the token exists only where F16C is enabled; loads and stores are unaligned and stay in the arrays.
        unsafe {
            for half in 0..2 {
                let wide = _mm256_loadu_ps(values.as_ptr().add(8 * half));
                let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                _mm_storeu_si128(out.as_mut_ptr().add(16 * half).cast(), narrow);
            }
        }
    }
}

impl Isa for Avx512 {
    #[inline(always)]
    fn f16(self, bytes: [u8; 2]) -> f32 {
        Avx2(()).f16(bytes)
    }

    #[inline(always)]
    fn nibbles(self, table: &[i8; 16], packed: &[u8; 16]) -> [i8; 32] {
        Avx2(()).nibbles(table, packed)
    }

    #[inline(always)]
    fn narrow_f16(self, values: &[f32; 16], out: &mut [u8; 32]) {
        // SAFETY: the token exists only where AVX-512 F is enabled; the load and the store are unaligned and of the arrays'
        // sizes.
        unsafe {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(values.as_ptr()));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), narrow);
        }
    }
}
