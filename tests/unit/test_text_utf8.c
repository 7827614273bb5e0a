/* utf8_stream: whole code points whatever the cuts, and U+FFFD where Python puts it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

/* bytes.decode("utf-8", errors="replace") of the left is the right (Unicode's "maximal subpart"
 * practice, chapter 3: one mark per unfinished or impossible sequence). "?" stands for U+FFFD. */
static const char *const decoded[][2] = {
    {"abc", "abc"},
    {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "é€😀"},
    {"\x80", "?"},
    {"\xbf\xbf", "??"},
    {"\xc0\xaf", "??"},
    {"\xc1\xbf", "??"},
    {"\xc3", "?"},
    {"\xc3(", "?("},
    {"\xe2\x82", "?"},
    {"\xe2\x82(", "?("},
    {"\xe2(\xa1", "?(?"},
    {"\xe0\x80\x80", "???"},
    {"\xe0\xa0", "?"},
    {"\xed\xa0\x80", "???"}, /* a surrogate */
    {"\xed\x9f\xbf", "\xed\x9f\xbf"},
    {"\xf0\x9f\x98", "?"},
    {"\xf0\x9f\x98\xc3\xa9", "?é"},
    {"\xf0\x80\x80\x80", "????"},
    {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
    {"\xf4\x90\x80\x80", "????"},
    {"\xf5\x80\x80\x80", "????"},
    {"\xff\xfe", "??"},
    {"a\xf1\x80\x80\xe1\x80\xc2"
     "b\x80"
     "c\x80\xbf"
     "d",
     "a???b?c??d"},
};

static void expand(const char *pattern, struct buf *out) {
    for (; *pattern; pattern++) {
        if (*pattern == '?')
            assert_true(buf_puts(out, "\xef\xbf\xbd"));
        else
            assert_true(buf_append(out, pattern, 1));
    }
}

/* Feeds text cut after a and after b bytes; each push must leave whole code points. */
static void feed(const char *text, size_t n, size_t a, size_t b, const struct buf *want) {
    struct utf8_stream s = {0};
    struct buf out = {0};
    size_t cuts[] = {0, a, b, n};
    for (int i = 0; i < 3; i++) {
        assert_true(utf8_stream_push(&s, text + cuts[i], cuts[i + 1] - cuts[i], &out));
        assert_int_equal(utf8_invalid_at(out.data ? out.data : "", out.len), out.len);
    }
    assert_true(utf8_stream_flush(&s, &out));
    assert_true(utf8_stream_flush(&s, &out)); /* nothing is left */
    assert_int_equal(out.len, want->len);
    assert_memory_equal(out.data, want->data, want->len);
    buf_free(&out);
}

static void test_every_split(void **state) {
    (void)state;
    struct buf all = {0}, all_want = {0};
    for (size_t i = 0; i < sizeof decoded / sizeof *decoded; i++) {
        struct buf want = {0};
        size_t n = strlen(decoded[i][0]);
        expand(decoded[i][1], &want);
        for (size_t a = 0; a <= n; a++) {
            for (size_t b = a; b <= n; b++) feed(decoded[i][0], n, a, b, &want);
        }
        buf_free(&want);
        /* a full stop keeps the cases apart when they are joined */
        assert_true(buf_puts(&all, decoded[i][0]) && buf_puts(&all, "."));
        expand(decoded[i][1], &all_want);
        assert_true(buf_puts(&all_want, "."));
    }
    for (size_t a = 0; a <= all.len; a++) feed(all.data, all.len, a, all.len, &all_want);
    buf_free(&all);
    buf_free(&all_want);
}

/* Random bytes: the stream's output does not depend on the cuts, is valid, and keeps valid text. */
static void test_random_bytes(void **state) {
    (void)state;
    static const unsigned char likely[] = {0x41, 0x80, 0xbf, 0xc3, 0xa9, 0xe0, 0xa0, 0xed,
                                           0x9f, 0xf0, 0x90, 0xf4, 0x8f, 0xff, 0xe2, 0x82};
    uint64_t x = 1;
    for (int round = 0; round < 20000; round++) {
        char text[12];
        size_t n = 1 + (size_t)(round % 12);
        for (size_t i = 0; i < n; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            text[i] = (char)likely[x >> 60];
        }
        struct utf8_stream s = {0};
        struct buf whole = {0};
        assert_true(utf8_stream_push(&s, text, n, &whole) && utf8_stream_flush(&s, &whole));
        if (utf8_invalid_at(text, n) == n) assert_memory_equal(whole.data, text, n);
        for (size_t a = 0; a <= n; a++) feed(text, n, a, n, &whole);
        buf_free(&whole);
    }
}

static void test_invalid_at(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t n, at;
    } cases[] = {{"", 0, 0},
                 {"a\0b", 3, 3},
                 {"ab\xff", 3, 2},
                 {"é\xc3", 3, 2},
                 {"\xed\xa0\x80", 3, 0},
                 {"a\xf4\x90\x80\x80", 5, 1},
                 {"\xe0\x9f\x80", 3, 0},
                 {"😀\xf0\x9f\x98", 7, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(utf8_invalid_at(cases[i].text, cases[i].n), cases[i].at);
}

static void test_strip_is_pythons(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {" a ", "a"},
        {"\t\n\v\f\r\x1c\x1d\x1e\x1f a b\x1f\n", "a b"},
        {"\xc2\x85\xc2\xa0\xe1\x9a\x80\xe2\x80\x80\xe2\x80\x8a\xe2\x80\xa8\xe2\x80\xaf\xe2\x81\x9f"
         "\xe3\x80\x80x",
         "x"},
        {"\xe2\x80\x8bx\xe1\xa0\x8e\xef\xbb\xbf", "\xe2\x80\x8bx\xe1\xa0\x8e\xef\xbb\xbf"},
        {"x\xe3\x80\x80\xc2\x85", "x"},
        {" \n ", ""},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t begin = 0, end = strlen(cases[i][0]);
        utf8_strip(cases[i][0], &begin, &end);
        assert_int_equal(end - begin, strlen(cases[i][1]));
        assert_memory_equal(cases[i][0] + begin, cases[i][1], end - begin);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_invalid_at),
        cmocka_unit_test(test_strip_is_pythons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
