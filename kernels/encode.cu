// The kernels that encode decoded values, which lie in memory of the device as f32, and measure how far the result is from
// them, as src/encode does.
//
// No thread needs another: what many threads make together (a maximum, a count, an exact sum) is the same in any order. So
// there is no shared memory, and fp8 takes four kernels:
//
//   ggshard_amax          the largest magnitude of every block, or of all values
//   ggshard_fp8           codes and scales from those
//   ggshard_fp8_measure   sixteen sums of squares for every block, each in its order
//   ggshard_fp8_sum       folds a block's sums, and adds them exactly to those of all blocks
//
// nvfp4 takes one, ggshard_nvfp4 or ggshard_nvfp4_searched, where a thread does a block of sixteen alone.
//
// Blocks of threads are 32 x 8, or 256 in x in the last two of fp8. The grid must cover x; y takes strides of the grid, whose
// height is limited. src/cuda/encode.rs computes both.

#include "encode.cuh"

// Words of 32 bits of an exact sum: it counts 2^-320.
constexpr u32 WORDS = 20;

// What is found in values and in what became of them; src/cuda/encode.rs has the same struct. Word i of a sum is added to
// without carrying, and counts 2^(32 * i - 320).
struct Found {
    u64 errors[WORDS], values[WORDS];
    u32 largest_error, largest_value; // bits of magnitudes
    u64 nan, inf;
};

// How many there are of it. Threads spread over them, and the host adds them up.
constexpr u32 SLOTS = 64;

// What a kernel is given; src/cuda/encode.rs has the same struct.
struct Encode {
    const float *values; // row r begins at values + r * stride; a multiple of 16 bytes
    u64 stride;          // a multiple of four
    u64 rows, cols;      // below 2^31
    u8 *codes;           // dense rows: a byte per value, or per two; a multiple of 8
    u8 *scales;          // f32 per block of 128 x 128, or E4M3 per sixteen; dense rows
    u32 *largest;        // bits of the largest magnitude of every such block, or of all values
    double *sums;        // thirty-two per block: of lanes' errors, and of their values
    Found *found;        // SLOTS of them; added to
    u32 whole;           // nonzero: ggshard_amax has one result
    float scale_2;
};

constexpr u32 ENCODE_THREADS = 256;
// Rows that a thread does one after the other.
constexpr u32 STRIP = 16;

DEVICE u32 blocks_of(u32 elements) { return (elements + 127) / 128; }

DEVICE Found *slot(const Encode &encode) { return encode.found + (blockIdx.x + blockIdx.y) % SLOTS; }

// Eight values of a row, zeros after the last column.
DEVICE void load8(const float *row, u32 col, u32 cols, float *values) {
    if (cols - col >= 8) {
        load4(row + col, values);
        load4(row + col + 4, values + 4);
        return;
    }
    for (u32 i = 0; i < 8; i++) {
        values[i] = col + i < cols ? load<float>(reinterpret_cast<const u8 *>(row + col + i)) : 0;
    }
}

// Counts what is not finite.
template <u32 COUNT> DEVICE void count(const float (&values)[COUNT], Found *found) {
    u32 highest = 0;
    for (u32 i = 0; i < COUNT; i++) {
        highest = raise(highest, values[i]);
    }
    if (highest < 0x7F800000) {
        return;
    }
    u32 nan = 0, inf = 0;
    for (u32 i = 0; i < COUNT; i++) {
        const u32 size = bits(values[i]) & 0x7FFFFFFF;
        nan += size > 0x7F800000;
        inf += size == 0x7F800000;
    }
    atomicAdd(&found->nan, static_cast<u64>(nan));
    atomicAdd(&found->inf, static_cast<u64>(inf));
}

// Adds a number that is not negative to an exact sum. What it has below 2^-320 is cut off; what is not finite counts nothing.
DEVICE void add_exactly(u64 *sum, double number) {
    const u64 word = bits(number);
    // The place of the lowest mantissa bit.
    const int place = static_cast<int>(word >> 52) - (1075 - 320);
    if (place < -52 || place > 640 - 53) {
        return;
    }
    const u64 mantissa = ((word & ((1ull << 52) - 1)) | 1ull << 52) >> (place < 0 ? -place : 0);
    const u32 at = place < 0 ? 0 : place, shift = at % 32;
    const u64 high = (mantissa >> 32 << shift) + ((mantissa & 0xFFFFFFFF) << shift >> 32);
    const u32 words[3] = {static_cast<u32>(mantissa << shift), static_cast<u32>(high), static_cast<u32>(high >> 32)};
    for (u32 i = 0; i < 3; i++) {
        if (words[i]) {
            atomicAdd(sum + at / 32 + i, static_cast<u64>(words[i]));
        }
    }
}

// Raises the maxima of what was found.
DEVICE void raise_found(Found *found, u32 largest_error, u32 largest_value) {
    atomicMax(&found->largest_error, largest_error);
    atomicMax(&found->largest_value, largest_value);
}

// x: groups of eight columns; y: strips of rows.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_amax(const Encode encode) {
    const u32 rows = static_cast<u32>(encode.rows), cols = static_cast<u32>(encode.cols);
    const u32 col = 8 * (blockIdx.x * blockDim.x + threadIdx.x), strips = (rows + STRIP - 1) / STRIP;
    if (col >= cols) {
        return;
    }
    for (u32 strip = blockIdx.y * blockDim.y + threadIdx.y; strip < strips; strip += gridDim.y * blockDim.y) {
        const u32 first = strip * STRIP, end = min(first + STRIP, rows);
        u32 largest = 0;
        for (u32 row = first; row < end; row++) {
            float values[8];
            load8(encode.values + row * encode.stride, col, cols, values);
            for (u32 i = 0; i < 8; i++) {
                largest = raise(largest, values[i]);
            }
        }
        const u64 block = static_cast<u64>(first / 128) * blocks_of(cols) + col / 128;
        atomicMax(encode.largest + (encode.whole ? 0 : block), largest);
    }
}

// x: groups of eight columns; y: strips of rows.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_fp8(const Encode encode) {
    const u32 rows = static_cast<u32>(encode.rows), cols = static_cast<u32>(encode.cols);
    const u32 col = 8 * (blockIdx.x * blockDim.x + threadIdx.x), strips = (rows + STRIP - 1) / STRIP;
    if (col >= cols) {
        return;
    }
    for (u32 strip = blockIdx.y * blockDim.y + threadIdx.y; strip < strips; strip += gridDim.y * blockDim.y) {
        const u32 first = strip * STRIP, end = min(first + STRIP, rows);
        const u64 block = static_cast<u64>(first / 128) * blocks_of(cols) + col / 128;
        const float scale = fp8_scale(load<u32>(reinterpret_cast<const u8 *>(encode.largest + block)));
        const Divisor by = divisor(scale);
        if (first % 128 == 0 && col % 128 == 0) {
            store(encode.scales + 4 * block, scale);
        }
        for (u32 row = first; row < end; row++) {
            float values[8];
            load8(encode.values + row * encode.stride, col, cols, values);
            count(values, slot(encode));
            const u64 codes = fp8_codes(values, by);
            u8 *const to = encode.codes + static_cast<u64>(row) * cols + col;
            if (cols % 8 == 0) {
                store(to, codes);
            } else {
                for (u32 i = 0; i < min(cols - col, 8u); i++) {
                    store(to + i, static_cast<u8>(codes >> 8 * i));
                }
            }
        }
    }
}

// x: lanes, sixteen of each block of a band; y: bands. Lane l takes columns l, l + 16, ... of the block, row after row.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_fp8_measure(const Encode encode) {
    const u32 rows = static_cast<u32>(encode.rows), cols = static_cast<u32>(encode.cols);
    const u32 x = blockIdx.x * blockDim.x + threadIdx.x, lane = x % 16, across = blocks_of(cols);
    if (x / 16 >= across) {
        return;
    }
    const u32 left = x / 16 * 128, right = min(left + 128, cols);
    for (u32 band = blockIdx.y; band < blocks_of(rows); band += gridDim.y) {
        const u64 block = static_cast<u64>(band) * across + x / 16;
        const float scale = load<float>(encode.scales + 4 * block);
        double errors = 0, values = 0;
        u32 largest_error = 0, largest_value = 0;
        const u32 end = min(128 * band + 128, rows);
#pragma unroll 1
        for (u32 row = 128 * band; row < end; row++) {
            const u8 *const from = reinterpret_cast<const u8 *>(encode.values + row * encode.stride);
            const u8 *const codes = encode.codes + static_cast<u64>(row) * cols;
#pragma unroll 8
            for (u32 col = left + lane; col < right; col += 16) {
                const float value = load<float>(from + 4 * static_cast<u64>(col));
                const float error = add(value, -mul(E4M3::value(load<u8>(codes + col)), scale));
                errors = add(errors, mul(static_cast<double>(error), static_cast<double>(error)));
                values = add(values, mul(static_cast<double>(value), static_cast<double>(value)));
                largest_error = raise(largest_error, error);
                largest_value = raise(largest_value, value);
            }
        }
        u8 *const sums = reinterpret_cast<u8 *>(encode.sums + 32 * block + lane);
        store(sums, errors);
        store(sums + 16 * sizeof(double), values);
        raise_found(slot(encode), largest_error, largest_value);
    }
}

// x: blocks, all of them.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_fp8_sum(const Encode encode) {
    const u32 rows = static_cast<u32>(encode.rows), cols = static_cast<u32>(encode.cols);
    const u64 block = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block >= static_cast<u64>(blocks_of(rows)) * blocks_of(cols)) {
        return;
    }
    const u8 *const sums = reinterpret_cast<const u8 *>(encode.sums + 32 * block);
    double lanes[16];
    for (u32 kind = 0; kind < 2; kind++) {
        for (u32 i = 0; i < 16; i++) {
            lanes[i] = load<double>(sums + sizeof(double) * (16 * kind + i));
        }
        Found *const found = slot(encode);
        add_exactly(kind ? found->values : found->errors, fold(lanes));
    }
}

// x: blocks of sixteen columns; y: rows.
template <bool SEARCHED> DEVICE void nvfp4(const Encode &encode) {
    const u32 rows = static_cast<u32>(encode.rows), cols = static_cast<u32>(encode.cols);
    const u32 x = blockIdx.x * blockDim.x + threadIdx.x, across = cols / NVFP4_BLOCK;
    if (x >= across) {
        return;
    }
    Found *const found = slot(encode);
    for (u32 row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += gridDim.y * blockDim.y) {
        float values[NVFP4_BLOCK];
        for (u32 i = 0; i < NVFP4_BLOCK; i += 4) {
            load4(encode.values + row * encode.stride + NVFP4_BLOCK * x + i, values + i);
        }
        count(values, found);
        const Sixteen block = SEARCHED ? nvfp4_searched(values, encode.scale_2) : nvfp4_block(values, encode.scale_2);
        const u64 at = static_cast<u64>(row) * across + x;
        store(encode.codes + 8 * at, block.words[0] | static_cast<u64>(block.words[1]) << 32);
        store(encode.scales + at, static_cast<u8>(block.scale));

        const float step = mul(E4M3::value(block.scale), encode.scale_2);
        u32 largest_error = 0, largest_value = 0;
        double errors[NVFP4_BLOCK], squares[NVFP4_BLOCK];
        for (u32 i = 0; i < NVFP4_BLOCK; i++) {
            const float error = add(values[i], -mul(E2M1::value(block.code(i)), step));
            errors[i] = mul(static_cast<double>(error), static_cast<double>(error));
            squares[i] = mul(static_cast<double>(values[i]), static_cast<double>(values[i]));
            largest_error = raise(largest_error, error);
            largest_value = raise(largest_value, values[i]);
        }
        add_exactly(found->errors, fold(errors));
        add_exactly(found->values, fold(squares));
        raise_found(found, largest_error, largest_value);
    }
}

extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_nvfp4(const Encode encode) { nvfp4<false>(encode); }

extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) ggshard_nvfp4_searched(const Encode encode) {
    nvfp4<true>(encode);
}

#define FOR_EACH_ENCODER(DO)                                                                                           \
    DO(ggshard_amax)                                                                                                   \
    DO(ggshard_fp8) DO(ggshard_fp8_measure) DO(ggshard_fp8_sum) DO(ggshard_nvfp4) DO(ggshard_nvfp4_searched)
