// 1 Mathematics, e by the block map: _up: act[place, I] = bf16(silu(x gate_e^T) * (x up_e^T));
//   _down: out[pair, H] = bf16(weight[pair] * (act[place] down_e^T)).
// 2 Layout: x bf16 [n, H]; gate, up [I, H], down [H, I] of 4 bits, expert e at e strides; act bf16
//   [8n, I] in sorted order; out bf16 [n, 8, H].
// 3 Threads: a threadgroup of 4 simdgroups has a block (up to 32 pairs of one expert, in a tile 8,
//   16 or 32 high) and 64 outputs, or 32 of gate and the same of up; tile.h. Empty blocks end at
//   once.
// 4 Fused: gathering, dequantisation, SiLU, weighting, scattering. Agrees with expert() of ref_moe
//   (backend/ref/moe.c) for bf16 inputs.
// 5 Bytes: a used expert's weights once per block (n = 2048: 2.5 blocks, 1.13 GB; 0.45 GB at
//   least), rows once per tile of outputs (1.61 GB from cache, 25 MB at least), act 16 n I, out
//   16 n H written once; 48 n I H operations (103 G). Not measured on a Mac.
#include <metal_stdlib>
using namespace metal;
#ifndef TILE_KERNEL
#define TILE_KERNEL(name) name /* prefill_tensor.metal has the same kernels by another name */
#include "tile_simd.h"
#endif

[[max_total_threads_per_threadgroup(PREFILL_GEMM_THREADS)]]
kernel void TILE_KERNEL(prefill_experts_up)(device const uint4 *x [[buffer(PREFILL_UP_X)]],
                               device const uint4 *gate_codes [[buffer(PREFILL_UP_GATE_CODES)]],
                               device const ushort *gate_scales [[buffer(PREFILL_UP_GATE_SCALES)]],
                               device const ushort *gate_biases [[buffer(PREFILL_UP_GATE_BIASES)]],
                               device const uint4 *up_codes [[buffer(PREFILL_UP_UP_CODES)]],
                               device const ushort *up_scales [[buffer(PREFILL_UP_UP_SCALES)]],
                               device const ushort *up_biases [[buffer(PREFILL_UP_UP_BIASES)]],
                               device const uint *sorted [[buffer(PREFILL_UP_SORTED)]],
                               device const uint4 *blocks [[buffer(PREFILL_UP_BLOCKS)]],
                               device uint4 *act [[buffer(PREFILL_UP_ACT)]],
                               constant prefill_experts_args &args [[buffer(PREFILL_UP_ARGS)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[TILE_W_QUADS];
    threadgroup uint4 tile_x[TILE_X_QUADS];
    threadgroup float sums[PREFILL_TILE_M];
    threadgroup float factors[2 * PREFILL_TILE_N];
    tile_memory t = {tile_w, tile_x, sums, factors};
    uint4 block = blocks[group.y];
    uint rows = block.z;
    if (rows == 0) return; // the whole threadgroup
    uint n0 = group.x * (PREFILL_TILE_N / 2);
    uint n = n0 + thread_index / 2 % (PREFILL_TILE_N / 2);
    bool is_up = thread_index >= PREFILL_TILE_N;
    uint code_skip = block.x * (args.code_stride / 16);
    uint scale_skip = block.x * (args.scale_stride / 2);
    tile_source source;
    tile_source_w(source, (is_up ? up_codes : gate_codes) + code_skip,
                  (is_up ? up_scales : gate_scales) + scale_skip,
                  (is_up ? up_biases : gate_biases) + scale_skip, n, SHAPE_EXPERT_WIDTH,
                  SHAPE_HIDDEN, thread_index);
    uint m = 2 * tile_pair_of(thread_index);
    source.has_x0 = m < rows;
    source.has_x1 = m + 1 < rows;
    uint row0 = source.has_x0 ? sorted[block.y + m] / SHAPE_TOP_K : 0;
    uint row1 = source.has_x1 ? sorted[block.y + m + 1] / SHAPE_TOP_K : 0;
    source.x0 = x + (row0 * (SHAPE_HIDDEN / 8) + thread_index % 8);
    source.x1 = x + (row1 * (SHAPE_HIDDEN / 8) + thread_index % 8);
    tile_make_for<true>(rows, source, SHAPE_HIDDEN / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 16;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        uint at = (block.y + i / pieces) * (SHAPE_EXPERT_WIDTH / 8) + n0 / 8 + i % pieces;
        act[at] = tile_sums_bf16(t, i / pieces, i % pieces, 1.0f);
    }
}

[[max_total_threads_per_threadgroup(PREFILL_GEMM_THREADS)]]
kernel void TILE_KERNEL(prefill_experts_down)(device const uint4 *act [[buffer(PREFILL_DOWN_ACT)]],
                                 device const uint4 *codes [[buffer(PREFILL_DOWN_CODES)]],
                                 device const ushort *scales [[buffer(PREFILL_DOWN_SCALES)]],
                                 device const ushort *biases [[buffer(PREFILL_DOWN_BIASES)]],
                                 device const uint *sorted [[buffer(PREFILL_DOWN_SORTED)]],
                                 device const uint4 *blocks [[buffer(PREFILL_DOWN_BLOCKS)]],
                                 device const float *weights [[buffer(PREFILL_DOWN_WEIGHTS)]],
                                 device uint4 *out [[buffer(PREFILL_DOWN_OUT)]],
                                 constant prefill_experts_args &args [[buffer(PREFILL_DOWN_ARGS)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[TILE_W_QUADS];
    threadgroup uint4 tile_x[TILE_X_QUADS];
    threadgroup float sums[PREFILL_TILE_M];
    threadgroup float factors[2 * PREFILL_TILE_N];
    tile_memory t = {tile_w, tile_x, sums, factors};
    uint4 block = blocks[group.y];
    uint rows = block.z;
    if (rows == 0) return; // the whole threadgroup
    uint n0 = group.x * PREFILL_TILE_N;
    tile_source source;
    uint scale_skip = block.x * (args.scale_stride / 2);
    tile_source_w(source, codes + block.x * (args.code_stride / 16), scales + scale_skip,
                  biases + scale_skip, n0 + thread_index / 2, SHAPE_HIDDEN, SHAPE_EXPERT_WIDTH,
                  thread_index);
    uint m = 2 * tile_pair_of(thread_index);
    source.has_x0 = m < rows;
    source.has_x1 = m + 1 < rows;
    source.x0 = act + ((block.y + m) * (SHAPE_EXPERT_WIDTH / 8) + thread_index % 8);
    source.x1 = source.x0 + SHAPE_EXPERT_WIDTH / 8;
    tile_make_for<false>(rows, source, SHAPE_EXPERT_WIDTH / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 8;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        uint pair = sorted[block.y + i / pieces];
        uint at = pair * (SHAPE_HIDDEN / 8) + n0 / 8 + i % pieces;
        out[at] = tile_sums_bf16(t, i / pieces, i % pieces, weights[pair]);
    }
}
