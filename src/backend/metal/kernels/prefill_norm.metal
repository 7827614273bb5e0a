/* Mathematics: x[n, H] = bf16(h * r * weight), r[n] = 1 / sqrt(mean(h^2) + eps) of each row.
 * Layout: h float32 [n, H], weight float32 [H] (the factor itself), x bf16 [n, H], r float32 [n].
 * Threads: a threadgroup has a row, a thread eight neighbouring values: 32 bytes in, 16 out.
 * Fused: nothing; prefill_combine_norm has it too. Agrees with ref_rms_norm up to order, rounded.
 * Bytes: 4 H a row read (and 4 H of weight, cached), 2 H written; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "tile_row.h"

KERNEL_THREADS(PREFILL_ROW_THREADS)
kernel void prefill_norm(constant prefill_norm_args &args [[buffer(PREFILL_NORM_ARGS)]],
                         device const float4 *h [[buffer(PREFILL_NORM_H)]],
                         device const float4 *weight [[buffer(PREFILL_NORM_WEIGHT)]],
                         device uint4 *x [[buffer(PREFILL_NORM_X)]],
                         device float *r [[buffer(PREFILL_NORM_R)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup float parts[TILE_ROW_SIMDS];
    if (row >= args.rows) return; /* the whole threadgroup */
    const uint at = 2 * (row * PREFILL_ROW_THREADS + thread_index);
    tile_row_norm(h[at], h[at + 1], weight, x, r, row, parts, thread_index);
}
