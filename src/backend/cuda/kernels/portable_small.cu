/* Mathematics: out [n][N] = X [n][K] W^T near float32 accuracy: (xh + xl) (wh + wl) without xl wl.
 * Layout: X float32 [n][K], out float32 [n][N]; W 4 or 8 bits, planar or tiles.
 * Threads: 256 a block of 16 or 32 rows and eight outputs; a warp an eighth of the columns.
 * Fused: unpacking and splitting. Agrees with ref's router, beta and decay to 16 bits a factor.
 * Bytes: 16 rows 62 us, before columns were shared among warps (docs/cuda.md; not timed since).
 *
 * Products whose results decide something (which experts, how much to forget): the router, the
 * shared expert's gate, DeltaNet's gates. Inputs and weights go to the tensor cores as a sum of two
 * bf16 each, 16 significant bits, so that scores are near float32 accuracy; these matrices are
 * small. Each of a block's eight warps takes an eighth of the columns straight from memory. */
#include "common.cuh"

enum { SMALL_THREADS = 256, SMALL_WARPS = SMALL_THREADS / 32 };

/* 16 codes of a group of one output (4 bits: two words), its scale and bias; `from` is where the
 * row's first such 16 codes lie. */
struct small_codes {
    uint4 words;
    float scale, bias;
};

__device__ __forceinline__ small_codes small_load(const cuda_mat &w, const mat_row &from, int group,
                                                  bool valid) {
    small_codes x = {};
    if (!valid) return x;
    const uint8_t *at = from.codes + code_at(w, group);
    if (w.bits == 4) {
        uint2 two = __ldg((const uint2 *)at);
        x.words = make_uint4(two.x, two.y, 0, 0);
    } else {
        x.words = __ldg((const uint4 *)at);
    }
    x.scale = bf16_float(__ldg(from.scales + factor_at(w, group)));
    x.bias = bf16_float(__ldg(from.biases + factor_at(w, group)));
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
 * blocks of 16 MT rows in x, of eight outputs in y. */
template <int MT>
__device__ void small_product(const float *a, const cuda_mat &w, float *out, int rows) {
    __shared__ float part[SMALL_WARPS][MT * 128];
    expect_layout(w);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = w.cols / 64;
    int m0 = blockIdx.x * 16 * MT, n0 = blockIdx.y * 8, n = n0 + lane / 4;
    int each = (groups + SMALL_WARPS - 1) / SMALL_WARPS;
    int begin = warp * each, end = min(begin + each, groups);
    bool valid = n < w.rows;
    float acc[3][MT][4] = {}; /* low by high, high by low, high by high */
    mat_row from = row_of(w, valid ? n : 0);
    from.codes += code_sixteen(w, lane % 4);
    small_codes next = small_load(w, from, begin, valid && begin < end);
    for (int g = begin; g < end; g++) {
        small_codes now = next;
        if (g + 1 < end) next = small_load(w, from, g + 1, valid);
        float2 x[4][MT][4]; /* this lane's part of the activations, all of it on its way at once */
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    int m = m0 + i * 16 + lane / 4 + v % 2 * 8;
                    int k = g * 64 + s * 16 + v / 2 * 8 + lane % 4 * 2;
                    x[s][i][v] = make_float2(0, 0);
                    if (m < rows) x[s][i][v] = *(const float2 *)(a + (int64_t)m * w.cols + k);
                }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t bh[2], bl[2];
#pragma unroll
            for (int u = 0; u < 2; u++) {
                float b0, b1;
                small_pair(now, w.bits, s, u == 1, b0, b1);
                bf16_halves(b0, b1, bh[u], bl[u]);
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
                uint32_t ah[4], al[4];
#pragma unroll
                for (int v = 0; v < 4; v++) bf16_halves(x[s][i][v].x, x[s][i][v].y, ah[v], al[v]);
                multiply(acc[0][i], al, bh[0], bh[1]);
                multiply(acc[1][i], ah, bl[0], bl[1]);
                multiply(acc[2][i], ah, bh[0], bh[1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            int m = i * 16 + lane / 4 + v / 2 * 8, c = lane % 4 * 2 + v % 2;
            part[warp][m * 8 + c] = acc[2][i][v] + (acc[1][i][v] + acc[0][i][v]);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < MT * 128; i += SMALL_THREADS) {
        int m = m0 + i / 8, c = n0 + i % 8;
        float sum = 0;
        for (int x = 0; x < SMALL_WARPS; x++) sum += part[x][i];
        if (m < rows && c < w.rows) out[(int64_t)m * w.rows + c] = sum;
    }
}

KERNEL __launch_bounds__(SMALL_THREADS) small_16(const float *a, cuda_mat w, float *out, int rows) {
    small_product<1>(a, w, out, rows);
}
KERNEL __launch_bounds__(SMALL_THREADS) small_32(const float *a, cuda_mat w, float *out, int rows) {
    small_product<2>(a, w, out, rows);
}
