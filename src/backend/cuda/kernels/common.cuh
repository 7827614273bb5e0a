/* What the portable kernels share: the shape's numbers, conversions, sums over a warp. */
#ifndef LILY_CUDA_COMMON_CUH
#define LILY_CUDA_COMMON_CUH

#include <stdint.h>

#include SHAPE_HEADER /* the shape these kernels are compiled for: model/shapes/<shape>.h */

#include "device.h"
#include "instructions.cuh"
#include "tile.h"

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

/* Two values as bf16 and the bf16 of what that leaves: 16 significant bits. */
__device__ __forceinline__ void bf16_halves(float a, float b, uint32_t &high, uint32_t &low) {
    high = bf16_pair(a, b);
    low = bf16_pair(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}

__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

__device__ __forceinline__ float dot_four(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

__device__ __forceinline__ float4 scaled(float4 y, float s) {
    return make_float4(y.x * s, y.y * s, y.z * s, y.w * s);
}

__device__ __forceinline__ void add_scaled(float4 &sum, float4 x, float s) {
    sum.x = fmaf(x.x, s, sum.x), sum.y = fmaf(x.y, s, sum.y);
    sum.z = fmaf(x.z, s, sum.z), sum.w = fmaf(x.w, s, sum.w);
}

/* A channel after the convolution, before its SiLU: a, b, d are the inputs before u, a the oldest.
 */
__device__ __forceinline__ float convolved(float4 taps, float a, float b, float d, float u) {
    return fmaf(taps.w, u, fmaf(taps.z, d, fmaf(taps.y, b, taps.x * a)));
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

/* Tiles are for cards with the kernels that stream them; kernels of others are compiled without. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define TILED 0
#else
#define TILED 1
#endif
/* For the router's product, which every step runs: a kernel compiled for another card than the
 * upload saw (the program has no machine code for 9.0) ends here rather than in wrong numbers. */
__device__ __forceinline__ void expect_layout(const cuda_mat &m) {
    (void)m;
#if !TILED
    if (m.layout != CUDA_PLANAR) __trap();
#endif
}
__device__ __forceinline__ bool lies_as(const cuda_mat &m, int layout) {
    return TILED ? m.layout == layout : layout == CUDA_PLANAR;
}

/* Where a row of a matrix begins: its group 0, the first run of codes. */
struct mat_row {
    const uint8_t *codes;
    const uint16_t *scales, *biases;
};

/* A tile's rows lie in fours of 64 bytes of codes each (tile.h). `down` has H rows an expert. */
__device__ __forceinline__ mat_row row_of(const cuda_mat &m, int64_t row) {
    if (lies_as(m, CUDA_PLANAR)) {
        int64_t factors = row * (m.cols / 64);
        return {m.codes + row * (m.cols * m.bits / 8), m.scales + factors, m.biases + factors};
    }
    int64_t tile;
    int in_tile, codes, factors;
    row <<= m.doubled;
    if (m.layout == CUDA_WIDE) {
        in_tile = (int)(row & 31);
        tile = (row >> 5) * m.row_tiles;
        codes = tile_wide_codes(in_tile, 0), factors = tile_wide_scale(in_tile, 0);
    } else if (m.layout == CUDA_DOWN) {
        in_tile = (int)(row & 127);
        tile =
            row / H * (int64_t)(m.cols / TILE_DOWN_COLS) * (H / TILE_DOWN_ROWS * TILE_DOWN_BYTES) +
            row % H / TILE_DOWN_ROWS * TILE_DOWN_BYTES;
        codes = tile_down_codes(in_tile, 0), factors = tile_down_scale(in_tile);
    } else {
        in_tile = (int)(row & 15);
        tile = (row >> 4) * m.row_tiles;
        codes = tile_byte_codes(in_tile, 0), factors = tile_byte_scale(in_tile, 0);
    }
    factors = (factors - TILE_CODES) / 2;
    return {m.codes + tile + codes, m.scales + tile / 2 + factors, m.biases + tile / 2 + factors};
}

/* Byte of codes [16 q, 16 q + 16) of a group, q = 0 .. 3, from the group's first on. */
__device__ __forceinline__ int code_sixteen(const cuda_mat &m, int q) {
    if (lies_as(m, CUDA_DOWN)) return q / 2 * (m.code_group / 2) + q % 2 * 32;
    if (lies_as(m, CUDA_BYTE)) return q / 2 * 16 + q % 2 * 512;
    return q * 2 * m.bits;
}

/* The second eight of those sixteen. In tiles of `down` they are no neighbours. */
__device__ __forceinline__ int code_eight(const cuda_mat &m) {
    return lies_as(m, CUDA_DOWN) ? 16 : m.bits;
}

__device__ __forceinline__ int code_at(const cuda_mat &m, int group) {
    return TILED ? group / 2 * m.code_pair + group % 2 * m.code_group : group * 8 * m.bits;
}
__device__ __forceinline__ int factor_at(const cuda_mat &m, int group) {
    return TILED ? group / 2 * m.factor_pair + group % 2 * m.factor_group : group;
}

/* A value of a row, in float32. */
__device__ __forceinline__ float mat_value(const cuda_mat &m, int64_t row, int col) {
    mat_row from = row_of(m, row);
    int group = col / 64, in_eight = col % 8;
    const uint8_t *at = from.codes + code_at(m, group) + code_sixteen(m, col % 64 / 16) +
                        col % 16 / 8 * code_eight(m) + in_eight * m.bits / 8;
    int code = m.bits == 4 ? *at >> (4 * (col & 1)) & 15 : *at, factor = factor_at(m, group);
    return fmaf(bf16_float(from.scales[factor]), (float)code, bf16_float(from.biases[factor]));
}

#endif
