/* The tokenizer by itself: what the file may say, spans, normalisation, the split expression, merge
 * order, time. Identity with the Rust library is tests/e2e/test_text.py. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../cpu_clock.h"
#include "../text/tiny_tokenizer.h"

static struct tokenizer *load(json_t *root) {
    lily_err err;
    struct tokenizer *t = tiny_load(root, &err);
    if (!t) fail_msg("%s", err.msg);
    return t;
}

/* Longer tokens "ab", "abc", " a", "e\u0301" as one character, and merges in the given order. */
static json_t *small_json(void) {
    static const char *const longer[] = {"ab", "bc", "abc", " a", "aa", "aaaa"};
    static const size_t len[] = {2, 2, 3, 2, 2, 4};
    json_t *merges =
        json_pack("[[ss][ss][ss][ss][ss]]", "b", "c", "a", "b", "a", "bc", "a", "a", "aa", "aa");
    return tiny_json(longer, len, 6, merges);
}

static void expect(const struct tokenizer *t, const char *text, size_t n,
                   const struct text_span *spans, size_t n_spans, const char *want) {
    struct id_list ids = {0};
    struct buf got = {0};
    lily_err err;
    if (tokenizer_encode(t, text, n, spans, n_spans, &ids, &err)) fail_msg("%s", err.msg);
    for (size_t i = 0; i < ids.len; i++) buf_printf(&got, "%s%d", i ? " " : "", ids.data[i]);
    assert_string_equal(got.data ? got.data : "", want);
    buf_free(&got);
    id_list_free(&ids);
}

static void expect_text(const struct tokenizer *t, const char *text, const char *want) {
    expect(t, text, strlen(text), NULL, 0, want);
}

static void test_merges_by_rank_then_from_the_left(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    expect_text(t, "abc", "258"); /* "b c" ranks before "a b" */
    expect_text(t, "abab", "256 256");
    expect_text(t, "aaa", "260 97"); /* leftmost of equal rank */
    expect_text(t, "aaaaaaa", "261 260 97");
    expect_text(t, "aaaab", "260 97 256"); /* "a b" ranks before "a a" */
    expect_text(t, "", "");
    expect(t, "a\0b", 3, NULL, 0, "97 0 98");
    tokenizer_free(t);
}

static void test_both_spellings_of_merges(void **state) {
    (void)state;
    json_t *root = small_json(), *model = json_object_get(root, "model");
    json_object_set_new(model, "merges",
                        json_pack("[sssss]", "b c", "a b", "a bc", "a a", "aa aa"));
    struct tokenizer *t = load(root);
    expect_text(t, "abcaaaa", "258 261");
    tokenizer_free(t);
}

static void test_tokens_without_a_merge_are_not_made(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    expect_text(t, " a", "32 97"); /* " a" is in the vocabulary, but no merge leads there */
    size_t n;
    assert_memory_equal(tokenizer_bytes(t, 259, &n), " a", 3);
    assert_int_equal(n, 2);
    tokenizer_free(t);
}

static void test_control_tokens_only_inside_spans(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    const char *text = "ab<think>ab<think>a";
    const struct text_span first[] = {{0, 9}}, tight[] = {{2, 9}}, cut[] = {{3, 9}},
                           both[] = {{2, 9}, {11, 18}}, touching[] = {{2, 5}, {5, 9}};
    expect(t, text, strlen(text), first, 1, "256 4000 256 60 116 104 105 110 107 62 97");
    expect(t, text, strlen(text), tight, 1, "256 4000 256 60 116 104 105 110 107 62 97");
    expect(t, text, strlen(text), both, 2, "256 4000 256 4000 97");
    expect(t, "<think>", 7, cut, 0, "60 116 104 105 110 107 62");
    expect(t, text, 9, touching, 2, "256 60 116 104 105 110 107 62");
    tokenizer_free(t);
}

static void test_longest_added_token_wins(void **state) {
    (void)state;
    json_t *root = small_json(), *added = json_object_get(root, "added_tokens");
    json_array_append_new(added, json_pack("{s:i,s:s}", "id", 4100, "content", "<thi"));
    json_array_append_new(added, json_pack("{s:i,s:s}", "id", 4101, "content", "<think>!"));
    struct tokenizer *t = load(root);
    const struct text_span all = {0, 20};
    expect(t, "<think>!<think><thib", 20, &all, 1, "4101 4000 4100 98");
    expect(t, "<<think>x", 9, &(struct text_span){0, 9}, 1, "60 4000 120");
    assert_int_equal(tokenizer_find(t, "<thi"), 4100);
    assert_int_equal(tokenizer_find(t, "<th"), -1);
    assert_true(tokenizer_is_added(t, 4101));
    assert_false(tokenizer_is_special(t, 4000)); /* <think> */
    assert_true(tokenizer_is_special(t, 4004));  /* <|im_start|> */
    assert_false(tokenizer_is_added(t, 97));
    assert_int_equal(tokenizer_vocab(t), 4102);
    size_t n;
    assert_null(tokenizer_bytes(t, 4050, &n));
    assert_null(tokenizer_bytes(t, -1, &n));
    assert_null(tokenizer_bytes(t, 4102, &n));
    tokenizer_free(t);
}

static void test_spans_are_checked(void **state) {
    (void)state;
    static const struct text_span bad[][2] = {
        {{0, 4}, {0, 0}}, {{2, 1}, {0, 0}}, {{0, 2}, {1, 3}}, {{2, 3}, {0, 1}}};
    struct tokenizer *t = load(small_json());
    for (size_t i = 0; i < 4; i++) {
        struct id_list ids = {0};
        lily_err err;
        assert_int_equal(tokenizer_encode(t, "abc", 3, bad[i], 2, &ids, &err), LILY_EINVAL);
        assert_int_equal(ids.len, 0);
        id_list_free(&ids);
    }
    tokenizer_free(t);
}

static void test_invalid_utf8_names_the_offset(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    struct id_list ids = {0};
    lily_err err;
    assert_int_equal(tokenizer_encode_all(t, "abc\xff", 4, false, &ids, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "0xff at offset 3"));
    assert_int_equal(tokenizer_encode_all(t, "\xed\xa0\x80", 3, false, &ids, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "offset 0"));
    assert_int_equal(ids.len, 0);
    id_list_free(&ids);
    tokenizer_free(t);
}

/* The ids of the parts that the expression makes, joined with the byte tokens' own ids: a merge of
 * the two bytes beside a cut shows whether there is one. */
static bool is_cut(const char *text, size_t at) {
    char pair[2] = {text[at - 1], text[at]};
    const char *longer[] = {pair};
    const size_t len[] = {2};
    struct buf left = {0}, right = {0};
    tiny_spell(&left, pair, 1);
    tiny_spell(&right, pair + 1, 1);
    struct tokenizer *t =
        load(tiny_json(longer, len, 1, json_pack("[[ss]]", left.data, right.data)));
    struct id_list ids = {0};
    lily_err err;
    assert_int_equal(tokenizer_encode_all(t, text, strlen(text), false, &ids, &err), 0);
    size_t merged = 0;
    for (size_t i = 0; i < ids.len; i++) merged += ids.data[i] == 256;
    id_list_free(&ids);
    tokenizer_free(t);
    buf_free(&left);
    buf_free(&right);
    return merged == 0;
}

static void test_split_expression(void **state) {
    (void)state;
    assert_true(is_cut("12", 1)); /* digits stand alone */
    assert_true(is_cut("a's", 1));
    assert_false(is_cut("'s", 1));
    assert_false(is_cut("'\xc5\xbf", 1)); /* (?i:'s) folds U+017F */
    assert_true(is_cut("'\xc5\xbf"
                       "b",
                       3)); /* as a contraction, which ends there */
    assert_true(is_cut("a'S", 1));
    assert_false(is_cut("b\xcc\x81", 1)); /* a mark stays with its letter */
    assert_false(is_cut("\xe1\xa0\x8e"
                        "b",
                        3)); /* U+180E is no white space: "?" + letter */
    assert_true(is_cut("  b", 1));
    assert_false(is_cut(" b", 1));
    assert_true(is_cut("\xe3\x80\x80 1", 4));
    assert_false(is_cut("--\n", 2));
    assert_false(is_cut(" \n", 1));
    assert_true(is_cut("\n b", 1));
}

static void test_nfc(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    expect_text(t, "e\xcc\x81", "195 169");                     /* e + acute: U+00E9 */
    expect_text(t, "\xe2\x84\xab", "195 133");                  /* the Angstrom sign: U+00C5 */
    expect_text(t, "\xe1\x84\x80\xe1\x85\xa1", "234 176 128");  /* jamo: U+AC00 */
    expect_text(t, "a\xcc\x81\xcc\xa3", "225 186 161 204 129"); /* dot below (220) before acute */
    expect_text(t, "\xef\xac\x81", "239 172 129"); /* compatibility stays: fi ligature */
    expect_text(t, "\xcd\x84", "204 136 204 129"); /* U+0344 is excluded: two marks */
    tokenizer_free(t);
    json_t *root = small_json();
    json_object_set_new(root, "normalizer", json_null());
    t = load(root);
    expect_text(t, "e\xcc\x81", "101 204 129");
    tokenizer_free(t);
}

/* A run of marks in the worst order, and long pieces: far from quadratic. */
static void test_time_is_linear(void **state) {
    (void)state;
    static const char *const units[] = {"a", " ", "\n", "\xcc\x81\xcc\x96", "<think", "0", "bc"};
    struct tokenizer *t = load(small_json());
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        double seconds[2];
        for (int k = 0; k < 2; k++) {
            struct buf text = {0};
            struct id_list ids = {0};
            lily_err err;
            size_t n = k ? 1000000 : 125000;
            while (text.len < n) assert_true(buf_puts(&text, units[u]));
            double start = cpu_seconds();
            assert_int_equal(tokenizer_encode_all(t, text.data, text.len, true, &ids, &err), 0);
            seconds[k] = cpu_seconds() - start;
            id_list_free(&ids);
            buf_free(&text);
        }
        if (seconds[1] > 0.5 + 24 * seconds[0])
            fail_msg("\"%s\": %.3f s for 125 kB, %.3f s for 1 MB", units[u], seconds[0],
                     seconds[1]);
    }
    tokenizer_free(t);
}

/* A loaded tokenizer is shared by threads (the thread sanitizer runs this too). */
static void *encode_repeatedly(void *arg) {
    size_t total = 0;
    for (int i = 0; i < 50; i++) {
        struct id_list ids = {0};
        lily_err err;
        static const char text[] = "abc e\xcc\x81 <think> it's 12 \n\n  x";
        if (tokenizer_encode_all(arg, text, sizeof text - 1, true, &ids, &err)) return NULL;
        total += ids.len;
        id_list_free(&ids);
    }
    return (void *)(uintptr_t)total;
}

static void test_threads_share_a_tokenizer(void **state) {
    (void)state;
    struct tokenizer *t = load(small_json());
    pthread_t threads[3];
    void *first = encode_repeatedly(t);
    assert_non_null(first);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_repeatedly, t), 0);
    for (int i = 0; i < 3; i++) {
        void *total;
        pthread_join(threads[i], &total);
        assert_ptr_equal(total, first);
    }
    tokenizer_free(t);
}

/* ---- files that are refused ------------------------------------------------------------------ */

static void refuse(json_t *root, int code, const char *word) {
    lily_err err = {0};
    struct tokenizer *t = tiny_load(root, &err);
    assert_null(t);
    if (err.code != code || !strstr(err.msg, word))
        fail_msg("found %d \"%s\", expected %d with \"%s\"", err.code, err.msg, code, word);
}

static json_t *with(const char *part, const char *key, json_t *value) {
    json_t *root = small_json();
    json_t *at = part ? json_object_get(root, part) : root;
    if (json_is_array(at)) at = json_array_get(at, 0);
    assert_int_equal(json_object_set_new(at, key, value), 0);
    return root;
}

static void test_other_tokenizers_are_refused(void **state) {
    (void)state;
    refuse(with("model", "type", json_string("Unigram")), LILY_EMODEL, "Unigram");
    refuse(with("model", "byte_fallback", json_true()), LILY_EMODEL, "byte_fallback");
    refuse(with("model", "ignore_merges", json_true()), LILY_EMODEL, "ignore_merges");
    refuse(with("model", "unk_token", json_string("<unk>")), LILY_EMODEL, "unk_token");
    refuse(with("normalizer", "type", json_string("NFKC")), LILY_EMODEL, "NFKC");
    refuse(with("added_tokens", "lstrip", json_true()), LILY_EMODEL, "lstrip");
    refuse(with(NULL, "pre_tokenizer", json_null()), LILY_EMODEL, "Sequence");
    json_t *root = small_json();
    json_t *split =
        json_array_get(json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers"), 0);
    json_object_set_new(json_object_get(split, "pattern"), "Regex", json_string("a(b"));
    refuse(root, LILY_EMODEL, "split expression");
}

static void test_damaged_files_are_refused(void **state) {
    (void)state;
    lily_err err;
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_load("{\"a\":", 5, &t, &err), LILY_EFORMAT);
    assert_int_equal(tokenizer_load("[]", 2, &t, &err), LILY_EMODEL);
    assert_int_equal(tokenizer_load("", 0, &t, &err), LILY_EFORMAT);
    refuse(with("model", "vocab", json_object()), LILY_EMODEL, "vocab");
    refuse(with("model", "merges", json_pack("[[ss]]", "a", "zz")), LILY_EFORMAT, "merge 0");
    refuse(with("model", "merges", json_pack("[s]", "a b c")), LILY_EFORMAT, "merge 0");
    refuse(with("model", "merges", json_integer(1)), LILY_EMODEL, "merges");
    refuse(with("added_tokens", "id", json_integer(1LL << 40)), LILY_EFORMAT, "1099511627776");
    refuse(with("added_tokens", "id", json_integer(-1)), LILY_EFORMAT, "-1");
    refuse(with("added_tokens", "id", json_integer(4001)), LILY_EMODEL, "twice");
    json_t *root = small_json(), *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    json_object_set_new(vocab, "b", json_integer(97));
    refuse(root, LILY_EFORMAT, "two tokens");
    root = small_json();
    json_object_del(json_object_get(json_object_get(root, "model"), "vocab"), "z");
    refuse(root, LILY_EMODEL, "256 single-byte tokens");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges_by_rank_then_from_the_left),
        cmocka_unit_test(test_both_spellings_of_merges),
        cmocka_unit_test(test_tokens_without_a_merge_are_not_made),
        cmocka_unit_test(test_control_tokens_only_inside_spans),
        cmocka_unit_test(test_longest_added_token_wins),
        cmocka_unit_test(test_spans_are_checked),
        cmocka_unit_test(test_invalid_utf8_names_the_offset),
        cmocka_unit_test(test_split_expression),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_time_is_linear),
        cmocka_unit_test(test_threads_share_a_tokenizer),
        cmocka_unit_test(test_other_tokenizers_are_refused),
        cmocka_unit_test(test_damaged_files_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
