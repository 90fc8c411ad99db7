// Vectors of 16 bytes for any processor. Included by native.cpp within a namespace.

typedef float Lanes __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(16)));
constexpr int64_t LANES = 4;
constexpr int COLUMNS = 2;            // vectors in a row of a tile: ROWS * COLUMNS sums fit the registers
constexpr float LEAST_POWER = -127;   // 2^x is zero here

DSX_INLINE Lanes load(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
DSX_INLINE void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }
DSX_INLINE Lanes all(float x) { return Lanes{x, x, x, x}; }
DSX_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }
DSX_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }  // b if one is NaN

// Numbers at 1.5 * 2^23 have no digits behind the point.
DSX_INLINE Lanes nearest(Lanes x) { return (x + all(0x1.8p23f)) - all(0x1.8p23f); }

DSX_INLINE Lanes times_power(Lanes x, Lanes power) {
    const Integers exponent = __builtin_convertvector(power, Integers) + 127;
    return x * bit_cast<Lanes>(exponent << 23);
}
DSX_INLINE float sum(Lanes x) { return (x[0] + x[2]) + (x[1] + x[3]); }
DSX_INLINE float largest(Lanes x) { return std::max(std::max(x[0], x[2]), std::max(x[1], x[3])); }
