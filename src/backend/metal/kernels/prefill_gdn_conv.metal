/* Mathematics: c[n, CD] = silu(taps * last 4 inputs), q, k to unit length; beta, exp(g) of b, a.
 * Layout: u [n][qkv_stride], history [3][CD], c [n][CD] as q k v, gates [n][2][v_heads]; float32.
 * Threads: a simdgroup has 128 channels (one head) of 16 tokens, or 32 heads' gates of them.
 * Fused: SiLU, l2 norm, gates, next history. Agrees with convolve, make_gates (ref/deltanet.c).
 * Bytes: 4 n CD (19/16 read), 8 n v_heads, in and out; 40 CD of history; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "common.h"
#include "prefill_mix_args.h"

/* c_t = silu(w0 u_(t-3) + w1 u_(t-2) + w2 u_(t-1) + w3 u_t); q_h and k_h / sqrt(sum of squares +
 * 1e-6), q also / sqrt(128); beta = sigmoid(b), exp(g) = exp(-exp(a_log) softplus(a + dt_bias)). No
 * token's arithmetic knows where the chunk begins; the last three inputs stay in registers. */

enum {
    GDN_CHANNEL_SEGMENTS = SHAPE_CONV_DIM / 128,
    GDN_ROW = SHAPE_CONV_DIM / 4 /* float4 of a row of history and channels */
};

/* Inputs of four channels over time: position t of the chunk, or before it. */
struct gdn_inputs {
    device const float4 *chunk; /* of these channels */
    device const float4 *history;
    uint stride; /* float4 between rows of the chunk */
};

inline float4 gdn_input_at(thread const gdn_inputs &u, int t) {
    return t < 0 ? u.history[(uint)(t + 3) * GDN_ROW] : u.chunk[(uint)t * u.stride];
}

/* Tokens [first, last) of this lane's four channels. */
inline void gdn_convolve(thread const gdn_inputs &u, thread const float4 *taps, device float4 *out,
                         uint segment, uint first, uint last) {
    const bool query = segment < SHAPE_GDN_K_HEADS;
    const bool key = !query && segment < 2 * SHAPE_GDN_K_HEADS;
    const float scale = query ? inverse_sqrt((float)SHAPE_GDN_HEAD_DIM) : 1.0f;
    float4 u0 = gdn_input_at(u, (int)first - 3);
    float4 u1 = gdn_input_at(u, (int)first - 2);
    float4 u2 = gdn_input_at(u, (int)first - 1);
    for (uint t = first; t < last; t++) {
        const float4 u3 = gdn_input_at(u, (int)t);
        float4 c = silu(taps[0] * u0 + taps[1] * u1 + taps[2] * u2 + taps[3] * u3);
        if (query || key) c *= inverse_sqrt(simd_sum(dot(c, c)) + 1e-6f) * scale;
        out[t * GDN_ROW] = c;
        u0 = u1;
        u1 = u2;
        u2 = u3;
    }
}

KERNEL_THREADS(PREFILL_GDN_CONV_THREADS)
kernel void prefill_gdn_conv(constant prefill_gdn_args &args [[buffer(PREFILL_GDN_CONV_ARGS)]],
                             device const float4 *qkv [[buffer(PREFILL_GDN_CONV_QKV)]],
                             device const float *b [[buffer(PREFILL_GDN_CONV_B)]],
                             device const float *a [[buffer(PREFILL_GDN_CONV_A)]],
                             device const float4 *taps [[buffer(PREFILL_GDN_CONV_TAPS)]],
                             device const float *a_log [[buffer(PREFILL_GDN_CONV_A_LOG)]],
                             device const float *dt_bias [[buffer(PREFILL_GDN_CONV_DT_BIAS)]],
                             device const float4 *old [[buffer(PREFILL_GDN_CONV_HISTORY_IN)]],
                             device float4 *next [[buffer(PREFILL_GDN_CONV_HISTORY_OUT)]],
                             device float4 *channels [[buffer(PREFILL_GDN_CONV_CHANNELS)]],
                             device float *gates [[buffer(PREFILL_GDN_CONV_GATES)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint segment = group.x * PREFILL_GDN_CONV_SEGMENTS + simdgroup;
    const uint first = group.y * PREFILL_GDN_CONV_TOKENS;
    const uint last = min(first + PREFILL_GDN_CONV_TOKENS, args.rows);
    if (segment < GDN_CHANNEL_SEGMENTS) {
        const uint at = segment * 32 + lane;
        gdn_inputs u;
        u.chunk = qkv + at;
        u.history = old + at;
        u.stride = args.qkv_stride / 4;
        float4 by_time[4]; /* taps lie channel by channel */
        UNROLL
        for (uint i = 0; i < 4; i++) {
            const float4 w = taps[at * 4 + i];
            UNROLL
            for (uint j = 0; j < 4; j++) by_time[j][i] = w[j];
        }
        gdn_convolve(u, by_time, channels + at, segment, first, last);
        if (last == args.rows) { /* LAST TOKENS */
            for (int j = 0; j < 3; j++) {
                next[(uint)j * GDN_ROW + at] = gdn_input_at(u, (int)args.rows - 3 + j);
            }
        }
        return;
    }
    const uint head = (segment - GDN_CHANNEL_SEGMENTS) * 32 + lane;
    if (head >= SHAPE_GDN_V_HEADS) return;
    const float rate = precise::exp(a_log[head]);
    for (uint t = first; t < last; t++) {
        const uint from = t * args.ba_stride + head;
        device float *to = gates + t * 2 * SHAPE_GDN_V_HEADS + head;
        to[0] = sigmoid(b[from]);
        to[SHAPE_GDN_V_HEADS] = precise::exp(-rate * softplus(a[from] + dt_bias[head]));
    }
}
