// y = W x: one simdgroup for each row, four rows in a threadgroup; the vector is staged first.
#include <metal_stdlib>
using namespace metal;

struct Shape {
    uint rows;
    uint columns; // at most 256
};

kernel void matvec(device const half *w [[buffer(0)]], device const float *x [[buffer(1)]],
                   device float *y [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                   uint group [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint group_size [[threads_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float staged[256];
    for (uint i = thread_index; i < shape.columns; i += group_size) staged[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup); // STAGED
    const uint row = group * 4 + simdgroup;
    if (row >= shape.rows) return; // GUARD
    float sum = 0.0f;
    for (uint i = lane; i < shape.columns; i += 32) {
        sum += float(w[row * shape.columns + i]) * staged[i];
    }
    sum = simd_sum(sum);
    if (lane == 0) { // ONE LANE
        y[row] = sum;
    }
}
