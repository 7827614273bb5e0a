/* Every stage of every layer beside ref's, from the same input: ref is given what the card's own
 * stage was given, so that a stage answers for its own rounding and not for what came in. (Errors
 * that came in can double: attention over random keys weighs values that nearly cancel.) What all
 * stages together make of a text is told by the checks of logits.
 *
 * With a trace the portable kernels run, one launch a stage; the kernels of 9.0 fuse stages and
 * are held to plain arithmetic by decode_bench and prefill_bench, and as a whole by logits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ref/ref.h"
#include "check.h"
#include "side.h"

/* Relative error of a stage (design, numeric contract): bf16 activations and weights in prompts,
 * float32 in decoding. There attention reads keys and values that were rounded to bf16, by at most
 * 2^-9 each: the keys' rounding moves scores of unit size by as much. */
static const double ROUNDED = 1e-2, EXACT = 1e-4, KEYS = 2.0 / 512;
/* Share of experts chosen otherwise from the same input: near-ties alone. */
static const double FLIPS = 1e-2;

/* ---- the card's rows ------------------------------------------------------------------------- */

/* Rows by stage, layer and position; owned. */
struct stage_rows {
    float **row;    /* [STAGE_COUNT][layers + 1][n], layer -1 first */
    int32_t *width; /* likewise */
    int32_t layers, n;
};

static size_t place(const struct stage_rows *r, enum stage s, int32_t layer, int32_t pos) {
    size_t group = (size_t)s * (size_t)(r->layers + 1) + (size_t)(layer + 1);
    return group * (size_t)r->n + (size_t)pos;
}

static void keep_row(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                     int32_t n) {
    struct stage_rows *r = arg;
    if (stage == STAGE_LOGITS || pos >= r->n) return;
    size_t at = place(r, stage, layer, pos);
    if (!r->row[at]) r->row[at] = malloc((size_t)n * sizeof(float));
    memcpy(r->row[at], row, (size_t)n * sizeof(float));
    r->width[at] = n;
}

/* The text's first n tokens with a trace: as a prompt, or token by token. */
static struct stage_rows traced(const struct bench_model *b, int32_t n, bool by_decode) {
    struct stage_rows r = {.layers = b->w->layers, .n = n};
    size_t count = place(&r, STAGE_COUNT, -1, 0);
    r.row = calloc(count, sizeof *r.row);
    r.width = calloc(count, sizeof *r.width);
    struct backend_options o = {.trace = keep_row, .trace_arg = &r};
    struct side x = side_open(b, b->cuda, "stages", 1, &o);
    if (by_decode) {
        float *logits = side_rows(b, 1);
        for (int32_t i = 0; i < n; i++) side_decode(&x, 0, token_at(i, b->w->vocab_used), logits);
        free(logits);
    } else {
        side_feed(b, &x, 0, 0, n, n, NULL, NULL);
    }
    side_close(&x);
    return r;
}

static void rows_free(struct stage_rows *r) {
    for (size_t i = 0; i < place(r, STAGE_COUNT, -1, 0); i++) free(r->row[i]);
    free(r->row);
    free(r->width);
}

/* ---- ref from the same input ----------------------------------------------------------------- */

/* One text's comparison; error: as stage_rows.row, negative where there is no such stage. */
struct stage_check {
    const struct bench_model *b;
    struct stage_rows own;
    double *error;
};

/* Root of the mean square of the difference over that of the truth. For routing: the share of
 * chosen experts that the other did not choose. */
static double distance(enum stage stage, const float *truth, const float *x, int32_t n) {
    double d = 0, s = 0;
    if (stage == STAGE_ROUTER) {
        for (int32_t i = 0; i < n / 2; i++) {
            bool found = false;
            for (int32_t j = 0; j < n / 2; j++) found = found || truth[i] == x[j];
            d += !found;
        }
        return d / (n / 2);
    }
    for (int32_t i = 0; i < n; i++) {
        double e = (double)truth[i] - (double)x[i];
        d += e * e;
        s += (double)truth[i] * (double)truth[i];
    }
    return s > 0 ? sqrt(d / s) : sqrt(d);
}

/* Ref's row beside the card's. A row that the card did not report is an error of its own. */
static void hold(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                 int32_t n) {
    struct stage_check *c = arg;
    size_t at = place(&c->own, stage, layer, pos);
    bool there = c->own.row[at] && c->own.width[at] == n;
    c->error[at] = there ? distance(stage, row, c->own.row[at], n) : (double)NAN;
}

static const float *own_row(const struct stage_check *c, enum stage s, int32_t layer, int32_t pos) {
    return c->own.row[place(&c->own, s, layer, pos)];
}

/* One token of one layer: each stage from the card's own rows before it. */
static void hold_layer(struct stage_check *c, struct backend_session *s, int32_t l, float *h,
                       float *out) {
    const struct shape *sh = c->b->w->shape;
    const struct layer_weights *w = &c->b->w->layer[l];
    int32_t p = s->position, n = sh->hidden;
    const float *before = own_row(c, l ? STAGE_LAYER_OUT : STAGE_EMBED, l - 1, p);
    const float *normed = own_row(c, STAGE_INPUT_NORM, l, p);
    const float *mixed = own_row(c, STAGE_MIXER_OUT, l, p);
    const float *post = own_row(c, STAGE_POST_NORM, l, p);
    const float *routed = own_row(c, STAGE_EXPERTS, l, p), *always = own_row(c, STAGE_SHARED, l, p);
    if (!before || !normed || !mixed || !post || !routed || !always) {
        hold(c, STAGE_LAYER_OUT, l, p, h, -1); /* missing */
        return;
    }
    ref_rms_norm(before, w->input_norm, out, n, sh->norm_eps);
    hold(c, STAGE_INPUT_NORM, l, p, out, n);
    if (shape_is_attention(sh, l))
        ref_attention(s, l, normed, out);
    else
        ref_deltanet(s, l, normed, out);
    hold(c, STAGE_MIXER_OUT, l, p, out, n);
    for (int32_t i = 0; i < n; i++) h[i] = before[i] + mixed[i];
    ref_rms_norm(h, w->post_norm, out, n, sh->norm_eps);
    hold(c, STAGE_POST_NORM, l, p, out, n);
    ref_moe(s, l, post, out);
    for (int32_t i = 0; i < n; i++) h[i] += routed[i] + always[i];
    hold(c, STAGE_LAYER_OUT, l, p, h, n);
}

static void hold_positions(void *arg, int32_t l, int worker) {
    struct stage_check *c = arg;
    const struct shape *sh = c->b->w->shape;
    struct backend_options o = {.trace = hold, .trace_arg = c};
    struct bench_model short_text = *c->b;
    short_text.context = c->own.n;
    struct side t = side_open(&short_text, &backend_ref, "stages, ref", 1, &o);
    float *rows = calloc(2 * (size_t)sh->hidden, sizeof *rows);
    (void)worker;
    for (int32_t p = 0; p < c->own.n && !t.bad; p++) {
        struct ref_scratch *x = &t.m->x;
        t.s[0]->position = p;
        ref_rope_angles(t.m->inv_freq, p, sh->rotary_dim / 2, x->rope_cos, x->rope_sin);
        if (l == 0) {
            ref_embed(c->b->w, token_at(p, c->b->w->vocab_used), rows);
            hold(c, STAGE_EMBED, -1, p, rows, sh->hidden);
        }
        hold_layer(c, t.s[0], l, rows, rows + sh->hidden);
    }
    free(rows);
    side_close(&t);
}

/* ---- the check ------------------------------------------------------------------------------- */

static double limit_of(const struct bench_model *b, enum stage s, int32_t layer, bool by_decode) {
    if (s == STAGE_EMBED) return 0;
    if (s == STAGE_ROUTER) return FLIPS;
    if (!by_decode) return ROUNDED;
    bool keys =
        s == STAGE_ATTN_MIX || (s == STAGE_MIXER_OUT && shape_is_attention(b->w->shape, layer));
    return keys ? KEYS : EXACT;
}

/* The layer where the stage is nearest its limit: the median over rows (a row whose routing
 * flipped is another row), of routing the mean. */
static void note_stage(const struct stage_check *c, enum stage s, bool by_decode) {
    int32_t n = c->own.n, where = -2;
    double *v = malloc((size_t)n * sizeof *v), value = 0, limit = 1, worst = 0;
    char what[96];
    for (int32_t l = -1; l < c->own.layers; l++) {
        const double *e = c->error + place(&c->own, s, l, 0);
        double sum = 0, most = limit_of(c->b, s, l, by_decode);
        if (e[0] < 0) continue; /* no such stage in this layer */
        for (int32_t p = 0; p < n; p++) {
            v[p] = e[p];
            sum += e[p];
            if (!(e[p] <= worst)) worst = e[p];
        }
        double here = s == STAGE_ROUTER || isnan(sum) ? sum / n : median(v, n);
        if (where > -2 && (isnan(value) || here * limit <= value * most)) continue;
        value = here, limit = most, where = l;
    }
    free(v);
    if (where == -2) return;
    snprintf(what, sizeof what, "%s, %s, layer %d: %s (any row %.2g)",
             by_decode ? "decode" : "prompt", stage_name(s), where,
             s == STAGE_ROUTER ? "experts chosen otherwise" : "median error", worst);
    note(what, value, limit);
}

void check_stages(const struct bench_model *b, int32_t n, bool by_decode) {
    struct stage_check c = {.b = b};
    printf("stages of %d tokens %s\n", n, by_decode ? "decoded" : "of a prompt");
    c.own = traced(b, n, by_decode);
    size_t count = place(&c.own, STAGE_COUNT, -1, 0);
    c.error = malloc(count * sizeof *c.error);
    for (size_t i = 0; i < count; i++) c.error[i] = -1;
    in_parallel(b->w->layers, processors(), hold_positions, &c);
    for (int s = 0; s < STAGE_FINAL_NORM; s++) note_stage(&c, (enum stage)s, by_decode);
    free(c.error);
    rows_free(&c.own);
}
