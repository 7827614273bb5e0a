/* Chat requests: what is taken from a body, and what is refused by which name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "serve/request.h"

#define ONE_MESSAGE "\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]"

static const struct request_limits limits = {
    .vocab = 1000,
    .thinking = {.temperature = 1.0f,
                 .top_k = 20,
                 .top_p = 0.95f,
                 .presence_penalty = 1.5f,
                 .repetition_penalty = 1.0f},
    .plain = {.temperature = 0.7f, .top_k = 20, .top_p = 0.8f, .repetition_penalty = 1.0f},
};

static struct chat_request *parse(const char *fields, struct api_error *err) {
    char body[4096];
    struct chat_request *r;
    snprintf(body, sizeof body, "{" ONE_MESSAGE "%s%s}", fields[0] ? ", " : "", fields);
    return request_parse(body, strlen(body), &limits, &r, err) ? NULL : r;
}

static struct chat_request *parse_good(const char *fields) {
    struct api_error err = {0};
    struct chat_request *r = parse(fields, &err);
    if (!r) fail_msg("%s: %s", fields, err.message);
    return r;
}

static bool near(float a, double b) {
    double d = (double)a - b;
    return d < 1e-6 && d > -1e-6;
}

static void defaults_follow_the_mode(void **state) {
    (void)state;
    struct chat_request *r = parse_good("");
    assert_true(r->thinking && !r->stream && !r->preserve_thinking);
    assert_true(near(r->sampling.temperature, 1.0) && near(r->sampling.presence_penalty, 1.5));
    assert_true(r->sampling.random_seed);
    assert_int_equal(r->max_tokens, 0);
    assert_null(r->tools);
    assert_string_equal(r->messages, "[{\"role\":\"user\",\"content\":\"hi\"}]");
    request_free(r);
    static const char *const off[] = {
        "\"chat_template_kwargs\": {\"enable_thinking\": false}",
        "\"reasoning_effort\": \"none\"",
        "\"enable_thinking\": false",
        "\"reasoning_effort\": \"high\", \"chat_template_kwargs\": {\"enable_thinking\": false}",
    };
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        r = parse_good(off[i]);
        assert_false(r->thinking);
        assert_true(near(r->sampling.temperature, 0.7) && near(r->sampling.top_p, 0.8));
        request_free(r);
    }
}

static void fields_reach_the_request(void **state) {
    (void)state;
    struct chat_request *r = parse_good(
        "\"temperature\": 0, \"top_p\": 0.5, \"top_k\": -1, \"min_p\": 0.25, \"seed\": -7,"
        "\"presence_penalty\": -2, \"frequency_penalty\": 2, \"repetition_penalty\": 1.5,"
        "\"logit_bias\": {\"0\": -100, \"999\": 1.5}, \"stop\": [\"a\", \"\", \"b\"],"
        "\"max_tokens\": 5, \"max_completion_tokens\": 7.0, \"stream\": true,"
        "\"stream_options\": {\"include_usage\": true}, \"ignore_eos\": true,"
        "\"chat_template_kwargs\": {\"preserve_thinking\": true, \"other\": 1},"
        "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}],"
        "\"tool_choice\": \"auto\", \"parallel_tool_calls\": false, \"user\": \"me\","
        "\"model\": \"any\", \"n\": 1, \"logprobs\": false, \"no_such_field\": {\"x\": []}");
    const lily_sampling *s = &r->sampling;
    assert_true(near(s->temperature, 0) && near(s->top_p, 0.5) && near(s->min_p, 0.25));
    assert_int_equal(s->top_k, 0);
    assert_true(s->seed == (uint64_t)-7 && !s->random_seed);
    assert_true(near(s->presence_penalty, -2) && near(s->frequency_penalty, 2));
    assert_true(near(s->repetition_penalty, 1.5));
    assert_int_equal(s->n_bias, 2);
    assert_true(s->bias_ids[0] == 0 && near(s->bias[0], -100));
    assert_true(s->bias_ids[1] == 999 && near(s->bias[1], 1.5));
    assert_int_equal(r->n_stops, 2);
    assert_string_equal(r->stops[1], "b");
    assert_int_equal(r->max_tokens, 7);
    assert_true(r->stream && r->include_usage && r->ignore_eos && r->preserve_thinking);
    assert_non_null(strstr(r->tools, "\"name\":\"f\""));
    request_free(r);
}

static void null_is_absent(void **state) {
    (void)state;
    struct chat_request *r = parse_good(
        "\"temperature\": null, \"stop\": null, \"tools\": null, \"stream\": null, \"seed\": null,"
        "\"logit_bias\": null, \"stream_options\": null, \"response_format\": null, \"n\": null,"
        "\"chat_template_kwargs\": null, \"tool_choice\": null, \"max_tokens\": null");
    assert_true(near(r->sampling.temperature, 1.0) && r->sampling.random_seed);
    request_free(r);
}

static void unlimited_and_tool_choice_none(void **state) {
    (void)state;
    struct chat_request *r =
        parse_good("\"max_tokens\": -1, \"tool_choice\": \"none\", \"tools\":"
                   "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]");
    assert_int_equal(r->max_tokens, 0);
    assert_null(r->tools);
    request_free(r);
}

static void wrong_fields_are_named(void **state) {
    (void)state;
    static const struct {
        const char *fields, *param;
    } cases[] = {
        {"\"temperature\": \"hot\"", "temperature"},
        {"\"temperature\": 2.5", "temperature"},
        {"\"top_p\": true", "top_p"},
        {"\"top_k\": 1.5", "top_k"},
        {"\"seed\": \"x\"", "seed"},
        {"\"max_tokens\": 0", "max_tokens"},
        {"\"max_tokens\": 1.5", "max_tokens"},
        {"\"max_completion_tokens\": -2", "max_completion_tokens"},
        {"\"stream\": \"true\"", "stream"},
        {"\"stream\": true, \"stream_options\": []", "stream_options"},
        {"\"stream\": true, \"stream_options\": {\"include_usage\": 1}",
         "stream_options.include_usage"},
        {"\"stream_options\": {\"include_usage\": true}", "stream_options"},
        {"\"stop\": 5", "stop"},
        {"\"stop\": [\"a\", 5]", "stop[1]"},
        {"\"stop\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "stop"},
        {"\"logit_bias\": [1]", "logit_bias"},
        {"\"logit_bias\": {\"1000\": 1}", "logit_bias"},
        {"\"logit_bias\": {\"-1\": 1}", "logit_bias"},
        {"\"logit_bias\": {\"1x\": 1}", "logit_bias"},
        {"\"logit_bias\": {\"01\": 1}", "logit_bias"},
        {"\"logit_bias\": {\"1\": 101}", "logit_bias.1"},
        {"\"logit_bias\": {\"1\": null}", "logit_bias.1"},
        {"\"model\": 5", "model"},
        {"\"user\": 5", "user"},
        {"\"tools\": {}", "tools"},
        {"\"tools\": [5]", "tools[0]"},
        {"\"tools\": [{\"type\": \"custom\"}]", "tools[0]"},
        {"\"tools\": [{\"type\": \"function\"}]", "tools[0].function"},
        {"\"tools\": [{\"function\": {\"name\": 5}}]", "tools[0].function.name"},
        {"\"tools\": [{\"function\": {\"name\": \"f\", \"parameters\": \"{}\"}}]",
         "tools[0].function.parameters"},
        {"\"tool_choice\": \"required\"", "tool_choice"},
        {"\"tool_choice\": {\"type\": \"function\"}", "tool_choice"},
        {"\"tool_choice\": 1", "tool_choice"},
        {"\"reasoning_effort\": \"extreme\"", "reasoning_effort"},
        {"\"chat_template_kwargs\": {\"enable_thinking\": \"false\"}",
         "chat_template_kwargs.enable_thinking"},
        {"\"n\": 2", "n"},
        {"\"logprobs\": true", "logprobs"},
        {"\"top_logprobs\": 3", "top_logprobs"},
        {"\"response_format\": {\"type\": \"json_object\"}", "response_format"},
        {"\"functions\": [{\"name\": \"f\"}]", "functions"},
        {"\"guided_json\": {}", "guided_json"},
        {"\"prompt_logprobs\": 1", "prompt_logprobs"},
        {"\"echo\": true", "echo"},
        {"\"use_beam_search\": true", "use_beam_search"},
        {"\"modalities\": [\"audio\"]", "modalities"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct api_error err = {0};
        struct chat_request *r = parse(cases[i].fields, &err);
        if (r) fail_msg("%s: accepted", cases[i].fields);
        assert_int_equal(err.status, 400);
        assert_string_equal(err.param, cases[i].param);
        /* A person can tell the field from the message alone. */
        assert_memory_equal(err.message, cases[i].param, strlen(cases[i].param));
    }
}

/* The message says what is wrong with the value: its kind, or that it is too large. */
static void integers_of_any_size(void **state) {
    (void)state;
    static const struct {
        const char *fields, *code;
    } cases[] = {
        {"\"seed\": 18446744073709551615", "invalid_value"},
        {"\"seed\": 1e30", "invalid_value"},
        {"\"seed\": 9223372036854775808", "invalid_value"},
        {"\"top_k\": 1e10", "invalid_value"},
        {"\"max_tokens\": -1e300", "invalid_value"},
        {"\"seed\": 0.5", "invalid_type"},
        {"\"seed\": [1]", "invalid_type"},
        {"\"seed\": false", "invalid_type"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct api_error err = {0};
        struct chat_request *r = parse(cases[i].fields, &err);
        if (r) fail_msg("%s: accepted", cases[i].fields);
        assert_string_equal(err.code, cases[i].code);
    }
    struct chat_request *r =
        parse_good("\"seed\": 9007199254740993, \"max_tokens\": 9223372036854775807");
    assert_true(r->sampling.seed == 9007199254740993u);
    assert_int_equal(r->max_tokens, INT32_MAX);
    request_free(r);
    r = parse_good("\"seed\": -9.223372036854775808e18, \"max_tokens\": 1e17");
    assert_true(r->sampling.seed == (uint64_t)INT64_MIN);
    assert_int_equal(r->max_tokens, INT32_MAX);
    request_free(r);
}

/* What was found is told so that it differs from what was expected. */
static void values_are_told_in_full(void **state) {
    (void)state;
    struct api_error err = {0};
    assert_null(parse("\"top_p\": 1.0000001", &err));
    assert_string_equal(err.message, "top_p: found 1.0000001, expected a number from 0 to 1");
    assert_null(parse("\"seed\": 9223372036854775808", &err));
    assert_memory_equal(err.message, "seed: found 9223372036854775808, ", 33);
    struct chat_request *r = NULL;
    assert_int_equal(request_parse("{\"messages\": []}", 16, &limits, &r, &err), -1);
    assert_string_equal(
        err.message, "messages: found an empty array, expected an array of at least one message");
}

static void check_body(const char *body, int status, const char *param) {
    struct api_error err = {0};
    struct chat_request *r = NULL;
    int rc = request_parse(body, strlen(body), &limits, &r, &err);
    request_free(r);
    if (err.status != status || strcmp(err.param, param))
        fail_msg("%s: %d \"%s\" (%s)", body, err.status, err.param, err.message);
    assert_int_equal(rc, status ? -1 : 0);
}

static void messages_are_checked_by_path(void **state) {
    (void)state;
#define M(text) "{\"messages\": [" text "]}"
    check_body("{}", 400, "messages");
    check_body("{\"messages\": []}", 400, "messages");
    check_body("{\"messages\": \"hi\"}", 400, "messages");
    check_body(M("5"), 400, "messages[0]");
    check_body(M("{\"content\": \"x\"}"), 400, "messages[0].role");
    check_body(M("{\"role\": \"robot\", \"content\": \"x\"}"), 400, "messages[0].role");
    check_body(M("{\"role\": \"user\", \"content\": 5}"), 400, "messages[0].content");
    check_body(M("{\"role\": \"user\", \"content\": {}}"), 400, "messages[0].content");
    check_body(M("{\"role\": \"user\", \"content\": [5]}"), 400, "messages[0].content[0]");
    check_body(M("{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}, "
                 "{\"type\": \"image_url\", \"image_url\": {\"url\": \"data:\"}}]}"),
               400, "messages[0].content[1]");
    check_body(M("{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}"), 400,
               "messages[0].content[0].text");
    check_body(M("{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                 "\"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": 5}}]}"),
               400, "messages[1].tool_calls[0].function.arguments");
    check_body(M("{\"role\": \"assistant\", \"tool_calls\": {}}"), 400, "messages[0].tool_calls");
    check_body(M("{\"role\": \"tool\", \"tool_call_id\": 5}"), 400, "messages[0].tool_call_id");
    check_body(M("{\"role\": \"user\", \"content\": \"\\ud83d\"}"), 400, "messages[0].content");
    check_body(M("{\"role\": \"assistant\", \"function_call\": \"f\"}"), 400,
               "messages[0].function_call");
    check_body(M("{\"role\": \"assistant\", \"function_call\": {}}"), 400,
               "messages[0].function_call.name");
    check_body(M("{\"role\": \"assistant\", \"function_call\": {\"name\": \"f\", "
                 "\"arguments\": 5}}"),
               400, "messages[0].function_call.arguments");
    check_body(M("{\"role\": \"assistant\", \"tool_calls\": [{\"arguments\": {}}]}"), 400,
               "messages[0].tool_calls[0].name");
    /* what real clients send */
    check_body(M("{\"role\": \"user\", \"content\": [\"a\", {\"type\": \"input_text\", "
                 "\"text\": \"b\"}]}, {\"role\": \"assistant\", \"content\": [{\"type\": "
                 "\"refusal\", \"refusal\": \"no\"}], \"function_call\": {\"name\": \"f\", "
                 "\"arguments\": \"{}\"}}, {\"role\": \"function\", \"name\": \"f\", "
                 "\"content\": \"1\"}"),
               0, "");
    check_body(M("{\"role\": \"system\", \"content\": null}, {\"role\": \"developer\", "
                 "\"content\": []}, {\"role\": \"user\", \"content\": [{\"type\": \"text\", "
                 "\"text\": \"\"}]}"),
               0, "");
    check_body(M("{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": "
                 "null, \"reasoning\": \"r\", \"tool_calls\": [{\"id\": \"1\", \"type\": "
                 "\"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"a\": 1}}}]}, "
                 "{\"role\": \"tool\", \"tool_call_id\": \"1\", \"content\": \"\"}"),
               0, "");
#undef M
}

static void bodies_that_are_no_request(void **state) {
    (void)state;
    check_body("", 400, "");
    check_body("hello", 400, "");
    check_body("[]", 400, "");
    check_body("\"x\"", 400, "");
    check_body("{\"messages\": [}", 400, "");
    check_body("{" ONE_MESSAGE "} trailing", 400, "");
    check_body("{\"a\": \"\xff\xfe\"}", 400, "");
    check_body("{" ONE_MESSAGE ", \"seed\": 99999999999999999999999}", 400, "seed");
}

static void a_begun_answer_is_continued_without_thinking(void **state) {
    (void)state;
    static const struct {
        const char *last;
        bool thinking;
    } cases[] = {
        {"{\"role\": \"assistant\", \"content\": \"Sure,\"}", false},
        {"{\"role\": \"assistant\", \"content\": \"Sure,\", \"tool_calls\": []}", false},
        {"{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\"}}]}", true},
        {"{\"role\": \"user\", \"content\": \"Sure,\"}", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[512];
        struct api_error err = {0};
        struct chat_request *r = NULL;
        snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\"}, %s]}", cases[i].last);
        assert_int_equal(request_parse(body, strlen(body), &limits, &r, &err), 0);
        assert_int_equal(r->thinking, cases[i].thinking);
        request_free(r);
    }
}

static void wide_integers_in_schemas_are_kept(void **state) {
    (void)state;
    struct chat_request *r =
        parse_good("\"tools\": [{\"function\": {\"name\": \"f\", \"parameters\": {\"maximum\": "
                   "18446744073709551615}}}]");
    json_t *tools = json_loads(r->tools, 0, NULL);
    json_t *function = json_object_get(json_array_get(tools, 0), "function");
    json_t *maximum = json_object_get(json_object_get(function, "parameters"), "maximum");
    assert_true(json_real_value(maximum) == 18446744073709551616.0);
    json_decref(tools);
    request_free(r);
}

static void nul_in_text_is_kept(void **state) {
    (void)state;
    const char body[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000b\"}]}";
    struct api_error err = {0};
    struct chat_request *r = NULL;
    assert_int_equal(request_parse(body, strlen(body), &limits, &r, &err), 0);
    assert_non_null(strstr(r->messages, "a\\u0000b"));
    request_free(r);
}

static void engine_errors_become_statuses(void **state) {
    (void)state;
    static const struct {
        int code, status;
    } cases[] = {{LILY_EINVAL, 400},   {LILY_ECONTEXT, 400}, {LILY_EBUSY, 503}, {LILY_ENOMEM, 503},
                 {LILY_EBACKEND, 503}, {LILY_ENUMERIC, 500}, {LILY_EIO, 500}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lily_err engine = {.code = cases[i].code, .msg = "messages[3].content: found this"};
        struct api_error err;
        api_error_from_engine(&err, &engine, 20, 10);
        assert_int_equal(err.status, cases[i].status);
        if (cases[i].code == LILY_EINVAL) assert_string_equal(err.param, "messages[3].content");
        if (cases[i].code == LILY_ECONTEXT) {
            assert_string_equal(err.code, "context_length_exceeded");
            assert_true(err.n_prompt == 20 && err.n_ctx == 10);
        }
        json_t *json = api_error_json(&err), *body = json_object_get(json, "error");
        assert_true(json_is_string(json_object_get(body, "message")));
        assert_string_equal(json_string_value(json_object_get(body, "type")),
                            err.status >= 500 ? "server_error" : "invalid_request_error");
        json_decref(json);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_follow_the_mode),
        cmocka_unit_test(fields_reach_the_request),
        cmocka_unit_test(null_is_absent),
        cmocka_unit_test(unlimited_and_tool_choice_none),
        cmocka_unit_test(wrong_fields_are_named),
        cmocka_unit_test(integers_of_any_size),
        cmocka_unit_test(values_are_told_in_full),
        cmocka_unit_test(messages_are_checked_by_path),
        cmocka_unit_test(bodies_that_are_no_request),
        cmocka_unit_test(a_begun_answer_is_continued_without_thinking),
        cmocka_unit_test(wide_integers_in_schemas_are_kept),
        cmocka_unit_test(nul_in_text_is_kept),
        cmocka_unit_test(engine_errors_become_statuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
