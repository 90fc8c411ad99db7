// Conversion between floating dtypes, one pass.
#include "../cuda.cuh"

namespace dsx {

template <class Source, class Target>
__global__ void __launch_bounds__(THREADS) cast(const Source* source, Target* target, int64_t count, int64_t head) {
    using W = typename wide<Source>::type;
    for_each<each<Source, Target>>(count, head, [&](auto size, int64_t at) {
        W values[decltype(size)::value];
        read(source, at, values);
        write(target, at, values);
    });
}

}  // namespace dsx
