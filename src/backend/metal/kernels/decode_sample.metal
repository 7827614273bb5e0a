/* Mathematics: token of logits[V]: penalties, temperature, top_k, top_p, min_p, a draw; or argmax.
 * Layout: logits float32 [V], best uint32 [V/128] by ordered_key; token one uint32, result two.
 * Threads: one threadgroup; k groups of 128 by their best, then k logits; one simdgroup draws.
 * Fused: the whole pipeline. Agrees with ref/sample.c to the bit: engine/sampler.c in float32.
 * Bytes: V/32 of best, up to 64 * 128 logits, counts, mask; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_pick.h"

/* The k groups with the largest best hold the k largest logits, ties to lower ids included. Groups
 * and logits are chosen by a threshold made bit by bit; candidates stay in the order of ids. */

enum {
    SAMPLE_THREADS = DECODE_SAMPLE_THREADS,
    SAMPLE_SIMDS = SAMPLE_THREADS / 32,
    SAMPLE_TALLIES = 2 * SAMPLE_SIMDS,
    SAMPLE_MOST = 64, /* candidates */
    SAMPLE_GROUPS = DECODE_CEIL(SHAPE_VOCAB, DECODE_HEAD_ROWS),
    SAMPLE_PER_THREAD = DECODE_CEIL(SAMPLE_GROUPS, SAMPLE_THREADS),
    SAMPLE_SPAN = SAMPLE_MOST * DECODE_HEAD_ROWS / SAMPLE_THREADS /* logits of a thread */
};
static_assert(SHAPE_VOCAB % SAMPLE_SPAN == 0, "spans are whole");

struct sample_threads {
    threadgroup uint *tally; /* [2][SAMPLE_SIMDS] */
    uint turn;               /* which half of tally is free: the other may still be read */
    uint thread_index;
    uint lane;
    uint simdgroup;
};

/* One number of each simdgroup to all threads: [SAMPLE_SIMDS], good until the next call but one. */
inline threadgroup const uint *sample_tell(thread sample_threads &t, bool teller, uint value) {
    threadgroup uint *tally = t.tally + t.turn * SAMPLE_SIMDS;
    if (teller) tally[t.simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* TOLD */
    t.turn = 1 - t.turn;
    return tally;
}
/* Over all threads; every thread gets the result. */
inline uint sample_sum(thread sample_threads &t, uint value) {
    threadgroup const uint *tally = sample_tell(t, t.lane == 0, simd_sum(value));
    uint total = 0;
    for (uint i = 0; i < SAMPLE_SIMDS; i++) total += tally[i];
    return total;
}
inline uint sample_max(thread sample_threads &t, uint value) {
    threadgroup const uint *tally = sample_tell(t, t.lane == 0, simd_max(value));
    uint largest = 0;
    for (uint i = 0; i < SAMPLE_SIMDS; i++) largest = max(largest, tally[i]);
    return largest;
}
/* Sum over the threads before this one. */
inline uint sample_before(thread sample_threads &t, uint value) {
    uint total = simd_prefix_exclusive_sum(value);
    threadgroup const uint *tally = sample_tell(t, t.lane == 31, total + value);
    for (uint i = 0; i < t.simdgroup; i++) total += tally[i];
    return total;
}

template <int N> inline uint sample_above(thread const uint *keys, uint limit) {
    uint n = 0;
    UNROLL
    for (int i = 0; i < N; i++) n += keys[i] > limit ? 1 : 0;
    return n;
}

/* Which of all threads' keys, N each in ascending order of ids, are among the k largest, ties to
 * the lower id; keys of 0 are none. Returns a bit for each of this thread's, and the number of
 * chosen keys before them in `first`. There are at least k keys. */
template <int N>
inline uint sample_choose(thread sample_threads &t, thread const uint *keys, uint k,
                          thread uint &first) {
    /* The k-th largest: the largest number that at least k keys reach. */
    uint limit = 0;
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1) {
        const uint reached = sample_sum(t, sample_above<N>(keys, (limit | bit) - 1));
        if (reached >= k) limit |= bit;
        if (reached == k) break; /* these are they */
    }
    uint equal = 0;
    UNROLL
    for (int i = 0; i < N; i++) equal += keys[i] == limit ? 1 : 0;
    const uint above = sample_above<N>(keys, limit);
    const uint ties = k - sample_sum(t, above); /* so many equal ones are in, the first ones */
    const uint before = sample_before(t, above << 16 | equal);
    uint tie = before & 0xffffu;
    first = (before >> 16) + min(tie, ties);
    uint bits = 0;
    UNROLL
    for (int i = 0; i < N; i++) {
        const bool is_tie = keys[i] == limit;
        if (keys[i] > limit || (is_tie && tie < ties)) bits |= 1u << i;
        tie += is_tie ? 1 : 0;
    }
    return bits;
}

/* The top 24 bits of the pick-th number of splitmix64's stream, in [0, 1). */
inline float sample_uniform(constant decode_sampling_args &args) {
    const ulong stream = (ulong)args.stream_high << 32 | args.stream_low;
    const ulong pick = (ulong)args.pick_high << 32 | args.pick_low;
    ulong z = stream + (pick + 1) * 0x9e3779b97f4a7c15ul;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ul;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebul;
    z = z ^ (z >> 31);
    return (float)(uint)(z >> 40) * (1.0f / 16777216);
}

/* How many of n candidates the fewest heaviest are whose sum reaches top_p of all, ties to the
 * lower id. weight[n] by ascending id; rank[s] of the lane's candidates s * 32 + lane; sorted[n] is
 * filled. */
inline uint sample_top_p(threadgroup const float *weight, threadgroup float *sorted, uint n,
                         float top_p, uint lane, thread uint *rank) {
    UNROLL
    for (uint s = 0; s < 2; s++) {
        const uint i = s * 32 + lane;
        rank[s] = 0;
        if (i >= n) continue;
        const float w = weight[i];
        for (uint j = 0; j < n; j++) {
            rank[s] += weight[j] > w || (weight[j] == w && j < i) ? 1 : 0;
        }
        sorted[rank[s]] = w;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); /* SORTED */
    float total = 0.0f;
    for (uint i = 0; i < n; i++) total += weight[i];
    float taken = 0.0f;
    for (uint i = 0; i < n; i++) {
        taken += sorted[i];
        if (!(taken < top_p * total)) return i + 1;
    }
    return n;
}

/* One of n candidates with logits value[] in ascending order of ids, by one simdgroup: its place.
 * value[] become weights, 0 for what the filters drop. */
inline uint sample_draw(threadgroup float *value, threadgroup float *sorted, uint n,
                        constant decode_sampling_args &args, uint lane) {
    float best = -INFINITY;
    for (uint i = 0; i < n; i++) best = max(best, value[i]);
    float w[2];
    UNROLL
    for (uint s = 0; s < 2; s++) {
        const uint i = s * 32 + lane;
        w[s] = i < n ? precise::exp((value[i] - best) / args.temperature) : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); /* BEST */
    UNROLL
    for (uint s = 0; s < 2; s++) {
        if (s * 32 + lane < n) value[s * 32 + lane] = w[s];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); /* WEIGHTS */
    if (args.top_p < 1.0f) {
        uint rank[2];
        const uint kept = sample_top_p(value, sorted, n, args.top_p, lane, rank);
        UNROLL
        for (uint s = 0; s < 2; s++) w[s] = rank[s] < kept ? w[s] : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); /* TOP_P */
    UNROLL
    for (uint s = 0; s < 2; s++) {
        if (w[s] < args.min_p) w[s] = 0.0f;
        if (s * 32 + lane < n) value[s * 32 + lane] = w[s];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); /* MIN_P */
    float total = 0.0f;
    for (uint i = 0; i < n; i++) total += value[i];
    float left = sample_uniform(args) * total;
    uint last = 0; /* the last candidate with any weight takes what rounding leaves over */
    for (uint i = 0; i < n; i++) {
        if (!(value[i] > 0.0f)) continue;
        last = i;
        left -= value[i];
        if (left < 0.0f) break;
    }
    return last;
}

KERNEL_THREADS(DECODE_SAMPLE_THREADS)
kernel void decode_sample(constant decode_sampling_args &args [[buffer(DECODE_SAMPLE_ARGS)]],
                          device const float *logits [[buffer(DECODE_SAMPLE_LOGITS)]],
                          device const uint *best [[buffer(DECODE_SAMPLE_BEST)]],
                          device const uint *counts [[buffer(DECODE_SAMPLE_COUNTS)]],
                          device const uint *mask [[buffer(DECODE_SAMPLE_MASK)]],
                          device uint *token [[buffer(DECODE_SAMPLE_TOKEN)]],
                          device uint *result [[buffer(DECODE_SAMPLE_RESULT)]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint tally[SAMPLE_TALLIES];
    threadgroup uint groups[SAMPLE_MOST];
    threadgroup uint ids[SAMPLE_MOST];
    threadgroup float values[SAMPLE_MOST];
    threadgroup float sorted[SAMPLE_MOST];
    sample_threads t;
    t.tally = tally;
    t.turn = 0;
    t.thread_index = thread_index;
    t.lane = lane;
    t.simdgroup = simdgroup;

    uint keys[SAMPLE_PER_THREAD];
    uint most = 0;
    UNROLL
    for (uint i = 0; i < SAMPLE_PER_THREAD; i++) {
        const uint group = thread_index * SAMPLE_PER_THREAD + i;
        keys[i] = group < SAMPLE_GROUPS ? best[group] : 0;
        most = max(most, keys[i]);
    }
    if (sample_max(t, most) == DECODE_NOT_FINITE) {
        if (thread_index == 0) token[0] = result[0] = result[1] = 0;
        return;
    }
    const uint k = args.temperature < 1e-5f ? 1 : clamp(args.top_k, 1u, (uint)SAMPLE_MOST);
    const uint n_groups = min(k, (uint)SAMPLE_GROUPS);
    uint at;
    uint bits = sample_choose<SAMPLE_PER_THREAD>(t, keys, n_groups, at);
    UNROLL
    for (uint i = 0; i < SAMPLE_PER_THREAD; i++) {
        if ((bits >> i & 1) != 0) groups[at++] = thread_index * SAMPLE_PER_THREAD + i;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* GROUPS */

    /* SAMPLE_SPAN neighbouring logits of one group each. */
    const uint place = thread_index * SAMPLE_SPAN;
    const bool used = place / DECODE_HEAD_ROWS < n_groups;
    const uint from =
        used ? groups[place / DECODE_HEAD_ROWS] * DECODE_HEAD_ROWS + place % DECODE_HEAD_ROWS
             : (uint)SHAPE_VOCAB;
    uint span[SAMPLE_SPAN];
    UNROLL
    for (uint i = 0; i < SAMPLE_SPAN; i++) {
        span[i] = 0;
        if (from < SHAPE_VOCAB) {
            span[i] = ordered_key(pick_logit(logits[from + i], from + i, counts, mask, args));
        }
    }
    bits = sample_choose<SAMPLE_SPAN>(t, span, k, at);
    UNROLL
    for (uint i = 0; i < SAMPLE_SPAN; i++) {
        if ((bits >> i & 1) != 0) {
            ids[at] = from + i;
            values[at++] = ordered_value(span[i]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* CANDIDATES */
    if (simdgroup != 0) return;
    const uint chosen = k == 1 ? 0 : sample_draw(values, sorted, k, args, lane);
    if (lane == 0) {
        token[0] = result[0] = ids[chosen];
        result[1] = 1;
    }
}
