/* What the portable kernels share: the shape's numbers, conversions, sums over a warp. */
#ifndef LILY_CUDA_COMMON_CUH
#define LILY_CUDA_COMMON_CUH

#include <stdint.h>

#include SHAPE_HEADER /* the shape these kernels are compiled for: model/shapes/<shape>.h */

#include "device.h"
#include "instructions.cuh"

#define KERNEL extern "C" __global__ void

enum {
    H = SHAPE_HIDDEN,
    HEAD = SHAPE_HEAD_DIM,
    Q_HEADS = SHAPE_Q_HEADS,
    KV_HEADS = SHAPE_KV_HEADS,
    Q_DIM = SHAPE_Q_DIM,
    KV_DIM = SHAPE_KV_DIM,
    KV_GROUP = SHAPE_Q_HEADS / SHAPE_KV_HEADS, /* query heads that share a key */
    DIM = SHAPE_GDN_HEAD_DIM,                  /* of the recurrent state */
    K_HEADS = SHAPE_GDN_K_HEADS,
    V_HEADS = SHAPE_GDN_V_HEADS,
    K_DIM = SHAPE_GDN_K_DIM,
    V_DIM = SHAPE_GDN_V_DIM,
    CONV_DIM = SHAPE_CONV_DIM,
    EXPERTS = SHAPE_EXPERTS,
    TOP_K = SHAPE_TOP_K,
    INNER = SHAPE_EXPERT_WIDTH,
    SHARED = SHAPE_SHARED_WIDTH,
    VOCAB = SHAPE_VOCAB
};

constexpr unsigned ALL_LANES = 0xffffffffu;

typedef uint16_t bf16; /* the bits */

__device__ __forceinline__ float bf16_float(bf16 x) {
    return __uint_as_float((uint32_t)x << 16);
}

__device__ __forceinline__ bf16 to_bf16(float x) {
    return (bf16)bf16_pair(x, 0.0f);
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}

/* The sum over the warp, the same bits in every lane. */
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* The sum over the block (at most 1024 threads), the same bits in every thread. */
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float part[32];
    x = warp_sum(x);
    __syncthreads(); /* part may still be read for an earlier sum */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < (int)(blockDim.x + 31) / 32; i++) sum += part[i];
    return sum;
}

/* ---- 4- and 8-bit codes ---------------------------------------------------------------------- */

/* 128 + code in float32, exactly, for code i of a word of eight 4-bit codes: the code becomes the
 * last bits of the significand. Subtracting 128 is left to the caller, who can do it once a sum. */
__device__ __forceinline__ float code_128(uint32_t word, int i) {
    uint32_t at = i < 4 ? word << (16 - 4 * i) : word >> (4 * i - 16);
    return __uint_as_float((at & 0x000f0000u) | 0x43000000u);
}

/* Eight 4-bit codes as bf16 values scale * code + bias, each rounded once; scale and bias are
 * doubled bf16 pairs. 128 + code is exact in bf16, and so is the difference. */
__device__ __forceinline__ uint4 dequantise8(uint32_t word, uint32_t scale, uint32_t bias) {
    const uint32_t one = 0x3f803f80u, minus_128 = 0xc300c300u;
    uint32_t q[4]; /* codes (0, 4), (1, 5), (2, 6), (3, 7) */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t x = ((word >> (4 * i)) & 0x000f000fu) | 0x43004300u;
        q[i] = fma_bf16x2(fma_bf16x2(x, one, minus_128), scale, bias);
    }
    return make_uint4(__byte_perm(q[0], q[1], 0x5410), __byte_perm(q[2], q[3], 0x5410),
                      __byte_perm(q[0], q[1], 0x7632), __byte_perm(q[2], q[3], 0x7632));
}

/* Value i of a row, in float32. */
__device__ __forceinline__ float mat_value(const cuda_mat &m, int64_t row, int col) {
    int64_t group = row * (m.cols / 64) + col / 64;
    int code;
    if (m.bits == 4)
        code = m.codes[row * (m.cols / 2) + col / 2] >> (4 * (col & 1)) & 15;
    else
        code = m.codes[row * m.cols + col];
    return fmaf(bf16_float(m.scales[group]), (float)code, bf16_float(m.biases[group]));
}

#endif
