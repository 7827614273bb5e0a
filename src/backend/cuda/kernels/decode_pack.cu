/* Planar matrices as tiles (tile.h), once when a model is opened. A thread moves eight codes, or a
 * scale and a bias. Grid: words in x, matrices (experts) in y. */
#include SHAPE_HEADER
#include "decode.h"
#include "tile.h"

namespace {

/* Where row r and input k of a matrix of that many rows and columns lie: tile and place in it. */
__device__ __forceinline__ uint8_t *tile_at(const decode_pack &p, uint8_t *to, int rows, int r,
                                            int k) {
    int cols = p.a.cols;
    switch (p.tile) {
    case DECODE_DOWN:
        return to + ((size_t)(k / 32) * (rows / 128) + r / 128) * TILE_DOWN_BYTES;
    case DECODE_BYTE:
        return to + ((size_t)(r / 16) * (cols / 128) + k / 128) * TILE_BYTE_BYTES;
    case DECODE_WIDE_SLICES:
        return to + ((size_t)(k / 128) * (rows / 32) + r / 32) * TILE_WIDE_BYTES;
    default:
        return to + ((size_t)(r / 32) * (cols / 128) + k / 128) * TILE_WIDE_BYTES;
    }
}

} /* namespace */

extern "C" __global__ void decode_pack(const __grid_constant__ decode_pack p) {
    int cols = p.a.cols, words = cols / 8, groups = cols / 64, rows = p.rows;
    if (p.b.rows) rows += p.interleaved ? p.rows : p.b.rows;
    int height = p.tile == DECODE_BYTE ? 16 : p.tile == DECODE_DOWN ? 128 : 32;
    int padded = (rows + height - 1) / height * height;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)padded * words) return;
    int r = (int)(i / words), word = (int)(i % words), k = 8 * word;
    const cuda_mat *m = &p.a;
    long long row = r;
    if (p.interleaved) {
        if (r & 1) m = &p.b;
        row = r / 2;
    } else if (p.b.rows && r >= p.rows) {
        m = &p.b;
        row = r - p.rows;
    }
    row += (long long)blockIdx.y * p.stride;
    uint8_t *tile = tile_at(p, p.to + blockIdx.y * p.bytes, padded, r, k);
    bool real = r < rows;
    uint2 codes = {0, 0};
    if (real && m->bits == 8) {
        codes = *reinterpret_cast<const uint2 *>(m->codes + row * cols + k);
    } else if (real) {
        codes.x = *reinterpret_cast<const uint32_t *>(m->codes + (row * cols + k) / 2);
    }
    if (p.tile == DECODE_BYTE) {
        if (m->bits == 4) { /* the same codes, a byte each */
            uint32_t low = codes.x & 0x0f0f0f0fu, high = codes.x >> 4 & 0x0f0f0f0fu;
            codes.x = __byte_perm(low, high, 0x5140);
            codes.y = __byte_perm(low, high, 0x7362);
        }
        *reinterpret_cast<uint2 *>(tile + tile_byte_codes(r % 16, k % 128)) = codes;
    } else if (p.tile == DECODE_DOWN) {
        *reinterpret_cast<uint32_t *>(tile + tile_down_codes(r % 128, k % 32)) = codes.x;
    } else {
        *reinterpret_cast<uint32_t *>(tile + tile_wide_codes(r % 32, k % 128)) = codes.x;
    }
    /* A group's scale, once for each tile that holds a part of it. */
    int span = p.tile == DECODE_DOWN ? 32 : 64;
    if (k % span) return;
    uint32_t pair = 0;
    if (real) {
        long long at = row * groups + k / 64;
        pair = m->scales[at] | (uint32_t)m->biases[at] << 16;
    }
    int at = p.tile == DECODE_DOWN   ? tile_down_scale(r % 128)
             : p.tile == DECODE_BYTE ? tile_byte_scale(r % 16, k % 128 / 64)
                                     : tile_wide_scale(r % 32, k % 128 / 64);
    *reinterpret_cast<uint32_t *>(tile + at) = pair;
}
