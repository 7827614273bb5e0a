/* How matrices lie in the memory of a card with the persistent decode kernel (sm_90a): as tiles,
 * each one contiguous piece of codes followed by its scales and biases, so that a block's share of
 * a matrix is one stream for bulk copies and lands in shared memory in the order in which the
 * tensor cores' registers take it: every lane of a warp reads 16 bytes beside its neighbour's, no
 * bank conflicts, no shuffles. pack.c makes them; all other kernels read them in place: 128 inputs
 * of a row of a wide tile are 64 contiguous bytes. C11 and CUDA.
 *
 *   wide  32 rows x 128 inputs of 4 bits   2,048 + 256 bytes   everything but the two below
 *   down  128 rows x 32 inputs of 4 bits   2,048 + 512 bytes   second half of an expert
 *   byte  16 rows x 128 inputs of 8 bits   2,048 + 128 bytes   router and shared gate
 *   score 16 rows x 128 inputs of 16 bits  4,096 + 128 bytes   router times out (decode_fuse.cu)
 *
 * A scale and its bias are one 32-bit word, scale in the low half, both bfloat16; those of `score`
 * are float32 and without a bias. Missing rows of
 * the last tiles are zeros. A `down` tile holds half a group, so its scales are there twice (in the
 * tile of the group's other half): 64 KB more per expert. */
#ifndef LILY_CUDA_TILE_H
#define LILY_CUDA_TILE_H

#include <stdint.h>

#ifdef __CUDACC__
#define TILE_FN static __host__ __device__ __forceinline__
#else
#define TILE_FN static inline
#endif

enum {
    TILE_CODES = 2048,
    TILE_WIDE_ROWS = 32,
    TILE_WIDE_COLS = 128,
    TILE_WIDE_BYTES = TILE_CODES + 256,
    TILE_DOWN_ROWS = 128,
    TILE_DOWN_COLS = 32,
    TILE_DOWN_BYTES = TILE_CODES + 512,
    TILE_BYTE_ROWS = 16,
    TILE_BYTE_COLS = 128,
    TILE_BYTE_BYTES = TILE_CODES + 128,
    TILE_SCORE_PLANE = 2048, /* the signed upper bytes, then as many lower ones */
    TILE_SCORE_ROWS = 16,
    TILE_SCORE_COLS = 128,
    TILE_SCORE_BYTES = 2 * TILE_SCORE_PLANE + 128
};

/* Wide tile, row r and input k within it. Lane 4 (r / 4) + k / 32 of a warp owns the 16 bytes with
 * the codes of inputs 32 (k / 32) and on; the four rows of a lane lie 512 bytes apart. */
TILE_FN int tile_wide_codes(int r, int k) { /* byte that holds the code; low nibble for even k */
    return (r & 3) * 512 + (4 * (r >> 2) + (k >> 5)) * 16 + ((k & 31) >> 1);
}
TILE_FN int tile_wide_scale(int r, int group) { /* group: 0 or 1 of the tile */
    return TILE_CODES + (4 * (r >> 2) + 2 * ((r >> 1) & 1) + group) * 8 + (r & 1) * 4;
}

/* Down tile: sets of 32 rows; a lane owns one 32-bit word (8 codes) of four of them. */
TILE_FN int tile_down_codes(int r, int k) {
    int set = r >> 5, octet = ((r & 1) << 1) | ((r >> 1) & 1);
    return set * 512 + (4 * ((r & 31) >> 2) + (k >> 3)) * 16 + octet * 4 + ((k & 7) >> 1);
}
TILE_FN int tile_down_scale(int r) {
    return TILE_CODES + r * 4;
}

/* Byte tile: one byte a code. */
TILE_FN int tile_byte_codes(int r, int k) {
    int half = (k & 31) >> 4;
    return ((r & 1) * 2 + half) * 512 + (4 * (r >> 1) + (k >> 5)) * 16 + (k & 15);
}
TILE_FN int tile_byte_scale(int r, int group) {
    return TILE_CODES + (2 * (r >> 1) + group) * 8 + (r & 1) * 4;
}

/* Score tile: within a plane a byte a code; of each 32 inputs eight times four of one parity. */
TILE_FN int tile_score_codes(int r, int k) {
    int four = ((k & 31) >> 3) + (k & 1) * 4;
    return (four >> 1) * 512 + (4 * (r >> 1) + (k >> 5)) * 16 + (2 * (four & 1) + (r & 1)) * 4 +
           ((k & 7) >> 1);
}
TILE_FN int tile_score_scale(int r, int group) {
    return 2 * TILE_SCORE_PLANE + (2 * (r >> 1) + group) * 8 + (r & 1) * 4;
}

#endif
