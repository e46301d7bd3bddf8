// Division with the bits of IEEE 754, from additions and multiplications that each round once.
//
// The device's own division is exact too, but made of fused operations, which no kernel has. Values here are divided by few
// numbers, so the reciprocal of each is computed once, in f64, and a quotient is a product:
//
//   1. The reciprocal is wrong by less than 2^-51.6 of itself: 2^-53 from each of the two roundings of the last Newton step
//      that count, 2^-64 from the step before. A product with it is wrong by less than 2^-51.1.
//   2. A quotient of two f32 that has at most 25 significant bits is found exactly by rounding the product to 50, of which
//      half a step is at least 2^-51. Then the conversion to f32 rounds the true quotient: ties are ties.
//   3. Any other is at least 2^-49 of itself away from every number of 25 bits, where roundings to f32 change: a multiple of
//      1 / (S * M) for a divisor S of 24 bits and such a number M. The product and its rounding to 50 bits are wrong by less
//      than 2^-51.1 + 2^-50 together, so the conversion goes the same way. Subnormal quotients have fewer bits, and overflow
//      begins at a number of 25 bits.

#pragma once

#include "machine.cuh"

struct Divisor {
    double reciprocal;
};

// A divisor that is positive, normal and finite.
DEVICE Divisor divisor(float value) {
    const u32 word = bits(value);
    // Between 1 and 2. The line is wrong by a 17th at most, and every Newton step squares that.
    const float mantissa = number((word & 0x007FFFFF) | 0x3F800000);
    float rough = add(24.0f / 17, -mul(8.0f / 17, mantissa));
    rough = mul(rough, add(2.0f, -mul(mantissa, rough)));
    rough = mul(rough, add(2.0f, -mul(mantissa, rough)));
    const double wide = mantissa;
    double reciprocal = rough;
    reciprocal = add(reciprocal, mul(reciprocal, add(1.0, -mul(wide, reciprocal))));
    reciprocal = add(reciprocal, mul(reciprocal, add(1.0, -mul(wide, reciprocal))));
    return {mul(reciprocal, number64(static_cast<u64>(1150 - (word >> 23)) << 52))};
}

// The quotient of a finite value. NaN gives NaN, and infinity infinity.
DEVICE float divide(float value, const Divisor &by) {
    const u64 product = bits(mul(static_cast<double>(value), by.reciprocal));
    return nearest(number64((product + 4) & ~static_cast<u64>(7)));
}
