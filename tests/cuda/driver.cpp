// A test double of the CUDA driver's library: devices whose memory is the host's, and whose kernels are those of
// kernels/kernels.cu, compiled for the host. It has the functions that src/cuda/driver.rs lists, and no others.
//
// It is stricter than a driver. Nothing runs when it is enqueued: a stream's work runs when somebody waits for it, in the
// stream's order and behind the events that it waits for, so that a wait which is missing gives wrong bytes. Every copy and
// every access of a kernel must lie in memory that is allocated, on the stream's device. Misuse ends the process (abort), and
// so does whatever was not freed when it exits (status 99).
//
// GGSHARD_DOUBLE holds settings, `name=value` with commas between:
//
//   devices=N        number of devices (1)              capability=A.B   their architecture (9.0)
//   version=N        driver version, as CUDA gives it (12080)
//   init=N           cuInit gives this code             load=N           cuModuleLoadData gives this code
//   device_bytes=N   memory of a device                 pinned_bytes=N   pinned memory, in all
//   oom_device=N     the N-th allocation on a device fails, and oom_pinned=N the N-th pinned one
//   launch=N         the N-th launch fails, copy_in=N and copy_out=N that copy, when it runs; the device is lost then
//   report=FILE      where `name value` lines go at exit

#include "state.hpp"

// Runs a stream's work up to a position.
static void run(Stream *stream, std::uint64_t position) {
    if (!streams.count(stream)) {
        misuse("a stream that does not exist is waited for");
    }
    while (stream->executed < position) {
        auto work = std::move(stream->work.front());
        stream->work.pop_front();
        stream->executed++;
        work();
    }
}

static void enqueue(Stream *stream, std::function<void()> work) {
    stream->work.push_back(std::move(work));
    stream->enqueued++;
}

// What every call begins with.
#define ENTER                                                                                                           \
    const std::lock_guard<std::recursive_mutex> guard(mutex);                                                           \
    if (!initialised) {                                                                                                 \
        misuse("a call before cuInit");                                                                                 \
    }

#define ENTER_CONTEXT                                                                                                   \
    ENTER                                                                                                               \
    if (!current || current->retained == 0) {                                                                           \
        misuse("a call without a context");                                                                             \
    }                                                                                                                   \
    if (current->lost) {                                                                                                \
        return LOST;                                                                                                    \
    }

static int check_stream(Stream *stream) {
    if (!streams.count(stream)) {
        misuse("a stream that does not exist");
    }
    if (stream->context != current) {
        misuse("a stream of another device");
    }
    return stream->context->lost ? LOST : SUCCESS;
}

struct AtExit {
    ~AtExit() {
        const std::string report = setting("report");
        if (!report.empty()) {
            if (FILE *file = std::fopen(report.c_str(), "w")) {
                for (const auto &[name, count] : counts) {
                    std::fprintf(file, "%s %llu\n", name.c_str(), static_cast<unsigned long long>(count));
                }
                std::fclose(file);
            }
        }
        std::size_t left = device_memory.size() + pinned_memory.size() + streams.size() + events.size() + modules.size();
        for (const Context &context : contexts) {
            left += context.retained;
        }
        if (left > 0) {
            std::fprintf(stderr, "driver double: %zu things were not freed\n", left);
            _exit(99);
        }
    }
};
static AtExit at_exit;

// ---- The driver's functions

extern "C" {

int cuInit(unsigned) {
    const std::lock_guard<std::recursive_mutex> guard(mutex);
    const int code = static_cast<int>(number("init", SUCCESS));
    if (code == SUCCESS && number("devices", 1) == 0) {
        return NO_DEVICE;
    }
    initialised = code == SUCCESS;
    return code;
}

int cuDriverGetVersion(int *version) {
    *version = static_cast<int>(number("version", 12080));
    return SUCCESS;
}

int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case 200: *name = "CUDA_ERROR_INVALID_IMAGE"; return SUCCESS;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; return SUCCESS;
    case LOST: *name = "CUDA_ERROR_LAUNCH_FAILED"; return SUCCESS;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return SUCCESS;
    default: *name = nullptr; return INVALID_VALUE;
    }
}

int cuDeviceGetCount(int *count) {
    ENTER
    *count = static_cast<int>(number("devices", 1));
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER
    if (ordinal < 0 || static_cast<std::uint64_t>(ordinal) >= number("devices", 1)) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int) {
    ENTER
    std::snprintf(name, static_cast<std::size_t>(length), "Double");
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER
    const std::string text = setting("capability");
    int major = 9, minor = 0;
    if (!text.empty() && std::sscanf(text.c_str(), "%d.%d", &major, &minor) != 2) {
        misuse("capability is A.B");
    }
    if (attribute != 75 && attribute != 76) {
        misuse("an attribute that has no number here");
    }
    *value = attribute == 75 ? major : minor;
    return SUCCESS;
}

int cuDeviceTotalMem_v2(std::size_t *bytes, int) {
    ENTER
    *bytes = number("device_bytes", 1u << 30);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    ENTER
    *context = &contexts[device];
    (*context)->device = device;
    (*context)->retained++;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER
    if (contexts[device].retained == 0) {
        misuse("a context is released too often");
    }
    contexts[device].retained--;
    return SUCCESS;
}

int cuCtxSetCurrent(Context *context) {
    ENTER
    if (context && context->retained == 0) {
        misuse("a context that is not retained");
    }
    current = context;
    return SUCCESS;
}

int cuModuleLoadData(Module **module, const void *image) {
    ENTER_CONTEXT
    if (const auto code = number("load", 0)) {
        return static_cast<int>(code);
    }
    const char *text = static_cast<const char *>(image);
    if (std::memcmp(text, "\x7f"
                          "ELF",
                    4) != 0 &&
        !std::strstr(text, ".version")) {
        return 200;
    }
    *module = new Module{current};
    modules.insert(*module);
    return SUCCESS;
}

int cuModuleUnload(Module *module) {
    ENTER
    if (!modules.erase(module)) {
        misuse("a module is unloaded twice");
    }
    delete module;
    return SUCCESS;
}

int cuModuleGetFunction(Named **function, Module *module, const char *name) {
    ENTER_CONTEXT
    if (!modules.count(module)) {
        misuse("a module that is not loaded");
    }
    for (Named &kernel : KERNELS) {
        if (std::strcmp(kernel.name, name) == 0) {
            *function = &kernel;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int cuMemAlloc_v2(std::uint64_t *pointer, std::size_t bytes) {
    ENTER_CONTEXT
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    const std::size_t after = allocated(device_memory, current) + bytes;
    if (fails("oom_device") || after > number("device_bytes", 1u << 30)) {
        return OUT_OF_MEMORY;
    }
    most("most_device_bytes", after);
    void *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    // What nobody has written is no zero.
    std::memset(memory, 0xA5, bytes);
    *pointer = reinterpret_cast<std::uintptr_t>(memory);
    device_memory[*pointer] = {bytes, current};
    return SUCCESS;
}

int cuMemFree_v2(std::uint64_t pointer) {
    ENTER
    const auto found = device_memory.find(pointer);
    if (found == device_memory.end()) {
        misuse("device memory is freed that is not allocated");
    }
    std::memset(reinterpret_cast<void *>(pointer), 0x5A, found->second.bytes);
    std::free(reinterpret_cast<void *>(pointer));
    const bool lost = found->second.context->lost;
    device_memory.erase(found);
    return lost ? LOST : SUCCESS;
}

int cuMemHostAlloc(void **pointer, std::size_t bytes, unsigned flags) {
    ENTER_CONTEXT
    if (flags & 4) {
        misuse("write-combined memory, which is slow to read");
    }
    const std::size_t after = allocated(pinned_memory, nullptr) + bytes;
    if (fails("oom_pinned") || after > number("pinned_bytes", 1u << 30)) {
        return OUT_OF_MEMORY;
    }
    most("most_pinned_bytes", after);
    *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    pinned_memory[reinterpret_cast<std::uintptr_t>(*pointer)] = {bytes, current};
    return SUCCESS;
}

int cuMemFreeHost(void *pointer) {
    ENTER
    const auto found = pinned_memory.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == pinned_memory.end()) {
        misuse("pinned memory is freed that is not allocated");
    }
    std::memset(pointer, 0x5A, found->second.bytes);
    std::free(pointer);
    pinned_memory.erase(found);
    return SUCCESS;
}

// A copy, of which both sides are looked at when it is enqueued and again when it runs.
static int copy(void *to, const void *from, std::size_t bytes, Stream *stream, bool to_device, bool from_device,
                const char *name) {
    Context *const context = current;
    const auto look = [=] {
        if (!within(to_device ? device_memory : pinned_memory, to, bytes, to_device ? context : nullptr) ||
            !within(from_device ? device_memory : pinned_memory, from, bytes, from_device ? context : nullptr)) {
            misuse("a copy beyond what is allocated");
        }
    };
    if (const int code = check_stream(stream)) {
        return code;
    }
    look();
    enqueue(stream, [=] {
        if (fails(name)) {
            context->lost = true;
        }
        if (!context->lost) {
            look();
            std::memmove(to, from, bytes);
        }
    });
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void *from, std::size_t bytes, Stream *stream) {
    ENTER_CONTEXT
    return copy(reinterpret_cast<void *>(to), from, bytes, stream, true, false, "copy_in");
}

int cuMemcpyDtoHAsync_v2(void *to, std::uint64_t from, std::size_t bytes, Stream *stream) {
    ENTER_CONTEXT
    return copy(to, reinterpret_cast<const void *>(from), bytes, stream, false, true, "copy_out");
}

int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, Stream *stream) {
    ENTER_CONTEXT
    return copy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes, stream, true, true, "copy");
}

int cuMemcpyHtoD_v2(std::uint64_t to, const void *from, std::size_t bytes) {
    ENTER_CONTEXT
    if (!within(device_memory, reinterpret_cast<void *>(to), bytes, current)) {
        misuse("a copy beyond what is allocated");
    }
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, std::uint64_t from, std::size_t bytes) {
    ENTER_CONTEXT
    if (!within(device_memory, reinterpret_cast<const void *>(from), bytes, current)) {
        misuse("a copy beyond what is allocated");
    }
    std::memcpy(to, reinterpret_cast<const void *>(from), bytes);
    return SUCCESS;
}

int cuMemsetD8Async(std::uint64_t to, unsigned char value, std::size_t bytes, Stream *stream) {
    ENTER_CONTEXT
    if (const int code = check_stream(stream)) {
        return code;
    }
    Context *const context = current;
    enqueue(stream, [=] {
        if (!within(device_memory, reinterpret_cast<void *>(to), bytes, context)) {
            misuse("memory is set beyond what is allocated");
        }
        std::memset(reinterpret_cast<void *>(to), value, bytes);
    });
    return SUCCESS;
}

int cuStreamCreate(Stream **stream, unsigned) {
    ENTER_CONTEXT
    *stream = new Stream{current, {}, 0, 0};
    streams.insert(*stream);
    return SUCCESS;
}

int cuStreamDestroy_v2(Stream *stream) {
    ENTER
    run(stream, stream->enqueued);
    streams.erase(stream);
    delete stream;
    return SUCCESS;
}

int cuStreamSynchronize(Stream *stream) {
    ENTER_CONTEXT
    if (const int code = check_stream(stream)) {
        return code;
    }
    run(stream, stream->enqueued);
    return current->lost ? LOST : SUCCESS;
}

int cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    ENTER_CONTEXT
    if (const int code = check_stream(stream)) {
        return code;
    }
    if (!events.count(event)) {
        misuse("an event that does not exist");
    }
    // What was recorded last counts; an event that was not recorded is no reason to wait.
    if (Stream *const recorded = event->stream) {
        const auto position = event->position;
        enqueue(stream, [=] { run(recorded, position); });
    }
    return SUCCESS;
}

int cuEventCreate(Event **event, unsigned) {
    ENTER_CONTEXT
    *event = new Event{current};
    events.insert(*event);
    return SUCCESS;
}

int cuEventDestroy_v2(Event *event) {
    ENTER
    if (!events.erase(event)) {
        misuse("an event is destroyed twice");
    }
    delete event;
    return SUCCESS;
}

int cuEventRecord(Event *event, Stream *stream) {
    ENTER_CONTEXT
    if (const int code = check_stream(stream)) {
        return code;
    }
    if (event->context != stream->context) {
        misuse("an event of another device");
    }
    event->stream = stream;
    event->position = stream->enqueued;
    return SUCCESS;
}

int cuEventSynchronize(Event *event) {
    ENTER_CONTEXT
    if (event->stream) {
        run(event->stream, event->position);
    }
    return event->context->lost ? LOST : SUCCESS;
}

int cuLaunchKernel(Named *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, Stream *stream, void **parameters, void **) {
    ENTER_CONTEXT
    if (const int code = check_stream(stream)) {
        return code;
    }
    const Index grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || grid.y > 65535 || grid.z > 65535 ||
        block.x * block.y * block.z > (function->decode ? THREADS : ENCODE_THREADS)) {
        return INVALID_VALUE;
    }
    Launch launch{};
    Encode encode{};
    if (function->decode) {
        std::memcpy(&launch, parameters[0], sizeof launch);
    } else {
        std::memcpy(&encode, parameters[0], sizeof encode);
    }
    Context *const context = current;
    counts[std::string("device_") + std::to_string(context->device)]++;
    counts[function->name]++;
    enqueue(stream, [=] {
        if (fails("launch")) {
            context->lost = true;
        }
        if (context->lost) {
            return;
        }
        given.clear();
        if (function->decode) {
            give(launch.source, context);
            give(launch.out, context);
            give(launch.counts, 24, context);
        } else {
            give(function->name, encode, context);
        }
        blockDim = block;
        gridDim = grid;
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                for (threadIdx.y = 0; threadIdx.y < block.y; threadIdx.y++) {
                    for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++) {
                        if (function->decode) {
                            function->decode(launch);
                        } else {
                            function->encode(encode);
                        }
                    }
                }
            }
        }
    });
    return SUCCESS;
}

} // extern "C"
