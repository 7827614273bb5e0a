/* The prompt kernels of sm_90a for the host: file, name, grid, threads, shared memory and arguments
 * of each. C11. They take a shape whose widths are multiples of 512 with 4-bit matrices
 * (prefill_takes); everything else stays with the portable kernels. half: fp16.
 *
 * Order of a layer (R rows, one slot; bf16 rows marked * are reordered, see prefill_common.cuh):
 *   norm            x, add | 0, weight, ordered*, high, low, sums, counts
 *   DeltaNet        dense qkvz; decisive b and a; convolve; pieces; states; gated_norm; dense out
 *   attention       dense qkv; attention_rows; flash; join where flash was split; dense o
 *   norm            x, add = the mixer's output
 *   experts         decisive router; route; group; up; down, both with the shared expert's;
 *                   combine, with the norm of the next layer
 * Each may begin while the one before it ends and waits for it itself (begin_after_previous). */
#ifndef LILY_CUDA_PREFILL_KERNELS_H
#define LILY_CUDA_PREFILL_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prefill_launch {
    const char *file, *kernel;
    uint32_t gx, gy, threads;
    size_t shared; /* dynamic, bytes */
};

static inline uint32_t prefill_blocks(int64_t n, int64_t each) {
    return (uint32_t)((n + each - 1) / each);
}

/* Whether a matrix [rows, cols] of tiles of 4 bits can be multiplied by prefill_gemm.cu. */
static inline bool prefill_takes(int32_t rows, int32_t cols) {
    return rows % 256 == 0 && cols % 512 == 0;
}

/* Tiles of prefill_gemm.cu: warpgroups, rows of activations, stages of the ring, blocks a
 * multiprocessor at least; of long prompts also times, see prefill_dense_time. Experts have two
 * warpgroups. */
#define PREFILL_DENSE_TILES(XX)                                                                    \
    XX(1, 16, 10, 4, 0, 0)                                                                         \
    XX(1, 32, 8, 4, 0, 0)                                                                          \
    XX(1, 64, 8, 2, 0, 0) XX(2, 64, 6, 2, 39, 25) XX(2, 128, 5, 2, 54, 33)
#define PREFILL_EXPERT_TILES(XX) XX(16, 9, 3) XX(32, 8, 2) XX(64, 6, 2) XX(128, 5, 2) XX(160, 4, 2)
#define PREFILL_TILE_SHARED(wgs, n, stages)                                                        \
    ((stages) * (n)*128 + (wgs)*128 * (((stages) + 1) / 2 * 32 + 32) + 1024)
#define PREFILL_WIDE_STAGES 5
#define PREFILL_WIDE_SHARED                                                                        \
    (PREFILL_WIDE_STAGES * (256 * 128 + 16) + 2 * (4 * 4096 + 2 * 2048) + 1024)
#define PREFILL_PIECES_SHARED (49152 + 64 * 68 * 4)
#define PREFILL_STATES_SHARED (2 * 57344 + (128 + 2 * 64) * 80)
#define PREFILL_FLASH_SHARED  (128 * 512 + 4 * 64 * 512 + 256 * 4 + 1024)

/* Tiles of prefill_small.cu: rows, stages. What it multiplies is summed in two parts. */
#define PREFILL_DECISIVE_TILES(XX) XX(16, 6) XX(32, 6) XX(64, 5)
#define PREFILL_DECISIVE_PARTS     2
/* of so many groups of 64 inputs a part. */
#define PREFILL_DECISIVE_SHARED(n, stages, groups) ((n) * ((stages)*256 + (groups)*4) + 1024)

/* Time of so many blocks, in halves of a microsecond at 2,048 inputs on an H200: pair where a
 * multiprocessor has two blocks, alone where it has one. */
static inline uint32_t prefill_dense_time(uint32_t blocks, uint32_t processors, uint32_t pair,
                                          uint32_t alone) {
    uint32_t left = blocks % (2 * processors);
    return blocks / (2 * processors) * pair + (left == 0 ? 0 : left <= processors ? alone : pair);
}

/* dense: x* [rows][w.cols], cuda_mat w, half out, int ldo, int rows. Of few rows the widest tile
 * that leaves work for every processor, from there on the one that takes the least time; all give
 * the same bits. */
static inline struct prefill_launch prefill_dense(int32_t rows, int32_t outputs, int32_t cols,
                                                  int32_t processors) {
    static const struct {
        const char *name;
        uint8_t wgs, n, stages, pair, alone;
    } tile[] = {
#define TILE(wgs, n, stages, at_least, pair, alone)                                                \
    {"dense_" #wgs "_" #n, wgs, n, stages, pair, alone},
        PREFILL_DENSE_TILES(TILE)
#undef TILE
    };
    enum { FEW = 256, WIDE_TIME = 48 };
    uint32_t all = (uint32_t)processors, least = UINT32_MAX;
    int best = -1;
    for (int t = 4; t >= 0; t--) {
        uint32_t blocks =
            prefill_blocks(outputs, 64 * tile[t].wgs) * prefill_blocks(rows, tile[t].n);
        bool filled = (t < 3 || blocks >= all) && rows > tile[t].n / 2;
        if (rows <= FEW && best < 0 && (filled || t == 0)) best = t;
        uint32_t time = prefill_dense_time(blocks, all, tile[t].pair, tile[t].alone);
        if (rows <= FEW || t < 3 || time >= least) continue;
        least = time;
        best = t;
    }
    /* In tiles of 256 rows factors take turns between two places, from one tile to the next only
     * where the inputs are a multiple of 1,024. */
    uint32_t wide = prefill_blocks(outputs, 128) * prefill_blocks(rows, 256);
    if (rows > FEW && cols % 1024 == 0 && prefill_blocks(wide, all) * WIDE_TIME < least) {
        return (struct prefill_launch){
            "prefill_gemm", "dense_wide", wide < all ? wide : all, 1, 384, PREFILL_WIDE_SHARED};
    }
    return (struct prefill_launch){
        "prefill_gemm",
        tile[best].name,
        prefill_blocks(outputs, 64 * tile[best].wgs),
        prefill_blocks(rows, tile[best].n),
        tile[best].wgs * 128u,
        PREFILL_TILE_SHARED((size_t)tile[best].wgs, tile[best].n, tile[best].stages)};
}

/* Rows of a block of one expert for a chunk: what prompt_group takes as `height`. */
static inline int32_t prefill_expert_height(int32_t rows, int32_t experts, int32_t top_k) {
    int32_t mean = rows * top_k / experts;
    /* 160 where many experts would have more than 128 rows and so two blocks. */
    return mean > 114 ? 160 : mean > 48 ? 128 : mean > 24 ? 64 : mean > 12 ? 32 : 16;
}

/* Blocks of rows that the products of a chunk may have, with those of the shared expert, which all
 * rows go through and which come first. */
static inline uint32_t prefill_expert_blocks(int32_t rows, int32_t experts, int32_t top_k,
                                             int32_t height) {
    int32_t pairs = rows * top_k;
    return prefill_blocks(rows, height) +
           (uint32_t)(pairs / height + (pairs < experts ? pairs : experts));
}

/* up: x*, gate and up in turns, cuda_groups, hidden* [places][inner], then [rows][shared], the
 * shared expert's gate and up, int rows. down: hidden*, down, cuda_groups, half out [places][H],
 * the shared expert's down and out, int rows. blocks: prefill_expert_blocks; widest: of both kinds'
 * inner sizes.
 */
static inline struct prefill_launch
prefill_experts(bool first_half, int32_t height, uint32_t blocks, int32_t widest, int32_t hidden) {
    static const struct {
        const char *up, *down;
        uint8_t n, stages;
    } tile[] = {
#define TILE(n, stages, at_least) {"prompt_up_" #n, "prompt_down_" #n, n, stages},
        PREFILL_EXPERT_TILES(TILE)
#undef TILE
    };
    int t = 0;
    while (tile[t].n < height) t++;
    return (struct prefill_launch){"prefill_gemm",
                                   first_half ? tile[t].up : tile[t].down,
                                   first_half ? prefill_blocks(widest, 64)
                                              : prefill_blocks(hidden, 128),
                                   blocks,
                                   256,
                                   PREFILL_TILE_SHARED((size_t)2, tile[t].n, tile[t].stages)};
}

/* decisive: high, low, sums, cuda_mat w, float out [parts][rows][w.rows], int rows; w of 320
 * outputs at most. Narrow tiles while they find a processor of their own. */
static inline struct prefill_launch prefill_decisive(int32_t rows, int32_t outputs, int32_t cols,
                                                     int32_t processors) {
    static const struct {
        const char *name;
        uint8_t n, stages;
    } tile[] = {
#define TILE(n, stages) {"prompt_decisive_" #n, n, stages},
        PREFILL_DECISIVE_TILES(TILE)
#undef TILE
    };
    int t = 0;
    while (t < 2 &&
           prefill_blocks(rows, tile[t].n) * PREFILL_DECISIVE_PARTS > (uint32_t)processors) {
        t++;
    }
    uint32_t threads = prefill_blocks(outputs, 64) * 128u;
    uint32_t groups = prefill_blocks(cols, 64 * PREFILL_DECISIVE_PARTS);
    return (struct prefill_launch){
        "prefill_small",
        tile[t].name,
        prefill_blocks(rows, tile[t].n),
        PREFILL_DECISIVE_PARTS,
        threads,
        PREFILL_DECISIVE_SHARED((size_t)tile[t].n, tile[t].stages, groups)};
}

/* route: scores (parts), routing, int rows, counts, entries. */
static inline struct prefill_launch prefill_route(int32_t rows) {
    return (struct prefill_launch){
        "prefill_route", "prompt_route", prefill_blocks(rows, 4), 1, 128, 0};
}

/* group: counts, int rows, int height, begin, blocks, n_blocks, pairs, places (entries before). */
static inline struct prefill_launch prefill_group(int32_t rows) {
    return (struct prefill_launch){
        "prefill_route", "prompt_group", prefill_blocks(rows, 256), 1, 256, 0};
}

/* combine: half out, places, routing, scores, half shared, x, weight | 0, then as norm from
 * ordered* on. */
static inline struct prefill_launch prefill_combine(int32_t rows) {
    return (struct prefill_launch){"prefill_norm", "prompt_combine", (uint32_t)rows, 1, 256, 0};
}

/* norm: x, half add | 0, weight, ordered*, high | 0, low, sums, counts | 0. */
static inline struct prefill_launch prefill_norm(int32_t rows) {
    return (struct prefill_launch){"prefill_norm", "prompt_norm", (uint32_t)rows, 1, 256, 0};
}

/* Rows of a warp of convolve, which reads three more: few where there are few. */
static inline int32_t prefill_convolve_each(int32_t rows) {
    return rows > 1024 ? 16 : 4;
}

/* convolve: half proj, int width, taps, slot, int rows, int layer, channels bf16 [rows][conv_dim],
 * int each. heads: of queries, keys and values. */
static inline struct prefill_launch prefill_convolve(int32_t rows, int32_t heads) {
    return (struct prefill_launch){"prefill_deltanet",
                                   "prompt_convolve",
                                   (uint32_t)heads,
                                   prefill_blocks(rows, 4 * prefill_convolve_each(rows)),
                                   128,
                                   0};
}

/* Pieces of 64 positions on the absolute grid that rows [pos, pos + rows) touch. */
static inline int32_t prefill_pieces(int32_t pos, int32_t rows) {
    return (pos % 64 + rows + 63) / 64;
}

/* Scratch of the delta rule for so many pieces and value heads: decays, w, p, u in turn. */
static inline size_t prefill_delta_bytes(int32_t pieces, int32_t heads, size_t at[4]) {
    size_t n = (size_t)pieces * (size_t)heads;
    at[0] = 0;
    at[1] = n * 64 * 4;
    at[2] = at[1] + n * 64 * 128 * 2;
    at[3] = at[2] + n * 64 * 64 * 2;
    return at[3] + n * 64 * 128 * 4;
}

/* pieces: channels, ba [parts][rows][2 * heads], rate, dt_bias, slot, int rows, decays, w, p, u. */
static inline struct prefill_launch prefill_delta_pieces(int32_t pieces, int32_t heads) {
    return (struct prefill_launch){
        "prefill_deltanet",   "delta_pieces", (uint32_t)pieces, (uint32_t)heads, 128,
        PREFILL_PIECES_SHARED};
}

/* states: channels, decays, w, p, u, slot, int rows, int pieces, int layer, half delta
 * [rows][v_dim]. */
static inline struct prefill_launch prefill_delta_states(int32_t heads) {
    return (struct prefill_launch){
        "prefill_deltanet", "delta_states", (uint32_t)heads * 4, 1, 256, PREFILL_STATES_SHARED};
}

/* gated_norm: delta, proj, int width, weight, mix* [rows][v_dim]. */
static inline struct prefill_launch prefill_gated_norm(int32_t rows) {
    return (struct prefill_launch){
        "prefill_deltanet", "prompt_gated_norm", (uint32_t)rows, 1, 256, 0};
}

/* attention_rows: proj, int width, q_norm, k_norm, inv_freq, slot, int layer, queries bf16. */
static inline struct prefill_launch prefill_attention_rows(int32_t rows) {
    return (struct prefill_launch){
        "prefill_attention", "prompt_attention_rows", (uint32_t)rows, 1, 256, 0};
}

/* Positions of the context that are summed from nothing, before they are joined with others. */
#ifndef PREFILL_SEGMENT
#define PREFILL_SEGMENT 4096
#endif

/* Into how many blocks the context of few rows is split, each a segment; 0: not. room: rows of
 * parts.
 */
static inline int32_t prefill_split(int32_t pos, int32_t rows, int32_t kv_heads, int32_t room,
                                    int32_t processors) {
    int32_t segments = (int32_t)prefill_blocks((int64_t)pos + rows, PREFILL_SEGMENT);
    bool few = prefill_blocks(rows, 16) * (uint32_t)kv_heads < (uint32_t)processors;
    return few && segments > 1 && (int64_t)segments * rows <= room ? segments : 0;
}

/* flash: queries, proj, int width, slot, int rows, int layer, mix* [rows][q_dim], parts float
 * [rows, split: segments * rows][q_dim], sums of parts [..][q_heads][2], int split. */
static inline struct prefill_launch prefill_flash(int32_t rows, int32_t kv_heads, int32_t split) {
    return (struct prefill_launch){"prefill_attention",
                                   "prompt_flash",
                                   prefill_blocks(rows, 16),
                                   (uint32_t)kv_heads * (uint32_t)(split ? split : 1),
                                   256,
                                   PREFILL_FLASH_SHARED};
}

/* join: parts, sums, proj, int width, slot, int rows, mix*. After flash with split. */
static inline struct prefill_launch prefill_join(int32_t rows) {
    return (struct prefill_launch){"prefill_attention", "prompt_join", (uint32_t)rows, 1, 256, 0};
}

#endif
