/* A threadgroup has one row of the residual stream, a thread eight neighbouring values of it. */
#ifndef LILY_METAL_TILE_ROW_H
#define LILY_METAL_TILE_ROW_H

#include "tile.h"

enum { TILE_ROW_SIMDS = PREFILL_ROW_THREADS / 32 };
static_assert(PREFILL_ROW_THREADS % 32 == 0, "a row is whole simdgroups");

/* 1 / sqrt(mean(h^2) + eps) of the row, the same in every thread. parts[TILE_ROW_SIMDS]. */
inline float tile_row_scale(float4 a, float4 b, threadgroup float *parts, uint thread_index) {
    const float sum = simd_sum(dot(a, a) + dot(b, b));
    if (thread_index % 32 == 0) parts[thread_index / 32] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* PARTS */
    float total = parts[0];
    for (uint i = 1; i < TILE_ROW_SIMDS; i++) total += parts[i];
    return norm_factor(total, SHAPE_HIDDEN);
}

/* Writes this thread's part of x = bf16(h * r * weight), and r once. */
inline void tile_row_norm(float4 a, float4 b, device const float4 *weight, device uint4 *x,
                          device float *r, uint row, threadgroup float *parts, uint thread_index) {
    const float scale = tile_row_scale(a, b, parts, thread_index);
    x[row * PREFILL_ROW_THREADS + thread_index] =
        bf16_eight(a * scale * weight[2 * thread_index], b * scale * weight[2 * thread_index + 1]);
    if (thread_index == 0) r[row] = scale;
}

#endif
