/* What the portable kernels share: the shape's numbers, conversions, sums over a warp, tensor-core
 * and copy instructions of sm_80. */
#ifndef LILY_CUDA_COMMON_CUH
#define LILY_CUDA_COMMON_CUH

#include <stdint.h>

#include SHAPE_HEADER /* the shape these kernels are compiled for: model/shapes/<shape>.h */

#include "device.h"

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

/* Two floats rounded to nearest even: a in the low half. */
__device__ __forceinline__ uint32_t bf16_pair(float a, float b) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
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

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
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

/* ---- shared memory and tensor cores ---------------------------------------------------------- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes from device to shared memory in the background; zeros where valid is false. */
__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most n of this thread's committed groups are under way. */
template <int n> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

/* Four 8x8 bf16 matrices: lane l gives the address of row l % 8 of matrix l / 8. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c[16, 8] += a[16, 16] b[16, 8], bf16 in, float32 sums. Lane l holds of c rows l / 4 and 8 + l / 4,
 * columns 2 (l % 4) and the next. */
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
