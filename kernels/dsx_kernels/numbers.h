// Element types and exact arithmetic on them: what kernels for CPUs and for CUDA share, so that an element gets the same
// bits from both. Compiled by the host's compiler, nvcc and NVRTC, without fused multiply-add.
#pragma once

#ifdef __CUDACC_RTC__
// NVRTC has no standard headers.
namespace dsx {
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
}  // namespace dsx
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

#ifdef __CUDACC__
#define DSX_INLINE __device__ __forceinline__
#else
#define DSX_INLINE inline __attribute__((always_inline))
#endif

namespace dsx {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <class To, class From> DSX_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

DSX_INLINE float widen(float value) { return value; }
DSX_INLINE double widen(double value) { return value; }
DSX_INLINE float widen(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

DSX_INLINE float widen(f16 value) {
    // Exponent and mantissa move up by 13 bits; a NaN becomes a quiet one, as processors make it. A subnormal is counted
    // in units of 2^-24, as an integer: its image is a normal number, whatever the processor does to subnormal ones.
    const uint32_t size = value.bits & 0x7fffu, sign = uint32_t(value.bits & 0x8000u) << 16;
    const uint32_t moved = (size << 13) + (size >= 0x7c00u ? 0x70000000u : 0x38000000u);
    const uint32_t quiet = size > 0x7c00u ? 0x00400000u : 0u;
    const uint32_t small = bit_cast<uint32_t>(float(int32_t(size)) * 0x1p-24f);
    return bit_cast<float>((size < 0x0400u ? small : moved | quiet) | sign);
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
    half = value != value ? 0x7e00u | ((size >> 13) & 0x03ffu) : half;  // a quiet NaN, as processors make it
    return {uint16_t(half | ((bits >> 16) & 0x8000u))};
}

// By way of float, as torch and GPUs do.
template <> DSX_INLINE bf16 narrow<bf16>(double value) { return narrow<bf16>(float(value)); }
template <> DSX_INLINE f16 narrow<f16>(double value) { return narrow<f16>(float(value)); }

// The square root, rounded to nearest.
#ifdef __CUDACC__
DSX_INLINE float root(float value) { return __fsqrt_rn(value); }
DSX_INLINE double root(double value) { return __dsqrt_rn(value); }
#else
DSX_INLINE float root(float value) { return std::sqrt(value); }
DSX_INLINE double root(double value) { return std::sqrt(value); }
#endif

// The type in which numbers of these types are computed: double if any is, else float.
template <class... T> struct wide {
    using type = float;
};
template <class First, class... Rest> struct wide<First, Rest...> : wide<Rest...> {};
template <class... Rest> struct wide<double, Rest...> {
    using type = double;
};

// A gradient as an update sees it: multiplied, clamped, NaN kept.
template <class W> DSX_INLINE W clamped(W gradient, W multiplier, W limit) {
    const W scaled = gradient * multiplier;
    const W below = scaled > limit ? limit : scaled;
    return below < -limit ? -limit : below;
}

}  // namespace dsx
