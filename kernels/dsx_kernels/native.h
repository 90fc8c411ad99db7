// What every native.cpp shares: element types, loops over instruction sets and threads, the version of the interface.
//
// Plain C ABI, called through ctypes; no header of Python or torch. Loops are written once and compiled for each
// instruction set by `for_each`. They use no fused multiply-add (-ffp-contract=off) and no approximation, so an
// element's bits depend neither on the instruction set, nor on whether it fell into a vector or a tail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <omp.h>

#if defined(__x86_64__) && !defined(DSX_GENERIC_ONLY)
#define DSX_X86 1
#define DSX_AVX2 __attribute__((target("avx2,fma,f16c")))
#define DSX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")))
#endif

#if defined(__clang__)
#define DSX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DSX_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define DSX_API extern "C" __attribute__((visibility("default")))
#define DSX_INLINE inline __attribute__((always_inline))

namespace dsx {

// ---- element types ------------------------------------------------------------------------------------------------

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

enum dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

template <class To, class From> DSX_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

DSX_INLINE float widen(float value) { return value; }
DSX_INLINE double widen(double value) { return value; }
DSX_INLINE float widen(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

DSX_INLINE float widen(f16 value) {
    // Exponent and mantissa move up by 13 bits. A subnormal is counted in units of 2^-24, as an integer: its image is
    // a normal number, whatever the processor does to subnormal ones.
    const uint32_t size = value.bits & 0x7fffu, sign = uint32_t(value.bits & 0x8000u) << 16;
    const uint32_t moved = (size << 13) + (size >= 0x7c00u ? 0x70000000u : 0x38000000u);
    const uint32_t small = bit_cast<uint32_t>(float(int32_t(size)) * 0x1p-24f);
    return bit_cast<float>((size < 0x0400u ? small : moved) | sign);
}

template <class To, class From> DSX_INLINE To narrow(From value);  // round to nearest, ties to even

template <> DSX_INLINE float narrow<float>(float value) { return value; }
template <> DSX_INLINE float narrow<float>(double value) { return float(value); }
template <> DSX_INLINE double narrow<double>(float value) { return value; }
template <> DSX_INLINE double narrow<double>(double value) { return value; }

template <> DSX_INLINE bf16 narrow<bf16>(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {uint16_t(value != value ? 0x7fc0u : rounded)};
}

template <> DSX_INLINE f16 narrow<f16>(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), size = bits & 0x7fffffffu;
    const uint32_t normal = (size - 0x38000000u + 0x0fffu + ((size >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves the multiple of 2^-24 that is nearest in the low bits.
    const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
    uint32_t half = size < 0x38800000u ? small : normal;
    half = size >= 0x477ff000u ? 0x7c00u : half;
    half = value != value ? 0x7e00u : half;
    return {uint16_t(half | ((bits >> 16) & 0x8000u))};
}

// By way of float, as torch and GPUs do.
template <> DSX_INLINE bf16 narrow<bf16>(double value) { return narrow<bf16>(float(value)); }
template <> DSX_INLINE f16 narrow<f16>(double value) { return narrow<f16>(float(value)); }

// Calls `use` with a value of the element type that a code names.
template <class Use> DSX_INLINE void with_type(int32_t code, const Use& use) {
    switch (code) {
    case BFLOAT16: return use(bf16{});
    case FLOAT16: return use(f16{});
    case FLOAT64: return use(double{});
    default: return use(float{});
    }
}

// The type in which numbers of these types are computed: double if any is, else float.
template <class... T> struct wide {
    using type = typename std::conditional<(std::is_same<T, double>::value || ...), double, float>::type;
};

// ---- instruction sets and threads ---------------------------------------------------------------------------------

enum level : int32_t { GENERIC = 0, AVX2 = 1, AVX512 = 2 };
extern int32_t instructions;

// Bytes of a vector register.
template <int BYTES> struct Width {
    static constexpr int bytes = BYTES;
};

#ifdef DSX_X86
template <class Body> DSX_AVX512 void on_avx512(const Body& body, int64_t begin, int64_t end) {
    body(begin, end, Width<64>{});
}
template <class Body> DSX_AVX2 void on_avx2(const Body& body, int64_t begin, int64_t end) {
    body(begin, end, Width<32>{});
}
#endif
template <class Body> void on_generic(const Body& body, int64_t begin, int64_t end) {
    body(begin, end, Width<16>{});
}

template <class Body> void run(const Body& body, int64_t begin, int64_t end) {
#ifdef DSX_X86
    if (instructions == AVX512) return on_avx512(body, begin, end);
    if (instructions == AVX2) return on_avx2(body, begin, end);
#endif
    on_generic(body, begin, end);
}

// Calls `body(begin, end, width)`, an always-inline callable, for ranges that together are [0, count).
//
// grain  what a thread is worth starting for; ranges start at multiples of 64
template <class Body> void for_each(int64_t count, int32_t threads, int64_t grain, const Body& body) {
    const int64_t useful = std::min<int64_t>(threads, count / grain);
    if (useful <= 1) {
        if (count > 0) run(body, 0, count);
        return;
    }
#pragma omp parallel num_threads(int(useful))
    {
        const int64_t share = (count + omp_get_num_threads() - 1) / omp_get_num_threads();
        const int64_t each = (share + 63) / 64 * 64;
        const int64_t begin = std::min(count, each * omp_get_thread_num()), end = std::min(count, begin + each);
        if (begin < end) run(body, begin, end);
    }
}

}  // namespace dsx
