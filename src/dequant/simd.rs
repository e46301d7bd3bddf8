//! The instruction sets that decoders are compiled for.

/// An instruction set level. All levels give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Simd {
    /// What the compilation target guarantees (SSE2 on x86-64).
    Baseline,
    /// AVX2 with F16C, FMA and BMI (x86-64-v3: Haswell, Zen and later).
    Avx2,
    /// AVX-512 F, BW, CD, DQ and VL (x86-64-v4: Skylake-X, Zen 4 and later).
    Avx512,
}

impl Simd {
    /// The best level of this CPU.
    pub fn detect() -> Simd {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512cd")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 {
                return Simd::Avx512;
            }
            if avx2 {
                return Simd::Avx2;
            }
        }
        Simd::Baseline
    }

    /// Every level of this CPU, from the lowest.
    pub fn available() -> Vec<Simd> {
        let best = Simd::detect();
        [Simd::Baseline, Simd::Avx2, Simd::Avx512].into_iter().filter(|level| *level <= best).collect()
    }

    /// This level, or the best of this CPU where the CPU lacks it.
    pub(crate) fn or_available(self) -> Simd {
        self.min(Simd::detect())
    }
}
