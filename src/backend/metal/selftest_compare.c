/* Rows of the device against rows of the reference, and whose fault a difference is. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/selftest.h"
#include "base/bf16.h"

/* ---- judging --------------------------------------------------------------------------------- */

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
    double limit = selftest_limit(&t->text, t->prefill, stage, layer);
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

static void judge(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                  const float *row, int32_t n) {
    const float *right = selftest_right(&t->text, stage, layer, pos);
    if (!right || behind_failure(t)) return;
    if (trace_what(t->m->trace_mark) <= TRACE_POST_NORM) t->flipped[pos] = false;
    if (t->flipped[pos]) return;
    if (stage != STAGE_ROUTER) {
        credit_piece(t, stage, layer, pos, selftest_error(row, right, n), false);
        return;
    }
    t->flipped[pos] = selftest_other_experts(row, right, n / 2);
    credit_piece(t, stage, layer, pos, selftest_error(row + n / 2, right + n / 2, n / 2),
                 t->flipped[pos]);
}

/* ---- replacing ------------------------------------------------------------------------------- */

static void replace_residual(struct selftest *t, int32_t pos, const float *a, const float *b) {
    int32_t n = t->text.s->hidden, buffer = t->prefill ? METAL_P_H : METAL_H;
    float *h = buffers_contents(&t->m->buffers, buffer);
    if (t->prefill) h += (size_t)pos * (size_t)n;
    for (int32_t i = 0; i < n && a; i++) h[i] = a[i] + (b ? b[i] : 0);
}

static void replace_normed(struct selftest *t, int32_t pos, const float *x) {
    int32_t n = t->text.s->hidden;
    uint16_t *to = buffers_contents(&t->m->buffers, METAL_P_X);
    to += (size_t)pos * (size_t)n;
    for (int32_t i = 0; i < n && x; i++) to[i] = f32_to_bf16(x[i]);
}

/* The gated norm divides a head's values by their size: what rounding did to small ones would be
 * taken for its own error. */
static void replace_delta(struct selftest *t, int32_t pos, const float *x) {
    size_t n = (size_t)t->text.s->gdn_v_dim;
    float *delta = buffers_contents(&t->m->buffers, METAL_P_DELTA);
    if (x) memcpy(delta + (size_t)pos * n, x, n * sizeof *x);
}

void selftest_compare(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                      const float *row, int32_t n) {
    const float *right = selftest_right(&t->text, stage, layer, pos);
    judge(t, stage, layer, pos, row, n);
    if (stage == STAGE_MIXER_OUT) {
        replace_residual(t, pos, selftest_before(&t->text, layer, pos), right);
    } else if (stage == STAGE_LAYER_OUT) {
        replace_residual(t, pos, right, NULL);
    } else if (stage == STAGE_INPUT_NORM && t->prefill) {
        replace_normed(t, pos, right);
    } else if (stage == STAGE_GDN_DELTA && t->prefill) {
        replace_delta(t, pos, right);
    }
}
