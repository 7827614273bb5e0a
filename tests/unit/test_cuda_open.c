/* Opening the CUDA backend on a driver without a card: what is missing is said in words, what can
 * be done without is done without, and no call that fails leaves anything behind. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifdef LILY_CUDA
#include <unistd.h>

#include "backend/cuda/cuda.h"
#include "ckpt/ckpt.h"
#include "cuda_fake.h"
#include "engine/engine.h"

static struct ckpt *checkpoint;
static const struct weights *weights;

/* A stand-in of random weights, packed. */
static int make_weights(void **state) {
    (void)state;
    char path[] = "/tmp/lily-cuda-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) return -1;
    close(fd);
    const struct ckpt_synth_options synth = {.shape = "mini", .seed = 3, .packed = true};
    const struct ckpt_options load = {0};
    lily_err err;
    int rc = ckpt_synth(path, &synth, &err);
    if (rc == LILY_OK) rc = ckpt_load(path, &load, &checkpoint, &err);
    unlink(path);
    if (rc == LILY_OK) weights = ckpt_weights(checkpoint);
    return rc;
}

static int free_weights(void **state) {
    (void)state;
    ckpt_free(checkpoint);
    return 0;
}

static struct backend_model *open_model(const struct backend_options *options, int expected,
                                        lily_err *err) {
    struct backend_model *m = NULL;
    *err = (lily_err){0};
    int rc = backend_cuda.open(weights, options, &m, err);
    if (rc != expected) fail_msg("found %d (%s), expected %d", rc, err->msg, expected);
    return m;
}

static void close_model(struct backend_model *m) {
    backend_cuda.close(m);
    assert_int_equal(atomic_load(&card.live), 0);
    assert_int_equal(atomic_load(&card.taken), 0);
}

static const struct backend_options one = {.max_sessions = 1, .max_context = 128};

static void says(const lily_err *err, int code, const char *text) {
    assert_int_equal(err->code, code);
    if (!strstr(err->msg, text)) fail_msg("\"%s\" lacks \"%s\"", err->msg, text);
}

/* ---- drivers and cards ----------------------------------------------------------------------- */

/* First of all tests: once opened a driver stays. */
static void drivers_that_do_not_serve(void **state) {
    (void)state;
    lily_err err = {0};
    card_reset();
    card.version = 12080;
    assert_null(cuda_driver_open_from(NULL, &err));
    says(&err, LILY_EBACKEND, "found a driver for CUDA 12.8, expected 13.0 or newer; update the");
    card_reset();
    card.init = NO_DEVICE;
    assert_null(cuda_driver_open_from(NULL, &err));
    says(&err, LILY_EBACKEND, "found no GPU, expected one that the driver shows; check nvidia-smi");
    card.init = 803;
    assert_null(cuda_driver_open_from(NULL, &err));
    says(&err, LILY_EBACKEND, "restart the machine after an update");
    card.init = LAUNCH_FAILED;
    assert_null(cuda_driver_open_from(NULL, &err));
    says(&err, LILY_EBACKEND, "found error 719 (CUDA_ERROR_LAUNCH_FAILED: unspecified launch");
    card_reset();
    assert_non_null(cuda_driver_open_from(NULL, &err));
}

/* Open refuses with the text, and `lily doctor` tells it as well. */
static void refuses(const char *text) {
    lily_err err;
    char *json;
    struct backend_probe probe;
    open_model(&one, LILY_EBACKEND, &err);
    says(&err, LILY_EBACKEND, text);
    backend_cuda.probe(&probe);
    assert_false(probe.usable);
    if (!strstr(probe.reason, text)) fail_msg("\"%s\" lacks \"%s\"", probe.reason, text);
    assert_int_equal(lily_doctor(&json, &err), LILY_OK);
    if (!strstr(json, text)) fail_msg("doctor lacks \"%s\": %s", text, json);
    free(json);
    assert_int_equal(atomic_load(&card.live), 0);
}

static void cards_that_do_not_serve(void **state) {
    (void)state;
    lily_err err;
    card_reset();
    card.devices = 0;
    refuses("CUDA device: found no GPU, expected one that the driver shows");
    card_reset();
    card.capability = 75;
    refuses("found fake card of compute capability 7.5, expected 8.0 or newer; choose another");
    card_reset();
    struct embedded first = cuda_embedded[0];
    cuda_embedded[0].shape = NULL;
    struct backend_probe probe;
    backend_cuda.probe(&probe);
    assert_non_null(strstr(probe.reason, "built without CUDA kernels: no nvcc was found"));
    open_model(&one, LILY_EBACKEND, &err);
    says(&err, LILY_EBACKEND, "found no kernels for shape mini in the program");
    cuda_embedded[0] = first;

    /* Only loading them shows these. */
    card.no_module = "portable_gemm", card.module_error = NO_BINARY;
    open_model(&one, LILY_EBACKEND, &err);
    says(&err, LILY_EBACKEND, "found no kernels for this GPU in the program, expected some; build");
    card.module_error = NEW_PTX;
    open_model(&one, LILY_EBACKEND, &err);
    says(&err, LILY_EBACKEND, "the driver is too old to compile; update the NVIDIA driver");
    assert_int_equal(atomic_load(&card.live), 0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static struct cuda_need need_of(const struct backend_options *o) {
    lily_err err;
    card_reset();
    struct backend_model *m = open_model(o, LILY_OK, &err);
    struct cuda_need need = cuda_need(m);
    close_model(m);
    return need;
}

static void too_little_memory(void **state) {
    (void)state;
    struct cuda_need need = need_of(&one);
    size_t all = need.weights + need.scratch + need.sessions + need.reserve;
    lily_err err;
    card.context = need.context;
    card.memory = all + need.context;
    close_model(open_model(&one, LILY_OK, &err));
    card.memory--;
    open_model(&one, LILY_ENOMEM, &err);
    char text[64];
    snprintf(text, sizeof text, "expected %.2f GiB: ", (double)all / (1 << 30));
    says(&err, LILY_ENOMEM, text);
    says(&err, LILY_ENOMEM, "GiB of free memory (of ");
    says(&err, LILY_ENOMEM, "session(s) of 128 tokens");
    says(&err, LILY_ENOMEM, "ask for a shorter context or fewer sessions, or close other programs");
    card.memory = need.weights;
    open_model(&one, LILY_ENOMEM, &err);
    says(&err, LILY_ENOMEM, "this GPU is too small for the model: use the CPU backend");
    assert_int_equal(atomic_load(&card.live), 0);
}

/* Somebody else was faster: each allocation says how much it asked for and what is free. */
static void memory_that_went_away(void **state) {
    (void)state;
    struct cuda_need need = need_of(&one);
    lily_err err;
    card.refuse = need.weights;
    open_model(&one, LILY_ENOMEM, &err);
    says(&err, LILY_ENOMEM, "CUDA weights: found ");
    says(&err, LILY_ENOMEM, "GiB of free memory (of 4.00) on fake card, expected ");
    assert_int_equal(atomic_load(&card.live), 0);
    card_reset();
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    struct backend_session *s;
    card.refuse = cuda_session_bytes(m, 128);
    assert_int_equal(backend_cuda.session_new(m, 128, &s, &err), LILY_ENOMEM);
    says(&err, LILY_ENOMEM, "CUDA session: found ");
    close_model(m);
}

static void keep_line(void *arg, const char *line) {
    snprintf(arg, 1024, "%s", line);
}

/* The engine goes on with the CPU where it chose the card by itself, and else says why not. */
static void the_cpu_takes_over(void **state) {
    (void)state;
    static const struct backend *const all[] = {&backend_cuda, &backend_cpu, NULL};
    char line[1024] = "";
    const lily_engine_options o = {.log = keep_line, .arg = line, .threads = 1};
    struct engine_parts parts = {.weights = weights, .backend = &backend_cuda, .all = all};
    lily_engine *e;
    lily_engine_info info;
    lily_err err;
    card_reset();
    card.memory = 1 << 20;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_OK);
    lily_engine_get_info(e, &info);
    assert_string_equal(info.backend, "cpu");
    assert_non_null(strstr(info.reason, "cuda failed to open: context of 2048 tokens: fake card: "
                                        "found 0.00 GiB of memory, expected "));
    lily_engine_close(e);
    parts.all = NULL;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_ENOMEM);
    says(&err, LILY_ENOMEM, "this GPU is too small for the model: use the CPU backend");
    assert_int_equal(atomic_load(&card.live), 0);
}

/* Where a prompt's scratch does not fit it gets fewer rows, not the user a shorter context. */
static void prompts_take_fewer_rows(void **state) {
    (void)state;
    const struct backend_options o = {.max_sessions = 1, .max_context = 8192};
    struct cuda_need need = need_of(&o);
    lily_err err;
    struct backend_model *m = open_model(&o, LILY_OK, &err);
    assert_int_equal(m->rows, CUDA_CHUNK);
    close_model(m);
    card.context = need.context;
    card.memory = need.weights + need.scratch / 4 + need.sessions + need.reserve + need.context;
    m = open_model(&o, LILY_OK, &err);
    assert_true(m->rows >= CUDA_LEAST_ROWS && m->rows < CUDA_CHUNK / 2);
    struct backend_stats stats;
    char rows[64];
    backend_cuda.stats(m, &stats);
    snprintf(rows, sizeof rows, "prompts portable by %d rows", m->rows);
    assert_non_null(strstr(stats.kernels, rows));
    assert_int_equal(m->rows % BACKEND_GRID, 0);
    close_model(m);
}

/* ---- progress -------------------------------------------------------------------------------- */

struct told {
    uint64_t done, total;
    int calls, cancel_at;
};

static int tell(void *arg, uint64_t done, uint64_t total) {
    struct told *t = arg;
    assert_true(done >= t->done && done <= total && (!t->calls || total == t->total));
    t->done = done;
    t->total = total;
    return ++t->calls == t->cancel_at;
}

static void the_upload_is_told(void **state) {
    (void)state;
    struct told t = {0};
    struct backend_options o = one;
    lily_err err;
    o.progress = tell, o.progress_arg = &t;
    card_reset();
    struct backend_model *m = open_model(&o, LILY_OK, &err);
    assert_int_equal(t.total, cuda_need(m).weights);
    assert_int_equal(t.done, t.total);
    close_model(m);
    t = (struct told){.cancel_at = 1};
    open_model(&o, LILY_ECANCELED, &err);
    assert_int_equal(atomic_load(&card.live), 0);
}

/* ---- paths ----------------------------------------------------------------------------------- */

static void first_path_is(const char *name) {
    lily_err err;
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    struct backend_stats stats;
    backend_cuda.stats(m, &stats);
    assert_true(stats.bandwidth > 4.91e12 && stats.bandwidth < 4.92e12); /* 3,201 MHz, 6,144 bits */
    if (strcmp(m->paths[0]->name, name) != 0) {
        fail_msg("found \"%s\", expected \"%s\"", m->paths[0]->name, name);
    }
    assert_ptr_equal(m->paths[m->n_paths - 1], &cuda_path_portable);
    close_model(m);
}

/* A fast path that cannot be had is left out; without the portable kernels nothing opens. */
static void paths_that_cannot_be_had(void **state) {
    (void)state;
    lily_err err;
    card_reset();
    first_path_is("persistent sm_90a");
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    size_t decode = cuda_decode_bytes(m);
    close_model(m);
    assert_true(decode > 0);
    card.refuse = decode;
    first_path_is("batch");
    card_reset();
    card.no_module = "decode_step", card.module_error = NO_BINARY;
    first_path_is("batch");
    card_reset();
    card.capability = 89;
    first_path_is("batch");
}

/* Threads have the stack that the kernels want and no more, from open on. */
static void stacks_are_small(void **state) {
    (void)state;
    lily_err err;
    card_reset();
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    assert_int_equal(card.stack, 256); /* cuda_fake.h, pick */
    close_model(m);
}

/* Files of a card's own that do not load keep no model from opening (what the large one then does
 * without: test_cuda_host.c). */
static void prompts_without_their_kernels(void **state) {
    (void)state;
    static const int32_t ids[] = {1, 2, 3};
    lily_err err;
    card_reset();
    card.no_module = "prefill_", card.module_error = NO_BINARY;
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    struct backend_session *s;
    assert_int_equal(backend_cuda.session_new(m, 128, &s, &err), LILY_OK);
    struct prefill_step step = {.ids = ids, .n = 3};
    assert_int_equal(backend_cuda.prefill(s, &step, &err), LILY_OK);
    assert_int_equal(step.done, 3);
    backend_cuda.session_free(s);
    close_model(m);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static struct backend_session *new_session(struct backend_model *m) {
    struct backend_session *s;
    lily_err err;
    assert_int_equal(backend_cuda.session_new(m, 128, &s, &err), LILY_OK);
    return s;
}

static void planned(struct plan_query q, long launches) {
    struct backend_plan p;
    lily_err err;
    q.layers = weights->layers;
    assert_int_equal(backend_cuda.plan(weights->shape, &q, &p, &err), LILY_OK);
    assert_int_equal(p.kernels, launches);
}

/* What `lily plan` tells is what is launched. */
static void steps_cost_what_is_planned(void **state) {
    (void)state;
    static const struct backend_options two = {.max_sessions = 2, .max_context = 128};
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1};
    static const int32_t ids[] = {1, 2, 3, 4, 5};
    float *logits = malloc((size_t)weights->shape->vocab * sizeof *logits);
    lily_err err;
    assert_non_null(logits);
    card_reset();
    struct backend_model *m = open_model(&two, LILY_OK, &err);
    struct backend_session *s[2] = {new_session(m), new_session(m)};
    struct prefill_step step = {.ids = ids, .n = 5, .logits = logits};
    card.launches = 0;
    assert_int_equal(backend_cuda.prefill(s[0], &step, &err), LILY_OK);
    planned((struct plan_query){.tokens = 5}, card.launches);
    for (int32_t n = 1; n <= 2; n++) {
        struct decode_slot slots[2];
        struct decode_result results[2];
        for (int i = 0; i < 2; i++) {
            slots[i] = (struct decode_slot){.session = s[i], .token = 7, .sampling = &greedy};
        }
        card.launches = 0;
        assert_int_equal(backend_cuda.decode_submit(m, slots, n, &err), LILY_OK);
        assert_int_equal(backend_cuda.decode_wait(m, results, n, &err), LILY_OK);
        planned((struct plan_query){.depth = 5, .tokens = 1, .sessions = n}, card.launches);
    }
    free(logits);
    for (int i = 0; i < 2; i++) backend_cuda.session_free(s[i]);
    close_model(m);
}

/* A prompt on a slow card comes in pieces, between which a request can be cancelled. */
static void slow_chunks_get_shorter(void **state) {
    (void)state;
    static const struct backend_options long_one = {.max_sessions = 1, .max_context = 8192};
    static int32_t ids[8192];
    struct backend_session *s;
    lily_err err;
    card_reset();
    struct backend_model *m = open_model(&long_one, LILY_OK, &err);
    assert_int_equal(backend_cuda.session_new(m, 8192, &s, &err), LILY_OK);
    struct prefill_step step = {.ids = ids, .n = 8192};
    card.wait_ms = 600;
    assert_int_equal(backend_cuda.prefill(s, &step, &err), LILY_OK);
    assert_int_equal(step.done, 1024);
    card.wait_ms = 0;
    step.n -= step.done;
    assert_int_equal(backend_cuda.prefill(s, &step, &err), LILY_OK);
    assert_true(step.done >= 256 && step.done < 1024 && step.done % BACKEND_GRID == 0);
    backend_cuda.session_free(s);
    close_model(m);
}

/* Ids without a token are masked wherever they lie, as by the other backends. */
static void holes_of_the_vocabulary(void **state) {
    (void)state;
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1};
    int32_t vocab = weights->shape->vocab, used = weights->vocab_used;
    uint32_t *bits = malloc(((size_t)vocab + 31) / 32 * sizeof *bits), back;
    struct backend_options o = {.max_sessions = 1, .max_context = 128, .sampled = bits};
    lily_err err;
    assert_non_null(bits);
    card_reset();
    for (int holes = 0; holes < 2; holes++) {
        memset(bits, 0xff, ((size_t)vocab + 31) / 32 * sizeof *bits);
        if (holes) bits[2] &= ~(1u << 5);
        struct backend_model *m = open_model(&o, LILY_OK, &err);
        struct backend_session *s = new_session(m);
        struct decode_slot slot = {.session = s, .token = 7, .sampling = &greedy};
        struct decode_result result;
        card.mask = 0;
        assert_int_equal(backend_cuda.decode_submit(m, &slot, 1, &err), LILY_OK);
        assert_int_equal(backend_cuda.decode_wait(m, &result, 1, &err), LILY_OK);
        assert_int_equal(m->sampled_below, used);
        assert_string_equal(card.kernel, holes ? "pick" : "decode_step");
        assert_int_equal(card.mask != 0, holes);
        if (holes) {
            memcpy(&back, (const char *)(uintptr_t)card.mask + 2 * sizeof back, sizeof back);
            assert_int_equal(back, ~(1u << 5));
        }
        backend_cuda.session_free(s);
        close_model(m);
    }
    free(bits);
}

/* Saved states take what the sessions to come leave; without one the engine reads more, no more. */
static void states_leave_room_for_sessions(void **state) {
    (void)state;
    static const struct backend_options three = {.max_sessions = 3, .max_context = 128};
    struct cuda_need need = need_of(&three);
    struct backend_state *saved[64];
    struct backend_session *s[3];
    lily_err err;
    int n = 0;
    struct backend_model *m = open_model(&three, LILY_OK, &err);
    s[0] = new_session(m);
    size_t left = 2 * need.sessions / 3 + (64 << 20) + 3 * cuda_state_bytes(m);
    card.memory = atomic_load(&card.taken) + left;
    while (n < 64 && backend_cuda.state_new(m, &saved[n], &err) == LILY_OK) n++;
    assert_int_equal(n, 3);
    says(&err, LILY_ENOMEM, "are kept for 2 session(s) to come");
    for (int i = 1; i < 3; i++) s[i] = new_session(m);
    for (int i = 0; i < n; i++) backend_cuda.state_free(saved[i]);
    for (int i = 0; i < 3; i++) backend_cuda.session_free(s[i]);
    close_model(m);
}

/* An engine whose card has no memory for states answers as any other. */
static void answers_without_saved_states(void **state) {
    (void)state;
    const lily_engine_options o = {.threads = 1, .context = 128};
    const struct engine_parts parts = {.weights = weights, .backend = &backend_cuda};
    static const int32_t ids[] = {1, 2, 3, 4, 5, 6};
    struct cuda_need need = need_of(&one);
    lily_engine *e;
    lily_session *s;
    lily_err err;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_OK);
    card.memory = atomic_load(&card.taken) + need.sessions; /* the driver took the rest */
    assert_int_equal(lily_session_new(e, 0, &s, &err), LILY_OK);
    for (int i = 0; i < 3; i++) {
        if (lily_session_sync(s, ids, 6 - (size_t)i, &err)) fail_msg("%s", err.msg);
    }
    lily_session_free(s);
    lily_engine_close(e);
    assert_int_equal(atomic_load(&card.live), 0);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Whichever call of the driver fails, once or from then on: either the model opens without what
 * failed, or it says why, and everything is given back. */
static void any_call_may_fail(void **state) {
    (void)state;
    static const int errors[] = {OUT_OF_MEMORY, LAUNCH_FAILED};
    long opened = 0, refused = 0, calls = LONG_MAX;
    for (int i = 0; i < 4; i++) {
        for (long k = 1; k <= calls; k += i < 2 ? 1 : 7) {
            struct backend_model *m = NULL;
            lily_err err = {0};
            card_reset();
            card.fail_at = k, card.fail_with = errors[i % 2], card.stays_failed = i >= 2;
            int rc = backend_cuda.open(weights, &one, &m, &err);
            if (rc == LILY_OK) {
                calls = i < 2 && atomic_load(&card.calls) < k ? k : calls;
                opened++;
                backend_cuda.close(m);
            } else {
                assert_int_equal(rc, errors[i % 2] == OUT_OF_MEMORY ? LILY_ENOMEM : LILY_EBACKEND);
                assert_int_equal(err.code, rc);
                assert_true(strstr(err.msg, "found ") != NULL);
                refused++;
            }
            if (atomic_load(&card.live)) {
                fail_msg("call %ld failed with %d: %ld things left", k, card.fail_with,
                         atomic_load(&card.live));
            }
        }
    }
    print_message("%ld opened, %ld refused\n", opened, refused);
    assert_true(refused > 100 && opened > 10);
}

/* What a sequence does from its beginning to its end; ends at the first error. */
static int live(struct backend_model *m, struct backend_session **s, struct backend_state **saved,
                char *room, lily_err *err) {
    static const struct backend_sampling warm = {
        .temperature = 1, .top_p = 1, .repetition = 1.1f, .top_k = 5};
    static const int32_t ids[] = {1, 2, 3, 4, 5};
    static float logits[4096];
    const struct backend *b = &backend_cuda;
    struct prefill_step step = {.ids = ids, .n = 5, .logits = logits};
    struct decode_result result;
    int rc = b->session_new(m, 128, s, err);
    if (rc == LILY_OK) rc = b->prefill(*s, &step, err);
    if (rc == LILY_OK) rc = b->sample_begin(*s, ids, 5, err);
    struct decode_slot slot = {.session = *s, .token = 5, .sampling = &warm, .logits = logits};
    for (int i = 0; i < 2 && rc == LILY_OK; i++, slot.token = -1) {
        rc = b->decode_submit(m, &slot, 1, err);
    }
    for (int i = 0; i < 2 && rc == LILY_OK; i++) rc = b->decode_wait(m, &result, 1, err);
    if (rc == LILY_OK) rc = b->rewind(*s, err);
    if (rc == LILY_OK) rc = b->state_new(m, saved, err);
    if (rc == LILY_OK) rc = b->state_save(*s, *saved, err);
    if (rc == LILY_OK) rc = b->state_export(*saved, room, err);
    if (rc == LILY_OK) rc = b->state_import(*saved, room, err);
    if (rc == LILY_OK) rc = b->kv_export(*s, 0, 6, room, err);
    if (rc == LILY_OK) rc = b->kv_import(*s, 0, 6, room, err);
    return rc == LILY_OK ? b->state_restore(*s, *saved, 6, err) : rc;
}

/* A call that fails in the life of a sequence is an error of that call; the model goes on, and
 * nothing is left behind. */
static void any_later_call_may_fail(void **state) {
    (void)state;
    lily_err err;
    card_reset();
    struct backend_model *m = open_model(&one, LILY_OK, &err);
    size_t bytes = cuda_state_bytes(m) + cuda_kv_bytes(m, 6);
    char *room = malloc(bytes);
    long before = atomic_load(&card.live), k = 1;
    assert_non_null(room);
    for (int rc = 1; rc != LILY_OK; k++) {
        struct backend_session *s = NULL;
        struct backend_state *saved = NULL;
        struct decode_result result;
        card_reset();
        card.fail_at = k, card.fail_with = LAUNCH_FAILED;
        err = (lily_err){0};
        rc = live(m, &s, &saved, room, &err);
        if (rc != LILY_OK) {
            assert_int_equal(rc, LILY_EBACKEND);
            assert_int_equal(err.code, rc);
        }
        while (m->n_steps) assert_int_equal(backend_cuda.decode_wait(m, &result, 1, &err), 0);
        backend_cuda.state_free(saved);
        backend_cuda.session_free(s);
        assert_int_equal(atomic_load(&card.live), before);
        assert_int_equal(m->sessions, 0);
    }
    assert_true(k > 100);
    free(room);
    close_model(m);
}

/* ---- the self-test --------------------------------------------------------------------------- */

struct tested {
    int items, failed, steps, stop_at;
    uint64_t total;
};

static void count_item(void *arg, const struct selftest_item *item) {
    struct tested *t = arg;
    t->items++;
    t->failed += item->status == SELFTEST_FAILED;
    assert_true(item->status == SELFTEST_NOTE || item->note[0]);
}

static int count_step(void *arg, uint64_t done, uint64_t total) {
    struct tested *t = arg;
    assert_int_equal(done, ++t->steps);
    t->total = total;
    return t->steps == t->stop_at;
}

static int self_test(struct tested *t, lily_err *err) {
    const struct selftest_args args = {.w = weights,
                                       .reference = &backend_ref,
                                       .layers = weights->layers,
                                       .context = 4096,
                                       .item = count_item,
                                       .progress = count_step,
                                       .arg = t};
    *err = (lily_err){0};
    int rc = backend_cuda.selftest(&args, err);
    assert_int_equal(atomic_load(&card.live), 0);
    return rc;
}

/* Kernels that leave everything as it was are found wrong; a test that is stopped or that meets an
 * error of the driver leaves nothing behind. */
static void self_tests_find_a_card_that_computes_nothing(void **state) {
    (void)state;
    struct tested t = {0};
    lily_err err;
    card_reset();
    if (self_test(&t, &err) != LILY_OK) fail_msg("%s", err.msg);
    int items = t.items;
    assert_true(items > 30 && t.failed > 8 && t.steps == (int)t.total);
    for (int stop = 1; stop <= (int)t.total; stop += 7) {
        struct tested stopped = {.stop_at = stop};
        assert_int_equal(self_test(&stopped, &err), LILY_ECANCELED);
        assert_true(stopped.items < items);
    }
    for (long k = 200; k < 3000; k += 900) {
        struct tested broken = {0};
        card_reset();
        card.fail_at = k, card.fail_with = LAUNCH_FAILED, card.stays_failed = true;
        assert_int_equal(self_test(&broken, &err), LILY_EBACKEND);
    }
    card_reset();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drivers_that_do_not_serve),
        cmocka_unit_test(cards_that_do_not_serve),
        cmocka_unit_test(too_little_memory),
        cmocka_unit_test(memory_that_went_away),
        cmocka_unit_test(the_cpu_takes_over),
        cmocka_unit_test(prompts_take_fewer_rows),
        cmocka_unit_test(the_upload_is_told),
        cmocka_unit_test(paths_that_cannot_be_had),
        cmocka_unit_test(stacks_are_small),
        cmocka_unit_test(prompts_without_their_kernels),
        cmocka_unit_test(steps_cost_what_is_planned),
        cmocka_unit_test(slow_chunks_get_shorter),
        cmocka_unit_test(holes_of_the_vocabulary),
        cmocka_unit_test(states_leave_room_for_sessions),
        cmocka_unit_test(answers_without_saved_states),
        cmocka_unit_test(any_call_may_fail),
        cmocka_unit_test(any_later_call_may_fail),
        cmocka_unit_test(self_tests_find_a_card_that_computes_nothing),
    };
    return cmocka_run_group_tests(tests, make_weights, free_weights);
}
#else
int main(void) {
    print_message("skipped: the CUDA backend is part of builds for Linux\n");
    return 0;
}
#endif
