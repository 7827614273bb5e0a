/* The producer warp: streams everything this block reads from memory in bulk into the ring, ahead of
 * the grid's barriers. Only the routed experts must wait for their stage: the producer itself reads
 * the router's scores and chooses the experts. */
#ifndef LILY_CUDA_DECODE_PRODUCER_CUH
#define LILY_CUDA_DECODE_PRODUCER_CUH

#include "decode_plan.cuh"

namespace decode {

/* Chunks on their way at once: more would delay the barriers' own traffic. */
#ifndef DECODE_IN_FLIGHT
#define DECODE_IN_FLIGHT 3
#endif

struct Producer {
    Shared &s;
    unsigned phases; /* bit i: parity of the next use of slot i */
    Run run;
    unsigned flying; /* the last chunks' slots, 8 bits each: slot + 16 parity; 0xff: none */

    __device__ __forceinline__ void begin_run(int base, int mod, int slot) {
        run = {base, mod, slot};
    }
    __device__ __forceinline__ unsigned char *begin(unsigned bytes) {
        int slot = run.slot;
        unsigned phase = phases >> slot & 1;
        barrier_wait(&s.empty[slot], phase ^ 1);
        unsigned old = flying >> (8 * (DECODE_IN_FLIGHT - 1)) & 0xff;
        /* A slot that has been used again since has surely been landed in; its parity would lie. */
        if (old != 0xff && (phases >> (old & 15) & 1) != old >> 4) {
            barrier_wait(&s.full[old & 15], old >> 4);
        }
        flying = flying << 8 | (unsigned)slot | phase << 4;
        phases ^= 1u << slot;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                         shared_address(&s.full[slot])),
                     "r"(bytes)
                     : "memory");
        return s.ring + slot * SLOT;
    }
    __device__ __forceinline__ void copy(unsigned char *to, const void *from, unsigned bytes) {
        bulk_copy(to, from, bytes, &s.full[run.slot]);
    }
    __device__ __forceinline__ void end() { run.slot = step_slot(run, run.slot, 1); }
    /* One contiguous piece in chunks of at most `chunk` bytes. */
    __device__ __forceinline__ void stream(const uint8_t *from, unsigned bytes, unsigned chunk) {
#pragma unroll 1
        for (unsigned at = 0; at < bytes; at += chunk) {
            unsigned n = min(chunk, bytes - at);
            copy(begin(n), from + at, n);
            end();
        }
    }
};
static_assert(DECODE_IN_FLIGHT <= 4, "fits into a word");

/* Descending, by compare and exchange; N is a power of two. */
template <int N> __device__ __forceinline__ void sort_down(uint32_t (&key)[N]) {
#pragma unroll
    for (int size = 2; size <= N; size *= 2) {
#pragma unroll
        for (int step = size / 2; step; step /= 2) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                int j = i ^ step;
                if (j < i) continue;
                uint32_t high = max(key[i], key[j]), low = min(key[i], key[j]);
                bool down = (i & size) == 0;
                key[i] = down ? high : low;
                key[j] = down ? low : high;
            }
        }
    }
}

/* The eight largest scores, ties to the lower index; this block's expert among them and its weight,
 * a softmax over the eight. Scores are first compared by their upper 24 bits, with the expert's
 * number below them; where that leaves the eighth and the ninth undecided, by all bits. All lanes
 * take part. Which of the eight is whose does not matter, so their order does not either. */
__device__ __forceinline__ void choose(const float *scores, Shared &s) {
    constexpr int N = EXPERTS / 32;
    int lane = threadIdx.x & 31;
    uint32_t whole[N], key[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = lane + 32 * i;
        float score = __ldcg(scores + e);
        uint32_t bits = __float_as_uint(score);
        whole[i] = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u); /* orders as floats do */
        s.scores[e] = score;
        key[i] = (whole[i] & ~255u) | (255u - (unsigned)e);
    }
    sort_down(key);
    uint32_t kept = 0, most = 0, eighth = 0; /* round k's winner belongs to lane k */
#pragma unroll 1
    for (int k = 0; k <= TOP_K; k++) {
        eighth = most;
        most = __reduce_max_sync(~0u, key[0]);
        if (lane == k) kept = most;
        bool mine = key[0] == most;
#pragma unroll
        for (int i = 0; i < N - 1; i++) key[i] = mine ? key[i + 1] : key[i];
        if (mine) key[N - 1] = 0;
    }
    int expert = 255 - (int)(kept & 255);
    if (eighth >> 8 == most >> 8) { /* rare: again, exactly */
#pragma unroll 1
        for (int k = 0; k < TOP_K; k++) {
            uint32_t best = 0;
            int where = 0x7fffffff;
#pragma unroll
            for (int i = N - 1; i >= 0; i--) {
                if (whole[i] >= best) best = whole[i], where = lane + 32 * i;
            }
            uint32_t all = __reduce_max_sync(~0u, best);
            int winner = (int)__reduce_min_sync(~0u, (unsigned)(best == all ? where : 0x7fffffff));
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (lane + 32 * i == winner) whole[i] = 0;
            }
            if (lane == k) expert = winner;
        }
    }
    __syncwarp();
    float score = s.scores[expert & (EXPERTS - 1)], top = lane < TOP_K ? score : -3.0e38f;
#pragma unroll
    for (int d = TOP_K / 2; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    float weight = __expf(score - top), sum = weight;
#pragma unroll
    for (int d = TOP_K / 2; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == (int)blockIdx.x / EXPERT_JOBS) {
        s.route_weight = weight / sum;
        s.chosen = expert;
    }
    __syncwarp();
}
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 256, "as many for each lane, a byte for the number");

/* Chunks [from, to) of a projection's share. */
__device__ __forceinline__ void produce_project(Producer &p, const uint8_t *tiles, Share share,
                                                int from, int to) {
    const uint8_t *at = tiles + (size_t)share.first * SLICES * TILE_WIDE_BYTES;
    unsigned bytes = (unsigned)share.n * SLICES * TILE_WIDE_BYTES;
    unsigned begin = (unsigned)from * SLOT, end = min(bytes, (unsigned)to * SLOT);
    if (begin < end) p.stream(at + begin, end - begin, SLOT);
}

__device__ __forceinline__ void produce_context(Producer &p, int layer) {
    const Context &c = p.s.context;
    const cuda_slot &slot = p.s.slot;
    size_t row = ((size_t)kind_index(layer) * KV_HEADS + c.kv) * (size_t)slot.capacity + c.first;
    const uint16_t *keys = slot.keys + row * HEAD, *values = slot.values + row * HEAD;
#pragma unroll 1
    for (int i = 0; i < c.mine; i += KV_TOKENS) {
        /* This token's own row comes from its projection, not from the cache. */
        int old = min(KV_TOKENS, min(c.mine, c.n - 1 - c.first) - i);
        unsigned bytes = (unsigned)max(old, 0) * HEAD * 2;
        unsigned char *to = p.begin(2 * bytes);
        if (bytes) {
            p.copy(to, keys + (size_t)i * HEAD, bytes);
            p.copy(to + KV_CHUNK, values + (size_t)i * HEAD, bytes);
        }
        p.end();
    }
}

__device__ __forceinline__ void produce_mixer(Producer &p, const decode_layer &w, int layer) {
    bool attention = is_attention(layer), out = has_out(attention);
    if (attention) {
        produce_context(p, layer);
    } else if (out) {
        const float *state =
            p.s.slot.state_in +
            ((size_t)kind_index(layer) * VHEADS + blockIdx.x / OUT_PARTS) * (128 * 128);
        p.stream(reinterpret_cast<const uint8_t *>(state), STATE_SLOTS * STATE_CHUNK, STATE_CHUNK);
    }
    if (out) {
        p.stream(w.out + (size_t)blockIdx.x * (OUT_TILES * TILE_WIDE_BYTES),
                 OUT_TILES * TILE_WIDE_BYTES, SLOT);
    }
}

__device__ __forceinline__ void produce_route(Producer &p, const decode_layer &w) {
    int b = blockIdx.x;
    if (b >= SHARED_TILES + ROUTER_TILES) return;
    bool shared = b < SHARED_TILES;
    unsigned bytes = SLICES * (shared ? TILE_WIDE_BYTES : TILE_BYTE_BYTES);
    const uint8_t *from = shared ? w.shared_in + (size_t)b * bytes
                                 : w.router + (size_t)(b - SHARED_TILES) * bytes;
    p.stream(from, bytes, shared ? SLOT : BYTE_PER_SLOT * TILE_BYTE_BYTES);
}

__device__ __forceinline__ void produce_experts(Producer &p, const decode_layer &w, bool routed) {
    constexpr size_t DOWN_SLICE = (size_t)DOWN_TILES * TILE_DOWN_BYTES;
    constexpr unsigned DOWN_CHUNK = DOWN_PER_SLOT * TILE_DOWN_BYTES;
    Share slices = p.s.shared_slices;
    const uint8_t *down = w.shared_out + (size_t)slices.first * DOWN_SLICE;
    if (routed) {
        constexpr unsigned in = 2 * SLICES * TILE_WIDE_BYTES;
        size_t job = (size_t)p.s.chosen * EXPERT_JOBS + blockIdx.x % EXPERT_JOBS;
        p.stream(w.gate_up + job * in, in, SLOT);
        down = w.down + job * DOWN_SLICE;
        slices.n = 1;
    }
#pragma unroll 1
    for (int i = 0; i < slices.n; i++) p.stream(down + i * DOWN_SLICE, DOWN_SLICE, DOWN_CHUNK);
}

/* The whole warp; lane 0 issues. */
__device__ __forceinline__ void produce(const decode_args &a, Shared &s) {
    int lane = threadIdx.x & 31;
    bool leads = lane == 0, routed = (int)blockIdx.x < ROUTED_JOBS;
    constexpr int WORDS = sizeof(decode_layer) / 4;
    Producer p = {s, 0, {0, SLOTS, 0}, 0xffffffffu};
    unsigned target = a.barrier;
    const uint8_t *tiles = a.layers[0].in;
    if (leads) produce_project(p, tiles, s.project[is_attention(0)], 0, EARLY);
#pragma unroll 1
    for (int l = 0; l < a.n_layers; l++) {
        bool attention = is_attention(l), last = l + 1 == a.n_layers;
        decode_layer &w = s.layers[1][0];
        __syncwarp();
        if (lane < WORDS) {
            reinterpret_cast<uint32_t *>(&w)[lane] =
                __ldg(reinterpret_cast<const uint32_t *>(a.layers + l) + lane);
        }
        __syncwarp();
        target += (attention ? 4u : 3u) * gridDim.x; /* up to the router's barrier */
        if (leads) {
            p.begin_run(0, SLOTS, min(EARLY, s.project_chunks[attention]));
            produce_project(p, tiles, s.project[attention], EARLY, 1 << 16);
            produce_mixer(p, w, l);
            produce_route(p, w);
            tiles = last ? a.lm_head : a.layers[l + 1].in;
            p.begin_run(0, SLOTS, 0);
            produce_project(p, tiles, s.project[last ? 2 : is_attention(l + 1)], 0, EARLY);
            p.begin_run(EARLY, EXPERT_SLOTS, EARLY);
        }
        if (routed) {
            if (leads) grid_poll(a.x.counter, target);
            __syncwarp();
            choose(a.x.scores, s);
        }
        if (leads) produce_experts(p, w, routed);
        target += gridDim.x;
    }
    if (leads) {
        p.begin_run(0, SLOTS, min(EARLY, s.project_chunks[2]));
        produce_project(p, tiles, s.project[2], EARLY, 1 << 16);
    }
}

} /* namespace decode */

#endif
