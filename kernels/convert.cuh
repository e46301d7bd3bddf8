// From f32 to an output type: the rules of src/dequant/convert.rs. Rounded to nearest even; overflow becomes infinity;
// NaN stays NaN with its sign and upper payload bits, and quiet.
//
// Eight values that stay finite are narrowed by the device's own instruction, which is right for those. Where an output
// might not, `careful` does one value after the other, in integers, and counts.

#pragma once

#include "machine.cuh"

// Output types, as Launch::dtype has them.
constexpr u32 TO_BF16 = 0, TO_F16 = 1, TO_F32 = 2;

// The bf16 of an f32, by bits. For NaN ggml's rule.
DEVICE u32 bf16_of(u32 value) {
    const bool nan = (value & 0x7FFFFFFF) > 0x7F800000;
    return nan ? value >> 16 | 64 : (value + 0x7FFF + (value >> 16 & 1)) >> 16;
}

// The f16 of an f32, by bits. For NaN what F16C does.
DEVICE u32 f16_of(u32 value) {
    const u32 size = value & 0x7FFFFFFF, sign = value >> 16 & 0x8000;
    if (size > 0x7F800000) {
        return sign | 0x7E00 | (size >> 13 & 0x01FF);
    }
    if (size >= 143u << 23) {
        return sign | 0x7C00;
    }
    if (size < 113u << 23) {
        // The last mantissa bit of 0.5 is worth 2^-24, a step of the subnormals: the sum rounds at the right place.
        return sign | (bits(add(number(size), 0.5f)) - 0x3F000000);
    }
    // Half a step less one, plus the lowest kept bit. A carry moves into the exponent, as it should.
    return sign | (size - (112u << 23) + 0x0FFF + (size >> 13 & 1)) >> 13;
}

// Two finite values, the first in the lower half. What is infinite or NaN stays so, but has not always the right bits.
#ifdef __CUDACC__

DEVICE u32 narrow_bf16(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

DEVICE u32 narrow_f16(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

#else

inline u32 narrow_bf16(float low, float high) { return bf16_of(bits(low)) | bf16_of(bits(high)) << 16; }
inline u32 narrow_f16(float low, float high) { return f16_of(bits(low)) | f16_of(bits(high)) << 16; }

#endif

// The magnitude, as f32 bits, from which an output is infinite or NaN.
DEVICE u32 first_infinite(u32 dtype) {
    return dtype == TO_BF16 ? 0x7F7F8000 : dtype == TO_F16 ? 0x477FF000 : 0x7F800000;
}

// Whether all outputs are certain to be finite. The sum of magnitudes is not below any of them, and NaN with NaN among
// them.
DEVICE bool all_finite(const float *values, u32 dtype) {
    float sum = magnitude(values[0]);
    for (u32 i = 1; i < 8; i++) {
        sum = add(sum, magnitude(values[i]));
    }
    return sum < number(first_infinite(dtype));
}

// Eight outputs: a word each for f32, half a word otherwise.
struct Outputs {
    u32 words[8];
};

DEVICE Outputs narrow(const float *values, u32 dtype) {
    Outputs outputs;
    if (dtype == TO_F32) {
        for (u32 i = 0; i < 8; i++) {
            outputs.words[i] = bits(values[i]);
        }
    } else {
        for (u32 i = 0; i < 4; i++) {
            const float low = values[2 * i], high = values[2 * i + 1];
            outputs.words[i] = dtype == TO_BF16 ? narrow_bf16(low, high) : narrow_f16(low, high);
        }
    }
    return outputs;
}

// What Nonfinite counts.
struct Counts {
    u32 nan, inf, overflow;
};

// One output, counted if it is not finite. `unify` gives every NaN the bits of the positive quiet one without payload.
DEVICE u32 careful(float value, u32 dtype, bool unify, Counts &counts) {
    u32 word = bits(value);
    const u32 size = word & 0x7FFFFFFF;
    if (size > 0x7F800000) {
        counts.nan++;
        word = unify ? 0x7FC00000 : word;
    } else if (size == 0x7F800000) {
        counts.inf++;
    } else if (size >= first_infinite(dtype)) {
        counts.overflow++;
    }
    return dtype == TO_BF16 ? bf16_of(word) : dtype == TO_F16 ? f16_of(word) : word;
}
