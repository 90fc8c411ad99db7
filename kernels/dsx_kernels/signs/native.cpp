// Signs with error feedback: a block is read twice, the second time from the cache.
#include "../slices.h"

namespace {

using namespace dsx;

constexpr int64_t GROUP = 1024;  // elements whose signs make 32 words; BLOCK of slices.h is as many
constexpr int64_t WORD = 32, LANES = 64;
static_assert(GROUP == BLOCK);

template <class W> DSX_INLINE double total_of(const W* lanes) {
    double parts[8] = {};
    for (int64_t lane = 0; lane < LANES; lane += 8)
        for (int64_t part = 0; part < 8; part++) parts[part] += double(lanes[lane + part]);
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

// Where a group's results go: to where they rest if they are of that type and whole, else into `buffer`.
template <class W> DSX_INLINE W* target(const Slice& slice, int64_t at, int64_t count, W* buffer) {
    const bool here = count == GROUP && slice.type == (sizeof(W) == 8 ? FLOAT64 : FLOAT32);
    return here ? static_cast<W*>(slice.data) + at : buffer;
}

template <int BYTES> struct Vectors {
    typedef float Floats __attribute__((vector_size(BYTES), aligned(4)));
    typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(4)));
    static constexpr int64_t WIDTH = BYTES / 4;
};

// Signs of a group's sums into words, and what is left of the sums.
template <int BYTES> DSX_INLINE void pack(const float* sums, float scale, float* left, uint32_t* words) {
    typedef typename Vectors<BYTES>::Floats Floats;
    typedef typename Vectors<BYTES>::Words Words;
    const uint32_t size = bit_cast<uint32_t>(scale);
    for (int64_t lane = 0; lane < WORD; lane += Vectors<BYTES>::WIDTH) {
        Words packed = {};
#pragma GCC unroll 8
        for (int64_t bit = 0; bit < WORD; bit++) {
            Floats sum;
            std::memcpy(&sum, sums + bit * WORD + lane, sizeof sum);
            const Words below = (Words)(sum < 0.0f);
            packed |= below & (1u << bit);
            const Floats rest = sum - (Floats)((below & 0x80000000u) | size);
            std::memcpy(left + bit * WORD + lane, &rest, sizeof rest);
        }
        std::memcpy(words + lane, &packed, sizeof packed);
    }
}

template <int BYTES> DSX_INLINE void pack(const double* sums, double scale, double* left, uint32_t* words) {
    alignas(64) uint32_t packed[WORD] = {};
    for (int64_t bit = 0; bit < WORD; bit++) {
        DSX_INDEPENDENT
        for (int64_t lane = 0; lane < WORD; lane++) {
            const double sum = sums[bit * WORD + lane];
            packed[lane] |= uint32_t(sum < 0) << bit;
            left[bit * WORD + lane] = sum - (sum < 0 ? -scale : scale);
        }
    }
    std::memcpy(words, packed, sizeof packed);
}

template <class W> struct Signs {
    Slice value, error;
    W* scales;
    const int32_t* counts;
    uint32_t* bits;
    int64_t block;

    // What a group adds up to, zeros after the first `count` elements; returns the sum of the absolute values.
    DSX_INLINE double sums(int64_t at, int64_t count, W* out) const {
        alignas(64) W room[2][GROUP];
        alignas(64) W lanes[LANES] = {};
        const W* v = read(value, at, count, room[0]);
        const W* e = read(error, at, count, room[1]);
        for (int64_t i = count; i < GROUP; i++) out[i] = 0;
        const int64_t whole = count / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            DSX_INDEPENDENT
            for (int64_t lane = 0; lane < LANES; lane++) {
                const W sum = v[i + lane] + e[i + lane];
                out[i + lane] = sum;
                lanes[lane] += std::abs(sum);
            }
        }
        for (int64_t i = whole; i < count; i++) {
            out[i] = v[i] + e[i];
            lanes[i - whole] += std::abs(out[i]);
        }
        return total_of(lanes);
    }

    template <int BYTES> DSX_INLINE void operator()(int64_t begin, int64_t end, Width<BYTES>) const {
        for (int64_t number = begin; number < end; number++) {
            alignas(64) W total[GROUP], room[GROUP];
            const int64_t start = number * block, counted = std::min<int64_t>(counts[number], block);
            double sum = 0;
            for (int64_t at = 0; at < counted; at += GROUP)
                sum += sums(start + at, std::min(GROUP, counted - at), total);
            const W scale = W(sum / double(std::max<int64_t>(counted, 1)));
            scales[number] = scale;
            for (int64_t at = 0; at < block; at += GROUP) {
                uint32_t* words = bits + (start + at) / WORD;
                const int64_t count = std::min(GROUP, counted - at);
                if (count <= 0) {
                    std::memset(words, 0, GROUP / 8);
                    continue;
                }
                if (block > GROUP) sums(start + at, count, total);
                W* left = target(error, start + at, count, room);
                pack<BYTES>(total, scale, left, words);
                write(error, start + at, count, left);
            }
        }
    }
};

template <class W>
void signs(const Slice* s, const int32_t* counts, uint32_t* bits, int64_t blocks, int64_t block, int32_t threads) {
    const int64_t grain = std::max<int64_t>(1, GRAIN / block);
    for_each(blocks, threads, grain, Signs<W>{s[0], s[1], static_cast<W*>(s[2].data), counts, bits, block});
}

}  // namespace

// slices: value, error, scales (double: computes in double); counts: of `blocks`; bits: blocks * block / 32 words
DSX_API void dsx_signs(
    const Slice* slices, const int32_t* counts, uint32_t* bits, int64_t blocks, int64_t block, int32_t threads) {
    const auto compress = slices[2].type == FLOAT64 ? signs<double> : signs<float>;
    compress(slices, counts, bits, blocks, block, threads);
}
