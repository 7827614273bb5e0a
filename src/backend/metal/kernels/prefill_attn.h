/* Flash attention for head size 256 and eight query heads per key/value head: what prefill_attn and
 * prefill_attn_split share. MSL only, after metal_stdlib and the shape macros. The reasons for this
 * layout and its counts are in docs/metal-attention.md.
 *
 * A threadgroup has 8 tokens of one kv head, that is 64 query rows, and walks over blocks of 64
 * positions; each simdgroup has one token: its 8 heads are the rows of an 8 x 256 float32 result in
 * registers (64 of them in each lane). Keys and values pass through threadgroup memory in pieces of
 * 8 KiB (64 positions x 64 dimensions of keys, 16 positions x 256 of values), two in turn, so that
 * the next piece is on its way while this one is multiplied, with one barrier for each.
 *
 * Scores are made transposed, K q^T: then keys, queries and values are all read as the pairs of
 * neighbouring bf16 numbers that a lane's fragment holds, one word each. The 8 x 8 scores are
 * turned by exchange between lanes; after that a lane has one head, whose maximum and sum need two
 * exchanges, and the scores are already the left operand of P V.
 *
 * Blocks and spans lie on the absolute grid of positions and a row adds them in ascending order, so
 * its bits depend on neither the chunk nor the other tokens of the threadgroup. */
#ifndef LILY_METAL_PREFILL_ATTN_H
#define LILY_METAL_PREFILL_ATTN_H

#include "matrix8x8.h"
#include "prefill_attn_join.h"

enum {
    ATTN_COLUMNS = ATTN_DIM / 8, /* fragments of the result */
    ATTN_STEPS = ATTN_BLOCK / 8, /* fragments of a block's scores */
    ATTN_PARTS = 4,              /* pieces of a block's keys, and of its values */
    ATTN_KEY_DIMS = ATTN_DIM / ATTN_PARTS,
    ATTN_VALUE_ROWS = ATTN_BLOCK / ATTN_PARTS,
    /* uint4 of a row in threadgroup memory: 16 bytes of padding put 8 rows into different banks. */
    ATTN_KEY_ROW = ATTN_KEY_DIMS / 8 + 1,
    ATTN_VALUE_ROW = ATTN_DIM / 8 + 1,
    ATTN_PIECE = ATTN_BLOCK * ATTN_KEY_ROW,
    ATTN_FETCHED = ATTN_BLOCK * ATTN_KEY_DIMS / 8 / PREFILL_ATTN_THREADS /* uint4 per thread */
};
static_assert(ATTN_VALUE_ROWS * ATTN_VALUE_ROW <= ATTN_PIECE, "values fit where keys were");
static_assert(PREFILL_ATTN_THREADS == 32 * ATTN_TOKENS, "a simdgroup for each token");

/* Where a lane stands in an 8 x 8 fragment: it holds (row, column) and (row, column + 1). */
struct attn_lane {
    uint row;
    uint column;
    ushort turned; /* the lane that holds (column, row & ~1); | 2: (column + 1, row & ~1) */
};

inline attn_lane attn_lane_of(uint lane) {
    const lane_place place = lane_place_of(lane);
    attn_lane p;
    p.row = place.row;
    p.column = place.column;
    p.turned = (ushort)((lane >> 2 & 1) | (lane << 2 & 4) | (lane >> 1 & 8) | (lane << 1 & 16));
    return p;
}

/* What a simdgroup computes: the softmax over the positions seen so far, not yet divided. */
struct attn_rows {
    simdgroup_float8x8 out[ATTN_COLUMNS]; /* [8 heads][256] */
    float top;                            /* of this lane's row; the same in its four lanes */
    float sum;                            /* this lane's share */
};

inline void attn_clear(thread attn_rows &r) {
    UNROLL
    for (uint c = 0; c < ATTN_COLUMNS; c++) r.out[c] = matrix_zero();
    r.top = ATTN_NONE;
    r.sum = 0.0f;
}

/* Over the four lanes that share a row. */
inline float attn_row_max(float x) {
    x = max(x, simd_shuffle_xor(x, 1));
    return max(x, simd_shuffle_xor(x, 8));
}
inline float attn_row_sum(float x) {
    x += simd_shuffle_xor(x, 1);
    return x + simd_shuffle_xor(x, 8);
}

/* ---- pieces of keys and values */

struct attn_cache { /* of one kv head; rows in uint4 */
    device const uint4 *keys;
    device const uint4 *values;
    uint row;
    uint end; /* positions that exist */
};

/* A thread's share of piece `part` of a block: 0..3 keys, 4..7 values; 0 beyond the end. */
inline void attn_fetch(thread uint4 *fetched, thread const attn_cache &cache, uint block, uint part,
                       uint thread_index) {
    UNROLL
    for (uint i = 0; i < ATTN_FETCHED; i++) {
        const uint at = thread_index + i * PREFILL_ATTN_THREADS;
        const bool key = part < ATTN_PARTS;
        const uint position = block * ATTN_BLOCK +
                              (key ? at / (ATTN_KEY_DIMS / 8)
                                   : (part - ATTN_PARTS) * ATTN_VALUE_ROWS + at / (ATTN_DIM / 8));
        const uint word =
            key ? part * (ATTN_KEY_DIMS / 8) + at % (ATTN_KEY_DIMS / 8) : at % (ATTN_DIM / 8);
        fetched[i] = uint4(0);
        if (position < cache.end) { /* GUARD */
            fetched[i] = (key ? cache.keys : cache.values)[position * cache.row + word];
        }
    }
}

inline void attn_put(threadgroup uint4 *piece, thread const uint4 *fetched, uint part,
                     uint thread_index) {
    UNROLL
    for (uint i = 0; i < ATTN_FETCHED; i++) {
        const uint at = thread_index + i * PREFILL_ATTN_THREADS;
        const uint to = part < ATTN_PARTS
                            ? at / (ATTN_KEY_DIMS / 8) * ATTN_KEY_ROW + at % (ATTN_KEY_DIMS / 8)
                            : at / (ATTN_DIM / 8) * ATTN_VALUE_ROW + at % (ATTN_DIM / 8);
        piece[to] = fetched[i];
    }
}

/* ---- one simdgroup's work on a piece */

/* scores[64 positions][8 heads] += keys[64][64 dimensions] queries[64][8] */
inline void attn_add_scores(thread simdgroup_float8x8 *scores, threadgroup const uint4 *piece,
                            device const uint *query, uint part, attn_lane p) {
    threadgroup const uint *key = (threadgroup const uint *)piece + p.row * (ATTN_KEY_ROW * 4);
    for (uint d = 0; d < ATTN_KEY_DIMS / 8; d++) {
        const uint dimension = part * ATTN_KEY_DIMS + d * 8 + p.row;
        const simdgroup_float8x8 q =
            matrix_of_bf16(query[dimension * (ATTN_HEADS / 2) + p.column / 2]);
        UNROLL
        for (uint s = 0; s < ATTN_STEPS; s++) {
            const simdgroup_float8x8 k =
                matrix_of_bf16(key[s * 8 * (ATTN_KEY_ROW * 4) + d * 4 + p.column / 2]);
            simdgroup_multiply_accumulate(scores[s], k, q, scores[s]);
        }
    }
}

/* Turns, masks and exponentiates a block's scores; positions above `position` count as absent. */
inline void attn_soften(thread attn_rows &r, thread simdgroup_float8x8 *scores, uint block,
                        uint position, attn_lane p) {
    float high = -INFINITY;
    UNROLL
    for (uint s = 0; s < ATTN_STEPS; s++) {
        const float2 have = matrix_get(scores[s]);
        const float2 first = simd_shuffle(have, p.turned);
        const float2 second = simd_shuffle(have, (ushort)(p.turned | 2));
        const bool odd = (p.row & 1) != 0;
        const uint at = block * ATTN_BLOCK + s * 8 + p.column;
        const float a = at <= position ? (odd ? first.y : first.x) : -INFINITY; /* MASK */
        const float b = at + 1 <= position ? (odd ? second.y : second.x) : -INFINITY;
        matrix_set(scores[s], a, b);
        high = max(high, max(a, b));
    }
    const float keep = attn_lift(r.top, attn_row_max(high));
    float sum = 0.0f;
    UNROLL
    for (uint s = 0; s < ATTN_STEPS; s++) {
        const float2 e = precise::exp(matrix_get(scores[s]) - r.top);
        matrix_set(scores[s], e.x, e.y);
        sum += e.x + e.y;
    }
    r.sum = fma(r.sum, keep, sum);
    if (!simd_any(keep != 1.0f)) return; /* the rule */
    UNROLL
    for (uint c = 0; c < ATTN_COLUMNS; c++) {
        const float2 o = matrix_get(r.out[c]) * keep;
        matrix_set(r.out[c], o.x, o.y);
    }
}

/* out[8][256] += weights[8][16 positions] values[16][256]; the next piece's weights move to the
 * front, so that registers are named by constants. */
inline void attn_add_values(thread attn_rows &r, thread simdgroup_float8x8 *weights,
                            threadgroup const uint4 *piece, attn_lane p) {
    threadgroup const uint *value =
        (threadgroup const uint *)piece + p.row * (ATTN_VALUE_ROW * 4) + p.column / 2;
    UNROLL
    for (uint s = 0; s < ATTN_VALUE_ROWS / 8; s++) {
        UNROLL
        for (uint c = 0; c < ATTN_COLUMNS; c++) {
            const simdgroup_float8x8 v =
                matrix_of_bf16(value[s * 8 * (ATTN_VALUE_ROW * 4) + c * 4]);
            simdgroup_multiply_accumulate(r.out[c], weights[s], v, r.out[c]);
        }
    }
    UNROLL
    for (uint s = 0; s + ATTN_VALUE_ROWS / 8 < ATTN_STEPS; s++) {
        weights[s] = weights[s + ATTN_VALUE_ROWS / 8];
    }
}

#endif
