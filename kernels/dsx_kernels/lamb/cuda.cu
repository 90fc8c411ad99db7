// What LAMB with a frozen variance looks at, in one pass: three numbers for each block of elements.
#include "../cuda.cuh"

namespace dsx {

// The sums of native.cpp: a block is added up in 64 lanes, which then go to double, in order; what is left of the last
// block goes to double at once.
constexpr int BLOCK = 4096;
constexpr int LANES = 64;

// The elements [at, at + N), wherever they start.
template <bool ALIGNED, class W, int N> __device__ inline void load(const W* data, int64_t at, W (&values)[N]) {
    if constexpr (ALIGNED) {
        read(data, at, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = data[at + i];
    }
}

template <bool ALIGNED, class W, int N> __device__ inline void store(W* data, int64_t at, const W (&values)[N]) {
    if constexpr (ALIGNED) {
        write(data, at, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) data[at + i] = values[i];
    }
}

// As many neighbouring threads as have all LANES between them, each ACCESS bytes wide, add up a block.
//
// ALIGNED  all slices start at a multiple of ACCESS bytes
// found    [3, blocks]: sums of squares of the momentum and of the step, and the least root
template <class W, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) lamb(
    const W* next, W* mean, W* fresh, const W* factor, const W* weights, double* found, int64_t count, int64_t blocks,
    double take_, double keep_, double more_, double decay_, double least_, double eps_
) {
    constexpr int EACH = each<W>, MEMBERS = LANES / EACH;
    const W take = W(take_), keep = W(keep_), more = W(more_), decay = W(decay_), least = W(least_), eps = W(eps_);
    const int64_t block = this_thread() / MEMBERS;
    const int member = threadIdx.x % MEMBERS;
    const int64_t start = block * BLOCK, length = count - start < BLOCK ? count - start : BLOCK;  // below 0: no block
    const int rows = length < 0 ? 0 : int(length / LANES);

    // An element's new variance; squares of its momentum and of its step, and its root.
    const auto element = [&](W now, W before, W& variance, W weight, W f, W& square, W& step, W& size) {
        const W gradient = before + (now - before) * take;
        variance = keep * variance + more * (gradient * gradient);
        const W moved = now + decay * weight, floor = f * f * least;
        square = now * now;
        step = moved * moved;
        size = root(variance > floor ? variance : floor) + eps * f;
    };

    const double infinite = bit_cast<float>(0x7f800000u);
    W means[EACH] = {}, steps[EACH] = {}, roots[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) roots[i] = W(infinite);
#pragma unroll 1
    for (int number = 0; number < rows; number++) {
        const int64_t at = start + number * LANES + member * EACH;
        W now[EACH], before[EACH], variances[EACH], factors[EACH], weight[EACH];
        load<ALIGNED>(next, at, now);
        load<ALIGNED>(mean, at, before);
        load<ALIGNED>(fresh, at, variances);
        load<ALIGNED>(factor, at, factors);
        load<ALIGNED>(weights, at, weight);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            W square, step, size;
            element(now[i], before[i], variances[i], weight[i], factors[i], square, step, size);
            means[i] += square;
            steps[i] += step;
            roots[i] = size < roots[i] ? size : roots[i];
        }
        store<ALIGNED>(fresh, at, variances);
        store<ALIGNED>(mean, at, now);
    }

    double totals[2] = {}, rest[2] = {}, smallest = infinite;
#pragma unroll 1
    for (int turn = 0; turn < MEMBERS; turn++) {
        if (turn == member) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                totals[0] += double(means[i]);
                totals[1] += double(steps[i]);
                smallest = double(roots[i]) < smallest ? double(roots[i]) : smallest;
                const int64_t at = int64_t(rows) * LANES + member * EACH + i;
                if (at < length) {
                    W variance = fresh[start + at], square, step, size;
                    const W now = next[start + at];
                    element(now, mean[start + at], variance, weights[start + at], factor[start + at], square, step, size);
                    fresh[start + at] = variance;
                    mean[start + at] = now;
                    rest[0] += double(square);
                    rest[1] += double(step);
                    smallest = double(size) < smallest ? double(size) : smallest;
                }
            }
        }
        // Each adds to what those before it have found; the last one has it all.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            totals[i] = __shfl_sync(0xffffffffu, totals[i], turn, MEMBERS);
            rest[i] = __shfl_sync(0xffffffffu, rest[i], turn, MEMBERS);
        }
        smallest = __shfl_sync(0xffffffffu, smallest, turn, MEMBERS);
    }
    if (member == 0 && length > 0) {
        found[block] = totals[0] + rest[0];
        found[blocks + block] = totals[1] + rest[1];
        found[2 * blocks + block] = smallest;
    }
}

}  // namespace dsx
