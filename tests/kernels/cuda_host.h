// Runs CUDA kernels on the CPU, for tests: each thread of a block has a stack of its own, and they take turns where the
// threads of a warp exchange values. An access that is not aligned is an error, as on a GPU. It finds no races.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct Index {
    unsigned x = 0;
};
inline Index blockIdx, threadIdx;

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

namespace host {

constexpr int WARP = 32;
constexpr size_t STACK = 1 << 16;

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool ended = true;
};

// Where the threads of a warp meet.
struct Warp {
    std::array<uint64_t, WARP> values;
    int living = 0, waiting = 0;
    unsigned meetings = 0;
};

inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline ucontext_t scheduler;
inline void (*body)(const void*);
inline const void* call;
inline std::string failure;

inline Warp& warp() { return warps[threadIdx.x / WARP]; }

// The others go on, until it is this thread's turn again.
inline void pass() {
    const unsigned mine = threadIdx.x;
    swapcontext(&threads[mine].context, &scheduler);
    threadIdx.x = mine;
}

// All threads that are left must have come before any goes on.
inline void let_go(Warp& here) {
    if (here.waiting < here.living) return;
    here.waiting = 0;
    here.meetings++;
}

inline void meet() {
    Warp& here = warp();
    const unsigned meeting = here.meetings;
    here.waiting++;
    let_go(here);
    while (here.meetings == meeting) pass();
}

inline void run_thread() {
    try {
        body(call);
    } catch (const std::exception& error) {
        failure = error.what();
    }
    threads[threadIdx.x].ended = true;
    warp().living--;
    let_go(warp());
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void run_block(unsigned count) {
    warps.assign((count + WARP - 1) / WARP, Warp());
    for (unsigned number = 0; number < count; number++) {
        Thread& thread = threads[number];
        thread.ended = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
        warps[number / WARP].living++;
    }
    for (bool living = true; living;) {
        living = false;
        for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) {
            const unsigned number = threadIdx.x;
            if (threads[number].ended) continue;
            swapcontext(&scheduler, &threads[number].context);
            threadIdx.x = number;
            living = living || !threads[number].ended;
        }
    }
}

template <class T> T exchange(T value, int source, int width) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "of one register or two");
    const int lane = int(threadIdx.x) % WARP;
    Warp& here = warp();
    std::memcpy(&here.values[lane], &value, sizeof value);
    meet();
    std::memcpy(&value, &here.values[lane / width * width + source % width], sizeof value);
    meet();
    return value;
}

template <class... A, size_t... PLACES>
std::string start(
    void (*kernel)(A...), unsigned blocks, unsigned count, void** arguments, std::index_sequence<PLACES...>
) {
    auto called = [&] { kernel(*static_cast<A*>(arguments[PLACES])...); };
    threads.resize(count);
    call = &called;
    body = [](const void* what) { (*static_cast<const decltype(called)*>(what))(); };
    failure.clear();
    for (blockIdx.x = 0; blockIdx.x < blocks && failure.empty(); blockIdx.x++) run_block(count);
    return failure;
}

// Runs a kernel with pointers to its arguments; returns what went wrong, or nothing.
template <class... A> std::string start(void (*kernel)(A...), unsigned blocks, unsigned count, void** arguments) {
    return start(kernel, blocks, count, arguments, std::index_sequence_for<A...>());
}

inline void must_be_aligned(const uint4* place) {
    if (reinterpret_cast<uintptr_t>(place) % sizeof(uint4)) throw std::runtime_error("an access is not aligned");
}

}  // namespace host

inline uint4 __ldca(const uint4* from) {
    host::must_be_aligned(from);
    return *from;
}

inline void __stwb(uint4* to, uint4 value) {
    host::must_be_aligned(to);
    *to = value;
}

template <class T> T __shfl_sync(unsigned, T value, int source, int width = host::WARP) {
    return host::exchange(value, source, width);
}
