// AdamW, one pass.
#include "../slices.h"
#include "update.h"

namespace {

using namespace dsx;

template <class W, bool AMSGRAD> struct AdamW {
    Slice gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq;
    Output param;
    AdamWNumbers<W> numbers;
    static constexpr int64_t STEP = BLOCK / 4;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[5][STEP];
        const AdamWNumbers<W> k = numbers;
        const W* g = read(gradient, at, count, room[0]);
        W* p = read(master, at, count, room[1]);
        W* m = read(exp_avg, at, count, room[2]);
        W* v = read(exp_avg_sq, at, count, room[3]);
        W* most = AMSGRAD ? read(max_exp_avg_sq, at, count, room[4]) : nullptr;
        DSX_INDEPENDENT
        for (int64_t i = 0; i < count; i++) {
            const W before = AMSGRAD ? most[i] : W(0);
            const AdamWState<W> found = adamw_update<AMSGRAD>(k, g[i], AdamWState<W>{p[i], m[i], v[i], before});
            p[i] = found.weight;
            m[i] = found.mean;
            v[i] = found.square;
            if constexpr (AMSGRAD) most[i] = found.most;
        }
        write(master, at, count, p);
        write(exp_avg, at, count, m);
        write(exp_avg_sq, at, count, v);
        if (AMSGRAD) write(max_exp_avg_sq, at, count, most);
        if (param.data) write(param, at, count, p);
    }
};

template <class W, bool AMSGRAD> void adamw(const Slice* s, const double* n, int64_t count, int32_t threads) {
    const AdamWNumbers<W> k{W(n[0]), W(n[1]), W(n[2]), W(n[3]), W(n[4]), W(n[5]), W(n[6]), W(n[7]), W(n[8])};
    for_each_block(count, threads, AdamW<W, AMSGRAD>{s[0], s[1], s[2], s[3], s[4], output(s, 6, count), k});
}

}  // namespace

// slices: gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq (null: no amsgrad), param (null: it is the master)
// numbers: those of update.h, in order
DSX_API void dsx_adamw(const Slice* slices, const double* numbers, int64_t count, int32_t threads) {
    const bool amsgrad = slices[4].data;
    const auto update = slices[1].type == FLOAT64 ? amsgrad ? adamw<double, true> : adamw<double, false>
                        : amsgrad                 ? adamw<float, true>
                                                  : adamw<float, false>;
    update(slices, numbers, count, threads);
}
