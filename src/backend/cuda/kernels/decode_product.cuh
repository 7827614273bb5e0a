/* The stages of a step, and the products all of them share. A stage's front makes the activations,
 * each warp takes its slice of 128 of them, multiplies its tiles, and a stage's back uses the rows.
 * The products are written once for all stages: a step is a long path that every multiprocessor
 * walks once a layer, and fetching its instructions would otherwise cost more than running them. */
#ifndef LILY_CUDA_DECODE_PRODUCT_CUH
#define LILY_CUDA_DECODE_PRODUCT_CUH

#include "decode_attn.cuh"
#include "decode_gdn.cuh"
#include "decode_moe.cuh"

namespace decode {

enum Kind {
    PROJECT, /* norm, the mixer's projections */
    MIX,     /* DeltaNet, or what follows attention; output projection */
    ROUTE,   /* norm, router, shared expert's first half */
    MOE,     /* both halves of the routed experts, second half of the shared one */
    LOGITS   /* final norm, head */
};

/* ---- fronts -----------------------------------------------------------------------------------
 */

/* Inputs 4 lane .. + 3 of the warp's slice of the embedding row. */
__device__ __forceinline__ void embed(const Worker &w, int token, int slice, float (&x)[4]) {
    const cuda_mat &e = w.a.embed;
    int k = slice * 128 + 4 * w.lane;
    size_t row = (size_t)token;
    float scale = bf16_low(__ldg(e.scales + row * (H / 64) + k / 64));
    float bias = bf16_low(__ldg(e.biases + row * (H / 64) + k / 64));
    if (e.bits == 8) {
        uint32_t codes = __ldg(reinterpret_cast<const uint32_t *>(e.codes + row * H) + k / 4);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fmaf(scale, (float)(codes >> (8 * i) & 255), bias);
        return;
    }
    unsigned codes = __ldg(reinterpret_cast<const uint16_t *>(e.codes + row * (H / 2)) + k / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fmaf(scale, (float)(codes >> (4 * i) & 15), bias);
}

/* The residual stream, its sum of squares and, times the norm's weight, the warp's slice. The
 * norm's factor is applied to the results, so that no one waits for the sum of squares. */
__device__ __forceinline__ void norm_front(Worker &w, Kind kind, int layer, int token,
                                           const decode_layer &l) {
    int slice = w.warp % SLICES;
    const float *norm = kind == PROJECT  ? l.input_norm
                        : kind == LOGITS ? w.a.final_norm
                                         : l.post_norm;
    float4 weight = __ldg(reinterpret_cast<const float4 *>(norm + slice * 128) + w.lane);
    /* The next layer's table comes in passing. */
    constexpr int WORDS = sizeof(decode_layer) / 4;
    bool next = kind == ROUTE && w.warp == WARPS - 1 && w.lane < WORDS && layer + 1 < w.a.n_layers;
    uint32_t word = 0;
    if (next) word = __ldg(reinterpret_cast<const uint32_t *>(w.a.layers + layer + 1) + w.lane);
    float h[4];
    if (kind == PROJECT && layer == 0) {
        embed(w, token, slice, h);
        w.mark(0);
        if (blockIdx.x == 0 && w.warp < SLICES) { /* the residual stream begins */
#pragma unroll
            for (int i = 0; i < 4 * COPIES; i++) {
                long long *to = w.a.x.h + residual_at(slice * 128 + 4 * w.lane + i % 4, i / 4);
                *to = i < 4 ? __float2ll_rn(h[i % 4] * ONE) : 0;
            }
        }
    } else {
        w.wait();
        /* Blocks with no part in the router are in no hurry and leave the cache to the others. */
        bool idle = kind == ROUTE && (int)blockIdx.x >= SHARED_TILES + ROUTER_TILES;
        if (idle) __nanosleep(400);
        const longlong2 *from =
            reinterpret_cast<const longlong2 *>(w.a.x.h + slice * (128 * COPIES)) + w.lane;
        longlong2 p[COPIES], q[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            p[i] = __ldcg(from + 64 * i), q[i] = __ldcg(from + 64 * i + 32);
        }
#pragma unroll
        for (int i = 1; i < COPIES; i++) {
            p[0].x += p[i].x, p[0].y += p[i].y, q[0].x += q[i].x, q[0].y += q[i].y;
        }
        h[0] = from_fixed(p[0].x), h[1] = from_fixed(p[0].y);
        h[2] = from_fixed(q[0].x), h[3] = from_fixed(q[0].y);
    }
    if (next) reinterpret_cast<uint32_t *>(&w.s.layers[0][(layer + 1) & 1])[w.lane] = word;
    const float x[4] = {h[0] * weight.x, h[1] * weight.y, h[2] * weight.z, h[3] * weight.w};
    float squares = warp_sum((h[0] * h[0] + h[1] * h[1]) + (h[2] * h[2] + h[3] * h[3]));
    quantise(x, w.scratch());
    if (w.lane == 0) w.s.squares[w.warp] = squares;
    __syncwarp();
}

/* ---- backs ------------------------------------------------------------------------------------
 */

/* Row tiles between barriers of the block: whole pairs of chunks. */
constexpr int ROUND = SLICES < 4 ? WARPS / SLICES : 4;
constexpr int ROUND_TILES = ROUND * SLICES;
static_assert(ROUND_TILES % (2 * SLOT_TILES) == 0, "whole pairs");
static_assert(2 * ROUND_TILES * 128 <= WORK && ROUND * 32 <= THREADS, "two rounds, one row each");
static_assert(BYTE_PER_SLOT == SLOT_TILES, "as many of either kind");

/* Row r of a round: its slices' partial sums in order, times 1 / rms of the residual stream. */
__device__ __forceinline__ float finish_row(const Worker &w, const float *parts, int r) {
    const float *from = parts + (r >> 5) * (SLICES * 32) + (r & 31);
    float y[4] = {0, 0, 0, 0}, squares[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        y[i & 3] += from[32 * i];
        squares[i & 3] += w.s.squares[i];
    }
    float all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    return ((y[0] + y[1]) + (y[2] + y[3])) * rsqrtf(all * (1.0f / H) + SHAPE_NORM_EPS);
}

/* The largest logit of each thread that finishes rows, with its row. */
__device__ __forceinline__ unsigned long long &best_of(Worker &w) {
    return reinterpret_cast<unsigned long long *>(w.s.work + 2 * ROUND_TILES * 128)[w.tid];
}
static_assert(2 * ROUND_TILES * 128 + THREADS * 8 <= WORK, "beside two rounds");

__device__ __forceinline__ void take_logit(Worker &w, int row, float y) {
    w.a.logits[row] = y;
    if (!(fabsf(y) < 3.0e38f)) w.a.x.counter[2] = 1;
    unsigned bits = __float_as_uint(y);
    bits ^= (unsigned)((int)bits >> 31) | 0x80000000u;
    unsigned long long key = (unsigned long long)bits << 32 | (0xffffffffu - (unsigned)row);
    if (row < w.a.vocab_used && key > best_of(w)) best_of(w) = key;
}

/* The last block to come here hands the result over and leaves everything as the next step expects
 * it. */
__device__ __forceinline__ void end_step(Worker &w) {
    unsigned long long best = best_of(w);
    unsigned *counter = w.a.x.counter;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        unsigned long long other = __shfl_xor_sync(~0u, best, d);
        if (other > best) best = other;
    }
    if (w.lane == 0 && best) atomicMax(w.a.x.best, best);
    sync_consumers();
    w.mark(7);
    if (w.tid != 0) return;
    __threadfence();
    if (atomicAdd(counter + 1, 1) != gridDim.x - 1) return;
    __threadfence();
    unsigned long long won = atomicExch(w.a.x.best, 0ull);
    int token = won ? (int)(0xffffffffu - (unsigned)won) : 0;
    bool bad = atomicExch(counter + 2, 0u) != 0;
    if (bad) *w.a.finite = 0;
    w.a.result->finite = !bad;
    w.a.result->token = w.a.pick ? token : -1;
    if (w.a.pick) *w.s.slot.token = token;
    counter[1] = 0;
}

/* ---- the step ---------------------------------------------------------------------------------
 */

/* What a stage multiplies. */
struct Product {
    int tiles;      /* of this block; tile i is slice i % SLICES of row tile i / SLICES */
    int tile_bytes; /* wide or byte tiles */
    bool out;       /* rows join the residual stream at once */
    int row;        /* first row */
};

__device__ __forceinline__ Product product_of(const Worker &w, Kind kind, bool attention,
                                              bool last) {
    int b = blockIdx.x;
    Product p = {0, TILE_WIDE_BYTES, false, 0};
    if (kind == PROJECT || kind == LOGITS) {
        Share share = w.s.project[last ? 2 : attention];
        p.tiles = share.n * SLICES;
        p.row = share.first * 32;
    } else if (kind == MIX) {
        p.tiles = has_out(attention) ? OUT_TILES : 0;
        p.out = true;
        p.row = b % OUT_PARTS * (OUT_TILES * 32);
    } else if (kind == ROUTE) {
        p.tiles = b < SHARED_TILES + ROUTER_TILES ? SLICES : 0;
        p.tile_bytes = b < SHARED_TILES ? TILE_WIDE_BYTES : TILE_BYTE_BYTES;
    } else {
        p.tiles = b < ROUTED_JOBS ? 2 * SLICES : 0;
    }
    return p;
}

/* A finished row of a round, in one thread; row: of the round, or of the whole product. */
__device__ __forceinline__ void use_row(Worker &w, Kind kind, int rows, int r, int row, float y) {
    if (kind == PROJECT) {
        if (row < rows) w.a.x.proj[row] = y;
    } else if (kind == LOGITS) {
        if (row < SHAPE_VOCAB) take_logit(w, row, y);
    } else if (kind == ROUTE && (int)blockIdx.x >= SHARED_TILES) {
        int score = ((int)blockIdx.x - SHARED_TILES) * TILE_BYTE_ROWS + 2 * (r >> 2) + (r & 1);
        if ((r & 2) == 0 && score <= EXPERTS) w.a.x.scores[score] = y;
    } else { /* gate and up of one unit are neighbours */
        float up = __shfl_down_sync(~0u, y, 1), inner = silu(y) * up;
        float *to = kind == ROUTE ? w.a.x.shared + 16 * blockIdx.x : w.work() + ROUND_TILES * 32;
        if (kind == MOE) inner *= w.s.route_weight;
        if (r % 2 == 0) to[r / 2] = inner;
    }
}

__device__ __forceinline__ void multiply(Worker &w, Kind kind, const Product &p, int rows,
                                         const Slice &x) {
#pragma unroll 1
    for (int round = 0, buffer = 0; round < p.tiles; round += ROUND_TILES, buffer ^= 1) {
        float *parts = w.work() + buffer * (ROUND_TILES * 32);
        int end = min(ROUND_TILES, p.tiles - round), base = 0;
#pragma unroll 1
        for (int first = 0; first < end; first += WARPS) {
            int tile = first + w.warp;
            if (tile < end) {
                const unsigned char *at =
                    w.chunk(base + w.warp / SLOT_TILES) + w.warp % SLOT_TILES * p.tile_bytes;
                if (first == 0) w.mark(2);
                float y;
                if (p.tile_bytes == TILE_BYTE_BYTES) {
                    y = byte_tile(at, x);
                } else {
                    y = wide_tile(at, x);
                }
                if (p.out) {
                    int row = p.row + tile * 32 + w.lane,
                        copy = (int)blockIdx.x / OUT_PARTS % COPIES;
                    residual_add(w.a.x.h + residual_at(row, copy), y, w.a.x.counter + 2);
                } else {
                    parts[tile * 32 + w.lane] = y;
                }
            }
            if (kind == LOGITS) {
                w.leave(end - first > SLOT_TILES ? 2 : 1);
                base = 0;
            } else {
                base += 2;
            }
        }
        if (base) w.leave(chunks(end, SLOT_TILES));
        if (p.out) break;
        w.mark(3);
        sync_consumers();
        if (w.tid < end / SLICES * 32) {
            int row = p.row + round / SLICES * 32 + w.tid;
            use_row(w, kind, rows, w.tid, row, finish_row(w, parts, w.tid));
        }
    }
}

/* Keeps the compiler from writing the products out once for every kind of stage. */
__device__ __forceinline__ Kind hide(Kind kind) {
    int k = kind;
    asm volatile("" : "+r"(k));
    return (Kind)k;
}

__device__ __forceinline__ void consume(Worker &w, int token) {
    Slice x = {};
    int layer = 0;
    Kind kind = PROJECT;
#pragma unroll 1
    for (;;) {
        /* What follows from these is worked out when needed, not kept for the whole step. */
        asm volatile("" : "+r"(w.tid), "+r"(w.lane), "+r"(w.warp));
        const decode_layer &l = w.s.layers[0][layer & 1];
        const bool attention = is_attention(layer), last = layer == w.a.n_layers;
        const Quantised *from = &w.scratch();
        const bool routed = (int)blockIdx.x < ROUTED_JOBS;
        if (kind == PROJECT || kind == ROUTE || kind == LOGITS) {
            if (kind != ROUTE) w.run = {0, SLOTS, 0};
            if (kind == LOGITS) best_of(w) = 0;
            norm_front(w, kind, layer, token, l);
        } else if (kind == MIX && attention) {
            stage_attend(w, layer, l);
            if (has_out(true)) {
                gather_front(w);
            } else {
                w.wait();
            }
            from = &reinterpret_cast<GatherShared *>(w.s.work)->quantised;
        } else if (kind == MIX) {
            if (has_out(false)) {
                delta_front(w, layer, l);
            } else {
                w.wait();
            }
            from = &reinterpret_cast<GdnShared *>(w.s.work)->quantised;
        } else {
            w.run = {EARLY, EXPERT_SLOTS, EARLY};
            /* A routed expert arrives after the router's barrier, which the producer has passed. */
            if (!routed) {
                w.wait();
            } else {
                w.mark(0);
            }
        }
        kind = hide(kind);
        if (kind != MOE) take_slice(*from, x);
        w.mark(1);
        Product p = product_of(w, kind, attention, last);
        multiply(w, kind, p, attention ? ATTN_ROWS : GDN_ROWS, x);
        kind = hide(kind);
        if (kind == LOGITS) break;
        if (kind == MOE) {
            const float *inner = w.work() + ROUND_TILES * 32;
            int n = 1;
            float factor = 1;
            if (routed) {
                sync_consumers();
                w.mark(4);
            } else {
                n = w.s.shared_slices.n;
                inner = w.a.x.shared + w.s.shared_slices.first * INNER;
                if (n) factor = sigmoid(__ldcg(w.a.x.scores + EXPERTS));
            }
            multiply_down(w, inner, n, factor);
        }
        w.arrive();
        if (kind == MIX && !attention && has_out(false)) delta_shadow(w, layer);
        if (kind == MOE) {
            layer++;
            kind = layer == w.a.n_layers ? LOGITS : PROJECT;
        } else {
            kind = kind == PROJECT ? MIX : kind == MIX ? ROUTE : MOE;
        }
    }
    end_step(w);
}

} /* namespace decode */

#endif
