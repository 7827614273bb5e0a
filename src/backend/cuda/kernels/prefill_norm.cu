/* The residual stream's norms of a prompt chunk, with rows reordered for prefill_gemm.cu. */
#include "prefill_common.cuh"

enum { NORM_THREADS = 256 };

/* x[r] += add[r] (where add is given); normed = x / sqrt(mean(x^2) + eps) * weight, as float32
 * (where given) and as bf16 reordered. One block a row. */
KERNEL __launch_bounds__(NORM_THREADS)
    prompt_norm(float *x, const float *add, const float *weight, float *normed, bf16 *reordered) {
    enum { EACH = (H / 4 + NORM_THREADS - 1) / NORM_THREADS };
    __shared__ __align__(16) float values[H / ORDERED * (ORDERED + 4)]; /* other banks */
    int64_t row = (int64_t)blockIdx.x * H;
    float4 v[EACH];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int at = ((int)threadIdx.x + i * NORM_THREADS) * 4;
        if (at >= H) break;
        v[i] = *(const float4 *)(x + row + at);
        if (add) {
            float4 a = *(const float4 *)(add + row + at);
            v[i].x += a.x, v[i].y += a.y, v[i].z += a.z, v[i].w += a.w;
            *(float4 *)(x + row + at) = v[i];
        }
        sum = fmaf(v[i].x, v[i].x,
                   fmaf(v[i].y, v[i].y, fmaf(v[i].z, v[i].z, fmaf(v[i].w, v[i].w, sum))));
    }
    sum = block_sum(sum);
    float scale = 1.0f / sqrtf(sum / H + SHAPE_NORM_EPS);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int at = ((int)threadIdx.x + i * NORM_THREADS) * 4;
        if (at >= H) break;
        float4 w = *(const float4 *)(weight + at), y;
        y.x = v[i].x * scale * w.x, y.y = v[i].y * scale * w.y;
        y.z = v[i].z * scale * w.z, y.w = v[i].w * scale * w.w;
        if (normed) *(float4 *)(normed + row + at) = y;
        *(float4 *)&values[at + at / ORDERED * 4] = y;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < H / 8; i += NORM_THREADS) {
        const float *block = values + i / 16 * (ORDERED + 4);
        *(uint4 *)(reordered + row + i * 8) =
            reordered_part(i % 16, [&](int k) { return block[k]; });
    }
}
