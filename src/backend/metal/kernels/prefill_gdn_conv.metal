// 1 Mathematics, n tokens: c_t = silu(w0 u_(t-3) + w1 u_(t-2) + w2 u_(t-1) + w3 u_t), conv_dim
//   channels; q_h, k_h [128] / sqrt(sum of squares + 1e-6), q also / sqrt(128); beta = sigmoid(b),
//   exp(g) = exp(-exp(a_log) softplus(a + dt_bias)).
// 2 Layout: u [n][qkv_stride], history [3][conv_dim], c [n][conv_dim] q k v, gates [n][2][v_heads].
// 3 Threads: a simdgroup has 128 channels (one head; four in each lane) and 16 tokens, and keeps
//   the last three inputs in registers; the last simdgroup of a row has 32 heads' gates.
// 4 Fuses convolution, SiLU, l2 norm, gates and the next history. Agrees with src/backend/ref
//   (convolve, ref_l2_norm, make_gates). No token's arithmetic knows where the chunk begins.
// 5 Bytes: reads 4 n conv_dim (and 3 rows more of each 16), 8 n v_heads, 28 conv_dim; writes
//   4 n conv_dim, 8 n v_heads, 12 conv_dim. Measured fraction of bandwidth: not measured on a Mac.
#include <metal_stdlib>
using namespace metal;

#include "prefill_mix.h"
#include "prefill_mix_args.h"

constant constexpr uint CHANNEL_SEGMENTS = SHAPE_CONV_DIM / 128;
constant constexpr uint GATE_SEGMENTS = (SHAPE_GDN_V_HEADS + 31) / 32;
constant constexpr uint ROW = SHAPE_CONV_DIM / 4; // float4 of a row of history and channels

// conv_inputs of four channels over time: position t of the chunk, or before it.
struct conv_inputs {
    device const float4 *chunk; // of these channels
    device const float4 *history;
    uint stride; // float4 between rows of the chunk
};

inline float4 input_at(thread const conv_inputs &u, int t) {
    return t < 0 ? u.history[uint(t + 3) * ROW] : u.chunk[uint(t) * u.stride];
}

// Tokens [first, last) of this lane's four channels.
inline void convolve(thread const conv_inputs &u, thread const float4 *taps, device float4 *out,
                     uint segment, uint first, uint last) {
    const bool query = segment < SHAPE_GDN_K_HEADS;
    const bool key = !query && segment < 2 * SHAPE_GDN_K_HEADS;
    float4 u0 = input_at(u, int(first) - 3);
    float4 u1 = input_at(u, int(first) - 2);
    float4 u2 = input_at(u, int(first) - 1);
    for (uint t = first; t < last; t++) {
        const float4 u3 = input_at(u, int(t));
        float4 c = silu(taps[0] * u0 + taps[1] * u1 + taps[2] * u2 + taps[3] * u3);
        if (query || key) {
            const float squares = simd_sum(dot(c, c));
            c *= 1.0f / sqrt(squares + 1e-6f) * (query ? 0.0883883476483184f : 1.0f);
        }
        out[t * ROW] = c;
        u0 = u1;
        u1 = u2;
        u2 = u3;
    }
}

kernel void prefill_gdn_conv(
    constant prefill_gdn_args &args [[buffer(PREFILL_GDN_CONV_ARGS)]],
    device const float4 *qkv [[buffer(PREFILL_GDN_CONV_QKV)]],
    device const float *b [[buffer(PREFILL_GDN_CONV_B)]],
    device const float *a [[buffer(PREFILL_GDN_CONV_A)]],
    device const float4 *taps [[buffer(PREFILL_GDN_CONV_TAPS)]],
    device const float *a_log [[buffer(PREFILL_GDN_CONV_A_LOG)]],
    device const float *dt_bias [[buffer(PREFILL_GDN_CONV_DT_BIAS)]],
    device const float4 *history_in [[buffer(PREFILL_GDN_CONV_HISTORY_IN)]],
    device float4 *history_out [[buffer(PREFILL_GDN_CONV_HISTORY_OUT)]],
    device float4 *channels [[buffer(PREFILL_GDN_CONV_CHANNELS)]],
    device float *gates [[buffer(PREFILL_GDN_CONV_GATES)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint segment = group.x * PREFILL_GDN_CONV_SEGMENTS + simdgroup;
    const uint first = group.y * PREFILL_GDN_CONV_TOKENS;
    const uint last = min(first + PREFILL_GDN_CONV_TOKENS, args.n);
    if (segment < CHANNEL_SEGMENTS) {
        const uint at = segment * 32 + lane;
        conv_inputs u;
        u.chunk = qkv + at;
        u.history = history_in + at;
        u.stride = args.qkv_stride / 4;
        float4 by_time[4]; // taps lie channel by channel
        for (uint i = 0; i < 4; i++) {
            const float4 w = taps[at * 4 + i];
            for (uint j = 0; j < 4; j++) by_time[j][i] = w[j];
        }
        convolve(u, by_time, channels + at, segment, first, last);
        if (last == args.n) { // LAST TOKENS
            for (int j = 0; j < 3; j++) {
                history_out[uint(j) * ROW + at] = input_at(u, int(args.n) - 3 + j);
            }
        }
        return;
    }
    const uint head = (segment - CHANNEL_SEGMENTS) * 32 + lane;
    if (head >= SHAPE_GDN_V_HEADS) return;
    const float rate = exp(a_log[head]);
    for (uint t = first; t < last; t++) {
        const uint from = t * args.ba_stride + head;
        device float *to = gates + t * 2 * SHAPE_GDN_V_HEADS + head;
        to[0] = sigmoid(b[from]);
        to[SHAPE_GDN_V_HEADS] = exp(-rate * softplus(a[from] + dt_bias[head]));
    }
}
