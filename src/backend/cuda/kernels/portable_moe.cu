/* Mathematics: top 8 of scores and their softmax; pairs sorted by expert; x += sum of weight * out.
 * Layout: scores float32 [n][E + 1]; routing [n][2 * 8]; cuda_groups (device.h); out [place][H].
 * Threads: route a warp a row; group one block of 1,024; combine a block a row.
 * Fused: weighted sum, shared expert's gate, residual. Agrees with ref/moe.c, the ids exactly.
 * Bytes: combine, 4,096 rows: 369 MB in 104 us, 77 % of 4,642 GB/s (bench/cuda-portable-h200.json).
 *
 * Routing, on the device from scores to the block map of the grouped products, and the sum of what
 * the experts give. */
#include "routing.cuh"

/* routing[r] of every row; one warp a row. */
KERNEL route(const float *scores, float *routing, int rows) {
    int64_t r = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (r < rows) route_row(scores + r * (EXPERTS + 1), routing + r * 2 * TOP_K);
}

/* Sorts pairs row * TOP_K + choice by expert: begin[EXPERTS + 1], pairs[rows * TOP_K], and its
 * inverse places; then the blocks of `height` pairs (device.h, cuda_groups). One block. */
enum { GROUP_THREADS = 1024 };
static_assert((int)EXPERTS <= (int)GROUP_THREADS, "a thread an expert");
KERNEL __launch_bounds__(GROUP_THREADS)
    group(const float *routing, int rows, int height, int32_t *begin, int32_t *blocks,
          int32_t *n_blocks, int32_t *pairs, int32_t *places) {
    __shared__ int count[EXPERTS], first[EXPERTS], first_block[EXPERTS];
    int tid = threadIdx.x, n = rows * TOP_K;
    if (tid < EXPERTS) count[tid] = 0;
    __syncthreads();
    auto expert = [&](int pair) {
        return (int)routing[(int64_t)(pair / TOP_K) * 2 * TOP_K + pair % TOP_K];
    };
    for (int p = tid; p < n; p += GROUP_THREADS) atomicAdd(&count[expert(p)], 1);
    __syncthreads();
    if (tid == 0) {
        int sum = 0, sum_blocks = 0;
        for (int e = 0; e < EXPERTS; e++) {
            first[e] = sum;
            first_block[e] = sum_blocks;
            sum += count[e];
            sum_blocks += (count[e] + height - 1) / height;
        }
        *n_blocks = sum_blocks;
        begin[EXPERTS] = sum;
    }
    __syncthreads();
    if (tid < EXPERTS) {
        begin[tid] = first[tid];
        int own = (count[tid] + height - 1) / height;
        for (int b = 0; b < own; b++) blocks[first_block[tid] + b] = tid << 16 | b;
    }
    __syncthreads();
    /* Which place of its group a pair gets may differ from run to run; no value depends on it. */
    for (int p = tid; p < n; p += GROUP_THREADS) {
        int place = atomicAdd(&first[expert(p)], 1);
        pairs[place] = p;
        places[p] = place;
    }
}

/* x[r] += sum over choices of weight * out[place] (in order of choice) + sigmoid(gate) * shared[r];
 * both parts also to experts_trace and shared_trace where given. Grid: rows. */
KERNEL combine(const float *out, const int32_t *places, const float *routing, const float *scores,
               const float *shared, float *x, float *experts_trace, float *shared_trace) {
    int64_t r = blockIdx.x;
    __shared__ int place[TOP_K];
    __shared__ float weight[TOP_K];
    if (threadIdx.x < TOP_K) {
        place[threadIdx.x] = places[r * TOP_K + threadIdx.x];
        weight[threadIdx.x] = routing[r * 2 * TOP_K + TOP_K + threadIdx.x];
    }
    __syncthreads();
    float gate = sigmoid(scores[r * (EXPERTS + 1) + EXPERTS]);
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        float sum = 0, always = gate * shared[r * H + i];
#pragma unroll
        for (int j = 0; j < TOP_K; j++) sum = fmaf(weight[j], out[(int64_t)place[j] * H + i], sum);
        if (experts_trace) experts_trace[r * H + i] = sum;
        if (shared_trace) shared_trace[r * H + i] = always;
        x[r * H + i] += sum + always;
    }
}
