/* Mathematics: q_h, k_j = rms(x) * weight[256], RoPE in planes (i, i + 32), i < 32; q / 16.
 * Layout: q [n][q_heads][query, gate], k v [n][kv_stride] float32; queries bf16 [n][kv][256][8].
 * Threads: a token's 8 query heads, key and value of a kv head a threadgroup, a simdgroup each.
 * Fused: norms, RoPE, scale, transposition, cache rows. Agrees with project (ref/attention.c).
 * Bytes: 4 n (QD + 2 KV) read, 2 n (QD + 2 KV) written; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "prefill_attn_join.h"
#include "rope.h"

/* Lane i holds dimensions i, i + 32, ..., so a plane lies in one lane with one angle. Queries are
 * transposed so that the fragments of prefill_attn are whole lines; prefill_attn_tensor.metal has
 * them by head. */

enum { ATTN_VALUES = ATTN_DIM / 32 /* of a head in each lane */ };
static_assert(SHAPE_ROTARY_DIM == 64, "lane i turns the plane of dimensions i and i + 32");
static_assert(PREFILL_ATTN_PREP_THREADS == 32 * (ATTN_HEADS + 2), "eight queries, key, value");

/* Where a value of a query stands in its token's part of a kv head, and where that part stands. */
#ifdef PREFILL_QUERIES_BY_HEAD
inline uint attn_query_value(uint head, uint dimension) {
    return head * ATTN_DIM + dimension;
}
inline uint attn_query_token(uint token, uint kv_head, uint rows) {
    return kv_head * rows + token;
}
#else
inline uint attn_query_value(uint head, uint dimension) {
    return dimension * ATTN_HEADS + head;
}
inline uint attn_query_token(uint token, uint kv_head, uint) {
    return token * SHAPE_KV_HEADS + kv_head;
}
#endif

/* The norm of a head and its turn, in place. */
inline void attn_norm_and_turn(thread float *x, device const float *weight, float2 turn,
                               uint lane) {
    float squares = 0.0f;
    UNROLL
    for (uint j = 0; j < ATTN_VALUES; j++) squares += x[j] * x[j];
    const float r = norm_factor(simd_sum(squares), ATTN_DIM);
    UNROLL
    for (uint j = 0; j < ATTN_VALUES; j++) x[j] *= r * weight[j * 32 + lane];
    const float a = x[0];
    const float b = x[1];
    x[0] = a * turn.x - b * turn.y;
    x[1] = b * turn.x + a * turn.y;
}

KERNEL_THREADS(PREFILL_ATTN_PREP_THREADS)
kernel void prefill_attn_prep(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_PREP_ARGS)]],
                              device const float *qg [[buffer(PREFILL_ATTN_PREP_QG)]],
                              device const float *k [[buffer(PREFILL_ATTN_PREP_K)]],
                              device const float *v [[buffer(PREFILL_ATTN_PREP_V)]],
                              device const float *q_norm [[buffer(PREFILL_ATTN_PREP_Q_NORM)]],
                              device const float *k_norm [[buffer(PREFILL_ATTN_PREP_K_NORM)]],
                              device const float *inv_freq [[buffer(PREFILL_ATTN_PREP_INV_FREQ)]],
                              device uint4 *query [[buffer(PREFILL_ATTN_PREP_QUERY)]],
                              device bfloat *keys [[buffer(PREFILL_ATTN_PREP_KEYS)]],
                              device bfloat *values [[buffer(PREFILL_ATTN_PREP_VALUES)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint4 turned[ATTN_DIM * ATTN_HEADS / 8]; /* bfloat */
    const uint token = group.x;
    const uint kv_head = group.y;
    const uint row = args.position + token;
    const uint cache = row * args.cache_row + kv_head * args.cache_head + lane;
    const bool is_query = simdgroup < ATTN_HEADS;
    const bool is_key = simdgroup == ATTN_HEADS;

    device const float *from =
        is_query ? qg + token * args.qg_stride + (kv_head * ATTN_HEADS + simdgroup) * 2 * ATTN_DIM
                 : (is_key ? k : v) + token * args.kv_stride + kv_head * ATTN_DIM;
    float x[ATTN_VALUES];
    UNROLL
    for (uint j = 0; j < ATTN_VALUES; j++) x[j] = from[j * 32 + lane];
    if (is_query || is_key) {
        const float2 turn = rope_direction((float)row * inv_freq[lane]);
        attn_norm_and_turn(x, is_query ? q_norm : k_norm, turn, lane);
    }
    UNROLL
    for (uint j = 0; j < ATTN_VALUES; j++) {
        if (is_query) {
            ((threadgroup bfloat *)turned)[attn_query_value(simdgroup, j * 32 + lane)] =
                bfloat(x[j] * 0.0625f); /* 1 / sqrt(256), exact */
        } else {
            (is_key ? keys : values)[cache + j * 32] = bfloat(x[j]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* TRANSPOSED */
    if (thread_index < ATTN_DIM * ATTN_HEADS / 8) {
        query[attn_query_token(token, kv_head, args.rows) * (ATTN_DIM * ATTN_HEADS / 8) +
              thread_index] = turned[thread_index];
    }
}
