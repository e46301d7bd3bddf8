//! One compiled function per encoder and per instruction set. The only file of this folder with `unsafe`: calls of functions
//! that were compiled for the features that this CPU was found to have.

use super::fp8;
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
