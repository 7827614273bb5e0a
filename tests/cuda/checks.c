#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "side.h"

/* ---- logits ---------------------------------------------------------------------------------- */

static void *state_of(struct side *x, int i) {
    if (x->bad) return calloc(1, 1);
    void *out = malloc(x->b->state_bytes(x->m));
    struct backend_state *state = NULL;
    lily_err err;
    if (!x->bad) side_failed(x, x->b->state_new(x->m, &state, &err), &err);
    if (!x->bad) side_failed(x, x->b->state_save(x->s[i], state, &err), &err);
    if (!x->bad) side_failed(x, x->b->state_export(state, out, &err), &err);
    x->b->state_free(state);
    return out;
}

enum {
    ALL_ROWS = 2100, /* prompts up to here are compared at every position */
    TIE_ROWS = 1000  /* of the longest up to here, rows near a tie of experts are told apart */
};

/* Truth and card with the rows of both. */
struct logits {
    const struct bench_model *b;
    struct side t, x;
    float *truth, *own;
    double decoded, max; /* of the tokens decoded behind prompts: sum of KL, largest difference */
};

/* Rows [from, n) lie at the rows' begin; four tokens are decoded behind them. */
static void compare_from(struct logits *c, int32_t from, int32_t n, bool decode_truth) {
    const struct bench_model *b = c->b;
    size_t row = (size_t)b->vocab;
    float *truth = c->truth, *own = c->own;
    int32_t rows = n - from;
    char what[96];
    /* Of many logits every seventh row, and the last 64. */
    struct likeness p =
        compare_some(truth, own, rows, b->vocab, rows > 400 && b->vocab > 100000 ? 7 : 1);
    snprintf(what, sizeof what, "prompt of %d: mean KL (worst %.2g, difference %.2g, top-1 %.3f)",
             n, p.worst, p.max, p.agree);
    note(what, c->x.bad || c->t.bad ? (double)NAN : p.kl, 1e-3);
    for (int32_t k = 0; k < 4; k++) {
        int32_t token = token_at(n + k, b->w->vocab_used);
        size_t at = (size_t)(rows + k) * row;
        side_decode(&c->x, 0, token, own + at);
        if (decode_truth) side_decode(&c->t, 0, token, truth + at);
    }
    struct likeness d = compare(truth + (size_t)rows * row, own + (size_t)rows * row, 4, b->vocab);
    c->decoded += d.kl;
    if (!(d.max <= c->max)) c->max = d.max;
}

/* A long prompt in one call must leave the state that one cut on the grid leaves; the rows behind
 * the cut, at least 64, are compared. */
static void compare_tail(struct logits *c, int32_t n) {
    const struct bench_model *b = c->b;
    int32_t cut = (n - BACKEND_GRID) / BACKEND_GRID * BACKEND_GRID;
    char what[96];
    side_feed(b, &c->x, 0, 0, n, n, NULL, NULL);
    void *whole = state_of(&c->x, 0);
    b->cuda->reset(c->x.s[0]);
    b->truth->reset(c->t.s[0]);
    side_feed(b, &c->x, 0, 0, cut, cut, NULL, NULL);
    side_feed(b, &c->x, 0, cut, n - cut, n, c->own, NULL);
    side_feed(b, &c->t, 0, 0, cut, cut, NULL, NULL);
    side_feed(b, &c->t, 0, cut, n - cut, n, c->truth, NULL);
    void *parts = state_of(&c->x, 0);
    snprintf(what, sizeof what, "prompt of %d cut at %d: bytes of state that differ", n, cut);
    note(what,
         c->x.bad ? (double)NAN : (double)differing(whole, parts, b->cuda->state_bytes(c->x.m)), 0);
    free(whole);
    free(parts);
    compare_from(c, cut, n, true);
}

/* Prompts of these ascending lengths, and four decoded tokens behind each. */
void check_logits(const struct bench_model *b, const int32_t *lengths, int32_t n_lengths) {
    struct logits c = {.b = b};
    int32_t most = 2 * BACKEND_GRID + 4; /* what compare_tail needs */
    int32_t tied = 0;
    for (int32_t i = 0; i < n_lengths; i++) {
        if (lengths[i] <= ALL_ROWS && lengths[i] + 4 > most) most = lengths[i] + 4;
        if (lengths[i] <= TIE_ROWS) tied = lengths[i];
    }
    struct ties *ties = ties_new(b, tied);
    c.truth = side_rows(b, most);
    c.own = side_rows(b, most);
    struct backend_options o = {.trace = ties_keep, .trace_arg = ties};
    c.t = side_open(b, b->truth, "logits, truth", 1, &o);
    c.x = side_open(b, b->cuda, "logits", 1, NULL);
    printf("logits of prompts\n");
    /* The truth's rows do not depend on where a prompt ends. */
    side_feed(b, &c.t, 0, 0, most, most, c.truth, NULL);
    for (int32_t i = 0; i < n_lengths && !c.x.bad && !c.t.bad; i++) {
        int32_t n = lengths[i];
        b->cuda->reset(c.x.s[0]);
        int32_t used = n < most ? n + 4 : most;
        memset(c.own, 0xff, (size_t)used * (size_t)b->vocab * sizeof *c.own); /* NaN again */
        if (n > ALL_ROWS) {
            compare_tail(&c, n);
            continue;
        }
        side_feed(b, &c.x, 0, 0, n, n, c.own, NULL);
        compare_from(&c, 0, n, false);
        if (n == tied && !c.x.bad && !c.t.bad) ties_tell(ties, c.truth, c.own, n);
    }
    ties_free(ties);
    char what[96];
    snprintf(what, sizeof what, "decode behind each: mean KL (largest difference %.2g)", c.max);
    note(what, c.x.bad || c.t.bad ? (double)NAN : c.decoded / n_lengths, 1e-3);
    side_close(&c.t);
    side_close(&c.x);
    free(c.truth);
    free(c.own);
}

/* ---- the same however it is cut -------------------------------------------------------------- */

/* Cuts on the grid of state checkpoints change no bit. Others neither, where the recurrent state
 * advances token by token; the large model's advances in pieces of the grid (prompt.c), and a piece
 * in two parts is the same sum in another order. */
void check_cuts(const struct bench_model *b, int32_t n) {
    static const int32_t all[] = {64, 17, 33, 1, 7, 192, 100, 129};
    int32_t n_cuts = b->emulated ? 3 : 8;
    struct side x = side_open(b, b->cuda, "cuts", 2, NULL);
    float *whole = side_rows(b, 1), *cut = side_rows(b, 1);
    printf("a prompt of %d in pieces\n", n);
    side_feed(b, &x, 0, 0, n, n, NULL, whole);
    void *state = state_of(&x, 0);
    for (int32_t i = 0; i < n_cuts && !x.bad; i++) {
        char what[96];
        b->cuda->reset(x.s[1]);
        side_feed(b, &x, 1, 0, n, all[i], NULL, cut);
        void *other = state_of(&x, 1);
        if (b->pieces && all[i] % BACKEND_GRID) {
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
    side_close(&x);
    free(whole);
    free(cut);
}

/* ---- states ---------------------------------------------------------------------------------- */

/* Decodes the text's tokens [from, from + n) and returns the last logits. */
static void decode_text(const struct bench_model *b, struct side *x, int i, int64_t from, int32_t n,
                        float *logits) {
    for (int32_t k = 0; k < n; k++) {
        side_decode(x, i, token_at(from + k, b->w->vocab_used), k == n - 1 ? logits : NULL);
    }
}

void check_states(const struct bench_model *b, int32_t n) {
    struct side x = side_open(b, b->cuda, "states", 2, NULL);
    float *first = side_rows(b, 1), *again = side_rows(b, 1);
    size_t row = (size_t)b->vocab * sizeof(float);
    struct backend_state *saved = NULL, *imported = NULL;
    lily_err err;
    printf("states at %d tokens\n", n);
    side_feed(b, &x, 0, 0, n, n, NULL, NULL);
    if (x.bad) { /* no session to go on with */
        side_close(&x);
        free(first);
        free(again);
        return;
    }
    side_failed(&x, b->cuda->state_new(x.m, &saved, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_new(x.m, &imported, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_save(x.s[0], saved, &err), &err);
    decode_text(b, &x, 0, n, 3, first);
    if (!x.bad) side_failed(&x, b->cuda->state_restore(x.s[0], saved, n, &err), &err);
    decode_text(b, &x, 0, n, 3, again);
    note("restored: bytes of logits that differ", (double)differing(first, again, row), 0);

    if (!x.bad) side_failed(&x, b->cuda->rewind(x.s[0], &err), &err);
    note("rewound: position off by", fabs((double)(b->cuda->position(x.s[0]) - (n + 2))), 0);
    decode_text(b, &x, 0, n + 2, 1, again);
    note("rewound: bytes of logits that differ", (double)differing(first, again, row), 0);
    if (!x.bad) side_failed(&x, b->cuda->rewind(x.s[0], &err), &err);
    note("a second rewind is refused", b->cuda->rewind(x.s[0], &err) == LILY_EINVAL ? 0 : 1, 0);

    /* Out through host memory and into another session. */
    size_t kv = x.bad ? 1 : b->cuda->kv_bytes(x.m, n);
    char *rows = malloc(kv), *state = malloc(x.bad ? 1 : b->cuda->state_bytes(x.m));
    if (!x.bad) side_failed(&x, b->cuda->kv_export(x.s[0], 0, n, rows, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_export(saved, state, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->kv_import(x.s[1], 0, n, rows, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_import(imported, state, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_restore(x.s[1], imported, n, &err), &err);
    decode_text(b, &x, 1, n, 3, again);
    note("moved to another session: bytes of logits that differ",
         (double)differing(first, again, row), 0);
    free(rows);
    free(state);
    b->cuda->state_free(saved);
    b->cuda->state_free(imported);
    side_close(&x);
    free(first);
    free(again);
}

/* ---- batches --------------------------------------------------------------------------------- */

/* Slots of different depth in one step give nearly what each gives alone (other kernels), and the
 * same bytes however many others there are. */
void check_batch(const struct bench_model *b, int32_t slots, int32_t steps) {
    struct side x = side_open(b, b->cuda, "batch", slots, NULL);
    float *alone = side_rows(b, slots), *together = side_rows(b, slots), *pair = side_rows(b, 2);
    size_t row = (size_t)b->vocab;
    printf("%d slots, %d steps\n", slots, steps);
    for (int32_t i = 0; i < slots; i++) {
        side_begin_slot(b, &x, 0, i);
        decode_text(b, &x, 0, 1000 * i + 500, steps, alone + (size_t)i * row);
    }
    side_decode_slots(b, &x, slots, steps, together);
    side_decode_slots(b, &x, 2, steps, pair);
    struct likeness l = compare(alone, together, slots, b->vocab);
    note("batch against alone: mean KL", l.kl, 1e-3);
    note("batch against a pair: bytes that differ",
         (double)differing(pair, together, 2 * row * sizeof(float)), 0);
    side_close(&x);
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
        if (!x->bad) side_failed(x, b->cuda->decode_submit(x->m, slot, c.n, &err), &err);
    }
    for (int k = 0; k < 2; k++) {
        if (!x->bad) side_failed(x, b->cuda->decode_wait(x->m, result[k], c.n, &err), &err);
        for (int32_t i = 0; i < c.n && !x->bad; i++) out[c.of[i]].token[k] = result[k][i].token;
    }
}

/* Whichever sessions share a step, in whichever order: from two on, each gets the same bytes and
 * the same tokens; and the token of the largest logit is that of the row which the host gets. */
void check_compositions(const struct bench_model *b, int32_t slots) {
    struct side x = side_open(b, b->cuda, "compositions", slots, NULL);
    struct backend_state *saved[32] = {NULL};
    struct outcome first[32] = {{{0}, NULL}}, other[32] = {{{0}, NULL}};
    int32_t of[32] = {0};
    size_t row = (size_t)b->vocab * sizeof(float);
    double bytes = 0, tokens = 0, largest = 0;
    lily_err err;
    printf("%d slots in other company\n", slots);
    for (int32_t i = 0; i < slots; i++) {
        first[i] = (struct outcome){.logits = side_rows(b, 1)};
        other[i] = (struct outcome){.logits = side_rows(b, 1)};
        side_feed(b, &x, i, 100 * i, 1 + i % 3, 64, NULL, NULL);
        if (!x.bad) side_failed(&x, b->cuda->sample_begin(x.s[i], NULL, 0, &err), &err);
        if (!x.bad) side_failed(&x, b->cuda->state_new(x.m, &saved[i], &err), &err);
        if (!x.bad) side_failed(&x, b->cuda->state_save(x.s[i], saved[i], &err), &err);
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
            side_failed(&x, b->cuda->state_restore(x.s[i], saved[i], 1 + i % 3, &err), &err);
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
    side_close(&x);
}

/* ---- for tools ------------------------------------------------------------------------------- */

static void told(const char *what) {
    printf("%s\n", what);
    fflush(stdout);
}

/* Each kind of step once or twice, for tools under which a kernel takes a thousand times as long: a
 * prompt, single steps, steps of several sessions with sampling, a state that is taken back to. */
void check_kinds(const struct bench_model *b) {
    enum { PROMPT = 70, SLOTS = 3, STEPS = 2 };
    static const struct backend_sampling draw = {
        .temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 3};
    struct bench_model narrow = *b;
    narrow.context = 128;
    struct side x = side_open(&narrow, b->cuda, "kinds of steps", SLOTS, NULL);
    float *first = side_rows(b, 1), *again = side_rows(b, 1);
    struct backend_state *saved = NULL;
    struct decode_slot slot[SLOTS];
    struct decode_result result[SLOTS];
    size_t row = (size_t)b->vocab * sizeof(float);
    lily_err err;
    told("each kind of step: a prompt");
    side_feed(b, &x, 0, 0, PROMPT, PROMPT, NULL, NULL);
    told("single steps");
    if (!x.bad) side_failed(&x, b->cuda->state_new(x.m, &saved, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->state_save(x.s[0], saved, &err), &err);
    decode_text(b, &x, 0, PROMPT, STEPS, first);
    if (!x.bad) side_failed(&x, b->cuda->state_restore(x.s[0], saved, PROMPT, &err), &err);
    decode_text(b, &x, 0, PROMPT, STEPS, again);
    note("kinds: restored: bytes of logits that differ", (double)differing(first, again, row), 0);
    told("several sessions");
    for (int32_t i = 0; i < SLOTS; i++) {
        if (i) side_feed(b, &x, i, 100 * i, 2, 2, NULL, NULL);
        if (!x.bad) side_failed(&x, b->cuda->sample_begin(x.s[i], NULL, 0, &err), &err);
        slot[i] = (struct decode_slot){.session = x.s[i], .token = i, .sampling = &draw};
    }
    if (!x.bad) side_failed(&x, b->cuda->decode_submit(x.m, slot, SLOTS, &err), &err);
    if (!x.bad) side_failed(&x, b->cuda->decode_wait(x.m, result, SLOTS, &err), &err);
    double infinite = 0;
    for (int32_t i = 0; i < SLOTS && !x.bad; i++) infinite += !result[i].finite;
    note("kinds: sessions of several that are not finite", x.bad ? NAN : infinite, 0);
    b->cuda->state_free(saved);
    side_close(&x);
    free(first);
    free(again);
}

/* ---- the program's own test ------------------------------------------------------------------ */

static void note_item(void *arg, const struct selftest_item *item) {
    char what[96];
    (void)arg;
    if (item->status == SELFTEST_NOTE) return;
    bool good = item->status == SELFTEST_PASSED;
    snprintf(what, sizeof what, "%.30s: %.60s", item->name, item->note);
    if (item->limit > 0) {
        note(what, item->status == SELFTEST_UNTESTED ? (double)NAN : item->error, item->limit);
    } else {
        note(what, !good, 0);
    }
}

void check_selftest(const struct bench_model *b) {
    const struct selftest_args args = {.w = b->w,
                                       .reference = &backend_ref,
                                       .layers = b->w->shape->layers,
                                       .context = 32768,
                                       .item = note_item};
    lily_err err;
    printf("the self-test of lily doctor\n");
    int rc = b->cuda->selftest(&args, &err);
    if (rc != LILY_OK) note_error("self-test", rc, &err);
}
