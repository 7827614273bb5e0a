/* Second and third stage of a full-attention layer. The context is split over the blocks; each
 * attends with all eight query heads of a key/value head to its rows, 64 at a time, on tensor cores
 * (queries and probabilities as two bfloat16 each, so that only keys and values are rounded). Then
 * 128 blocks gather the parts of half a head each and multiply a quarter of the output's rows. */
#ifndef LILY_CUDA_DECODE_ATTN_CUH
#define LILY_CUDA_DECODE_ATTN_CUH

#include "decode_worker.cuh"

namespace decode {

constexpr int QPITCH = HEAD + 8; /* bf16 of a query, padded against bank conflicts */
constexpr int OPITCH = HEAD + 4;
constexpr int PPITCH = ATTN_STEP + 4; /* scores of a head */
struct AttnShared {
    union {
        struct {
            alignas(16) uint16_t query_high[QPK][QPITCH];
            alignas(16) uint16_t query_low[QPK][QPITCH];
            alignas(16) float parts[4][ATTN_STEP][QPK]; /* of the scores, 64 dimensions each */
        };
        alignas(16) float out[2][QPK][OPITCH];
    };
    alignas(16) float scores[QPK][PPITCH];
    alignas(16) uint16_t key[HEAD], value[HEAD]; /* of this token */
    float sums[4][QPK];
};
static_assert(sizeof(AttnShared) <= WORK, "fits");

__device__ __forceinline__ uint16_t to_bf16(float x) { /* round to nearest even; x is finite */
    uint32_t bits = __float_as_uint(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ float from_bf16(uint16_t x) {
    return __uint_as_float((uint32_t)x << 16);
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* One head of 256 dimensions in a warp: x[m] is dimension 32 m + lane. Norm, then RoPE. */
__device__ __forceinline__ void norm_and_turn(const Worker &w, float (&x)[8],
                                              const float (&weight)[8]) {
    float squares = 0;
#pragma unroll
    for (int m = 0; m < 8; m++) squares = fmaf(x[m], x[m], squares);
    float factor = rsqrtf(warp_sum(squares) * (1.0f / HEAD) + SHAPE_NORM_EPS);
#pragma unroll
    for (int m = 0; m < 8; m++) x[m] *= factor * weight[m];
    float c = w.s.cosine[w.lane], s = w.s.sine[w.lane], p = x[0], q = x[1];
    x[0] = p * c - q * s;
    x[1] = q * c + p * s;
}

__device__ __forceinline__ void load_weights(const Worker &w, const float *from, float (&x)[8]) {
#pragma unroll
    for (int m = 0; m < 8; m++) x[m] = __ldg(from + 32 * m + w.lane);
}

/* Queries into shared memory; the block with the newest row makes that row and keeps it. */
__device__ __forceinline__ void prepare(Worker &w, AttnShared &g, int layer,
                                        const float (&weight)[8], const Context &c) {
    const bool query = w.warp < QPK, is_key = w.warp == QPK;
    const bool row = !query && w.warp < QPK + 2 && c.first + c.mine == c.n;
    float x[8];
    if (query || row) {
        int at = query ? (c.kv * QPK + w.warp) * 2 * HEAD
                       : 2 * QDIM + (is_key ? 0 : KVDIM) + c.kv * HEAD;
        take_words(w.a.x.proj + at + w.lane, 32, w.tag(layer), x);
    }
    sync_consumers(); /* everyone is done with the rows of the projection */
    w.mark(0);
    if (query) {
        norm_and_turn(w, x, weight);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            float q = x[m] * 0.0625f; /* 256^-0.5 */
            uint16_t high = to_bf16(q);
            g.query_high[w.warp][32 * m + w.lane] = high;
            g.query_low[w.warp][32 * m + w.lane] = to_bf16(q - from_bf16(high));
        }
    } else if (row) {
        if (is_key) norm_and_turn(w, x, weight);
        size_t place = ((size_t)(layer / SHAPE_ATTENTION_EVERY) * KV_HEADS + c.kv) *
                           (size_t)w.s.slot.capacity +
                       (size_t)(c.n - 1);
        uint16_t *cache = (is_key ? w.s.slot.keys : w.s.slot.values) + place * HEAD;
        uint16_t *mine = is_key ? g.key : g.value;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            uint16_t v = to_bf16(x[m]);
            mine[32 * m + w.lane] = v;
            cache[32 * m + w.lane] = v;
        }
    }
}

/* Scores of tokens [16 i, 16 i + 16) of the step from 64 of the dimensions. */
__device__ __forceinline__ void score(const Worker &w, AttnShared &g, const unsigned char *keys,
                                      int newest, const uint4 (&high)[2], const uint4 (&low)[2]) {
    int n = w.lane >> 2, t = w.lane & 3, i = w.warp >> 2, quarter = w.warp & 3;
    const unsigned char *row0 = keys + n * HEAD * 2, *row1 = row0 + 8 * HEAD * 2;
    const unsigned char *fresh = reinterpret_cast<const unsigned char *>(g.key);
    if (newest == n) row0 = fresh;
    if (newest == n + 8) row1 = fresh;
    float c[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int at = quarter * 128 + j * 64 + t * 16;
        uint4 p = *reinterpret_cast<const uint4 *>(row0 + at);
        uint4 q = *reinterpret_cast<const uint4 *>(row1 + at);
        mma_bf16(c, p.x, q.x, p.y, q.y, high[j].x, high[j].y);
        mma_bf16(e, p.x, q.x, p.y, q.y, low[j].x, low[j].y);
        mma_bf16(c, p.z, q.z, p.w, q.w, high[j].z, high[j].w);
        mma_bf16(e, p.z, q.z, p.w, q.w, low[j].z, low[j].w);
    }
    float2 *to0 = reinterpret_cast<float2 *>(&g.parts[quarter][16 * i + n][2 * t]);
    float2 *to1 = reinterpret_cast<float2 *>(&g.parts[quarter][16 * i + n + 8][2 * t]);
    *to0 = {c[0] + e[0], c[1] + e[1]};
    *to1 = {c[2] + e[2], c[3] + e[3]};
}

struct Running { /* of head n; tokens of this lane for the sum */
    float top, sum;
    float out[4][4]; /* dimensions 64 (warp % 4) + 8 n + 2 m (+ 1) x heads 2 t, 2 t + 1 */
};

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    return (uint32_t)to_bf16(low) | (uint32_t)to_bf16(high) << 16;
}

/* Softmax of the step's scores, and this warp's 16 tokens times 64 dimensions of the values. */
__device__ __forceinline__ void gather(const Worker &w, AttnShared &g, const unsigned char *values,
                                       int newest, int rows, Running &run) {
    int n = w.lane >> 2, t = w.lane & 3, i = w.warp >> 2, block = w.warp & 3;
    const float4 *all = reinterpret_cast<const float4 *>(g.scores[n]) + 4 * t;
    float top = run.top;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float4 x = all[j];
        top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float fade = __expf(run.top - top);
    run.top = top;
    const float2 *own = reinterpret_cast<const float2 *>(g.scores[n] + 16 * i) + t;
    float2 x = own[0], y = own[4];
    float p0 = __expf(x.x - top), p1 = __expf(x.y - top);
    float p2 = __expf(y.x - top), p3 = __expf(y.y - top);
    run.sum = run.sum * fade + ((p0 + p1) + (p2 + p3));
    float fade0 = __shfl_sync(~0u, fade, 8 * t), fade1 = __shfl_sync(~0u, fade, 8 * t + 4);
#pragma unroll
    for (int m = 0; m < 4; m++) {
        run.out[m][0] *= fade0, run.out[m][1] *= fade1;
        run.out[m][2] *= fade0, run.out[m][3] *= fade1;
    }
    if (rows <= 0) return;
    uint32_t high0 = pack_bf16(p0, p1), high1 = pack_bf16(p2, p3);
    uint32_t low0 = pack_bf16(p0 - bf16_low(high0), p1 - bf16_high(high0));
    uint32_t low1 = pack_bf16(p2 - bf16_low(high1), p3 - bf16_high(high1));
    uint4 v[4];
    const int token[4] = {2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const unsigned char *row = values + token[j] * HEAD * 2;
        if (token[j] == newest) row = reinterpret_cast<const unsigned char *>(g.value);
        if (token[j] >= rows) row = w.s.zeros;
        v[j] = *reinterpret_cast<const uint4 *>(row + block * 128 + n * 16);
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        uint32_t a = (&v[0].x)[m], b = (&v[1].x)[m], c = (&v[2].x)[m], d = (&v[3].x)[m];
        uint32_t a0 = __byte_perm(a, b, 0x5410), a1 = __byte_perm(a, b, 0x7632);
        uint32_t a2 = __byte_perm(c, d, 0x5410), a3 = __byte_perm(c, d, 0x7632);
        mma_bf16(run.out[m], a0, a1, a2, a3, high0, high1);
        mma_bf16(run.out[m], a0, a1, a2, a3, low0, low1);
    }
}

/* Partial outputs lie in the order of the tensor cores' registers: in every 64 dimensions, d at
 * place 8 (d % 8) + d / 8. */
__device__ __forceinline__ int dim_at(int place) {
    return place % 8 * 8 + place / 8;
}

/* The four warps that share 64 dimensions had other tokens: adds their sums, in a fixed order. */
__device__ __forceinline__ void finish(Worker &w, AttnShared &g, const Running &run,
                                       const Context &c) {
    int n = w.lane >> 2, t = w.lane & 3, i = w.warp >> 2, block = w.warp & 3;
    float sum = run.sum + __shfl_xor_sync(~0u, run.sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (block == 0 && t == 0) g.sums[i][n] = sum;
    float out[4][4];
#pragma unroll
    for (int m = 0; m < 16; m++) out[m / 4][m % 4] = run.out[m / 4][m % 4];
    auto place = [&](float *base, int pitch, int m, int j) -> float & {
        int at = 64 * block + (2 * m + (j >> 1)) * 8 + n, head = 2 * t + (j & 1);
        return base[head * pitch + at];
    };
    size_t at = (size_t)c.kv * c.span + (size_t)c.group;
    float *parts = w.a.x.parts + at * QPK * HEAD;
    sync_consumers(); /* queries and parts of scores are done with */
#pragma unroll
    for (int round = 0; round < 2; round++) {
        if (c.mine <= KV_TOKENS) break; /* one warp's tokens: nothing to add */
        int buffer = round == 0 ? i >> 1 : 0;
        float *base = &g.out[buffer][0][0];
        bool gives = round == 0 ? i & 1 : i == 2, takes = round == 0 ? !(i & 1) : i == 0;
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (gives) place(base, OPITCH, m, j) = out[m][j];
            }
        }
        sync_consumers();
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (takes) out[m][j] += place(base, OPITCH, m, j);
            }
        }
        sync_consumers();
    }
    if (i == 0) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) place(parts, HEAD, m, j) = out[m][j];
        }
        if (block == 0 && t == 0) {
            float total = (g.sums[0][n] + g.sums[1][n]) + (g.sums[2][n] + g.sums[3][n]);
            size_t row = ((size_t)c.kv * QPK + (size_t)n) * c.span + (size_t)c.group;
            reinterpret_cast<float2 *>(w.a.x.parts_ml)[row] = {run.top, total};
        }
    }
}

/* Second stage of an attention layer: all of it. */
__device__ __forceinline__ void stage_attend(Worker &w, int layer, const decode_layer &l) {
    const Context &c = w.s.context;
    float weight[8]; /* of the norms, before the wait */
    load_weights(w, w.warp < QPK ? l.q_norm : l.k_norm, weight);
    if (c.mine == 0) {
        w.arrive();
        return;
    }
    AttnShared &g = *reinterpret_cast<AttnShared *>(w.s.work);
    prepare(w, g, layer, weight, c);
    sync_consumers();
    w.mark(1);
    int n = w.lane >> 2, t = w.lane & 3, i = w.warp >> 2, quarter = w.warp & 3;
    uint4 high[2], low[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int at = quarter * 64 + j * 32 + t * 8;
        high[j] = *reinterpret_cast<const uint4 *>(&g.query_high[n][at]);
        low[j] = *reinterpret_cast<const uint4 *>(&g.query_low[n][at]);
    }
    Running run = {-3.0e38f, 0, {}};
#pragma unroll 1
    for (int step = 0; step < c.mine; step += ATTN_STEP) {
        int rows = min(KV_TOKENS, c.mine - step - KV_TOKENS * i); /* of this warp's tokens */
        int newest = c.n - 1 - (c.first + step + KV_TOKENS * i);  /* among them, or outside */
        const unsigned char *chunk = w.s.zeros;
        if (rows > 0) {
            chunk = w.chunk(i);
            score(w, g, chunk, newest, high, low);
        }
        sync_consumers();
        { /* one thread a token and head */
            int token = w.tid >> 3, head = w.tid & 7;
            float x = (g.parts[0][token][head] + g.parts[1][token][head]) +
                      (g.parts[2][token][head] + g.parts[3][token][head]);
            g.scores[head][token] = token < c.mine - step ? x : -3.0e38f;
        }
        sync_consumers();
        gather(w, g, chunk + KV_CHUNK, newest, rows, run);
        w.leave(chunks(min(ATTN_STEP, c.mine - step), KV_TOKENS));
    }
    w.mark(4);
    finish(w, g, run, c);
    w.arrive();
}

struct GatherShared {
    alignas(16) float parts[WARPS][128];
    alignas(16) float y[128];
    alignas(16) Quantised quantised;
};
static_assert(sizeof(GatherShared) <= WORK, "fits");

/* Third stage, first half: the parts of half a head, weighed, and the gate, until the result lies
 * quantised in shared memory. All loads are asked for before any is used. */
__device__ __forceinline__ void gather_front(Worker &w, int layer) {
    constexpr int BATCH = 5; /* parts a warp adds at once: 80 groups */
    const Context &c = w.s.context;
    GatherShared &g = *reinterpret_cast<GatherShared *>(w.s.work);
    int slice = (int)blockIdx.x / OUT_PARTS, head = slice / 2;
    size_t first = (size_t)(head / QPK) * c.span * QPK + (size_t)(head % QPK);
    const float2 *ml = reinterpret_cast<const float2 *>(w.a.x.parts_ml) + (size_t)head * c.span;
    const float4 *from =
        reinterpret_cast<const float4 *>(w.a.x.parts + first * HEAD + slice % 2 * 128) + w.lane;
    float gate = 0;
    const int dim = w.tid / 64 * 64 + dim_at(w.tid % 64); /* of threads below 128 */
    if (w.warp < 4) {
        gate = take_word(w.a.x.proj + (2 * head + 1) * HEAD + slice % 2 * 128 + dim, w.tag(layer));
    }
    float top = -3.0e38f, sum = 0;
    float4 o = {};
#pragma unroll 1
    for (int base = 0; base < c.groups; base += BATCH * WARPS) {
        float2 mine[BATCH / 2 + 1];
        float4 x[BATCH];
#pragma unroll
        for (int j = 0; j <= BATCH / 2; j++) {
            int group = base + 32 * j + w.lane;
            bool valid = group < c.groups && 32 * j + w.lane < BATCH * WARPS;
            mine[j] = valid ? __ldcg(ml + group) : float2{-3.0e38f, 0};
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int group = base + WARPS * j + w.warp;
            x[j] = group < c.groups ? __ldcg(from + (size_t)group * (QPK * HEAD / 4)) : float4{};
        }
        float now = top;
#pragma unroll
        for (int j = 0; j <= BATCH / 2; j++) now = fmaxf(now, mine[j].x);
        now = warp_max(now);
        float fade = __expf(top - now), part = 0;
        top = now;
#pragma unroll
        for (int j = 0; j <= BATCH / 2; j++) {
            mine[j].x = __expf(mine[j].x - now);
            part = fmaf(mine[j].x, mine[j].y, part);
        }
        sum = sum * fade + part;
        o.x *= fade, o.y *= fade, o.z *= fade, o.w *= fade;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            float weight = __shfl_sync(~0u, mine[j / 2].x, w.warp + WARPS * (j & 1));
            o.x = fmaf(weight, x[j].x, o.x), o.y = fmaf(weight, x[j].y, o.y);
            o.z = fmaf(weight, x[j].z, o.z), o.w = fmaf(weight, x[j].w, o.w);
        }
    }
    sum = warp_sum(sum);
    w.mark(1);
    reinterpret_cast<float4 *>(g.parts[w.warp])[w.lane] = o;
    sync_consumers();
    if (w.warp < 4) {
        float y = 0;
#pragma unroll
        for (int j = 0; j < WARPS; j++) y += g.parts[j][w.tid];
        g.y[dim] = __fdividef(y, sum) * sigmoid(gate);
        sync_four();
        if (w.warp == 0) {
            float4 y4 = reinterpret_cast<const float4 *>(g.y)[w.lane];
            const float v[4] = {y4.x, y4.y, y4.z, y4.w};
            quantise(v, g.quantised);
        }
    }
    sync_consumers();
    w.mark(4);
}

} /* namespace decode */

#endif
