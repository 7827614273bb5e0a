/* Mathematics   y[T, R] = X[T, C] W[R, C]^T; W affine 4-bit, X 16-bit integers, groups of 64.
 * Memory        W row-major as stored (a group of a row is 32 bytes), X group-major (kernels.h).
 *               matvec4 reads 16 rows side by side, 64 bytes of each at a time; matmul4 unpacks
 *               32 rows x 64 columns into 2 KiB, rows in lanes, and four rows of X pass it at once.
 * Threads       none here: the caller hands each thread its own multiple of 16 rows.
 * Fusion        dequantisation in the product; agrees bit for bit with kernels_portable.c.
 * Bytes         matvec4: every weight byte once (0.5625 B a weight), 48 to 55 GB/s with 2 threads
 *               where a plain read gives 50. matmul4: 50 products a cycle from cache, of the 58
 *               that two VNNI pipes and 16-bit inputs allow (Zen 5). Runs: docs/cpu.md. */
#include "backend/cpu/kernels/kernels.h"

#include <immintrin.h>

#include "base/bf16.h"

#define VN 16
typedef float vf __attribute__((vector_size(VN * 4)));
typedef float vf_u __attribute__((vector_size(VN * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VN * 4)));
#define V_SET(x)       ((vf)_mm512_set1_ps(x))
#define V_FMA(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define V_MAX(a, b)    ((vf)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define V_BF16(p)      ((vf)widen_bf16(p))
#define V_U8(p)        ((vf)widen_u8(p))
#define ATTEND_HEADS   8

static inline __m512 widen_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline __m512 widen_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}

#include "backend/cpu/kernels/float_body.h"

/* 64 dwords as bytes, the even elements first. */
static inline __m512i even_odd_bytes(const __m512i v[4]) {
    /* Of each 16 bytes the evens go to the low half, then the halves are gathered. */
    const __m512i split =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m512i halves = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i bytes = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(v[0]));
    bytes = _mm512_inserti32x4(bytes, _mm512_cvtepi32_epi8(v[1]), 1);
    bytes = _mm512_inserti32x4(bytes, _mm512_cvtepi32_epi8(v[2]), 2);
    bytes = _mm512_inserti32x4(bytes, _mm512_cvtepi32_epi8(v[3]), 3);
    return _mm512_permutexvar_epi64(halves, _mm512_shuffle_epi8(bytes, split));
}

static void quantise(const float *x, int32_t cols, const struct qrows *out, size_t row) {
    for (int32_t g = 0; g < cols / GROUP; g++, x += GROUP) {
        size_t at = (size_t)g * out->rows + row;
        __m512 v[4], zero = _mm512_setzero_ps(), top = zero, poison = zero;
        for (int i = 0; i < 4; i++) {
            v[i] = _mm512_loadu_ps(x + 16 * i);
            top = _mm512_max_ps(_mm512_abs_ps(v[i]), top); /* NaN first: keeps top */
            poison = _mm512_fmadd_ps(v[i], zero, poison);
        }
        float largest = _mm512_reduce_max_ps(top);
        float inverse = largest > QUANT_TINY ? (float)QUANT_MAX / largest : 0.0f;
        __m512i high[4], low[4], sum = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], _mm512_set1_ps(inverse)));
            sum = _mm512_add_epi32(sum, code);
            high[i] = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            low[i] = _mm512_sub_epi32(code, _mm512_slli_epi32(high[i], 8));
        }
        _mm512_storeu_si512(out->q + at * GROUP_BYTES, even_odd_bytes(high));
        _mm512_storeu_si512(out->q + at * GROUP_BYTES + GROUP, even_odd_bytes(low));
        float scale = largest > QUANT_TINY ? largest * (1.0f / QUANT_MAX) : 0.0f;
        scale += _mm512_reduce_add_ps(poison);
        out->s[at * 2] = scale;
        out->s[at * 2 + 1] = scale * (float)_mm512_reduce_add_epi32(sum);
    }
}

/* Asks for n lines of memory that will be read soon; any address is fine. Always inlined: gcc takes
 * a function that only prefetches for one without effects and drops the call. */
static inline __attribute__((always_inline)) void prefetch_lines(const void *p, int n) {
    for (int i = 0; i < n; i++) _mm_prefetch((const char *)p + i * 64, _MM_HINT_T0);
}

/* Scales or biases of 16 rows as float, group by group: out[g * 16 + i] = row i. Two groups share
 * a dword, so one gather of 16 rows serves both; the last of an odd number is read alone. */
static inline void transpose_bf16(const uint16_t *rows, int32_t groups, float *out) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const __m512i stride =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(groups));
    int32_t g = 0;
    for (; g + 1 < groups; g += 2) {
        __m512i pair = _mm512_i32gather_epi32(stride, (const void *)(rows + g), 2);
        _mm512_store_si512(out + g * 16, _mm512_slli_epi32(pair, 16));
        _mm512_store_si512(out + g * 16 + 16, _mm512_and_si512(pair, high));
    }
    if (g < groups) {
        for (int32_t i = 0; i < 16; i++) {
            out[g * 16 + i] = bf16_to_f32(rows[(size_t)i * (size_t)groups + (size_t)g]);
        }
    }
}

struct row_scales {
    _Alignas(64) float scale[MAX_COLS / GROUP * 16];
    _Alignas(64) float bias[MAX_COLS / GROUP * 16];
};

static inline void load_scales(const struct mat *m, int32_t r, struct row_scales *s) {
    int32_t groups = m->cols / GROUP;
    size_t at = (size_t)r * (size_t)groups;
    transpose_bf16(m->scales + at, groups, s->scale);
    transpose_bf16(m->biases + at, groups, s->bias);
}

/* y + (dot * (ws * xs) + wb * xt), each operation rounded once. */
static inline __m512 add_group(__m512 y, __m512i dots, const float *ws, const float *wb,
                               const float *xs) {
    __m512 weight = _mm512_mul_ps(_mm512_load_ps(ws), _mm512_set1_ps(xs[0]));
    __m512 bias = _mm512_mul_ps(_mm512_load_ps(wb), _mm512_set1_ps(xs[1]));
    return _mm512_add_ps(y, _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), weight), bias));
}

/* Two groups of one input row: even and odd elements, high and low bytes. */
struct input_pair {
    __m512i high_even, high_odd, low_even, low_odd;
};

static inline struct input_pair load_pair(const int8_t *first, const int8_t *second) {
    __m512i h0 = _mm512_loadu_si512(first), h1 = _mm512_loadu_si512(second);
    __m512i l0 = _mm512_loadu_si512(first + GROUP), l1 = _mm512_loadu_si512(second + GROUP);
    return (struct input_pair){
        _mm512_shuffle_i64x2(h0, h1, 0x44), _mm512_shuffle_i64x2(h0, h1, 0xee),
        _mm512_shuffle_i64x2(l0, l1, 0x44), _mm512_shuffle_i64x2(l0, l1, 0xee)};
}

/* One row's products with 128 columns (two groups), as 16 partial sums: lanes 0-7 group one. */
static inline __m512i row_pair(const uint8_t *codes, const struct input_pair *x) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i packed = _mm512_loadu_si512(codes);
    __m512i even = _mm512_and_si512(packed, mask);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, x->high_even);
    sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, odd, x->high_odd), 8);
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, even, x->low_even), odd, x->low_odd);
}

/* Sums of four rows over each 128-bit lane: lane l of the result is {a, b, c, d} summed in l. */
static inline __m512i sum_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* Lanes {x0 + x1, x2 + x3, y0 + y1, y2 + y3}. */
static inline __m512i fold_lanes(__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
}

static inline __m512i four_rows(const uint8_t *codes, size_t stride, const struct input_pair *x) {
    __m512i a = row_pair(codes, x), b = row_pair(codes + stride, x);
    __m512i c = row_pair(codes + 2 * stride, x), d = row_pair(codes + 3 * stride, x);
    return sum_lanes(a, b, c, d);
}

/* Four dwords of each of eight rows, rows in lanes: in[i] holds 32 bytes of row i, then of row
 * i + 4 (i < 4). out[k] = {dword k of rows 0-3, dword k + 4 of rows 0-3, the same of rows 4-7}. */
static inline void transpose_4x4(const __m512i in[4], __m512i out[4]) {
    __m512i a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpackhi_epi32(in[0], in[1]);
    __m512i c = _mm512_unpacklo_epi32(in[2], in[3]), d = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

static inline __m512i two_rows(const uint8_t *first, const uint8_t *second) {
    __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)first));
    return _mm512_inserti64x4(v, _mm256_loadu_si256((const void *)second), 1);
}

/* One group of 16 rows: even[k] holds elements 8k, 8k+2, 8k+4, 8k+6 of each row in its dword,
 * odd[k] the elements between. */
static inline void unpack_group(const uint8_t *codes, size_t stride, __m512i even[8],
                                __m512i odd[8]) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i in[4], low[4], up[4];
    for (size_t i = 0; i < 4; i++) in[i] = two_rows(codes + i * stride, codes + (i + 4) * stride);
    transpose_4x4(in, low);
    codes += 8 * stride;
    for (size_t i = 0; i < 4; i++) in[i] = two_rows(codes + i * stride, codes + (i + 4) * stride);
    transpose_4x4(in, up);
    for (int k = 0; k < 4; k++) {
        __m512i first = _mm512_shuffle_i32x4(low[k], up[k], 0x88);
        __m512i second = _mm512_shuffle_i32x4(low[k], up[k], 0xdd);
        even[k] = _mm512_and_si512(first, mask);
        odd[k] = _mm512_and_si512(_mm512_srli_epi16(first, 4), mask);
        even[k + 4] = _mm512_and_si512(second, mask);
        odd[k + 4] = _mm512_and_si512(_mm512_srli_epi16(second, 4), mask);
    }
}

/* Four consecutive inputs, in every dword. */
static inline __m512i spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Dots of 16 rows with one input row over a group: complete sums, no reduction across lanes. Eight
 * independent sums cover the instruction's latency. */
static inline __m512i group_dots(const __m512i even[8], const __m512i odd[8], const int8_t *x) {
    __m512i high[4], low[4];
    for (int i = 0; i < 4; i++) high[i] = low[i] = _mm512_setzero_si512();
    for (int k = 0; k < 8; k++) {
        int i = k & 1;
        high[i] = _mm512_dpbusd_epi32(high[i], even[k], spread(x + 4 * k));
        high[i + 2] = _mm512_dpbusd_epi32(high[i + 2], odd[k], spread(x + 32 + 4 * k));
        low[i] = _mm512_dpbusd_epi32(low[i], even[k], spread(x + 64 + 4 * k));
        low[i + 2] = _mm512_dpbusd_epi32(low[i + 2], odd[k], spread(x + 96 + 4 * k));
    }
    __m512i h =
        _mm512_add_epi32(_mm512_add_epi32(high[0], high[1]), _mm512_add_epi32(high[2], high[3]));
    __m512i l =
        _mm512_add_epi32(_mm512_add_epi32(low[0], low[1]), _mm512_add_epi32(low[2], low[3]));
    return _mm512_add_epi32(_mm512_slli_epi32(h, 8), l);
}

enum { AHEAD = 8 }; /* pairs of groups between asking for codes and using them */

/* A block of 16 rows: where its codes are. */
struct block {
    const uint8_t *codes; /* NULL: unknown */
    size_t stride;
};

/* The block at a row, its scales asked for. */
static inline __attribute__((always_inline)) struct block block_at(struct ahead at) {
    if (!at.m) return (struct block){NULL, 0};
    int32_t groups = at.m->cols / GROUP;
    size_t group = (size_t)at.r * (size_t)groups, stride = mat_row_bytes(at.m);
    prefetch_lines(at.m->scales + group, groups / 2);
    prefetch_lines(at.m->biases + group, groups / 2);
    return (struct block){at.m->data + (size_t)at.r * stride, stride};
}

/* What matvec4 will read AHEAD pairs of groups from group g of this block: later columns of the
 * same rows, then the first columns of the next block. Narrow matrices take the next block in the
 * order of memory instead. */
static inline __attribute__((always_inline)) void
prefetch_block(struct block now, struct block next, int32_t g, int32_t groups) {
    int32_t later = g + 2 * AHEAD;
    if (groups <= 2 * AHEAD) {
        if (next.codes) prefetch_lines(next.codes + g * (GROUP / 2) * ROW_BLOCK, ROW_BLOCK);
        return;
    }
    struct block from = later < groups ? now : next;
    if (!from.codes) return;
    from.codes += (later < groups ? later : later - groups) * (GROUP / 2);
    for (size_t i = 0; i < ROW_BLOCK; i++) prefetch_lines(from.codes + i * from.stride, 1);
}

static void fetch(struct ahead next) {
    struct block block = block_at(next);
    if (!block.codes) return;
    size_t width = block.stride < AHEAD * GROUP ? block.stride : AHEAD * GROUP;
    for (size_t i = 0; i < ROW_BLOCK; i++) {
        for (size_t at = 0; at < width; at += 64) {
            prefetch_lines(block.codes + i * block.stride + at, 1);
        }
    }
}

static void matvec4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x, float *out,
                    struct ahead next) {
    int32_t groups = m->cols / GROUP;
    size_t stride = mat_row_bytes(m), step = x->rows * GROUP_BYTES;
    struct row_scales scales;
    for (int32_t r = r0; r < r1; r += ROW_BLOCK) {
        struct block now = {m->data + (size_t)r * stride, stride};
        struct block then = block_at(r + ROW_BLOCK < r1 ? (struct ahead){m, r + ROW_BLOCK} : next);
        const uint8_t *codes = now.codes;
        load_scales(m, r, &scales);
        __m512 y = _mm512_setzero_ps();
        int32_t g = 0;
        for (; g + 1 < groups; g += 2, codes += GROUP) {
            struct input_pair in =
                load_pair(x->q + (size_t)g * step, x->q + (size_t)(g + 1) * step);
            prefetch_block(now, then, g, groups);
            __m512i r03 = four_rows(codes, stride, &in);
            __m512i r47 = four_rows(codes + 4 * stride, stride, &in);
            __m512i r8b = four_rows(codes + 8 * stride, stride, &in);
            __m512i rcf = four_rows(codes + 12 * stride, stride, &in);
            /* lanes {rows 0-3 of g, 0-3 of g + 1, 4-7 of g, 4-7 of g + 1}, then the other rows */
            __m512i low = fold_lanes(r03, r47), up = fold_lanes(r8b, rcf);
            const float *ws = scales.scale + g * 16, *wb = scales.bias + g * 16;
            const float *xs = x->s + (size_t)g * x->rows * 2;
            y = add_group(y, _mm512_shuffle_i32x4(low, up, 0x88), ws, wb, xs);
            y = add_group(y, _mm512_shuffle_i32x4(low, up, 0xdd), ws + 16, wb + 16,
                          xs + x->rows * 2);
        }
        if (g < groups) {
            __m512i even[8], odd[8]; /* the last of an odd number */
            unpack_group(codes, stride, even, odd);
            y = add_group(y, group_dots(even, odd, x->q + (size_t)g * step), scales.scale + g * 16,
                          scales.bias + g * 16, x->s + (size_t)g * x->rows * 2);
        }
        _mm512_storeu_ps(out + (r - r0), y);
    }
}

/* ---- matrix times matrix --------------------------------------------------------------------- */

/* A block of 32 rows: one group's codes unpacked, rows in lanes, and sums for TOKEN_BLOCK inputs.
 */
enum { BLOCKS = 2, TOKEN_TILE = 4 };
struct panel {
    _Alignas(64) uint8_t codes[BLOCKS][16][64]; /* [.][k]: elements 8k, .. of 16 rows; kernels.h */
    _Alignas(64) float y[TOKEN_BLOCK][BLOCKS * 16];
    struct row_scales scales[BLOCKS];
};

/* One group: blocks x 16 rows times n inputs, x[t] -> y[t]. Each loaded vector of codes meets 2 n
 * input bytes, each of those every block: 10 loads for 16 products at full size, so that the
 * multipliers and not the load ports set the pace. blocks and n are constants at every call. */
static inline __attribute__((always_inline)) void tile(struct panel *p, int blocks, int n,
                                                       int32_t g, const int8_t *xq, const float *xs,
                                                       const size_t *at, float (*y)[BLOCKS * 16]) {
    __m512i high[BLOCKS][TOKEN_TILE], low[BLOCKS][TOKEN_TILE];
    const int8_t *x[TOKEN_TILE];
    for (int t = 0; t < n; t++) {
        x[t] = xq + at[t] * GROUP_BYTES;
        for (int b = 0; b < blocks; b++) high[b][t] = low[b][t] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int k = 0; k < 16; k++) {
        __m512i w[BLOCKS];
        for (int b = 0; b < blocks; b++) w[b] = _mm512_load_si512(p->codes[b][k]);
        for (int t = 0; t < n; t++) {
            __m512i h = spread(x[t] + 4 * k), l = spread(x[t] + GROUP + 4 * k);
            for (int b = 0; b < blocks; b++) {
                high[b][t] = _mm512_dpbusd_epi32(high[b][t], w[b], h);
                low[b][t] = _mm512_dpbusd_epi32(low[b][t], w[b], l);
            }
        }
    }
    for (int b = 0; b < blocks; b++) {
        const float *ws = p->scales[b].scale + g * 16, *wb = p->scales[b].bias + g * 16;
        for (int t = 0; t < n; t++) {
            __m512i dots = _mm512_add_epi32(_mm512_slli_epi32(high[b][t], 8), low[b][t]);
            __m512 sum = add_group(_mm512_load_ps(y[t] + b * 16), dots, ws, wb, xs + at[t] * 2);
            _mm512_store_ps(y[t] + b * 16, sum);
        }
    }
}

static inline __attribute__((always_inline)) void tiles(struct panel *p, int blocks, int32_t n,
                                                        int32_t g, const int8_t *xq,
                                                        const float *xs, const size_t *at) {
    int32_t t = 0;
    for (; t + TOKEN_TILE <= n; t += TOKEN_TILE) {
        tile(p, blocks, TOKEN_TILE, g, xq, xs, at + t, p->y + t);
    }
    switch (n - t) {
    case 3:
        tile(p, blocks, 3, g, xq, xs, at + t, p->y + t);
        break;
    case 2:
        tile(p, blocks, 2, g, xq, xs, at + t, p->y + t);
        break;
    case 1:
        tile(p, blocks, 1, g, xq, xs, at + t, p->y + t);
        break;
    default:
        break;
    }
}

/* blocks x 16 rows of m from r times n rows of x; at[t] is the row of x. Sums end in p->y. */
static inline __attribute__((always_inline)) void panel_product(struct panel *p, int blocks,
                                                                const struct mat *m, int32_t r,
                                                                const struct qrows *x,
                                                                const size_t *at, int32_t n) {
    int32_t groups = m->cols / GROUP;
    size_t stride = mat_row_bytes(m);
    const uint8_t *codes = m->data + (size_t)r * stride;
    const uint8_t *ahead =
        codes + (size_t)blocks * ROW_BLOCK * stride; /* the next rows, in order */
    for (int b = 0; b < blocks; b++) {
        load_scales(m, r + b * ROW_BLOCK, &p->scales[b]);
        block_at((struct ahead){m, r + (blocks + b) * ROW_BLOCK});
    }
    for (int32_t t = 0; t < n; t++) {
        for (int b = 0; b < blocks; b++) _mm512_store_ps(p->y[t] + b * 16, _mm512_setzero_ps());
    }
    for (int32_t g = 0; g < groups; g++, codes += GROUP / 2) {
        for (int b = 0; b < blocks; b++) {
            __m512i even[8], odd[8];
            unpack_group(codes + (size_t)b * ROW_BLOCK * stride, stride, even, odd);
            for (int k = 0; k < 8; k++) {
                _mm512_store_si512(p->codes[b][k], even[k]);
                _mm512_store_si512(p->codes[b][k + 8], odd[k]);
            }
        }
        prefetch_lines(ahead, blocks * ROW_BLOCK / 2);
        ahead += blocks * ROW_BLOCK * (GROUP / 2);
        tiles(p, blocks, n, g, x->q + (size_t)g * x->rows * GROUP_BYTES,
              x->s + (size_t)g * x->rows * 2, at);
    }
}

static void matmul4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x,
                    const int32_t *index, int32_t n, float *out, size_t ldo) {
    struct panel p;
    size_t at[TOKEN_BLOCK];
    for (int32_t t0 = 0; t0 < n; t0 += TOKEN_BLOCK) {
        int32_t count = n - t0 < TOKEN_BLOCK ? n - t0 : TOKEN_BLOCK;
        for (int32_t t = 0; t < count; t++) at[t] = (size_t)(index ? index[t0 + t] : t0 + t);
        for (int32_t r = r0; r < r1; r += BLOCKS * ROW_BLOCK) {
            int32_t blocks = r1 - r >= BLOCKS * ROW_BLOCK ? BLOCKS : 1;
            if (blocks == BLOCKS)
                panel_product(&p, BLOCKS, m, r, x, at, count);
            else
                panel_product(&p, 1, m, r, x, at, count);
            float *o = out + (size_t)t0 * ldo + (size_t)(r - r0);
            for (int32_t t = 0; t < count; t++, o += ldo) {
                memcpy(o, p.y[t], (size_t)blocks * ROW_BLOCK * sizeof *o);
            }
        }
    }
}

const struct kernels kernels_avx512 = {
    .name = "avx512-vnni",
    .why = "AVX-512 F, BW, VL, DQ and VNNI",
    .quantise = quantise,
    .matvec4 = matvec4,
    .fetch = fetch,
    .matmul4 = matmul4,
    FLOAT_KERNELS,
};
