// Adding a scaled slice to another, one pass.
#include "../slices.h"

namespace {

using namespace dsx;

template <class W> struct Accumulate {
    Slice into, source;
    W scale;
    static constexpr int64_t STEP = BLOCK;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[2][STEP];
        W* sum = read(into, at, count, room[0]);
        const W* more = read(source, at, count, room[1]);
        DSX_INDEPENDENT
        for (int64_t i = 0; i < count; i++) sum[i] += more[i] * scale;
        write(into, at, count, sum);
    }
};

}  // namespace

// slices: into, source
DSX_API void dsx_accumulate(const Slice* slices, double scale, int64_t count, int32_t threads) {
    slices[0].type == FLOAT64
        ? for_each_block(count, threads, Accumulate<double>{slices[0], slices[1], scale})
        : for_each_block(count, threads, Accumulate<float>{slices[0], slices[1], float(scale)});
}
