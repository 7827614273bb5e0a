#include "ckpt/quantise.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "ckpt/finite.h"
#include "ckpt/parallel.h"
#include "ckpt/table.h"

/* bfloat16 bits as integers in the order of the values: the compiler vectorises the integer minimum
 * and maximum, which it may not do for floats. */
static inline int16_t ordered(uint16_t h) {
    int16_t s = (int16_t)h;
    return (int16_t)(s ^ ((s >> 15) & 0x7fff));
}

static inline float unordered(int16_t o) {
    return bf16_to_f32((uint16_t)(o ^ ((o >> 15) & 0x7fff)));
}

/* The compiler makes vector code of each of these loops when it stands alone, and of none when
 * they share a function. */
#define ALONE __attribute__((noinline))

/* Smallest and largest value, the latter at least 0; false when one is not finite. */
static ALONE bool group_range(const uint16_t *w, float *min, float *max) {
    int16_t low = INT16_MAX, high = 0;
    for (int i = 0; i < QUANTISE_GROUP; i++) {
        int16_t o = ordered(w[i]);
        low = o < low ? o : low;
        high = o > high ? o : high;
    }
    *min = unordered(low);
    *max = unordered(high);
    /* Infinities and NaNs of either sign lie beyond all finite values in this order. */
    return float_is_finite(*min) && float_is_finite(*max);
}

/* The quotient lies between -0.5 and 2 * top, so that truncation to an integer is defined. */
static ALONE void group_codes(const uint16_t *w, float scale, float bias, int32_t top,
                              int32_t *restrict q) {
    for (int i = 0; i < QUANTISE_GROUP; i++) {
        float x = (bf16_to_f32(w[i]) - bias) / scale;
        /* Half away from zero without a call: the fraction is exact. */
        int32_t whole = (int32_t)x;
        int32_t code = whole + (x - (float)whole >= 0.5f);
        q[i] = code < top ? code : top;
    }
}

static ALONE void group_store(const int32_t *restrict q, int32_t bits, uint8_t *restrict out) {
    if (bits == 8) {
        for (int i = 0; i < QUANTISE_GROUP; i++) out[i] = (uint8_t)q[i];
    } else {
        for (int i = 0; i < QUANTISE_GROUP / 2; i++) {
            out[i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
        }
    }
}

/* Scale and bias of a group, before their own rounding to bfloat16. */
static void group_parameters(float min, float max, float n, float *scale, float *bias) {
    bool side = fabsf(min) > fabsf(max);
    float s = (max - min) / n;
    if (s < 1e-7f) s = 1e-7f;
    if (!side) s = -s;
    float edge = side ? min : max;
    float q0 = roundf(edge / s);
    *scale = q0 == 0 ? s : edge / q0;
    *bias = q0 == 0 ? 0 : edge;
}

size_t quantise_groups(const uint8_t *values, size_t n, int32_t bits, uint8_t *codes,
                       uint16_t *scales, uint16_t *biases) {
    int32_t top = (1 << bits) - 1;
    size_t group_bytes = (size_t)(QUANTISE_GROUP * bits / 8);
    for (size_t g = 0; g < n; g++) {
        uint16_t w[QUANTISE_GROUP];
        int32_t q[QUANTISE_GROUP];
        float min, max, scale, bias;
        memcpy(w, values + 2 * QUANTISE_GROUP * g, sizeof w);
        if (!group_range(w, &min, &max)) {
            return g * QUANTISE_GROUP + bf16_find_not_finite((const uint8_t *)w, QUANTISE_GROUP);
        }
        group_parameters(min, max, (float)top, &scale, &bias);
        scales[g] = f32_to_bf16(scale);
        biases[g] = f32_to_bf16(bias);
        if (!float_is_finite(bf16_to_f32(scales[g]))) return g * QUANTISE_GROUP;
        if (scale == 0) {
            /* A constant group beyond 1e31: 0 / 0, which min(NaN, n) there turns into n. */
            for (int i = 0; i < QUANTISE_GROUP; i++) q[i] = top;
        } else {
            group_codes(w, scale, bias, top, q);
        }
        group_store(q, bits, codes + g * group_bytes);
    }
    return SIZE_MAX;
}

/* A run of rows of one matrix: small enough to spread a large matrix over all cores. */
struct piece {
    const uint8_t *values;
    uint8_t *codes;
    uint16_t *scales, *biases;
    size_t groups;
    int32_t bits;
};

struct quantising {
    struct weights *w;
    struct pool *pool;
    struct work *work;
    struct piece *pieces; /* [n] */
    size_t n, cap;
    pthread_mutex_t lock; /* of bad */
    const uint8_t *bad;
};

enum { PIECE_GROUPS = 1 << 15 };

static int add_piece(struct quantising *q, struct piece p, lily_err *err) {
    if (q->n == q->cap) {
        size_t cap = q->cap ? q->cap * 2 : 1024;
        void *grown = realloc(q->pieces, cap * sizeof *q->pieces);
        if (!grown) return ERR_NOMEM(err, "quantising");
        q->pieces = grown;
        q->cap = cap;
    }
    q->pieces[q->n++] = p;
    if (q->work) q->work->total += p.groups * QUANTISE_GROUP * 2;
    return 0;
}

/* Gives m its quantised memory and lists the pieces that will fill it. */
static int plan_matrix(struct quantising *q, struct mat *m, int32_t bits, lily_err *err) {
    size_t groups = (size_t)m->rows * (size_t)(m->cols / QUANTISE_GROUP);
    size_t code_bytes = groups * QUANTISE_GROUP * (size_t)bits / 8;
    uint8_t *codes = pool_alloc(q->pool, code_bytes + 4 * groups);
    if (!codes) return ERR_NOMEM(err, "quantised weights");
    /* Whole groups of at least 32 bytes of codes keep scales and biases aligned. */
    uint16_t *scales = (uint16_t *)(void *)(codes + code_bytes), *biases = scales + groups;
    for (size_t at = 0; at < groups; at += PIECE_GROUPS) {
        size_t n = groups - at < PIECE_GROUPS ? groups - at : PIECE_GROUPS;
        struct piece p = {.values = m->data + at * QUANTISE_GROUP * 2,
                          .codes = codes + at * QUANTISE_GROUP * (size_t)bits / 8,
                          .scales = scales + at,
                          .biases = biases + at,
                          .groups = n,
                          .bits = bits};
        int rc = add_piece(q, p, err);
        if (rc != 0) return rc;
    }
    *m = (struct mat){.data = codes,
                      .scales = scales,
                      .biases = biases,
                      .rows = m->rows,
                      .cols = m->cols,
                      .bits = bits};
    /* The 16-bit form leaves the account, the quantised one enters it. */
    q->w->bytes += code_bytes + 4 * groups;
    q->w->bytes -= groups * QUANTISE_GROUP * 2;
    return 0;
}

static int quantise_piece(void *arg, size_t i, lily_err *err) {
    struct quantising *q = arg;
    const struct piece *p = &q->pieces[i];
    size_t bad = quantise_groups(p->values, p->groups, p->bits, p->codes, p->scales, p->biases);
    work_add(q->work, p->groups * QUANTISE_GROUP * 2);
    if (bad == SIZE_MAX) return 0;
    pthread_mutex_lock(&q->lock);
    if (!q->bad) q->bad = p->values + 2 * bad;
    pthread_mutex_unlock(&q->lock);
    return ERR(err, LILY_ENUMERIC, "a weight that is not finite");
}

static int quantise_tick(void *arg, lily_err *err) {
    const struct quantising *q = arg;
    return work_report(q->work, err);
}

static int plan_all(struct quantising *q, lily_err *err) {
    struct tensor_walk walk;
    tensor_walk_start(&walk, q->w->shape, q->w->layers);
    while (tensor_walk_next(&walk)) {
        const struct mat *m = tensor_mats(walk.role, q->w, walk.layer);
        if (!m || m->bits != 16) continue;
        size_t items = (size_t)tensor_items(walk.role, q->w->shape);
        struct mat *quantised = pool_alloc(q->pool, items * sizeof *quantised);
        if (!quantised) return ERR_NOMEM(err, "quantised weights");
        memcpy(quantised, m, items * sizeof *quantised);
        for (size_t i = 0; i < items; i++) {
            int rc = plan_matrix(q, &quantised[i], walk.role->bits, err);
            if (rc != 0) return rc;
        }
        tensor_set_mats(walk.role, q->w, walk.layer, quantised);
    }
    return 0;
}

int quantise_weights(struct weights *w, struct pool *p, struct work *work, const uint8_t **bad,
                     lily_err *err) {
    struct quantising q = {.w = w, .pool = p, .work = work};
    *bad = NULL;
    pthread_mutex_init(&q.lock, NULL);
    int rc = plan_all(&q, err);
    if (rc == 0) rc = parallel_for(q.n, quantise_piece, quantise_tick, &q, err);
    *bad = q.bad;
    pthread_mutex_destroy(&q.lock);
    free(q.pieces);
    return rc;
}
