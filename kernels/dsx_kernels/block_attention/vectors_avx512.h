// Vectors of AVX-512. Included by native.cpp within a namespace and the target of that instruction set.

using Lanes = __m512;
constexpr int64_t LANES = 16;
constexpr int COLUMNS = 4;            // vectors in a row of a tile: ROWS * COLUMNS sums fit the registers
constexpr float LEAST_POWER = -160;   // 2^x is zero here

DSX_INLINE Lanes load(const float* from) { return _mm512_loadu_ps(from); }
DSX_INLINE void store(float* to, Lanes x) { _mm512_storeu_ps(to, x); }
DSX_INLINE Lanes all(float x) { return _mm512_set1_ps(x); }
DSX_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
DSX_INLINE Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }  // b if one is NaN
DSX_INLINE Lanes nearest(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
DSX_INLINE Lanes times_power(Lanes x, Lanes power) { return _mm512_scalef_ps(x, power); }
DSX_INLINE float sum(Lanes x) { return _mm512_reduce_add_ps(x); }
DSX_INLINE float largest(Lanes x) { return _mm512_reduce_max_ps(x); }
