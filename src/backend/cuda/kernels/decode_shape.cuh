/* The persistent decode kernel's numbers of the shape it is compiled for: sizes, and into how many
 * tiles and jobs they come apart. */
#ifndef LILY_CUDA_DECODE_SHAPE_CUH
#define LILY_CUDA_DECODE_SHAPE_CUH

#include SHAPE_HEADER
#include "decode.h"
#include "tile.h"

namespace decode {

constexpr int H = SHAPE_HIDDEN;
constexpr int SLICES = H / TILE_WIDE_COLS; /* slices of the hidden width: one a warp */
constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int EXPERTS = SHAPE_EXPERTS, TOP_K = SHAPE_TOP_K;
constexpr int CONV = SHAPE_CONV_DIM, KDIM = SHAPE_GDN_K_DIM, VDIM = SHAPE_GDN_V_DIM;
constexpr int VHEADS = SHAPE_GDN_V_HEADS, QDIM = SHAPE_Q_DIM, KVDIM = SHAPE_KV_DIM;
constexpr int KV_HEADS = SHAPE_KV_HEADS, HEAD = SHAPE_HEAD_DIM, QPK = 8;
__host__ __device__ constexpr int row_tiles(int rows) {
    return (rows + 31) / 32;
}
constexpr int GDN_ROWS = CONV + VDIM + 2 * VHEADS, ATTN_ROWS = 2 * QDIM + 2 * KVDIM;
constexpr int OUT_PARTS = DECODE_OUT_PARTS;                  /* blocks that share a slice of out */
constexpr int OUT_TILES = H / 32 / OUT_PARTS;                /* tiles of one of them */
constexpr int GDN_SLICES = VHEADS, ATTN_SLICES = QDIM / 128; /* of out's inputs */
constexpr int SCORE_ROWS = EXPERTS / OUT_PARTS;              /* scores of one of them */
constexpr int SCORE_TILES = (SCORE_ROWS + TILE_SCORE_ROWS - 1) / TILE_SCORE_ROWS;
constexpr int SCORE_BYTES = SCORE_TILES * TILE_SCORE_BYTES;
constexpr int INNER = DECODE_INNER;
constexpr int EXPERT_JOBS = SHAPE_EXPERT_WIDTH / INNER, ROUTED_JOBS = TOP_K * EXPERT_JOBS;
constexpr int SHARED_SLICES = SHAPE_SHARED_WIDTH / INNER;
constexpr int DOWN_TILES = H / TILE_DOWN_ROWS; /* of one slice of 32 inputs */
constexpr int SHARED_TILES = row_tiles(2 * SHAPE_SHARED_WIDTH);
constexpr int ROUTER_TILES = EXPERTS / TILE_BYTE_ROWS; /* rows; then those of the shared gate */
constexpr int ROUTER_JOB = 2;                          /* tiles of a block */
constexpr int ROUTER_JOBS = ROUTER_TILES * SLICES / ROUTER_JOB;
static_assert(WARPS % SLICES == 0, "a warp keeps one slice");
static_assert(SHAPE_GDN_HEAD_DIM == 128 && HEAD == 256, "head sizes of this family");
static_assert(OUT_TILES <= WARPS && DOWN_TILES <= WARPS && SCORE_TILES <= WARPS, "one a warp");
static_assert(EXPERTS % TILE_BYTE_ROWS == 0 && EXPERTS % OUT_PARTS == 0, "whole tiles, quarters");
static_assert(SLICES % ROUTER_JOB == 0, "of the same rows");
static_assert(SHARED_SLICES >= 1 && SHAPE_EXPERT_WIDTH % INNER == 0, "whole slices");

/* A pair of bfloat16: a scale and its bias. */
__device__ __forceinline__ float bf16_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

} /* namespace decode */

#endif
