/* The second half of the experts: a block multiplies 32 inner activations with their columns of
 * down, and the results join the residual stream. */
#ifndef LILY_CUDA_DECODE_MOE_CUH
#define LILY_CUDA_DECODE_MOE_CUH

#include "decode_worker.cuh"

namespace decode {

/* n slices of inner[32] each, all in this block; the sums over them are added once. */
__device__ __forceinline__ void multiply_down(Worker &w, const float *inner, int n) {
    float y[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        if (i) sync_consumers(); /* see Worker::leave_from */
        if (w.warp < DOWN_TILES) {
            Narrow x;
            make_narrow(inner[i * INNER + w.lane], reinterpret_cast<unsigned char *>(&w.scratch()),
                        x);
            const unsigned char *tile =
                w.chunk(w.warp / DOWN_PER_SLOT) + w.warp % DOWN_PER_SLOT * TILE_DOWN_BYTES;
            if (i == 0) w.mark(5);
#pragma unroll
            for (int set = 0; set < 4; set++) y[set] += down_set(tile, set, x);
        }
        w.leave(DOWN_CHUNKS);
    }
    if (w.warp < DOWN_TILES) { /* every block, for the count */
#pragma unroll
        for (int set = 0; set < 4; set++) {
            int row = w.warp * 128 + set * 32 + w.lane;
            residual_add(w.sum(true) + residual_at(row, blockIdx.x % COPIES), y[set],
                         w.a.x.counter + 2);
        }
    }
}

} /* namespace decode */

#endif
