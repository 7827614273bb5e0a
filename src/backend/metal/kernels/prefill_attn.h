// Flash attention for head size 256 and eight query heads per key/value head: what prefill_attn and
// prefill_attn_split share. MSL only, after metal_stdlib and the shape macros. The reasons for this
// layout and its counts are in docs/metal-attention.md.
//
// A threadgroup has 8 tokens of one kv head, that is 64 query rows, and walks over blocks of 64
// positions; each simdgroup has one token: its 8 heads are the rows of an 8 x 256 float32 result in
// registers (64 of them in each lane). Keys and values pass through threadgroup memory in pieces of
// 8 KiB (64 positions x 64 dimensions of keys, 16 positions x 256 of values), two in turn, so that
// the next piece is on its way while this one is multiplied, with one barrier for each.
//
// Scores are made transposed, K q^T: then keys, queries and values are all read as the pairs of
// neighbouring bfloat numbers that a lane's fragment holds, one word each. The 8 x 8 scores are
// turned by exchange between lanes; after that a lane has one head, whose maximum and sum need two
// exchanges, and the scores are already the left operand of P V.
//
// Loops over fragments are unrolled by order (UNROLL): an index into registers must be a constant.
//
// Blocks and spans lie on the absolute grid of positions and a row adds them in ascending order, so
// its bits depend on neither the chunk nor the other tokens of the threadgroup.
#ifndef LILY_METAL_PREFILL_ATTN_H
#define LILY_METAL_PREFILL_ATTN_H

#include "prefill_mix_args.h"

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr uint DIM = PREFILL_ATTN_DIM;
constant constexpr uint GROUP = PREFILL_ATTN_GROUP;
constant constexpr uint TOKENS = PREFILL_ATTN_TOKENS;
constant constexpr uint BLOCK = PREFILL_ATTN_BLOCK;
constant constexpr uint SPAN_BLOCKS = PREFILL_ATTN_SPAN / BLOCK;
constant constexpr uint COLUMNS = DIM / 8; // fragments of the result
constant constexpr uint STEPS = BLOCK / 8; // fragments of a block's scores
constant constexpr uint PARTS = 4;         // pieces of a block's keys, and of its values
constant constexpr uint KEY_DIMS = DIM / PARTS;
constant constexpr uint VALUE_ROWS = BLOCK / PARTS;
// uint4 of a row in threadgroup memory: 16 bytes of padding put 8 rows into different banks.
constant constexpr uint KEY_ROW = KEY_DIMS / 8 + 1;
constant constexpr uint VALUE_ROW = DIM / 8 + 1;
constant constexpr uint PIECE = BLOCK * KEY_ROW;
static_assert(VALUE_ROWS * VALUE_ROW <= PIECE, "a piece of values fits where keys were");
static_assert(PREFILL_ATTN_THREADS == 32 * TOKENS, "a simdgroup for each token");
constant constexpr uint FETCHED = BLOCK * KEY_DIMS / 8 / PREFILL_ATTN_THREADS; // uint4 per thread

// Where a lane stands in an 8 x 8 fragment: it holds (row, column) and (row, column + 1).
struct lane_place {
    uint row;
    uint column;
    ushort turned; // lane that holds (column, row & ~1); the one for (column + 1, ..) is turned | 2
};

inline lane_place place_of(uint lane) {
    lane_place p;
    p.row = (lane >> 2 & 4) | (lane >> 1 & 3);
    p.column = (lane >> 1 & 4) | (lane << 1 & 2);
    p.turned = ushort((lane >> 2 & 1) | (lane << 2 & 4) | (lane >> 1 & 8) | (lane << 1 & 16));
    return p;
}

// What a simdgroup computes: the softmax over the positions seen so far, not yet divided.
struct query_rows {
    simdgroup_float8x8 out[COLUMNS]; // [8 heads][256]
    float top;                       // of this lane's row; the same in its four lanes
    float sum;                       // this lane's share
};

inline void clear(thread query_rows &r) {
    UNROLL
    for (uint c = 0; c < COLUMNS; c++) r.out[c] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    r.top = -INFINITY;
    r.sum = 0.0f;
}

// Over the four lanes that share a row.
inline float row_max(float x) {
    x = max(x, simd_shuffle_xor(x, 1));
    return max(x, simd_shuffle_xor(x, 8));
}
inline float row_sum(float x) {
    x += simd_shuffle_xor(x, 1);
    return x + simd_shuffle_xor(x, 8);
}

inline simdgroup_float8x8 matrix_of(uint word) { // of two bfloat numbers
    simdgroup_float8x8 m;
    m.thread_elements()[0] = as_type<float>(word << 16);
    m.thread_elements()[1] = as_type<float>(word & 0xFFFF0000u);
    return m;
}

// ---- pieces of keys and values

struct kv_cache { // of one kv head; rows in uint4
    device const uint4 *keys;
    device const uint4 *values;
    uint row;
    uint end; // positions that exist
};

// A thread's share of piece `part` of a block: 0..3 keys, 4..7 values; 0 beyond the end.
inline void fetch(thread uint4 *fetched, thread const kv_cache &cache, uint block, uint part,
                  uint thread_index) {
    UNROLL
    for (uint i = 0; i < FETCHED; i++) {
        const uint at = thread_index + i * PREFILL_ATTN_THREADS;
        const bool key = part < PARTS;
        const uint position = block * BLOCK + (key ? at / (KEY_DIMS / 8)
                                                   : (part - PARTS) * VALUE_ROWS + at / (DIM / 8));
        const uint word = key ? part * (KEY_DIMS / 8) + at % (KEY_DIMS / 8) : at % (DIM / 8);
        fetched[i] = uint4(0);
        if (position < cache.end) { // GUARD
            fetched[i] = (key ? cache.keys : cache.values)[position * cache.row + word];
        }
    }
}

inline void put(threadgroup uint4 *piece, thread const uint4 *fetched, uint part,
                uint thread_index) {
    UNROLL
    for (uint i = 0; i < FETCHED; i++) {
        const uint at = thread_index + i * PREFILL_ATTN_THREADS;
        const uint to = part < PARTS ? at / (KEY_DIMS / 8) * KEY_ROW + at % (KEY_DIMS / 8)
                                     : at / (DIM / 8) * VALUE_ROW + at % (DIM / 8);
        piece[to] = fetched[i];
    }
}

// ---- one simdgroup's work on a piece

// scores[64 positions][8 heads] += keys[64][64 dimensions] queries[64][8]
inline void add_scores(thread simdgroup_float8x8 *scores, threadgroup const uint4 *piece,
                       device const uint *query, uint part, lane_place p) {
    threadgroup const uint *key = (threadgroup const uint *)piece + p.row * (KEY_ROW * 4);
    for (uint d = 0; d < KEY_DIMS / 8; d++) {
        const uint dimension = part * KEY_DIMS + d * 8 + p.row;
        const simdgroup_float8x8 q = matrix_of(query[dimension * (GROUP / 2) + p.column / 2]);
        UNROLL
        for (uint s = 0; s < STEPS; s++) {
            const simdgroup_float8x8 k =
                matrix_of(key[s * 8 * (KEY_ROW * 4) + d * 4 + p.column / 2]);
            simdgroup_multiply_accumulate(scores[s], k, q, scores[s]);
        }
    }
}

// Turns, masks and exponentiates a block's scores; positions above `position` count as absent.
inline void soften(thread query_rows &r, thread simdgroup_float8x8 *scores, uint block,
                   uint position, lane_place p) {
    float high = -INFINITY;
    UNROLL
    for (uint s = 0; s < STEPS; s++) {
        const float2 have = float2(scores[s].thread_elements()[0], scores[s].thread_elements()[1]);
        const float2 first = simd_shuffle(have, p.turned);
        const float2 second = simd_shuffle(have, ushort(p.turned | 2));
        const bool odd = (p.row & 1) != 0;
        const uint at = block * BLOCK + s * 8 + p.column;
        const float a = at <= position ? (odd ? first.y : first.x) : -INFINITY; // MASK
        const float b = at + 1 <= position ? (odd ? second.y : second.x) : -INFINITY;
        scores[s].thread_elements()[0] = a;
        scores[s].thread_elements()[1] = b;
        high = max(high, max(a, b));
    }
    const float top = max(r.top, row_max(high)); // finite: position is in this block or above it
    const float keep = exp(r.top - top);
    float sum = 0.0f;
    UNROLL
    for (uint s = 0; s < STEPS; s++) {
        const float a = exp(scores[s].thread_elements()[0] - top);
        const float b = exp(scores[s].thread_elements()[1] - top);
        scores[s].thread_elements()[0] = a;
        scores[s].thread_elements()[1] = b;
        sum += a + b;
    }
    r.top = top;
    r.sum = fma(r.sum, keep, sum);
    UNROLL
    for (uint c = 0; c < COLUMNS; c++) {
        r.out[c].thread_elements()[0] *= keep;
        r.out[c].thread_elements()[1] *= keep;
    }
}

// out[8][256] += weights[8][16 positions] values[16][256]; the next piece's weights move to the
// front, so that registers are named by constants.
inline void add_values(thread query_rows &r, thread simdgroup_float8x8 *weights,
                       threadgroup const uint4 *piece, lane_place p) {
    threadgroup const uint *value =
        (threadgroup const uint *)piece + p.row * (VALUE_ROW * 4) + p.column / 2;
    UNROLL
    for (uint s = 0; s < VALUE_ROWS / 8; s++) {
        UNROLL
        for (uint c = 0; c < COLUMNS; c++) {
            const simdgroup_float8x8 v = matrix_of(value[s * 8 * (VALUE_ROW * 4) + c * 4]);
            simdgroup_multiply_accumulate(r.out[c], weights[s], v, r.out[c]);
        }
    }
    UNROLL
    for (uint s = 0; s + VALUE_ROWS / 8 < STEPS; s++) weights[s] = weights[s + VALUE_ROWS / 8];
}

// ---- joining spans; the same bits whoever does it

struct span_join {
    float top;
    float keep; // factor of what came before
    float add;  // factor of the new span
};

inline span_join join(float top_before, float top_span) {
    span_join j;
    j.top = max(top_before, top_span);
    j.keep = exp(top_before - j.top);
    j.add = exp(top_span - j.top);
    return j;
}
inline float joined(span_join j, float before, float span) {
    return fma(before, j.keep, span * j.add);
}

// Divides by the softmax's sum and applies the output gate.
inline float gated(float out, float sum, float gate) {
    return out / sum * (1.0f / (1.0f + exp(-gate)));
}

#endif
