/* A state machine over single bytes, so that it cannot depend on how the text was cut. What it has
 * told its owner cannot be taken back: a name is told once it is complete, a byte of a value once
 * it can no longer be part of a tag that ends the value. */
#include "text/tool_call.h"

#include <string.h>

#include "text/json_text.h"
#include "text/tool_types.h"

static const char function_open[] = "<function=", function_close[] = "</function>";
static const char parameter_open[] = "<parameter=", parameter_close[] = "</parameter>";

enum { MAX_NAME = 256 }; /* bytes of a function's name; more is no call */

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static void append(struct tool_call *c, struct buf *to, const char *text, size_t n) {
    if (!buf_append(to, text, n)) c->failed = true;
}

static void emit(struct tool_call *c, const char *json, size_t n) {
    if (n && !c->failed) c->sink.args(c->sink.arg, json, n);
}

static void emit_text(struct tool_call *c, const char *json) {
    emit(c, json, strlen(json));
}

void tool_call_start(struct tool_call *c, const char *opening) {
    c->state = TOOL_CALL_HEAD;
    c->calls = 0;
    buf_clear(&c->raw);
    buf_clear(&c->name);
    buf_clear(&c->tag);
    append(c, &c->raw, opening, strlen(opening));
}

void tool_call_free(struct tool_call *c) {
    buf_free(&c->raw);
    buf_free(&c->name);
    buf_free(&c->tag);
    buf_free(&c->held);
    buf_free(&c->value);
    json_decref(c->keys);
    c->keys = NULL;
}

/* The name in hand, of a function or a parameter, without the whitespace around it. */
static const char *stripped_name(struct tool_call *c) {
    if (c->name.len == 0) return "";
    size_t begin = 0, end = c->name.len;
    while (begin < end && is_space(c->name.data[begin])) begin++;
    while (begin < end && is_space(c->name.data[end - 1])) end--;
    c->name.data[end] = 0;
    return c->name.data + begin;
}

/* ---- values ---------------------------------------------------------------------------------- */

static void emit_escaped(struct tool_call *c, const char *text, size_t n) {
    struct buf json = {0};
    if (!json_text_append_escaped(&json, text, n)) c->failed = true;
    emit(c, json.data, json.len);
    buf_free(&json);
}

/* Bytes that certainly belong to the value. A string flows on at once; one that may be null waits
 * until it differs from that; every other type waits for its end. */
static void value_text(struct tool_call *c, const char *text, size_t n) {
    if (c->ignored || n == 0) return;
    if (c->string_open) {
        emit_escaped(c, text, n);
        return;
    }
    append(c, &c->value, text, n);
    bool may_be_null = c->value.len <= 4 && memcmp(c->value.data, "null", c->value.len) == 0;
    if (!c->failed && c->types == (TOOL_STRING | TOOL_NULL) && !may_be_null) {
        c->string_open = true;
        emit_text(c, "\"");
        emit_escaped(c, c->value.data, c->value.len);
    }
}

/* The key is complete: it is sent at once, and the opening quote where the value is a string. */
static void value_begin(struct tool_call *c) {
    const char *key = stripped_name(c);
    c->state = TOOL_CALL_VALUE;
    c->tail = (struct tool_call_tail){0};
    c->first_byte = true;
    c->string_open = false;
    buf_clear(&c->held);
    buf_clear(&c->value);
    c->ignored = json_object_get(c->keys, key) != NULL;
    if (c->ignored) return;
    emit_text(c, json_object_size(c->keys) ? ", \"" : "{\"");
    emit_escaped(c, key, strlen(key));
    emit_text(c, "\": ");
    if (json_object_set_new(c->keys, key, json_true())) c->failed = true;
    c->types = tool_argument_types(c->parameters, key);
    if (c->types == TOOL_STRING) {
        c->string_open = true;
        emit_text(c, "\"");
    }
}

/* Sends the rest of the value: the closing quote, or all of a value that waited for its type. */
static void value_end(struct tool_call *c) {
    if (c->ignored) return;
    if (c->string_open) {
        emit_text(c, "\"");
        return;
    }
    struct buf json = {0};
    const char *text = c->value.len ? c->value.data : "";
    if (!tool_argument_json(c->types, text, c->value.len, &json)) c->failed = true;
    emit(c, json.data, json.len);
    buf_free(&json);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* "<function=NAME>" is complete. */
static void call_begin(struct tool_call *c) {
    const char *name = stripped_name(c);
    json_decref(c->keys);
    c->keys = json_object();
    if (!c->keys) c->failed = true;
    c->parameters = tool_parameters(c->tools, name);
    c->calls++;
    c->state = TOOL_CALL_BODY;
    buf_clear(&c->tag);
    buf_clear(&c->raw);
    if (!c->failed) c->sink.begin(c->sink.arg, name);
}

/* Another call may follow in the same block, so this is HEAD again. */
static void call_end(struct tool_call *c) {
    emit_text(c, json_object_size(c->keys) ? "}" : "{}");
    if (!c->failed) c->sink.end(c->sink.arg);
    c->state = TOOL_CALL_HEAD;
    buf_clear(&c->raw);
    buf_clear(&c->name);
    buf_clear(&c->tag);
}

/* After one of the three tags that may follow in a body; a function may begin without the one
 * before having been closed. */
static void enter(struct tool_call *c, const char *tag) {
    buf_clear(&c->name);
    if (tag == parameter_open) {
        c->state = TOOL_CALL_KEY;
        return;
    }
    call_end(c);
    if (tag == function_open) {
        append(c, &c->raw, tag, strlen(tag));
        append(c, &c->tag, tag, strlen(tag));
    }
}

/* One more byte of HEAD, already in raw; false when it cannot be a call any more. */
static bool head_byte(struct tool_call *c) {
    size_t at = c->raw.len - 1;
    char byte = c->raw.data[at];
    if (c->tag.len == strlen(function_open)) {
        if (byte == '>') {
            bool named = false;
            for (size_t i = 0; i < c->name.len; i++) named = named || !is_space(c->name.data[i]);
            if (named) call_begin(c);
            return named;
        }
        append(c, &c->name, &byte, 1);
        return byte != '\n' && byte != '<' && byte != 0 && c->name.len <= MAX_NAME;
    }
    if (c->tag.len == 0 && is_space(byte)) return true;
    if (byte != function_open[c->tag.len]) return false;
    append(c, &c->tag, &byte, 1);
    return true;
}

/* A byte between parameters: tags are acted on, anything else is dropped, since the call has
 * already begun and its arguments can hold nothing but parameters. */
static void body_byte(struct tool_call *c, char byte) {
    static const char *const tags[] = {parameter_open, function_close, function_open};
    if (byte == '<') buf_clear(&c->tag);
    if (c->tag.len == 0 && byte != '<') return;
    append(c, &c->tag, &byte, 1);
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        if (c->failed || strncmp(tags[i], c->tag.data, c->tag.len) != 0) continue;
        if (strlen(tags[i]) == c->tag.len) {
            enter(c, tags[i]);
        }
        return;
    }
    buf_clear(&c->tag);
}

static void key_byte(struct tool_call *c, char byte) {
    if (byte != '>' && byte != '\n') {
        if (byte) append(c, &c->name, &byte, 1);
        return;
    }
    value_begin(c);
    if (byte == '\n') c->first_byte = false; /* the closing > is missing: this is its newline */
}

/* ---- the end of a value ---------------------------------------------------------------------- */

/* A value ends at an optional newline and "</parameter>", but only where whitespace and then
 * another parameter, "</function>" or "<function=" follow, since values may quote these tags. At
 * the end of the block "</parameter>" or "</function>" alone are enough. */
enum tail_phase {
    TAIL_NONE,
    TAIL_NEWLINE,   /* "\n" */
    TAIL_TAG,       /* a beginning of "</parameter>" or "</function>" */
    TAIL_PARAMETER, /* "</parameter>" and whitespace */
    TAIL_NEXT,      /* and a beginning of what may follow */
    TAIL_FUNCTION,  /* "</function>" and whitespace: it ends the value if the block ends here */
};
enum tail_result { TAIL_FAILED, TAIL_PARTIAL, TAIL_ENDED };

/* Which of two or three tags text[n] is a beginning of; NULL: none. They differ early, so that
 * the first that fits is the only one, except for "<" and "</" which fit several. */
static const char *tag_beginning(const char *const *tags, const char *text, size_t n) {
    for (; *tags; tags++) {
        if (n <= strlen(*tags) && memcmp(*tags, text, n) == 0) return *tags;
    }
    return NULL;
}

/* Takes one more byte; at: that byte, of which the last tail->matched before belong to the tag in
 * hand. *next is what follows the value when it has ENDED. */
static enum tail_result tail_byte(struct tool_call_tail *t, const char *at, const char **next) {
    static const char *const closing[] = {parameter_close, function_close, NULL};
    static const char *const following[] = {parameter_open, function_close, function_open, NULL};
    const char *tag;
    switch (t->phase) {
    case TAIL_NONE:
        if (*at == '\n') t->phase = TAIL_NEWLINE;
        if (*at == '<') *t = (struct tool_call_tail){TAIL_TAG, 1};
        return t->phase == TAIL_NONE ? TAIL_FAILED : TAIL_PARTIAL;
    case TAIL_NEWLINE:
        if (*at != '<') return TAIL_FAILED;
        *t = (struct tool_call_tail){TAIL_TAG, 1};
        return TAIL_PARTIAL;
    case TAIL_TAG:
        t->matched++;
        tag = tag_beginning(closing, at - t->matched + 1, t->matched);
        if (!tag) return TAIL_FAILED;
        if (t->matched == strlen(tag)) {
            t->phase = tag == parameter_close ? TAIL_PARAMETER : TAIL_FUNCTION;
        }
        return TAIL_PARTIAL;
    case TAIL_PARAMETER:
        if (is_space(*at)) return TAIL_PARTIAL;
        if (*at != '<') return TAIL_FAILED;
        *t = (struct tool_call_tail){TAIL_NEXT, 1};
        return TAIL_PARTIAL;
    case TAIL_NEXT:
        t->matched++;
        tag = tag_beginning(following, at - t->matched + 1, t->matched);
        if (!tag) return TAIL_FAILED;
        *next = tag;
        return t->matched == strlen(tag) ? TAIL_ENDED : TAIL_PARTIAL;
    default:
        return is_space(*at) ? TAIL_PARTIAL : TAIL_FAILED;
    }
}

/* Enters what follows a value that ended by its tags. */
static void value_done(struct tool_call *c, const char *next) {
    buf_clear(&c->held);
    value_end(c);
    enter(c, next);
}

/* One more byte of a value, or of what ends it. */
static void value_byte(struct tool_call *c, char byte) {
    bool first = c->first_byte;
    c->first_byte = false;
    if (first && byte == '\n') return;
    if (c->held.len == 0 && byte != '\n' && byte != '<') {
        value_text(c, &byte, 1);
        return;
    }
    append(c, &c->held, &byte, 1);
    if (c->failed) return;
    const char *next = NULL;
    enum tail_result result = tail_byte(&c->tail, c->held.data + c->held.len - 1, &next);
    if (result == TAIL_ENDED) {
        value_done(c, next);
        return;
    }
    /* What was held is no end after all: its first byte is text, and an end may begin later in
     * it. Each byte of it starts at most one failed attempt, and those that begin inside
     * whitespace or a tag fail at once, so this is linear. */
    size_t begin = 0;
    while (result == TAIL_FAILED && begin < c->held.len) {
        begin++;
        c->tail = (struct tool_call_tail){0};
        result = begin < c->held.len ? TAIL_PARTIAL : TAIL_FAILED;
        for (size_t i = begin; i < c->held.len && result == TAIL_PARTIAL; i++) {
            result = tail_byte(&c->tail, c->held.data + i, &next);
        }
    }
    if (begin == 0) return;
    value_text(c, c->held.data, begin);
    memmove(c->held.data, c->held.data + begin, c->held.len - begin + 1);
    c->held.len -= begin;
    if (c->held.len == 0) c->tail = (struct tool_call_tail){0};
}

/* The block ends inside a value: what of the held text is the value's? */
static void value_finish(struct tool_call *c, bool cut_short) {
    bool ended = c->tail.phase == TAIL_PARAMETER || c->tail.phase == TAIL_NEXT ||
                 c->tail.phase == TAIL_FUNCTION || c->tail.phase == TAIL_NEWLINE;
    if (cut_short && c->tail.phase == TAIL_TAG && c->tail.matched > 2) ended = true;
    if (!ended) value_text(c, c->held.len ? c->held.data : "", c->held.len);
    buf_clear(&c->held);
    value_end(c);
}

/* ---- public ---------------------------------------------------------------------------------- */

size_t tool_call_feed(struct tool_call *c, const char *text, size_t n,
                      enum tool_call_status *status) {
    *status = TOOL_CALL_OPEN;
    for (size_t i = 0; i < n && !c->failed; i++) {
        switch (c->state) {
        case TOOL_CALL_HEAD:
            append(c, &c->raw, text + i, 1);
            if (!c->failed && !head_byte(c)) {
                *status = TOOL_CALL_CLOSED;
                return i + 1;
            }
            break;
        case TOOL_CALL_BODY:
            body_byte(c, text[i]);
            break;
        case TOOL_CALL_KEY:
            key_byte(c, text[i]);
            break;
        case TOOL_CALL_VALUE:
            value_byte(c, text[i]);
            break;
        }
    }
    return n;
}

bool tool_call_may_restart(const struct tool_call *c) {
    return c->state != TOOL_CALL_VALUE || c->tail.phase == TAIL_PARAMETER ||
           c->tail.phase == TAIL_FUNCTION;
}

void tool_call_finish(struct tool_call *c, bool cut_short) {
    if (c->state == TOOL_CALL_HEAD) {
        bool blank = true;
        for (size_t i = 0; i < c->raw.len; i++) blank = blank && is_space(c->raw.data[i]);
        if (c->calls > 0 && blank) buf_clear(&c->raw);
        return;
    }
    if (c->state == TOOL_CALL_VALUE) value_finish(c, cut_short);
    call_end(c);
}
