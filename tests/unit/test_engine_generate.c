/* Requests on the fake backend: how they end, what they report, and that they can be stopped. All
 * of it twice: with the host as the sampler, and with a device that runs one step ahead. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/session.h"
#include "engine_fake.h"

/* What on_event saw. */
struct seen {
    struct buf reasoning, content, args, names;
    int tool_ends, prefills;
    int32_t last_done, last_total, first_done;
    int stop_after; /* returns nonzero at this event, counted from 1; 0: never */
    int events, after_stop;
    lily_session *cancel;    /* lily_cancel at the first text */
    enum lily_event_kind at; /* the first event of this kind, which brings something, */
    atomic_int *started;     /* sets this, and then waits until another thread */
    atomic_int *answered;    /* has set that */
};

static int watch(void *arg, const lily_event *e) {
    struct seen *s = arg;
    if (s->stop_after && s->events >= s->stop_after) s->after_stop++;
    s->events++;
    if (s->started && e->kind == s->at && (e->done > 0 || e->n > 0)) {
        atomic_store(s->started, 1);
        while (!atomic_load(s->answered)) usleep(100);
    }
    assert_int_equal(e->text[e->n], 0);
    switch (e->kind) {
    case LILY_EVENT_PREFILL:
        if (s->prefills++ == 0) s->first_done = e->done;
        s->last_done = e->done;
        s->last_total = e->total;
        break;
    case LILY_EVENT_REASONING:
        buf_append(&s->reasoning, e->text, e->n);
        break;
    case LILY_EVENT_CONTENT:
        buf_append(&s->content, e->text, e->n);
        if (s->cancel) lily_cancel(s->cancel);
        break;
    case LILY_EVENT_TOOL_BEGIN:
        buf_append(&s->names, e->text, e->n);
        break;
    case LILY_EVENT_TOOL_ARGS:
        buf_append(&s->args, e->text, e->n);
        break;
    case LILY_EVENT_TOOL_END:
        s->tool_ends++;
        break;
    }
    return s->stop_after && s->events == s->stop_after;
}

static void forget(struct seen *s) {
    buf_free(&s->reasoning);
    buf_free(&s->content);
    buf_free(&s->args);
    buf_free(&s->names);
    *s = (struct seen){0};
}

static const char *text(const struct buf *b) {
    return b->data ? b->data : "";
}

static const lily_sampling greedy = {.temperature = 0, .top_p = 1, .repetition_penalty = 1};

/* An engine, a session, a prompt of 70 tokens, and a script the model follows after it. */
struct setting {
    lily_engine *engine;
    lily_session *session;
    int32_t prompt[70];
    lily_tokens script;
    struct seen seen;
    lily_request request;
    lily_result result;
    lily_err err;
};

static void follow(struct setting *t, const char *script) {
    lily_tokens_free(&t->script);
    assert_int_equal(lily_tokenize(t->engine, script, strlen(script), true, &t->script, &t->err),
                     0);
    fake.script = t->script.ids;
    fake.n_script = (int32_t)t->script.n;
    fake.script_at = 70;
}

static void open_setting(struct setting *t, lily_engine_options options, const char *script) {
    *t = (struct setting){0};
    t->engine = fake_engine(options);
    t->session = fake_session(t->engine);
    for (int32_t i = 0; i < 70; i++) t->prompt[i] = 'a' + i % 26;
    follow(t, script);
    t->request = (lily_request){.prompt = t->prompt,
                                .n_prompt = 70,
                                .sampling = &greedy,
                                .on_event = watch,
                                .arg = &t->seen};
}

static void close_setting(struct setting *t) {
    forget(&t->seen);
    lily_tokens_free(&t->script);
    fake_close_all(t->engine, t->session);
}

static int generate(struct setting *t) {
    return lily_generate(t->session, &t->request, &t->result, &t->err);
}

static void expect(struct setting *t, enum lily_finish finish, int32_t outputs,
                   const char *reasoning, const char *content) {
    int rc = generate(t);
    if (rc) fail_msg("%d: %s", rc, t->err.msg);
    assert_int_equal(t->result.finish, finish);
    assert_int_equal(t->result.output_tokens, outputs);
    assert_int_equal(t->result.prompt_tokens, 70);
    assert_string_equal(text(&t->seen.reasoning), reasoning);
    assert_string_equal(text(&t->seen.content), content);
}

static void test_end_of_turn(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "Hello!<|im_end|>never");
    fake.chunk = 30;
    expect(&t, LILY_FINISH_STOP, 7, "", "Hello!");
    assert_int_equal(t.result.cached_tokens, 0);
    assert_int_equal(t.result.reasoning_tokens, 0);
    assert_int_equal(t.seen.prefills, 5); /* at 0, 30, 60, 64 (a checkpoint), 70 */
    assert_int_equal(t.seen.first_done, 0);
    assert_int_equal(t.seen.last_done, 70);
    assert_int_equal(t.seen.last_total, 70);
    assert_true(t.result.prefill_seconds >= 0 && t.result.decode_seconds >= 0);
    assert_int_equal(fake.decoded - fake.rewound, 6); /* the end token is not appended */
    assert_int_equal(fake.rewound, fake_on_device ? 1 : 0);
    assert_int_equal(session_position(t.session), 76);

    forget(&t.seen); /* the same again: resumed, the same text */
    t.request.arg = &t.seen;
    expect(&t, LILY_FINISH_STOP, 7, "", "Hello!");
    assert_int_equal(t.result.cached_tokens, 64);
    assert_int_equal(t.seen.first_done, 64);
    forget(&t.seen);
    follow(&t, "Hello!<|endoftext|>never"); /* any of the end tokens */
    expect(&t, LILY_FINISH_STOP, 7, "", "Hello!");
    forget(&t.seen);
    follow(&t, "say <|im_start|> or </think>!<|im_end|>"); /* text is no end */
    t.request.on_event = NULL;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_STOP);
    close_setting(&t);
}

/* The next turn extends this one: only the last token and what is new is read. */
static void test_next_turn(void **state) {
    (void)state;
    struct setting t;
    int32_t next[200];
    open_setting(&t, (lily_engine_options){0}, "Hello!<|im_end|>");
    expect(&t, LILY_FINISH_STOP, 7, "", "Hello!");
    memcpy(next, t.prompt, sizeof t.prompt);
    memcpy(next + 70, t.script.ids, 7 * sizeof *next); /* the answer and its end token */
    for (int i = 77; i < 100; i++) next[i] = 'x';
    forget(&t.seen);
    fake.script_at = 100;
    t.request.prompt = next, t.request.n_prompt = 100;
    assert_int_equal(generate(&t), 0);
    assert_string_equal(text(&t.seen.content), "Hello!");
    assert_int_equal(t.result.cached_tokens, 76);
    close_setting(&t);
}

static void test_reasoning(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "plan\n</think>\n\ndone<|im_end|>");
    t.request.in_think = true;
    expect(&t, LILY_FINISH_STOP, 5 + 1 + 2 + 4 + 1, "plan", "done");
    assert_int_equal(t.result.reasoning_tokens, 5);
    close_setting(&t);
}

/* An answer to be continued has its think block closed in the prompt. */
static void test_closed_think_block(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "and done<|im_end|>");
    t.request.in_think = true;
    t.prompt[40] = FAKE_THINK_END; /* of an earlier turn: says nothing */
    t.prompt[50] = FAKE_IM_START;
    t.prompt[60] = FAKE_THINK;
    expect(&t, LILY_FINISH_STOP, 9, "and done", "");
    forget(&t.seen);
    t.prompt[65] = FAKE_THINK_END;
    expect(&t, LILY_FINISH_STOP, 9, "", "and done");
    assert_int_equal(t.result.reasoning_tokens, 0);
    close_setting(&t);
}

static const char call_text[] = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
                                "</function>\n</tool_call>";

static void test_tool_call(void **state) {
    (void)state;
    struct setting t;
    char script[256];
    snprintf(script, sizeof script, "%s<|im_end|>", call_text);
    open_setting(&t, (lily_engine_options){0}, script);
    t.request.tools = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":"
                      "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}}}]";
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_TOOLS);
    assert_string_equal(text(&t.seen.names), "f");
    assert_string_equal(text(&t.seen.args), "{\"a\": 1}");
    assert_int_equal(t.seen.tool_ends, 1);
    assert_string_equal(text(&t.seen.content), "");

    forget(&t.seen); /* cut by the limit: not "tool_calls" */
    t.request.max_tokens = (int32_t)t.script.n - 1;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_LENGTH);
    forget(&t.seen); /* nobody offered a tool: the same tokens are text */
    t.request.max_tokens = 0;
    t.request.no_calls = true;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_STOP);
    assert_int_equal(t.seen.tool_ends, 0);
    assert_string_equal(text(&t.seen.content), call_text);
    t.request.no_calls = false;
    t.request.tools = "{}";
    assert_int_equal(generate(&t), LILY_EINVAL);
    t.request.tools = "[";
    assert_int_equal(generate(&t), LILY_EINVAL);
    assert_non_null(strstr(t.err.msg, "tools"));
    close_setting(&t);
}

/* A call inside the think block is a call; its tokens are not reasoning. */
static void test_tool_call_in_reasoning(void **state) {
    (void)state;
    struct setting t;
    char script[256];
    snprintf(script, sizeof script, "plan\n%s<|im_end|>", call_text);
    open_setting(&t, (lily_engine_options){0}, script);
    t.request.in_think = true;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_TOOLS);
    assert_int_equal(t.result.reasoning_tokens, 5);
    assert_int_equal(t.seen.tool_ends, 1);
    close_setting(&t);
}

static void test_stop_strings(void **state) {
    (void)state;
    struct setting t;
    static const char *const stops[] = {"END", "lo w"};
    open_setting(&t, (lily_engine_options){0}, "hello world END<|im_end|>");
    t.request.stops = stops, t.request.n_stops = 2;
    expect(&t, LILY_FINISH_STOP, 7, "", "hel");
    forget(&t.seen);
    follow(&t, "it is the EN<|im_end|>"); /* begun and not completed: handed out at the end */
    expect(&t, LILY_FINISH_STOP, 13, "", "it is the EN");
    close_setting(&t);
}

static void test_limits(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){.context = 80}, "0123456789abcdef<|im_end|>");
    t.request.max_tokens = 4;
    expect(&t, LILY_FINISH_LENGTH, 4, "", "0123");
    forget(&t.seen);
    t.request.max_tokens = 1;
    expect(&t, LILY_FINISH_LENGTH, 1, "", "0");
    forget(&t.seen);
    t.request.max_tokens = 0; /* until the context ends, and nothing beyond it */
    expect(&t, LILY_FINISH_LENGTH, 10, "", "0123456789");
    forget(&t.seen);
    t.request.max_tokens = 1000;
    expect(&t, LILY_FINISH_LENGTH, 10, "", "0123456789");
    forget(&t.seen);
    t.request.max_tokens = 10; /* an end token in the last place is an end */
    follow(&t, "012345678<|im_end|>");
    expect(&t, LILY_FINISH_STOP, 10, "", "012345678");
    forget(&t.seen);
    t.request.max_tokens = -1;
    assert_int_equal(generate(&t), LILY_EINVAL);
    assert_non_null(strstr(t.err.msg, "max_tokens: found -1"));
    close_setting(&t);
}

/* LC5: clamped with a word in the log; LC3: too long is refused at once, with both numbers. */
static void test_context_end_is_told(void **state) {
    (void)state;
    struct setting t;
    char line[500] = "";
    open_setting(&t, (lily_engine_options){.context = 80, .log = fake_keep_line, .arg = line},
                 "0123456789abcdef");
    t.request.max_tokens = 1000;
    expect(&t, LILY_FINISH_LENGTH, 10, "", "0123456789");
    assert_string_equal(line, "max_tokens: 1000 lowered to 10: the prompt has 70 tokens and the "
                              "context 80");
    int32_t before = fake.prefilled;
    int32_t long_prompt[80] = {0};
    t.request.prompt = long_prompt, t.request.n_prompt = 80;
    assert_int_equal(generate(&t), LILY_ECONTEXT);
    assert_string_equal(t.err.msg, "prompt: found 80 tokens, expected fewer than the context of "
                                   "80; shorten it or ask for a larger context");
    assert_int_equal(fake.prefilled, before);
    t.request.n_prompt = 79;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.output_tokens, 1);
    t.request.n_prompt = 0;
    assert_int_equal(generate(&t), LILY_EINVAL);
    close_setting(&t);
}

static void test_ignore_eos(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "ab<|im_end|>cd<|endoftext|>ef");
    t.request.ignore_eos = true;
    t.request.max_tokens = 8;
    expect(&t, LILY_FINISH_LENGTH, 8, "", "abcdef");
    close_setting(&t);
}

/* ---- sampling -------------------------------------------------------------------------------- */

static void test_sampling(void **state) {
    (void)state;
    struct setting t;
    char first[2000];
    open_setting(&t, (lily_engine_options){0}, "");
    lily_sampling warm = {
        .temperature = 1, .top_k = 20, .top_p = 0.95f, .repetition_penalty = 1, .seed = 7};
    t.request.sampling = &warm;
    t.request.ignore_eos = true;
    t.request.max_tokens = 100;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.seed, 7);
    snprintf(first, sizeof first, "%s", text(&t.seen.content));
    assert_true(strlen(first) > 20);
    forget(&t.seen); /* warm, cold: the same */
    assert_int_equal(generate(&t), 0);
    assert_string_equal(text(&t.seen.content), first);
    forget(&t.seen);
    lily_session_reset(t.session);
    assert_int_equal(generate(&t), 0);
    assert_string_equal(text(&t.seen.content), first);
    forget(&t.seen);
    warm.seed = 8;
    assert_int_equal(generate(&t), 0);
    assert_string_not_equal(text(&t.seen.content), first);
    forget(&t.seen);
    warm.random_seed = true; /* drawn, told, repeatable */
    assert_int_equal(generate(&t), 0);
    snprintf(first, sizeof first, "%s", text(&t.seen.content));
    forget(&t.seen);
    warm.seed = t.result.seed, warm.random_seed = false;
    assert_int_equal(generate(&t), 0);
    assert_string_equal(text(&t.seen.content), first);

    forget(&t.seen);
    t.request.sampling = NULL; /* the defaults, with a seed of their own each time */
    assert_int_equal(generate(&t), 0);
    uint64_t seed = t.result.seed;
    assert_int_equal(generate(&t), 0);
    assert_true(t.result.seed != seed);

    warm.top_p = 3;
    t.request.sampling = &warm;
    int32_t before = fake.prefilled;
    assert_int_equal(generate(&t), LILY_EINVAL);
    assert_non_null(strstr(t.err.msg, "top_p: found 3"));
    assert_int_equal(lily_sampling_check(t.engine, &warm, &t.err), LILY_EINVAL);
    assert_int_equal(fake.prefilled, before);
    warm.top_p = 1;
    const int32_t id = FAKE_USED; /* a padding row */
    const float bias = 5;
    warm.bias_ids = &id, warm.bias = &bias, warm.n_bias = 1;
    assert_int_equal(generate(&t), LILY_EINVAL);
    assert_non_null(strstr(t.err.msg, "logit_bias: found token id 263"));
    close_setting(&t);
}

/* ---- being stopped --------------------------------------------------------------------------- */

static void test_event_cancels(void **state) {
    (void)state;
    struct setting t;
    for (int at = 1; at < 12; at++) { /* in prefill and in decode */
        open_setting(&t, (lily_engine_options){0}, "hello world, hello world<|im_end|>");
        fake.chunk = 20;
        t.seen.stop_after = at;
        assert_int_equal(generate(&t), 0);
        assert_int_equal(t.result.finish, LILY_FINISH_CANCELLED);
        assert_int_equal(t.seen.events, at);
        assert_int_equal(t.seen.after_stop, 0);
        int32_t kept = session_position(t.session);
        forget(&t.seen); /* what was read is kept for the retry */
        assert_int_equal(generate(&t), 0);
        assert_int_equal(t.result.finish, LILY_FINISH_STOP);
        assert_string_equal(text(&t.seen.content), "hello world, hello world");
        assert_int_equal(t.result.cached_tokens, kept <= 70 ? kept : 64);
        close_setting(&t);
    }
}

static void test_cancel_from_within(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "hello world, hello world<|im_end|>");
    t.seen.cancel = t.session;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_CANCELLED);
    assert_int_equal(t.result.output_tokens, 1);
    close_setting(&t);
}

struct canceller {
    lily_session *session;
    atomic_int started, cancelled;
};

static void *cancel_when_started(void *arg) {
    struct canceller *c = arg;
    while (!atomic_load(&c->started)) usleep(100);
    lily_cancel(c->session);
    atomic_store(&c->cancelled, 1);
    return NULL;
}

/* From another thread, in a prefill and in a decode that would go on for very long. */
static void test_cancel_from_another_thread(void **state) {
    (void)state;
    for (int in_decode = 0; in_decode < 2; in_decode++) {
        struct setting t;
        pthread_t thread;
        open_setting(&t, (lily_engine_options){0}, "");
        struct canceller c = {.session = t.session};
        atomic_init(&c.started, 0);
        atomic_init(&c.cancelled, 0);
        t.seen.started = &c.started;
        t.seen.answered = &c.cancelled;
        t.seen.at = in_decode ? LILY_EVENT_CONTENT : LILY_EVENT_PREFILL;
        t.request.ignore_eos = true;
        if (!in_decode) fake.chunk = 1;
        assert_int_equal(pthread_create(&thread, NULL, cancel_when_started, &c), 0);
        assert_int_equal(generate(&t), 0);
        pthread_join(thread, NULL);
        assert_int_equal(t.result.finish, LILY_FINISH_CANCELLED);
        if (!in_decode) assert_int_equal(fake.prefilled, 1);
        assert_true(in_decode ? t.result.output_tokens > 0 : t.result.output_tokens == 0);
        assert_true(t.result.output_tokens < 100);
        close_setting(&t);
    }
}

/* A callback that does what it must not: every call is refused, and harmless. */
struct intruder {
    lily_session *session, *other;
    int calls;
};

static int intrude(void *arg, const lily_event *event) {
    struct intruder *i = arg;
    lily_session *const sessions[] = {i->session, i->other};
    const int32_t id = 'a';
    lily_request request = {.prompt = &id, .n_prompt = 1, .sampling = &greedy};
    lily_result result;
    lily_err err;
    if (event->kind != LILY_EVENT_CONTENT) return 0;
    for (int k = 0; k < 2; k++) {
        lily_session *s = sessions[k];
        assert_int_equal(lily_generate(s, &request, &result, &err), LILY_EBUSY);
        assert_non_null(strstr(err.msg, "within a callback"));
        assert_int_equal(lily_session_sync(s, &id, 1, &err), LILY_EBUSY);
        assert_int_equal(lily_session_step(s, id, &err), LILY_EBUSY);
        assert_int_equal(lily_session_greedy(s, id, 1, NULL, NULL, &err), LILY_EBUSY);
        assert_int_equal(lily_session_score(s, &id, 1, NULL, NULL, &err), LILY_EBUSY);
    }
    if (++i->calls == 3) lily_session_reset(i->session); /* cancels */
    return 0;
}

static void test_calls_from_a_callback(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "hello world<|im_end|>");
    struct intruder i = {.session = t.session, .other = fake_session(t.engine)};
    t.request.on_event = intrude, t.request.arg = &i;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.finish, LILY_FINISH_CANCELLED);
    assert_int_equal(i.calls, 3);
    assert_int_equal(session_position(t.session), 72); /* what was read is kept */
    t.request.on_event = watch, t.request.arg = &t.seen;
    expect(&t, LILY_FINISH_STOP, 12, "", "hello world");
    lily_session_reset(t.session);
    assert_int_equal(session_position(t.session), 0);
    lily_session_free(i.other);
    close_setting(&t);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void test_failures_end_the_request_only(void **state) {
    (void)state;
    struct setting t;
    open_setting(&t, (lily_engine_options){0}, "hello<|im_end|>");
    for (int32_t where = 60; where <= 72; where += 12) { /* in prefill, in decode */
        fake.nan_at = where;
        assert_int_equal(generate(&t), LILY_ENUMERIC);
        forget(&t.seen);
        expect(&t, LILY_FINISH_STOP, 6, "", "hello");
        assert_int_equal(t.result.cached_tokens, 0);
        forget(&t.seen);
        lily_session_reset(t.session);
        fake.fail_at = where;
        assert_int_equal(generate(&t), LILY_EBACKEND);
        forget(&t.seen);
        expect(&t, LILY_FINISH_STOP, 6, "", "hello");
        forget(&t.seen);
        lily_session_reset(t.session);
    }
    for (int32_t where = 71; where <= 73; where++) { /* a device: the second one is behind it */
        fake.refuse_at = where;
        assert_int_equal(generate(&t), LILY_EBACKEND);
        assert_non_null(strstr(t.err.msg, "told to refuse"));
        assert_int_equal(session_position(t.session), 0);
        forget(&t.seen);
        expect(&t, LILY_FINISH_STOP, 6, "", "hello");
        assert_int_equal(t.result.cached_tokens, 0);
        forget(&t.seen);
    }
    close_setting(&t);
}

/* ---- one step ahead -------------------------------------------------------------------------- */

static bool same_session(const lily_session *a, const lily_session *b) {
    const struct backend_session *x = a->backend, *y = b->backend;
    bool same = a->held == b->held && x->pos == y->pos && x->state.hash == y->state.hash &&
                memcmp(a->tokens, b->tokens, (size_t)a->held * sizeof *a->tokens) == 0 &&
                a->states.n == b->states.n;
    for (int32_t i = 0; same && i < a->states.n; i++) {
        same = a->states.entry[i].pos == b->states.entry[i].pos &&
               a->states.entry[i].decode == b->states.entry[i].decode &&
               a->states.entry[i].saved->state.hash == b->states.entry[i].saved->state.hash;
    }
    return same;
}

/* A request that ends somehow, drawn from dice: by a token, a string, the limit, or an event. */
static void draw_request(struct setting *t, uint64_t dice) {
    static const char *const stops[] = {"y z", "fgh", "0"};
    char script[400];
    size_t n = 1 + dice % 300;
    for (size_t i = 0; i < n; i++) script[i] = (char)('a' + (i * (1 + dice % 3) + dice) % 26);
    snprintf(script + n, sizeof script - n, "%s", dice / 7 % 3 ? "<|im_end|>" : "");
    forget(&t->seen);
    follow(t, script);
    t->request.max_tokens = dice / 3 % 2 ? (int32_t)(1 + dice / 11 % 320) : 350;
    t->request.stops = dice / 5 % 4 == 0 ? stops : NULL;
    t->request.n_stops = t->request.stops ? 3 : 0;
    t->seen.stop_after = dice / 13 % 4 == 0 ? (int)(1 + dice / 17 % 300) : 0;
    t->prompt[60 + dice / 19 % 10] = 'a' + (int32_t)(dice / 23 % 26);
}

/* Whatever ends a request, the session holds the same as if the host had sampled: the tokens, the
 * state after them, and the checkpoints with their states. */
static void test_ahead_leaves_what_the_host_would(void **state) {
    (void)state;
    struct setting host, device;
    bool mode = fake_on_device;
    const lily_engine_options options = {.context = 500, .state_bytes = 5 * fake_state_bytes(NULL)};
    fake_on_device = false;
    open_setting(&host, options, "");
    lily_tokens_free(&host.script);
    fake_on_device = true;
    open_setting(&device, options, "");
    fake.models = 2, fake.sessions = 2; /* opening the second one forgot the first */
    fake.states = host.session->states.limit + device.session->states.limit;
    for (uint64_t round = 0; round < 400; round++) {
        uint64_t dice = fake_mix(round);
        if (dice / 29 % 8 == 0) {
            lily_session_reset(host.session);
            lily_session_reset(device.session);
        }
        draw_request(&host, dice);
        if (generate(&host)) fail_msg("%s", host.err.msg);
        draw_request(&device, dice);
        if (generate(&device)) fail_msg("%s", device.err.msg);
        assert_string_equal(text(&host.seen.content), text(&device.seen.content));
        assert_int_equal(host.result.finish, device.result.finish);
        assert_int_equal(host.result.output_tokens, device.result.output_tokens);
        assert_int_equal(host.seen.events, device.seen.events);
        if (!same_session(host.session, device.session)) fail_msg("round %d", (int)round);
    }
    assert_true(fake.rewound > 100);
    assert_true(fake.two_in_flight > 10000);
    forget(&host.seen);
    lily_tokens_free(&host.script);
    lily_session_free(host.session);
    lily_engine_close(host.engine);
    close_setting(&device);
    fake_on_device = mode;
}

struct picked {
    int32_t ids[300];
    int n, stop_after;
};

static int keep_id(void *arg, int32_t id) {
    struct picked *p = arg;
    p->ids[p->n++] = id;
    return p->n == p->stop_after;
}

/* What bench measures: the tokens that a greedy request would bring, by the same path. */
static void test_greedy_measurement(void **state) {
    (void)state;
    struct setting t;
    struct picked all = {.n = 0}, some = {.stop_after = 5};
    open_setting(&t, (lily_engine_options){.context = 300}, "hello<|im_end|> and on");
    int32_t first = t.script.ids[0];
    assert_int_equal(lily_session_sync(t.session, t.prompt, 70, &t.err), 0);
    assert_int_equal(lily_session_greedy(t.session, first, 230, keep_id, &all, &t.err), 0);
    assert_int_equal(all.n, 230);
    assert_memory_equal(all.ids, t.script.ids + 1, (t.script.n - 1) * sizeof *all.ids);
    assert_int_equal(session_position(t.session), 300);
    assert_int_equal(fake.decoded, 230);
    if (fake_on_device) assert_int_equal(fake.two_in_flight, 229 - 3); /* 128, 192, 256 */
    assert_int_equal(lily_session_logits(t.session) == NULL, fake_on_device);
    assert_int_equal(lily_session_greedy(t.session, first, 1, NULL, NULL, &t.err), LILY_ECONTEXT);

    assert_int_equal(lily_session_sync(t.session, t.prompt, 70, &t.err), 0);
    assert_int_equal(lily_session_greedy(t.session, first, 231, NULL, NULL, &t.err), LILY_ECONTEXT);
    assert_int_equal(lily_session_greedy(t.session, first, 0, NULL, NULL, &t.err), LILY_ECONTEXT);
    assert_int_equal(lily_session_greedy(t.session, 4096, 1, NULL, NULL, &t.err), LILY_EINVAL);
    assert_int_equal(lily_session_greedy(t.session, -1, 1, NULL, NULL, &t.err), LILY_EINVAL);
    assert_int_equal(lily_session_greedy(t.session, first, 20, keep_id, &some, &t.err),
                     LILY_ECANCELED);
    assert_int_equal(some.n, 5);
    assert_int_equal(session_position(t.session), 75);
    fake.nan_at = 78;
    assert_int_equal(lily_session_greedy(t.session, all.ids[4], 20, NULL, NULL, &t.err),
                     LILY_ENUMERIC);
    assert_int_equal(session_position(t.session), 0);
    close_setting(&t);
}

/* The device waits for the host before a checkpoint and before the last token, and nowhere else. */
static void test_ahead_is_ahead(void **state) {
    (void)state;
    struct setting t;
    if (!fake_on_device) return;
    open_setting(&t, (lily_engine_options){0}, "");
    t.request.ignore_eos = true;
    t.request.max_tokens = 200; /* 199 steps, from position 70 to 269 */
    assert_int_equal(generate(&t), 0);
    assert_int_equal(fake.decoded, 199);
    assert_int_equal(fake.rewound, 0); /* it is known that nobody wants a 201st token */
    /* Each step but the first follows another in flight, except after 128, 192 and 256. */
    assert_int_equal(fake.two_in_flight, 198 - 3);
    assert_int_equal(t.session->states.entry[t.session->states.n - 1].pos, 256);
    close_setting(&t);
}

/* What a device cannot do is left to the host. */
static void test_ahead_only_where_the_device_can(void **state) {
    (void)state;
    struct setting t;
    if (!fake_on_device) return;
    const int32_t id = 3;
    const float bias = 0;
    const struct {
        lily_sampling sampling;
        bool device;
        int32_t counted;
    } cases[] = {
        {{.temperature = 0, .top_p = 1, .repetition_penalty = 1}, true, 0},
        {{.temperature = 1e-6f, .top_k = 1000, .top_p = 1, .repetition_penalty = 1.5f}, true, 70},
        {{.temperature = 1, .top_k = 1, .top_p = 1, .repetition_penalty = 1}, true, 0},
        {{.temperature = 1, .top_k = BACKEND_TOP_K, .top_p = 1, .repetition_penalty = 1}, true, 0},
        {{.temperature = 1, .top_k = BACKEND_TOP_K + 1, .top_p = 1, .repetition_penalty = 1},
         false,
         0},
        {{.temperature = 1, .top_k = 0, .top_p = 0.5f, .repetition_penalty = 1}, false, 0},
        {{.temperature = 0,
          .top_p = 1,
          .repetition_penalty = 1,
          .bias_ids = &id,
          .bias = &bias,
          .n_bias = 1},
         false,
         0},
    };
    open_setting(&t, (lily_engine_options){0}, "hello<|im_end|>");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        t.request.sampling = &cases[i].sampling;
        fake.begun = fake.two_in_flight = 0;
        expect(&t, LILY_FINISH_STOP, 6, "", "hello");
        assert_int_equal(fake.begun, cases[i].device ? 1 : 0);
        assert_int_equal(fake.two_in_flight > 0, cases[i].device);
        if (cases[i].device) assert_int_equal(fake.begun_with, cases[i].counted);
        /* a repetition of what is held is answered from the logits, or read again */
        assert_int_equal(lily_session_logits(t.session) == NULL, cases[i].device);
        forget(&t.seen);
    }
    close_setting(&t);
}

/* After the device has sampled there are no logits: the very tokens that the session holds are
 * gone back in, not taken for known. */
static void test_ahead_then_the_same_tokens(void **state) {
    (void)state;
    struct setting t;
    int32_t again[76];
    open_setting(&t, (lily_engine_options){0}, "hello!<|im_end|>");
    expect(&t, LILY_FINISH_STOP, 7, "", "hello!");
    memcpy(again, t.prompt, sizeof t.prompt);
    memcpy(again + 70, t.script.ids, 6 * sizeof *again);
    assert_int_equal(session_position(t.session), 76);
    forget(&t.seen);
    t.request.prompt = again, t.request.n_prompt = 76, t.request.max_tokens = 1;
    assert_int_equal(generate(&t), 0);
    assert_int_equal(t.result.cached_tokens, fake_on_device ? 64 : 76);
    lily_session *cold = fake_session(t.engine);
    int32_t cached;
    assert_int_equal(session_sync(cold, again, 76, NULL, NULL, &cached, &t.err), 0);
    assert_memory_equal(lily_session_logits(cold), lily_session_logits(t.session),
                        4096 * sizeof(float));
    lily_session_free(cold);
    close_setting(&t);
}

/* The step in flight when an answer ends may fail: the answer stands, the session starts over. */
static void test_ahead_fails_late(void **state) {
    (void)state;
    struct setting t;
    char line[500] = "";
    if (!fake_on_device) return;
    open_setting(&t, (lily_engine_options){.log = fake_keep_line, .arg = line}, "hello<|im_end|>");
    for (int what = 0; what < 4; what++) { /* the end token would be number 76 */
        fake.fail_at = what == 0 ? 76 : 0;
        fake.nan_at = what == 1 ? 76 : 0;
        fake.rewind_fails = what == 2;
        fake.begin_fails = what == 3;
        line[0] = 0;
        if (what == 3) {
            assert_int_equal(generate(&t), LILY_EBACKEND);
        } else {
            expect(&t, LILY_FINISH_STOP, 6, "", "hello");
            assert_non_null(strstr(line, "taking back a step"));
        }
        assert_int_equal(session_position(t.session), 0);
        fake.rewind_fails = fake.begin_fails = false;
        forget(&t.seen);
        expect(&t, LILY_FINISH_STOP, 6, "", "hello");
        assert_int_equal(t.result.cached_tokens, 0);
        forget(&t.seen);
    }
    fake.fail_at = 72; /* with another step behind it */
    assert_int_equal(generate(&t), LILY_EBACKEND);
    assert_int_equal(session_position(t.session), 0);
    close_setting(&t);
}

/* Ids alone, for measurements on checkpoints without text. */
static void test_without_tokenizer(void **state) {
    (void)state;
    fake = (struct fake){0};
    const lily_engine_options o = {0};
    const struct engine_parts parts = {.weights = &fake_weights, .backend = &backend_fake};
    lily_engine *e;
    lily_err err;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), 0);
    lily_session *s = fake_session(e);
    const int32_t prompt[] = {1, 2, 3};
    static const char *const stops[] = {"x"};
    lily_request q = {.prompt = prompt, .n_prompt = 3, .max_tokens = 20, .ignore_eos = true};
    lily_result result;
    assert_int_equal(lily_generate(s, &q, &result, &err), 0);
    assert_int_equal(result.output_tokens, 20);
    assert_int_equal(result.finish, LILY_FINISH_LENGTH);
    q.stops = stops, q.n_stops = 1;
    assert_int_equal(lily_generate(s, &q, &result, &err), LILY_EINVAL);
    fake_close_all(e, s);
}

static int on_host(void **state) {
    (void)state;
    fake_on_device = false;
    return 0;
}

static int on_device(void **state) {
    (void)state;
    fake_on_device = true;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_end_of_turn),
        cmocka_unit_test(test_next_turn),
        cmocka_unit_test(test_reasoning),
        cmocka_unit_test(test_closed_think_block),
        cmocka_unit_test(test_tool_call),
        cmocka_unit_test(test_tool_call_in_reasoning),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_context_end_is_told),
        cmocka_unit_test(test_ignore_eos),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_event_cancels),
        cmocka_unit_test(test_cancel_from_within),
        cmocka_unit_test(test_cancel_from_another_thread),
        cmocka_unit_test(test_calls_from_a_callback),
        cmocka_unit_test(test_failures_end_the_request_only),
        cmocka_unit_test(test_ahead_leaves_what_the_host_would),
        cmocka_unit_test(test_greedy_measurement),
        cmocka_unit_test(test_ahead_is_ahead),
        cmocka_unit_test(test_ahead_only_where_the_device_can),
        cmocka_unit_test(test_ahead_then_the_same_tokens),
        cmocka_unit_test(test_ahead_fails_late),
        cmocka_unit_test(test_without_tokenizer),
    };
    int failed = cmocka_run_group_tests_name("the host samples", tests, on_host, NULL);
    return failed + cmocka_run_group_tests_name("the device samples", tests, on_device, NULL);
}
