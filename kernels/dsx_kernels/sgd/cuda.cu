// Stochastic gradient descent, one pass.
#include "../cuda.cuh"
#include "update.h"

namespace dsx {

// momentum_buffer is none without momentum, param if it is the master. Numbers are those of update.h, in order.
template <class Gradient, class Master, class Buffer, class Param, bool NESTEROV>
__global__ void __launch_bounds__(THREADS) sgd(
    const Gradient* gradient, Master* master, Buffer* momentum_buffer, Param* param, int64_t count, int64_t head,
    double multiplier, double limit, double decay, double keep, double share, double momentum, double rate
) {
    using W = typename wide<Master>::type;
    const SGDNumbers<W> numbers{W(multiplier), W(limit), W(decay), W(keep), W(share), W(momentum), W(rate)};
    for_each<each<Gradient, Master, Buffer, Param>>(count, head, [&](auto size, int64_t at) {
        constexpr int N = decltype(size)::value;
        W grad[N], weight[N], buffer[N] = {};
        read(gradient, at, grad);
        read(master, at, weight);
        read(momentum_buffer, at, buffer);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const SGDState<W> old{weight[i], buffer[i]};
            const SGDState<W> found = sgd_update<is_given<Buffer>, NESTEROV>(numbers, grad[i], old);
            weight[i] = found.weight, buffer[i] = found.buffer;
        }
        write(master, at, weight);
        write(momentum_buffer, at, buffer);
        write(param, at, weight);
    });
}

}  // namespace dsx
