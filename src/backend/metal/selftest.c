/* The self-test's runs and its report. */
#include "backend/metal/selftest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/tensor.h"

enum { CONTEXT = DECODE_LONG_FROM + 1024, PIECES = 5 };

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* ---- one run of a backend -------------------------------------------------------------------- */

static void on_row(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                   int32_t n) {
    struct selftest *t = arg;
    if (t->mode == SELFTEST_COMPARE) selftest_compare(t, stage, layer, pos, row, n);
    if (t->mode == SELFTEST_DEEP) selftest_attention_row(t, stage, layer, pos, row, n);
}

static int open_device(struct selftest *t, lily_err *err) {
    const struct backend_options o = {
        .max_sessions = 1, .max_context = CONTEXT, .trace = on_row, .trace_arg = t};
    int rc = backend_metal.open(&t->text.w, &o, &t->m, err);
    if (rc == LILY_OK) rc = metal_session_new(t->m, CONTEXT, &t->session, err);
    return rc;
}

/* Each from an empty session, so that neither rests on the other. */
static int compare_rows(struct selftest *t, float *logits, lily_err *err) {
    int32_t picked[SELFTEST_DECODED];
    t->mode = SELFTEST_COMPARE;
    t->prefill = false;
    t->failed_mark = -1;
    int rc =
        selftest_decode(&backend_metal, t->m, t->session, &t->text, picked, logits, false, err);
    for (int32_t i = 0; i < SELFTEST_DECODED && rc == LILY_OK; i++) {
        double differs = picked[i] != t->text.picked[i];
        selftest_credit(t, DECODE_SAMPLE, STAGE_LOGITS, -1, i, differs, 0.5);
    }
    if (rc == LILY_OK) rc = selftest_advance(&t->text, err);
    metal_reset(t->session);
    t->prefill = true;
    t->failed_mark = -1;
    if (rc == LILY_OK) {
        rc = selftest_prefill(&backend_metal, t->session, &t->text, 0, SELFTEST_ROWS, logits, err);
    }
    return rc == LILY_OK ? selftest_advance(&t->text, err) : rc;
}

/* ---- whole command buffers ------------------------------------------------------------------- */

/* A prompt, then tokens that the device hands to itself with two steps in flight. */
static int run_whole(struct selftest *t, int32_t *tokens, float *logits, lily_err *err) {
    struct decode_slot slot = {t->session, t->text.ids[0], logits, &selftest_sampling, 0};
    struct decode_result result = {0};
    int32_t done = 0;
    metal_reset(t->session);
    int rc = selftest_prefill(&backend_metal, t->session, &t->text, 0, SELFTEST_ROWS, NULL, err);
    if (rc == LILY_OK) rc = metal_sample_begin(t->session, t->text.ids, SELFTEST_ROWS, err);
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
    size_t vocab = (size_t)t->text.s->vocab;
    struct metal_trace_state *trace = t->m->trace;
    float *logits = calloc(2 * vocab, sizeof *logits);
    t->mode = SELFTEST_IGNORE;
    int rc = logits ? run_whole(t, tokens[0], logits, err) : ERR_NOMEM(err, "self-test");
    t->m->trace = NULL;
    if (rc == LILY_OK) rc = selftest_advance(&t->text, err);
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
    t->text.args->item(t->text.args->arg, &item);
}

static void report_whole(const struct selftest *t, bool same) {
    struct selftest_item item = {.name = "command buffers",
                                 .status = same ? SELFTEST_PASSED : SELFTEST_FAILED};
    snprintf(item.note, sizeof item.note,
             same ? "whole, and two in flight: the bits of their pieces"
                  : "whole, or two in flight, give other bits than their pieces: a barrier is "
                    "missing");
    t->text.args->item(t->text.args->arg, &item);
}

static void report_tensors(const struct selftest *t) {
    struct selftest_item item = {.name = "tensor operations", .status = SELFTEST_NOTE};
    snprintf(item.note, sizeof item.note, "%s", t->m->tensor_reason);
    t->text.args->item(t->text.args->arg, &item);
}

/* Of the whole model, whether or not it is at hand. */
static int report_memory(const struct selftest *t, lily_err *err) {
    struct selftest_item item = {.name = "memory", .status = SELFTEST_NOTE};
    const struct metal_device *d = &t->m->device;
    struct metal_layout l = {0};
    lily_err need;
    int rc = layout_make(t->text.s, t->text.args->layers, NULL, false, t->m->layout.rows,
                         t->text.args->context, 1, d->max_buffer, &l, err);
    if (rc != LILY_OK) return rc;
    if (buffers_preflight(d, &l, &need) == LILY_OK) {
        snprintf(item.note, sizeof item.note,
                 "%d layers and one session of %d tokens take %.2f of the %.2f GiB that the GPU "
                 "may keep resident",
                 t->text.args->layers, t->text.args->context, (double)buffers_need(&l) / GIB,
                 (double)d->working_set / GIB);
    } else {
        snprintf(item.note, sizeof item.note, "%s", need.msg);
    }
    layout_free(&l);
    t->text.args->item(t->text.args->arg, &item);
    return LILY_OK;
}

static int report(const struct selftest *t, bool same, lily_err *err) {
    for (int32_t k = 0; k < METAL_KERNELS; k++) report_kernel(t, k);
    report_whole(t, same);
    report_tensors(t);
    return report_memory(t, err);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int run(struct selftest *t, lily_err *err) {
    bool same = false;
    int rc = open_device(t, err);
    if (rc == LILY_OK) rc = compare_rows(t, t->text.logits, err);
    if (rc == LILY_OK) rc = selftest_attention(t, err);
    if (rc == LILY_OK) rc = selftest_advance(&t->text, err);
    if (rc == LILY_OK) rc = compare_whole(t, &same, err);
    return rc == LILY_OK ? report(t, same, err) : rc;
}

int metal_selftest(const struct selftest_args *args, lily_err *err) {
    struct selftest t = {0};
    int rc = selftest_begin(&t.text, args, PIECES, err);
    if (rc == LILY_OK) rc = run(&t, err);
    if (t.session) metal_session_free(t.session);
    backend_metal.close(t.m);
    selftest_end(&t.text);
    return rc;
}
