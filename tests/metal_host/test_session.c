/* Sessions on the emulated device: sampling there with two steps in flight, going back, saving and
 * restoring, several sessions in a step, any cut of a prompt. What must be equal is compared bit by
 * bit. */
#include "backend/metal/metal.h"
#include "harness.h"

/* As in backend/ref/ref.h, whose structs have the names of this backend's. */
int32_t ref_sample(const struct backend_sampling *p, uint64_t pick, const float *logits,
                   const int32_t *counts, const uint32_t *sampled, int32_t n, float *x);

enum { PROMPT = 70, CONTEXT = 512 };
static int32_t prompt[PROMPT];
static const struct weights *w;
static int32_t vocab;
static float *one, *two;

static int set_up(void **state) {
    (void)state;
    w = ckpt_weights(stand_in());
    vocab = w->shape->vocab;
    one = calloc((size_t)vocab, sizeof *one);
    two = calloc((size_t)vocab, sizeof *two);
    for (int32_t i = 0; i < PROMPT; i++) prompt[i] = 5 + i * 53 % 3000;
    emulate(false, 0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    free(one);
    free(two);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
    return 0;
}

static void equal(const float *a, const float *b, const char *what) {
    if (memcmp(a, b, (size_t)vocab * sizeof *a) != 0) fail_msg("%s: logits differ", what);
}

static struct bench open_for(int32_t sessions) {
    struct backend_options o = {.threads = 1, .max_sessions = sessions, .max_context = CONTEXT};
    return bench_open(&backend_metal, w, &o);
}

/* ---- sampling -------------------------------------------------------------------------------- */

/* The step behind the one in flight reads its token on the device. */
static void two_steps_in_flight(void **state) {
    (void)state;
    enum { STEPS = 12 };
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1, .top_k = 1};
    struct bench x = open_for(1);
    int32_t slow[STEPS], fast[STEPS];
    struct decode_result r;
    lily_err err;
    bench_prefill(&x, prompt, PROMPT, one);
    int32_t first = argmax(one, w->vocab_used), token = first;
    ok(x.b->sample_begin(x.s, prompt, PROMPT, &err), &err);
    for (int32_t i = 0; i < STEPS; i++) {
        r = bench_step(&x, token, &greedy, (uint64_t)i, one);
        assert_true(r.finite);
        assert_int_equal(r.token, argmax(one, w->vocab_used));
        token = slow[i] = r.token;
    }
    x.b->reset(x.s);
    bench_prefill(&x, prompt, PROMPT, NULL);
    struct decode_slot slot = {x.s, first, NULL, &greedy, 0};
    ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
    for (int32_t i = 0; i < STEPS; i++) {
        slot.token = -1;
        slot.pick++;
        if (i + 1 < STEPS) ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
        if (i == 0) assert_int_equal(x.b->decode_submit(x.m, &slot, 1, &err), LILY_EBUSY);
        ok(x.b->decode_wait(x.m, &r, 1, &err), &err);
        fast[i] = r.token;
    }
    assert_memory_equal(slow, fast, sizeof slow);
    assert_int_equal(x.b->decode_wait(x.m, &r, 1, &err), LILY_EINVAL);
    bench_close(&x);
}

/* From the device's own logits, ref's sampler draws the same tokens. */
static void draws_are_those_of_ref(void **state) {
    (void)state;
    static const struct backend_sampling p = {.temperature = 0.9f,
                                              .top_p = 0.9f,
                                              .min_p = 0.01f,
                                              .repetition = 1.1f,
                                              .frequency = 0.2f,
                                              .presence = 0.3f,
                                              .top_k = 40,
                                              .stream = 0x123456789abcdef0u};
    struct bench x = open_for(1);
    int32_t *counts = calloc((size_t)vocab, sizeof *counts);
    uint32_t *mask = calloc((size_t)vocab / 32 + 1, sizeof *mask);
    const struct backend_options none = {0};
    lily_err err;
    backend_sampled(w, &none, mask);
    bench_prefill(&x, prompt, PROMPT, NULL);
    ok(x.b->sample_begin(x.s, prompt, PROMPT, &err), &err);
    for (int32_t i = 0; i < PROMPT; i++) counts[prompt[i]] = 1;
    int32_t token = 77;
    for (uint64_t i = 0; i < 12; i++) {
        counts[token] += counts[token] ? 1 : 2;
        struct decode_result r = bench_step(&x, token, &p, i, one);
        assert_int_equal(r.token, ref_sample(&p, i, one, counts, mask, vocab, two));
        token = r.token;
    }
    bench_close(&x);
    free(counts);
    free(mask);
}

/* ---- going back ------------------------------------------------------------------------------ */

static void a_token_taken_back_leaves_no_trace(void **state) {
    (void)state;
    struct bench x = open_for(1);
    lily_err err;
    bench_prefill(&x, prompt, PROMPT, NULL);
    assert_int_equal(x.b->rewind(x.s, &err), LILY_EINVAL);
    bench_step(&x, 11, NULL, 0, one);
    bench_step(&x, 12, NULL, 0, two);
    bench_step(&x, 13, NULL, 0, one);
    ok(x.b->rewind(x.s, &err), &err);
    assert_int_equal(x.b->rewind(x.s, &err), LILY_EINVAL);
    assert_int_equal(x.b->position(x.s), PROMPT + 2);
    bench_step(&x, 21, NULL, 0, one);
    x.b->reset(x.s);
    bench_prefill(&x, prompt, PROMPT, NULL);
    bench_step(&x, 11, NULL, 0, two);
    bench_step(&x, 12, NULL, 0, two);
    bench_step(&x, 21, NULL, 0, two);
    equal(one, two, "after a rewind");
    bench_close(&x);
}

static void saved_states_and_rows_restore_exactly(void **state) {
    (void)state;
    struct bench x = open_for(2);
    struct backend_session *other;
    struct backend_state *saved, *moved;
    lily_err err;
    ok(x.b->session_new(x.m, CONTEXT / 2, &other, &err), &err);
    ok(x.b->state_new(x.m, &saved, &err), &err);
    ok(x.b->state_new(x.m, &moved, &err), &err);
    bench_prefill(&x, prompt, PROMPT, NULL);
    ok(x.b->state_save(x.s, saved, &err), &err);
    bench_step(&x, 11, NULL, 0, one);
    bench_step(&x, 12, NULL, 0, one);
    bench_step(&x, 31, NULL, 0, one);
    /* The same session again, */
    ok(x.b->state_restore(x.s, saved, PROMPT, &err), &err);
    bench_step(&x, 11, NULL, 0, two);
    bench_step(&x, 12, NULL, 0, two);
    bench_step(&x, 31, NULL, 0, two);
    equal(one, two, "restored");
    /* and another one, by way of bytes, with rows in two parts. */
    uint8_t *bytes = malloc(x.b->state_bytes(x.m));
    ok(x.b->state_export(saved, bytes, &err), &err);
    ok(x.b->state_import(moved, bytes, &err), &err);
    assert_int_equal(x.b->state_restore(other, moved, PROMPT, &err), LILY_EINVAL);
    static const int32_t parts[] = {0, 33, PROMPT};
    for (int32_t i = 0; i < 2; i++) {
        int32_t n = parts[i + 1] - parts[i];
        uint8_t *rows = malloc(x.b->kv_bytes(x.m, n));
        ok(x.b->kv_export(x.s, parts[i], n, rows, &err), &err);
        ok(x.b->kv_import(other, parts[i], n, rows, &err), &err);
        free(rows);
    }
    ok(x.b->state_restore(other, moved, PROMPT, &err), &err);
    struct bench y = {x.b, x.m, other};
    bench_step(&y, 11, NULL, 0, two);
    bench_step(&y, 12, NULL, 0, two);
    bench_step(&y, 31, NULL, 0, two);
    equal(one, two, "moved to another session");
    free(bytes);
    x.b->state_free(saved);
    x.b->state_free(moved);
    x.b->session_free(other);
    bench_close(&x);
}

/* ---- batches and cuts ------------------------------------------------------------------------ */

static void sessions_of_one_step_do_not_meet(void **state) {
    (void)state;
    struct bench x = open_for(2);
    struct backend_session *other;
    struct decode_result r[2];
    lily_err err;
    ok(x.b->session_new(x.m, CONTEXT, &other, &err), &err);
    struct bench y = {x.b, x.m, other};
    bench_prefill(&x, prompt, PROMPT, NULL);
    bench_prefill(&y, prompt + 20, 7, NULL);
    struct decode_slot slots[] = {{x.s, 44, one, NULL, 0}, {other, 55, two, NULL, 0}};
    ok(x.b->decode_submit(x.m, slots, 2, &err), &err);
    ok(x.b->decode_wait(x.m, r, 2, &err), &err);
    assert_true(r[0].finite && r[1].finite);
    float *alone = calloc((size_t)vocab, sizeof *alone);
    x.b->reset(x.s);
    bench_prefill(&x, prompt, PROMPT, NULL);
    bench_step(&x, 44, NULL, 0, alone);
    equal(one, alone, "the first of two");
    x.b->reset(x.s);
    bench_prefill(&x, prompt + 20, 7, NULL);
    bench_step(&x, 55, NULL, 0, alone);
    equal(two, alone, "the second of two");
    slots[1].session = x.s;
    assert_int_equal(x.b->decode_submit(x.m, slots, 2, &err), LILY_EINVAL);
    /* A session that goes does not disturb another's step in flight. */
    x.b->reset(x.s);
    bench_prefill(&x, prompt, PROMPT, NULL);
    ok(x.b->decode_submit(x.m, slots, 1, &err), &err);
    x.b->session_free(other);
    memset(one, 0, (size_t)vocab * sizeof *one);
    ok(x.b->decode_wait(x.m, r, 1, &err), &err);
    bench_step(&x, 3, NULL, 0, alone);
    x.b->reset(x.s);
    bench_prefill(&x, prompt, PROMPT, NULL);
    bench_step(&x, 44, NULL, 0, alone);
    equal(one, alone, "beside a session that goes");
    free(alone);
    bench_close(&x);
}

/* More than one command buffer holds. */
static void ten_sessions_in_a_step(void **state) {
    (void)state;
    enum { SESSIONS = METAL_SLOTS + 2 };
    struct backend_options o = {.threads = 1, .max_sessions = SESSIONS, .max_context = 64};
    struct bench x = bench_open(&backend_metal, w, &o);
    struct backend_session *s[SESSIONS] = {x.s};
    struct decode_slot slots[SESSIONS];
    struct decode_result r[SESSIONS];
    float *all = calloc(SESSIONS * (size_t)vocab, sizeof *all);
    lily_err err;
    for (int32_t i = 0; i < SESSIONS; i++) {
        if (i > 0) ok(x.b->session_new(x.m, 64, &s[i], &err), &err);
        slots[i] =
            (struct decode_slot){.session = s[i], .token = 10 + i, .logits = all + i * vocab};
    }
    for (int step = 0; step < 2; step++) { /* two in flight */
        ok(x.b->decode_submit(x.m, slots, SESSIONS, &err), &err);
    }
    assert_int_equal(x.m->flight[0].commands, 2);
    for (int step = 0; step < 2; step++) ok(x.b->decode_wait(x.m, r, SESSIONS, &err), &err);
    for (int32_t i = 0; i < SESSIONS; i++) {
        assert_true(r[i].finite);
        x.b->reset(x.s);
        bench_step(&x, 10 + i, NULL, 0, one);
        bench_step(&x, 10 + i, NULL, 0, one);
        equal(one, all + (size_t)i * (size_t)vocab, "one of ten");
    }
    for (int32_t i = 1; i < SESSIONS; i++) x.b->session_free(s[i]);
    free(all);
    bench_close(&x);
}

static void any_cut_of_a_prompt_gives_the_same(void **state) {
    (void)state;
    static const int32_t cuts[] = {64, 1, 33, 8};
    struct bench x = open_for(1);
    bench_prefill(&x, prompt, PROMPT, one);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        x.b->reset(x.s);
        bench_prefill(&x, prompt, cuts[i], NULL);
        bench_prefill(&x, prompt + cuts[i], PROMPT - cuts[i], two);
        char what[32];
        snprintf(what, sizeof what, "cut at %d", cuts[i]);
        equal(one, two, what);
    }
    bench_close(&x);
}

/* Logits of every row are those that a prompt ending there would get. */
static void logits_of_every_row(void **state) {
    (void)state;
    struct bench x = open_for(1);
    float *all = calloc(12 * (size_t)vocab, sizeof *all);
    struct prefill_step step = {.ids = prompt, .n = 12, .all_logits = all, .logits = one};
    lily_err err;
    ok(x.b->prefill(x.s, &step, &err), &err);
    assert_int_equal(step.done, 12);
    equal(one, all + 11 * (size_t)vocab, "the last row");
    for (int32_t n = 1; n <= 12; n += 5) {
        x.b->reset(x.s);
        bench_prefill(&x, prompt, n, two);
        equal(two, all + (size_t)(n - 1) * (size_t)vocab, "a row");
    }
    free(all);
    bench_close(&x);
}

static void wrong_calls_are_refused(void **state) {
    (void)state;
    struct bench x = open_for(1);
    struct backend_session *s;
    struct decode_slot slot = {.session = x.s, .token = -1};
    struct prefill_step step = {.ids = &(int32_t){vocab}, .n = 1};
    lily_err err;
    assert_int_equal(x.b->session_new(x.m, CONTEXT, &s, &err), LILY_EBUSY);
    assert_int_equal(x.b->session_new(x.m, CONTEXT + 1, &s, &err), LILY_EINVAL);
    assert_int_equal(x.b->decode_submit(x.m, &slot, 1, &err), LILY_EINVAL);
    slot.token = vocab;
    assert_int_equal(x.b->decode_submit(x.m, &slot, 1, &err), LILY_EINVAL);
    assert_int_equal(x.b->prefill(x.s, &step, &err), LILY_EINVAL);
    slot.token = 1;
    slot.sampling = &(struct backend_sampling){.temperature = 1, .top_k = 65};
    assert_int_equal(x.b->decode_submit(x.m, &slot, 1, &err), LILY_EINVAL);
    int32_t bad = -1;
    assert_int_equal(x.b->sample_begin(x.s, &bad, 1, &err), LILY_EINVAL);
    slot.sampling = NULL;
    ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
    step.ids = prompt;
    assert_int_equal(x.b->prefill(x.s, &step, &err), LILY_EBUSY);
    bench_close(&x); /* with the step in flight */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_steps_in_flight),
        cmocka_unit_test(draws_are_those_of_ref),
        cmocka_unit_test(a_token_taken_back_leaves_no_trace),
        cmocka_unit_test(saved_states_and_rows_restore_exactly),
        cmocka_unit_test(sessions_of_one_step_do_not_meet),
        cmocka_unit_test(ten_sessions_in_a_step),
        cmocka_unit_test(any_cut_of_a_prompt_gives_the_same),
        cmocka_unit_test(logits_of_every_row),
        cmocka_unit_test(wrong_calls_are_refused),
    };
    return cmocka_run_group_tests_name("metal sessions", tests, set_up, tear_down);
}
