/* Mathematics: top 8 of the scores and their softmax; pairs row * 8 + choice sorted by expert.
 * Layout: scores float32 [parts][n][E + 1]; routing float32 [n][2 * 8]; cuda_groups (device.h).
 * Threads: route a warp a row; group a block of 256 for 256 rows, each counts for itself.
 * Fused: sum of parts, choice and counts; scan, places and blocks. Agrees with ref/moe.c exactly.
 * Bytes: 4,096 rows 26 us where the bound is 2: latency (bench/cuda-prompt-h200.json).
 *
 * Routing of a prompt chunk: the choice of experts, and rows sorted by expert for the grouped
 * products of prefill_gemm.cu. */
#include "prefill_common.cuh"
#include "routing.cuh"

enum { ROUTE_WARPS = 4, GROUP_THREADS = 256, GROUP_ROWS = 256 };
static_assert((int)EXPERTS <= (int)GROUP_THREADS && (int)TOP_K == 8, "a thread an expert");

/* routing[row] = ids and weights of its experts, from the parts of scores; counts[e] += 1 for each,
 * and entries[row * TOP_K + choice] = expert << 16 | what the count was. One warp a row. */
KERNEL __launch_bounds__(ROUTE_WARPS * 32)
    prompt_route(const float *scores, float *routing, int rows, int32_t *counts, int32_t *entries) {
    __shared__ float own[ROUTE_WARPS][EXPERTS];
    begin_after_previous();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t r = (int64_t)blockIdx.x * ROUTE_WARPS + warp;
    if (r >= rows) return;
    for (int e = lane; e < EXPERTS; e += 32) {
        own[warp][e] = decisive_sum(scores, rows, EXPERTS + 1, r, e);
    }
    __syncwarp();
    route_row(own[warp], routing + r * 2 * TOP_K);
    __syncwarp();
    if (lane < TOP_K) {
        int e = (int)routing[r * 2 * TOP_K + lane];
        entries[r * TOP_K + lane] = e << 16 | atomicAdd(&counts[e], 1);
    }
}

/* The sum of values of threads before this one; *all: of all. */
__device__ __forceinline__ int sum_before(int value, int *all) {
    __shared__ int part[GROUP_THREADS / 32];
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

/* From counts and entries: begin[EXPERTS + 1], pairs[rows * TOP_K] sorted by expert, in the place
 * of each entry its place among them, and the blocks of at most `height` pairs (device.h,
 * cuda_groups). Which place of its expert a pair gets may differ from run to run; no value depends
 * on it. Every block counts for itself. Grid: blocks of GROUP_ROWS rows. */
KERNEL __launch_bounds__(GROUP_THREADS)
    prompt_group(const int32_t *counts, int rows, int height, int32_t *begin, int32_t *blocks,
                 int32_t *n_blocks, int32_t *pairs, int32_t *places) {
    __shared__ int first[EXPERTS];
    begin_after_previous();
    int tid = threadIdx.x, r = blockIdx.x * GROUP_ROWS + tid;
    static_assert((int)GROUP_ROWS == (int)GROUP_THREADS, "a row a thread");
    int own = tid < EXPERTS ? counts[tid] : 0, all, all_blocks;
    int own_blocks = (own + height - 1) / height;
    int before = sum_before(own, &all), blocks_before = sum_before(own_blocks, &all_blocks);
    if (tid < EXPERTS) first[tid] = before;
    if (blockIdx.x == 0) {
        if (tid < EXPERTS) {
            begin[tid] = before;
            for (int b = 0; b < own_blocks; b++) blocks[blocks_before + b] = tid << 16 | b;
        }
        if (tid == 0) begin[EXPERTS] = all, *n_blocks = all_blocks;
    }
    __syncthreads();
    if (r >= rows) return;
    uint4 *at = (uint4 *)(places + (int64_t)r * TOP_K);
    uint4 a = at[0], b = at[1];
    uint32_t entry[TOP_K] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < TOP_K; j++) {
        entry[j] = (uint32_t)first[entry[j] >> 16] + (entry[j] & 0xffff);
        pairs[entry[j]] = r * TOP_K + j;
    }
    at[0] = make_uint4(entry[0], entry[1], entry[2], entry[3]);
    at[1] = make_uint4(entry[4], entry[5], entry[6], entry[7]);
}
