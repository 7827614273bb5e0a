/* The second half of the experts. The blocks of a chosen expert hand each other their inner
 * activations, so that each has whole rows of down and eight additions a row suffice: additions to
 * one address wait for each other. */
#ifndef LILY_CUDA_DECODE_MOE_CUH
#define LILY_CUDA_DECODE_MOE_CUH

#include "decode_worker.cuh"

namespace decode {

constexpr int DOWN_PARTS = 2 * SLICES * 128; /* offset in work, behind what the first half uses */
static_assert(EXPERT_JOBS == DOWN_TILES && EXPERT_JOBS <= WARPS, "a block's share, a warp's slice");
static_assert(DOWN_PARTS + EXPERT_JOBS * 512 <= WORK, "beside");

/* The weight of this block's expert: a softmax over the scores of the chosen ones, which the
 * producer read before the norm's factor was known. */
__device__ __forceinline__ float route_weight(const Worker &w) {
    const float factor = w.norm_factor();
    float most = w.s.top[0], sum = 0;
#pragma unroll
    for (int k = 1; k < TOP_K; k++) most = fmaxf(most, w.s.top[k]);
#pragma unroll
    for (int k = 0; k < TOP_K; k++) sum += __expf((w.s.top[k] - most) * factor);
    return __fdividef(__expf((w.s.top[blockIdx.x / EXPERT_JOBS] - most) * factor), sum);
}

/* Rows [128 j, 128 j + 128) of a chosen expert, j of its blocks. Each of them has made 32 of the
 * inner activations, one for each lane; a warp takes one block's. */
__device__ __forceinline__ void multiply_down(Worker &w, int layer) {
    const int expert = (int)blockIdx.x / EXPERT_JOBS, job = (int)blockIdx.x % EXPERT_JOBS;
    float *parts = reinterpret_cast<float *>(w.s.work + DOWN_PARTS);
    float weight = 0; /* made while the activations are on their way */
    if (w.tid < 128) weight = route_weight(w);
    if (w.warp < EXPERT_JOBS) {
        const decode_word *from = w.a.x.inner + (expert * EXPERT_JOBS + w.warp) * INNER;
        float inner = take_word(from + w.lane, w.tag(layer));
        Narrow x;
        make_narrow(inner, reinterpret_cast<unsigned char *>(&w.scratch()), x);
        const unsigned char *tile =
            w.chunk(w.warp / DOWN_PER_SLOT) + w.warp % DOWN_PER_SLOT * TILE_DOWN_BYTES;
        w.mark(5);
#pragma unroll
        for (int set = 0; set < 4; set++) {
            parts[w.warp * 128 + set * 32 + w.lane] = down_set(tile, set, x);
        }
    }
    w.leave(DOWN_CHUNKS);
    sync_consumers();
    if (w.tid >= 128) return;
    float y[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EXPERT_JOBS; i++) y[i & 3] += parts[i * 128 + w.tid];
    w.add(w.sum(true) + residual_at(job * 128 + w.tid), ((y[0] + y[1]) + (y[2] + y[3])) * weight);
}

/* All rows of some slices of the shared expert, or of none; every such block adds, for the count.
 * The words of a slice are asked for while the one before is multiplied. */
__device__ __forceinline__ void multiply_shared(Worker &w, int layer) {
    const Share share = w.s.shared_slices;
    const decode_word *from = w.a.x.shared + share.first * INNER + w.lane;
    const uint32_t tag = w.tag(layer);
    float y[4] = {0, 0, 0, 0}, gate = 0, inner = 0;
    const bool works = w.warp < DOWN_TILES && share.n > 0;
    if (works) {
        inner = take_word(from, tag);
        gate = sigmoid(take_word(w.a.x.gate, tag));
    }
#pragma unroll 1
    for (int i = 0; i < share.n; i++, from += INNER) {
        if (i) sync_consumers(); /* see Worker::leave_from */
        if (works) {
            const bool more = i + 1 < share.n;
            float next = 0;
            bool arrived = !more || look_word(from + INNER, tag, next);
            Narrow x;
            make_narrow(inner * gate, reinterpret_cast<unsigned char *>(&w.scratch()), x);
            const unsigned char *tile =
                w.chunk(w.warp / DOWN_PER_SLOT) + w.warp % DOWN_PER_SLOT * TILE_DOWN_BYTES;
#pragma unroll
            for (int set = 0; set < 4; set++) y[set] += down_set(tile, set, x);
            inner = __all_sync(~0u, arrived) ? next : take_word(from + INNER, tag);
        }
        w.leave(DOWN_CHUNKS);
    }
    if (w.warp < DOWN_TILES) {
#pragma unroll
        for (int set = 0; set < 4; set++) {
            w.add(w.sum(true) + residual_at(w.warp * 128 + set * 32 + w.lane), y[set]);
        }
    }
}

} /* namespace decode */

#endif
