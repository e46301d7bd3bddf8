//! Blocks to try the kernels on.

use std::path::PathBuf;

use ggshard::dequant::{Dequantizer, Simd};
use ggshard::gguf::GgmlType;
use ggshard::gguf::types::TYPES;

use crate::gguf_writer::Random;
use crate::golden::{fixtures, read_folder};

/// Blocks of a type.
pub struct Sample {
    /// For messages.
    pub name: String,
    pub ty: GgmlType,
    pub blocks: Vec<u8>,
}

/// Types that have a decoder.
pub fn decodable() -> Vec<GgmlType> {
    TYPES.iter().map(|info| info.ty).filter(|ty| Dequantizer::new(*ty, Simd::Baseline).is_some()).collect()
}

/// Everything: golden blocks of the repository and, where `GGSHARD_CORPUS` names it, of the conformance corpus; random
/// blocks; and random blocks with special scales.
pub fn samples() -> Vec<Sample> {
    let mut goldens = read_folder(&fixtures());
    if let Some(corpus) = std::env::var_os("GGSHARD_CORPUS") {
        goldens.extend(read_folder(&PathBuf::from(corpus).join("blocks")));
    }
    let mut samples: Vec<Sample> = goldens
        .into_iter()
        .map(|golden| Sample { name: golden.name, ty: golden.ty, blocks: golden.blocks })
        .filter(|sample| decodable().contains(&sample.ty))
        .collect();
    let mut random = Random(7);
    for ty in decodable() {
        // Enough weights that every kernel has several blocks of threads.
        let count = (16384 / ty.block()).max(20);
        let blocks = (0..count * ty.block_bytes()).map(|_| random.next() as u8).collect();
        samples.push(Sample { name: format!("{ty}: random"), ty, blocks });
        samples.push(Sample { name: format!("{ty}: special"), ty, blocks: special(ty, &mut random) });
    }
    samples
}

/// Random blocks of a type, all scales finite and none extreme: what most launches are like.
pub fn tame(ty: GgmlType, count: u64, random: &mut Random) -> Vec<u8> {
    let mut blocks: Vec<u8> = (0..count * ty.block_bytes()).map(|_| random.next() as u8).collect();
    for block in blocks.chunks_mut(ty.block_bytes() as usize) {
        match ty {
            GgmlType::F32 | GgmlType::Q8_K => {
                block[..4].copy_from_slice(&((random.next() as i32 as f32) / 1e9).to_le_bytes())
            }
            GgmlType::F64 => block.copy_from_slice(&((random.next() as i32 as f64) / 1e9).to_le_bytes()),
            GgmlType::F16 => block[1] &= 0xBF,
            GgmlType::BF16 => block[1] = block[1] & 0x80 | 0x3C,
            GgmlType::MXFP4 => block[0] = 120 + block[0] % 8,
            GgmlType::IQ1_M => block[55] &= 0xBF,
            _ => halves(ty).iter().for_each(|at| block[at + 1] &= 0xBF),
        }
    }
    blocks
}

/// Where blocks have `f16` scales.
fn halves(ty: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match ty {
        Q4_0 | Q5_0 | Q8_0 | Q1_0 | Q2_0 | IQ4_NL | IQ4_XS => &[0],
        IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[0],
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        F32 | F16 | BF16 | F64 | Q8_K | IQ1_M | MXFP4 | NVFP4 | Q8_1 | I8 | I16 | I32 | I64 => &[],
    }
}

/// Zeros, subnormals, the largest, infinities and NaN of both kinds, both signs; and 1.
const HALVES: [u16; 17] = [
    0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE55,
    0x7C01, 0xFDFF,
];

fn special(ty: GgmlType, random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    let mut block = || (0..ty.block_bytes()).map(|_| random.next() as u8).collect::<Vec<u8>>();
    match ty {
        GgmlType::F16 | GgmlType::BF16 => (0..=u16::MAX).for_each(|half| out.extend(half.to_le_bytes())),
        GgmlType::F32 => hard_values().into_iter().for_each(|value| out.extend(value.to_le_bytes())),
        GgmlType::F64 => {
            for value in hard_values().into_iter().step_by(5) {
                // Beside an f32, and half-way to its neighbour.
                let bits = (value as f64).to_bits();
                for nudge in [0, 1, 1 << 28, (1 << 28) - 1, (1 << 28) + 1, 3 << 28] {
                    out.extend(bits.wrapping_add(nudge).to_le_bytes());
                }
            }
            [1e-320f64, 1e308, -1e39, f64::MIN_POSITIVE].iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
        GgmlType::Q8_K => {
            for scale in
                [0u32, 1 << 31, 1, 0x007F_FFFF, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001]
            {
                out.extend(scale.to_le_bytes());
                out.extend_from_slice(&block()[4..]);
            }
        }
        GgmlType::MXFP4 => {
            for e in 0..=255 {
                out.push(e);
                out.extend_from_slice(&block()[1..]);
            }
        }
        GgmlType::NVFP4 => {
            for byte in 0..=255u8 {
                out.extend([byte, byte.wrapping_add(85), byte ^ 0x7F, byte ^ 0x80]);
                out.extend_from_slice(&block()[4..]);
            }
        }
        GgmlType::IQ1_M => {
            for half in HALVES {
                let mut block = block();
                for nibble in 0..4 {
                    let top = &mut block[49 + 2 * nibble];
                    *top = *top & 15 | (half >> (4 * nibble) << 4) as u8;
                }
                out.extend(block);
            }
        }
        _ => {
            let at = halves(ty);
            for (i, first) in HALVES.into_iter().enumerate() {
                for second in if at.len() > 1 { &HALVES[..] } else { &HALVES[i..=i] } {
                    let mut block = block();
                    for (at, half) in at.iter().zip([first, *second]) {
                        block[*at..at + 2].copy_from_slice(&half.to_le_bytes());
                    }
                    out.extend(block);
                }
            }
        }
    }
    out
}

/// `f32` at which a rounding can go wrong: around every tie of bf16 and f16, subnormals, overflows, NaN of all kinds.
pub fn hard_values() -> Vec<f32> {
    let mut bits: Vec<u32> = Vec::new();
    for half in (0..=u16::MAX).step_by(11).chain(0x7B00..0x7C80).chain(0..0x0410).chain(0x7F00..=0x7FFF) {
        for centre in [half::f16::from_bits(half).to_f32().to_bits(), (half as u32) << 16] {
            for nudge in [0u32, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001] {
                bits.extend([centre.wrapping_add(nudge), centre.wrapping_sub(nudge)]);
            }
        }
    }
    for exponent in 0..=255u32 {
        for mantissa in [0, 1, 0x0FFF, 0x1000, 0x1001, 0x8000, 0x3F_FFFF, 0x40_0000, 0x5A_A000, 0x7F_FFFF] {
            bits.extend([exponent << 23 | mantissa, 1 << 31 | exponent << 23 | mantissa]);
        }
    }
    bits.into_iter().map(f32::from_bits).collect()
}
