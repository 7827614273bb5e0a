/* Every stage's output, layer by layer, beside the truth's.
 *
 * Distances grow along a model: what enters a stage is already off, and the stage adds its own. A
 * stage of random weights can double what enters (attention at first weighs values that nearly
 * cancel), so that no one number suits all stages. What a stage may do is therefore taken from the
 * truth itself, run once more with a disturbed embedding: a stage is allowed the error that entered
 * its layer, times what the truth's own stage made of the disturbance, plus a rounding of its own.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "check.h"
#include "side.h"

/* A stage's own rounding: activations and weights in bf16 (design, numeric contract). */
static const double OWN_ROUNDING = 1e-2;
/* Decoding is float32 but for keys and values. */
static const double DECODED = 4e-3, DECODED_FLIPS = 2e-2;

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

/* Runs the text's first n tokens with a trace: as a prompt, or token by token. */
static void traced(const struct bench_model *t, const struct backend *b, struct trace *trace,
                   int32_t n, bool by_decode) {
    struct backend_options o = {.trace = keep_row, .trace_arg = trace};
    struct side x = side_open(t, b, "stages", 1, &o);
    if (by_decode) {
        float *logits = side_rows(t, 1);
        for (int32_t i = 0; i < n; i++) side_decode(&x, 0, token_at(i, t->w->vocab_used), logits);
        free(logits);
    } else {
        side_feed(t, &x, 0, 0, n, n, NULL, NULL);
    }
    side_close(&x);
    qsort(trace->rows, trace->n, sizeof *trace->rows, order);
}

/* ---- distances of one layer's stage ---------------------------------------------------------- */

/* [STAGE_COUNT][layers + 1], layer -1 first: medians over rows (means of routing). A row whose
 * routing flipped is another row: hence the median. */
struct distances {
    double *of, worst[STAGE_COUNT];
    int32_t layers, missing;
};

static double *distance_at(const struct distances *d, enum stage s, int32_t layer) {
    return &d->of[(int32_t)s * (d->layers + 1) + layer + 1];
}

static void add_group(struct distances *d, const struct trace_row *first, double *v, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += v[i];
        if (!(v[i] <= d->worst[first->stage])) d->worst[first->stage] = v[i];
    }
    double middle = isfinite(sum) ? median(v, n) : (double)NAN;
    *distance_at(d, first->stage, first->layer) = first->stage == STAGE_ROUTER ? sum / n : middle;
}

static struct distances distances_of(const struct bench_model *b, const struct trace *truth,
                                     const struct trace *own) {
    struct distances d = {.layers = b->w->layers};
    double *v = malloc((truth->n + 1) * sizeof *v);
    int n = 0;
    d.of = calloc((size_t)STAGE_COUNT * (size_t)(d.layers + 1), sizeof *d.of);
    for (size_t i = 0, j = 0; i < truth->n; i++) {
        const struct trace_row *x = &truth->rows[i], *next = i + 1 < truth->n ? x + 1 : NULL;
        while (j < own->n && order(&own->rows[j], x) < 0) j++;
        if (x->stage == STAGE_FINAL_NORM) continue;
        if (j == own->n || order(&own->rows[j], x) != 0 || own->rows[j].n != x->n)
            d.missing++;
        else
            v[n++] = distance(x, &own->rows[j], b->w->shape->top_k);
        if (n && (!next || next->stage != x->stage || next->layer != x->layer)) {
            add_group(&d, x, v, n);
            n = 0;
        }
    }
    free(v);
    return d;
}

/* ---- the truth, disturbed -------------------------------------------------------------------- */

/* Every scale and bias of the embedding up or down to the next bf16. */
static uint16_t *disturbed(const uint16_t *from, size_t n, uint64_t seed) {
    uint16_t *out = malloc(n * sizeof *out);
    for (size_t i = 0; i < n; i++) {
        int step = random_at(seed, i) >> 63 ? 1 : -1;
        out[i] = (uint16_t)((from[i] & 0x7fff) < 2 ? from[i] : from[i] + step);
    }
    return out;
}

static struct distances disturbance(const struct bench_model *b, const struct trace *truth,
                                    int32_t n) {
    struct weights w = *b->w;
    struct bench_model t = *b;
    struct trace trace = {0};
    size_t groups = (size_t)w.embed.rows * (size_t)w.embed.cols / 64;
    uint16_t *scales = disturbed(w.embed.scales, groups, 1);
    uint16_t *biases = disturbed(w.embed.biases, groups, 2);
    w.embed.scales = scales;
    w.embed.biases = biases;
    t.w = &w;
    traced(&t, b->truth, &trace, n, false);
    struct distances d = distances_of(b, truth, &trace);
    free_trace(&trace);
    free(scales);
    free(biases);
    return d;
}

/* What a stage hands on: the stage whose error enters it, in the same layer or the one before. */
static enum stage source_of(enum stage s) {
    if (s == STAGE_INPUT_NORM) return STAGE_LAYER_OUT;
    if (s <= STAGE_MIXER_OUT || s == STAGE_POST_NORM) return STAGE_INPUT_NORM;
    return STAGE_POST_NORM;
}

static double allowed(const struct distances *own, const struct distances *moved, enum stage s,
                      int32_t layer) {
    enum stage from = source_of(s);
    int32_t at = s == STAGE_INPUT_NORM ? layer - 1 : layer;
    if (at < 0) return OWN_ROUNDING; /* the embedding row itself is exact */
    double in = *distance_at(own, from, at), shift = *distance_at(moved, from, at);
    return OWN_ROUNDING + in / shift * *distance_at(moved, s, layer);
}

/* ---- the check ------------------------------------------------------------------------------- */

/* The layer where the stage is nearest its limit. */
static void note_stage(const struct distances *own, const struct distances *moved, enum stage s) {
    double value = 0, limit = 1;
    int32_t where = -1;
    bool seen = false;
    char what[96];
    for (int32_t l = -1; l < own->layers; l++) {
        double v = *distance_at(own, s, l), most = s == STAGE_ROUTER ? DECODED_FLIPS : DECODED;
        if (moved) most = s == STAGE_EMBED ? 0 : allowed(own, moved, s, l);
        if ((l < 0) != (s == STAGE_EMBED) || (v == 0 && s != STAGE_ROUTER && l >= 0)) continue;
        if (seen && (isnan(value / limit) || v / most <= value / limit)) continue;
        value = v, limit = most, where = l, seen = true;
    }
    if (!seen) return;
    snprintf(what, sizeof what, "%s %s, layer %d: %s (any row %.2g)", moved ? "prompt" : "decode",
             stage_name(s), where,
             s == STAGE_ROUTER ? "share of experts chosen otherwise" : "median distance",
             own->worst[s]);
    note(what, value, limit);
}

void check_stages(const struct bench_model *b, int32_t n, bool by_decode) {
    struct trace truth = {0}, own = {0};
    struct distances moved = {.of = NULL};
    printf("stages of %d tokens %s\n", n, by_decode ? "decoded" : "of a prompt");
    traced(b, b->truth, &truth, n, by_decode);
    traced(b, b->cuda, &own, n, by_decode);
    struct distances d = distances_of(b, &truth, &own);
    if (!by_decode) moved = disturbance(b, &truth, n);
    note("rows of stages that are missing", d.missing, 0);
    for (int s = 0; s < STAGE_LOGITS; s++) {
        if (s != STAGE_FINAL_NORM) note_stage(&d, by_decode ? NULL : &moved, (enum stage)s);
    }
    free(d.of);
    free(moved.of);
    free_trace(&truth);
    free_trace(&own);
}
