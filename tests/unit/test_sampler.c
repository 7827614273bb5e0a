/* The sampler against an independent computation: full sorts in double precision, chi-square on
 * many draws, and exact supports on logits whose right answer is obvious. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../cpu_clock.h"
#include "engine/sampler.h"

static const lily_sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

static struct sampler *make(int32_t used) {
    struct sampler *s;
    lily_err err;
    assert_int_equal(sampler_new(&(struct sampler_vocab){.used = used}, &s, &err), 0);
    return s;
}

static void begin(struct sampler *s, const lily_sampling *p) {
    lily_err err = {0};
    if (sampler_begin(s, p, NULL, 0, &err)) fail_msg("%s", err.msg);
}

/* Deterministic values in [-1, 1). */
static float noise(uint32_t i) {
    uint32_t x = i * 2654435761u + 12345;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x >> 8) * 0x1p-23f - 1;
}

struct entry {
    double z;
    int32_t id;
};

static int by_rank(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    if (x->z != y->z) return x->z < y->z ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

/* The distribution the header promises, by sorting: p[n] of logits[n] after output[n_output]. */
static void reference(const float *logits, int32_t n, const lily_sampling *q, const int32_t *prompt,
                      int32_t n_prompt, const int32_t *output, int32_t n_output, double *p) {
    struct entry *e = malloc((size_t)n * sizeof *e);
    for (int32_t i = 0; i < n; i++) {
        double x = (double)logits[i];
        int outputs = 0, present = 0;
        for (int32_t j = 0; j < n_output; j++) outputs += output[j] == i;
        for (int32_t j = 0; j < n_prompt; j++) present |= prompt[j] == i;
        double r = (double)q->repetition_penalty;
        if (outputs || present) x = x > 0 ? x / r : x * r;
        x -= (double)q->frequency_penalty * outputs;
        x -= outputs ? (double)q->presence_penalty : 0;
        for (int32_t j = 0; j < q->n_bias; j++) {
            if (q->bias_ids[j] == i) x += (double)q->bias[j];
        }
        e[i] = (struct entry){x / (double)q->temperature, i};
        p[i] = 0;
    }
    qsort(e, (size_t)n, sizeof *e, by_rank);
    int32_t kept = q->top_k > 0 && q->top_k < n ? q->top_k : n;
    double total = 0, mass = 0;
    for (int32_t i = 0; i < kept; i++) total += exp(e[i].z - e[0].z);
    int32_t by_p = 0;
    while (by_p < kept && (by_p == 0 || mass < (double)q->top_p * total)) {
        mass += exp(e[by_p++].z - e[0].z);
    }
    if (q->top_p < 1) kept = by_p;
    while (kept > 1 && exp(e[kept - 1].z - e[0].z) < (double)q->min_p) kept--;
    total = 0;
    for (int32_t i = 0; i < kept; i++) total += exp(e[i].z - e[0].z);
    for (int32_t i = 0; i < kept; i++) p[e[i].id] = exp(e[i].z - e[0].z) / total;
    free(e);
}

/* The value that a chi-square with df degrees of freedom exceeds with probability 1e-4
 * (Wilson and Hilferty's approximation; 3.719 is the normal quantile). */
static double chi_square_limit(int df) {
    double c = 2.0 / (9.0 * df);
    return df * pow(1 - c + 3.719 * sqrt(c), 3);
}

/* Draws once from each of many sequences that differ in their seed only, so that the history stays
 * what the case says, and compares the counts with the reference distribution. */
static void check_distribution(const float *logits, int32_t n, const lily_sampling *q,
                               const int32_t *prompt, int32_t n_prompt, const int32_t *output,
                               int32_t n_output) {
    enum { DRAWS = 20000 };
    struct sampler *s = make(n);
    double *p = malloc((size_t)n * sizeof *p);
    int *count = calloc((size_t)n, sizeof *count);
    float *forced = malloc((size_t)n * sizeof *forced);
    reference(logits, n, q, prompt, n_prompt, output, n_output, p);
    for (int i = 0; i < DRAWS; i++) {
        lily_sampling seeded = *q;
        lily_err err;
        seeded.seed = (uint64_t)i;
        assert_int_equal(sampler_begin(s, &seeded, prompt, (size_t)n_prompt, &err), 0);
        for (int32_t j = 0; j < n_output; j++) { /* logits that leave no choice */
            for (int32_t k = 0; k < n; k++) forced[k] = k == output[j] ? 5000 : -5000;
            assert_int_equal(sampler_pick(s, forced), output[j]);
        }
        int32_t id = sampler_pick(s, logits);
        assert_in_range(id, 0, n - 1);
        count[id]++;
    }
    double chi = 0, rest = 0;
    int df = -1, rest_count = 0;
    for (int32_t i = 0; i < n; i++) {
        if (p[i] == 0) assert_int_equal(count[i], 0);
        double expected = p[i] * DRAWS;
        if (expected < 5) { /* rare ones are judged together */
            rest += expected;
            rest_count += count[i];
            continue;
        }
        chi += (count[i] - expected) * (count[i] - expected) / expected;
        df++;
    }
    if (rest > 5) {
        chi += (rest_count - rest) * (rest_count - rest) / rest;
        df++;
    }
    if (df > 0 && chi > chi_square_limit(df)) {
        fail_msg("chi-square %.1f with %d degrees of freedom, expected below %.1f", chi, df,
                 chi_square_limit(df));
    }
    free(forced);
    free(count);
    free(p);
    sampler_free(s);
}

static void test_distributions(void **state) {
    (void)state;
    float logits[12];
    for (uint32_t i = 0; i < 12; i++) logits[i] = 2 * noise(i);
    lily_sampling q = plain;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.temperature = 0.6f;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.top_k = 5;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.top_p = 0.7f;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.top_k = 0;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.top_p = 1, q.min_p = 0.2f;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
    q.top_p = 0.95f, q.top_k = 9, q.temperature = 1.7f, q.min_p = 0.05f;
    check_distribution(logits, 12, &q, NULL, 0, NULL, 0);
}

static void test_penalties_and_bias(void **state) {
    (void)state;
    float logits[10];
    for (uint32_t i = 0; i < 10; i++) logits[i] = 2 * noise(100 + i);
    const int32_t prompt[] = {1, 1, 2, 7}, output[] = {2, 3, 3, 3};
    lily_sampling q = plain;
    q.presence_penalty = 1.5f;
    check_distribution(logits, 10, &q, prompt, 4, output, 4);
    q.frequency_penalty = -0.4f;
    check_distribution(logits, 10, &q, prompt, 4, output, 4);
    q.repetition_penalty = 1.4f;
    check_distribution(logits, 10, &q, prompt, 4, output, 4);
    const int32_t ids[] = {3, 9};
    const float bias[] = {2.5f, -1};
    q.bias_ids = ids, q.bias = bias, q.n_bias = 2, q.top_k = 6, q.temperature = 0.8f;
    check_distribution(logits, 10, &q, prompt, 4, output, 4);
}

/* A larger vocabulary takes the paths that skip blocks and partition. */
static void test_large_vocabulary(void **state) {
    (void)state;
    enum { V = 700 };
    float logits[V];
    for (uint32_t i = 0; i < V; i++) logits[i] = 3 * noise(i) + 3 * noise(i + 7777);
    lily_sampling q = plain;
    q.top_k = 20, q.top_p = 0.95f;
    check_distribution(logits, V, &q, NULL, 0, NULL, 0);
    q.top_k = 300, q.top_p = 1;
    check_distribution(logits, V, &q, NULL, 0, NULL, 0);
    q.top_k = 0, q.top_p = 0.8f;
    check_distribution(logits, V, &q, NULL, 0, NULL, 0);
}

/* Which ids come up in many draws of one sequence without penalties. */
static int32_t support(struct sampler *s, const lily_sampling *q, const float *logits, int32_t n,
                       bool *hit) {
    memset(hit, 0, (size_t)n * sizeof *hit);
    begin(s, q);
    int32_t distinct = 0;
    for (int i = 0; i < 20000; i++) {
        int32_t id = sampler_pick(s, logits);
        distinct += !hit[id];
        hit[id] = true;
    }
    return distinct;
}

/* Equal logits: every filter must keep the lowest ids, and exactly as many as it says. */
static void test_ties_go_to_lower_ids(void **state) {
    (void)state;
    enum { V = 1000 };
    float *logits = calloc(V, sizeof *logits);
    bool hit[V];
    struct sampler *s = make(V);
    const int32_t ks[] = {1, 2, 63, 64, 65, 255, 256, 257, 600, 999};
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
        lily_sampling q = plain;
        q.top_k = ks[i];
        assert_int_equal(support(s, &q, logits, V, hit), ks[i]);
        assert_true(hit[0] && hit[ks[i] - 1] && !hit[ks[i]]);
    }
    const struct {
        float top_p;
        int32_t n;
    } ps[] = {{0, 1}, {0.0005f, 1}, {0.25f, 250}, {0.5f, 500}, {0.75f, 750}};
    for (size_t i = 0; i < sizeof ps / sizeof *ps; i++) {
        lily_sampling q = plain;
        q.top_p = ps[i].top_p;
        assert_int_equal(support(s, &q, logits, V, hit), ps[i].n);
        assert_true(hit[0] && hit[ps[i].n - 1] && !hit[ps[i].n]);
    }
    lily_sampling both = plain; /* top_p counts within what top_k left */
    both.top_k = 500, both.top_p = 0.5f;
    assert_int_equal(support(s, &both, logits, V, hit), 250);
    free(logits);
    sampler_free(s);
}

static void test_greedy(void **state) {
    (void)state;
    enum { V = 5000 };
    float *logits = malloc(V * sizeof *logits);
    struct sampler *s = make(V);
    lily_sampling q = plain;
    for (uint32_t round = 0; round < 300; round++) {
        int32_t best = 0;
        for (uint32_t i = 0; i < V; i++) { /* coarse values, so that there are many ties */
            logits[i] = floorf(8 * noise(i * 31 + round * 131071));
            if (logits[i] > logits[best]) best = (int32_t)i;
        }
        q.temperature = round % 2 ? 0 : 0.9e-5f;
        q.seed = round;
        begin(s, &q);
        assert_int_equal(sampler_pick(s, logits), best);
        q.temperature = 1, q.top_k = 1; /* the same by another road */
        begin(s, &q);
        assert_int_equal(sampler_pick(s, logits), best);
        q.top_k = 0, q.top_p = 0;
        begin(s, &q);
        assert_int_equal(sampler_pick(s, logits), best);
        q = plain;
    }
    free(logits);
    sampler_free(s);
}

static void test_seeds(void **state) {
    (void)state;
    enum { V = 64, N = 200 };
    float logits[V] = {0};
    int32_t first[N];
    struct sampler *s = make(V);
    lily_sampling q = plain;
    q.seed = 42;
    begin(s, &q);
    assert_int_equal(sampler_seed(s), 42);
    for (int i = 0; i < N; i++) first[i] = sampler_pick(s, logits);
    begin(s, &q);
    for (int i = 0; i < N; i++) assert_int_equal(sampler_pick(s, logits), first[i]);
    for (uint64_t seed = 0; seed < 50; seed++) { /* agreement by chance only: 200/64 = 3 of 200 */
        if (seed == 42) continue;
        q.seed = seed;
        begin(s, &q);
        int same = 0;
        for (int i = 0; i < N; i++) same += sampler_pick(s, logits) == first[i];
        assert_in_range(same, 0, 20);
    }
    q.random_seed = true;
    begin(s, &q);
    uint64_t a = sampler_seed(s);
    begin(s, &q);
    assert_true(sampler_seed(s) != a);
    q.random_seed = false; /* a drawn seed, handed back, repeats its text */
    q.seed = a;
    begin(s, &q);
    for (int i = 0; i < N; i++) first[i] = sampler_pick(s, logits);
    begin(s, &q);
    for (int i = 0; i < N; i++) assert_int_equal(sampler_pick(s, logits), first[i]);
    sampler_free(s);
}

/* Successive draws of one sequence must be independent: pairs fall evenly into 8 x 8 cells. */
static void test_draws_are_independent(void **state) {
    (void)state;
    float logits[8] = {0};
    struct sampler *s = make(8);
    for (uint64_t seed = 0; seed < 4; seed++) {
        lily_sampling q = plain;
        q.seed = seed;
        begin(s, &q);
        int cell[64] = {0};
        for (int i = 0; i < 32000; i++) {
            int32_t a = sampler_pick(s, logits), b = sampler_pick(s, logits);
            cell[a * 8 + b]++;
        }
        double chi = 0;
        for (int i = 0; i < 64; i++) chi += (cell[i] - 500.0) * (cell[i] - 500.0) / 500.0;
        assert_true(chi < chi_square_limit(63));
    }
    sampler_free(s);
}

static void test_padding_and_holes(void **state) {
    (void)state;
    enum { V = 200, USED = 150 };
    float logits[V];
    for (int i = 0; i < V; i++) logits[i] = i >= USED ? 100 : 0; /* padding rows look best */
    const int32_t holes[] = {0, 77, 149};
    logits[77] = 90;
    struct sampler *s;
    lily_err err;
    const struct sampler_vocab vocab = {.used = USED, .holes = holes, .n_holes = 3};
    assert_int_equal(sampler_new(&vocab, &s, &err), 0);
    lily_sampling ways[4] = {plain, plain, plain, plain};
    ways[1].temperature = 0;
    ways[2].top_k = 148; /* one more than there are */
    ways[3].top_k = 3, ways[3].top_p = 0.9f;
    const int32_t expected[] = {147, 1, 147, 3};
    bool hit[V];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(support(s, &ways[i], logits, V, hit), expected[i]);
        assert_true(!hit[0] && !hit[77] && !hit[149] && !hit[150] && !hit[199]);
    }
    sampler_free(s);
    const int32_t all[] = {0, 1};
    const struct sampler_vocab none = {.used = 2, .holes = all, .n_holes = 2};
    assert_int_equal(sampler_new(&none, &s, &err), LILY_EMODEL);
    assert_null(s);
}

static void test_extreme_logits(void **state) {
    (void)state;
    float logits[] = {3.0e38f, -3.0e38f, 0, 3.0e38f};
    struct sampler *s = make(4);
    lily_sampling q = plain;
    q.temperature = 1e-4f;
    begin(s, &q);
    for (int i = 0; i < 200; i++) {
        int32_t id = sampler_pick(s, logits);
        assert_true(id == 0 || id == 3);
    }
    sampler_free(s);
    /* A penalty beyond the range of floats must leave tokens better than holes. */
    const int32_t hole = 0, prompt[] = {0, 1, 2, 3};
    const struct sampler_vocab vocab = {.used = 4, .holes = &hole, .n_holes = 1};
    const float penalties[] = {100, 0.01f}, sign[] = {-1, 1};
    lily_err err = {0};
    assert_int_equal(sampler_new(&vocab, &s, &err), 0);
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) logits[j] = sign[i] * 1e37f;
        for (uint64_t seed = 0; seed < 50; seed++) {
            bool hit[4] = {0};
            q = plain;
            q.repetition_penalty = penalties[i], q.seed = seed;
            q.temperature = seed % 2 ? 0.7f : 0;
            assert_int_equal(sampler_begin(s, &q, prompt, 4, &err), 0);
            for (int k = 0; k < 50; k++) hit[sampler_pick(s, logits)] = true;
            assert_false(hit[0]);
            if (q.temperature > 0) assert_true(hit[1] && hit[2] && hit[3]);
        }
    }
    sampler_free(s);
}

static int by_value(const void *a, const void *b) {
    const float *x = a, *y = b;
    return (*x < *y) - (*x > *y);
}

/* What a pick costs at the real model's vocabulary; without a sort it must be far below one. */
static void test_cost(void **state) {
    (void)state;
    enum { V = 248320, PICKS = 20 };
    float *logits = malloc(V * sizeof *logits), *sorted = malloc(V * sizeof *logits);
    for (uint32_t i = 0; i < V; i++) { /* roughly normal, deviation 2.5 */
        float x = 0;
        for (uint32_t j = 0; j < 12; j++) x += noise(i * 12 + j);
        sorted[i] = logits[i] = 1.25f * x;
    }
    double start = cpu_seconds();
    qsort(sorted, V, sizeof *sorted, by_value);
    double sort = cpu_seconds() - start;
    struct {
        const char *name;
        lily_sampling q;
    } cases[] = {{"greedy", plain},
                 {"top_k 20, top_p 0.95", plain},
                 {"top_k 1000", plain},
                 {"top_p 0.95", plain},
                 {"no filter", plain}};
    cases[0].q.temperature = 0;
    cases[1].q.top_k = 20, cases[1].q.top_p = 0.95f;
    cases[2].q.top_k = 1000;
    cases[3].q.top_p = 0.95f;
    struct sampler *s = make(V);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(s, &cases[i].q);
        start = cpu_seconds();
        for (int j = 0; j < PICKS; j++) sampler_pick(s, logits);
        double pick = (cpu_seconds() - start) / PICKS;
        print_message("%-22s %6.0f us of %.0f us for a sort\n", cases[i].name, pick * 1e6,
                      sort * 1e6);
        if (i == 0 || i == 1) assert_true(pick < sort / 4);
    }
    sampler_free(s);
    free(sorted);
    free(logits);
}

static void expect_refusal(lily_sampling q, const char *field) {
    lily_err err = {0};
    assert_int_equal(sampler_check(&q, 100, &err), LILY_EINVAL);
    if (strncmp(err.msg, field, strlen(field)) != 0) fail_msg("%s: %s", field, err.msg);
}

static void test_validation(void **state) {
    (void)state;
    lily_err err;
    assert_int_equal(sampler_check(&plain, 100, &err), 0);
#define REFUSE(field, value)                                                                       \
    do {                                                                                           \
        lily_sampling q = plain;                                                                   \
        q.field = value;                                                                           \
        expect_refusal(q, #field ": found ");                                                      \
    } while (0)
    REFUSE(temperature, -0.1f);
    REFUSE(temperature, NAN);
    REFUSE(temperature, INFINITY);
    REFUSE(top_k, -1);
    REFUSE(top_p, -0.1f);
    REFUSE(top_p, 1.1f);
    REFUSE(top_p, NAN);
    REFUSE(min_p, 1.5f);
    REFUSE(presence_penalty, 2.5f);
    REFUSE(frequency_penalty, -2.5f);
    REFUSE(repetition_penalty, 0);
    REFUSE(repetition_penalty, NAN);
#undef REFUSE
    int32_t id = 100;
    float bias = 1;
    lily_sampling q = plain;
    q.n_bias = 1;
    expect_refusal(q, "logit_bias: found ");
    q.bias_ids = &id, q.bias = &bias;
    expect_refusal(q, "logit_bias: found token id 100");
    id = -1;
    expect_refusal(q, "logit_bias: found token id -1");
    id = 99, bias = NAN;
    expect_refusal(q, "logit_bias: found ");
    bias = -100;
    assert_int_equal(sampler_check(&q, 100, &err), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_distributions),
        cmocka_unit_test(test_penalties_and_bias),
        cmocka_unit_test(test_large_vocabulary),
        cmocka_unit_test(test_ties_go_to_lower_ids),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_draws_are_independent),
        cmocka_unit_test(test_padding_and_holes),
        cmocka_unit_test(test_extreme_logits),
        cmocka_unit_test(test_cost),
        cmocka_unit_test(test_validation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
