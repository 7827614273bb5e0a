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
    unsigned next; /* chunk to issue */

    __device__ __forceinline__ unsigned char *begin(unsigned bytes) {
        int slot = slot_of(next);
        if (next >= SLOTS) barrier_wait(&s.empty[slot], (turn_of(next) - 1) & 1);
        if (next >= DECODE_IN_FLIGHT) {
            unsigned old = next - DECODE_IN_FLIGHT;
            barrier_wait(&s.full[slot_of(old)], turn_of(old) & 1);
        }
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                         shared_address(&s.full[slot])),
                     "r"(bytes)
                     : "memory");
        return s.ring + slot * SLOT;
    }
    __device__ __forceinline__ void copy(unsigned char *to, const void *from, unsigned bytes) {
        bulk_copy(to, from, bytes, &s.full[slot_of(next)]);
    }
    /* One contiguous piece in chunks of at most `chunk` bytes. */
    __device__ __forceinline__ void stream(const uint8_t *from, unsigned bytes, unsigned chunk) {
        for (unsigned at = 0; at < bytes; at += chunk) {
            unsigned n = min(chunk, bytes - at);
            copy(begin(n), from + at, n);
            next++;
        }
    }
};

/* The eight largest scores in descending order, ties to the lower index, and this block's weight:
 * softmax over the eight. Lane l looks after experts l, l + 32, ... All lanes take part. */
__device__ __forceinline__ void choose(const float *scores, Shared &s) {
    constexpr int N = (EXPERTS + 31) / 32;
    int lane = threadIdx.x & 31;
    uint32_t key[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = lane + 32 * i;
        uint32_t bits = e < EXPERTS ? __float_as_uint(__ldcg(scores + e)) : 0xffffffffu;
        key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u; /* orders as the floats do */
    }
    float top = 0, sum = 0, mine = 0;
    int own = (int)blockIdx.x / EXPERT_JOBS;
#pragma unroll 1
    for (int k = 0; k < TOP_K; k++) {
        uint32_t best = 0;
        int where = 0x7fffffff;
#pragma unroll
        for (int i = N - 1; i >= 0; i--) {
            if (key[i] >= best) best = key[i], where = lane + 32 * i;
        }
        uint32_t most = __reduce_max_sync(~0u, best);
        int winner = __reduce_min_sync(~0u, best == most ? where : 0x7fffffff);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (lane + 32 * i == winner) key[i] = 0;
        }
        float score = __uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most);
        if (k == 0) top = score;
        float weight = expf(score - top);
        sum += weight;
        if (k == own) mine = weight;
        if (lane == 0) s.chosen[k] = winner;
    }
    if (lane == 0) s.route_weight = mine / sum;
    __syncwarp();
}

__device__ __forceinline__ void produce_project(Producer &p, const uint8_t *tiles, Share share,
                                                int from, int to) {
    const uint8_t *at = tiles + (size_t)share.first * SLICES * TILE_WIDE_BYTES;
    unsigned bytes = (unsigned)share.n * SLICES * TILE_WIDE_BYTES;
    unsigned begin = (unsigned)from * SLOT, end = min(bytes, (unsigned)to * SLOT);
    if (begin < end) p.stream(at + begin, end - begin, SLOT);
}

__device__ __forceinline__ void produce_mixer(Producer &p, const decode_layer &w, int layer,
                                              const cuda_slot &slot, const Context &c) {
    int kind = is_attention(layer) ? layer / SHAPE_ATTENTION_EVERY
                                   : layer - layer / SHAPE_ATTENTION_EVERY;
    if (is_attention(layer)) {
        size_t head = ((size_t)kind * KV_HEADS + c.kv) * (size_t)slot.capacity;
        const uint16_t *keys = slot.keys + (head + c.first) * HEAD;
        const uint16_t *values = slot.values + (head + c.first) * HEAD;
        for (int i = 0; i < c.mine; i += KV_TOKENS) {
            /* This token's own row comes from its projection, not from the cache. */
            int old = min(KV_TOKENS, min(c.mine, c.n - 1 - c.first) - i);
            unsigned bytes = (unsigned)max(old, 0) * HEAD * 2;
            unsigned char *to = p.begin(2 * bytes);
            if (bytes) {
                p.copy(to, keys + (size_t)i * HEAD, bytes);
                p.copy(to + KV_CHUNK, values + (size_t)i * HEAD, bytes);
            }
            p.next++;
        }
    } else if (has_out(layer)) {
        const float *state = slot.state_in +
                             ((size_t)kind * VHEADS + blockIdx.x / OUT_PARTS) * (128 * 128);
        p.stream(reinterpret_cast<const uint8_t *>(state), STATE_SLOTS * STATE_CHUNK, STATE_CHUNK);
    }
    if (has_out(layer)) {
        p.stream(w.out + (size_t)blockIdx.x * (OUT_TILES * TILE_WIDE_BYTES),
                 OUT_TILES * TILE_WIDE_BYTES, SLOT);
    }
}

__device__ __forceinline__ void produce_route(Producer &p, const decode_layer &w) {
    int b = blockIdx.x;
    if (b < SHARED_TILES) {
        p.stream(w.shared_in + (size_t)b * (SLICES * TILE_WIDE_BYTES), SLICES * TILE_WIDE_BYTES,
                 SLOT);
    } else if (b < SHARED_TILES + ROUTER_TILES) {
        p.stream(w.router + (size_t)(b - SHARED_TILES) * (SLICES * TILE_BYTE_BYTES),
                 SLICES * TILE_BYTE_BYTES, BYTE_PER_SLOT * TILE_BYTE_BYTES);
    }
}

__device__ __forceinline__ void produce_experts(Producer &p, const decode_layer &w, int expert) {
    constexpr size_t DOWN_SLICE = (size_t)DOWN_TILES * TILE_DOWN_BYTES;
    constexpr unsigned DOWN_CHUNK = DOWN_PER_SLOT * TILE_DOWN_BYTES;
    if (expert >= 0) {
        constexpr unsigned in = 2 * SLICES * TILE_WIDE_BYTES;
        size_t job = (size_t)expert * EXPERT_JOBS + blockIdx.x % EXPERT_JOBS;
        p.stream(w.gate_up + job * in, in, SLOT);
        p.stream(w.down + job * DOWN_SLICE, DOWN_SLICE, DOWN_CHUNK);
        return;
    }
    Share slices = p.s.shared_slices;
    for (int i = 0; i < slices.n; i++) {
        p.stream(w.shared_out + (size_t)(slices.first + i) * DOWN_SLICE, DOWN_SLICE, DOWN_CHUNK);
    }
}

/* The whole warp; lane 0 issues. */
__device__ __forceinline__ void produce(const decode_args &a, Shared &s) {
    bool leads = (threadIdx.x & 31) == 0;
    Producer p = {s, 0};
    unsigned target = a.barrier;
    bool routed = (int)blockIdx.x < ROUTED_JOBS;
    for (int l = 0; l <= a.n_layers; l++) {
        Share share = project_share(s, l, a.n_layers);
        const uint8_t *tiles = l < a.n_layers ? a.layers[l].in : a.lm_head;
        int n = project_chunks(s, l, a.n_layers);
        if (leads) {
            int early = l == 0 ? 0 : early_chunks(s, l, a.n_layers);
            produce_project(p, tiles, share, early, n);
        }
        if (l == a.n_layers) break;
        const decode_layer &w = a.layers[l];
        target += (unsigned)(stages_of(l) - 1) * gridDim.x; /* up to the router's barrier */
        if (leads) {
            produce_mixer(p, w, l, s.slot, s.context);
            produce_route(p, w);
            produce_project(p, l + 1 == a.n_layers ? a.lm_head : a.layers[l + 1].in,
                            project_share(s, l + 1, a.n_layers), 0,
                            early_chunks(s, l + 1, a.n_layers));
        }
        if (routed) {
            if (leads) grid_poll(a.x.counter, target);
            __syncwarp();
            choose(a.x.scores, s);
        }
        if (leads) produce_experts(p, w, routed ? s.chosen[blockIdx.x / EXPERT_JOBS] : -1);
        target += gridDim.x;
    }
}

} /* namespace decode */

#endif
