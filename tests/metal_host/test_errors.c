/* What goes wrong on a GPU, injected: errors of command buffers, a queue that refuses everything
 * afterwards, too little memory, damaged values. The request fails with the cause, and the next one
 * works. */
#include <math.h>

#include "backend/metal/metal.h"
#include "harness.h"
#include "lily.h"

enum { PROMPT = 9 };
static const int32_t ids[PROMPT] = {5, 6, 700, 8, 900, 10, 11, 12, 1300};
static const struct weights *w;
static float *right, *mine;

static int set_up(void **state) {
    (void)state;
    w = ckpt_weights(stand_in());
    right = calloc((size_t)w->shape->vocab, sizeof *right);
    mine = calloc((size_t)w->shape->vocab, sizeof *mine);
    emulate(false, 0);
    struct bench x = bench_open(&backend_metal, w, NULL);
    bench_prefill(&x, ids, PROMPT, NULL);
    bench_step(&x, 3, NULL, 0, right);
    bench_close(&x);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    free(right);
    free(mine);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
    return 0;
}

/* The session starts over, as the engine does after an error, and is as good as new. */
static void works_again(struct bench *x) {
    x->b->reset(x->s);
    bench_prefill(x, ids, PROMPT, NULL);
    bench_step(x, 3, NULL, 0, mine);
    assert_memory_equal(right, mine, (size_t)w->shape->vocab * sizeof *mine);
}

static void expect(int rc, const lily_err *err, const char *text) {
    assert_int_equal(rc, LILY_EBACKEND);
    if (!strstr(err->msg, text)) fail_msg("found \"%s\", expected %s", err->msg, text);
}

static void a_failed_prompt_chunk(void **state) {
    (void)state;
    static const struct {
        long code;
        const char *advice;
    } errors[] = {{MTLCommandBufferErrorTimeout, "busy too long"},
                  {MTLCommandBufferErrorOutOfMemory, "memory is full"},
                  {MTLCommandBufferErrorPageFault, "please report"},
                  {MTLCommandBufferErrorInternal, "try again"}};
    struct bench x = bench_open(&backend_metal, w, NULL);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        struct prefill_step step = {.ids = ids, .n = PROMPT};
        lily_err err;
        metal_emu_inject(0, errors[i].code, 5, true);
        expect(x.b->prefill(x.s, &step, &err), &err, errors[i].advice);
        works_again(&x);
    }
    bench_close(&x);
}

/* Of two steps in flight the first fails: the second, which read what it left, fails too. */
static void a_failed_step_fails_the_one_behind_it(void **state) {
    (void)state;
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1, .top_k = 1};
    struct bench x = bench_open(&backend_metal, w, NULL);
    for (int poison = 0; poison < 2; poison++) {
        struct decode_slot slot = {x.s, 3, NULL, &greedy, 0};
        struct decode_result r;
        lily_err err;
        bench_prefill(&x, ids, PROMPT, NULL);
        metal_emu_inject(0, MTLCommandBufferErrorInternal, 20, poison);
        ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
        slot.token = -1;
        ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
        expect(x.b->decode_wait(x.m, &r, 1, &err), &err, "error 1");
        expect(x.b->decode_wait(x.m, &r, 1, &err), &err, "expected none");
        works_again(&x);
        x.b->reset(x.s);
    }
    bench_close(&x);
}

static void a_refused_allocation(void **state) {
    (void)state;
    struct backend_options o = {.max_sessions = 1, .max_context = 512};
    struct backend_model *m;
    lily_err err;
    for (uint32_t skip = 0; skip < 48; skip += 5) {
        metal_emu_inject_no_memory(skip);
        int rc = backend_metal.open(w, &o, &m, &err);
        if (rc == LILY_OK) { /* all of open's buffers were made: the session's are not */
            struct backend_session *s;
            rc = backend_metal.session_new(m, 512, &s, &err);
            backend_metal.close(m);
        }
        assert_int_equal(rc, LILY_ENOMEM);
        assert_non_null(strstr(err.msg, "no memory for the buffer"));
        assert_int_equal(metal_emu_live_objects(), 0);
    }
    metal_emu_inject_no_memory(UINT32_MAX);
}

/* A device whose working set is too small: refused before anything is made, with what helps. */
static void too_small_a_device(void **state) {
    (void)state;
    struct metal_emu_options o = metal_emu_defaults();
    struct backend_options options = {.max_sessions = 1, .max_context = 4096};
    struct backend_model *m;
    lily_err err;
    o.checked = false;
    o.working_set = 20 << 20;
    metal_emu_configure(&o);
    assert_int_equal(backend_metal.open(w, &options, &m, &err), LILY_ENOMEM);
    if (!strstr(err.msg, "sudo sysctl iogpu.wired_limit_mb=")) fail_msg("%s", err.msg);
    assert_int_equal(metal_emu_live_objects(), 0);
    /* With the limit it asks for, it opens. */
    unsigned long long mib = strtoull(strchr(strstr(err.msg, "limit_mb"), '=') + 1, NULL, 10);
    o.working_set = mib << 20;
    metal_emu_configure(&o);
    ok(backend_metal.open(w, &options, &m, &err), &err);
    backend_metal.close(m);
    emulate(false, 0);
}

static void a_pipeline_with_too_few_threads(void **state) {
    (void)state;
    struct metal_emu_options o = metal_emu_defaults();
    struct backend_options options = {.max_sessions = 1, .max_context = 128};
    struct backend_model *m;
    lily_err err;
    o.checked = false;
    o.pipeline_threads = 128;
    metal_emu_configure(&o);
    expect(backend_metal.open(w, &options, &m, &err), &err, "found 128 threads");
    assert_int_equal(metal_emu_live_objects(), 0);
    emulate(false, 0);
}

/* A NaN in the state of one session: its own steps say so, another session's are good. */
static void a_spoilt_state(void **state) {
    (void)state;
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1, .top_k = 1};
    struct bench x = bench_open(&backend_metal, w, NULL);
    lily_err err;
    bench_prefill(&x, ids, PROMPT, NULL);
    float *s = session_bytes(x.s, SESSION_STATE_0 + x.s->parity);
    s[77] = NAN;
    struct decode_result r = bench_step(&x, 3, &greedy, 0, NULL);
    assert_false(r.finite);
    assert_true(r.token >= 0 && r.token < w->shape->vocab);
    struct prefill_step step = {.ids = ids, .n = PROMPT};
    assert_int_equal(x.b->prefill(x.s, &step, &err), LILY_ENUMERIC);
    works_again(&x);
    bench_close(&x);
}

static void wrong_weights_are_refused(void **state) {
    (void)state;
    struct weights other = *w;
    struct backend_options o = {.max_sessions = 1, .max_context = 128};
    struct backend_model *m;
    lily_err err;
    other.lm_head.bits = 8;
    assert_int_equal(backend_metal.open(&other, &o, &m, &err), LILY_EMODEL);
    assert_non_null(strstr(err.msg, "lm_head: found 8-bit"));
    o.max_context = 0;
    assert_int_equal(backend_metal.open(w, &o, &m, &err), LILY_EINVAL);
}

/* ---- how long a chunk takes ------------------------------------------------------------------ */

/* A GPU of so many operations a second, half as many in attention; the longest command buffer. */
struct slow_gpu {
    const struct bench *x;
    double speed, longest;
};

static double time_of_chunk(void *arg, const char *label) {
    struct slow_gpu *gpu = arg;
    const struct backend_model *m = gpu->x->m;
    struct prefill_embed_args args;
    if (strcmp(label, "prompt chunk") != 0) return 0.001;
    memcpy(&args, m->graph->args + m->graph->dispatch[0].args_at, sizeof args);
    double n = args.rows, depth = gpu->x->s->position + n / 2;
    double t = (m->pace.row_work + 2 * m->pace.pair_work * depth) * n / gpu->speed;
    gpu->longest = fmax(gpu->longest, t);
    return t;
}

/* As if so many tokens had been read. */
static void go_to(struct bench *x, int32_t depth) {
    void *rows = calloc(1, x->b->kv_bytes(x->m, depth));
    struct backend_state *state;
    lily_err err;
    x->b->reset(x->s);
    ok(x->b->state_new(x->m, &state, &err), &err);
    ok(x->b->state_save(x->s, state, &err), &err);
    ok(x->b->kv_import(x->s, 0, depth, rows, &err), &err);
    ok(x->b->state_restore(x->s, state, depth, &err), &err);
    x->b->state_free(state);
    free(rows);
}

/* After chunks of 128 rows at the beginning, which just fit in the time, the first chunk of a deep
 * session is so much shorter that it does too. */
static void chunks_are_bounded_in_time(void **state) {
    (void)state;
    enum { MANY = 128, DEPTH = 3000 };
    struct metal_emu_options o = metal_emu_defaults();
    struct backend_options options = {.max_sessions = 1, .max_context = DEPTH + MANY};
    struct bench x;
    struct slow_gpu gpu = {.x = &x};
    int32_t many[MANY];
    for (int32_t i = 0; i < MANY; i++) many[i] = 3 + i;
    o.checked = false;
    o.seconds = time_of_chunk;
    o.seconds_arg = &gpu;
    metal_emu_configure(&o);
    x = bench_open(&backend_metal, w, &options);
    gpu.speed = MANY * (x.m->pace.row_work + x.m->pace.pair_work * MANY) / 0.38;
    bench_prefill(&x, many, MANY, NULL);
    printf("%d rows at the beginning: %.2f s", MANY, gpu.longest);
    assert_true(gpu.longest > 0.3 && gpu.longest < 0.45);
    gpu.longest = 0;
    go_to(&x, DEPTH);
    struct prefill_step step = {.ids = many, .n = MANY};
    lily_err err;
    ok(x.b->prefill(x.s, &step, &err), &err);
    printf("; %d at depth %d: %.2f s\n", step.done, DEPTH, gpu.longest);
    assert_true(gpu.longest > 0.1 && gpu.longest < 0.45);
    assert_true(step.done < MANY / 4 && (DEPTH + step.done) % 8 == 0);
    /* One that was ended is not tried again at the same length. */
    go_to(&x, 64);
    int32_t rows = metal_pace_rows(&x.m->pace, 64);
    metal_emu_inject(0, MTLCommandBufferErrorTimeout, 5, true);
    expect(x.b->prefill(x.s, &step, &err), &err, "busy too long");
    assert_true(metal_pace_rows(&x.m->pace, 64) <= rows / 2);
    bench_close(&x);
    emulate(false, 0);
}

/* ---- nothing where an object is expected ----------------------------------------------------- */

static int open_and_decode(struct backend_model **m, lily_err *err) {
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1, .top_k = 1};
    struct backend_options options = {.max_sessions = 1, .max_context = 128};
    struct backend_session *s = NULL;
    struct decode_result r;
    *m = NULL;
    int rc = backend_metal.open(w, &options, m, err);
    if (rc == LILY_OK) rc = backend_metal.session_new(*m, 128, &s, err);
    struct prefill_step step = {.ids = ids, .n = PROMPT};
    struct decode_slot slot = {s, 3, NULL, &greedy, 0};
    if (rc == LILY_OK) rc = backend_metal.prefill(s, &step, err);
    if (rc == LILY_OK) rc = backend_metal.decode_submit(*m, &slot, 1, err);
    if (rc == LILY_OK) rc = backend_metal.decode_wait(*m, &r, 1, err);
    if (s) backend_metal.session_free(s);
    backend_metal.close(*m);
    return rc;
}

/* Each call of Metal that makes an object gives none, at each time that it is made: an error that
 * says what is missing, and no crash. */
static void nothing_where_an_object_is_expected(void **state) {
    (void)state;
    static const char *const calls[] = {"MTLCreateSystemDefaultDevice",
                                        "newCommandQueue",
                                        "new",
                                        "newLibraryWithSource:options:error:",
                                        "newFunctionWithName:",
                                        "newComputePipelineStateWithFunction:error:",
                                        "newBufferWithLength:options:",
                                        "commandBufferWithUnretainedReferences",
                                        "computeCommandEncoderWithDispatchType:"};
    struct backend_model *m;
    lily_err err;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        uint32_t skip = 0;
        for (;; skip += skip < 3 ? 1 : 9) {
            metal_emu_inject_nil(calls[i], skip);
            int rc = open_and_decode(&m, &err);
            if (!metal_emu_nil_returned()) break;
            if (rc != LILY_EBACKEND && rc != LILY_ENOMEM) fail_msg("%s: %d", calls[i], rc);
            assert_non_null(strstr(err.msg, "found"));
            assert_int_equal(metal_emu_live_objects(), 0);
        }
        printf("%s: up to call %u\n", calls[i], skip);
        assert_true(skip > 0);
        metal_emu_inject_nil("", UINT32_MAX);
    }
}

/* macOS 14 has one switch for all of fast math; the kernels are compiled safely there too. */
static void an_older_system(void **state) {
    (void)state;
    struct metal_emu_options o = metal_emu_defaults();
    struct backend_model *m;
    lily_err err;
    o.checked = false;
    o.profile = *metal_emu_profile("M1 Pro 32 GB, macOS 14");
    metal_emu_configure(&o);
    ok(open_and_decode(&m, &err), &err);
    nothing_found();
    emulate(false, 0);
}

/* A step that cannot be encoded leaves the one in flight as it is, and its session where it was. */
static void a_refused_step_spares_the_one_in_flight(void **state) {
    (void)state;
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1, .top_k = 1};
    static const char *const calls[] = {"commandBufferWithUnretainedReferences",
                                        "computeCommandEncoderWithDispatchType:"};
    struct bench x = bench_open(&backend_metal, w, NULL);
    struct decode_result r;
    lily_err err;
    bench_prefill(&x, ids, PROMPT, NULL);
    int32_t first = bench_step(&x, 3, &greedy, 0, NULL).token;
    int32_t second = bench_step(&x, -1, &greedy, 1, right).token;
    for (size_t i = 0; i < 2; i++) {
        struct decode_slot slot = {x.s, 3, NULL, &greedy, 0};
        x.b->reset(x.s);
        bench_prefill(&x, ids, PROMPT, NULL);
        ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
        slot.token = -1;
        metal_emu_inject_nil(calls[i], 0);
        expect(x.b->decode_submit(x.m, &slot, 1, &err), &err, "found no co");
        assert_int_equal(x.b->position(x.s), PROMPT + 1);
        ok(x.b->decode_wait(x.m, &r, 1, &err), &err);
        assert_int_equal(r.token, first);
        assert_int_equal(x.b->decode_wait(x.m, &r, 1, &err), LILY_EINVAL);
        /* The step may be tried again. */
        slot.logits = mine;
        ok(x.b->decode_submit(x.m, &slot, 1, &err), &err);
        ok(x.b->decode_wait(x.m, &r, 1, &err), &err);
        assert_int_equal(r.token, second);
        assert_memory_equal(right, mine, (size_t)w->shape->vocab * sizeof *mine);
    }
    bench_close(&x);
}

/* Of more slots than a command buffer takes, the last ones cannot be encoded: the first ones have
 * run, and their sessions stand where they stood. */
static void a_step_refused_in_the_middle(void **state) {
    (void)state;
    enum { SESSIONS = METAL_SLOTS + 1 };
    struct backend_options o = {.threads = 1, .max_sessions = SESSIONS, .max_context = 64};
    struct bench x = bench_open(&backend_metal, w, &o);
    struct backend_session *s[SESSIONS] = {x.s};
    struct decode_slot slots[SESSIONS];
    struct decode_result r[SESSIONS];
    lily_err err;
    for (int32_t i = 0; i < SESSIONS; i++) {
        if (i > 0) ok(x.b->session_new(x.m, 64, &s[i], &err), &err);
        slots[i] = (struct decode_slot){.session = s[i], .token = 20 + i};
    }
    slots[1].logits = right;
    ok(x.b->decode_submit(x.m, slots, SESSIONS, &err), &err);
    ok(x.b->decode_wait(x.m, r, SESSIONS, &err), &err);
    for (int32_t i = 0; i < SESSIONS; i++) x.b->reset(s[i]);
    slots[1].logits = mine;
    metal_emu_inject_nil("commandBufferWithUnretainedReferences", 1);
    expect(x.b->decode_submit(x.m, slots, SESSIONS, &err), &err, "found no command buffer");
    for (int32_t i = 0; i < SESSIONS; i++) assert_int_equal(x.b->position(s[i]), 0);
    assert_int_equal(x.b->rewind(s[0], &err), LILY_EINVAL);
    ok(x.b->decode_submit(x.m, slots, SESSIONS, &err), &err);
    ok(x.b->decode_wait(x.m, r, SESSIONS, &err), &err);
    assert_memory_equal(right, mine, (size_t)w->shape->vocab * sizeof *mine);
    for (int32_t i = 1; i < SESSIONS; i++) x.b->session_free(s[i]);
    bench_close(&x);
}

/* The same through the engine, whose own loop runs one step ahead: the request fails with the
 * device's message, for which the server answers 503, and the next request gives the right text. */
static void the_engine_goes_on(void **state) {
    (void)state;
    lily_engine_options o = {.backend = "metal", .context = 256, .threads = 1};
    lily_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    lily_request request = {.prompt = ids,
                            .n_prompt = PROMPT,
                            .max_tokens = 6,
                            .sampling = &greedy,
                            .ignore_eos = true};
    lily_engine *engine;
    lily_session *session;
    lily_result result;
    lily_err err;
    ok(lily_engine_open(&o, &engine, &err), &err);
    ok(lily_session_new(engine, 0, &session, &err), &err);
    for (uint32_t skip = 0; skip < 6; skip++) {
        metal_emu_inject(skip, MTLCommandBufferErrorInternal, 9, true);
        expect(lily_generate(session, &request, &result, &err), &err, "error 1 of the GPU");
        ok(lily_generate(session, &request, &result, &err), &err);
        assert_int_equal(result.output_tokens, 6);
        assert_int_equal(result.cached_tokens, 0);
    }
    lily_session_free(session);
    lily_engine_close(engine);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_prompt_chunk),
        cmocka_unit_test(a_failed_step_fails_the_one_behind_it),
        cmocka_unit_test(a_refused_allocation),
        cmocka_unit_test(too_small_a_device),
        cmocka_unit_test(a_pipeline_with_too_few_threads),
        cmocka_unit_test(a_spoilt_state),
        cmocka_unit_test(chunks_are_bounded_in_time),
        cmocka_unit_test(nothing_where_an_object_is_expected),
        cmocka_unit_test(an_older_system),
        cmocka_unit_test(a_refused_step_spares_the_one_in_flight),
        cmocka_unit_test(a_step_refused_in_the_middle),
        cmocka_unit_test(the_engine_goes_on),
        cmocka_unit_test(wrong_weights_are_refused),
    };
    return cmocka_run_group_tests_name("metal errors", tests, set_up, tear_down);
}
