/* lily bench on an engine without a model: what its exit status says. The commands run in processes
 * of this program, as a report's rows do in those of lily. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/err.h"
#include "cli/child.h"
#include "cli/command.h"
#include "lily.h"

/* ---- an engine ------------------------------------------------------------------------------- */

enum { VOCAB = 16 };

/* Models are named by what they do: "steady", "unsteady" (no run repeats another), or "small" (a
 * context of 8 tokens). */
struct lily_engine {
    const char *model;
};
struct lily_session {
    lily_engine *engine;
    float logits[VOCAB];
};

static int32_t context_of(const lily_engine *e) {
    return strcmp(e->model, "small") == 0 ? 8 : 4096;
}

int lily_engine_open(const lily_engine_options *options, lily_engine **out, lily_err *err) {
    static lily_engine engine;
    engine.model = options->model;
    *out = &engine;
    if (options->context <= context_of(&engine)) return 0;
    return ERR(err, LILY_ENOMEM, "small: found %d tokens, expected 8", options->context);
}
void lily_engine_close(lily_engine *e) {
    (void)e;
}
void lily_engine_get_info(const lily_engine *e, lily_engine_info *out) {
    *out = (lily_engine_info){.model_name = e->model,
                              .model_kind = "none",
                              .checkpoint = "0",
                              .backend = "cuda",
                              .device = "none",
                              .reason = "",
                              .kernels = "fast ones",
                              .layers = 4,
                              .vocab = VOCAB,
                              .context = context_of(e),
                              .bytes_per_token = 1000,
                              .bandwidth = 2e12};
}
int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err) {
    static lily_session session;
    (void)context, (void)err;
    session = (lily_session){.engine = e};
    *out = &session;
    return 0;
}
void lily_session_free(lily_session *s) {
    (void)s;
}
void lily_session_reset(lily_session *s) {
    (void)s;
}
void lily_cancel(lily_session *s) {
    (void)s;
}
int lily_session_sync(lily_session *s, const int32_t *ids, size_t n, lily_err *err) {
    (void)ids, (void)n, (void)err;
    s->logits[0] += strcmp(s->engine->model, "unsteady") == 0;
    return 0;
}
int lily_session_greedy(lily_session *s, int32_t first, int32_t n, lily_token_fn token, void *arg,
                        lily_err *err) {
    (void)s, (void)err;
    for (int32_t i = 0; i < n; i++) token(arg, first);
    return 0;
}
const float *lily_session_logits(const lily_session *s) {
    return s->logits;
}
int lily_doctor(char **json, lily_err *err) {
    *json = strdup("{\"machine\": {}}");
    return *json ? 0 : ERR_NOMEM(err, "doctor");
}
/* ---- commands -------------------------------------------------------------------------------- */

/* A prompt of 4 tokens, one run after the warm-up; more: the last words. */
static int bench(const char *model, const char *last, const char *value, struct buf *out,
                 lily_err *err) {
    const char *const words[] = {"bench", "-m", model, "-p", "4",  "-n",  "2",
                                 "-d",    "0",  "-r",  "1",  last, value, NULL};
    *err = (lily_err){0};
    buf_clear(out);
    return child_run(words, out, err);
}

static json_t *read_report(const char *path) {
    json_t *doc = json_load_file(path, 0, NULL);
    assert_non_null(doc);
    return doc;
}

static void runs_that_differ(void **state) {
    (void)state;
    struct buf out = {0};
    lily_err err;
    if (bench("steady", "--json", NULL, &out, &err)) fail_msg("%s", err.msg);
    json_t *rows = json_loadb(out.data, out.len, 0, NULL), *decode = json_array_get(rows, 1);
    assert_int_equal(json_array_size(rows), 2);
    assert_true(json_real_value(json_object_get(decode, "bound_gb_s")) == 2000);
    assert_string_equal(json_string_value(json_object_get(decode, "bound")),
                        "stated by the driver");
    assert_string_equal(json_string_value(json_object_get(decode, "kernels")), "fast ones");
    json_decref(rows);
    assert_int_not_equal(bench("unsteady", "--json", NULL, &out, &err), 0);
    assert_non_null(strstr(err.msg, "found runs that did not repeat the digest of their row"));
    assert_non_null(strstr(out.data, "\"digest_repeats\": false"));
    buf_free(&out);
}

/* Rows whose runs differ are in the report, which then fails. */
static void reports(void **state) {
    (void)state;
    char path[] = "/tmp/lily-report-XXXXXX";
    struct buf out = {0};
    lily_err err;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    const char *const unsteady[] = {"bench", "-m", "unsteady", "-p",       "4",  "-n",
                                    "2",     "-r", "1",        "--report", path, NULL};
    assert_int_not_equal(child_run(unsteady, &out, &err), 0);
    assert_non_null(strstr(err.msg, "found runs that did not repeat the digest of their row"));
    json_t *doc = read_report(path);
    assert_int_equal(json_array_size(json_object_get(doc, "left_out")), 0);
    json_t *row = json_array_get(json_object_get(doc, "prefill"), 0);
    assert_true(json_is_false(json_object_get(row, "digest_repeats")));
    row = json_array_get(json_object_get(doc, "decode"), 0);
    assert_string_equal(json_string_value(json_object_get(row, "bandwidth")),
                        "stated by the driver");
    json_decref(doc);
    buf_clear(&out);
    const char *const small[] = {"bench", "-m", "small", "-p",       "4,9", "-n",
                                 "2",     "-r", "1",     "--report", path,  NULL};
    if (child_run(small, &out, &err)) fail_msg("%s", err.msg);
    assert_non_null(strstr(out.data, "2 rows left out"));
    buf_free(&out);
    unlink(path);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_that_differ),
        cmocka_unit_test(reports),
    };
    if (argc > 1) return cmd_bench(argc - 1, argv + 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
