// A mean of gradients over time, one pass.
#include "../slices.h"

namespace {

using namespace dsx;

template <class W, bool FACTOR> struct Momentum {
    Slice mean, gradient, factor;
    W multiplier, limit, take;
    static constexpr int64_t STEP = BLOCK;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[3][STEP];
        W* m = read(mean, at, count, room[0]);
        const W* g = read(gradient, at, count, room[1]);
        const W* f = FACTOR ? read(factor, at, count, room[2]) : nullptr;
        DSX_INDEPENDENT
        for (int64_t i = 0; i < count; i++) {
            W grad = clamped(g[i], multiplier, limit);
            if constexpr (FACTOR) grad *= f[i];
            m[i] = m[i] + take * (grad - m[i]);
        }
        write(mean, at, count, m);
    }
};

template <class W> void momentum(const Slice* s, const double* n, int64_t count, int32_t threads) {
    const W multiplier = W(n[0]), limit = W(n[1]), take = W(n[2]);
    if (s[2].data)
        for_each_block(count, threads, Momentum<W, true>{s[0], s[1], s[2], multiplier, limit, take});
    else
        for_each_block(count, threads, Momentum<W, false>{s[0], s[1], s[2], multiplier, limit, take});
}

}  // namespace

// slices: mean, gradient, factor (null: none); numbers: multiplier, limit, 1 - beta
DSX_API void dsx_momentum(const Slice* slices, const double* numbers, int64_t count, int32_t threads) {
    (slices[0].type == FLOAT64 ? momentum<double> : momentum<float>)(slices, numbers, count, threads);
}
