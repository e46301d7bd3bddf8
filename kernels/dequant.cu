// One kernel per type, `ggshard_<TYPE>`: decodes a rectangle of a tensor and puts every element where it belongs in the
// output, so that the device gives finished pieces.
//
// A thread decodes eight consecutive weights of a row and stores 16 bytes (32 for f32) where all eight are wanted and
// lie together at a multiple of 16 bytes, else one element after the other. No thread needs another, and there is no
// shared memory.
//
// Blocks have THREADS threads, in two dimensions. Plain: x runs over the groups of eight of a row, y over rows.
// Transposed: x runs over rows, 32 at least, so that a warp's elements lie together in the output, and y over groups.
// The grid must cover x; y takes strides of the grid, whose height is limited. src/cuda/launch.rs computes both.

#include "convert.cuh"
#include "dequant.cuh"

// What a kernel is given; src/cuda/launch.rs has the same struct.
struct Launch {
    const u8 *source; // row r begins at source + r * row_bytes, at a block
    u8 *out;          // a multiple of 16
    u64 row_bytes;    // from one row's first block to the next's
    u64 skip;         // elements of a row's first block before the first wanted column
    u64 rows, cols;   // the wanted rectangle; rows, and skip + cols, below 2^31
    u64 out_start;    // element of `out` that takes (0, 0)
    u64 out_stride;   // elements between rows of the output (plain) or between columns (transposed)
    u32 dtype;        // TO_BF16, TO_F16 or TO_F32
    u32 transpose;    // nonzero: (r, c) goes to out_start + c * out_stride + r
    u32 has_scale, has_add;
    float scale, add; // value * scale, then + add, each rounded
    u64 *counts;      // NaN, infinite, overflowing; added to
};

constexpr u32 THREADS = 256;
// Groups that a thread decodes before it takes the next stride in y.
constexpr u32 ROUNDS = 4;
// Blocks that a multiprocessor can hold at least, so that registers suffice and none is spilled.
constexpr u32 RESIDENT = 5;

// The eight weights of a block's group. Lanes from `end` on are not in the row, which only matters where a weight is a
// block.
template <class T> DEVICE void decode(const u8 *block, u32 group, u32 end, float *values) {
    if constexpr (T::WEIGHTS == 1) {
        if (end < 8) {
            for (u32 i = 0; i < 8; i++) {
                values[i] = i < end ? T::dq1(block + i * T::BYTES) : 0;
            }
            return;
        }
    }
    T::dq8(block, group, values);
}

// Eight finite values that lie together at a multiple of 16 bytes.
DEVICE void place_together(u8 *to, const float *values, u32 dtype) {
    const Outputs outputs = narrow(values, dtype);
    const u32 *const words = outputs.words;
    store(to, words[0], words[1], words[2], words[3]);
    if (dtype == TO_F32) {
        store(to + 16, words[4], words[5], words[6], words[7]);
    }
}

// Lanes begin..end of any values, lane i at to + i * step. Counts what is not finite.
DEVICE void place_each(const Launch &launch, float *values, bool unify, u8 *to, u64 step, u32 begin, u32 end) {
    Counts counts = {0, 0, 0};
#pragma unroll 1
    for (u32 i = 0; i < end; i++) {
        if (begin <= i) {
            const u32 dtype = here(launch.dtype), word = careful(values[0], dtype, unify, counts);
            if (dtype == TO_F32) {
                store(to, word);
            } else {
                store(to, static_cast<u16>(word));
            }
        }
        to += step;
        // Moved up rather than indexed: registers have no index.
        for (u32 j = 0; j < 7; j++) {
            values[j] = values[j + 1];
        }
    }
    if (counts.nan) {
        atomicAdd(launch.counts, static_cast<u64>(counts.nan));
    }
    if (counts.inf) {
        atomicAdd(launch.counts + 1, static_cast<u64>(counts.inf));
    }
    if (counts.overflow) {
        atomicAdd(launch.counts + 2, static_cast<u64>(counts.overflow));
    }
}

// Each rounded, as the CPU engine does. To add -0 changes nothing.
DEVICE void apply(const Launch &launch, float *values) {
    const float scale = launch.has_scale ? launch.scale : 1.0f, summand = launch.has_add ? launch.add : -0.0f;
    for (u32 i = 0; i < 8; i++) {
        values[i] = add(mul(values[i], scale), summand);
    }
}

template <class T> DEVICE void run(const Launch &launch) {
    const u32 skip = static_cast<u32>(launch.skip), cols = static_cast<u32>(launch.cols);
    const u32 rows = static_cast<u32>(launch.rows);
    const u32 first_group = skip / 8, groups = (skip + cols + 7) / 8 - first_group;
    const bool turned = launch.transpose != 0, changed = launch.has_scale | launch.has_add;
    const u32 width = turned ? rows : groups, height = turned ? groups : rows;
    const u32 x = blockIdx.x * (blockDim.x * ROUNDS) + threadIdx.x;
    if (x >= width) {
        return;
    }

    // What changes from round to round. Rounds are whole blocks apart, so that a thread has the same group of each.
    constexpr bool SINGLE = T::WEIGHTS == 1;
    constexpr u32 GROUPS = SINGLE ? 1 : T::WEIGHTS / 8, GROUPS_BYTES = SINGLE ? 8 * T::BYTES : T::BYTES;
    const u32 size = launch.dtype == TO_F32 ? 4 : 2;
    const u64 source_step = turned ? blockDim.x * launch.row_bytes : blockDim.x / GROUPS * GROUPS_BYTES;
    const u32 column_step = turned ? 0 : 8 * blockDim.x, to_step = blockDim.x * (turned ? size : 8 * size);
    const u64 step = turned ? launch.out_stride * size : size;

    for (u32 y = blockIdx.y * blockDim.y + threadIdx.y; y < height; y += gridDim.y * blockDim.y) {
        const u32 row = turned ? x : y, group = first_group + (turned ? y : x), part = here(group % GROUPS);
        const u8 *source = launch.source + row * launch.row_bytes + static_cast<u64>(group / GROUPS) * GROUPS_BYTES;
        // The column of lane 0: negative in the first group if that begins before the first wanted column.
        int column = static_cast<int>(8 * group - skip);
        u8 *to = launch.out + (launch.out_start + (turned ? row : row * launch.out_stride)) * size;
        to += column * static_cast<long long>(step);
        u32 left = width - x;
#pragma unroll 1
        for (u32 round = 0; round < ROUNDS; round++) {
            const u32 begin = max(-column, 0), end = min(cols - column, 8u);
            float values[8];
            decode<T>(source, part, end, values);
            if (changed) {
                apply(launch, values);
            }
            const bool together = !turned && end - begin == 8 && (reinterpret_cast<u64>(to) & 15) == 0;
            if (together && all_finite(values, launch.dtype)) {
                place_together(to, values, launch.dtype);
            } else {
                place_each(launch, values, T::COMPUTES || changed, to, step, begin, end);
            }
            if (left <= blockDim.x) {
                break;
            }
            left -= blockDim.x;
            source += source_step;
            column += column_step;
            to += to_step;
        }
    }
}

#define KERNEL(TYPE)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) ggshard_##TYPE(const Launch launch) {              \
        run<TYPE>(launch);                                                                                             \
    }

FOR_EACH_TYPE(KERNEL)
