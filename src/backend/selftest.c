/* The text of a self-test, the reference's rows, and what a difference is. */
#include "backend/selftest.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLICE = 8 /* rows of a step of the reference */ };

const struct backend_sampling selftest_sampling = {.temperature = 1,
                                                   .top_p = 0.95f,
                                                   .min_p = 0.01f,
                                                   .repetition = 1.1f,
                                                   .frequency = 0.1f,
                                                   .presence = 0.5f,
                                                   .top_k = 20,
                                                   .stream = 1};

int selftest_advance(struct selftest_text *t, lily_err *err) {
    const struct selftest_args *a = t->args;
    t->done++;
    if (!a->progress || a->progress(a->arg, t->done, t->total) == 0) return LILY_OK;
    return ERR(err, LILY_ECANCELED, "self-test: interrupted");
}

static void choose_ids(struct selftest_text *t) {
    const int32_t distinct = SELFTEST_ROWS / 3, stride = t->s->vocab / (distinct + 2);
    for (int32_t i = 0; i < SELFTEST_ROWS; i++) {
        t->ids[i] = (i < distinct ? i + 1 : distinct) * stride % t->w.vocab_used;
    }
}

/* ---- one run of a backend -------------------------------------------------------------------- */

int selftest_decode(const struct backend *b, struct backend_model *m, struct backend_session *s,
                    struct selftest_text *t, int32_t *picked, float *logits, bool all,
                    lily_err *err) {
    size_t vocab = (size_t)t->s->vocab;
    int rc = b->sample_begin(s, NULL, 0, err);
    for (int32_t i = 0; i < SELFTEST_DECODED && rc == LILY_OK; i++) {
        float *to = all ? logits + (size_t)i * vocab : logits;
        struct decode_slot slot = {s, t->ids[i], to, &selftest_sampling, (uint64_t)i};
        struct decode_result result = {0};
        rc = b->decode_submit(m, &slot, 1, err);
        if (rc == LILY_OK) rc = b->decode_wait(m, &result, 1, err);
        picked[i] = result.finite ? result.token : -1;
        if (rc == LILY_OK && b == t->args->reference) rc = selftest_advance(t, err);
    }
    return rc;
}

int selftest_prefill(const struct backend *b, struct backend_session *s, struct selftest_text *t,
                     int32_t from, int32_t slice, float *logits, lily_err *err) {
    int rc = LILY_OK;
    for (int32_t at = from; at < SELFTEST_ROWS && rc == LILY_OK;) {
        int32_t n = SELFTEST_ROWS - at < slice ? SELFTEST_ROWS - at : slice;
        bool last = at + n == SELFTEST_ROWS;
        struct prefill_step step = {.ids = t->ids + at, .n = n, .logits = last ? logits : NULL};
        rc = b->prefill(s, &step, err);
        at += step.done;
        if (rc == LILY_OK && b == t->args->reference) rc = selftest_advance(t, err);
    }
    return rc;
}

/* ---- the reference's rows -------------------------------------------------------------------- */

static float **slot_of(const struct selftest_rows *r, enum stage stage, int32_t layer,
                       int32_t pos) {
    if (layer < -1 || layer >= r->layers || pos < 0 || pos >= SELFTEST_ROWS) return NULL;
    size_t at = ((size_t)(layer + 1) * STAGE_COUNT + (size_t)stage) * SELFTEST_ROWS;
    return &r->row[at + (size_t)pos];
}

static int rows_new(struct selftest_rows *r, int32_t layers, lily_err *err) {
    size_t n = ((size_t)layers + 1) * STAGE_COUNT * SELFTEST_ROWS;
    *r = (struct selftest_rows){calloc(n, sizeof *r->row), layers, true};
    return r->row ? LILY_OK : ERR_NOMEM(err, "self-test");
}

static void rows_free(struct selftest_rows *r) {
    size_t n = ((size_t)r->layers + 1) * STAGE_COUNT * SELFTEST_ROWS;
    for (size_t i = 0; r->row && i < n; i++) free(r->row[i]);
    free(r->row);
    *r = (struct selftest_rows){0};
}

/* A backend's trace; arg is struct selftest_rows. */
static void keep(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                 int32_t n) {
    struct selftest_rows *r = arg;
    float **slot = slot_of(r, stage, layer, pos);
    if (!slot || *slot) return;
    *slot = malloc((size_t)n * sizeof *row);
    r->whole = r->whole && *slot;
    if (*slot) memcpy(*slot, row, (size_t)n * sizeof *row);
}

const float *selftest_right(const struct selftest_text *t, enum stage stage, int32_t layer,
                            int32_t pos) {
    float **slot = slot_of(&t->right, stage, layer, pos);
    return slot ? *slot : NULL;
}

const float *selftest_before(const struct selftest_text *t, int32_t layer, int32_t pos) {
    return layer > 0 ? selftest_right(t, STAGE_LAYER_OUT, layer - 1, pos)
                     : selftest_right(t, STAGE_EMBED, -1, pos);
}

static int run_reference(struct selftest_text *t, lily_err *err) {
    const struct backend *b = t->args->reference;
    const struct backend_options o = {
        .max_sessions = 1, .max_context = SELFTEST_ROWS, .trace = keep, .trace_arg = &t->right};
    struct backend_model *m = NULL;
    struct backend_session *s = NULL;
    int rc = b->open(&t->w, &o, &m, err);
    if (rc != LILY_OK) return rc;
    rc = b->session_new(m, SELFTEST_ROWS, &s, err);
    if (rc == LILY_OK) rc = selftest_decode(b, m, s, t, t->picked, t->logits, false, err);
    if (rc == LILY_OK) rc = selftest_prefill(b, s, t, SELFTEST_DECODED, SLICE, t->logits, err);
    if (rc == LILY_OK && !t->right.whole) rc = ERR_NOMEM(err, "self-test");
    if (s) b->session_free(s);
    b->close(m);
    return rc;
}

int selftest_begin(struct selftest_text *t, const struct selftest_args *args, int32_t runs,
                   lily_err *err) {
    const int32_t slices = (SELFTEST_ROWS - SELFTEST_DECODED + SLICE - 1) / SLICE;
    *t = (struct selftest_text){.args = args, .w = *args->w, .s = args->w->shape};
    t->total = (uint64_t)(SELFTEST_DECODED + slices + runs);
    if (t->w.layers < SELFTEST_LAYERS) {
        return ERR(err, LILY_EINVAL, "self-test: found %d layers, expected at least %d",
                   t->w.layers, SELFTEST_LAYERS);
    }
    t->w.layers = SELFTEST_LAYERS;
    choose_ids(t);
    t->logits = malloc((size_t)t->s->vocab * sizeof *t->logits);
    int rc = rows_new(&t->right, t->w.layers, err);
    if (rc == LILY_OK && !t->logits) rc = ERR_NOMEM(err, "self-test");
    return rc == LILY_OK ? run_reference(t, err) : rc;
}

void selftest_end(struct selftest_text *t) {
    rows_free(&t->right);
    free(t->logits);
    t->logits = NULL;
}

/* ---- differences ----------------------------------------------------------------------------- */

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
double selftest_limit(const struct selftest_text *t, bool prefill, enum stage stage,
                      int32_t layer) {
    bool cached = layer >= 0 && shape_is_attention(t->s, layer) && stage <= STAGE_MIXER_OUT;
    bool small = stage == STAGE_GDN_DELTA || stage == STAGE_GDN_NORM || stage == STAGE_ATTN_MIX;
    if (stage == STAGE_EMBED) return 1e-5;
    if (stage == STAGE_ROUTER) return 2e-3;
    if (prefill && small) return 0.2;
    return prefill || cached ? 0.05 : 2e-3;
}

/* Ids, then weights, both in descending order of weight: at a near-tie two implementations may
 * choose differently, but then their weights agree. */
bool selftest_other_experts(const float *a, const float *b, int32_t k) {
    for (int32_t i = 0; i < k; i++) {
        if (a[i] != b[i]) return true;
    }
    return false;
}
