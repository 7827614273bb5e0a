// 1 Mathematics: x[n, H] = bf16(h * r * weight), r = 1 / sqrt(mean(h^2) + eps) of each row.
// 2 Layout: h float32 [n, H], weight float32 [H] (the factor itself), x bf16 [n, H], r float32 [n].
// 3 Threads: a threadgroup has a row, a thread eight neighbouring values: 32 bytes in, 16 out.
// 4 Fused: nothing; prefill_combine_norm does the same behind the experts. r is the router's.
//   Agrees with ref_rms_norm (backend/ref/norm.c) up to the order of the sum, then rounded.
// 5 Bytes per row: 4 H read (and 4 H of weight, cached), 2 H written. Not measured on a Mac.
#include <metal_stdlib>
using namespace metal;
#include "tile_row.h"

[[max_total_threads_per_threadgroup(PREFILL_ROW_THREADS)]]
kernel void prefill_norm(device const float4 *h [[buffer(PREFILL_NORM_H)]],
                         device const float4 *weight [[buffer(PREFILL_NORM_WEIGHT)]],
                         device uint4 *x [[buffer(PREFILL_NORM_X)]],
                         device float *r [[buffer(PREFILL_NORM_R)]],
                         constant prefill_norm_args &args [[buffer(PREFILL_NORM_ARGS)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup float parts[TILE_ROW_SIMDS];
    if (row >= args.rows) return; // the whole threadgroup
    uint at = 2 * (row * PREFILL_ROW_THREADS + thread_index);
    tile_row_norm(h[at], h[at + 1], weight, x, r, row, parts, thread_index);
}
