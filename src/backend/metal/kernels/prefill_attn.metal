/* Mathematics: out_h[n, 256] = softmax(q_h k^T, causal) v * sigmoid(gate_h), 8 q heads a kv head.
 * Layout: q bf16 [n][kv_heads][256][8]; k, v, out bf16; gates float32; partial results float32.
 * Threads: 8 tokens of a kv head a threadgroup, one a simdgroup; merge: a head a simdgroup.
 * Fused: scores, online softmax, mix, gate. Agrees with attend (ref/attention.c); whole = split.
 * Bytes: 1,024 a position and threadgroup (64 query rows), q 512 a block; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "prefill_attn.h"

/* KV goes by in blocks of 64 positions on the absolute grid (prefill_attn.h). _split gives a span
 * of 2,048 positions to each threadgroup, _merge joins a head's spans; whole and split agree in
 * every bit, as both join in ascending order. Per row and pair 512 multiply-adds, the least there
 * are, and at most 63 masked positions. */

/* Where a simdgroup's results go; the pointers are those of its token and kv head. */
struct attn_target {
    device const float2 *gate;
    device bfloat2 *out;
    device float2 *total; /* [8 heads][256] */
    device float2 *stats; /* [8 heads] */
};

/* The running total of earlier spans; in registers but for the result itself. */
struct attn_total {
    float top;
    float sum;
};

/* Ends a span of prefill_attn: joins it to the total; writes the result if it was the last. */
inline void attn_close_span(thread attn_rows &r, thread attn_total &t, thread const attn_target &to,
                            bool first, bool last, attn_lane p) {
    const float sum = attn_row_sum(r.sum);
    const attn_join j = attn_join_of(t.top, r.top);
    t.sum = first ? sum : attn_joined(j, t.sum, sum);
    t.top = j.top;
    UNROLL
    for (uint c = 0; c < ATTN_COLUMNS; c++) {
        const uint at = (p.row * ATTN_DIM + c * 8 + p.column) / 2;
        float2 o = matrix_get(r.out[c]);
        if (!first) {
            const float2 before = to.total[at];
            o = float2(attn_joined(j, before.x, o.x), attn_joined(j, before.y, o.y));
        }
        if (last) {
            const float2 gate = to.gate[(p.row * 2 * ATTN_DIM + ATTN_DIM + c * 8 + p.column) / 2];
            to.out[at] =
                bfloat2(float2(attn_gated(o.x, t.sum, gate.x), attn_gated(o.y, t.sum, gate.y)));
        } else {
            to.total[at] = o;
        }
    }
    attn_clear(r);
}

/* Ends the span of prefill_attn_split. */
inline void attn_store_span(thread attn_rows &r, thread const attn_target &to, attn_lane p) {
    const float sum = attn_row_sum(r.sum);
    UNROLL
    for (uint c = 0; c < ATTN_COLUMNS; c++) {
        to.total[(p.row * ATTN_DIM + c * 8 + p.column) / 2] = matrix_get(r.out[c]);
    }
    if (p.column == 0) to.stats[p.row] = float2(r.top, sum);
}

/* Blocks [block, end) for one threadgroup. `position` is that of this simdgroup's token. */
template <bool SPLIT>
inline void attn_run(thread const attn_cache &cache, device const uint *query,
                     thread const attn_target &to, threadgroup uint4 *pieces, uint block, uint end,
                     bool active, uint position, uint thread_index, attn_lane p) {
    attn_rows rows;
    attn_total total;
    simdgroup_float8x8 scores[ATTN_STEPS];
    uint4 fetched[ATTN_FETCHED];
    attn_clear(rows);
    total.top = -INFINITY;
    total.sum = 0.0f;
    attn_fetch(fetched, cache, block, 0, thread_index);
    attn_put(pieces, fetched, 0, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup); /* FIRST PIECE */
    for (; block < end; block++) {
        const bool seen = active && block * ATTN_BLOCK <= position;
        const bool last = position / ATTN_BLOCK == block;
        UNROLL
        for (uint s = 0; s < ATTN_STEPS; s++) scores[s] = matrix_zero();
        for (uint part = 0; part < 2 * ATTN_PARTS; part++) {
            const uint next = (part + 1) % (2 * ATTN_PARTS);
            const uint next_block = block + (next == 0 ? 1 : 0);
            threadgroup const uint4 *piece = pieces + part % 2 * ATTN_PIECE;
            if (next_block < end) attn_fetch(fetched, cache, next_block, next, thread_index);
            if (seen && part < ATTN_PARTS) attn_add_scores(scores, piece, query, part, p);
            if (seen && part == ATTN_PARTS) attn_soften(rows, scores, block, position, p);
            if (seen && part >= ATTN_PARTS) attn_add_values(rows, scores, piece, p);
            if (next_block < end)
                attn_put(pieces + next % 2 * ATTN_PIECE, fetched, next, thread_index);
            threadgroup_barrier(mem_flags::mem_threadgroup); /* NEXT PIECE */
        }
        if (seen && (last || (block + 1) % ATTN_SPAN_BLOCKS == 0)) {
            if (SPLIT) {
                attn_store_span(rows, to, p);
            } else {
                attn_close_span(rows, total, to, block < ATTN_SPAN_BLOCKS, last, p);
            }
        }
    }
}

inline attn_cache attn_cache_of(constant prefill_attn_args &args, device const uint4 *keys,
                                device const uint4 *values, uint kv_head, uint end) {
    attn_cache c;
    c.keys = keys + kv_head * args.cache_head / 8;
    c.values = values + kv_head * args.cache_head / 8;
    c.row = args.cache_row / 8;
    c.end = end;
    return c;
}

KERNEL_THREADS(PREFILL_ATTN_THREADS)
kernel void prefill_attn(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_ARGS)]],
                         device const uint *query [[buffer(PREFILL_ATTN_QUERY)]],
                         device const uint4 *keys [[buffer(PREFILL_ATTN_KEYS)]],
                         device const uint4 *values [[buffer(PREFILL_ATTN_VALUES)]],
                         device const float2 *qg [[buffer(PREFILL_ATTN_QG)]],
                         device bfloat2 *out [[buffer(PREFILL_ATTN_OUT)]],
                         device float2 *total [[buffer(PREFILL_ATTN_TOTAL)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint2 groups [[threadgroups_per_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint4 pieces[2 * ATTN_PIECE];
    const uint kv_head = group.y;
    const uint first = (groups.x - 1 - group.x) * ATTN_TOKENS; /* those that see most begin first */
    const uint token = first + simdgroup;
    const uint end = attn_seen_by(args, first);
    const uint at = token * SHAPE_KV_HEADS + kv_head;
    attn_target to;
    to.gate = qg + (token * args.qg_stride + kv_head * ATTN_HEADS * 2 * ATTN_DIM) / 2;
    to.out = out + at * (ATTN_HEADS * ATTN_DIM / 2);
    to.total = total + at * (ATTN_HEADS * ATTN_DIM / 2);
    to.stats = nullptr;
    attn_run<false>(attn_cache_of(args, keys, values, kv_head, end),
                    query + at * (ATTN_DIM * ATTN_HEADS / 2), to, pieces, 0,
                    (end - 1) / ATTN_BLOCK + 1, token < args.rows, args.position + token,
                    thread_index, attn_lane_of(lane));
}

KERNEL_THREADS(PREFILL_ATTN_THREADS)
kernel void prefill_attn_split(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_SPLIT_ARGS)]],
                               device const uint *query [[buffer(PREFILL_ATTN_SPLIT_QUERY)]],
                               device const uint4 *keys [[buffer(PREFILL_ATTN_SPLIT_KEYS)]],
                               device const uint4 *values [[buffer(PREFILL_ATTN_SPLIT_VALUES)]],
                               device float2 *total [[buffer(PREFILL_ATTN_SPLIT_TOTAL)]],
                               device float2 *stats [[buffer(PREFILL_ATTN_SPLIT_STATS)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint4 pieces[2 * ATTN_PIECE];
    const uint kv_head = group.y;
    const uint first = group.x * ATTN_TOKENS;
    const uint token = first + simdgroup;
    const uint end = attn_seen_by(args, first);
    const uint block = group.z * ATTN_SPAN_BLOCKS;
    const uint blocks = min(block + ATTN_SPAN_BLOCKS, (end - 1) / ATTN_BLOCK + 1);
    if (block >= blocks) return; /* the whole threadgroup: none of its tokens sees this span */
    const uint at = token * SHAPE_KV_HEADS + kv_head;
    const uint record = group.z * args.rows * SHAPE_KV_HEADS + at;
    attn_target to;
    to.gate = nullptr;
    to.out = nullptr;
    to.total = total + record * (ATTN_HEADS * ATTN_DIM / 2);
    to.stats = stats + record * ATTN_HEADS;
    attn_run<true>(attn_cache_of(args, keys, values, kv_head, end),
                   query + at * (ATTN_DIM * ATTN_HEADS / 2), to, pieces, block, blocks,
                   token < args.rows, args.position + token, thread_index, attn_lane_of(lane));
}

KERNEL_THREADS(PREFILL_ATTN_MERGE_THREADS)
kernel void prefill_attn_merge(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_MERGE_ARGS)]],
                               device const float *total [[buffer(PREFILL_ATTN_MERGE_TOTAL)]],
                               device const float2 *stats [[buffer(PREFILL_ATTN_MERGE_STATS)]],
                               device const float *qg [[buffer(PREFILL_ATTN_MERGE_QG)]],
                               device bfloat *out [[buffer(PREFILL_ATTN_MERGE_OUT)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint head = group.y * ATTN_HEADS + simdgroup;
    const uint at = group.x * SHAPE_Q_HEADS + head;
    const uint spans = (args.position + group.x) / PREFILL_ATTN_SPAN + 1;
    float out_sum[ATTN_DIM / 32];
    float2 seen = stats[at]; /* maximum, sum */
    UNROLL
    for (uint i = 0; i < ATTN_DIM / 32; i++) out_sum[i] = total[at * ATTN_DIM + i * 32 + lane];
    for (uint span = 1; span < spans; span++) {
        const uint from = span * args.rows * SHAPE_Q_HEADS + at;
        const float2 more = stats[from];
        const attn_join j = attn_join_of(seen.x, more.x);
        seen = float2(j.top, attn_joined(j, seen.y, more.y));
        UNROLL
        for (uint i = 0; i < ATTN_DIM / 32; i++) {
            out_sum[i] = attn_joined(j, out_sum[i], total[from * ATTN_DIM + i * 32 + lane]);
        }
    }
    device const float *gate = qg + group.x * args.qg_stride + head * 2 * ATTN_DIM + ATTN_DIM;
    UNROLL
    for (uint i = 0; i < ATTN_DIM / 32; i++) {
        out[at * ATTN_DIM + i * 32 + lane] =
            bfloat(attn_gated(out_sum[i], seen.y, gate[i * 32 + lane]));
    }
}
