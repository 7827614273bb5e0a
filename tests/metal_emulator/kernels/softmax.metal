// Softmax of each row: reductions in simdgroups, then across them in threadgroup memory.
#include <metal_stdlib>
using namespace metal;

constant uint COLUMNS [[function_constant(0)]];
constant float SCALE [[function_constant(1)]];

kernel void softmax(device float *values [[buffer(0)]],
                    uint row [[threadgroup_position_in_grid]],
                    uint thread_index [[thread_index_in_threadgroup]],
                    uint group_size [[threads_per_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float largest[32];
    threadgroup float total[32];
    const float scale = is_function_constant_defined(SCALE) ? SCALE : 1.0f;
    device float *v = values + row * COLUMNS;
    float high = -INFINITY;
    for (uint i = thread_index; i < COLUMNS; i += group_size) high = max(high, v[i] * scale);
    high = simd_max(high);
    if (lane == 0) largest[simdgroup] = high;
    threadgroup_barrier(mem_flags::mem_threadgroup); // LARGEST
    for (uint i = 0; i < simdgroups; i++) high = max(high, largest[i]);
    float sum = 0.0f;
    for (uint i = thread_index; i < COLUMNS; i += group_size) {
        v[i] = exp(v[i] * scale - high);
        sum += v[i];
    }
    sum = simd_sum(sum);
    if (lane == 0) total[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup); // TOTAL
    sum = 0.0f;
    for (uint i = 0; i < simdgroups; i++) sum += total[i];
    for (uint i = thread_index; i < COLUMNS; i += group_size) v[i] /= sum;
}
