/* What backends' self-tests say becomes a document; a backend that fails, or cannot run its test,
 * is no success. */
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/selftest.h"

static bool usable = true;
static enum selftest_status second;
static int outcome, calls;

static void probe(struct backend_probe *out) {
    *out = (struct backend_probe){.usable = usable, .device = "a box"};
}

/* The weights are what it was promised: four layers in one mapping that a device may use. */
static int selftest(const struct selftest_args *args, lily_err *err) {
    const struct selftest_item items[] = {
        {"first", SELFTEST_PASSED, 0.25, 0.5, "in the middle"},
        {"second", second, second == SELFTEST_FAILED ? INFINITY : 0, 1, "at the end"},
        {"memory", SELFTEST_NOTE, 0, 0, "plenty"},
    };
    calls++;
    assert_string_equal(args->w->shape->name, "mini");
    assert_int_equal(args->w->layers, 4);
    assert_int_equal(args->layers, 8);
    assert_non_null(args->w->map);
    assert_ptr_equal(args->reference, &backend_ref);
    if (outcome) return ERR(err, outcome, "the box is shut");
    for (size_t i = 0; i < 3; i++) args->item(args->arg, &items[i]);
    return args->progress(args->arg, 1, 1) ? ERR(err, LILY_ECANCELED, "stopped") : 0;
}

static const struct backend box = {.name = "box", .probe = probe, .selftest = selftest};
static const struct backend plain = {.name = "plain", .probe = probe};
static const struct backend *const all[] = {&plain, &box, NULL};

static int stop_at_steps(void *arg, const char *label, const char *unit, uint64_t done,
                         uint64_t total) {
    (void)arg, (void)label, (void)done, (void)total;
    return strcmp(unit, "steps") == 0;
}

static int run(const char *backend, lily_progress_fn progress, json_t **list) {
    const lily_selftest_options o = {.backend = backend, .shape = "mini", .progress = progress};
    char *text = NULL;
    lily_err err = {0};
    int rc = engine_selftest(all, &backend_ref, &o, &text, &err);
    *list = text ? json_loads(text, 0, NULL) : NULL;
    assert_true(rc ? !text && err.msg[0] : json_is_array(*list));
    free(text);
    return rc;
}

static bool passed(const json_t *list) {
    return json_is_true(json_object_get(json_array_get(list, 0), "passed"));
}

static void items_become_a_document(void **state) {
    (void)state;
    json_t *list;
    second = SELFTEST_PASSED, outcome = 0;
    assert_int_equal(run(NULL, NULL, &list), 0);
    assert_int_equal(json_array_size(list), 1); /* plain has none */
    const json_t *items = json_object_get(json_array_get(list, 0), "items");
    assert_true(passed(list));
    assert_int_equal(json_array_size(items), 3);
    const json_t *first = json_array_get(items, 0), *note = json_array_get(items, 2);
    assert_string_equal(json_string_value(json_object_get(first, "result")), "passed");
    assert_true(json_real_value(json_object_get(first, "error")) == 0.25);
    assert_string_equal(json_string_value(json_object_get(note, "result")), "note");
    assert_true(json_is_null(json_object_get(note, "error")));
    json_decref(list);
}

static void what_failed_is_no_success(void **state) {
    (void)state;
    json_t *list;
    for (second = SELFTEST_FAILED; second <= SELFTEST_UNTESTED; second++) {
        assert_int_equal(run("box", NULL, &list), 0);
        assert_false(passed(list));
        json_decref(list);
    }
    second = SELFTEST_PASSED, outcome = LILY_EBACKEND;
    assert_int_equal(run("box", NULL, &list), 0);
    assert_false(passed(list));
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "error")),
                        "the box is shut");
    json_decref(list);
    outcome = 0;
}

static void what_cannot_be_tested_is_said(void **state) {
    (void)state;
    json_t *list;
    assert_int_equal(run("plain", NULL, &list), LILY_EINVAL);
    assert_int_equal(run("box", stop_at_steps, &list), LILY_ECANCELED);
    calls = 0, usable = false;
    assert_int_equal(run(NULL, NULL, &list), 0);
    assert_true(calls == 0 && json_array_size(list) == 0);
    json_decref(list);
    assert_int_equal(run("box", NULL, &list), LILY_EINVAL);
    usable = true;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_become_a_document),
        cmocka_unit_test(what_failed_is_no_success),
        cmocka_unit_test(what_cannot_be_tested_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
