/* Mathematics   y[T, R] = X[T, C] W[R, C]^T; W affine 4-bit, X 16-bit integers, groups of 64.
 * Memory        W row-major as stored, X group-major (kernels.h). A group of 16 rows is unpacked
 *               into 1 KiB of stack, rows in lanes; eight rows meet four rows of X at once.
 * Threads       none here: the caller hands each thread its own multiple of 16 rows.
 * Fusion        dequantisation in the product; agrees bit for bit with kernels_portable.c.
 * Bytes         not measured: no Arm machine was at hand; its tests ran under emulation. */
#include "backend/cpu/kernels/kernels.h"

#include <arm_neon.h>

#include "base/bf16.h"

#define VN 4
typedef float vf __attribute__((vector_size(VN * 4)));
typedef float vf_u __attribute__((vector_size(VN * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VN * 4)));
#define V_SET(x)       ((vf)vdupq_n_f32(x))
#define V_FMA(a, b, c) ((vf)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define V_MAX(a, b)    ((vf)larger((float32x4_t)(a), (float32x4_t)(b)))
#define V_BF16(p)      ((vf)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)))
#define V_U8(p)        ((vf)widen_u8(p))
#define ATTEND_HEADS   8

static inline float32x4_t larger(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b); /* b where a is not a number */
}

static inline float32x4_t widen_u8(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    uint16x8_t wide = vmovl_u8(vcreate_u8(four));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

#include "backend/cpu/kernels/float_body.h"

static void quantise(const float *x, int32_t cols, const struct qrows *out, size_t row) {
    for (int32_t g = 0; g < cols / GROUP; g++, x += GROUP) {
        size_t at = (size_t)g * out->rows + row;
        float32x4_t zero = vdupq_n_f32(0), top = zero, poison = zero;
        for (int i = 0; i < GROUP; i += 4) {
            float32x4_t v = vld1q_f32(x + i);
            top = vmaxnmq_f32(vabsq_f32(v), top); /* not a number: keeps top */
            poison = vfmaq_f32(poison, v, zero);
        }
        float largest = vmaxvq_f32(top);
        float inverse = largest > QUANT_TINY ? (float)QUANT_MAX / largest : 0.0f;
        int32_t codes[GROUP], sum = 0;
        for (int i = 0; i < GROUP; i += 4) {
            vst1q_s32(codes + i, vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse)));
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
        scale += vaddvq_f32(poison);
        out->s[at * 2] = scale;
        out->s[at * 2 + 1] = scale * (float)sum;
    }
}

/* Rows in lanes, four at a time. */
enum { QUADS = ROW_BLOCK / 4, TOKEN_TILE = 4 };
struct panel {
    _Alignas(64) int8_t codes[QUADS][16][16]; /* [.][k]: elements 8k, .. of four rows; kernels.h */
    _Alignas(64) float y[TOKEN_BLOCK][ROW_BLOCK];
    _Alignas(64) float scale[ROW_BLOCK], bias[ROW_BLOCK];
};

/* Four dwords of each of four rows, transposed; even and odd nibbles to places k and k + 8. */
static inline void unpack_quad(const uint8_t *codes, size_t stride, int8_t out[16][16], int k) {
    uint32x4_t r[4];
    for (size_t i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u8(vld1q_u8(codes + i * stride));
    uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1]));
    uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1]));
    uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3]));
    uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
    uint8x16_t column[4] = {
        vreinterpretq_u8_u64(vtrn1q_u64(a, c)), vreinterpretq_u8_u64(vtrn1q_u64(b, d)),
        vreinterpretq_u8_u64(vtrn2q_u64(a, c)), vreinterpretq_u8_u64(vtrn2q_u64(b, d))};
    for (int i = 0; i < 4; i++) {
        vst1q_s8(out[k + i], vreinterpretq_s8_u8(vandq_u8(column[i], vdupq_n_u8(15))));
        vst1q_s8(out[k + i + 8], vreinterpretq_s8_u8(vshrq_n_u8(column[i], 4)));
    }
}

/* y + (dot * (ws * xs) + wb * xt), each operation rounded once. */
static inline float32x4_t add_group(float32x4_t y, int32x4_t dots, float32x4_t ws, float32x4_t wb,
                                    const float *xs) {
    float32x4_t weight = vmulq_n_f32(ws, xs[0]), bias = vmulq_n_f32(wb, xs[1]);
    return vaddq_f32(y, vaddq_f32(vmulq_f32(vcvtq_f32_s32(dots), weight), bias));
}

/* One group: eight rows (two quads) times n inputs; every loaded vector is used several times. n is
 * a constant at every call. */
static inline __attribute__((always_inline)) void tile(struct panel *p, int quad, int n,
                                                       const int8_t *xq, const float *xs,
                                                       const size_t *at, float (*y)[ROW_BLOCK]) {
    int32x4_t high[2][TOKEN_TILE], low[2][TOKEN_TILE];
    for (int t = 0; t < n; t++) {
        for (int b = 0; b < 2; b++) high[b][t] = low[b][t] = vdupq_n_s32(0);
    }
    for (int k = 0; k < 16; k += 4) {
        int8x16_t h[TOKEN_TILE], l[TOKEN_TILE];
        for (int t = 0; t < n; t++) {
            h[t] = vld1q_s8(xq + at[t] * GROUP_BYTES + 4 * k);
            l[t] = vld1q_s8(xq + at[t] * GROUP_BYTES + GROUP + 4 * k);
        }
        for (int b = 0; b < 2; b++) {
            const int8_t *w = p->codes[quad + b][k];
            int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16), w2 = vld1q_s8(w + 32),
                      w3 = vld1q_s8(w + 48);
            for (int t = 0; t < n; t++) {
                high[b][t] = vdotq_laneq_s32(high[b][t], w0, h[t], 0);
                high[b][t] = vdotq_laneq_s32(high[b][t], w1, h[t], 1);
                high[b][t] = vdotq_laneq_s32(high[b][t], w2, h[t], 2);
                high[b][t] = vdotq_laneq_s32(high[b][t], w3, h[t], 3);
                low[b][t] = vdotq_laneq_s32(low[b][t], w0, l[t], 0);
                low[b][t] = vdotq_laneq_s32(low[b][t], w1, l[t], 1);
                low[b][t] = vdotq_laneq_s32(low[b][t], w2, l[t], 2);
                low[b][t] = vdotq_laneq_s32(low[b][t], w3, l[t], 3);
            }
        }
    }
    for (int b = 0; b < 2; b++) {
        int row = 4 * (quad + b);
        float32x4_t ws = vld1q_f32(p->scale + row), wb = vld1q_f32(p->bias + row);
        for (int t = 0; t < n; t++) {
            int32x4_t dots = vaddq_s32(vshlq_n_s32(high[b][t], 8), low[b][t]);
            float *sum = y[t] + row;
            vst1q_f32(sum, add_group(vld1q_f32(sum), dots, ws, wb, xs + at[t] * 2));
        }
    }
}

static void block_product(struct panel *p, const struct mat *m, int32_t r, const struct qrows *x,
                          const size_t *at, int32_t n) {
    int32_t groups = m->cols / GROUP;
    size_t stride = mat_row_bytes(m), first = (size_t)r * (size_t)groups;
    const uint8_t *codes = m->data + (size_t)r * stride;
    memset(p->y, 0, (size_t)n * sizeof p->y[0]);
    for (int32_t g = 0; g < groups; g++, codes += GROUP / 2) {
        for (int quad = 0; quad < QUADS; quad++) {
            const uint8_t *rows = codes + (size_t)quad * 4 * stride;
            unpack_quad(rows, stride, p->codes[quad], 0);
            unpack_quad(rows + 16, stride, p->codes[quad], 4);
        }
        for (int i = 0; i < ROW_BLOCK; i++) {
            size_t group = first + (size_t)i * (size_t)groups + (size_t)g;
            p->scale[i] = bf16_to_f32(m->scales[group]);
            p->bias[i] = bf16_to_f32(m->biases[group]);
            __builtin_prefetch(codes + (size_t)(i + ROW_BLOCK) * stride);
        }
        const int8_t *xq = x->q + (size_t)g * x->rows * GROUP_BYTES;
        const float *xs = x->s + (size_t)g * x->rows * 2;
        for (int quad = 0; quad < QUADS; quad += 2) {
            int32_t t = 0;
            for (; t + TOKEN_TILE <= n; t += TOKEN_TILE) {
                tile(p, quad, TOKEN_TILE, xq, xs, at + t, p->y + t);
            }
            for (; t < n; t++) tile(p, quad, 1, xq, xs, at + t, p->y + t);
        }
    }
}

static void matmul4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x,
                    const int32_t *index, int32_t n, float *out, size_t ldo) {
    struct panel p;
    size_t at[TOKEN_BLOCK];
    for (int32_t t0 = 0; t0 < n; t0 += TOKEN_BLOCK) {
        int32_t count = n - t0 < TOKEN_BLOCK ? n - t0 : TOKEN_BLOCK;
        for (int32_t t = 0; t < count; t++) at[t] = (size_t)(index ? index[t0 + t] : t0 + t);
        for (int32_t r = r0; r < r1; r += ROW_BLOCK) {
            block_product(&p, m, r, x, at, count);
            float *o = out + (size_t)t0 * ldo + (size_t)(r - r0);
            for (int32_t t = 0; t < count; t++, o += ldo) memcpy(o, p.y[t], sizeof p.y[t]);
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

const struct kernels kernels_neon = {
    .name = "neon-dotprod",
    .why = "Advanced SIMD and the dot-product extension",
    .quantise = quantise,
    .matvec4 = matvec4,
    .fetch = fetch,
    .matmul4 = matmul4,
    FLOAT_KERNELS,
};
