// 1 Mathematics: that of prefill_gemm.metal and prefill_experts.metal, whose text is used here with
//   W rounded to bf16: prefill_gemm_tensor, prefill_gemm_multi_tensor, prefill_gemm_silu_tensor,
//   prefill_experts_up_tensor, prefill_experts_down_tensor; same bindings, arguments and grids.
// 2 Layout: as there. Language version 4.0.
// 3 Threads: a threadgroup of 4 simdgroups has 32 x 64 outputs, by one cooperative matmul2d for
//   each 64 columns; tile_tensor.h.
// 4 Fused: as there. Agrees with mat_vec of bf16(x) up to the rounding of W, each value by at most
//   1/256 of itself; the check at start-up measures it.
// 5 Bytes: as there; a rest of up to 31 rows is multiplied as 32. Not measured on a Mac.
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
#define TILE_KERNEL(name) name##_tensor
#include "tile_tensor.h"
#include "prefill_gemm.metal"
#include "prefill_experts.metal"
