/* The true host and its kernels with every access watched, in three orders of execution, with and
 * without contraction: no race, no access outside a buffer, no uninitialised read, no missing
 * barrier, no rule of the API broken. And the recording tells the truth: kernels, stages, barriers
 * and unique bytes are those the emulated device saw. */
#include <jansson.h>

#include "backend/metal/encode.h"
#include "backend/metal/metal.h"
#include "harness.h"

enum { PROMPT = 21, FULL_PROMPT = 90 };
static int32_t prompt = PROMPT;

static json_t *newest_graph(void) {
    assert_true(metal_emu_graph_count() > 0);
    char *text = metal_emu_graph_json(metal_emu_graph_count() - 1);
    json_t *graph = json_loads(text, 0, NULL);
    free(text);
    assert_non_null(graph);
    return graph;
}

static int64_t field(const json_t *graph, const char *name) {
    return json_integer_value(json_object_get(graph, name));
}

/* The model's last recording against what the device did with it. */
static void recording_is_true(const struct backend_model *m, const char *what) {
    struct graph_counts c;
    uint64_t declared = 0;
    lily_err err;
    json_t *seen = newest_graph();
    ok(graph_count(m->graph, &c, &err), &err);
    for (int32_t i = 0; i < GRAPH_CLASSES; i++) declared += c.unique_read[i];
    printf("%s: %d kernels, %d stages, %d barriers; %llu bytes declared, %lld read\n", what,
           c.kernels, c.stages, c.barriers, (unsigned long long)declared,
           (long long)field(seen, "unique_read"));
    assert_int_equal(field(seen, "dispatches"), c.kernels);
    assert_int_equal(field(seen, "stages"), c.stages);
    assert_int_equal(field(seen, "barriers"), c.barriers);
    assert_true((uint64_t)field(seen, "unique_read") <= declared);
    assert_true((uint64_t)field(seen, "unique_read") * 100 >= declared * 97);
    json_decref(seen);
}

static void run(uint64_t seed, bool contract) {
    static const struct backend_sampling p = {
        .temperature = 0.8f, .top_p = 0.95f, .repetition = 1.1f, .presence = 0.1f, .top_k = 20};
    const struct weights *w = ckpt_weights(stand_in());
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = true;
    o.seed = seed;
    o.contract = contract;
    metal_emu_configure(&o);
    struct bench x = bench_open(&backend_metal, w, NULL);
    int32_t ids[FULL_PROMPT];
    float *logits = calloc((size_t)w->shape->vocab, sizeof *logits);
    lily_err err;
    for (int32_t i = 0; i < prompt; i++) ids[i] = 9 + i * 131 % 3000;
    bench_prefill(&x, ids, prompt, logits);
    recording_is_true(x.m, "prompt chunk");
    ok(x.b->sample_begin(x.s, ids, prompt, &err), &err);
    struct decode_result r = bench_step(&x, 40, &p, 0, NULL);
    bench_step(&x, -1, &p, 1, logits);
    recording_is_true(x.m, "token");
    assert_true(r.finite && r.token >= 0);
    bench_close(&x);
    free(logits);
    nothing_found();
    metal_emu_reset();
}

static void in_order(void **state) {
    (void)state;
    run(0, false);
}
static void in_a_drawn_order(void **state) {
    (void)state;
    run(1, false);
}
static void in_another_order_with_contraction(void **state) {
    (void)state;
    run(2, true);
}

/* ---- a barrier left out ---------------------------------------------------------------------- */

/* Runs one token's recording without the n-th of its barriers. */
static void run_without(struct bench *x, int32_t n) {
    const struct decode_record r = {
        .session = session_view(x->s), .token = 7, .sampling = decode_no_sampling};
    double seconds;
    lily_err err;
    graph_clear(x->m->graph);
    decode_record(x->m->graph, &x->m->layout, &r);
    for (int32_t i = 0; i < x->m->graph->dispatches; i++) {
        struct graph_dispatch *d = &x->m->graph->dispatch[i];
        if (d->barrier != 0 && n-- == 0) d->barrier = 0;
    }
    void *pool = objc_autoreleasePoolPush();
    ok(metal_run(&x->m->device, "mutilated", x->m->graph, 0, x->m->graph->dispatches,
                 x->m->buffers.buffer, &seconds, &err),
       &err);
    objc_autoreleasePoolPop(pool);
}

/* Each of them is needed: without it the emulated device names the bytes in conflict. */
static void a_barrier_left_out_is_found(void **state) {
    (void)state;
    struct metal_emu_options o = metal_emu_defaults();
    o.quiet = true;
    metal_emu_configure(&o);
    struct bench x = bench_open(&backend_metal, ckpt_weights(stand_in()), NULL);
    run_without(&x, INT32_MAX);
    nothing_found();
    int32_t barriers = x.m->graph->barriers, found = 0;
    for (int32_t n = 0; n < barriers; n += prompt == PROMPT ? 2 : 1) {
        metal_emu_reset();
        run_without(&x, n);
        if (metal_emu_count_of(METAL_EMU_HAZARD) == 0) fail_msg("barrier %d was not missed", n);
        assert_int_equal(metal_emu_finding_count(), metal_emu_count_of(METAL_EMU_HAZARD));
        found++;
    }
    printf("%d of %d barriers left out one by one, each found\n", found, barriers);
    metal_emu_reset();
    bench_close(&x);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "full") == 0) prompt = FULL_PROMPT;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order),
        cmocka_unit_test(in_a_drawn_order),
        cmocka_unit_test(in_another_order_with_contraction),
        cmocka_unit_test(a_barrier_left_out_is_found),
    };
    return cmocka_run_group_tests_name("metal checked", tests, NULL, NULL);
}
