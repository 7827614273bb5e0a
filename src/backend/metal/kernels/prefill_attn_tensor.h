/* Flash attention by the tensor operations of Metal 4 (language 4.0): what prefill_attn_tensor and
 * prefill_attn_split_tensor share. The reasons for this layout and its counts are in
 * docs/metal-attention.md.
 *
 * A threadgroup has 8 tokens of one kv head, that is 64 query rows, and walks over blocks of 64
 * positions. Its 8 simdgroups multiply as one: scores are one operation of 64 x 64 x 256 whose
 * operands are the queries and the cache as they lie in memory, the mix is one of 64 x 256 x 64
 * whose float32 sums stay in registers. Between them scores pass through threadgroup memory, where
 * each simdgroup has its token's 8 heads, four lanes each, and leaves bf16 weights in the place of
 * the scores. Where a sum lies in a thread's registers is the implementation's own affair; what is
 * done to sums by row asks for the row of each.
 *
 * The maximum that weights refer to is lifted row by row, and blocks and spans lie on the absolute
 * grid: a row's bits depend neither on the chunk nor on its neighbours. */
#ifndef LILY_METAL_PREFILL_ATTN_TENSOR_H
#define LILY_METAL_PREFILL_ATTN_TENSOR_H

#include "prefill_attn_join.h"

using mpp::tensor_ops::matmul2d;
using mpp::tensor_ops::matmul2d_descriptor;

enum {
    ATTN_ROWS = ATTN_TOKENS * ATTN_HEADS,
    ATTN_STAGE = ATTN_BLOCK + 4,             /* words of a staged row: 8 rows begin in 8 banks */
    ATTN_PARTS = 4,                          /* lanes of a row */
    ATTN_QUADS = ATTN_BLOCK / ATTN_PARTS / 4 /* scores of a lane, by four */
};
static_assert(ATTN_HEADS * ATTN_PARTS == 32, "a simdgroup has the heads of a token");
static_assert(PREFILL_ATTN_THREADS == 32 * ATTN_TOKENS, "a simdgroup for each token");

/* Extents and strides name the innermost dimension first. */
typedef tensor<device bfloat, dextents<int32_t, 2>, tensor_inline> attn_operand;
typedef tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> attn_weights;
typedef tensor<threadgroup float, dextents<int32_t, 2>, tensor_inline> attn_stage;
typedef matmul2d<matmul2d_descriptor(ATTN_ROWS, ATTN_BLOCK, ATTN_DIM, false, true),
                 execution_simdgroups<ATTN_TOKENS>>
    attn_score;
typedef matmul2d<matmul2d_descriptor(ATTN_ROWS, ATTN_DIM, ATTN_BLOCK, false, false, false,
                                     matmul2d_descriptor::mode::multiply_accumulate),
                 execution_simdgroups<ATTN_TOKENS>>
    attn_mix;
typedef attn_score::cooperative_tensor_destination_t<attn_operand, attn_operand, float, int>
    attn_scores;
typedef attn_mix::cooperative_tensor_destination_t<attn_weights, attn_operand, float, int>
    attn_sums;

/* 18,720 bytes. In the outer scope of a kernel. */
struct attn_memory {
    threadgroup float4 *stage; /* [ATTN_ROWS][ATTN_STAGE] float scores, then bf16 weights */
    threadgroup float *keep;   /* [ATTN_ROWS] factor of the sums so far, where lifted says so */
    threadgroup uint *lifted;  /* [ATTN_TOKENS] whether a row of the token rescales */
    threadgroup float4 *close; /* [ATTN_ROWS] of rows that end: keep, add, sum */
};
#define ATTN_MEMORY(m)                                                                             \
    threadgroup float4 m##_stage[ATTN_ROWS * ATTN_STAGE / 4];                                      \
    threadgroup float m##_keep[ATTN_ROWS];                                                         \
    threadgroup uint m##_lifted[ATTN_TOKENS];                                                      \
    threadgroup float4 m##_close[ATTN_ROWS];                                                       \
    const attn_memory m = {m##_stage, m##_keep, m##_lifted, m##_close}

/* ---- what a threadgroup has */

/* Its tokens [first, first + 8); pointers are those of the first one and of the kv head. */
struct attn_tile {
    uint position; /* of the first token */
    uint tokens;   /* that exist */
    uint end;      /* positions that they see */
    uint cache_row;
    uint qg_stride;
    device bfloat *query; /* [tokens][8 heads][256] */
    device bfloat *keys;  /* [end] rows of 256 */
    device bfloat *values;
    device const float *gate;
    device bfloat *out;
    device float *total;  /* [n][q_heads][256] */
    device float2 *stats; /* [n][q_heads] */
};

/* But for where the results go. */
inline attn_tile attn_tile_of(constant prefill_attn_args &args, device bfloat *query,
                              device bfloat *keys, device bfloat *values, uint first,
                              uint kv_head) {
    attn_tile t;
    t.position = args.position + first;
    t.tokens = min((uint)ATTN_TOKENS, args.rows - first);
    t.end = attn_seen_by(args, first);
    t.cache_row = args.cache_row;
    t.qg_stride = args.qg_stride;
    t.query = query + (kv_head * args.rows + first) * (ATTN_HEADS * ATTN_DIM);
    t.keys = keys + kv_head * args.cache_head;
    t.values = values + kv_head * args.cache_head;
    return t;
}

/* A block's keys or values; positions beyond the end count as 0. */
inline attn_operand attn_block_of(device bfloat *cache, thread const attn_tile &t, uint block) {
    const uint at = block * ATTN_BLOCK;
    return attn_operand(cache + at * t.cache_row, dextents<int32_t, 2>(ATTN_DIM, (int)(t.end - at)),
                        array<int32_t, 2>({1, (int)t.cache_row}));
}

/* Whether the token's row ends its sums with this block: its last one, or the last of a span. */
inline bool attn_closes(thread const attn_tile &t, uint token, uint block) {
    const uint last = (t.position + token) / ATTN_BLOCK;
    return token < t.tokens &&
           (block == last || (block < last && (block + 1) % ATTN_SPAN_BLOCKS == 0));
}

/* ---- one simdgroup's work on the scores of its token */

/* Of this lane's row; the same in its four lanes but for the sums. */
struct attn_row {
    float top;       /* what its weights refer to: at most ATTN_SLACK below its largest score */
    float sum;       /* this lane's share */
    float total_top; /* of earlier spans */
    float total_sum;
};

/* Over the four lanes that share a row. */
inline float attn_row_max(float x) {
    x = max(x, simd_shuffle_xor(x, 1));
    return max(x, simd_shuffle_xor(x, 2));
}
inline float attn_row_sum(float x) {
    return neighbours_sum<ATTN_PARTS>(x);
}

/* Scores become weights. `position` is the token's; a block that it does not see weighs nothing.
 * The sum is that of the rounded weights, so that they are divided by what they add up to. */
inline void attn_soften(thread attn_row &r, attn_memory m, uint block, uint position,
                        uint simdgroup, uint lane) {
    const uint row = simdgroup * ATTN_HEADS + lane / ATTN_PARTS;
    const uint part = lane % ATTN_PARTS;
    threadgroup float4 *scores = m.stage + row * (ATTN_STAGE / 4);
    float4 s[ATTN_QUADS];
    float high = -INFINITY;
    UNROLL
    for (uint i = 0; i < ATTN_QUADS; i++) s[i] = scores[i * ATTN_PARTS + part];
    if (block * ATTN_BLOCK + ATTN_BLOCK - 1 > position) {
        UNROLL
        for (uint i = 0; i < ATTN_QUADS; i++) {
            const uint at = block * ATTN_BLOCK + (i * ATTN_PARTS + part) * 4;
            s[i].x = at <= position ? s[i].x : -INFINITY; /* MASK */
            s[i].y = at + 1 <= position ? s[i].y : -INFINITY;
            s[i].z = at + 2 <= position ? s[i].z : -INFINITY;
            s[i].w = at + 3 <= position ? s[i].w : -INFINITY;
        }
    }
    UNROLL
    for (uint i = 0; i < ATTN_QUADS; i++) {
        high = max(high, max(max(s[i].x, s[i].y), max(s[i].z, s[i].w)));
    }
    high = attn_row_max(high); /* -INFINITY in a block that the token does not see */
    const float keep = attn_lift(r.top, high);
    const bool any = simd_any(keep != 1.0f);
    if (lane == 0) m.lifted[simdgroup] = any;
    if (part == 0) m.keep[row] = keep;
    float sum = 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup); /* READ */
    UNROLL
    for (uint i = 0; i < ATTN_QUADS; i++) {
        const float4 e = precise::exp(s[i] - r.top);
        const uint2 w = uint2(bf16_pair(e.x, e.y), bf16_pair(e.z, e.w));
        ((threadgroup uint2 *)scores)[i * ATTN_PARTS + part] = w;
        sum += (bf16_low(w.x) + bf16_high(w.x)) + (bf16_low(w.y) + bf16_high(w.y));
    }
    r.sum = fma(r.sum, keep, sum);
}

/* The row's part in ending its sums: how they join those of earlier spans. */
template <bool SPLIT>
inline void attn_close_row(thread attn_row &r, attn_memory m, thread const attn_tile &t, bool first,
                           uint simdgroup, uint lane) {
    const uint head = lane / ATTN_PARTS;
    const float sum = attn_row_sum(r.sum);
    if (SPLIT) {
        if (lane % ATTN_PARTS == 0) {
            t.stats[simdgroup * SHAPE_Q_HEADS + head] = float2(r.top, sum);
        }
    } else {
        const attn_join j = attn_join_of(r.total_top, r.top);
        r.total_sum = first ? sum : attn_joined(j, r.total_sum, sum);
        r.total_top = j.top;
        if (lane % ATTN_PARTS == 0) {
            m.close[simdgroup * ATTN_HEADS + head] = float4(j.keep, j.add, r.total_sum, 0.0f);
        }
    }
    r.top = ATTN_NONE;
    r.sum = 0.0f;
}

/* ---- all threads' work on the sums: a new span begins with ATTN_NONE, so that its first block
 * takes all that is in them times 0 */

inline void attn_rescale(thread attn_sums &sums, attn_memory m) {
    uint any = 0;
    UNROLL
    for (uint i = 0; i < ATTN_TOKENS; i++) any |= m.lifted[i];
    if (any == 0) return; /* the rule */
    UNROLL
    for (uint16_t i = 0; i < sums.get_capacity(); i++) {
        if (sums.is_valid_element(i)) sums[i] *= m.keep[sums.get_multidimensional_index(i)[1]];
    }
}

/* One value of a row that ends. */
template <bool SPLIT>
inline void attn_close_value(float value, thread const attn_tile &t, float4 close, uint token,
                             uint in_token, bool first, bool last) {
    const uint at = token * (SHAPE_Q_HEADS * ATTN_DIM) + in_token;
    if (!SPLIT && !first) {
        attn_join j;
        j.keep = close.x;
        j.add = close.y;
        value = attn_joined(j, t.total[at], value);
    }
    if (SPLIT || !last) {
        t.total[at] = value;
    } else {
        const uint head = in_token / ATTN_DIM;
        const float gate = t.gate[token * t.qg_stride + in_token + head * ATTN_DIM];
        t.out[at] = bfloat(attn_gated(value, close.z, gate));
    }
}

template <bool SPLIT>
inline void attn_close(thread attn_sums &sums, attn_memory m, thread const attn_tile &t,
                       uint block) {
    UNROLL
    for (uint16_t i = 0; i < sums.get_capacity(); i++) {
        if (!sums.is_valid_element(i)) continue; /* VALID */
        const auto at = sums.get_multidimensional_index(i);
        const uint row = (uint)at[1];
        const uint token = row / ATTN_HEADS;
        if (!attn_closes(t, token, block)) continue;
        attn_close_value<SPLIT>(sums[i], t, SPLIT ? float4(0.0f) : m.close[row], token,
                                row % ATTN_HEADS * ATTN_DIM + (uint)at[0], block < ATTN_SPAN_BLOCKS,
                                block == (t.position + token) / ATTN_BLOCK);
    }
}

/* ---- blocks [block, end) for one threadgroup */

template <bool SPLIT>
inline void attn_run(thread const attn_tile &t, attn_memory m, uint block, uint end, uint simdgroup,
                     uint lane) {
    attn_score score;
    attn_mix mix;
    attn_operand query(t.query, dextents<int32_t, 2>(ATTN_DIM, (int)(t.tokens * ATTN_HEADS)));
    attn_stage stage((threadgroup float *)m.stage, dextents<int32_t, 2>(ATTN_BLOCK, ATTN_ROWS),
                     array<int32_t, 2>({1, ATTN_STAGE}));
    attn_weights weights((threadgroup bfloat *)m.stage, dextents<int32_t, 2>(ATTN_BLOCK, ATTN_ROWS),
                         array<int32_t, 2>({1, 2 * ATTN_STAGE}));
    attn_scores scores =
        score.get_destination_cooperative_tensor<attn_operand, attn_operand, float>();
    attn_sums sums = mix.get_destination_cooperative_tensor<attn_weights, attn_operand, float>();
    UNROLL
    for (uint16_t i = 0; i < sums.get_capacity(); i++) sums[i] = 0.0f;
    attn_row row = {ATTN_NONE, 0.0f, -INFINITY, 0.0f};
    for (; block < end; block++) {
        attn_operand k = attn_block_of(t.keys, t, block);
        attn_operand v = attn_block_of(t.values, t, block);
        score.run(query, k, scores);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* WEIGHTS USED */
        scores.store(stage);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* SCORES STORED */
        attn_soften(row, m, block, t.position + simdgroup, simdgroup, lane);
        if (attn_closes(t, simdgroup, block)) {
            attn_close_row<SPLIT>(row, m, t, block < ATTN_SPAN_BLOCKS, simdgroup, lane);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); /* WEIGHTS STORED */
        attn_rescale(sums, m);
        mix.run(weights, v, sums);
        if (block >= t.position / ATTN_BLOCK || (block + 1) % ATTN_SPAN_BLOCKS == 0) {
            attn_close<SPLIT>(sums, m, t, block);
        }
    }
}

#endif
