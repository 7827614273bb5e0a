/* Replies: every script is fed byte by byte, cut in two at every byte, and with each stretch
 * between control tokens as one token; all must give the same, expected events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "../text/tiny_tokenizer.h"
#include "text/json_text.h"
#include "text/reply.h"

/* What a client sees, as text: R(...) reasoning, C(...) content, F0 name(args); calls by index. */
struct seen {
    struct buf text;
    struct buf args; /* of the call in hand */
    enum reply_event_kind last;
    bool any;
    int n_args_events;
    int refuse_after; /* > 0: the callback fails at that event */
};

static void close_run(struct seen *s) {
    bool run = s->any && (s->last == REPLY_REASONING || s->last == REPLY_CONTENT);
    if (run) buf_puts(&s->text, ")");
}

static int on_event(void *arg, const struct reply_event *e) {
    struct seen *s = arg;
    assert_int_equal(e->text[e->n], 0);
    if (s->refuse_after > 0 && --s->refuse_after == 0) return 77;
    bool same = s->any && s->last == e->kind;
    if (!same) close_run(s);
    switch (e->kind) {
    case REPLY_REASONING:
    case REPLY_CONTENT:
        assert_true(e->n > 0);
        if (!same) buf_puts(&s->text, e->kind == REPLY_CONTENT ? "C(" : "R(");
        buf_append(&s->text, e->text, e->n);
        break;
    case REPLY_TOOL_BEGIN:
        buf_printf(&s->text, "F%d %s(", e->call, e->text);
        buf_clear(&s->args);
        break;
    case REPLY_TOOL_ARGS:
        s->n_args_events++;
        buf_append(&s->args, e->text, e->n);
        break;
    case REPLY_TOOL_END: {
        json_t *v = NULL;
        lily_err err;
        assert_int_equal(json_text_load("arguments", s->args.data, s->args.len, &v, &err), 0);
        assert_true(json_is_object(v));
        json_decref(v);
        buf_append(&s->text, s->args.data, s->args.len);
        buf_puts(&s->text, ")");
        break;
    }
    }
    s->last = e->kind;
    s->any = true;
    return 0;
}

struct script {
    const char *text; /* control tokens as TINY_CONTROL's bytes */
    size_t n;
    bool answer; /* the prompt did not end in a think block */
    const char *tools;
    const char *stops[3];
    bool no_calls;
    const char *want;
    bool stopped;
    int reasoning_tokens; /* > 0: checked where every byte is a token */
};

/* Feeds the script with cuts after each byte i for which cut(i), and at control tokens. */
static void run_script(const struct script *q, size_t cut, bool every_byte) {
    const char *pieces[512];
    size_t lens[512], n = 0, n_stops = 0;
    int32_t ids[4096];
    size_t n_ids = 0;
    for (size_t i = 0; i < q->n;) {
        unsigned char c = (unsigned char)q->text[i];
        if (c >= 1 && c <= TINY_CONTROLS) {
            ids[n_ids++] = TINY_FIRST_CONTROL + c - 1;
            i++;
            continue;
        }
        size_t end = i + 1;
        while (!every_byte && end < q->n && end != cut &&
               !((unsigned char)q->text[end] >= 1 && (unsigned char)q->text[end] <= TINY_CONTROLS))
            end++;
        size_t known = 0;
        while (known < n &&
               !(lens[known] == end - i && !memcmp(pieces[known], q->text + i, end - i)))
            known++;
        if (end - i == 1) {
            ids[n_ids++] = c;
        } else {
            if (known == n) pieces[n] = q->text + i, lens[n++] = end - i;
            ids[n_ids++] = 256 + (int32_t)known;
        }
        i = end;
    }
    lily_err err = {0};
    struct tokenizer *t = tiny_load(tiny_json(pieces, lens, n, NULL), &err);
    if (!t) fail_msg("%s", err.msg);
    while (n_stops < 3 && q->stops[n_stops]) n_stops++;
    json_t *tools = q->tools ? json_loads(q->tools, 0, NULL) : NULL;
    assert_true(!q->tools || tools);
    struct reply_options options = {.tokenizer = t,
                                    .in_think = !q->answer,
                                    .tools = tools,
                                    .stops = q->stops,
                                    .n_stops = n_stops,
                                    .no_calls = q->no_calls};
    struct seen seen = {0};
    struct reply *r;
    bool stopped = false;
    assert_int_equal(reply_new(&options, on_event, &seen, &r, &err), 0);
    for (size_t i = 0; i < n_ids; i++) {
        assert_int_equal(reply_push(r, ids[i], &stopped, &err), 0);
        if (stopped) break;
    }
    assert_int_equal(reply_finish(r, &err), 0);
    close_run(&seen);
    const char *got = seen.text.data ? seen.text.data : "";
    if (strcmp(got, q->want) != 0 || stopped != q->stopped)
        fail_msg("cut at %zu: got %s, want %s", every_byte ? 0 : cut, got, q->want);
    if (every_byte && q->reasoning_tokens)
        assert_int_equal(reply_reasoning_tokens(r), q->reasoning_tokens);
    buf_free(&seen.text);
    buf_free(&seen.args);
    reply_free(r);
    json_decref(tools);
    tokenizer_free(t);
}

static void check(struct script q) {
    q.n = strlen(q.text);
    run_script(&q, 0, true);
    run_script(&q, q.n, false);
    for (size_t cut = 1; cut < q.n; cut++) run_script(&q, cut, false);
}

/* ---- reasoning and content ------------------------------------------------------------------- */

static void test_reasoning_then_content(void **state) {
    (void)state;
    check((struct script){.text = "plan é\nb\n" THINK_END "\n\nHello **x**\n\n- a\n",
                          .want = "R(plan é\nb)C(Hello **x**\n\n- a\n)",
                          .reasoning_tokens = 10});
    check((struct script){.text = "Hi\n", .answer = true, .want = "C(Hi\n)"});
    check((struct script){.text = "\nHi", .answer = true, .want = "C(\nHi)"});
    check((struct script){.text = THINK_END "\n\nHi", .want = "C(Hi)"});
    check((struct script){.text = "cut off\n", .want = "R(cut off\n)"});
    check((struct script){.text = "", .want = ""});
}

static void test_one_extra_think_is_dropped(void **state) {
    (void)state;
    check((struct script){.text = THINK "\nplan" THINK_END "\nA", .want = "R(plan)C(A)"});
    check((struct script){.text = "\n" THINK "plan" THINK_END "A", .want = "R(plan)C(A)"});
    check((struct script){.text = THINK THINK "x" THINK_END "A", .want = "R(<think>x)C(A)"});
    check((struct script){.text = "a " THINK " b" THINK_END "A", .want = "R(a <think> b)C(A)"});
}

static void test_think_tags_in_the_answer(void **state) {
    (void)state;
    /* RE3: only the first </think> closes; RE4: spelled in plain tokens it is text */
    check((struct script){.text = "p" THINK_END "\n\n" THINK_END THINK_END "A" THINK_END "B",
                          .want = "R(p)C(AB)"});
    check((struct script){.text = "a </think> b" THINK_END "c </think> d <think> e",
                          .want = "R(a </think> b)C(c </think> d <think> e)"});
    check((struct script){
        .text = THINK "\nplan\n" THINK_END "\n\nA", .answer = true, .want = "R(plan)C(A)"});
    check((struct script){.text = "a" THINK_END "b" THINK "c" THINK_END "\nd",
                          .want = "R(a)C(b)R(\nc)C(d)"});
}

static void test_bytes_that_are_no_text(void **state) {
    (void)state;
    check((struct script){.text = "\xf0\x9f\x98\x80\xe2\x82" THINK_END "\xff"
                                  "a\xc3",
                          .want = "R(😀\xef\xbf\xbd)C(\xef\xbf\xbd"
                                  "a\xef\xbf\xbd)"});
    check((struct script){.text = "a" IM_START "b", .answer = true, .want = "C(ab)"});
}

/* ---- stop strings ---------------------------------------------------------------------------- */

static void test_stop_strings(void **state) {
    (void)state;
    check((struct script){.text = "one STOP two",
                          .answer = true,
                          .stops = {"STOP"},
                          .want = "C(one )",
                          .stopped = true});
    /* ST8: what was held back for a stop string comes at the end */
    check((struct script){
        .text = "ends </s>", .answer = true, .stops = {"</s>x"}, .want = "C(ends </s>)"});
    check((struct script){.text = "aab aabaaab",
                          .answer = true,
                          .stops = {"aaab", "zz"},
                          .want = "C(aab aab)",
                          .stopped = true});
    check((struct script){
        .text = "xabcd", .answer = true, .stops = {"bc", "abc"}, .want = "C(x)", .stopped = true});
    check((struct script){.text = "\xc3\xa8\xc3\xa9",
                          .answer = true,
                          .stops = {"é"},
                          .want = "C(è)",
                          .stopped = true});
    check((struct script){.text = "a", .answer = true, .stops = {"", "b"}, .want = "C(a)"});
}

static void test_stop_strings_see_content_only(void **state) {
    (void)state;
    check((struct script){.text = "x STOP y" THINK_END "\n\nA\n\nB",
                          .stops = {"STOP", "\n\n"},
                          .want = "R(x STOP y)C(A)",
                          .stopped = true});
    check(
        (struct script){.text = THINK_END CALL
                        "\n<function=f>\n<parameter=a>\nSTOP\n</parameter>\n</function>\n" CALL_END,
                        .stops = {"STOP", "<function"},
                        .want = "F0 f({\"a\": \"STOP\"})"});
    /* a stop string does not reach across a call */
    check((struct script){.text = "AB" CALL "\n<function=f>\n</function>\n" CALL_END "CD",
                          .answer = true,
                          .stops = {"BC"},
                          .want = "C(AB)F0 f({})C(CD)"});
    /* ST9: the flush of held text goes to the parser it belongs to */
    check(
        (struct script){.text = "x" THINK_END "A </" CALL "\n<function=f>\n</function>\n" CALL_END,
                        .stops = {"</s>"},
                        .want = "R(x)C(A </)F0 f({})"});
}

/* ---- tool calls ------------------------------------------------------------------------------ */

#define ONE_CALL(name, key, value)                                                                 \
    CALL "\n<function=" name ">\n<parameter=" key ">\n" value                                      \
         "\n</parameter>\n</function>\n" CALL_END

static const char weather[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
    "\"$defs\":{\"n\":{\"type\":\"integer\"}},\"properties\":{"
    "\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"x\":{\"type\":\"number\"},"
    "\"b\":{\"type\":\"boolean\"},\"o\":{\"type\":\"object\"},\"l\":{\"type\":\"array\"},"
    "\"z\":{\"type\":\"null\"},\"sn\":{\"type\":[\"string\",\"null\"]},"
    "\"in\":{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}]},"
    "\"si\":{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}]},"
    "\"r\":{\"$ref\":\"#/$defs/n\"},\"e\":{\"enum\":[\"a\",1]},\"any\":{},"
    "\"nl\":{\"type\":\"string\",\"nullable\":true}}}}}]";

static void test_a_call(void **state) {
    (void)state;
    /* TC1, TC2: one call, two calls, text before; no byte of the tags in content */
    check((struct script){.text = THINK_END "\n\n" ONE_CALL("f", "a", "1"),
                          .want = "F0 f({\"a\": \"1\"})"});
    check((struct script){.text = "p\n" THINK_END "\n\nLook.\n\n" ONE_CALL(
                              "f", "a", "1") "\n" ONE_CALL("g", "b", "2"),
                          .want = "R(p)C(Look.)F0 f({\"a\": \"1\"})F1 g({\"b\": \"2\"})"});
    check((struct script){
        .text = CALL "<function=f></function>" CALL_END, .answer = true, .want = "F0 f({})"});
    check((struct script){.text = ONE_CALL("f", "a", "1") "\nDone.\n",
                          .answer = true,
                          .want = "F0 f({\"a\": \"1\"})C(\nDone.\n)"});
    check((struct script){.text = "a <tool_call> b\n<function=x>",
                          .answer = true,
                          .want = "C(a <tool_call> b\n<function=x>)"});
}

static void test_closing_tags_left_out(void **state) {
    (void)state;
    /* whitespace around names is none of theirs: the schema must be found */
    check((struct script){.text = CALL "\n<function= f >\n<parameter= i >\n5\n</parameter>\n"
                                       "<parameter=\ti \n6\n</parameter>\n</function>\n" CALL_END,
                          .answer = true,
                          .tools = "[{\"name\":\"f\",\"parameters\":{\"properties\":"
                                   "{\"i\":{\"type\":\"integer\"}}}}]",
                          .want = "F0 f({\"i\": 5})"});
    /* TC3: no newline before </parameter>, no </function> before the next <function= */
    check((struct script){.text = CALL
                          "\n<function=f>\n<parameter=path>a.txt</parameter>\n<function=g>\n"
                          "<parameter=b>\n\n two\n\n</parameter>\n</function>\n" CALL_END,
                          .answer = true,
                          .want = "F0 f({\"path\": \"a.txt\"})F1 g({\"b\": \"\\n two\\n\"})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nx\n</function>\n" CALL_END,
                          .answer = true,
                          .want = "F0 f({\"a\": \"x\"})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nx\n" CALL_END "\nT",
                          .answer = true,
                          .want = "F0 f({\"a\": \"x\"})C(\nT)"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nx\n</parameter>\n" CALL
                                       "\n<function=g>\n</function>\n" CALL_END,
                          .answer = true,
                          .want = "F0 f({\"a\": \"x\"})F1 g({})"});
    check(
        (struct script){.text = CALL "\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>",
                        .answer = true,
                        .want = "F0 f({\"a\": \"x\"})"});
    check((struct script){.text = CALL
                          "<function=f>junk<parameter=a\nx</parameter></function>" CALL_END,
                          .answer = true,
                          .want = "F0 f({\"a\": \"x\"})"});
}

static void test_values_that_look_like_tags(void **state) {
    (void)state;
    /* TC13 */
    check((struct script){.text = ONE_CALL("f", "a", "<div>\n</function>\n</div>"),
                          .answer = true,
                          .want = "F0 f({\"a\": \"<div>\\n</function>\\n</div>\"})"});
    check((struct script){.text = ONE_CALL("f", "a", "x </parameter> y\n</parameter>z\n</param"),
                          .answer = true,
                          .want = "F0 f({\"a\": \"x </parameter> y\\n</parameter>z\\n</param\"})"});
    check((struct script){.text = ONE_CALL("f", "a", "</parameter>\n\n</p\n</function>\n<"),
                          .answer = true,
                          .want = "F0 f({\"a\": \"</parameter>\\n\\n</p\\n</function>\\n<\"})"});
    check((struct script){.text = ONE_CALL("f", "a", "\"q\" \\ \t é\x7f"),
                          .answer = true,
                          .want = "F0 f({\"a\": \"\\\"q\\\" \\\\ \\t é\x7f\"})"});
    check((struct script){
        .text = ONE_CALL("f", "a", ""), .answer = true, .want = "F0 f({\"a\": \"\"})"});
    /* control tokens are text there, but for the one that ends the call */
    check((struct script){.text = ONE_CALL("f", "a", "a" THINK "b" THINK_END "c" CALL "d" IM_START),
                          .answer = true,
                          .want = "F0 f({\"a\": \"a<think>b</think>c<tool_call>d\"})"});
}

static void test_call_inside_the_think_block(void **state) {
    (void)state;
    /* TC4 */
    check((struct script){.text = "\nplan\n" ONE_CALL("f", "a", "1"),
                          .want = "R(plan)F0 f({\"a\": \"1\"})"});
    check((struct script){.text = "plan\n" ONE_CALL("f", "a", "1") "\n" THINK_END "\n\nA",
                          .want = "R(plan)F0 f({\"a\": \"1\"})C(A)"});
    check((struct script){.text = "use " CALL " and " CALL_END " here\n" THINK_END "A",
                          .want = "R(use <tool_call> and </tool_call> here)C(A)"});
    check(
        (struct script){.text = "use " CALL "\n" THINK_END "A", .want = "R(use <tool_call>)C(A)"});
}

static void test_malformed_calls_are_text(void **state) {
    (void)state;
    /* TC14 */
    check((struct script){.text = THINK_END "\n\n" CALL "\n{\"name\":",
                          .want = "C(<tool_call>\n{\"name\":)"});
    check((struct script){.text = "A\n\n" CALL "\n{\"name\": \"f\"}\n" CALL_END "\n",
                          .answer = true,
                          .want = "C(A\n\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>\n)"});
    check((struct script){
        .text = CALL "\n<function=f\n>", .answer = true, .want = "C(<tool_call>\n<function=f\n>)"});
    check((struct script){
        .text = CALL "<function= >", .answer = true, .want = "C(<tool_call><function= >)"});
    check((struct script){.text = CALL "\n<func", .answer = true, .want = "C(<tool_call>\n<func)"});
    check((struct script){.text = CALL CALL "\n<function=f>\n</function>\n" CALL_END,
                          .answer = true,
                          .want = "C(<tool_call>)F0 f({})"});
    check((struct script){.text = "a" CALL_END "b", .answer = true, .want = "C(a</tool_call>b)"});
}

static void test_cut_off_calls_are_closed(void **state) {
    (void)state;
    /* TC9 */
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nhel",
                          .answer = true,
                          .want = "F0 f({\"a\": \"hel\"})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nhel\n</para",
                          .answer = true,
                          .want = "F0 f({\"a\": \"hel\"})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\nhel <",
                          .answer = true,
                          .want = "F0 f({\"a\": \"hel <\"})"});
    check((struct script){
        .text = CALL "\n<function=f>\n<parame", .answer = true, .want = "F0 f({})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=i>\n12",
                          .answer = true,
                          .tools = weather,
                          .want = "F0 f({\"i\": 12})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=l>\n[1, 2",
                          .answer = true,
                          .tools = weather,
                          .want = "F0 f({\"l\": \"[1, 2\"})"});
    check((struct script){.text = CALL "\n<function=f>\n<parameter=a>\n\xc3",
                          .answer = true,
                          .want = "F0 f({\"a\": \"\xef\xbf\xbd\"})"});
}

/* Nobody offered a tool: the tags are the text they spell, in the answer and in the block. */
static void test_calls_nobody_expects(void **state) {
    (void)state;
    check((struct script){.text = "A " CALL "\n<function=f>\n</function>\n" CALL_END " B",
                          .answer = true,
                          .no_calls = true,
                          .want = "C(A <tool_call>\n<function=f>\n</function>\n</tool_call> B)"});
    check((struct script){.text = "p" CALL "q" CALL_END THINK_END "\n\nA" CALL_END,
                          .no_calls = true,
                          .want = "R(p<tool_call>q</tool_call>)C(A</tool_call>)"});
    check((struct script){.text = "A" CALL "bSTOP" CALL_END,
                          .answer = true,
                          .no_calls = true,
                          .stops = {"STOP"},
                          .want = "C(A<tool_call>b)",
                          .stopped = true});
}

static void check_value(const char *key, const char *value, const char *json) {
    char text[512], want[512];
    snprintf(text, sizeof text,
             CALL "\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n" CALL_END, key,
             value);
    snprintf(want, sizeof want, "F0 f({\"%s\": %s})", key, json);
    check((struct script){.text = text, .answer = true, .tools = weather, .want = want});
}

static void test_arguments_by_schema(void **state) {
    (void)state;
    static const char *const cases[][3] = {
        /* TC6, TC8: the schema decides, and what does not convert stays a string */
        {"s", "02134", "\"02134\""},
        {"s", "1e5", "\"1e5\""},
        {"s", "true", "\"true\""},
        {"s", "null", "\"null\""},
        {"s", "{}", "\"{}\""},
        {"i", "5", "5"},
        {"i", "-5", "-5"},
        {"i", "5.0", "5"},
        {"i", "5.5", "\"5.5\""},
        {"i", " 7 ", "7"},
        {"i", "02134", "\"02134\""},
        {"i", "null", "null"},
        {"i", "2026-01-15", "\"2026-01-15\""},
        {"i", "123456789012345678901234567890", "123456789012345678901234567890"},
        {"x", "5", "5"},
        {"x", "1.50", "1.50"},
        {"x", "1e999", "\"1e999\""},
        {"x", "1.", "\"1.\""},
        {"b", "true", "true"},
        {"b", "False", "false"},
        {"b", "1", "\"1\""},
        {"z", "null", "null"},
        {"z", "x", "\"x\""},
        {"o", "{\"a\": [1, {}]}", "{\"a\": [1, {}]}"},
        {"o", "[1]", "\"[1]\""},
        {"o", "{\"a\":", "\"{\\\"a\\\":\""},
        {"l", "[1, \"x\"]", "[1, \"x\"]"},
        {"l", "1], [2", "\"1], [2\""},
        {"sn", "null", "null"},
        {"sn", "nul", "\"nul\""},
        {"sn", "nullx", "\"nullx\""},
        {"sn", "", "\"\""},
        {"sn", "5", "\"5\""},
        {"in", "null", "null"},
        {"in", "5", "5"},
        {"si", "5", "5"},
        {"si", "05", "\"05\""},
        {"si", "x", "\"x\""},
        {"r", "3", "3"},
        {"e", "1", "1"},
        {"e", "a", "\"a\""},
        {"any", "{\"k\": 1}", "{\"k\": 1}"},
        {"any", "word", "\"word\""},
        {"nl", "null", "null"},
        {"nl", "no", "\"no\""},
        {"other", "5", "\"5\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_value(cases[i][0], cases[i][1], cases[i][2]);
}

static void test_arguments_given_twice(void **state) {
    (void)state;
    check((struct script){
        .text =
            CALL "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n"
                 "<parameter=b>\n3\n</parameter>\n</function>" CALL_END,
        .answer = true,
        .want = "F0 f({\"a\": \"1\", \"b\": \"3\"})"});
}

/* A reply that a test feeds itself. */
struct fed {
    struct tokenizer *tokenizer;
    struct seen seen;
    struct reply *reply;
    lily_err err;
};

static void fed_open(struct fed *f, int refuse_after) {
    *f = (struct fed){.seen = {.refuse_after = refuse_after}};
    f->tokenizer = tiny_load(tiny_json(NULL, NULL, 0, NULL), &f->err);
    const struct reply_options options = {.tokenizer = f->tokenizer};
    assert_int_equal(reply_new(&options, on_event, &f->seen, &f->reply, &f->err), 0);
}

static int fed_push(struct fed *f, int32_t id) {
    bool stopped;
    return reply_push(f->reply, id, &stopped, &f->err);
}

static void fed_text(struct fed *f, const char *text) {
    for (; *text; text++) assert_int_equal(fed_push(f, *text), 0);
}

static void fed_close(struct fed *f) {
    reply_free(f->reply);
    buf_free(&f->seen.text);
    buf_free(&f->seen.args);
    tokenizer_free(f->tokenizer);
}

/* TC12: the name comes as soon as it is known and a string's bytes as they are sampled. */
static void test_arguments_flow(void **state) {
    (void)state;
    struct fed f;
    fed_open(&f, 0);
    assert_int_equal(fed_push(&f, TINY_FIRST_CONTROL + 2), 0);
    fed_text(&f, "\n<function=write>");
    assert_string_equal(f.seen.text.data, "F0 write(");
    fed_text(&f, "\n<parameter=text>\n");
    for (int i = 0; i < 2000; i++) {
        assert_int_equal(fed_push(&f, 'a' + i % 26), 0);
        assert_int_equal(f.seen.args.len, strlen("{\"text\": \"") + (size_t)i + 1);
    }
    assert_true(f.seen.n_args_events >= 2000);
    assert_int_equal(reply_tool_calls(f.reply), 0);
    assert_int_equal(reply_finish(f.reply, &f.err), 0);
    assert_int_equal(reply_tool_calls(f.reply), 1);
    fed_close(&f);
}

static void test_the_callback_stops_the_feeding(void **state) {
    (void)state;
    struct fed f;
    fed_open(&f, 2);
    assert_int_equal(fed_push(&f, 'a'), 0);
    assert_int_equal(fed_push(&f, 'b'), 77);
    assert_int_equal(fed_push(&f, 'c'), 77);
    assert_int_equal(reply_finish(f.reply, &f.err), 77);
    assert_string_equal(f.seen.text.data, "C(a");
    fed_close(&f);
}

static void test_ids_without_a_token(void **state) {
    (void)state;
    struct fed f;
    struct reply *r;
    fed_open(&f, 0);
    assert_int_equal(fed_push(&f, 300), LILY_EINVAL);
    assert_int_equal(fed_push(&f, -1), LILY_EINVAL);
    const struct reply_options options = {
        .tokenizer = f.tokenizer, .stops = (const char *const[]){"\xff"}, .n_stops = 1};
    assert_int_equal(reply_new(&options, on_event, &f.seen, &r, &f.err), LILY_EINVAL);
    fed_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reasoning_then_content),
        cmocka_unit_test(test_one_extra_think_is_dropped),
        cmocka_unit_test(test_think_tags_in_the_answer),
        cmocka_unit_test(test_bytes_that_are_no_text),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_stop_strings_see_content_only),
        cmocka_unit_test(test_a_call),
        cmocka_unit_test(test_closing_tags_left_out),
        cmocka_unit_test(test_values_that_look_like_tags),
        cmocka_unit_test(test_call_inside_the_think_block),
        cmocka_unit_test(test_malformed_calls_are_text),
        cmocka_unit_test(test_cut_off_calls_are_closed),
        cmocka_unit_test(test_calls_nobody_expects),
        cmocka_unit_test(test_arguments_by_schema),
        cmocka_unit_test(test_arguments_given_twice),
        cmocka_unit_test(test_arguments_flow),
        cmocka_unit_test(test_the_callback_stops_the_feeding),
        cmocka_unit_test(test_ids_without_a_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
