/* A scripted engine behind the real server: timing, hang-ups and every event order can be tested
 * without a model. The last message's text is the script, one step a line:
 *
 *   prefill N MS       N chunks of MS milliseconds each (the default is one of 0)
 *   delay MS           from here on, before each event
 *   say TEXT           content, one event per word; \n in TEXT is a newline
 *   think TEXT         the same as reasoning
 *   call NAME JSON     a tool call, the arguments in two events (none without JSON)
 *   repeat N TEXT      TEXT as content N times
 *   silence MS         nothing for so long, deaf to on_event, ended by lily_cancel
 *   fail CODE TEXT     lily_generate returns the code (-5, ...)
 *   reject TEXT        lily_chat_prompt refuses
 *   slow MS            lily_chat_prompt takes so long
 *   show               content: the request as the engine was given it, as JSON
 *   idle               content: how often lily_session_idle was called
 *
 * A text without a known step is answered by "ok". A prompt's tokens are the bytes of all texts. */
#include <jansson.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/buf.h"
#include "base/clock.h"
#include "serve/serve.h"

#define FAKE_VOCAB  1000
#define FAKE_TOKENS 990

struct lily_engine {
    int32_t context;
    int32_t rest_seconds; /* of lily_session_idle, unless cancelled */
};

struct lily_session {
    lily_engine *engine;
    atomic_bool cancel;
    int32_t held; /* the prompt, unless the backend or the model failed */
    int idle;     /* calls of lily_session_idle, which the third says are of no use */
};

static void pause_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* ---- engine ---------------------------------------------------------------------------------- */

void lily_engine_get_info(const lily_engine *e, lily_engine_info *out) {
    *out = (lily_engine_info){.model_name = "fake",
                              .model_path = "",
                              .backend = "script",
                              .vocab = FAKE_VOCAB,
                              .context = e->context};
}

void lily_sampling_defaults(const lily_engine *e, bool thinking, lily_sampling *out) {
    (void)e;
    *out = (lily_sampling){.temperature = thinking ? 1.0f : 0.5f,
                           .top_k = 20,
                           .top_p = 0.75f,
                           .presence_penalty = 1.5f,
                           .repetition_penalty = 1.0f};
}

/* The last ids of the vocabulary are padding, as in a real checkpoint. */
int lily_sampling_check(const lily_engine *e, const lily_sampling *s, lily_err *err) {
    (void)e;
    for (int i = 0; i < s->n_bias; i++)
        if (s->bias_ids[i] >= FAKE_TOKENS)
            return ERR(err, LILY_EINVAL, "logit_bias: found token id %d, expected 0 to %d",
                       (int)s->bias_ids[i], FAKE_TOKENS - 1);
    return 0;
}

int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err) {
    (void)context;
    *out = calloc(1, sizeof **out);
    if (!*out) return ERR_NOMEM(err, "session");
    (*out)->engine = e;
    return 0;
}

void lily_session_free(lily_session *s) {
    free(s);
}

void lily_session_reset(lily_session *s) {
    s->held = 0;
}

int32_t lily_session_held(const lily_session *s) {
    return s->held;
}

bool lily_session_idle(lily_session *s) {
    const int64_t until = clock_ns() + (int64_t)s->engine->rest_seconds * 1000000000;
    while (clock_ns() < until && !atomic_load(&s->cancel)) pause_ms(5);
    return ++s->idle < 3;
}

void lily_cancel(lily_session *s) {
    atomic_store(&s->cancel, true);
}

void lily_tokens_free(lily_tokens *t) {
    free(t->ids);
    *t = (lily_tokens){0};
}

/* ---- prompt ---------------------------------------------------------------------------------- */

static void add_text(struct buf *out, const json_t *content) {
    size_t i;
    json_t *part;
    if (json_is_string(content)) buf_puts(out, json_string_value(content));
    json_array_foreach(content, i, part) add_text(out, json_object_get(part, "text"));
}

/* The value of a step at the start of a line, or NULL. */
static const char *step_find(const char *script, const char *step) {
    size_t n = strlen(step);
    for (const char *p = script; p; p = strchr(p, '\n'), p = p ? p + 1 : NULL)
        if (!strncmp(p, step, n)) return p + n;
    return NULL;
}

int lily_chat_prompt(const lily_engine *e, const char *messages, const char *tools,
                     const lily_chat_options *options, lily_tokens *out, lily_err *err) {
    (void)e;
    (void)tools;
    (void)options;
    struct buf text = {0};
    size_t i;
    json_t *message, *list = json_loads(messages, JSON_ALLOW_NUL, NULL);
    json_array_foreach(list, i, message) {
        add_text(&text, json_object_get(message, "content"));
        if (i + 1 < json_array_size(list)) buf_puts(&text, "\n");
    }
    json_decref(list);
    buf_reserve(&text, 1);
    const char *reject = step_find(text.data, "reject "), *slow = step_find(text.data, "slow ");
    if (slow) pause_ms(atol(slow));
    int rc = reject ? ERR(err, LILY_EINVAL, "%.*s", (int)strcspn(reject, "\n"), reject) : 0;
    out->n = text.len;
    out->ids = rc ? NULL : calloc(text.len + 1, sizeof *out->ids);
    for (i = 0; out->ids && i < text.len; i++) out->ids[i] = (unsigned char)text.data[i];
    buf_free(&text);
    return rc;
}

/* ---- generation ------------------------------------------------------------------------------ */

struct play {
    lily_session *session;
    const lily_request *request;
    lily_result *result;
    lily_err *err;
    long delay;
    int calls;
    int rc;
    bool ended; /* cancelled, failed or at max_tokens */
};

static void stop_play(struct play *p, enum lily_finish finish) {
    p->result->finish = finish;
    p->ended = true;
}

static void emit(struct play *p, lily_event event) {
    if (p->ended) return;
    if (p->delay) pause_ms(p->delay);
    if (atomic_load(&p->session->cancel) ||
        (p->request->on_event && p->request->on_event(p->request->arg, &event))) {
        stop_play(p, LILY_FINISH_CANCELLED);
        return;
    }
    if (event.kind == LILY_EVENT_PREFILL) return;
    p->result->output_tokens++;
    p->result->reasoning_tokens += event.kind == LILY_EVENT_REASONING;
    if (p->request->max_tokens && p->result->output_tokens >= p->request->max_tokens)
        stop_play(p, LILY_FINISH_LENGTH);
}

static void emit_text(struct play *p, enum lily_event_kind kind, const char *text, size_t n) {
    char *copy = strndup(text, n);
    emit(p, (lily_event){.kind = kind, .text = copy, .n = n, .call = p->calls});
    free(copy);
}

/* One event per word, with \n as a newline. */
static void emit_words(struct play *p, enum lily_event_kind kind, const char *text, size_t n) {
    struct buf word = {0};
    for (size_t i = 0; i < n; i++) {
        bool newline = text[i] == '\\' && i + 1 < n && text[i + 1] == 'n';
        if (text[i] == ' ' && word.len) {
            emit_text(p, kind, word.data, word.len);
            buf_clear(&word);
        }
        buf_append(&word, newline ? "\n" : text + i, 1);
        i += newline;
    }
    if (word.len) emit_text(p, kind, word.data, word.len);
    buf_free(&word);
}

static void do_call(struct play *p, const char *text, size_t n) {
    size_t name = strcspn(text, " \n"), half;
    if (name > n) name = n;
    emit_text(p, LILY_EVENT_TOOL_BEGIN, text, name);
    text += name;
    n -= name;
    half = n / 2;
    if (half) emit_text(p, LILY_EVENT_TOOL_ARGS, text + 1, half);
    if (n) emit_text(p, LILY_EVENT_TOOL_ARGS, text + 1 + half, n - 1 - half);
    emit_text(p, LILY_EVENT_TOOL_END, "", 0);
    p->calls++;
}

static void do_prefill(struct play *p, const char *args) {
    char *rest;
    long n = strtol(args, &rest, 10), ms = strtol(rest, NULL, 10);
    for (long i = 0; i <= n && !p->ended; i++) {
        lily_event event = {.kind = LILY_EVENT_PREFILL, .done = (int32_t)i, .total = (int32_t)n};
        emit(p, event);
        if (i < n) pause_ms(ms);
    }
}

static void do_repeat(struct play *p, const char *args, size_t n) {
    char *rest;
    long times = strtol(args, &rest, 10);
    size_t used = (size_t)(rest - args) + 1;
    for (long i = 0; i < times && used < n && !p->ended; i++)
        emit_text(p, LILY_EVENT_CONTENT, rest + 1, n - used);
}

static void do_silence(struct play *p, const char *args) {
    int64_t until = clock_ns() + atol(args) * 1000000;
    while (clock_ns() < until && !p->ended) {
        pause_ms(5);
        if (atomic_load(&p->session->cancel)) stop_play(p, LILY_FINISH_CANCELLED);
    }
}

static void do_fail(struct play *p, const char *args, size_t n) {
    char *rest;
    p->rc = (int)strtol(args, &rest, 10);
    size_t used = (size_t)(rest - args);
    ERR(p->err, p->rc, "%.*s", (int)(n - used), rest + (used < n));
    if (p->rc == LILY_EBACKEND || p->rc == LILY_ENUMERIC) p->session->held = 0;
    p->ended = true;
}

static void do_show(struct play *p) {
    const lily_request *r = p->request;
    const lily_sampling *s = r->sampling;
    json_t *bias = json_object();
    for (int i = 0; i < s->n_bias; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", (int)s->bias_ids[i]);
        json_object_set_new(bias, id, json_real((double)s->bias[i]));
    }
    json_t *stops = json_array();
    for (size_t i = 0; i < r->n_stops; i++) json_array_append_new(stops, json_string(r->stops[i]));
    json_t *all = json_pack(
        "{s:f, s:i, s:f, s:f, s:f, s:f, s:f, s:I, s:b, s:o, s:o, s:i, s:b, s:b, s:b, s:s?}",
        "temperature", (double)s->temperature, "top_k", (int)s->top_k, "top_p", (double)s->top_p,
        "min_p", (double)s->min_p, "presence_penalty", (double)s->presence_penalty,
        "frequency_penalty", (double)s->frequency_penalty, "repetition_penalty",
        (double)s->repetition_penalty, "seed", (json_int_t)s->seed, "random_seed",
        (int)s->random_seed, "bias", bias, "stops", stops, "max_tokens", (int)r->max_tokens,
        "in_think", (int)r->in_think, "ignore_eos", (int)r->ignore_eos, "no_calls",
        (int)r->no_calls, "tools", r->tools);
    char *text = json_dumps(all, 0);
    json_decref(all);
    if (text) emit_text(p, LILY_EVENT_CONTENT, text, strlen(text));
    free(text);
}

static void do_idle(struct play *p) {
    char text[16];
    int n = snprintf(text, sizeof text, "%d", p->session->idle);
    emit_text(p, LILY_EVENT_CONTENT, text, (size_t)n);
}

/* One line of the script; true when it was a step. */
static bool step(struct play *p, const char *line, size_t n) {
    size_t name = strcspn(line, " \n");
    if (name > n) name = n;
    const char *args = line + name + (name < n);
    size_t left = n - (size_t)(args - line);
#define IS(text) (name == sizeof(text) - 1 && !strncmp(line, text, name))
    if (IS("prefill")) {
        do_prefill(p, args);
    } else if (IS("delay")) {
        p->delay = atol(args);
    } else if (IS("say")) {
        emit_words(p, LILY_EVENT_CONTENT, args, left);
    } else if (IS("think")) {
        emit_words(p, LILY_EVENT_REASONING, args, left);
    } else if (IS("call")) {
        do_call(p, args, left);
    } else if (IS("repeat")) {
        do_repeat(p, args, left);
    } else if (IS("silence")) {
        do_silence(p, args);
    } else if (IS("fail")) {
        do_fail(p, args, left);
    } else if (IS("show")) {
        do_show(p);
    } else if (IS("idle")) {
        do_idle(p);
    } else {
        return false;
    }
    return true;
#undef IS
}

int lily_generate(lily_session *s, const lily_request *request, lily_result *result,
                  lily_err *err) {
    struct play p = {.session = s, .request = request, .result = result, .err = err};
    struct buf script = {0};
    bool any = false;
    atomic_store(&s->cancel, false);
    *result =
        (lily_result){.finish = LILY_FINISH_STOP, .prompt_tokens = (int32_t)request->n_prompt};
    s->held = (int32_t)request->n_prompt;
    for (size_t i = 0; i < request->n_prompt; i++)
        buf_append(&script, &(char){(char)request->prompt[i]}, 1);
    buf_reserve(&script, 1);
    for (const char *line = script.data; line && !p.ended;) {
        const char *end = strchrnul(line, '\n');
        any |= step(&p, line, (size_t)(end - line));
        line = *end ? end + 1 : NULL;
    }
    if (!any) emit_text(&p, LILY_EVENT_CONTENT, "ok", 2);
    if (!p.ended && p.calls) result->finish = LILY_FINISH_TOOLS;
    buf_free(&script);
    return p.rc;
}

/* ---- program --------------------------------------------------------------------------------- */

static void print_port(void *arg, uint16_t port, bool local) {
    (void)arg;
    (void)local;
    printf("port %d\n", (int)port);
    fflush(stdout);
}

/* fake-serve [name=number | host=ADDR]... */
int main(int argc, char **argv) {
    struct lily_engine engine = {.context = 4096};
    struct serve_options options = {0};
    lily_err err = {0};
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) continue;
        *value++ = 0;
        int32_t number = (int32_t)atol(value);
        if (!strcmp(argv[i], "host")) options.host = value;
        if (!strcmp(argv[i], "port")) options.port = (uint16_t)number;
        if (!strcmp(argv[i], "alias")) options.model_alias = value;
        if (!strcmp(argv[i], "body")) options.max_body = (size_t)number;
        if (!strcmp(argv[i], "queue")) options.max_queue = number;
        if (!strcmp(argv[i], "connections")) options.max_connections = number;
        if (!strcmp(argv[i], "idle")) options.idle_seconds = number;
        if (!strcmp(argv[i], "keepalive")) options.keepalive_seconds = number;
        if (!strcmp(argv[i], "context")) engine.context = number;
        if (!strcmp(argv[i], "rest")) engine.rest_seconds = number;
        if (!strcmp(argv[i], "quiet")) options.quiet = number != 0;
    }
    int rc = serve_run(&engine, &options, print_port, NULL, &err);
    if (rc) fprintf(stderr, "fake-serve: %s\n", err.msg);
    return rc ? 1 : 0;
}
