// The kernels on the host: the same code as on the device, run thread by thread. Tests build it into a library and
// compare what it does with the Rust decoders; it is no part of the program.

#include <cstddef>
#include <cstring>

// What a launch defines on the device.
struct Index {
    unsigned x, y, z;
};

static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// Accesses at addresses that are not a multiple of their size, which the device would refuse; and all, by size.
static thread_local int misaligned;
static thread_local unsigned accesses[17];

#define __global__
#define __launch_bounds__(...)
#define BEFORE_ACCESS(address, bytes)                                                                                  \
    do {                                                                                                               \
        misaligned += reinterpret_cast<std::size_t>(address) % (bytes) != 0;                                           \
        accesses[bytes]++;                                                                                             \
    } while (0)

static void atomicAdd(unsigned long long *counter, unsigned long long count) { *counter += count; }

#include "dequant.cu"
#include "encode.cuh"

// Weights 8 * group to 8 * group + 8 of a block. Gives the number of misaligned accesses, or -1 for an unknown type.
extern "C" int host_dq8(const char *type, const u8 *block, u32 group, float *out) {
    misaligned = 0;
#define DQ8(TYPE)                                                                                                      \
    if (std::strcmp(type, #TYPE) == 0) {                                                                               \
        TYPE::dq8(block, group, out);                                                                                  \
        return misaligned;                                                                                             \
    }
    FOR_EACH_TYPE(DQ8)
    return -1;
}

// Weights and bytes of a type's block; nonzero for an unknown type.
extern "C" int host_block(const char *type, u32 *weights, u32 *bytes) {
#define BLOCK(TYPE)                                                                                                    \
    if (std::strcmp(type, #TYPE) == 0) {                                                                               \
        *weights = TYPE::WEIGHTS;                                                                                      \
        *bytes = TYPE::BYTES;                                                                                          \
        return 0;                                                                                                      \
    }
    FOR_EACH_TYPE(BLOCK)
    return -1;
}

// Runs all threads of a launch, one after the other. Gives the number of misaligned accesses, or -1 for an unknown
// kernel.
extern "C" int host_launch(const char *kernel, const u32 *blocks, const u32 *threads, const Launch *launch) {
    void (*run)(Launch) = nullptr;
#define FIND(TYPE)                                                                                                     \
    if (std::strcmp(kernel, "ggshard_" #TYPE) == 0) {                                                                  \
        run = ggshard_##TYPE;                                                                                          \
    }
    FOR_EACH_TYPE(FIND)
    if (run == nullptr) {
        return -1;
    }
    misaligned = 0;
    std::memset(accesses, 0, sizeof accesses);
    gridDim = {blocks[0], blocks[1], blocks[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
            for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++) {
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
                    run(*launch);
                }
            }
        }
    }
    return misaligned;
}

// How often the last launch accessed so many bytes at once.
extern "C" u32 host_accesses(u32 bytes) { return accesses[bytes]; }

// Where the fields of Launch lie, in order, and its size last.
extern "C" void host_layout(u32 *at) {
#define AT(FIELD) offsetof(Launch, FIELD)
    const std::size_t fields[] = {
        AT(source), AT(out), AT(row_bytes), AT(skip), AT(rows),
        AT(cols), AT(out_start), AT(out_stride), AT(dtype), AT(transpose),
        AT(has_scale), AT(has_add), AT(scale), AT(add), AT(counts),
        sizeof(Launch),
    };
    for (std::size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        at[i] = static_cast<u32>(fields[i]);
    }
}

// How threads share the work, which the host's grids are computed for.
extern "C" void host_shape(u32 *threads, u32 *rounds) {
    *threads = THREADS;
    *rounds = ROUNDS;
}

// A band of at most 128 rows in fp8: codes, and a scale per 128 columns.
extern "C" void host_fp8(const float *values, u64 rows, u64 cols, u8 *codes, float *scales) {
    for (u64 start = 0; start < cols; start += 128) {
        const u64 end = start + 128 < cols ? start + 128 : cols;
        u32 largest = 0;
        for (u64 row = 0; row < rows; row++) {
            for (u64 col = start; col < end; col++) {
                largest = raise(largest, values[row * cols + col]);
            }
        }
        const float scale = scales[start / 128] = fp8_scale(largest);
        for (u64 row = 0; row < rows; row++) {
            u64 at = row * cols + start;
            const u64 stop = row * cols + end;
            for (; at + 8 <= stop; at += 8) {
                u32 words[2];
                fp8_codes(values + at, scale, words);
                std::memcpy(codes + at, words, sizeof words);
            }
            for (; at < stop; at++) {
                codes[at] = static_cast<u8>(fp8_code(values[at], scale));
            }
        }
    }
}

// Blocks of sixteen values in nvfp4.
extern "C" void host_nvfp4(const float *values, u64 blocks, float scale_2, int searched, u8 *packed, u8 *scales) {
    for (u64 i = 0; i < blocks; i++) {
        const Sixteen block = (searched ? nvfp4_searched : nvfp4_block)(values + 16 * i, scale_2);
        std::memcpy(packed + 8 * i, block.words, sizeof block.words);
        scales[i] = static_cast<u8>(block.scale);
    }
}

// The weight_scale_2 of some values.
extern "C" float host_nvfp4_scale_2(const float *values, u64 count) {
    u32 largest = 0;
    for (u64 i = 0; i < count; i++) {
        largest = raise(largest, values[i]);
    }
    return nvfp4_scale_2(largest);
}
