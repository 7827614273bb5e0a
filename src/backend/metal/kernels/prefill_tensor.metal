/* Mathematics: that of prefill_gemm.metal and prefill_experts.metal with W rounded to bf16.
 * Layout: as there, under names that end in _tensor. Language version 4.0.
 * Threads: 4 simdgroups have 32 x 64 outputs, a cooperative matmul2d per 64 columns; tile_tensor.h.
 * Fused: as there. Agrees with mat_vec of bf16(x) up to 1/256 of each weight: checked at start-up.
 * Bytes: as there; a rest of up to 31 rows is multiplied as 32; not measured on a Mac. */
#include <metal_stdlib>
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
#define prefill_gemm         prefill_gemm_tensor
#define prefill_gemm_multi   prefill_gemm_multi_tensor
#define prefill_gemm_silu    prefill_gemm_silu_tensor
#define prefill_experts_up   prefill_experts_up_tensor
#define prefill_experts_down prefill_experts_down_tensor
#include "tile_tensor.h"

#include "prefill_experts.metal"
#include "prefill_gemm.metal"
