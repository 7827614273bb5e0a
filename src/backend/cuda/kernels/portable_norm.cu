/* Mathematics: x = embedding row; x += add; x / sqrt(mean(x^2) + eps) * weight; is x finite.
 * Layout: x, add and normed float32 [rows][H], normed also bf16; the table quantised, row by row.
 * Threads: a block a row.
 * Fused: residual sum and norm, in float32 and bf16 at once. Agrees with ref/norm.c.
 * Bytes: 4,096 rows: 151 MB at most in 43 us, 76 % of 4,642 GB/s (bench/cuda-portable-h200.json).
 *
 * Embedding rows, the residual stream and its norms. */
#include "common.cuh"

/* Row r of the embedding: of token ids[r], or, without ids, of slot r's own (its input, or the
 * token it sampled last). */
KERNEL embed(cuda_mat table, const int32_t *ids, const cuda_slot *slots, float *x) {
    int r = blockIdx.x, token;
    if (ids) {
        token = ids[r];
    } else {
        token = slots[r].input;
        if (token < 0) token = *slots[r].token;
    }
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        x[(int64_t)r * H + i] = mat_value(table, token, i);
    }
}

/* x[r] += add[r] (where add is given); normed = x / sqrt(mean(x^2) + eps) * weight, as float32 and
 * bf16 (each where given). Row r of the output is row r * stride + first of x. One block a row. */
KERNEL rms_norm(float *x, const float *add, const float *weight, float *normed, bf16 *normed_bf,
                int first) {
    int64_t from = ((int64_t)blockIdx.x + first) * H, to = (int64_t)blockIdx.x * H;
    float sum = 0;
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        float v = x[from + i];
        if (add) {
            v += add[from + i];
            x[from + i] = v;
        }
        sum = fmaf(v, v, sum);
    }
    sum = block_sum(sum);
    float scale = 1.0f / sqrtf(sum / H + SHAPE_NORM_EPS);
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        float v = x[from + i] * scale * weight[i];
        if (normed) normed[to + i] = v;
        if (normed_bf) normed_bf[to + i] = to_bf16(v);
    }
}

/* flags[r / per_flag] = 0 when any of row r of x[rows][n] is NaN or infinite. Grid: rows in x, any
 * number of blocks that share a row in y. */
KERNEL check_finite(const float *x, int64_t n, int per_flag, int32_t *flags) {
    bool bad = false;
    const float *row = x + (int64_t)blockIdx.x * n;
    int64_t step = (int64_t)blockDim.x * gridDim.y;
    for (int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < n; i += step) {
        bad |= !isfinite(row[i]);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0) flags[blockIdx.x / per_flag] = 0;
}
