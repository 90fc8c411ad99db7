// A mean of gradients over time, one pass.
#include "../cuda.cuh"

namespace dsx {

// factor is none if it is 1; take is 1 - beta.
template <class Mean, class Gradient, class Factor>
__global__ void __launch_bounds__(THREADS) momentum(
    Mean* mean, const Gradient* gradient, const Factor* factor, int64_t count, int64_t head, double multiplier,
    double limit, double take
) {
    using W = typename wide<Mean>::type;
    const W multiply = W(multiplier), most = W(limit), share = W(take);
    for_each<each<Mean, Gradient, Factor>>(count, head, [&](auto size, int64_t at) {
        constexpr int N = decltype(size)::value;
        W means[N], grads[N], factors[N];
        read(mean, at, means);
        read(gradient, at, grads);
        read(factor, at, factors);
#pragma unroll
        for (int i = 0; i < N; i++) {
            W grad = clamped(grads[i], multiply, most);
            if constexpr (is_given<Factor>) grad *= factors[i];
            means[i] = means[i] + share * (grad - means[i]);
        }
        write(mean, at, means);
    });
}

}  // namespace dsx
