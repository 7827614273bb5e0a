/* The self-test (`lily doctor`): the kernels on the device at hand, at the shape of some weights.
 *
 * First the portable kernels run traced, decode and then a prompt, each from an empty session, and
 * every stage is held against the reference's. Behind the mixer and behind the layer the device's
 * rows are replaced by the reference's, so that a difference belongs to the stage that shows it,
 * and stages behind a wrong one in the same half of a layer are not judged. Then the model is
 * opened as for use, and what its fast paths give in the end is held against the reference's
 * logits, which shows a kernel that computes something else, not one that is a little less exact.
 * Last, tokens of two steps in flight must be those of one step after another. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/selftest.h"

enum { RUNS = 6, SESSIONS = 2 };

/* Of all logits of a row, root mean square of the difference over that of the reference's. Random
 * ones differ by 1.4; on random weights, where some row chooses another expert at a near-tie, a few
 * hundredths have been seen. */
static const double LOGITS_LIMIT = 0.3;
static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* What is known of a stage. */
struct verdict {
    int32_t rows, flips; /* compared; with other experts than the reference's at a near-tie */
    double error, limit; /* the worst, relative to its limit */
    int32_t layer, position;
    bool failed;
};

struct selftest {
    struct selftest_text text;
    struct backend_model *m;
    struct backend_session *session[SESSIONS];
    bool prefill; /* what runs now */
    int32_t failed_half;
    enum stage failed_stage;
    bool flipped[SELFTEST_ROWS]; /* rows whose experts differ in this half of the layer */
    struct verdict verdict[2][STAGE_COUNT];
};

/* ---- stages ---------------------------------------------------------------------------------- */

static int32_t half_of(enum stage stage, int32_t layer) {
    return 2 * (layer + 1) + (stage >= STAGE_POST_NORM);
}

/* A recurrent mixer's stages are told of when all of it has run, so that each has the rounding of
 * those before it: up to 0.17 on the stand-in, and 0.33 at the large shape behind the norm, which
 * divides a head's values by their size. */
static double limit_of(const struct selftest *t, enum stage stage, int32_t layer) {
    if (t->prefill && stage == STAGE_GDN_NORM) return 0.7;
    if (t->prefill && (stage == STAGE_GDN_CONV || stage == STAGE_GDN_DELTA)) return 0.4;
    return selftest_limit(&t->text, t->prefill, stage, layer);
}

static void judge(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                  const float *row, int32_t n) {
    const float *right = selftest_right(&t->text, stage, layer, pos);
    struct verdict *v = &t->verdict[t->prefill][stage];
    bool behind = t->failed_half == half_of(stage, layer) && t->failed_stage != stage;
    if (stage <= STAGE_POST_NORM) t->flipped[pos] = false;
    if (!right || behind || t->flipped[pos]) return;
    double limit = limit_of(t, stage, layer), error;
    if (stage == STAGE_ROUTER) {
        t->flipped[pos] = selftest_other_experts(row, right, n / 2);
        v->flips += t->flipped[pos];
        error = selftest_error(row + n / 2, right + n / 2, n / 2);
    } else {
        error = selftest_error(row, right, n);
    }
    if (v->rows == 0 || error / limit > v->error / v->limit) {
        v->error = error, v->limit = limit;
        v->layer = layer, v->position = pos;
    }
    v->rows++;
    if (error <= limit) return;
    v->failed = true;
    t->failed_half = half_of(stage, layer), t->failed_stage = stage;
}

/* The reference's row in the place of the device's; the next kernel is queued behind it. */
static void replace(struct selftest *t, CUdeviceptr rows, int32_t pos, const float *right) {
    const struct backend_model *m = t->m;
    size_t bytes = (size_t)t->text.s->hidden * sizeof *right;
    CUdeviceptr to = rows + (t->prefill ? (size_t)pos * bytes : 0);
    if (right && m->d->to_device(to, right, bytes, m->stream) == 0) m->d->stream_wait(m->stream);
}

static void on_row(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                   int32_t n) {
    struct selftest *t = arg;
    const struct cuda_scratch *x = t->prefill ? &t->m->chunk : &t->m->x;
    judge(t, stage, layer, pos, row, n);
    if (stage == STAGE_MIXER_OUT || stage == STAGE_LAYER_OUT) {
        replace(t, stage == STAGE_MIXER_OUT ? x->out : x->x, pos,
                selftest_right(&t->text, stage, layer, pos));
    }
}

static void close_device(struct selftest *t) {
    for (int i = 0; i < SESSIONS; i++) cuda_session_free(t->session[i]);
    cuda_close(t->m);
    t->m = NULL;
    memset(t->session, 0, sizeof t->session);
}

static int open_device(struct selftest *t, bool traced, lily_err *err) {
    const struct backend_options o = {.max_sessions = SESSIONS,
                                      .max_context = 2 * SELFTEST_ROWS,
                                      .trace = traced ? on_row : NULL,
                                      .trace_arg = t};
    int rc = backend_cuda.open(&t->text.w, &o, &t->m, err);
    for (int i = 0; i < SESSIONS && rc == LILY_OK; i++) {
        rc = cuda_session_new(t->m, 2 * SELFTEST_ROWS, &t->session[i], err);
    }
    return rc;
}

static int compare_stages(struct selftest *t, lily_err *err) {
    int32_t picked[SELFTEST_DECODED];
    t->failed_half = -1;
    int rc = open_device(t, true, err);
    if (rc == LILY_OK) {
        rc = selftest_decode(&backend_cuda, t->m, t->session[0], &t->text, picked, t->text.logits,
                             false, err);
    }
    if (rc == LILY_OK) rc = selftest_advance(&t->text, err);
    t->prefill = true;
    t->failed_half = -1;
    if (rc == LILY_OK) {
        rc = selftest_prefill(&backend_cuda, t->session[1], &t->text, 0, SELFTEST_ROWS, NULL, err);
    }
    close_device(t);
    return rc == LILY_OK ? selftest_advance(&t->text, err) : rc;
}

static void report_stage(const struct selftest *t, bool prefill, enum stage stage) {
    const struct verdict *v = &t->verdict[prefill][stage];
    char name[48];
    snprintf(name, sizeof name, "%s %s", prefill ? "prompt" : "decode", stage_name(stage));
    struct selftest_item item = {.name = name, .error = v->error, .limit = v->limit};
    item.status = v->failed ? SELFTEST_FAILED : v->rows ? SELFTEST_PASSED : SELFTEST_UNTESTED;
    if (v->rows == 0) {
        snprintf(item.note, sizeof item.note, "its input comes from a stage that failed");
    } else if (v->flips * 10 > v->rows) {
        item.status = SELFTEST_FAILED;
        snprintf(item.note, sizeof item.note, "other experts in %d of %d rows", v->flips, v->rows);
    } else {
        snprintf(item.note, sizeof item.note, "layer %d, position %d; %d rows", v->layer,
                 v->position, v->rows);
    }
    t->text.args->item(t->text.args->arg, &item);
}

/* ---- paths ----------------------------------------------------------------------------------- */

static double distance(const float *a, const float *right, int32_t n) {
    double d = 0, s = 0;
    for (int32_t i = 0; i < n; i++) {
        double e = (double)a[i] - (double)right[i];
        d += e * e;
        s += (double)right[i] * (double)right[i];
    }
    return isfinite(d) ? sqrt(d / (s + 1e-30)) : INFINITY;
}

/* n rows of logits, at positions first and on, of so many sessions. */
static void report_logits(const struct selftest *t, const char *name, const float *logits,
                          int32_t first, int32_t n, int32_t sessions) {
    struct selftest_item item = {.name = name, .limit = LOGITS_LIMIT};
    int32_t vocab = t->text.s->vocab, worst = first;
    for (int32_t i = 0; i < n * sessions; i++) {
        int32_t pos = first + i % n;
        const float *right = selftest_right(&t->text, STAGE_LOGITS, -1, pos);
        const float *row = logits + (size_t)i * (size_t)vocab;
        double error = right ? distance(row, right, vocab) : INFINITY;
        if (error > item.error) item.error = error, worst = pos;
    }
    item.status = item.error <= item.limit ? SELFTEST_PASSED : SELFTEST_FAILED;
    snprintf(item.note, sizeof item.note, "logits (root mean square), position %d; %d row(s)",
             worst, n * sessions);
    t->text.args->item(t->text.args->arg, &item);
}

static void report_tokens(const struct selftest *t, const char *name, const int32_t *a,
                          const int32_t *b, int32_t n, const char *why) {
    int32_t differ = 0;
    for (int32_t i = 0; i < n; i++) differ += a[i] != b[i];
    struct selftest_item item = {.name = name,
                                 .status = differ ? SELFTEST_FAILED : SELFTEST_PASSED};
    if (differ) {
        snprintf(item.note, sizeof item.note, "%d of %d tokens are %s", differ, n, why);
    } else {
        snprintf(item.note, sizeof item.note, "all of %d tokens", n);
    }
    t->text.args->item(t->text.args->arg, &item);
}

static const char *path_of(const struct backend_model *m, int32_t slots) {
    const struct cuda_step step = {.n = slots};
    int32_t i = 0;
    while (!m->paths[i]->takes(m, &step)) i++;
    return m->paths[i]->name;
}

/* The first ids in two sessions at once; logits [2][SELFTEST_DECODED][V]. */
static int decode_pairs(struct selftest *t, float *logits, lily_err *err) {
    size_t vocab = (size_t)t->text.s->vocab;
    int rc = LILY_OK;
    for (int i = 0; i < SESSIONS; i++) cuda_reset(t->session[i]);
    for (int32_t k = 0; k < SELFTEST_DECODED && rc == LILY_OK; k++) {
        struct decode_slot slots[SESSIONS];
        struct decode_result results[SESSIONS];
        for (int32_t i = 0; i < SESSIONS; i++) {
            float *to = logits + (size_t)(i * SELFTEST_DECODED + k) * vocab;
            slots[i] = (struct decode_slot){t->session[i], t->text.ids[k], to, NULL, 0};
        }
        rc = cuda_decode_submit(t->m, slots, SESSIONS, err);
        if (rc == LILY_OK) rc = cuda_decode_wait(t->m, results, SESSIONS, err);
    }
    return rc;
}

/* Tokens behind the prompt, each read by the next step on the device or handed back by the host. */
static int run_on(struct selftest *t, bool in_flight, int32_t *tokens, lily_err *err) {
    struct decode_slot slot = {t->session[0], t->text.ids[0], NULL, &selftest_sampling, 0};
    struct decode_result result = {0};
    int32_t done = 0, ahead = 0;
    cuda_reset(t->session[0]);
    int rc = selftest_prefill(&backend_cuda, t->session[0], &t->text, 0, SELFTEST_ROWS, NULL, err);
    if (rc == LILY_OK) rc = cuda_sample_begin(t->session[0], t->text.ids, SELFTEST_ROWS, err);
    while (done < SELFTEST_DECODED && rc == LILY_OK) {
        for (; rc == LILY_OK && ahead <= in_flight && done + ahead < SELFTEST_DECODED; ahead++) {
            rc = cuda_decode_submit(t->m, &slot, 1, err);
            slot.token = -1;
            slot.pick++;
        }
        if (rc == LILY_OK) rc = cuda_decode_wait(t->m, &result, 1, err);
        tokens[done++] = result.token;
        if (!in_flight) slot.token = result.token;
        ahead--;
    }
    return rc;
}

static int compare_paths(struct selftest *t, float *logits, lily_err *err) {
    int32_t picked[SELFTEST_DECODED], flying[SELFTEST_DECODED];
    char name[48];
    int rc = open_device(t, false, err);
    if (rc == LILY_OK) {
        rc =
            selftest_prefill(&backend_cuda, t->session[0], &t->text, 0, SELFTEST_ROWS, logits, err);
    }
    if (rc != LILY_OK) return rc;
    snprintf(name, sizeof name, "prompts %s", t->m->prompt ? "sm_90a" : "portable");
    report_logits(t, name, logits, SELFTEST_ROWS - 1, 1, 1);
    rc = selftest_advance(&t->text, err);
    cuda_reset(t->session[0]);
    if (rc == LILY_OK) {
        rc = selftest_decode(&backend_cuda, t->m, t->session[0], &t->text, picked, logits, true,
                             err);
    }
    if (rc != LILY_OK) return rc;
    report_logits(t, path_of(t->m, 1), logits, 0, SELFTEST_DECODED, 1);
    report_tokens(t, "sampling", picked, t->text.picked, SELFTEST_DECODED, "not the reference's");
    rc = selftest_advance(&t->text, err);
    if (rc == LILY_OK) rc = decode_pairs(t, logits, err);
    if (rc != LILY_OK) return rc;
    snprintf(name, sizeof name, "%s, two sessions", path_of(t->m, SESSIONS));
    report_logits(t, name, logits, 0, SELFTEST_DECODED, SESSIONS);
    rc = selftest_advance(&t->text, err);
    if (rc == LILY_OK) rc = run_on(t, false, picked, err);
    if (rc == LILY_OK) rc = run_on(t, true, flying, err);
    if (rc != LILY_OK) return rc;
    report_tokens(t, "two steps in flight", flying, picked, SELFTEST_DECODED,
                  "not those of one step after another");
    return selftest_advance(&t->text, err);
}

/* Of the whole model, whether or not it is at hand. */
static int report_memory(const struct selftest *t, lily_err *err) {
    const struct selftest_args *a = t->text.args;
    struct selftest_item item = {.name = "memory", .status = SELFTEST_NOTE};
    struct backend_model m = *t->m;
    struct weights w;
    size_t total = 0;
    int rc = cuda_sized_weights(t->text.s, a->layers, &w, err);
    if (rc != LILY_OK) return rc;
    m.w = &w;
    m.options = (struct backend_options){.max_sessions = 1, .max_context = a->context};
    cuda_set_sizes(&m);
    rc = cuda_weights_plan(&m, err);
    if (rc == LILY_OK) {
        struct cuda_need n = cuda_need(&m);
        size_t all = n.weights + n.scratch + n.sessions + n.reserve + n.context;
        m.d->device_memory(&total, m.device);
        snprintf(item.note, sizeof item.note,
                 "%d layers and one session of %d tokens take %.2f of this GPU's %.2f GiB",
                 a->layers, a->context, (double)all / GIB, (double)total / GIB);
        a->item(a->arg, &item);
        free(m.dw.layer);
    }
    cuda_sized_weights_free(&w);
    return rc;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int run(struct selftest *t, float *logits, lily_err *err) {
    int rc = compare_stages(t, err);
    if (rc != LILY_OK) return rc;
    for (int prefill = 0; prefill < 2; prefill++) {
        for (enum stage s = STAGE_EMBED; s <= STAGE_LAYER_OUT; s++) report_stage(t, prefill, s);
    }
    rc = compare_paths(t, logits, err);
    return rc == LILY_OK ? report_memory(t, err) : rc;
}

int cuda_selftest(const struct selftest_args *args, lily_err *err) {
    struct selftest t = {0};
    int rc = selftest_begin(&t.text, args, RUNS, err);
    size_t rows = SESSIONS * SELFTEST_DECODED;
    float *logits = rc == LILY_OK ? calloc(rows * (size_t)t.text.s->vocab, sizeof *logits) : NULL;
    if (rc == LILY_OK) rc = logits ? run(&t, logits, err) : ERR_NOMEM(err, "self-test");
    close_device(&t);
    selftest_end(&t.text);
    free(logits);
    return rc;
}
