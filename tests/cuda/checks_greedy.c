/* Greedy text of many prompts against the truth's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "prompts.h"
#include "side.h"

enum { LONGEST = 256 }; /* tokens of a prompt */

/* A row of logits of the card's text beside the truth's of the same tokens. */
struct greedy_row {
    double kl, max;   /* divergence, largest difference */
    double gap, cost; /* of the truth's own choice over the card's, and its tie_cost */
    int32_t want, got;
};

/* One block of prompts. */
struct greedy {
    const struct bench_model *b;
    const struct prompt *prompts; /* [n] */
    struct side *truth;           /* [workers] */
    int32_t n, steps, end;
    int32_t *length;         /* [n] rows written, at most steps */
    int32_t *text;           /* [n][steps] tokens chosen by the card */
    float *own, *right;      /* [n][steps][V] */
    struct greedy_row *rows; /* [n][steps] */
};

static float *row_of(const struct greedy *g, float *rows, int32_t p, int32_t k) {
    return rows + ((size_t)p * (size_t)g->steps + (size_t)k) * (size_t)g->b->vocab;
}

static void write_texts(struct greedy *g, struct side *x) {
    for (int32_t p = 0; p < g->n && !x->bad; p++) {
        int32_t *text = g->text + p * g->steps, k = 0;
        x->b->reset(x->s[0]);
        side_feed_ids(g->b, x, 0, g->prompts[p].ids, g->prompts[p].n, 4096, NULL,
                      row_of(g, g->own, p, 0));
        for (; k < g->steps && !x->bad; k++) {
            text[k] = best_of(row_of(g, g->own, p, k), g->b->w->vocab_used);
            if (text[k] == g->end || k + 1 == g->steps) break;
            side_decode(x, 0, text[k], row_of(g, g->own, p, k + 1));
        }
        g->length[p] = k + 1;
    }
}

/* The truth reads the card's text; on ref and cpu its logits are those of decoding, bit for bit. */
static void read_text(void *arg, int32_t p, int worker) {
    struct greedy *g = arg;
    struct side *t = &g->truth[worker];
    const struct prompt *r = &g->prompts[p];
    int32_t n = g->length[p], *ids = malloc((size_t)n * sizeof *ids);
    ids[0] = r->ids[r->n - 1];
    memcpy(ids + 1, g->text + p * g->steps, (size_t)(n - 1) * sizeof *ids);
    if (!t->bad) t->b->reset(t->s[0]);
    if (r->n > 1) side_feed_ids(g->b, t, 0, r->ids, r->n - 1, 4096, NULL, NULL);
    side_feed_ids(g->b, t, 0, ids, n, 4096, row_of(g, g->right, p, 0), NULL);
    free(ids);
}

static void compare_rows(void *arg, int32_t i, int worker) {
    struct greedy *g = arg;
    int32_t p = i / g->steps, k = i % g->steps, used = g->b->w->vocab_used;
    (void)worker;
    if (k >= g->length[p]) return;
    const float *truth = row_of(g, g->right, p, k), *own = row_of(g, g->own, p, k);
    struct greedy_row *out = &g->rows[i];
    *out = (struct greedy_row){.kl = divergence(truth, own, used),
                               .want = best_of(truth, used),
                               .got = g->text[p * g->steps + k]};
    out->gap = (double)truth[out->want] - (double)truth[out->got];
    out->cost = tie_cost(truth, out->want, out->got, used);
    for (int32_t v = 0; v < used; v++) {
        double d = fabs((double)truth[v] - (double)own[v]);
        if (!(d <= out->max)) out->max = d;
    }
}

/* What all blocks gave. */
struct greedy_sum {
    int64_t rows;
    double kl, worst_kl, max;
    int32_t parted, far, flipped; /* prompts; those whose first parting is no near-tie; is one of
                                     experts */
    double gap, cost;             /* largest of all first partings at a near-tie of tokens */
};

static void larger(double *a, double b) {
    if (!(b <= *a)) *a = b;
}

/* A text's first row k at which another token came than the truth's. */
static void add_parting(const struct greedy *g, int32_t first, int32_t p, int32_t k,
                        struct greedy_sum *s) {
    const struct greedy_row *r = &g->rows[p * g->steps + k];
    const struct prompt *prompt = &g->prompts[p];
    s->parted++;
    printf("    prompt %d (%s, %d tokens) parts at token %d: gap %.3f, costs %.2g; row's KL %.2g, "
           "difference %.2g\n",
           first + p, prompt->kind, prompt->n, k, r->gap, r->cost, r->kl, r->max);
    if (!(r->cost <= NEAR_TIE)) {
        struct expert_tie tie;
        int32_t n = prompt->n + k, *ids = malloc((size_t)n * sizeof *ids);
        memcpy(ids, prompt->ids, (size_t)prompt->n * sizeof *ids);
        memcpy(ids + prompt->n, g->text + p * g->steps, (size_t)k * sizeof *ids);
        bool tied = tie_of_experts(g->b, ids, n, row_of(g, g->own, p, k), &tie);
        free(ids);
        printf("      experts of layer %d, %.2g of the scores apart: exchanged, a KL of %.2g is "
               "left\n",
               tie.layer, tie.gap, tie.kl);
        s->flipped += tied;
        s->far += !tied;
        if (tied) return;
    }
    larger(&s->gap, r->gap);
    larger(&s->cost, r->cost);
}

static void add_block(const struct greedy *g, int32_t first, struct greedy_sum *s) {
    for (int32_t p = 0; p < g->n; p++) {
        bool parted = false;
        for (int32_t k = 0; k < g->length[p]; k++) {
            const struct greedy_row *r = &g->rows[p * g->steps + k];
            s->rows++;
            s->kl += r->kl;
            larger(&s->worst_kl, r->kl);
            larger(&s->max, r->max);
            if (r->want == r->got || parted) continue;
            parted = true;
            add_parting(g, first, p, k, s);
        }
    }
}

static void note_sum(const struct greedy_sum *s, int32_t prompts) {
    char what[96];
    snprintf(what, sizeof what, "greedy: mean KL of %lld rows (worst %.2g, difference %.2g)",
             (long long)s->rows, s->worst_kl, s->max);
    note(what, s->rows ? s->kl / (double)s->rows : (double)NAN, 1e-3);
    snprintf(what, sizeof what, "greedy: %d of %d texts part, widest gap %.3f: largest tie cost",
             s->parted, prompts, s->gap);
    note(what, s->rows ? s->cost : (double)NAN, NEAR_TIE);
    record("greedy: texts that part at a near-tie of experts", s->flipped, "texts");
    note("greedy: texts that part at no near-tie", s->far, 0);
}

/* A text may part from the truth's where the truth itself is nearly undecided: where a
 * distribution that ties both tokens is closer to it than the mean divergence that is allowed. The
 * width of the gap alone says little: in flat logits of random weights 0.3 is less than in those of
 * a trained model 0.1. Or where two experts are nearly tied, and the truth with these two exchanged
 * agrees with the card (checks_ties.c). */
void check_greedy(const struct bench_model *b, int32_t prompts, int32_t steps) {
    bool one = b->truth != &backend_ref; /* others spread a step over the processors themselves */
    int workers = one ? 1 : processors();
    int32_t block = b->vocab > 100000 ? 16 : 256;
    struct prompts list = prompts_of(b, prompts, LONGEST);
    struct side x = side_open(b, b->cuda, "greedy", 1, NULL);
    struct side *t = calloc((size_t)workers, sizeof *t);
    struct greedy g = {.b = b, .truth = t, .steps = steps, .end = list.end};
    struct greedy_sum sum = {0};
    if (block > prompts) block = prompts;
    printf("greedy text of %d prompts\n", prompts);
    for (int i = 0; i < workers; i++) t[i] = side_open(b, b->truth, "greedy, truth", 1, NULL);
    g.length = calloc((size_t)block, sizeof *g.length);
    g.text = calloc((size_t)(block * steps), sizeof *g.text);
    g.rows = calloc((size_t)(block * steps), sizeof *g.rows);
    g.own = side_rows(b, block * steps);
    g.right = side_rows(b, block * steps);
    for (int32_t at = 0; at < prompts && !x.bad; at += block) {
        g.prompts = list.list + at;
        g.n = prompts - at < block ? prompts - at : block;
        write_texts(&g, &x);
        if (x.bad) break;
        in_parallel(g.n, workers, read_text, &g);
        in_parallel(g.n * steps, processors(), compare_rows, &g);
        add_block(&g, at, &sum);
    }
    for (int i = 0; i < workers; i++) x.bad = x.bad || t[i].bad;
    if (!x.bad) note_sum(&sum, prompts);
    for (int i = 0; i < workers; i++) side_close(&t[i]);
    side_close(&x);
    free(g.length);
    free(g.text);
    free(g.rows);
    free(g.own);
    free(g.right);
    free(t);
    prompts_free(&list);
}
