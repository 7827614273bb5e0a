/* Mathematics   y[T, R] = X[T, C] W[R, C]^T; W affine 4-bit, X 16-bit integers, groups of 64.
 * Memory        W row-major as stored, X group-major (kernels.h). 8 rows x 64 columns are unpacked
 *               into 512 bytes of stack, rows in lanes, and X streams past them.
 * Threads       none here: the caller hands each thread its own multiple of 16 rows.
 * Fusion        dequantisation in the product; agrees bit for bit with kernels_portable.c.
 * Bytes         every weight byte once in decode (0.5625 B a weight). Bound by arithmetic: 0.56 of
 *               the AVX-512 set's speed in decode, 0.35 in prefill on one thread (docs/cpu.md). */
#include "backend/cpu/kernels/kernels.h"

#include <immintrin.h>

#include "base/bf16.h"

#define VN 8
typedef float vf __attribute__((vector_size(VN * 4)));
typedef float vf_u __attribute__((vector_size(VN * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VN * 4)));
#define V_SET(x)       ((vf)_mm256_set1_ps(x))
#define V_FMA(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define V_MAX(a, b)    ((vf)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define V_BF16(p)      ((vf)widen_bf16(p))
#define V_U8(p)        ((vf)widen_u8(p))
#define ATTEND_HEADS   4

static inline __m256 widen_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline __m256 widen_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)));
}

#include "backend/cpu/kernels/float_body.h"

enum { ROWS = 8 };

static void quantise(const float *x, int32_t cols, const struct qrows *out, size_t row) {
    const __m256 sign = _mm256_set1_ps(-0.0f), zero = _mm256_setzero_ps();
    for (int32_t g = 0; g < cols / GROUP; g++, x += GROUP) {
        size_t at = (size_t)g * out->rows + row;
        __m256 top = zero, poison = zero;
        for (int i = 0; i < GROUP; i += VN) {
            __m256 v = _mm256_loadu_ps(x + i);
            top = _mm256_max_ps(_mm256_andnot_ps(sign, v), top); /* NaN first: keeps top */
            poison = _mm256_fmadd_ps(v, zero, poison);
        }
        float largest = v_top((vf)top);
        float inverse = largest > QUANT_TINY ? (float)QUANT_MAX / largest : 0.0f;
        int32_t codes[GROUP], sum = 0;
        for (int i = 0; i < GROUP; i += VN) {
            __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(inverse));
            _mm256_storeu_si256((void *)(codes + i), _mm256_cvtps_epi32(v));
        }
        int8_t *q = out->q + at * GROUP_BYTES;
        for (int i = 0; i < GROUP; i++) {
            int16_t code = (int16_t)codes[i], high = (int16_t)((code + 128) >> 8);
            int at_byte = (i & 1) * (GROUP / 2) + i / 2;
            q[at_byte] = (int8_t)high;
            q[GROUP + at_byte] = (int8_t)(code - 256 * high);
            sum += code;
        }
        float scale = largest > QUANT_TINY ? largest * (1.0f / QUANT_MAX) : 0.0f;
        scale += v_sum((vf)poison);
        out->s[at * 2] = scale;
        out->s[at * 2 + 1] = scale * (float)sum;
    }
}

/* Transposes eight rows of eight dwords: out[k] = dword k of every row. */
static inline void transpose_8x8(const uint8_t *rows, size_t stride, __m256i out[8]) {
    __m256i r[8], t[8];
    for (size_t i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const void *)(rows + i * stride));
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
}

/* w[0-7]: even elements of each row, four per dword; w[8-15]: the odd ones. */
static inline void unpack_group(const uint8_t *codes, size_t stride, __m256i w[16]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i packed[8];
    transpose_8x8(codes, stride, packed);
    for (int k = 0; k < 8; k++) {
        w[k] = _mm256_and_si256(packed[k], mask);
        w[k + 8] = _mm256_and_si256(_mm256_srli_epi16(packed[k], 4), mask);
    }
}

/* Dots of 8 rows with one input row over a group. Pairs of products are at most 2 * 15 * 127, so
 * eight of them stay below 2^15 and nothing saturates. */
static inline __m256i group_dots(const __m256i w[16], const int8_t *x) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = _mm256_setzero_si256();
    for (int part = 0; part < GROUP_BYTES; part += 32) { /* high even, high odd, low even, odd */
        __m256i s = _mm256_setzero_si256();
        for (int k = 0; k < 8; k++) {
            int32_t four;
            memcpy(&four, x + part + 4 * k, sizeof four);
            __m256i pairs = _mm256_maddubs_epi16(w[part % GROUP / 4 + k], _mm256_set1_epi32(four));
            s = _mm256_add_epi16(s, pairs);
        }
        total = _mm256_add_epi32(total, _mm256_madd_epi16(s, ones));
        if (part == 32) total = _mm256_slli_epi32(total, 8);
    }
    return total;
}

/* Scale or bias of group g of eight rows, as float. */
static inline __m256 group_bf16(const uint16_t *rows, int32_t groups, int32_t g) {
    _Alignas(32) float v[ROWS];
    for (int i = 0; i < ROWS; i++) {
        v[i] = bf16_to_f32(rows[(size_t)i * (size_t)groups + (size_t)g]);
    }
    return _mm256_load_ps(v);
}

static void block_product(const struct mat *m, int32_t r, const struct qrows *x, const size_t *at,
                          int32_t n, float *y) {
    int32_t groups = m->cols / GROUP;
    size_t stride = mat_row_bytes(m), first = (size_t)r * (size_t)groups;
    const uint8_t *codes = m->data + (size_t)r * stride;
    for (int32_t t = 0; t < n; t++) _mm256_store_ps(y + t * ROWS, _mm256_setzero_ps());
    for (int32_t g = 0; g < groups; g++, codes += GROUP / 2) {
        __m256i w[16];
        unpack_group(codes, stride, w);
        __m256 ws = group_bf16(m->scales + first, groups, g);
        __m256 wb = group_bf16(m->biases + first, groups, g);
        const int8_t *xq = x->q + (size_t)g * x->rows * GROUP_BYTES;
        const float *xs = x->s + (size_t)g * x->rows * 2;
        for (int32_t t = 0; t < n; t++) {
            __m256 dots = _mm256_cvtepi32_ps(group_dots(w, xq + at[t] * GROUP_BYTES));
            __m256 weight = _mm256_mul_ps(ws, _mm256_set1_ps(xs[at[t] * 2]));
            __m256 bias = _mm256_mul_ps(wb, _mm256_set1_ps(xs[at[t] * 2 + 1]));
            __m256 term = _mm256_add_ps(_mm256_mul_ps(dots, weight), bias);
            _mm256_store_ps(y + t * ROWS, _mm256_add_ps(_mm256_load_ps(y + t * ROWS), term));
        }
    }
}

static void matmul4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x,
                    const int32_t *index, int32_t n, float *out, size_t ldo) {
    _Alignas(32) float y[TOKEN_BLOCK * ROWS];
    size_t at[TOKEN_BLOCK];
    for (int32_t t0 = 0; t0 < n; t0 += TOKEN_BLOCK) {
        int32_t block = n - t0 < TOKEN_BLOCK ? n - t0 : TOKEN_BLOCK;
        for (int32_t t = 0; t < block; t++) at[t] = (size_t)(index ? index[t0 + t] : t0 + t);
        for (int32_t r = r0; r < r1; r += ROWS) {
            block_product(m, r, x, at, block, y);
            float *o = out + (size_t)t0 * ldo + (size_t)(r - r0);
            for (int32_t t = 0; t < block; t++, o += ldo) {
                _mm256_storeu_ps(o, _mm256_load_ps(y + t * ROWS));
            }
        }
    }
}

static void matvec4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x, float *out,
                    struct ahead next) {
    (void)next; /* left to the hardware's own prefetching */
    matmul4(m, r0, r1, x, NULL, 1, out, 0);
}

static void fetch(struct ahead next) {
    (void)next;
}

const struct kernels kernels_avx2 = {
    .name = "avx2",
    .why = "AVX2 and FMA",
    .quantise = quantise,
    .matvec4 = matvec4,
    .fetch = fetch,
    .matmul4 = matmul4,
    FLOAT_KERNELS,
};
