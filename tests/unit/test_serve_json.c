/* The JSON edge of the server: scanning bodies before they are parsed, and escaping what goes out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "serve/json_safe.h"
#include "serve/sse.h"

static struct jsafe_report scan(const char *text) {
    struct jsafe_report report;
    jsafe_scan(text, strlen(text), &report);
    return report;
}

static void accepts_pairs_and_plain_text(void **state) {
    (void)state;
    static const char *const good[] = {
        "{\"a\": \"\\ud83d\\ude00\"}",
        "[\"\\u0041\", \"\\\\ud83d\", \"\\uDBFF\\uDFFF\"]",
        "\"\\\\\\ud83d\\ude00\"",
        "",
        "{\"a\":",
        "}}}]]]",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_int_equal(scan(good[i]).fault, JSAFE_OK);
}

static void names_a_lone_surrogate_by_path_and_offset(void **state) {
    (void)state;
    static const struct {
        const char *text, *path;
    } cases[] = {
        {"{\"messages\": [{\"role\": \"user\"}, {\"content\": \"x\\ud83d\"}]}",
         "messages[1].content"},
        {"{\"messages\": [{\"content\": [{\"text\": \"\\ude00\"}]}]}",
         "messages[0].content[0].text"},
        {"{\"tools\": [1, [2, \"\\ud83d\\ud83d\"]]}", "tools[1][1]"},
        {"{\"a\": {\"b\\ud800\": 1}}", "a"},
        {"\"\\ud83dx\"", ""},
        {"{\"x\": 1, \"user\": \"\\uD83D\\u0041\"}", "user"},
        {"{\"a\": \"\\ud83d\\ude0", "a"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct jsafe_report r = scan(cases[i].text);
        assert_int_equal(r.fault, JSAFE_SURROGATE);
        assert_string_equal(r.path, cases[i].path);
        assert_memory_equal(cases[i].text + r.offset, "\\u", 2);
    }
}

static void bounds_depth(void **state) {
    (void)state;
    char text[2 * JSAFE_MAX_DEPTH + 3];
    memset(text, '[', sizeof text);
    text[JSAFE_MAX_DEPTH] = 0;
    assert_int_equal(scan(text).fault, JSAFE_OK);
    text[JSAFE_MAX_DEPTH] = '[';
    text[JSAFE_MAX_DEPTH + 1] = 0;
    assert_int_equal(scan(text).fault, JSAFE_DEPTH);
}

static void bounds_values(void **state) {
    (void)state;
    size_t n = 3 * (size_t)JSAFE_MAX_VALUES + 10;
    char *text = malloc(n + 1);
    assert_non_null(text);
    for (size_t i = 0; i < n; i++) text[i] = "{},"[i % 3];
    text[n] = 0;
    assert_int_equal(scan(text).fault, JSAFE_VALUES);
    text[JSAFE_MAX_VALUES] = 0;
    assert_int_equal(scan(text).fault, JSAFE_OK);
    free(text);
}

static void long_paths_are_cut_not_overrun(void **state) {
    (void)state;
    char text[4096] = "";
    for (int i = 0; i < 60; i++) strcat(text, "{\"a_rather_long_key_for_a_field\":");
    strcat(text, "\"\\ud800\"");
    struct jsafe_report r = scan(text);
    assert_int_equal(r.fault, JSAFE_SURROGATE);
    assert_true(strlen(r.path) < sizeof r.path);
}

static void escapes_what_readers_split_at(void **state) {
    (void)state;
    const char text[] = "a\xc2\x85"
                        "b\xe2\x80\xa8\xe2\x80\xa9\xe2\x80\xaa\xc2\x86\n";
    json_t *value = json_pack("{s:s}", "t", text);
    struct buf out = {0};
    assert_true(sse_data(&out, value));
    assert_string_equal(out.data, "data: {\"t\":\"a\\u0085b\\u2028\\u2029\xe2\x80\xaa\xc2\x86\\n\"}"
                                  "\n\n");
    json_t *back = json_loads(out.data + 6, 0, NULL);
    assert_true(json_equal(value, back)); /* the meaning is unchanged */
    json_decref(value);
    json_decref(back);
    buf_free(&out);
}

static void invalid_utf8_becomes_text(void **state) {
    (void)state;
    json_t *value = jsafe_string("a\xff\xc3!", 4);
    assert_string_equal(json_string_value(value), "a\?\?!");
    json_decref(value);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_pairs_and_plain_text),
        cmocka_unit_test(names_a_lone_surrogate_by_path_and_offset),
        cmocka_unit_test(bounds_depth),
        cmocka_unit_test(bounds_values),
        cmocka_unit_test(long_paths_are_cut_not_overrun),
        cmocka_unit_test(escapes_what_readers_split_at),
        cmocka_unit_test(invalid_utf8_becomes_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
