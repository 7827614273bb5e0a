/* The true host and its kernels with every access watched, in three orders of execution, with and
 * without contraction (full: each order both ways): no race, no access outside a buffer, no
 * uninitialised read, no missing barrier, no rule of the API broken. And the recording tells the
 * truth: kernels, stages, barriers and unique bytes are those the emulated device saw. */
#include <jansson.h>

#include "backend/metal/encode.h"
#include "backend/metal/metal.h"
#include "harness.h"

enum { PROMPTS = 3, LONGEST = 90 };
static const int32_t quick_prompts[PROMPTS] = {21, 3, 40}, full_prompts[PROMPTS] = {90, 5, 64};
static const int32_t *prompts = quick_prompts;
static bool full;

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

/* The model's last recording against what the device did with it. Of a few rows the experts are
 * data's choice, and one of them may choose what another did: fewer are read than declared. */
static void recording_is_true(const struct backend_model *m, const char *what, int32_t rows) {
    const struct shape *s = m->layout.shape;
    bool few = rows > 1 && rows * s->top_k < 5 * s->experts;
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
    assert_true((uint64_t)field(seen, "unique_read") * 100 >= declared * (few ? 75 : 97));
    json_decref(seen);
}

/* A prompt, and two tokens that the device samples. */
static void answer(struct bench *x, int32_t n, float *logits) {
    static const struct backend_sampling p = {
        .temperature = 0.8f, .top_p = 0.95f, .repetition = 1.1f, .presence = 0.1f, .top_k = 20};
    int32_t ids[LONGEST];
    lily_err err;
    for (int32_t i = 0; i < n; i++) ids[i] = 9 + (i + n) * 131 % 3000;
    x->b->reset(x->s);
    bench_prefill(x, ids, n, logits);
    recording_is_true(x->m, "prompt chunk", n);
    ok(x->b->sample_begin(x->s, ids, n, &err), &err);
    struct decode_result r = bench_step(x, 40, &p, 0, NULL);
    bench_step(x, -1, &p, 1, logits);
    recording_is_true(x->m, "token", 1);
    assert_true(r.finite && r.token >= 0);
}

static void run(uint64_t seed, bool contract) {
    const struct weights *w = ckpt_weights(stand_in());
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = true;
    o.seed = seed;
    o.contract = contract;
    metal_emu_configure(&o);
    struct bench x = bench_open(&backend_metal, w, NULL);
    float *logits = calloc((size_t)w->shape->vocab, sizeof *logits);
    for (int32_t i = 0; i < PROMPTS; i++) answer(&x, prompts[i], logits);
    bench_close(&x);
    free(logits);
    figure("checked runs", (double)seed);
    figure("checked findings", (double)metal_emu_finding_count());
    nothing_found();
    metal_emu_reset();
}

static void in_order(void **state) {
    (void)state;
    run(0, false);
    if (full) run(0, true);
}
static void in_a_drawn_order(void **state) {
    (void)state;
    run(1, false);
    if (full) run(1, true);
}
static void in_another_order_with_contraction(void **state) {
    (void)state;
    run(2, true);
    if (full) run(2, false);
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
    for (int32_t n = 0; n < barriers; n += full ? 1 : 2) {
        metal_emu_reset();
        run_without(&x, n);
        if (metal_emu_count_of(METAL_EMU_HAZARD) == 0) fail_msg("barrier %d was not missed", n);
        assert_int_equal(metal_emu_finding_count(), metal_emu_count_of(METAL_EMU_HAZARD));
        found++;
    }
    printf("%d of %d barriers left out one by one, each found\n", found, barriers);
    figure("barriers", barriers);
    figure("barriers left out and found", found);
    metal_emu_reset();
    bench_close(&x);
}

int main(int argc, char **argv) {
    full = harness_begin(argc, argv);
    if (full) prompts = full_prompts;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order),
        cmocka_unit_test(in_a_drawn_order),
        cmocka_unit_test(in_another_order_with_contraction),
        cmocka_unit_test(a_barrier_left_out_is_found),
    };
    return cmocka_run_group_tests_name("metal checked", tests, NULL, NULL);
}
