// 1 Mathematics: y[n, out] = x[n, cols] W[out, cols]^T; _multi: up to four W; _silu: y =
//   bf16(silu(x gate^T) * (x up^T)). Stored as float32 or bf16, or added to y.
// 2 Layout: x bf16 rows; W of 4 bits row by row, bf16 scale and bias per 64 columns; y rows.
// 3 Threads: a threadgroup of 4 simdgroups has 32 x 64 outputs (16 or 8 rows for a small rest);
//   bands of 8 tiles of rows walk over the outputs together; tile.h.
// 4 Fused: dequantisation, several matrices of one input, SiLU, residual. Agrees with mat_vec of
//   bf16(x) (model/weights.h): weights are exact.
// 5 Bytes: x per 64 outputs, W per 32 rows: in_proj_qkv at n = 2048 1.07 GB and 0.60 GB, mostly
//   from cache (8.4 MB and 9.4 MB at least), y once; 2 n cols out operations (69 G). Not measured
//   on a Mac.
#include <metal_stdlib>
using namespace metal;
#ifndef TILE_KERNEL
#define TILE_KERNEL(name) name /* prefill_tensor.metal has the same kernels by another name */
#include "tile_simd.h"
#endif

/* One matrix of a launch: its part of W from row n0 on, and what becomes of the sums. */
struct gemm_part {
    device const uint4 *codes;
    device const ushort *scales;
    device const ushort *biases;
    device uint4 *y;
    uint out_rows;
    uint mode;
    uint n0;
};

inline void gemm_source_x(thread tile_source &s, device const uint4 *x, uint m0, uint rows,
                          uint cols, uint thread_index) {
    uint m = m0 + 2 * tile_pair_of(thread_index);
    s.has_x0 = m < rows;
    s.has_x1 = m + 1 < rows;
    s.x0 = x + (m * (cols / 8) + thread_index % 8);
    s.x1 = s.x0 + cols / 8;
}

inline void gemm_store(thread const gemm_part &part, uint m0, uint rows, tile_memory t,
                       uint thread_index) {
    bool narrow = part.mode == PREFILL_STORE_BF16;
    uint each = narrow ? 8 : 4;
    uint pieces = PREFILL_TILE_N / each;
    ulong row_pieces = part.out_rows / each;
    for (uint i = thread_index; i < rows * pieces; i += PREFILL_GEMM_THREADS) {
        uint m = i / pieces;
        uint piece = i % pieces;
        uint column = part.n0 / each + piece;
        if (column >= row_pieces) continue; // EDGE
        ulong at = (m0 + m) * row_pieces + column;
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
    tile_source_w(source, part.codes, part.scales, part.biases, part.n0 + thread_index / 2,
                  part.out_rows, cols, thread_index);
    uint here = min(rows - m0, (uint)PREFILL_TILE_M);
    tile_make_for<false>(here, source, cols / SHAPE_GROUP, t, thread_index);
    gemm_store(part, m0, here, t, thread_index);
}

/* First row of this threadgroup's tile: bands of neighbouring tiles share the weights they read. */
inline uint gemm_first_row(uint3 group) {
    return (group.z * PREFILL_BAND + group.x) * PREFILL_TILE_M;
}

[[max_total_threads_per_threadgroup(PREFILL_GEMM_THREADS)]]
kernel void TILE_KERNEL(prefill_gemm)(device const uint4 *x [[buffer(PREFILL_GEMM_X)]],
                         device const uint4 *codes [[buffer(PREFILL_GEMM_CODES)]],
                         device const ushort *scales [[buffer(PREFILL_GEMM_SCALES)]],
                         device const ushort *biases [[buffer(PREFILL_GEMM_BIASES)]],
                         device uint4 *y [[buffer(PREFILL_GEMM_Y)]],
                         constant prefill_gemm_args &args [[buffer(PREFILL_GEMM_ARGS)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[TILE_W_QUADS];
    threadgroup uint4 tile_x[TILE_X_QUADS];
    threadgroup float sums[PREFILL_TILE_M];
    threadgroup float factors[2 * PREFILL_TILE_N];
    tile_memory t = {tile_w, tile_x, sums, factors};
    uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; // the whole threadgroup
    gemm_part part = {codes, scales, biases, y, args.out_rows, args.mode, group.y * PREFILL_TILE_N};
    gemm_run(part, x, m0, args.rows, args.cols, t, thread_index);
}

[[max_total_threads_per_threadgroup(PREFILL_GEMM_THREADS)]]
kernel void TILE_KERNEL(prefill_gemm_multi)(device const uint4 *codes0 [[buffer(0)]],
                               device const ushort *scales0 [[buffer(1)]],
                               device const ushort *biases0 [[buffer(2)]],
                               device uint4 *y0 [[buffer(3)]],
                               device const uint4 *codes1 [[buffer(4)]],
                               device const ushort *scales1 [[buffer(5)]],
                               device const ushort *biases1 [[buffer(6)]],
                               device uint4 *y1 [[buffer(7)]],
                               device const uint4 *codes2 [[buffer(8)]],
                               device const ushort *scales2 [[buffer(9)]],
                               device const ushort *biases2 [[buffer(10)]],
                               device uint4 *y2 [[buffer(11)]],
                               device const uint4 *codes3 [[buffer(12)]],
                               device const ushort *scales3 [[buffer(13)]],
                               device const ushort *biases3 [[buffer(14)]],
                               device uint4 *y3 [[buffer(15)]],
                               device const uint4 *x [[buffer(PREFILL_MULTI_X)]],
                               constant prefill_multi_args &args [[buffer(PREFILL_MULTI_ARGS)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[TILE_W_QUADS];
    threadgroup uint4 tile_x[TILE_X_QUADS];
    threadgroup float sums[PREFILL_TILE_M];
    threadgroup float factors[2 * PREFILL_TILE_N];
    tile_memory t = {tile_w, tile_x, sums, factors};
    uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; // the whole threadgroup
    uint p = 0;
    uint tile = group.y;
    while (p + 1 < args.parts) {
        uint tiles = (args.out_rows[p] + PREFILL_TILE_N - 1) / PREFILL_TILE_N;
        if (tile < tiles) break;
        tile -= tiles;
        p++;
    }
    gemm_part part = {codes0, scales0, biases0, y0, args.out_rows[p], args.mode[p],
                      tile * PREFILL_TILE_N};
    if (p == 1) {
        part.codes = codes1;
        part.scales = scales1;
        part.biases = biases1;
        part.y = y1;
    } else if (p == 2) {
        part.codes = codes2;
        part.scales = scales2;
        part.biases = biases2;
        part.y = y2;
    } else if (p == 3) {
        part.codes = codes3;
        part.scales = scales3;
        part.biases = biases3;
        part.y = y3;
    }
    gemm_run(part, x, m0, args.rows, args.cols, t, thread_index);
}

[[max_total_threads_per_threadgroup(PREFILL_GEMM_THREADS)]]
kernel void TILE_KERNEL(prefill_gemm_silu)(device const uint4 *x [[buffer(PREFILL_SILU_X)]],
                              device const uint4 *gate_codes [[buffer(PREFILL_SILU_GATE_CODES)]],
                              device const ushort *gate_scales [[buffer(PREFILL_SILU_GATE_SCALES)]],
                              device const ushort *gate_biases [[buffer(PREFILL_SILU_GATE_BIASES)]],
                              device const uint4 *up_codes [[buffer(PREFILL_SILU_UP_CODES)]],
                              device const ushort *up_scales [[buffer(PREFILL_SILU_UP_SCALES)]],
                              device const ushort *up_biases [[buffer(PREFILL_SILU_UP_BIASES)]],
                              device uint4 *y [[buffer(PREFILL_SILU_Y)]],
                              constant prefill_silu_args &args [[buffer(PREFILL_SILU_ARGS)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint4 tile_w[TILE_W_QUADS];
    threadgroup uint4 tile_x[TILE_X_QUADS];
    threadgroup float sums[PREFILL_TILE_M];
    threadgroup float factors[2 * PREFILL_TILE_N];
    tile_memory t = {tile_w, tile_x, sums, factors};
    uint m0 = gemm_first_row(group);
    if (m0 >= args.rows) return; // the whole threadgroup
    uint n0 = group.y * (PREFILL_TILE_N / 2);
    uint n = n0 + thread_index / 2 % (PREFILL_TILE_N / 2);
    bool is_up = thread_index >= PREFILL_TILE_N;
    tile_source source;
    gemm_source_x(source, x, m0, args.rows, args.cols, thread_index);
    tile_source_w(source, is_up ? up_codes : gate_codes, is_up ? up_scales : gate_scales,
                  is_up ? up_biases : gate_biases, n, args.out_rows, args.cols, thread_index);
    uint here = min(args.rows - m0, (uint)PREFILL_TILE_M);
    tile_make_for<true>(here, source, args.cols / SHAPE_GROUP, t, thread_index);
    const uint pieces = PREFILL_TILE_N / 16;
    for (uint i = thread_index; i < here * pieces; i += PREFILL_GEMM_THREADS) {
        uint at = (m0 + i / pieces) * (args.out_rows / 8) + n0 / 8 + i % pieces;
        y[at] = tile_sums_bf16(t, i / pieces, i % pieces, 1.0f);
    }
}
