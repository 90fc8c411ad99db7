// AdamW, one pass.
#include "../cuda.cuh"
#include "update.h"

namespace dsx {

// max_exp_avg_sq is none without amsgrad, param if it is the master. Numbers are those of update.h, in order.
template <class Gradient, class Master, class Mean, class Square, class Most, class Param>
__global__ void __launch_bounds__(THREADS) adamw(
    const Gradient* gradient, Master* master, Mean* exp_avg, Square* exp_avg_sq, Most* max_exp_avg_sq, Param* param,
    int64_t count, int64_t head, double multiplier, double limit, double take1, double keep2, double take2,
    double decay, double rate, double scale, double eps
) {
    using W = typename wide<Master>::type;
    const AdamWNumbers<W> numbers{
        W(multiplier), W(limit), W(take1), W(keep2), W(take2), W(decay), W(rate), W(scale), W(eps)
    };
    constexpr int EACH = each<Gradient, Master, Mean, Square, Most, Param>;
    for_each<EACH>(count, head, [&](auto size, int64_t at) {
        constexpr int N = decltype(size)::value;
        W grad[N], weight[N], mean[N], square[N], most[N] = {};
        read(gradient, at, grad);
        read(master, at, weight);
        read(exp_avg, at, mean);
        read(exp_avg_sq, at, square);
        read(max_exp_avg_sq, at, most);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const AdamWState<W> old{weight[i], mean[i], square[i], most[i]};
            const AdamWState<W> found = adamw_update<is_given<Most>>(numbers, grad[i], old);
            weight[i] = found.weight, mean[i] = found.mean, square[i] = found.square, most[i] = found.most;
        }
        write(master, at, weight);
        write(exp_avg, at, mean);
        write(exp_avg_sq, at, square);
        write(max_exp_avg_sq, at, most);
        write(param, at, weight);
    });
}

}  // namespace dsx
