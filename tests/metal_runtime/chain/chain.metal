// A gated feed-forward layer in four small kernels, each threadgroup one simdgroup of 32 threads.
#include <metal_stdlib>
using namespace metal;

// sum[0] = sum of x[i]^2, i < n; one threadgroup
kernel void square_sum(device const float *x [[buffer(0)]], device float *sum [[buffer(1)]],
                       constant uint &n [[buffer(2)]],
                       uint lane [[thread_index_in_simdgroup]]) {
    float part = 0.0f;
    for (uint i = lane; i < n; i += 32) part += x[i] * x[i];
    part = simd_sum(part);
    if (lane == 0) sum[0] = part;
}

// y[i] = x[i] / sqrt(sum[0] / n + 1e-6); n / 32 threadgroups
kernel void normalise(device const float *x [[buffer(0)]], device const float *sum [[buffer(1)]],
                      device float *y [[buffer(2)]], constant uint &n [[buffer(3)]],
                      uint i [[thread_position_in_grid]]) {
    y[i] = x[i] * rsqrt(sum[0] / float(n) + 1e-6f);
}

// y[row] = dot(w[row][:], x), rows of n; one threadgroup a row
kernel void row_dot(device const float *w [[buffer(0)]], device const float *x [[buffer(1)]],
                    device float *y [[buffer(2)]], constant uint &n [[buffer(3)]],
                    uint row [[threadgroup_position_in_grid]],
                    uint lane [[thread_index_in_simdgroup]]) {
    float part = 0.0f;
    for (uint i = lane; i < n; i += 32) part += w[row * n + i] * x[i];
    part = simd_sum(part);
    if (lane == 0) y[row] = part;
}

// out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]
kernel void gated(device const float *gate [[buffer(0)]], device const float *up [[buffer(1)]],
                  device float *out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    out[i] = gate[i] / (1.0f + exp(-gate[i])) * up[i];
}
