/* Mathematics   y[T, R] = X[T, C] W[R, C]^T; W affine 4-bit, X 16-bit integers, groups of 64.
 * Memory        W row-major as stored, X group-major (kernels.h), evens before odds in a group.
 * Threads       none here: the caller hands each thread its own rows.
 * Fusion        dequantisation in the product; the other sets must agree bit for bit with this one.
 * Bytes         not tuned: the fallback, and the definition by which the others are tested. */
#include "backend/cpu/kernels/kernels.h"

#include "base/bf16.h"

#define VN 4
typedef float vf __attribute__((vector_size(VN * 4)));
typedef float vf_u __attribute__((vector_size(VN * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VN * 4)));
#define V_SET(x)       ((vf){(x), (x), (x), (x)})
#define V_FMA(a, b, c) ((a) * (b) + (c))
#define V_MAX(a, b)    v_max((a), (b))
#define V_BF16(p)      v_bf16(p)
#define V_U8(p)        v_u8(p)
#define ATTEND_HEADS   4

static inline vf v_max(vf a, vf b) {
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}

static inline vf v_bf16(const uint16_t *p) {
    return (vf){bf16_to_f32(p[0]), bf16_to_f32(p[1]), bf16_to_f32(p[2]), bf16_to_f32(p[3])};
}

static inline vf v_u8(const uint8_t *p) {
    return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}

#include "backend/cpu/kernels/float_body.h"

static void quantise(const float *x, int32_t cols, const struct qrows *out, size_t row) {
    for (int32_t g = 0; g < cols / GROUP; g++, x += GROUP) {
        size_t at = (size_t)g * out->rows + row;
        int8_t *q = out->q + at * GROUP_BYTES;
        float top = 0, poison = 0; /* poison: 0, or NaN when the input is not finite */
        for (int i = 0; i < GROUP; i++) {
            top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
            poison += x[i] * 0.0f;
        }
        float inverse = top > QUANT_TINY ? (float)QUANT_MAX / top : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < GROUP; i++) {
            int16_t code = (int16_t)lrintf(x[i] * inverse);
            int16_t high = (int16_t)((code + 128) >> 8);
            int at_byte = (i & 1) * (GROUP / 2) + i / 2;
            q[at_byte] = (int8_t)high;
            q[GROUP + at_byte] = (int8_t)(code - 256 * high);
            sum += code;
        }
        float scale = (top > QUANT_TINY ? top * (1.0f / QUANT_MAX) : 0.0f) + poison;
        out->s[at * 2] = scale;
        out->s[at * 2 + 1] = scale * (float)sum;
    }
}

static float product(const struct mat *m, int32_t r, const struct qrows *x, size_t row) {
    int32_t groups = m->cols / GROUP;
    const uint8_t *codes = m->data + (size_t)r * mat_row_bytes(m);
    const uint16_t *scales = m->scales + (size_t)r * (size_t)groups;
    const uint16_t *biases = m->biases + (size_t)r * (size_t)groups;
    float y = 0;
    for (int32_t g = 0; g < groups; g++, codes += GROUP / 2) {
        size_t at = (size_t)g * x->rows + row;
        const int8_t *high = x->q + at * GROUP_BYTES, *low = high + GROUP;
        int32_t sum = 0;
        for (int i = 0; i < GROUP / 2; i++) {
            int32_t even = 256 * high[i] + low[i];
            int32_t odd = 256 * high[i + GROUP / 2] + low[i + GROUP / 2];
            sum += (codes[i] & 15) * even + (codes[i] >> 4) * odd;
        }
        float weight = bf16_to_f32(scales[g]) * x->s[at * 2];
        y = y + ((float)sum * weight + bf16_to_f32(biases[g]) * x->s[at * 2 + 1]);
    }
    return y;
}

static void matmul4(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x,
                    const int32_t *index, int32_t n, float *out, size_t ldo) {
    for (int32_t r = r0; r < r1; r++) {
        for (int32_t t = 0; t < n; t++) {
            size_t row = (size_t)(index ? index[t] : t);
            out[(size_t)t * ldo + (size_t)(r - r0)] = product(m, r, x, row);
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

const struct kernels kernels_portable = {
    .name = "portable",
    .why = "plain C",
    .quantise = quantise,
    .matvec4 = matvec4,
    .fetch = fetch,
    .matmul4 = matmul4,
    FLOAT_KERNELS,
};
