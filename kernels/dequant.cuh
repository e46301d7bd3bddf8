// The block arithmetic of every ggml type: what src/dequant/blocks does, eight weights at a time.
//
// A struct per type: WEIGHTS and BYTES of a block, and `dq8(block, group, out)`, which gives weights 8 * group to 8 *
// group + 8 with the bits of the Rust decoder. COMPUTES says that decoding is arithmetic, and a NaN that comes of it
// has no payload worth keeping. A type whose block is one weight takes a row of them as one block, and has
// `dq1(weight)` for what is left at the end of the row.
//
// Drawings are those of src/dequant/blocks: a block from its first byte on, little-endian. A block lies at a multiple
// of the largest power of two that divides BYTES (16 at most), and no load is wider than what that guarantees.
//
// Codes are kept as unsigned bytes, eight in two words, and become floats without a conversion: set into the lowest
// mantissa bits of 2^23, off which 2^23 and the code of zero are taken. Both steps are exact, and zero is +0.

#pragma once

#include "grids.cuh"
#include "machine.cuh"

// Every type that has a decoder, in order of id.
#define FOR_EACH_TYPE(DO)                                                                                              \
    DO(F32) DO(F16) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(Q8_K) \
    DO(IQ2_XXS) DO(IQ2_XS) DO(IQ3_XXS) DO(IQ1_S) DO(IQ4_NL) DO(IQ3_S) DO(IQ2_S) DO(IQ4_XS) DO(F64) DO(IQ1_M) DO(BF16)  \
    DO(TQ1_0) DO(TQ2_0) DO(MXFP4) DO(NVFP4) DO(Q1_0) DO(Q2_0)

// ---- Codes: eight bytes, the first lowest in `low`.

struct Codes {
    u32 low, high;
};

DEVICE Codes operator&(Codes codes, u32 mask) { return {codes.low & mask, codes.high & mask}; }
DEVICE Codes operator|(Codes a, Codes b) { return {a.low | b.low, a.high | b.high}; }
DEVICE Codes operator^(Codes codes, u32 mask) { return {codes.low ^ mask, codes.high ^ mask}; }
DEVICE Codes operator<<(Codes codes, u32 count) { return {codes.low << count, codes.high << count}; }
DEVICE Codes operator>>(Codes codes, u32 count) { return {codes.low >> count, codes.high >> count}; }

// Four bytes of a block of BYTES, loaded as wide as its alignment allows; their place in it must allow the same.
template <int BYTES> DEVICE u32 four_bytes(const u8 *at) {
    constexpr int ALIGNMENT = BYTES & -BYTES;
    if constexpr (ALIGNMENT >= int{sizeof(u32)}) {
        return load<u32>(at);
    } else if constexpr (ALIGNMENT == int{sizeof(u16)}) {
        return load<u16>(at) | static_cast<u32>(load<u16>(at + 2)) << 16;
    } else {
        return load<u8>(at) | load<u8>(at + 1) << 8 | load<u8>(at + 2) << 16 | static_cast<u32>(load<u8>(at + 3)) << 24;
    }
}

// Eight bytes, likewise.
template <int BYTES> DEVICE Codes eight_bytes(const u8 *at) {
    if constexpr ((BYTES & -BYTES) >= int{sizeof(u64)}) {
        const u64 bytes = load<u64>(at);
        return {static_cast<u32>(bytes), static_cast<u32>(bytes >> 32)};
    } else {
        return {four_bytes<BYTES>(at), four_bytes<BYTES>(at + 4)};
    }
}

// Byte i is bit i of a byte.
DEVICE Codes spread(u32 byte) {
    // The factor makes four copies of a nibble, seven bits apart: bit i of copy i is bit 8 * i.
    return {(byte & 15) * 0x00204081 & 0x01010101, (byte >> 4) * 0x00204081 & 0x01010101};
}

// 2^23. An instruction takes one number as it is, which should be the selector.
HIDDEN u32 FRAME = 0x4B000000;

// Byte i of a word, less `zero`.
DEVICE float code(u32 word, u32 i, float zero) {
    return add(number(permute(word, FRAME, 0x7540 | i)), -(8388608.0f + zero));
}

// out[i] = scale * (codes[i] - zero).
DEVICE void scaled(float *out, float scale, Codes codes, float zero) {
    for (u32 i = 0; i < 4; i++) {
        out[i] = mul(scale, code(codes.low, i, zero));
        out[i + 4] = mul(scale, code(codes.high, i, zero));
    }
}

// out[i] = scale * codes[i] + offset; the sum rounds.
DEVICE void affine(float *out, float scale, Codes codes, float offset) {
    scaled(out, scale, codes, 0);
    for (u32 i = 0; i < 8; i++) {
        out[i] = add(out[i], offset);
    }
}

DEVICE float half_at(const u8 *at) { return widen(load<u16>(at)); }

// ---- Legacy types: 32 weights. The low nibble of qs[i] is weight i, the high nibble weight i + 16.

// The 4-bit codes of a group, from the 16 bytes `qs`.
template <int BYTES> DEVICE Codes nibbles(const u8 *qs, u32 group) {
    return eight_bytes<BYTES>(qs + 8 * (group & 1)) >> 4 * (group >> 1) & 0x0F0F0F0F;
}

// d f16 | qs 16 B                       x = d * (q - 8)
struct Q4_0 {
    static constexpr int WEIGHTS = 32, BYTES = 18;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, half_at(block), nibbles<BYTES>(block + 2, group), 8);
    }
};

// d f16 | m f16 | qs 16 B               x = d * q + m
struct Q4_1 {
    static constexpr int WEIGHTS = 32, BYTES = 20;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        affine(out, half_at(block), nibbles<BYTES>(block + 4, group), half_at(block + 2));
    }
};

// d f16 | qh 4 B | qs 16 B              x = d * (q - 16); bit i of qh is the fifth bit of weight i
struct Q5_0 {
    static constexpr int WEIGHTS = 32, BYTES = 22;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const Codes fifth = spread(load<u8>(block + 2 + group)) << 4;
        scaled(out, half_at(block), nibbles<BYTES>(block + 6, group) | fifth, 16);
    }
};

// d f16 | m f16 | qh 4 B | qs 16 B      x = d * q + m
struct Q5_1 {
    static constexpr int WEIGHTS = 32, BYTES = 24;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const Codes fifth = spread(load<u8>(block + 4 + group)) << 4;
        affine(out, half_at(block), nibbles<BYTES>(block + 8, group) | fifth, half_at(block + 2));
    }
};

// d f16 | qs 32 x i8                    x = d * q
struct Q8_0 {
    static constexpr int WEIGHTS = 32, BYTES = 34;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, half_at(block), eight_bytes<BYTES>(block + 2 + 8 * group) ^ 0x80808080, 128);
    }
};

// ---- K-quants: 256 weights whose sub-blocks have small integer scales.

// The 2-bit codes of a group, from the 64 bytes `qs`: byte l of 32 holds weights l, l + 32, l + 64, l + 96 of its half
// of the block, from the lowest bits up.
template <int BYTES> DEVICE Codes pairs(const u8 *qs, u32 group) {
    return eight_bytes<BYTES>(qs + 32 * (group >> 4) + 8 * (group & 3)) >> 2 * (group >> 2 & 3) & 0x03030303;
}

// scales 16 B (sc low nibble, m high) | qs 64 B | d f16 | dmin f16      x = d*sc * q - dmin*m      16 x 16 weights
struct Q2_K {
    static constexpr int WEIGHTS = 256, BYTES = 84;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 packed = load<u8>(block + (group >> 1));
        const float scale = mul(half_at(block + 80), static_cast<float>(packed & 15));
        const float minimum = mul(half_at(block + 82), static_cast<float>(packed >> 4));
        affine(out, scale, pairs<BYTES>(block + 16, group), -minimum);
    }
};

// hmask 32 B | qs 64 B | scales 12 B | d f16                            x = d*(sc - 32) * (q - 4)  16 x 16
// Bit i of hmask[l] is the third bit of weight l + 32 * i. Scale j: four bits in byte j % 8, low nibbles first, and two
// in byte 8 + j % 4 at bit 2 * (j / 4).
struct Q3_K {
    static constexpr int WEIGHTS = 256, BYTES = 110;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 j = group >> 1;
        const u32 low = load<u8>(block + 96 + (j & 7)) >> 4 * (j >> 3) & 15;
        const u32 high = load<u8>(block + 104 + (j & 3)) >> 2 * (j >> 2) & 3;
        const float scale = mul(half_at(block + 108), static_cast<float>(static_cast<int>(low | high << 4) - 32));
        const Codes third = eight_bytes<BYTES>(block + 8 * (group & 3)) >> (group >> 2) & 0x01010101;
        scaled(out, scale, pairs<BYTES>(block + 32, group) | third << 2, 4);
    }
};

// The head of Q4_K and Q5_K: d, dmin, and eight 6-bit scales and minimums.
//
// byte   4..8              8..12             12..16
// bits   hhssssss          hhmmmmmm          mmmmssss
//        sc[0..4], and     m[0..4], and      low nibbles: sc[4..8], high: m[4..8]
//        hh of sc[4..8]    hh of m[4..8]
struct Factors {
    float scale, minimum;

    DEVICE static Factors of(const u8 *block, u32 sub_block) {
        const u64 front = load<u64>(block), back = load<u64>(block + 8);
        const u32 at = 8 * (sub_block & 3);
        const u32 first = static_cast<u32>(front >> 32) >> at;
        const u32 second = static_cast<u32>(back) >> at;
        const u32 third = static_cast<u32>(back >> 32) >> at;
        const bool late = sub_block >= 4;
        const u32 sc = late ? (third & 15) | (first >> 2 & 0x30) : first & 63;
        const u32 m = late ? (third >> 4 & 15) | (second >> 2 & 0x30) : second & 63;
        const u32 halves = static_cast<u32>(front);
        return {
            mul(widen(static_cast<u16>(halves)), static_cast<float>(sc)),
            mul(widen(static_cast<u16>(halves >> 16)), static_cast<float>(m)),
        };
    }
};

// The 4-bit codes of a group of 256: each 32 bytes hold two sub-blocks, low nibbles the first.
template <int BYTES> DEVICE Codes nibbles_of_256(const u8 *qs, u32 group) {
    return eight_bytes<BYTES>(qs + 32 * (group >> 3) + 8 * (group & 3)) >> 4 * (group >> 2 & 1) & 0x0F0F0F0F;
}

// d f16 | dmin f16 | scales 12 B | qs 128 B                             x = d*sc * q - dmin*m      8 x 32
struct Q4_K {
    static constexpr int WEIGHTS = 256, BYTES = 144;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const Factors factors = Factors::of(block, group >> 2);
        affine(out, factors.scale, nibbles_of_256<BYTES>(block + 16, group), -factors.minimum);
    }
};

// d f16 | dmin f16 | scales 12 B | qh 32 B | qs 128 B                   x = d*sc * q - dmin*m      8 x 32
// Bit i of qh[l] is the fifth bit of weight l of sub-block i.
struct Q5_K {
    static constexpr int WEIGHTS = 256, BYTES = 176;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const Factors factors = Factors::of(block, group >> 2);
        const Codes fifth = eight_bytes<BYTES>(block + 16 + 8 * (group & 3)) >> (group >> 2) & 0x01010101;
        affine(out, factors.scale, nibbles_of_256<BYTES>(block + 48, group) | fifth << 4, -factors.minimum);
    }
};

// ql 128 B | qh 64 B | scales 16 x i8 | d f16                           x = d*sc * (q - 32)        16 x 16
// Quarter k of a half, 32 weights: low four bits in ql[32 * (k % 2)..] at bit 4 * (k / 2), upper two in qh at 2 * k.
struct Q6_K {
    static constexpr int WEIGHTS = 256, BYTES = 210;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 half = group >> 4, quarter = group >> 2 & 3, l = 8 * (group & 3);
        const u8 *const ql = block + 64 * half + 32 * (quarter & 1) + l;
        const Codes low = eight_bytes<BYTES>(ql) >> 4 * (quarter >> 1) & 0x0F0F0F0F;
        const Codes high = eight_bytes<BYTES>(block + 128 + 32 * half + l) >> 2 * quarter & 0x03030303;
        const float sc = code(load<u8>(block + 192 + (group >> 1)) ^ 0x80, 0, 128);
        scaled(out, mul(half_at(block + 208), sc), low | high << 4, 32);
    }
};

// d f32 | qs 256 x i8 | bsums 16 x i16 (unused here)                    x = d * q                  1 x 256
struct Q8_K {
    static constexpr int WEIGHTS = 256, BYTES = 292;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, load<float>(block), eight_bytes<BYTES>(block + 4 + 8 * group) ^ 0x80808080, 128);
    }
};

// ---- One and two bits, and ternary types: one f16 scale.

// d f16 | bits 16 B                     128 weights: x = bit ? d : -d
struct Q1_0 {
    static constexpr int WEIGHTS = 128, BYTES = 18;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, half_at(block), spread(load<u8>(block + 2 + group)) << 1, 1);
    }
};

// The four 2-bit numbers of a byte, one to a byte.
DEVICE u32 quarters(u32 byte) { return (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303; }

// d f16 | qs 16 B                       64 weights: x = d * (q - 1), four to a byte from the lowest bits up
struct Q2_0 {
    static constexpr int WEIGHTS = 64, BYTES = 18;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 qs = load<u16>(block + 2 + 2 * group);
        scaled(out, half_at(block), {quarters(qs & 0xFF), quarters(qs >> 8)}, 1);
    }
};

// qs 48 B | qh 4 B | d f16              256 weights: digit n of byte b is floor(3 * (b * 3^n mod 256) / 256)
// Digit n of a group of bytes precedes digit n + 1; the groups are qs[0..32], qs[32..48] (five digits) and qh (four).
struct TQ1_0 {
    static constexpr int WEIGHTS = 256, BYTES = 54;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        Codes codes;
        if (group < 30) {
            const bool first = group < 20;
            const u32 n = first ? group >> 2 : (group - 20) >> 1;
            const Codes bytes = eight_bytes<BYTES>(block + (first ? 8 * (group & 3) : 32 + 8 * (group & 1)));
            codes = {digits(bytes.low, n), digits(bytes.high, n)};
        } else {
            const u32 bytes = four_bytes<BYTES>(block + 48), n = 2 * (group - 30);
            codes = {digits(bytes, n), digits(bytes, n + 1)};
        }
        scaled(out, half_at(block + 52), codes, 1);
    }

    // Digit n of four bytes.
    DEVICE static u32 digits(u32 bytes, u32 n) {
        const u32 power = n == 4 ? 81 : 0x1B090301 >> 8 * n & 0xFF;
        // Two bytes at a time, with room above each for the product.
        const u32 even = (bytes & 0x00FF00FF) * power & 0x00FF00FF;
        const u32 odd = (bytes >> 8 & 0x00FF00FF) * power & 0x00FF00FF;
        return (even * 3 >> 8 & 0x00030003) | (odd * 3 & 0x03000300);
    }
};

// qs 64 B | d f16                       256 weights: x = d * (q - 1), bits as in Q2_K
struct TQ2_0 {
    static constexpr int WEIGHTS = 256, BYTES = 66;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, half_at(block + 64), pairs<BYTES>(block, group), 1);
    }
};

// ---- Sixteen uneven steps: IQ4 and FP4. In each sub-block, low nibbles are the first half of the weights.

// Sixteen bytes, 128 more than the steps they stand for.
struct Steps {
    u32 a, b, c, d;

    // The bytes that four codes pick, a code to a byte.
    DEVICE u32 pick(u32 word) const {
        const u32 packed = permute(word | word >> 4, word, 0x20) & 0x7777;
        const u32 upper = permute(word << 4, word, 0xBA98);
        return (permute(a, b, packed) & ~upper) | (permute(c, d, packed) & upper);
    }

    DEVICE Codes pick(Codes codes) const { return {pick(codes.low), pick(codes.high)}; }
};

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
DEVICE Steps iq4_steps() { return {0x3F2D1801, 0x766A5D4F, 0xA6998D81, 0xF1D9C5B5}; }

// Twice the E2M1 values: 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12. Code 8 is +0 in ggml.
DEVICE Steps twice_e2m1() { return {0x83828180, 0x8C888684, 0x7D7E7F80, 0x74787A7C}; }

// d f16 | qs 16 B                                      32 weights: x = d * STEPS[q]
struct IQ4_NL {
    static constexpr int WEIGHTS = 32, BYTES = 18;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        scaled(out, half_at(block), iq4_steps().pick(nibbles<BYTES>(block + 2, group)), 128);
    }
};

// d f16 | scales_h u16 | scales_l 4 B | qs 128 B       8 x 32 weights: x = d*(sc - 32) * STEPS[q]
struct IQ4_XS {
    static constexpr int WEIGHTS = 256, BYTES = 136;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 i = group >> 2;
        const u64 head = load<u64>(block);
        const u32 low = static_cast<u32>(head >> 32) >> 4 * i & 15;
        const u32 high = static_cast<u32>(head) >> 16 >> 2 * i & 3;
        const float sc = static_cast<float>(static_cast<int>(low | high << 4) - 32);
        const float scale = mul(widen(static_cast<u16>(head)), sc);
        scaled(out, scale, iq4_steps().pick(nibbles<BYTES>(block + 8 + 16 * i, group & 3)), 128);
    }
};

// e u8 | qs 16 B                        32 weights: x = 2^(e - 128) * TWICE[q]
struct MXFP4 {
    static constexpr int WEIGHTS = 32, BYTES = 17;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        // For e = 0 and 1 a subnormal f32, else an exponent field of e - 1.
        const u32 e = load<u8>(block);
        const float scale = number(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        scaled(out, scale, twice_e2m1().pick(nibbles<BYTES>(block + 1, group)), 128);
    }
};

// scales 4 B | qs 32 B                  4 x 16 weights: x = ue4m3(scale) / 2 * TWICE[q]
struct NVFP4 {
    static constexpr int WEIGHTS = 64, BYTES = 36;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 i = group >> 1;
        const u32 byte = load<u8>(block + i);
        // Exponent and mantissa set into an f32, subnormals included, whose bias is larger by 120; half of that.
        const float scale = byte == 0x7F ? 0 : mul(number((byte & 0x7F) << 20), 0x1p119f);
        const Codes codes = eight_bytes<BYTES>(block + 4 + 8 * i) >> 4 * (group & 1) & 0x0F0F0F0F;
        scaled(out, scale, twice_e2m1().pick(codes), 128);
    }
};

// ---- Grid types: an index picks several codes.

// The 2-bit numbers of a grid point, one to a nibble.
DEVICE u32 selectors(u32 point) {
    point = (point | point << 8) & 0x00FF00FF;
    point = (point | point << 4) & 0x0F0F0F0F;
    return (point | point << 2) & 0x33333333;
}

// A pattern of seven signs with the eighth, which makes the number of negative weights even.
DEVICE u32 even_signs(u32 seven) { return seven | odd_ones(seven) << 7; }

DEVICE u32 entry(const u16 *table, u32 index) { return load<u16>(reinterpret_cast<const u8 *>(table + index)); }

// Codes of IQ1, in eighths, 128 more: -1, 0 and 1 moved up or down by an eighth.
DEVICE Codes iq1_codes(u32 index, bool down) {
    const u32 point = selectors(entry(IQ1S, index)), values = down ? 0x00877F77 : 0x00898179;
    return {permute(values, values, point), permute(values, values, point >> 16)};
}

// Codes of IQ2, 128 more: magnitudes 8, 25, 43, from the upper word where the sign is set.
DEVICE Codes iq2_codes(u32 point, u32 signs) {
    signs = (signs | signs << 12) & 0x000F000F;
    signs = (signs | signs << 6) & 0x03030303;
    signs = (signs | signs << 3) & 0x11111111;
    const u32 picks = selectors(point) | signs << 2;
    return {permute(0x00AB9988, 0x00556778, picks), permute(0x00AB9988, 0x00556778, picks >> 16)};
}

// Codes of IQ3, 128 more, from two points of four magnitudes among the eight of the words `a` and `b`.
DEVICE Codes iq3_codes(u32 a, u32 b, u32 first, u32 second, u32 signs) {
    const Codes codes = {permute(a, b, first), permute(a, b, second)};
    // Negated: all bits turned, plus one. No code is 0, so that nothing is carried into a neighbour.
    const Codes ones = spread(signs);
    return Codes{(codes.low ^ ones.low * 0xFF) + ones.low, (codes.high ^ ones.high * 0xFF) + ones.high} ^ 0x80808080;
}

// d f16 | indices 32 B | qh 8 x u16                       x = d * (2*sc + 1) * (code + shift)
// qh of 32 weights: bits 0..12 the upper three bits of four indices, bits 12..15 the scale, bit 15 the shift.
struct IQ1_S {
    static constexpr int WEIGHTS = 256, BYTES = 50;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 qh = load<u16>(block + 34 + 2 * (group >> 2));
        const u32 index = load<u8>(block + 2 + group) | (qh >> 3 * (group & 3) & 7) << 8;
        const float scale = mul(mul(half_at(block), static_cast<float>(2 * (qh >> 12 & 7) + 1)), 0.125f);
        scaled(out, scale, iq1_codes(index, qh >> 15), 128);
    }
};

// indices 32 B | qh 16 B | scales 4 x u16                 as IQ1_S, one scale per 16 weights
// A nibble of qh for each index: three upper bits, and the shift on top. In each u16 four 3-bit scales, from the lowest
// bits up; the four top nibbles are the four nibbles of d.
struct IQ1_M {
    static constexpr int WEIGHTS = 256, BYTES = 56;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const Codes scales = eight_bytes<BYTES>(block + 48);
        const u32 d = (scales.low >> 12 & 0x000F) | (scales.low >> 24 & 0x00F0) | (scales.high >> 4 & 0x0F00) |
                      (scales.high >> 16 & 0xF000);
        const u32 i = group >> 1;
        const u32 packed = (i < 8 ? scales.low : scales.high) >> 16 * (i >> 2 & 1) >> 3 * (i & 3) & 7;
        const u32 nibble = load<u8>(block + 32 + i) >> 4 * (group & 1) & 15;
        const u32 index = load<u8>(block + group) | (nibble & 7) << 8;
        const float scale = mul(mul(widen(static_cast<u16>(d)), static_cast<float>(2 * packed + 1)), 0.125f);
        scaled(out, scale, iq1_codes(index, nibble >> 3), 128);
    }
};

// The scale of IQ2 types: d * (0.5 + sc) / 4.
DEVICE float iq2_scale(float d, u32 sc) { return mul(mul(d, add(0.5f, static_cast<float>(sc))), 0.25f); }

// d f16 | 8 x (indices 4 B | u32: four 7-bit signs, 4-bit scale on top)
struct IQ2_XXS {
    static constexpr int WEIGHTS = 256, BYTES = 66;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u8 *const part = block + 2 + 8 * (group >> 2);
        const u32 packed = four_bytes<BYTES>(part + 4), l = group & 3;
        const u32 point = entry(IQ2XXS, load<u8>(part + l));
        scaled(out, iq2_scale(half_at(block), packed >> 28), iq2_codes(point, even_signs(packed >> 7 * l & 127)), 128);
    }
};

// d f16 | qs 32 x u16 (9-bit index, 7-bit signs) | scales 8 B (nibbles, low first)
struct IQ2_XS {
    static constexpr int WEIGHTS = 256, BYTES = 74;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 q = load<u16>(block + 2 + 2 * group);
        const u32 sc = load<u8>(block + 66 + (group >> 2)) >> 4 * (group >> 1 & 1) & 15;
        const u32 point = entry(IQ2XS, q & 511);
        scaled(out, iq2_scale(half_at(block), sc), iq2_codes(point, even_signs(q >> 9)), 128);
    }
};

// d f16 | indices 32 B | signs 32 B | qh 8 B | scales 8 B (nibbles, low first)
// Two more bits for index l of four weight groups: bits 2 * l and 2 * l + 1 of their byte of qh.
struct IQ2_S {
    static constexpr int WEIGHTS = 256, BYTES = 82;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 high = load<u8>(block + 66 + (group >> 2)) >> 2 * (group & 3) & 3;
        const u32 sc = load<u8>(block + 74 + (group >> 2)) >> 4 * (group >> 1 & 1) & 15;
        const u32 point = entry(IQ2S, load<u8>(block + 2 + group) | high << 8);
        scaled(out, iq2_scale(half_at(block), sc), iq2_codes(point, load<u8>(block + 34 + group)), 128);
    }
};

// d f16 | indices 64 B | 8 x u32 (four 7-bit signs, 4-bit scale on top)         x = d * (0.5 + sc) / 2 * code
struct IQ3_XXS {
    static constexpr int WEIGHTS = 256, BYTES = 98;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 packed = four_bytes<BYTES>(block + 66 + 4 * (group >> 2));
        const u32 indices = load<u16>(block + 2 + 2 * group);
        const u32 first = entry(IQ3XXS, indices & 0xFF), second = entry(IQ3XXS, indices >> 8);
        const u32 signs = even_signs(packed >> 7 * (group & 3) & 127);
        const float scale = mul(mul(half_at(block), add(0.5f, static_cast<float>(packed >> 28))), 0.5f);
        scaled(out, scale, iq3_codes(0x1C140C04, 0x3E342C24, first, second, signs), 128);
    }
};

// d f16 | indices 64 B | qh 8 B | signs 32 B | scales 4 B (nibbles, low first)  x = d * (1 + 2*sc) * code
// Bit l of a byte of qh is the ninth bit of index l of eight.
struct IQ3_S {
    static constexpr int WEIGHTS = 256, BYTES = 110;
    static constexpr bool COMPUTES = true;
    DEVICE static void dq8(const u8 *block, u32 group, float *out) {
        const u32 i = group >> 2;
        const u32 high = load<u8>(block + 66 + i) >> 2 * (group & 3);
        const u32 indices = load<u16>(block + 2 + 2 * group);
        const u32 first = entry(IQ3S, (indices & 0xFF) | (high & 1) << 8);
        const u32 second = entry(IQ3S, indices >> 8 | (high >> 1 & 1) << 8);
        const u32 sc = load<u8>(block + 106 + (i >> 1)) >> 4 * (i & 1) & 15;
        const float scale = mul(half_at(block), static_cast<float>(1 + 2 * sc));
        const u32 signs = load<u8>(block + 74 + group);
        scaled(out, scale, iq3_codes(0x07050301, 0x0F0D0B09, first, second, signs), 128);
    }
};

// ---- Floats: a weight is a block. Eight are loaded as two to a load where they lie so.

// Whether eight weights of a float type can be loaded as u64.
DEVICE bool wide(const u8 *at) { return (reinterpret_cast<u64>(at) & 7) == 0; }

struct F32 {
    static constexpr int WEIGHTS = 1, BYTES = 4;
    static constexpr bool COMPUTES = false;
    DEVICE static float dq1(const u8 *weight) { return load<float>(weight); }
    DEVICE static void dq8(const u8 *row, u32 group, float *out) {
        const u8 *const at = row + 32 * static_cast<u64>(group);
        const bool together = wide(at);
        for (u32 i = 0; i < 8; i += 2) {
            const Codes pair = together ? eight_bytes<sizeof(u64)>(at + 4 * i) : eight_bytes<BYTES>(at + 4 * i);
            out[i] = number(pair.low);
            out[i + 1] = number(pair.high);
        }
    }
};

// The two 16-bit types.
template <class T> DEVICE void halves(const u8 *row, u32 group, float *out) {
    const u8 *const at = row + 16 * static_cast<u64>(group);
    const bool together = wide(at);
    for (u32 i = 0; i < 8; i += 4) {
        const Codes four = together ? eight_bytes<sizeof(u64)>(at + 2 * i) : eight_bytes<T::BYTES>(at + 2 * i);
        out[i] = T::of(four.low & 0xFFFF);
        out[i + 1] = T::of(four.low >> 16);
        out[i + 2] = T::of(four.high & 0xFFFF);
        out[i + 3] = T::of(four.high >> 16);
    }
}

// NaN keeps its sign and payload, and is made quiet, as F16C does.
struct F16 {
    static constexpr int WEIGHTS = 1, BYTES = 2;
    static constexpr bool COMPUTES = false;
    DEVICE static float of(u32 half) {
        const bool nan = (half & 0x7FFF) > 0x7C00;
        return nan ? number((half & 0x8000) << 16 | 0x7FC00000 | (half & 0x01FF) << 13) : widen(static_cast<u16>(half));
    }
    DEVICE static float dq1(const u8 *weight) { return of(load<u16>(weight)); }
    DEVICE static void dq8(const u8 *row, u32 group, float *out) { halves<F16>(row, group, out); }
};

// The upper half of an f32; a signalling NaN stays one.
struct BF16 {
    static constexpr int WEIGHTS = 1, BYTES = 2;
    static constexpr bool COMPUTES = false;
    DEVICE static float of(u32 half) { return number(half << 16); }
    DEVICE static float dq1(const u8 *weight) { return of(load<u16>(weight)); }
    DEVICE static void dq8(const u8 *row, u32 group, float *out) { halves<BF16>(row, group, out); }
};

// Rounded to the nearest f32.
struct F64 {
    static constexpr int WEIGHTS = 1, BYTES = 8;
    static constexpr bool COMPUTES = true;
    DEVICE static float dq1(const u8 *weight) { return nearest(load<double>(weight)); }
    DEVICE static void dq8(const u8 *row, u32 group, float *out) {
        for (u32 i = 0; i < 8; i++) {
            out[i] = dq1(row + 64 * static_cast<u64>(group) + 8 * i);
        }
    }
};
