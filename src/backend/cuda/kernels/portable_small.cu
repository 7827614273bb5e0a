/* Products whose results decide something (which experts, how much to forget): the router, the
 * shared expert's gate, DeltaNet's gates. Inputs and weights go to the tensor cores as a sum of two
 * bf16 each, 16 significant bits, so that scores are near float32 accuracy; these matrices are
 * small. A warp computes eight outputs of 16 MT rows and takes codes straight from memory, as in
 * thin.cuh. */
#include "common.cuh"

enum { SMALL_THREADS = 256, SMALL_AHEAD = 4 };

/* Eight values as bf16 and the bf16 of what that leaves. */
__device__ __forceinline__ void split8(const float (&v)[8], char *high, char *low) {
    uint32_t h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
        l[i] = bf16_pair(v[2 * i] - __uint_as_float(h[i] << 16),
                         v[2 * i + 1] - __uint_as_float(h[i] & 0xffff0000u));
    }
    *(uint4 *)high = make_uint4(h[0], h[1], h[2], h[3]);
    *(uint4 *)low = make_uint4(l[0], l[1], l[2], l[3]);
}

/* 16 codes of a group of one output (4 bits: two words), its scale and bias. */
struct small_codes {
    uint4 words;
    float scale, bias;
};

__device__ __forceinline__ small_codes small_load(const cuda_mat &w, int64_t row, int group,
                                                  bool valid) {
    small_codes x = {};
    if (!valid) return x;
    int q = threadIdx.x % 4;
    const uint8_t *at = w.codes + row * (w.cols * w.bits / 8) + group * 8 * w.bits;
    if (w.bits == 4) {
        uint2 two = __ldg((const uint2 *)(at + q * 8));
        x.words = make_uint4(two.x, two.y, 0, 0);
    } else {
        x.words = __ldg((const uint4 *)(at + q * 16));
    }
    x.scale = bf16_float(__ldg(w.scales + row * (w.cols / 64) + group));
    x.bias = bf16_float(__ldg(w.biases + row * (w.cols / 64) + group));
    return x;
}

/* The pair of values at columns 2 q and 2 q + 1 of the lower (upper) eight of step s of the group,
 * whose codes lane s of the quad has. */
__device__ __forceinline__ void small_pair(const small_codes &x, int bits, int s, bool upper,
                                           float &a, float &b) {
    int lane = threadIdx.x % 32, q = lane % 4, from = lane / 4 * 4 + s;
    uint32_t codes;
    if (bits == 4) {
        codes = __shfl_sync(ALL_LANES, upper ? x.words.y : x.words.x, from) >> (8 * q);
        a = fmaf(x.scale, (float)(codes & 15), x.bias);
        b = fmaf(x.scale, (float)(codes >> 4 & 15), x.bias);
    } else {
        uint32_t first = __shfl_sync(ALL_LANES, upper ? x.words.z : x.words.x, from);
        uint32_t second = __shfl_sync(ALL_LANES, upper ? x.words.w : x.words.y, from);
        codes = (q < 2 ? first : second) >> (16 * (q % 2));
        a = fmaf(x.scale, (float)(codes & 255), x.bias);
        b = fmaf(x.scale, (float)(codes >> 8 & 255), x.bias);
    }
}

/* out[row][n] = sum_k a[row][k] w[n][k]: a float [rows, w.cols], out float [rows, w.rows]. Grid:
 * blocks of 16 MT rows in x, of eight outputs a warp in y. */
template <int MT>
__device__ void small_product(const float *a, const cuda_mat &w, float *out, int rows) {
    constexpr int PIECE = 512 / MT, PITCH = PIECE * 2 + 16;
    __shared__ __align__(128) char high[16 * MT * PITCH], low[16 * MT * PITCH];
    int lane = threadIdx.x % 32, groups = w.cols / 64, m0 = blockIdx.x * 16 * MT;
    int n0 = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 8, n = n0 + lane / 4;
    bool valid = n < w.rows;
    small_codes next[SMALL_AHEAD];
#pragma unroll
    for (int d = 0; d < SMALL_AHEAD; d++) {
        if (d < groups) next[d] = small_load(w, n, d, valid);
    }
    float acc[3][MT][4] = {}; /* low by high, high by low, high by high */
    for (int first = 0; first < w.cols; first += PIECE) {
        int columns = min(PIECE, w.cols - first), pieces = columns / 8;
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * MT * pieces; i += blockDim.x) {
            int r = i / pieces, p = i % pieces;
            float v[8] = {};
            if (m0 + r < rows) {
                const float4 *from = (const float4 *)(a + (int64_t)(m0 + r) * w.cols + first + p * 8);
                float4 x = from[0], y = from[1];
                v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
                v[4] = y.x, v[5] = y.y, v[6] = y.z, v[7] = y.w;
            }
            split8(v, high + r * PITCH + p * 16, low + r * PITCH + p * 16);
        }
        __syncthreads();
        for (int g0 = 0; g0 < columns / 64; g0 += SMALL_AHEAD) {
#pragma unroll
            for (int d = 0; d < SMALL_AHEAD; d++) {
                int g = g0 + d, ahead = first / 64 + g + SMALL_AHEAD;
                if (g >= columns / 64) break;
                small_codes now = next[d];
                if (ahead < groups) next[d] = small_load(w, n, ahead, valid);
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint32_t bh[2], bl[2];
#pragma unroll
                    for (int u = 0; u < 2; u++) {
                        float x, y;
                        small_pair(now, w.bits, s, u == 1, x, y);
                        bh[u] = bf16_pair(x, y);
                        bl[u] = bf16_pair(x - __uint_as_float(bh[u] << 16),
                                          y - __uint_as_float(bh[u] & 0xffff0000u));
                    }
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        uint32_t ah[4], al[4], at = (uint32_t)((i * 16 + lane % 16) * PITCH +
                                                               g * 128 + s * 32 + lane / 16 * 16);
                        load_matrices(ah, shared_address(high) + at);
                        load_matrices(al, shared_address(low) + at);
                        multiply(acc[0][i], al, bh[0], bh[1]);
                        multiply(acc[1][i], ah, bl[0], bl[1]);
                        multiply(acc[2][i], ah, bh[0], bh[1]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            int m = m0 + i * 16 + lane / 4 + v / 2 * 8, c = n0 + lane % 4 * 2 + v % 2;
            if (m >= rows || c >= w.rows) continue;
            out[(int64_t)m * w.rows + c] = acc[2][i][v] + (acc[1][i][v] + acc[0][i][v]);
        }
}

KERNEL __launch_bounds__(SMALL_THREADS) small_16(const float *a, cuda_mat w, float *out, int rows) {
    small_product<1>(a, w, out, rows);
}
KERNEL __launch_bounds__(SMALL_THREADS) small_32(const float *a, cuda_mat w, float *out, int rows) {
    small_product<2>(a, w, out, rows);
}
