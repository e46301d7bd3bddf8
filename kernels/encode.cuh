// Encoding in few bits: what src/encode does, with the same bits, for values that are finite.
//
// fp8: a block of 128 x 128 has one scale, so its largest magnitude is found first. Bits of magnitudes are ordered as integers:
// threads that share a block can raise one u32 with atomicMax, in any order. Then each value is divided and rounded alone.
//
// nvfp4: a block of 16 belongs to one thread, which stores 8 bytes of codes and one of the scale.
//
// Codes are rounded in integers, because the conversion instructions are not there on every chip.

#pragma once

#include "divide.cuh"

// A float format: mantissa bits, exponent of the smallest normal value, bits of the largest value as f32, sign bit of a code.
template <u32 MANTISSA, int SMALLEST, u32 LARGEST, u32 SIGN, bool NAN_AFTER> struct Format {
    static constexpr u32 SHIFT = 23 - MANTISSA;
    // What exponents of f32 are larger by, as f32 bits; and the smallest normal value.
    static constexpr u32 BIAS = static_cast<u32>(126 + SMALLEST) << 23, FIRST = BIAS + (1u << 23);

    // The nearest code, ties to even; the largest if that is exceeded. NaN is the code after the largest, where there is one.
    DEVICE static u32 code(float value) {
        const u32 word = bits(value), wide = word & 0x7FFFFFFF, size = wide < LARGEST ? wide : LARGEST;
        // Half a step less one, plus the lowest kept bit. A carry moves into the exponent, as it should.
        const u32 normal = (size - BIAS + (1u << (SHIFT - 1)) - 1 + (size >> SHIFT & 1)) >> SHIFT;
        // Added to the power of two whose last mantissa bit is a step of the subnormals, the sum rounds at the right place.
        constexpr u32 STEPS = FIRST + (SHIFT << 23);
        const u32 subnormal = bits(add(number(size), number(STEPS))) - STEPS;
        const u32 nan = NAN_AFTER && wide > 0x7F800000;
        return (size < FIRST ? subnormal : normal) + nan + (word >> 31) * SIGN;
    }

    // The value of a code that is not NaN.
    DEVICE static float value(u32 code) {
        const u32 wide = (code & (SIGN - 1)) << SHIFT;
        // With the smallest exponent subnormals have a one too many in front, which is taken off again.
        const float subnormal = add(number(wide + FIRST), -number(FIRST));
        const u32 size = wide < 1u << 23 ? bits(subnormal) : wide + BIAS;
        return number(size | (code & SIGN ? 0x80000000 : 0));
    }
};

// 1 sign, 4 exponent, 3 mantissa; 448 at most. 1 sign, 2 exponent, 1 mantissa; 6 at most, no NaN.
typedef Format<3, -6, 0x43E00000, 0x80, true> E4M3;
typedef Format<1, 0, 0x40C00000, 8, false> E2M1;

// The larger of some magnitudes' bits and that of a value.
DEVICE u32 raise(u32 largest, float value) {
    const u32 size = bits(value) & 0x7FFFFFFF;
    return size > largest ? size : largest;
}

// The scale of a block of fp8, from the bits of its largest magnitude: never subnormal, and 1 for zeros.
DEVICE float fp8_scale(u32 largest) {
    const float scale = divide(number(largest), {1.0 / 448}), least = number(0x00800000);
    return largest == 0 ? 1.0f : scale > least ? scale : least;
}

// The codes of eight values, the first lowest.
DEVICE u64 fp8_codes(const float (&values)[8], const Divisor &scale) {
    u64 codes = 0;
    for (u32 i = 0; i < 8; i++) {
        codes |= static_cast<u64>(E4M3::code(divide(values[i], scale))) << 8 * i;
    }
    return codes;
}

constexpr u32 NVFP4_BLOCK = 16;
// The code of the largest block scale.
constexpr int LAST_SCALE = 0x7E;

// A block of nvfp4: sixteen codes, the first lowest, and the code of the scale.
struct Sixteen {
    u32 words[2];
    u32 scale;

    DEVICE u32 code(u32 i) const { return words[i >> 3] >> 4 * (i & 7) & 15; }
};

// The code of a block's scale, from its largest magnitude: at least the smallest, and 1 for zeros.
DEVICE u32 nvfp4_scale(const float *values, float scale_2) {
    u32 largest = 0;
    for (u32 i = 0; i < NVFP4_BLOCK; i++) {
        largest = raise(largest, values[i]);
    }
    const float ratio = divide(number(largest), divisor(mul(6.0f, scale_2))), least = E4M3::value(1);
    return E4M3::code(ratio == 0 ? 1.0f : ratio > least ? ratio : least);
}

DEVICE Sixteen nvfp4_with(const float *values, float scale_2, u32 scale) {
    Sixteen block = {{0, 0}, scale};
    const Divisor step = divisor(mul(E4M3::value(scale), scale_2));
    for (u32 i = 0; i < NVFP4_BLOCK; i++) {
        block.words[i >> 3] |= E2M1::code(divide(values[i], step)) << 4 * (i & 7);
    }
    return block;
}

// The sum of sixteen numbers, which are overwritten. Halves are added, then halves of those.
template <class T> DEVICE T fold(T *lanes) {
    for (u32 width = 8; width > 0; width /= 2) {
        for (u32 i = 0; i < width; i++) {
            lanes[i] = add(lanes[i], lanes[i + width]);
        }
    }
    return lanes[0];
}

// The sum of squared errors in units of `scale_2`, of which `ratios` are the values.
DEVICE float nvfp4_error(const float *ratios, const Sixteen &block) {
    const float scale = E4M3::value(block.scale);
    float squares[NVFP4_BLOCK];
    for (u32 i = 0; i < NVFP4_BLOCK; i++) {
        const float error = add(ratios[i], -mul(E2M1::value(block.code(i)), scale));
        squares[i] = mul(error, error);
    }
    return fold(squares);
}

// Sixteen values with the scale that the largest asks for.
DEVICE Sixteen nvfp4_block(const float *values, float scale_2) {
    return nvfp4_with(values, scale_2, nvfp4_scale(values, scale_2));
}

// Sixteen values with that scale or the one of two below and six above that has the smallest error.
DEVICE Sixteen nvfp4_searched(const float *values, float scale_2) {
    Sixteen best = nvfp4_block(values, scale_2);
    const int first = static_cast<int>(best.scale);
    const Divisor by = divisor(scale_2);
    float ratios[NVFP4_BLOCK];
    for (u32 i = 0; i < NVFP4_BLOCK; i++) {
        ratios[i] = divide(values[i], by);
    }
    float least = nvfp4_error(ratios, best);
#pragma unroll 1
    for (int nudge = -2; nudge <= 6; nudge++) {
        const int scale = first + nudge;
        const Sixteen other = nvfp4_with(values, scale_2, scale < 1 ? 1 : scale > LAST_SCALE ? LAST_SCALE : scale);
        const float error = nvfp4_error(ratios, other);
        // Better by more than the arithmetic can be wrong.
        if (error < mul(least, 65535.0f / 65536)) {
            best = other;
            least = error;
        }
    }
    return best;
}
