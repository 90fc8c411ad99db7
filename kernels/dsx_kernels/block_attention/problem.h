// What a call of block_attention is, for every instruction set: tensors, layout, numbers.
#pragma once

#include "../native.h"

namespace dsx {

// 32 bits of an operand, a float or a pair of bfloat16, and half of them: both may lie on memory of other types.
using Unit = uint32_t __attribute__((may_alias));
using Half = uint16_t __attribute__((may_alias));

enum condition : uint8_t { CAUSAL = 1, WINDOW = 2, SEGMENTS = 4, BITS = 8 };

// [batch, heads, tokens, dim] of `type`; strides in elements, dim contiguous.
struct View {
    void* data;
    int64_t batch, head, token, type;
};

// `Problem` of native.py. Pointers that a call has no use for are null.
struct Problem {
    View q, k, v, out, grad, grad_q, grad_k, grad_v;
    float *lse, *delta;        // [batch, heads, queries]
    const float* grad_lse;     // [batch, heads, queries]
    const uint8_t* padding;    // [batch, keys]
    const float* bias;         // keys contiguous
    float* grad_bias;          // [batch, heads, queries, keys]
    int64_t bias_batch, bias_head, bias_query;
    int64_t batch, heads, key_heads, queries, keys, dim;

    int64_t block, query_blocks, key_blocks;
    const int32_t *offsets, *columns, *head_groups, *windows, *query_segments, *key_segments, *masks;
    const uint8_t *kinds, *bits;
    const int32_t *column_offsets, *rows, *entries;
    int64_t groups_batch, query_segments_batch, key_segments_batch;  // strides

    double scale, kept;  // kept: what a pair that dropout leaves is multiplied by
    int64_t threshold, seed;

    int64_t slots() const { return batch * key_heads; }
    int64_t group_size() const { return heads / key_heads; }
    int32_t group(int64_t b, int64_t head) const { return head_groups[b * groups_batch + head]; }
};

// Rows of blocks of one query head, or columns of one key head, that an item of work is about.
struct Head {
    int64_t batch, head, key_head;
};

// Keys and values of some key heads, rearranged block by block, and sums of their gradients: see engine.h.
struct Packed {
    int64_t first;                  // slot that lies at the start
    Unit *k_across, *k_along, *v_across, *v_along;
    float *grad_k, *grad_v;
    int64_t units, sums;            // of a slot in the former, in the latter
};

constexpr int64_t LARGEST_BLOCK = 128;
constexpr int64_t ROWS = 4;  // of a tile of a product

// Where in a block pairs may attend, by position alone: for each row a range of columns, empty beyond the last query.
struct Spans {
    int32_t begin[LARGEST_BLOCK], end[LARGEST_BLOCK];
    int32_t tile_begin[LARGEST_BLOCK / ROWS], tile_end[LARGEST_BLOCK / ROWS];      // columns of ROWS rows together
    int32_t row_begin[LARGEST_BLOCK / ROWS], row_end[LARGEST_BLOCK / ROWS];        // rows of ROWS columns together

    Spans(const Problem& p, int64_t row, int64_t column, uint8_t kind, int64_t window) {
        const int32_t rows = int32_t(std::min(p.block, p.queries - row * p.block));
        const int32_t columns = int32_t(std::min(p.block, p.keys - column * p.block));
        const int64_t distance = row * p.block + p.keys - p.queries - column * p.block;  // of the first pair
        for (int32_t r = 0; r < p.block; r++) {
            int64_t from = 0, to = r < rows ? columns : 0;
            if (kind & CAUSAL) to = std::min(to, distance + r + 1);
            if (kind & WINDOW) from = std::max(from, distance + r - window + 1), to = std::min(to, distance + r + window);
            begin[r] = from < to ? int32_t(from) : 0;
            end[r] = from < to ? int32_t(to) : 0;
        }
        join(p.block);
    }

  private:
    void join(int64_t block) {
        const int32_t tiles = int32_t(block / ROWS);
        for (int32_t tile = 0; tile < tiles; tile++) row_begin[tile] = int32_t(block), row_end[tile] = 0;
        for (int32_t tile = 0; tile < tiles; tile++) {
            int32_t from = int32_t(block), to = 0;
            for (int32_t r = tile * ROWS; r < (tile + 1) * ROWS; r++) {
                if (begin[r] < end[r]) from = std::min(from, begin[r]), to = std::max(to, end[r]);
            }
            tile_begin[tile] = from < to ? from : 0;
            tile_end[tile] = to;
            for (int32_t column = from / int32_t(ROWS); column * ROWS < to; column++) {
                row_begin[column] = std::min(row_begin[column], int32_t(tile * ROWS));
                row_end[column] = int32_t((tile + 1) * ROWS);
            }
        }
    }
};

// One instruction set's passes; each call is an item of work for one thread.
struct Passes {
    int64_t pair;                                                                // elements in 32 bits of an operand
    int64_t lanes;                                                               // dim is padded to a multiple
    int64_t (*workspace)(const Problem&);                                        // bytes for a thread
    void (*pack)(const Problem&, const Packed&, int64_t slot, int64_t block, bool backward, char* workspace);
    void (*forward)(const Problem&, const Packed&, Head, int64_t row, char* workspace);
    void (*backward_slot)(const Problem&, const Packed&, int64_t slot, char* workspace);
    void (*backward_row)(const Problem&, const Packed&, Head, int64_t row, char* workspace);
    void (*backward_column)(const Problem&, const Packed&, int64_t slot, int64_t column, char* workspace);
};

}  // namespace dsx
