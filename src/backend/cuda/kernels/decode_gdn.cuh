/* Second stage of a Gated DeltaNet layer: convolution, gates, delta rule, gated norm and the output
 * projection. Four blocks work on one value head: each computes all of the head (its state comes
 * from the second-level cache for three of them), updates a quarter of the state's rows and
 * multiplies a quarter of the output's rows. */
#ifndef LILY_CUDA_DECODE_GDN_CUH
#define LILY_CUDA_DECODE_GDN_CUH

#include "decode_project.cuh"

namespace decode {

/* Tiles of the output projection: the warp's row of 32 joins the residual stream. */
__device__ __forceinline__ void project_out(Worker &w, unsigned chunk, const Slice &x,
                                            float factor) {
    if (w.warp < OUT_TILES) {
        const unsigned char *tiles = chunk_wait(w.s, chunk + (unsigned)(w.warp / SLOT_TILES));
        float y = wide_tile(tiles + w.warp % SLOT_TILES * TILE_WIDE_BYTES, x) * factor;
        int row = (((int)blockIdx.x % OUT_PARTS) * OUT_TILES + w.warp) * 32 + w.lane;
        residual_add(w.a.x.h + row, y, w.a.x.counter + 2);
    }
    for (int i = 0; i < OUT_CHUNKS; i++) chunk_leave(w.s, chunk + (unsigned)i);
}

struct GdnShared {
    float q[128], k[128], v[128], z[128]; /* after the convolution; z: norm weight * silu(z) */
    float d[128], y[128];
    float squares[4];
    alignas(16) float parts[WARPS][2][128]; /* of state^T k and state^T q, 8 rows each */
};
static_assert(sizeof(GdnShared) <= WORK, "fits");

__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

__device__ __forceinline__ void stage_gdn(Worker &w, const Stream &st, int layer,
                                          const decode_layer &l) {
    if (!has_out(layer)) {
        w.wait();
        w.arrive();
        return;
    }
    GdnShared &g = *reinterpret_cast<GdnShared *>(w.s.work);
    const int kind = layer - layer / SHAPE_ATTENTION_EVERY;
    const int head = (int)blockIdx.x / OUT_PARTS, part = (int)blockIdx.x % OUT_PARTS;
    const int what = w.tid >> 7, i = w.tid & 127; /* 0 q, 1 k, 2 v, 3 z */
    const int channel = what == 0   ? head / 2 * 128 + i
                        : what == 1 ? KDIM + head / 2 * 128 + i
                        : what == 2 ? 2 * KDIM + head * 128 + i
                                    : CONV + head * 128 + i;
    /* Known before the projections are: asked for before the wait. */
    float4 tap = {};
    float h0 = 0, h1 = 0, h2 = 0, weight = 0;
    if (what < 3) {
        const float *history = w.slot.conv_in + (size_t)kind * 3 * CONV + channel;
        tap = __ldg(reinterpret_cast<const float4 *>(l.conv) + channel);
        h0 = history[0], h1 = history[CONV], h2 = history[2 * CONV];
    } else {
        weight = __ldg(l.gdn_norm + i);
    }
    float rate = __ldg(l.decay_rate + head), dt = __ldg(l.dt_bias + head);

    w.wait();
    const float *proj = w.a.x.proj;
    float u = __ldcg(proj + channel);
    float b = __ldcg(proj + CONV + VDIM + head), a = __ldcg(proj + CONV + VDIM + VHEADS + head);
    float c = what < 3 ? silu(tap.x * h0 + tap.y * h1 + tap.z * h2 + tap.w * u) : weight * silu(u);
    g.q[w.tid] = c; /* q, k, v, z lie one behind the other */
    float beta = sigmoid(b), decay = expf(-rate * softplus(a + dt));
    sync_consumers();
    w.mark(1);

    /* r = S^T k and p = S^T q over this warp's 8 rows; this lane has 4 columns. */
    const unsigned char *chunk = chunk_wait(w.s, st.mixer + (unsigned)(w.warp >> 2));
    w.mark(2);
    const float4 *rows = reinterpret_cast<const float4 *>(chunk) + (w.warp & 3) * 8 * 32 + w.lane;
    float4 state[8], r = {}, p = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        state[j] = rows[32 * j];
        float k = g.k[8 * w.warp + j], q = g.q[8 * w.warp + j];
        r.x = fmaf(state[j].x, k, r.x), r.y = fmaf(state[j].y, k, r.y);
        r.z = fmaf(state[j].z, k, r.z), r.w = fmaf(state[j].w, k, r.w);
        p.x = fmaf(state[j].x, q, p.x), p.y = fmaf(state[j].y, q, p.y);
        p.z = fmaf(state[j].z, q, p.z), p.w = fmaf(state[j].w, q, p.w);
    }
    for (int j = 0; j < STATE_SLOTS; j++) chunk_leave(w.s, st.mixer + (unsigned)j);
    reinterpret_cast<float4 *>(g.parts[w.warp][0])[w.lane] = r;
    reinterpret_cast<float4 *>(g.parts[w.warp][1])[w.lane] = p;
    float4 k4 = reinterpret_cast<const float4 *>(g.k)[w.lane];
    float4 q4 = reinterpret_cast<const float4 *>(g.q)[w.lane];
    float kk = warp_sum(dot4(k4, k4)), qq = warp_sum(dot4(q4, q4)), kq = warp_sum(dot4(k4, q4));
    float kn = rsqrtf(kk + 1e-6f), qn = rsqrtf(qq + 1e-6f) * 0.08838834764831845f; /* 128^-0.5 */
    sync_consumers();
    w.mark(3);

    if (w.tid < 128) { /* one column each */
        float rj = 0, pj = 0;
#pragma unroll
        for (int j = 0; j < WARPS; j++) rj += g.parts[j][0][i], pj += g.parts[j][1][i];
        float d = beta * (g.v[i] - decay * kn * rj);
        float o = decay * qn * pj + kq * kn * qn * d;
        g.d[i] = d;
        g.y[i] = o * g.z[i];
        float squares = warp_sum(o * o);
        if (w.lane == 0) g.squares[w.warp] = squares;
    }
    sync_consumers();

    float mean = ((g.squares[0] + g.squares[1]) + (g.squares[2] + g.squares[3])) * (1.0f / 128);
    float4 y4 = reinterpret_cast<const float4 *>(g.y)[w.lane];
    const float y[4] = {y4.x, y4.y, y4.z, y4.w};
    Slice x;
    w.mark(4);
    make_slice(y, w.scratch, x);
    w.mark(5);
    project_out(w, st.mixer + STATE_SLOTS, x, rsqrtf(mean + SHAPE_NORM_EPS));
    w.arrive();

    /* While the others arrive: S <- e S + k d^T for rows 32 part .. + 31, and the history. */
    if (w.warp >> 2 == part) {
        float4 d4 = reinterpret_cast<const float4 *>(g.d)[w.lane];
        float4 *to = reinterpret_cast<float4 *>(w.slot.state_out) +
                     (((size_t)kind * VHEADS + head) * 128 + 8 * w.warp) * 32 + w.lane;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float k = g.k[8 * w.warp + j] * kn;
            to[32 * j] = {fmaf(k, d4.x, decay * state[j].x), fmaf(k, d4.y, decay * state[j].y),
                          fmaf(k, d4.z, decay * state[j].z), fmaf(k, d4.w, decay * state[j].w)};
        }
    }
    if (part == 0 && (what == 2 || (what < 2 && head % 2 == 0))) {
        float *to = w.slot.conv_out + (size_t)kind * 3 * CONV + channel;
        to[0] = h1, to[CONV] = h2, to[2 * CONV] = u;
    }
}

} /* namespace decode */

#endif
