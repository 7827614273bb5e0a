/* lily doctor: the machine, its backends and memory, and the backends' own tests. */
#include <string.h>

#include "cli/command.h"
#include "cli/document.h"
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/options.h"
#include "cli/output.h"
#include "lily.h"

/* ---- the self-tests -------------------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* "6.1e-05 of 0.002", or nothing where nothing was measured. */
static void print_item(const json_t *item) {
    char error[40] = "";
    const json_t *limit = json_object_get(item, "limit");
    if (json_is_real(limit)) {
        snprintf(error, sizeof error, "%.2g of %.2g",
                 json_real_value(json_object_get(item, "error")), json_real_value(limit));
    }
    printf("  %-27s %-9s %-17s %s\n", text_of(item, "name"), text_of(item, "result"), error,
           text_of(item, "note"));
}

static void print_test(const json_t *test) {
    size_t i;
    json_t *item;
    printf("\nself-test of %s on %s: %s, %d layers, weights: %s\n", text_of(test, "backend"),
           text_of(test, "device"), text_of(test, "shape"),
           (int)json_integer_value(json_object_get(test, "layers")), text_of(test, "weights"));
    if (json_array_size(json_object_get(test, "items")) > 0)
        printf("  %-27s %-9s %-17s %s\n", "what", "result", "error, limit", "largest at, or why");
    json_array_foreach(json_object_get(test, "items"), i, item) {
        print_item(item);
    }
    if (json_object_get(test, "error")) printf("  %s\n", text_of(test, "error"));
    printf("  %s: %d passed, %d failed, %d untested\n",
           json_is_true(json_object_get(test, "passed")) ? "passed" : "FAILED",
           (int)json_integer_value(json_object_get(test, "passed_items")),
           (int)json_integer_value(json_object_get(test, "failed_items")),
           (int)json_integer_value(json_object_get(test, "untested_items")));
}

/* Whether no test failed. */
static bool all_passed(const json_t *tests) {
    size_t i;
    json_t *test;
    json_array_foreach(tests, i, test) {
        if (!json_is_true(json_object_get(test, "passed"))) return false;
    }
    return true;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* The machine's document, with the tests' in it unless they are left out; NULL: failed. */
static int examine(const lily_selftest_options *o, bool tests, json_t **out, lily_err *err) {
    char *text;
    int rc = lily_doctor(&text, err);
    if (rc) return rc;
    *out = take_json(text, "doctor");
    if (!*out || !tests) return LILY_OK;
    rc = lily_selftest(o, &text, err);
    work_bar_end(o->arg);
    if (rc) return rc;
    json_t *list = take_json(text, "self-test");
    return json_object_set_new(*out, "selftest", list) ? ERR_NOMEM(err, "doctor") : LILY_OK;
}

/* model: what the tests were to run with, NULL: random weights. */
static void print_doctor(json_t *doc, const char *model) {
    size_t i;
    json_t *test, *tests = json_incref(json_object_get(doc, "selftest"));
    json_object_del(doc, "selftest");
    print_document(doc, NULL);
    json_array_foreach(tests, i, test) {
        print_test(test);
    }
    if (tests && json_array_size(tests) == 0)
        printf("\nself-test: no backend that is usable here has one%s\n",
               model ? "; the checkpoint was not looked at (lily inspect does)" : "");
    json_decref(tests);
}

int cmd_doctor(int argc, char **argv) {
    bool json = false, no_test = false;
    struct work_bar bar = {0};
    lily_selftest_options o = {.progress = work_bar_update, .arg = &bar};
    const struct option options[] = {
        OPT(NAME, "model", 'm', &o.model, "PATH",
            "test with the first layers of this checkpoint instead of random weights"),
        OPT(NAME, "backend", 0, &o.backend, "NAME", "test this one only"),
        OPT(NAME, "model-shape", 0, &o.shape, "NAME",
            "shape of the random weights: qwen3.6-35b-a3b (2.4 GB in /tmp while it runs) or mini"),
        OPT_FLAG("no-selftest", 0, &no_test, "only look, run no kernels"),
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "doctor",
        .summary = "this machine, its backends, and a test of their kernels",
        .about =
            "Says which backends this program can use here and why, or why not. Then, for each "
            "that has a test of its own, runs every kernel at the model's shape and compares "
            "with the reference backend. Exit status 1 when a usable backend fails its test; one "
            "that cannot be used or has no test is named and no failure.",
        .example = "lily doctor",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if (no_test && (o.model || o.backend || o.shape))
        return usage_error("doctor", "--no-selftest: found an option of the test beside it");
    if (o.model && o.shape)
        return usage_error("doctor", "--model-shape: found --model beside it, which has a shape");
    json_t *doc = NULL;
    lily_err err = {0};
    interrupt_catch();
    int rc = examine(&o, !no_test, &doc, &err);
    if (rc || !doc) {
        json_decref(doc);
        return rc ? fail(&err) : EXIT_FAILED;
    }
    status = all_passed(json_object_get(doc, "selftest")) ? EXIT_OK : EXIT_FAILED;
    if (json) return print_json(doc) == EXIT_OK ? status : EXIT_FAILED;
    print_doctor(doc, o.model);
    json_decref(doc);
    return status;
}
