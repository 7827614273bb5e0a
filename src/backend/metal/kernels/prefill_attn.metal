// 1 Mathematics: out_h = softmax(q_h k^T, causal) v * sigmoid(gate_h), online, in float32; q is
//   scaled already; n tokens, q_heads and kv_heads of 256, 8 : 1.
// 2 Layout: queries bfloat [n][kv_heads][256][8], keys and values bfloat [context][kv_heads][256],
//   gates in qg [n][q_heads][query 256, gate 256] float32, out bfloat [n][q_heads][256].
// 3 Threads: 8 tokens x 8 heads of one kv head in a threadgroup, a token in each of 8 simdgroups;
//   KV in blocks of 64 positions on the absolute grid (prefill_attn.h). _split: a span of 2,048
//   positions in each threadgroup; _merge: a simdgroup joins a head's spans.
// 4 Fuses scores, softmax, mix and gate. Agrees with src/backend/ref (attend); whole and split
//   agree with each other in every bit, as both join spans in ascending order.
// 5 Bytes per threadgroup: 1,024 for each position (keys and values once for 64 query rows), 512 of
//   queries per token and block; per row and pair 512 multiply-adds, the least there are, and at
//   most 63 masked positions. Measured fraction of peak: not measured on a Mac.
#include <metal_stdlib>
using namespace metal;

#include "prefill_attn.h"

// Where a simdgroup's results go; the pointers are those of its token and kv head.
struct attn_target {
    device const float2 *gate;
    device bfloat2 *out;
    device float2 *total; // [8 heads][256]
    device float2 *stats; // [8 heads]
};

// The running total of earlier spans; in registers but for the result itself.
struct running_total {
    float top;
    float sum;
};

// Ends a span of prefill_attn: joins it to the total; writes the result if it was the last.
inline void close_span(thread query_rows &r, thread running_total &t, thread const attn_target &to,
                       bool first, bool last, lane_place p) {
    const float sum = row_sum(r.sum);
    const span_join j = join(t.top, r.top);
    t.sum = first ? sum : joined(j, t.sum, sum);
    t.top = j.top;
    UNROLL
    for (uint c = 0; c < COLUMNS; c++) {
        const uint at = (p.row * DIM + c * 8 + p.column) / 2;
        float2 o = float2(r.out[c].thread_elements()[0], r.out[c].thread_elements()[1]);
        if (!first) {
            const float2 before = to.total[at];
            o = float2(joined(j, before.x, o.x), joined(j, before.y, o.y));
        }
        if (last) {
            const float2 gate = to.gate[(p.row * 2 * DIM + DIM + c * 8 + p.column) / 2];
            to.out[at] = bfloat2(float2(gated(o.x, t.sum, gate.x), gated(o.y, t.sum, gate.y)));
        } else {
            to.total[at] = o;
        }
    }
    clear(r);
}

// Ends the span of prefill_attn_split.
inline void store_span(thread query_rows &r, thread const attn_target &to, lane_place p) {
    const float sum = row_sum(r.sum);
    UNROLL
    for (uint c = 0; c < COLUMNS; c++) {
        to.total[(p.row * DIM + c * 8 + p.column) / 2] =
            float2(r.out[c].thread_elements()[0], r.out[c].thread_elements()[1]);
    }
    if (p.column == 0) to.stats[p.row] = float2(r.top, sum);
}

// Blocks [block, end) for one threadgroup. `position` is that of this simdgroup's token.
template <bool SPLIT>
inline void attend(thread const kv_cache &cache, device const uint *query,
                   thread const attn_target &to, threadgroup uint4 *pieces, uint block, uint end,
                   bool active, uint position, uint thread_index, lane_place p) {
    query_rows rows;
    running_total total;
    simdgroup_float8x8 scores[STEPS];
    uint4 fetched[FETCHED];
    clear(rows);
    total.top = -INFINITY;
    total.sum = 0.0f;
    fetch(fetched, cache, block, 0, thread_index);
    put(pieces, fetched, 0, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup); // FIRST PIECE
    for (; block < end; block++) {
        const bool seen = active && block * BLOCK <= position;
        const bool last = position / BLOCK == block;
        UNROLL
        for (uint s = 0; s < STEPS; s++) scores[s] = make_filled_simdgroup_matrix<float, 8>(0.0f);
        for (uint part = 0; part < 2 * PARTS; part++) {
            const uint next = (part + 1) % (2 * PARTS);
            const uint next_block = block + (next == 0 ? 1 : 0);
            threadgroup const uint4 *piece = pieces + part % 2 * PIECE;
            if (next_block < end) fetch(fetched, cache, next_block, next, thread_index);
            if (seen && part < PARTS) add_scores(scores, piece, query, part, p);
            if (seen && part == PARTS) soften(rows, scores, block, position, p);
            if (seen && part >= PARTS) add_values(rows, scores, piece, p);
            if (next_block < end) put(pieces + next % 2 * PIECE, fetched, next, thread_index);
            threadgroup_barrier(mem_flags::mem_threadgroup); // NEXT PIECE
        }
        if (seen && (last || (block + 1) % SPAN_BLOCKS == 0)) {
            if (SPLIT) {
                store_span(rows, to, p);
            } else {
                close_span(rows, total, to, block < SPAN_BLOCKS, last, p);
            }
        }
    }
}

// Positions that the threadgroup's tokens [first, ...) see.
inline uint seen_by(constant prefill_attn_args &args, uint first) {
    return args.pos + min(first + TOKENS, args.n);
}

inline kv_cache cache_of(constant prefill_attn_args &args, device const uint4 *keys,
                         device const uint4 *values, uint kv_head, uint end) {
    kv_cache c;
    c.keys = keys + kv_head * args.cache_head / 8;
    c.values = values + kv_head * args.cache_head / 8;
    c.row = args.cache_row / 8;
    c.end = end;
    return c;
}

[[max_total_threads_per_threadgroup(PREFILL_ATTN_THREADS)]]
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
    threadgroup uint4 pieces[2 * PIECE];
    const uint kv_head = group.y;
    const uint first = (groups.x - 1 - group.x) * TOKENS; // those that see most begin first
    const uint token = first + simdgroup;
    const uint end = seen_by(args, first);
    const uint at = token * SHAPE_KV_HEADS + kv_head;
    attn_target to;
    to.gate = qg + (token * args.qg_stride + kv_head * GROUP * 2 * DIM) / 2;
    to.out = out + at * (GROUP * DIM / 2);
    to.total = total + at * (GROUP * DIM / 2);
    to.stats = nullptr;
    attend<false>(cache_of(args, keys, values, kv_head, end), query + at * (DIM * GROUP / 2), to,
                  pieces, 0, (end - 1) / BLOCK + 1, token < args.n, args.pos + token, thread_index,
                  place_of(lane));
}

[[max_total_threads_per_threadgroup(PREFILL_ATTN_THREADS)]]
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
    threadgroup uint4 pieces[2 * PIECE];
    const uint kv_head = group.y;
    const uint first = group.x * TOKENS;
    const uint token = first + simdgroup;
    const uint end = seen_by(args, first);
    const uint block = group.z * SPAN_BLOCKS;
    const uint blocks = min(block + SPAN_BLOCKS, (end - 1) / BLOCK + 1);
    if (block >= blocks) return; // the whole threadgroup: none of its tokens sees this span
    const uint at = token * SHAPE_KV_HEADS + kv_head;
    const uint record = group.z * args.n * SHAPE_KV_HEADS + at;
    attn_target to;
    to.gate = nullptr;
    to.out = nullptr;
    to.total = total + record * (GROUP * DIM / 2);
    to.stats = stats + record * GROUP;
    attend<true>(cache_of(args, keys, values, kv_head, end), query + at * (DIM * GROUP / 2), to,
                 pieces, block, blocks, token < args.n, args.pos + token, thread_index,
                 place_of(lane));
}

kernel void prefill_attn_merge(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_MERGE_ARGS)]],
                               device const float *total [[buffer(PREFILL_ATTN_MERGE_TOTAL)]],
                               device const float2 *stats [[buffer(PREFILL_ATTN_MERGE_STATS)]],
                               device const float *qg [[buffer(PREFILL_ATTN_MERGE_QG)]],
                               device bfloat *out [[buffer(PREFILL_ATTN_MERGE_OUT)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint head = group.y * GROUP + simdgroup;
    const uint at = group.x * SHAPE_Q_HEADS + head;
    const uint spans = (args.pos + group.x) / PREFILL_ATTN_SPAN + 1;
    float out_sum[DIM / 32];
    float2 seen = stats[at]; // maximum, sum
    for (uint i = 0; i < DIM / 32; i++) out_sum[i] = total[at * DIM + i * 32 + lane];
    for (uint span = 1; span < spans; span++) {
        const uint from = span * args.n * SHAPE_Q_HEADS + at;
        const float2 more = stats[from];
        const span_join j = join(seen.x, more.x);
        seen = float2(j.top, joined(j, seen.y, more.y));
        for (uint i = 0; i < DIM / 32; i++) {
            out_sum[i] = joined(j, out_sum[i], total[from * DIM + i * 32 + lane]);
        }
    }
    device const float *gate = qg + group.x * args.qg_stride + head * 2 * DIM + DIM;
    for (uint i = 0; i < DIM / 32; i++) {
        out[at * DIM + i * 32 + lane] = bfloat(gated(out_sum[i], seen.y, gate[i * 32 + lane]));
    }
}
