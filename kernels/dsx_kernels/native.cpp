// The library's own face: its version, and the instruction set it uses.
#include "native.h"

namespace dsx {

// Raised by one whenever the arguments of a function change; library.py holds the number that it calls.
constexpr int32_t ABI = 3;

static int32_t best() {
#ifdef DSX_X86
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 && avx2 ? AVX512 : avx2 ? AVX2 : GENERIC;
#else
    return GENERIC;
#endif
}

int32_t instructions = best();

}  // namespace dsx

DSX_API int32_t dsx_abi() { return dsx::ABI; }

// The best instruction set of this processor.
DSX_API int32_t dsx_best() { return dsx::best(); }

// The one in use; `wanted` above what there is changes nothing, a negative one only asks.
DSX_API int32_t dsx_instructions(int32_t wanted) {
    if (wanted >= 0 && wanted <= dsx::best()) dsx::instructions = wanted;
    return dsx::instructions;
}
