/* Whether a divergence comes from experts chosen otherwise. Two experts whose scores are nearly
 * equal may change places by the rounding of a prompt's activations, and then the row's output
 * jumps by what one expert adds. Rows are put in the order of their smallest gap, over all layers,
 * between the eighth and the ninth score of the truth, and the tenth with the smallest is told
 * apart from the rest. It explains and weakens nothing: the check is of all rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "side.h"

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
