/* Mathematics: act[place, I] = silu(x gate_e^T) * (x up_e^T); out[pair, H] = w[pair] act down_e^T.
 * Layout: x, act [8n, I] sorted, out [n, 8, H] bf16; gate, up [I, H], down [H, I] 4 bits by rows.
 * Threads: 4 simdgroups have up to 32 pairs of one expert, 64 outputs (32 of gate, of up); tile.h.
 * Fused: gather, dequantisation, SiLU, weighting, scatter. Agrees with expert (ref/moe.c) of bf16.
 * Bytes: weights a block, x 25 MB (1.61 GB cached), act 16nI, out 16nH; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#ifndef LILY_METAL_TILE_TENSOR_H /* prefill_tensor.metal has this text by another way and name */
#include "tile_simd.h"
#endif

/* e by the block map; blocks without rows end at once. At n = 2048 an expert has 2.5 blocks: 1.13
 * GB of weights, 0.45 GB at least; 48 n I H operations (103 G). */

KERNEL_THREADS(PREFILL_GEMM_THREADS)
kernel void prefill_experts_up(constant prefill_experts_args &args [[buffer(PREFILL_UP_ARGS)]],
                               device const uint4 *x [[buffer(PREFILL_UP_X)]],
                               device const uint4 *gate_codes [[buffer(PREFILL_UP_GATE_CODES)]],
                               device const ushort *gate_scales
                               [[buffer(PREFILL_UP_GATE_CODES + 1)]],
                               device const ushort *gate_biases
                               [[buffer(PREFILL_UP_GATE_CODES + 2)]],
                               device const uint4 *up_codes [[buffer(PREFILL_UP_UP_CODES)]],
                               device const ushort *up_scales [[buffer(PREFILL_UP_UP_CODES + 1)]],
                               device const ushort *up_biases [[buffer(PREFILL_UP_UP_CODES + 2)]],
                               device const uint *sorted [[buffer(PREFILL_UP_SORTED)]],
                               device const uint4 *blocks [[buffer(PREFILL_UP_BLOCKS)]],
                               device uint4 *act [[buffer(PREFILL_UP_ACT)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
    TILE_MEMORY(t);
    const uint4 block = blocks[group.y];
    const uint rows = block.z;
    if (rows == 0) return; /* the whole threadgroup */
    const uint n0 = group.x * (PREFILL_TILE_N / 2);
    const uint n = n0 + thread_index / 2 % (PREFILL_TILE_N / 2);
    const bool is_up = thread_index >= PREFILL_TILE_N;
    const quantised w = is_up ? quantised_of(up_codes, up_scales, up_biases)
                              : quantised_of(gate_codes, gate_scales, gate_biases);
    tile_source source;
    tile_source_w(source, quantised_at(w, (size_t)block.x * args.expert_stride), n,
                  SHAPE_EXPERT_WIDTH, SHAPE_HIDDEN, thread_index);
    const uint m = 2 * tile_pair_of(thread_index);
    source.has_x0 = m < rows;
    source.has_x1 = m + 1 < rows;
    const uint row0 = source.has_x0 ? sorted[block.y + m] / SHAPE_TOP_K : 0;
    const uint row1 = source.has_x1 ? sorted[block.y + m + 1] / SHAPE_TOP_K : 0;
    source.x0 = x + (row0 * (SHAPE_HIDDEN / 8) + thread_index % 8);
    source.x1 = x + (row1 * (SHAPE_HIDDEN / 8) + thread_index % 8);
    tile_make_for<true>(rows, source, SHAPE_HIDDEN / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 16;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        const uint at = (block.y + i / pieces) * (SHAPE_EXPERT_WIDTH / 8) + n0 / 8 + i % pieces;
        act[at] = tile_sums_bf16(t, i / pieces, i % pieces, 1.0f);
    }
}

KERNEL_THREADS(PREFILL_GEMM_THREADS)
kernel void prefill_experts_down(constant prefill_experts_args &args [[buffer(PREFILL_DOWN_ARGS)]],
                                 device const uint4 *act [[buffer(PREFILL_DOWN_ACT)]],
                                 device const uint4 *codes [[buffer(PREFILL_DOWN_CODES)]],
                                 device const ushort *scales [[buffer(PREFILL_DOWN_CODES + 1)]],
                                 device const ushort *biases [[buffer(PREFILL_DOWN_CODES + 2)]],
                                 device const uint *sorted [[buffer(PREFILL_DOWN_SORTED)]],
                                 device const uint4 *blocks [[buffer(PREFILL_DOWN_BLOCKS)]],
                                 device const float *weights [[buffer(PREFILL_DOWN_WEIGHTS)]],
                                 device uint4 *out [[buffer(PREFILL_DOWN_OUT)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
    TILE_MEMORY(t);
    const uint4 block = blocks[group.y];
    const uint rows = block.z;
    if (rows == 0) return; /* the whole threadgroup */
    const uint n0 = group.x * PREFILL_TILE_N;
    tile_source source;
    const quantised w = quantised_of(codes, scales, biases);
    tile_source_w(source, quantised_at(w, (size_t)block.x * args.expert_stride),
                  n0 + thread_index / 2, SHAPE_HIDDEN, SHAPE_EXPERT_WIDTH, thread_index);
    const uint m = 2 * tile_pair_of(thread_index);
    source.has_x0 = m < rows;
    source.has_x1 = m + 1 < rows;
    source.x0 = act + ((block.y + m) * (SHAPE_EXPERT_WIDTH / 8) + thread_index % 8);
    source.x1 = source.x0 + SHAPE_EXPERT_WIDTH / 8;
    tile_make_for<false>(rows, source, SHAPE_EXPERT_WIDTH / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 8;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        const uint pair = sorted[block.y + i / pieces];
        const uint at = pair * (SHAPE_HIDDEN / 8) + n0 / 8 + i % pieces;
        out[at] = tile_sums_bf16(t, i / pieces, i % pieces, weights[pair]);
    }
}
