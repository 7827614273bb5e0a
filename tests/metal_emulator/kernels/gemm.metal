// C = A B in 16 x 16 tiles by four simdgroups with simdgroup_matrix; edges are filled with zeros.
#include <metal_stdlib>
using namespace metal;

struct Shape {
    uint m;
    uint n;
    uint k;
};

template <typename T>
kernel void gemm(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]],
                 device float *c [[buffer(2)]], constant Shape &s [[buffer(3)]],
                 threadgroup float *result [[threadgroup(0)]],
                 uint2 group [[threadgroup_position_in_grid]],
                 uint thread_index [[thread_index_in_threadgroup]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup T tile_a[16 * 8];
    threadgroup T tile_b[8 * 16];
    const uint row0 = group.y * 16;
    const uint column0 = group.x * 16;
    const uint sub_row = (simdgroup / 2) * 8;
    const uint sub_column = (simdgroup % 2) * 8;
    simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8>(0.0f);
    for (uint k0 = 0; k0 < s.k; k0 += 8) {
        const uint ar = row0 + thread_index / 8;
        const uint ak = k0 + thread_index % 8;
        tile_a[thread_index] = ar < s.m && ak < s.k ? a[ar * s.k + ak] : T(0);
        const uint bk = k0 + thread_index / 16;
        const uint bc = column0 + thread_index % 16;
        tile_b[thread_index] = bk < s.k && bc < s.n ? b[bk * s.n + bc] : T(0);
        threadgroup_barrier(mem_flags::mem_threadgroup); // FILLED
        simdgroup_matrix<T, 8, 8> ma;
        simdgroup_matrix<T, 8, 8> mb;
        simdgroup_load(ma, tile_a + sub_row * 8, 8);
        simdgroup_load(mb, tile_b + sub_column, 16);
        simdgroup_multiply_accumulate(sum, ma, mb, sum);
        threadgroup_barrier(mem_flags::mem_threadgroup); // USED
    }
    simdgroup_store(sum, result + sub_row * 16 + sub_column, 16);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < 256; i += 128) {
        const uint r = row0 + i / 16;
        const uint col = column0 + i % 16;
        if (r < s.m && col < s.n) c[r * s.n + col] = result[i]; // EDGE
    }
}

template [[host_name("gemm_half")]] kernel void gemm<half>(
    device const half *, device const half *, device float *, constant Shape &,
    threadgroup float *, uint2, uint, uint);
template [[host_name("gemm_float")]] kernel void gemm<float>(
    device const float *, device const float *, device float *, constant Shape &,
    threadgroup float *, uint2, uint, uint);
