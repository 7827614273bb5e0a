/* Mathematics: norm(S^T q) w silu(z), S <- e S + k d^T, d = beta (v - e S^T k), of a head.
 * Layout: S float32 [heads][128 key][128 value]; convolution float32 [3][C]; mix bf16 [n][V_DIM].
 * Threads: a block of 256 a head and slot; a warp has 16 keys, a lane 4 columns, in registers.
 * Fused: convolution, SiLU, lengths, gates, rule, gated norm. Agrees with ref/deltanet.c.
 * Bytes: 128 KB a head and slot: 44 % of 4,642 GB/s for 8 slots, 64 % for 32 (docs/cuda-batch.md).
 *
 * DeltaNet in a decode step of several slots: convolution, gates, delta rule and gated norm of one
 * value head of one slot by one block. The state of a head, 64 KB, passes through registers once.
 */
#include "common.cuh"

enum {
    MIX_THREADS = 256,
    MIX_WARPS = MIX_THREADS / 32,
    KEYS = DIM / MIX_WARPS /* of the state, a warp */
};

/* Four channels of head `head` after the convolution; writes the convolution state where `owner`.
 */
__device__ __forceinline__ float4 convolve_head(const float *proj, const float4 *taps,
                                                const cuda_slot &slot, int layer, int head,
                                                bool owner) {
    int c = head * DIM + threadIdx.x % 32 * 4;
    const float *history = slot.conv_in + (int64_t)layer * 3 * CONV_DIM;
    float4 a = *(const float4 *)(history + c), b = *(const float4 *)(history + CONV_DIM + c);
    float4 d = *(const float4 *)(history + 2 * CONV_DIM + c), u = *(const float4 *)(proj + c), y;
    float4 w0 = taps[c], w1 = taps[c + 1], w2 = taps[c + 2], w3 = taps[c + 3]; /* of a channel */
    y.x = silu(convolved(w0, a.x, b.x, d.x, u.x));
    y.y = silu(convolved(w1, a.y, b.y, d.y, u.y));
    y.z = silu(convolved(w2, a.z, b.z, d.z, u.z));
    y.w = silu(convolved(w3, a.w, b.w, d.w, u.w));
    if (owner) {
        float *next = slot.conv_out + (int64_t)layer * 3 * CONV_DIM;
        *(float4 *)(next + c) = b;
        *(float4 *)(next + CONV_DIM + c) = d;
        *(float4 *)(next + 2 * CONV_DIM + c) = u;
    }
    return y;
}

__device__ __forceinline__ float squares(float4 y) {
    return warp_sum(dot_four(y, y));
}

/* mix[slot][head], bf16, from proj[slot] (queries, keys, values, z) and ba[slot] (b, a). The rule
 * is that of delta_scan (portable_deltanet.cu), its sums over keys in another order: lane l of warp
 * w has columns 4 l and on of keys KEYS w and on. Grid: value heads in x, slots in y. */
KERNEL __launch_bounds__(MIX_THREADS)
    batch_mix(const float *proj, int width, const float4 *taps, const float *ba, const float *rate,
              const float *dt_bias, const float *weight, const cuda_slot *slots, int layer,
              bf16 *mix) {
    __shared__ __align__(16) float q[DIM], k[DIM], v[DIM];
    __shared__ __align__(16) float part[2][MIX_WARPS][DIM];
    __shared__ float beta, decay;
    int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int key_head = head / (V_HEADS / K_HEADS);
    bool owner = head % (V_HEADS / K_HEADS) == 0; /* of what two value heads share */
    const cuda_slot &slot = slots[blockIdx.y];
    const float *row = proj + (int64_t)blockIdx.y * width;
    int64_t at = (((int64_t)layer * V_HEADS + head) * DIM + warp * KEYS) * DIM + lane * 4;
    float4 s[KEYS];
    let_next_begin();
#pragma unroll
    for (int i = 0; i < KEYS; i++) s[i] = *(const float4 *)(slot.state_in + at + i * DIM);
    wait_for_previous(); /* the state is of the step before */
    if (warp == 0) {
        float4 y = convolve_head(row, taps, slot, layer, key_head, owner);
        *(float4 *)&q[lane * 4] = scaled(y, 1.0f / sqrtf(squares(y) + 1e-6f) * rsqrtf((float)DIM));
    } else if (warp == 1) {
        float4 y = convolve_head(row, taps, slot, layer, K_HEADS + key_head, owner);
        *(float4 *)&k[lane * 4] = scaled(y, 1.0f / sqrtf(squares(y) + 1e-6f));
    } else if (warp == 2) {
        *(float4 *)&v[lane * 4] = convolve_head(row, taps, slot, layer, 2 * K_HEADS + head, true);
    } else if (warp == 3 && lane == 0) {
        const float *from = ba + (int64_t)blockIdx.y * 2 * V_HEADS;
        float dt = softplus(from[V_HEADS + head] + dt_bias[head]);
        beta = sigmoid(from[head]);
        decay = expf(-rate[head] * dt);
    }
    __syncthreads();
    float4 recall = make_float4(0, 0, 0, 0), read = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        add_scaled(recall, s[i], k[warp * KEYS + i]);
        add_scaled(read, s[i], q[warp * KEYS + i]);
    }
    *(float4 *)&part[0][warp][lane * 4] = recall;
    *(float4 *)&part[1][warp][lane * 4] = read;
    float4 qs = *(const float4 *)&q[lane * 4], ks = *(const float4 *)&k[lane * 4];
    float kq = warp_sum(dot_four(qs, ks));
    __syncthreads();
    float4 m = make_float4(0, 0, 0, 0), p = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < MIX_WARPS; w++) {
        add_scaled(m, *(const float4 *)&part[0][w][lane * 4], 1.0f);
        add_scaled(p, *(const float4 *)&part[1][w][lane * 4], 1.0f);
    }
    float e = decay, b = beta;
    float4 vs = *(const float4 *)&v[lane * 4];
    float4 d = make_float4(b * fmaf(-e, m.x, vs.x), b * fmaf(-e, m.y, vs.y),
                           b * fmaf(-e, m.z, vs.z), b * fmaf(-e, m.w, vs.w));
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        float4 next = scaled(s[i], e);
        add_scaled(next, d, k[warp * KEYS + i]);
        *(float4 *)(slot.state_out + at + i * DIM) = next;
    }
    if (warp > 0) return;
    float4 y = scaled(p, e);
    add_scaled(y, d, kq);
    y = scaled(y, 1.0f / sqrtf(squares(y) / DIM + SHAPE_NORM_EPS));
    float4 z = *(const float4 *)(row + CONV_DIM + head * DIM + lane * 4);
    float4 w = *(const float4 *)(weight + lane * 4);
    y = make_float4(y.x * w.x * silu(z.x), y.y * w.y * silu(z.y), y.z * w.z * silu(z.z),
                    y.w * w.w * silu(z.w));
    *(uint2 *)(mix + (int64_t)blockIdx.y * V_DIM + head * DIM + lane * 4) =
        make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
}
