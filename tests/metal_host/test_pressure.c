/* The system's memory pressure, told by a source of libdispatch on a thread of the system's: saved
 * states go to disk, and nothing else does; the answer stays the same. */
#include "backend/metal/metal.h"
#include "engine/session.h"
#include "harness.h"
#include "lily.h"

enum { NORMAL = 1, WARN = 2, CRITICAL = 4 };

static void the_level_follows_the_events(void **state) {
    (void)state;
    static const struct {
        int event;
        enum backend_pressure level;
    } steps[] = {{WARN, BACKEND_PRESSURE_WARN},
                 {CRITICAL, BACKEND_PRESSURE_CRITICAL},
                 {WARN, BACKEND_PRESSURE_WARN},
                 {NORMAL, BACKEND_PRESSURE_NONE},
                 {CRITICAL, BACKEND_PRESSURE_CRITICAL}};
    emulate(false, 0);
    struct bench x = bench_open(&backend_metal, ckpt_weights(stand_in()), NULL);
    assert_int_equal(x.b->pressure(x.m), BACKEND_PRESSURE_NONE);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        metal_emu_memory_pressure(steps[i].event);
        assert_int_equal(x.b->pressure(x.m), steps[i].level);
    }
    /* A model that is opened now knows it without an event. */
    struct bench y = bench_open(&backend_metal, ckpt_weights(stand_in()), NULL);
    assert_int_equal(y.b->pressure(y.m), BACKEND_PRESSURE_CRITICAL);
    assert_int_equal(metal_emu_live_sources(), 2);
    bench_close(&x);
    metal_emu_memory_pressure(NORMAL);
    assert_int_equal(y.b->pressure(y.m), BACKEND_PRESSURE_NONE);
    bench_close(&y);
    metal_emu_memory_pressure(NORMAL);
    assert_int_equal(metal_emu_live_sources(), 0);
    nothing_found();
}

static void no_source(void **state) {
    (void)state;
    struct backend_options o = {.max_sessions = 1, .max_context = 64};
    struct backend_model *m;
    lily_err err;
    metal_emu_inject_nil("dispatch_source_create", 0);
    assert_int_equal(backend_metal.open(ckpt_weights(stand_in()), &o, &m, &err), LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "memory-pressure source"));
    assert_int_equal(metal_emu_live_objects(), 0);
    assert_int_equal(metal_emu_live_sources(), 0);
}

/* ---- through the engine ---------------------------------------------------------------------- */

enum { PROMPT = 150, TOKENS = 4 };

static int take(void *arg, int32_t token) {
    int32_t **at = arg;
    *(*at)++ = token;
    return 0;
}

/* Reads a prompt whose last token is `last` and goes on by itself; returns how many tokens were not
 * read again. */
static int32_t answer(lily_session *s, int32_t last, int32_t *tokens) {
    int32_t prompt[PROMPT], cached;
    lily_err err;
    for (int32_t i = 0; i < PROMPT; i++) prompt[i] = 7 + i * 37 % 3000;
    prompt[PROMPT - 1] = last;
    ok(session_enter(s, &err), &err);
    ok(session_leave(s, session_sync(s, prompt, PROMPT, NULL, NULL, &cached, &err)), &err);
    ok(lily_session_greedy(s, 9, TOKENS, take, &tokens, &err), &err);
    return cached;
}

/* The checkpoint of the shared prompt goes to disk, and the next prompt is resumed from there.
 * There is room in memory again once it is not short any more. */
static void saved_states_go_and_nothing_else(void **state) {
    (void)state;
    static const struct {
        int event;
        int32_t room, on_disk; /* -1: as at first */
    } steps[] = {{WARN, 1, 0}, {CRITICAL, 0, 1}, {CRITICAL, 0, 1}, {NORMAL, -1, 1}};
    lily_engine_options o = {.backend = "metal", .context = 256, .threads = 1};
    int32_t right[2][TOKENS], tokens[TOKENS];
    lily_engine *e;
    lily_session *s;
    lily_err err;
    emulate(false, 0);
    ok(lily_engine_open(&o, &e, &err), &err);
    ok(lily_session_new(e, 0, &s, &err), &err);
    id device = e->model->device.device;
    uint64_t held = mtl_device_allocated(device);
    answer(s, 5, right[0]);
    assert_int_equal(answer(s, 6, right[1]), 128);
    assert_true(s->states.limit > 2 && s->states.on_disk == 0);
    int32_t room = s->states.limit;
    for (int32_t i = 0; i < (int32_t)(sizeof steps / sizeof *steps); i++) {
        metal_emu_memory_pressure(steps[i].event);
        assert_int_equal(answer(s, 5 + i % 2, tokens), 128);
        assert_memory_equal(right[i % 2], tokens, sizeof tokens);
        assert_int_equal(s->states.limit, steps[i].room < 0 ? room : steps[i].room);
        assert_int_equal(s->states.on_disk, steps[i].on_disk);
        assert_int_equal(mtl_device_allocated(device), held);
    }
    lily_session_free(s);
    lily_engine_close(e);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
    assert_int_equal(metal_emu_live_sources(), 0);
}

/* Between requests all of it goes there, and comes back with the next one. */
static void an_idle_session_goes_to_disk(void **state) {
    (void)state;
    lily_engine_options o = {.backend = "metal", .context = 256, .threads = 1};
    int32_t right[TOKENS], tokens[TOKENS];
    lily_engine *e;
    lily_session *s;
    lily_err err;
    emulate(false, 0);
    ok(lily_engine_open(&o, &e, &err), &err);
    ok(lily_session_new(e, 0, &s, &err), &err);
    id device = e->model->device.device;
    uint64_t held = mtl_device_allocated(device);
    answer(s, 5, right);
    assert_true(lily_session_idle(s));
    assert_int_equal(mtl_device_allocated(device), held);
    metal_emu_memory_pressure(WARN);
    assert_true(lily_session_idle(s));
    uint64_t left = mtl_device_allocated(device);
    struct backend_stats stats;
    e->backend->stats(e->model, &stats);
    assert_int_equal(held - left, stats.session_bytes);
    assert_int_equal(answer(s, 5, tokens), PROMPT - 1 - (PROMPT - 1) % 64);
    assert_memory_equal(right, tokens, sizeof tokens);
    assert_int_equal(mtl_device_allocated(device), held);
    assert_true(lily_session_idle(s)); /* and is freed there */
    lily_session_free(s);
    lily_engine_close(e);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_level_follows_the_events),
        cmocka_unit_test(no_source),
        cmocka_unit_test(saved_states_go_and_nothing_else),
        cmocka_unit_test(an_idle_session_goes_to_disk),
    };
    return cmocka_run_group_tests_name("metal pressure", tests, NULL, NULL);
}
