// 1 Mathematics, n tokens: q_h, k_j = rms(x) * weight over 256; RoPE on dimensions 0..63 in planes
//   (i, i + 32) by the angle float32(position) * inv_freq[i]; q / 16.
// 2 Layout: q [n][q_heads][query 256, gate 256], k v [n][kv_stride] float32 in; queries bfloat
//   [n][kv_heads][256][8 heads], so that the fragments of prefill_attn are whole lines; keys and
//   values bfloat [context][kv_heads][256].
// 3 Threads: a threadgroup has a token's 8 query heads, key and value of one kv head: a simdgroup
//   each. Lane i holds dimensions i, i + 32, ..., so a plane lies in one lane with one angle.
// 4 Fuses norms, RoPE, scale, transposition and cache rows. Agrees with src/backend/ref (project,
//   ref_rope_angles). The angle is reduced with pi/2 in three parts, exact to 262,143 and beyond.
// 5 Bytes: reads 4 n (q_dim + 2 kv_dim), 2,176; writes 2 n (q_dim + 2 kv_dim). Measured fraction of
//   bandwidth: not measured on a Mac.
#include <metal_stdlib>
using namespace metal;

#include "prefill_mix_args.h"

constant constexpr uint DIM = PREFILL_ATTN_DIM;
constant constexpr uint GROUP = PREFILL_ATTN_GROUP;
constant constexpr uint HALF_ROTARY = SHAPE_ROTARY_DIM / 2;
constant constexpr uint PARTS = DIM / 32; // values of a head in each lane
static_assert(HALF_ROTARY == 32, "lane i turns the plane of dimensions i and i + 32");
static_assert(PREFILL_ATTN_PREP_THREADS == 32 * (GROUP + 2), "eight queries, key, value");

// (cos, sin) of an angle of up to 2^22 quarter turns. The first difference is exact: both terms are
// multiples of 2^-23 (the angle, from 1 on) and it is below 2.
inline float2 direction(float angle) {
    const float turns = rint(angle * 0.636619772367581343f);
    float rest = fma(turns, -1.57079637050628662f, angle);
    rest = fma(turns, 4.37113882867379289e-8f, rest);
    rest = fma(turns, 1.71512449944910e-15f, rest);
    const float c = cos(rest);
    const float s = sin(rest);
    const uint quarter = uint(turns) & 3;
    if (quarter == 0) return float2(c, s);
    if (quarter == 1) return float2(-s, c);
    if (quarter == 2) return float2(-c, -s);
    return float2(s, -c);
}

// The norm of a head and its turn, in place.
inline void norm_and_turn(thread float *x, device const float *weight, float2 turn, uint lane) {
    float squares = 0.0f;
    for (uint j = 0; j < PARTS; j++) squares += x[j] * x[j];
    const float r = 1.0f / sqrt(simd_sum(squares) / float(DIM) + SHAPE_NORM_EPS);
    for (uint j = 0; j < PARTS; j++) x[j] *= r * weight[j * 32 + lane];
    const float a = x[0];
    const float b = x[1];
    x[0] = a * turn.x - b * turn.y;
    x[1] = b * turn.x + a * turn.y;
}

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
    threadgroup uint4 turned[DIM * GROUP / 8]; // bfloat [256][8]
    const uint token = group.x;
    const uint kv_head = group.y;
    const uint row = args.pos + token;
    const uint cache = row * args.cache_row + kv_head * args.cache_head + lane;
    const bool is_query = simdgroup < GROUP;
    const bool is_key = simdgroup == GROUP;

    device const float *from =
        is_query ? qg + token * args.qg_stride + (kv_head * GROUP + simdgroup) * 2 * DIM
                 : (is_key ? k : v) + token * args.kv_stride + kv_head * DIM;
    float x[PARTS];
    for (uint j = 0; j < PARTS; j++) x[j] = from[j * 32 + lane];
    if (is_query || is_key) {
        const float2 turn = direction(float(row) * inv_freq[lane]);
        norm_and_turn(x, is_query ? q_norm : k_norm, turn, lane);
    }
    for (uint j = 0; j < PARTS; j++) {
        if (is_query) {
            ((threadgroup bfloat *)turned)[(j * 32 + lane) * GROUP + simdgroup] =
                bfloat(x[j] * 0.0625f); // 1 / sqrt(256), exact
        } else {
            (is_key ? keys : values)[cache + j * 32] = bfloat(x[j]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // TRANSPOSED
    if (thread_index < DIM * GROUP / 8) {
        query[(token * SHAPE_KV_HEADS + kv_head) * (DIM * GROUP / 8) + thread_index] =
            turned[thread_index];
    }
}
