// The mean of several ranks' signs times scales: a warp for each group of 1,024 elements.
#include "../cuda.cuh"

namespace dsx {

constexpr int GROUP = 1024, WORD = 32;

// bits: [ranks, blocks * block / 32], scales: [ranks, blocks], rows of each so many apart; counts: [blocks]
template <class Scale, class Out>
__global__ void __launch_bounds__(THREADS) signs_mean(
    const uint32_t* bits, const Scale* scales, const int32_t* counts, Out* out, int64_t ranks, int64_t words_apart,
    int64_t scales_apart, int64_t blocks, int64_t block
) {
    const int64_t group = this_thread() / WORD, start = group * GROUP, number = start / block;
    const int lane = threadIdx.x % WORD;
    if (number >= blocks) return;
    const int64_t count = counts[number] - (start - number * block);  // of this group on, below 0: none

    Scale sums[WORD] = {};
    for (int64_t rank = 0; rank < ranks; rank++) {
        const uint32_t word = bits[rank * words_apart + group * WORD + lane];
        const Scale scale = scales[rank * scales_apart + number];
#pragma unroll
        for (int bit = 0; bit < WORD; bit++) sums[bit] += word >> bit & 1 ? -scale : scale;
    }
#pragma unroll
    for (int bit = 0; bit < WORD; bit++) {
        const int i = bit * WORD + lane;
        if (i < count) out[start + i] = narrow<Out>(sums[bit] / Scale(ranks));
    }
}

}  // namespace dsx
