// Signs with error feedback: a warp for each block, a thread for each word of a group.
#include "../cuda.cuh"

namespace dsx {

constexpr int GROUP = 1024;  // elements whose signs make 32 words
constexpr int WORD = 32;     // bits of a word, and threads of a warp

// What signs are made of: a value, none or with a gradient's share that `momentum` would add, and the error.
template <class W, class Value, class Error, class Gradient, class Factor> struct Added {
    const Value* value;
    const Error* error;
    const Gradient* gradient;
    const Factor* factor;
    W multiplier, limit, take;

    __device__ inline W one(int64_t at) const {
        W sum = W(0);
        if constexpr (is_given<Value>) sum = W(widen(value[at]));
        if constexpr (is_given<Gradient>) {
            W grad = clamped(W(widen(gradient[at])), multiplier, limit);
            if constexpr (is_given<Factor>) grad *= W(widen(factor[at]));
            sum = is_given<Value> ? sum + take * (grad - sum) : grad;
        }
        return sum + W(widen(error[at]));
    }

    // Of a thread's elements of a group, zeros after the first `count` of the group.
    __device__ inline void group(int64_t at, int count, W (&sums)[WORD]) const {
#pragma unroll
        for (int bit = 0; bit < WORD; bit++) {
            const int i = bit * WORD + threadIdx.x % WORD;
            sums[bit] = i < count ? one(at + i) : W(0);
        }
    }
};

// The absolute values of a group, added up as native.cpp does: in 64 lanes, then in 8 parts of double, then by pairs.
template <class W> __device__ inline double sizes(const W (&sums)[WORD]) {
    const int lane = threadIdx.x % WORD;
    W even = 0, odd = 0;
#pragma unroll
    for (int bit = 0; bit < WORD; bit += 2) {
        even += sums[bit] < 0 ? -sums[bit] : sums[bit];
        odd += sums[bit + 1] < 0 ? -sums[bit + 1] : sums[bit + 1];
    }
    double part = 0;
#pragma unroll
    for (int from = lane % 8; from < WORD; from += 8) part += double(__shfl_sync(0xffffffffu, even, from));
#pragma unroll
    for (int from = lane % 8; from < WORD; from += 8) part += double(__shfl_sync(0xffffffffu, odd, from));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) part += __shfl_sync(0xffffffffu, part, lane ^ step);
    return part;
}

// value, error, gradient, factor: [blocks * block]; counts, scales: [blocks]; bits: [blocks * block / 32]; take is
// 1 - beta.
template <class Value, class Error, class Scale, class Gradient, class Factor>
__global__ void __launch_bounds__(THREADS) signs(
    const Value* value, Error* error, const int32_t* counts, uint32_t* bits, Scale* scales, const Gradient* gradient,
    const Factor* factor, int64_t blocks, int64_t block, double multiplier, double limit, double take
) {
    using Sum = Added<Scale, Value, Error, Gradient, Factor>;
    const Sum added{value, error, gradient, factor, Scale(multiplier), Scale(limit), Scale(take)};
    const int64_t number = this_thread() / WORD, start = number * block;
    const int lane = threadIdx.x % WORD;
    if (number >= blocks) return;
    const int64_t counted = counts[number] < block ? counts[number] : block;

    Scale sums[WORD];
    double sum = 0;
    for (int64_t at = 0; at < counted; at += GROUP) {
        added.group(start + at, counted - at < GROUP ? int(counted - at) : GROUP, sums);
        sum += sizes(sums);
    }
    const Scale scale = Scale(sum / double(counted > 1 ? counted : 1));
    if (lane == 0) scales[number] = scale;

    for (int64_t at = 0; at < block; at += GROUP) {
        const int count = counted - at < GROUP ? int(counted - at) : GROUP;
        if (block > GROUP) added.group(start + at, count, sums);
        uint32_t word = 0;
#pragma unroll
        for (int bit = 0; bit < WORD; bit++) {
            const int i = bit * WORD + lane;
            const bool below = sums[bit] < 0;
            if (i >= count) continue;
            word |= uint32_t(below) << bit;
            error[start + at + i] = narrow<Error>(sums[bit] - (below ? -scale : scale));
        }
        bits[(start + at) / WORD + lane] = word;
    }
}

}  // namespace dsx
