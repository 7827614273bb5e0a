/* Rows of the device against rows of the reference, and whose fault a difference is. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/selftest.h"
#include "base/bf16.h"

/* ---- the reference's rows -------------------------------------------------------------------- */

static float **slot_of(const struct selftest_rows *r, enum stage stage, int32_t layer,
                       int32_t pos) {
    if (layer < -1 || layer >= r->layers || pos < 0 || pos >= SELFTEST_ROWS) return NULL;
    size_t at = ((size_t)(layer + 1) * STAGE_COUNT + (size_t)stage) * SELFTEST_ROWS;
    return &r->row[at + (size_t)pos];
}

int selftest_rows_new(struct selftest_rows *r, int32_t layers, lily_err *err) {
    size_t n = ((size_t)layers + 1) * STAGE_COUNT * SELFTEST_ROWS;
    *r = (struct selftest_rows){calloc(n, sizeof *r->row), layers, true};
    return r->row ? LILY_OK : ERR_NOMEM(err, "self-test");
}

void selftest_rows_free(struct selftest_rows *r) {
    size_t n = ((size_t)r->layers + 1) * STAGE_COUNT * SELFTEST_ROWS;
    for (size_t i = 0; r->row && i < n; i++) free(r->row[i]);
    free(r->row);
    *r = (struct selftest_rows){0};
}

void selftest_record(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                     int32_t n) {
    struct selftest_rows *r = arg;
    float **slot = slot_of(r, stage, layer, pos);
    if (!slot || *slot) return;
    *slot = malloc((size_t)n * sizeof *row);
    r->whole = r->whole && *slot;
    if (*slot) memcpy(*slot, row, (size_t)n * sizeof *row);
}

static const float *right_row(const struct selftest *t, enum stage stage, int32_t layer,
                              int32_t pos) {
    float **slot = slot_of(&t->right, stage, layer, pos);
    return slot ? *slot : NULL;
}

/* The residual stream before layer `layer`. */
static const float *right_before(const struct selftest *t, int32_t layer, int32_t pos) {
    return layer > 0 ? right_row(t, STAGE_LAYER_OUT, layer - 1, pos)
                     : right_row(t, STAGE_EMBED, -1, pos);
}

/* ---- judging --------------------------------------------------------------------------------- */

double selftest_error(const float *a, const float *b, int32_t n) {
    double largest = 0, squares = 0;
    for (int32_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= largest)) largest = isnan(d) ? INFINITY : d;
        squares += (double)b[i] * (double)b[i];
    }
    return largest / sqrt(squares / n + 1e-30);
}

/* Decode keeps float32 everywhere but in the cache; a prompt's products take bfloat16 inputs, whose
 * rounding (2^-9 of a value that may be five times its row's root mean square) is seen in each
 * stage, and more where results are small sums of large terms: the delta rule, its norm, the mean
 * of many values. At least twice what is seen on random weights of both shapes is allowed; a
 * kernel that is wrong in one value is off by about 1. */
static double limit_of(const struct selftest *t, enum stage stage, int32_t layer) {
    bool cached = layer >= 0 && shape_is_attention(t->s, layer) && stage <= STAGE_MIXER_OUT;
    bool small = stage == STAGE_GDN_DELTA || stage == STAGE_GDN_NORM || stage == STAGE_ATTN_MIX;
    if (stage == STAGE_EMBED) return 1e-5;
    if (stage == STAGE_ROUTER) return 2e-3;
    if (t->prefill && small) return 0.2;
    return t->prefill || cached ? 0.05 : 2e-3;
}

void selftest_credit(struct selftest *t, int32_t kernel, enum stage stage, int32_t layer,
                     int32_t pos, double error, double limit) {
    struct selftest_verdict *v = &t->verdict[kernel];
    if (v->rows == 0 || error / limit > v->error / v->limit) {
        v->error = error, v->limit = limit;
        v->stage = stage, v->layer = layer, v->position = pos;
    }
    v->rows++;
    v->failed = v->failed || !(error <= limit);
}

/* Every kernel of the piece; the sampler shows in the tokens that it picks. */
static void credit_piece(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                         double error, bool flip) {
    const struct graph *g = t->m->graph;
    double limit = limit_of(t, stage, layer);
    for (int32_t i = 0; i < g->dispatches; i++) {
        int32_t kernel = g->dispatch[i].kernel;
        bool again = false;
        if (g->dispatch[i].mark != t->m->trace_mark || kernel == DECODE_SAMPLE) continue;
        for (int32_t j = 0; j < i; j++) {
            again = again ||
                    (g->dispatch[j].mark == t->m->trace_mark && g->dispatch[j].kernel == kernel);
        }
        if (again) continue;
        selftest_credit(t, kernel, stage, layer, pos, error, limit);
        t->verdict[kernel].flips += flip;
    }
    if (!(error <= limit)) t->failed_mark = t->m->trace_mark;
}

/* Pieces of one half of a layer, or alone (embedding, head), have the same number. */
static int32_t half_of(int32_t mark) {
    enum metal_trace what = trace_what(mark);
    int32_t part = what == TRACE_EMBED || what == TRACE_LOGITS ? 0 : what <= TRACE_MIXER ? 1 : 2;
    return (trace_layer(mark) + 1) * 3 + part;
}

/* Whether an earlier piece of this half has failed: then nothing can be said of this one. */
static bool behind_failure(const struct selftest *t) {
    int32_t mark = t->m->trace_mark;
    return t->failed_mark >= 0 && t->failed_mark != mark &&
           half_of(t->failed_mark) == half_of(mark);
}

/* Ids, then weights, both in descending order of weight: at a near-tie two implementations may
 * choose differently, but then their weights agree. */
static bool other_experts(const float *a, const float *b, int32_t k) {
    for (int32_t i = 0; i < k; i++) {
        if (a[i] != b[i]) return true;
    }
    return false;
}

static void judge(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                  const float *row, int32_t n) {
    const float *right = right_row(t, stage, layer, pos);
    if (!right || behind_failure(t)) return;
    if (trace_what(t->m->trace_mark) <= TRACE_POST_NORM) t->flipped[pos] = false;
    if (t->flipped[pos]) return;
    if (stage != STAGE_ROUTER) {
        credit_piece(t, stage, layer, pos, selftest_error(row, right, n), false);
        return;
    }
    t->flipped[pos] = other_experts(row, right, n / 2);
    credit_piece(t, stage, layer, pos, selftest_error(row + n / 2, right + n / 2, n / 2),
                 t->flipped[pos]);
}

/* ---- replacing ------------------------------------------------------------------------------- */

static void replace_residual(struct selftest *t, int32_t pos, const float *a, const float *b) {
    int32_t n = t->s->hidden, buffer = t->prefill ? METAL_P_H : METAL_H;
    float *h = buffers_contents(&t->m->buffers, buffer);
    if (t->prefill) h += (size_t)pos * (size_t)n;
    for (int32_t i = 0; i < n && a; i++) h[i] = a[i] + (b ? b[i] : 0);
}

static void replace_normed(struct selftest *t, int32_t pos, const float *x) {
    int32_t n = t->s->hidden;
    uint16_t *to = buffers_contents(&t->m->buffers, METAL_P_X);
    to += (size_t)pos * (size_t)n;
    for (int32_t i = 0; i < n && x; i++) to[i] = f32_to_bf16(x[i]);
}

/* The gated norm divides a head's values by their size: what rounding did to small ones would be
 * taken for its own error. */
static void replace_delta(struct selftest *t, int32_t pos, const float *x) {
    size_t n = (size_t)t->s->gdn_v_dim;
    float *delta = buffers_contents(&t->m->buffers, METAL_P_DELTA);
    if (x) memcpy(delta + (size_t)pos * n, x, n * sizeof *x);
}

void selftest_compare(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                      const float *row, int32_t n) {
    const float *right = right_row(t, stage, layer, pos);
    judge(t, stage, layer, pos, row, n);
    if (stage == STAGE_MIXER_OUT) {
        replace_residual(t, pos, right_before(t, layer, pos), right);
    } else if (stage == STAGE_LAYER_OUT) {
        replace_residual(t, pos, right, NULL);
    } else if (stage == STAGE_INPUT_NORM && t->prefill) {
        replace_normed(t, pos, right);
    } else if (stage == STAGE_GDN_DELTA && t->prefill) {
        replace_delta(t, pos, right);
    }
}
