/* Tiles of y = x W^T with W of 4 bits: what is common to every way of multiplying them. A file of
 * kernels includes one of those ways, tile_simd.h (any chip) or tile_tensor.h (tensor operations);
 * either offers
 *
 *   tile_make_for<PAIRED>(rows, source, steps, memory, thread_index)
 *
 * which multiplies `rows` (1..32) rows of x by 64 rows of W over `steps` groups of 64 columns and
 * leaves the sums in threadgroup memory, readable by all threads. PAIRED: 32 rows of gate, then 32
 * of up, are 32 outputs silu(gate) * up. */
#ifndef LILY_METAL_TILE_H
#define LILY_METAL_TILE_H

#include "common.h"
#include "prefill_gemm_args.h"

enum {
    TILE_W_WORDS = 36, /* room for a row of W: 64 bfloat values and 4 words of padding */
    TILE_X_WORDS = 72, /* room for a pair of rows of x: 64 words and 8 of padding */
    TILE_W_QUADS = PREFILL_TILE_N * TILE_W_WORDS / 4,
    TILE_X_QUADS = PREFILL_TILE_M / 2 * TILE_X_WORDS / 4,
    TILE_STAGE = 68 /* words of a row of finished sums, kept where W was */
};
static_assert(PREFILL_TILE_M * TILE_STAGE <= 4 * TILE_W_QUADS, "finished sums fit");
static_assert((ulong)PREFILL_MAX_ROWS * SHAPE_TOP_K * SHAPE_HIDDEN < 1ul << 32, "pairs by uint");

/* 14,464 bytes, so that two threadgroups fit a core. */
struct tile_memory {
    threadgroup uint4 *w;       /* [TILE_W_QUADS], then the finished sums as bits of float */
    threadgroup uint4 *x;       /* [TILE_X_QUADS] */
    threadgroup float *sums;    /* [PREFILL_TILE_M] of a row of x over the group */
    threadgroup float *factors; /* [PREFILL_TILE_N][2] scale, bias */
};
/* In the outer scope of a kernel. */
#define TILE_MEMORY(t)                                                                             \
    threadgroup uint4 t##_w[TILE_W_QUADS];                                                         \
    threadgroup uint4 t##_x[TILE_X_QUADS];                                                         \
    threadgroup float t##_sums[PREFILL_TILE_M];                                                    \
    threadgroup float t##_factors[2 * PREFILL_TILE_N];                                             \
    const tile_memory t = {t##_w, t##_x, t##_sums, t##_factors}

/* What one thread copies of each tile: 16 bytes of two rows of x, half a group of one row of W,
 * and that row's scale (even threads) or bias (odd). Rows that do not exist count as 0. */
struct tile_source {
    device const uint4 *x0;
    device const uint4 *x1;
    device const uint4 *w;
    device const ushort *factor;
    bool has_x0;
    bool has_x1;
    bool has_w;
};
struct tile_fetched {
    uint4 x0;
    uint4 x1;
    uint4 w;
    ushort factor;
};

inline uint tile_pair_of(uint thread_index) {
    return thread_index / 8;
}

inline tile_fetched tile_fetch(thread const tile_source &s, uint step) {
    tile_fetched f;
    f.x0 = s.has_x0 ? s.x0[step * 8] : uint4(0);
    f.x1 = s.has_x1 ? s.x1[step * 8] : uint4(0);
    f.w = s.has_w ? s.w[step * 2] : uint4(0);
    f.factor = s.has_w ? s.factor[step] : (ushort)0;
    return f;
}

/* Four finished sums, numbers 4 * quad .. of row m. */
inline float4 tile_sums(tile_memory t, uint m, uint quad) {
    return as_type<float4>(t.w[m * (TILE_STAGE / 4) + quad]);
}
/* Eight finished sums times a factor as bfloat. */
inline uint4 tile_sums_bf16(tile_memory t, uint m, uint octet, float factor) {
    return bf16_eight(tile_sums(t, m, 2 * octet) * factor, tile_sums(t, m, 2 * octet + 1) * factor);
}

/* This thread's part of W: row `row` of a matrix of out_rows rows. */
inline void tile_source_w(thread tile_source &s, quantised m, uint row, uint out_rows, uint cols,
                          uint thread_index) {
    s.has_w = row < out_rows;
    s.w = m.codes + (row * (cols / 32) + thread_index % 2);
    s.factor = (thread_index % 2 == 0 ? m.scales : m.biases) + row * (cols / SHAPE_GROUP);
}

#endif
