/* Products of decode steps of several slots: 2 to 64 rows, each weight read and unpacked once for
 * up to 32 of them (docs/cuda-batch.md). A warp multiplies 16 rows of weights by 128 inputs of
 * every slot: weights are the left operand, taken 16 bytes a lane straight from memory to
 * registers, slots are the columns of the right one. The 16 warps of a block take different inputs
 * (or other rows, where there are fewer than 2,048 inputs) and their sums are added in shared
 * memory in the order of the inputs. A slot is one column of its own, so its bits depend neither on
 * the other slots nor on their number. */
#ifndef LILY_CUDA_BATCH_CUH
#define LILY_CUDA_BATCH_CUH

#include "rows.cuh"

enum {
    BATCH_THREADS = 512,
    BATCH_WARPS = BATCH_THREADS / 32,
    BATCH_ROWS = 8,   /* columns of one product */
    BATCH_CHUNK = 128, /* inputs of a warp at once */
    BATCH_PITCH = 36  /* floats: a quad's stores then meet no bank twice */
};

/* Sums of one warp: for each slot of eight, of 32 rows of weights. */
typedef float batch_sums[BATCH_ROWS][BATCH_PITCH];

/* 16 rows of weights by 128 inputs, as lane 4 g + q holds them: inputs [32 q, 32 q + 32) of rows
 * 2 g and 2 g + 1. This and batch_fetch alone know how weights lie. */
struct batch_weights {
    uint4 codes[2];
    uint32_t factors[2]; /* scale, bias */
};

/* Rows [first, first + 16) of m, those from end on being zeros. */
__device__ __forceinline__ batch_weights batch_fetch(const cuda_mat &m, int64_t first, int64_t end,
                                                     int chunk) {
    int lane = threadIdx.x % 32, column = chunk * BATCH_CHUNK + lane % 4 * 32;
    batch_weights w = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t row = first + lane / 4 * 2 + i;
        if (row >= end || column >= m.cols) continue;
        int64_t group = row * (m.cols / 64) + column / 64;
        w.codes[i] = __ldg((const uint4 *)(m.codes + (row * m.cols + column) / 2));
        w.factors[i] = __ldg(m.scales + group) | (uint32_t)__ldg(m.biases + group) << 16;
    }
    return w;
}

/* The same inputs of 8 NT slots: for word w of codes, its pairs of inputs in the order in which
 * batch_multiply unpacks codes: (0, 4), (1, 5), (2, 6), (3, 7). */
template <int NT> struct batch_inputs {
    uint32_t pairs[NT][4][4];
};

template <int NT, class Rows>
__device__ __forceinline__ void batch_load(batch_inputs<NT> &x, const Rows &rows, int cols,
                                           int chunk) {
    int lane = threadIdx.x % 32, column = chunk * BATCH_CHUNK + lane % 4 * 32;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const bf16 *row = column < cols ? rows.row(t * BATCH_ROWS + lane / 4) : nullptr;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row) v = *(const uint4 *)(row + column + w * 8);
            x.pairs[t][w][0] = __byte_perm(v.x, v.z, 0x5410);
            x.pairs[t][w][1] = __byte_perm(v.x, v.z, 0x7632);
            x.pairs[t][w][2] = __byte_perm(v.y, v.w, 0x5410);
            x.pairs[t][w][3] = __byte_perm(v.y, v.w, 0x7632);
        }
    }
}

/* Codes i and i + 4 of a word as bf16 values, rounded as dequantise8 does. */
__device__ __forceinline__ uint32_t batch_pair(uint32_t word, int i, uint32_t scale,
                                               uint32_t bias) {
    uint32_t x = ((word >> (4 * i)) & 0x000f000fu) | 0x43004300u;
    return fma_bf16x2(fma_bf16x2(x, 0x3f803f80u, 0xc300c300u), scale, bias);
}

template <int NT>
__device__ __forceinline__ void batch_multiply(float (&acc)[NT][4], const batch_weights &w,
                                               const batch_inputs<NT> &x) {
    uint32_t scale[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        scale[i] = (w.factors[i] & 0xffffu) * 0x10001u;
        bias[i] = (w.factors[i] >> 16) * 0x10001u;
    }
#pragma unroll
    for (int word = 0; word < 4; word++) {
        uint32_t code[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &c = w.codes[i];
            code[i] = word == 0 ? c.x : word == 1 ? c.y : word == 2 ? c.z : c.w;
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
            uint32_t a[4];
#pragma unroll
            for (int v = 0; v < 4; v++) {
                a[v] = batch_pair(code[v % 2], 2 * s + v / 2, scale[v % 2], bias[v % 2]);
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                multiply(acc[t], a, x.pairs[t][word][2 * s], x.pairs[t][word][2 * s + 1]);
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
 * bf16 each. */
__device__ __forceinline__ void batch_halves(float a, float b, uint32_t &high, uint32_t &low) {
    high = bf16_pair(a, b);
    low = bf16_pair(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
}

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
                    batch_halves(value[v % 2][i], value[v % 2][i + 4], ah[v], al[v]);
                }
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    batch_halves(x[2 * s + v], x[2 * s + v + 4], bh[v], bl[v]);
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

#endif
