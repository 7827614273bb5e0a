/* Rows of a prompt chunk on imagined GPUs: each chunk takes about the time it aims at, also the
 * first one at a depth where none was timed before, and none takes many times as long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/metal/pace.h"

static const double TARGET = 0.4;
static struct metal_layout layout;

static int set_up(void **state) {
    lily_err err;
    (void)state;
    return layout_make(&shape_qwen36_35b_a3b, 40, NULL, false, 2048, 262144, 1, UINT64_MAX, &layout,
                       &err);
}

static int tear_down(void **state) {
    (void)state;
    layout_free(&layout);
    return 0;
}

/* A GPU: operations of products a second, bytes a second, cost of an operation of attention. */
struct gpu {
    const char *name;
    double flops, bytes, attention;
};
static const struct gpu gpus[] = {{"slow", 2e12, 90e9, 1.5},
                                  {"middle", 8e12, 350e9, 1.2},
                                  {"fast", 40e12, 550e9, 2.0},
                                  {"fast, attention well done", 40e12, 550e9, 0.7}};
enum { GPUS = sizeof gpus / sizeof *gpus };

/* What n rows really take; the weights' part is counted apart from metal_pace's own sums. */
static double real_time(const struct gpu *g, int32_t n, int32_t position) {
    double experts = 1;
    for (int32_t i = 0; i < n; i++) experts *= 1 - 8.0 / 256;
    double rows = 4.7e9 * n / g->flops + (1.1e9 + 18e9 * (1 - experts)) / g->bytes;
    double depth = position + n / 2.0;
    return 0.003 + rows + g->attention * 4.0 * 4096 * 10 * n * depth / g->flops;
}

/* Reads n tokens from position on; returns the longest chunk's time and stores the first's. */
static double read(struct metal_pace *p, const struct gpu *g, int32_t position, int32_t n,
                   double *first) {
    double longest = 0;
    *first = 0;
    for (int32_t end = position + n; position < end;) {
        int32_t rows = metal_pace_rows(p, position), grid = rows < 64 ? rows : 64;
        int32_t take = rows - position % grid;
        if (take > end - position) take = end - position;
        double t = real_time(g, take, position);
        metal_pace_took(p, take, position, t);
        position += take;
        if (*first == 0) *first = t;
        if (t > longest) longest = t;
    }
    return longest;
}

/* A new program's first prompt, of each length and at each depth. */
static void a_first_prompt(void **state) {
    (void)state;
    static const int32_t depths[] = {0, 32768, 131072, 258048};
    for (size_t i = 0; i < GPUS; i++) {
        for (size_t d = 0; d < 4; d++) {
            struct metal_pace p;
            double first;
            metal_pace_new(&p, &layout, TARGET);
            double longest = read(&p, &gpus[i], depths[d], 4096, &first);
            printf("%s, depth %d: first %.2f s, longest %.2f s\n", gpus[i].name, depths[d], first,
                   longest);
            assert_true(first < 1.25 * TARGET && longest < 1.25 * TARGET);
        }
    }
}

/* The case that a length kept for the whole model gets wrong: long chunks near the beginning of one
 * session, then the first chunk of another at great depth. */
static void from_a_shallow_session_to_a_deep_one(void **state) {
    (void)state;
    static const int32_t depths[] = {32768, 131072, 258048};
    for (size_t i = 0; i < GPUS; i++) {
        for (size_t d = 0; d < 3; d++) {
            struct metal_pace p;
            double first;
            metal_pace_new(&p, &layout, TARGET);
            read(&p, &gpus[i], 0, 16384, &first);
            int32_t shallow = metal_pace_rows(&p, 0), deep = metal_pace_rows(&p, depths[d]);
            double longest = read(&p, &gpus[i], depths[d], 2048, &first);
            printf("%s: %d rows at the beginning, %d at %d: first %.2f s, longest %.2f s\n",
                   gpus[i].name, shallow, deep, depths[d], first, longest);
            assert_true(shallow > deep || shallow == 2048);
            assert_true(first < 1.1 * TARGET && longest < 1.25 * TARGET);
            assert_true(first > 0.2 * TARGET); /* nor needlessly short */
            /* And back. */
            assert_true(metal_pace_rows(&p, 0) * 2 > shallow);
            assert_true(read(&p, &gpus[i], 0, 4096, &first) < 1.25 * TARGET);
        }
    }
}

/* Attention that costs four times what is assumed: the first deep chunk is long, the next is right.
 */
static void what_was_assumed_wrongly_is_measured(void **state) {
    (void)state;
    const struct gpu odd = {"odd", 8e12, 350e9, 8};
    struct metal_pace p;
    double first;
    metal_pace_new(&p, &layout, TARGET);
    read(&p, &odd, 0, 8192, &first);
    read(&p, &odd, 131072, 1, &first);
    int32_t rows = metal_pace_rows(&p, 131072);
    double t = real_time(&odd, rows, 131072);
    assert_true(t < 4.5 * TARGET);
    metal_pace_took(&p, rows, 131072, t);
    t = real_time(&odd, metal_pace_rows(&p, 131072 + rows), 131072 + rows);
    assert_true(t < 1.1 * TARGET && t > 0.4 * TARGET);
}

/* Half after a chunk that was ended, at most twice as long after each that succeeds; a part of the
 * grid at last, and never nothing. */
static void a_chunk_that_was_ended(void **state) {
    (void)state;
    struct metal_pace p;
    double first;
    metal_pace_new(&p, &layout, TARGET);
    read(&p, &gpus[2], 0, 16384, &first);
    int32_t rows = metal_pace_rows(&p, 0);
    assert_int_equal(rows % BACKEND_GRID, 0);
    metal_pace_failed(&p, rows);
    assert_true(metal_pace_rows(&p, 0) <= rows / 2);
    for (int32_t i = 0; i < 20; i++) metal_pace_failed(&p, metal_pace_rows(&p, 0));
    assert_int_equal(metal_pace_rows(&p, 0), 8);
    for (int32_t before = 8; before < rows / 2; before *= 2) {
        assert_true(metal_pace_rows(&p, 0) <= before);
        metal_pace_took(&p, metal_pace_rows(&p, 0), 0, real_time(&gpus[2], before, 0));
    }
    assert_true(metal_pace_rows(&p, 0) > 8);
}

/* A device that tells no times, or absurd ones, leads to no absurd chunk. */
static void odd_times(void **state) {
    (void)state;
    struct metal_pace p;
    metal_pace_new(&p, &layout, TARGET);
    int32_t rows = metal_pace_rows(&p, 0);
    metal_pace_took(&p, rows, 0, 0);
    assert_int_equal(metal_pace_rows(&p, 0), rows);
    metal_pace_took(&p, rows, 0, 1e-9);
    assert_true(metal_pace_rows(&p, 0) <= 4 * rows + BACKEND_GRID);
    metal_pace_took(&p, rows, 0, 1e9);
    assert_int_equal(metal_pace_rows(&p, 0), 8);
    assert_int_equal(metal_pace_rows(&p, 200000), 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_first_prompt),
        cmocka_unit_test(from_a_shallow_session_to_a_deep_one),
        cmocka_unit_test(what_was_assumed_wrongly_is_measured),
        cmocka_unit_test(a_chunk_that_was_ended),
        cmocka_unit_test(odd_times),
    };
    return cmocka_run_group_tests_name("metal pace", tests, set_up, tear_down);
}
