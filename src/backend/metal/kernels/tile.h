/* Tiles of y = x W^T with W of 4 bits, shared by every matrix product of the prompt.
 *
 * A threadgroup of 4 simdgroups makes a tile of 32 (or 8) rows of x and 64 rows of W, 64 columns at
 * a time, one quantisation group. Codes are unpacked into threadgroup memory as the bfloat numbers
 * 128 + code, which takes one OR for two codes (0x4300 is 128, and its last mantissa bit is worth
 * 1), so weights are never rounded. Scale and bias join once per group, on the sums:
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
 * multiplied: one buffer of threadgroup memory (14,464 bytes), so two threadgroups fit a core. */
#ifndef LILY_METAL_TILE_H
#define LILY_METAL_TILE_H

#include "prefill_gemm_args.h"

/* The padding keeps the 32 words of a fragment in 32 different banks. */
enum {
    TILE_W_WORDS = 36, /* of a row of W: 64 values and 4 words of padding */
    TILE_X_WORDS = 72, /* of a pair of rows of x: 64 words and 8 of padding */
    TILE_W_QUADS = PREFILL_TILE_N * TILE_W_WORDS / 4,
    TILE_X_QUADS = PREFILL_TILE_M / 2 * TILE_X_WORDS / 4,
    TILE_STAGE = 68 /* words of a row of finished sums, kept where W was */
};
/* Arrays of fragments live in registers only where every index is a constant. */
#define TILE_UNROLL _Pragma("clang loop unroll(full)")
static_assert(PREFILL_TILE_M * TILE_STAGE <= 4 * TILE_W_QUADS, "finished sums fit");

/* A kernel declares these four arrays and hands them over together. */
struct tile_memory {
    threadgroup uint4 *w;       /* [TILE_W_QUADS], then the finished sums as bits of float */
    threadgroup uint4 *x;       /* [TILE_X_QUADS] */
    threadgroup float *sums;    /* [PREFILL_TILE_M] of a row of x over the group */
    threadgroup float *factors; /* [PREFILL_TILE_N][2] scale, bias */
};

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

/* Where a thread stands: of its simdgroup's part of the tile, and of the fragment its lane. */
struct tile_place {
    uint thread_index;
    uint simd_n; /* which part of the 64 outputs */
    uint simd_m; /* which part of the rows */
    uint row;    /* of the lane's two elements of an 8 x 8 fragment */
    uint pair;   /* half the column of the first */
};

/* A lane's two elements of a fragment, in neighbouring columns (tile_where). */
inline void tile_set(thread simdgroup_float8x8 &m, float left, float right) {
    m.thread_elements()[0] = left;
    m.thread_elements()[1] = right;
}
inline float2 tile_get(thread simdgroup_float8x8 &m) {
    return float2(m.thread_elements()[0], m.thread_elements()[1]);
}

inline uint tile_pair_of(uint thread_index) {
    return thread_index / 8;
}

inline float tile_low(uint word) {
    return as_type<float>(word << 16);
}
inline float tile_high(uint word) {
    return as_type<float>(word & 0xFFFF0000u);
}
inline float tile_bf16(ushort bits) {
    return as_type<float>((uint)bits << 16);
}
inline uint tile_pack(float low, float high) {
    return (uint)as_type<ushort>(bfloat(low)) | (uint)as_type<ushort>(bfloat(high)) << 16;
}

/* Eight nibbles as four words of two bfloat numbers 128 + code. */
inline uint4 tile_codes(uint word) {
    uint4 nibbles = uint4(word, word >> 4, word >> 8, word >> 12);
    return (nibbles & 0x000F000Fu) | 0x43004300u;
}

template <int HEIGHT> inline tile_place tile_where(uint thread_index) {
    uint simdgroup = thread_index / 32;
    uint lane = thread_index % 32;
    uint quad = lane / 4;
    tile_place p;
    p.thread_index = thread_index;
    p.simd_n = HEIGHT == PREFILL_SMALL_M ? simdgroup : simdgroup % 2;
    p.simd_m = HEIGHT == PREFILL_SMALL_M ? 0 : simdgroup / 2;
    p.row = (quad & 4) + (lane / 2) % 4;
    p.pair = (quad & 2) + lane % 2;
    return p;
}

inline tile_fetched tile_fetch(thread const tile_source &s, uint step) {
    tile_fetched f;
    f.x0 = s.has_x0 ? s.x0[step * 8] : uint4(0);
    f.x1 = s.has_x1 ? s.x1[step * 8] : uint4(0);
    f.w = s.has_w ? s.w[step * 2] : uint4(0);
    f.factor = s.has_w ? s.factor[step] : (ushort)0;
    return f;
}

/* Column by column the two rows' values side by side, and each row's sum over the group: eight
 * columns here, the other lanes' by exchange, in an order that is the same for every row. */
inline void tile_put_x(thread const tile_fetched &f, tile_memory t, uint thread_index) {
    uint pair = tile_pair_of(thread_index);
    uint chunk = thread_index % 8;
    float2 sum = float2(0.0f);
    TILE_UNROLL
    for (uint half_chunk = 0; half_chunk < 2; half_chunk++) {
        uint2 a = half_chunk == 0 ? f.x0.xy : f.x0.zw;
        uint2 b = half_chunk == 0 ? f.x1.xy : f.x1.zw;
        uint4 words = uint4((a.x & 0xFFFFu) | b.x << 16, a.x >> 16 | (b.x & 0xFFFF0000u),
                            (a.y & 0xFFFFu) | b.y << 16, a.y >> 16 | (b.y & 0xFFFF0000u));
        t.x[pair * (TILE_X_WORDS / 4) + chunk * 2 + half_chunk] = words;
        sum += float2(tile_low(words.x), tile_high(words.x));
        sum += float2(tile_low(words.y), tile_high(words.y));
        sum += float2(tile_low(words.z), tile_high(words.z));
        sum += float2(tile_low(words.w), tile_high(words.w));
    }
    for (ushort mask = 1; mask < 8; mask *= 2) sum += simd_shuffle_xor(sum, mask);
    if (chunk == 0) {
        t.sums[2 * pair] = sum.x;
        t.sums[2 * pair + 1] = sum.y;
    }
}

template <int HEIGHT>
inline void tile_put(thread const tile_fetched &f, tile_memory t, uint thread_index) {
    if (thread_index < HEIGHT * 4) tile_put_x(f, t, thread_index); /* whole simdgroups */
    uint at = thread_index / 2 * (TILE_W_WORDS / 4) + thread_index % 2 * 4;
    t.w[at] = tile_codes(f.w.x);
    t.w[at + 1] = tile_codes(f.w.y);
    t.w[at + 2] = tile_codes(f.w.z);
    t.w[at + 3] = tile_codes(f.w.w);
    t.factors[thread_index] = tile_bf16(f.factor);
}

/* The sums of one simdgroup: FN x FM fragments, transposed: rows are outputs. */
template <int FN, int FM> struct tile_totals { float2 f[FN][FM]; };

/* Number of a simdgroup's fragment i among the eight of the tile. Where gate and up are computed
 * together, the first 32 rows of the tile are gate's and a simdgroup owns the same of both. */
template <bool PAIRED, int FN> inline uint tile_fragment(uint simd_n, int i) {
    if (!PAIRED) return simd_n * FN + (uint)i;
    uint in_half = simd_n * (FN / 2) + (uint)(i % (FN / 2));
    return i < FN / 2 ? in_half : in_half + PREFILL_TILE_N / 16;
}

template <bool PAIRED, int FN, int FM>
inline void tile_multiply(thread tile_totals<FN, FM> &totals, tile_memory t, tile_place p) {
    threadgroup const uint *words_w = (threadgroup const uint *)t.w;
    threadgroup const uint *words_x = (threadgroup const uint *)t.x;
    uint column = p.row / 2 + p.row % 2 * 4; /* 0 4 1 5 2 6 3 7 */
    simdgroup_float8x8 sum[FN][FM];
    TILE_UNROLL
    for (int i = 0; i < FN; i++) {
        TILE_UNROLL
        for (int j = 0; j < FM; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    for (uint k = 0; k < 8; k++) {
        simdgroup_float8x8 x[FM];
        TILE_UNROLL
        for (int j = 0; j < FM; j++) {
            uint pair = (p.simd_m * FM + (uint)j) * 4 + p.pair;
            uint word = words_x[pair * TILE_X_WORDS + k * 8 + column];
            tile_set(x[j], tile_low(word), tile_high(word));
        }
        TILE_UNROLL
        for (int i = 0; i < FN; i++) {
            uint row = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
            uint word = words_w[row * TILE_W_WORDS + k * 4 + p.pair];
            simdgroup_float8x8 w;
            tile_set(w, tile_low(word), tile_high(word));
            TILE_UNROLL
            for (int j = 0; j < FM; j++)
                simdgroup_multiply_accumulate(sum[i][j], w, x[j], sum[i][j]);
        }
    }
    TILE_UNROLL
    for (int i = 0; i < FN; i++) {
        uint row = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
        float scale = t.factors[2 * row];
        float offset = fma(-128.0f, scale, t.factors[2 * row + 1]);
        TILE_UNROLL
        for (int j = 0; j < FM; j++) {
            uint m = (p.simd_m * FM + (uint)j) * 8 + 2 * p.pair;
            float2 sums = float2(t.sums[m], t.sums[m + 1]);
            float2 group = tile_get(sum[i][j]);
            totals.f[i][j] = fma(float2(scale), group, fma(float2(offset), sums, totals.f[i][j]));
        }
    }
}

/* All columns of the tile: `steps` groups of 64. */
template <int HEIGHT, bool PAIRED, int FN, int FM>
inline void tile_run(thread tile_totals<FN, FM> &totals, thread const tile_source &source,
                     uint steps, tile_memory t, tile_place p) {
    TILE_UNROLL
    for (int i = 0; i < FN; i++) {
        TILE_UNROLL
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

inline float tile_silu(float x) {
    return x / (1.0f + exp(-x));
}

/* Finished sums go to threadgroup memory row by row of x, so that a row leaves in 16 byte pieces.
 * Paired: 32 outputs silu(gate) * up. */
template <bool PAIRED, int FN, int FM>
inline void tile_stage(thread const tile_totals<FN, FM> &totals, tile_memory t, tile_place p) {
    threadgroup uint *stage = (threadgroup uint *)t.w;
    TILE_UNROLL
    for (int i = 0; i < (PAIRED ? FN / 2 : FN); i++) {
        uint n = tile_fragment<PAIRED, FN>(p.simd_n, i) * 8 + p.row;
        TILE_UNROLL
        for (int j = 0; j < FM; j++) {
            float2 value = totals.f[i][j];
            if (PAIRED) {
                float2 up = totals.f[(i + FN / 2) % FN][j];
                value = float2(tile_silu(value.x) * up.x, tile_silu(value.y) * up.y);
            }
            uint m = (p.simd_m * FM + (uint)j) * 8 + 2 * p.pair;
            stage[m * TILE_STAGE + n] = as_type<uint>(value.x);
            stage[(m + 1) * TILE_STAGE + n] = as_type<uint>(value.y);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
}

/* Four finished sums, numbers 4 * quad .. of row m. */
inline float4 tile_sums(tile_memory t, uint m, uint quad) {
    return as_type<float4>(t.w[m * (TILE_STAGE / 4) + quad]);
}
/* Eight finished sums times a factor as bfloat. */
inline uint4 tile_sums_bf16(tile_memory t, uint m, uint octet, float factor) {
    float4 a = tile_sums(t, m, 2 * octet) * factor;
    float4 b = tile_sums(t, m, 2 * octet + 1) * factor;
    return uint4(tile_pack(a.x, a.y), tile_pack(a.z, a.w), tile_pack(b.x, b.y),
                 tile_pack(b.z, b.w));
}

/* A tile from its source to finished sums in threadgroup memory. A small tile gives each simdgroup
 * two fragments of outputs, the usual one 4 x 2. */
template <int HEIGHT, bool PAIRED>
inline void tile_make(thread const tile_source &source, uint steps, tile_memory t,
                      uint thread_index) {
    tile_place p = tile_where<HEIGHT>(thread_index);
    tile_totals<HEIGHT == PREFILL_SMALL_M ? 2 : 4, HEIGHT == PREFILL_SMALL_M ? 1 : 2> totals;
    tile_run<HEIGHT, PAIRED>(totals, source, steps, t, p);
    tile_stage<PAIRED>(totals, t, p);
}

/* The height that `rows` rows need; the same for all threads of the threadgroup. */
template <bool PAIRED>
inline void tile_make_for(uint rows, thread const tile_source &source, uint steps, tile_memory t,
                          uint thread_index) {
    if (rows <= PREFILL_SMALL_M)
        tile_make<PREFILL_SMALL_M, PAIRED>(source, steps, t, thread_index);
    else
        tile_make<PREFILL_TILE_M, PAIRED>(source, steps, t, thread_index);
}

/* Rows of W for this thread: the tile begins at row `first` of a matrix of out_rows rows. */
inline void tile_source_w(thread tile_source &s, device const uint4 *codes,
                          device const ushort *scales, device const ushort *biases, uint row,
                          uint out_rows, uint cols, uint thread_index) {
    s.has_w = row < out_rows;
    s.w = codes + (row * (cols / 32) + thread_index % 2);
    s.factor = (thread_index % 2 == 0 ? scales : biases) + row * (cols / 64);
}

#endif
