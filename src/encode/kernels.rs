//! One compiled function per encoder and per instruction set. The only file of this folder with `unsafe`: calls of functions
//! that were compiled for the features that this CPU was found to have.

use super::deviation::Deviation;
use super::{fp8, nvfp4};
use crate::dequant::Simd;

/// Compiles everything once for one instruction set: `$attribute` turns its features on.
macro_rules! level {
    ($level:ident, $attribute:meta) => {
        mod $level {
            use super::*;

            #[$attribute]
            pub(super) fn fp8_band(values: &[f32], cols: usize, out: &mut [u8], scales: &mut [f32]) {
                fp8::encode(values, cols, out, scales)
            }

            #[$attribute]
            pub(super) fn fp8_deviation(values: &[f32], cols: usize, codes: &[u8], scales: &[f32]) -> Deviation {
                fp8::measure(values, cols, codes, scales)
            }

            #[$attribute]
            pub(super) fn nvfp4_amax(values: &[f32]) -> f32 {
                nvfp4::largest(values)
            }

            #[$attribute]
            pub(super) fn nvfp4_rows(values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
                nvfp4::encode(values, weight_scale_2, packed, scales)
            }

            #[$attribute]
            pub(super) fn nvfp4_searched(values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
                nvfp4::search(values, weight_scale_2, packed, scales)
            }

            #[$attribute]
            pub(super) fn nvfp4_deviation(
                values: &[f32],
                weight_scale_2: f32,
                packed: &[u8],
                scales: &[u8],
            ) -> Deviation {
                nvfp4::measure(values, weight_scale_2, packed, scales)
            }
        }
    };
}

level!(baseline, inline(never));
#[cfg(target_arch = "x86_64")]
level!(avx2, target_feature(enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt"));
#[cfg(target_arch = "x86_64")]
level!(
    avx512,
    target_feature(enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
);

/// Calls a function of the best available level not above `$simd`.
macro_rules! call {
    ($simd:expr, $name:ident $arguments:tt) => {
        match $simd.or_available() {
            Simd::Baseline => baseline::$name $arguments,
            // SAFETY: this CPU has the features of the level.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { avx2::$name $arguments },
            // SAFETY: this CPU has the features of the level.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { avx512::$name $arguments },
            #[cfg(not(target_arch = "x86_64"))]
            Simd::Avx2 | Simd::Avx512 => baseline::$name $arguments,
        }
    };
}

/// [`fp8::encode`].
pub(super) fn fp8_band(simd: Simd, values: &[f32], cols: usize, out: &mut [u8], scales: &mut [f32]) {
    call!(simd, fp8_band(values, cols, out, scales))
}

/// [`fp8::measure`].
pub(super) fn fp8_deviation(simd: Simd, values: &[f32], cols: usize, codes: &[u8], scales: &[f32]) -> Deviation {
    call!(simd, fp8_deviation(values, cols, codes, scales))
}

/// [`nvfp4::largest`].
pub(super) fn nvfp4_amax(simd: Simd, values: &[f32]) -> f32 {
    call!(simd, nvfp4_amax(values))
}

/// [`nvfp4::encode`].
pub(super) fn nvfp4_rows(simd: Simd, values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
    call!(simd, nvfp4_rows(values, weight_scale_2, packed, scales))
}

/// [`nvfp4::search`].
pub(super) fn nvfp4_searched(simd: Simd, values: &[f32], weight_scale_2: f32, packed: &mut [u8], scales: &mut [u8]) {
    call!(simd, nvfp4_searched(values, weight_scale_2, packed, scales))
}

/// [`nvfp4::measure`].
pub(super) fn nvfp4_deviation(
    simd: Simd,
    values: &[f32],
    weight_scale_2: f32,
    packed: &[u8],
    scales: &[u8],
) -> Deviation {
    call!(simd, nvfp4_deviation(values, weight_scale_2, packed, scales))
}
