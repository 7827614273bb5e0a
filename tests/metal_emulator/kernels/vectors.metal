// Construction, casts, packed types, bits and bfloat.
#include <metal_stdlib>
using namespace metal;

template <typename T> inline vec<T, 4> doubled(vec<T, 4> v) { return v * T(2); }

kernel void vectors(device const packed_float3 *in [[buffer(0)]], device float4 *out [[buffer(1)]],
                    device bfloat *narrow [[buffer(2)]], device uint *bits [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
    float3 v = float3(in[i]);
    half4 h = half4(float4(v, 0.5f));
    float4 back = (float4)h;
    out[i] = doubled<float>(float4(back.xy, back.zw)) + float4(1.0h);
    narrow[i] = bfloat(v.x + 0.001f);
    uint4 u = uint4(int4(float4(v, -1.0f)));
    bits[i] = as_type<uint>(v.x) ^ (u.w & popcount(7u)) ^ uint(static_cast<float>(h.y));
}
