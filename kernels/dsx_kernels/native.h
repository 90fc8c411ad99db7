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

#ifdef DSX_X86
DSX_AVX512 inline int64_t stream_lines(const char* from, char* to, int64_t bytes) {
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
    return at;
}

// Floats with the bits of narrow<bf16>, of which a line is stored at a time, so that stores do not hold up reads.
DSX_AVX512 inline __m256i narrow_vector(__m512i bits) {
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512 value = _mm512_castsi512_ps(bits);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
}
DSX_AVX512 inline int64_t stream_narrow(const float* from, bf16* to, int64_t count) {
    int64_t at = 0;
    for (; at + 32 <= count; at += 32) {
        const __m256i low = narrow_vector(_mm512_loadu_si512(from + at));
        const __m256i high = narrow_vector(_mm512_loadu_si512(from + at + 16));
        const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), line);
    }
    return at;
}
inline int64_t stream_parts(const char* from, char* to, int64_t bytes) {
    const __m128i* in = reinterpret_cast<const __m128i*>(from);
    __m128i* out = reinterpret_cast<__m128i*>(to);
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        for (int part = 0; part < 4; part++) _mm_stream_si128(out++, _mm_loadu_si128(in++));
    return at;
}
#endif

// Copies to lines of 64 bytes, which are written whole and so need not be fetched first: `target` starts a line. What is
// left of the last one goes the usual way.
inline void stream(const void* source, void* target, int64_t bytes) {
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
    int64_t at = 0;
#ifdef DSX_X86
    at = (instructions == AVX512 ? stream_lines : stream_parts)(from, to, bytes);
#endif
    std::memcpy(to + at, from + at, bytes - at);
}

// Stores a register of BYTES, of which as many as make a line follow each other.
template <int BYTES> DSX_INLINE void stream_vector(void* to, const void* from) {
#ifdef DSX_X86
    for (int part = 0; part < BYTES / 16; part++)
        _mm_stream_si128(static_cast<__m128i*>(to) + part, _mm_loadu_si128(static_cast<const __m128i*>(from) + part));
#else
    std::memcpy(to, from, BYTES);
#endif
}

// The same with rounding; returns how many of the elements it took: none where there is no quick way.
inline int64_t stream_rounded(const float* from, bf16* to, int64_t count) {
#ifdef DSX_X86
    if (instructions == AVX512) return stream_narrow(from, to, count);
#endif
    return 0;
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
