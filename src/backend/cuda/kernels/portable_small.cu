/* Products whose results decide something (which experts, how much to forget): the router, the
 * shared expert's gate, DeltaNet's gates. Inputs and weights go to the tensor cores as a sum of two
 * bf16 each, 16 significant bits, so that scores are near float32 accuracy; these matrices are small.
 * A tile is 64 rows x 64 outputs, 64 columns a round. */
#include "common.cuh"

enum { SMALL_THREADS = 128, SMALL = 64, PART = SMALL * 64 * 2 };

__device__ __forceinline__ uint32_t place(int r, int p) {
    return (uint32_t)(r * 128 + ((p ^ (r & 7)) * 16));
}

/* Eight values as bf16 and the bf16 of what that leaves. */
__device__ __forceinline__ void split8(const float (&v)[8], char *high, char *low, uint32_t at) {
    uint32_t h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
        l[i] = bf16_pair(v[2 * i] - __uint_as_float(h[i] << 16),
                         v[2 * i + 1] - __uint_as_float(h[i] & 0xffff0000u));
    }
    *(uint4 *)(high + at) = make_uint4(h[0], h[1], h[2], h[3]);
    *(uint4 *)(low + at) = make_uint4(l[0], l[1], l[2], l[3]);
}

/* Eight values of a row of w, column first. */
__device__ __forceinline__ void values8(const cuda_mat &w, int row, int first, float (&v)[8]) {
    int64_t group = (int64_t)row * (w.cols / 64) + first / 64;
    float scale = bf16_float(w.scales[group]), bias = bf16_float(w.biases[group]);
    if (w.bits == 4) {
        uint32_t word = *(const uint32_t *)(w.codes + ((int64_t)row * w.cols + first) / 2);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = fmaf(scale, (float)(word >> (4 * i) & 15), bias);
    } else {
        uint2 word = *(const uint2 *)(w.codes + (int64_t)row * w.cols + first);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t half = i < 4 ? word.x : word.y;
            v[i] = fmaf(scale, (float)(half >> (8 * (i % 4)) & 255), bias);
        }
    }
}

/* out[row][n] = sum_k a[row][k] w[n][k]: a float [rows, w.cols], out float [rows, w.rows]. */
KERNEL __launch_bounds__(SMALL_THREADS) small(const float *a, cuda_mat w, float *out, int rows) {
    __shared__ __align__(128) char a_high[PART], a_low[PART], b_high[PART], b_low[PART];
    int m0 = blockIdx.x * SMALL, n0 = blockIdx.y * SMALL;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mw = warp / 2 * 32, nw = warp % 2 * 32;
    float acc[2][4][4] = {};
    for (int k0 = 0; k0 < w.cols; k0 += 64) {
        __syncthreads();
        for (int i = threadIdx.x; i < SMALL * 8; i += SMALL_THREADS) {
            int r = i / 8, p = i % 8;
            float v[8] = {};
            if (m0 + r < rows) {
                const float4 *from = (const float4 *)(a + (int64_t)(m0 + r) * w.cols + k0 + p * 8);
                float4 x = from[0], y = from[1];
                v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
                v[4] = y.x, v[5] = y.y, v[6] = y.z, v[7] = y.w;
            }
            split8(v, a_high, a_low, place(r, p));
            float u[8] = {};
            if (n0 + r < w.rows) values8(w, n0 + r, k0 + p * 8, u);
            split8(u, b_high, b_low, place(r, p));
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t ah[2][4], al[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t at = place(mw + i * 16 + lane % 16, 2 * k + lane / 16);
                load_matrices(ah[i], shared_address(a_high) + at);
                load_matrices(al[i], shared_address(a_low) + at);
            }
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t at = place(nw + j * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
                uint32_t bh[4], bl[4];
                load_matrices(bh, shared_address(b_high) + at);
                load_matrices(bl, shared_address(b_low) + at);
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        multiply(acc[i][j + c], al[i], bh[2 * c], bh[2 * c + 1]);
                        multiply(acc[i][j + c], ah[i], bl[2 * c], bl[2 * c + 1]);
                        multiply(acc[i][j + c], ah[i], bh[2 * c], bh[2 * c + 1]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                int m = m0 + mw + i * 16 + lane / 4 + v / 2 * 8;
                int n = n0 + nw + j * 8 + lane % 4 * 2 + v % 2;
                if (m < rows && n < w.rows) out[(int64_t)m * w.rows + n] = acc[i][j][v];
            }
}
