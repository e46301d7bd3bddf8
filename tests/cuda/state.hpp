// The double's state, and what its kernels may reach: their code is included here, between those of the double.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

// ---- What the kernels need

static void check_access(const void *address, std::size_t bytes);
#define BEFORE_ACCESS(address, bytes) check_access(address, bytes)
#define __global__
#define __launch_bounds__(...)

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;

static void atomicAdd(unsigned long long *to, unsigned long long value) {
    check_access(to, sizeof *to);
    *to += value;
}

static void atomicMax(unsigned *to, unsigned value) {
    check_access(to, sizeof *to);
    *to = *to < value ? value : *to;
}

#include "../../kernels/kernels.cu"

// A kernel takes one of two arguments.
struct Named {
    const char *name;
    void (*decode)(Launch);
    void (*encode)(Encode);
};

#define DECODES(TYPE) {"ggshard_" #TYPE, ggshard_##TYPE, nullptr},
#define ENCODES(NAME) {#NAME, nullptr, NAME},
static Named KERNELS[] = {FOR_EACH_TYPE(DECODES) FOR_EACH_ENCODER(ENCODES)};

// ---- State

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_FOUND = 500, LOST = 719 };

[[noreturn]] static void misuse(const char *what) {
    std::fprintf(stderr, "driver double: misuse: %s\n", what);
    std::abort();
}

struct Context {
    int device = 0, retained = 0;
    bool lost = false;
};

struct Stream {
    Context *context;
    std::deque<std::function<void()>> work;
    std::uint64_t enqueued = 0, executed = 0;
};

struct Event {
    Context *context;
    Stream *stream = nullptr;
    std::uint64_t position = 0;
};

struct Allocation {
    std::size_t bytes;
    Context *context;
};

struct Module {
    Context *context;
};

static std::recursive_mutex mutex;
static bool initialised = false;
static Context contexts[8];
static thread_local Context *current = nullptr;
static std::map<std::uintptr_t, Allocation> device_memory, pinned_memory;
static std::set<Stream *> streams;
static std::set<Event *> events;
static std::set<Module *> modules;
static std::map<std::string, std::uint64_t> counts;

static std::string setting(const char *name) {
    const char *all = std::getenv("GGSHARD_DOUBLE");
    const std::string text = std::string(",") + (all ? all : "") + ",", key = std::string(",") + name + "=";
    const auto at = text.find(key);
    return at == std::string::npos ? "" : text.substr(at + key.size(), text.find(',', at + 1) - at - key.size());
}

static std::uint64_t number(const char *name, std::uint64_t otherwise) {
    const std::string value = setting(name);
    return value.empty() ? otherwise : std::strtoull(value.c_str(), nullptr, 10);
}

// Whether this is the call of that name that a setting makes fail.
static bool fails(const char *name) { return ++counts[name] == number(name, 0); }

static void most(const char *name, std::uint64_t value) {
    if (value > counts[name]) {
        counts[name] = value;
    }
}

static std::size_t allocated(const std::map<std::uintptr_t, Allocation> &memory, const Context *context) {
    std::size_t bytes = 0;
    for (const auto &[start, allocation] : memory) {
        bytes += !context || allocation.context == context ? allocation.bytes : 0;
    }
    return bytes;
}

static bool within(const std::map<std::uintptr_t, Allocation> &memory, const void *address, std::size_t bytes,
                   const Context *context) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    auto next = memory.upper_bound(at);
    if (next == memory.begin()) {
        return false;
    }
    --next;
    return at - next->first <= next->second.bytes && bytes <= next->second.bytes - (at - next->first) &&
           (!context || next->second.context == context);
}

// A range of memory that the running kernel was given: all of an allocation, or a place in one.
struct Range {
    std::uintptr_t start, end;
};
static std::vector<Range> given;

// Where this library begins and ends in memory, as the linker says: the kernels' tables are in it.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

static void check_access(const void *address, std::size_t bytes) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const auto in = [=](std::uintptr_t start, std::uintptr_t end) { return start <= at && at + bytes <= end; };
    bool allowed = in(reinterpret_cast<std::uintptr_t>(&__ehdr_start), reinterpret_cast<std::uintptr_t>(&_end));
    for (const Range &range : given) {
        allowed = allowed || in(range.start, range.end);
    }
    if (!allowed) {
        misuse("a kernel reaches beyond the memory that it was given");
    }
    if (at % bytes != 0 && bytes <= 16) {
        misuse("a kernel's access is not aligned");
    }
}

// Gives the running kernel the allocation of a context that an address is in.
static void give(const void *address, const Context *context) {
    if (!within(device_memory, address, 1, context)) {
        misuse("a kernel is given memory that is not this device's");
    }
    const auto next = --device_memory.upper_bound(reinterpret_cast<std::uintptr_t>(address));
    given.push_back({next->first, next->first + next->second.bytes});
}

// Gives it so many bytes alone. None are given at any address.
static void give(const void *address, std::size_t bytes, const Context *context) {
    if (bytes > 0 && !within(device_memory, address, bytes, context)) {
        misuse("a kernel is given memory that is not this device's");
    }
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    given.push_back({start, start + bytes});
}

// What an encoding kernel is given: no more than it may use.
static void give(const std::string &kernel, const Encode &encode, const Context *context) {
    const std::size_t blocks = (encode.rows + 127) / 128 * ((encode.cols + 127) / 128), all = encode.rows * encode.cols;
    const bool amax = kernel == "ggshard_amax", fp8 = kernel == "ggshard_fp8", sum = kernel == "ggshard_fp8_sum";
    const bool measure = kernel == "ggshard_fp8_measure", nvfp4 = !amax && !fp8 && !sum && !measure;
    give(encode.values, sum ? 0 : 4 * ((encode.rows - 1) * encode.stride + encode.cols), context);
    give(encode.codes, fp8 || measure ? all : nvfp4 ? all / 2 : 0, context);
    give(encode.scales, fp8 || measure ? 4 * blocks : nvfp4 ? all / 16 : 0, context);
    give(encode.largest, amax && encode.whole ? 4 : amax || fp8 ? 4 * blocks : 0, context);
    give(encode.sums, measure || sum ? 256 * blocks : 0, context);
    give(encode.found, amax ? 0 : SLOTS * sizeof(Found), context);
}
