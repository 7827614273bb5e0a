/* Mathematics: penalties, top_k, softmax at a temperature, top_p, min_p, one draw; or the largest.
 * Layout: logits float32 [slots][V], counts int32 [V] a session; pool [slots][64 slices][64].
 * Threads: 256 a block, a block a slice of the vocabulary and slot; then a block a slot.
 * Fused: penalties with the selection, whether logits are finite too. Agrees with ref/sample.c.
 * Bytes: 8 V a slot that samples, 2 MB; two launches are its floor, no fraction was measured.
 *
 * Sampling on the device (ref/sample.c is the readable form): penalties, temperature, top_k, top_p,
 * min_p, one draw. Selection is exact, ties go to the lower id. Three kernels a step: count the
 * input tokens, the best candidates of each slice of the vocabulary, the pick among those. */
#include <float.h>

#include "common.cuh"

enum {
    SAMPLE_THREADS = 256,
    SLICES = 64, /* of the vocabulary, a block each */
    MOST = 64,   /* BACKEND_TOP_K */
    POOL = SLICES * MOST
};

struct candidate {
    uint32_t key; /* rises with the logit */
    int32_t id;
};

/* counts[ids[i]] = 1: seen in the prompt. */
KERNEL mark_prompt(const int32_t *ids, int n, int32_t *counts) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) counts[ids[i]] = 1;
}

/* The input token of every slot that samples counts as output. One thread a slot. */
KERNEL count_inputs(const cuda_slot *slots, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !slots[i].sample) return;
    int token = slots[i].input < 0 ? *slots[i].token : slots[i].input;
    int32_t *count = &slots[i].counts[token];
    *count += *count ? 1 : 2;
}

__device__ __forceinline__ float penalised(const cuda_slot &s, float x, int32_t count) {
    if (count == 0) return x;
    if (s.repetition != 1) {
        x = x > 0 ? x / s.repetition : x * s.repetition;
        x = fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
    }
    x -= s.frequency * (float)(count - 1);
    return count > 1 ? x - s.presence : x;
}

/* Floats in the order of unsigned integers; both zeros are one value, as in comparisons. */
__device__ __forceinline__ uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x == 0 ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* The k largest of item(0 .. n), in order of their number, into out[k]; fewer when n < k. Radix
 * selection, eight bits at a time, of the key of the k-th; then all above it and the first equal
 * ones. item gives candidates in ascending order of id. All threads of the block call it; returns
 * how many there are. */
template <class Item>
__device__ int select_largest(const Item &item, int n, int k, candidate *out) {
    __shared__ int histogram[256], chosen, left;
    __shared__ int warp_above[SAMPLE_THREADS / 32], warp_equal[SAMPLE_THREADS / 32];
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    if (k > n) k = n;
    uint32_t prefix = 0;
    int need = k; /* how many with the prefix found so far */
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[tid] = 0;
        __syncthreads();
        for (int i = tid; i < n; i += SAMPLE_THREADS) {
            uint32_t key = item(i).key;
            if (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8)) {
                atomicAdd(&histogram[key >> shift & 255], 1);
            }
        }
        __syncthreads();
        if (tid == 0) {
            int bin = 255, rest = need;
            for (; bin > 0 && histogram[bin] < rest; bin--) rest -= histogram[bin];
            chosen = bin;
            left = rest;
        }
        __syncthreads();
        prefix |= (uint32_t)chosen << shift;
        need = left;
        __syncthreads();
    }
    /* In order: a pass of SAMPLE_THREADS items at a time, ranks by ballots. */
    int taken = 0, equal_taken = 0;
    for (int from = 0; from < n; from += SAMPLE_THREADS) {
        candidate c = {0, 0};
        bool there = from + tid < n;
        if (there) c = item(from + tid);
        bool equal = there && c.key == prefix, above = there && c.key > prefix;
        unsigned equals = __ballot_sync(ALL_LANES, equal);
        if (lane == 0) warp_equal[warp] = __popc(equals);
        __syncthreads();
        int rank = equal_taken + __popc(equals & ((1u << lane) - 1)), all_equal = 0;
        for (int w = 0; w < SAMPLE_THREADS / 32; w++) {
            if (w < warp) rank += warp_equal[w];
            all_equal += warp_equal[w];
        }
        bool in = above || (equal && rank < need);
        unsigned ins = __ballot_sync(ALL_LANES, in);
        if (lane == 0) warp_above[warp] = __popc(ins);
        __syncthreads();
        int at = taken + __popc(ins & ((1u << lane) - 1)), all_in = 0;
        for (int w = 0; w < SAMPLE_THREADS / 32; w++) {
            if (w < warp) at += warp_above[w];
            all_in += warp_above[w];
        }
        if (in) out[at] = c;
        taken += all_in;
        equal_taken += all_equal;
        __syncthreads();
    }
    return taken;
}

/* pool[slot][slice][MOST]: the largest of each slice after the penalties, fewer padded with id -1;
 * finite[slot] = 0 when any of its logits is not. Only ids below `used` are sampled, and of those,
 * unless it is NULL, only those with bit id % 32 of sampled[id / 32]. Grid: SLICES in x, slots in
 * y. */
KERNEL __launch_bounds__(SAMPLE_THREADS)
    candidates(const float *logits, const cuda_slot *slots, int used, const uint32_t *sampled,
               candidate *pool, int32_t *finite) {
    __shared__ candidate best[MOST];
    const cuda_slot &s = slots[blockIdx.y];
    if (!s.sample && !s.want_logits) return;
    const float *row = logits + (int64_t)blockIdx.y * VOCAB;
    int each = (VOCAB + SLICES - 1) / SLICES, from = blockIdx.x * each;
    bool bad = false;
    for (int i = from + threadIdx.x; i < min(from + each, (int)VOCAB); i += SAMPLE_THREADS) {
        bad |= !isfinite(row[i]);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0) finite[blockIdx.y] = 0;
    if (!s.sample) return;
    int n = max(0, min(from + each, used) - from);
    int k = s.temperature == 0 ? 1 : s.top_k;
    auto item = [&](int i) {
        int id = from + i;
        candidate c = {0, -1};
        if (!sampled || sampled[id / 32] >> (id % 32) & 1) {
            c.key = key_of(penalised(s, row[id], s.counts[id]));
            c.id = id;
        }
        return c;
    };
    int found = select_largest(item, n, k, best);
    candidate *to = pool + ((int64_t)blockIdx.y * SLICES + blockIdx.x) * MOST;
    __syncthreads();
    if (threadIdx.x < MOST) {
        candidate none = {0, -1};
        to[threadIdx.x] = (int)threadIdx.x < found ? best[threadIdx.x] : none;
    }
}

/* SplitMix64's output function (base/random.h). */
__device__ __forceinline__ uint64_t random_at(uint64_t stream, uint64_t n) {
    uint64_t z = stream + (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* One thread: the draw among n candidates by ascending id; those without one are padding. */
__device__ int draw(const cuda_slot &s, const candidate *c, int n) {
    float weight[MOST], best = -INFINITY, all = 0, kept_sum = 0;
    uint64_t kept = 0;
    for (int i = 0; i < n; i++) best = fmaxf(best, c[i].id < 0 ? best : value_of(c[i].key));
    for (int i = 0; i < n; i++) {
        bool real = c[i].id >= 0;
        weight[i] = real ? expf((value_of(c[i].key) - best) / s.temperature) : 0;
        all += weight[i];
        if (real) kept |= (uint64_t)1 << i;
    }
    if (s.top_p < 1) { /* the smallest set whose share reaches top_p, the heaviest first */
        float want = s.top_p * all, taken = 0;
        kept = 0;
        do {
            int heaviest = -1;
            for (int i = 0; i < n; i++) {
                bool left = !(kept >> i & 1);
                if (left && (heaviest < 0 || weight[i] > weight[heaviest])) heaviest = i;
            }
            if (heaviest < 0) break;
            kept |= (uint64_t)1 << heaviest;
            taken += weight[heaviest];
        } while (taken < want);
    }
    for (int i = 0; i < n; i++) {
        if (!(weight[i] >= s.min_p)) kept &= ~((uint64_t)1 << i);
        if (kept >> i & 1) kept_sum += weight[i];
    }
    float left = (float)(random_at(s.stream, s.pick) >> 40) * 0x1p-24f * kept_sum;
    int last = 0;
    for (int i = 0; i < n; i++) {
        if (!(kept >> i & 1) || !(weight[i] > 0)) continue;
        last = i;
        left -= weight[i];
        if (left < 0) break;
    }
    return c[last].id;
}

/* results[slot], and the slot's token where it samples. A spoilt row samples token 0. Grid: slots.
 */
KERNEL __launch_bounds__(SAMPLE_THREADS) pick(const candidate *pool, const cuda_slot *slots,
                                              const int32_t *finite, cuda_result *results) {
    __shared__ candidate best[MOST];
    const cuda_slot &s = slots[blockIdx.x];
    const candidate *from = pool + (int64_t)blockIdx.x * POOL;
    int token = -1, good = finite[blockIdx.x];
    if (s.sample) {
        int k = s.temperature == 0 ? 1 : s.top_k;
        /* Slices come in order of ids, and within a slice so do its candidates; padding has the
         * least key, which no number has, and is chosen only where there are fewer than k. */
        int found = select_largest([&](int i) { return from[i]; }, POOL, k, best);
        __syncthreads();
        if (threadIdx.x == 0) {
            token = !good ? 0 : s.temperature == 0 ? best[0].id : draw(s, best, found);
            if (token < 0) token = 0; /* none may be sampled */
            *s.token = token;
        }
    }
    if (threadIdx.x == 0) {
        results[blockIdx.x].token = token;
        results[blockIdx.x].finite = good;
    }
}
