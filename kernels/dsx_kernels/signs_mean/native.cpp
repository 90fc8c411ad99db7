// The mean of several ranks' signs times scales, a group of 1,024 elements at a time.
#include "../slices.h"

namespace {

using namespace dsx;

constexpr int64_t GROUP = BLOCK, WORD = 32;

template <class W> struct Mean {
    Output out;
    const W* scales;
    const int32_t* counts;
    const uint32_t* bits;
    int64_t ranks, words_apart, scales_apart, block;

    // The mean of a group whose scales are in block `number`.
    template <int BYTES> DSX_INLINE void group(const uint32_t* words, int64_t number, float* sums) const {
        typedef float Floats __attribute__((vector_size(BYTES), aligned(4)));
        typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(4)));
        const float share = float(ranks);
        for (int64_t rank = 0; rank < ranks; rank++) {
            const uint32_t size = bit_cast<uint32_t>(scales[rank * scales_apart + number]);
            const bool last = rank + 1 == ranks;
            for (int64_t lane = 0; lane < WORD; lane += BYTES / 4) {
                Words packed;
                std::memcpy(&packed, words + rank * words_apart + lane, sizeof packed);
#pragma GCC unroll 8
                for (int64_t bit = 0; bit < WORD; bit++) {
                    float* to = sums + bit * WORD + lane;
                    Floats sum = {};
                    if (rank > 0) std::memcpy(&sum, to, sizeof sum);
                    sum += (Floats)(((packed >> bit) << 31) ^ size);
                    if (last && ranks > 1) sum /= share;
                    std::memcpy(to, &sum, sizeof sum);
                }
            }
        }
    }

    template <int BYTES> DSX_INLINE void group(const uint32_t* words, int64_t number, double* sums) const {
        for (int64_t rank = 0; rank < ranks; rank++) {
            const double scale = scales[rank * scales_apart + number];
            for (int64_t i = 0; i < GROUP; i++) {
                const bool below = words[rank * words_apart + i % WORD] >> (i / WORD) & 1;
                sums[i] = (rank ? sums[i] : 0.0) + (below ? -scale : scale);
            }
        }
        for (int64_t i = 0; i < GROUP; i++) sums[i] /= double(ranks);
    }

    template <int BYTES> DSX_INLINE void operator()(int64_t begin, int64_t end, Width<BYTES>) const {
        const bool here = !out.past && out.type == (sizeof(W) == 8 ? FLOAT64 : FLOAT32);
        for (int64_t number = begin; number < end; number++) {
            alignas(64) W room[GROUP];
            const int64_t start = number * block, counted = std::min<int64_t>(counts[number], block);
            for (int64_t at = 0; at < counted; at += GROUP) {
                const int64_t count = std::min(GROUP, counted - at);
                W* sums = count == GROUP && here ? static_cast<W*>(out.data) + start + at : room;
                group<BYTES>(bits + (start + at) / WORD, number, sums);
                write(out, start + at, count, sums);
            }
        }
        settle();
    }
};

template <class W>
void mean(const Slice* s, const int32_t* counts, const uint32_t* bits, const int64_t* n, int32_t threads) {
    const int64_t blocks = n[3], block = n[4], grain = std::max<int64_t>(1, GRAIN / block);
    const W* scales = static_cast<const W*>(s[0].data);
    // The sums of several ranks are made where they stay: copying them from a buffer takes longer than fetching lines.
    const Output out = n[0] == 1 ? output(s + 1, 1, blocks * block) : Output{s[1], false};
    for_each(blocks, threads, grain, Mean<W>{out, scales, counts, bits, n[0], n[1], n[2], block});
}

}  // namespace

// slices: scales (double: computes in double), out; `ranks` rows of words and of scales, which lie so many apart
DSX_API void dsx_signs_mean(
    const Slice* slices, const int32_t* counts, const uint32_t* bits, int64_t ranks, int64_t words_apart,
    int64_t scales_apart, int64_t blocks, int64_t block, int32_t threads) {
    const int64_t sizes[] = {ranks, words_apart, scales_apart, blocks, block};
    (slices[0].type == FLOAT64 ? mean<double> : mean<float>)(slices, counts, bits, sizes, threads);
}
