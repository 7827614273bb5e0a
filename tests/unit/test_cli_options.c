/* The option tables: every kind of value, ranges, operands, suggestions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/options.h"

struct values {
    bool flag, has_real;
    const char *text;
    struct text_list texts;
    struct int_list ints;
    int32_t count;
    uint64_t seed;
    size_t size;
    float real;
    const char *operands[2];
    int n_operands;
};

/* Parses the words, ended by NULL. */
static int parse(struct values *v, const char *const *words) {
    const struct option options[] = {
        OPT_GROUP("all kinds"),
        OPT_FLAG("flag", 'f', &v->flag, "a flag"),
        OPT(TEXT, "text", 't', &v->text, "T", "a text"),
        OPT(TEXTS, "texts", 0, &v->texts, "T", "texts"),
        OPT_RANGE(INTS, "ints", &v->ints, "N,...", 1, 100, "integers"),
        OPT_RANGE(INT, "count", &v->count, "N", -5, 5, "an integer"),
        OPT(U64, "seed", 0, &v->seed, "N", "a seed"),
        OPT(SIZE, "size", 0, &v->size, "SIZE", "a size"),
        OPT_GIVEN(REAL, "real", &v->real, "X", 0, 2, &v->has_real, "a number"),
    };
    const struct usage usage = {
        .command = "test",
        .operands = "[A] [B]",
        .summary = "a test",
        .example = "lily test",
        USAGE_OPTIONS(options),
        .max_operands = 2,
    };
    char *argv[16] = {(char *)"test"};
    int argc = 1;
    while (words[argc - 1]) argv[argc] = (char *)words[argc - 1], argc++;
    return options_parse(&usage, argc, argv, v->operands, &v->n_operands);
}
#define PARSE(v, ...) parse((v), (const char *const[]){__VA_ARGS__, NULL})

static void test_values(void **state) {
    (void)state;
    struct values v = {0};
    assert_int_equal(PARSE(&v, "-f", "--text=a b", "--texts", "x", "--texts", "-y", "--ints",
                           "1,2,3", "--count", "-5", "--seed", "18446744073709551615", "--size",
                           "32M"),
                     OPTIONS_GO_ON);
    assert_true(v.flag);
    assert_string_equal(v.text, "a b");
    assert_int_equal(v.texts.n, 2);
    assert_string_equal(v.texts.items[1], "-y");
    assert_int_equal(v.ints.n, 3);
    assert_int_equal(v.ints.items[2], 3);
    assert_int_equal(v.count, -5);
    assert_true(v.seed == UINT64_MAX);
    assert_int_equal(v.size, 32 << 20);
    assert_false(v.has_real);
    assert_int_equal(PARSE(&v, "-tshort", "--real", "1.5"), OPTIONS_GO_ON);
    assert_string_equal(v.text, "short");
    assert_true(v.has_real && v.real == 1.5f);
}

static void test_operands(void **state) {
    (void)state;
    struct values v = {0};
    assert_int_equal(PARSE(&v, "one", "-f", "-"), OPTIONS_GO_ON);
    assert_int_equal(v.n_operands, 2);
    assert_string_equal(v.operands[1], "-");
    assert_int_equal(PARSE(&v, "--", "--flag"), OPTIONS_GO_ON);
    assert_int_equal(v.n_operands, 1);
    assert_string_equal(v.operands[0], "--flag");
    assert_int_equal(PARSE(&v, "one", "two", "three"), EXIT_USAGE);
}

static void test_refusals(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"--nothing", NULL},
        {"-q", NULL},
        {"--flag=yes", NULL},
        {"--text", NULL},
        {"--count", "6"},
        {"--count", "1x"},
        {"--count", ""},
        {"--count", "1e1"},
        {"--ints", "1,,x"},
        {"--ints", "0"},
        {"--ints", "101"},
        {"--ints", ""},
        {"--seed", "-1"},
        {"--seed", "1.5"},
        {"--seed", "18446744073709551616"},
        {"--size", "0"},
        {"--size", "1T"},
        {"--size", "99999999999G"},
        {"--real", "nan"},
        {"--real", "inf"},
        {"--real", "2.1"},
        {"--count", "999999999999999999999"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct values v = {0};
        int status = bad[i][1] ? PARSE(&v, bad[i][0], bad[i][1]) : PARSE(&v, bad[i][0]);
        if (status != EXIT_USAGE) fail_msg("%s %s: status %d", bad[i][0], bad[i][1], status);
    }
}

static void test_too_many(void **state) {
    (void)state;
    struct int_list list;
    char text[4 * OPTION_LIST_MAX + 8] = "1";
    for (int i = 1; i < OPTION_LIST_MAX; i++) strcat(text, ",1");
    assert_true(parse_int_list(text, &list));
    assert_int_equal(list.n, OPTION_LIST_MAX);
    strcat(text, ",1");
    assert_false(parse_int_list(text, &list));
}

static void test_suggestions(void **state) {
    (void)state;
    static const char *const names[] = {"temperature", "top-k", "threads", "seed", "json"};
    const struct {
        const char *word, *near;
    } cases[] = {
        {"temprature", "temperature"},
        {"temp", "temperature"},
        {"topk", "top-k"},
        {"tpo-k", "top-k"},
        {"thread", "threads"},
        {"jsno", "json"},
        {"quantize", NULL},
        {"x", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *found = nearest_word(cases[i].word, names, 5);
        if (!cases[i].near)
            assert_null(found);
        else
            assert_string_equal(found, cases[i].near);
    }
    char longest[200];
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = 0;
    assert_null(nearest_word(longest, names, 5));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),      cmocka_unit_test(test_operands),
        cmocka_unit_test(test_refusals),    cmocka_unit_test(test_too_many),
        cmocka_unit_test(test_suggestions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
