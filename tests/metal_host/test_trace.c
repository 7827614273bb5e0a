/* Stage by stage against ref: what the device computes in each stage of each layer, for rows that
 * prefill and decode bring. Both run the whole model, so that differences grow with depth; a stage
 * that is wrong stands out by orders of magnitude. */
#include <math.h>

#include "harness.h"

enum { ROWS = 40, DECODED = 3, LAYERS = 8, WIDEST = 4096 };

/* Rows of one stage and layer as a backend reported them. */
struct stage_rows {
    float *row[ROWS + DECODED];
    int32_t n;
};
struct record {
    struct stage_rows at[LAYERS + 1][STAGE_COUNT]; /* layer -1 is 0 */
};
static struct record right, mine;

static void note(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                 int32_t n) {
    struct stage_rows *rows = &((struct record *)arg)->at[layer + 1][stage];
    assert_true(pos >= 0 && pos < ROWS + DECODED);
    free(rows->row[pos]);
    rows->row[pos] = malloc((size_t)n * sizeof *row);
    memcpy(rows->row[pos], row, (size_t)n * sizeof *row);
    rows->n = n;
}

/* Root of the squared error over the squared size. */
static double relative(const float *a, const float *b, int32_t n) {
    double error = 0, size = 0;
    for (int32_t i = 0; i < n; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)a[i] * (double)a[i];
    }
    return sqrt(error / (size + 1e-30));
}

static bool same_experts(const float *a, const float *b) {
    for (int32_t i = 0; i < 8; i++) {
        if (a[i] != b[i]) return false;
    }
    return true;
}

struct worst {
    double first, any; /* in the first two layers; anywhere */
    int32_t rows, flips;
};

static struct worst compare(enum stage stage, int32_t from, int32_t to) {
    struct worst w = {0};
    for (int32_t l = 0; l <= LAYERS; l++) {
        const struct stage_rows *a = &right.at[l][stage], *b = &mine.at[l][stage];
        for (int32_t i = from; i < to; i++) {
            if (!a->row[i] || !b->row[i]) continue;
            assert_int_equal(a->n, b->n);
            w.rows++;
            if (stage == STAGE_ROUTER && !same_experts(a->row[i], b->row[i])) {
                w.flips++;
                continue;
            }
            int32_t skip = stage == STAGE_ROUTER ? 8 : 0;
            double error = relative(a->row[i] + skip, b->row[i] + skip, a->n - skip);
            w.any = fmax(w.any, error);
            if (l <= 2) w.first = fmax(w.first, error);
        }
    }
    return w;
}

static void feed(const struct backend *b, const struct weights *w, struct record *r) {
    struct backend_options o = {
        .threads = 1, .max_sessions = 1, .max_context = 64, .trace = note, .trace_arg = r};
    struct bench x = bench_open(b, w, &o);
    float *logits = calloc((size_t)w->shape->vocab, sizeof *logits);
    int32_t ids[ROWS + DECODED];
    for (int32_t i = 0; i < ROWS + DECODED; i++) ids[i] = 100 + i * 37 % 3000;
    bench_prefill(&x, ids, ROWS, logits);
    for (int32_t i = ROWS; i < ROWS + DECODED; i++) bench_step(&x, ids[i], NULL, 0, logits);
    bench_close(&x);
    free(logits);
}

static void stages_are_those_of_ref(void **state) {
    (void)state;
    const struct weights *w = ckpt_weights(stand_in());
    emulate(false, 0);
    feed(&backend_ref, w, &right);
    feed(&backend_metal, w, &mine);
    for (int32_t s = 0; s < STAGE_COUNT; s++) {
        struct worst p = compare((enum stage)s, 0, ROWS),
                     d = compare((enum stage)s, ROWS, ROWS + DECODED);
        printf("%-11s prefill: %4d rows, %.1e first layers, %.1e any, %d flips; decode: %3d rows, "
               "%.1e, %.1e, %d\n",
               stage_name((enum stage)s), p.rows, p.first, p.any, p.flips, d.rows, d.first, d.any,
               d.flips);
        if (p.rows) figure("stage error prompt", p.first);
        if (d.rows) figure("stage error decoded", d.first);
        assert_true(p.first < 2e-2 && d.first < 2e-2);
        assert_true(p.flips * 20 <= p.rows && d.flips * 10 <= d.rows);
    }
    nothing_found();
}

int main(int argc, char **argv) {
    harness_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_are_those_of_ref),
    };
    return cmocka_run_group_tests_name("metal trace", tests, NULL, NULL);
}
