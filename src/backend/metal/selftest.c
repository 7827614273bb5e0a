/* The self-test's runs and its report. */
#include "backend/metal/selftest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/tensor.h"

enum { CONTEXT = DECODE_LONG_FROM + 1024, PIECES = 5, SLICE = 8 };

const struct backend_sampling selftest_sampling = {.temperature = 1,
                                                   .top_p = 0.95f,
                                                   .min_p = 0.01f,
                                                   .repetition = 1.1f,
                                                   .frequency = 0.1f,
                                                   .presence = 0.5f,
                                                   .top_k = 20,
                                                   .stream = 1};

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* Reference rows in slices, then PIECES runs of the device. */
static int advance(struct selftest *t, lily_err *err) {
    const uint64_t total = SELFTEST_DECODED + (SELFTEST_ROWS - SELFTEST_DECODED) / SLICE + PIECES;
    t->done++;
    if (!t->args->progress || t->args->progress(t->args->arg, t->done, total) == 0) return LILY_OK;
    return ERR(err, LILY_ECANCELED, "self-test: interrupted");
}

static void choose_ids(struct selftest *t) {
    const int32_t distinct = SELFTEST_ROWS / 3, stride = t->s->vocab / (distinct + 2);
    for (int32_t i = 0; i < SELFTEST_ROWS; i++) {
        t->ids[i] = (i < distinct ? i + 1 : distinct) * stride % t->w.vocab_used;
    }
}

/* ---- one run of a backend -------------------------------------------------------------------- */

/* Decodes the first ids, each sampled; the picks are compared and not fed. */
static int decode_rows(const struct backend *b, struct backend_model *m, struct backend_session *s,
                       struct selftest *t, int32_t *picked, float *logits, lily_err *err) {
    int rc = b->sample_begin(s, NULL, 0, err);
    for (int32_t i = 0; i < SELFTEST_DECODED && rc == LILY_OK; i++) {
        struct decode_slot slot = {s, t->ids[i], logits, &selftest_sampling, (uint64_t)i};
        struct decode_result result = {0};
        rc = b->decode_submit(m, &slot, 1, err);
        if (rc == LILY_OK) rc = b->decode_wait(m, &result, 1, err);
        picked[i] = result.finite ? result.token : -1;
        if (rc == LILY_OK && b == t->args->reference) rc = advance(t, err);
    }
    return rc;
}

/* ids [from, SELFTEST_ROWS) by prefill, at most `slice` to a call; logits of the last. */
static int prefill_rows(const struct backend *b, struct backend_session *s, struct selftest *t,
                        int32_t from, int32_t slice, float *logits, lily_err *err) {
    int rc = LILY_OK;
    for (int32_t at = from; at < SELFTEST_ROWS && rc == LILY_OK;) {
        int32_t n = SELFTEST_ROWS - at < slice ? SELFTEST_ROWS - at : slice;
        bool last = at + n == SELFTEST_ROWS;
        struct prefill_step step = {.ids = t->ids + at, .n = n, .logits = last ? logits : NULL};
        rc = b->prefill(s, &step, err);
        at += step.done;
        if (rc == LILY_OK && b == t->args->reference) rc = advance(t, err);
    }
    return rc;
}

static int run_reference(struct selftest *t, float *logits, lily_err *err) {
    const struct backend *b = t->args->reference;
    const struct backend_options o = {.max_sessions = 1,
                                      .max_context = SELFTEST_ROWS,
                                      .trace = selftest_record,
                                      .trace_arg = &t->right};
    struct backend_model *m = NULL;
    struct backend_session *s = NULL;
    int rc = b->open(&t->w, &o, &m, err);
    if (rc != LILY_OK) return rc;
    rc = b->session_new(m, SELFTEST_ROWS, &s, err);
    if (rc == LILY_OK) rc = decode_rows(b, m, s, t, t->picked, logits, err);
    if (rc == LILY_OK) rc = prefill_rows(b, s, t, SELFTEST_DECODED, SLICE, logits, err);
    if (rc == LILY_OK && !t->right.whole) rc = ERR_NOMEM(err, "self-test");
    if (s) b->session_free(s);
    b->close(m);
    return rc;
}

static void on_row(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                   int32_t n) {
    struct selftest *t = arg;
    if (t->mode == SELFTEST_COMPARE) selftest_compare(t, stage, layer, pos, row, n);
    if (t->mode == SELFTEST_DEEP) selftest_attention_row(t, stage, layer, pos, row, n);
}

static int open_device(struct selftest *t, lily_err *err) {
    const struct backend_options o = {
        .max_sessions = 1, .max_context = CONTEXT, .trace = on_row, .trace_arg = t};
    int rc = backend_metal.open(&t->w, &o, &t->m, err);
    if (rc == LILY_OK) rc = metal_session_new(t->m, CONTEXT, &t->session, err);
    return rc;
}

/* Each from an empty session, so that neither rests on the other. */
static int compare_rows(struct selftest *t, float *logits, lily_err *err) {
    int32_t picked[SELFTEST_DECODED];
    t->mode = SELFTEST_COMPARE;
    t->prefill = false;
    t->failed_mark = -1;
    int rc = decode_rows(&backend_metal, t->m, t->session, t, picked, logits, err);
    for (int32_t i = 0; i < SELFTEST_DECODED && rc == LILY_OK; i++) {
        double differs = picked[i] != t->picked[i];
        selftest_credit(t, DECODE_SAMPLE, STAGE_LOGITS, -1, i, differs, 0.5);
    }
    if (rc == LILY_OK) rc = advance(t, err);
    metal_reset(t->session);
    t->prefill = true;
    t->failed_mark = -1;
    if (rc == LILY_OK) {
        rc = prefill_rows(&backend_metal, t->session, t, 0, SELFTEST_ROWS, logits, err);
    }
    return rc == LILY_OK ? advance(t, err) : rc;
}

/* ---- whole command buffers ------------------------------------------------------------------- */

/* A prompt, then tokens that the device hands to itself with two steps in flight. */
static int run_whole(struct selftest *t, int32_t *tokens, float *logits, lily_err *err) {
    struct decode_slot slot = {t->session, t->ids[0], logits, &selftest_sampling, 0};
    struct decode_result result = {0};
    int32_t done = 0;
    metal_reset(t->session);
    int rc = prefill_rows(&backend_metal, t->session, t, 0, SELFTEST_ROWS, NULL, err);
    if (rc == LILY_OK) rc = metal_sample_begin(t->session, t->ids, SELFTEST_ROWS, err);
    for (int32_t i = 0; i < SELFTEST_DECODED && rc == LILY_OK; i++) {
        rc = metal_decode_submit(t->m, &slot, 1, err);
        slot.token = -1;
        slot.pick++;
        if (rc == LILY_OK && i > 0) {
            rc = metal_decode_wait(t->m, &result, 1, err);
            tokens[done++] = result.token;
        }
    }
    if (rc == LILY_OK) rc = metal_decode_wait(t->m, &result, 1, err);
    tokens[done] = result.token;
    return rc;
}

static int compare_whole(struct selftest *t, bool *same, lily_err *err) {
    int32_t tokens[2][SELFTEST_DECODED] = {{0}};
    size_t vocab = (size_t)t->s->vocab;
    struct metal_trace_state *trace = t->m->trace;
    float *logits = calloc(2 * vocab, sizeof *logits);
    t->mode = SELFTEST_IGNORE;
    int rc = logits ? run_whole(t, tokens[0], logits, err) : ERR_NOMEM(err, "self-test");
    t->m->trace = NULL;
    if (rc == LILY_OK) rc = advance(t, err);
    if (rc == LILY_OK) rc = run_whole(t, tokens[1], logits + vocab, err);
    t->m->trace = trace;
    *same = rc == LILY_OK && memcmp(tokens[0], tokens[1], sizeof tokens[0]) == 0 &&
            memcmp(logits, logits + vocab, vocab * sizeof *logits) == 0;
    free(logits);
    return rc;
}

/* ---- the report ------------------------------------------------------------------------------ */

static void report_kernel(const struct selftest *t, int32_t kernel) {
    const struct selftest_verdict *v = &t->verdict[kernel];
    struct selftest_item item = {.name = metal_tensor_name(t->m, kernel),
                                 .status = SELFTEST_PASSED,
                                 .error = v->error,
                                 .limit = v->limit};
    if (v->rows == 0) {
        item.status = SELFTEST_UNTESTED;
        snprintf(item.note, sizeof item.note, "its inputs come from a kernel that failed");
    } else if (v->flips * 10 > v->rows) {
        item.status = SELFTEST_FAILED;
        snprintf(item.note, sizeof item.note, "other experts in %d of %d rows", v->flips, v->rows);
    } else if (kernel == DECODE_SAMPLE) {
        item.status = v->failed ? SELFTEST_FAILED : SELFTEST_PASSED;
        item.limit = item.error = 0;
        snprintf(item.note, sizeof item.note, "%s of %d draws", v->failed ? "other tokens" : "all",
                 v->rows);
    } else {
        item.status = v->failed ? SELFTEST_FAILED : SELFTEST_PASSED;
        snprintf(item.note, sizeof item.note, "%s, layer %d, position %d; %d rows",
                 stage_name(v->stage), v->layer, v->position, v->rows);
    }
    t->args->item(t->args->arg, &item);
}

static void report_whole(const struct selftest *t, bool same) {
    struct selftest_item item = {.name = "command buffers",
                                 .status = same ? SELFTEST_PASSED : SELFTEST_FAILED};
    snprintf(item.note, sizeof item.note,
             same ? "whole, and two in flight: the bits of their pieces"
                  : "whole, or two in flight, give other bits than their pieces: a barrier is "
                    "missing");
    t->args->item(t->args->arg, &item);
}

static void report_tensors(const struct selftest *t) {
    struct selftest_item item = {.name = "tensor operations", .status = SELFTEST_NOTE};
    snprintf(item.note, sizeof item.note, "%s", t->m->tensor_reason);
    t->args->item(t->args->arg, &item);
}

/* Of the whole model, whether or not it is at hand. */
static int report_memory(const struct selftest *t, lily_err *err) {
    struct selftest_item item = {.name = "memory", .status = SELFTEST_NOTE};
    const struct metal_device *d = &t->m->device;
    struct metal_layout l = {0};
    lily_err need;
    int rc = layout_make(t->s, t->args->layers, NULL, false, t->m->layout.rows, t->args->context, 1,
                         d->max_buffer, &l, err);
    if (rc != LILY_OK) return rc;
    if (buffers_preflight(d, &l, &need) == LILY_OK) {
        snprintf(item.note, sizeof item.note,
                 "%d layers and one session of %d tokens take %.2f of the %.2f GiB that the GPU "
                 "may keep resident",
                 t->args->layers, t->args->context, (double)buffers_need(&l) / GIB,
                 (double)d->working_set / GIB);
    } else {
        snprintf(item.note, sizeof item.note, "%s", need.msg);
    }
    layout_free(&l);
    t->args->item(t->args->arg, &item);
    return LILY_OK;
}

static int report(const struct selftest *t, bool same, lily_err *err) {
    for (int32_t k = 0; k < METAL_KERNELS; k++) report_kernel(t, k);
    report_whole(t, same);
    report_tensors(t);
    return report_memory(t, err);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int run(struct selftest *t, float *logits, lily_err *err) {
    bool same = false;
    int rc = run_reference(t, logits, err);
    if (rc == LILY_OK) rc = open_device(t, err);
    if (rc == LILY_OK) rc = compare_rows(t, logits, err);
    if (rc == LILY_OK) rc = selftest_attention(t, err);
    if (rc == LILY_OK) rc = advance(t, err);
    if (rc == LILY_OK) rc = compare_whole(t, &same, err);
    return rc == LILY_OK ? report(t, same, err) : rc;
}

int metal_selftest(const struct selftest_args *args, lily_err *err) {
    struct selftest t = {.args = args, .w = *args->w, .s = args->w->shape};
    if (t.w.layers < SELFTEST_LAYERS) {
        return ERR(err, LILY_EINVAL, "self-test: found %d layers, expected at least %d", t.w.layers,
                   SELFTEST_LAYERS);
    }
    t.w.layers = SELFTEST_LAYERS;
    choose_ids(&t);
    float *logits = malloc((size_t)t.s->vocab * sizeof *logits);
    int rc = selftest_rows_new(&t.right, t.w.layers, err);
    if (rc == LILY_OK && !logits) rc = ERR_NOMEM(err, "self-test");
    if (rc == LILY_OK) rc = run(&t, logits, err);
    if (t.session) metal_session_free(t.session);
    backend_metal.close(t.m);
    selftest_rows_free(&t.right);
    free(logits);
    return rc;
}
