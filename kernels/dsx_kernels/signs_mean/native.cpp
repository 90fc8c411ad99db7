// The mean of several ranks' signs times scales, a group of 1,024 elements at a time.
#include "../slices.h"

namespace {

using namespace dsx;

constexpr int64_t GROUP = BLOCK, WORD = 32;

template <int BYTES> struct Vectors {
    typedef float Floats __attribute__((vector_size(BYTES), aligned(4)));
    typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(4)));
    static constexpr int64_t WIDTH = BYTES / 4, ROW = WORD / WIDTH;
};

template <class W> struct Mean {
    Output out;
    const W* scales;
    const int32_t* counts;
    const uint32_t* bits;
    int64_t ranks, words_apart, scales_apart, block;

    // The mean of a group whose scales are in block `number`; `past`: to where it rests, past the caches.
    template <int BYTES> DSX_INLINE void group(const uint32_t* words, int64_t number, float* sums, bool past) const {
        // With the number of ranks known, a sum stays in a register until it is the mean.
        if (ranks == 1) return few<BYTES, 1>(words, number, sums, past);
        if (ranks == 2) return few<BYTES, 2>(words, number, sums, past);
        if (ranks == 3) return few<BYTES, 3>(words, number, sums, past);
        if (ranks == 4) return few<BYTES, 4>(words, number, sums, past);
        alignas(64) float room[GROUP];
        float* to = past ? room : sums;
        many<BYTES>(words, number, to);
        if (past) stream(room, sums, sizeof room);
    }

    template <int BYTES, int RANKS>
    DSX_INLINE void few(const uint32_t* words, int64_t number, float* sums, bool past) const {
        typedef Vectors<BYTES> V;
        typename V::Words size[RANKS];
#pragma GCC unroll 4
        for (int rank = 0; rank < RANKS; rank++)
            size[rank] = typename V::Words{} + bit_cast<uint32_t>(scales[rank * scales_apart + number]);
        typename V::Words packed[RANKS][V::ROW];
#pragma GCC unroll 4
        for (int rank = 0; rank < RANKS; rank++) std::memcpy(packed[rank], words + rank * words_apart, sizeof packed[rank]);
#pragma GCC unroll 4
        for (int64_t bit = 0; bit < WORD; bit++) {
#pragma GCC unroll 8
            for (int64_t lane = 0; lane < V::ROW; lane++) {
                typename V::Floats sum = (typename V::Floats)(((packed[0][lane] >> bit) << 31) ^ size[0]);
#pragma GCC unroll 4
                for (int rank = 1; rank < RANKS; rank++)
                    sum += (typename V::Floats)(((packed[rank][lane] >> bit) << 31) ^ size[rank]);
                if (RANKS == 3) sum /= float(RANKS);
                else if (RANKS > 1) sum *= 1.0f / float(RANKS);  // as exact as dividing by a power of two
                float* to = sums + bit * WORD + lane * V::WIDTH;
                if (past) stream_vector<BYTES>(to, &sum);
                else std::memcpy(to, &sum, sizeof sum);
            }
        }
    }

    template <int BYTES> DSX_INLINE void many(const uint32_t* words, int64_t number, float* sums) const {
        typedef Vectors<BYTES> V;
        const float share = float(ranks);
        for (int64_t rank = 0; rank < ranks; rank++) {
            const uint32_t size = bit_cast<uint32_t>(scales[rank * scales_apart + number]);
            const bool last = rank + 1 == ranks;
            for (int64_t lane = 0; lane < WORD; lane += V::WIDTH) {
                typename V::Words packed;
                std::memcpy(&packed, words + rank * words_apart + lane, sizeof packed);
#pragma GCC unroll 8
                for (int64_t bit = 0; bit < WORD; bit++) {
                    float* to = sums + bit * WORD + lane;
                    typename V::Floats sum = {};
                    if (rank > 0) std::memcpy(&sum, to, sizeof sum);
                    sum += (typename V::Floats)(((packed >> bit) << 31) ^ size);
                    if (last) sum /= share;
                    std::memcpy(to, &sum, sizeof sum);
                }
            }
        }
    }

    template <int BYTES> DSX_INLINE void group(const uint32_t* words, int64_t number, double* sums, bool) const {
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
        const bool past = out.past && sizeof(W) == 4 && out.type == FLOAT32;
        const bool here = past || (!out.past && out.type == (sizeof(W) == 8 ? FLOAT64 : FLOAT32));
        for (int64_t number = begin; number < end; number++) {
            alignas(64) W room[GROUP];
            const int64_t start = number * block, counted = std::min<int64_t>(counts[number], block);
            for (int64_t at = 0; at < counted; at += GROUP) {
                const int64_t count = std::min(GROUP, counted - at);
                const bool rests = count == GROUP && here;
                W* sums = rests ? static_cast<W*>(out.data) + start + at : room;
                group<BYTES>(bits + (start + at) / WORD, number, sums, rests && past);
                write(rests ? Output{out, false} : out, start + at, count, sums);
            }
        }
        settle();
    }
};

template <class W>
void mean(const Slice* s, const int32_t* counts, const uint32_t* bits, const int64_t* n, int32_t threads) {
    const int64_t blocks = n[3], block = n[4], grain = std::max<int64_t>(1, GRAIN / block);
    const W* scales = static_cast<const W*>(s[0].data);
    for_each(blocks, threads, grain, Mean<W>{output(s + 1, 1, blocks * block), scales, counts, bits, n[0], n[1], n[2], block});
}

}  // namespace

// slices: scales (double: computes in double), out; `ranks` rows of words and of scales, which lie so many apart
DSX_API void dsx_signs_mean(
    const Slice* slices, const int32_t* counts, const uint32_t* bits, int64_t ranks, int64_t words_apart,
    int64_t scales_apart, int64_t blocks, int64_t block, int32_t threads) {
    const int64_t sizes[] = {ranks, words_apart, scales_apart, blocks, block};
    (slices[0].type == FLOAT64 ? mean<double> : mean<float>)(slices, counts, bits, sizes, threads);
}
