/* Mathematics: x += add, or x += sum of weight * out + gate * shared; x / sqrt(mean(x^2) + eps) w.
 * Layout: x float32, add fp16 [n][H]; out bf16 reordered; high, low, sums to decide.
 * Threads: a block of 256 a row, four neighbouring values a thread and turn.
 * Fused: weighted sum, residual, norm, reordering, splitting. Agrees with ref/norm.c, ref/moe.c.
 * Bytes: 4,096 rows: norm 77, combine 80 % of 4,640 GB/s (bench/cuda-prompt-h200.json).
 *
 * The residual stream of a prompt chunk: what is added to it, and its norms, with rows as
 * prefill_gemm.cu and prefill_small.cu read them. */
#include "prefill_common.cuh"

enum { NORM_THREADS = 256, NORM_EACH = (H / 4 + NORM_THREADS - 1) / NORM_THREADS };

/* Where a norm goes. high and low: the two bf16 that make up a value, sums: of each 64 inputs, for
 * products that decide; NULL where no such product follows. */
struct norm_out {
    bf16 *reordered, *high, *low;
    float *sums;
};

/* A row of x, four values at (threadIdx.x + i * NORM_THREADS) * 4 a thread, normed to row r. */
__device__ __forceinline__ void norm_row(const float4 (&v)[NORM_EACH], const float *weight,
                                         int64_t r, const norm_out &out) {
    __shared__ __align__(16) float values[H / ORDERED * (ORDERED + 4)]; /* other banks */
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        if (((int)threadIdx.x + i * NORM_THREADS) * 4 >= H) break;
        sum = fmaf(v[i].x, v[i].x,
                   fmaf(v[i].y, v[i].y, fmaf(v[i].z, v[i].z, fmaf(v[i].w, v[i].w, sum))));
    }
    sum = block_sum(sum);
    float scale = 1.0f / sqrtf(sum / H + SHAPE_NORM_EPS);
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        int at = ((int)threadIdx.x + i * NORM_THREADS) * 4;
        if (at >= H) break;
        float4 w = *(const float4 *)(weight + at), y;
        y.x = v[i].x * scale * w.x, y.y = v[i].y * scale * w.y;
        y.z = v[i].z * scale * w.z, y.w = v[i].w * scale * w.w;
        *(float4 *)&values[at + at / ORDERED * 4] = y;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < H / 8; i += NORM_THREADS) {
        const float *block = values + i / 16 * (ORDERED + 4);
        *(uint4 *)(out.reordered + r * H + i * 8) =
            reordered_part(i % 16, [&](int k) { return block[k]; });
    }
    if (!out.high) return;
    for (int i = threadIdx.x; i < H / 8; i += NORM_THREADS) { /* eight places of a group each */
        const float *group = values + i / 16 * (ORDERED + 4) + i % 16 / 8 * 64;
        int first = decisive_input(i % 8 * 8);
        uint32_t high[4], low[4];
        float total = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 y = *(const float2 *)(group + first + 16 * j);
            bf16_halves(y.x, y.y, high[j], low[j]);
            total += y.x + y.y;
        }
        *(uint4 *)(out.high + r * H + i * 8) = make_uint4(high[0], high[1], high[2], high[3]);
        *(uint4 *)(out.low + r * H + i * 8) = make_uint4(low[0], low[1], low[2], low[3]);
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
            total += __shfl_xor_sync(ALL_LANES, total, step);
        }
        if (i % 8 == 0) out.sums[r * (H / 64) + i / 8] = total;
    }
}

/* x[r] += add[r] (where add is given), then its norm. One block a row; the first sets counts
 * [EXPERTS], where given, to 0 for the routing that follows. */
KERNEL __launch_bounds__(NORM_THREADS)
    prompt_norm(float *x, const fp16 *add, const float *weight, bf16 *reordered, bf16 *high,
                bf16 *low, float *sums, int32_t *counts) {
    begin_after_previous();
    int64_t row = (int64_t)blockIdx.x * H;
    float4 v[NORM_EACH];
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        int at = ((int)threadIdx.x + i * NORM_THREADS) * 4;
        if (at >= H) break;
        v[i] = *(const float4 *)(x + row + at);
        if (add) {
            float4 a = four_halves(add + row + at);
            v[i].x += a.x, v[i].y += a.y, v[i].z += a.z, v[i].w += a.w;
            *(float4 *)(x + row + at) = v[i];
        }
    }
    if (counts && blockIdx.x == 0 && threadIdx.x < EXPERTS) counts[threadIdx.x] = 0;
    static_assert((int)EXPERTS <= (int)NORM_THREADS, "a thread an expert");
    norm_row(v, weight, blockIdx.x, {reordered, high, low, sums});
}

/* x[r] += sum over choices of weight * out[place] (in order of choice) + sigmoid(gate) * shared[r],
 * both of them stored as EXPERT_UNIT says, gate from the parts of scores; then, where a weight is
 * given, its norm. One block a row. */
KERNEL __launch_bounds__(NORM_THREADS)
    prompt_combine(const fp16 *out, const int32_t *places, const float *routing,
                   const float *scores, const fp16 *shared, float *x, const float *weight,
                   bf16 *reordered, bf16 *high, bf16 *low, float *sums) {
    begin_after_previous();
    int64_t r = blockIdx.x;
    int64_t place[TOP_K];
    float share[TOP_K];
#pragma unroll
    for (int j = 0; j < TOP_K; j++) {
        place[j] = (int64_t)places[r * TOP_K + j] * H;
        share[j] = EXPERT_UNIT * routing[r * 2 * TOP_K + TOP_K + j];
    }
    float gate = EXPERT_UNIT * sigmoid(decisive_sum(scores, gridDim.x, EXPERTS + 1, r, EXPERTS));
    float4 v[NORM_EACH];
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        int at = ((int)threadIdx.x + i * NORM_THREADS) * 4;
        if (at >= H) break;
        float4 sum = make_float4(0, 0, 0, 0), always = four_halves(shared + r * H + at);
        uint2 of[TOP_K];
        v[i] = *(const float4 *)(x + r * H + at);
#pragma unroll
        for (int j = 0; j < TOP_K; j++) of[j] = *(const uint2 *)(out + place[j] + at);
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            float2 a = half_floats(of[j].x), b = half_floats(of[j].y);
            add_scaled(sum, make_float4(a.x, a.y, b.x, b.y), share[j]);
        }
        v[i].x += fmaf(gate, always.x, sum.x), v[i].y += fmaf(gate, always.y, sum.y);
        v[i].z += fmaf(gate, always.z, sum.z), v[i].w += fmaf(gate, always.w, sum.w);
        *(float4 *)(x + r * H + at) = v[i];
    }
    if (weight) norm_row(v, weight, r, {reordered, high, low, sums});
}
