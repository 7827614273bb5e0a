// 1 Mathematics: y = o / sqrt(mean(o^2) + eps) * weight * silu(z), per value head, 128 wide.
// 2 Layout: o [n][v_heads][128] and z [n][z_stride] float32, y [n][v_heads][128] bfloat.
// 3 Threads: a simdgroup has one head of one token, four values in each lane; 8 in a threadgroup.
// 4 Fuses norm, gate and rounding for the output projection. Norm first, gate after, as in
//   src/backend/ref (ref_deltanet).
// 5 Bytes: reads 8 n v_dim, 512; writes 2 n v_dim. Measured fraction of bandwidth: not measured on
//   a Mac.
#include <metal_stdlib>
using namespace metal;

#include "prefill_mix.h"
#include "prefill_mix_args.h"

kernel void prefill_gdn_norm(constant prefill_gdn_args &args [[buffer(PREFILL_GDN_NORM_ARGS)]],
                             device const float4 *delta [[buffer(PREFILL_GDN_NORM_DELTA)]],
                             device const float4 *z [[buffer(PREFILL_GDN_NORM_Z)]],
                             device const float4 *weight [[buffer(PREFILL_GDN_NORM_WEIGHT)]],
                             device bfloat4 *out [[buffer(PREFILL_GDN_NORM_OUT)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint pair = group * PREFILL_GDN_NORM_HEADS + simdgroup; // of token and head
    if (pair >= args.n * SHAPE_GDN_V_HEADS) return;               // GUARD
    const uint token = pair / SHAPE_GDN_V_HEADS;
    const uint head = pair % SHAPE_GDN_V_HEADS;
    const float4 o = delta[pair * 32 + lane];
    const float4 gate = z[token * (args.z_stride / 4) + head * 32 + lane];
    const float mean = simd_sum(dot(o, o)) / float(PREFILL_GDN_STATE);
    const float r = 1.0f / sqrt(mean + SHAPE_NORM_EPS);
    out[pair * 32 + lane] = bfloat4(o * r * weight[lane] * silu(gate));
}
