/* Mathematics: y[n, VD] = o / sqrt(mean(o^2) + eps) * weight * silu(z), for each head of 128.
 * Layout: o [n][VD] and z [n][z_stride] float32, weight float32 [128], y bf16 [n][VD].
 * Threads: a simdgroup has one head of one token, four values a lane; 8 simdgroups a threadgroup.
 * Fused: norm, gate, rounding for the output projection. Agrees with ref_deltanet, then rounded.
 * Bytes: 8 n VD read, 2 n VD written; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "common.h"
#include "prefill_mix_args.h"

KERNEL_THREADS(PREFILL_GDN_NORM_THREADS)
kernel void prefill_gdn_norm(constant prefill_gdn_args &args [[buffer(PREFILL_GDN_NORM_ARGS)]],
                             device const float4 *delta [[buffer(PREFILL_GDN_NORM_DELTA)]],
                             device const float4 *z [[buffer(PREFILL_GDN_NORM_Z)]],
                             device const float4 *weight [[buffer(PREFILL_GDN_NORM_WEIGHT)]],
                             device bfloat4 *out [[buffer(PREFILL_GDN_NORM_OUT)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint pair = group * PREFILL_GDN_NORM_HEADS + simdgroup; /* of token and head */
    if (pair >= args.rows * SHAPE_GDN_V_HEADS) return;            /* GUARD */
    const uint token = pair / SHAPE_GDN_V_HEADS;
    const uint head = pair % SHAPE_GDN_V_HEADS;
    const float4 o = delta[pair * 32 + lane];
    const float4 gate = z[token * (args.z_stride / 4) + head * 32 + lane];
    const float r = norm_factor(simd_sum(dot(o, o)), PREFILL_GDN_STATE);
    out[pair * 32 + lane] = bfloat4(o * r * weight[lane] * silu(gate));
}
