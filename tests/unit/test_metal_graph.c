/* The recorded graph of the Metal backend: barriers only where bytes conflict, all of them that are
 * needed, stages, counts, and refusal of recordings that are not whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/metal/graph.h"

static const uint32_t one[3] = {1, 1, 1};

static struct graph *new_graph(int32_t dispatches, int32_t buffers) {
    struct graph *g;
    lily_err err;
    if (graph_new(dispatches, buffers, &g, &err) != LILY_OK) fail_msg("%s", err.msg);
    return g;
}

/* One dispatch that reads one range and writes another. */
static void step(struct graph *g, int32_t from, uint64_t from_at, int32_t to, uint64_t to_at,
                 uint64_t bytes) {
    graph_begin(g, 0, one, one);
    graph_bind(g, 0, from, 0);
    graph_bind(g, 1, to, 0);
    graph_read(g, from, from_at, bytes);
    graph_write(g, to, to_at, bytes);
    graph_end(g);
}

static void a_chain_has_a_barrier_at_each_step(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 4);
    lily_err err;
    step(g, 0, 0, 1, 0, 16);
    step(g, 1, 0, 2, 0, 16);
    step(g, 2, 0, 3, 0, 16);
    assert_int_equal(graph_check(g, &err), LILY_OK);
    assert_int_equal(g->barriers, 2);
    assert_int_equal(g->dispatch[0].barrier, 0);
    assert_int_equal(g->dispatch[1].barrier, 1);
    assert_int_equal(g->listed[g->dispatch[1].first_barrier], 1);
    assert_int_equal(g->listed[g->dispatch[2].first_barrier], 2);
    assert_int_equal(g->highest, 3);
    graph_free(g);
}

static void disjoint_bytes_of_one_buffer_overlap(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 2);
    step(g, 0, 0, 1, 0, 16);
    step(g, 0, 0, 1, 16, 16);  /* another half: no barrier */
    step(g, 0, 0, 1, 31, 1);   /* its last byte: a barrier */
    step(g, 0, 64, 1, 64, 16); /* after the barrier, elsewhere */
    assert_int_equal(g->barriers, 1);
    assert_int_equal(g->dispatch[1].barrier, 0);
    assert_int_equal(g->dispatch[2].barrier, 1);
    assert_int_equal(g->dispatch[3].barrier, 0);
    assert_int_equal(g->dispatch[1].stage, 1);
    assert_int_equal(g->dispatch[2].stage, 2);
    graph_free(g);
}

static void a_write_waits_for_readers(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 3);
    step(g, 0, 0, 1, 0, 8);
    step(g, 0, 0, 2, 0, 8); /* both read: no barrier */
    step(g, 1, 0, 0, 4, 1); /* writes what they read, reads what the first wrote */
    assert_int_equal(g->dispatch[1].barrier, 0);
    /* Two of the three buffers in use are listed: not all. */
    assert_int_equal(g->dispatch[2].barrier, 2);
    graph_free(g);
}

static void a_barrier_on_everything_in_use_lists_nothing(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 2);
    step(g, 0, 0, 1, 0, 8);
    step(g, 1, 0, 0, 0, 8);
    assert_int_equal(g->dispatch[1].barrier, GRAPH_SCOPE);
    assert_int_equal(g->n_listed, 0);
    assert_int_equal(g->dispatch[1].stage, 2);
    graph_free(g);
}

static void weights_need_no_barrier_and_take_no_write(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 2);
    lily_err err;
    graph_set_class(g, 0, GRAPH_WEIGHTS);
    step(g, 0, 0, 1, 0, 8);
    step(g, 0, 0, 1, 8, 8);
    assert_int_equal(g->barriers, 0);
    step(g, 1, 0, 0, 0, 8);
    assert_int_equal(graph_check(g, &err), LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "a write to weights"));
    graph_free(g);
}

/* ---- any recording --------------------------------------------------------------------------- */

static uint32_t random_state = 1;
static uint32_t draw(uint32_t below) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % below;
}

static bool touch(const struct graph *g, int32_t i, int32_t j, int32_t buffer) {
    const struct graph_dispatch *x = &g->dispatch[i], *y = &g->dispatch[j];
    for (int32_t a = 0; a < x->accesses; a++) {
        for (int32_t b = 0; b < y->accesses; b++) {
            const struct graph_access *p = &g->access[x->first_access + a];
            const struct graph_access *q = &g->access[y->first_access + b];
            if (p->buffer == buffer && q->buffer == buffer && (p->write || q->write) &&
                p->begin < q->end && q->begin < p->end) {
                return true;
            }
        }
    }
    return false;
}

static bool covers(const struct graph *g, int32_t dispatch, int32_t buffer) {
    const struct graph_dispatch *d = &g->dispatch[dispatch];
    if (d->barrier == GRAPH_SCOPE) return true;
    for (int32_t i = 0; i < d->barrier; i++) {
        if (g->listed[d->first_barrier + i] == buffer) return true;
    }
    return false;
}

/* Whether dispatches i and j are ordered on that buffer, without the barrier before `without`. */
static bool ordered(const struct graph *g, int32_t i, int32_t j, int32_t buffer, int32_t without) {
    for (int32_t k = i + 1; k <= j; k++) {
        if (k != without && covers(g, k, buffer)) return true;
    }
    return false;
}

/* Conflicts that are not ordered when the barrier before `without` is left out. */
static int32_t unordered(const struct graph *g, int32_t without) {
    int32_t n = 0;
    for (int32_t j = 0; j < g->dispatches; j++) {
        for (int32_t i = 0; i < j; i++) {
            for (int32_t b = 0; b < g->buffers; b++) {
                n += touch(g, i, j, b) && !ordered(g, i, j, b, without);
            }
        }
    }
    return n;
}

/* The longest chain: a dispatch follows those it is ordered after through a buffer both bind. */
static int32_t longest_chain(const struct graph *g) {
    int32_t stage[64], longest = 0;
    for (int32_t j = 0; j < g->dispatches; j++) {
        stage[j] = 1;
        for (int32_t i = 0; i < j; i++) {
            bool after = false;
            for (int32_t k = i + 1; k <= j && !after; k++) {
                after = g->dispatch[k].barrier == GRAPH_SCOPE;
            }
            for (int32_t a = 0; a < 3 && !after; a++) {
                for (int32_t b = 0; b < 3 && !after; b++) {
                    int32_t x = g->binding[g->dispatch[i].first_binding + a].buffer;
                    int32_t y = g->binding[g->dispatch[j].first_binding + b].buffer;
                    after = x == y && ordered(g, i, j, x, -1);
                }
            }
            if (after && stage[i] + 1 > stage[j]) stage[j] = stage[i] + 1;
        }
        assert_int_equal(stage[j], g->dispatch[j].stage);
        if (stage[j] > longest) longest = stage[j];
    }
    return longest;
}

static void barriers_are_enough_and_none_is_idle(void **state) {
    (void)state;
    enum { BUFFERS = 7, DISPATCHES = 24, ROUNDS = 300 };
    struct graph *g = new_graph(DISPATCHES, BUFFERS);
    lily_err err;
    int32_t scopes = 0, lists = 0;
    for (int32_t round = 0; round < ROUNDS; round++) {
        graph_clear(g);
        for (int32_t i = 0; i < DISPATCHES; i++) {
            int32_t base = (int32_t)draw(BUFFERS);
            graph_begin(g, i, one, one);
            for (int32_t a = 0; a < 3; a++) {
                int32_t buffer = (base + a) % BUFFERS;
                uint64_t begin = draw(40), bytes = draw(6);
                graph_bind(g, a, buffer, 0);
                if (draw(3) == 0) {
                    graph_write(g, buffer, begin, bytes);
                } else {
                    graph_read(g, buffer, begin, bytes);
                }
            }
            graph_end(g);
        }
        if (graph_check(g, &err) != LILY_OK) fail_msg("%s", err.msg);
        assert_int_equal(unordered(g, -1), 0);
        int32_t barriers = 0;
        for (int32_t i = 0; i < g->dispatches; i++) {
            if (!g->dispatch[i].barrier) continue;
            barriers++;
            scopes += g->dispatch[i].barrier == GRAPH_SCOPE;
            lists += g->dispatch[i].barrier != GRAPH_SCOPE;
            assert_true(unordered(g, i) > 0);
        }
        assert_int_equal(barriers, g->barriers);
        assert_int_equal(longest_chain(g), g->highest);
    }
    assert_true(scopes > 0 && lists > 0);
    graph_free(g);
}

/* ---- counts and refusals --------------------------------------------------------------------- */

static void bytes_are_counted_once_and_as_traffic(void **state) {
    (void)state;
    struct graph *g = new_graph(8, 3);
    struct graph_counts c;
    lily_err err;
    graph_set_class(g, 0, GRAPH_WEIGHTS);
    for (int32_t i = 0; i < 2; i++) {
        graph_begin(g, 0, one, one);
        graph_bind(g, 0, 0, 0);
        graph_bind(g, 1, 1, 0);
        graph_read(g, 0, 100, 50);
        graph_read(g, 0, 120, 60);             /* 100 to 180 in all */
        graph_read_some(g, 0, 1000, 8000, 64); /* 64 of 8,000 */
        graph_write(g, 1, 0, 10);
        graph_end(g);
    }
    assert_int_equal(graph_count(g, &c, &err), LILY_OK);
    assert_int_equal(c.unique_read[GRAPH_WEIGHTS], 80 + 64);
    assert_int_equal(c.unique_read[GRAPH_SCRATCH], 0);
    assert_int_equal(c.traffic_read, 2 * (50 + 60 + 64));
    assert_int_equal(c.traffic_written, 20);
    assert_int_equal(c.kernels, 2);
    assert_int_equal(c.barriers, 1);
    graph_free(g);
}

static void expect_broken(struct graph *g, const char *why) {
    lily_err err;
    assert_int_equal(graph_check(g, &err), LILY_EBACKEND);
    if (!strstr(err.msg, why)) fail_msg("found \"%s\", expected %s", err.msg, why);
    graph_clear(g);
}

static void a_recording_that_is_not_whole_is_refused(void **state) {
    (void)state;
    struct graph *g = new_graph(2, 2);
    const uint32_t none[3] = {1, 0, 1};
    uint32_t args = 7;
    graph_begin(g, 0, one, one);
    expect_broken(g, "an open dispatch");
    graph_begin(g, 0, none, one);
    expect_broken(g, "an empty grid");
    graph_begin(g, 0, one, one);
    graph_bind(g, 3, 0, 0);
    graph_bind(g, 3, 1, 0);
    expect_broken(g, "an index bound twice");
    graph_begin(g, 0, one, one);
    graph_bind(g, 31, 0, 0);
    expect_broken(g, "an index above 30");
    graph_begin(g, 0, one, one);
    graph_bind(g, 0, 2, 0);
    expect_broken(g, "an unknown buffer");
    graph_begin(g, 0, one, one);
    graph_bind(g, 0, 0, 6);
    expect_broken(g, "no multiple of 4");
    graph_begin(g, 0, one, one);
    graph_read(g, 0, 0, 4);
    graph_end(g);
    expect_broken(g, "not bound");
    graph_begin(g, 0, one, one);
    graph_args(g, 0, &args, sizeof args);
    graph_args(g, 1, &args, sizeof args);
    expect_broken(g, "a wrong argument block");
    for (int32_t i = 0; i < 3; i++) step(g, 0, 0, 1, 0, 4);
    expect_broken(g, "too many dispatches");
    graph_bind(g, 0, 0, 0);
    expect_broken(g, "outside a dispatch");
    step(g, 0, 0, 1, 0, 4); /* and after all that it works again */
    lily_err err;
    assert_int_equal(graph_check(g, &err), LILY_OK);
    graph_free(g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_has_a_barrier_at_each_step),
        cmocka_unit_test(disjoint_bytes_of_one_buffer_overlap),
        cmocka_unit_test(a_write_waits_for_readers),
        cmocka_unit_test(a_barrier_on_everything_in_use_lists_nothing),
        cmocka_unit_test(weights_need_no_barrier_and_take_no_write),
        cmocka_unit_test(barriers_are_enough_and_none_is_idle),
        cmocka_unit_test(bytes_are_counted_once_and_as_traffic),
        cmocka_unit_test(a_recording_that_is_not_whole_is_refused),
    };
    return cmocka_run_group_tests_name("metal graph", tests, NULL, NULL);
}
