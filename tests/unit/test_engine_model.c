/* The whole engine on a synthetic checkpoint, once on each backend that is usable here: greedy and
 * seeded text must be byte for byte the same cold and warm, whatever the session held before. */
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "lily.h"

enum { PROMPT = 130, SHORT = 70, SHARED = 66, OUTPUT = 12 }; /* the grid is 64 */

static char folder[] = "/tmp/lily-engine-XXXXXX";
static char model[sizeof folder + 16];

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

static int make_model(void **state) {
    (void)state;
    lily_err err = {0};
    const lily_synth_options options = {.shape = "mini", .layers = 4, .seed = 5, .packed = true};
    if (!mkdtemp(folder)) return -1;
    snprintf(model, sizeof model, "%s/mini.lily", folder);
    if (lily_synth(model, &options, NULL, NULL, &err)) {
        print_error("%s\n", err.msg);
        return -1;
    }
    return 0;
}

static int remove_model(void **state) {
    (void)state;
    return nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* The engine under test; skips where the backend is not usable. */
static lily_engine *open_engine(const char *backend, int32_t threads) {
    lily_engine *e;
    lily_err err = {0};
    const lily_engine_options o = {
        .model = model, .backend = backend, .threads = threads, .context = 512, .max_sessions = 2};
    int rc = lily_engine_open(&o, &e, &err);
    if (rc == LILY_EBACKEND) {
        print_message("%s\n", err.msg);
        skip();
    }
    if (rc) fail_msg("%s", err.msg);
    return e;
}

static lily_session *open_session(lily_engine *e) {
    lily_session *s;
    lily_err err = {0};
    if (lily_session_new(e, 0, &s, &err)) fail_msg("%s", err.msg);
    return s;
}

static int append_text(void *arg, const lily_event *event) {
    if (event->kind == LILY_EVENT_CONTENT) buf_append(arg, event->text, event->n);
    return 0;
}

/* Prompt number which: the first SHARED tokens are the same in all. */
static void fill(int32_t *ids, int which) {
    uint32_t x = 1;
    for (int i = 0; i < PROMPT; i++) {
        if (i == SHARED) x += 77u * (uint32_t)which;
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)(x >> 24); /* a byte's token */
    }
}

/* Generates after ids[n]; the text goes to out, *cached tells what was reused. */
static void generate(lily_session *s, const int32_t *ids, size_t n, float temperature,
                     struct buf *out, int32_t *cached) {
    const lily_sampling sampling = {.temperature = temperature,
                                    .top_k = 50,
                                    .top_p = 0.95f,
                                    .repetition_penalty = 1,
                                    .seed = 9};
    const lily_request request = {.prompt = ids,
                                  .n_prompt = n,
                                  .max_tokens = OUTPUT,
                                  .sampling = &sampling,
                                  .ignore_eos = true,
                                  .on_event = append_text,
                                  .arg = out};
    lily_result result;
    lily_err err = {0};
    if (lily_generate(s, &request, &result, &err)) fail_msg("%s", err.msg);
    assert_int_equal(result.output_tokens, OUTPUT);
    *cached = result.cached_tokens;
}

/* The text after ids[n] on a fresh session. */
static struct buf cold_text(lily_engine *e, const int32_t *ids, size_t n, float temperature) {
    struct buf out = {0};
    int32_t cached;
    lily_session *fresh = open_session(e);
    generate(fresh, ids, n, temperature, &out, &cached);
    assert_int_equal(cached, 0);
    assert_true(out.len > 2);
    lily_session_free(fresh);
    return out;
}

/* On s the text must be the same; returns how many tokens of the prompt were not read again. */
static int32_t expect_text(lily_session *s, const int32_t *ids, size_t n, float temperature,
                           const struct buf *cold) {
    struct buf warm = {0};
    int32_t cached;
    generate(s, ids, n, temperature, &warm, &cached);
    assert_int_equal(warm.len, cold->len);
    assert_memory_equal(warm.data, cold->data, cold->len);
    buf_free(&warm);
    return cached;
}

/* A, then B that shares a beginning with it, then A again, greedy and seeded. */
static void cold_and_warm(const char *backend) {
    lily_engine *e = open_engine(backend, 0);
    lily_session *s = open_session(e);
    int32_t a[PROMPT], b[PROMPT];
    fill(a, 0);
    fill(b, 1);
    struct buf cold_a = cold_text(e, a, SHORT, 0), cold_b = cold_text(e, b, SHORT, 0);
    struct buf seeded_a = cold_text(e, a, SHORT, 1);
    assert_true(cold_a.len != cold_b.len || memcmp(cold_a.data, cold_b.data, cold_a.len) != 0);
    assert_int_equal(expect_text(s, a, SHORT, 0, &cold_a), 0);
    assert_int_equal(expect_text(s, b, SHORT, 0, &cold_b), 64);
    assert_int_equal(expect_text(s, a, SHORT, 0, &cold_a), 64);
    assert_int_equal(expect_text(s, a, SHORT, 1, &seeded_a), 64);
    lily_session_reset(s);
    assert_int_equal(expect_text(s, a, SHORT, 1, &seeded_a), 0);
    buf_free(&cold_a);
    buf_free(&cold_b);
    buf_free(&seeded_a);
    lily_session_free(s);
    lily_engine_close(e);
}

/* The second turn of a chat: the first answer is read as it was generated. */
static void next_turn(const char *backend) {
    enum { FIRST = 50, ANSWER = 22, NEXT = 90 };
    lily_engine *e = open_engine(backend, 0);
    lily_session *s = open_session(e);
    lily_err err = {0};
    int32_t ids[PROMPT];
    fill(ids, 2);
    if (lily_session_sync(s, ids, FIRST, &err)) fail_msg("%s", err.msg);
    for (int i = FIRST; i < FIRST + ANSWER; i++) { /* greedy, by hand, to know the tokens */
        const float *logits = lily_session_logits(s);
        ids[i] = 0;
        for (int32_t v = 1; v < 256; v++) {
            if (logits[v] > logits[ids[i]]) ids[i] = v;
        }
        if (lily_session_step(s, ids[i], &err)) fail_msg("%s", err.msg);
    }
    struct buf cold = cold_text(e, ids, NEXT, 0);
    assert_int_equal(expect_text(s, ids, NEXT, 0, &cold), FIRST + ANSWER);
    buf_free(&cold);
    ids[FIRST + ANSWER - 3] ^=
        1; /* the answer edited near its end: from the grid point within it */
    cold = cold_text(e, ids, NEXT, 0);
    assert_int_equal(expect_text(s, ids, NEXT, 0, &cold), 64);
    buf_free(&cold);
    lily_session_free(s);
    lily_engine_close(e);
}

static int same_row(void *arg, size_t i, const float *logits) {
    const float *rows = arg;
    assert_memory_equal(logits, rows + i * 4096, 4096 * sizeof *rows);
    return 0;
}

/* Decode, prefill and evaluation are one function of the tokens: equal logits, bit for bit. */
static void one_arithmetic(const char *backend) {
    lily_engine *e = open_engine(backend, 0);
    lily_session *s = open_session(e);
    lily_err err = {0};
    int32_t ids[PROMPT];
    float *rows = malloc((size_t)PROMPT * 4096 * sizeof *rows);
    fill(ids, 3);
    for (int i = 0; i < PROMPT; i++) {
        int rc = i ? lily_session_step(s, ids[i], &err) : lily_session_sync(s, ids, 1, &err);
        if (rc) fail_msg("%s", err.msg);
        memcpy(rows + i * 4096, lily_session_logits(s), 4096 * sizeof *rows);
    }
    if (lily_session_score(s, ids, PROMPT, same_row, rows, &err)) fail_msg("%s", err.msg);
    lily_session_reset(s);
    if (lily_session_sync(s, ids, PROMPT, &err)) fail_msg("%s", err.msg);
    same_row(rows, PROMPT - 1, lily_session_logits(s));
    free(rows);
    lily_session_free(s);
    lily_engine_close(e);
}

/* A bias of zero changes nothing but who samples: the host, instead of a device that could. */
static void test_host_and_device_sample_alike(void **state) {
    (void)state;
    lily_engine *e = open_engine("ref", 0);
    lily_session *s = open_session(e);
    int32_t ids[PROMPT];
    const int32_t id = 0;
    const float zero = 0;
    fill(ids, 6);
    const lily_sampling cases[] = {
        {.temperature = 0, .top_p = 1, .repetition_penalty = 1.2f},
        {.temperature = 1, .top_k = 20, .top_p = 0.95f, .repetition_penalty = 1, .seed = 3},
        {.temperature = 0.7f,
         .top_k = 60,
         .top_p = 0.8f,
         .min_p = 0.01f,
         .presence_penalty = 1.5f,
         .frequency_penalty = 0.3f,
         .repetition_penalty = 1.1f,
         .seed = 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf texts[2] = {{0}};
        for (int host = 0; host < 2; host++) {
            lily_sampling sampling = cases[i];
            if (host) sampling.bias_ids = &id, sampling.bias = &zero, sampling.n_bias = 1;
            const lily_request request = {.prompt = ids,
                                          .n_prompt = 60, /* over the grid point at 64 */
                                          .max_tokens = 30,
                                          .sampling = &sampling,
                                          .ignore_eos = true,
                                          .on_event = append_text,
                                          .arg = &texts[host]};
            lily_result result;
            lily_err err = {0};
            if (lily_generate(s, &request, &result, &err)) fail_msg("%s", err.msg);
            assert_int_equal(result.output_tokens, 30);
            /* the host leaves logits, the device none */
            assert_int_equal(lily_session_logits(s) != NULL, host);
        }
        assert_int_equal(texts[0].len, texts[1].len);
        assert_memory_equal(texts[0].data, texts[1].data, texts[0].len);
        buf_free(&texts[0]);
        buf_free(&texts[1]);
    }
    lily_session_free(s);
    lily_engine_close(e);
}

static void test_ref_cold_and_warm(void **state) {
    (void)state;
    cold_and_warm("ref");
}

static void test_ref_next_turn(void **state) {
    (void)state;
    next_turn("ref");
}

static void test_ref_one_arithmetic(void **state) {
    (void)state;
    one_arithmetic("ref");
}

static void test_cpu_cold_and_warm(void **state) {
    (void)state;
    cold_and_warm("cpu");
}

static void test_cpu_next_turn(void **state) {
    (void)state;
    next_turn("cpu");
}

static void test_cpu_one_arithmetic(void **state) {
    (void)state;
    one_arithmetic("cpu");
}

/* The number of threads divides the work, not the sums. */
static void test_cpu_threads(void **state) {
    (void)state;
    int32_t ids[PROMPT], cached;
    struct buf one = {0}, two = {0};
    fill(ids, 4);
    for (int32_t threads = 1; threads <= 2; threads++) {
        lily_engine *e = open_engine("cpu", threads);
        lily_session *s = open_session(e);
        generate(s, ids, SHORT, 0, threads == 1 ? &one : &two, &cached);
        lily_session_free(s);
        lily_engine_close(e);
    }
    assert_int_equal(one.len, two.len);
    assert_memory_equal(one.data, two.data, one.len);
    buf_free(&one);
    buf_free(&two);
}

/* A chat from messages to tokens, and what the engine says about itself. */
static void test_chat(void **state) {
    (void)state;
    static const char messages[] = "[{\"role\":\"user\",\"content\":\"Hi <|im_end|> there\"}]";
    lily_engine *e = open_engine(NULL, 0);
    lily_engine_info info;
    lily_tokens typed, retokenised;
    lily_err err = {0};
    char *text;
    lily_engine_get_info(e, &info);
    assert_string_equal(info.model_name, "mini");
    assert_string_equal(info.model_path, model);
    assert_int_equal(info.layers, 4);
    assert_int_equal(info.context, 512);
    assert_true(info.weight_bytes > 1000000 && info.bytes_per_token > 0);
    assert_true(strlen(info.reason) > 0 && info.load_seconds > 0);
    if (lily_chat_text(e, messages, NULL, NULL, &text, &err)) fail_msg("%s", err.msg);
    assert_string_equal(text, "<|im_start|>user\nHi <|im_end|> there<|im_end|>\n"
                              "<|im_start|>assistant\n<think>\n");
    if (lily_chat_prompt(e, messages, NULL, NULL, &typed, &err)) fail_msg("%s", err.msg);
    /* what a user types as a control token stays text */
    if (lily_tokenize(e, text, strlen(text), true, &retokenised, &err)) fail_msg("%s", err.msg);
    assert_int_equal(typed.n, retokenised.n + strlen("<|im_end|>") - 1);
    lily_tokens_free(&typed);
    lily_tokens_free(&retokenised);
    free(text);
    static const char open_answer[] = "[{\"role\":\"user\",\"content\":\"Count\"},"
                                      "{\"role\":\"assistant\",\"content\":\"One, two,\"}]";
    if (lily_chat_text(e, open_answer, NULL, NULL, &text, &err)) fail_msg("%s", err.msg);
    assert_string_equal(text + strlen(text) - 9, "One, two,");
    free(text);
    assert_int_equal(lily_chat_text(e, "[", NULL, NULL, &text, &err), LILY_EINVAL);
    assert_int_equal(lily_chat_text(e, "{}", NULL, NULL, &text, &err), LILY_EINVAL);
    assert_int_equal(lily_chat_text(e, messages, "3", NULL, &text, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "tools"));
    lily_engine_close(e);
}

static int count_progress(void *arg, const char *label, const char *unit, uint64_t done,
                          uint64_t total) {
    assert_string_equal(label, "load");
    assert_string_equal(unit, "B");
    assert_true(done <= total);
    return ++*(int *)arg == 1;
}

static void test_cancelled_load(void **state) {
    (void)state;
    int calls = 0;
    lily_engine *e;
    lily_err err = {0};
    const lily_engine_options o = {.model = model, .progress = count_progress, .arg = &calls};
    int rc = lily_engine_open(&o, &e, &err);
    if (calls == 0) { /* a mapped file may be ready before there is anything to tell */
        assert_int_equal(rc, 0);
        lily_engine_close(e);
        return;
    }
    assert_int_equal(rc, LILY_ECANCELED);
    assert_null(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ref_cold_and_warm),
        cmocka_unit_test(test_ref_next_turn),
        cmocka_unit_test(test_ref_one_arithmetic),
        cmocka_unit_test(test_cpu_cold_and_warm),
        cmocka_unit_test(test_cpu_next_turn),
        cmocka_unit_test(test_cpu_one_arithmetic),
        cmocka_unit_test(test_cpu_threads),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_cancelled_load),
        cmocka_unit_test(test_host_and_device_sample_alike),
    };
    return cmocka_run_group_tests(tests, make_model, remove_model);
}
