// Sum of squares in one read.
#include "../native.h"

namespace {

using namespace dsx;

// A block is added up in 64 lanes of float, which then go to double: the same lanes whatever the registers' width.
// Blocks lie on a grid that does not depend on the number of threads, and their sums are added in order.
constexpr int64_t BLOCK = 4096;
constexpr int64_t LANES = 64;

template <class W, int BYTES> struct Lanes {
    typedef W Vector __attribute__((vector_size(BYTES)));
    typedef uint32_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int64_t WIDTH = BYTES / sizeof(W), COUNT = LANES / WIDTH;
    Vector sums[COUNT] = {};

    DSX_INLINE void add(const W* values) {
#pragma GCC unroll 16
        for (int64_t number = 0; number < COUNT; number++) {
            Vector x;
            std::memcpy(&x, values + number * WIDTH, sizeof x);
            sums[number] += x * x;
        }
    }

    // Two neighbours share 32 bits: one is widened by a shift, the other by a mask.
    DSX_INLINE void add(const bf16* values) {
#pragma GCC unroll 16
        for (int64_t number = 0; number < COUNT; number += 2) {
            Bits pairs;
            std::memcpy(&pairs, values + number * WIDTH, sizeof pairs);
            const Vector one = bit_cast<Vector>(pairs << 16), other = bit_cast<Vector>(pairs & 0xffff0000u);
            sums[number] += one * one;
            sums[number + 1] += other * other;
        }
    }

    DSX_INLINE double total() const {
        double total = 0;
        for (int64_t number = 0; number < COUNT; number++)
            for (int64_t lane = 0; lane < WIDTH; lane++) total += double(sums[number][lane]);
        return total;
    }
};

template <class T> struct Squares {
    using W = typename wide<T>::type;
    const T* values;
    int64_t count;
    double* sums;

    template <int BYTES> DSX_INLINE void operator()(int64_t begin, int64_t end, Width<BYTES>) const {
        // Blocks from two places take turns by lines: a core that reads at one place waits for memory more often.
        const int64_t half = (end - begin) / 2;
        int64_t block = begin;
        if constexpr (!std::is_same<T, f16>::value) {
            for (; block + 1 < begin + half; block++) {  // the very last block may not be whole
                const T* one = values + block * BLOCK;
                const T* other = one + half * BLOCK;
                Lanes<W, BYTES> lanes, more;
                for (int64_t at = 0; at < BLOCK; at += LANES) {
                    lanes.add(one + at);
                    more.add(other + at);
                }
                sums[block] = lanes.total();
                sums[block + half] = more.total();
            }
            for (int64_t rest = block; rest < begin + half; rest++) single<BYTES>(rest);
            block += half;
        }
        for (; block < end; block++) single<BYTES>(block);
    }

    template <int BYTES> DSX_INLINE void single(int64_t block) const {
        const int64_t at = block * BLOCK, length = std::min(BLOCK, count - at);
        if constexpr (std::is_same<T, f16>::value) {
            alignas(64) float widened[BLOCK];
            widen(values + at, widened, length);
            sums[block] = sum<BYTES>(widened, length);
        } else {
            sums[block] = sum<BYTES>(values + at, length);
        }
    }

    template <int BYTES, class V> static DSX_INLINE double sum(const V* values, int64_t count) {
        Lanes<W, BYTES> lanes;
        int64_t at = 0;
        for (; at + LANES <= count; at += LANES) lanes.add(values + at);
        double rest = 0;
        for (; at < count; at++) {
            const W x = widen(values[at]);
            rest += double(W(x * x));
        }
        return lanes.total() + rest;
    }
};

}  // namespace

// Blocks whose sums the caller gives room for.
DSX_API int64_t dsx_squares_blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// values: `count` of `type`; sums: room for dsx_squares_blocks(count); returns the sum of squares.
DSX_API double dsx_squares(const void* values, int32_t type, int64_t count, double* sums, int32_t threads) {
    const int64_t blocks = dsx_squares_blocks(count);
    with_type(type, [&](auto tag) {
        using T = decltype(tag);
        for_each(blocks, threads, 8, Squares<T>{static_cast<const T*>(values), count, sums});
    });
    double total = 0;
    for (int64_t block = 0; block < blocks; block++) total += sums[block];
    return total;
}
