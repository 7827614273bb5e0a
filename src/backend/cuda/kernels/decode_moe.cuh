/* Fourth stage: both halves of the experts. A block has 32 inner units of one routed expert: their
 * gate and up rows, then their columns of down, whose results join the residual stream. Blocks
 * beyond those multiply the shared expert's second half. */
#ifndef LILY_CUDA_DECODE_MOE_CUH
#define LILY_CUDA_DECODE_MOE_CUH

#include "decode_project.cuh"

namespace decode {

__device__ __forceinline__ const unsigned char *down_tile(const Worker &w, unsigned chunk) {
    return chunk_wait(w.s, chunk + (unsigned)(w.warp / DOWN_PER_SLOT)) +
           w.warp % DOWN_PER_SLOT * TILE_DOWN_BYTES;
}

__device__ __forceinline__ void add_down(const Worker &w, const float (&y)[4]) {
#pragma unroll
    for (int set = 0; set < 4; set++) {
        residual_add(w.a.x.h + w.warp * 128 + set * 32 + w.lane, y[set], w.a.x.counter + 2);
    }
}

__device__ __forceinline__ void routed_expert(Worker &w, const Stream &st, const Slice &x) {
    float *parts = w.work(), *inner = parts + 2 * SLICES * 32; /* [INNER] */
    for (int tile = w.warp; tile - w.warp < 2 * SLICES; tile += WARPS) {
        if (tile < 2 * SLICES) {
            const unsigned char *chunk = chunk_wait(w.s, st.expert + (unsigned)(tile / SLOT_TILES));
            if (tile == 0) w.mark(1);
            if (tile == 16) w.mark(2);
            parts[tile * 32 + w.lane] = wide_tile(chunk + tile % SLOT_TILES * TILE_WIDE_BYTES, x);
        }
    }
    for (int i = 0; i < EXPERT_IN_CHUNKS; i++) chunk_leave(w.s, st.expert + (unsigned)i);
    sync_consumers();
    w.mark(3);
    if (w.tid < 2 * INNER) {
        float y = partial_sum(parts, w.tid) * rms_factor(w);
        float up = __shfl_down_sync(~0u, y, 1);
        if (w.tid % 2 == 0) inner[w.tid / 2] = silu(y) * up * w.s.route_weight;
    }
    sync_consumers();
    w.mark(4);
    if (w.warp < DOWN_TILES) {
        Narrow n;
        make_narrow(inner[w.lane], reinterpret_cast<unsigned char *>(w.scratch), n);
        const unsigned char *tile = down_tile(w, st.expert + EXPERT_IN_CHUNKS);
        w.mark(5);
        float y[4];
#pragma unroll
        for (int set = 0; set < 4; set++) y[set] = down_set(tile, set, n);
        add_down(w, y);
    }
    for (int i = 0; i < DOWN_CHUNKS; i++) {
        chunk_leave(w.s, st.expert + (unsigned)(EXPERT_IN_CHUNKS + i));
    }
}

__device__ __forceinline__ void shared_expert(Worker &w, const Stream &st, Share slices) {
    float gate = sigmoid(__ldcg(w.a.x.scores + EXPERTS));
    float y[4] = {0, 0, 0, 0};
    for (int i = 0; i < slices.n; i++) {
        unsigned chunk = st.expert + (unsigned)(i * DOWN_CHUNKS);
        if (w.warp < DOWN_TILES) {
            Narrow n;
            make_narrow(__ldcg(w.a.x.shared + (slices.first + i) * INNER + w.lane) * gate,
                        reinterpret_cast<unsigned char *>(w.scratch), n);
            const unsigned char *tile = down_tile(w, chunk);
#pragma unroll
            for (int set = 0; set < 4; set++) y[set] += down_set(tile, set, n);
        }
        for (int j = 0; j < DOWN_CHUNKS; j++) chunk_leave(w.s, chunk + (unsigned)j);
        sync_consumers(); /* see chunk_leave */
    }
    if (w.warp < DOWN_TILES) add_down(w, y);
}

__device__ __forceinline__ void stage_experts(Worker &w, const Stream &st, const Slice &x) {
    if ((int)blockIdx.x < ROUTED_JOBS) {
        /* The first chunk of a routed expert arrives after the router's barrier, which the producer
         * has passed. */
        w.mark(0);
        routed_expert(w, st, x);
    } else {
        Share slices = w.s.shared_slices;
        w.wait();
        if (slices.n) shared_expert(w, st, slices);
    }
    w.arrive();
}

} /* namespace decode */

#endif
