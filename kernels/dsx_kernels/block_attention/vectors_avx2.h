// Vectors of AVX2. Included by native.cpp within a namespace and the target of that instruction set.

using Lanes = __m256;
constexpr int64_t LANES = 8;
constexpr int COLUMNS = 2;            // vectors in a row of a tile: ROWS * COLUMNS sums fit the registers
constexpr float LEAST_POWER = -127;   // 2^x is zero here

DSX_INLINE Lanes load(const float* from) { return _mm256_loadu_ps(from); }
DSX_INLINE void store(float* to, Lanes x) { _mm256_storeu_ps(to, x); }
DSX_INLINE Lanes all(float x) { return _mm256_set1_ps(x); }
DSX_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
DSX_INLINE Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }  // b if one is NaN
DSX_INLINE Lanes nearest(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

DSX_INLINE Lanes times_power(Lanes x, Lanes power) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

DSX_INLINE float sum(Lanes x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

DSX_INLINE float largest(Lanes x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
