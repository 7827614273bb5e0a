/* chat_mend: each rule of docs/clients.md, and that the caller's messages stay as they were. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "text/chat_template.h"
#include "text/json_text.h"

static json_t *parse(const char *text) {
    json_t *v = NULL;
    lily_err err;
    if (json_text_load("test", text, strlen(text), &v, &err)) fail_msg("%s: %s", text, err.msg);
    return v;
}

static void expect(const char *messages, const char *want) {
    json_t *in = parse(messages), *before = json_deep_copy(in), *out = NULL, *wanted = parse(want);
    lily_err err;
    if (chat_mend(in, &out, &err)) fail_msg("%s: %s", messages, err.msg);
    if (!json_equal(out, wanted)) {
        struct buf got = {0};
        json_text_append(&got, out);
        fail_msg("%s: got %s, want %s", messages, got.data, want);
    }
    assert_true(json_equal(in, before));
    json_decref(in);
    json_decref(before);
    json_decref(out);
    json_decref(wanted);
}

static void refuse(const char *messages, const char *want) {
    json_t *in = parse(messages), *out = NULL;
    lily_err err = {0};
    assert_int_equal(chat_mend(in, &out, &err), LILY_EINVAL);
    if (!strstr(err.msg, want)) fail_msg("%s: got \"%s\", want \"%s\"", messages, err.msg, want);
    json_decref(in);
}

#define USER      "{\"role\":\"user\",\"content\":\"u\"}"
#define ASSISTANT "{\"role\":\"assistant\",\"content\":\"a\"}"

static void test_what_is_right_stays(void **state) {
    (void)state;
    static const char *const fine[] = {
        "[" USER "]",
        "[{\"role\":\"system\",\"content\":\"s\"}," USER "," ASSISTANT "," USER "]",
        "[" USER ",{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"r\","
        "\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":{\"a\":1}}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"t\"}]",
    };
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) expect(fine[i], fine[i]);
}

static void test_system_messages(void **state) {
    (void)state;
    /* TP1: leading ones merge, later ones stay in place as marked turns of the user */
    expect("[{\"role\":\"system\",\"content\":\"A\"},{\"role\":\"system\",\"content\":\"B\"}," USER
           "]",
           "[{\"role\":\"system\",\"content\":\"A\\n\\nB\"}," USER "]");
    expect("[{\"role\":\"system\",\"content\":\"A\"}," USER "," ASSISTANT
           ",{\"role\":\"system\",\"content\":\"B\"}," USER "]",
           "[{\"role\":\"system\",\"content\":\"A\"}," USER "," ASSISTANT
           ",{\"role\":\"user\",\"content\":\"[System message]\\nB\"}," USER "]");
    expect("[" USER ",{\"role\":\"system\",\"content\":\" \\n\"}]", "[" USER "]");
    expect("[{\"role\":\"system\",\"content\":null}," USER "]",
           "[{\"role\":\"system\",\"content\":\"\"}," USER "]");
    /* TP2 */
    expect("[{\"role\":\"developer\",\"content\":\"A\"}," USER "]",
           "[{\"role\":\"system\",\"content\":\"A\"}," USER "]");
    expect("[" USER
           ",{\"role\":\"developer\",\"content\":[{\"type\":\"text\",\"text\":\"B\"}]}," USER "]",
           "[" USER ",{\"role\":\"user\",\"content\":\"[System message]\\nB\"}," USER "]");
}

/* Appending to a conversation only appends to what it is mended to: the prefix stays cached. */
static void test_mending_keeps_the_prefix(void **state) {
    (void)state;
    json_t *all = parse("[{\"role\":\"system\",\"content\":\"A\"},{\"role\":\"developer\","
                        "\"content\":\"B\"}," USER "," ASSISTANT
                        ",{\"role\":\"system\",\"content\":\"C\"}," USER "," ASSISTANT "]");
    json_t *whole = NULL;
    lily_err err;
    assert_int_equal(chat_mend(all, &whole, &err), 0);
    for (size_t n = 2; n < json_array_size(all); n++) {
        json_t *part = json_copy(all), *out = NULL;
        while (json_array_size(part) > n) json_array_remove(part, json_array_size(part) - 1);
        assert_int_equal(chat_mend(part, &out, &err), 0);
        for (size_t i = 0; i < json_array_size(out); i++)
            assert_true(json_equal(json_array_get(out, i), json_array_get(whole, i)));
        json_decref(part);
        json_decref(out);
    }
    json_decref(all);
    json_decref(whole);
}

static void test_content(void **state) {
    (void)state;
    /* TP3 */
    expect("[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
           "{\"type\":\"input_text\",\"text\":\"b\"},\"c\"]}]",
           "[{\"role\":\"user\",\"content\":\"abc\"}]");
    expect("[{\"role\":\"user\",\"content\":[]}]", "[{\"role\":\"user\",\"content\":\"\"}]");
    expect("[" USER ",{\"role\":\"tool\",\"content\":[{\"type\":\"text\",\"text\":\"t\"}]}]",
           "[" USER ",{\"role\":\"tool\",\"content\":\"t\"}]");
    expect("[" USER
           ",{\"role\":\"assistant\",\"content\":[{\"type\":\"refusal\",\"refusal\":\"no\"}]}]",
           "[" USER ",{\"role\":\"assistant\",\"content\":\"no\"}]");
    refuse("[" USER ",{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
           "{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]",
           "messages[1].content[1]: found a part of type image_url, expected text");
    refuse("[{\"role\":\"user\",\"content\":7}]", "messages[0].content: found another JSON type");
}

static void test_arguments(void **state) {
    (void)state;
    /* TC10 */
#define CALL(arguments)                                                                            \
    "[" USER ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","             \
    "\"arguments\":" arguments "}}]}]"
    expect(CALL("\"{\\\"city\\\":\\\"Paris\\\"}\""), CALL("{\"city\":\"Paris\"}"));
    expect(CALL("\"\""), CALL("{}"));
    expect(CALL("\" \\n\""), CALL("{}"));
    expect(CALL("\"null\""), CALL("{}"));
    expect(CALL("null"), CALL("{}"));
    expect(CALL("\" {\\\"a\\\": 1} \""), CALL("{\"a\":1}"));
    static const char where[] = "messages[1].tool_calls[0].function.arguments: found ";
    refuse(CALL("\"[1]\""), where);
    refuse(CALL("\"not json\""), where);
    refuse(CALL("\"{\""), where);
    refuse(CALL("7"), where);
    refuse("[" USER ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]",
           "messages[1].tool_calls[0].function.name: found no name");
    refuse("[" USER ",{\"role\":\"assistant\",\"tool_calls\":{}}]",
           "messages[1].tool_calls: found no array");
}

static void test_older_and_other_names(void **state) {
    (void)state;
    expect("[" USER ",{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\","
           "\"arguments\":\"{}\"}},{\"role\":\"function\",\"name\":\"f\",\"content\":\"t\"}]",
           "[" USER ",{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\","
           "\"arguments\":{}},\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
           "\"arguments\":{}}}]},{\"role\":\"tool\",\"name\":\"f\",\"content\":\"t\"}]");
    expect("[" USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\"}]",
           "[" USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\","
           "\"reasoning_content\":\"r\"}]");
    expect("[" USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\","
           "\"reasoning_content\":\"x\"}]",
           "[" USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\","
           "\"reasoning_content\":\"x\"}]");
}

static void test_what_cannot_be_mended(void **state) {
    (void)state;
    refuse("{}", "messages: found no array");
    refuse("[7]", "messages[0]: found another JSON type");
    refuse("[" USER ",{\"content\":\"x\"}]", "messages[1].role: found no role");
    refuse("[" USER ",{\"role\":\"critic\"}]", "messages[1].role: found an unknown role");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_right_stays),
        cmocka_unit_test(test_system_messages),
        cmocka_unit_test(test_mending_keeps_the_prefix),
        cmocka_unit_test(test_content),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_older_and_other_names),
        cmocka_unit_test(test_what_cannot_be_mended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
