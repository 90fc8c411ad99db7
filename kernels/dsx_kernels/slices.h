// Elementwise operations on slices of any floating dtype, a block at a time.
//
// A loop computes on blocks of float, or of double if the weights are double. What lies in memory in another dtype
// goes through a buffer in the first-level cache: each dtype is converted by one plain vector loop, and no operation
// is compiled for every combination.
#pragma once

#include "native.h"

namespace dsx {

// `type` of data, from the first element that an operation works on.
struct Slice {
    void* data;
    int32_t type;
};

constexpr int64_t BLOCK = 1024;  // elements at the most; fewer where many tensors are to share the first-level cache

// Bytes of an element, by its dtype's code.
constexpr int64_t ITEM[] = {4, 2, 2, 8};

// A slice that an operation writes and does not read.
struct Output : Slice {
    bool past;  // its lines go past the caches
};

// Bytes of tensors from which a call's outputs go past the caches: none holds them, so that nothing that is written is
// still there when somebody reads it.
constexpr int64_t BEYOND = int64_t(32) << 20;

// The last of `number` slices of `count` elements, which are what a call reads and writes.
inline Output output(const Slice* slices, int number, int64_t count) {
    int64_t bytes = 0;
    for (int at = 0; at < number; at++) bytes += slices[at].data ? count * ITEM[slices[at].type] : 0;
    const Slice& last = slices[number - 1];
    return {last, bytes >= BEYOND && reinterpret_cast<uintptr_t>(last.data) % 64 == 0};
}

// The elements [at, at + count) as W: where they lie if that is their type, else widened into `buffer`.
template <class W> DSX_INLINE W* read(const Slice& slice, int64_t at, int64_t count, W* buffer) {
    W* found = buffer;
    with_type(slice.type, [&](auto tag) __attribute__((always_inline)) {
        using T = decltype(tag);
        T* from = static_cast<T*>(slice.data) + at;
        if constexpr (std::is_same<T, W>::value) {
            found = from;
        } else if constexpr (std::is_same<T, f16>::value && std::is_same<W, float>::value) {
            widen(from, buffer, count);
        } else {
            DSX_INDEPENDENT
            for (int64_t i = 0; i < count; i++) buffer[i] = W(widen(from[i]));
        }
    });
    return found;
}

// Puts values, rounded to nearest, into the elements [at, at + count); nothing to do if they lie there already.
template <class W> DSX_INLINE void write(const Slice& slice, int64_t at, int64_t count, const W* values) {
    with_type(slice.type, [&](auto tag) __attribute__((always_inline)) {
        using T = decltype(tag);
        T* to = static_cast<T*>(slice.data) + at;
        if (static_cast<const void*>(to) == values) return;
        if constexpr (std::is_same<T, f16>::value && std::is_same<W, float>::value) {
            narrow(values, to, count);
        } else {
            DSX_INDEPENDENT
            for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(values[i]);
        }
    });
}

// The same for an output; `at` is a multiple of 64 elements.
template <class W> DSX_INLINE void write(const Output& output, int64_t at, int64_t count, const W* values) {
    const Slice& slice = output;
    if (!output.past) return write(slice, at, count, values);
    char* to = static_cast<char*>(slice.data) + at * ITEM[slice.type];
    if (to == reinterpret_cast<const char*>(values)) return;
    if (slice.type == (sizeof(W) == 8 ? FLOAT64 : FLOAT32)) return stream(values, to, count * sizeof(W));
    int64_t done = 0;
    if constexpr (sizeof(W) == 4)
        if (slice.type == BFLOAT16) done = stream_rounded(values, reinterpret_cast<bf16*>(to), count);
    if (done == count) return;
    alignas(64) char room[BLOCK * sizeof(double)];
    write(Slice{room, slice.type}, 0, count - done, values + done);
    stream(room, to + done * ITEM[slice.type], (count - done) * ITEM[slice.type]);
}

// Calls `body.block(at, count)`, always inline, for every block of a range, of `body.STEP` elements.
template <class Body> struct Blocks {
    Body body;

    template <class Any> DSX_INLINE void operator()(int64_t begin, int64_t end, Any) const {
        for (int64_t at = begin; at < end; at += Body::STEP) body.block(at, std::min(Body::STEP, end - at));
        settle();
    }
};

constexpr int64_t GRAIN = 1 << 15;

template <class Body> void for_each_block(int64_t count, int32_t threads, const Body& body) {
    for_each(count, threads, GRAIN, Blocks<Body>{body});
}

}  // namespace dsx
