/* Tiles multiplied by the tensor operations of Metal 4 (language 4.0), where the chip has units for
 * them; tile_simd.h for all others.
 *
 * A threadgroup of 4 simdgroups multiplies 32 rows of x by 64 rows of W in one cooperative
 * operation per 64 columns. Both lie in threadgroup memory as bfloat rows; weights are rounded to
 * bfloat there, value = bf16(scale * code + bias), because the place of a sum in a thread's
 * registers is the implementation's own affair and scale and bias could join on it only at a cost.
 * There is one height for any number of rows, missing ones are zeros, so a row's result does not
 * depend on what is beside it. The next 64 columns are fetched while this tile is multiplied. */
#ifndef LILY_METAL_TILE_TENSOR_H
#define LILY_METAL_TILE_TENSOR_H

#include "tile.h"

using mpp::tensor_ops::matmul2d;
using mpp::tensor_ops::matmul2d_descriptor;

/* Extents and strides name the innermost dimension first. */
typedef tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> tile_operand;
typedef tensor<threadgroup float, dextents<int32_t, 2>, tensor_inline> tile_result;
typedef matmul2d<matmul2d_descriptor(PREFILL_TILE_M, PREFILL_TILE_N, SHAPE_GROUP, false, true,
                                     false, matmul2d_descriptor::mode::multiply_accumulate),
                 execution_simdgroups<PREFILL_GEMM_THREADS / 32>>
    tile_operation;
typedef tile_operation::cooperative_tensor_destination_t<tile_operand, tile_operand, float, int>
    tile_registers;

/* Eight codes of a word as bfloat weights. */
inline uint4 tile_weights(uint word, float scale, float bias) {
    return bf16_eight(fma(codes_first(word), float4(scale), float4(bias)),
                      fma(codes_last(word), float4(scale), float4(bias)));
}

/* Rows of 64 bfloat without padding: eight quads each. */
inline void tile_put(thread const tile_fetched &f, tile_memory t, uint thread_index) {
    uint at = 2 * tile_pair_of(thread_index) * 8 + thread_index % 8;
    t.x[at] = f.x0;
    t.x[at + 8] = f.x1;
    const float mine = bf16_value(f.factor);
    const float other = simd_shuffle_xor(mine, 1);
    const bool even = thread_index % 2 == 0;
    const float scale = even ? mine : other;
    const float bias = even ? other : mine;
    at = thread_index / 2 * 8 + thread_index % 2 * 4;
    t.w[at] = tile_weights(f.w.x, scale, bias);
    t.w[at + 1] = tile_weights(f.w.y, scale, bias);
    t.w[at + 2] = tile_weights(f.w.z, scale, bias);
    t.w[at + 3] = tile_weights(f.w.w, scale, bias);
}

/* silu(gate) * up of 32 outputs, in place: a thread reads and writes elements of its own. */
inline void tile_silu_in_place(tile_memory t, uint thread_index) {
    threadgroup float *stage = (threadgroup float *)t.w;
    for (uint i = thread_index; i < PREFILL_TILE_M * PREFILL_TILE_N / 2;
         i += PREFILL_GEMM_THREADS) {
        const uint at = i / (PREFILL_TILE_N / 2) * TILE_STAGE + i % (PREFILL_TILE_N / 2);
        stage[at] = silu(stage[at]) * stage[at + PREFILL_TILE_N / 2];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* PAIRED */
}

template <bool PAIRED>
inline void tile_make_for(uint rows, thread const tile_source &source, uint steps, tile_memory t,
                          uint thread_index) {
    tile_operand x((threadgroup bfloat *)t.x, dextents<int32_t, 2>(SHAPE_GROUP, PREFILL_TILE_M));
    tile_operand w((threadgroup bfloat *)t.w, dextents<int32_t, 2>(SHAPE_GROUP, PREFILL_TILE_N));
    tile_operation operation;
    tile_registers totals =
        operation.get_destination_cooperative_tensor<tile_operand, tile_operand, float>();
    UNROLL
    for (uint16_t i = 0; i < totals.get_capacity(); i++) totals[i] = 0.0f;
    tile_fetched next = tile_fetch(source, 0);
    for (uint step = 0; step < steps; step++) {
        tile_put(next, t, thread_index);
        if (step + 1 < steps) next = tile_fetch(source, step + 1);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* FILLED */
        operation.run(x, w, totals);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* USED */
    }
    tile_result stage((threadgroup float *)t.w,
                      dextents<int32_t, 2>(PREFILL_TILE_N, PREFILL_TILE_M),
                      array<int32_t, 2>({1, TILE_STAGE}));
    totals.store(stage);
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    if (PAIRED) tile_silu_in_place(t, thread_index);
}

#endif
