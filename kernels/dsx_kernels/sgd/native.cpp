// Stochastic gradient descent, one pass.
#include "../slices.h"
#include "update.h"

namespace {

using namespace dsx;

enum Look : int32_t { PLAIN = 0, MOMENTUM = 1, NESTEROV = 2 };

template <class W, Look LOOK> struct SGD {
    Slice gradient, master, buffer;
    Output param;
    SGDNumbers<W> numbers;
    static constexpr int64_t STEP = BLOCK / 4;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[3][STEP];
        const SGDNumbers<W> k = numbers;
        const W* g = read(gradient, at, count, room[0]);
        W* p = read(master, at, count, room[1]);
        W* b = LOOK == PLAIN ? nullptr : read(buffer, at, count, room[2]);
        DSX_INDEPENDENT
        for (int64_t i = 0; i < count; i++) {
            const SGDState<W> old{p[i], LOOK == PLAIN ? W(0) : b[i]};
            const SGDState<W> found = sgd_update<LOOK != PLAIN, LOOK == NESTEROV>(k, g[i], old);
            p[i] = found.weight;
            if constexpr (LOOK != PLAIN) b[i] = found.buffer;
        }
        write(master, at, count, p);
        if (LOOK != PLAIN) write(buffer, at, count, b);
        if (param.data) write(param, at, count, p);
    }
};

template <class W> void sgd(const Slice* s, const double* n, Look look, int64_t count, int32_t threads) {
    const SGDNumbers<W> k{W(n[0]), W(n[1]), W(n[2]), W(n[3]), W(n[4]), W(n[5]), W(n[6])};
    const Output param = output(s, 4, count);
    switch (look) {
    case PLAIN: return for_each_block(count, threads, SGD<W, PLAIN>{s[0], s[1], s[2], param, k});
    case MOMENTUM: return for_each_block(count, threads, SGD<W, MOMENTUM>{s[0], s[1], s[2], param, k});
    case NESTEROV: return for_each_block(count, threads, SGD<W, NESTEROV>{s[0], s[1], s[2], param, k});
    }
}

}  // namespace

// slices: gradient, master, momentum_buffer (null: no momentum), param (null: it is the master)
// numbers: those of update.h, in order
DSX_API void dsx_sgd(const Slice* slices, const double* numbers, int32_t nesterov, int64_t count, int32_t threads) {
    const Look look = !slices[2].data ? PLAIN : nesterov ? NESTEROV : MOMENTUM;
    slices[1].type == FLOAT64 ? sgd<double>(slices, numbers, look, count, threads)
                              : sgd<float>(slices, numbers, look, count, threads);
}
