// Conversion between floating dtypes, one pass.
#include "../slices.h"

namespace {

using namespace dsx;

template <class W> struct Cast {
    Slice source;
    Output target;
    static constexpr int64_t STEP = 256;  // longer runs of stores past the caches keep reads waiting

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[STEP];
        write(target, at, count, read(source, at, count, room));
    }
};

}  // namespace

// slices: source, target
DSX_API void dsx_cast(const Slice* slices, int64_t count, int32_t threads) {
    const Output target = output(slices, 2, count);
    slices[0].type == FLOAT64 ? for_each_block(count, threads, Cast<double>{slices[0], target})
                              : for_each_block(count, threads, Cast<float>{slices[0], target});
}
