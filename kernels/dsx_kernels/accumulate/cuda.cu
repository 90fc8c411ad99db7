// Adding a scaled slice to another, one pass.
#include "../cuda.cuh"

namespace dsx {

template <class Into, class Source>
__global__ void __launch_bounds__(THREADS)
    accumulate(Into* into, const Source* source, int64_t count, int64_t head, double scale) {
    using W = typename wide<Into>::type;
    const W factor = W(scale);
    for_each<each<Into, Source>>(count, head, [&](auto size, int64_t at) {
        constexpr int N = decltype(size)::value;
        W sum[N], more[N];
        read(into, at, sum);
        read(source, at, more);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += more[i] * factor;
        write(into, at, sum);
    });
}

}  // namespace dsx
