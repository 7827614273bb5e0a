/* The CPU's inner loops, once per instruction set, behind one table chosen at run time.
 *
 * Integer products. An input row is rounded to 16 bits in groups of 64: x ~ scale * q, |q| <=
 * 32639, kept as two signed bytes, q = 256 * high + low, because the processors multiply bytes. The
 * dot product of a group with the weights' unsigned codes is exact in integers, and y = sum over
 * groups g, ascending, of  dot_g * (ws_g * xs_g) + wb_g * xt_g in float32, every operation rounded
 * once (no fused multiply-add), where ws, wb are the weights' scale and bias and xt = xs * sum(q).
 * So y depends on nothing but its own row and column: matvec4 and matmul4, any tile, any thread and
 * any instruction set give the same bits.
 *
 * Float kernels use the set's own width and fused multiply-add: same bits on one machine whatever
 * the batch, last-bit differences between machines. */
#ifndef LILY_CPU_KERNELS_H
#define LILY_CPU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/weights.h"

/* What both shapes share (checked when a model is opened), so that loops have fixed bounds. */
enum {
    GROUP = 64,        /* inputs per quantisation group */
    GROUP_BYTES = 128, /* a group of a quantised input row: high bytes, then low bytes */
    QUANT_MAX = 32639, /* 127 * 256 + 127: both bytes stay within [-127, 127] */
    ROW_BLOCK = 16,    /* output rows an integer kernel makes at once; parts are multiples of it */
    TOKEN_BLOCK = 64,  /* input rows matmul4 takes through one pass over the weights */
    HEAD = 256,        /* width of an attention head */
    KV_GROUP = 8,      /* query heads that share a key/value head */
    KEY_BLOCK = 16,    /* positions whose keys are stored transposed: [HEAD][KEY_BLOCK] */
    VALUE_BLOCK = 64, /* positions whose values are stored as [HEAD / VALUE_LANE][64][VALUE_LANE] */
    VALUE_LANE = 32,
    SPAN = 512,      /* positions of one partial attention result, on the absolute grid */
    STATE = 128,     /* a DeltaNet head's state is [STATE key][STATE value] */
    STATE_HALF = 64, /* stored as two halves [STATE key][STATE_HALF value] */
    CONV_TAPS = 4,
    MAX_COLS = 4096 /* widest matrix; bounds the stack buffers of the kernels */
};

#define QUANT_TINY 1e-30f /* a group whose largest magnitude is below this counts as zero */

/* Quantised rows, group by group: group g of row r is q[(g * rows + r) * 128]: the high bytes of
 * the 32 even elements, then of the 32 odd ones (so a byte of codes unpacks without a shuffle),
 * then the low bytes likewise; its {scale, scale * sum(q)} is s[(g * rows + r) * 2]. A view of some
 * rows is the same with q and s moved. */
struct qrows {
    int8_t *q;   /* [groups][rows][128] */
    float *s;    /* [groups][rows][2] */
    size_t rows; /* distance between groups, in rows */
};

/* Where the caller will go on reading weights: row r of m. */
struct ahead {
    const struct mat *m; /* NULL: nowhere yet known */
    int32_t r;
};

/* Running result of attention for the KV_GROUP query heads of one key/value head. */
struct attend {
    float max[KV_GROUP];       /* largest score; -inf when empty */
    float sum[KV_GROUP];       /* of exp(score - max) */
    float out[KV_GROUP][HEAD]; /* sum of exp(score - max) * value */
};

struct kernels {
    const char *name; /* "avx512-vnni" */
    const char *why;  /* what it needs, for `lily doctor` */

    /* Row `row` of out from x[cols]; a group that is not finite gets a NaN scale, so that the fault
     * reaches the logits. */
    void (*quantise)(const float *x, int32_t cols, const struct qrows *out, size_t row);
    /* out[r - r0] = row r of m times x (one row), r0 <= r < r1, multiples of ROW_BLOCK; 4 bits.
     * Near the end it asks memory for the first rows of next. */
    void (*matvec4)(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x, float *out,
                    struct ahead next);
    /* Asks for the first rows of next, for matvec4 to find them near. */
    void (*fetch)(struct ahead next);
    /* out[t * ldo + r - r0] = row r of m times row t of x, t < n; index, when not NULL, names the
     * row of x instead of t. */
    void (*matmul4)(const struct mat *m, int32_t r0, int32_t r1, const struct qrows *x,
                    const int32_t *index, int32_t n, float *out, size_t ldo);
    /* The same product from float inputs x[t * ldx], weights of 4 or 8 bits, any rows: for the
     * small matrices whose outputs decide (router, decay, gates). */
    void (*matmul_float)(const struct mat *m, int32_t r0, int32_t r1, const float *x, size_t ldx,
                         int32_t n, float *out, size_t ldo);

    void (*rms_norm)(const float *x, const float *weight, int32_t n, float eps, float *out);
    /* x *= scale / sqrt(sum x^2 + eps) */
    void (*l2_norm)(float *x, int32_t n, float eps, float scale);
    /* out = rms_norm(x) * weight * silu(z), in place allowed */
    void (*gated_norm)(const float *x, const float *weight, const float *z, int32_t n, float eps,
                       float *out);
    /* out[c] = silu(sum over taps j of taps[j * ld + c] * u[j][c]); out may be u[3] */
    void (*conv_silu)(const float *const u[CONV_TAPS], const float *taps, size_t ld, int32_t n,
                      float *out);
    void (*silu_mul)(const float *gate, const float *up, int32_t n, float *out);
    void (*sigmoid_mul)(const float *x, const float *gate, int32_t n, float *out);
    void (*axpy)(float a, const float *x, int32_t n, float *y); /* y += a * x */

    /* One token of the delta rule on half a head: state [STATE][STATE_HALF], k, q [STATE],
     * v, out [STATE_HALF]; kq = k . q, decay = exp(g). */
    void (*delta)(float *state, const float *q, const float *k, const float *v, float kq,
                  float beta, float decay, float *out);
    float (*dot)(const float *a, const float *b, int32_t n);

    /* Attention of KV_GROUP queries q[KV_GROUP][HEAD], already scaled, over the first n positions
     * (1..SPAN) of a span. keys, values: the span's blocks. scores: scratch [KV_GROUP][SPAN]. */
    void (*attend)(const float *q, const uint16_t *keys, const uint16_t *values, int32_t n,
                   float *scores, struct attend *out);
    bool (*all_finite)(const float *x, int32_t n);
};

extern const struct kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_neon;

/* The tables this processor can run, best first, ended by NULL; the portable one is always last. */
const struct kernels *const *kernels_usable(void);

#endif
