/* Mathematics: y[n, out] = x[n, cols] W[out, cols]^T; _multi: 1 to 4 W; _silu: silu(x g^T) x u^T.
 * Layout: x bf16 by rows; W 4 bits by rows, bf16 scale and bias per 64 columns; y float32 or bf16.
 * Threads: 4 simdgroups have 32 (16, 8) x 64 outputs; bands of 8 tiles of rows go together; tile.h.
 * Fused: dequantisation, several W, SiLU, residual. Agrees with mat_vec of bf16(x): W is exact.
 * Bytes: x per 64 outputs, W per 32 rows, mostly from cache; y once; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#ifndef LILY_METAL_TILE_TENSOR_H /* prefill_tensor.metal has this text by another way and name */
#include "tile_simd.h"
#endif

/* in_proj_qkv at n = 2048: x 1.07 GB, W 0.60 GB, at least 8.4 MB and 9.4 MB; 2 n cols out
 * operations (69 G). */

/* Binding of part p of prefill_gemm_multi. */
#define MULTI(name, p) (PREFILL_MULTI_##name + PREFILL_MULTI_STRIDE * (p))

/* One matrix of a launch: its part of W from row n0 on, and what becomes of the sums. */
struct gemm_part {
    quantised w;
    device uint4 *y;
    uint out_rows;
    uint mode;
    uint n0;
};

inline void gemm_source_x(thread tile_source &s, device const uint4 *x, uint m0, uint rows,
                          uint cols, uint thread_index) {
    const uint m = m0 + 2 * tile_pair_of(thread_index);
    s.has_x0 = m < rows;
    s.has_x1 = m + 1 < rows;
    s.x0 = x + (m * (cols / 8) + thread_index % 8);
    s.x1 = s.x0 + cols / 8;
}

inline void gemm_store(thread const gemm_part &part, uint m0, uint rows, tile_memory t,
                       uint thread_index) {
    const bool narrow = part.mode == PREFILL_STORE_BF16;
    const uint each = narrow ? 8 : 4;
    const uint pieces = PREFILL_TILE_N / each;
    const uint row_pieces = part.out_rows / each;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        const uint m = i / pieces;
        const uint piece = i % pieces;
        const uint column = part.n0 / each + piece;
        if (column >= row_pieces) continue; /* EDGE */
        const uint at = (m0 + m) * row_pieces + column;
        if (narrow) {
            part.y[at] = tile_sums_bf16(t, m, piece, 1.0f);
        } else {
            float4 sums = tile_sums(t, m, piece);
            if (part.mode == PREFILL_ADD_F32) sums += as_type<float4>(part.y[at]);
            part.y[at] = as_type<uint4>(sums);
        }
    }
}

inline void gemm_run(thread const gemm_part &part, device const uint4 *x, uint m0, uint rows,
                     uint cols, tile_memory t, uint thread_index) {
    tile_source source;
    gemm_source_x(source, x, m0, rows, cols, thread_index);
    tile_source_w(source, part.w, part.n0 + thread_index / 2, part.out_rows, cols, thread_index);
    const uint here = min(rows - m0, (uint)PREFILL_TILE_M);
    tile_make_for<false>(here, source, cols / SHAPE_GROUP, t, thread_index);
    gemm_store(part, m0, here, t, thread_index);
}

/* First row of this threadgroup's tile: bands of neighbouring tiles share the weights they read. */
inline uint gemm_first_row(uint3 group) {
    return (group.z * PREFILL_BAND + group.x) * PREFILL_TILE_M;
}

KERNEL_THREADS(PREFILL_GEMM_THREADS)
kernel void prefill_gemm(constant prefill_gemm_args &args [[buffer(PREFILL_GEMM_ARGS)]],
                         device const uint4 *x [[buffer(PREFILL_GEMM_X)]],
                         device const uint4 *codes [[buffer(PREFILL_GEMM_CODES)]],
                         device const ushort *scales [[buffer(PREFILL_GEMM_CODES + 1)]],
                         device const ushort *biases [[buffer(PREFILL_GEMM_CODES + 2)]],
                         device uint4 *y [[buffer(PREFILL_GEMM_Y)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    TILE_MEMORY(t);
    const uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; /* the whole threadgroup */
    const gemm_part part = {quantised_of(codes, scales, biases), y, args.out_rows, args.mode,
                            group.y * PREFILL_TILE_N};
    gemm_run(part, x, m0, args.rows, args.cols, t, thread_index);
}

KERNEL_THREADS(PREFILL_GEMM_THREADS)
kernel void prefill_gemm_multi(constant prefill_multi_args &args [[buffer(PREFILL_MULTI_ARGS)]],
                               device const uint4 *x [[buffer(PREFILL_MULTI_X)]],
                               device const uint4 *codes0 [[buffer(MULTI(CODES, 0))]],
                               device const ushort *scales0 [[buffer(MULTI(CODES, 0) + 1)]],
                               device const ushort *biases0 [[buffer(MULTI(CODES, 0) + 2)]],
                               device uint4 *y0 [[buffer(MULTI(Y, 0))]],
                               device const uint4 *codes1 [[buffer(MULTI(CODES, 1))]],
                               device const ushort *scales1 [[buffer(MULTI(CODES, 1) + 1)]],
                               device const ushort *biases1 [[buffer(MULTI(CODES, 1) + 2)]],
                               device uint4 *y1 [[buffer(MULTI(Y, 1))]],
                               device const uint4 *codes2 [[buffer(MULTI(CODES, 2))]],
                               device const ushort *scales2 [[buffer(MULTI(CODES, 2) + 1)]],
                               device const ushort *biases2 [[buffer(MULTI(CODES, 2) + 2)]],
                               device uint4 *y2 [[buffer(MULTI(Y, 2))]],
                               device const uint4 *codes3 [[buffer(MULTI(CODES, 3))]],
                               device const ushort *scales3 [[buffer(MULTI(CODES, 3) + 1)]],
                               device const ushort *biases3 [[buffer(MULTI(CODES, 3) + 2)]],
                               device uint4 *y3 [[buffer(MULTI(Y, 3))]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
    TILE_MEMORY(t);
    const uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; /* the whole threadgroup */
    uint p = 0;
    uint tile = group.y;
    while (p + 1 < args.parts) {
        const uint tiles = (args.out_rows[p] + PREFILL_TILE_N - 1) / PREFILL_TILE_N;
        if (tile < tiles) break;
        tile -= tiles;
        p++;
    }
    gemm_part part = {quantised_of(codes0, scales0, biases0), y0, args.out_rows[p], args.mode[p],
                      tile * PREFILL_TILE_N};
    if (p == 1) {
        part.w = quantised_of(codes1, scales1, biases1);
        part.y = y1;
    } else if (p == 2) {
        part.w = quantised_of(codes2, scales2, biases2);
        part.y = y2;
    } else if (p == 3) {
        part.w = quantised_of(codes3, scales3, biases3);
        part.y = y3;
    }
    gemm_run(part, x, m0, args.rows, args.cols, t, thread_index);
}

KERNEL_THREADS(PREFILL_GEMM_THREADS)
kernel void prefill_gemm_silu(constant prefill_silu_args &args [[buffer(PREFILL_SILU_ARGS)]],
                              device const uint4 *x [[buffer(PREFILL_SILU_X)]],
                              device const uint4 *gate_codes [[buffer(PREFILL_SILU_GATE_CODES)]],
                              device const ushort *gate_scales
                              [[buffer(PREFILL_SILU_GATE_CODES + 1)]],
                              device const ushort *gate_biases
                              [[buffer(PREFILL_SILU_GATE_CODES + 2)]],
                              device const uint4 *up_codes [[buffer(PREFILL_SILU_UP_CODES)]],
                              device const ushort *up_scales [[buffer(PREFILL_SILU_UP_CODES + 1)]],
                              device const ushort *up_biases [[buffer(PREFILL_SILU_UP_CODES + 2)]],
                              device uint4 *y [[buffer(PREFILL_SILU_Y)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
    TILE_MEMORY(t);
    const uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; /* the whole threadgroup */
    const uint n0 = group.y * (PREFILL_TILE_N / 2);
    const uint n = n0 + thread_index / 2 % (PREFILL_TILE_N / 2);
    const bool is_up = thread_index >= PREFILL_TILE_N;
    tile_source source;
    gemm_source_x(source, x, m0, args.rows, args.cols, thread_index);
    tile_source_w(source,
                  is_up ? quantised_of(up_codes, up_scales, up_biases)
                        : quantised_of(gate_codes, gate_scales, gate_biases),
                  n, args.out_rows, args.cols, thread_index);
    const uint here = min(args.rows - m0, (uint)PREFILL_TILE_M);
    tile_make_for<true>(here, source, args.cols / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 16;
    for (uint i = thread_index; i < here * pieces; i += PREFILL_GEMM_THREADS) {
        const uint at = (m0 + i / pieces) * (args.out_rows / 8) + n0 / 8 + i % pieces;
        y[at] = tile_sums_bf16(t, i / pieces, i % pieces, 1.0f);
    }
}
