/* The choice of experts of one row. */
#ifndef LILY_CUDA_ROUTING_CUH
#define LILY_CUDA_ROUTING_CUH

#include "common.cuh"

/* routing = the TOP_K largest of scores[0 .. EXPERTS), ids in descending order (ties to the
 * lower id), then their softmax, which equals the share of each among the chosen. One warp;
 * lane l holds experts l, l + 32, ... The choice is written twice more, where its time is waited
 * for: choose_experts (batch_experts.cuh) for all slots in every block, choose
 * (decode_producer.cuh) from words that are still arriving. All three must agree to the id. */
__device__ __forceinline__ void route_row(const float *scores, float *routing) {
    enum { EACH = (EXPERTS + 31) / 32 };
    int lane = threadIdx.x % 32;
    float v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = lane + 32 * i;
        v[i] = e < EXPERTS ? scores[e] : -INFINITY;
        if (isnan(v[i])) v[i] = -INFINITY; /* ids stay valid; the step is reported as not finite */
    }
    uint32_t taken = 0;
    float chosen = 0, top = 0;
    int id = 0;
    for (int j = 0; j < TOP_K; j++) {
        float best = -INFINITY;
        int at = INT32_MAX;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int e = lane + 32 * i;
            bool free = e < EXPERTS && !(taken >> i & 1);
            if (free && (v[i] > best || at == INT32_MAX)) best = v[i], at = e;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, step);
            int other_at = __shfl_xor_sync(ALL_LANES, at, step);
            bool better = other_at != INT32_MAX &&
                          (at == INT32_MAX || other > best || (other == best && other_at < at));
            if (better) best = other, at = other_at;
        }
        if (at % 32 == lane) taken |= 1u << (at / 32);
        if (j == 0) top = best;
        if (lane == j) chosen = best, id = at;
    }
    float weight = lane < TOP_K ? expf(chosen - top) : 0.0f;
    float sum = warp_sum(weight);
    if (lane < TOP_K) {
        routing[lane] = (float)id;
        routing[TOP_K + lane] = weight / sum;
    }
}

#endif
