//! Signs of the grid types, as masks over eight codes held in a `u64`.

use bytemuck::Pod;

use super::map;

/// For each 8-bit sign pattern, a mask whose byte `j` is 0xFF if bit `j` is set: weight `j` is negative.
pub(super) static SIGNS: [u64; 256] = {
    let mut table = [0; 256];
    let mut pattern = 0;
    while pattern < 256 {
        table[pattern] = mask(pattern as u8);
        pattern += 1;
    }
    table
};

/// The same for 7-bit patterns: IQ2_XXS, IQ2_XS and IQ3_XXS leave out the eighth sign, which makes the number of
/// negative weights even (`ksigns_iq2xs` in ggml).
pub(super) static EVEN_SIGNS: [u64; 128] = {
    let mut table = [0; 128];
    let mut pattern = 0u8;
    while pattern < 128 {
        let eighth = (pattern.count_ones() & 1) as u8;
        table[pattern as usize] = mask(pattern | eighth << 7);
        pattern += 1;
    }
    table
};

const fn mask(pattern: u8) -> u64 {
    let mut mask = 0;
    let mut j = 0;
    while j < 8 {
        if pattern >> j & 1 != 0 {
            mask |= 0xFF << (8 * j);
        }
        j += 1;
    }
    mask
}

/// Negates the codes that the mask covers. All codes of the grids are in 1..=127, so the increments cannot carry into a
/// neighbour.
#[inline(always)]
pub(super) fn negate(codes: u64, mask: u64) -> u64 {
    (codes ^ mask) + (mask & 0x0101_0101_0101_0101)
}

/// Codes gathered eight to a word, first code lowest, as bytes.
#[inline(always)]
pub(super) fn to_bytes<const WORDS: usize, const BYTES: usize>(words: [u64; WORDS]) -> [i8; BYTES]
where
    [u64; WORDS]: Pod,
    [i8; BYTES]: Pod,
{
    const { assert!(8 * WORDS == BYTES) };
    bytemuck::cast(map(&words, u64::to_le))
}
