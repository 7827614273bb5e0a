/* lily plan: which backend's recording is counted, at what steps, beside what bound. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/plan.h"
#include "model/least.h"

/* Figures that tell which query they answer. */
static int echo(const struct shape *s, const struct plan_query *q, struct backend_plan *out,
                lily_err *err) {
    if (q->depth == 13) return ERR(err, LILY_ENOMEM, "echo: not at 13");
    struct least least = shape_least(s, q->layers, q->tokens);
    *out = (struct backend_plan){
        .kernels = 10 * q->layers,
        .stages = q->tokens,
        .barriers = 3,
        .command_buffers = 4,
        .host_syncs = 5,
        .weight_bytes = 2 * least.weight_bytes,
        .state_bytes = 2 * (least.state_bytes + least.conv_bytes),
        .kv_bytes = 2 * (uint64_t)q->depth * least.kv_bytes_token,
        .read_bytes = 6,
        .written_bytes = 7,
    };
    return 0;
}

static int other(const struct shape *s, const struct plan_query *q, struct backend_plan *out,
                 lily_err *err) {
    (void)s, (void)q, (void)err;
    *out = (struct backend_plan){.kernels = 1};
    return 0;
}

/* One that is usable, one that records nothing, and one whose recording half alone is there. */
static const struct backend whole = {.name = "whole", .plan = echo};
static const struct backend silent = {.name = "silent"};
static const struct backend *const all[] = {&whole, &silent, NULL};
static const struct backend_planner plans[] = {{"half", other}, {NULL, NULL}};
static const struct backend_planner no_plans[] = {{NULL, NULL}};

static json_t *plan(const lily_plan_options *o) {
    char *text;
    lily_err err = {0};
    if (engine_plan(all, plans, o, &text, &err)) fail_msg("%s", err.msg);
    json_t *doc = json_loads(text, 0, NULL);
    assert_non_null(doc);
    free(text);
    return doc;
}

static int64_t number(const json_t *object, const char *name) {
    json_t *value = json_object_get(object, name);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

static void refused(const lily_plan_options *o, const char *message) {
    char *text;
    lily_err err = {0};
    assert_int_not_equal(engine_plan(all, plans, o, &text, &err), 0);
    assert_null(text);
    if (!strstr(err.msg, message)) fail_msg("\"%s\" lacks \"%s\"", err.msg, message);
}

static void test_default_steps(void **state) {
    (void)state;
    json_t *doc = plan(&(lily_plan_options){.backend = "whole"}), *step;
    assert_string_equal(json_string_value(json_object_get(doc, "backend")), "whole");
    assert_string_equal(json_string_value(json_object_get(doc, "shape")), "qwen3.6-35b-a3b");
    assert_int_equal(number(doc, "layers"), 40);
    const int64_t depths[] = {0, 4096, 32768, 131072, 0}, tokens[] = {1, 1, 1, 1, 512};
    json_t *steps = json_object_get(doc, "steps");
    assert_int_equal(json_array_size(steps), 5);
    size_t i;
    json_array_foreach(steps, i, step) {
        assert_int_equal(number(step, "depth"), depths[i]);
        assert_int_equal(number(step, "tokens"), tokens[i]);
        assert_int_equal(number(step, "kernels"), 400);
        assert_int_equal(number(step, "stages"), tokens[i]);
        assert_int_equal(number(step, "barriers"), 3);
        assert_int_equal(number(step, "command_buffers"), 4);
        assert_int_equal(number(step, "host_syncs"), 5);
        assert_int_equal(number(step, "read_bytes"), 6);
        assert_int_equal(number(step, "written_bytes"), 7);
        assert_int_equal(number(step, "unique_bytes"), number(step, "weight_bytes") +
                                                           number(step, "state_bytes") +
                                                           number(step, "kv_bytes"));
        assert_int_equal(number(step, "unique_bytes"), 2 * number(step, "least_bytes"));
        assert_true(json_real_value(json_object_get(step, "of_least")) == 2.0);
    }
    json_decref(doc);
}

static void test_asked_steps(void **state) {
    (void)state;
    const int32_t depths[] = {5, 6}, tokens[] = {1, 64};
    lily_plan_options o = {
        .backend = "whole", .shape = "mini", .layers = 4, .depths = depths, .n_depths = 2};
    json_t *doc = plan(&o);
    json_t *steps = json_object_get(doc, "steps");
    assert_int_equal(json_array_size(steps), 2);
    assert_int_equal(number(json_array_get(steps, 1), "depth"), 6);
    assert_int_equal(number(json_array_get(steps, 1), "tokens"), 1);
    assert_int_equal(number(json_array_get(steps, 1), "kernels"), 40);
    json_decref(doc);
    o.tokens = tokens, o.n_tokens = 2;
    doc = plan(&o);
    steps = json_object_get(doc, "steps");
    assert_int_equal(json_array_size(steps), 4);
    assert_int_equal(number(json_array_get(steps, 2), "depth"), 5);
    assert_int_equal(number(json_array_get(steps, 2), "tokens"), 64);
    json_decref(doc);
    o.n_depths = 0; /* a prompt chunk at the usual depths */
    doc = plan(&o);
    assert_int_equal(json_array_size(json_object_get(doc, "steps")), 8);
    json_decref(doc);
}

/* Several sessions in a step: each reads its own state and context, the weights are shared. */
static void test_sessions(void **state) {
    (void)state;
    const int32_t depth = 100, sessions[] = {1, 3}, two = 2;
    lily_plan_options o = {
        .backend = "whole", .depths = &depth, .n_depths = 1, .sessions = sessions, .n_sessions = 2};
    json_t *doc = plan(&o), *steps = json_object_get(doc, "steps");
    const struct shape *s = &shape_qwen36_35b_a3b;
    struct least least = shape_least(s, 40, 3);
    assert_int_equal(json_array_size(steps), 2);
    assert_null(json_object_get(json_array_get(steps, 0), "sessions"));
    json_t *three = json_array_get(steps, 1);
    assert_int_equal(number(three, "sessions"), 3);
    assert_int_equal(number(three, "least_bytes"),
                     least.weight_bytes +
                         3 * (least.state_bytes + least.conv_bytes + 100 * least.kv_bytes_token));
    json_decref(doc);
    o.tokens = &two, o.n_tokens = 1;
    refused(&o, "plan: found 3 sessions of 2 tokens, expected one, or up to");
}

static void test_which_backend(void **state) {
    (void)state;
    json_t *doc = plan(&(lily_plan_options){.backend = "half"});
    json_t *step = json_array_get(json_object_get(doc, "steps"), 0);
    assert_int_equal(number(step, "kernels"), 1);
    json_decref(doc);
    refused(&(lily_plan_options){.backend = "silent"},
            "backend silent: records no plan of its steps; ask for one that does: half, whole");
    refused(&(lily_plan_options){.backend = "nothing"},
            "backend: found \"nothing\", expected one with a plan: half, whole");
    static const struct backend *const quiet[] = {&silent, NULL};
    char *text;
    lily_err err;
    const lily_plan_options o = {.backend = "silent"};
    assert_int_equal(engine_plan(quiet, no_plans, &o, &text, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "none in this build"));
}

static void test_refusals(void **state) {
    (void)state;
    const int32_t far = 262144, negative = -1, none = 0, unlucky = 13;
    refused(&(lily_plan_options){.backend = "whole", .shape = "tiny"},
            "shape: found \"tiny\", expected one of qwen3.6-35b-a3b, mini");
    refused(&(lily_plan_options){0}, "backend: found \"\"");
    refused(&(lily_plan_options){.backend = "whole", .layers = 6}, "layers: found 6");
    refused(&(lily_plan_options){.backend = "whole", .layers = 44}, "layers: found 44");
    refused(&(lily_plan_options){.backend = "whole", .layers = -4}, "layers: found -4");
    refused(&(lily_plan_options){.backend = "whole", .depths = &far, .n_depths = 1},
            "plan: found 1 tokens at depth 262144");
    refused(&(lily_plan_options){.backend = "whole", .depths = &negative, .n_depths = 1},
            "at depth -1");
    refused(&(lily_plan_options){.backend = "whole", .tokens = &none, .n_tokens = 1},
            "plan: found 0 tokens");
    refused(&(lily_plan_options){.backend = "whole", .depths = &unlucky, .n_depths = 1},
            "echo: not at 13");
}

/* The bound of docs/numbers.md, from the shape's numbers. */
static void test_least(void **state) {
    (void)state;
    const struct shape *s = &shape_qwen36_35b_a3b;
    struct least least = shape_least(s, 40, 1);
    assert_int_equal(least.weight_bytes, 1669561728);
    assert_int_equal(least.state_bytes, 62914560);
    assert_int_equal(least.conv_bytes, 2949120);
    assert_int_equal(least.kv_bytes_token, 20480);
    /* Half of the layers: half of what lies in layers. */
    uint64_t outside = 286064640 + 1152 + 2 * 2048; /* head, one embedding row, final norm */
    struct least half = shape_least(s, 20, 1);
    assert_int_equal(2 * (half.weight_bytes - outside), least.weight_bytes - outside);
    assert_int_equal(2 * half.state_bytes, least.state_bytes);
    /* 32 tokens can choose all 256 experts, no more. */
    uint64_t expert = 566231040 / 8;
    assert_int_equal(shape_least(s, 40, 4).weight_bytes,
                     least.weight_bytes + 24 * expert + 3 * 1152);
    assert_int_equal(shape_least(s, 40, 32).weight_bytes,
                     least.weight_bytes + 248 * expert + 31 * 1152);
    assert_int_equal(shape_least(s, 40, 512).weight_bytes,
                     least.weight_bytes + 248 * expert + 511 * 1152);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default_steps), cmocka_unit_test(test_asked_steps),
        cmocka_unit_test(test_sessions),      cmocka_unit_test(test_which_backend),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_least),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
