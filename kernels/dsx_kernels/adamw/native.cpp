// AdamW, one pass.
#include "../slices.h"

namespace {

using namespace dsx;

template <class W> struct Numbers {
    W multiplier, limit, take1, keep2, take2, decay, rate, root, eps;
};

template <class W, bool AMSGRAD> struct AdamW {
    Slice gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param;
    Numbers<W> numbers;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[5][BLOCK];
        const Numbers<W> k = numbers;
        const W* g = read(gradient, at, count, room[0]);
        W* p = read(master, at, count, room[1]);
        W* m = read(exp_avg, at, count, room[2]);
        W* v = read(exp_avg_sq, at, count, room[3]);
        W* most = AMSGRAD ? read(max_exp_avg_sq, at, count, room[4]) : nullptr;
        DSX_INDEPENDENT
        for (int64_t i = 0; i < count; i++) {
            const W grad = clamped(g[i], k.multiplier, k.limit);
            const W mean = m[i] + k.take1 * (grad - m[i]);
            const W square = k.keep2 * v[i] + k.take2 * grad * grad;
            W divisor = square;
            if constexpr (AMSGRAD) {
                const bool kept = most[i] >= square || most[i] != most[i];
                most[i] = divisor = kept ? most[i] : square;
            }
            m[i] = mean;
            v[i] = square;
            p[i] = p[i] * k.decay - k.rate * (mean / (std::sqrt(divisor) * k.root + k.eps));
        }
        write(master, at, count, p);
        write(exp_avg, at, count, m);
        write(exp_avg_sq, at, count, v);
        if (AMSGRAD) write(max_exp_avg_sq, at, count, most);
        if (param.data) write(param, at, count, p);
    }
};

template <class W, bool AMSGRAD> void adamw(const Slice* s, const double* n, int64_t count, int32_t threads) {
    const Numbers<W> k{W(n[0]), W(n[1]), W(n[2]), W(n[3]), W(n[4]), W(n[5]), W(n[6]), W(n[7]), W(n[8])};
    for_each_block(count, threads, AdamW<W, AMSGRAD>{s[0], s[1], s[2], s[3], s[4], s[5], k});
}

}  // namespace

// slices: gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq (null: no amsgrad), param (null: it is the master)
// numbers: multiplier (negative to maximize), limit, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay,
//          lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step), eps
DSX_API void dsx_adamw(const Slice* slices, const double* numbers, int64_t count, int32_t threads) {
    const bool amsgrad = slices[4].data;
    const auto update = slices[1].type == FLOAT64 ? amsgrad ? adamw<double, true> : adamw<double, false>
                        : amsgrad                 ? adamw<float, true>
                                                  : adamw<float, false>;
    update(slices, numbers, count, threads);
}
