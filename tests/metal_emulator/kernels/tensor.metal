// C = A B^T of bfloat by the tensor operations of Metal 4, three ways: a threadgroup with B staged
// in threadgroup memory, a simdgroup with operands in registers, results written by the operation.
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

struct Shape {
    int m, n, k;
};
constant int TILE_M = 16, TILE_N = 32, TILE_K = 16;

kernel void gemm_group(device bfloat *a [[buffer(0)]], device const bfloat *b [[buffer(1)]],
                       device float *c [[buffer(2)]], constant Shape &s [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup bfloat staged[TILE_N * TILE_K];
    const int m0 = (int)group.y * TILE_M, n0 = (int)group.x * TILE_N;
    auto rows = tensor(a, dextents<int, 2>(s.k, s.m)).slice(0, m0);
    tensor<threadgroup bfloat, extents<int, TILE_K, TILE_N>, tensor_inline> columns(
        (threadgroup bfloat *)staged, extents<int, TILE_K, TILE_N>());
    constexpr auto tile = matmul2d_descriptor(
        TILE_M, TILE_N, TILE_K, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<tile, execution_simdgroups<2>> operation;
    auto sum = operation.get_destination_cooperative_tensor<decltype(rows), decltype(columns),
                                                            float>();
    for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f; // ZERO
    for (int k = 0; k < s.k; k += TILE_K) {
        for (int i = (int)thread_index; i < TILE_N * TILE_K; i += 64) {
            int n = n0 + i / TILE_K, depth = k + i % TILE_K;
            staged[i] = n < s.n && depth < s.k ? b[n * s.k + depth] : (bfloat)0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // FILLED
        auto part = rows.slice(k, 0);
        operation.run(part, columns, sum);
        threadgroup_barrier(mem_flags::mem_threadgroup); // USED
    }
    auto result = tensor(c, dextents<int, 2>(s.n, s.m)).slice(n0, m0); // EDGES
    sum.store(result);
}

kernel void gemm_registers(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]],
                           device float *c [[buffer(2)]], constant Shape &s [[buffer(3)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
    const int m0 = (int)group.y * TILE_M, n0 = (int)group.x * TILE_N;
    auto rows = tensor(a, dextents<int, 2>(s.k, s.m), array<int, 2>{1, s.k});
    auto columns = tensor(b, dextents<int, 2>(s.k, s.n));
    constexpr auto tile = matmul2d_descriptor(
        TILE_M, TILE_N, TILE_K, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<tile, execution_simdgroup> operation;
    auto left = operation.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
    auto right = operation.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
    auto sum = operation.get_destination_cooperative_tensor<decltype(left), decltype(right),
                                                            float>();
    for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f;
    for (int k = 0; k < s.k; k += TILE_K) {
        left.load(rows.slice(k, m0));
        for (ushort i = 0; i < right.get_capacity(); i++) {
            auto at = right.get_multidimensional_index(i);
            bool inside = right.is_valid_element(i) && k + at[0] < s.k && n0 + at[1] < s.n;
            right[i] = inside ? b[(n0 + at[1]) * s.k + k + at[0]] : (bfloat)0.0f;
        }
        operation.run(left, right, sum); // RUN
    }
    for (ushort i = 0; i < sum.get_capacity(); i++) {
        if (!sum.is_valid_element(i)) continue; // VALID
        auto at = sum.get_multidimensional_index(i); // WHERE
        if (n0 + at[0] < s.n && m0 + at[1] < s.m) c[(m0 + at[1]) * s.n + n0 + at[0]] = sum[i];
    }
}

kernel void gemm_memory(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]],
                        device float *c [[buffer(2)]], constant Shape &s [[buffer(3)]],
                        uint2 group [[threadgroup_position_in_grid]]) {
    auto rows = tensor(a, dextents<int, 2>(s.k, s.m)).slice(0, (int)group.y * TILE_M);
    auto columns = tensor(b, dextents<int, 2>(s.k, s.n)).slice(0, (int)group.x * TILE_N);
    auto result = tensor(c, dextents<int, 2>(s.n, s.m))
                      .slice((int)group.x * TILE_N, (int)group.y * TILE_M); // RESULT
    matmul2d<matmul2d_descriptor(TILE_M, TILE_N, dynamic_length_v<int>, false, true),
             execution_simdgroups<2>>
        operation;
    operation.run(rows, columns, result);
}
