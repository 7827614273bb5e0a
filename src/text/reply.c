/* Tokens go down one path: id -> bytes -> whole code points -> the channel or call they belong to
 * -> one event per kind and token. Each stage holds back what it cannot yet decide on, and
 * reply_finish pushes what is left through the same stages. */
#include "text/reply.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "text/stop_match.h"
#include "text/tool_call.h"

/* Reasoning or content. Whitespace waits until it is known that text follows it. */
struct channel {
    enum reply_event_kind kind;
    struct buf space; /* held back */
    bool begun;       /* some text has been emitted */
    bool after_call;  /* nothing but whitespace since the last tool call */
};

struct reply {
    const struct tokenizer *tokenizer;
    reply_fn fn;
    void *arg;
    int32_t think_open, think_close, call_open, call_close; /* ids, -1: none */

    struct utf8_stream utf8;
    struct buf text; /* whole code points of the token in hand */
    bool in_think, in_call;
    bool think_dropped;  /* the one extra <think> */
    bool strip_newlines; /* directly after </think> */
    bool stopped;        /* a stop string is complete */
    struct channel reasoning, content;
    struct stop_match stops;
    struct buf stop_text; /* content that may be the beginning of a stop string */
    struct tool_call call;

    struct buf event; /* text of the event being gathered */
    enum reply_event_kind event_kind;
    int n_calls; /* begun */
    int n_ended;
    int n_reasoning_tokens;
    int rc;      /* what fn returned */
    bool failed; /* out of memory */
};

/* ---- events ---------------------------------------------------------------------------------- */

/* Nothing is sent any more after the callback has refused an event. */
static void send(struct reply *r, enum reply_event_kind kind, const char *text, size_t n) {
    struct reply_event event = {.kind = kind, .call = r->n_calls - 1, .text = text, .n = n};
    if (!r->rc && !r->failed) r->rc = r->fn(r->arg, &event);
}

static void flush(struct reply *r) {
    if (r->event.len) send(r, r->event_kind, r->event.data, r->event.len);
    buf_clear(&r->event);
}

/* Adds to the event in hand; text of another kind sends that first, which keeps the order. */
static void gather(struct reply *r, enum reply_event_kind kind, const char *text, size_t n) {
    if (n == 0) return;
    if (r->event_kind != kind) flush(r);
    r->event_kind = kind;
    if (!buf_append(&r->event, text, n)) r->failed = true;
}

/* ---- channels -------------------------------------------------------------------------------- */

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Text goes out together with the whitespace that waited before it; whitespace at its end waits. */
static void channel_text(struct reply *r, struct channel *to, const char *text, size_t n) {
    size_t end = n; /* of the text proper: what follows is held */
    while (end > 0 && is_space(text[end - 1])) end--;
    size_t begin = 0;
    if (end > 0) {
        if (!to->begun && to->kind == REPLY_REASONING) { /* reasoning has no leading whitespace */
            while (is_space(text[begin])) begin++;
            buf_clear(&to->space);
        }
        gather(r, to->kind, to->space.data, to->space.len);
        gather(r, to->kind, text + begin, end - begin);
        buf_clear(&to->space);
        to->begun = true;
        to->after_call = false;
    }
    if (!buf_append(&to->space, text + end, n - end)) r->failed = true;
}

/* Content goes by the stop strings first: they see it as the client will. */
static void content_text(struct reply *r, const char *text, size_t n) {
    while (n > 0 && r->strip_newlines && *text == '\n') text++, n--;
    if (n == 0) return;
    r->strip_newlines = false;
    if (!buf_append(&r->stop_text, text, n)) {
        r->failed = true;
        return;
    }
    size_t before = r->stop_text.len - n;
    for (size_t i = 0; i < n; i++) {
        size_t stop = stop_match_feed(&r->stops, text[i]);
        if (stop == 0) continue;
        channel_text(r, &r->content, r->stop_text.data, before + i + 1 - stop);
        buf_clear(&r->stop_text);
        r->stopped = true;
        return;
    }
    size_t pass = r->stop_text.len - stop_match_held(&r->stops);
    channel_text(r, &r->content, r->stop_text.data, pass);
    memmove(r->stop_text.data, r->stop_text.data + pass, r->stop_text.len - pass + 1);
    r->stop_text.len -= pass;
}

/* Content is interrupted or over: no stop string can grow any further. */
static void content_break(struct reply *r) {
    if (r->stop_text.len) channel_text(r, &r->content, r->stop_text.data, r->stop_text.len);
    buf_clear(&r->stop_text);
    stop_match_reset(&r->stops);
}

/* Text outside tool calls. */
static void plain_text(struct reply *r, const char *text, size_t n) {
    if (n == 0 || r->stopped) return;
    if (r->in_think)
        channel_text(r, &r->reasoning, text, n);
    else
        content_text(r, text, n);
}

/* ---- tool calls ------------------------------------------------------------------------------ */

/* Only now is it certain that this is a call: the whitespace before it goes. */
static void on_call_begin(void *arg, const char *name) {
    struct reply *r = arg;
    content_break(r);
    buf_clear(&r->content.space);
    buf_clear(&r->reasoning.space);
    r->content.after_call = r->reasoning.after_call = true;
    flush(r);
    r->n_calls++;
    send(r, REPLY_TOOL_BEGIN, name, strlen(name));
}

static void on_call_args(void *arg, const char *json, size_t n) {
    gather(arg, REPLY_TOOL_ARGS, json, n);
}

static void on_call_end(void *arg) {
    struct reply *r = arg;
    flush(r);
    send(r, REPLY_TOOL_END, "", 0);
    r->n_ended++;
}

/* Ends the block; what turned out to be no call is text. */
static void close_call(struct reply *r, bool cut_short) {
    tool_call_finish(&r->call, cut_short);
    r->in_call = false;
    plain_text(r, r->call.raw.data, r->call.raw.len);
    buf_clear(&r->call.raw);
}

static void open_call(struct reply *r) {
    tool_call_start(&r->call, "<tool_call>");
    r->in_call = true;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* Whole code points to where they belong. */
static void route(struct reply *r, const char *text, size_t n) {
    if (r->in_call && n > 0) {
        enum tool_call_status status;
        size_t taken = tool_call_feed(&r->call, text, n, &status);
        if (status == TOOL_CALL_OPEN) return;
        close_call(r, false);
        text += taken;
        n -= taken;
    }
    plain_text(r, text, n);
}

static void push_bytes(struct reply *r, const char *bytes, size_t n) {
    buf_clear(&r->text);
    if (!utf8_stream_push(&r->utf8, bytes, n, &r->text)) r->failed = true;
    if (r->text.len) route(r, r->text.data, r->text.len);
}

/* An unfinished code point cannot be continued beyond a control token. */
static void end_bytes(struct reply *r) {
    buf_clear(&r->text);
    if (!utf8_stream_flush(&r->utf8, &r->text)) r->failed = true;
    if (r->text.len) route(r, r->text.data, r->text.len);
}

/* <think>: dropped once at the beginning, text inside a block, and in the answer a new block, whose
 * text is set off from that of the first. */
static void open_think(struct reply *r) {
    if (!r->in_think) {
        content_break(r);
        r->in_think = true;
        if (r->reasoning.begun && !buf_puts(&r->reasoning.space, "\n")) r->failed = true;
        return;
    }
    if (!r->reasoning.begun && !r->think_dropped)
        r->think_dropped = true;
    else
        plain_text(r, "<think>", strlen("<think>"));
}

static void close_think(struct reply *r) {
    if (!r->in_think) return;
    buf_clear(&r->reasoning.space);
    r->in_think = false;
    r->strip_newlines = true;
}

/* Whether the added token is text where the reply now is: inside a value, where only </tool_call>
 * and a <tool_call> behind the closed value count. */
static bool is_value_text(const struct reply *r, int32_t id) {
    if (!r->in_call || r->call.state != TOOL_CALL_VALUE || id == r->call_close) return false;
    return id != r->call_open || !tool_call_may_restart(&r->call);
}

/* Control tokens act, special ones vanish, and the others are text. */
static void push_added(struct reply *r, int32_t id, const char *spelling, size_t n) {
    end_bytes(r);
    bool in_value = is_value_text(r, id);
    if (tokenizer_is_special(r->tokenizer, id)) return;
    if (!in_value && id == r->call_open) {
        if (r->in_call) close_call(r, false);
        open_call(r);
    } else if (!in_value && id == r->call_close) {
        bool call = r->in_call && (r->call.calls > 0 || r->call.state != TOOL_CALL_HEAD);
        if (r->in_call) close_call(r, false);
        if (!call) plain_text(r, spelling, n);
    } else if (!in_value && (id == r->think_open || id == r->think_close)) {
        /* Between parameters it means nothing; before a call has begun, there is none. */
        if (r->in_call && r->call.state != TOOL_CALL_HEAD) return;
        if (r->in_call) close_call(r, false);
        if (id == r->think_open)
            open_think(r);
        else
            close_think(r);
    } else {
        route(r, spelling, n);
    }
}

/* What a push or the end returns: the callback's refusal comes before our own failure. */
static int outcome(struct reply *r, lily_err *err) {
    if (r->rc) return r->rc;
    return r->failed || r->call.failed ? ERR_NOMEM(err, "reply") : 0;
}

int reply_push(struct reply *r, int32_t id, bool *stopped, lily_err *err) {
    size_t n;
    const char *bytes = tokenizer_bytes(r->tokenizer, id, &n);
    *stopped = r->stopped;
    if (r->rc || r->stopped) return r->rc;
    if (!bytes) {
        return ERR(err, LILY_EINVAL, "reply: found id %d, expected one of the %d tokens", (int)id,
                   (int)tokenizer_vocab(r->tokenizer));
    }
    bool tag = id == r->think_open || id == r->think_close;
    if (r->in_think && !r->in_call && !tag && id != r->call_open) r->n_reasoning_tokens++;
    if (tokenizer_is_added(r->tokenizer, id))
        push_added(r, id, bytes, n);
    else
        push_bytes(r, bytes, n);
    flush(r);
    *stopped = r->stopped;
    return outcome(r, err);
}

int reply_finish(struct reply *r, lily_err *err) {
    if (r->rc) return r->rc;
    if (!r->stopped) {
        end_bytes(r);
        if (r->in_call) close_call(r, true);
        content_break(r);
    }
    struct channel *channels[] = {&r->reasoning, &r->content};
    for (int i = 0; i < 2; i++) {
        struct channel *c = channels[i];
        bool keep = !c->after_call && (c->begun || c->kind == REPLY_CONTENT);
        if (keep) gather(r, c->kind, c->space.data, c->space.len);
        buf_clear(&c->space);
    }
    flush(r);
    return outcome(r, err);
}

int reply_tool_calls(const struct reply *r) {
    return r->n_ended;
}

bool reply_in_think(const struct reply *r) {
    return r->in_think && !r->in_call;
}

int reply_reasoning_tokens(const struct reply *r) {
    return r->n_reasoning_tokens;
}

int reply_new(const struct reply_options *options, reply_fn fn, void *arg, struct reply **out,
              lily_err *err) {
    struct reply *r = calloc(1, sizeof *r);
    if (!r) return ERR_NOMEM(err, "reply");
    int rc = stop_match_init(&r->stops, options->stops, options->n_stops, err);
    if (rc) {
        free(r);
        return rc;
    }
    r->tokenizer = options->tokenizer;
    r->fn = fn;
    r->arg = arg;
    r->in_think = options->in_think;
    r->reasoning.kind = REPLY_REASONING;
    r->content.kind = REPLY_CONTENT;
    r->think_open = tokenizer_find(r->tokenizer, "<think>");
    r->think_close = tokenizer_find(r->tokenizer, "</think>");
    /* No token has the id -1: both tags are then text like any other added token. */
    r->call_open = options->no_calls ? -1 : tokenizer_find(r->tokenizer, "<tool_call>");
    r->call_close = options->no_calls ? -1 : tokenizer_find(r->tokenizer, "</tool_call>");
    r->call.tools = options->tools;
    r->call.sink = (struct tool_call_sink){on_call_begin, on_call_args, on_call_end, r};
    *out = r;
    return 0;
}

void reply_free(struct reply *r) {
    if (!r) return;
    stop_match_free(&r->stops);
    tool_call_free(&r->call);
    buf_free(&r->text);
    buf_free(&r->reasoning.space);
    buf_free(&r->content.space);
    buf_free(&r->stop_text);
    buf_free(&r->event);
    free(r);
}
