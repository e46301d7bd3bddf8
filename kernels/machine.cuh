// What the device and the host compiler have different words for. No header is included, so that NVRTC needs none;
// compiled as plain C++17 the same kernels run on the host, where tests compare them with the Rust decoders.
//
// Arithmetic is IEEE 754 single and double precision, one rounding per operation: nothing is contracted to a fused
// multiply-add, no subnormal is flushed. The host compiler needs -ffp-contract=off for that.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(float) == 4, "sizes of the machine");
static_assert(sizeof(double) == 8, "sizes of the machine");

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
// Read through the L1 cache: lanes look up different entries, which constant memory would serve one after the other.
#define TABLE static __device__ const

// A number that the assembler cannot see, and so keeps in a register.
#define HIDDEN static __constant__

// The value itself, computed here: the compiler does not compute it again, or take decisions on it, elsewhere.
DEVICE u32 here(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// A little-endian value at an address that is a multiple of its size, and does not change during the launch.
template <class T> DEVICE T load(const u8 *at) {
    return __ldg(reinterpret_cast<const T *>(at));
}

DEVICE u32 bits(float value) { return __float_as_uint(value); }
DEVICE float number(u32 bits) { return __uint_as_float(bits); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE u64 bits(double value) { return static_cast<u64>(__double_as_longlong(value)); }
DEVICE double number64(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
DEVICE float magnitude(float value) { return fabsf(value); }
DEVICE float nearest(double value) { return __double2float_rn(value); }
DEVICE u32 odd_ones(u32 word) { return __popc(word) & 1; }

// Byte i of the result is byte `s & 7` of a (0..4) and b (4..8), s being nibble i of `selectors`; where s has its bit 3
// set, it is eight copies of that byte's top bit.
DEVICE u32 permute(u32 a, u32 b, u32 selectors) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selectors));
    return result;
}

// The f32 of an f16, subnormals included. NaN stays NaN, whichever.
DEVICE float widen(u16 half) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
    return result;
}

// Four values at a multiple of sixteen, which do not change during the launch.
DEVICE void load4(const float *at, float *values) {
    const float4 four = __ldg(reinterpret_cast<const float4 *>(at));
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
}

// Sixteen bytes at a multiple of sixteen.
DEVICE void store(u8 *at, u32 a, u32 b, u32 c, u32 d) {
    *reinterpret_cast<uint4 *>(at) = make_uint4(a, b, c, d);
}

template <class T> DEVICE void store(u8 *at, T value) {
    *reinterpret_cast<T *>(at) = value;
}

#else

#define DEVICE inline
#define TABLE static const
#define HIDDEN static const

inline u32 here(u32 value) { return value; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

// The includer may look at every access before it happens.
#ifndef BEFORE_ACCESS
#define BEFORE_ACCESS(address, bytes)
#endif

template <class T> inline T load(const u8 *at) {
    BEFORE_ACCESS(at, sizeof(T));
    T value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}

inline void load4(const float *at, float *values) {
    BEFORE_ACCESS(at, 16);
    __builtin_memcpy(values, at, 16);
}

template <class T> inline void store(u8 *at, T value) {
    BEFORE_ACCESS(at, sizeof(T));
    __builtin_memcpy(at, &value, sizeof value);
}

inline void store(u8 *at, u32 a, u32 b, u32 c, u32 d) {
    BEFORE_ACCESS(at, 16);
    const u32 words[4] = {a, b, c, d};
    __builtin_memcpy(at, words, sizeof words);
}

inline u32 bits(float value) {
    u32 result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

inline float number(u32 bits) {
    float result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
}

inline u64 bits(double value) {
    u64 result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

inline double number64(u64 bits) {
    double result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
}

inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline double mul(double a, double b) { return a * b; }
inline double add(double a, double b) { return a + b; }
inline float magnitude(float value) { return __builtin_fabsf(value); }
inline float nearest(double value) { return static_cast<float>(value); }
inline u32 odd_ones(u32 word) { return __builtin_popcount(word) & 1; }

inline u32 permute(u32 a, u32 b, u32 selectors) {
    const u64 bytes = a | static_cast<u64>(b) << 32;
    u32 result = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 selector = selectors >> 4 * i;
        u32 byte = static_cast<u32>(bytes >> 8 * (selector & 7)) & 0xFF;
        if (selector & 8) {
            byte = byte & 0x80 ? 0xFF : 0;
        }
        result |= byte << 8 * i;
    }
    return result;
}

inline float widen(u16 half) {
    // A subnormal's mantissa counts steps of 2^-24; otherwise the exponent's bias grows from 15 to 127.
    const u32 magnitude = half & 0x7FFF, sign = static_cast<u32>(half & 0x8000) << 16;
    if (magnitude < 0x0400) {
        return number(bits(static_cast<float>(magnitude) * (1.0f / 16777216.0f)) | sign);
    }
    return number((magnitude < 0x7C00 ? (magnitude << 13) + (112u << 23) : magnitude << 13 | 0x7F800000) | sign);
}

#endif
