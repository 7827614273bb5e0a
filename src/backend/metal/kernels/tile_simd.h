/* Tiles multiplied by simdgroup_matrix, on every chip.
 *
 * A threadgroup of 4 simdgroups makes a tile of 32 (16, 8) rows of x and 64 rows of W, 64 columns
 * at a time, one quantisation group. Codes are unpacked into threadgroup memory as the bfloat
 * numbers 128 + code, which takes one OR for two codes (0x4300 is 128, and its last mantissa bit is
 * worth 1), so weights are never rounded. Scale and bias join once per group, on the sums:
 *
 *   sum_k x_k (s q_k + b) = s sum_k x_k (128 + q_k) + (b - 128 s) sum_k x_k
 *
 * The product is made transposed, W x^T, so that both operands lie in threadgroup memory in the
 * pairs that a lane's fragment holds: a word is two columns of a weight row, or one column of two
 * rows of x. The order of columns within eight is 0 4 1 5 2 6 3 7, which is how nibbles come out
 * of a word two at a time; a sum does not mind as long as both operands agree.
 *
 * A row's result depends on that row alone: heights differ in which simdgroup owns which fragments,
 * never in the order of a sum. The next 64 columns are fetched into registers while this tile is
 * multiplied, so one buffer of threadgroup memory does. Its rows are padded so that the 32 words of
 * a fragment lie in 32 different banks. */
#ifndef LILY_METAL_TILE_SIMD_H
#define LILY_METAL_TILE_SIMD_H

#include "matrix8x8.h"
#include "tile.h"

/* Where a thread stands: of its simdgroup's part of the tile, and of the fragment its lane. */
struct tile_place {
    uint thread_index;
    uint simd_n; /* which part of the 64 outputs */
    uint simd_m; /* which part of the rows */
    uint row;    /* of the lane's two elements of an 8 x 8 fragment */
    uint pair;   /* half the column of the first */
};

/* Eight nibbles as four words of two bfloat numbers 128 + code. */
inline uint4 tile_codes(uint word) {
    const uint4 nibbles = uint4(word, word >> 4, word >> 8, word >> 12);
    return (nibbles & 0x000F000Fu) | 0x43004300u;
}

template <int HEIGHT> inline tile_place tile_where(uint thread_index) {
    const uint simdgroup = thread_index / 32;
    const lane_place lane = lane_place_of(thread_index % 32);
    tile_place p;
    p.thread_index = thread_index;
    p.simd_n = HEIGHT == PREFILL_TILE_M ? simdgroup % 2 : simdgroup;
    p.simd_m = HEIGHT == PREFILL_TILE_M ? simdgroup / 2 : 0;
    p.row = lane.row;
    p.pair = lane.column / 2;
    return p;
}

/* Column by column the two rows' values side by side, and each row's sum over the group: eight
 * columns here, the other lanes' by exchange, in an order that is the same for every row. */
inline void tile_put_x(thread const tile_fetched &f, tile_memory t, uint thread_index) {
    const uint pair = tile_pair_of(thread_index);
    const uint chunk = thread_index % 8;
    float2 sum = float2(0.0f);
    UNROLL
    for (uint half_chunk = 0; half_chunk < 2; half_chunk++) {
        const uint2 a = half_chunk == 0 ? f.x0.xy : f.x0.zw;
        const uint2 b = half_chunk == 0 ? f.x1.xy : f.x1.zw;
        const uint4 words = uint4((a.x & 0xFFFFu) | b.x << 16, a.x >> 16 | (b.x & 0xFFFF0000u),
                                  (a.y & 0xFFFFu) | b.y << 16, a.y >> 16 | (b.y & 0xFFFF0000u));
        t.x[pair * (TILE_X_WORDS / 4) + chunk * 2 + half_chunk] = words;
        sum += float2(bf16_low(words.x), bf16_high(words.x));
        sum += float2(bf16_low(words.y), bf16_high(words.y));
        sum += float2(bf16_low(words.z), bf16_high(words.z));
        sum += float2(bf16_low(words.w), bf16_high(words.w));
    }
    sum = neighbours_sum<8>(sum);
    if (chunk == 0) {
        t.sums[2 * pair] = sum.x;
        t.sums[2 * pair + 1] = sum.y;
    }
}

template <int HEIGHT>
inline void tile_put(thread const tile_fetched &f, tile_memory t, uint thread_index) {
    if (thread_index < HEIGHT * 4) tile_put_x(f, t, thread_index); /* whole simdgroups */
    const uint at = thread_index / 2 * (TILE_W_WORDS / 4) + thread_index % 2 * 4;
    t.w[at] = tile_codes(f.w.x);
    t.w[at + 1] = tile_codes(f.w.y);
    t.w[at + 2] = tile_codes(f.w.z);
    t.w[at + 3] = tile_codes(f.w.w);
    t.factors[thread_index] = bf16_value(f.factor);
}

/* The sums of one simdgroup: FN x FM fragments, transposed: rows are outputs. */
template <int FN, int FM> struct tile_totals { float2 f[FN][FM]; };

/* Number of a simdgroup's fragment i among the eight of the tile. Where gate and up are computed
 * together, the first 32 rows of the tile are gate's and a simdgroup owns the same of both. */
template <bool PAIRED, int FN> inline uint tile_fragment(uint simd_n, int i) {
    if (!PAIRED) return simd_n * FN + (uint)i;
    const uint in_half = simd_n * (FN / 2) + (uint)(i % (FN / 2));
    return i < FN / 2 ? in_half : in_half + PREFILL_TILE_N / 16;
}

template <bool PAIRED, int FN, int FM>
inline void tile_multiply(thread tile_totals<FN, FM> &totals, tile_memory t, tile_place p) {
    threadgroup const uint *words_w = (threadgroup const uint *)t.w;
    threadgroup const uint *words_x = (threadgroup const uint *)t.x;
    const uint column = p.row / 2 + p.row % 2 * 4; /* 0 4 1 5 2 6 3 7 */
    simdgroup_float8x8 sum[FN][FM];
    UNROLL
    for (int i = 0; i < FN; i++) {
        UNROLL
        for (int j = 0; j < FM; j++) sum[i][j] = matrix_zero();
    }
    for (uint k = 0; k < 8; k++) {
        simdgroup_float8x8 x[FM];
        UNROLL
        for (int j = 0; j < FM; j++) {
            const uint pair = (p.simd_m * FM + (uint)j) * 4 + p.pair;
            x[j] = matrix_of_bf16(words_x[pair * TILE_X_WORDS + k * 8 + column]);
        }
        UNROLL
        for (int i = 0; i < FN; i++) {
            const uint row = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
            const simdgroup_float8x8 w =
                matrix_of_bf16(words_w[row * TILE_W_WORDS + k * 4 + p.pair]);
            UNROLL
            for (int j = 0; j < FM; j++) {
                simdgroup_multiply_accumulate(sum[i][j], w, x[j], sum[i][j]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < FN; i++) {
        const uint row = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
        const float scale = t.factors[2 * row];
        const float offset = fma(-128.0f, scale, t.factors[2 * row + 1]);
        UNROLL
        for (int j = 0; j < FM; j++) {
            const uint m = (p.simd_m * FM + (uint)j) * 8 + 2 * p.pair;
            const float2 sums = float2(t.sums[m], t.sums[m + 1]);
            const float2 group = matrix_get(sum[i][j]);
            totals.f[i][j] = fma(float2(scale), group, fma(float2(offset), sums, totals.f[i][j]));
        }
    }
}

/* All columns of the tile: `steps` groups of 64. */
template <int HEIGHT, bool PAIRED, int FN, int FM>
inline void tile_run(thread tile_totals<FN, FM> &totals, thread const tile_source &source,
                     uint steps, tile_memory t, tile_place p) {
    UNROLL
    for (int i = 0; i < FN; i++) {
        UNROLL
        for (int j = 0; j < FM; j++) totals.f[i][j] = float2(0.0f);
    }
    tile_fetched next = tile_fetch(source, 0);
    for (uint step = 0; step < steps; step++) {
        tile_put<HEIGHT>(next, t, p.thread_index);
        if (step + 1 < steps) next = tile_fetch(source, step + 1);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* FILLED */
        tile_multiply<PAIRED, FN, FM>(totals, t, p);
        threadgroup_barrier(mem_flags::mem_threadgroup); /* USED */
    }
}

/* Finished sums go to threadgroup memory row by row of x, so that a row leaves in 16 byte pieces.
 * Paired: 32 outputs silu(gate) * up. */
template <bool PAIRED, int FN, int FM>
inline void tile_stage(thread const tile_totals<FN, FM> &totals, tile_memory t, tile_place p) {
    threadgroup uint *stage = (threadgroup uint *)t.w;
    UNROLL
    for (int i = 0; i < (PAIRED ? FN / 2 : FN); i++) {
        const uint n = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
        UNROLL
        for (int j = 0; j < FM; j++) {
            float2 value = totals.f[i][j];
            if (PAIRED) {
                const float2 up = totals.f[(i + FN / 2) % FN][j];
                value = silu(value) * up;
            }
            const uint m = (p.simd_m * FM + (uint)j) * 8 + 2 * p.pair;
            stage[m * TILE_STAGE + n] = as_type<uint>(value.x);
            stage[(m + 1) * TILE_STAGE + n] = as_type<uint>(value.y);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
}

/* A tile from its source to finished sums in threadgroup memory. A simdgroup has 32 outputs of 16
 * rows, or in a lower tile 16 outputs of all rows. */
template <int HEIGHT, bool PAIRED>
inline void tile_make(thread const tile_source &source, uint steps, tile_memory t,
                      uint thread_index) {
    const tile_place p = tile_where<HEIGHT>(thread_index);
    tile_totals<HEIGHT == PREFILL_TILE_M ? 4 : 2, HEIGHT == PREFILL_SMALL_M ? 1 : 2> totals;
    tile_run<HEIGHT, PAIRED>(totals, source, steps, t, p);
    tile_stage<PAIRED>(totals, t, p);
}

/* The height that `rows` rows need; the same for all threads of the threadgroup. */
template <bool PAIRED>
inline void tile_make_for(uint rows, thread const tile_source &source, uint steps, tile_memory t,
                          uint thread_index) {
    if (rows <= PREFILL_SMALL_M)
        tile_make<PREFILL_SMALL_M, PAIRED>(source, steps, t, thread_index);
    else if (rows <= PREFILL_MEDIUM_M)
        tile_make<PREFILL_MEDIUM_M, PAIRED>(source, steps, t, thread_index);
    else
        tile_make<PREFILL_TILE_M, PAIRED>(source, steps, t, thread_index);
}

#endif
