// The passes over blocks. Included by native.cpp once for each instruction set, after products.h.
//
// "Rows" of a block are a left operand [tokens, units of dim]; "across" is its transpose [units of dim, tokens] and
// "along" is [units of tokens, dim], both right operands. Scores are in powers of two.

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;
constexpr float INFINITE = __builtin_inff();

template <class T> DSX_INLINE void widen_row(const void* from, int64_t at, int64_t dim, float* to) {
    const T* row = static_cast<const T*>(from) + at;
    DSX_INDEPENDENT
    for (int64_t i = 0; i < dim; i++) to[i] = widen(row[i]);
}

template <class T> DSX_INLINE void narrow_row(void* to, int64_t at, int64_t dim, const float* from, float factor) {
    T* row = static_cast<T*>(to) + at;
    DSX_INDEPENDENT
    for (int64_t i = 0; i < dim; i++) row[i] = narrow<T>(from[i] * factor);
}

DSX_INLINE int64_t place(const View& view, int64_t batch, int64_t head, int64_t token) {
    return batch * view.batch + head * view.head + token * view.token;
}

void read_row(const View& view, int64_t at, int64_t dim, float* to) {
    if (view.type == BFLOAT16) return widen_row<bf16>(view.data, at, dim, to);
    if (view.type == FLOAT16) return widen_row<f16>(view.data, at, dim, to);
    widen_row<float>(view.data, at, dim, to);
}

void write_row(const View& view, int64_t at, int64_t dim, const float* from, float factor) {
    if (view.type == BFLOAT16) return narrow_row<bf16>(view.data, at, dim, from, factor);
    if (view.type == FLOAT16) return narrow_row<f16>(view.data, at, dim, from, factor);
    narrow_row<float>(view.data, at, dim, from, factor);
}

DSX_INLINE uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

template <class Operand> struct Engine {
    static constexpr int64_t PAIR = Operand::PAIR;
    static constexpr int DEGREE = PAIR == 2 ? 4 : 6;

    // A thread's own memory: operands and results of one block. Where units are floats, weights lie on scores and
    // `grad_*` on `products`.
    struct Workspace {
        int64_t block, width, units;  // units: of dim
        float *scores, *products;     // [block, block]: q kᵀ, grad vᵀ
        Unit *weights, *grad_rows, *weights_across, *grad_across;
        float *sums, *line, *kept;
        float *most, *total, *fade, *added, *shift, *delta;  // [block]
        Unit *q_rows, *q_along, *g_rows, *g_along;
        int64_t bytes;

        Workspace(const Problem& p, char* memory) {
            block = p.block;
            width = (p.dim + LANES - 1) / LANES * LANES;
            width = (width + PAIR - 1) / PAIR * PAIR;
            units = width / PAIR;
            bytes = 0;
            take(memory, scores, block * block);
            take(memory, products, block * block);
            take(memory, sums, block * width);
            take(memory, line, 2 * width + block);
            for (float** each : {&most, &total, &fade, &added, &shift, &delta, &kept}) take(memory, *each, block);
            take(memory, q_rows, block * units);
            take(memory, g_rows, block * units);
            q_along = q_rows, g_along = g_rows;
            weights = weights_across = reinterpret_cast<Unit*>(scores);
            grad_rows = grad_across = reinterpret_cast<Unit*>(products);
            if constexpr (PAIR == 2) {
                take(memory, q_along, block * units);
                take(memory, g_along, block * units);
                take(memory, weights, block * block / PAIR);
                take(memory, weights_across, block * block / PAIR);
                take(memory, grad_across, block * block / PAIR);
                grad_rows = weights;
            }
        }

        // Of a second row of blocks, which is worked on in turns with the first one: what a block leaves is not kept.
        Workspace(const Problem& p, const Workspace& first, char* memory) : Workspace(p, memory) {
            scores = first.scores, products = first.products, line = first.line, kept = first.kept;
            weights = first.weights, weights_across = first.weights_across;
            grad_rows = first.grad_rows, grad_across = first.grad_across;
        }

        template <class T> void take(char* memory, T*& pointer, int64_t count) {
            pointer = reinterpret_cast<T*>(memory + bytes);
            bytes += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        }
    };

    static int64_t workspace(const Problem& p) { return 2 * Workspace(p, nullptr).bytes; }

    // ---- operands ---------------------------------------------------------------------------------------------------

    // Tokens of a block as a left operand's rows, zeros beyond the last token and the last element.
    static void rows(const Problem& p, const Workspace& w, const View& view, Head head, int64_t first, int64_t count,
                     int64_t which, Unit* to) {
        const int64_t used = p.dim * 4 / PAIR, bytes = w.units * 4;  // of a row
        const bool same = view.type == (PAIR == 2 ? BFLOAT16 : FLOAT32);
        int64_t token = 0;
        if (same && used == bytes && view.token == p.dim) {
            const char* from = static_cast<const char*>(view.data) + place(view, head.batch, which, first) * (4 / PAIR);
            std::memcpy(to, from, size_t(count * bytes));
            token = count;
        }
        for (; token < count; token++) {
            Unit* row = to + token * w.units;
            const int64_t at = place(view, head.batch, which, first + token);
            if constexpr (PAIR == 2) std::memcpy(row, static_cast<const Half*>(view.data) + at, size_t(used));
            else read_row(view, at, p.dim, reinterpret_cast<float*>(row));
            std::memset(reinterpret_cast<char*>(row) + used, 0, size_t(bytes - used));
        }
        std::memset(to + count * w.units, 0, size_t((w.block - count) * bytes));
    }

    static void across(const Workspace& w, const Unit* rows, Unit* to) {
        for (int64_t token = 0; token < w.block; token += 4)
            for (int64_t unit = 0; unit < w.units; unit += 4)
                transpose(rows + token * w.units + unit, w.units, to + unit * w.block + token, w.block);
    }

    static void along(const Workspace& w, const Unit* rows, Unit* to) {
        if constexpr (PAIR == 1) {
            if (to != rows) std::memcpy(to, rows, size_t(w.block * w.units) * 4);
        } else {
            for (int64_t pair = 0; pair < w.block / 2; pair++) {
                const Half* even = reinterpret_cast<const Half*>(rows + 2 * pair * w.units);
                const Half* odd = even + w.width;
                DSX_INDEPENDENT
                for (int64_t i = 0; i < w.width; i++) to[pair * w.width + i] = even[i] | uint32_t(odd[i]) << 16;
            }
        }
    }

    static void pack(const Problem& p, const Packed& packed, int64_t slot, int64_t column, bool backward, char* memory) {
        const Workspace w(p, memory);
        const Head head = {slot / p.key_heads, 0, slot % p.key_heads};
        const int64_t first = column * p.block, count = std::min(p.block, p.keys - first);
        const int64_t at = (slot - packed.first) * packed.units + column * w.block * w.units;
        Unit* made = w.q_rows;
        rows(p, w, p.k, head, first, count, head.key_head, made);
        across(w, made, packed.k_across + at);
        if (backward) along(w, made, packed.k_along + at);
        rows(p, w, p.v, head, first, count, head.key_head, made);
        if (backward) across(w, made, packed.v_across + at);
        else along(w, made, packed.v_along + at);
    }

    // ---- scores -----------------------------------------------------------------------------------------------------

    // A block of the score matrix.
    struct Block {
        Head head;
        int64_t row, column, entry, at;  // at: of its keys in packed operands
        Spans spans;

        Block(const Problem& p, const Workspace& w, const Packed& packed, Head h, int64_t row_, int64_t column_, int64_t e)
            : head(h), row(row_), column(column_), entry(e),
              at((h.batch * p.key_heads + h.key_head - packed.first) * packed.units + column_ * w.block * w.units),
              spans(p, row_, column_, p.kinds[e], p.windows[p.group(h.batch, h.head)]) {}
    };

    static void score(const Problem& p, const Workspace& w, const Packed& packed, const Block& b) {
        const Factors f = {w.q_rows, w.units, 1, packed.k_across + b.at, w.block, w.scores, w.block};
        set_spans<Operand>(f, w.block, units_of(p), float(p.scale) * LOG2_E, b.spans);
        const bool more = p.bias || p.padding || (p.kinds[b.entry] & (SEGMENTS | BITS));
        for (int64_t r = 0; r < w.block; r++) {
            const int64_t from = b.spans.tile_begin[r / ROWS] / LANES * LANES, to = upper(b.spans.tile_end[r / ROWS]);
            float* scores = w.scores + r * w.block;
            for (int64_t c = from; c < std::min<int64_t>(to, b.spans.begin[r]); c++) scores[c] = -INFINITE;
            for (int64_t c = std::max<int64_t>(from, b.spans.end[r]); c < to; c++) scores[c] = -INFINITE;
            if (more) restrict_row(p, b, r, scores);
        }
    }

    static DSX_INLINE int64_t units_of(const Problem& p) { return (p.dim + PAIR - 1) / PAIR; }
    static DSX_INLINE int64_t upper(int64_t column) { return (column + LANES - 1) / LANES * LANES; }

    // Adds the bias to a row of scores, and takes away pairs by key padding, segments and bits.
    static void restrict_row(const Problem& p, const Block& b, int64_t r, float* scores) {
        const int64_t begin = b.spans.begin[r], end = b.spans.end[r];
        const int64_t query = b.row * p.block + r, key = b.column * p.block;
        const uint8_t kind = p.kinds[b.entry];
        if (p.bias) {
            const Head& h = b.head;
            const float* bias = p.bias + h.batch * p.bias_batch + h.head * p.bias_head + query * p.bias_query + key;
            for (int64_t c = begin; c < end; c++) scores[c] += bias[c] * LOG2_E;
        }
        if (p.padding) {
            const uint8_t* may = p.padding + b.head.batch * p.keys + key;
            for (int64_t c = begin; c < end; c++) scores[c] = may[c] ? scores[c] : -INFINITE;
        }
        if (kind & SEGMENTS && begin < end) {
            const int32_t segment = p.query_segments[b.head.batch * p.query_segments_batch + query];
            const int32_t* segments = p.key_segments + b.head.batch * p.key_segments_batch + key;
            for (int64_t c = begin; c < end; c++) scores[c] = segments[c] == segment ? scores[c] : -INFINITE;
        }
        if (kind & BITS) {
            const uint8_t* bits = p.bits + (int64_t(p.masks[b.entry]) * p.block + r) * (p.block / 8);
            for (int64_t c = begin; c < end; c++) scores[c] = bits[c / 8] >> (c % 8) & 1 ? scores[c] : -INFINITE;
        }
    }

    // What dropout multiplies a row's pairs by.
    static void keep(const Problem& p, const Block& b, int64_t r, int64_t from, int64_t to, float* kept) {
        const uint32_t head = mixed(uint32_t(p.seed) + uint32_t(b.head.batch * p.heads + b.head.head));
        const uint32_t row = mixed(head + uint32_t(b.row * p.block + r)), limit = uint32_t(p.threshold);
        const uint32_t key = uint32_t(b.column * p.block);
        for (int64_t c = from; c < to; c++)
            kept[c] = mixed(row ^ (key + uint32_t(c)) * 0x9e3779b9u) >= limit ? float(p.kept) : 0.0f;
    }

    // ---- forward ----------------------------------------------------------------------------------------------------

    static void forward(const Problem& p, const Packed& packed, Head head, int64_t row, char* memory) {
        const Workspace w(p, memory);
        const int64_t first = row * p.block, count = std::min(p.block, p.queries - first);
        rows(p, w, p.q, head, first, count, head.head, w.q_rows);
        std::fill_n(w.most, w.block, -INFINITE);
        std::fill_n(w.total, w.block, 0.0f);
        std::fill_n(w.sums, w.block * w.width, 0.0f);
        const int32_t* offsets = p.offsets + p.group(head.batch, head.head) * (p.query_blocks + 1) + row;
        for (int64_t entry = offsets[0]; entry < offsets[1]; entry++) {
            const Block b(p, w, packed, head, row, p.columns[entry], entry);
            score(p, w, packed, b);
            if (p.threshold) weigh<true>(p, w, b);
            else weigh<false>(p, w, b);
            const Factors f = {w.weights, w.block / PAIR, 1, packed.v_along + b.at, w.width, w.sums, w.width};
            add_spans<Operand, FADE_AND_ADD>(f, w.block, w.width, b.spans.tile_begin, b.spans.tile_end, w.fade);
        }
        for (int64_t r = 0; r < count; r++) {
            const float total = w.total[r];
            const int64_t at = place(p.out, head.batch, head.head, first + r);
            write_row(p.out, at, p.dim, w.sums + r * w.width, total == 0 ? 0 : 1 / total);
            const float lse = total == 0 ? -INFINITE : (w.most[r] + std::log2(total)) * LN_2;
            p.lse[(head.batch * p.heads + head.head) * p.queries + first + r] = lse;
        }
    }

    // Scores to weights under the largest score so far, and what sums under the one before are to be multiplied by. A
    // tile's rows together: one row waits for its largest score, and for its sum.
    template <bool DROP> static void weigh(const Problem& p, const Workspace& w, const Block& b) {
        for (int64_t row = 0; row < w.block; row += ROWS) {
            const int64_t from = b.spans.tile_begin[row / ROWS] / LANES * LANES, to = upper(b.spans.tile_end[row / ROWS]);
            const float* scores = w.scores + row * w.block;
            Unit* weights = w.weights + row * w.block / PAIR;
            Lanes high[ROWS], base[ROWS], added[ROWS];
#pragma GCC unroll 4
            for (int64_t r = 0; r < ROWS; r++) high[r] = all(-INFINITE), added[r] = all(0);
            for (int64_t c = from; c < to; c += LANES)
#pragma GCC unroll 4
                for (int64_t r = 0; r < ROWS; r++) high[r] = larger(high[r], load(scores + r * w.block + c));
#pragma GCC unroll 4
            for (int64_t r = 0; r < ROWS; r++) {
                const float before = w.most[row + r], now = std::max(before, largest(high[r]));
                base[r] = all(now == -INFINITE ? 0 : now);
                w.fade[row + r] = before == now ? 0 : before - now;
                w.most[row + r] = now;
            }
            for (int64_t c = from; c < to; c += LANES)
#pragma GCC unroll 4
                for (int64_t r = 0; r < ROWS; r++) {
                    Lanes weight = power_of_two<DEGREE>(load(scores + r * w.block + c) - base[r]);
                    added[r] = added[r] + weight;
                    if constexpr (DROP) {
                        keep(p, b, row + r, c, c + LANES, w.kept);
                        weight = weight * load(w.kept + c);
                    }
                    Operand::put_row(weights + (r * w.block + c) / PAIR, weight);
                }
#pragma GCC unroll 4
            for (int64_t r = 0; r < ROWS; r++) w.added[row + r] = sum(added[r]);
        }
        for (int64_t r = 0; r < w.block; r += LANES) {
            const Lanes fade = power_of_two<6>(load(w.fade + r));
            store(w.fade + r, fade);
            store(w.total + r, multiply_add(load(w.total + r), fade, load(w.added + r)));
        }
    }

    // ---- backward ---------------------------------------------------------------------------------------------------

    // Operands of a row of blocks, and the log-sum-exp of each query; `first_time`: its delta is still to be made.
    static void load_queries(const Problem& p, const Workspace& w, Head head, int64_t row, bool along_too, bool first_time) {
        const int64_t first = row * p.block, count = std::min(p.block, p.queries - first);
        rows(p, w, p.q, head, first, count, head.head, w.q_rows);
        rows(p, w, p.grad, head, first, count, head.head, w.g_rows);
        if (along_too) along(w, w.q_rows, w.q_along), along(w, w.g_rows, w.g_along);
        const int64_t at = (head.batch * p.heads + head.head) * p.queries + first;
        if (first_time) {
            for (int64_t r = 0; r < count; r++) p.delta[at + r] = delta(p, w, head, first + r, at + r);
        }
        std::fill_n(w.shift, w.block, INFINITE);
        std::fill_n(w.delta, w.block, 0.0f);  // weights of zero take nothing away from what is not a number
        for (int64_t r = 0; r < count; r++) {
            w.shift[r] = p.lse[at + r] == -INFINITE ? INFINITE : p.lse[at + r] * LOG2_E;
            w.delta[r] = p.delta[at + r];
        }
    }

    static float delta(const Problem& p, const Workspace& w, Head head, int64_t query, int64_t at) {
        float *grad = w.line, *out = w.line + w.width;
        std::fill_n(w.line, 2 * w.width, 0.0f);
        read_row(p.grad, place(p.grad, head.batch, head.head, query), p.dim, grad);
        read_row(p.out, place(p.out, head.batch, head.head, query), p.dim, out);
        Lanes made = all(0);
        for (int64_t i = 0; i < w.width; i += LANES) made = multiply_add(load(grad + i), load(out + i), made);
        return sum(made) - (p.grad_lse ? p.grad_lse[at] : 0);
    }

    // Adds what a block gives to the gradients: to `w.sums` for its queries, to grad_k and grad_v for its keys.
    template <bool QUERIES, bool KEYS>
    static void differentiate(const Problem& p, const Workspace& w, const Packed& packed, const Block& b, float* grad_k,
                              float* grad_v) {
        score(p, w, packed, b);
        const Factors f = {w.g_rows, w.units, 1, packed.v_across + b.at, w.block, w.products, w.block};
        set_spans<Operand>(f, w.block, units_of(p), 1, b.spans);
        const bool more = p.threshold || (QUERIES && p.grad_bias);
        for (int64_t r = 0; r < w.block; r += 2) {
            if (more) differentiate_rows<QUERIES, KEYS, true>(p, w, b, r);
            else differentiate_rows<QUERIES, KEYS, false>(p, w, b, r);
        }
        if constexpr (QUERIES) {
            const Factors q = {w.grad_rows, w.block / PAIR, 1, packed.k_along + b.at, w.width, w.sums, w.width};
            add_spans<Operand, ADD>(q, w.block, w.width, b.spans.tile_begin, b.spans.tile_end, nullptr);
        }
        if constexpr (KEYS) {
            const Factors v = {w.weights_across, 1, w.block, w.g_along, w.width, grad_v, w.width};
            add_spans<Operand, ADD>(v, w.block, w.width, b.spans.row_begin, b.spans.row_end, nullptr);
            const Factors k = {w.grad_across, 1, w.block, w.q_along, w.width, grad_k, w.width};
            add_spans<Operand, ADD>(k, w.block, w.width, b.spans.row_begin, b.spans.row_end, nullptr);
        }
    }

    // Two rows of scores and products to weights and gradients of scores; MORE: with dropout, or the bias' gradient.
    template <bool QUERIES, bool KEYS, bool MORE>
    static void differentiate_rows(const Problem& p, const Workspace& w, const Block& b, int64_t row) {
        const int64_t from = b.spans.tile_begin[row / ROWS] / LANES * LANES, to = upper(b.spans.tile_end[row / ROWS]);
        const int64_t width = w.block;
        const float *scores = w.scores + row * width, *products = w.products + row * width;
        Unit *rows = w.grad_rows + row * width / PAIR, *weights_across = w.weights_across, *grad_across = w.grad_across;
        const Lanes scale = all(float(p.scale));
        const Lanes shift[2] = {all(w.shift[row]), all(w.shift[row + 1])};
        const Lanes delta[2] = {all(w.delta[row]), all(w.delta[row + 1])};
        for (int64_t c = from; c < to; c += LANES) {
            Lanes weights[2], grads[2];
#pragma GCC unroll 2
            for (int64_t odd = 0; odd < 2; odd++) {
                const Lanes weight = power_of_two<DEGREE>(load(scores + odd * width + c) - shift[odd]);
                Lanes product = load(products + odd * width + c);
                weights[odd] = weight;
                if constexpr (MORE) {
                    if (p.threshold) {
                        keep(p, b, row + odd, c, c + LANES, w.kept);
                        product = product * load(w.kept + c);
                        weights[odd] = weight * load(w.kept + c);
                    }
                }
                const Lanes grad = weight * (product - delta[odd]);
                if constexpr (MORE && QUERIES) {
                    if (p.grad_bias) put_grad_bias(p, w, b, row + odd, c, grad);
                }
                grads[odd] = grad * scale;
                if constexpr (QUERIES && PAIR == 2) Operand::put_row(rows + (odd * width + c) / PAIR, grads[odd]);
            }
            if constexpr (KEYS) Operand::put_across(weights_across + c, row, width, weights[0], weights[1]);
            if constexpr (KEYS || PAIR == 1) Operand::put_across(grad_across + c, row, width, grads[0], grads[1]);
        }
    }

    static void put_grad_bias(const Problem& p, const Workspace& w, const Block& b, int64_t r, int64_t c, Lanes grad) {
        store(w.line, grad);
        const int64_t row = (b.head.batch * p.heads + b.head.head) * p.queries + b.row * p.block + r;
        float* to = p.grad_bias + row * p.keys + b.column * p.block;
        const int64_t end = std::min<int64_t>(c + LANES, b.spans.end[r]);
        for (int64_t at = std::max<int64_t>(c, b.spans.begin[r]); at < end; at++) to[at] = w.line[at - c];
    }

    // A row of blocks in the making: its entries that are still to come.
    struct Row {
        const Workspace& w;
        int64_t row, entry, end;

        Row(const Problem& p, const Workspace& w_, Head head, int64_t row_, bool keys) : w(w_), row(row_) {
            const int32_t* offsets = p.offsets + p.group(head.batch, head.head) * (p.query_blocks + 1) + row;
            entry = offsets[0], end = offsets[1];
            load_queries(p, w, head, row, keys, true);
            std::fill_n(w.sums, w.block * w.width, 0.0f);
        }

        bool is_at(const Problem& p, int32_t column) const { return entry < end && p.columns[entry] == column; }

        int32_t column(const Problem& p) const { return entry < end ? p.columns[entry] : INT32_MAX; }
    };

    template <bool KEYS> static void next(const Problem& p, const Packed& packed, Head head, Row& row) {
        const Block b(p, row.w, packed, head, row.row, p.columns[row.entry], row.entry);
        row.entry++;
        const int64_t slot = head.batch * p.key_heads + head.key_head - packed.first;
        const int64_t at = slot * packed.sums + b.column * row.w.block * row.w.width;
        differentiate<true, KEYS>(p, row.w, packed, b, packed.grad_k + at, packed.grad_v + at);
    }

    static void write_queries(const Problem& p, Head head, const Row& row) {
        const Workspace& w = row.w;
        const int64_t first = row.row * p.block, count = std::min(p.block, p.queries - first);
        for (int64_t r = 0; r < count; r++)
            write_row(p.grad_q, place(p.grad_q, head.batch, head.head, first + r), p.dim, w.sums + r * w.width, 1);
    }

    static void backward_row(const Problem& p, const Packed& packed, Head head, int64_t number, char* memory) {
        const Workspace w(p, memory);
        Row row(p, w, head, number, false);
        while (row.entry < row.end) next<false>(p, packed, head, row);
        write_queries(p, head, row);
    }

    // Two rows of blocks together: what both see of a long sequence comes but once from beyond the core's own caches.
    static void backward_rows(const Problem& p, const Packed& packed, Head head, int64_t number, char* memory) {
        const Workspace w(p, memory), more(p, w, memory + w.bytes);
        Row one(p, w, head, number, true), other(p, more, head, number + 1, true);
        while (one.entry < one.end || other.entry < other.end) {
            const int32_t column = std::min(one.column(p), other.column(p));
            if (one.is_at(p, column)) next<true>(p, packed, head, one);
            if (other.is_at(p, column)) next<true>(p, packed, head, other);
        }
        write_queries(p, head, one);
        write_queries(p, head, other);
    }

    // All gradients of a key head and its query heads, each block once.
    static void backward_slot(const Problem& p, const Packed& packed, int64_t slot, char* memory) {
        const Workspace w(p, memory);
        float *grad_k = packed.grad_k + (slot - packed.first) * packed.sums;
        float *grad_v = packed.grad_v + (slot - packed.first) * packed.sums;
        std::fill_n(grad_k, packed.sums, 0.0f);
        std::fill_n(grad_v, packed.sums, 0.0f);
        const int64_t batch = slot / p.key_heads, key_head = slot % p.key_heads;
        for (int64_t member = 0; member < p.group_size(); member++) {
            const Head head = {batch, key_head * p.group_size() + member, key_head};
            int64_t row = 0;
            for (; row + 1 < p.query_blocks; row += 2) backward_rows(p, packed, head, row, memory);
            if (row == p.query_blocks) continue;
            Row last(p, w, head, row, true);
            while (last.entry < last.end) next<true>(p, packed, head, last);
            write_queries(p, head, last);
        }
        write_keys(p, w, batch, key_head, 0, p.keys, grad_k, grad_v);
    }

    // Gradients of a block of keys; the same sums in the same order as by backward_slot.
    static void backward_column(const Problem& p, const Packed& packed, int64_t slot, int64_t column, char* memory) {
        const Workspace w(p, memory);
        const int64_t at = (slot - packed.first) * packed.sums + column * w.block * w.width;
        float *grad_k = packed.grad_k + at, *grad_v = packed.grad_v + at;
        std::fill_n(grad_k, w.block * w.width, 0.0f);
        std::fill_n(grad_v, w.block * w.width, 0.0f);
        const int64_t batch = slot / p.key_heads, key_head = slot % p.key_heads;
        for (int64_t member = 0; member < p.group_size(); member++) {
            const Head head = {batch, key_head * p.group_size() + member, key_head};
            const int32_t* offsets = p.column_offsets + p.group(batch, head.head) * (p.key_blocks + 1) + column;
            for (int64_t place = offsets[0]; place < offsets[1]; place++) {
                load_queries(p, w, head, p.rows[place], true, false);
                const Block b(p, w, packed, head, p.rows[place], column, p.entries[place]);
                differentiate<false, true>(p, w, packed, b, grad_k, grad_v);
            }
        }
        const int64_t first = column * p.block;
        write_keys(p, w, batch, key_head, first, std::min(p.block, p.keys - first), grad_k, grad_v);
    }

    static void write_keys(const Problem& p, const Workspace& w, int64_t batch, int64_t key_head, int64_t first,
                           int64_t count, const float* grad_k, const float* grad_v) {
        for (int64_t token = 0; token < count; token++, grad_k += w.width, grad_v += w.width) {
            write_row(p.grad_k, place(p.grad_k, batch, key_head, first + token), p.dim, grad_k, 1);
            write_row(p.grad_v, place(p.grad_v, batch, key_head, first + token), p.dim, grad_v, 1);
        }
    }

    static Passes passes() {
        return {PAIR, LANES, workspace, pack, forward, backward_slot, backward_row, backward_column};
    }
};
