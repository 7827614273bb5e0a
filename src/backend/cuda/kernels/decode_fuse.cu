/* Mathematics: F = router diag(post_norm) out, [E][inputs of out]: what the mixer's heads add to
 *   the router's scores before the norm's factor, so that no score waits for the residual stream.
 * Layout: byte and wide tiles (tile.h) in, [slice of 128 inputs][quarter of the experts] score
 *   tiles out: integers of +-32767 with a scale for each row and 64 inputs.
 * Threads: a block of 256 one tile, 16 experts x 128 inputs; a thread eight experts of one input.
 * Fused: both factors' scales; none of ref's stages, it is made once, when a model is opened.
 * Bytes: 86 GFMA and 86 MB for 40 layers; not timed alone. */
#include "decode_shape.cuh"

namespace decode {

constexpr int DEPTH = TILE_WIDE_ROWS; /* of the hidden width at once: a tile of out */
constexpr int FUSE_THREADS = DECODE_FUSE_THREADS;
constexpr int OWN = TILE_SCORE_ROWS * TILE_SCORE_COLS / FUSE_THREADS;
constexpr float CODE_MAX = 32767.0f;

struct FuseShared {
    alignas(16) float router[DEPTH][TILE_SCORE_ROWS]; /* times the norm's weight */
    alignas(16) float out[DEPTH][TILE_SCORE_COLS];
    float most[TILE_SCORE_ROWS][TILE_SCORE_COLS / 32]; /* magnitude in a row of a warp */
};

__device__ __forceinline__ float router_weight(const uint8_t *router, int row, int k) {
    const uint8_t *tile =
        router + ((size_t)(row / TILE_BYTE_ROWS) * SLICES + k / TILE_BYTE_COLS) * TILE_BYTE_BYTES;
    const int r = row % TILE_BYTE_ROWS, c = k % TILE_BYTE_COLS;
    uint32_t pair = *reinterpret_cast<const uint32_t *>(tile + tile_byte_scale(r, c / 64));
    return fmaf(bf16_low(pair), (float)tile[tile_byte_codes(r, c)], bf16_high(pair));
}

/* Row r of a tile of out, its inputs k .. k + 3. */
__device__ __forceinline__ float4 out_weights(const uint8_t *tile, int r, int k) {
    uint32_t pair = *reinterpret_cast<const uint32_t *>(tile + tile_wide_scale(r, k / 64));
    unsigned codes = *reinterpret_cast<const uint16_t *>(tile + tile_wide_codes(r, k));
    float scale = bf16_low(pair), bias = bf16_high(pair);
    return {fmaf(scale, (float)(codes & 15), bias), fmaf(scale, (float)(codes >> 4 & 15), bias),
            fmaf(scale, (float)(codes >> 8 & 15), bias), fmaf(scale, (float)(codes >> 12), bias)};
}

/* Rows [first, first + n) of the scores times the slice, in float32: this thread's. */
__device__ __forceinline__ void multiply_through(FuseShared &s, const uint8_t *router,
                                                 const float *norm, const uint8_t *out, int first,
                                                 int n, float (&sum)[OWN]) {
    const int tid = threadIdx.x, k = tid % TILE_SCORE_COLS, own = tid / TILE_SCORE_COLS * OWN;
    for (int h = 0; h < H; h += DEPTH, out += TILE_WIDE_BYTES) {
        __syncthreads();
        for (int i = tid; i < TILE_SCORE_ROWS * DEPTH; i += FUSE_THREADS) {
            int r = i / DEPTH, j = i % DEPTH;
            s.router[j][r] = r < n ? router_weight(router, first + r, h + j) * norm[h + j] : 0.0f;
        }
        for (int i = tid; i < DEPTH * TILE_SCORE_COLS / 4; i += FUSE_THREADS) {
            int r = i / (TILE_SCORE_COLS / 4), four = 4 * (i % (TILE_SCORE_COLS / 4));
            *reinterpret_cast<float4 *>(&s.out[r][four]) = out_weights(out, r, four);
        }
        __syncthreads();
        float part[OWN] = {}; /* long sums are more exact in pieces */
#pragma unroll 8
        for (int j = 0; j < DEPTH; j++) {
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                part[r] = fmaf(s.router[j][own + r], s.out[j][k], part[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; r++) sum[r] += part[r];
    }
}

} /* namespace decode */

/* Grid: tiles of all quarters, slices. */
extern "C" __global__ void __launch_bounds__(decode::FUSE_THREADS)
    decode_fuse(const uint8_t *router, const float *norm, const uint8_t *out, uint8_t *scores) {
    using namespace decode;
    __shared__ FuseShared s;
    const int tid = threadIdx.x, k = tid % TILE_SCORE_COLS, own = tid / TILE_SCORE_COLS * OWN;
    const int quarter = (int)blockIdx.x / SCORE_TILES, tile = (int)blockIdx.x % SCORE_TILES;
    const int row = tile * TILE_SCORE_ROWS, group = k / 64;
    float sum[OWN] = {};
    multiply_through(s, router, norm, out + (size_t)blockIdx.y * (H / 32) * TILE_WIDE_BYTES,
                     quarter * SCORE_ROWS + row, SCORE_ROWS - row, sum);
    for (int r = 0; r < OWN; r++) {
        float most = fabsf(sum[r]);
        for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        if (tid % 32 == 0) s.most[own + r][k / 32] = most;
    }
    __syncthreads();
    uint8_t *to = scores + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * (size_t)TILE_SCORE_BYTES;
    for (int r = 0; r < OWN; r++) {
        float top = fmaxf(s.most[own + r][2 * group], s.most[own + r][2 * group + 1]);
        int code = top > 0 ? (int)rintf(sum[r] * (CODE_MAX / top)) : 0;
        int at = tile_score_codes(own + r, k);
        to[at] = (uint8_t)(code >> 8);
        to[TILE_SCORE_PLANE + at] = (uint8_t)code;
        if (k % 64 == 0) {
            *reinterpret_cast<float *>(to + tile_score_scale(own + r, group)) = top / CODE_MAX;
        }
    }
}
