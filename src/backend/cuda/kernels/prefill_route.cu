/* Rows of a prompt chunk sorted by expert, for the grouped products of prefill_gemm.cu. */
#include "prefill_common.cuh"

enum { GROUP_THREADS = 1024, GROUP_ROWS = 4 }; /* rows a thread keeps: 4,096 rows in all */
static_assert((int)EXPERTS <= (int)GROUP_THREADS && (int)TOP_K == 8, "two loads a row");

/* The sum of values of threads before this one; *all: of all. */
__device__ __forceinline__ int sum_before(int value, int *all) {
    __shared__ int part[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads(); /* part may still be read */
    if (lane == 31) part[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int i = 0; i < GROUP_THREADS / 32; i++) {
        if (i < warp) before += part[i];
        total += part[i];
    }
    *all = total;
    return before + sum - value;
}

/* From routing [row][ids, weights]: begin[EXPERTS + 1], pairs[rows * TOP_K] sorted by expert and
 * its inverse places, and the blocks of at most `height` pairs (device.h, cuda_groups). Which place
 * of its expert a pair gets may differ from run to run; no value depends on it. One block; rows at
 * most GROUP_THREADS * GROUP_ROWS. */
KERNEL __launch_bounds__(GROUP_THREADS)
    prompt_group(const float *routing, int rows, int height, int32_t *begin, int32_t *blocks,
                 int32_t *n_blocks, int32_t *pairs, int32_t *places) {
    __shared__ int count[EXPERTS];
    int tid = threadIdx.x;
    if (tid < EXPERTS) count[tid] = 0;
    __syncthreads();
    uint32_t entry[GROUP_ROWS][TOP_K]; /* expert << 16 | rank among its pairs */
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        int r = tid + i * GROUP_THREADS;
        if (r >= rows) break;
        const float4 *from = (const float4 *)(routing + (int64_t)r * 2 * TOP_K);
        float4 a = from[0], b = from[1];
        const float id[TOP_K] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            int e = (int)id[j];
            entry[i][j] = (uint32_t)e << 16 | (uint32_t)atomicAdd(&count[e], 1);
        }
    }
    __syncthreads();
    int own = tid < EXPERTS ? count[tid] : 0, all, all_blocks;
    int own_blocks = (own + height - 1) / height;
    int first = sum_before(own, &all), first_block = sum_before(own_blocks, &all_blocks);
    if (tid < EXPERTS) {
        begin[tid] = first;
        count[tid] = first;
        for (int b = 0; b < own_blocks; b++) blocks[first_block + b] = tid << 16 | b;
    }
    if (tid == 0) {
        begin[EXPERTS] = all;
        *n_blocks = all_blocks;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        int r = tid + i * GROUP_THREADS;
        if (r >= rows) break;
        uint32_t at[TOP_K];
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            at[j] = (uint32_t)count[entry[i][j] >> 16] + (entry[i][j] & 0xffff);
            pairs[at[j]] = r * TOP_K + j;
        }
        uint4 *own = (uint4 *)(places + r * TOP_K);
        own[0] = make_uint4(at[0], at[1], at[2], at[3]);
        own[1] = make_uint4(at[4], at[5], at[6], at[7]);
    }
}
