#include "serve/answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "serve/json_safe.h"
#include "serve/sse.h"

void answer_make_id(char *out, size_t size, const char *prefix) {
    static const char letters[] = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
    unsigned char random[24] = {0};
    if (getentropy(random, sizeof random)) memset(random, 0, sizeof random); /* never on Linux */
    size_t n = strlen(prefix);
    snprintf(out, size, "%s", prefix);
    for (size_t i = 0; i < sizeof random && n + 1 < size; i++) {
        out[n++] = letters[random[i] % (sizeof letters - 1)];
        out[n] = 0;
    }
}

void answer_init(struct answer *a, const struct reply_head *head, bool stream) {
    *a = (struct answer){.head = *head, .stream = stream};
}

void answer_free(struct answer *a) {
    buf_free(&a->content);
    buf_free(&a->reasoning);
    buf_free(&a->held);
    for (int i = 0; i < a->n_calls; i++) {
        free(a->calls[i].name);
        buf_free(&a->calls[i].args);
    }
    free(a->calls);
    a->calls = NULL;
    a->n_calls = 0;
}

static struct answer_call *add_call(struct answer *a, const char *name, size_t n) {
    struct answer_call *grown = realloc(a->calls, ((size_t)a->n_calls + 1) * sizeof *grown);
    if (!grown) return NULL;
    a->calls = grown;
    struct answer_call *call = &grown[a->n_calls];
    *call = (struct answer_call){.name = strndup(name, n)};
    if (!call->name) return NULL;
    answer_make_id(call->id, sizeof call->id, "call_");
    a->n_calls++;
    return call;
}

/* ---- stream ---------------------------------------------------------------------------------- */

static bool write_chunk(struct buf *out, json_t *chunk) {
    bool ok = chunk && sse_data(out, chunk);
    json_decref(chunk);
    return ok;
}

static bool write_delta(struct answer *a, json_t *delta, struct buf *out) {
    return delta && write_chunk(out, openai_chunk(&a->head, delta, NULL));
}

bool answer_begin(struct answer *a, struct buf *out) {
    return !a->stream || write_delta(a, openai_delta_role(), out);
}

static json_t *text_delta(enum lily_event_kind kind, int call, const char *text, size_t n) {
    switch (kind) {
    case LILY_EVENT_REASONING:
        return openai_delta_text("reasoning_content", text, n);
    case LILY_EVENT_CONTENT:
        return openai_delta_text("content", text, n);
    default:
        return openai_delta_args(call, text, n);
    }
}

static bool release(struct answer *a, struct buf *out) {
    if (!a->held.len) return true;
    json_t *delta = text_delta(a->held_kind, a->held_call, a->held.data, a->held.len);
    buf_free(&a->held);
    return write_delta(a, delta, out);
}

static bool stream_text(struct answer *a, const lily_event *e, bool hold, struct buf *out) {
    bool same = a->held.len && a->held_kind == e->kind && a->held_call == e->call;
    if (a->held.len && !same && !release(a, out)) return false;
    if (!hold && !a->held.len) {
        return write_delta(a, text_delta(e->kind, e->call, e->text, e->n), out);
    }
    a->held_kind = e->kind;
    a->held_call = e->call;
    return buf_append(&a->held, e->text, e->n) && (hold || release(a, out));
}

static bool stream_event(struct answer *a, const lily_event *e, bool hold, struct buf *out) {
    if (e->kind != LILY_EVENT_TOOL_BEGIN) return !e->n || stream_text(a, e, hold, out);
    const struct answer_call *call = add_call(a, e->text, e->n);
    return call && release(a, out) &&
           write_delta(a, openai_delta_call(e->call, call->id, e->text, e->n), out);
}

/* ---- whole replies --------------------------------------------------------------------------- */

static bool collect_event(struct answer *a, const lily_event *e) {
    switch (e->kind) {
    case LILY_EVENT_REASONING:
        return buf_append(&a->reasoning, e->text, e->n);
    case LILY_EVENT_CONTENT:
        return buf_append(&a->content, e->text, e->n);
    case LILY_EVENT_TOOL_BEGIN:
        return add_call(a, e->text, e->n) != NULL;
    default:
        return a->n_calls && buf_append(&a->calls[a->n_calls - 1].args, e->text, e->n);
    }
}

bool answer_event(struct answer *a, const lily_event *e, bool hold, struct buf *out) {
    static const char no_args[] = "{}";
    struct answer_call *last = a->n_calls ? &a->calls[a->n_calls - 1] : NULL;
    lily_event empty = {.kind = LILY_EVENT_TOOL_ARGS, .text = no_args, .n = 2, .call = e->call};
    if (e->kind == LILY_EVENT_PREFILL) return true;
    if (e->kind == LILY_EVENT_TOOL_END) {
        if (!last || last->has_args) return true;
        e = &empty; /* arguments are a JSON object, also when there are none */
    }
    if (e->kind == LILY_EVENT_TOOL_ARGS && e->n && last) last->has_args = true;
    a->total += e->n;
    return a->stream ? stream_event(a, e, hold, out) : collect_event(a, e);
}

static json_t *whole_message(const struct answer *a) {
    json_t *calls = a->n_calls ? json_array() : NULL;
    for (int i = 0; i < a->n_calls; i++) {
        const struct answer_call *c = &a->calls[i];
        const char *args = c->args.len ? c->args.data : "";
        json_t *call = openai_call(c->id, c->name, args, c->args.len);
        if (json_array_append_new(calls, call)) {
            json_decref(calls);
            return NULL;
        }
    }
    const char *content = a->content.len ? a->content.data : "";
    json_t *reasoning = a->reasoning.len ? jsafe_string(a->reasoning.data, a->reasoning.len) : NULL;
    return openai_message(jsafe_string(content, a->content.len), reasoning, calls);
}

bool answer_finish(struct answer *a, enum lily_finish finish, const lily_result *result,
                   struct buf *out) {
    const char *reason = openai_finish(finish);
    if (a->stream) {
        return release(a, out) && write_chunk(out, openai_chunk(&a->head, json_object(), reason)) &&
               (!a->head.include_usage || write_chunk(out, openai_usage_chunk(&a->head, result))) &&
               sse_done(out);
    }
    json_t *message = whole_message(a);
    json_t *document = message ? openai_completion(&a->head, message, reason, result) : NULL;
    bool ok = document && jsafe_write(out, document);
    json_decref(document);
    return ok;
}

bool answer_error(struct answer *a, const struct api_error *err, struct buf *out) {
    return release(a, out) && write_chunk(out, api_error_json(err)) && sse_done(out);
}
