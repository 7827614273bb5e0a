/* A Gated DeltaNet layer for one token in three kernels: proj = in_proj norm(h); gated [VD] from
 * convolution, gates and delta rule; h += out_proj (gated norm). Letters as in decode_args.h.
 * Weights 4 bits row-major; state float32 by columns [VH][128 value][128 key]; conv float32
 * [3][CD]. in, out: a simdgroup makes 4 (2) waves of rows at a time. delta: it has 4 columns in
 * registers. Fused: norm in front, residual behind. Agrees with ref/deltanet.c up to the order of
 * sums. Bytes: weights once, state once in and out, 8H (in), 4 VD + 16 VH (out) more per
 * threadgroup. Not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_common.h"

/* ---- in ------------------------------------------------------------------------------------- */

/* Simdgroup units of 4 waves of rows each; a matrix ends its own last unit. */
#define GDN_UNIT        (4 * DECODE_WAVE_ROWS(SHAPE_HIDDEN))
#define GDN_UNITS_QKV   DECODE_CEIL(SHAPE_CONV_DIM, GDN_UNIT)
#define GDN_UNITS_Z     DECODE_CEIL(SHAPE_GDN_V_DIM, GDN_UNIT)
#define GDN_UNITS_GATE  DECODE_CEIL(SHAPE_GDN_V_HEADS, GDN_UNIT)
#define GDN_GROUP_UNITS (DECODE_IN_ROWS(SHAPE_HIDDEN) / GDN_UNIT)
static_assert(SHAPE_CONV_DIM % GDN_UNIT == 0 && SHAPE_GDN_V_DIM % GDN_UNIT == 0, "whole units");

kernel void decode_gdn_in(device const float4 *h [[buffer(DECODE_GDN_IN_H)]],
                          device const float4 *norm [[buffer(DECODE_GDN_IN_NORM)]],
                          device const uint4 *qkv [[buffer(DECODE_GDN_IN_QKV)]],
                          device const ushort *qkv_scales [[buffer(DECODE_GDN_IN_QKV + 1)]],
                          device const ushort *qkv_biases [[buffer(DECODE_GDN_IN_QKV + 2)]],
                          device const uint4 *z [[buffer(DECODE_GDN_IN_Z)]],
                          device const ushort *z_scales [[buffer(DECODE_GDN_IN_Z + 1)]],
                          device const ushort *z_biases [[buffer(DECODE_GDN_IN_Z + 2)]],
                          device const uint4 *b [[buffer(DECODE_GDN_IN_B)]],
                          device const ushort *b_scales [[buffer(DECODE_GDN_IN_B + 1)]],
                          device const ushort *b_biases [[buffer(DECODE_GDN_IN_B + 2)]],
                          device const uint4 *a [[buffer(DECODE_GDN_IN_A)]],
                          device const ushort *a_scales [[buffer(DECODE_GDN_IN_A + 1)]],
                          device const ushort *a_biases [[buffer(DECODE_GDN_IN_A + 2)]],
                          device float *proj [[buffer(DECODE_GDN_IN_PROJ)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 x[HIDDEN_QUADS];
    threadgroup float sums[HIDDEN_CHUNKS];
    threadgroup float partial[8];
    const float r = decode_stage_norm<SHAPE_HIDDEN, 256>(h, norm, x, sums, partial, thread_index);
    const uint wave = decode_lane_row<SHAPE_HIDDEN>(lane);
    for (uint i = simdgroup; i < GDN_GROUP_UNITS; i += 8) {
        uint unit = group * GDN_GROUP_UNITS + i;
        uint rows = SHAPE_CONV_DIM;
        uint out = 0;
        decode_matrix m = decode_matrix_of(qkv, qkv_scales, qkv_biases);
        if (unit >= GDN_UNITS_QKV + GDN_UNITS_Z + GDN_UNITS_GATE) {
            unit -= GDN_UNITS_QKV + GDN_UNITS_Z + GDN_UNITS_GATE;
            rows = SHAPE_GDN_V_HEADS;
            out = SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + SHAPE_GDN_V_HEADS;
            m = decode_matrix_of(a, a_scales, a_biases);
        } else if (unit >= GDN_UNITS_QKV + GDN_UNITS_Z) {
            unit -= GDN_UNITS_QKV + GDN_UNITS_Z;
            rows = SHAPE_GDN_V_HEADS;
            out = SHAPE_CONV_DIM + SHAPE_GDN_V_DIM;
            m = decode_matrix_of(b, b_scales, b_biases);
        } else if (unit >= GDN_UNITS_QKV) {
            unit -= GDN_UNITS_QKV;
            rows = SHAPE_GDN_V_DIM;
            out = SHAPE_CONV_DIM;
            m = decode_matrix_of(z, z_scales, z_biases);
        }
        if (unit * GDN_UNIT >= rows) break; /* beyond the last matrix, for the whole simdgroup */
        const uint first = unit * GDN_UNIT + wave;
        float y[4];
        decode_rows<SHAPE_HIDDEN, 4>(m, first, rows, x, sums, lane, y);
        const uint mine = decode_lane_part<SHAPE_HIDDEN>(lane);
        const uint row = first + mine * DECODE_WAVE_ROWS(SHAPE_HIDDEN);
        if (mine < 4 && row < rows) proj[out + row] = decode_pick<4>(y, mine) * r;
    }
}

/* ---- delta ---------------------------------------------------------------------------------- */

/* One channel: the convolution with its last three inputs, SiLU; the owner moves the inputs on. */
inline float gdn_channel(device const float *proj, device const float4 *taps,
                         device const float *in, device float *out, uint channel, bool owner) {
    const float now = proj[channel];
    const float old = in[channel];
    const float mid = in[SHAPE_CONV_DIM + channel];
    const float late = in[2 * SHAPE_CONV_DIM + channel];
    const float4 w = taps[channel];
    if (owner) {
        out[channel] = mid;
        out[SHAPE_CONV_DIM + channel] = late;
        out[2 * SHAPE_CONV_DIM + channel] = now;
    }
    return decode_silu(w.x * old + w.y * mid + w.z * late + w.w * now);
}

/* log(1 + e^x). Where 1 + y rounds, log(1 + y) y / ((1 + y) - 1) takes the error back out. */
inline float gdn_softplus(float x) {
    if (x > 20.0f) return x;
    const float y = exp(x);
    const float u = 1.0f + y;
    return u == 1.0f ? y : log(u) * (y / (u - 1.0f));
}

kernel void decode_gdn_delta(device const float *proj [[buffer(DECODE_GDN_DELTA_PROJ)]],
                             device const float4 *taps [[buffer(DECODE_GDN_DELTA_CONV)]],
                             device const float *a_log [[buffer(DECODE_GDN_DELTA_A_LOG)]],
                             device const float *dt_bias [[buffer(DECODE_GDN_DELTA_DT_BIAS)]],
                             device const float *norm [[buffer(DECODE_GDN_DELTA_NORM)]],
                             device const float *conv_in [[buffer(DECODE_GDN_DELTA_CONV_IN)]],
                             device float *conv_out [[buffer(DECODE_GDN_DELTA_CONV_OUT)]],
                             device const float4 *state_in [[buffer(DECODE_GDN_DELTA_STATE_IN)]],
                             device float4 *state_out [[buffer(DECODE_GDN_DELTA_STATE_OUT)]],
                             device float *gated [[buffer(DECODE_GDN_DELTA_GATED)]],
                             device float *squares [[buffer(DECODE_GDN_DELTA_SQUARES)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum { N = SHAPE_GDN_HEAD_DIM, COLUMNS = DECODE_DELTA_COLUMNS / 8 };
    threadgroup float4 query_key[2 * N / 4];
    threadgroup float partial[8];
    threadgroup float slice_squares[8];
    const uint head = group / DECODE_DELTA_SLICES;
    const uint slice = group % DECODE_DELTA_SLICES;
    const uint key_head = head / 2;

    /* Query and key of the head, 256 channels, one a thread. */
    const uint part = thread_index / N;
    const uint channel = part * SHAPE_GDN_K_DIM + key_head * N + thread_index % N;
    const float value =
        gdn_channel(proj, taps, conv_in, conv_out, channel, slice == 0 && head % 2 == 0);
    ((threadgroup float *)query_key)[thread_index] = value;
    const float square = decode_lanes_sum<32>(value * value);
    if (lane == 0) partial[simdgroup] = square;

    /* The simdgroup's four columns, each in 32 lanes of four keys. */
    const uint column = slice * DECODE_DELTA_COLUMNS + simdgroup * COLUMNS;
    const uint place = (head * N + column) * (N / 4) + lane;
    float4 s[COLUMNS];
    DECODE_UNROLL
    for (int i = 0; i < COLUMNS; i++) s[i] = state_in[place + i * (N / 4)];
    const uint mine = head * N + column + lane % COLUMNS; /* of the values */
    const float v =
        gdn_channel(proj, taps, conv_in, conv_out, 2 * SHAPE_GDN_K_DIM + mine, lane < COLUMNS);
    const float b = proj[SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + head];
    const float a = proj[SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + SHAPE_GDN_V_HEADS + head];
    const float beta = decode_sigmoid(b);
    const float decay = exp(-exp(a_log[head]) * gdn_softplus(a + dt_bias[head]));
    threadgroup_barrier(mem_flags::mem_threadgroup); /* QUERY_KEY */

    const float q_squares = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    const float k_squares = (partial[4] + partial[5]) + (partial[6] + partial[7]);
    const float4 q = query_key[lane] * (rsqrt(q_squares + 1e-6f) * rsqrt((float)N));
    const float4 k = query_key[N / 4 + lane] * rsqrt(k_squares + 1e-6f);
    /* S <- decay S; d = beta (v - S k); S <- S + d k; o = S q = (decay S) q + (k q) d: both sums
     * over the keys at once, of four columns at once. */
    static_assert(COLUMNS == 4, "columns are the elements of a vector");
    float4 recalled;
    float4 read;
    float4 values;
    DECODE_UNROLL
    for (int i = 0; i < COLUMNS; i++) {
        s[i] *= decay;
        recalled[i] = decode_dot4(s[i], k, 0.0f);
        read[i] = decode_dot4(s[i], q, 0.0f);
        values[i] = simd_shuffle(v, (ushort)i);
    }
    const float key_query = decode_lanes_sum<32>(decode_dot4(k, q, 0.0f));
    const float4 d = beta * (values - decode_lanes_sum<32>(recalled));
    const float4 o = decode_lanes_sum<32>(read) + key_query * d;
    DECODE_UNROLL
    for (int i = 0; i < COLUMNS; i++) state_out[place + i * (N / 4)] = s[i] + k * d[i];
    if (lane < COLUMNS) {
        const float z = proj[SHAPE_CONV_DIM + mine];
        const float mixed[COLUMNS] = {o.x, o.y, o.z, o.w};
        gated[mine] = decode_pick<COLUMNS>(mixed, lane) * norm[mine % N] * decode_silu(z);
    }
    const float sum_squares = decode_dot4(o, o, 0.0f);
    if (lane == 0) slice_squares[simdgroup] = sum_squares;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* SQUARES */
    if (thread_index == 0) {
        float total = 0.0f;
        for (int i = 0; i < 8; i++) total += slice_squares[i];
        squares[group] = total;
    }
}

/* ---- out ------------------------------------------------------------------------------------ */

kernel void decode_gdn_out(device const float4 *gated [[buffer(DECODE_GDN_OUT_GATED)]],
                           device const float4 *squares [[buffer(DECODE_GDN_OUT_SQUARES)]],
                           device const uint4 *codes [[buffer(DECODE_GDN_OUT_PROJ)]],
                           device const ushort *scales [[buffer(DECODE_GDN_OUT_PROJ + 1)]],
                           device const ushort *biases [[buffer(DECODE_GDN_OUT_PROJ + 2)]],
                           device float *h [[buffer(DECODE_GDN_OUT_H)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum {
        COLS = SHAPE_GDN_V_DIM,
        QUADS = DECODE_QUADS(COLS),
        CHUNKS = DECODE_CHUNKS(COLS),
        R = 2
    };
    threadgroup float4 x[QUADS];
    threadgroup float sums[CHUNKS];
    static_assert(COLS % 256 == 0 && DECODE_DELTA_SLICES == 4, "whole simdgroups stage");
    for (uint octet = thread_index; octet < COLS / 8; octet += 256) {
        const float4 slices = squares[octet / (SHAPE_GDN_HEAD_DIM / 8)];
        const float r = rsqrt(decode_sum4(slices) / SHAPE_GDN_HEAD_DIM + SHAPE_NORM_EPS);
        decode_stage<COLS>(x, sums, octet, COLS / 8, gated[2 * octet] * r,
                           gated[2 * octet + 1] * r);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    const uint first = group * DECODE_OUT_ROWS(COLS) + simdgroup * R * DECODE_WAVE_ROWS(COLS) +
                       decode_lane_row<COLS>(lane);
    float y[R];
    decode_rows<COLS, R>(decode_matrix_of(codes, scales, biases), first, SHAPE_HIDDEN, x, sums,
                         lane, y);
    const uint mine = decode_lane_part<COLS>(lane);
    const uint row = first + mine * DECODE_WAVE_ROWS(COLS);
    if (mine < R && row < SHAPE_HIDDEN) h[row] += decode_pick<R>(y, mine);
}
