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
    MIX,     /* DeltaNet, or what follows attention; output projection and scores */
    SHARED,  /* norm, the shared expert's first half and gate */
    MOE,     /* both halves of the routed experts, second half of the shared one */
    LOGITS   /* final norm, head */
};

/* ---- fronts -----------------------------------------------------------------------------------
 */

/* Inputs 4 lane .. + 3 of the warp's slice of the embedding row. */
__device__ __forceinline__ void embed(const Worker &w, int slice, float (&x)[4]) {
    const cuda_mat &e = w.a.embed;
    int token = w.s.slot.input;
    if (token < 0) token = *static_cast<const volatile int *>(w.s.slot.token);
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

/* How many contributions a sum has after so many layers. To a row of the experts' sum
 * adds every block, to one of the mixers' every block with that quarter of the rows, and one the
 * embedding. */
__device__ __forceinline__ unsigned contributions(bool experts, int quarter, int layers) {
    unsigned blocks = experts ? TOP_K + gridDim.x - ROUTED_JOBS
                              : (gridDim.x + OUT_PARTS - 1 - (unsigned)quarter) / OUT_PARTS;
    return (unsigned)layers * blocks + !experts;
}

/* Four values of a sum, once all contributions of so many layers are in. Until the last row of the
 * warp's slice is complete, which a lane looks at, it does not pay to read all of it. */
__device__ __forceinline__ void take_sum(const Worker &w, bool experts, int layers, float (&h)[4]) {
    const int slice = w.warp % SLICES, last = slice * 128 + 127;
    const unsigned count = contributions(experts, (slice * 128 + 4 * w.lane) / PART_ROWS, layers);
    const unsigned sign = contributions(experts, last / PART_ROWS, layers);
    const long long *sum = w.sum(experts), *from = sum + slice * 128 + 2 * w.lane;
    const long long *at = sum + residual_at(last);
    if (w.lane == 0) {
#pragma unroll 1
        for (unsigned spin = 0;; spin++) {
            long long x;
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
            if ((((unsigned)x ^ sign) & COUNTED) == 0) break;
            if (spin == SPIN_LIMIT) __trap();
        }
    }
    __syncwarp();
    longlong2 x[2];
#pragma unroll 1
    for (unsigned spin = 0;; spin++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(x[i].x), "=l"(x[i].y)
                         : "l"(from + 64 * i)
                         : "memory");
        }
        unsigned early = (((unsigned)x[0].x ^ count) | ((unsigned)x[0].y ^ count)) |
                         (((unsigned)x[1].x ^ count) | ((unsigned)x[1].y ^ count));
        if ((early & COUNTED) == 0) break;
        if (spin == SPIN_LIMIT) __trap();
    }
    __syncwarp();
    h[0] = from_fixed(x[0].x, count), h[1] = from_fixed(x[0].y, count);
    h[2] = from_fixed(x[1].x, count), h[3] = from_fixed(x[1].y, count);
}

/* The residual stream, its sum of squares and, times the norm's weight, the warp's slice. The
 * norm's factor is applied to the results, so that no one waits for the sum of squares. h: inputs
 * 4 lane .. + 3 of the slice. */
__device__ __forceinline__ void norm_front(Worker &w, Kind kind, int layer, const decode_layer &l,
                                           float (&h)[4]) {
    int slice = w.warp % SLICES;
    const float *norm = kind == PROJECT  ? l.input_norm
                        : kind == LOGITS ? w.a.final_norm
                                         : l.post_norm;
    float4 weight = __ldg(reinterpret_cast<const float4 *>(norm + slice * 128) + w.lane);
    /* The next layer's table comes in passing. */
    constexpr int WORDS = sizeof(decode_layer) / 4;
    bool next = kind == SHARED && w.warp == WARPS - 1 && w.lane < WORDS && layer + 1 < w.a.n_layers;
    uint32_t word = 0;
    if (next) word = __ldg(reinterpret_cast<const uint32_t *>(w.a.layers + layer + 1) + w.lane);
    float4 rest = {};
    if (kind == PROJECT && layer == 0) {
        embed(w, slice, h);
        w.mark(0);
        if (blockIdx.x == 0 && w.warp < SLICES) { /* the residual stream begins */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w.add(w.sum(false) + residual_at(slice * 128 + 4 * w.lane + i), h[i]);
            }
        }
        const int n = (int)gridDim.x * THREADS;
        for (int i = (int)blockIdx.x * THREADS + w.tid; i < STEP_SUMS; i += n) w.sums(true)[i] = 0;
    } else {
        const bool experts = kind != SHARED;
        if (experts || layer > 0) rest = w.kept();
        take_sum(w, experts, experts ? layer : layer + 1, h);
        w.mark(0);
        float most = fmaxf(fmaxf(fabsf(h[0]), fabsf(h[1])), fmaxf(fabsf(h[2]), fabsf(h[3])));
        if (!(most < LARGEST_SUM)) w.a.x.counter[2] = 1;
        w.kept() = {h[0], h[1], h[2], h[3]};
        h[0] += rest.x, h[1] += rest.y, h[2] += rest.z, h[3] += rest.w;
    }
    if (next) reinterpret_cast<uint32_t *>(&w.s.layers[0][(layer + 1) & 1])[w.lane] = word;
    const float x[4] = {h[0] * weight.x, h[1] * weight.y, h[2] * weight.z, h[3] * weight.w};
    float squares = warp_sum((h[0] * h[0] + h[1] * h[1]) + (h[2] * h[2] + h[3] * h[3]));
    quantise(x, w.scratch());
    /* Other warps are done with the old ones: each row they finished with them has become a word on
     * which this sum depends, or a barrier has come since. */
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
    float y[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SLICES; i++) y[i & 3] += from[32 * i];
    return ((y[0] + y[1]) + (y[2] + y[3])) * w.norm_factor();
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
    int row;        /* first row */
};

__device__ __forceinline__ Product product_of(const Worker &w, Kind kind, bool attention,
                                              bool last) {
    int b = blockIdx.x;
    Product p = {0, TILE_WIDE_BYTES, 0};
    if (kind == PROJECT || kind == LOGITS) {
        Share share = w.s.project[last ? 2 : attention];
        p.tiles = share.n * SLICES;
        p.row = share.first * 32;
    } else if (kind == MIX) {
        p.tiles = has_out(attention) ? OUT_TILES : 0;
        p.row = b % OUT_PARTS * (OUT_TILES * 32);
    } else if (kind == SHARED) { /* the gate has a tile of its own */
        p.tiles = b <= SHARED_TILES ? SLICES : 0;
        p.tile_bytes = b < SHARED_TILES ? TILE_WIDE_BYTES : TILE_BYTE_BYTES;
    } else {
        p.tiles = b < ROUTED_JOBS ? 2 * SLICES : 0;
    }
    return p;
}

/* A finished row of a round, in one thread; row: of the round, or of the whole product. */
__device__ __forceinline__ void use_row(Worker &w, Kind kind, int layer, int rows, int r, int row,
                                        float y) {
    if (kind == PROJECT) {
        if (row < rows) give_word(w.a.x.proj + row, y, w.tag(layer));
    } else if (kind == LOGITS) {
        if (row < SHAPE_VOCAB) take_logit(w, row, y);
    } else if (kind == SHARED && (int)blockIdx.x == SHARED_TILES) {
        if (r == 0) give_word(w.a.x.gate, y, w.tag(layer));
    } else { /* gate and up of one unit are neighbours */
        float up = __shfl_down_sync(~0u, y, 1), inner = silu(y) * up;
        decode_word *to =
            kind == SHARED ? w.a.x.shared + 16 * blockIdx.x : w.a.x.inner + INNER * blockIdx.x;
        if (r % 2 == 0) give_word(to + r / 2, inner, w.tag(layer));
    }
}

/* Scores of experts `first` and on, as a tile of 16 rows left them in the lanes: those of one slice
 * of what they are a sum over. The choice waits for them, so they go before all else. */
__device__ __forceinline__ void add_scores(const Worker &w, int layer, int first, int n, float y) {
    const int row = 2 * (w.lane >> 2) + (w.lane & 1);
    if ((w.lane & 2) == 0 && row < n) w.add(w.scores(layer) + first + row, y);
}

/* The warp's tile of the output projection into the mixers' sum, and of the scores. */
__device__ __forceinline__ void multiply_out(Worker &w, int layer, const Product &p,
                                             const Slice &x) {
    w.run.slot = OUT_SLOT;
    if (w.warp < SCORE_TILES) {
        const unsigned char *tile = w.chunk(0) + w.warp * TILE_SCORE_BYTES;
        const int row = w.warp * TILE_SCORE_ROWS, quarter = (int)blockIdx.x % OUT_PARTS;
        float y = score_tile(tile, x);
        add_scores(w, layer, quarter * SCORE_ROWS + row, SCORE_ROWS - row, y);
    }
    if (w.warp < p.tiles) {
        const unsigned char *chunk = w.chunk(1 + w.warp / SLOT_TILES);
        w.mark(2);
        float y = wide_tile(chunk + w.warp % SLOT_TILES * TILE_WIDE_BYTES, x);
        w.add(w.sum(false) + residual_at(p.row + w.warp * 32 + w.lane), y);
    }
    w.leave(1 + OUT_CHUNKS);
}

/* The router times the residual stream before the mixer, h, while the projection is on its way:
 * a tile each in the warps that have its slices. */
__device__ __forceinline__ void multiply_router(Worker &w, int layer, const decode_layer &l,
                                                const float (&h)[4]) {
    if (!has_router()) return;
    const int first = ROUTER_JOB * (int)blockIdx.x, i = w.warp - first % SLICES;
    if (i >= 0 && i < ROUTER_JOB) {
        const float *norm = l.post_norm + w.warp * 128;
        float4 weight = __ldg(reinterpret_cast<const float4 *>(norm) + w.lane);
        const float g[4] = {h[0] * weight.x, h[1] * weight.y, h[2] * weight.z, h[3] * weight.w};
        quantise(g, w.scratch());
        __syncwarp();
        Slice x;
        take_slice(w.scratch(), x);
        float y = byte_tile(w.chunk(0) + i * TILE_BYTE_BYTES, x);
        add_scores(w, layer, first / SLICES * TILE_BYTE_ROWS, TILE_BYTE_ROWS, y);
    }
    w.leave(1);
}

/* Each warp multiplies every 16th tile, so that its slice stays the same. */
__device__ __forceinline__ void multiply(Worker &w, Kind kind, int layer, const Product &p,
                                         int rows, const Slice &x) {
    const int offset = w.warp % SLOT_TILES * p.tile_bytes;
#pragma unroll 1
    for (int round = 0, buffer = 0; round < p.tiles; round += ROUND_TILES, buffer ^= 1) {
        float *parts = w.work() + buffer * (ROUND_TILES * 32);
        const int end = min(ROUND_TILES, p.tiles - round);
        int slot = step_slot(w.run, w.run.slot, w.warp / SLOT_TILES);
        float *to = parts + w.warp * 32 + w.lane;
#pragma unroll 1
        for (int left = end - w.warp; left > 0; left -= WARPS, to += WARPS * 32) {
            if (kind == PROJECT && left > WARPS) { /* two at once hide each other's latency */
                int other = step_slot(w.run, slot, 2);
                barrier_wait(&w.s.full[slot], w.phases >> slot & 1);
                if (left == end - w.warp) w.mark(2);
                barrier_wait(&w.s.full[other], w.phases >> other & 1);
                const unsigned char *const tiles[2] = {w.s.ring + slot * SLOT + offset,
                                                       w.s.ring + other * SLOT + offset};
                float y[2];
                wide_tiles(tiles, x, y);
                to[0] = y[0], to[WARPS * 32] = y[1];
                slot = step_slot(w.run, other, 2);
                left -= WARPS, to += WARPS * 32;
                continue;
            }
            barrier_wait(&w.s.full[slot], w.phases >> slot & 1);
            if (left == end - w.warp) w.mark(2);
            const unsigned char *tile = w.s.ring + slot * SLOT + offset;
            if (kind == SHARED && p.tile_bytes == TILE_BYTE_BYTES) {
                *to = byte_tile(tile, x);
            } else {
                *to = wide_tile(tile, x);
            }
            slot = step_slot(w.run, slot, 2);
            if (kind == LOGITS) w.leave(left + w.warp > SLOT_TILES ? 2 : 1);
        }
        if (kind == LOGITS && end % WARPS && w.warp >= end % WARPS)
            w.leave(end % WARPS > SLOT_TILES ? 2 : 1);
        if (kind != LOGITS) w.leave(chunks(end, SLOT_TILES));
        w.mark(3);
        sync_consumers();
        if (w.tid < end / SLICES * 32) {
            int row = p.row + round / SLICES * 32 + w.tid;
            use_row(w, kind, layer, rows, w.tid, row, finish_row(w, parts, w.tid));
        }
    }
}

/* Keeps the compiler from writing the products out once for every kind of stage. */
__device__ __forceinline__ Kind hide(Kind kind) {
    int k = kind;
    asm volatile("" : "+r"(k));
    return (Kind)k;
}

__device__ __forceinline__ void consume(Worker &w) {
    Slice x = {};
    int layer = 0;
    Kind kind = PROJECT;
#pragma unroll 1
    for (;;) {
        /* What follows from these is worked out when needed, not kept for the whole step. */
        asm volatile("" : "+r"(w.tid), "+r"(w.lane), "+r"(w.warp));
        const decode_layer &l = w.s.layers[0][layer & 1];
        const bool attention = is_attention(layer), last = layer == w.a.n_layers;
        const bool routed = (int)blockIdx.x < ROUTED_JOBS;
        float h[4]; /* of the residual stream before the mixer */
        const Product p = product_of(w, kind, attention, last);
        if (kind == MOE) {
            w.run = {EARLY, EXPERT_SLOTS, EARLY};
            w.mark(0); /* the routed expert's weights arrive, or the shared one's words */
        } else {
            const Quantised *from = &w.scratch();
            if (kind != MIX) {
                w.run = {0, SLOTS, kind == SHARED ? SHARED_SLOT : 0};
                if (kind == LOGITS) best_of(w) = 0;
                norm_front(w, kind, layer, l, h);
            } else if (attention) {
                stage_attend(w, layer, l);
                w.wait();
                if (has_out(true)) gather_front(w, layer);
                from = &reinterpret_cast<GatherShared *>(w.s.work)->quantised;
            } else {
                if (has_out(false)) delta_front(w, layer, l);
                from = &reinterpret_cast<GdnShared *>(w.s.work)->quantised;
            }
            take_slice(*from, x); /* which experts use as the shared one did */
        }
        kind = hide(kind);
        w.mark(1);
        if (kind != MIX) {
            if (kind != MOE) sync_consumers(); /* the stage before is done with shared memory */
            multiply(w, kind, layer, p, attention ? ATTN_ROWS : GDN_ROWS, x);
        } else if (p.tiles) {
            multiply_out(w, layer, p, x);
        }
        if (kind == PROJECT) multiply_router(w, layer, l, h);
        kind = hide(kind);
        if (kind == LOGITS) break;
        if (kind == MOE) {
            w.mark(4);
            if (routed) {
                multiply_down(w, layer);
            } else {
                multiply_shared(w, layer);
            }
        }
        if (kind == MIX && !has_out(attention)) { /* for the count */
            int row = (int)blockIdx.x % OUT_PARTS * PART_ROWS + w.tid;
            if (w.tid < PART_ROWS) w.add(w.sum(false) + residual_at(row), 0.0f);
        }
        w.pass();
        if (kind == SHARED) sync_consumers();
        if (kind == MIX && !attention && has_out(false)) delta_shadow(w, layer);
        if (kind == MOE) {
            layer++;
            kind = layer == w.a.n_layers ? LOGITS : PROJECT;
        } else {
            kind = kind == PROJECT ? MIX : kind == MIX ? SHARED : MOE;
        }
    }
    end_step(w);
}

} /* namespace decode */

#endif
