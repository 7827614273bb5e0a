/* What the prompt kernels of sm_90a share: the order of activations, pieces in shared memory.
 *
 * Activations that a product of prefill_gemm.cu reads are bf16 rows whose inputs are reordered
 * within each block of 128, two quantisation groups, so that the thread that holds 32 consecutive
 * codes of a row of weights holds exactly the inputs the tensor cores want of it, and unpacking is
 * two operations a pair. Place p of a block holds input
 *   32 ((p % 8) / 2) + 8 (p / 32) + 4 (p % 2) + 2 (p / 16 % 2) + p / 8 % 2. */
#ifndef LILY_CUDA_PREFILL_COMMON_CUH
#define LILY_CUDA_PREFILL_COMMON_CUH

#include "common.cuh"
#include "prefill_kernels.h"
#include "prefill_wgmma.cuh"

enum { ORDERED = 128 }; /* inputs of a block */

/* What one kernel leaves for the next, where it is not an input of a product, is fp16 (the bits):
 * half the bytes of float32, and 2^-12 relative where the inputs of products have 2^-9. Larger
 * values than it holds become the largest; experts' outputs, which may be large, are stored as
 * sixteenths. */
typedef uint16_t fp16;
constexpr float EXPERT_UNIT = 16.0f;

/* Four consecutive values. */
__device__ __forceinline__ float4 four_halves(const fp16 *at) {
    uint2 pairs = *(const uint2 *)at;
    float2 a = half_floats(pairs.x), b = half_floats(pairs.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ int input_of_place(int p) {
    return 32 * (p % 8 / 2) + 8 * (p / 32) + 4 * (p % 2) + 2 * (p / 16 % 2) + p / 8 % 2;
}
__device__ __forceinline__ int place_of_input(int k) {
    return 32 * (k % 32 / 8) + 16 * (k % 4 / 2) + 8 * (k % 2) + 2 * (k / 32) + k % 8 / 4;
}

/* Places 8 part .. 8 part + 7 of a block whose inputs in natural order are value(0 .. 127). */
template <class F> __device__ __forceinline__ uint4 reordered_part(int part, F value) {
    int first = input_of_place(8 * part);
    return make_uint4(bf16_pair(value(first), value(first + 4)),
                      bf16_pair(value(first + 32), value(first + 36)),
                      bf16_pair(value(first + 64), value(first + 68)),
                      bf16_pair(value(first + 96), value(first + 100)));
}

/* Inputs for prefill_small.cu are reordered within each group of 64: a thread's sixteen, 16 q and
 * on, are its columns of four products. */
__device__ __forceinline__ int decisive_input(int p) {
    return 16 * (p % 8 / 2) + 4 * (p / 16) + 2 * (p % 16 / 8) + p % 2;
}

/* Element [row][i] of what prefill_small.cu left in parts [rows][width]. */
__device__ __forceinline__ float decisive_sum(const float *parts, int rows, int width, int64_t row,
                                              int i) {
    static_assert(PREFILL_DECISIVE_PARTS == 2, "added in order");
    const float *at = parts + row * width + i;
    return at[0] + at[(int64_t)rows * width];
}

/* First in every kernel of a prompt chunk: the next one may begin where there is room, and what is
 * read from here on has been written by the one before. */
__device__ __forceinline__ void begin_after_previous() {
    let_next_begin();
    wait_for_previous();
}

/* sigmoid and SiLU within 4 units in the last place, in a few instructions: what follows is rounded
 * to bf16. */
__device__ __forceinline__ float quick_sigmoid(float x) {
    return reciprocal(1.0f + power_of_two(-1.44269504f * x));
}
__device__ __forceinline__ float quick_silu(float x) {
    return x * quick_sigmoid(x);
}

/* Byte of 16-byte part p of row r among rows of 128 bytes, as products read them. */
__device__ __forceinline__ uint32_t part_at(int r, int p) {
    return (uint32_t)(r * 128 + ((p ^ (r & 7)) * 16));
}

/* The dynamic shared memory from its first multiple of 1,024 on. */
#define SHARED_PIECES(name)                                                                        \
    DYNAMIC_SHARED(char, name##_raw);                                                              \
    char *name = name##_raw + (-(int)(shared_address(name##_raw) & 1023) & 1023)
enum { SHARED_SLACK = 1024 };

#endif
