// x[n, H] = bf16(h * r * weight), r = 1 / sqrt(mean(h^2) + eps) per row, in float32; r[n] is kept for the router.
// h float [n, H], weight float [H] (the factor itself), x bf16 [n, H], r float [n].
// A threadgroup has one row, a thread eight neighbouring values: two 16 byte reads, one 16 byte write.
// Nothing is fused (prefill_combine_norm fuses the same with what comes before). Agrees with ref_rms_norm (backend/ref/norm.c).
// Bytes per row: 4 H and 4 H (weight, cached) read, 2 H written. Measured fraction: not measured on a Mac.
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
