// Sum of squares in one read: a sum for each block of elements.
#include "../cuda.cuh"

namespace dsx {

// The sums of native.cpp: a block is added up in 64 lanes of float, which then go to double, in order; what is left of
// the last block goes to double at once.
constexpr int BLOCK = 4096;
constexpr int LANES = 64;

// The elements [at, at + N) of a row of LANES, wherever it starts.
template <bool ALIGNED, class T, class W, int N> __device__ inline void row(const T* data, int64_t at, W (&values)[N]) {
    if constexpr (ALIGNED) {
        read(data, at, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = W(widen(data[at + i]));
    }
}

// As many neighbouring threads as have all LANES between them, each ACCESS bytes wide, add up a block.
//
// ALIGNED  tensor starts at a multiple of ACCESS bytes
// sums     [ceil(count / BLOCK)]
template <class T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) squares(const T* tensor, double* sums, int64_t count) {
    using W = typename wide<T>::type;
    constexpr int EACH = each<T>, MEMBERS = LANES / EACH;
    const int64_t block = this_thread() / MEMBERS;
    const int member = threadIdx.x % MEMBERS;
    const int64_t start = block * BLOCK, length = count - start < BLOCK ? count - start : BLOCK;  // below 0: no block
    const int rows = length < 0 ? 0 : int(length / LANES);

    W lanes[EACH] = {}, values[EACH];
#pragma unroll 4
    for (int number = 0; number < rows; number++) {
        row<ALIGNED>(tensor, start + number * LANES + member * EACH, values);
#pragma unroll
        for (int i = 0; i < EACH; i++) lanes[i] += values[i] * values[i];
    }

    double total = 0, rest = 0;
#pragma unroll 1
    for (int turn = 0; turn < MEMBERS; turn++) {
        if (turn == member) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int64_t at = int64_t(rows) * LANES + member * EACH + i;
                total += double(lanes[i]);
                if (at < length) {
                    const W x = W(widen(tensor[start + at]));
                    rest += double(W(x * x));
                }
            }
        }
        // Each adds to what those before it have found; the last one has it all.
        total = __shfl_sync(0xffffffffu, total, turn, MEMBERS);
        rest = __shfl_sync(0xffffffffu, rest, turn, MEMBERS);
    }
    if (member == 0 && length > 0) sums[block] = total + rest;
}

}  // namespace dsx
