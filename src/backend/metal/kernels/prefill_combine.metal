// 1 Mathematics: h[n, H] += sum over rank of pairs[n, 8, H] + gate[n] * shared[n, H]; _norm: also
//   x = bf16(RMS norm of the new h) and its r.
// 2 Layout: pairs bf16, weighted already, by row and rank; shared bf16; gate, h, weight, r float32.
// 3 Threads: a threadgroup has a row, a thread eight neighbouring values; ranks in order 0 .. 7.
// 4 Fused: sum over experts, shared expert, residual, next norm. Agrees with the end of ref_moe
//   (backend/ref/moe.c), then ref_rms_norm.
// 5 Bytes per row: 18 H + 4 H read, 4 H written (_norm: 2 H more), each once: 53,248 (57,344) at
//   the real shape. Not measured on a Mac.
#include <metal_stdlib>
using namespace metal;
#include "tile_row.h"

inline float4 combine_low(uint4 eight) {
    return float4(tile_low(eight.x), tile_high(eight.x), tile_low(eight.y), tile_high(eight.y));
}
inline float4 combine_high(uint4 eight) {
    return float4(tile_low(eight.z), tile_high(eight.z), tile_low(eight.w), tile_high(eight.w));
}

/* This thread's eight values of the new h, in a and b and in device memory. */
inline void combine_row(device const uint4 *pairs, device const uint4 *shared, float gate,
                        device float4 *h, uint row, uint thread_index, thread float4 &a,
                        thread float4 &b) {
    float4 low = float4(0.0f);
    float4 high = float4(0.0f);
    for (uint rank = 0; rank < SHAPE_TOP_K; rank++) {
        uint pair = row * SHAPE_TOP_K + rank;
        uint4 eight = pairs[pair * PREFILL_ROW_THREADS + thread_index];
        low += combine_low(eight);
        high += combine_high(eight);
    }
    uint at = row * PREFILL_ROW_THREADS + thread_index;
    uint4 eight = shared[at];
    a = h[2 * at] + fma(float4(gate), combine_low(eight), low);
    b = h[2 * at + 1] + fma(float4(gate), combine_high(eight), high);
    h[2 * at] = a;
    h[2 * at + 1] = b;
}

[[max_total_threads_per_threadgroup(PREFILL_ROW_THREADS)]]
kernel void prefill_combine(device const uint4 *pairs [[buffer(PREFILL_COMBINE_PAIRS)]],
                            device const uint4 *shared [[buffer(PREFILL_COMBINE_SHARED)]],
                            device const float *gate [[buffer(PREFILL_COMBINE_GATE)]],
                            device float4 *h [[buffer(PREFILL_COMBINE_H)]],
                            constant prefill_combine_args &args [[buffer(PREFILL_COMBINE_ARGS)]],
                            uint row [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
    if (row >= args.rows) return;
    float4 a;
    float4 b;
    combine_row(pairs, shared, gate[row], h, row, thread_index, a, b);
}

[[max_total_threads_per_threadgroup(PREFILL_ROW_THREADS)]]
kernel void prefill_combine_norm(
    device const uint4 *pairs [[buffer(PREFILL_COMBINE_PAIRS)]],
    device const uint4 *shared [[buffer(PREFILL_COMBINE_SHARED)]],
    device const float *gate [[buffer(PREFILL_COMBINE_GATE)]],
    device float4 *h [[buffer(PREFILL_COMBINE_H)]],
    device const float4 *weight [[buffer(PREFILL_COMBINE_WEIGHT)]],
    device uint4 *x [[buffer(PREFILL_COMBINE_X)]], device float *r [[buffer(PREFILL_COMBINE_R)]],
    constant prefill_combine_args &args [[buffer(PREFILL_COMBINE_ARGS)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup float parts[TILE_ROW_SIMDS];
    if (row >= args.rows) return; // the whole threadgroup
    float4 a;
    float4 b;
    combine_row(pairs, shared, gate[row], h, row, thread_index, a, b);
    tile_row_norm(a, b, weight, x, r, row, parts, thread_index);
}
