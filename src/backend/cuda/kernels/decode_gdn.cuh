/* Second stage of a Gated DeltaNet layer: convolution, gates, delta rule, gated norm; the output
 * projection follows (decode_product.cuh). Four blocks work on one value head: each computes all of
 * the head (its state comes from the second-level cache for three of them), updates a quarter of
 * the state's rows and multiplies a quarter of the output's rows. */
#ifndef LILY_CUDA_DECODE_GDN_CUH
#define LILY_CUDA_DECODE_GDN_CUH

#include "decode_worker.cuh"

namespace decode {

struct GdnShared {
    float q[128], k[128], v[128], z[128]; /* after the convolution; z: norm weight * silu(z) */
    alignas(16) float d[128], y[128];
    float squares[4], beta, decay, kn; /* kn: 1 / |k| */
    alignas(16) Quantised quantised;
    alignas(16) float parts[WARPS][2][128]; /* of state^T k and state^T q, 8 rows each */
};
static_assert(sizeof(GdnShared) <= WORK, "fits");

__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

/* A thread's channel: 128 each of q, k, v and z; their place in the projection. */
__device__ __forceinline__ int gdn_channel(int tid, int head) {
    int what = tid >> 7, i = tid & 127;
    return what == 0   ? head / 2 * 128 + i
           : what == 1 ? KDIM + head / 2 * 128 + i
           : what == 2 ? 2 * KDIM + head * 128 + i
                       : CONV + head * 128 + i;
}

/* d and the head's gated norm from the warps' sums; four warps, one column a thread. */
__device__ __forceinline__ void finish_delta(Worker &w, GdnShared &g, int i, float kn, float4 k4) {
    float4 q4 = reinterpret_cast<const float4 *>(g.q)[w.lane];
    float qq = warp_sum(dot4(q4, q4)), kq = warp_sum(dot4(k4, q4));
    float qn = rsqrtf(qq + 1e-6f) * 0.08838834764831845f; /* 128^-0.5 */
    float rj = 0, pj = 0, decay = g.decay;
#pragma unroll
    for (int j = 0; j < WARPS; j++) rj += g.parts[j][0][i], pj += g.parts[j][1][i];
    float d = g.beta * (g.v[i] - decay * kn * rj);
    float o = decay * qn * pj + kq * kn * qn * d;
    g.d[i] = d;
    g.y[i] = o * g.z[i];
    float squares = warp_sum(o * o);
    if (w.lane == 0) g.squares[w.warp] = squares;
    sync_four();
    if (w.warp == 0) {
        float mean = (g.squares[0] + g.squares[1] + g.squares[2] + g.squares[3]) * (1.0f / 128);
        float factor = rsqrtf(mean + SHAPE_NORM_EPS);
        float4 y4 = reinterpret_cast<const float4 *>(g.y)[w.lane];
        const float y[4] = {y4.x * factor, y4.y * factor, y4.z * factor, y4.w * factor};
        quantise(y, g.quantised);
    }
}

/* Until the head's output lies quantised in shared memory. */
__device__ __forceinline__ void delta_front(Worker &w, int layer, const decode_layer &l) {
    GdnShared &g = *reinterpret_cast<GdnShared *>(w.s.work);
    const int head = (int)blockIdx.x / OUT_PARTS, i = w.tid & 127;
    const int channel = gdn_channel(w.tid, head);
    const bool history = w.tid < 384;
    /* Known before the projections are: asked for before the wait. */
    float4 tap = {};
    float h0 = 0, h1 = 0, h2 = 0, weight = 0, rate = 0, dt = 0;
    if (history) {
        const float *from = w.s.slot.conv_in + (size_t)kind_index(layer) * 3 * CONV + channel;
        tap = __ldg(reinterpret_cast<const float4 *>(l.conv) + channel);
        h0 = __ldg(from), h1 = __ldg(from + CONV), h2 = __ldg(from + 2 * CONV);
    } else {
        weight = __ldg(l.gdn_norm + i);
        rate = __ldg(l.decay_rate + head), dt = __ldg(l.dt_bias + head);
    }
    const decode_word *proj = w.a.x.proj;
    const uint32_t tag = w.tag(layer);
    float u = take_word(proj + channel, tag);
    float *scratch = reinterpret_cast<float *>(&w.scratch());
    if (w.warp == 15) {
        float gates[2]; /* b, a */
        take_words(proj + CONV + VDIM + head, VHEADS, tag, gates);
        float x = gates[1] + dt, plus = fmaxf(x, 0.0f) + __logf(1.0f + __expf(-fabsf(x)));
        if (w.lane == 0) scratch[0] = sigmoid(gates[0]), scratch[1] = __expf(-rate * plus);
    }
    sync_consumers(); /* everyone is done with the rows of the projection */
    w.mark(0);
    if (w.warp == 15 && w.lane == 0) g.beta = scratch[0], g.decay = scratch[1];
    float c = history ? tap.x * h0 + tap.y * h1 + tap.z * h2 + tap.w * u : u;
    c = silu(c);
    g.q[w.tid] = history ? c : weight * c; /* q, k, v, z lie one behind the other */
    sync_consumers();
    w.mark(1);

    /* r = S^T k and p = S^T q over this warp's 8 rows; this lane has 4 columns. */
    w.run.slot = STATE_SLOT;
    const float4 *rows =
        reinterpret_cast<const float4 *>(w.chunk(w.warp >> 2)) + (w.warp & 3) * 8 * 32 + w.lane;
    w.mark(2);
    float4 r = {}, p = {};
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        float4 k4 = reinterpret_cast<const float4 *>(g.k)[(8 * w.warp + j) / 4];
        float4 q4 = reinterpret_cast<const float4 *>(g.q)[(8 * w.warp + j) / 4];
        const float ks[4] = {k4.x, k4.y, k4.z, k4.w}, qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float4 x = rows[32 * (j + m)];
            r.x = fmaf(x.x, ks[m], r.x), r.y = fmaf(x.y, ks[m], r.y);
            r.z = fmaf(x.z, ks[m], r.z), r.w = fmaf(x.w, ks[m], r.w);
            p.x = fmaf(x.x, qs[m], p.x), p.y = fmaf(x.y, qs[m], p.y);
            p.z = fmaf(x.z, qs[m], p.z), p.w = fmaf(x.w, qs[m], p.w);
        }
    }
    reinterpret_cast<float4 *>(g.parts[w.warp][0])[w.lane] = r;
    reinterpret_cast<float4 *>(g.parts[w.warp][1])[w.lane] = p;
    float4 k4 = reinterpret_cast<const float4 *>(g.k)[w.lane];
    float kn = rsqrtf(warp_sum(dot4(k4, k4)) + 1e-6f);
    if (w.tid == 0) g.kn = kn;
    sync_consumers();
    w.mark(3);

    if (w.warp < 4) finish_delta(w, g, i, kn, k4);
    sync_consumers();
    w.mark(4);
    if (history) { /* for delta_shadow, in the same thread */
        float *kept = &g.parts[0][0][0] + w.tid;
        kept[0] = h1, kept[384] = h2, kept[768] = u;
    }
}

/* While the others arrive: S <- e S + k d^T for rows 32 part .. + 31, and the history. Warps 12 to
 * 15 and 0 to 11; nothing is waited for. */
__device__ __forceinline__ void delta_shadow(Worker &w, int layer) {
    GdnShared &g = *reinterpret_cast<GdnShared *>(w.s.work);
    const int head = (int)blockIdx.x / OUT_PARTS, part = (int)blockIdx.x % OUT_PARTS;
    const int kind = kind_index(layer), what = w.tid >> 7;
    if (w.warp >= 12) {
        const int row = 32 * part + 8 * (w.warp & 3); /* the first of eight */
        const unsigned char *chunk = w.s.ring + (STATE_SLOT + part) * SLOT;
        const float4 *rows =
            reinterpret_cast<const float4 *>(chunk) + (w.warp & 3) * 8 * 32 + w.lane;
        float4 d = reinterpret_cast<const float4 *>(g.d)[w.lane];
        float decay = g.decay, kn = g.kn;
        float4 *to = reinterpret_cast<float4 *>(w.s.slot.state_out) +
                     (((size_t)kind * VHEADS + head) * 128 + row) * 32 + w.lane;
#pragma unroll 4
        for (int j = 0; j < 8; j++) {
            float k = g.k[row + j] * kn;
            float4 x = rows[32 * j];
            to[32 * j] = {fmaf(k, d.x, decay * x.x), fmaf(k, d.y, decay * x.y),
                          fmaf(k, d.z, decay * x.z), fmaf(k, d.w, decay * x.w)};
        }
    }
    w.leave_from(STATE_SLOT, STATE_SLOTS);
    if (part == 0 && (what == 2 || (what < 2 && head % 2 == 0))) {
        int channel = gdn_channel(w.tid, head);
        const float *from = &g.parts[0][0][0] + w.tid;
        float *to = w.s.slot.conv_out + (size_t)kind * 3 * CONV + channel;
        to[0] = from[0], to[CONV] = from[384], to[2 * CONV] = from[768];
    }
}

} /* namespace decode */

#endif
