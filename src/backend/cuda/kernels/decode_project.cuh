/* Stages that begin with a norm of the residual stream: the mixer's projections, the router with
 * the shared expert's first half, the head. Each warp keeps one slice of 128 inputs for all rows;
 * the norm's factor is applied to the results, so that no one waits for the sum of squares. */
#ifndef LILY_CUDA_DECODE_PROJECT_CUH
#define LILY_CUDA_DECODE_PROJECT_CUH

#include "decode_plan.cuh"

namespace decode {

/* What a consumer thread carries through a step. */
struct Worker {
    Shared &s;
    const decode_args &a;
    const cuda_slot &slot;
    int tid, lane, warp;
    uint32_t *scratch; /* of the warp */
    unsigned target;   /* grid barrier passed last */
    int stage;

    __device__ __forceinline__ float *work() { return reinterpret_cast<float *>(s.work); }
    /* Where the time goes, when built to tell: mark m (0 .. 7) of the stage. */
    __device__ __forceinline__ void mark(int m) {
#ifdef DECODE_PROFILE
        if (a.clocks && tid == 0) a.clocks[(stage * gridDim.x + blockIdx.x) * 8 + m] = clock64();
#endif
    }
    /* Ends a stage: tells the grid. What only this block reads later may still be written. */
    __device__ __forceinline__ void arrive() {
        mark(6);
        sync_consumers();
        grid_arrive(a.x.counter);
        mark(7);
        stage++;
        target += gridDim.x;
    }
    /* Begins the next one. */
    __device__ __forceinline__ void wait() {
        grid_wait(a.x.counter, target);
        mark(0);
    }
};

/* Inputs 4 lane .. + 3 of the warp's slice of the embedding row. */
__device__ __forceinline__ void embed(const Worker &w, int token, int slice, float (&x)[4]) {
    const cuda_mat &e = w.a.embed;
    int k = slice * 128 + 4 * w.lane;
    size_t row = (size_t)token;
    float scale = bf16_low(__ldg(e.scales + row * (H / 64) + k / 64));
    float bias = bf16_low(__ldg(e.biases + row * (H / 64) + k / 64));
    if (e.bits == 8) {
        const uint8_t *codes = e.codes + row * H + k;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fmaf(scale, (float)__ldg(codes + i), bias);
        return;
    }
    unsigned codes = __ldg(reinterpret_cast<const uint16_t *>(e.codes + row * (H / 2)) + k / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fmaf(scale, (float)(codes >> (4 * i) & 15), bias);
}

/* The warp's slice of the residual stream times the norm's weight, and its sum of squares. */
__device__ __forceinline__ void load_slice(Worker &w, const float (&h)[4], float4 weight,
                                           Slice &out) {
    float squares = warp_sum((h[0] * h[0] + h[1] * h[1]) + (h[2] * h[2] + h[3] * h[3]));
    if (w.lane == 0) w.s.squares[w.warp] = squares;
    const float x[4] = {h[0] * weight.x, h[1] * weight.y, h[2] * weight.z, h[3] * weight.w};
    make_slice(x, w.scratch, out);
}

__device__ __forceinline__ void load_residual(const Worker &w, int slice, float (&h)[4]) {
    const longlong2 *from =
        reinterpret_cast<const longlong2 *>(w.a.x.h + slice * 128 + 4 * w.lane);
    longlong2 p = __ldcg(from), q = __ldcg(from + 1);
    h[0] = from_fixed(p.x), h[1] = from_fixed(p.y);
    h[2] = from_fixed(q.x), h[3] = from_fixed(q.y);
}

__device__ __forceinline__ float4 norm_weight(const Worker &w, const float *weight) {
    int slice = w.warp % SLICES;
    return __ldg(reinterpret_cast<const float4 *>(weight + slice * 128) + w.lane);
}

/* 1 / rms of the residual stream; after a barrier of the block. */
__device__ __forceinline__ float rms_factor(const Worker &w) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < SLICES; i++) squares += w.s.squares[i];
    return rsqrtf(squares * (1.0f / H) + SHAPE_NORM_EPS);
}

/* Row tiles between barriers of the block: whole pairs of chunks. */
constexpr int ROUND = SLICES < 4 ? WARPS / SLICES : 4;
constexpr int ROUND_TILES = ROUND * SLICES;
static_assert(ROUND_TILES % (2 * SLOT_TILES) == 0, "whole pairs");
static_assert(2 * ROUND_TILES * 128 <= WORK, "two rounds of partial sums");

/* Row r (0 .. 32 ROUND - 1) of a round: its slices' partial sums in order. */
__device__ __forceinline__ float partial_sum(const float *parts, int r) {
    float y = 0;
#pragma unroll
    for (int i = 0; i < SLICES; i++) y += parts[((r >> 5) * SLICES + i) * 32 + (r & 31)];
    return y;
}

/* Multiplies this block's row tiles; done(row, value) gets each finished row, in one thread. */
template <typename Done>
__device__ __forceinline__ void project(Worker &w, const Stream &st, Share share, const Slice &x,
                                        Done done) {
    for (int round = 0, buffer = 0; round < share.n; round += ROUND, buffer ^= 1) {
        float *parts = w.work() + buffer * (ROUND_TILES * 32);
        int n_tiles = min(ROUND, share.n - round) * SLICES;
        for (int tile = w.warp; tile - w.warp < n_tiles; tile += WARPS) {
            int all = round * SLICES + tile, pair = (all - w.warp) / SLOT_TILES;
            if (tile < n_tiles) {
                const unsigned char *chunk =
                    chunk_wait(w.s, project_chunk(st, all / SLOT_TILES));
                if (tile == 0 && round == 0) w.mark(2);
                float y = wide_tile(chunk + all % SLOT_TILES * TILE_WIDE_BYTES, x);
                parts[tile * 32 + w.lane] = y;
            }
            /* The second of a pair first: who sees the first one empty may count on both. */
            if (pair + 1 < st.n_project) chunk_leave(w.s, project_chunk(st, pair + 1));
            chunk_leave(w.s, project_chunk(st, pair));
        }
        w.mark(3);
        sync_consumers();
        w.mark(4);
        float factor = rms_factor(w);
        for (int r = w.tid; r < n_tiles / SLICES * 32; r += THREADS) {
            done((share.first + round) * 32 + r, partial_sum(parts, r) * factor);
        }
    }
}

/* First stage of a layer: the mixer's projections. */
__device__ __forceinline__ void stage_project(Worker &w, const Stream &st, int layer,
                                              const decode_layer &l, int token) {
    float4 weight = norm_weight(w, l.input_norm);
    int slice = w.warp % SLICES;
    float h[4];
    if (layer == 0) {
        embed(w, token, slice, h);
        w.mark(0);
        if (blockIdx.x == 0 && w.warp < SLICES) { /* the residual stream begins */
            long long *to = w.a.x.h + slice * 128 + 4 * w.lane;
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = __float2ll_rn(h[i] * ONE);
        }
    } else {
        w.wait();
        load_residual(w, slice, h);
    }
    Slice x;
    load_slice(w, h, weight, x);
    w.mark(1);
    float *to = w.a.x.proj;
    int rows = is_attention(layer) ? ATTN_ROWS : GDN_ROWS;
    project(w, st, w.s.project[is_attention(layer)], x, [&](int row, float y) {
        if (row < rows) to[row] = y;
    });
    w.arrive();
}

/* Third stage: router's scores, shared expert's first half. The slice stays in registers for the
 * routed experts. */
__device__ __forceinline__ void stage_route(Worker &w, const Stream &st, const decode_layer &l,
                                            Slice &x) {
    float4 weight = norm_weight(w, l.post_norm);
    w.wait();
    float h[4];
    load_residual(w, w.warp % SLICES, h);
    load_slice(w, h, weight, x);
    w.mark(1);
    int b = blockIdx.x;
    bool shared = b < SHARED_TILES;
    float *parts = w.work();
    if (shared || b < SHARED_TILES + ROUTER_TILES) {
        if (w.warp < SLICES) {
            int per = shared ? SLOT_TILES : BYTE_PER_SLOT;
            int bytes = shared ? TILE_WIDE_BYTES : TILE_BYTE_BYTES;
            const unsigned char *chunk = chunk_wait(w.s, st.route + (unsigned)(w.warp / per));
            const unsigned char *tile = chunk + w.warp % per * bytes;
            w.mark(2);
            parts[w.warp * 32 + w.lane] = shared ? wide_tile(tile, x) : byte_tile(tile, x);
        }
        for (int i = 0; i < st.n_route; i++) chunk_leave(w.s, st.route + (unsigned)i);
    }
    w.mark(3);
    sync_consumers();
    w.mark(4);
    if (w.warp == 0 && shared) {
        float y = partial_sum(parts, w.lane) * rms_factor(w);
        float up = __shfl_down_sync(~0u, y, 1);
        if (w.lane % 2 == 0) w.a.x.shared[16 * b + w.lane / 2] = silu(y) * up;
    } else if (w.warp == 0 && b < SHARED_TILES + ROUTER_TILES) {
        float y = partial_sum(parts, w.lane) * rms_factor(w);
        int row = (b - SHARED_TILES) * TILE_BYTE_ROWS + 2 * (w.lane >> 2) + (w.lane & 1);
        if ((w.lane & 2) == 0 && row <= EXPERTS) w.a.x.scores[row] = y;
    }
    w.arrive();
}

/* Logits, and the largest of them. */
__device__ __forceinline__ void stage_head(Worker &w, const Stream &st) {
    float4 weight = norm_weight(w, w.a.final_norm);
    w.wait();
    float h[4];
    load_residual(w, w.warp % SLICES, h);
    Slice x;
    load_slice(w, h, weight, x);
    unsigned long long best = 0;
    bool finite = true;
    project(w, st, w.s.project[2], x, [&](int row, float y) {
        if (row >= SHAPE_VOCAB) return;
        w.a.logits[row] = y;
        finite = finite && fabsf(y) < 3.0e38f;
        unsigned bits = __float_as_uint(y);
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        unsigned long long key = (unsigned long long)bits << 32 | (0xffffffffu - (unsigned)row);
        if (row < w.a.vocab_used && key > best) best = key;
    });
    if (!finite) w.a.x.counter[2] = 1;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        unsigned long long other = __shfl_xor_sync(~0u, best, d);
        if (other > best) best = other;
    }
    if (w.lane == 0 && best) atomicMax(w.a.x.best, best);
    sync_consumers();
    w.mark(7);
    if (w.tid != 0) return;
    /* The last block hands the result over and leaves everything as the next step expects it. */
    unsigned *counter = w.a.x.counter;
    __threadfence();
    if (atomicAdd(counter + 1, 1) != gridDim.x - 1) return;
    __threadfence();
    unsigned long long won = atomicExch(w.a.x.best, 0ull);
    int token = won ? (int)(0xffffffffu - (unsigned)won) : 0;
    w.a.result->finite = atomicExch(counter + 2, 0u) == 0;
    w.a.result->token = token;
    if (w.slot.sample) *w.slot.token = token;
    counter[1] = 0;
}

} /* namespace decode */

#endif
