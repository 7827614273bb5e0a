#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "check.h"

/* ---- running a backend ----------------------------------------------------------------------- */

/* A model with sessions; the first failure is noted and makes the rest do nothing. */
struct side {
    const struct backend *b;
    struct backend_model *m;
    struct backend_session *s[32];
    const char *what;
    bool bad;
};

static void failed(struct side *x, int rc, const lily_err *err) {
    if (rc == LILY_OK || x->bad) return;
    x->bad = true;
    note_error(x->what, rc, err);
}

static struct side open_side(const struct bench_model *t, const struct backend *b, const char *what,
                             int32_t sessions, const struct backend_options *extra) {
    struct side x = {.b = b, .what = what};
    struct backend_options o = extra ? *extra : (struct backend_options){0};
    lily_err err;
    o.max_sessions = sessions;
    o.max_context = t->context;
    failed(&x, b->open(t->w, &o, &x.m, &err), &err);
    for (int32_t i = 0; i < sessions && !x.bad; i++) {
        failed(&x, b->session_new(x.m, t->context, &x.s[i], &err), &err);
    }
    return x;
}

static void close_side(struct side *x) {
    for (int i = 0; i < 32; i++) x->b->session_free(x->s[i]);
    if (x->m) x->b->close(x->m);
}

/* Tokens [from, from + n) of the text, in calls of at most cut; all: [n][V] or NULL. */
static void feed(const struct bench_model *t, struct side *x, int i, int64_t from, int32_t n,
                 int32_t cut, float *all, float *last) {
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    for (int32_t k = 0; k < n; k++) ids[k] = token_at(from + k, t->w->vocab_used);
    for (int32_t at = 0; at < n && !x->bad;) {
        lily_err err;
        int32_t part = n - at < cut ? n - at : cut;
        struct prefill_step step = {.ids = ids + at, .n = part};
        if (all) step.all_logits = all + (size_t)at * (size_t)t->vocab;
        if (at + part == n) step.logits = last;
        failed(x, x->b->prefill(x->s[i], &step, &err), &err);
        at += step.done;
    }
    free(ids);
}

static int32_t decode(struct side *x, int i, int32_t token, float *logits) {
    struct decode_slot slot = {.session = x->s[i], .token = token, .logits = logits};
    struct decode_result result = {.token = -1};
    lily_err err;
    if (x->bad) return -1;
    failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
    if (!x->bad) failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
    if (!x->bad && !result.finite) {
        x->bad = true;
        note(x->what, NAN, 0);
    }
    return result.token;
}

static float *rows_new(const struct bench_model *t, int32_t n) {
    size_t count = (size_t)n * (size_t)t->vocab;
    float *rows = malloc(count * sizeof *rows);
    for (size_t i = 0; i < count; i++) rows[i] = NAN; /* what is not written is seen */
    return rows;
}

/* ---- comparing ------------------------------------------------------------------------------- */

static int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

/* KL(softmax(truth) || softmax(x)). */
static double divergence(const float *truth, const float *x, int32_t n) {
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

struct likeness {
    double kl, max, agree;
};
static struct likeness compare(const float *truth, const float *x, int32_t rows, int32_t n) {
    struct likeness out = {0};
    for (int32_t r = 0; r < rows; r++) {
        const float *a = truth + (size_t)r * (size_t)n, *b = x + (size_t)r * (size_t)n;
        out.kl += divergence(a, b, n) / rows;
        out.agree += (double)(best_of(a, n) == best_of(b, n)) / rows;
        for (int32_t i = 0; i < n; i++) {
            double d = fabs((double)a[i] - (double)b[i]);
            if (!(d <= out.max)) out.max = d;
        }
    }
    return out;
}

static size_t differing(const void *a, const void *b, size_t n) {
    const unsigned char *x = a, *y = b;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += x[i] != y[i];
    return count;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[n / 2];
}

/* ---- stages ---------------------------------------------------------------------------------- */

struct trace_row {
    enum stage stage;
    int32_t layer, pos, n;
    float *row;
};
struct trace {
    struct trace_row *rows;
    size_t n, room;
};

static void keep_row(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                     int32_t n) {
    struct trace *t = arg;
    if (stage == STAGE_LOGITS) return;
    if (t->n == t->room) {
        t->room = t->room ? 2 * t->room : 1024;
        t->rows = realloc(t->rows, t->room * sizeof *t->rows);
    }
    float *copy = malloc((size_t)n * sizeof *copy);
    memcpy(copy, row, (size_t)n * sizeof *copy);
    t->rows[t->n++] = (struct trace_row){stage, layer, pos, n, copy};
}

static int order(const void *a, const void *b) {
    const struct trace_row *x = a, *y = b;
    if (x->stage != y->stage) return x->stage < y->stage ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->pos < y->pos ? -1 : x->pos > y->pos;
}

static void free_trace(struct trace *t) {
    for (size_t i = 0; i < t->n; i++) free(t->rows[i].row);
    free(t->rows);
}

/* Root of the mean square of the difference over that of the truth. For routing: the share of
 * chosen experts that the other did not choose. */
static double distance(const struct trace_row *truth, const struct trace_row *x, int32_t top_k) {
    double d = 0, s = 0;
    if (truth->stage == STAGE_ROUTER) {
        for (int32_t i = 0; i < top_k; i++) {
            bool found = false;
            for (int32_t j = 0; j < top_k; j++) found = found || truth->row[i] == x->row[j];
            d += !found;
        }
        return d / top_k;
    }
    for (int32_t i = 0; i < truth->n; i++) {
        double e = (double)truth->row[i] - (double)x->row[i];
        d += e * e;
        s += (double)truth->row[i] * (double)truth->row[i];
    }
    return s > 0 ? sqrt(d / s) : sqrt(d);
}

/* Runs the text's first n tokens with a trace: as a prompt, or token by token after one. */
static void traced(const struct bench_model *t, const struct backend *b, struct trace *trace,
                   int32_t n, bool by_decode) {
    struct backend_options o = {.trace = keep_row, .trace_arg = trace};
    struct side x = open_side(t, b, "stages", 1, &o);
    if (by_decode) {
        float *logits = rows_new(t, 1);
        for (int32_t i = 0; i < n; i++) decode(&x, 0, token_at(i, t->w->vocab_used), logits);
        free(logits);
    } else {
        feed(t, &x, 0, 0, n, n, NULL, NULL);
    }
    close_side(&x);
}

void check_stages(const struct bench_model *b, int32_t n, bool by_decode) {
    struct trace truth = {0}, own = {0};
    printf("stages of %d tokens %s\n", n, by_decode ? "decoded" : "of a prompt");
    traced(b, b->truth, &truth, n, by_decode);
    traced(b, b->cuda, &own, n, by_decode);
    qsort(truth.rows, truth.n, sizeof *truth.rows, order);
    qsort(own.rows, own.n, sizeof *own.rows, order);
    double *all[STAGE_COUNT] = {NULL};
    int count[STAGE_COUNT] = {0}, missing = 0;
    for (size_t i = 0, j = 0; i < truth.n; i++) {
        while (j < own.n && order(&own.rows[j], &truth.rows[i]) < 0) j++;
        const struct trace_row *x = &truth.rows[i];
        if (x->stage == STAGE_FINAL_NORM) continue;
        if (j == own.n || order(&own.rows[j], x) != 0 || own.rows[j].n != x->n) {
            missing++;
            continue;
        }
        if (!all[x->stage]) all[x->stage] = malloc(truth.n * sizeof **all);
        all[x->stage][count[x->stage]++] = distance(x, &own.rows[j], b->w->shape->top_k);
    }
    note("rows of stages that are missing", missing, 0);
    for (int s = 0; s < STAGE_COUNT; s++) {
        if (!count[s]) continue;
        char what[96];
        double worst = 0, mean = 0;
        for (int i = 0; i < count[s]; i++) {
            mean += all[s][i] / count[s];
            if (!(all[s][i] <= worst)) worst = all[s][i];
        }
        if (s == STAGE_ROUTER) { /* flips at near-ties: reported, and bounded */
            snprintf(what, sizeof what, "%s: share of experts chosen otherwise",
                     by_decode ? "decode" : "prompt");
            note(what, mean, by_decode ? 1e-2 : 5e-2);
        } else {
            snprintf(what, sizeof what, "%s %s: median distance (largest %.2g)",
                     by_decode ? "decode" : "prompt", stage_name((enum stage)s), worst);
            /* bf16 activations in prompts; in decode float32 but for keys and values. A row whose
             * routing flipped is another row: hence the median. */
            note(what, worst == worst ? median(all[s], count[s]) : (double)NAN,
                 by_decode ? 4e-3 : 2e-2);
        }
        free(all[s]);
    }
    free_trace(&truth);
    free_trace(&own);
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Every position of prompts of these lengths, and four decoded tokens behind each. */
void check_logits(const struct bench_model *b, const int32_t *lengths, int32_t n_lengths) {
    int32_t most = lengths[n_lengths - 1] + 4;
    float *truth = rows_new(b, most), *own = rows_new(b, most);
    size_t row = (size_t)b->vocab;
    struct side t = open_side(b, b->truth, "logits, truth", 1, NULL);
    struct side x = open_side(b, b->cuda, "logits", 1, NULL);
    double decoded = 0, max = 0;
    char what[96];
    printf("logits of prompts\n");
    /* The truth's rows do not depend on where a prompt ends. */
    feed(b, &t, 0, 0, most, most, truth, NULL);
    for (int32_t i = 0; i < n_lengths && !x.bad && !t.bad; i++) {
        int32_t n = lengths[i];
        b->cuda->reset(x.s[0]);
        feed(b, &x, 0, 0, n, n, own, NULL);
        struct likeness p = compare(truth, own, n, b->vocab);
        for (int32_t k = 0; k < 4; k++) {
            decode(&x, 0, token_at(n + k, b->w->vocab_used), own + (size_t)(n + k) * row);
        }
        struct likeness d = compare(truth + (size_t)n * row, own + (size_t)n * row, 4, b->vocab);
        decoded += d.kl / n_lengths;
        if (!(d.max <= max)) max = d.max;
        snprintf(what, sizeof what, "prompt of %d: mean KL (largest difference %.2g, top-1 %.3f)",
                 n, p.max, p.agree);
        note(what, p.kl, 1e-3);
    }
    snprintf(what, sizeof what, "decode behind each: mean KL (largest difference %.2g)", max);
    note(what, x.bad || t.bad ? (double)NAN : decoded, 1e-3);
    close_side(&t);
    close_side(&x);
    free(truth);
    free(own);
}

/* ---- the same however it is cut -------------------------------------------------------------- */

static void *state_of(struct side *x, int i) {
    if (x->bad) return calloc(1, 1);
    void *out = malloc(x->b->state_bytes(x->m));
    struct backend_state *state = NULL;
    lily_err err;
    if (!x->bad) failed(x, x->b->state_new(x->m, &state, &err), &err);
    if (!x->bad) failed(x, x->b->state_save(x->s[i], state, &err), &err);
    if (!x->bad) failed(x, x->b->state_export(state, out, &err), &err);
    x->b->state_free(state);
    return out;
}

/* Cuts on the grid of state checkpoints change no bit. Others neither, where the recurrent state
 * advances token by token; the large model's advances in pieces of the grid (prompt.c), and a piece
 * in two parts is the same sum in another order. */
void check_cuts(const struct bench_model *b, int32_t n) {
    static const int32_t all[] = {64, 17, 33, 1, 7, 192, 100, 129};
    int32_t n_cuts = b->emulated ? 3 : 8;
    bool pieces = b->vocab > 100000;
    struct side x = open_side(b, b->cuda, "cuts", 2, NULL);
    float *whole = rows_new(b, 1), *cut = rows_new(b, 1);
    printf("a prompt of %d in pieces\n", n);
    feed(b, &x, 0, 0, n, n, NULL, whole);
    void *state = state_of(&x, 0);
    for (int32_t i = 0; i < n_cuts && !x.bad; i++) {
        char what[96];
        b->cuda->reset(x.s[1]);
        feed(b, &x, 1, 0, n, all[i], NULL, cut);
        void *other = state_of(&x, 1);
        if (pieces && all[i] % BACKEND_GRID) {
            struct likeness d = compare(whole, cut, 1, b->vocab);
            snprintf(what, sizeof what, "pieces of %d: mean KL", all[i]);
            note(what, d.kl, 1e-3);
        } else {
            snprintf(what, sizeof what, "pieces of %d: bytes of logits that differ", all[i]);
            note(what, (double)differing(whole, cut, (size_t)b->vocab * sizeof(float)), 0);
            snprintf(what, sizeof what, "pieces of %d: bytes of state that differ", all[i]);
            note(what, x.bad ? NAN : (double)differing(state, other, b->cuda->state_bytes(x.m)), 0);
        }
        free(other);
    }
    free(state);
    close_side(&x);
    free(whole);
    free(cut);
}

/* ---- states ---------------------------------------------------------------------------------- */

/* Decodes the text's tokens [from, from + n) and returns the last logits. */
static void decode_text(const struct bench_model *b, struct side *x, int i, int64_t from, int32_t n,
                        float *logits) {
    for (int32_t k = 0; k < n; k++) {
        decode(x, i, token_at(from + k, b->w->vocab_used), k == n - 1 ? logits : NULL);
    }
}

void check_states(const struct bench_model *b, int32_t n) {
    struct side x = open_side(b, b->cuda, "states", 2, NULL);
    float *first = rows_new(b, 1), *again = rows_new(b, 1);
    size_t row = (size_t)b->vocab * sizeof(float);
    struct backend_state *saved = NULL, *imported = NULL;
    lily_err err;
    printf("states at %d tokens\n", n);
    feed(b, &x, 0, 0, n, n, NULL, NULL);
    if (x.bad) { /* no session to go on with */
        close_side(&x);
        free(first);
        free(again);
        return;
    }
    failed(&x, b->cuda->state_new(x.m, &saved, &err), &err);
    if (!x.bad) failed(&x, b->cuda->state_new(x.m, &imported, &err), &err);
    if (!x.bad) failed(&x, b->cuda->state_save(x.s[0], saved, &err), &err);
    decode_text(b, &x, 0, n, 3, first);
    if (!x.bad) failed(&x, b->cuda->state_restore(x.s[0], saved, n, &err), &err);
    decode_text(b, &x, 0, n, 3, again);
    note("restored: bytes of logits that differ", (double)differing(first, again, row), 0);

    if (!x.bad) failed(&x, b->cuda->rewind(x.s[0], &err), &err);
    note("rewound: position off by", fabs((double)(b->cuda->position(x.s[0]) - (n + 2))), 0);
    decode_text(b, &x, 0, n + 2, 1, again);
    note("rewound: bytes of logits that differ", (double)differing(first, again, row), 0);
    if (!x.bad) failed(&x, b->cuda->rewind(x.s[0], &err), &err);
    note("a second rewind is refused", b->cuda->rewind(x.s[0], &err) == LILY_EINVAL ? 0 : 1, 0);

    /* Out through host memory and into another session. */
    size_t kv = x.bad ? 1 : b->cuda->kv_bytes(x.m, n);
    char *rows = malloc(kv), *state = malloc(x.bad ? 1 : b->cuda->state_bytes(x.m));
    if (!x.bad) failed(&x, b->cuda->kv_export(x.s[0], 0, n, rows, &err), &err);
    if (!x.bad) failed(&x, b->cuda->state_export(saved, state, &err), &err);
    if (!x.bad) failed(&x, b->cuda->kv_import(x.s[1], 0, n, rows, &err), &err);
    if (!x.bad) failed(&x, b->cuda->state_import(imported, state, &err), &err);
    if (!x.bad) failed(&x, b->cuda->state_restore(x.s[1], imported, n, &err), &err);
    decode_text(b, &x, 1, n, 3, again);
    note("moved to another session: bytes of logits that differ",
         (double)differing(first, again, row), 0);
    free(rows);
    free(state);
    b->cuda->state_free(saved);
    b->cuda->state_free(imported);
    close_side(&x);
    free(first);
    free(again);
}

/* ---- batches --------------------------------------------------------------------------------- */

/* Slot i's sequence: a prompt of its own, from the start. */
static void begin_slot(const struct bench_model *b, struct side *x, int s, int32_t i) {
    if (!x->bad) b->cuda->reset(x->s[s]);
    feed(b, x, s, 1000 * i, 3 + 5 * i, 64, NULL, NULL);
}

/* The steps of slots [0, n) together; out: [n][V] of the last. */
static void decode_slots(const struct bench_model *b, struct side *x, int32_t n, int32_t steps,
                         float *out) {
    size_t row = (size_t)b->vocab;
    for (int32_t i = 0; i < n; i++) begin_slot(b, x, i, i);
    for (int32_t k = 0; k < steps && !x->bad; k++) {
        struct decode_slot slot[32];
        struct decode_result result[32];
        lily_err err;
        for (int32_t i = 0; i < n; i++) {
            slot[i] = (struct decode_slot){.session = x->s[i],
                                           .token = token_at(1000 * i + 500 + k, b->w->vocab_used),
                                           .logits = k == steps - 1 ? out + (size_t)i * row : NULL};
        }
        failed(x, b->cuda->decode_submit(x->m, slot, n, &err), &err);
        if (!x->bad) failed(x, b->cuda->decode_wait(x->m, result, n, &err), &err);
    }
}

/* Slots of different depth in one step give nearly what each gives alone (other kernels), and the
 * same bytes however many others there are. */
void check_batch(const struct bench_model *b, int32_t slots, int32_t steps) {
    struct side x = open_side(b, b->cuda, "batch", slots, NULL);
    float *alone = rows_new(b, slots), *together = rows_new(b, slots), *pair = rows_new(b, 2);
    size_t row = (size_t)b->vocab;
    printf("%d slots, %d steps\n", slots, steps);
    for (int32_t i = 0; i < slots; i++) {
        begin_slot(b, &x, 0, i);
        decode_text(b, &x, 0, 1000 * i + 500, steps, alone + (size_t)i * row);
    }
    decode_slots(b, &x, slots, steps, together);
    decode_slots(b, &x, 2, steps, pair);
    struct likeness l = compare(alone, together, slots, b->vocab);
    note("batch against alone: mean KL", l.kl, 1e-3);
    note("batch against a pair: bytes that differ",
         (double)differing(pair, together, 2 * row * sizeof(float)), 0);
    close_side(&x);
    free(alone);
    free(together);
    free(pair);
}

/* One way to put sessions together: their numbers, in order. */
struct composition {
    const int32_t *of;
    int32_t n;
};

/* What two steps of each session gave: tokens picked, logits of the second. */
struct outcome {
    int32_t token[2];
    float *logits;
};

/* Two steps in flight, the second of tokens that the first picks on the device: the largest logit
 * for even sessions, a draw for odd ones. */
static void two_steps(const struct bench_model *b, struct side *x, struct composition c,
                      struct outcome *out) {
    const struct backend_sampling draw = {
        .temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 3};
    const struct backend_sampling largest = {.temperature = 0, .top_p = 1, .repetition = 1};
    struct decode_slot slot[32];
    struct decode_result result[2][32];
    lily_err err;
    for (int k = 0; k < 2; k++) {
        for (int32_t i = 0; i < c.n; i++) {
            int32_t s = c.of[i];
            slot[i] = (struct decode_slot){.session = x->s[s],
                                           .token = k ? -1 : token_at(500 + s, b->w->vocab_used),
                                           .logits = k ? out[s].logits : NULL,
                                           .sampling = s % 2 ? &draw : &largest,
                                           .pick = (uint64_t)k};
        }
        if (!x->bad) failed(x, b->cuda->decode_submit(x->m, slot, c.n, &err), &err);
    }
    for (int k = 0; k < 2; k++) {
        if (!x->bad) failed(x, b->cuda->decode_wait(x->m, result[k], c.n, &err), &err);
        for (int32_t i = 0; i < c.n && !x->bad; i++) out[c.of[i]].token[k] = result[k][i].token;
    }
}

/* Whichever sessions share a step, in whichever order: from two on, each gets the same bytes and
 * the same tokens; and the token of the largest logit is that of the row which the host gets. */
void check_compositions(const struct bench_model *b, int32_t slots) {
    struct side x = open_side(b, b->cuda, "compositions", slots, NULL);
    struct backend_state *saved[32] = {NULL};
    struct outcome first[32] = {{{0}, NULL}}, other[32] = {{{0}, NULL}};
    int32_t of[32] = {0};
    size_t row = (size_t)b->vocab * sizeof(float);
    double bytes = 0, tokens = 0, largest = 0;
    lily_err err;
    printf("%d slots in other company\n", slots);
    for (int32_t i = 0; i < slots; i++) {
        first[i] = (struct outcome){.logits = rows_new(b, 1)};
        other[i] = (struct outcome){.logits = rows_new(b, 1)};
        feed(b, &x, i, 100 * i, 1 + i % 3, 64, NULL, NULL);
        if (!x.bad) failed(&x, b->cuda->sample_begin(x.s[i], NULL, 0, &err), &err);
        if (!x.bad) failed(&x, b->cuda->state_new(x.m, &saved[i], &err), &err);
        if (!x.bad) failed(&x, b->cuda->state_save(x.s[i], saved[i], &err), &err);
        of[i] = i;
    }
    two_steps(b, &x, (struct composition){of, slots}, first);
    for (int32_t i = 0; i < slots && !x.bad; i += 2) {
        largest += first[i].token[1] != best_of(first[i].logits, b->w->vocab_used);
    }
    /* Backwards: the last two, the last eight, more than eight, all. */
    for (int32_t i = 0; i < slots; i++) of[i] = slots - 1 - i;
    const int32_t sizes[] = {2, 8, 9, slots};
    for (int k = 0; k < 4 && !x.bad; k++) {
        int32_t n = sizes[k] < slots ? sizes[k] : slots;
        for (int32_t i = 0; i < slots && !x.bad; i++) {
            failed(&x, b->cuda->state_restore(x.s[i], saved[i], 1 + i % 3, &err), &err);
        }
        two_steps(b, &x, (struct composition){of, n}, other);
        for (int32_t i = 0; i < n && !x.bad; i++) {
            const struct outcome *a = &first[of[i]], *c = &other[of[i]];
            bytes += (double)differing(a->logits, c->logits, row);
            tokens += (a->token[0] != c->token[0]) + (a->token[1] != c->token[1]);
        }
    }
    note("other company: bytes of logits that differ", x.bad ? NAN : bytes, 0);
    note("other company: tokens that differ", x.bad ? NAN : tokens, 0);
    note("argmax on the device: tokens that are not the largest", x.bad ? NAN : largest, 0);
    for (int32_t i = 0; i < slots; i++) {
        b->cuda->state_free(saved[i]);
        free(first[i].logits);
        free(other[i].logits);
    }
    close_side(&x);
}

/* ---- sampling -------------------------------------------------------------------------------- */

/* Picks of a backend from a prompt of 10, two steps in flight where `ahead`. */
static void picks(const struct bench_model *t, struct side *x, const struct backend_sampling *p,
                  int32_t steps, bool ahead, int32_t *out) {
    int32_t prompt[10];
    lily_err err;
    for (int i = 0; i < 10; i++) prompt[i] = token_at(i, t->w->vocab_used);
    if (x->bad) return;
    x->b->reset(x->s[0]);
    feed(t, x, 0, 0, 9, 9, NULL, NULL);
    if (!x->bad) failed(x, x->b->sample_begin(x->s[0], prompt, 10, &err), &err);
    struct decode_slot slot = {.session = x->s[0], .token = prompt[9], .sampling = p};
    int32_t submitted = 0, waited = 0;
    while (waited < steps && !x->bad) {
        if (submitted < steps && submitted - waited < (ahead ? 2 : 1)) {
            slot.pick = (uint64_t)submitted;
            failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
            submitted++;
            slot.token = -1;
            if (ahead && submitted - waited < 2 && submitted < steps) continue;
        }
        struct decode_result result;
        failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
        out[waited++] = x->bad ? -1 : result.token;
    }
}

void check_sampling(const struct bench_model *b, int32_t steps, bool against_ref) {
    static const struct backend_sampling kinds[] = {
        {.temperature = 0, .top_p = 1, .repetition = 1},
        {.temperature = 0, .top_p = 1, .repetition = 1.3f, .frequency = 0.2f, .presence = 1.5f},
        {.temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 7},
        {.temperature = 0.7f,
         .top_p = 0.8f,
         .repetition = 1,
         .presence = 1.5f,
         .top_k = 20,
         .stream = 99},
        {.temperature = 1.5f,
         .top_p = 1,
         .min_p = 0.05f,
         .repetition = 1.1f,
         .top_k = 64,
         .stream = 1234567},
        {.temperature = 2, .top_p = 1, .repetition = 1, .top_k = 1, .stream = 5}};
    struct side t = {.b = &backend_ref, .bad = true};
    if (against_ref) t = open_side(b, &backend_ref, "sampling, ref", 1, NULL);
    struct side x = open_side(b, b->cuda, "sampling", 1, NULL);
    int32_t want[256], got[256], ahead[256];
    printf("sampling on the device, %d picks each\n", steps);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        char what[96];
        int32_t same = 0, alike = 0;
        picks(b, &x, &kinds[k], steps, false, got);
        picks(b, &x, &kinds[k], steps, true, ahead);
        while (alike < steps && got[alike] == ahead[alike]) alike++;
        snprintf(what, sizeof what, "sampling %zu: picks of two in flight unlike one", k);
        note(what, x.bad ? (double)NAN : (double)(steps - alike), 0);
        if (!against_ref) continue;
        picks(b, &t, &kinds[k], steps, false, want);
        while (same < steps && want[same] == got[same]) same++;
        /* A near-tie may part the texts, and then all that follows differs. */
        snprintf(what, sizeof what, "sampling %zu: picks from the first unlike ref's on", k);
        note(what, x.bad ? (double)NAN : (double)(steps - same), steps * 0.5);
    }
    if (against_ref) close_side(&t);
    close_side(&x);
}

/* ---- greedy text ----------------------------------------------------------------------------- */

/* Greedy text of many prompts; where it parts from the truth's, the truth's gap between the two
 * tokens must be small. */
void check_greedy(const struct bench_model *b, int32_t prompts, int32_t steps) {
    struct side t = open_side(b, b->truth, "greedy, truth", 1, NULL);
    struct side x = open_side(b, b->cuda, "greedy", 1, NULL);
    float *truth = rows_new(b, 1), *own = rows_new(b, 1);
    double widest = 0;
    int32_t parted = 0, used = b->w->vocab_used;
    printf("greedy text of %d prompts\n", prompts);
    for (int32_t p = 0; p < prompts && !x.bad && !t.bad; p++) {
        b->truth->reset(t.s[0]);
        b->cuda->reset(x.s[0]);
        feed(b, &t, 0, 7919 * p, 4 + p % 40, 64, NULL, truth);
        feed(b, &x, 0, 7919 * p, 4 + p % 40, 4096, NULL, own);
        for (int32_t k = 0; k < steps && !x.bad && !t.bad; k++) {
            int32_t want = best_of(truth, used), got = best_of(own, used);
            if (want != got) {
                double gap = (double)truth[want] - (double)truth[got];
                if (!(gap <= widest)) widest = gap;
                parted++;
                break;
            }
            decode(&t, 0, want, truth);
            decode(&x, 0, got, own);
        }
    }
    char what[96];
    snprintf(what, sizeof what, "greedy: %d of %d parted, widest gap there", parted, prompts);
    note(what, widest, 0.1);
    close_side(&t);
    close_side(&x);
    free(truth);
    free(own);
}

/* Many tokens, sampled on the device, two steps in flight; every step must be finite. */
void check_long_run(const struct bench_model *b, int64_t tokens) {
    struct side x = open_side(b, b->cuda, "long run", 1, NULL);
    const struct backend_sampling p = {
        .temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 3};
    int64_t done = 0, bad = 0;
    printf("%lld tokens\n", (long long)tokens);
    while (done < tokens && !x.bad) {
        lily_err err;
        int32_t room = b->context - 16;
        b->cuda->reset(x.s[0]);
        feed(b, &x, 0, done, 8, 8, NULL, NULL);
        if (!x.bad) failed(&x, b->cuda->sample_begin(x.s[0], NULL, 0, &err), &err);
        struct decode_slot slot = {.session = x.s[0], .token = 1, .sampling = &p};
        for (int32_t k = 0; k <= room && !x.bad; k++) {
            struct decode_result result = {.finite = true};
            slot.pick = (uint64_t)(done + k);
            if (k < room) failed(&x, b->cuda->decode_submit(x.m, &slot, 1, &err), &err);
            slot.token = -1;
            if (k > 0 && !x.bad) failed(&x, b->cuda->decode_wait(x.m, &result, 1, &err), &err);
            bad += !result.finite;
        }
        done += room;
    }
    note("steps of a long run that are not finite", x.bad ? NAN : (double)bad, 0);
    close_side(&x);
}

/* ---- depth and speed ------------------------------------------------------------------------- */

/* A prompt of so many tokens and eight decoded ones against the CPU backend. */
void check_depth(const struct bench_model *b, int32_t depth) {
    struct bench_model deep = *b;
    deep.context = depth + 64;
    struct side t = open_side(&deep, &backend_cpu, "depth, cpu", 1, NULL);
    struct side x = open_side(&deep, b->cuda, "depth", 1, NULL);
    float *truth = rows_new(b, 9), *own = rows_new(b, 9);
    printf("%d tokens deep\n", depth);
    feed(&deep, &t, 0, 0, depth, depth, NULL, truth);
    feed(&deep, &x, 0, 0, depth, depth, NULL, own);
    for (int32_t k = 0; k < 8; k++) {
        size_t at = (size_t)(k + 1) * (size_t)b->vocab;
        int32_t token = token_at(depth + k, b->w->vocab_used);
        decode(&t, 0, token, truth + at);
        decode(&x, 0, token, own + at);
    }
    struct likeness l = compare(truth, own, 9, b->vocab);
    char what[96];
    snprintf(what, sizeof what, "%d deep: mean KL (largest %.2g, top-1 %.2f)", depth, l.max,
             l.agree);
    note(what, l.kl, 1e-3);
    close_side(&t);
    close_side(&x);
    free(truth);
    free(own);
}

/* Tokens a second of greedy decoding at a depth, two steps in flight. */
static double decode_speed(struct side *x, int32_t steps) {
    const struct backend_sampling p = {.temperature = 0, .top_p = 1, .repetition = 1};
    struct decode_slot slot = {.session = x->s[0], .token = 1, .sampling = &p};
    struct decode_result result;
    lily_err err;
    if (!x->bad) failed(x, x->b->sample_begin(x->s[0], NULL, 0, &err), &err);
    int64_t began = clock_ns();
    for (int32_t k = 0; k <= steps && !x->bad; k++) {
        if (k == 8) began = clock_ns(); /* after a warm start */
        if (k < steps) failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
        slot.token = -1;
        if (k > 0 && !x->bad) failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
    }
    return (steps - 8) / ((double)(clock_ns() - began) * 1e-9);
}

/* Tokens a second of n sessions together, two steps in flight. */
static double batch_speed(const struct bench_model *b, struct side *x, int32_t n, int32_t steps) {
    static const struct backend_sampling p = {.temperature = 0, .top_p = 1, .repetition = 1};
    struct decode_slot slot[32];
    struct decode_result result[32];
    lily_err err;
    int64_t began = clock_ns();
    for (int32_t i = 0; i < n && !x->bad; i++) {
        begin_slot(b, x, i, i);
        if (!x->bad) failed(x, b->cuda->sample_begin(x->s[i], NULL, 0, &err), &err);
        slot[i] = (struct decode_slot){.session = x->s[i], .token = i + 1, .sampling = &p};
    }
    for (int32_t k = 0; k <= steps && !x->bad; k++) {
        if (k == 4) began = clock_ns();
        if (k < steps) failed(x, b->cuda->decode_submit(x->m, slot, n, &err), &err);
        for (int32_t i = 0; i < n; i++) slot[i].token = -1;
        if (k > 0 && !x->bad) failed(x, b->cuda->decode_wait(x->m, result, n, &err), &err);
    }
    return (double)n * (steps - 4) / ((double)(clock_ns() - began) * 1e-9);
}

void measure_batches(const struct bench_model *b) {
    static const int32_t sizes[] = {1, 2, 4, 8, 16, 32};
    struct bench_model narrow = *b;
    narrow.context = 1024;
    struct side x = open_side(&narrow, b->cuda, "speed of batches", 32, NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !x.bad; i++) {
        char what[96];
        snprintf(what, sizeof what, "decode of %d sessions", sizes[i]);
        record(what, batch_speed(&narrow, &x, sizes[i], 36), "tok/s");
    }
    close_side(&x);
}

void measure(const struct bench_model *b) {
    static const int32_t prompts[] = {1, 2, 8, 16, 32, 64, 128, 512, 2048, 4096, 16384, 65536};
    static const int32_t depths[] = {0, 4096, 32768};
    struct bench_model wide = *b;
    char what[96];
    wide.context = 66560;
    int64_t began = clock_ns();
    struct side x = open_side(&wide, b->cuda, "speed", 1, NULL);
    float *logits = rows_new(b, 1);
    printf("speed\n");
    record("open", (double)(clock_ns() - began) * 1e-9, "s");
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts && !x.bad; i++) {
        double s[5];
        int repeats = prompts[i] > 4096 ? 2 : 5;
        for (int k = 0; k < repeats + 1 && !x.bad; k++) {
            b->cuda->reset(x.s[0]);
            int64_t t = clock_ns();
            feed(&wide, &x, 0, 0, prompts[i], prompts[i], NULL, logits);
            if (k) s[k - 1] = (double)(clock_ns() - t) * 1e-9;
        }
        double m = median(s, repeats);
        snprintf(what, sizeof what, "prompt of %d (%.3f ms)", prompts[i], m * 1e3);
        record(what, prompts[i] / m, "tok/s");
    }
    for (size_t i = 0; i < sizeof depths / sizeof *depths && !x.bad; i++) {
        b->cuda->reset(x.s[0]);
        if (depths[i]) feed(&wide, &x, 0, 0, depths[i], depths[i], NULL, NULL);
        snprintf(what, sizeof what, "decode at %d", depths[i]);
        record(what, decode_speed(&x, 136), "tok/s");
    }
    free(logits);
    close_side(&x);
}

/* The kernels of some steps, each run alone. */
void profile(const struct bench_model *b) {
    static const int32_t prompts[] = {16, 512, 4096};
    static const int32_t slots[] = {1, 8, 32};
    struct bench_model narrow = *b;
    char what[96];
    narrow.context = 4352;
    profile_begin();
    struct side x = open_side(&narrow, b->cuda, "profile", 32, NULL);
    float *logits = rows_new(b, 32);
    for (int i = 0; i < 3 && !x.bad; i++) {
        b->cuda->reset(x.s[0]);
        profile_start();
        feed(&narrow, &x, 0, 0, prompts[i], prompts[i], NULL, logits);
        snprintf(what, sizeof what, "prompt of %d", prompts[i]);
        profile_print(what);
    }
    for (int i = 0; i < 3 && !x.bad; i++) {
        decode_slots(&narrow, &x, slots[i], 1, logits);
        struct decode_slot slot[32];
        struct decode_result result[32];
        lily_err err;
        for (int32_t k = 0; k < slots[i]; k++) {
            slot[k] = (struct decode_slot){.session = x.s[k], .token = k};
            slot[k].logits = logits + (size_t)k * (size_t)b->vocab;
        }
        profile_start();
        failed(&x, b->cuda->decode_submit(x.m, slot, slots[i], &err), &err);
        if (!x.bad) failed(&x, b->cuda->decode_wait(x.m, result, slots[i], &err), &err);
        snprintf(what, sizeof what, "decode of %d", slots[i]);
        profile_batch(b->w->shape, b->w->layers, slots[i]);
        profile_print(what);
    }
    free(logits);
    close_side(&x);
    profile_end();
}
