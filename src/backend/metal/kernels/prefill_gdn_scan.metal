/* Mathematics: per head and token: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q.
 * Layout: q k v [n][CD], gates [n][2][v_heads], o [n][VD]; S by columns [v_heads][128 v][128 k].
 * Threads: 32 columns of a head a threadgroup, 8 a simdgroup: 4 groups of 8 lanes, 2 columns each.
 * Fused: a whole chunk with S in registers. Agrees with ref_delta_rule up to the order of sums.
 * Bytes: S once in and out, 1,160 n a threadgroup read, 4 n VD written; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "common.h"
#include "prefill_mix_args.h"

/* A lane keeps 16 keys of two columns from the first token to the last. Keys add up in the lane,
 * then over its eight lanes. Eight tokens of q, k, v are staged at a time. Tokens pass one by one,
 * so where a chunk ends cannot be seen in any bit: 128 x 128 x 4 operations for head and token. */

enum {
    GDN_TOKENS = 8, /* staged at a time */
    GDN_HEAD4 = PREFILL_GDN_STATE / 4,
    GDN_COLUMNS4 = PREFILL_GDN_SCAN_COLUMNS / 4,
    GDN_ROW4 = SHAPE_CONV_DIM / 4,
    GDN_KEYS_AT4 = SHAPE_GDN_K_DIM / 4, /* in a row of channels, after the queries */
    GDN_VALUES_AT4 = SHAPE_GDN_K_DIM / 2,
    GDN_VALUES_PER_KEY = SHAPE_GDN_V_HEADS / SHAPE_GDN_K_HEADS
};

/* Over the eight lanes that share two columns. */
inline float2 gdn_over_keys(float4 a, float4 b) {
    return neighbours_sum<8>(float2(sum4(a), sum4(b)));
}

/* One token: 16 keys of two columns of S; k and q point at this lane's first four keys. */
inline float2 gdn_advance(thread float4 *s0, thread float4 *s1, threadgroup const float4 *k,
                          threadgroup const float4 *q, float2 v, float beta, float decay) {
    float4 key[4];
    float4 recall0 = float4(0.0f);
    float4 recall1 = float4(0.0f);
    UNROLL
    for (uint i = 0; i < 4; i++) {
        key[i] = k[i * 8];
        s0[i] *= decay;
        s1[i] *= decay;
        recall0 = fma(s0[i], key[i], recall0);
        recall1 = fma(s1[i], key[i], recall1);
    }
    const float2 d = beta * (v - gdn_over_keys(recall0, recall1));
    float4 out0 = float4(0.0f);
    float4 out1 = float4(0.0f);
    UNROLL
    for (uint i = 0; i < 4; i++) {
        const float4 query = q[i * 8];
        s0[i] = fma(key[i], float4(d.x), s0[i]);
        s1[i] = fma(key[i], float4(d.y), s1[i]);
        out0 = fma(s0[i], query, out0);
        out1 = fma(s1[i], query, out1);
    }
    return gdn_over_keys(out0, out1);
}

KERNEL_THREADS(PREFILL_GDN_SCAN_THREADS)
kernel void prefill_gdn_scan(constant prefill_gdn_args &args [[buffer(PREFILL_GDN_SCAN_ARGS)]],
                             device const float4 *channels [[buffer(PREFILL_GDN_SCAN_CHANNELS)]],
                             device const float *gates [[buffer(PREFILL_GDN_SCAN_GATES)]],
                             device const float4 *state_in [[buffer(PREFILL_GDN_SCAN_STATE_IN)]],
                             device float4 *state_out [[buffer(PREFILL_GDN_SCAN_STATE_OUT)]],
                             device float4 *delta [[buffer(PREFILL_GDN_SCAN_DELTA)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 queries[GDN_TOKENS * GDN_HEAD4];
    threadgroup float4 keys[GDN_TOKENS * GDN_HEAD4];
    threadgroup float4 values[GDN_TOKENS * GDN_COLUMNS4];
    threadgroup float4 results[GDN_TOKENS * GDN_COLUMNS4];
    threadgroup float factors[GDN_TOKENS * 2]; /* beta, decay */
    const uint head = group.y;
    const uint part = lane % 8;                       /* of the keys */
    const uint column = simdgroup * 8 + lane / 8 * 2; /* of the threadgroup's 32 */
    const uint head_column4 = head * GDN_HEAD4 + group.x * GDN_COLUMNS4;
    device const float4 *row = channels + head / GDN_VALUES_PER_KEY * GDN_HEAD4;

    float4 s0[4];
    float4 s1[4];
    const uint state_at =
        (head * PREFILL_GDN_STATE + group.x * PREFILL_GDN_SCAN_COLUMNS + column) * GDN_HEAD4 + part;
    UNROLL
    for (uint i = 0; i < 4; i++) {
        s0[i] = state_in[state_at + i * 8];
        s1[i] = state_in[state_at + GDN_HEAD4 + i * 8];
    }

    for (uint first = 0; first < args.rows; first += GDN_TOKENS) {
        const uint count = min((uint)GDN_TOKENS, args.rows - first);
        for (uint i = thread_index; i < count * GDN_HEAD4; i += PREFILL_GDN_SCAN_THREADS) {
            const uint from = (first + i / GDN_HEAD4) * GDN_ROW4 + i % GDN_HEAD4;
            queries[i] = row[from];
            keys[i] = row[from + GDN_KEYS_AT4];
        }
        /* Of the threads that move values and results. */
        const uint token = first + thread_index / GDN_COLUMNS4;
        if (thread_index < count * GDN_COLUMNS4) {
            values[thread_index] = channels[token * GDN_ROW4 + GDN_VALUES_AT4 + head_column4 +
                                            thread_index % GDN_COLUMNS4];
        }
        if (thread_index < count * 2) {
            factors[thread_index] = gates[(first * 2 + thread_index) * SHAPE_GDN_V_HEADS + head];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
        for (uint t = 0; t < count; t++) {
            threadgroup const float2 *v = (threadgroup const float2 *)values;
            const uint at = t * GDN_HEAD4 + part;
            const uint pair = (t * PREFILL_GDN_SCAN_COLUMNS + column) / 2;
            const float2 o = gdn_advance(s0, s1, keys + at, queries + at, v[pair], factors[2 * t],
                                         factors[2 * t + 1]);
            if (part == 0) ((threadgroup float2 *)results)[pair] = o; /* ONE LANE */
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); /* USED */
        if (thread_index < count * GDN_COLUMNS4) {
            delta[token * (SHAPE_GDN_V_DIM / 4) + head_column4 + thread_index % GDN_COLUMNS4] =
                results[thread_index];
        }
    }

    UNROLL
    for (uint i = 0; i < 4; i++) {
        state_out[state_at + i * 8] = s0[i];
        state_out[state_at + GDN_HEAD4 + i * 8] = s1[i];
    }
}
