/* Mathematics: logits[V] = lm_head (h * r * norm); best of each 128 that may be sampled.
 * Layout: lm_head [V, H] 4 bits row-major; logits float32; best uint32 by ordered_key.
 * Threads: a threadgroup has 128 rows, a simdgroup makes four waves of rows at a time.
 * Fused: final norm, penalties of engine/sampler.c. Agrees with ref/head.c up to order of sums.
 * Bytes: weights once, 4V out; 8H a group; V/8 of mask, 4V of counts; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_pick.h"

KERNEL_THREADS(DECODE_HEAD_THREADS)
kernel void decode_head(constant decode_sampling_args &args [[buffer(DECODE_HEAD_ARGS)]],
                        device const float4 *h [[buffer(DECODE_HEAD_H)]],
                        device const float4 *norm [[buffer(DECODE_HEAD_NORM)]],
                        device const uint4 *codes [[buffer(DECODE_HEAD_PROJ)]],
                        device const ushort *scales [[buffer(DECODE_HEAD_PROJ + 1)]],
                        device const ushort *biases [[buffer(DECODE_HEAD_PROJ + 2)]],
                        device const uint *counts [[buffer(DECODE_HEAD_COUNTS)]],
                        device const uint *mask [[buffer(DECODE_HEAD_MASK)]],
                        device float *logits [[buffer(DECODE_HEAD_LOGITS)]],
                        device uint *best [[buffer(DECODE_HEAD_BEST)]],
                        uint group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum {
        R = 4,
        WAVE = DECODE_WAVE_ROWS(SHAPE_HIDDEN),
        SIMDS = DECODE_HEAD_THREADS / 32,
        PASSES = DECODE_HEAD_ROWS / (SIMDS * R * WAVE)
    };
    static_assert(PASSES * SIMDS * R * WAVE == DECODE_HEAD_ROWS, "whole passes");
    threadgroup float4 x[HIDDEN_QUADS];
    threadgroup float sums[HIDDEN_CHUNKS];
    threadgroup float partial[SIMDS];
    threadgroup uint largest[SIMDS];
    const float r = decode_stage_norm<SHAPE_HIDDEN, DECODE_HEAD_THREADS>(h, norm, x, sums, partial,
                                                                         thread_index);
    const uint mine = decode_lane_part<SHAPE_HIDDEN>(lane);
    uint key = 0;
    for (uint pass = 0; pass < PASSES; pass++) {
        const uint first = group * DECODE_HEAD_ROWS + (pass * SIMDS + simdgroup) * R * WAVE +
                           decode_lane_row<SHAPE_HIDDEN>(lane);
        float y[R];
        decode_rows<SHAPE_HIDDEN, R>(quantised_of(codes, scales, biases), first, SHAPE_VOCAB, x,
                                     sums, lane, y);
        const uint row = first + mine * WAVE;
        if (mine < R && row < SHAPE_VOCAB) {
            const float logit = decode_pick<R>(y, mine) * r;
            logits[row] = logit;
            const float seen = pick_logit(logit, row, counts, mask, args);
            key = max(key, isfinite(logit) ? ordered_key(seen) : DECODE_NOT_FINITE);
        }
    }
    key = simd_max(key);
    if (lane == 0) largest[simdgroup] = key;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* LARGEST */
    if (thread_index == 0) {
        for (uint i = 1; i < SIMDS; i++) key = max(key, largest[i]);
        best[group] = key;
    }
}
