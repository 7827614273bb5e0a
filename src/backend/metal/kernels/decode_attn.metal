/* Mathematics: qkv = W norm(h); softmax(q k^T / 16) v * sigmoid(gate), 8 q heads a KV head; h += o.
 * Layout: qkv float32 [2QD + 2KV]; cache bf16 [context][KV]; partial results float32 [blocks][QD].
 * Threads: a simdgroup reads whole rows of a KV head, 8 dimensions a lane, four rows at once.
 * Fused: norms, RoPE, new row, gate, merge, residual. Agrees with ref/attention.c (cache: bf16).
 * Bytes: KV once; a block 8 KB of results, 16 KB of queries and gates; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_rows.h"
#include "rope.h"

/* Blocks of KV rows: 512 neighbouring bytes of a row serve all eight heads; all scores first, then
 * the weighted sum. Products with W as in decode_gdn.metal. */

/* ---- in ------------------------------------------------------------------------------------- */

#define ATTN_UNIT        (4 * DECODE_WAVE_ROWS(SHAPE_HIDDEN))
#define ATTN_GROUP_UNITS (DECODE_IN_ROWS(SHAPE_HIDDEN) / ATTN_UNIT)
static_assert(SHAPE_Q_DIM % ATTN_UNIT == 0 && SHAPE_KV_DIM % ATTN_UNIT == 0, "whole units");

KERNEL_THREADS(DECODE_ATTN_IN_THREADS)
kernel void decode_attn_in(device const float4 *h [[buffer(DECODE_ATTN_IN_H)]],
                           device const float4 *norm [[buffer(DECODE_ATTN_IN_NORM)]],
                           device const uint4 *q [[buffer(DECODE_ATTN_IN_Q)]],
                           device const ushort *q_scales [[buffer(DECODE_ATTN_IN_Q + 1)]],
                           device const ushort *q_biases [[buffer(DECODE_ATTN_IN_Q + 2)]],
                           device const uint4 *k [[buffer(DECODE_ATTN_IN_K)]],
                           device const ushort *k_scales [[buffer(DECODE_ATTN_IN_K + 1)]],
                           device const ushort *k_biases [[buffer(DECODE_ATTN_IN_K + 2)]],
                           device const uint4 *v [[buffer(DECODE_ATTN_IN_V)]],
                           device const ushort *v_scales [[buffer(DECODE_ATTN_IN_V + 1)]],
                           device const ushort *v_biases [[buffer(DECODE_ATTN_IN_V + 2)]],
                           device float *qkv [[buffer(DECODE_ATTN_IN_QKV)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 x[HIDDEN_QUADS];
    threadgroup float sums[HIDDEN_CHUNKS];
    threadgroup float partial[DECODE_ATTN_IN_THREADS / 32];
    const float r = decode_stage_norm<SHAPE_HIDDEN, DECODE_ATTN_IN_THREADS>(h, norm, x, sums,
                                                                            partial, thread_index);
    for (uint i = simdgroup; i < ATTN_GROUP_UNITS; i += DECODE_ATTN_IN_THREADS / 32) {
        uint unit = group * ATTN_GROUP_UNITS + i;
        uint rows = 2 * SHAPE_Q_DIM;
        uint out = 0;
        quantised m = quantised_of(q, q_scales, q_biases);
        if (unit >= (2 * SHAPE_Q_DIM + SHAPE_KV_DIM) / ATTN_UNIT) {
            unit -= (2 * SHAPE_Q_DIM + SHAPE_KV_DIM) / ATTN_UNIT;
            rows = SHAPE_KV_DIM;
            out = 2 * SHAPE_Q_DIM + SHAPE_KV_DIM;
            m = quantised_of(v, v_scales, v_biases);
        } else if (unit >= 2 * SHAPE_Q_DIM / ATTN_UNIT) {
            unit -= 2 * SHAPE_Q_DIM / ATTN_UNIT;
            rows = SHAPE_KV_DIM;
            out = 2 * SHAPE_Q_DIM;
            m = quantised_of(k, k_scales, k_biases);
        }
        if (unit * ATTN_UNIT >= rows) break; /* beyond the last matrix, for the whole simdgroup */
        const uint first = unit * ATTN_UNIT + decode_lane_row<SHAPE_HIDDEN>(lane);
        decode_rows_out<SHAPE_HIDDEN, 4, false>(m, first, rows, r, x, sums, lane, qkv + out);
    }
}

/* ---- blocks of KV rows ---------------------------------------------------------------------- */

#define ATTN_DIM   SHAPE_HEAD_DIM
#define ATTN_HEADS 8 /* query heads of a KV head */
static_assert(ATTN_DIM == 256 && SHAPE_Q_HEADS == ATTN_HEADS * SHAPE_KV_HEADS,
              "a lane has 8 of 256");
static_assert(SHAPE_ROTARY_DIM == 64, "a lane has one of 32 frequencies");

/* cos and sin of this position for the lane's eight dimensions; lanes from 8 on do not turn. */
struct attn_turn {
    float c[8];
    float s[8];
};
inline attn_turn attn_turn_at(float inv_freq, uint position, uint lane) {
    const float2 turn = rope_direction((float)position * inv_freq); /* of frequency `lane` */
    attn_turn t;
    UNROLL
    for (int e = 0; e < 8; e++) {
        const ushort frequency = (ushort)(lane % 4 * 8 + e);
        t.c[e] = simd_shuffle(turn.x, frequency);
        t.s[e] = simd_shuffle(turn.y, frequency);
    }
    return t;
}

/* A head in its simdgroup, dimensions 8 * lane .. + 7 in low and high: norm, then RoPE, which pairs
 * dimension i with i + 32, four lanes on. */
inline void attn_prepare(thread float4 &low, thread float4 &high, device const float4 *weight,
                         thread const attn_turn &t, uint lane) {
    const float squares = lanes_sum<32>(decode_dot4(high, high, decode_dot4(low, low, 0.0f)));
    const float r = norm_factor(squares, ATTN_DIM);
    low *= r * weight[2 * lane];
    high *= r * weight[2 * lane + 1];
    const float4 other_low = simd_shuffle_xor(low, 4);
    const float4 other_high = simd_shuffle_xor(high, 4);
    if (lane < 8) {
        const float sign = lane < 4 ? -1.0f : 1.0f;
        UNROLL
        for (int e = 0; e < 4; e++) {
            low[e] = low[e] * t.c[e] + sign * other_low[e] * t.s[e];
            high[e] = high[e] * t.c[e + 4] + sign * other_high[e] * t.s[e + 4];
        }
    }
}

/* What the threads of a block know. */
struct attn_block {
    uint first; /* its first position */
    uint rows;  /* positions in it, at least 1 */
    uint kv_head;
    uint thread_index;
    uint lane;
    uint simdgroup;
};

/* A block's row for this lane, in units of 16 bytes; rows from the last on are the last. */
inline uint attn_place(attn_block b, uint row) {
    const uint position = b.first + min(row, b.rows - 1);
    return position * (SHAPE_KV_DIM / 8) + b.kv_head * (ATTN_DIM / 8) + b.lane;
}

/* Queries to shared [8 heads][64 quads], divided by 16 = sqrt(256); this token's KV row to the
 * cache if it is in this block. Ends with a barrier. */
template <int SIMDS>
inline void attn_queries(attn_block b, uint position, device const float4 *qkv,
                         device const float4 *q_norm, device const float4 *k_norm,
                         device const float *inv_freq, device uint4 *keys, device uint4 *values,
                         threadgroup float4 *shared) {
    const attn_turn t = attn_turn_at(inv_freq[b.lane], position, b.lane);
    for (uint head = b.simdgroup; head < ATTN_HEADS; head += SIMDS) {
        const uint at = (b.kv_head * ATTN_HEADS + head) * 2 * (ATTN_DIM / 4) + 2 * b.lane;
        float4 low = qkv[at];
        float4 high = qkv[at + 1];
        attn_prepare(low, high, q_norm, t, b.lane);
        shared[head * 64 + b.lane] = low * (1.0f / 16);
        shared[head * 64 + 32 + b.lane] = high * (1.0f / 16);
    }
    if (b.first + b.rows == position + 1) {
        const uint at = (2 * SHAPE_Q_DIM + b.kv_head * ATTN_DIM) / 4 + 2 * b.lane;
        const uint place = attn_place(b, b.rows - 1);
        if (b.simdgroup == 0) {
            float4 low = qkv[at];
            float4 high = qkv[at + 1];
            attn_prepare(low, high, k_norm, t, b.lane);
            keys[place] = bf16_eight(low, high);
        } else if (b.simdgroup == 1) {
            values[place] = bf16_eight(qkv[at + SHAPE_KV_DIM / 4], qkv[at + SHAPE_KV_DIM / 4 + 1]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); /* QUERIES */
}

/* Adds p over all lanes, eight heads of four rows: the lane keeps head lane / 4 of row lane % 4.
 * Each step halves what a lane holds, so that no sum is made twice. */
inline float attn_sum_heads(thread const float *p, uint lane) {
    float a[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        const bool upper = (lane & 16) != 0;
        const float sent = upper ? p[i] : p[i + 4];
        a[i] = (upper ? p[i + 4] : p[i]) + simd_shuffle_xor(sent, 16);
    }
    float c[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        const bool upper = (lane & 8) != 0;
        const float sent = upper ? a[i] : a[i + 2];
        c[i] = (upper ? a[i + 2] : a[i]) + simd_shuffle_xor(sent, 8);
    }
    const bool upper = (lane & 4) != 0;
    const float sent = upper ? c[0] : c[1];
    return (upper ? c[1] : c[0]) + simd_shuffle_xor(sent, 4);
}
inline float attn_sum_rows(thread const float *p, uint lane) {
    float a[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        const bool upper = (lane & 2) != 0;
        const float sent = upper ? p[i] : p[i + 2];
        a[i] = (upper ? p[i + 2] : p[i]) + simd_shuffle_xor(sent, 2);
    }
    const bool upper = (lane & 1) != 0;
    const float sent = upper ? a[0] : a[1];
    return (upper ? a[1] : a[0]) + simd_shuffle_xor(sent, 1);
}

/* scores[row][8 heads] of the block, and the largest of each head so far to most[simdgroup][8]. The
 * queries leave shared for registers before scores, which are the same memory, are written. */
template <int SIMDS>
inline void attn_scores(attn_block b, device const uint4 *keys, threadgroup float4 *shared,
                        threadgroup float *most) {
    threadgroup float *scores = (threadgroup float *)shared;
    float4 q[ATTN_HEADS][2];
    UNROLL
    for (int head = 0; head < ATTN_HEADS; head++) {
        q[head][0] = shared[head * 64 + b.lane];
        q[head][1] = shared[head * 64 + 32 + b.lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* TAKEN */
    float largest = -INFINITY;
    for (uint row = 4 * b.simdgroup; row < b.rows; row += 4 * SIMDS) {
        uint4 k[4];
        UNROLL
        for (uint i = 0; i < 4; i++) k[i] = keys[attn_place(b, row + i)];
        float sum[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const float4 low = bf16_first(k[i]);
            const float4 high = bf16_last(k[i]);
            float p[ATTN_HEADS];
            UNROLL
            for (int head = 0; head < ATTN_HEADS; head++) {
                p[head] = decode_dot4(high, q[head][1], decode_dot4(low, q[head][0], 0.0f));
            }
            sum[i] = attn_sum_heads(p, b.lane);
        }
        float score = attn_sum_rows(sum, b.lane);
        const uint mine = row + b.lane % 4;
        if (mine >= b.rows) score = -INFINITY;
        scores[mine * ATTN_HEADS + b.lane / 4] = score;
        largest = max(largest, score);
    }
    largest = max(largest, simd_shuffle_xor(largest, 1));
    largest = max(largest, simd_shuffle_xor(largest, 2));
    if (b.lane % 4 == 0) most[b.simdgroup * ATTN_HEADS + b.lane / 4] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* SCORES */
}

/* scores <- exp(score - max of the block), totals[simdgroup][8] their sums; returns that max for
 * head thread_index % 8. Neighbouring threads have neighbouring heads. Ends with a barrier. */
template <int SIMDS>
inline float attn_softmax(attn_block b, threadgroup float *scores, threadgroup const float *most,
                          threadgroup float *totals) {
    const uint head = b.thread_index % ATTN_HEADS;
    float largest = most[head];
    for (uint i = 1; i < SIMDS; i++) largest = max(largest, most[i * ATTN_HEADS + head]);
    const uint rows = (b.rows + 3) / 4 * 4;
    float total = 0.0f;
    for (uint row = b.thread_index / ATTN_HEADS; row < rows; row += 32 * SIMDS / ATTN_HEADS) {
        const float e = precise::exp(scores[row * ATTN_HEADS + head] - largest);
        scores[row * ATTN_HEADS + head] = e;
        total += e;
    }
    total += simd_shuffle_xor(total, 8);
    total += simd_shuffle_xor(total, 16);
    if (b.lane < ATTN_HEADS) totals[b.simdgroup * ATTN_HEADS + b.lane] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* WEIGHTS */
    return largest;
}

/* The simdgroup's rows of sum_row weight[row][head] value[row]. */
template <int SIMDS>
inline void attn_values(attn_block b, device const uint4 *values, threadgroup const float4 *weights,
                        thread float4 (&acc)[ATTN_HEADS][2]) {
    UNROLL
    for (int head = 0; head < ATTN_HEADS; head++) acc[head][0] = acc[head][1] = float4(0.0f);
    for (uint row = 4 * b.simdgroup; row < b.rows; row += 4 * SIMDS) {
        uint4 v[4];
        UNROLL
        for (uint i = 0; i < 4; i++) v[i] = values[attn_place(b, row + i)];
        UNROLL
        for (uint i = 0; i < 4; i++) {
            const float4 low = bf16_first(v[i]);
            const float4 high = bf16_last(v[i]);
            const float4 w0 = weights[2 * (row + i)];
            const float4 w1 = weights[2 * (row + i) + 1];
            UNROLL
            for (int head = 0; head < 4; head++) {
                acc[head][0] = fma(float4(w0[head]), low, acc[head][0]);
                acc[head][1] = fma(float4(w0[head]), high, acc[head][1]);
                acc[head + 4][0] = fma(float4(w1[head]), low, acc[head + 4][0]);
                acc[head + 4][1] = fma(float4(w1[head]), high, acc[head + 4][1]);
            }
        }
    }
}

/* Adds the simdgroups' sums, a few heads at a time, in the memory of the scores; out: [8][64]. */
template <int SIMDS>
inline void attn_finish(attn_block b, thread const float4 (&acc)[ATTN_HEADS][2],
                        device const float4 *qkv, threadgroup float4 *shared, device float4 *out) {
    enum { HEADS = 16 / SIMDS };
    UNROLL
    for (int from = 0; from < ATTN_HEADS; from += HEADS) {
        threadgroup_barrier(mem_flags::mem_threadgroup); /* FREE */
        UNROLL
        for (int i = 0; i < HEADS; i++) {
            const uint at = (b.simdgroup * HEADS + (uint)i) * 64 + 2 * b.lane;
            shared[at] = acc[from + i][0];
            shared[at + 1] = acc[from + i][1];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); /* GATHERED */
        for (uint i = b.thread_index; i < HEADS * 64; i += 32 * SIMDS) {
            float4 sum = shared[i];
            for (uint s = 1; s < SIMDS; s++) sum += shared[s * HEADS * 64 + i];
            const uint head = (uint)from + i / 64;
            const uint query_head = b.kv_head * ATTN_HEADS + head;
            const float4 gate = qkv[(2 * query_head + 1) * (ATTN_DIM / 4) + i % 64];
            out[head * 64 + i % 64] = sum / (1.0f + precise::exp(-gate));
        }
    }
}

/* shared: [1024] float4, the queries, then the scores of at most 512 rows, then the sums of the
 * simdgroups. most, totals: [SIMDS][8]. */
template <int SIMDS>
inline void attn_run(constant decode_attn_args &args, attn_block b, device const float4 *qkv,
                     device const float4 *q_norm, device const float4 *k_norm,
                     device const float *inv_freq, device uint4 *keys, device uint4 *values,
                     device float4 *partial, device float2 *stats, uint group,
                     threadgroup float4 *shared, threadgroup float *most,
                     threadgroup float *totals) {
    const uint block = group / SHAPE_KV_HEADS;
    b.kv_head = group % SHAPE_KV_HEADS;
    b.first = block * args.block_rows;
    b.rows = min(args.block_rows, args.position + 1 - b.first);
    attn_queries<SIMDS>(b, args.position, qkv, q_norm, k_norm, inv_freq, keys, values, shared);
    attn_scores<SIMDS>(b, keys, shared, most);
    const float largest = attn_softmax<SIMDS>(b, (threadgroup float *)shared, most, totals);
    float4 acc[ATTN_HEADS][2];
    attn_values<SIMDS>(b, values, shared, acc);
    const uint head = block * SHAPE_Q_HEADS + b.kv_head * ATTN_HEADS; /* first of the block's */
    attn_finish<SIMDS>(b, acc, qkv, shared, partial + head * (ATTN_DIM / 4));
    if (b.thread_index < ATTN_HEADS) {
        float total = 0.0f;
        for (uint i = 0; i < SIMDS; i++) total += totals[i * ATTN_HEADS + b.thread_index];
        stats[head + b.thread_index] = float2(largest, total);
    }
}

enum {
    ATTN_SHORT_SIMDS = DECODE_ATTN_SHORT_THREADS / 32,
    ATTN_LONG_SIMDS = DECODE_ATTN_LONG_THREADS / 32
};
#define ATTN_KERNEL(name, SIMDS)                                                                   \
    KERNEL_THREADS(32 * SIMDS)                                                                     \
    kernel void name(constant decode_attn_args &args [[buffer(DECODE_ATTN_ARGS)]],                 \
                     device const float4 *qkv [[buffer(DECODE_ATTN_QKV)]],                         \
                     device const float4 *q_norm [[buffer(DECODE_ATTN_Q_NORM)]],                   \
                     device const float4 *k_norm [[buffer(DECODE_ATTN_K_NORM)]],                   \
                     device const float *inv_freq [[buffer(DECODE_ATTN_INV_FREQ)]],                \
                     device uint4 *keys [[buffer(DECODE_ATTN_KEYS)]],                              \
                     device uint4 *values [[buffer(DECODE_ATTN_VALUES)]],                          \
                     device float4 *partial [[buffer(DECODE_ATTN_PARTIAL)]],                       \
                     device float2 *stats [[buffer(DECODE_ATTN_STATS)]],                           \
                     uint group [[threadgroup_position_in_grid]],                                  \
                     uint thread_index [[thread_index_in_threadgroup]],                            \
                     uint lane [[thread_index_in_simdgroup]],                                      \
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {                          \
        threadgroup float4 shared[1024];                                                           \
        threadgroup float most[SIMDS * ATTN_HEADS];                                                \
        threadgroup float totals[SIMDS * ATTN_HEADS];                                              \
        attn_block b;                                                                              \
        b.thread_index = thread_index;                                                             \
        b.lane = lane;                                                                             \
        b.simdgroup = simdgroup;                                                                   \
        attn_run<SIMDS>(args, b, qkv, q_norm, k_norm, inv_freq, keys, values, partial, stats,      \
                        group, shared, most, totals);                                              \
    }
ATTN_KERNEL(decode_attn_short, ATTN_SHORT_SIMDS)
ATTN_KERNEL(decode_attn_long, ATTN_LONG_SIMDS)

/* ---- merge ---------------------------------------------------------------------------------- */

KERNEL_THREADS(DECODE_ATTN_MERGE_THREADS)
kernel void decode_attn_merge(constant decode_merge_args &args [[buffer(DECODE_ATTN_MERGE_ARGS)]],
                              device const float4 *partial [[buffer(DECODE_ATTN_MERGE_PARTIAL)]],
                              device const float2 *stats [[buffer(DECODE_ATTN_MERGE_STATS)]],
                              device float4 *merged [[buffer(DECODE_ATTN_MERGE_MERGED)]],
                              device float2 *merged_stats
                              [[buffer(DECODE_ATTN_MERGE_MERGED_STATS)]],
                              uint group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum {
        QUADS = DECODE_MERGE_DIMS / 4,
        STEPS = DECODE_ATTN_MERGE_THREADS / QUADS,
        SLICES = ATTN_DIM / DECODE_MERGE_DIMS
    };
    threadgroup float most[DECODE_ATTN_MERGE_THREADS / 32];
    threadgroup float4 sums[DECODE_ATTN_MERGE_THREADS];
    threadgroup float totals[STEPS];
    const uint head = group / SLICES;
    float largest = -INFINITY;
    for (uint block = thread_index; block < args.blocks; block += DECODE_ATTN_MERGE_THREADS) {
        largest = max(largest, stats[block * SHAPE_Q_HEADS + head].x);
    }
    largest = simd_max(largest);
    if (lane == 0) most[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* MOST */
    for (uint i = 0; i < DECODE_ATTN_MERGE_THREADS / 32; i++) largest = max(largest, most[i]);

    const uint quad = thread_index % QUADS;
    const uint step = thread_index / QUADS;
    float4 sum = float4(0.0f);
    float total = 0.0f;
    for (uint block = step; block < args.blocks; block += STEPS) {
        const uint at = block * SHAPE_Q_HEADS + head;
        const float2 block_stats = stats[at];
        const float factor = precise::exp(block_stats.x - largest);
        total = fma(factor, block_stats.y, total);
        sum =
            fma(float4(factor), partial[at * (ATTN_DIM / 4) + group % SLICES * QUADS + quad], sum);
    }
    sums[thread_index] = sum;
    if (quad == 0) totals[step] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* SUMS */
    if (thread_index < QUADS) {
        for (uint i = 1; i < STEPS; i++) sum += sums[i * QUADS + quad];
        total = totals[0];
        for (uint i = 1; i < STEPS; i++) total += totals[i];
        merged[group * QUADS + quad] = sum / total;
    }
    if (thread_index == 0 && group % SLICES == 0) merged_stats[head] = float2(0.0f, 1.0f);
}

/* ---- out ------------------------------------------------------------------------------------ */

KERNEL_THREADS(DECODE_ATTN_OUT_THREADS)
kernel void decode_attn_out(constant decode_merge_args &args [[buffer(DECODE_ATTN_OUT_ARGS)]],
                            device const float4 *partial [[buffer(DECODE_ATTN_OUT_PARTIAL)]],
                            device const float2 *stats [[buffer(DECODE_ATTN_OUT_STATS)]],
                            device const uint4 *codes [[buffer(DECODE_ATTN_OUT_PROJ)]],
                            device const ushort *scales [[buffer(DECODE_ATTN_OUT_PROJ + 1)]],
                            device const ushort *biases [[buffer(DECODE_ATTN_OUT_PROJ + 2)]],
                            device float *h [[buffer(DECODE_ATTN_OUT_H)]],
                            uint group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum { COLS = SHAPE_Q_DIM, QUADS = DECODE_QUADS(COLS), CHUNKS = DECODE_CHUNKS(COLS), R = 2 };
    threadgroup float4 x[QUADS];
    threadgroup float sums[CHUNKS];
    static_assert(COLS % 256 == 0, "whole simdgroups stage");
    for (uint octet = thread_index; octet < COLS / 8; octet += DECODE_ATTN_OUT_THREADS) {
        const uint head = octet / (ATTN_DIM / 8);
        float largest = stats[head].x;
        for (uint i = 1; i < args.blocks; i++) {
            largest = max(largest, stats[i * SHAPE_Q_HEADS + head].x);
        }
        float4 low = float4(0.0f);
        float4 high = float4(0.0f);
        float total = 0.0f;
        for (uint i = 0; i < args.blocks; i++) {
            const float2 block_stats = stats[i * SHAPE_Q_HEADS + head];
            const float factor = precise::exp(block_stats.x - largest);
            total = fma(factor, block_stats.y, total);
            low = fma(float4(factor), partial[i * (COLS / 4) + 2 * octet], low);
            high = fma(float4(factor), partial[i * (COLS / 4) + 2 * octet + 1], high);
        }
        decode_stage<COLS>(x, sums, octet, COLS / 8, low / total, high / total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    const uint first = group * DECODE_OUT_ROWS(COLS) + simdgroup * R * DECODE_WAVE_ROWS(COLS) +
                       decode_lane_row<COLS>(lane);
    decode_rows_out<COLS, R, true>(quantised_of(codes, scales, biases), first, SHAPE_HIDDEN, 1.0f,
                                   x, sums, lane, h);
}
