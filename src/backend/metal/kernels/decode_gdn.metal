/* Mathematics: proj = [qkv; z; b; a] norm(h); gated [VD] by the delta rule; h += out_proj gated.
 * Layout: weights 4 bits by rows; state by columns [VH][128 v][128 k], conv [3][CD] float32.
 * Threads: a simdgroup makes 4 (in), 2 (out) waves of rows at a time; delta: 4 columns a simdgroup.
 * Fused: norms, conv, SiLU, gates, residual. Agrees with ref/deltanet.c up to the order of sums.
 * Bytes: weights, state once; 8H (in), 4VD + 16VH (out) a threadgroup; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_rows.h"

/* Letters as in decode_args.h. gated is not yet divided by rms(o): decode_gdn_out does that, where
 * the sums of o^2 of a head's four slices are together. */

/* ---- in ------------------------------------------------------------------------------------- */

/* Simdgroup units of 4 waves of rows each; a matrix ends its own last unit. */
#define GDN_UNIT        (4 * DECODE_WAVE_ROWS(SHAPE_HIDDEN))
#define GDN_UNITS_QKV   DECODE_CEIL(SHAPE_CONV_DIM, GDN_UNIT)
#define GDN_UNITS_Z     DECODE_CEIL(SHAPE_GDN_V_DIM, GDN_UNIT)
#define GDN_UNITS_GATE  DECODE_CEIL(SHAPE_GDN_V_HEADS, GDN_UNIT)
#define GDN_GROUP_UNITS (DECODE_IN_ROWS(SHAPE_HIDDEN) / GDN_UNIT)
static_assert(SHAPE_CONV_DIM % GDN_UNIT == 0 && SHAPE_GDN_V_DIM % GDN_UNIT == 0, "whole units");

KERNEL_THREADS(DECODE_GDN_IN_THREADS)
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
    threadgroup float partial[DECODE_GDN_IN_THREADS / 32];
    const float r = decode_stage_norm<SHAPE_HIDDEN, DECODE_GDN_IN_THREADS>(h, norm, x, sums,
                                                                           partial, thread_index);
    const uint wave = decode_lane_row<SHAPE_HIDDEN>(lane);
    for (uint i = simdgroup; i < GDN_GROUP_UNITS; i += DECODE_GDN_IN_THREADS / 32) {
        uint unit = group * GDN_GROUP_UNITS + i;
        uint rows = SHAPE_CONV_DIM;
        uint out = 0;
        quantised m = quantised_of(qkv, qkv_scales, qkv_biases);
        if (unit >= GDN_UNITS_QKV + GDN_UNITS_Z + GDN_UNITS_GATE) {
            unit -= GDN_UNITS_QKV + GDN_UNITS_Z + GDN_UNITS_GATE;
            rows = SHAPE_GDN_V_HEADS;
            out = SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + SHAPE_GDN_V_HEADS;
            m = quantised_of(a, a_scales, a_biases);
        } else if (unit >= GDN_UNITS_QKV + GDN_UNITS_Z) {
            unit -= GDN_UNITS_QKV + GDN_UNITS_Z;
            rows = SHAPE_GDN_V_HEADS;
            out = SHAPE_CONV_DIM + SHAPE_GDN_V_DIM;
            m = quantised_of(b, b_scales, b_biases);
        } else if (unit >= GDN_UNITS_QKV) {
            unit -= GDN_UNITS_QKV;
            rows = SHAPE_GDN_V_DIM;
            out = SHAPE_CONV_DIM;
            m = quantised_of(z, z_scales, z_biases);
        }
        if (unit * GDN_UNIT >= rows) break; /* beyond the last matrix, for the whole simdgroup */
        const uint first = unit * GDN_UNIT + wave;
        decode_rows_out<SHAPE_HIDDEN, 4, false>(m, first, rows, r, x, sums, lane, proj + out);
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
    return silu(w.x * old + w.y * mid + w.z * late + w.w * now);
}

KERNEL_THREADS(DECODE_GDN_DELTA_THREADS)
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
    enum {
        N = SHAPE_GDN_HEAD_DIM,
        SIMDS = DECODE_GDN_DELTA_THREADS / 32,
        COLUMNS = DECODE_DELTA_COLUMNS / SIMDS
    };
    static_assert(2 * N == DECODE_GDN_DELTA_THREADS, "a channel of query or key for each thread");
    threadgroup float4 query_key[2 * N / 4];
    threadgroup float partial[SIMDS];
    threadgroup float slice_squares[SIMDS];
    const uint head = group / DECODE_DELTA_SLICES;
    const uint slice = group % DECODE_DELTA_SLICES;
    const uint key_head = head / 2;

    /* Query and key of the head, 256 channels, one a thread. */
    const uint part = thread_index / N;
    const uint channel = part * SHAPE_GDN_K_DIM + key_head * N + thread_index % N;
    const float value =
        gdn_channel(proj, taps, conv_in, conv_out, channel, slice == 0 && head % 2 == 0);
    ((threadgroup float *)query_key)[thread_index] = value;
    const float square = lanes_sum<32>(value * value);
    if (lane == 0) partial[simdgroup] = square;

    /* The simdgroup's four columns, each in 32 lanes of four keys. */
    const uint column = slice * DECODE_DELTA_COLUMNS + simdgroup * COLUMNS;
    const uint place = (head * N + column) * (N / 4) + lane;
    float4 s[COLUMNS];
    UNROLL
    for (int i = 0; i < COLUMNS; i++) s[i] = state_in[place + i * (N / 4)];
    const uint mine = head * N + column + lane % COLUMNS; /* of the values */
    const float v =
        gdn_channel(proj, taps, conv_in, conv_out, 2 * SHAPE_GDN_K_DIM + mine, lane < COLUMNS);
    const float b = proj[SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + head];
    const float a = proj[SHAPE_CONV_DIM + SHAPE_GDN_V_DIM + SHAPE_GDN_V_HEADS + head];
    const float beta = sigmoid(b);
    const float decay = precise::exp(-precise::exp(a_log[head]) * softplus(a + dt_bias[head]));
    threadgroup_barrier(mem_flags::mem_threadgroup); /* QUERY_KEY */

    const float q_squares = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    const float k_squares = (partial[4] + partial[5]) + (partial[6] + partial[7]);
    const float4 q = query_key[lane] * (inverse_sqrt(q_squares + 1e-6f) * inverse_sqrt((float)N));
    const float4 k = query_key[N / 4 + lane] * inverse_sqrt(k_squares + 1e-6f);
    /* S <- decay S; d = beta (v - S k); S <- S + d k; o = S q = (decay S) q + (k q) d: both sums
     * over the keys at once, of four columns at once. */
    static_assert(COLUMNS == 4, "columns are the elements of a vector");
    float4 recalled;
    float4 read;
    float4 values;
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
        s[i] *= decay;
        recalled[i] = decode_dot4(s[i], k, 0.0f);
        read[i] = decode_dot4(s[i], q, 0.0f);
        values[i] = simd_shuffle(v, (ushort)i);
    }
    const float key_query = lanes_sum<32>(decode_dot4(k, q, 0.0f));
    const float4 d = beta * (values - lanes_sum<32>(recalled));
    const float4 o = lanes_sum<32>(read) + key_query * d;
    UNROLL
    for (int i = 0; i < COLUMNS; i++) state_out[place + i * (N / 4)] = s[i] + k * d[i];
    if (lane < COLUMNS) {
        const float z = proj[SHAPE_CONV_DIM + mine];
        const float mixed[COLUMNS] = {o.x, o.y, o.z, o.w};
        gated[mine] = decode_pick<COLUMNS>(mixed, lane) * norm[mine % N] * silu(z);
    }
    const float sum_squares = decode_dot4(o, o, 0.0f);
    if (lane == 0) slice_squares[simdgroup] = sum_squares;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* SQUARES */
    if (thread_index == 0) {
        float total = 0.0f;
        for (int i = 0; i < SIMDS; i++) total += slice_squares[i];
        squares[group] = total;
    }
}

/* ---- out ------------------------------------------------------------------------------------ */

KERNEL_THREADS(DECODE_GDN_OUT_THREADS)
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
    for (uint octet = thread_index; octet < COLS / 8; octet += DECODE_GDN_OUT_THREADS) {
        const float4 slices = squares[octet / (SHAPE_GDN_HEAD_DIM / 8)];
        const float r = norm_factor(sum4(slices), SHAPE_GDN_HEAD_DIM);
        decode_stage<COLS>(x, sums, octet, COLS / 8, gated[2 * octet] * r,
                           gated[2 * octet + 1] * r);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    const uint first = group * DECODE_OUT_ROWS(COLS) + simdgroup * R * DECODE_WAVE_ROWS(COLS) +
                       decode_lane_row<COLS>(lane);
    decode_rows_out<COLS, R, true>(quantised_of(codes, scales, biases), first, SHAPE_HIDDEN, 1.0f,
                                   x, sums, lane, h);
}
