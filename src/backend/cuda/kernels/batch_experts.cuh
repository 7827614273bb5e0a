/* The choice of experts of a decode step of several slots, worked out by every block alike: no
 * order of additions matters, so that all come to the same list. */
#ifndef LILY_CUDA_BATCH_EXPERTS_CUH
#define LILY_CUDA_BATCH_EXPERTS_CUH

#include "batch.cuh"

enum { LIST_MOST = EXPERTS + CUDA_FEW_ROWS * TOP_K / BATCH_ROWS + CUDA_FEW_ROWS / BATCH_ROWS };

/* Blocks of at most eight pairs of one expert; the shared one's (number EXPERTS) are the last. A
 * pair is slot * TOP_K + choice, of the shared expert slots * TOP_K + slot. */
struct __align__(16) expert_list {
    uint16_t pairs[LIST_MOST][BATCH_ROWS];
    uint32_t entry[LIST_MOST]; /* number of pairs << 16 | expert */
    int32_t n, reserved[3];
};

/* Rows of inputs for the pairs of a block. */
struct listed_rows {
    const bf16 *a;
    int cols;
    const uint16_t *pairs;
    int n, routed, each;
    __device__ __forceinline__ const bf16 *row(int m) const {
        if (m >= n) return nullptr;
        int pair = pairs[m], slot = pair < routed ? pair / each : pair - routed;
        return a + (int64_t)slot * cols;
    }
};

/* ids = the TOP_K experts with the largest scores, in descending order, ties to the lower number;
 * weights (where given): their softmax. One warp. Must agree to the id with route_row (routing.cuh)
 * and choose (decode_producer.cuh); sorted in each lane because every block waits for it. */
__device__ __forceinline__ void choose_experts(const float *scores, uint16_t *ids, float *weights) {
    enum { EACH = (EXPERTS + 31) / 32 };
    int lane = threadIdx.x % 32;
    uint32_t key[EACH], of[EACH]; /* orders as the scores do, 0: none; expert */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = lane + 32 * i;
        float v = e < EXPERTS ? scores[e] : -INFINITY;
        if (isnan(v)) v = -INFINITY; /* ids stay valid; the step is reported as not finite */
        uint32_t bits = __float_as_uint(v);
        key[i] = e < EXPERTS ? bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u) : 0;
        of[i] = (uint32_t)e;
    }
    /* Each lane's own in descending order; only neighbours that differ change places. */
#pragma unroll
    for (int pass = 0; pass < EACH; pass++) {
#pragma unroll
        for (int i = pass % 2; i + 1 < EACH; i += 2) {
            uint32_t k = key[i], e = of[i];
            bool swap = k < key[i + 1];
            key[i] = swap ? key[i + 1] : k, of[i] = swap ? of[i + 1] : e;
            key[i + 1] = swap ? k : key[i + 1], of[i + 1] = swap ? e : of[i + 1];
        }
    }
    uint32_t chosen = 0;
    int id = 0;
#pragma unroll 1
    for (int j = 0; j < TOP_K; j++) {
        uint32_t best = __reduce_max_sync(ALL_LANES, key[0]);
        uint32_t at = __reduce_min_sync(ALL_LANES, key[0] == best ? of[0] : 0xffffffffu);
        bool mine = key[0] == best && of[0] == at;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            key[i] = !mine ? key[i] : i + 1 < EACH ? key[i + 1] : 0;
            of[i] = mine && i + 1 < EACH ? of[i + 1] : of[i];
        }
        if (lane == j) chosen = best, id = (int)at;
    }
    if (lane < TOP_K) ids[lane] = (uint16_t)id;
    if (!weights) return;
    uint32_t top = __shfl_sync(ALL_LANES, chosen, 0);
    auto value = [](uint32_t k) {
        return __uint_as_float(k ^ ((uint32_t)((int)~k >> 31) | 0x80000000u));
    };
    float weight = lane < TOP_K ? expf(value(chosen) - value(top)) : 0.0f, sum = warp_sum(weight);
    if (lane < TOP_K) weights[lane] = weight / sum;
}

/* The list of a step's experts from the router's scores [rows][EXPERTS + 1], by all threads of a
 * block; weights [rows][TOP_K] where given. scratch: shared memory, of no use afterwards. */
__device__ __forceinline__ void list_experts(expert_list &list, const float *scores, int rows,
                                             char *scratch, float *weights) {
    struct place {
        uint32_t slots[EXPERTS][2]; /* bit s: of slot s */
        int first[EXPERTS], warps[BATCH_WARPS];
        uint16_t ids[CUDA_FEW_ROWS * TOP_K];
    };
    place &p = *(place *)scratch;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    static_assert((int)EXPERTS <= (int)BATCH_THREADS, "a thread an expert");
    static_assert((int)CUDA_FEW_ROWS * (int)TOP_K <= (int)BATCH_THREADS, "a thread a pair");
    if (tid < EXPERTS) p.slots[tid][0] = p.slots[tid][1] = 0;
    for (int r = warp; r < rows; r += BATCH_WARPS) {
        choose_experts(scores + (int64_t)r * (EXPERTS + 1), p.ids + r * TOP_K,
                       weights ? weights + r * TOP_K : nullptr);
    }
    __syncthreads();
    int slot = tid / TOP_K, expert = tid < rows * TOP_K ? p.ids[tid] : 0;
    if (tid < rows * TOP_K) atomicOr(&p.slots[expert][slot / 32], 1u << slot % 32);
    __syncthreads();
    int count = tid < EXPERTS ? __popc(p.slots[tid][0]) + __popc(p.slots[tid][1]) : 0;
    int blocks = (count + BATCH_ROWS - 1) / BATCH_ROWS, before = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) p.warps[warp] = before;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < BATCH_WARPS; w++) {
        int n = p.warps[w];
        all += n;
        if (w < warp) before += n;
    }
    before -= blocks;
    if (tid < EXPERTS) p.first[tid] = before;
    for (int b = 0; b < blocks; b++) {
        list.entry[before + b] =
            (uint32_t)(min(count - b * BATCH_ROWS, (int)BATCH_ROWS) << 16 | tid);
    }
    int own = (rows + BATCH_ROWS - 1) / BATCH_ROWS;
    if (tid < own) {
        list.entry[all + tid] =
            (uint32_t)(min(rows - tid * BATCH_ROWS, (int)BATCH_ROWS) << 16 | EXPERTS);
    }
    if (tid < rows) {
        list.pairs[all + tid / BATCH_ROWS][tid % BATCH_ROWS] = (uint16_t)(rows * TOP_K + tid);
    }
    if (tid == 0) list.n = all + own;
    __syncthreads();
    if (tid < rows * TOP_K) { /* its place: how many slots before this one chose the same */
        const uint32_t(&slots)[2] = p.slots[expert];
        uint32_t below = (1u << slot % 32) - 1;
        int rank =
            slot < 32 ? __popc(slots[0] & below) : __popc(slots[0]) + __popc(slots[1] & below);
        list.pairs[p.first[expert] + rank / BATCH_ROWS][rank % BATCH_ROWS] = (uint16_t)tid;
    }
    __syncthreads();
}

/* A list to and from device memory; pairs beyond a block's number mean nothing. */
__device__ __forceinline__ void leave_list(const expert_list &list, expert_list *to) {
    for (int i = threadIdx.x; i < (int)(sizeof list / 16); i += BATCH_THREADS) {
        ((uint4 *)to)[i] = ((const uint4 *)&list)[i];
    }
}
__device__ __forceinline__ void read_list(expert_list &list, const expert_list *from) {
    for (int i = threadIdx.x; i < (int)(sizeof list / 16); i += BATCH_THREADS) {
        ((uint4 *)&list)[i] = ((const uint4 *)from)[i];
    }
    __syncthreads();
}

#endif
