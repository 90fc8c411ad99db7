// What LAMB with a frozen variance looks at, in one pass.
#include "../native.h"

namespace {

using namespace dsx;

// A block is added up in 64 lanes, which then go to double, in order: the same ones whatever the registers' width.
constexpr int64_t BLOCK = 4096;
constexpr int64_t LANES = 64;

template <class W> struct Numbers {
    W take, keep, more, decay, least, eps;
};

// Sums of squares of the momentum and of the step, and the least root.
template <class W> struct Found {
    W mean, step, root;
};

template <class W> struct Lamb {
    const W* next;
    W *mean, *fresh;
    const W *factor, *weights;
    Numbers<W> n;
    int64_t count, blocks;
    double* found;

    DSX_INLINE Found<W> element(int64_t i) const {
        const W now = next[i], gradient = mean[i] + (now - mean[i]) * n.take;
        const W variance = n.keep * fresh[i] + n.more * (gradient * gradient);
        fresh[i] = variance;
        mean[i] = now;
        const W step = now + n.decay * weights[i], f = factor[i], floor = f * f * n.least;
        return {now * now, step * step, root(variance > floor ? variance : floor) + n.eps * f};
    }

    template <int BYTES> DSX_INLINE void operator()(int64_t begin, int64_t end, Width<BYTES>) const {
        for (int64_t block = begin; block < end; block++) {
            const int64_t start = block * BLOCK, length = std::min(BLOCK, count - start);
            const int64_t whole = length / LANES * LANES;
            alignas(64) W means[LANES] = {}, steps[LANES] = {}, roots[LANES];
            std::fill_n(roots, LANES, W(__builtin_inf()));
            for (int64_t at = start; at < start + whole; at += LANES) {
                DSX_INDEPENDENT
                for (int64_t lane = 0; lane < LANES; lane++) {
                    const Found<W> one = element(at + lane);
                    means[lane] += one.mean;
                    steps[lane] += one.step;
                    roots[lane] = one.root < roots[lane] ? one.root : roots[lane];
                }
            }
            double sums[2] = {}, rest[2] = {}, least = roots[0];
            for (int64_t lane = 0; lane < LANES; lane++) {
                sums[0] += double(means[lane]);
                sums[1] += double(steps[lane]);
                least = std::min(least, double(roots[lane]));
            }
            for (int64_t at = start + whole; at < start + length; at++) {
                const Found<W> one = element(at);
                rest[0] += double(one.mean);
                rest[1] += double(one.step);
                least = std::min(least, double(one.root));
            }
            found[block] = sums[0] + rest[0];
            found[blocks + block] = sums[1] + rest[1];
            found[2 * blocks + block] = least;
        }
    }
};

template <class W> void lamb(void* const* slices, const double* n, int64_t count, double* found, int32_t threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    const auto at = [&](int number) { return static_cast<W*>(slices[number]); };
    const Numbers<W> numbers{W(n[0]), W(n[1]), W(n[2]), W(n[3]), W(n[4]), W(n[5])};
    for_each(blocks, threads, 8, Lamb<W>{at(0), at(1), at(2), at(3), at(4), numbers, count, blocks, found});
}

}  // namespace

// new, mean, fresh, factor, weights: `count` of `type`; numbers: 1 / (1 - beta1), beta2, 1 - beta2, weight decay, least
// variance, eps; found: [3, ceil(count / 4096)]
DSX_API void dsx_lamb(
    void* next, void* mean, void* fresh, void* factor, void* weights, int32_t type, const double* numbers,
    int64_t count, double* found, int32_t threads) {
    void* const slices[] = {next, mean, fresh, factor, weights};
    (type == FLOAT64 ? lamb<double> : lamb<float>)(slices, numbers, count, found, threads);
}
