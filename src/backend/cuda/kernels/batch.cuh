/* Products of decode steps of several slots from planar weights: 2 to 64 rows, each weight read and
 * unpacked once for up to 16 of them (docs/cuda-batch.md; batch_tiles.cuh where weights lie as
 * tiles). A warp multiplies 16 rows of weights by 128 inputs of every slot: weights are the left
 * operand, taken straight from memory to registers, slots are the columns of the right one. The 16
 * warps of a block take different inputs (or other rows, where there are fewer than 2,048 inputs)
 * and their sums are added in shared memory in the order of the inputs. A slot is one column of its
 * own, so its bits depend neither on the other slots nor on their number. */
#ifndef LILY_CUDA_BATCH_CUH
#define LILY_CUDA_BATCH_CUH

#include "rows.cuh"

enum {
    BATCH_THREADS = 512,
    BATCH_WARPS = BATCH_THREADS / 32,
    BATCH_ROWS = 8,    /* columns of one product */
    BATCH_CHUNK = 128, /* inputs of a warp at once */
    BATCH_PITCH = 36   /* floats: a quad's stores then meet no bank twice */
};

/* Sums of one warp: for each slot of eight, of 32 rows of weights. */
typedef float batch_sums[BATCH_ROWS][BATCH_PITCH];

/* 16 rows of weights by 128 inputs, as lane 4 g + q holds them: of rows 2 g and 2 g + 1 four words
 * of eight codes, word w of the inputs from batch_column(w) on, so that a product of four lanes
 * stays within one group; scales and biases of both groups. These two functions, batch_column and
 * batch_factors alone know how weights lie. */
struct batch_weights {
    uint2 codes[2][2]; /* row, group */
    uint32_t scales[2], biases[2];
};

__device__ __forceinline__ int batch_column(int word) {
    return word / 2 * 64 + threadIdx.x % 4 * 16 + word % 2 * 8;
}

/* Rows [first, first + 16) of m, those from end on being zeros. */
__device__ __forceinline__ batch_weights batch_fetch(const cuda_mat &m, int first, int end,
                                                     int chunk) {
    int lane = threadIdx.x % 32, column = chunk * BATCH_CHUNK;
    bool whole = m.cols % BATCH_CHUNK == 0; /* else the last chunk is one group */
    batch_weights w = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + lane / 4 * 2 + i;
        if (row >= end || column >= m.cols) continue;
        uint32_t code = ((uint32_t)row * (uint32_t)m.cols + (uint32_t)column) / 2;
        uint32_t group = (uint32_t)row * (uint32_t)(m.cols / 64) + (uint32_t)column / 64;
        code += threadIdx.x % 4 * 8;
        w.codes[i][0] = __ldg((const uint2 *)(m.codes + code));
        if (whole) {
            w.codes[i][1] = __ldg((const uint2 *)(m.codes + code + 32));
            w.scales[i] = __ldg((const uint32_t *)(m.scales + group));
            w.biases[i] = __ldg((const uint32_t *)(m.biases + group));
        } else {
            w.scales[i] = __ldg(m.scales + group);
            w.biases[i] = __ldg(m.biases + group);
        }
    }
    return w;
}

/* Scale and bias of a row (0 or 1 of the lane's) and group. */
__device__ __forceinline__ float2 batch_factors(const batch_weights &w, int i, int group) {
    return make_float2(__uint_as_float(group ? w.scales[i] & 0xffff0000u : w.scales[i] << 16),
                       __uint_as_float(group ? w.biases[i] & 0xffff0000u : w.biases[i] << 16));
}

/* The same inputs of 8 NT slots: for each word of codes its pairs of inputs in the order in which
 * batch_multiply unpacks codes: (0, 4), (1, 5), (2, 6), (3, 7); and the sum of each group for the
 * lane's two slots of a product, 2 q and 2 q + 1. */
template <int NT> struct batch_inputs {
    uint32_t pairs[NT][4][4];
    float sums[NT][2][2];
};

template <int NT, class Rows>
__device__ __forceinline__ void batch_load(batch_inputs<NT> &x, const Rows &rows, int cols,
                                           int chunk) {
    const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const bf16 *row = rows.row(t * BATCH_ROWS + threadIdx.x % 32 / 4);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int column = chunk * BATCH_CHUNK + batch_column(w);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row && column < cols) v = *(const uint4 *)(row + column);
            x.pairs[t][w][0] = __byte_perm(v.x, v.z, 0x5410);
            x.pairs[t][w][1] = __byte_perm(v.x, v.z, 0x7632);
            x.pairs[t][w][2] = __byte_perm(v.y, v.w, 0x5410);
            x.pairs[t][w][3] = __byte_perm(v.y, v.w, 0x7632);
        }
#pragma unroll
        for (int group = 0; group < 2; group++) {
            float acc[4] = {};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const uint32_t *pair = &x.pairs[t][2 * group + s / 2][2 * (s % 2)];
                multiply(acc, ones, pair[0], pair[1]);
            }
            x.sums[t][group][0] = acc[0], x.sums[t][group][1] = acc[1];
        }
    }
}

/* acc += 16 rows of weights times the inputs. Codes enter the product as 128 + code, which bf16
 * holds exactly, so that a weight is rounded nowhere; scale and bias are applied to the sums of a
 * group: scale * sum + (bias - 128 scale) * sum of the inputs. */
template <int NT>
__device__ __forceinline__ void batch_multiply(float (&acc)[NT][4], const batch_weights &w,
                                               const batch_inputs<NT> &x) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
        float sum[NT][4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t a[4];
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const uint2 &c = w.codes[v % 2][group];
                int shift = 8 * (s % 2) + v / 2 * 4;
                a[v] = select_or((s < 2 ? c.x : c.y) >> shift, 0x000f000fu, 0x43004300u);
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint32_t *pair = &x.pairs[t][2 * group + s / 2][2 * (s % 2)];
                multiply(sum[t], a, pair[0], pair[1]);
            }
        }
#pragma unroll
        for (int v = 0; v < 4; v++) {
            float2 f = batch_factors(w, v / 2, group);
            float rest = fmaf(-128.0f, f.x, f.y);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                acc[t][v] = fmaf(f.x, sum[t][v], fmaf(rest, x.sums[t][group][v % 2], acc[t][v]));
            }
        }
    }
}

/* The warp's sums of 16 rows of weights (the upper or lower half of 32) to shared memory. */
__device__ __forceinline__ void batch_keep(batch_sums &to, const float (&acc)[4], int half) {
    int lane = threadIdx.x % 32, row = half * 16 + lane / 4 * 2, slot = lane % 4 * 2;
    *(float2 *)&to[slot][row] = make_float2(acc[0], acc[2]);
    *(float2 *)&to[slot + 1][row] = make_float2(acc[1], acc[3]);
}

/* How a block's warps share inputs of so many columns: warp w takes chunk w % slices of the set
 * w / slices of 32 rows. */
struct batch_split {
    int slices, sets;
    __device__ explicit batch_split(int cols) {
        int chunks = (cols + BATCH_CHUNK - 1) / BATCH_CHUNK;
        slices = min(chunks, (int)BATCH_WARPS);
        sets = BATCH_WARPS / slices;
    }
};

/* Sum of a row of weights over the warps of its set. */
__device__ __forceinline__ float batch_sum(const batch_sums *kept, const batch_split &split,
                                           int set, int stride, int slot, int row) {
    float sum = 0;
    for (int s = 0; s < split.slices; s++) {
        sum += kept[(set * split.slices + s) * stride][slot][row];
    }
    return sum;
}

/* ---- near float32 accuracy ------------------------------------------------------------------- */

/* Products whose results decide something (portable_small.cu): inputs and weights as the sum of two
 * bf16 each (bf16_halves). */

/* Eight neighbouring values of a row. */
__device__ __forceinline__ void batch_values(const cuda_mat &m, int64_t row, int column, bool valid,
                                             float (&out)[8]) {
    uint2 codes = make_uint2(0, 0);
    float scale = 0, bias = 0;
    if (valid) {
        int64_t group = row * (m.cols / 64) + column / 64;
        scale = bf16_float(__ldg(m.scales + group)), bias = bf16_float(__ldg(m.biases + group));
        if (m.bits == 4) {
            codes.x = __ldg((const uint32_t *)(m.codes + (row * m.cols + column) / 2));
        } else {
            codes = __ldg((const uint2 *)(m.codes + row * m.cols + column));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t code = m.bits == 4 ? codes.x >> (4 * i) & 15
                                    : (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)) & 255;
        out[i] = fmaf(scale, (float)code, bias);
    }
}

/* out[r][n] = sum_k a[r][k] w[n][k] for n in [first, first + 16) and eight rows r from r0 on: by
 * all threads of a block, at most 2,048 columns. */
__device__ __forceinline__ void batch_precise(const float *a, const cuda_mat &w, int first, int r0,
                                              int rows, float *out, batch_sums *kept) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    int slices = batch_split(w.cols).slices, column = warp * BATCH_CHUNK + lane % 4 * 32;
    float acc[3][4] = {}; /* low by high, high by low, high by high */
    if (warp < slices) {
#pragma unroll
        for (int word = 0; word < 4; word++) {
            float value[2][8], x[8] = {};
            int c = column + word * 8;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = first + 2 * g + i;
                batch_values(w, row, c, row < w.rows && c < w.cols, value[i]);
            }
            if (r0 + g < rows && c < w.cols) {
                const float4 *from = (const float4 *)(a + (int64_t)(r0 + g) * w.cols + c);
                float4 u = from[0], v = from[1];
                x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
                x[4] = v.x, x[5] = v.y, x[6] = v.z, x[7] = v.w;
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                uint32_t ah[4], al[4], bh[2], bl[2];
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    int i = 2 * s + v / 2;
                    bf16_halves(value[v % 2][i], value[v % 2][i + 4], ah[v], al[v]);
                }
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    bf16_halves(x[2 * s + v], x[2 * s + v + 4], bh[v], bl[v]);
                }
                multiply(acc[0], al, bh[0], bh[1]);
                multiply(acc[1], ah, bl[0], bl[1]);
                multiply(acc[2], ah, bh[0], bh[1]);
            }
        }
#pragma unroll
        for (int v = 0; v < 4; v++) acc[2][v] += acc[1][v] + acc[0][v];
        batch_keep(kept[warp], acc[2], 0);
    }
    __syncthreads();
    int row = threadIdx.x % 16, slot = threadIdx.x / 16, n = first + row, r = r0 + slot;
    if (slot < BATCH_ROWS && n < w.rows && r < rows) {
        out[(int64_t)r * w.rows + n] = batch_sum(kept, batch_split(w.cols), 0, 1, slot, row);
    }
}

/* ---- between layers -------------------------------------------------------------------------- */

/* Four channels of row r of the norm: y = x * scale * weight as float32 and bf16. */
__device__ __forceinline__ void keep_normed(float4 x, float scale, const float *weight, int64_t r,
                                            int c, float *normed, bf16 *normed_bf) {
    float4 w = *(const float4 *)(weight + c);
    float4 y =
        make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w);
    *(float4 *)(normed + r * H + c) = y;
    *(uint2 *)(normed_bf + r * H + c) = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
}

enum { CHANNELS = (H / 4 + BATCH_THREADS - 1) / BATCH_THREADS }; /* fours of a row, a thread */

#endif
