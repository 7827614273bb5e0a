/* The producer warp: streams everything this block reads from memory in bulk into the ring, ahead
 * of the consumers. Only the routed experts must wait for the mixer: the producer itself reads the
 * scores and chooses the experts. */
#ifndef LILY_CUDA_DECODE_PRODUCER_CUH
#define LILY_CUDA_DECODE_PRODUCER_CUH

#include "decode_plan.cuh"

namespace decode {

/* Chunks on their way at once while barriers are waited for: more would delay the barriers' own
 * traffic. Experts and head are waited for themselves and come as fast as they can. */
constexpr int IN_FLIGHT = 3;

struct Producer {
    Shared &s;
    unsigned phases; /* bit i: parity of the next use of slot i */
    int first, slot; /* of a run of slots up to the last one, used in turn; the next */
    bool eager;      /* no limit */
    unsigned flying; /* the last chunks' slots, 8 bits each: slot + 16 parity; 0xff: none */

    __device__ __forceinline__ void begin_run(int first_slot, int next) {
        first = first_slot, slot = next;
    }
    __device__ __forceinline__ unsigned char *begin(unsigned bytes) {
        unsigned phase = phases >> slot & 1;
        barrier_wait(&s.empty[slot], phase ^ 1);
        unsigned old = flying >> (8 * (IN_FLIGHT - 1)) & 0xff;
        /* A slot that has been used again since has surely been landed in; its parity would lie. */
        if (!eager && old != 0xff && (phases >> (old & 15) & 1) != old >> 4) {
            barrier_wait(&s.full[old & 15], old >> 4);
        }
        flying = flying << 8 | (unsigned)slot | phase << 4;
        phases ^= 1u << slot;
        announce(&s.full[slot], bytes);
        return s.ring + slot * SLOT;
    }
    __device__ __forceinline__ void copy(unsigned char *to, const void *from, unsigned bytes) {
        bulk_copy(to, from, bytes, &s.full[slot]);
    }
    __device__ __forceinline__ void end() { slot = slot + 1 < SLOTS ? slot + 1 : first; }
};
static_assert(IN_FLIGHT <= 4, "fits into a word");

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

/* The eight largest scores, ties to the lower index, and this block's expert among them. The norm's
 * factor is missing in all of them, which does not change their order. They are first compared by
 * their upper 24 bits, with the expert's number below them; where that leaves the eighth and the
 * ninth undecided, by all bits. All lanes take part. Which of the eight is whose does not matter,
 * so their order does not either. Must agree to the id with route_row (routing.cuh) and
 * choose_experts (batch_experts.cuh); its scores are sums to which others are still adding, and the
 * whole grid waits for it. */
__device__ __forceinline__ void choose(const decode_args &a, int layer, Shared &s) {
    constexpr int N = EXPERTS / 32;
    int lane = threadIdx.x & 31;
    asm volatile("" : "+r"(lane)); /* what follows from it is not kept until the next layer */
    const long long *scores = step_sums(a, a.step) + 2 * SUM + layer * EXPERTS;
    const unsigned contributions = score_contributions(is_attention(layer));
    uint32_t whole[N], key[N];
#pragma unroll 1
    for (unsigned spin = 0;; spin++) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float score;
            all &= look_sum(scores + lane + 32 * i, contributions, score);
            whole[i] = __float_as_uint(score);
        }
        if (all) break;
        if (spin == SPIN_LIMIT) __trap();
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = lane + 32 * i;
        uint32_t bits = whole[i];
        whole[i] = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u); /* orders as floats do */
        s.scores[e] = __uint_as_float(bits);
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
    if (lane < TOP_K) {
        s.top[lane] = s.scores[expert];
        if (lane == (int)blockIdx.x / EXPERT_JOBS) s.chosen = expert;
    }
    __syncwarp();
}
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 256, "as many for each lane, a byte for the number");

/* A piece of the stream: n chunks of at most `chunk` bytes, each from one place or, for a context,
 * as many bytes from a second one, or, with a stride, down tiles so far apart. */
struct Piece {
    const uint8_t *from, *second;
    unsigned bytes, chunk;
    int n;
    unsigned stride;
};

__device__ __forceinline__ void issue(Producer &p, const Piece &piece) {
    unsigned at = 0;
#pragma unroll 1
    for (int i = 0; i < piece.n; i++, at += piece.chunk) {
        unsigned bytes = at < piece.bytes ? min(piece.chunk, piece.bytes - at) : 0;
        unsigned char *to = p.begin(piece.second ? 2 * bytes : bytes);
        if (bytes) p.copy(to, piece.from + at, bytes);
        if (bytes && piece.second) p.copy(to + KV_CHUNK, piece.second + at, bytes);
        p.end();
    }
}

/* The same with a stride, by the whole warp: a lane copies a tile. */
__device__ __forceinline__ void issue_tiles(Producer &p, const Piece &piece) {
    const int lane = threadIdx.x & 31;
    const uint8_t *from = piece.from + (unsigned)lane * piece.stride;
#pragma unroll 1
    for (unsigned at = 0; at < piece.bytes;
         at += piece.chunk, from += DOWN_PER_SLOT * piece.stride) {
        unsigned bytes = min(piece.chunk, piece.bytes - at);
        if (lane == 0) p.begin(bytes);
        __syncwarp(); /* lane 0 has waited until the slot was left */
        int slot = __shfl_sync(~0u, p.slot, 0);
        if (lane < (int)(bytes / TILE_DOWN_BYTES)) {
            bulk_copy(p.s.ring + slot * SLOT + lane * TILE_DOWN_BYTES, from, TILE_DOWN_BYTES,
                      &p.s.full[slot]);
        }
        if (lane == 0) p.end();
    }
}

/* The parts of a layer's stream, in order. */
enum Part { REST, ROUTER, MIXER, SCORES, OUT, SHARED_IN, NEXT, FIRST_HALF, SECOND_HALF, PARTS };

/* Rows of keys and values before this token, whose own row comes from its projection. */
__device__ __forceinline__ Piece context_piece(const Shared &s, int layer) {
    const Context &c = s.context;
    size_t row = ((size_t)kind_index(layer) * KV_HEADS + c.kv) * (size_t)s.slot.capacity + c.first;
    unsigned old = (unsigned)min(c.mine, c.n - 1 - c.first);
    return {reinterpret_cast<const uint8_t *>(s.slot.keys + row * HEAD),
            reinterpret_cast<const uint8_t *>(s.slot.values + row * HEAD),
            old * HEAD * 2,
            KV_CHUNK,
            chunks(c.mine, KV_TOKENS),
            0};
}

/* 0 DeltaNet, 1 attention, 2 head. */
__device__ __forceinline__ int kind_of(const decode_args &a, int layer) {
    return layer == a.n_layers ? 2 : is_attention(layer);
}

__device__ __forceinline__ Piece piece_of(const decode_args &a, const Shared &s, Part part,
                                          int layer, bool routed, int slice) {
    constexpr unsigned DOWN_SLICE = DOWN_TILES * TILE_DOWN_BYTES;
    constexpr unsigned IN = 2 * SLICES * TILE_WIDE_BYTES, BYTE_ROW = SLICES * TILE_BYTE_BYTES;
    const decode_layer &w = s.layers[1][0];
    int b = blockIdx.x;
    asm volatile("" : "+r"(b)); /* see choose */
    const bool attention = is_attention(layer);
    Piece p = {nullptr, nullptr, 0, SLOT, -1, 0};
    if (part == REST || part == NEXT) {
        int of = part == REST ? layer : layer + 1, kind = kind_of(a, of);
        Share share = s.project[kind];
        unsigned bytes = (unsigned)share.n * SLICES * TILE_WIDE_BYTES;
        unsigned split = (unsigned)early_chunks() * SLOT;
        p.from = (kind == 2      ? a.lm_head
                  : part == REST ? w.in
                                 : a.layers[of].in) +
                 (size_t)share.first * SLICES * TILE_WIDE_BYTES;
        if (part == NEXT) {
            p.bytes = min(bytes, split);
        } else if (bytes > split) {
            p.from += split;
            p.bytes = bytes - split;
        }
    } else if (part == ROUTER) {
        p.from = w.router + (size_t)b * (ROUTER_JOB * TILE_BYTE_BYTES);
        p.bytes = has_router() ? ROUTER_JOB * TILE_BYTE_BYTES : 0;
    } else if (part == MIXER) {
        if (attention) return context_piece(s, layer);
        p.chunk = STATE_CHUNK;
        p.from = reinterpret_cast<const uint8_t *>(
            s.slot.state_in + ((size_t)kind_index(layer) * VHEADS + b / OUT_PARTS) * (128 * 128));
        p.bytes = has_out(false) ? STATE_SLOTS * STATE_CHUNK : 0;
    } else if (part == SCORES) {
        p.from = w.out_scores + (size_t)b * SCORE_BYTES;
        p.bytes = has_out(attention) ? SCORE_BYTES : 0;
    } else if (part == OUT) {
        p.from = w.out + (size_t)b * (OUT_TILES * TILE_WIDE_BYTES);
        p.bytes = has_out(attention) ? OUT_TILES * TILE_WIDE_BYTES : 0;
    } else if (part == SHARED_IN) { /* and the gate, behind the router's rows */
        bool gate = b == SHARED_TILES;
        unsigned each = gate ? BYTE_ROW : SLICES * TILE_WIDE_BYTES;
        p.from = gate ? w.router + (size_t)ROUTER_TILES * each : w.shared_in + (size_t)b * each;
        p.bytes = b <= SHARED_TILES ? each : 0;
        p.chunk = gate ? BYTE_PER_SLOT * TILE_BYTE_BYTES : SLOT;
    } else {
        size_t job = (size_t)s.chosen * EXPERT_JOBS + b % EXPERT_JOBS;
        Share slices = s.shared_slices;
        if (part == FIRST_HALF) {
            p.from = w.gate_up + job * IN;
            p.bytes = routed ? IN : 0;
        } else {
            if (routed) { /* of every slice the block's 128 rows */
                p.from = w.down + (job - (size_t)(b % EXPERT_JOBS)) * DOWN_SLICE +
                         b % EXPERT_JOBS * TILE_DOWN_BYTES;
                p.stride = DOWN_SLICE;
            } else {
                p.from = w.shared_out + (size_t)(slices.first + slice) * DOWN_SLICE;
            }
            p.bytes = routed || slice < slices.n ? DOWN_SLICE : 0;
            p.chunk = DOWN_PER_SLOT * TILE_DOWN_BYTES;
        }
    }
    if (p.n < 0) p.n = (int)((p.bytes + p.chunk - 1) / p.chunk);
    return p;
}

/* The whole warp; lane 0 issues. One loop over all parts of all layers, so that the few
 * instructions of a piece stay at hand. */
__device__ __forceinline__ void produce(const decode_args &a, Shared &all) {
    /* The same address as a number of its own, which adding nothing makes it: what the consumers
     * have no register for would lie in local memory for the producer too, and a load from there
     * takes as long as one from the cache beyond: the first level is shared memory here. */
    uint32_t at = shared_address(&all) + (blockDim.x - DECODE_THREADS);
    Shared &s = *static_cast<Shared *>(__cvta_shared_to_generic(at));
    int lane = threadIdx.x & 31;
    bool leads = lane == 0, routed = (int)blockIdx.x < ROUTED_JOBS;
    constexpr int WORDS = sizeof(decode_layer) / 4;
    Producer p = {s, 0, 0, 0, false, 0xffffffffu};
    int layer = -1, part = NEXT, slice = 0;
#ifdef DECODE_PROFILE
    /* The experts are a layer's last stage. */
    auto mark = [&](int m) {
        int stage = 4 * layer + layer / SHAPE_ATTENTION_EVERY + (is_attention(layer) ? 4 : 3);
        int at = (stage * (int)gridDim.x + (int)blockIdx.x) * DECODE_MARKS + m;
        if (a.clocks && leads && layer >= 0) a.clocks[at] = clock64();
    };
#else
    auto mark = [](int) {};
#endif
#pragma unroll 1
    for (;;) {
        asm volatile("" : "+r"(part));
        if (part == REST) {
            p.begin_run(0, min(early_chunks(), s.project_chunks[kind_of(a, layer)]));
            if (layer < a.n_layers && lane < WORDS) {
                reinterpret_cast<uint32_t *>(&s.layers[1][0])[lane] =
                    __ldg(reinterpret_cast<const uint32_t *>(a.layers + layer) + lane);
            }
            __syncwarp();
        } else if (part == NEXT) {
            p.begin_run(0, 0);
        } else if (part == MIXER && !is_attention(layer)) {
            p.begin_run(0, STATE_SLOT);
        } else if (part == SCORES) {
            p.begin_run(0, OUT_SLOT);
        } else if (part == SHARED_IN) {
            p.begin_run(0, SHARED_SLOT);
        } else if (part == FIRST_HALF) {
            p.begin_run(EARLY, EARLY);
            slice = 0;
            mark(8);
            if (routed) { /* looks before the block's own scores are added would only disturb */
                if (leads) barrier_wait(&s.empty[OUT_SLOT], ~p.phases >> OUT_SLOT & 1);
                __syncwarp();
                choose(a, layer, s);
            }
            mark(10);
        }
        p.eager = part == FIRST_HALF || part == SECOND_HALF || layer == a.n_layers;
        Piece piece = piece_of(a, s, (Part)part, layer, routed, slice);
        if (piece.stride) {
            issue_tiles(p, piece);
        } else if (leads) {
            issue(p, piece);
        }
        if (part == SECOND_HALF) mark(11);
        __syncwarp();
        if (part == REST && layer == a.n_layers) break;
        if (part == SECOND_HALF && !routed && ++slice < s.shared_slices.n) continue;
        part = layer < 0 || part == SECOND_HALF ? REST : part + 1;
        if (part == REST) layer++;
    }
}

} /* namespace decode */

#endif
