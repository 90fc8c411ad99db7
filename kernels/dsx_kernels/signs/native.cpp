// Signs with error feedback: what a block adds up to lies where its error does until the scale is known.
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

// Calls `body` with a type that says whether a pointer is one.
template <class Body> DSX_INLINE void with_flag(const void* pointer, const Body& body) {
    if (pointer) body(std::true_type{});
    else body(std::false_type{});
}

// Where a group's results go: to where they rest if they are of that type and whole, else into `buffer`.
template <class W> DSX_INLINE W* target(const Slice& slice, int64_t at, int64_t count, W* buffer) {
    const bool here = count == GROUP && slice.type == (sizeof(W) == 8 ? FLOAT64 : FLOAT32);
    return here ? static_cast<W*>(slice.data) + at : buffer;
}

template <class W, int BYTES> struct Vectors {
    typedef W Floats __attribute__((vector_size(BYTES), aligned(sizeof(W))));
    typedef typename std::conditional<sizeof(W) == 8, uint64_t, uint32_t>::type Bits;
    typedef Bits Words __attribute__((vector_size(BYTES), aligned(sizeof(W))));
    typedef uint16_t Halves __attribute__((vector_size(2 * BYTES / sizeof(W)), aligned(2)));
    static constexpr int64_t WIDTH = BYTES / sizeof(W);
    static constexpr Bits SIGN = Bits(1) << (8 * sizeof(W) - 1);
};

// A single number, where Vectors have a register of them.
template <class W> struct One {
    typedef W Floats;
};

template <class V, class W> DSX_INLINE typename V::Floats load(const W* from) {
    typename V::Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}
template <class V> DSX_INLINE typename V::Floats load(const bf16* from) {
    if constexpr (sizeof(typename V::Floats) == sizeof(float)) {
        return widen(*from);
    } else {
        typename V::Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        return (typename V::Floats)(__builtin_convertvector(halves, typename V::Words) << 16);
    }
}

template <class W> struct Plain {
    const W* values;

    template <class V> DSX_INLINE typename V::Floats at(int64_t i) const { return load<V>(values + i); }
};

// Values with the gradient's share in them, as `momentum` adds it.
template <class W, class G, bool MEAN, bool SCALED> struct Shared {
    const W* values;
    const G gradients;
    const W* factors;
    W multiplier, limit, take;

    template <class V> DSX_INLINE typename V::Floats at(int64_t i) const {
        typedef typename V::Floats T;
        const T most = T{} + limit, least = -most;
        T grad = load<V>(gradients + i) * multiplier;
        grad = grad > most ? most : grad;
        grad = grad < least ? least : grad;
        if constexpr (SCALED) grad *= load<V>(factors + i);
        if constexpr (!MEAN) return grad;
        const T mean = load<V>(values + i);
        return mean + take * (grad - mean);
    }
};

// Signs of a group's sums into words, and what is left of the sums, which takes their place. In steps of LANES elements,
// between which other work may be done.
template <class W, int BYTES> class Packing {
  public:
    Packing() : step_(STEPS) {}
    DSX_INLINE Packing(W* sums, W scale, uint32_t* words) : sums_(sums), words_(words), up_(V{} + scale), step_(0) {}

    DSX_INLINE void step() {
        if (step_ < STEPS) pack(step_++);
    }
    DSX_INLINE void finish() {
        while (step_ < STEPS) pack(step_++);
    }

  private:
    using V = typename Vectors<W, BYTES>::Floats;
    using Words = typename Vectors<W, BYTES>::Words;
    static constexpr int64_t STEPS = GROUP / LANES, WIDTH = Vectors<W, BYTES>::WIDTH, EACH = LANES / WIDTH;
    static_assert(WORD % EACH == 0);

    // Vectors bit by bit of some words, then of the next ones.
    DSX_INLINE void pack(int64_t step) {
        const int64_t lane = step * EACH / WORD * WIDTH, first = step * EACH % WORD;
#pragma GCC unroll 16
        for (int64_t bit = first; bit < first + EACH; bit++) {
            V sum;
            std::memcpy(&sum, sums_ + bit * WORD + lane, sizeof sum);
            const auto below = sum < W(0);
            packed_ = packed_ >> 1 | (below ? Words{} + (1u << 31) : Words{});
            sum += below ? up_ : -up_;
            std::memcpy(sums_ + bit * WORD + lane, &sum, sizeof sum);
        }
        if (first + EACH < WORD) return;
        if constexpr (sizeof(W) == sizeof(uint32_t)) std::memcpy(words_ + lane, &packed_, sizeof packed_);
        else for (int64_t i = 0; i < WIDTH; i++) words_[lane + i] = uint32_t(packed_[i]);
    }

    W* sums_;
    uint32_t* words_;
    V up_;
    Words packed_ = {};
    int64_t step_;
};

template <class W> struct Signs {
    Slice value, error, gradient, factor;
    W multiplier, limit, take;
    W* scales;
    const int32_t* counts;
    uint32_t* bits;
    int64_t block;

    // What a group adds up to, zeros after the first `count` elements; returns the sum of the absolute values. `out`
    // may be where the error rests. `between` is called again and again meanwhile.
    template <int BYTES, class Between>
    DSX_INLINE double sums(int64_t at, int64_t count, W* out, const Between& between) const {
        alignas(64) W room[4][GROUP];
        const W* v = value.data ? read(value, at, count, room[0]) : nullptr;
        const W* e = read(error, at, count, room[1]);
        if (!gradient.data) return added<BYTES>(Plain<W>{v}, e, count, out, between);
        const W* f = factor.data ? read(factor, at, count, room[2]) : nullptr;
        double sum = 0;
        with_flag(v, [&](auto mean) __attribute__((always_inline)) {
            with_flag(f, [&](auto scaled) __attribute__((always_inline)) {
                const auto add = [&](auto g) __attribute__((always_inline)) {
                    typedef Shared<W, decltype(g), decltype(mean)::value, decltype(scaled)::value> Values;
                    sum = added<BYTES>(Values{v, g, f, multiplier, limit, take}, e, count, out, between);
                };
                // The type that gradients mostly have is widened in registers.
                if constexpr (sizeof(W) == 4)
                    if (gradient.type == BFLOAT16) return add(static_cast<const bf16*>(gradient.data) + at);
                add(static_cast<const W*>(read(gradient, at, count, room[3])));
            });
        });
        return sum;
    }

    template <int BYTES, class Values, class Between>
    static DSX_INLINE double added(const Values& values, const W* e, int64_t count, W* out, const Between& between) {
        typedef Vectors<W, BYTES> V;
        for (int64_t i = count; i < GROUP; i++) out[i] = 0;
        typename V::Floats sizes[LANES / V::WIDTH] = {};  // in registers
        const int64_t whole = count / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
#pragma GCC unroll 16
            for (int64_t number = 0; number < LANES / V::WIDTH; number++) {
                const int64_t here = i + number * V::WIDTH;
                const typename V::Floats sum = values.template at<V>(here) + load<V>(e + here);
                std::memcpy(out + here, &sum, sizeof sum);
                sizes[number] += (typename V::Floats)((typename V::Words)sum & ~V::SIGN);
            }
            between();
        }
        alignas(64) W lanes[LANES];
        std::memcpy(lanes, sizes, sizeof lanes);
        for (int64_t i = whole; i < count; i++) {
            out[i] = values.template at<One<W>>(i) + e[i];
            lanes[i - whole] += std::abs(out[i]);
        }
        return total_of(lanes);
    }

    // Blocks of one group. The signs of one are taken while the next one is summed up: they need not wait for its scale,
    // and memory always has something to do.
    template <int BYTES> DSX_INLINE void groups(int64_t begin, int64_t end) const {
        alignas(64) W rooms[2][GROUP];
        W* before = nullptr;
        int64_t counted = 0;
        for (int64_t number = begin; number <= end; number++) {
            uint32_t* words = bits + (number - 1) * (GROUP / WORD);
            auto packing = counted ? Packing<W, BYTES>(before, scales[number - 1], words) : Packing<W, BYTES>();
            int64_t count = 0;
            W* total = nullptr;
            if (number < end) {
                const auto between = [&]() __attribute__((always_inline)) { packing.step(); };
                count = std::max<int64_t>(0, std::min<int64_t>(counts[number], GROUP));
                total = target(error, number * GROUP, count, rooms[number % 2]);
                const double sum = count ? sums<BYTES>(number * GROUP, count, total, between) : 0;
                scales[number] = W(sum / double(std::max<int64_t>(count, 1)));
            }
            packing.finish();
            if (counted) write(error, (number - 1) * GROUP, counted, before);
            else if (number > begin) std::memset(words, 0, GROUP / 8);
            before = total, counted = count;
        }
    }

    template <int BYTES> DSX_INLINE void operator()(int64_t begin, int64_t end, Width<BYTES>) const {
        if (block == GROUP) return groups<BYTES>(begin, end);
        const auto nothing = [] {};
        for (int64_t number = begin; number < end; number++) {
            alignas(64) W room[GROUP];
            const int64_t start = number * block, counted = std::min<int64_t>(counts[number], block);
            double sum = 0;
            for (int64_t at = start; at < start + counted; at += GROUP) {
                const int64_t count = std::min(GROUP, start + counted - at);
                sum += sums<BYTES>(at, count, target(error, at, count, room), nothing);
            }
            const W scale = W(sum / double(std::max<int64_t>(counted, 1)));
            scales[number] = scale;
            for (int64_t at = start; at < start + block; at += GROUP) {
                uint32_t* words = bits + at / WORD;
                const int64_t count = std::min(GROUP, start + counted - at);
                if (count <= 0) {
                    std::memset(words, 0, GROUP / 8);
                    continue;
                }
                W* total = target(error, at, count, room);
                if (total == room) sums<BYTES>(at, count, room, nothing);
                Packing<W, BYTES>(total, scale, words).finish();
                write(error, at, count, total);
            }
        }
    }
};

template <class W>
void signs(const Slice* s, const double* n, const int32_t* counts, uint32_t* bits, int64_t blocks, int64_t block,
           int32_t threads) {
    const int64_t grain = std::max<int64_t>(1, GRAIN / block);
    const Signs<W> body{s[0], s[1], s[2], s[3], W(n[0]), W(n[1]), W(n[2]), static_cast<W*>(s[4].data),
                        counts, bits, block};
    for_each(blocks, threads, grain, body);
}

}  // namespace

// slices: value (null: none), error, gradient, factor (null: none), scales (double: computes in double);
// numbers: multiplier, limit, 1 - beta; counts: of `blocks`; bits: blocks * block / 32 words
DSX_API void dsx_signs(
    const Slice* slices, const double* numbers, const int32_t* counts, uint32_t* bits, int64_t blocks, int64_t block,
    int32_t threads) {
    const auto compress = slices[4].type == FLOAT64 ? signs<double> : signs<float>;
    compress(slices, numbers, counts, bits, blocks, block, threads);
}
