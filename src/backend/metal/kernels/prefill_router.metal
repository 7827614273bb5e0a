/* Mathematics: logits [n, E] = x router^T, x = h r weight; softmax of 8; gate = sigmoid(x g^T).
 * Layout: h float32 [n, H], r [n], weight [H]; router [E, H], g [1, H] 8 bits; ids uint16 [n, 8].
 * Threads: a threadgroup has 8 rows, all experts; a simdgroup E/8 of them, then one row's choice.
 * Fused: norm, dequantisation, choice, softmax. Agrees with ref_route up to the order of sums.
 * Bytes: router per 8 rows (143 MB cached at 2048), h twice, 52 a row; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "tile_simd.h"

/* All in float32: codes are exact, scale and bias join on the sums. Logits stay in threadgroup
 * memory; ids are descending, of equals the lower id first. 2 n E H operations. */

enum {
    ROUTER_PARTS = SHAPE_EXPERTS / (8 * PREFILL_ROUTER_SIMDS), /* fragments of a simdgroup */
    ROUTER_KEYS = SHAPE_EXPERTS / 32,                          /* logits of a lane when choosing */
    ROUTER_W_BYTES = 80, /* of a row of codes: 64 and padding against conflicts */
    ROUTER_W_QUADS = SHAPE_EXPERTS * ROUTER_W_BYTES / 16,
    ROUTER_X_STRIDE = 68 /* columns of a pair of rows of x: 64 and padding */
};
static_assert(SHAPE_EXPERTS % (8 * PREFILL_ROUTER_SIMDS) == 0, "whole fragments of experts");
static_assert(PREFILL_ROUTER_THREADS >= 128, "the first four simdgroups fetch x");
static_assert(ROUTER_W_BYTES >= 4 * PREFILL_ROUTER_ROWS, "logits fit where codes were");

struct router_input {
    device const float4 *h;
    device const float *r;
    device const float4 *weight;
    uint row0;
    uint rows;
};
struct router_memory {
    threadgroup uint4 *w;       /* [ROUTER_W_QUADS], then logits [8][E] */
    threadgroup float *x;       /* [4 pairs of rows][ROUTER_X_STRIDE][2] */
    threadgroup float *sums;    /* [8] of a row of x over the group */
    threadgroup float *factors; /* [E][2] scale, bias */
};

/* Four columns of the normalised row, in the reference's order of multiplication. */
inline float4 router_x(thread const router_input &in, uint row, uint quad) {
    return in.h[row * (SHAPE_HIDDEN / 4) + quad] * in.r[row] * in.weight[quad];
}

/* Group `step` of 8 rows of x, by 128 threads; sixteen lanes share a row. */
inline void router_put_x(thread const router_input &in, router_memory t, uint step,
                         uint thread_index) {
    const uint m = thread_index / 16;
    const uint quad = thread_index % 16;
    const bool exists = in.row0 + m < in.rows;
    const float4 x = exists ? router_x(in, in.row0 + m, step * 16 + quad) : float4(0.0f);
    UNROLL
    for (uint i = 0; i < 4; i++) {
        t.x[(m / 2 * ROUTER_X_STRIDE + quad * 4 + i) * 2 + m % 2] = x[i];
    }
    const float sum = neighbours_sum<16>(sum4(x));
    if (quad == 0) t.sums[m] = sum;
}

inline void router_put(thread const router_input &in, quantised w, router_memory t, uint step,
                       uint thread_index) {
    if (thread_index < 128) router_put_x(in, t, step, thread_index); /* whole simdgroups */
    for (uint i = thread_index; i < SHAPE_EXPERTS * 4; i += PREFILL_ROUTER_THREADS) {
        t.w[i / 4 * (ROUTER_W_BYTES / 16) + i % 4] =
            w.codes[i / 4 * (SHAPE_HIDDEN / 16) + step * 4 + i % 4];
    }
    for (uint e = thread_index; e < SHAPE_EXPERTS; e += PREFILL_ROUTER_THREADS) {
        const uint group = e * (SHAPE_HIDDEN / SHAPE_GROUP) + step;
        t.factors[2 * e] = bf16_value(w.scales[group]);
        t.factors[2 * e + 1] = bf16_value(w.biases[group]);
    }
}

inline uint router_expert(tile_place p, int i) {
    return (p.simd_n * ROUTER_PARTS + (uint)i) * 8 + p.row;
}

/* Adds one group: codes are exact in float32, scale and bias join on the sums. */
inline void router_multiply(thread tile_totals<ROUTER_PARTS, 1> &totals, router_memory t,
                            tile_place p) {
    threadgroup const ushort *codes = (threadgroup const ushort *)t.w;
    simdgroup_float8x8 sum[ROUTER_PARTS];
    UNROLL
    for (int i = 0; i < ROUTER_PARTS; i++) sum[i] = matrix_zero();
    for (uint k = 0; k < 8; k++) {
        const uint column = p.pair * ROUTER_X_STRIDE + k * 8 + p.row;
        simdgroup_float8x8 x;
        matrix_set(x, t.x[2 * column], t.x[2 * column + 1]);
        UNROLL
        for (int i = 0; i < ROUTER_PARTS; i++) {
            const ushort two = codes[router_expert(p, i) * (ROUTER_W_BYTES / 2) + k * 4 + p.pair];
            simdgroup_float8x8 w;
            matrix_set(w, (float)(two & 255), (float)(two >> 8));
            simdgroup_multiply_accumulate(sum[i], w, x, sum[i]);
        }
    }
    const float2 sums = float2(t.sums[2 * p.pair], t.sums[2 * p.pair + 1]);
    UNROLL
    for (int i = 0; i < ROUTER_PARTS; i++) {
        const uint e = router_expert(p, i);
        const float2 group = matrix_get(sum[i]);
        totals.f[i][0] = fma(float2(t.factors[2 * e]), group,
                             fma(float2(t.factors[2 * e + 1]), sums, totals.f[i][0]));
    }
}

/* Logits of 8 rows to threadgroup memory, where the codes were. */
inline void router_logits(thread const router_input &in, quantised w, router_memory t,
                          uint thread_index) {
    const tile_place p = tile_where<PREFILL_ROUTER_ROWS>(thread_index);
    tile_totals<ROUTER_PARTS, 1> totals;
    UNROLL
    for (int i = 0; i < ROUTER_PARTS; i++) totals.f[i][0] = float2(0.0f);
    for (uint step = 0; step < SHAPE_HIDDEN / SHAPE_GROUP; step++) {
        router_put(in, w, t, step, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* FILLED */
        router_multiply(totals, t, p);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* USED */
    }
    threadgroup uint *logits = (threadgroup uint *)t.w;
    UNROLL
    for (int i = 0; i < ROUTER_PARTS; i++) {
        const uint e = router_expert(p, i);
        logits[2 * p.pair * SHAPE_EXPERTS + e] = as_type<uint>(totals.f[i][0].x);
        logits[(2 * p.pair + 1) * SHAPE_EXPERTS + e] = as_type<uint>(totals.f[i][0].y);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* LOGITS */
}

/* One simdgroup's choice for a row: eight times the largest key, of equals the lowest expert. */
inline void router_choose(threadgroup const uint *logits, device ushort *ids, device float *weights,
                          uint lane) {
    uint keys[ROUTER_KEYS];
    UNROLL
    for (uint i = 0; i < ROUTER_KEYS; i++) {
        keys[i] = max(ordered_key(as_type<float>(logits[i * 32 + lane])), 1u);
    }
    uint first = 0;
    float mine = 0.0f;
    float total = 0.0f;
    for (uint rank = 0; rank < SHAPE_TOP_K; rank++) {
        uint best = 0;
        uint at = 0;
        UNROLL
        for (uint i = 0; i < ROUTER_KEYS; i++) {
            if (keys[i] > best) {
                best = keys[i];
                at = i;
            }
        }
        const uint largest = simd_max(best);
        const uint expert = simd_min(best == largest ? at * 32 + lane : (uint)SHAPE_EXPERTS);
        UNROLL
        for (uint i = 0; i < ROUTER_KEYS; i++) {
            if (i * 32 + lane == expert) keys[i] = 0;
        }
        if (rank == 0) first = largest;
        const float share = precise::exp(ordered_value(largest) - ordered_value(first));
        total += share;
        if (lane == rank) mine = share;
        if (lane == 0) ids[rank] = (ushort)expert;
    }
    if (lane < SHAPE_TOP_K) weights[lane] = mine / total;
}

/* sigmoid of one row times the shared expert's gate, by one simdgroup. */
inline float router_gate(thread const router_input &in, device const uint *codes,
                         device const ushort *scales, device const ushort *biases, uint row,
                         uint lane) {
    float sum = 0.0f;
    for (uint quad = lane; quad < SHAPE_HIDDEN / 4; quad += 32) {
        const float4 x = router_x(in, row, quad);
        const uint word = codes[quad];
        const float4 code = float4(uint4(word, word >> 8, word >> 16, word >> 24) & 255u);
        const uint group = quad / (SHAPE_GROUP / 4);
        const float4 w = bf16_value(scales[group]) * code + bf16_value(biases[group]);
        sum += dot(w, x);
    }
    return sigmoid(simd_sum(sum));
}

KERNEL_THREADS(PREFILL_ROUTER_THREADS)
kernel void prefill_router(constant prefill_router_args &args [[buffer(PREFILL_ROUTER_ARGS)]],
                           device const float4 *h [[buffer(PREFILL_ROUTER_H)]],
                           device const float *r [[buffer(PREFILL_ROUTER_R)]],
                           device const float4 *weight [[buffer(PREFILL_ROUTER_WEIGHT)]],
                           device const uint4 *codes [[buffer(PREFILL_ROUTER_CODES)]],
                           device const ushort *scales [[buffer(PREFILL_ROUTER_CODES + 1)]],
                           device const ushort *biases [[buffer(PREFILL_ROUTER_CODES + 2)]],
                           device const uint *gate_codes [[buffer(PREFILL_ROUTER_GATE_CODES)]],
                           device const ushort *gate_scales
                           [[buffer(PREFILL_ROUTER_GATE_CODES + 1)]],
                           device const ushort *gate_biases
                           [[buffer(PREFILL_ROUTER_GATE_CODES + 2)]],
                           device ushort *ids [[buffer(PREFILL_ROUTER_IDS)]],
                           device float *weights [[buffer(PREFILL_ROUTER_WEIGHTS)]],
                           device float *gate [[buffer(PREFILL_ROUTER_GATE)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[ROUTER_W_QUADS];
    threadgroup float tile_x[8 * ROUTER_X_STRIDE];
    threadgroup float sums[PREFILL_ROUTER_ROWS];
    threadgroup float factors[2 * SHAPE_EXPERTS];
    router_memory t = {tile_w, tile_x, sums, factors};
    router_input in = {h, r, weight, group * PREFILL_ROUTER_ROWS, args.rows};
    router_logits(in, quantised_of(codes, scales, biases), t, thread_index);
    const uint lane = thread_index % 32;
    for (uint m = thread_index / 32; m < PREFILL_ROUTER_ROWS; m += PREFILL_ROUTER_SIMDS) {
        const uint row = in.row0 + m;
        if (row >= args.rows) break; /* the whole simdgroup */
        threadgroup const uint *logits = (threadgroup const uint *)tile_w + m * SHAPE_EXPERTS;
        router_choose(logits, ids + row * SHAPE_TOP_K, weights + row * SHAPE_TOP_K, lane);
        const float open = router_gate(in, gate_codes, gate_scales, gate_biases, row, lane);
        if (lane == 0) gate[row] = open;
    }
}
