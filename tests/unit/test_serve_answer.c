/* Replies: the same events as a stream and as a whole document say the same. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "serve/answer.h"

static const struct reply_head head = {
    .id = "chatcmpl-1", .created = 5, .model = "m", .fingerprint = "f", .include_usage = true};

static const lily_result result = {.finish = LILY_FINISH_TOOLS,
                                   .prompt_tokens = 10,
                                   .cached_tokens = 4,
                                   .output_tokens = 7,
                                   .reasoning_tokens = 2};

static const struct {
    enum lily_event_kind kind;
    const char *text;
    int call;
} events[] = {
    {LILY_EVENT_PREFILL, "", 0},
    {LILY_EVENT_REASONING, "hm", 0},
    {LILY_EVENT_REASONING, "m\xc2\x85", 0},
    {LILY_EVENT_CONTENT, "a", 0},
    {LILY_EVENT_CONTENT, "\xf0\x9f\x98\x80", 0},
    {LILY_EVENT_TOOL_BEGIN, "f", 0},
    {LILY_EVENT_TOOL_ARGS, "{\"x\":", 0},
    {LILY_EVENT_TOOL_ARGS, " 1}", 0},
    {LILY_EVENT_TOOL_END, "", 0},
    {LILY_EVENT_TOOL_BEGIN, "g", 1},
    {LILY_EVENT_TOOL_END, "", 1},
};

/* All events of the list and the end. hold: as to a reader that never catches up. */
static void play(struct answer *a, bool hold, struct buf *out) {
    assert_true(answer_begin(a, out));
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        lily_event e = {.kind = events[i].kind,
                        .text = events[i].text,
                        .n = strlen(events[i].text),
                        .call = events[i].call};
        assert_true(answer_event(a, &e, hold, out));
    }
    assert_true(answer_finish(a, result.finish, &result, out));
}

/* What a client makes of a stream. */
struct client {
    struct buf content, reasoning, args[2];
    char name[2][16], id[2][64], finish[32];
    int chunks, calls, roles, usages;
    bool done;
};

static void take_text(struct buf *to, const json_t *from) {
    if (from) assert_true(buf_append(to, json_string_value(from), json_string_length(from)));
}

static void take_call(struct client *c, const json_t *call) {
    const json_t *function = json_object_get(call, "function");
    const char *name = json_string_value(json_object_get(function, "name"));
    int index = (int)json_integer_value(json_object_get(call, "index"));
    assert_true(index >= 0 && index < 2 && !c->finish[0]);
    if (name) {
        assert_int_equal(index, c->calls);
        c->calls++;
        snprintf(c->name[index], sizeof c->name[index], "%s", name);
        snprintf(c->id[index], sizeof c->id[index], "%s",
                 json_string_value(json_object_get(call, "id")));
        assert_string_equal(json_string_value(json_object_get(call, "type")), "function");
    }
    take_text(&c->args[index], json_object_get(function, "arguments"));
}

static void take_chunk(struct client *c, const json_t *chunk) {
    const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
    const json_t *delta = json_object_get(choice, "delta");
    assert_string_equal(json_string_value(json_object_get(chunk, "id")), "chatcmpl-1");
    assert_false(c->done);
    if (!choice) {
        assert_true(c->finish[0] && json_is_object(json_object_get(chunk, "usage")));
        c->usages++;
        return;
    }
    assert_true(json_is_null(json_object_get(chunk, "usage")));
    assert_int_equal(c->finish[0], 0); /* nothing follows the terminal chunk */
    c->chunks++;
    if (json_object_get(delta, "role")) {
        assert_int_equal(c->chunks, 1);
        c->roles++;
    }
    take_text(&c->content, json_object_get(delta, "content"));
    take_text(&c->reasoning, json_object_get(delta, "reasoning_content"));
    if (json_object_get(delta, "tool_calls"))
        take_call(c, json_array_get(json_object_get(delta, "tool_calls"), 0));
    const json_t *finish = json_object_get(choice, "finish_reason");
    if (json_is_string(finish)) {
        assert_int_equal(json_object_size(delta), 0);
        snprintf(c->finish, sizeof c->finish, "%s", json_string_value(finish));
    }
}

static void read_stream(struct client *c, const char *text) {
    while (*text) {
        assert_memory_equal(text, "data: ", 6);
        const char *end = strstr(text, "\n\n");
        assert_non_null(end);
        if (!strncmp(text + 6, "[DONE]", 6)) {
            c->done = true;
        } else {
            json_t *chunk = json_loadb(text + 6, (size_t)(end - text) - 6, 0, NULL);
            assert_non_null(chunk);
            take_chunk(c, chunk);
            json_decref(chunk);
        }
        text = end + 2;
    }
}

static void client_free(struct client *c) {
    buf_free(&c->content);
    buf_free(&c->reasoning);
    for (int i = 0; i < 2; i++) buf_free(&c->args[i]);
}

static void check_stream(bool hold, int chunks) {
    struct answer a;
    struct buf out = {0};
    struct client c = {0};
    answer_init(&a, &head, true);
    play(&a, hold, &out);
    read_stream(&c, out.data);
    assert_int_equal(c.chunks, chunks);
    assert_true(c.done && c.roles == 1 && c.usages == 1 && c.calls == 2);
    assert_string_equal(c.content.data, "a\xf0\x9f\x98\x80");
    assert_string_equal(c.reasoning.data, "hmm\xc2\x85");
    assert_string_equal(c.args[0].data, "{\"x\": 1}");
    assert_string_equal(c.args[1].data, "{}");
    assert_string_equal(c.name[0], "f");
    assert_string_equal(c.name[1], "g");
    assert_string_equal(c.finish, "tool_calls");
    assert_string_not_equal(c.id[0], c.id[1]);
    client_free(&c);
    answer_free(&a);
    buf_free(&out);
}

static void stream_says_all(void **state) {
    (void)state;
    check_stream(false, 11); /* role, 4 texts, 2 names, 3 arguments, finish */
}

static void slow_reader_gets_the_same_in_fewer_chunks(void **state) {
    (void)state;
    check_stream(true, 8); /* role, reasoning, content, 2 x (name, arguments), finish */
}

static void whole_reply_says_the_same(void **state) {
    (void)state;
    struct answer a;
    struct buf out = {0};
    answer_init(&a, &head, false);
    play(&a, false, &out);
    json_t *root = json_loads(out.data, 0, NULL);
    json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
    json_t *message = json_object_get(choice, "message");
    json_t *calls = json_object_get(message, "tool_calls");
    json_t *usage = json_object_get(root, "usage");
    assert_string_equal(json_string_value(json_object_get(message, "content")),
                        "a\xf0\x9f\x98\x80");
    assert_string_equal(json_string_value(json_object_get(message, "reasoning_content")),
                        "hmm\xc2\x85");
    assert_int_equal(json_array_size(calls), 2);
    for (size_t i = 0; i < 2; i++) {
        json_t *function = json_object_get(json_array_get(calls, i), "function");
        assert_string_equal(json_string_value(json_object_get(function, "name")), i ? "g" : "f");
        assert_string_equal(json_string_value(json_object_get(function, "arguments")),
                            i ? "{}" : "{\"x\": 1}");
    }
    assert_string_equal(json_string_value(json_object_get(choice, "finish_reason")), "tool_calls");
    assert_int_equal(json_integer_value(json_object_get(usage, "total_tokens")), 17);
    json_t *details = json_object_get(usage, "prompt_tokens_details");
    assert_int_equal(json_integer_value(json_object_get(details, "cached_tokens")), 4);
    details = json_object_get(usage, "completion_tokens_details");
    assert_int_equal(json_integer_value(json_object_get(details, "reasoning_tokens")), 2);
    json_decref(root);
    answer_free(&a);
    buf_free(&out);
}

static void empty_reply_has_content_and_no_usage_chunk(void **state) {
    (void)state;
    struct reply_head plain = head;
    struct answer a;
    struct buf out = {0};
    plain.include_usage = false;
    answer_init(&a, &plain, true);
    assert_true(answer_begin(&a, &out) && answer_finish(&a, LILY_FINISH_LENGTH, &result, &out));
    assert_null(strstr(out.data, "usage"));
    assert_non_null(
        strstr(out.data, "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\""));
    answer_free(&a);
    buf_clear(&out);
    answer_init(&a, &plain, false);
    assert_true(answer_finish(&a, LILY_FINISH_STOP, &result, &out));
    assert_non_null(strstr(out.data, "\"content\":\"\""));
    assert_null(strstr(out.data, "tool_calls"));
    answer_free(&a);
    buf_free(&out);
}

static void failed_stream_ends_properly(void **state) {
    (void)state;
    struct answer a;
    struct buf out = {0};
    struct api_error err;
    lily_event e = {.kind = LILY_EVENT_CONTENT, .text = "held", .n = 4};
    api_error_set(&err, 500, "engine_failed", NULL, "state: found NaN");
    answer_init(&a, &head, true);
    assert_true(answer_event(&a, &e, true, &out));
    assert_int_equal(out.len, 0);
    assert_true(answer_error(&a, &err, &out));
    const char *held = strstr(out.data, "held"), *error = strstr(out.data, "data: {\"error\":{");
    assert_true(held && error && held < error); /* what was held back is not lost */
    assert_string_equal(out.data + out.len - 14, "data: [DONE]\n\n");
    answer_free(&a);
    buf_free(&out);
}

static void ids_differ(void **state) {
    (void)state;
    char a[40], b[40], small[8];
    answer_make_id(a, sizeof a, "chatcmpl-");
    answer_make_id(b, sizeof b, "chatcmpl-");
    answer_make_id(small, sizeof small, "call_");
    assert_memory_equal(a, "chatcmpl-", 9);
    assert_string_not_equal(a, b);
    assert_int_equal(strlen(a), 9 + 24);
    assert_int_equal(strlen(small), 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stream_says_all),
        cmocka_unit_test(slow_reader_gets_the_same_in_fewer_chunks),
        cmocka_unit_test(whole_reply_says_the_same),
        cmocka_unit_test(empty_reply_has_content_and_no_usage_chunk),
        cmocka_unit_test(failed_stream_ends_properly),
        cmocka_unit_test(ids_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
