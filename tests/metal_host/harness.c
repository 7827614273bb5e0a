#include "harness.h"

#include <math.h>

static const char *program, *figures;

bool harness_begin(int argc, char **argv) {
    const char *slash = strrchr(argv[0], '/');
    program = slash ? slash + 1 : argv[0];
    figures = argc > 2 ? argv[2] : NULL;
    return argc > 1 && strcmp(argv[1], "full") == 0;
}

void figure(const char *name, double value) {
    FILE *f = figures ? fopen(figures, "a") : NULL;
    if (!f) return;
    fprintf(f, "{\"test\": \"%s\", \"name\": \"%s\", \"value\": %.9g}\n", program, name, value);
    fclose(f);
}

void ok(int rc, const lily_err *err) {
    if (rc != LILY_OK) fail_msg("%d: %s", rc, err->msg);
}

void put_fault(struct buf *text, const char *right, const char *wrong) {
    struct buf old = *text;
    const char *at = strstr(old.data, right);
    assert_non_null(at);
    assert_null(strstr(at + 1, right));
    *text = (struct buf){0};
    assert_true(buf_append(text, old.data, (size_t)(at - old.data)) && buf_puts(text, wrong) &&
                buf_puts(text, at + strlen(right)));
    buf_free(&old);
}

struct ckpt *stand_in(void) {
    static struct ckpt *loaded;
    lily_err err;
    struct ckpt_options options = {0};
    if (!loaded) ok(ckpt_load(NULL, &options, &loaded, &err), &err);
    return loaded;
}

void emulate(bool checked, uint64_t seed) {
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = checked;
    o.seed = seed;
    metal_emu_configure(&o);
}

struct bench bench_open(const struct backend *b, const struct weights *w,
                        const struct backend_options *options) {
    struct bench x = {.b = b};
    struct backend_options one = {.threads = 1, .max_sessions = 1, .max_context = 512};
    lily_err err;
    if (options) one = *options;
    ok(b->open(w, &one, &x.m, &err), &err);
    ok(b->session_new(x.m, one.max_context, &x.s, &err), &err);
    return x;
}

void bench_close(struct bench *x) {
    x->b->session_free(x->s);
    x->b->close(x->m);
}

void bench_prefill(struct bench *x, const int32_t *ids, int32_t n, float *logits) {
    lily_err err;
    while (n > 0) {
        struct prefill_step step = {.ids = ids, .n = n, .logits = logits};
        ok(x->b->prefill(x->s, &step, &err), &err);
        assert_true(step.done > 0 && step.done <= n);
        ids += step.done;
        n -= step.done;
    }
}

struct decode_result bench_step(struct bench *x, int32_t token,
                                const struct backend_sampling *sampling, uint64_t pick,
                                float *logits) {
    struct decode_slot slot = {x->s, token, logits, sampling, pick};
    struct decode_result result;
    lily_err err;
    ok(x->b->decode_submit(x->m, &slot, 1, &err), &err);
    ok(x->b->decode_wait(x->m, &result, 1, &err), &err);
    return result;
}

int32_t argmax(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
    return best;
}

static double log_sum(const float *x, int32_t n) {
    double top = (double)x[argmax(x, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)x[i] - top);
    return top + log(sum);
}

struct gap logits_gap(const float *ref, const float *mine, int32_t vocab) {
    struct gap g = {0};
    double a = log_sum(ref, vocab), b = log_sum(mine, vocab);
    int32_t best = argmax(ref, vocab), other = argmax(mine, vocab);
    for (int32_t i = 0; i < vocab; i++) {
        double x = (double)ref[i], y = (double)mine[i];
        g.kl += exp(x - a) * ((x - a) - (y - b));
        g.worst = fmax(g.worst, fabs(x - y));
    }
    g.same_top = best == other;
    g.margin = (double)ref[best] - (double)ref[other];
    return g;
}

void nothing_found(void) {
    if (metal_emu_finding_count() == 0) return;
    fail_msg("%zu findings, the first: %s", metal_emu_finding_count(), metal_emu_finding(0)->text);
}
