//! One compiled function per decoder, per converter and per instruction set. The other file of this folder with `unsafe`:
//! calls through pointers to functions that were compiled for the features that this CPU was found to have.

use super::blocks::{self, float, fp4, iq1, iq2, iq3, iq4, k_quants, legacy, low_bits, ternary};
#[cfg(target_arch = "x86_64")]
use super::isa::{Avx2, Avx512};
use super::{FloatType, Simd, convert, isa::Baseline};
use crate::gguf::GgmlType;

/// Decodes whole blocks: `out` has as many elements as the blocks hold.
type DecodeFn = unsafe fn(&[u8], &mut [f32]);
/// Converts values, as the functions of `convert` that return `bool`.
type ConvertFn = unsafe fn(&[f32], &mut [u8]) -> bool;
/// Copies values that need no conversion.
type CopyFn = unsafe fn(&[u8], &mut [u8]) -> bool;
/// Looks for values that are not finite.
type ScanFn = unsafe fn(&[f32]) -> bool;

/// Compiles everything once for one instruction set: `$attribute` turns its features on, `$isa` makes its token. Types after
/// `$lower` are left to that level.
macro_rules! level {
    (
        $level:ident, $isa:expr, $attribute:meta, { $($ty:ident $decode:path;)* }, { $($none:ident)* }
        $(, $lower:ident { $($left:ident)* })?
    ) => {
        mod $level {
            use super::*;

            pub(super) fn decoder(ty: GgmlType) -> Option<DecodeFn> {
                match ty {
                    $(GgmlType::$ty => {
                        #[$attribute]
                        fn decode(blocks: &[u8], out: &mut [f32]) {
                            let isa = $isa;
                            const BYTES: usize = GgmlType::$ty.block_bytes() as usize;
                            const WEIGHTS: usize = GgmlType::$ty.block() as usize;
                            let blocks = blocks.as_chunks::<BYTES>().0;
                            for (block, out) in blocks.iter().zip(out.as_chunks_mut::<WEIGHTS>().0) {
                                $decode(isa, block, out);
                                if WEIGHTS > 1 {
                                    blocks::one_at_a_time();
                                }
                            }
                        }
                        Some(decode)
                    })*
                    $($(GgmlType::$left)|* => $lower::decoder(ty),)?
                    $(GgmlType::$none)|* => None,
                }
            }

            pub(super) fn converter(dtype: FloatType) -> ConvertFn {
                #[$attribute]
                fn f32(values: &[f32], out: &mut [u8]) -> bool {
                    convert::f32($isa, values, out)
                }
                #[$attribute]
                fn bf16(values: &[f32], out: &mut [u8]) -> bool {
                    convert::bf16($isa, values, out)
                }
                #[$attribute]
                fn f16(values: &[f32], out: &mut [u8]) -> bool {
                    convert::f16($isa, values, out)
                }
                match dtype {
                    FloatType::F32 => f32,
                    FloatType::BF16 => bf16,
                    FloatType::F16 => f16,
                }
            }

            #[$attribute]
            pub(super) fn copy_bf16(values: &[u8], out: &mut [u8]) -> bool {
                convert::copy_bf16($isa, values, out)
            }

            #[$attribute]
            pub(super) fn copy_f16(values: &[u8], out: &mut [u8]) -> bool {
                convert::copy_f16($isa, values, out)
            }

            #[$attribute]
            pub(super) fn scan(values: &[f32]) -> bool {
                convert::scan($isa, values)
            }
        }
    };
}

/// Hands the lists of decoders to every level.
///
/// Decoders with a codebook are those of AVX2 also where there is AVX-512, with which the compiler makes gathers of their
/// look-ups. On Zen 5 these make most of them slower by a fifth than single loads do, and gathers are among what the
/// mitigations of GDS (Intel, up to Ice Lake) slow down.
macro_rules! decoders {
    ({ $($some:tt)* } codebook { $($book:ident $look_up:path;)* } none $none:tt) => {
        level!(baseline, Baseline, inline(never), { $($some)* $($book $look_up;)* }, $none);
        #[cfg(target_arch = "x86_64")]
        level!(
            avx2,
            Avx2::new(),
            target_feature(enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt"),
            { $($some)* $($book $look_up;)* },
            $none
        );
        #[cfg(target_arch = "x86_64")]
        level!(
            avx512,
            Avx512::new(),
            target_feature(
                enable = "avx2,f16c,fma,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
            ),
            { $($some)* },
            $none,
            avx2 { $($book)* }
        );
    };
}

decoders! {
    {
        F32     float::f32;
        F16     float::f16;
        Q4_0    legacy::q4_0;
        Q4_1    legacy::q4_1;
        Q5_0    legacy::q5_0;
        Q5_1    legacy::q5_1;
        Q8_0    legacy::q8_0;
        Q2_K    k_quants::q2_k;
        Q3_K    k_quants::q3_k;
        Q4_K    k_quants::q4_k;
        Q5_K    k_quants::q5_k;
        Q6_K    k_quants::q6_k;
        Q8_K    k_quants::q8_k;
        IQ4_NL  iq4::iq4_nl;
        IQ4_XS  iq4::iq4_xs;
        F64     float::f64;
        BF16    float::bf16;
        TQ1_0   ternary::tq1_0;
        TQ2_0   ternary::tq2_0;
        MXFP4   fp4::mxfp4;
        NVFP4   fp4::nvfp4;
        Q1_0    low_bits::q1_0;
        Q2_0    low_bits::q2_0;
    }
    codebook {
        IQ2_XXS iq2::iq2_xxs;
        IQ2_XS  iq2::iq2_xs;
        IQ3_XXS iq3::iq3_xxs;
        IQ1_S   iq1::iq1_s;
        IQ3_S   iq3::iq3_s;
        IQ2_S   iq2::iq2_s;
        IQ1_M   iq1::iq1_m;
    }
    none { Q8_1 I8 I16 I32 I64 }
}

/// Calls `$level::$name` for the best available level not above `$simd`.
macro_rules! pick {
    ($simd:expr, $name:ident $($call:tt)?) => {
        match $simd.or_available() {
            Simd::Baseline => baseline::$name $($call)?,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => avx2::$name $($call)?,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => avx512::$name $($call)?,
            #[cfg(not(target_arch = "x86_64"))]
            Simd::Avx2 | Simd::Avx512 => baseline::$name $($call)?,
        }
    };
}

/// A decoder that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Decoder(DecodeFn);

impl Decoder {
    /// The decoder of a type, or nothing if the type has none.
    pub(super) fn new(ty: GgmlType, simd: Simd) -> Option<Self> {
        pick!(simd, decoder(ty)).map(Decoder)
    }

    /// Decodes whole blocks.
    pub(super) fn run(self, blocks: &[u8], out: &mut [f32]) {
        // SAFETY: `new` took the function from a level whose features this CPU has.
        unsafe { (self.0)(blocks, out) }
    }
}

/// A converter that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Converter(ConvertFn);

impl Converter {
    /// The converter to an output type.
    pub(super) fn new(dtype: FloatType, simd: Simd) -> Self {
        Converter(pick!(simd, converter(dtype)))
    }

    /// Converts; true if an output is not finite, and then outputs that should be NaN may be wrong.
    pub(super) fn run(self, values: &[f32], out: &mut [u8]) -> bool {
        // SAFETY: `new` took the function from a level whose features this CPU has.
        unsafe { (self.0)(values, out) }
    }
}

/// A copier that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Copier(CopyFn);

impl Copier {
    /// The copier of bf16.
    pub(super) fn bf16(simd: Simd) -> Self {
        Copier(pick!(simd, copy_bf16))
    }

    /// The copier of f16.
    pub(super) fn f16(simd: Simd) -> Self {
        Copier(pick!(simd, copy_f16))
    }

    /// Copies; true if a value is not finite.
    pub(super) fn run(self, values: &[u8], out: &mut [u8]) -> bool {
        // SAFETY: the constructors took the function from a level whose features this CPU has.
        unsafe { (self.0)(values, out) }
    }
}

/// A scan that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Scanner(ScanFn);

impl Scanner {
    /// The scan for values that are not finite.
    pub(super) fn new(simd: Simd) -> Self {
        Scanner(pick!(simd, scan))
    }

    /// True if a value is not finite.
    pub(super) fn run(self, values: &[f32]) -> bool {
        // SAFETY: `new` took the function from a level whose features this CPU has.
        unsafe { (self.0)(values) }
    }
}
