// Products of blocks of matrices. Included by native.cpp once for each instruction set, in a namespace and target of its
// own, after its vectors.
//
// An operand is made of units of 32 bits along the dimension that is summed over: a float, or a pair of bfloat16. The
// left one is read unit by unit, with any strides; the right one is [units, columns], a vector of columns at a time.

struct Wide {
    static constexpr int64_t PAIR = 1;
    using Left = Lanes;
    using Right = Lanes;

    static DSX_INLINE Left left(const Unit* unit) {
        float value;
        std::memcpy(&value, unit, sizeof value);
        return all(value);
    }
    static DSX_INLINE Right right(const Unit* units) { return load(reinterpret_cast<const float*>(units)); }
    static DSX_INLINE Lanes add_product(Left a, Right b, Lanes sum) { return multiply_add(a, b, sum); }

    // Elements as a left operand's row; rows 2n and 2n + 1 of elements as units of two rows that belong together.
    static DSX_INLINE void put_row(Unit* to, Lanes x) { store(reinterpret_cast<float*>(to), x); }
    static DSX_INLINE void put_across(Unit* to, int64_t row, int64_t width, Lanes even, Lanes odd) {
        put_row(to + row * width, even);
        put_row(to + (row + 1) * width, odd);
    }
};

#ifdef DSX_PAIRS
struct Pairs {
    static constexpr int64_t PAIR = 2;
    using Left = __m512bh;
    using Right = __m512bh;

    static DSX_INLINE Left left(const Unit* unit) { return Left(_mm512_set1_epi32(int32_t(*unit))); }
    static DSX_INLINE Right right(const Unit* units) { return Right(_mm512_loadu_si512(units)); }
    static DSX_INLINE Lanes add_product(Left a, Right b, Lanes sum) { return _mm512_dpbf16_ps(sum, a, b); }

    static DSX_INLINE void put_row(Unit* to, Lanes x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), __m256i(_mm512_cvtneps_pbh(x)));
    }
    static DSX_INLINE void put_across(Unit* to, int64_t row, int64_t width, Lanes even, Lanes odd) {
        static constexpr uint16_t IN_TURN[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i both = __m512i(_mm512_cvtne2ps_pbh(odd, even));
        _mm512_storeu_si512(to + row / 2 * width, _mm512_permutexvar_epi16(_mm512_loadu_si512(IN_TURN), both));
    }
};
#endif

// Four rows of four units to their transpose.
DSX_INLINE void transpose(const Unit* from, int64_t from_row, Unit* to, int64_t to_row) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    Four a, b, c, d;
    std::memcpy(&a, from, 16);
    std::memcpy(&b, from + from_row, 16);
    std::memcpy(&c, from + 2 * from_row, 16);
    std::memcpy(&d, from + 3 * from_row, 16);
    const Four ac = DSX_SHUFFLE(Four, a, c, 0, 4, 1, 5), bd = DSX_SHUFFLE(Four, b, d, 0, 4, 1, 5);
    const Four ca = DSX_SHUFFLE(Four, a, c, 2, 6, 3, 7), db = DSX_SHUFFLE(Four, b, d, 2, 6, 3, 7);
    const Four made[4] = {DSX_SHUFFLE(Four, ac, bd, 0, 4, 1, 5), DSX_SHUFFLE(Four, ac, bd, 2, 6, 3, 7),
                          DSX_SHUFFLE(Four, ca, db, 0, 4, 1, 5), DSX_SHUFFLE(Four, ca, db, 2, 6, 3, 7)};
#pragma GCC unroll 4
    for (int64_t row = 0; row < 4; row++) std::memcpy(to + row * to_row, &made[row], 16);
}

enum Mode { SET, FADE_AND_ADD, ADD };

// Operands and result of a product of blocks.
struct Factors {
    const Unit* left;
    int64_t left_row, left_unit;  // strides
    const Unit* right;
    int64_t right_unit;
    float* out;
    int64_t out_row;
};

// ROWS rows and C vectors of a product over units [begin, end): out = scale * product, out * fade[row] + product, or
// out + product.
template <class Operand, int C, Mode MODE>
DSX_INLINE void tile(Factors f, int64_t begin, int64_t end, const float* fade, float scale) {
    Lanes sums[ROWS][C];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const float* before = f.out + r * f.out_row + c * LANES;
            if constexpr (MODE == SET) sums[r][c] = all(0);
            if constexpr (MODE == FADE_AND_ADD) sums[r][c] = load(before) * all(fade[r]);
            if constexpr (MODE == ADD) sums[r][c] = load(before);
        }
    for (int64_t unit = begin; unit < end; unit++) {
        typename Operand::Right right[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) right[c] = Operand::right(f.right + unit * f.right_unit + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const typename Operand::Left left = Operand::left(f.left + r * f.left_row + unit * f.left_unit);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] = Operand::add_product(left, right[c], sums[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const Lanes made = MODE == SET ? sums[r][c] * all(scale) : sums[r][c];
            store(f.out + r * f.out_row + c * LANES, made);
        }
}

// `vectors` vectors of columns, from the factors' first.
template <class Operand, Mode MODE>
DSX_INLINE void strip(Factors f, int64_t vectors, int64_t begin, int64_t end, const float* fade, float scale) {
    for (; vectors >= COLUMNS; vectors -= COLUMNS, f.right += COLUMNS * LANES, f.out += COLUMNS * LANES)
        tile<Operand, COLUMNS, MODE>(f, begin, end, fade, scale);
    if constexpr (COLUMNS > 2) {
        if (vectors == 3) return tile<Operand, 3, MODE>(f, begin, end, fade, scale);
        if (vectors == 2) return tile<Operand, 2, MODE>(f, begin, end, fade, scale);
    }
    if (vectors == 1) tile<Operand, 1, MODE>(f, begin, end, fade, scale);
}

// out[r, c] = scale * product over all `units`, for the columns that each tile of rows may have, in whole vectors.
template <class Operand>
void set_spans(const Factors& f, int64_t block, int64_t units, float scale, const Spans& spans) {
    const int64_t wide = COLUMNS * LANES;
    for (int64_t column = 0; column < block; column += wide) {
        for (int64_t row = 0; row < block; row += ROWS) {
            const int64_t from = std::max<int64_t>(column, spans.tile_begin[row / ROWS] / LANES * LANES);
            const int64_t to = std::min<int64_t>(std::min(block, column + wide), spans.tile_end[row / ROWS]);
            if (from >= to) continue;
            Factors part = f;
            part.left += row * f.left_row;
            part.right += from;
            part.out += row * f.out_row + from;
            strip<Operand, SET>(part, (to - from + LANES - 1) / LANES, 0, units, nullptr, scale);
        }
    }
}

// out[r, :] += product over elements [begins[r / ROWS], ends[r / ROWS]), for each tile of rows.
template <class Operand, Mode MODE>
void add_spans(
    const Factors& f, int64_t block, int64_t columns, const int32_t* begins, const int32_t* ends, const float* fade) {
    for (int64_t row = 0; row < block; row += ROWS) {
        const int64_t begin = begins[row / ROWS] / Operand::PAIR;
        const int64_t end = (ends[row / ROWS] + Operand::PAIR - 1) / Operand::PAIR;
        if (begin >= end) continue;
        Factors part = f;
        part.left += row * f.left_row;
        part.out += row * f.out_row;
        strip<Operand, MODE>(part, columns / LANES, begin, end, MODE == FADE_AND_ADD ? fade + row : nullptr, 1);
    }
}

// 2^x, with a relative error of about 1e-7 (degree 6) or 4e-6 (degree 4); zero for -inf, NaN for NaN.
template <int DEGREE> DSX_INLINE Lanes power_of_two(Lanes x) {
    const Lanes bounded = larger(all(LEAST_POWER), x);
    const Lanes whole = nearest(bounded), rest = bounded - whole;
    Lanes y = all(DEGREE == 6 ? 1.5403530e-4f : 9.6181291e-3f);
    if constexpr (DEGREE == 6) {
        y = multiply_add(y, rest, all(1.3333558e-3f));
        y = multiply_add(y, rest, all(9.6181291e-3f));
    }
    y = multiply_add(y, rest, all(5.5504109e-2f));
    y = multiply_add(y, rest, all(2.4022651e-1f));
    y = multiply_add(y, rest, all(6.9314718e-1f));
    return times_power(multiply_add(y, rest, all(1)), whole);
}
