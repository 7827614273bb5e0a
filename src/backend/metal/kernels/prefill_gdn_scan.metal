// 1 Mathematics, per value head and token: S <- exp(g) S; m = S^T k; d = beta (v - m);
//   S <- S + k d^T; o = S^T q, with S [128 keys][128 values], q and k of key head (head / 2).
// 2 Layout: q k v [n][conv_dim], gates [n][2][v_heads], o [n][v_dim]; S is stored by columns,
//   [v_heads][128 values][128 keys], float32.
// 3 Threads: a threadgroup has 32 columns of a head, a simdgroup 8, as 4 groups of 8 lanes; a lane
//   keeps 16 keys of 2 columns in registers from the first token to the last. Keys add up in the
//   lane, then over its 8 lanes by exchange. Eight tokens of q, k, v are staged at a time.
// 4 The whole recurrence without touching S in memory between tokens. Agrees with ref_delta_rule.
//   Tokens pass one by one, so where a chunk ends cannot be seen in any bit.
// 5 Bytes: reads and writes S once (65,536 v_heads each); q, k, v, gates n rows, of which each
//   threadgroup loads 1,160 per token; writes 4 n v_dim. 128 x 128 x 4 operations per head and
//   token. Measured fraction of bandwidth: not measured on a Mac.
#include <metal_stdlib>
using namespace metal;

#include "prefill_mix_args.h"

constant constexpr uint TOKENS = 8; // staged at a time
constant constexpr uint HEAD4 = PREFILL_GDN_STATE / 4;
constant constexpr uint COLUMNS4 = PREFILL_GDN_SCAN_COLUMNS / 4;
constant constexpr uint ROW4 = SHAPE_CONV_DIM / 4;
constant constexpr uint KEYS_AT4 = SHAPE_GDN_K_DIM / 4; // in a row of channels, after the queries
constant constexpr uint VALUES_AT4 = SHAPE_GDN_K_DIM / 2;
constant constexpr uint VALUES_PER_KEY = SHAPE_GDN_V_HEADS / SHAPE_GDN_K_HEADS;

// Sums over the eight lanes that share two columns.
inline float2 over_keys(float4 a, float4 b) {
    float2 sum = float2((a.x + a.y) + (a.z + a.w), (b.x + b.y) + (b.z + b.w));
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    sum += simd_shuffle_xor(sum, 4);
    return sum;
}

// One token: 16 keys of two columns of S; k and q point at this lane's first four keys.
inline float2 advance(thread float4 *s0, thread float4 *s1, threadgroup const float4 *k,
                      threadgroup const float4 *q, float2 v, float beta, float decay) {
    float4 key[4];
    float4 recall0 = float4(0.0f);
    float4 recall1 = float4(0.0f);
    for (uint i = 0; i < 4; i++) {
        key[i] = k[i * 8];
        s0[i] *= decay;
        s1[i] *= decay;
        recall0 = fma(s0[i], key[i], recall0);
        recall1 = fma(s1[i], key[i], recall1);
    }
    const float2 d = beta * (v - over_keys(recall0, recall1));
    float4 out0 = float4(0.0f);
    float4 out1 = float4(0.0f);
    for (uint i = 0; i < 4; i++) {
        const float4 query = q[i * 8];
        s0[i] = fma(key[i], float4(d.x), s0[i]);
        s1[i] = fma(key[i], float4(d.y), s1[i]);
        out0 = fma(s0[i], query, out0);
        out1 = fma(s1[i], query, out1);
    }
    return over_keys(out0, out1);
}

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
    threadgroup float4 queries[TOKENS * HEAD4];
    threadgroup float4 keys[TOKENS * HEAD4];
    threadgroup float4 values[TOKENS * COLUMNS4];
    threadgroup float4 results[TOKENS * COLUMNS4];
    threadgroup float factors[TOKENS * 2]; // beta, decay
    const uint head = group.y;
    const uint part = lane % 8;                       // of the keys
    const uint column = simdgroup * 8 + lane / 8 * 2; // of the threadgroup's 32
    const uint head_column4 = head * HEAD4 + group.x * COLUMNS4;
    device const float4 *row = channels + head / VALUES_PER_KEY * HEAD4;

    float4 s0[4];
    float4 s1[4];
    const uint state_at =
        (head * PREFILL_GDN_STATE + group.x * PREFILL_GDN_SCAN_COLUMNS + column) * HEAD4 + part;
    for (uint i = 0; i < 4; i++) {
        s0[i] = state_in[state_at + i * 8];
        s1[i] = state_in[state_at + HEAD4 + i * 8];
    }

    for (uint first = 0; first < args.n; first += TOKENS) {
        const uint count = min(TOKENS, args.n - first);
        for (uint i = thread_index; i < count * HEAD4; i += PREFILL_GDN_SCAN_THREADS) {
            const uint from = (first + i / HEAD4) * ROW4 + i % HEAD4;
            queries[i] = row[from];
            keys[i] = row[from + KEYS_AT4];
        }
        const uint token = first + thread_index / COLUMNS4; // threads that move values and results
        if (thread_index < count * COLUMNS4) {
            values[thread_index] =
                channels[token * ROW4 + VALUES_AT4 + head_column4 + thread_index % COLUMNS4];
        }
        if (thread_index < count * 2) {
            factors[thread_index] = gates[(first * 2 + thread_index) * SHAPE_GDN_V_HEADS + head];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // STAGED
        for (uint t = 0; t < count; t++) {
            threadgroup const float2 *v = (threadgroup const float2 *)values;
            const uint at = t * HEAD4 + part;
            const uint pair = (t * PREFILL_GDN_SCAN_COLUMNS + column) / 2;
            const float2 o = advance(s0, s1, keys + at, queries + at, v[pair], factors[2 * t],
                                     factors[2 * t + 1]);
            if (part == 0) ((threadgroup float2 *)results)[pair] = o; // ONE LANE
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // USED
        if (thread_index < count * COLUMNS4) {
            delta[token * (SHAPE_GDN_V_DIM / 4) + head_column4 + thread_index % COLUMNS4] =
                results[thread_index];
        }
    }

    for (uint i = 0; i < 4; i++) {
        state_out[state_at + i * 8] = s0[i];
        state_out[state_at + HEAD4 + i * 8] = s1[i];
    }
}
