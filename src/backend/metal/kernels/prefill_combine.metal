/* Mathematics: h[n, H] += sum of 8 pairs [n, 8, H] + gate[n] * shared[n, H]; _norm: x = norm(h).
 * Layout: pairs bf16, weighted already, by row and rank; shared, x bf16; gate, h, r float32.
 * Threads: a threadgroup has a row, a thread eight neighbouring values; ranks in order 0 .. 7.
 * Fused: sum, shared expert, residual, next norm. Agrees with the end of ref_moe, ref_rms_norm.
 * Bytes: 22 H a row read, 4 H written, 2 H more by _norm, each once; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "tile_row.h"

/* This thread's eight values of the new h, in a and b and in device memory. */
inline void combine_row(device const uint4 *pairs, device const uint4 *shared, float gate,
                        device float4 *h, uint row, uint thread_index, thread float4 &a,
                        thread float4 &b) {
    float4 low = float4(0.0f);
    float4 high = float4(0.0f);
    for (uint rank = 0; rank < SHAPE_TOP_K; rank++) {
        const uint pair = row * SHAPE_TOP_K + rank;
        const uint4 eight = pairs[pair * PREFILL_ROW_THREADS + thread_index];
        low += bf16_first(eight);
        high += bf16_last(eight);
    }
    const uint at = row * PREFILL_ROW_THREADS + thread_index;
    const uint4 eight = shared[at];
    a = h[2 * at] + fma(float4(gate), bf16_first(eight), low);
    b = h[2 * at + 1] + fma(float4(gate), bf16_last(eight), high);
    h[2 * at] = a;
    h[2 * at + 1] = b;
}

KERNEL_THREADS(PREFILL_ROW_THREADS)
kernel void prefill_combine(constant prefill_combine_args &args [[buffer(PREFILL_COMBINE_ARGS)]],
                            device const uint4 *pairs [[buffer(PREFILL_COMBINE_PAIRS)]],
                            device const uint4 *shared [[buffer(PREFILL_COMBINE_SHARED)]],
                            device const float *gate [[buffer(PREFILL_COMBINE_GATE)]],
                            device float4 *h [[buffer(PREFILL_COMBINE_H)]],
                            uint row [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
    if (row >= args.rows) return;
    float4 a;
    float4 b;
    combine_row(pairs, shared, gate[row], h, row, thread_index, a, b);
}

KERNEL_THREADS(PREFILL_ROW_THREADS)
kernel void prefill_combine_norm(constant prefill_combine_args &args
                                 [[buffer(PREFILL_COMBINE_ARGS)]],
                                 device const uint4 *pairs [[buffer(PREFILL_COMBINE_PAIRS)]],
                                 device const uint4 *shared [[buffer(PREFILL_COMBINE_SHARED)]],
                                 device const float *gate [[buffer(PREFILL_COMBINE_GATE)]],
                                 device float4 *h [[buffer(PREFILL_COMBINE_H)]],
                                 device const float4 *weight [[buffer(PREFILL_COMBINE_WEIGHT)]],
                                 device uint4 *x [[buffer(PREFILL_COMBINE_X)]],
                                 device float *r [[buffer(PREFILL_COMBINE_R)]],
                                 uint row [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup float parts[TILE_ROW_SIMDS];
    if (row >= args.rows) return; /* the whole threadgroup */
    float4 a;
    float4 b;
    combine_row(pairs, shared, gate[row], h, row, thread_index, a, b);
    tile_row_norm(a, b, weight, x, r, row, parts, thread_index);
}
