// Conversion between floating dtypes, one pass.
#include "../slices.h"

namespace {

using namespace dsx;

template <class W> struct Cast {
    Slice source, target;

    DSX_INLINE void block(int64_t at, int64_t count) const {
        alignas(64) W room[BLOCK];
        write(target, at, count, read(source, at, count, room));
    }
};

}  // namespace

// slices: source, target
DSX_API void dsx_cast(const Slice* slices, int64_t count, int32_t threads) {
    slices[0].type == FLOAT64 ? for_each_block(count, threads, Cast<double>{slices[0], slices[1]})
                              : for_each_block(count, threads, Cast<float>{slices[0], slices[1]});
}
