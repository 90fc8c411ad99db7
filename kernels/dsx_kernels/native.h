// What every native.cpp shares: element types, loops over instruction sets and threads, the version of the interface.
//
// Plain C ABI, called through ctypes; no header of Python or torch. Loops are written once and compiled for each
// instruction set by `for_each`. They use no fused multiply-add (-ffp-contract=off) and no approximation, so an
// element's bits depend neither on the instruction set, nor on whether it fell into a vector or a tail.
#pragma once

#include <algorithm>
#include <type_traits>

#include <omp.h>

#include "numbers.h"

#if defined(__x86_64__) && !defined(DSX_GENERIC_ONLY)
#include <immintrin.h>
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

namespace dsx {

// ---- element types ------------------------------------------------------------------------------------------------

enum dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

// Calls `use` with a value of the element type that a code names.
template <class Use> DSX_INLINE void with_type(int32_t code, const Use& use) {
    switch (code) {
    case BFLOAT16: return use(bf16{});
    case FLOAT16: return use(f16{});
    case FLOAT64: return use(double{});
    default: return use(float{});
    }
}

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

// ---- float16 in blocks --------------------------------------------------------------------------------------------

// Processors with AVX2 convert float16 by an instruction that compilers do not make of a loop. Its bits are those of
// numbers.h, subnormal numbers and NaN included, by which the rest of a block goes.
#ifdef DSX_X86
DSX_AVX2 inline int64_t widen_vectors(const f16* from, float* to, int64_t count) {
    int64_t at = 0;
    for (; at + 8 <= count; at += 8)
        _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at))));
    return at;
}
DSX_AVX2 inline int64_t narrow_vectors(const float* from, f16* to, int64_t count) {
    int64_t at = 0;
    for (; at + 8 <= count; at += 8)
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(to + at), _mm256_cvtps_ph(_mm256_loadu_ps(from + at), _MM_FROUND_TO_NEAREST_INT)
        );
    return at;
}
#else
inline int64_t widen_vectors(const f16*, float*, int64_t) { return 0; }
inline int64_t narrow_vectors(const float*, f16*, int64_t) { return 0; }
#endif

inline void widen(const f16* from, float* to, int64_t count) {
    const int64_t done = instructions == GENERIC ? 0 : widen_vectors(from, to, count);
    DSX_INDEPENDENT
    for (int64_t at = done; at < count; at++) to[at] = widen(from[at]);
}

inline void narrow(const float* from, f16* to, int64_t count) {
    const int64_t done = instructions == GENERIC ? 0 : narrow_vectors(from, to, count);
    DSX_INDEPENDENT
    for (int64_t at = done; at < count; at++) to[at] = narrow<f16>(from[at]);
}

// ---- stores past the caches ---------------------------------------------------------------------------------------

// Copies to lines of 64 bytes, which are written whole and so need not be fetched first: `to` starts a line. What is
// left of the last one goes the usual way.
inline void stream(const void* from, void* to, int64_t bytes) {
    int64_t at = 0;
#ifdef DSX_X86
    const __m128i* in = static_cast<const __m128i*>(from);
    __m128i* out = static_cast<__m128i*>(to);
    for (; at + 64 <= bytes; at += 64)
        for (int part = 0; part < 4; part++) _mm_stream_si128(out++, _mm_loadu_si128(in++));
#endif
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, bytes - at);
}

// Puts what this thread has streamed before whatever it writes next, as others see it.
inline void settle() {
#ifdef DSX_X86
    _mm_sfence();
#endif
}

// ---- loops --------------------------------------------------------------------------------------------------------

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
