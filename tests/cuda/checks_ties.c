/* Whether a divergence comes from experts chosen otherwise. Two experts whose scores are nearly
 * equal may change places by the rounding of what came before, and then the row's output jumps by
 * what one expert adds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ref/ref.h"
#include "check.h"
#include "side.h"

/* ---- rows near a tie ------------------------------------------------------------------------- */

/* Rows are put in the order of their smallest gap, over all layers, between the eighth and the
 * ninth score of the truth, and the tenth with the smallest is told apart from the rest. It
 * explains and weakens nothing: the check is of all rows. */
struct ties {
    const struct bench_model *b;
    int32_t rows;
    float *inputs; /* [layers][rows][H] what the truth's routers were given */
};

struct ties *ties_new(const struct bench_model *b, int32_t rows) {
    struct ties *t = malloc(sizeof *t);
    size_t count = (size_t)b->w->layers * (size_t)rows * (size_t)b->w->shape->hidden;
    *t = (struct ties){.b = b, .rows = rows, .inputs = malloc(count * sizeof *t->inputs)};
    return t;
}

void ties_free(struct ties *t) {
    free(t->inputs);
    free(t);
}

static float *input(const struct ties *t, int32_t layer, int32_t row) {
    size_t at = (size_t)layer * (size_t)t->rows + (size_t)row;
    return t->inputs + at * (size_t)t->b->w->shape->hidden;
}

void ties_keep(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
               int32_t n) {
    struct ties *t = arg;
    if (stage != STAGE_POST_NORM || pos >= t->rows) return;
    memcpy(input(t, layer, pos), row, (size_t)n * sizeof *row);
}

struct tie_row {
    double gap, kl;
};
struct tie_rows {
    const struct ties *t;
    const float *truth, *own;
    struct tie_row *row;
};

static int falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x > y ? -1 : x < y;
}

static void look_at(void *arg, int32_t i, int worker) {
    const struct tie_rows *r = arg;
    const struct bench_model *b = r->t->b;
    const struct shape *s = b->w->shape;
    float *scores = malloc((size_t)s->experts * sizeof *scores);
    double gap = INFINITY;
    (void)worker;
    for (int32_t l = 0; l < b->w->layers; l++) {
        mat_vec(&b->w->layer[l].moe.router, input(r->t, l, i), scores);
        qsort(scores, (size_t)s->experts, sizeof *scores, falling);
        double here = (double)scores[s->top_k - 1] - (double)scores[s->top_k];
        if (here < gap) gap = here;
    }
    free(scores);
    size_t at = (size_t)i * (size_t)b->vocab;
    r->row[i] = (struct tie_row){gap, divergence(r->truth + at, r->own + at, b->vocab)};
}

static int by_gap(const void *a, const void *b) {
    double x = ((const struct tie_row *)a)->gap, y = ((const struct tie_row *)b)->gap;
    return x < y ? -1 : x > y;
}

void ties_tell(const struct ties *t, const float *truth, const float *own, int32_t n) {
    struct tie_row *row = malloc((size_t)n * sizeof *row);
    struct tie_rows r = {.t = t, .truth = truth, .own = own, .row = row};
    char what[96];
    in_parallel(n, processors(), look_at, &r);
    qsort(row, (size_t)n, sizeof *row, by_gap);
    int32_t tenth = (n + 9) / 10;
    double near = 0, rest = 0;
    for (int32_t i = 0; i < n; i++) *(i < tenth ? &near : &rest) += row[i].kl;
    snprintf(what, sizeof what, "prompt of %d: mean KL of the tenth nearest a tie (gap to %.2g)", n,
             row[tenth - 1].gap);
    record(what, near / tenth * 1e6, "millionths");
    snprintf(what, sizeof what, "prompt of %d: mean KL of the other rows", n);
    record(what, rest / (n - tenth) * 1e6, "millionths");
    free(row);
}

/* ---- one row with two experts exchanged ------------------------------------------------------ */

/* Of the scores' root mean square: what the rounding of a text before it may move a score by. */
static const double NEAR = 1e-2;

/* out = experts(in), as ref_moe; with `swap`, the ninth expert in the place of the eighth. Returns
 * how far their scores are apart, of the scores' root mean square. */
static double experts(const struct weights *w, int32_t layer, const float *in, bool swap,
                      float *out) {
    const struct shape *s = w->shape;
    const struct moe_weights *m = &w->layer[layer].moe;
    int32_t widest = s->expert_width > s->shared_width ? s->expert_width : s->shared_width;
    float *scores = malloc((size_t)s->experts * sizeof *scores), gate, routing[64];
    float *inner = malloc(2 * (size_t)widest * sizeof *inner);
    float *part = malloc((size_t)s->hidden * sizeof *part);
    int32_t order[512] = {0};
    double squares = 0;
    mat_vec(&m->router, in, scores);
    for (int32_t e = 0; e < s->experts; e++) {
        int32_t at = e; /* descending, ties to the lower number */
        for (; at > 0 && scores[order[at - 1]] < scores[e]; at--) order[at] = order[at - 1];
        order[at] = e;
        squares += (double)scores[e] * (double)scores[e];
    }
    int32_t eighth = order[s->top_k - 1], ninth = order[s->top_k];
    double gap = (double)scores[eighth] - (double)scores[ninth];
    gap /= sqrt(squares / s->experts);
    if (swap) {
        float high = scores[eighth];
        scores[eighth] = scores[ninth] - 1e-6f * fabsf(scores[ninth]);
        scores[ninth] = high;
    }
    ref_route(scores, s->experts, s->top_k, routing);
    memset(out, 0, (size_t)s->hidden * sizeof *out);
    mat_vec(&m->shared_gate, in, &gate);
    for (int32_t j = 0; j <= s->top_k; j++) {
        bool routed = j < s->top_k;
        int32_t e = routed ? (int32_t)routing[j] : 0;
        const struct mat *first = routed ? &m->gate[e] : &m->shared_gate_proj;
        float weight = routed ? routing[s->top_k + j] : ref_sigmoid(gate);
        mat_vec(first, in, inner);
        mat_vec(routed ? &m->up[e] : &m->shared_up_proj, in, inner + first->rows);
        for (int32_t i = 0; i < first->rows; i++) {
            inner[i] = ref_silu(inner[i]) * inner[first->rows + i];
        }
        mat_vec(routed ? &m->down[e] : &m->shared_down_proj, inner, part);
        for (int32_t i = 0; i < s->hidden; i++) out[i] += weight * part[i];
    }
    free(scores);
    free(inner);
    free(part);
    return gap;
}

/* The text's last token by ref, with the exchange in one layer (-1: in none); gaps [layers]. */
static void last_row(const struct bench_model *b, const int32_t *ids, int32_t n, int32_t swapped,
                     double *gaps, float *logits) {
    const struct shape *s = b->w->shape;
    struct bench_model short_text = *b;
    short_text.context = n + 1;
    struct side t = side_open(&short_text, &backend_ref, "ties, ref", 1, NULL);
    size_t row = (size_t)s->hidden;
    float *h = calloc(3 * row, sizeof *h), *normed = h + row, *out = normed + row;
    if (n > 1) side_feed_ids(&short_text, &t, 0, ids, n - 1, 4096, NULL, NULL);
    ref_embed(b->w, ids[n - 1], h);
    for (int32_t l = 0; l < b->w->layers && !t.bad; l++) {
        const struct layer_weights *w = &b->w->layer[l];
        struct ref_scratch *x = &t.m->x;
        ref_rope_angles(t.m->inv_freq, n - 1, s->rotary_dim / 2, x->rope_cos, x->rope_sin);
        ref_rms_norm(h, w->input_norm, normed, s->hidden, s->norm_eps);
        if (shape_is_attention(s, l))
            ref_attention(t.s[0], l, normed, out);
        else
            ref_deltanet(t.s[0], l, normed, out);
        for (int32_t i = 0; i < s->hidden; i++) h[i] += out[i];
        ref_rms_norm(h, w->post_norm, normed, s->hidden, s->norm_eps);
        double gap = experts(b->w, l, normed, l == swapped, out);
        if (gaps) gaps[l] = gap;
        for (int32_t i = 0; i < s->hidden; i++) h[i] += out[i];
    }
    ref_rms_norm(h, b->w->final_norm, normed, s->hidden, s->norm_eps);
    ref_logits(b->w, normed, logits);
    free(h);
    side_close(&t);
}

bool tie_of_experts(const struct bench_model *b, const int32_t *ids, int32_t n, const float *own,
                    struct expert_tie *tie) {
    float *logits = side_rows(b, 1);
    double *gaps = calloc((size_t)b->w->layers, sizeof *gaps);
    last_row(b, ids, n, -1, gaps, logits);
    *tie = (struct expert_tie){.layer = -1, .kl = divergence(logits, own, b->w->vocab_used)};
    for (int32_t l = 0; l < b->w->layers; l++) {
        if (gaps[l] > NEAR) continue;
        last_row(b, ids, n, l, NULL, logits);
        double kl = divergence(logits, own, b->w->vocab_used);
        if (kl < tie->kl) *tie = (struct expert_tie){.layer = l, .gap = gaps[l], .kl = kl};
    }
    free(gaps);
    free(logits);
    return tie->layer >= 0 && tie->kl <= NEAR_TIE;
}
