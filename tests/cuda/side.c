#include "side.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- running a backend ----------------------------------------------------------------------- */

void side_failed(struct side *x, int rc, const lily_err *err) {
    if (rc == LILY_OK || x->bad) return;
    x->bad = true;
    note_error(x->what, rc, err);
}

struct side side_open(const struct bench_model *t, const struct backend *b, const char *what,
                      int32_t sessions, const struct backend_options *extra) {
    struct side x = {.b = b, .what = what};
    struct backend_options o = extra ? *extra : (struct backend_options){0};
    lily_err err;
    o.max_sessions = sessions;
    o.max_context = t->context;
    side_failed(&x, b->open(t->w, &o, &x.m, &err), &err);
    for (int32_t i = 0; i < sessions && !x.bad; i++) {
        side_failed(&x, b->session_new(x.m, t->context, &x.s[i], &err), &err);
    }
    return x;
}

void side_close(struct side *x) {
    for (int i = 0; i < SIDE_SESSIONS; i++) x->b->session_free(x->s[i]);
    if (x->m) x->b->close(x->m);
}

void side_feed_ids(const struct bench_model *t, struct side *x, int i, const int32_t *ids,
                   int32_t n, int32_t cut, float *all, float *last) {
    for (int32_t at = 0; at < n && !x->bad;) {
        lily_err err;
        int32_t part = n - at < cut ? n - at : cut;
        struct prefill_step step = {.ids = ids + at, .n = part};
        if (all) step.all_logits = all + (size_t)at * (size_t)t->vocab;
        if (at + part == n) step.logits = last;
        side_failed(x, x->b->prefill(x->s[i], &step, &err), &err);
        at += step.done;
    }
}

void side_feed(const struct bench_model *t, struct side *x, int i, int64_t from, int32_t n,
               int32_t cut, float *all, float *last) {
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    for (int32_t k = 0; k < n; k++) ids[k] = token_at(from + k, t->w->vocab_used);
    side_feed_ids(t, x, i, ids, n, cut, all, last);
    free(ids);
}

int32_t side_decode(struct side *x, int i, int32_t token, float *logits) {
    struct decode_slot slot = {.session = x->s[i], .token = token, .logits = logits};
    struct decode_result result = {.token = -1};
    lily_err err;
    if (x->bad) return -1;
    side_failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
    if (!x->bad) side_failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
    if (!x->bad && !result.finite) {
        x->bad = true;
        note(x->what, NAN, 0);
    }
    return result.token;
}

void side_begin_slot(const struct bench_model *b, struct side *x, int s, int32_t i) {
    if (!x->bad) x->b->reset(x->s[s]);
    side_feed(b, x, s, 1000 * i, 3 + 5 * i, 64, NULL, NULL);
}

void side_decode_slots(const struct bench_model *b, struct side *x, int32_t n, int32_t steps,
                       float *out) {
    size_t row = (size_t)b->vocab;
    for (int32_t i = 0; i < n; i++) side_begin_slot(b, x, i, i);
    for (int32_t k = 0; k < steps && !x->bad; k++) {
        struct decode_slot slot[SIDE_SESSIONS];
        struct decode_result result[SIDE_SESSIONS];
        lily_err err;
        for (int32_t i = 0; i < n; i++) {
            slot[i] = (struct decode_slot){.session = x->s[i],
                                           .token = token_at(1000 * i + 500 + k, b->w->vocab_used),
                                           .logits = k == steps - 1 ? out + (size_t)i * row : NULL};
        }
        side_failed(x, x->b->decode_submit(x->m, slot, n, &err), &err);
        if (!x->bad) side_failed(x, x->b->decode_wait(x->m, result, n, &err), &err);
    }
}

float *side_rows(const struct bench_model *t, int32_t n) {
    size_t count = (size_t)n * (size_t)t->vocab;
    float *rows = malloc(count * sizeof *rows);
    for (size_t i = 0; i < count; i++) rows[i] = NAN;
    return rows;
}

/* ---- on all processors ----------------------------------------------------------------------- */

struct crowd {
    atomic_int next;
    int32_t n;
    void (*one)(void *arg, int32_t i, int worker);
    void *arg;
};
struct crowd_worker {
    struct crowd *crowd;
    int number;
    pthread_t thread;
};

static void *work(void *arg) {
    struct crowd_worker *w = arg;
    for (;;) {
        int i = atomic_fetch_add(&w->crowd->next, 1);
        if (i >= w->crowd->n) return NULL;
        w->crowd->one(w->crowd->arg, i, w->number);
    }
}

void in_parallel(int32_t n, int workers, void (*one)(void *arg, int32_t i, int worker), void *arg) {
    struct crowd crowd = {.n = n, .one = one, .arg = arg};
    struct crowd_worker *w = calloc((size_t)workers, sizeof *w);
    int started = 0;
    for (; started < workers; started++) {
        w[started] = (struct crowd_worker){.crowd = &crowd, .number = started};
        if (pthread_create(&w[started].thread, NULL, work, &w[started]) != 0) break;
    }
    if (!started) work(&w[0]);
    for (int i = 0; i < started; i++) pthread_join(w[i].thread, NULL);
    free(w);
}

int processors(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 64 ? 64 : (int)n;
}

/* ---- comparing ------------------------------------------------------------------------------- */

int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

double divergence(const float *truth, const float *x, int32_t n) {
    double mt = (double)truth[best_of(truth, n)], mx = (double)x[best_of(x, n)];
    double st = 0, sx = 0, sum = 0;
    for (int32_t i = 0; i < n; i++) {
        st += exp((double)truth[i] - mt);
        sx += exp((double)x[i] - mx);
    }
    for (int32_t i = 0; i < n; i++) {
        double lt = (double)truth[i] - mt - log(st), lx = (double)x[i] - mx - log(sx);
        sum += exp(lt) * (lt - lx);
    }
    return sum;
}

double tie_cost(const float *truth, int32_t a, int32_t b, int32_t n) {
    double most = (double)truth[best_of(truth, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)truth[i] - most);
    double p = exp((double)truth[a] - most) / sum, q = exp((double)truth[b] - most) / sum;
    return q >= p ? 0 : p * log(2 * p / (p + q)) + q * log(2 * q / (p + q));
}

/* The rows that compare_some looks at; one result each, so that sums have one order. */
struct comparison {
    const float *truth, *x;
    int32_t n;
    const int32_t *rows;
    struct likeness *each;
};

static void compare_row(void *arg, int32_t i, int worker) {
    const struct comparison *c = arg;
    size_t at = (size_t)c->rows[i] * (size_t)c->n;
    const float *a = c->truth + at, *b = c->x + at;
    struct likeness *out = &c->each[i];
    (void)worker;
    *out = (struct likeness){.kl = divergence(a, b, c->n),
                             .agree = best_of(a, c->n) == best_of(b, c->n)};
    for (int32_t k = 0; k < c->n; k++) {
        double d = fabs((double)a[k] - (double)b[k]);
        if (!(d <= out->max)) out->max = d;
    }
}

struct likeness compare_some(const float *truth, const float *x, int32_t rows, int32_t n,
                             int32_t step) {
    int32_t *chosen = malloc((size_t)rows * sizeof *chosen), count = 0;
    struct likeness out = {0}, *each = malloc((size_t)rows * sizeof *each);
    for (int32_t r = 0; r < rows; r++) {
        if (r % step == 0 || r >= rows - 64) chosen[count++] = r;
    }
    struct comparison c = {.truth = truth, .x = x, .n = n, .rows = chosen, .each = each};
    in_parallel(count, processors(), compare_row, &c);
    for (int32_t i = 0; i < count; i++) {
        out.kl += each[i].kl / count;
        out.agree += each[i].agree / count;
        if (!(each[i].kl <= out.worst)) out.worst = each[i].kl;
        if (!(each[i].max <= out.max)) out.max = each[i].max;
    }
    free(chosen);
    free(each);
    return out;
}

struct likeness compare(const float *truth, const float *x, int32_t rows, int32_t n) {
    return compare_some(truth, x, rows, n, 1);
}

size_t differing(const void *a, const void *b, size_t n) {
    const unsigned char *x = a, *y = b;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += x[i] != y[i];
    return count;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[n / 2];
}
