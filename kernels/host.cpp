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
static void atomicMax(unsigned *largest, unsigned value) { *largest = *largest < value ? value : *largest; }

#include "kernels.cu"

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

// Runs all threads of a launch, one after the other, from the first or from the last on: no kernel depends on the order.
template <class T> static int run_all(void (*run)(T), const u32 *blocks, const u32 *threads, const T &launch, int backwards) {
    if (run == nullptr) {
        return -1;
    }
    misaligned = 0;
    std::memset(accesses, 0, sizeof accesses);
    gridDim = {blocks[0], blocks[1], blocks[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    const u64 in_block = static_cast<u64>(threads[0]) * threads[1], all = in_block * blocks[0] * blocks[1];
    for (u64 i = 0; i < all; i++) {
        const u64 number = backwards ? all - 1 - i : i, block = number / in_block, thread = number % in_block;
        blockIdx = {static_cast<u32>(block % blocks[0]), static_cast<u32>(block / blocks[0]), 0};
        threadIdx = {static_cast<u32>(thread % threads[0]), static_cast<u32>(thread / threads[0]), 0};
        run(launch);
    }
    return misaligned;
}

// Runs a decoding kernel. Gives the number of misaligned accesses, or -1 for an unknown kernel.
extern "C" int host_launch(const char *kernel, const u32 *blocks, const u32 *threads, const Launch *launch) {
    void (*run)(Launch) = nullptr;
#define FIND(TYPE)                                                                                                     \
    if (std::strcmp(kernel, "ggshard_" #TYPE) == 0) {                                                                  \
        run = ggshard_##TYPE;                                                                                          \
    }
    FOR_EACH_TYPE(FIND)
    return run_all(run, blocks, threads, *launch, 0);
}

// Runs an encoding kernel, likewise.
extern "C" int host_encode(const char *kernel, const u32 *blocks, const u32 *threads, const Encode *encode, int backwards) {
    void (*run)(Encode) = nullptr;
#define FIND_ENCODER(NAME)                                                                                             \
    if (std::strcmp(kernel, #NAME) == 0) {                                                                             \
        run = NAME;                                                                                                    \
    }
    FOR_EACH_ENCODER(FIND_ENCODER)
    return run_all(run, blocks, threads, *encode, backwards);
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

// Where the fields of Encode lie, its size, then those of Found and its size.
extern "C" void host_encode_layout(u32 *at) {
#define AT_ENCODE(FIELD) offsetof(Encode, FIELD)
#define AT_FOUND(FIELD) offsetof(Found, FIELD)
    const std::size_t fields[] = {
        AT_ENCODE(values), AT_ENCODE(stride), AT_ENCODE(rows), AT_ENCODE(cols), AT_ENCODE(codes), AT_ENCODE(scales),
        AT_ENCODE(largest), AT_ENCODE(sums), AT_ENCODE(found), AT_ENCODE(whole), AT_ENCODE(scale_2), sizeof(Encode),
        AT_FOUND(errors), AT_FOUND(values), AT_FOUND(largest_error), AT_FOUND(largest_value), AT_FOUND(nan),
        AT_FOUND(inf), sizeof(Found),
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

// The same for encoding: threads of a block, rows of a strip, and how many of Found there are.
extern "C" void host_encode_shape(u32 *threads, u32 *strip, u32 *slots) {
    *threads = ENCODE_THREADS;
    *strip = STRIP;
    *slots = SLOTS;
}

// Quotients of values and as many divisors.
extern "C" void host_divide(const float *values, const float *divisors, u64 count, float *quotients) {
    for (u64 i = 0; i < count; i++) {
        quotients[i] = divide(values[i], divisor(divisors[i]));
    }
}
