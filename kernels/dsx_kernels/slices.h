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

constexpr int64_t BLOCK = 1024;

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

// Calls `body.block(at, count)`, always inline, for every block of a range.
template <class Body> struct Blocks {
    Body body;

    template <class Any> DSX_INLINE void operator()(int64_t begin, int64_t end, Any) const {
        for (int64_t at = begin; at < end; at += BLOCK) body.block(at, std::min(BLOCK, end - at));
    }
};

constexpr int64_t GRAIN = 1 << 15;

template <class Body> void for_each_block(int64_t count, int32_t threads, const Body& body) {
    for_each(count, threads, GRAIN, Blocks<Body>{body});
}

}  // namespace dsx
